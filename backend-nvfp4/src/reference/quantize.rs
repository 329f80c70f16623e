//! Quantizing a matrix and reading it back.

use super::{
    codec::{E4M3_MAX, e2m1_decode, e2m1_encode, e2m1_encode_stochastic, e4m3_decode, e4m3_encode, set_code, word_of},
    random::{draw_of, philox},
    threads::{share, threads},
};
use crate::packed::Packed;
use kernels_cubecl::{
    layout::{BLOCK, CODES_PER_WORD, scales_per_row, words_per_row},
    quantize::{BlockShape, QuantizeSpec, Rounding, Scaling, View},
};

/// The largest E2M1 magnitude times the largest E4M3 value: what the tensor's amax is mapped to.
pub const FULL_SCALE: f32 = 2688.0;
/// The smallest scale of a single-level tensor, 2^-6, as in torchao.
const SINGLE_LEVEL_FLOOR: f32 = 0.015625;
/// The factor by which the block scales of an NVFP4 master can grow before they saturate.
pub const MASTER_ROOM: f32 = 8.0;
/// Values for which a further thread is not worth its start.
const SMALL: usize = 1 << 16;

/// Quantizes the matrix that `view` sees in `x`.
///
/// # Panics
/// If `view` reaches outside `x`, or if its columns (with 16x16 blocks also its rows) are not a multiple of 16.
pub fn quantize(x: &[f32], view: View, spec: QuantizeSpec) -> Packed {
    quantize_sharing(x, view, spec, 0.0)
}

/// Quantizes a matrix as [`quantize()`] does, with the tensor scale of several matrices whose largest magnitude together is
/// `shared_amax`.
///
/// # Panics
/// As [`quantize()`].
pub fn quantize_sharing(x: &[f32], view: View, spec: QuantizeSpec, shared_amax: f32) -> Packed {
    let View { rows, cols, row_stride, col_stride } = view;
    assert!(cols.is_multiple_of(BLOCK), "{cols} columns: not a multiple of 16");
    let at = |r: usize, c: usize| x[r * row_stride + c * col_stride];
    let blocks = scales_per_row(cols);
    let amax = block_maxima(at, rows, cols, spec.block);
    let tensor_amax = shared_amax.max(tensor_amax(x));
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
    let part = rows_of_a_thread(rows, cols);
    let parts = codes.chunks_mut((part * words_per_row(cols)).max(1)).zip(scales.chunks_mut((part * blocks).max(1)));
    share((0..rows).step_by(part).zip(parts), |(first, (codes, scales))| encode(first, codes, scales));
    Packed { codes, scales, global: scaler.global }
}

/// The largest magnitude of each block of a matrix, row by row. The rows of a 16x16 block have equal ones.
fn block_maxima(at: impl Fn(usize, usize) -> f32 + Sync, rows: usize, cols: usize, block: BlockShape) -> Vec<f32> {
    assert!(block == BlockShape::Row || rows.is_multiple_of(BLOCK), "{rows} rows: not a multiple of 16");
    let blocks = scales_per_row(cols);
    let mut amax = vec![0.0f32; rows * blocks];
    let find = |first: usize, amax: &mut [f32]| {
        for (i, amax) in amax.iter_mut().enumerate() {
            let (r, b) = (first + i / blocks, i % blocks);
            *amax = (0..BLOCK).fold(0.0, |a: f32, i| a.max(at(r, b * BLOCK + i).abs()));
        }
        if block == BlockShape::Square {
            for squares in amax.chunks_exact_mut(BLOCK * blocks) {
                for b in 0..blocks {
                    let square = (0..BLOCK).fold(0.0, |a: f32, i| a.max(squares[i * blocks + b]));
                    (0..BLOCK).for_each(|i| squares[i * blocks + b] = square);
                }
            }
        }
    };
    let part = rows_of_a_thread(rows, cols);
    share((0..rows).step_by(part).zip(amax.chunks_mut((part * blocks).max(1))), |(first, amax)| find(first, amax));
    amax
}

/// How many rows a thread takes: whole blocks. A small matrix stays on one thread.
fn rows_of_a_thread(rows: usize, cols: usize) -> usize {
    rows.div_ceil(threads()).max(SMALL / cols.max(1)).next_multiple_of(BLOCK)
}

/// Quantizes a row-major master weight that training will move: two-level, 1x16, with a tensor scale that leaves block
/// scales room to grow by [`MASTER_ROOM`].
pub fn quantize_master(x: &[f32], rows: usize, cols: usize) -> Packed {
    let part = (rows.div_ceil(threads()) * cols).max(1);
    let scaler = Scaler::new(Scaling::Two, tensor_amax(x) * MASTER_ROOM);
    let quantized = |x: &[f32]| {
        let mut codes = Vec::with_capacity(x.len() / CODES_PER_WORD);
        let mut scales = Vec::with_capacity(x.len() / BLOCK);
        for block in x.chunks_exact(BLOCK) {
            let (scale, encode) = scaler.block(amax(block));
            scales.push(scale);
            let word = |values: &[f32]| word_of(values.iter().map(|v| e2m1_encode(v * encode)));
            codes.extend(block.chunks_exact(CODES_PER_WORD).map(word));
        }
        (codes, scales)
    };
    let mut parts = vec![(vec![], vec![]); x.len().div_ceil(part)];
    share(x.chunks(part).zip(&mut parts), |(x, quantized_part)| *quantized_part = quantized(x));
    let (codes, scales): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
    Packed { codes: codes.concat(), scales: scales.concat(), global: scaler.global }
}

