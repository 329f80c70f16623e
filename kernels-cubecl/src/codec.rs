//! E2M1 and E4M3, by integer operations and exact f32 sums, hence the same on every backend.
//!
//! * E2M1 code `s eem`: magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6 for 0..7, sign in bit 3. Encoding
//!   saturates at 6; to nearest, ties go to the even code; -0 and negative underflow give code 8;
//!   NaN gives 7 (+6).
//! * E4M3FN byte `s eeee mmm`: bias 7, subnormals `m/8 * 2^-6`, no infinity, NaN 0x7F. What is
//!   encoded is a block scale in [0, 448].
//!
//! E2M1 to nearest, and E4M3 below 2^-6, add a power of two and let f32 round. Stochastic E2M1 adds a uniform number to
//! the fraction, which carries into the code's bits; below 1 the fraction is that of `x + 1` in f32.

use crate::{device::flat_launch, rng::draw_of};
use cubecl::prelude::*;

/// The code of `x`, to nearest.
#[cube]
pub(crate) fn e2m1_encode(x: f32) -> u32 {
    let x = e2m1_bounded(x);
    e2m1_nearest(x.abs()) | ((u32::reinterpret(x) >> 28u32) & 8u32)
}

/// What is encoded as `x` is: within [-6, 6], 6 for what is not a number.
#[cube]
#[allow(clippy::eq_op)]
pub(crate) fn e2m1_bounded(x: f32) -> f32 {
    clamp(select(x == x, x, 6.0f32), -6.0f32, 6.0f32)
}

/// The code of a magnitude below 7, to nearest. Added to a power of two whose last place is 1/2, 1 or 2, it is rounded to
/// that, ties to even: these are the codes 0 to 4, 4 to 6 and 6 to 7 if counted from 0, 2 and 4, and elsewhere larger.
#[cube]
pub(crate) fn e2m1_nearest(x: f32) -> u32 {
    let halves = u32::reinterpret(x + 4_194_304.0f32);
    let ones = u32::reinterpret(x + 8_388_610.0f32) - 0x0080_0000u32;
    let twos = u32::reinterpret(x + 16_777_224.0f32) - 0x0100_0000u32;
    min(min(halves, ones), twos) - 0x4A80_0000u32
}

/// The code of a magnitude in [0, 6] in the upper bits from 22 on, and 252 more: exponent and first place of the significand
/// are the code, the 22 places below them the fraction, to which `draw`, uniform below 2^22, is added. Below 1 that holds of
/// `x + 1` a binade lower, which above 1 is the smaller of the two.
#[cube]
fn e2m1_carried(x: f32, draw: u32) -> u32 {
    max(u32::reinterpret(x), u32::reinterpret(x + 1.0f32) - 0x0080_0000u32) + draw
}

/// The word of the eight values from `first` on, each below 7 in magnitude, as block scales see to unless they are
/// subnormal.
/// `random` has a draw a value if `stochastic`, `each` of them a word, the first for value 0.
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
        // 252 more turns a code's third bit around, and the sign where that was 0.
        let third = word & 0x4444_4444u32;
        (word ^ (third << 1u32)) ^ 0x4444_4444u32
    } else {
        word
    }
}

/// The value of an E2M1 code.
#[cube]
pub(crate) fn e2m1_decode(code: u32) -> f32 {
    f32::reinterpret(u32::reinterpret(e2m1_magnitude(code)) | ((code & 8u32) << 28u32))
}

/// The magnitude of an E2M1 code. Its three bits as exponent and significand of an f32 are right from 1 on; below, where
/// codes are subnormal, `2y - 1` is, and the smaller of the two.
#[cube]
pub(crate) fn e2m1_magnitude(code: u32) -> f32 {
    let y = f32::reinterpret(((code & 7u32) << 22u32) + 0x3F00_0000u32);
    min(y, y * 2.0f32 - 1.0f32)
}

/// The eight values of a word as pairs `(k, k + 4)` of f16 or bf16, times [`pair_unit`]. The two bits of exponent and
/// the one of mantissa stand where the 16-bit format has its lowest, which decodes subnormal codes as well. In bf16 one
/// product brings them and the sign to their places; in f16 the copies would overlap.
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

