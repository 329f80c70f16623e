//! NVFP4 written down a second time, as the formats' documents define it and with no function of the program: tables that
//! are searched, sums in f64, the Hadamard transform as a matrix. What tests compare every backend with.
//!
//! The two-level scales are TransformerEngine's formula, every step one f32 rounding, as in
//! `golden/nvfp4/make_quantize.py`. Only the random words of stochastic rounding come from the program: its generator is
//! compared with published vectors elsewhere.

use backend_nvfp4::{Stream, reference::philox};

/// Magnitudes of the E2M1 codes 0 to 7.
pub(crate) const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// The signs of the random Hadamard transform.
const SIGNS: [i32; 16] = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1];

/// A quantized matrix: a code for each value, an E4M3 byte for each 16 values of a row, the tensor scale.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Quantized {
    pub(crate) codes: Vec<u8>,
    pub(crate) scales: Vec<u8>,
    pub(crate) global: f32,
}

impl Quantized {
    /// The values that the codes stand for.
    pub(crate) fn values(&self) -> Vec<f64> {
        let value = |(i, &code): (usize, &u8)| {
            let magnitude = f64::from(E2M1[usize::from(code & 7)]);
            let sign = if code & 8 == 0 { 1.0 } else { -1.0 };
            sign * magnitude * E4m3::value(self.scales[i / 16]) * f64::from(self.global)
        };
        self.codes.iter().enumerate().map(value).collect()
    }

    /// The codes eight to a word, the first in the lowest bits.
    pub(crate) fn words(&self) -> Vec<u32> {
        let word = |codes: &[u8]| codes.iter().rev().fold(0, |word, &code| word << 4 | u32::from(code));
        self.codes.chunks(8).map(word).collect()
    }
}

/// The 8-bit format with 4 exponent and 3 mantissa bits, without infinities.
pub(crate) struct E4m3;

impl E4m3 {
    /// The value of a byte without sign, other than NaN.
    pub(crate) fn value(byte: u8) -> f64 {
        assert!(byte < 0x7F, "{byte:#x} is negative or not a number");
        let (exponent, mantissa) = (i32::from(byte >> 3), f64::from(byte & 7) / 8.0);
        if exponent == 0 { mantissa * 2f64.powi(-6) } else { (1.0 + mantissa) * 2f64.powi(exponent - 7) }
    }

    /// The byte nearest to `x`, which is not negative; the even byte at a tie.
    fn nearest(x: f32) -> u8 {
        nearest_of(f64::from(x), &(0..0x7F).map(Self::value).collect::<Vec<_>>())
    }
}

/// The index of the entry nearest to `x`; the even index at a tie.
fn nearest_of(x: f64, grid: &[f64]) -> u8 {
    let mut best = 0;
    for i in 1..grid.len() {
        let (old, new) = ((x - grid[best]).abs(), (x - grid[i]).abs());
        if new < old || new == old && i % 2 == 0 {
            best = i;
        }
    }
    best as u8
}

/// Rounds a scaled value to the nearest code, at most 6. For [`quantize`].
pub(crate) fn nearest(_: usize, scaled: f32) -> u8 {
    if scaled.is_nan() {
        return 7;
    }
    nearest_of(f64::from(scaled.abs().min(6.0)), &E2M1.map(f64::from)) | u8::from(scaled.is_sign_negative()) << 3
}

/// Rounds a scaled value up in magnitude with the probability of its distance from the lower code. For [`quantize`].
pub(crate) fn stochastic(stream: Stream) -> impl Fn(usize, f32) -> u8 {
    move |index, scaled| {
        // Four values share a word: each takes the upper 22 bits of the word turned by another number of bytes.
        let word = philox((index / 16) as u32, stream)[index % 16 / 4];
        drawn(scaled, word.rotate_left(8 * (index % 4) as u32) >> 10)
    }
}

