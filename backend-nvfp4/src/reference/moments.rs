//! Quantized moments of AdamW: 256 values share an f32 absmax, and a code indexes a table of values up to 1. The second
//! moment is stored as its root, which spans half as many decades.

use super::codec::{E4M3_MAX, e2m1_decode, e2m1_encode, e4m3_decode, e4m3_encode};
use kernels_cubecl::{
    adamw::{NVFP4_LEAST, NVFP4_UNIT, STATE_BLOCK},
    layout::BLOCK,
};

/// The values of the codes of a moment, ascending.
///
/// The dynamic tables (Dettmers et al., arXiv 2110.02861, §2.1) hold 0, 1, and decades below 1. A decade holds evenly
/// spaced means, twice as many as the decade below it; a signed table holds both signs. The 4-bit table for the root of
/// v is linear and has no zero (Li et al., arXiv 2309.01507, §4.1).
pub(crate) fn table(signed: bool, bits: usize) -> Vec<f32> {
    if bits == 4 && !signed {
        return (1..=16).map(|i| i as f32 / 16.0).collect();
    }
    let decades = bits as i32 - 1;
    let mut values = vec![0.0f64, 1.0];
    for decade in 0..decades {
        let count = 1usize << (decade + i32::from(!signed));
        for i in 0..count {
            let edge = |i: usize| 0.1 + 0.9 * i as f64 / count as f64;
            let mean = (edge(i) + edge(i + 1)) / 2.0 * 10f64.powi(decade + 1 - decades);
            values.push(mean);
            if signed {
                values.push(-mean);
            }
        }
    }
    values.sort_by(f64::total_cmp);
    assert_eq!(values.len(), 1 << bits);
    values.into_iter().map(|v| v as f32).collect()
}

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

/// An NVFP4 moment on the host; of v its root.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Nvfp4Moment {
    pub(crate) codes: Vec<u8>,
    pub(crate) scales: Vec<u8>,
    pub(crate) absmax: Vec<f32>,
}

impl Nvfp4Moment {
    /// Of values whose number is a multiple of 16. A root above zero stays above zero.
    pub(crate) fn encode(values: &[f32], root: bool) -> Self {
        assert!(values.len().is_multiple_of(BLOCK), "{} values: not a multiple of 16", values.len());
        let stored: Vec<f32> = if root { values.iter().map(|v| v.sqrt()).collect() } else { values.to_vec() };
        let amax = |values: &[f32]| values.iter().fold(0.0f32, |a, x| a.max(x.abs()));
        let least = |amax: f32, least: f32| if root && amax > 0.0 { least } else { 0.0 };
        let (mut codes, mut scales) = (Vec::with_capacity(stored.len() / 2), Vec::with_capacity(stored.len() / BLOCK));
        let mut absmax = Vec::with_capacity(stored.len().div_ceil(STATE_BLOCK));
        for group in stored.chunks(STATE_BLOCK) {
            let top = amax(group);
            let full = if top >= NVFP4_LEAST { E4M3_MAX / top } else { 0.0 };
            absmax.push(top);
            for block in group.chunks(BLOCK) {
                let amax = amax(block);
                let scale = e4m3_encode((amax * full).max(least(amax, e4m3_decode(1))).min(E4M3_MAX));
                let unit = e4m3_decode(scale) * (top * NVFP4_UNIT);
                let inverse = if unit > 0.0 { 1.0 / unit } else { 0.0 };
                let of = |x: f32| if root { (x * inverse).max(least(x, 0.5)) } else { x * inverse };
                let code = |x: f32| e2m1_encode(of(x));
                codes.extend(block.chunks(2).map(|pair| code(pair[0]) | code(pair[1]) << 4));
                scales.push(scale);
            }
        }
        Self { codes, scales, absmax }
    }

