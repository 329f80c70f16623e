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
use burn::tensor::DType;
use half::{bf16, f16};
use kernels_cubecl::layout::{BLOCK, scales_per_row, words_per_row};

/// 2^-9, the smallest E4M3 number above zero: the least block scale that nvidia-modelopt gives a block with values.
const SMALLEST_SCALE: f32 = 1.0 / 512.0;

/// The library whose bytes a matrix gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// compressed-tensors, for weights of this type: f32, bf16 or f16.
    CompressedTensors(DType),
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
                    Self::CompressedTensors(_) => e4m3_decode(byte) / divisor,
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
        let reciprocal = 1.0 / amax.max(f32::MIN_POSITIVE);
        // PyTorch divides a number by a tensor in two roundings.
        let divisor = self.rounded(self.rounded(reciprocal) * super::FULL_SCALE);
        // If the largest of f16 weights is below 0.041, the library's number is infinite, and its file is useless.
        let of_f32 = reciprocal * super::FULL_SCALE;
        [divisor, of_f32].into_iter().find(|divisor| divisor.is_finite()).unwrap_or(1.0)
    }

    /// A number as the library holds it, if it computes in the type of the weights.
    fn rounded(self, x: f32) -> f32 {
        match self {
            Self::CompressedTensors(DType::BF16) => bf16::from_f32(x).to_f32(),
            Self::CompressedTensors(DType::F16) => f16::from_f32(x).to_f32(),
            _ => x,
        }
    }

    fn block_scale(self, amax: f32, divisor: f32, global: f32) -> u8 {
        let (scale, of_zero) = match self {
            Self::CompressedTensors(_) => (divisor * self.rounded(amax / 6.0), 0.125),
            Self::ModelOpt => (if amax == 0.0 { 1.0 } else { (amax / (6.0 * global)).max(SMALLEST_SCALE) }, 1.0),
        };
        let byte = e4m3_encode(scale.min(E4M3_MAX));
        if e4m3_decode(byte) == 0.0 { e4m3_encode(of_zero) } else { byte }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number that compressed-tensors computes in f16 for these weights is infinite.
    #[test]
    fn small_weights_in_f16_keep_their_values() {
        let values: Vec<f32> = (0..32).map(|i| f16::from_f32((i as f32 - 16.0) * 6e-5).to_f32()).collect();
        let amax = values.iter().fold(0.0f32, |a, v| a.max(v.abs()));
        let dialect = Dialect::CompressedTensors(DType::F16);
        let packed = dialect.quantize(&values, 16, amax);
        let decoded = dequantize_divided(&packed, 2, 16, dialect.divisor(amax));
        for (value, decoded) in values.iter().zip(decoded) {
            // Codes are up to 2 sixths of a block's largest apart, and block scales have 4 bits.
            assert!((value - decoded).abs() < amax * (1.0 / 6.0 + 1.0 / 16.0), "{value} became {decoded}");
        }
    }
}
