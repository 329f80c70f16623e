//! NVFP4 in scalar Rust: the specification. Every backend is held to these functions, bit for bit
//! for codes and scales and within stated bounds for products. The CPU backend and the file
//! converter run them as they are.
//!
//! Sources: OCP Microscaling Formats v1.0, §5.3.3 (E2M1); OCP 8-bit Floating Point v1.0 (E4M3);
//! NVIDIA, "Pretraining LLMs with NVFP4", arXiv 2509.25149, appendix C (two-level scaling);
//! Salmon et al., SC 2011 (Philox). doc/nvfp4.md derives them.

use kernels_cubecl::{
    layout::{BLOCK, CODES_PER_WORD, scales_per_row, words_per_row},
    quantize::{Block, QuantizeSpec, Rounding, Scaling, View},
    rng::Stream,
};

/// The magnitudes of E2M1 codes 0 to 7; bit 3 of a code is the sign.
pub const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
/// The largest E2M1 magnitude times the largest E4M3 value: what the tensor's amax is mapped to.
pub const FULL_SCALE: f32 = 2688.0;
/// Largest E4M3 value.
pub const E4M3_MAX: f32 = 448.0;
/// torchao's floor of single-level scales, 2^-6.
pub const SINGLE_LEVEL_FLOOR: f32 = 0.015625;

/// A packed matrix in host memory. See [`kernels_cubecl::layout`] for where things lie.
#[derive(Debug, Clone, PartialEq)]
pub struct Packed {
    /// R x C/8 words, eight codes each.
    pub codes: Vec<u32>,
    /// R x C/16 E4M3 bytes.
    pub scales: Vec<u8>,
    /// The tensor scale g: a value is `code * scale * g`. 1 in single-level tensors.
    pub global: f32,
}

/// Quantises the matrix that `view` sees in `x`.
///
/// # Panics
/// If `view` reaches outside `x` or its columns (for 16x16 blocks its rows too) are not a multiple of 16.
pub fn quantize(x: &[f32], view: View, spec: QuantizeSpec) -> Packed {
    let View { rows, cols, row_stride, col_stride } = view;
    assert!(cols.is_multiple_of(BLOCK), "{cols} columns: not a multiple of 16");
    let at = |r: usize, c: usize| x[r * row_stride + c * col_stride];
    let blocks = scales_per_row(cols);

    let mut amax = vec![0.0f32; rows * blocks];
    for r in 0..rows {
        for b in 0..blocks {
            amax[r * blocks + b] = (0..BLOCK).fold(0.0, |a: f32, i| a.max(at(r, b * BLOCK + i).abs()));
        }
    }
    let tensor_amax = amax.iter().fold(0.0, |a: f32, &b| a.max(b));
    if spec.block == Block::Square {
        assert!(rows.is_multiple_of(BLOCK), "{rows} rows: not a multiple of 16");
        for r in (0..rows).step_by(BLOCK) {
            for b in 0..blocks {
                let of = |i: usize| (r + i) * blocks + b;
                let square = (0..BLOCK).fold(0.0, |a: f32, i| a.max(amax[of(i)]));
                (0..BLOCK).for_each(|i| amax[of(i)] = square);
            }
        }
    }

    let scaler = Scaler::new(spec.scaling, tensor_amax);
    let mut codes = vec![0u32; rows * words_per_row(cols)];
    let mut scales = vec![0u8; rows * blocks];
    let encode = |first: usize, codes: &mut [u32], scales: &mut [u8]| {
        for (i, scale) in scales.iter_mut().enumerate() {
            let (r, b) = (first + i / blocks, i % blocks);
            let (byte, encode) = scaler.block(amax[r * blocks + b]);
            *scale = byte;
            for c in b * BLOCK..(b + 1) * BLOCK {
                let code = match spec.rounding {
                    Rounding::Nearest => e2m1_encode(at(r, c) * encode),
                    Rounding::Stochastic(stream) => {
                        let words = philox((r * blocks + b) as u32, stream);
                        let draw = draw_of(words[c % BLOCK / 4], c % 4, 4);
                        e2m1_encode_stochastic(at(r, c) * encode, draw)
                    }
                };
                set_code(codes, r - first, c, cols, code);
            }
        }
    };
    // Rows apart, on as many threads as there are cores, where there is enough for more than one.
    let part = rows.div_ceil(threads()).max((1 << 16) / cols.max(1));
    if part >= rows {
        encode(0, &mut codes, &mut scales);
    } else {
        let parts = codes.chunks_mut(part * words_per_row(cols)).zip(scales.chunks_mut(part * blocks));
        std::thread::scope(|scope| {
            for (first, (codes, scales)) in (0..rows).step_by(part).zip(parts) {
                let encode = &encode;
                scope.spawn(move || encode(first, codes, scales));
            }
        });
    }
    Packed { codes, scales, global: scaler.global }
}

fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Quantises a master weight, row-major, that training will move: two-level, 1x16, with a tensor scale that leaves
/// block scales room to grow by [`MASTER_ROOM`]. On as many threads as there are cores.
pub fn quantize_master(x: &[f32], rows: usize, cols: usize) -> Packed {
    let part = (rows.div_ceil(threads()) * cols).max(1);
    let amax = |x: &[f32]| x.iter().fold(0.0f32, |a, v| a.max(v.abs()));
    let tensor_amax = amax(x);
    let scaler = Scaler::new(Scaling::Two, tensor_amax * MASTER_ROOM);
    let quantised = |x: &[f32]| {
        let mut codes = Vec::with_capacity(x.len() / CODES_PER_WORD);
        let mut scales = Vec::with_capacity(x.len() / BLOCK);
        for block in x.chunks_exact(BLOCK) {
            let (scale, encode) = scaler.block(amax(block));
            scales.push(scale);
            let word = |values: &[f32]| {
                values
                    .iter()
                    .enumerate()
                    .fold(0u32, |word, (i, v)| word | u32::from(e2m1_encode(v * encode)) << (4 * i))
            };
            codes.extend(block.chunks_exact(CODES_PER_WORD).map(word));
        }
        (codes, scales)
    };
    let parts: Vec<_> = std::thread::scope(|scope| {
        let running: Vec<_> = x.chunks(part).map(|x| scope.spawn(move || quantised(x))).collect();
        running.into_iter().map(|t| t.join().expect("quantising does not panic")).collect()
    });
    let (codes, scales): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
    Packed { codes: codes.concat(), scales: scales.concat(), global: scaler.global }
}

/// A packed matrix whose block scales have room to grow by [`MASTER_ROOM`]: the same values where every scale has an
/// exact eighth, else quantised anew.
pub fn with_room(mut packed: Packed, rows: usize, cols: usize) -> Packed {
    // Three binades of E4M3 lie 24 bytes apart, from the fourth binade of normal numbers on.
    if packed.scales.iter().all(|&byte| byte == 0 || byte >= 0x20) {
        packed.global *= MASTER_ROOM;
        packed.scales.iter_mut().filter(|byte| **byte > 0).for_each(|byte| *byte -= 24);
        return packed;
    }
    quantize_master(&dequantize(&packed, rows, cols), rows, cols)
}

/// `len` normal numbers around 0 with deviation `std`, four from four words (Box & Muller, 1958), on as many threads as
/// there are cores.
pub fn normals(len: usize, std: f32, stream: Stream) -> Vec<f32> {
    let uniform = |bits: u32| (f64::from(bits) + 0.5) / 4_294_967_296.0;
    let four = |i: u32| {
        let r = philox(i, stream).map(uniform);
        let pair = |u: f64, v: f64| {
            let (radius, angle) = ((-2.0 * u.ln()).sqrt(), std::f64::consts::TAU * v);
            [radius * angle.cos(), radius * angle.sin()].map(|n| n as f32 * std)
        };
        let ([a, b], [c, d]) = (pair(r[0], r[1]), pair(r[2], r[3]));
        [a, b, c, d]
    };
    let mut out = vec![0.0; len];
    let part = len.div_ceil(threads()).next_multiple_of(4).max(4);
    std::thread::scope(|scope| {
        for (t, values) in out.chunks_mut(part).enumerate() {
            scope.spawn(move || {
                for (i, values) in values.chunks_mut(4).enumerate() {
                    values.copy_from_slice(&four((t * part / 4 + i) as u32)[..values.len()]);
                }
            });
        }
    });
    out
}

