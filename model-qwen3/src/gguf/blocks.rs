//! The blocks in which ggml stores quantized values.
//!
//! ```text
//! Q8_0   32 values   f16 scale d = amax / 127,  32 signed bytes round(x / d)
//! NVFP4  64 values   4 E4M3 scales, one for each 16 values;  then 8 bytes for each 16 values:
//!                    byte j holds the code of value j in its low half, and of value j + 8 in its high half
//! ```

use crate::bytes::FloatType;
use backend_nvfp4::{
    Packed,
    layout::{BLOCK, scales_per_row},
    reference,
};

pub(super) const Q8_VALUES: usize = 32;
pub(super) const Q8_BYTES: usize = 34;
pub(super) const NVFP4_VALUES: usize = 64;
pub(super) const NVFP4_BYTES: usize = 36;

/// Values, a multiple of 32 of them, as Q8_0.
pub(super) fn q8(values: &[f32]) -> Vec<u8> {
    let mut out = Vec::with_capacity(values.len() / Q8_VALUES * Q8_BYTES);
    for block in values.chunks_exact(Q8_VALUES) {
        let amax = block.iter().fold(0.0f32, |amax, x| amax.max(x.abs()));
        let scale = amax / 127.0;
        let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
        out.extend(FloatType::F16.encode(&[scale]));
        out.extend(block.iter().map(|x| ((x * inverse).round() as i8).cast_unsigned()));
    }
    out
}

/// The values of blocks of Q8_0.
pub(super) fn of_q8(bytes: &[u8]) -> Vec<f32> {
    let of_block = |block: &[u8]| {
        let scale = FloatType::F16.decode(&block[..2])[0];
        block[2..].iter().map(move |x| scale * f32::from(x.cast_signed())).collect::<Vec<_>>()
    };
    bytes.chunks_exact(Q8_BYTES).flat_map(of_block).collect()
}

/// The codes and scales of blocks of NVFP4. The tensor scale is stored elsewhere; here it is 1.
pub(super) fn of_nvfp4(bytes: &[u8]) -> Packed {
    const SCALES: usize = NVFP4_VALUES / BLOCK;
    let (mut codes, mut scales) = (vec![], vec![]);
    for block in bytes.chunks_exact(NVFP4_BYTES) {
        scales.extend(&block[..SCALES]);
        for halves in block[SCALES..].chunks_exact(BLOCK / 2) {
            let word = |shift: u8| reference::word_of(halves.iter().map(|byte| byte >> shift & 15));
            codes.extend([word(0), word(4)]);
        }
    }
    Packed { codes, scales, global: 1.0 }
}

/// A packed matrix whose rows have a multiple of 64 columns. Its tensor scale is stored elsewhere.
pub(super) fn nvfp4(packed: &Packed, rows: usize, cols: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(rows * cols / NVFP4_VALUES * NVFP4_BYTES);
    let code = |row, col| reference::code(&packed.codes, row, col, cols);
    for row in 0..rows {
        let scales = &packed.scales[row * scales_per_row(cols)..][..scales_per_row(cols)];
        for (block, scales) in scales.chunks_exact(NVFP4_VALUES / BLOCK).enumerate() {
            out.extend(scales);
            for first in (block * NVFP4_VALUES..(block + 1) * NVFP4_VALUES).step_by(BLOCK) {
                out.extend((first..first + BLOCK / 2).map(|col| code(row, col) | code(row, col + BLOCK / 2) << 4));
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;

    #[test]
    fn a_block_of_8_bit_values_is_ggmls() {
        // By gguf 0.19 for Python: gguf.quants.quantize(numpy.arange(-16, 16, dtype="f4"), GGMLQuantizationType.Q8_0)
        let values: Vec<f32> = (-16..16).map(|x| x as f32).collect();
        let bytes = q8(&values);
        assert_eq!(bytes.len(), Q8_BYTES);
        assert_eq!(bytes[..2], f16::from_f32(16.0 / 127.0).to_le_bytes());
        assert_eq!(bytes[2..6].iter().map(|b| b.cast_signed()).collect::<Vec<_>>(), [-127, -119, -111, -103]);
        assert_eq!(q8(&[0.0; 32]), [0; 34]);
        let scale = f16::from_f32(16.0 / 127.0).to_f32();
        assert_eq!(of_q8(&bytes)[..3], [-127.0 * scale, -119.0 * scale, -111.0 * scale]);
    }

    #[test]
    fn codes_are_paired_as_ggml_pairs_them() {
        // Value i of the row has code i mod 16, and block b of 16 values has scale 0x30 + b.
        let codes = [0x7654_3210, 0xFEDC_BA98].repeat(4);
        let packed = Packed { codes, scales: vec![0x30, 0x31, 0x32, 0x33], global: 2.0 };
        let bytes = nvfp4(&packed, 1, 64);
        assert_eq!(bytes[..4], [0x30, 0x31, 0x32, 0x33]);
        assert_eq!(bytes[4..12], [0x80, 0x91, 0xA2, 0xB3, 0xC4, 0xD5, 0xE6, 0xF7]);
        assert_eq!(bytes.len(), NVFP4_BYTES);
        let again = of_nvfp4(&bytes);
        assert_eq!((again.codes, again.scales), (packed.codes, packed.scales));
    }
}
