//! Quantizing a matrix that was packed before: values that did not move keep their codes.

use super::{
    codec::{E4M3_MAX, code, e2m1_decode, e2m1_encode, e4m3_decode, e4m3_encode, set_code},
    quantize::{MASTER_ROOM, Scaler, dequantize, quantize, quantize_master},
};
use crate::packed::Packed;
use kernels_cubecl::{
    layout::{BLOCK, scales_per_row},
    quantize::{BlockShape, QuantizeSpec, Rounding, Scaling, View},
};

/// Quantizes `x` (row-major) after training and keeps the bytes of what did not move.
///
/// There are two candidates. One has a fresh tensor scale. The other has the old tensor scale: a block whose 16 values
/// still equal the old ones keeps its bytes, and every other block takes the better of its old and its fresh block
/// scale. The candidate with the smaller squared error wins, and the old tensor scale wins a tie. A matrix that was read
/// from `old`, and the matrix that `old` was made of, therefore both give `old` byte for byte.
pub fn requantize(x: &[f32], rows: usize, cols: usize, old: &Packed, scaling: Scaling) -> Packed {
    let spec = QuantizeSpec { scaling, block: BlockShape::Row, rounding: Rounding::Nearest };
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

/// Gives block scales room to grow by [`MASTER_ROOM`]. The values stay the same if every scale has an exact eighth;
/// otherwise the matrix is quantized anew.
pub fn with_room(mut packed: Packed, rows: usize, cols: usize) -> Packed {
    // Three binades of E4M3 lie 24 bytes apart, from the fourth binade of normal numbers on.
    if packed.scales.iter().all(|&byte| byte == 0 || byte >= 0x20) {
        packed.global *= MASTER_ROOM;
        packed.scales.iter_mut().filter(|byte| **byte > 0).for_each(|byte| *byte -= 24);
        return packed;
    }
    quantize_master(&dequantize(&packed, rows, cols), rows, cols)
}

/// Gives a matrix another tensor scale. Each block gets the E4M3 scale nearest to its old one in the new unit. Codes move only
/// where that is a subnormal number of E4M3 or 0: a normal one is too near to its old scale.
pub fn rescale(old: &Packed, cols: usize, global: f32) -> Packed {
    let mut new = Packed { codes: old.codes.clone(), scales: old.scales.clone(), global };
    let blocks = scales_per_row(cols).max(1);
    for (at, scale) in new.scales.iter_mut().enumerate() {
        let (r, b) = (at / blocks, at % blocks);
        let before = e4m3_decode(*scale) * old.global;
        *scale = e4m3_encode((before / global).min(E4M3_MAX));
        let after = e4m3_decode(*scale) * global;
        for c in b * BLOCK..(b + 1) * BLOCK {
            let value = e2m1_decode(code(&old.codes, r, c, cols)) * before;
            // A block whose scale became 0 has only zeros.
            let moved = if after == 0.0 { 0 } else { e2m1_encode(value / after) };
            set_code(&mut new.codes, r, c, cols, moved);
        }
    }
    new
}

/// The squared error, the scale and the codes of a block under a given scale.
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

#[cfg(test)]
mod tests {
    use super::*;

    const TWO: QuantizeSpec =
        QuantizeSpec { scaling: Scaling::Two, block: BlockShape::Row, rounding: Rounding::Nearest };

    fn ramp(len: usize) -> Vec<f32> {
        (0..len).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.003).collect()
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
    fn rescaling_by_a_power_of_two_moves_no_value() {
        let (rows, cols) = (8, 64);
        let old = quantize(&ramp(rows * cols), View::row_major(rows, cols), TWO);
        let new = rescale(&old, cols, old.global * 4.0);
        assert_eq!(dequantize(&new, rows, cols), dequantize(&old, rows, cols));
        assert_eq!(new.codes, old.codes);
        // Any other factor rounds block scales, by a sixteenth at most, which is too little to move a code.
        let new = rescale(&old, cols, old.global * 1.3);
        let far = dequantize(&new, rows, cols);
        assert_eq!(new.codes, old.codes);
        assert_ne!(far, dequantize(&old, rows, cols));
        assert!(dequantize(&old, rows, cols).iter().zip(&far).all(|(a, b)| (a - b).abs() <= a.abs() / 16.0));
    }

    #[test]
    fn requantizing_never_loses_to_a_fresh_quantization() {
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