/// The code of a scaled value for a draw of 22 bits. Below 1 the distance from the lower code is known to 2^-23.
fn drawn(scaled: f32, draw: u32) -> u8 {
    if scaled.is_nan() {
        return 7;
    }
    let unit = 2f64.powi(-22);
    let a = scaled.abs();
    let a = f64::from(if a < 1.0 { (a + 1.0) - 1.0 } else { a });
    let below = E2M1.iter().filter(|&&v| f64::from(v) <= a).count() - 1;
    let magnitude = match E2M1.get(below + 1) {
        None => below,
        Some(&above) => {
            let share = (a - f64::from(E2M1[below])) / f64::from(above - E2M1[below]);
            below + usize::from((share / unit).floor() * unit + f64::from(draw) * unit >= 1.0)
        }
    };
    magnitude as u8 | u8::from(scaled.is_sign_negative()) << 3
}

/// Quantizes a row-major matrix along its rows. `two_level` adds the tensor scale; in `square` blocks 16 rows share the
/// scale of their 16 columns; `round` gives the code of a value by its index in the matrix.
pub(crate) fn quantize(
    x: &[f32],
    rows: usize,
    cols: usize,
    two_level: bool,
    square: bool,
    round: impl Fn(usize, f32) -> u8,
) -> Quantized {
    assert_eq!((x.len(), cols % 16), (rows * cols, 0));
    // NaN takes no part in the maximum of a block. In the maximum of the tensor it counts as infinity.
    let largest = |values: &mut dyn Iterator<Item = f32>| values.fold(0.0f32, |a, v| a.max(v.abs()));
    let amax = largest(&mut x.iter().map(|v| if v.is_nan() { f32::INFINITY } else { *v }));
    let is_finite = amax < f32::INFINITY;
    let tensor = if amax == 0.0 || !is_finite { 1.0 } else { (2688.0 / amax).min(f32::MAX) };
    let global = if two_level || !is_finite { amax / 2688.0 } else { 1.0 };
    let (mut codes, mut scales) = (Vec::with_capacity(x.len()), Vec::new());
    for row in 0..rows {
        for block in 0..cols / 16 {
            let of_row = |r: usize| x[r * cols + block * 16..][..16].iter().copied();
            let shared = if square { row / 16 * 16..row / 16 * 16 + 16 } else { row..row + 1 };
            let amax = largest(&mut shared.flat_map(of_row));
            let (scale, factor) = if two_level {
                two_level_scale(amax, tensor)
            } else {
                let scale = E4m3::nearest((amax / 6.0).clamp(2f32.powi(-6), 448.0));
                (scale, 1.0 / E4m3::value(scale) as f32)
            };
            scales.push(scale);
            let first = row * cols + block * 16;
            codes.extend((first..first + 16).map(|i| round(i, x[i] * factor)));
        }
    }
    Quantized { codes, scales, global }
}

/// The scale byte of a block, and the factor that brings its values onto the codes. `tensor` is 2688 over the largest
/// value of the tensor.
fn two_level_scale(amax: f32, tensor: f32) -> (u8, f32) {
    let scale = E4m3::nearest((amax * (tensor * (1.0 / 6.0))).min(448.0));
    (scale, (1.0 / (E4m3::value(scale) as f32 * (1.0 / tensor))).min(f32::MAX))
}

/// Each row quantized by itself, and read back: as [`quantize`] with two levels, and with the smallest power of two for the
/// tensor scale with which no block scale has to be larger than 448.
pub(crate) fn rounded_rows(x: &[f32], cols: usize) -> Vec<f64> {
    let rounded = |row: &[f32]| {
        let amax = row.iter().fold(0.0f32, |a, v| a.max(v.abs()));
        let mut top = 2688.0 * 2f64.powi(-100);
        while top < f64::from(amax) {
            top *= 2.0;
        }
        // The largest value of a second row makes the tensor scale.
        let mut two_rows = row.to_vec();
        two_rows.push(top as f32);
        two_rows.resize(2 * cols, 0.0);
        let mut values = quantize(&two_rows, 2, cols, true, false, nearest).values();
        values.truncate(cols);
        values
    };
    x.chunks(cols).flat_map(rounded).collect()
}