/// What [`e2m1_pairs()`] multiplies values by: the smallest normal number over the smallest normal code.
pub(crate) fn pair_unit(bf16: bool) -> f32 {
    if bf16 { f32::from_bits(1 << 23) } else { 1.0 / 16_384.0 }
}

/// An E4M3 scale in both halves of a pair, times [`scale_unit`]: its bits put in place as [`e2m1_pairs()`] does.
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

/// What [`e4m3_pair()`] multiplies a scale by: for bf16 what keeps its product with a pair a normal number.
pub(crate) fn scale_unit(bf16: bool) -> f32 {
    if bf16 { 2.0f32.powi(100) } else { 1.0 }
}

/// The E4M3FN byte nearest to a block scale in [0, 448], ties to even, and its value.
#[cube]
pub(crate) fn e4m3_scale(x: f32) -> (u32, f32) {
    let bits = u32::reinterpret(x);
    let rounded = (bits + 0x0007_FFFFu32 + ((bits >> 20u32) & 1u32)) & 0xFFF0_0000u32;
    // Below 2^-6 the grid is 2^-9 wide, the last place of 2^14. (A compiler may know what `x + c - c` is.)
    let count = u32::reinterpret(x + 16_384.0f32) & 15u32;
    let subnormal = f32::reinterpret(0x4680_0000u32 | count) - 16_384.0f32;
    let normal = x >= 0.015625f32;
    (select(normal, (rounded >> 20u32) - 960u32, count), select(normal, f32::reinterpret(rounded), subnormal))
}

/// The value of an E4M3FN byte.
#[cube]
pub(crate) fn e4m3_decode(byte: u32) -> f32 {
    let magnitude = byte & 0x7Fu32;
    let bits = u32::reinterpret(e4m3_magnitude(magnitude));
    let bits = select(magnitude == 0x7Fu32, 0x7FC0_0000u32, bits);
    f32::reinterpret(bits | ((byte & 0x80u32) << 24u32))
}

/// The value of an E4M3 byte that is a number without a sign, as scales are. Its bits as those of an f32 are right from 2^-6
/// on; below, where bytes are subnormal, `2y - 2^-6` is, and the smaller of the two.
#[cube]
pub(crate) fn e4m3_magnitude(byte: u32) -> f32 {
    let y = f32::reinterpret((byte << 20u32) + 0x3C00_0000u32);
    min(y, y * 2.0f32 - 0.015625f32)
}

/// Which conversion [`convert`] runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Conversion {
    /// f32 bits to an E2M1 code, to nearest.
    EncodeE2m1,
    /// Bits of an f32 in [0, 448], as block scales are, to an E4M3 byte.
    EncodeE4m3,
    /// E2M1 code to f32 bits.
    DecodeE2m1,
    /// E4M3 byte to f32 bits.
    DecodeE4m3,
}

/// `output[i] = conversion(input[i])`: the codec by itself, for tests that go through every input.
///
/// # Errors
/// If the two buffers differ in length.
pub fn convert<R: Runtime>(
    client: &ComputeClient<R>,
    input: ArrayArg<R>,
    output: ArrayArg<R>,
    conversion: Conversion,
) -> Result<(), crate::KernelError> {
    let len = input.size();
    crate::error::expect_len("convert", "output", output.size(), len)?;
    let (count, dim) = flat_launch(len);
    // SAFETY: both buffers hold `len` elements and the kernel stops at `len`.
    unsafe { convert_kernel::launch_unchecked(client, count, dim, input, output, conversion) };
    Ok(())
}

#[cube(launch_unchecked)]
fn convert_kernel(input: &Array<u32>, output: &mut Array<u32>, #[comptime] conversion: Conversion) {
    if ABSOLUTE_POS < output.len() {
        let x = input[ABSOLUTE_POS];
        output[ABSOLUTE_POS] = match comptime!(conversion) {
            Conversion::EncodeE2m1 => e2m1_encode(f32::reinterpret(x)),
            Conversion::EncodeE4m3 => {
                let (byte, _value) = e4m3_scale(f32::reinterpret(x));
                byte
            }
            Conversion::DecodeE2m1 => u32::reinterpret(e2m1_decode(x)),
            Conversion::DecodeE4m3 => u32::reinterpret(e4m3_decode(x)),
        };
    }
}
