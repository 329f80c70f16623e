//! E2M1 and E4M3 to and from f32, by integer operations and exact f32 sums, so that every backend computes the same
//! bits.
//!
//! * An E2M1 code has the bits `s eem`: magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6 for the codes 0 to 7, and the sign in
//!   bit 3. Encoding saturates at 6; rounding to nearest resolves ties to the even code; -0 and negative numbers that
//!   underflow become code 8; NaN becomes code 7 (+6).
//! * An E4M3FN byte has the bits `s eeee mmm`: bias 7, subnormal values `m/8 * 2^-6`, no infinity, NaN 0x7F. Block
//!   scales lie in [0, 448]; the numbers of a cache are clamped to [-448, 448].
//!
//! Rounding E2M1 to nearest, and E4M3 below 2^-6, adds a power of two and lets the f32 addition round. Stochastic
//! E2M1 rounding adds a uniform number to the fraction bits, whose carry reaches the bits of the code; below 1 it
//! uses the fraction of `x + 1`.

use crate::rng::draw_of;
use cubecl::prelude::*;

/// Clamps `x` to [-6, 6], and NaN to 6: the result has the same code as `x`.
#[cube]
#[allow(clippy::eq_op)]
pub(crate) fn e2m1_bounded(x: f32) -> f32 {
    clamp(select(x == x, x, 6.0f32), -6.0f32, 6.0f32)
}

/// Encodes a magnitude below 7, rounding to nearest. Adding a power of two whose last place is 1/2, 1 or 2 rounds the
/// magnitude to that place, ties to even. Counted from 0, 2 and 4, the three sums are the codes 0 to 4, 4 to 6 and 6
/// to 7, and each is larger than the code outside its range, so the code is the smallest of the three.
#[cube]
pub(crate) fn e2m1_nearest(x: f32) -> u32 {
    let halves = u32::reinterpret(x + 4_194_304.0f32);
    let ones = u32::reinterpret(x + 8_388_610.0f32) - 0x0080_0000u32;
    let twos = u32::reinterpret(x + 16_777_224.0f32) - 0x0100_0000u32;
    min(min(halves, ones), twos) - 0x4A80_0000u32
}

/// Encodes a magnitude in [0, 6], plus 252, in the bits from 22 up: exponent and first mantissa bit are the code, and
/// the 22 bits below are the fraction, to which `draw` (uniform below 2^22) is added. Below 1 the same holds for `x +
/// 1`, one binade lower; the larger of the two is right in both ranges.
#[cube]
fn e2m1_carried(x: f32, draw: u32) -> u32 {
    max(u32::reinterpret(x), u32::reinterpret(x + 1.0f32) - 0x0080_0000u32) + draw
}

/// Encodes the eight values from `first` on as one word. Each has a magnitude below 7, which the block scale ensures
/// unless it is subnormal. If `stochastic`, `random` has one draw for each value, `each` draws in a word, beginning
/// with value 0.
#[cube]
pub(crate) fn e2m1_word(
    values: &Array<f32>,
    #[comptime] first: usize,
    random: &Array<u32>,
    #[comptime] each: usize,
    #[comptime] stochastic: bool,
) -> u32 {
    let mut word = 0u32;
    #[unroll]
    for i in 0..8usize {
        let at = comptime!(first + 7 - i);
        let x = values[at];
        let code = if comptime!(stochastic) {
            let draw = draw_of(random[comptime!(at / each)], comptime!((at % each) as u32), comptime!(each as u32));
            e2m1_carried(min(x.abs(), 6.0f32), draw) << 6u32
        } else {
            e2m1_nearest(x.abs()) << 28u32
        };
        let signed = code ^ (u32::reinterpret(x) & 0x8000_0000u32);
        word = (word << 4u32) | (signed >> 28u32);
    }
    if comptime!(stochastic) {
        // The 252 that `e2m1_carried` adds flips the third bit of a code, and also the sign bit if the third bit was
        // 0.
        let third = word & 0x4444_4444u32;
        (word ^ (third << 1u32)) ^ 0x4444_4444u32
    } else {
        word
    }
}

/// Decodes an E2M1 code.
#[cube]
pub(crate) fn e2m1_decode(code: u32) -> f32 {
    f32::reinterpret(u32::reinterpret(e2m1_magnitude(code)) | ((code & 8u32) << 28u32))
}

/// Decodes the magnitude of an E2M1 code. Read as exponent and mantissa of an f32, its three bits give a `y` that is
/// right from 1 on. Below 1, where codes are subnormal, `2y - 1` is right; the smaller of the two is right
/// everywhere.
#[cube]
pub(crate) fn e2m1_magnitude(code: u32) -> f32 {
    let y = f32::reinterpret(((code & 7u32) << 22u32) + 0x3F00_0000u32);
    min(y, y * 2.0f32 - 1.0f32)
}

