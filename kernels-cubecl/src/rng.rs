//! Philox4x32-10, a counter-based random number generator (Salmon et al., "Parallel random numbers: as easy as 1, 2,
//! 3", SC 2011).
//!
//! A number depends only on (seed, step, stream, index). A resumed run therefore draws the same numbers as an
//! uninterrupted one, on any backend and with any launch geometry.

use crate::device::sequence;
use cubecl::{
    ir::{ElemType, UIntKind},
    prelude::*,
};

/// Identifies one sequence of random numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Stream {
    /// Seed of the run, the key of the cipher.
    pub seed: u64,
    /// What numbers the draws of one purpose: a micro-batch, an update of a tensor, an epoch, a position. Word 1 of the
    /// counter.
    pub step: u32,
    /// Number of the tensor or of the purpose, word 2 of the counter.
    pub stream: u32,
}

/// Rounds of the cipher.
const ROUNDS: usize = 10;
/// What each round adds to the two words of the key.
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// A [`Stream`] on the device. The host computes the keys of every round, so that a kernel reads them as constants.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Cipher {
    keys: Sequence<u32>,
    step: u32,
    stream: u32,
}

/// Prepares a stream for the device.
pub(crate) fn cipher<R: Runtime>(Stream { seed, step, stream }: Stream) -> CipherLaunch<R> {
    let keys_of = |round: u32| {
        let lower = (seed as u32).wrapping_add(round.wrapping_mul(WEYL[0]));
        [lower, ((seed >> 32) as u32).wrapping_add(round.wrapping_mul(WEYL[1]))]
    };
    CipherLaunch::new(sequence((0..ROUNDS as u32).flat_map(keys_of)), step, stream)
}

/// A stream whose seed and step a kernel has read.
#[cube]
pub(crate) fn cipher_of(seed_low: u32, seed_high: u32, step: u32, #[comptime] stream: u32) -> Cipher {
    let mut keys = Sequence::<u32>::new();
    #[unroll]
    for round in 0..ROUNDS {
        keys.push(seed_low + comptime!((round as u32).wrapping_mul(WEYL[0])));
        keys.push(seed_high + comptime!((round as u32).wrapping_mul(WEYL[1])));
    }
    Cipher { keys, step, stream: stream.runtime() }
}

/// Writes the four random words of counter `(index, step, stream, 0)` to `out[0..4]`. `other` is xored into the
/// stream, which selects a different one.
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

/// The upper and the lower half of a 64-bit product: one instruction where the device has 64-bit integers.
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

/// Extracts draw `lane` of the `of` draws that share a word, uniform below 2^22: the upper 22 bits of the word after
/// a rotation by `lane` parts of it. The lower bits of one draw are upper bits of another: each draw by itself is
/// uniform, and together they are independent to `32 / of` bits. (The `cvt.rs` instruction of sm_100a also serves
/// four codes from a word, with 8 bits each.)
#[cube]
pub(crate) fn draw_of(word: u32, #[comptime] lane: u32, #[comptime] of: u32) -> u32 {
    let turn = comptime!(lane * 32 / of);
    let turned = if comptime!(turn == 0) { word } else { (word << turn) | (word >> comptime!(32 - turn)) };
    turned >> 10u32
}
