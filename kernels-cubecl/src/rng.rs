//! Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
//!
//! A number is a function of (seed, step, stream, index) and of nothing else: a resumed run draws
//! what the uninterrupted one would have drawn, on any backend and in any launch geometry.

use cubecl::{
    ir::{ElemType, UIntKind},
    prelude::*,
};

/// Names one sequence of random numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Stream {
    /// The run's seed: the key of the cipher.
    pub seed: u64,
    /// Training step: counter word 1.
    pub step: u32,
    /// Tensor or purpose: counter word 2.
    pub stream: u32,
}

/// Rounds of the cipher.
const ROUNDS: usize = 10;

/// A [`Stream`] on the device. Each round's keys come from the host: a kernel reads them as constants.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Cipher {
    keys: Sequence<u32>,
    step: u32,
    stream: u32,
}

/// The numbers of `stream`.
pub(crate) fn cipher<R: Runtime>(Stream { seed, step, stream }: Stream) -> CipherLaunch<R> {
    let mut keys = SequenceArg::new();
    for round in 0..ROUNDS as u32 {
        keys.push((seed as u32).wrapping_add(round.wrapping_mul(0x9E37_79B9)));
        keys.push(((seed >> 32) as u32).wrapping_add(round.wrapping_mul(0xBB67_AE85)));
    }
    CipherLaunch::new(keys, step, stream)
}

/// Four 32-bit random words for counter `(index, step, stream, 0)`, into `out[0..4]`. `other` names another stream.
#[cube]
pub(crate) fn philox(index: u32, cipher: &Cipher, #[comptime] other: u32, out: &mut Array<u32>) {
    let mut c0 = index;
    let mut c1 = cipher.step;
    let mut c2 = cipher.stream ^ other;
    let mut c3 = 0u32;
    #[unroll]
    for round in 0..ROUNDS {
        let (high0, low0) = product(c0, 0xD251_1F53u32);
        let (high1, low1) = product(c2, 0xCD9E_8D57u32);
        c0 = high1 ^ c1 ^ *cipher.keys.index(comptime!(2 * round));
        c1 = low1;
        c2 = high0 ^ c3 ^ *cipher.keys.index(comptime!(2 * round + 1));
        c3 = low0;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

/// The upper and the lower half of a product: one instruction where 64 bits are a type.
#[cube]
fn product(a: u32, #[comptime] b: u32) -> (u32, u32) {
    let device = comptime::device_properties().comptime();
    if comptime!(device.supports_type(ElemType::UInt(UIntKind::U64))) {
        let all = u64::cast_from(a) * comptime!(u64::from(b)).runtime();
        (u32::cast_from(all >> 32u64), u32::cast_from(all))
    } else {
        (u32::mul_hi(a, b.runtime()), a * b)
    }
}

/// Draw `lane` of the `of` that share a word, uniform below 2^22: the upper 22 bits of the word turned by `lane` of its
/// parts. Their lower bits are another draw's upper ones: each by itself is uniform, together they are independent
/// to `32 / of` bits. (`cvt.rs` of sm_100a gives four codes a word too, and 8 bits each.)
#[cube]
pub(crate) fn draw_of(word: u32, #[comptime] lane: u32, #[comptime] of: u32) -> u32 {
    let turn = comptime!(lane * 32 / of);
    let turned = if comptime!(turn == 0) { word } else { (word << turn) | (word >> comptime!(32 - turn)) };
    turned >> 10u32
}