/// How far block scales of an NVFP4 master can grow before they saturate.
pub const MASTER_ROOM: f32 = 8.0;

/// Values of a packed matrix, row-major: `(code * scale) * g`, each product rounded to f32.
pub fn dequantize(q: &Packed, rows: usize, cols: usize) -> Vec<f32> {
    let mut out = Vec::with_capacity(rows * cols);
    for r in 0..rows {
        for b in 0..scales_per_row(cols) {
            let scale = e4m3_decode(q.scales[r * scales_per_row(cols) + b]);
            for c in b * BLOCK..(b + 1) * BLOCK {
                out.push((e2m1_decode(code(&q.codes, r, c, cols)) * scale) * q.global);
            }
        }
    }
    out
}

/// Quantises `x` (row-major) again after training, keeping what did not move.
///
/// Two candidates are made: with a fresh tensor scale, and with the old one, where each block takes
/// the better of its old and its fresh block scale and a block whose 16 values still equal its old
/// ones keeps its bytes. The candidate with the smaller squared error wins, the old one at a tie. So a
/// matrix that was read from `old`, and one that `old` was made of, both give `old` byte for byte.
pub fn requantize(x: &[f32], rows: usize, cols: usize, old: &Packed, scaling: Scaling) -> Packed {
    let spec = QuantizeSpec { scaling, block: Block::Row, rounding: Rounding::Nearest };
    let fresh = quantize(x, View::row_major(rows, cols), spec);
    if fresh == *old {
        return fresh;
    }
    let blocks = scales_per_row(cols);
    let old_values = dequantize(old, rows, cols);
    let mut kept = old.clone();
    let mut kept_error = 0.0f64;
    for r in 0..rows {
        for b in 0..blocks {
            let span = r * cols + b * BLOCK..r * cols + (b + 1) * BLOCK;
            let block = &x[span.clone()];
            if block.iter().zip(&old_values[span]).all(|(a, b)| a.to_bits() == b.to_bits()) {
                continue;
            }
            let amax = block.iter().fold(0.0, |a: f32, v| a.max(v.abs()));
            let old_scale = old.scales[r * blocks + b];
            let new_scale = match scaling {
                Scaling::Two => e4m3_encode((amax / (6.0 * old.global)).min(E4M3_MAX)),
                Scaling::Single => Scaler::new(scaling, amax).block(amax).0,
            };
            let (error, scale, block_codes) = [old_scale, new_scale]
                .map(|scale| encode_block(block, scale, old.global))
                .into_iter()
                .reduce(|a, b| if b.0 < a.0 { b } else { a })
                .expect("two candidates");
            kept_error += error;
            kept.scales[r * blocks + b] = scale;
            for (i, &value) in block_codes.iter().enumerate() {
                set_code(&mut kept.codes, r, b * BLOCK + i, cols, value);
            }
        }
    }
    let fresh_error: f64 = dequantize(&fresh, rows, cols).iter().zip(x).map(|(a, b)| f64::from(a - b).powi(2)).sum();
    if fresh_error < kept_error { fresh } else { kept }
}

/// `y[i, j] = sum_r a[i, r] b[j, r]` in f64: what products are measured against.
pub fn matmul_nt(a: &[f32], b: &[f32], i: usize, j: usize, r: usize) -> Vec<f64> {
    let mut y = vec![0.0; i * j];
    for p in 0..i {
        for q in 0..j {
            y[p * j + q] = (0..r).map(|k| f64::from(a[p * r + k]) * f64::from(b[q * r + k])).sum();
        }
    }
    y
}

/// `y = x · diag(signs) · H16 / 4` over each 16 consecutive values, as a butterfly in f32.
pub fn hadamard(x: &[f32], signs: u32) -> Vec<f32> {
    let mut y = x.to_vec();
    for group in y.chunks_exact_mut(BLOCK) {
        for (i, v) in group.iter_mut().enumerate() {
            if signs >> i & 1 == 1 {
                *v = -*v;
            }
        }
        for distance in [1, 2, 4, 8] {
            for low in (0..BLOCK).filter(|i| i / distance % 2 == 0) {
                let (a, b) = (group[low], group[low + distance]);
                group[low] = a + b;
                group[low + distance] = a - b;
            }
        }
        group.iter_mut().for_each(|v| *v = *v * 0.25 + 0.0);
    }
    y
}

