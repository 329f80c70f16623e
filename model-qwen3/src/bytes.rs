//! Numbers as the little-endian bytes of containers. No other file of this crate converts between the two.

use burn::tensor::DType;
use half::{bf16, f16, slice::HalfFloatSliceExt};

// Numbers that a device hands over are written as they lie in memory.
const _: () = assert!(cfg!(target_endian = "little"), "numbers must lie little end first, as files hold them");

/// The type of a dense tensor's values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum FloatType {
    F16,
    Bf16,
    F32,
}

impl FloatType {
    /// Bytes in a value.
    pub fn size(self) -> usize {
        if self == Self::F32 { 4 } else { 2 }
    }

    /// The type of the same values in a tensor.
    pub fn dtype(self) -> DType {
        match self {
            Self::F16 => DType::F16,
            Self::Bf16 => DType::BF16,
            Self::F32 => DType::F32,
        }
    }

    /// The name in listings and messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
        }
    }

    /// The bytes of values, which are rounded to nearest even.
    pub fn encode(self, values: &[f32]) -> Vec<u8> {
        match self {
            Self::F16 => {
                let mut halves = vec![f16::ZERO; values.len()];
                halves.convert_from_f32_slice(values);
                of_each(&halves, |v| v.to_le_bytes())
            }
            Self::Bf16 => of_each(values, |v| bf16::from_f32(*v).to_le_bytes()),
            Self::F32 => of_each(values, |v| v.to_le_bytes()),
        }
    }

    /// The values of bytes.
    pub fn decode(self, bytes: &[u8]) -> Vec<f32> {
        match self {
            Self::F16 => {
                let halves = each(bytes, f16::from_le_bytes);
                let mut values = vec![0.0; halves.len()];
                halves.convert_to_f32_slice(&mut values);
                values
            }
            Self::Bf16 => each(bytes, |b| bf16::from_le_bytes(b).to_f32()),
            Self::F32 => each(bytes, f32::from_le_bytes),
        }
    }

    /// Whether all values of bytes are finite: the exponents of the others have all bits.
    pub fn are_finite(self, bytes: &[u8]) -> bool {
        let of_two = |exponent: u16| all_are(bytes, |b| u16::from_le_bytes(b) & exponent != exponent);
        match self {
            Self::F16 => of_two(0x7c00),
            Self::Bf16 => of_two(0x7f80),
            Self::F32 => all_are(bytes, |b| u32::from_le_bytes(b) & 0x7f80_0000 != 0x7f80_0000),
        }
    }
}

/// The bytes of numbers. A processor makes those of many numbers at once if it knows where they go.
fn of_each<Number, const SIZE: usize>(numbers: &[Number], bytes: impl Fn(&Number) -> [u8; SIZE]) -> Vec<u8> {
    let mut all = vec![0; numbers.len() * SIZE];
    all.as_chunks_mut().0.iter_mut().zip(numbers).for_each(|(place, number)| *place = bytes(number));
    all
}

/// Whether all numbers of bytes are `good`. A processor tests many numbers at once if it need not stop at the first bad one.
fn all_are<const SIZE: usize>(bytes: &[u8], good: impl Fn([u8; SIZE]) -> bool) -> bool {
    let numbers = bytes.as_chunks().0;
    numbers.chunks(1024).all(|part| part.iter().fold(true, |all, number| all & good(*number)))
}

/// The bytes of unsigned 32-bit numbers.
pub fn of_u32s(values: impl IntoIterator<Item = u32>) -> Vec<u8> {
    values.into_iter().flat_map(u32::to_le_bytes).collect()
}

/// Unsigned 32-bit numbers, `count` of them, of the bytes that `fill` writes.
///
/// # Errors
/// If `fill` fails.
pub(crate) fn filled_u32s<Error>(
    count: usize,
    fill: impl FnOnce(&mut [u8]) -> Result<(), Error>,
) -> Result<Vec<u32>, Error> {
    let mut values = vec![0; count];
    fill(bytemuck::cast_slice_mut(&mut values))?;
    Ok(values)
}

/// The unsigned 32-bit numbers of bytes.
pub fn to_u32s(bytes: &[u8]) -> Vec<u32> {
    each(bytes, u32::from_le_bytes)
}

/// The bytes of signed 32-bit numbers.
pub fn of_i32s(values: impl IntoIterator<Item = i32>) -> Vec<u8> {
    values.into_iter().flat_map(i32::to_le_bytes).collect()
}

/// The signed 32-bit numbers of bytes.
pub fn to_i32s(bytes: &[u8]) -> Vec<i32> {
    each(bytes, i32::from_le_bytes)
}

/// The bytes of 64-bit floats.
pub fn of_f64s(values: impl IntoIterator<Item = f64>) -> Vec<u8> {
    values.into_iter().flat_map(f64::to_le_bytes).collect()
}

/// The 64-bit floats of bytes.
pub fn to_f64s(bytes: &[u8]) -> Vec<f64> {
    each(bytes, f64::from_le_bytes)
}

/// The bytes of an unsigned 64-bit number.
pub(crate) fn of_u64(value: u64) -> [u8; 8] {
    value.to_le_bytes()
}

/// A number that takes `SIZE` bytes in a file.
pub(crate) trait Number<const SIZE: usize> {
    /// The number of these bytes.
    fn of_bytes(bytes: [u8; SIZE]) -> Self;
}

macro_rules! numbers {
    ($($number:ty),+) => { $(
        impl Number<{ size_of::<$number>() }> for $number {
            fn of_bytes(bytes: [u8; size_of::<$number>()]) -> Self {
                Self::from_le_bytes(bytes)
            }
        }
    )+ };
}

numbers!(u8, i8, u16, i16, u32, i32, u64, i64, f32, f64);

/// Reads one number from each `SIZE` bytes.
fn each<const SIZE: usize, Value>(bytes: &[u8], read: impl Fn([u8; SIZE]) -> Value) -> Vec<Value> {
    let (chunks, _) = bytes.as_chunks::<SIZE>();
    chunks.iter().map(|chunk| read(*chunk)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_back_and_lie_little_end_first() {
        assert_eq!(of_u32s([0x0102_0304]), [4, 3, 2, 1]);
        assert_eq!(to_u32s(&of_u32s([7, u32::MAX])), [7, u32::MAX]);
        assert_eq!(to_i32s(&of_i32s([-100, 3])), [-100, 3]);
        assert_eq!(to_f64s(&of_f64s([0.1, -3.0])), [0.1, -3.0]);
        assert_eq!(u64::of_bytes(of_u64(1 << 40)), 1 << 40);
        assert_eq!(i16::of_bytes([0xFE, 0xFF]), -2);
        for float in [FloatType::F16, FloatType::Bf16, FloatType::F32] {
            let values = [1.0, -0.5, 0.0, 240.0];
            assert_eq!(float.encode(&values).len(), 4 * float.size());
            assert_eq!(float.decode(&float.encode(&values)), values, "{}", float.name());
        }
        assert_eq!(FloatType::F16.encode(&[1.0]), [0, 0x3C]);
        assert_eq!(FloatType::Bf16.encode(&[1.0]), [0x80, 0x3F]);
    }
}