/// The rows of a row-major matrix, each quantized by itself and decoded again: two-level, 1x16, to nearest. The tensor scale
/// of a row is a power of two (`row_scale`), so that every value has at most six significant bits, which 16-bit floats
/// hold exactly.
///
/// # Panics
/// If the columns are not a multiple of 16.
pub fn rounded_rows(x: &[f32], cols: usize) -> Vec<f32> {
    assert!(cols.is_multiple_of(BLOCK), "{cols} columns: not a multiple of 16");
    let rows = x.chunks_exact(cols.max(1));
    rows.flat_map(|row| rounded(row, &Scaler::with_full(1.0 / row_scale(amax(row))))).collect()
}

/// A row-major matrix, quantized with a given tensor scale `1 / full` and decoded again: two-level, 1x16, to nearest. Where a
/// magnitude is above `2688 / full`, block scales stay at 448 and codes at 6.
///
/// # Panics
/// If the columns are not a multiple of 16.
pub fn rounded_by(x: &[f32], cols: usize, full: f32) -> Vec<f32> {
    assert!(cols.is_multiple_of(BLOCK), "{cols} columns: not a multiple of 16");
    rounded(x, &Scaler::with_full(full))
}

/// Blocks of 16 values, quantized and decoded again.
fn rounded(x: &[f32], scaler: &Scaler) -> Vec<f32> {
    let of_block = |block: &[f32]| {
        let (byte, encode) = scaler.block(amax(block));
        let scale = e4m3_decode(byte);
        let value = |v: &f32| (e2m1_decode(e2m1_encode(v * encode)) * scale) * scaler.global;
        block.iter().map(value).collect::<Vec<f32>>()
    };
    x.chunks_exact(BLOCK).flat_map(of_block).collect()
}

/// The largest magnitude of the values that are not NaN.
fn amax(x: &[f32]) -> f32 {
    x.iter().fold(0.0, |a, v| a.max(v.abs()))
}

/// The largest magnitude of a tensor; infinity if a value is NaN. Codes cannot say that a value is NaN, so the tensor scale does.
pub fn tensor_amax(x: &[f32]) -> f32 {
    let part = x.len().div_ceil(threads()).max(SMALL);
    let mut found = vec![0.0f32; x.len().div_ceil(part)];
    share(x.chunks(part).zip(&mut found), |(x, found)| {
        *found = if x.iter().any(|v| v.is_nan()) { f32::INFINITY } else { amax(x) };
    });
    amax(&found)
}

/// The tensor scale of a row that is quantized by itself: the smallest power of two that is at least `amax / 2688`, but
/// not below 2^-100.
fn row_scale(amax: f32) -> f32 {
    // Integer operations, because a division may be rounded differently on a device. 2688 is 1.3125 * 2^11: the exponent
    // of `amax` goes up by one if its significand is above 1.3125.
    let exponent = (amax.to_bits() + 0x0057_FFFF) >> 23;
    f32::from_bits((exponent.max(27 + 11) - 11) << 23)
}

/// The values of a packed matrix, row-major: `(code * scale) * g`, where each product is rounded to f32.
pub fn dequantize(packed: &Packed, rows: usize, cols: usize) -> Vec<f32> {
    let grid: [f32; 16] = std::array::from_fn(|code| e2m1_decode(code as u8));
    let (words, blocks) = (words_per_row(cols), scales_per_row(cols));
    let mut out = Vec::with_capacity(rows * cols);
    for r in 0..rows {
        let codes = packed.codes[r * words..(r + 1) * words].chunks_exact(BLOCK / CODES_PER_WORD);
        for (codes, scale) in codes.zip(&packed.scales[r * blocks..(r + 1) * blocks]) {
            let scale = e4m3_decode(*scale);
            // A block has as many values as there are codes, so that its table costs no more than its values would.
            let values = grid.map(|value| (value * scale) * packed.global);
            for word in codes {
                out.extend((0..CODES_PER_WORD).map(|i| values[(word >> (4 * i) & 15) as usize]));
            }
        }
    }
    out
}

/// Computes the block scales of one tensor.
pub(super) struct Scaler {
    scaling: Scaling,
    full: f32,
    global: f32,
}

impl Scaler {
    /// For a tensor with this largest magnitude.
    pub(super) fn new(scaling: Scaling, tensor_amax: f32) -> Self {
        let is_usual = tensor_amax > 0.0 && tensor_amax.is_finite();
        let full = if is_usual { (FULL_SCALE / tensor_amax).min(f32::MAX) } else { 1.0 };
        let global = match scaling {
            Scaling::Single if tensor_amax == f32::INFINITY => f32::INFINITY,
            Scaling::Single => 1.0,
            Scaling::Two => tensor_amax / FULL_SCALE,
        };
        Self { scaling, full, global }
    }

    /// For a tensor scale with this reciprocal.
    fn with_full(full: f32) -> Self {
        Self { scaling: Scaling::Two, full, global: 1.0 / full }
    }

    /// The scale byte of a block and the factor that brings its values onto the E2M1 grid.
    pub(super) fn block(&self, amax: f32) -> (u8, f32) {
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