/// Decodes the eight values of a word as pairs `(k, k + 4)` of f16 or bf16, times [`pair_unit`]. The two exponent
/// bits and the mantissa bit of a code are placed where the 16-bit format has its lowest exponent bits and its
/// highest mantissa bit, which decodes subnormal codes as well. In bf16 one multiplication moves these bits and the
/// sign to their places; in f16 the copies would overlap.
#[cube]
pub(crate) fn e2m1_pairs<F: Float>(word: u32, #[comptime] bf16: bool) -> Array<Vector<F, Const<2>>> {
    let mut pairs = Array::<Vector<F, Const<2>>>::new(4usize);
    let upper = word >> 8u32;
    #[unroll]
    for k in 0..4u32 {
        let at = comptime!(k % 2 * 4);
        let codes = if comptime!(k < 2) { word } else { upper } & comptime!(0x000F_000Fu32 << at);
        let bits = if comptime!(bf16) {
            (codes * comptime!(((1u32 << 6) | (1 << 12)) >> at)) & 0x81C0_81C0u32
        } else {
            let magnitude = (codes << comptime!(9 - at)) & 0x0E00_0E00u32;
            magnitude | ((codes << comptime!(12 - at)) & 0x8000_8000u32)
        };
        pairs[k as usize] = Vector::<F, Const<2>>::reinterpret(bits);
    }
    pairs
}

/// The factor that [`e2m1_pairs()`] leaves in its values: the smallest normal number over the smallest normal code.
pub(crate) fn pair_unit(bf16: bool) -> f32 {
    if bf16 { f32::from_bits(1 << 23) } else { 1.0 / 16_384.0 }
}

/// Decodes an E4M3 scale into both halves of a pair, times [`scale_unit`], by placing its bits as [`e2m1_pairs()`]
/// does.
#[cube]
pub(crate) fn e4m3_pair<F: Float>(byte: u32, #[comptime] bf16: bool) -> Vector<F, Const<2>> {
    if comptime!(bf16) {
        let raw = Vector::<F, Const<2>>::reinterpret(byte * 0x0010_0010u32);
        let half_way = Vector::new(F::new(comptime!(2.0f32.powi(110))));
        raw * half_way * half_way
    } else {
        Vector::<F, Const<2>>::reinterpret(byte * 0x0080_0080u32) * Vector::new(F::new(256.0f32))
    }
}

/// The factor that [`e4m3_pair()`] leaves in a scale. For bf16 it keeps the product of a scale and a pair a normal
/// number.
pub(crate) fn scale_unit(bf16: bool) -> f32 {
    if bf16 { 2.0f32.powi(100) } else { 1.0 }
}

/// Encodes a block scale in [0, 448] as the nearest E4M3FN byte, ties to even. Returns the byte and its value.
#[cube]
pub(crate) fn e4m3_scale(x: f32) -> (u32, f32) {
    let bits = u32::reinterpret(x);
    let rounded = (bits + 0x0007_FFFFu32 + ((bits >> 20u32) & 1u32)) & 0xFFF0_0000u32;
    // Below 2^-6 the values are 2^-9 apart, the last place of 2^14. (A compiler could simplify `x + c - c`; it cannot
    // simplify this.)
    let count = u32::reinterpret(x + 16_384.0f32) & 15u32;
    let subnormal = f32::reinterpret(0x4680_0000u32 | count) - 16_384.0f32;
    let normal = x >= 0.015625f32;
    (select(normal, (rounded >> 20u32) - 960u32, count), select(normal, f32::reinterpret(rounded), subnormal))
}

/// Encodes any number as the nearest E4M3FN byte, ties to even. Magnitudes above 448 become 448, and NaN becomes 0x7F.
#[cube]
#[allow(clippy::eq_op)]
pub(crate) fn e4m3_byte(x: f32) -> u32 {
    // `clamp` may take NaN to either end; the byte of NaN is chosen below.
    let (magnitude, _) = e4m3_scale(clamp(x.abs(), 0.0f32, 448.0f32));
    let signed = magnitude | ((u32::reinterpret(x) >> 24u32) & 0x80u32);
    select(x == x, signed, 0x7Fu32)
}

/// Decodes an E4M3FN byte.
#[cube]
pub(crate) fn e4m3_decode(byte: u32) -> f32 {
    let magnitude = byte & 0x7Fu32;
    let bits = u32::reinterpret(e4m3_magnitude(magnitude));
    let bits = select(magnitude == 0x7Fu32, 0x7FC0_0000u32, bits);
    f32::reinterpret(bits | ((byte & 0x80u32) << 24u32))
}

/// Decodes an E4M3 byte that is neither NaN nor negative, as scales are. Read as exponent and mantissa of an f32, its
/// bits give a `y` that is right from 2^-6 on. Below, where bytes are subnormal, `2y - 2^-6` is right; the smaller of
/// the two is right everywhere.
#[cube]
pub(crate) fn e4m3_magnitude(byte: u32) -> f32 {
    let y = f32::reinterpret((byte << 20u32) + 0x3C00_0000u32);
    min(y, y * 2.0f32 - 0.015625f32)
}