/// Code `c` of row `r` in a matrix of `cols` columns.
pub fn code(codes: &[u32], r: usize, c: usize, cols: usize) -> u8 {
    let word = codes[r * words_per_row(cols) + c / CODES_PER_WORD];
    (word >> (4 * (c % CODES_PER_WORD)) & 15) as u8
}

pub(crate) fn set_code(codes: &mut [u32], r: usize, c: usize, cols: usize, code: u8) {
    let word = &mut codes[r * words_per_row(cols) + c / CODES_PER_WORD];
    let shift = 4 * (c % CODES_PER_WORD);
    *word = *word & !(15 << shift) | u32::from(code) << shift;
}

/// Block scales of one tensor.
struct Scaler {
    scaling: Scaling,
    full: f32,
    global: f32,
}

impl Scaler {
    fn new(scaling: Scaling, tensor_amax: f32) -> Self {
        let full = if tensor_amax == 0.0 { 1.0 } else { (FULL_SCALE / tensor_amax).min(f32::MAX) };
        let global = match scaling {
            Scaling::Single => 1.0,
            Scaling::Two => tensor_amax / FULL_SCALE,
        };
        Self { scaling, full, global }
    }

    /// The scale byte of a block and the factor that brings its values onto the E2M1 grid.
    fn block(&self, amax: f32) -> (u8, f32) {
        match self.scaling {
            Scaling::Single => {
                let scale = e4m3_encode((amax / 6.0).clamp(SINGLE_LEVEL_FLOOR, E4M3_MAX));
                (scale, 1.0 / e4m3_decode(scale))
            }
            Scaling::Two => {
                let scale = e4m3_encode((amax * (self.full * (1.0 / 6.0))).min(E4M3_MAX));
                (scale, (1.0 / (e4m3_decode(scale) * (1.0 / self.full))).min(f32::MAX))
            }
        }
    }
}

/// Squared error, scale and codes of a block under a given scale.
fn encode_block(block: &[f32], scale: u8, global: f32) -> (f64, u8, [u8; BLOCK]) {
    let step = e4m3_decode(scale) * global;
    let encode = (1.0 / step).min(f32::MAX);
    let mut codes = [0; BLOCK];
    let mut error = 0.0;
    for (code, &x) in codes.iter_mut().zip(block) {
        *code = e2m1_encode(x * encode);
        error += f64::from(e2m1_decode(*code) * step - x).powi(2);
    }
    (error, scale, codes)
}

/// E2M1 code of `x`: nearest, ties to the even code, saturating; NaN gives 7.
pub fn e2m1_encode(x: f32) -> u8 {
    if x.is_nan() {
        return 7;
    }
    let a = x.abs();
    let magnitude = u8::from(a > 0.25)
        + u8::from(a >= 0.75)
        + u8::from(a > 1.25)
        + u8::from(a >= 1.75)
        + u8::from(a > 2.5)
        + u8::from(a >= 3.5)
        + u8::from(a > 5.0);
    magnitude | u8::from(x.is_sign_negative()) << 3
}

/// E2M1 code of `x`, rounded up in magnitude where `draw / 2^22` and the distance to the lower code in units of the gap
/// add up to 1 or more. Below 1 that distance is taken of `|x| + 1` as f32 has it: to 2^-23.
pub fn e2m1_encode_stochastic(x: f32, draw: u32) -> u8 {
    if x.is_nan() {
        return 7;
    }
    let a = if x.abs() < 1.0 { (x.abs() + 1.0) - 1.0 } else { x.abs() };
    let low = E2M1.iter().rposition(|&v| v <= a).unwrap_or(0);
    let magnitude = match E2M1.get(low + 1) {
        None => low,
        Some(&high) => {
            let share = f64::from(a - E2M1[low]) / f64::from(high - E2M1[low]);
            low + usize::from((share * 4_194_304.0).floor() + f64::from(draw) >= 4_194_304.0)
        }
    };
    magnitude as u8 | u8::from(x.is_sign_negative()) << 3
}

/// The value of an E2M1 code.
pub fn e2m1_decode(code: u8) -> f32 {
    let magnitude = E2M1[usize::from(code & 7)];
    if code & 8 == 0 { magnitude } else { -magnitude }
}

