//! Random numbers that depend on a counter and a stream only, so that every backend draws the same ones.

use super::threads::{share, threads};
use kernels_cubecl::rng::Stream;

/// Four random words for `index` of `stream`: Philox4x32-10 (Salmon et al., SC 2011).
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

/// A draw that is uniform below 2^22. `of` draws share a word: draw `lane` is the upper 22 bits of the word, rotated by
/// `lane` of its `of` parts.
pub fn draw_of(word: u32, lane: usize, of: usize) -> u32 {
    word.rotate_left((lane * 32 / of) as u32) >> 10
}

/// Makes `len` normal numbers around 0 with deviation `std`, four from four words (Box & Muller, 1958).
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
    share(out.chunks_mut(part).enumerate(), |(t, values)| {
        for (i, values) in values.chunks_mut(4).enumerate() {
            values.copy_from_slice(&four((t * part / 4 + i) as u32)[..values.len()]);
        }
    });
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_matches_the_published_vectors() {
        // Random123's kat_vectors, philox4x32 10 rounds.
        let zero = Stream { seed: 0, step: 0, stream: 0 };
        assert_eq!(philox(0, zero), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
    }
}
