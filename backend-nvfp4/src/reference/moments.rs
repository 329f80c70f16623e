//! Quantized moments of AdamW: 256 values share an f32 absmax, and a code indexes a table of values up to 1. The second
//! moment is stored as its root, which spans half as many decades.

use kernels_cubecl::adamw::STATE_BLOCK;

/// The values of a quantized moment. If `root`, the codes stand for roots, which are squared.
pub(crate) fn decode_moment(codes: &[u8], absmax: &[f32], table: &[f32], len: usize, root: bool) -> Vec<f32> {
    let four = table.len() == 16;
    (0..len)
        .map(|i| {
            let code = if four { codes[i / 2] >> (i % 2 * 4) & 15 } else { codes[i] };
            let value = table[usize::from(code)] * absmax[i / STATE_BLOCK];
            if root { value * value } else { value }
        })
        .collect()
}

/// The codes and block maxima of a moment. A code is that of the nearest table entry, and of the lower one at a tie. If
/// `root`, the codes stand for roots, and a root above zero stays above zero.
pub(crate) fn encode_moment(values: &[f32], table: &[f32], root: bool) -> (Vec<u8>, Vec<f32>) {
    let stored: Vec<f32> = if root { values.iter().map(|v| v.sqrt()).collect() } else { values.to_vec() };
    let mut codes = vec![0; stored.len()];
    let mut absmax = Vec::with_capacity(stored.len().div_ceil(STATE_BLOCK));
    for (block, codes) in stored.chunks(STATE_BLOCK).zip(codes.chunks_mut(STATE_BLOCK)) {
        absmax.push(encode(block, codes, table));
    }
    if root && table.len() == 256 {
        codes.iter_mut().zip(&stored).for_each(|(code, root)| *code = (*code).max(u8::from(*root > 0.0)));
    }
    if table.len() == 16 {
        codes = codes.chunks(2).map(|pair| pair[0] | pair[1] << 4).collect();
    }
    (codes, absmax)
}

/// Writes the codes of one block and returns its absmax.
fn encode(values: &[f32], codes: &mut [u8], table: &[f32]) -> f32 {
    let absmax = values.iter().fold(0.0f32, |a, x| a.max(x.abs()));
    let unit = if absmax > 0.0 { absmax } else { 1.0 };
    for (code, &value) in codes.iter_mut().zip(values) {
        let x = value / unit;
        let high = table.partition_point(|&t| t <= x).clamp(1, table.len() - 1);
        let low = high - 1;
        *code = if table[high] - x < x - table[low] { high } else { low } as u8;
    }
    absmax
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernels_cubecl::adamw::Coding;

    #[test]
    fn tiny_second_moments_survive() {
        // A linear table with zero would flush everything below 1/512 of the block's largest value, and m / eps explode.
        let values: Vec<f32> = (0..256).map(|i| 10f32.powf(-12.0 * i as f32 / 255.0)).collect();
        for coding in [Coding::Bytes, Coding::Nibbles] {
            let (table, bits) = (coding.values(false), coding.bits());
            let (codes, absmax) = encode_moment(&values, &table, true);
            for (back, value) in decode_moment(&codes, &absmax, &table, 256, true).iter().zip(&values) {
                assert!(*back > 0.0, "{value} came back as {back}");
                let exact = bits == 8 && ((back / value).sqrt() - 1.0).abs() < 0.9;
                assert!(exact || bits == 4 && *back >= value * 0.4, "{bits} bits: {value} came back as {back}");
            }
        }
    }
}