/// E4M3FN byte of `x`: nearest, ties to even, saturating at 448; NaN gives 0x7F.
pub fn e4m3_encode(x: f32) -> u8 {
    if x.is_nan() {
        return 0x7F;
    }
    let a = x.abs();
    // The first byte whose value is above `a`, among the finite ones.
    let (mut low, mut high) = (0u8, 0x7F);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if e4m3_decode(middle) <= a { low = middle } else { high = middle }
    }
    let magnitude = if low == 0x7E {
        low
    } else {
        let below = a - e4m3_decode(low);
        let above = e4m3_decode(low + 1) - a;
        low + u8::from(above < below || above == below && low % 2 == 1)
    };
    magnitude | u8::from(x.is_sign_negative()) << 7
}

/// The value of an E4M3FN byte.
pub fn e4m3_decode(byte: u8) -> f32 {
    let (exponent, mantissa) = (u32::from(byte >> 3 & 15), u32::from(byte & 7));
    let magnitude = match (exponent, mantissa) {
        (15, 7) => f32::NAN,
        (0, m) => m as f32 / 512.0,
        (e, m) => f32::from_bits((e + 120) << 23 | m << 20),
    };
    if byte & 0x80 == 0 { magnitude } else { -magnitude }
}

/// Philox4x32-10: four random words for `index` of `stream`.
pub fn philox(index: u32, stream: Stream) -> [u32; 4] {
    let mut c = [index, stream.step, stream.stream, 0];
    let mut k = [stream.seed as u32, (stream.seed >> 32) as u32];
    for _ in 0..10 {
        let p0 = u64::from(c[0]) * 0xD251_1F53;
        let p1 = u64::from(c[2]) * 0xCD9E_8D57;
        c = [(p1 >> 32) as u32 ^ c[1] ^ k[0], p1 as u32, (p0 >> 32) as u32 ^ c[3] ^ k[1], p0 as u32];
        k = [k[0].wrapping_add(0x9E37_79B9), k[1].wrapping_add(0xBB67_AE85)];
    }
    c
}

/// Draw `lane` of the `of` that share a word, uniform below 2^22: the upper 22 bits of the word turned by `lane` of its parts.
pub fn draw_of(word: u32, lane: usize, of: usize) -> u32 {
    word.rotate_left((lane * 32 / of) as u32) >> 10
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO: QuantizeSpec = QuantizeSpec { scaling: Scaling::Two, block: Block::Row, rounding: Rounding::Nearest };

    fn ramp(len: usize) -> Vec<f32> {
        (0..len).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.003).collect()
    }

    #[test]
    fn philox_matches_the_published_vectors() {
        // Random123's kat_vectors, philox4x32 10 rounds.
        let zero = Stream { seed: 0, step: 0, stream: 0 };
        assert_eq!(philox(0, zero), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
    }

    #[test]
    fn an_untouched_matrix_requantizes_to_the_same_bytes() {
        for scaling in [Scaling::Two, Scaling::Single] {
            let (rows, cols) = (8, 64);
            let mut x = ramp(rows * cols);
            x[..64].iter_mut().for_each(|v| *v *= 1e-4); // subnormal block scales
            x[5] = -0.0;
            let old = quantize(&x, View::row_major(rows, cols), QuantizeSpec { scaling, ..TWO });
            let values = dequantize(&old, rows, cols);
            assert_eq!(requantize(&values, rows, cols, &old, scaling), old);
            assert_eq!(requantize(&x, rows, cols, &old, scaling), old);
        }
    }

    #[test]
    fn requantizing_never_loses_to_a_fresh_quantisation() {
        let (rows, cols) = (4, 32);
        let x = ramp(rows * cols);
        let old = quantize(&x, View::row_major(rows, cols), TWO);
        let moved: Vec<f32> = x.iter().enumerate().map(|(i, v)| v + (i % 7) as f32 * 0.004).collect();
        let error = |q: &Packed| -> f64 {
            dequantize(q, rows, cols).iter().zip(&moved).map(|(a, b)| f64::from(a - b).powi(2)).sum()
        };
        let again = requantize(&moved, rows, cols, &old, Scaling::Two);
        assert!(error(&again) <= error(&quantize(&moved, View::row_major(rows, cols), TWO)));
    }
}