    /// The values: `code * (scale * (absmax / 2688))`; of v its root squared.
    pub(crate) fn decode(&self, root: bool) -> Vec<f32> {
        (0..self.codes.len() * 2)
            .map(|i| {
                let unit = e4m3_decode(self.scales[i / BLOCK]) * (self.absmax[i / STATE_BLOCK] * NVFP4_UNIT);
                let value = e2m1_decode(self.codes[i / 2] >> (i % 2 * 4) & 15) * unit;
                if root { value * value } else { value }
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_ascending_and_reach_one() {
        for (signed, bits) in [(true, 8), (false, 8), (true, 4), (false, 4)] {
            let table = table(signed, bits);
            assert!(table.windows(2).all(|w| w[0] < w[1]));
            assert_eq!(table.last(), Some(&1.0));
            assert_eq!(table.contains(&0.0), signed || bits == 8);
        }
    }

    #[test]
    fn tiny_second_moments_survive() {
        // A linear table with zero would flush everything below 1/512 of the block's largest value, and m / eps explode.
        let values: Vec<f32> = (0..256).map(|i| 10f32.powf(-12.0 * i as f32 / 255.0)).collect();
        for bits in [8, 4] {
            let table = table(false, bits);
            let (codes, absmax) = encode_moment(&values, &table, true);
            for (back, value) in decode_moment(&codes, &absmax, &table, 256, true).iter().zip(&values) {
                assert!(*back > 0.0, "{value} came back as {back}");
                let exact = bits == 8 && ((back / value).sqrt() - 1.0).abs() < 0.9;
                assert!(exact || bits == 4 && *back >= value * 0.4, "{bits} bits: {value} came back as {back}");
            }
        }
        let moment = Nvfp4Moment::encode(&values, true);
        for (back, value) in moment.decode(true).iter().zip(&values) {
            assert!(*back >= value * 0.6, "NVFP4: {value} came back as {back}");
        }
    }

    #[test]
    fn nvfp4_moments_are_near_and_zeros_stay() {
        let wave = |i: usize| (i as f32 * 0.7).sin() * 10f32.powi(-((i / 16 % 3) as i32));
        let values: Vec<f32> = (0..512 + 48).map(|i| if i % 5 == 0 { 0.0 } else { wave(i) }).collect();
        for root in [false, true] {
            let values: Vec<f32> = values.iter().map(|x| if root { x * x } else { *x }).collect();
            let moment = Nvfp4Moment::encode(&values, root);
            assert_eq!([moment.codes.len(), moment.scales.len(), moment.absmax.len()], [280, 35, 3]);
            let size = |x: f32| if root { x.sqrt() } else { x };
            for (block, back) in values.chunks(16).zip(moment.decode(root).chunks(16)) {
                let amax = block.iter().fold(0.0f32, |a, x| a.max(size(*x).abs()));
                for (value, back) in block.iter().zip(back) {
                    // Half the widest gap is a sixth of 6; E4M3 rounds the scale to one sixteenth.
                    assert!((size(*value) - size(*back)).abs() <= amax * 0.18, "{value} came back as {back}");
                    assert!(*value != 0.0 || *back == 0.0, "0 came back as {back}");
                }
            }
            // What is stored is stored again as it is, but for rounding of the maximum.
            let again = Nvfp4Moment::encode(&moment.decode(root), root);
            let moved = again.decode(root).iter().zip(moment.decode(root)).filter(|(a, b)| *a != b).count();
            assert!(moved * 10 <= values.len(), "{moved} of {} moved", values.len());
        }
        for tiny in [0.0, 1e-45, 1e-38, 1e-31] {
            let moment = Nvfp4Moment::encode(&[tiny; 16], false);
            assert_eq!(moment.decode(false), [0.0; 16], "{tiny:e}");
        }
        let least = Nvfp4Moment::encode(&[f32::from_bits(1); 16], true);
        assert_eq!(least.scales, [0x7E]);
        assert_eq!(least.codes, [0x77; 8]);
    }
}
