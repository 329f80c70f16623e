//! NVFP4 as compressed-tensors and nvidia-modelopt make it of dense weights. Their formulas agree with [`super::quantize()`]
//! in exact arithmetic and round in other places:
//!
//! | | tensor scale g | block scale | code |
//! |---|---|---|---|
//! | compressed-tensors | `1 / d`, `d = (1 / amax) * 2688` | `e4m3(d * (amax_b / 6))`, 0.125 for 0 | `e2m1(x / (s / d))` |
//! | ModelOpt | `amax / 2688` | `e4m3(amax_b / (6 * g))`, 1 for 0 | `e2m1(x / (s * g))` |
//!
//! compressed-tensors 0.20.0 computes `d` and `amax_b / 6` in the type of the weights; everything else is f32.

use super::codec::{E4M3_MAX, code, e2m1_decode, e2m1_encode, e4m3_decode, e4m3_encode, set_code};
use crate::packed::Packed;
use half::bf16;
use kernels_cubecl::layout::{BLOCK, scales_per_row, words_per_row};

/// 2^-9, the smallest E4M3 number above zero: the least block scale that nvidia-modelopt gives a block with values.
const SMALLEST_SCALE: f32 = 1.0 / 512.0;

/// The library whose bytes a matrix gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// compressed-tensors, for weights of bf16 or of f32.
    CompressedTensors {
        /// Whether the weights are bf16.
        bf16: bool,
    },
    /// nvidia-modelopt.
    ModelOpt,
}

/// The values of a packed matrix as compressed-tensors decodes it, row-major: `code * (scale / divisor)`, where the quotient and
/// the product are rounded to f32. The tensor scale of the matrix, `1 / divisor`, is not read.
pub fn dequantize_divided(packed: &Packed, rows: usize, cols: usize, divisor: f32) -> Vec<f32> {
    let mut out = Vec::with_capacity(rows * cols);
    for r in 0..rows {
        for b in 0..scales_per_row(cols) {
            let step = e4m3_decode(packed.scales[r * scales_per_row(cols) + b]) / divisor;
            out.extend((b * BLOCK..(b + 1) * BLOCK).map(|c| e2m1_decode(code(&packed.codes, r, c, cols)) * step));
        }
    }
    out
}

impl Dialect {
    /// Quantizes a row-major matrix whose tensor scale is that of matrices with this largest magnitude together.
    ///
    /// # Panics
    /// If `cols` is not a multiple of 16.
    pub fn quantize(self, x: &[f32], cols: usize, amax: f32) -> Packed {
        assert!(cols.is_multiple_of(BLOCK), "{cols} columns: not a multiple of 16");
        let rows = x.len() / cols.max(1);
        let divisor = self.divisor(amax);
        let global = if let Self::ModelOpt = self { amax / super::FULL_SCALE } else { 1.0 / divisor };
        let mut codes = vec![0; rows * words_per_row(cols)];
        let mut scales = Vec::with_capacity(rows * scales_per_row(cols));
        for (r, row) in x.chunks_exact(cols).enumerate() {
            for (b, block) in row.chunks_exact(BLOCK).enumerate() {
                let block_amax = block.iter().fold(0.0f32, |a, v| a.max(v.abs()));
                let byte = self.block_scale(block_amax, divisor, global);
                scales.push(byte);
                let step = match self {
                    Self::CompressedTensors { .. } => e4m3_decode(byte) / divisor,
                    Self::ModelOpt => e4m3_decode(byte) * global,
                };
                for (c, value) in block.iter().enumerate() {
                    // A tensor of zeros has the step 0 in ModelOpt.
                    let code = if step == 0.0 { 0 } else { e2m1_encode(value / step) };
                    set_code(&mut codes, r, b * BLOCK + c, cols, code);
                }
            }
        }
        Packed { codes, scales, global }
    }

    /// `d`, the reciprocal of the tensor scale, for the largest magnitude of the matrices that share it.
    pub fn divisor(self, amax: f32) -> f32 {
        // PyTorch divides a number by a tensor in two roundings.
        let rounded =
            |x: f32| if self == (Self::CompressedTensors { bf16: true }) { bf16::from_f32(x).to_f32() } else { x };
        let divisor = rounded(rounded(1.0 / amax.max(f32::MIN_POSITIVE)) * super::FULL_SCALE);
        if divisor.is_finite() { divisor } else { 1.0 }
    }

    fn block_scale(self, amax: f32, divisor: f32, global: f32) -> u8 {
        let (scale, of_zero) = match self {
            Self::CompressedTensors { bf16: false } => (divisor * (amax / 6.0), 0.125),
            Self::CompressedTensors { bf16: true } => (divisor * bf16::from_f32(amax / 6.0).to_f32(), 0.125),
            Self::ModelOpt => (if amax == 0.0 { 1.0 } else { (amax / (6.0 * global)).max(SMALLEST_SCALE) }, 1.0),
        };
        let byte = e4m3_encode(scale.min(E4M3_MAX));
        if e4m3_decode(byte) == 0.0 { e4m3_encode(of_zero) } else { byte }
    }
}
