//! The emulator's 16-bit numbers are those of the crate `half`, which the program uses.

use crate::support::emulator;
use half::{bf16, f16};

/// Prints what the emulator makes of every number whose upper 18 bits differ: signs, exponents, and mantissas to the
/// ninth bit, with the bits below zero, half a step, and a little more, so that every rounding occurs.
const PROGRAM: &str = r#"
#include <algorithm>
#include <cstdio>
#include "numbers.h"
int main() {
  for (uint32_t upper = 0; upper < 1u << 18; ++upper)
    for (uint32_t lower : {0u, 1u, 0x1000u, 0x2000u, 0x3FFFu}) {
      float value = std::bit_cast<float>(upper << 14 | lower);
      uint16_t words[] = {numbers::f16_of(value), numbers::bf16_of(value)};
      fwrite(words, 2, 2, stdout);
    }
  for (uint32_t bits = 0; bits < 1u << 16; ++bits) {
    float values[] = {numbers::of_f16(uint16_t(bits)), numbers::of_bf16(uint16_t(bits))};
    fwrite(values, 4, 2, stdout);
  }
}
"#;

pub(super) fn are_those_of_half() {
    let output = emulator::output_of(PROGRAM).unwrap();
    let (words, floats) = output.split_at((4 * 5) << 18);
    let values = (0..1u32 << 18)
        .flat_map(|upper| [0, 1, 0x1000, 0x2000, 0x3FFF].map(|lower| f32::from_bits(upper << 14 | lower)));
    for (value, word) in values.zip(words.chunks_exact(4)) {
        let got = (f16::from_le_bytes([word[0], word[1]]), bf16::from_le_bytes([word[2], word[3]]));
        if value.is_nan() {
            assert!(got.0.is_nan() && got.1.is_nan(), "{value}");
        } else {
            let expected = (f16::from_f32(value).to_bits(), bf16::from_f32(value).to_bits());
            assert_eq!((got.0.to_bits(), got.1.to_bits()), expected, "{value}");
        }
    }
    assert_eq!(floats.len(), 8 << 16);
    for (bits, pair) in (0..=u16::MAX).zip(floats.chunks_exact(8)) {
        let (a, b) = pair.split_at(4);
        for (got, expected) in [(a, f16::from_bits(bits).to_f32()), (b, bf16::from_bits(bits).to_f32())] {
            let got = f32::from_le_bytes([got[0], got[1], got[2], got[3]]);
            assert!(
                got == expected && got.is_sign_negative() == expected.is_sign_negative()
                    || got.is_nan() && expected.is_nan(),
                "{bits:#x}"
            );
        }
    }
}
