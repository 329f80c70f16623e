//! AdamW on one tensor, and the rounding of what it stores: bf16 with and without a residual, and NVFP4 codes.

use super::{
    codec::{E4M3_MAX, code, e2m1_decode, e2m1_encode_stochastic, e4m3_decode, e4m3_encode, set_code},
    random::{draw_of, philox},
};
use crate::packed::Packed;
use kernels_cubecl::{
    adamw::{AdamwStep, Master},
    layout::{BLOCK, scales_per_row},
    rng::Stream,
};

/// Makes one AdamW step on f32 weights and f32 moments. All slices are equally long.
pub fn adamw(w: &mut [f32], grad: &[f32], m: &mut [f32], v: &mut [f32], s: AdamwStep) {
    let (rate, root_scale, decay) = (s.lr / s.bias1, 1.0 / s.bias2.sqrt(), 1.0 - s.lr * s.weight_decay);
    for i in 0..w.len() {
        let g = grad[i] * s.clip_factor;
        m[i] = s.beta1 * m[i] + (1.0 - s.beta1) * g;
        v[i] = s.beta2 * v[i] + (1.0 - s.beta2) * g * g;
        let step = rate * m[i] / (v[i].sqrt() * root_scale + s.eps);
        let decayed = w[i] * decay;
        // A step of zero keeps the bits of the weight, also those of -0.
        w[i] = if step == 0.0 { decayed } else { decayed - step };
    }
}

/// Rounds `x`, the value at `index` of its tensor, to what a master stores: a value, which is bf16 except for
/// [`Master::Exact`], and the residual.
pub fn round(x: f32, index: usize, master: Master, stream: Stream) -> (f32, u8) {
    let bits = x.to_bits();
    if master == Master::Exact || !x.is_finite() {
        return (x, 0);
    }
    let bits = bits
        + match master {
            Master::Stochastic => philox((index / 8) as u32, stream)[index % 8 / 2] >> (index % 2 * 16) & 0xFFFF,
            Master::Nearest => 0x7FFF + (bits >> 16 & 1),
            _ => 0x8080,
        };
    (f32::from_bits(bits & 0xFFFF_0000), (bits >> 8) as u8)
}

/// The f32 that a bf16 value and its residual stand for.
pub(crate) fn unrounded(value: f32, residual: u8) -> f32 {
    f32::from_bits((value.to_bits() + (u32::from(residual) << 8)).wrapping_sub(0x8000))
}

/// Rounds moments to bf16 stochastically, with draws that the weights do not use.
pub(crate) fn round_states(m: &mut [f32], v: &mut [f32], stream: Stream) {
    let other = Stream { stream: stream.stream ^ 0x8000_0000, ..stream };
    for i in 0..m.len() {
        let draw = philox((i / 4) as u32, other)[i % 4];
        let kept = |x: f32, draw: u32| f32::from_bits((x.to_bits() + draw) & 0xFFFF_0000);
        (m[i], v[i]) = (kept(m[i], draw >> 16), kept(v[i], draw & 0xFFFF));
    }
}

/// Packs the values of an NVFP4 master after a step. A block keeps its scale while its amax lies in the upper half of
/// what the scale reaches, and otherwise takes the smallest scale that reaches it. Codes are rounded stochastically.
pub fn repack(packed: &mut Packed, cols: usize, values: &[f32], stream: Stream) {
    for (b, block) in values.chunks(BLOCK).enumerate() {
        let amax = block.iter().fold(0.0f32, |a, x| a.max(x.abs()));
        let reach = |byte: u8| e4m3_decode(byte) * packed.global * 6.0;
        let old = packed.scales[b];
        let mut scale = old;
        if amax != 0.0 && !(amax <= reach(old) && amax * 2.0 > reach(old)) {
            let near = e4m3_encode((amax / (packed.global * 6.0)).min(E4M3_MAX));
            scale = if reach(near) < amax { near + 1 } else { near }.min(0x7E);
        }
        packed.scales[b] = scale;
        let unit = e4m3_decode(scale) * packed.global;
        let inverse = if unit > 0.0 { 1.0 / unit } else { 0.0 };
        for (i, &x) in block.iter().enumerate() {
            let at = b * BLOCK + i;
            let word = philox((at / 8) as u32, stream)[at % 8 / 2];
            let new = e2m1_encode_stochastic(x * inverse, draw_of(word, at % 2, 2));
            set_code(&mut packed.codes, at / cols, at % cols, cols, new);
        }
    }
}

/// The values of a packed matrix as the optimizer reads them: `code * (scale * g)`.
pub(crate) fn unpacked(packed: &Packed, rows: usize, cols: usize) -> Vec<f32> {
    let unit = |r: usize, c: usize| e4m3_decode(packed.scales[r * scales_per_row(cols) + c / BLOCK]) * packed.global;
    (0..rows * cols)
        .map(|at| (at / cols, at % cols))
        .map(|(r, c)| e2m1_decode(code(&packed.codes, r, c, cols)) * unit(r, c))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_residual_gives_24_bits_and_the_value_is_the_nearest_bf16() {
        let stream = Stream { seed: 0, step: 0, stream: 0 };
        for i in 0..20_000u32 {
            let x = f32::from_bits(i.wrapping_mul(0x9E37_79B9) & 0xBFFF_FFFF);
            let (value, residual) = round(x, 0, Master::Residual, stream);
            let back = unrounded(value, residual);
            assert!(back.to_bits().abs_diff(x.to_bits()) <= 128, "{x:e} came back as {back:e}");
            assert!(value.to_bits().abs_diff(x.to_bits()) <= 0x8080);
            assert_eq!(value.to_bits() & 0xFFFF, 0);
        }
        assert_eq!(unrounded(-0.0, 128).to_bits(), (-0.0f32).to_bits());
    }

    #[test]
    fn stochastic_rounding_is_right_in_the_mean() {
        let x = 1.0 + 0.3 / 128.0;
        let draws = 100_000;
        let of = |i| round(x, i, Master::Stochastic, Stream { seed: 3, step: 1, stream: 2 }).0;
        let mean = (0..draws).map(|i| f64::from(of(i))).sum::<f64>() / f64::from(draws as u32);
        assert!((mean - f64::from(x)).abs() < 4e-5, "{mean} for {x}");
        assert_eq!(
            round(f32::NAN, 0, Master::Stochastic, Stream { seed: 0, step: 0, stream: 0 }).0.to_bits(),
            f32::NAN.to_bits()
        );
    }
}