/// Each block quantized with the tensor scale `1 / full`, and read back.
pub(crate) fn rounded_by(x: &[f32], full: f32) -> Vec<f64> {
    let (mut codes, mut scales) = (Vec::with_capacity(x.len()), Vec::new());
    for block in x.chunks(16) {
        let (scale, factor) = two_level_scale(block.iter().fold(0.0f32, |a, v| a.max(v.abs())), full);
        scales.push(scale);
        codes.extend(block.iter().map(|v| nearest(0, v * factor)));
    }
    Quantized { codes, scales, global: 1.0 / full }.values()
}

/// Quantizes a weight that training will move: as [`quantize`] with two levels, and with a tensor scale 8 times as large,
/// so that block scales have room to grow.
pub(crate) fn quantize_master(x: &[f32]) -> Quantized {
    let amax = x.iter().fold(0.0f32, |a, v| a.max(v.abs())) * 8.0;
    let tensor = if amax == 0.0 { 1.0 } else { (2688.0 / amax).min(f32::MAX) };
    let (mut codes, mut scales) = (Vec::with_capacity(x.len()), Vec::new());
    for block in x.chunks(16) {
        let (scale, factor) = two_level_scale(block.iter().fold(0.0f32, |a, v| a.max(v.abs())), tensor);
        scales.push(scale);
        codes.extend(block.iter().map(|v| nearest(0, v * factor)));
    }
    Quantized { codes, scales, global: amax / 2688.0 }
}

/// Writes the values of an NVFP4 master weight after an optimizer step. A block keeps its scale while its largest value
/// lies in the upper half of what the scale reaches, else takes the smallest scale that reaches it; codes are rounded
/// stochastically.
pub(crate) fn repack(master: &mut Quantized, values: &[f32], stream: Stream) {
    let global = f64::from(master.global);
    for (block, values) in values.chunks(16).enumerate() {
        let amax = f64::from(values.iter().fold(0.0f32, |a, v| a.max(v.abs())));
        let reach = |byte: u8| 6.0 * E4m3::value(byte) * global;
        let old = reach(master.scales[block]);
        if amax != 0.0 && (amax > old || amax * 2.0 <= old) {
            master.scales[block] = (0..0x7F).find(|&byte| reach(byte) >= amax).unwrap_or(0x7E);
        }
        let unit = (E4m3::value(master.scales[block]) * global) as f32;
        let factor = if unit > 0.0 { 1.0 / unit } else { 0.0 };
        for (i, value) in values.iter().enumerate() {
            // Two values share a word.
            let at = block * 16 + i;
            let word = philox((at / 8) as u32, stream)[at % 8 / 2];
            master.codes[at] = drawn(value * factor, word.rotate_left(16 * (at % 2) as u32) >> 10);
        }
    }
}

/// Every 16 values of a row times `diag(signs) · H / 4`, where `H[i][j]` is -1 to the number of bits that i and j share.
pub(crate) fn rotated(x: &[f32]) -> Vec<f64> {
    let entry = |i: usize, j: usize| {
        let h = if (i & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
        f64::from(SIGNS[i]) * h / 4.0
    };
    let group = |group: &[f32]| -> Vec<f64> {
        (0..16).map(|j| (0..16).map(|i| f64::from(group[i]) * entry(i, j)).sum()).collect()
    };
    x.chunks(16).flat_map(group).collect()
}

/// The transpose of a row-major matrix.
pub(crate) fn transposed<T: Copy>(x: &[T], rows: usize, cols: usize) -> Vec<T> {
    (0..rows * cols).map(|i| x[i % rows * cols + i / rows]).collect()
}

/// `y[m, n] = sum over k of a[m, k] · b[n, k]`.
pub(crate) fn product(a: &[f64], b: &[f64], [m, n, k]: [usize; 3]) -> Vec<f64> {
    assert_eq!((a.len(), b.len()), (m * k, n * k));
    let dot = |i: usize, j: usize| (0..k).map(|c| a[i * k + c] * b[j * k + c]).sum();
    (0..m * n).map(|at| dot(at / n, at % n)).collect()
}

/// f32 values as f64.
pub(crate) fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|v| f64::from(*v)).collect()
}
