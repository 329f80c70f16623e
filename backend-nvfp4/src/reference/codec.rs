//! The two number formats of NVFP4, E2M1 codes and E4M3 scales, and where a code lies in its word.

use kernels_cubecl::layout::{CODES_PER_WORD, words_per_row};

/// The magnitudes of E2M1 codes 0 to 7; bit 3 of a code is the sign.
pub const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// Largest E4M3 value.
pub const E4M3_MAX: f32 = 448.0;

/// The E2M1 code of `x`: rounded to nearest with ties to the even code, and saturated. NaN gives 7.
pub fn e2m1_encode(x: f32) -> u8 {
    if x.is_nan() {
        return 7;
    }
    let a = x.abs();
    let magnitude = u8::from(a > 0.25)
        + u8::from(a >= 0.75)
        + u8::from(a > 1.25)
        + u8::from(a >= 1.75)
        + u8::from(a > 2.5)
        + u8::from(a >= 3.5)
        + u8::from(a > 5.0);
    magnitude | u8::from(x.is_sign_negative()) << 3
}

/// The E2M1 code of `x`, rounded stochastically. The magnitude is rounded up if the distance to the lower code, as a
/// share of the gap, and `draw / 2^22` add up to 1 or more. For `|x|` below 1 the distance is that of `(|x| + 1) - 1` in
/// f32, which has steps of 2^-23.
pub fn e2m1_encode_stochastic(x: f32, draw: u32) -> u8 {
    if x.is_nan() {
        return 7;
    }
    let a = if x.abs() < 1.0 { (x.abs() + 1.0) - 1.0 } else { x.abs() };
    let low = E2M1.iter().rposition(|&v| v <= a).unwrap_or(0);
    let magnitude = match E2M1.get(low + 1) {
        None => low,
        Some(&high) => {
            let share = f64::from(a - E2M1[low]) / f64::from(high - E2M1[low]);
            low + usize::from((share * 4_194_304.0).floor() + f64::from(draw) >= 4_194_304.0)
        }
    };
    magnitude as u8 | u8::from(x.is_sign_negative()) << 3
}

/// The value of an E2M1 code.
pub fn e2m1_decode(code: u8) -> f32 {
    let magnitude = E2M1[usize::from(code & 7)];
    if code & 8 == 0 { magnitude } else { -magnitude }
}

/// The E4M3FN byte of `x`: rounded to nearest with ties to even, and saturated at 448. NaN gives 0x7F.
pub fn e4m3_encode(x: f32) -> u8 {
    if x.is_nan() {
        return 0x7F;
    }
    let a = x.abs();
    // `low` becomes the last finite byte whose value is not above `a`.
    let (mut low, mut high) = (0u8, 0x7F);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if e4m3_decode(middle) <= a { low = middle } else { high = middle }
    }
    let magnitude = if low == 0x7E {
        low
    } else {
        let below = a - e4m3_decode(low);
        let above = e4m3_decode(low + 1) - a;
        low + u8::from(above < below || above == below && low % 2 == 1)
    };
    magnitude | u8::from(x.is_sign_negative()) << 7
}

/// The value of an E4M3FN byte.
pub fn e4m3_decode(byte: u8) -> f32 {
    let (exponent, mantissa) = (u32::from(byte >> 3 & 15), u32::from(byte & 7));
    let magnitude = match (exponent, mantissa) {
        (15, 7) => f32::NAN,
        (0, m) => m as f32 / 512.0,
        (e, m) => f32::from_bits((e + 120) << 23 | m << 20),
    };
    if byte & 0x80 == 0 { magnitude } else { -magnitude }
}

/// The code in row `r` and column `c` of a matrix with `cols` columns.
pub fn code(codes: &[u32], r: usize, c: usize, cols: usize) -> u8 {
    let word = codes[r * words_per_row(cols) + c / CODES_PER_WORD];
    (word >> (4 * (c % CODES_PER_WORD)) & 15) as u8
}

/// The word of eight codes. The first is in its lowest bits.
pub fn word_of(codes: impl IntoIterator<Item = u8>) -> u32 {
    codes.into_iter().take(CODES_PER_WORD).enumerate().fold(0, |word, (i, code)| word | u32::from(code) << (4 * i))
}

/// How many of the eight codes of two words stand for other values. Zero has two codes.
pub fn different_codes(a: u32, b: u32) -> usize {
    let (different, magnitudes) = (a ^ b, a | b);
    let differs = |i: &usize| different >> (4 * i) & 15 != 0 && magnitudes >> (4 * i) & 7 != 0;
    (0..CODES_PER_WORD).filter(differs).count()
}

/// Writes the code in row `r` and column `c` of a matrix with `cols` columns.
pub(super) fn set_code(codes: &mut [u32], r: usize, c: usize, cols: usize, code: u8) {
    let word = &mut codes[r * words_per_row(cols) + c / CODES_PER_WORD];
    let shift = 4 * (c % CODES_PER_WORD);
    *word = *word & !(15 << shift) | u32::from(code) << shift;
}
