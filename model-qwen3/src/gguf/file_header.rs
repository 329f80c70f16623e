//! The beginning of a GGUF file, up to the values of its first tensor.

use crate::bytes::{self, FloatType};

/// Tensors begin at multiples of so many bytes.
pub(super) const ALIGNMENT: u64 = 32;

/// The version of the format.
const VERSION: u32 = 3;

/// The value of a key.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum MetadataValue {
    /// An unsigned number.
    U32(u32),
    /// A float.
    F32(f32),
    /// Whether something holds.
    Bool(bool),
    /// A text.
    Text(String),
    /// Several texts.
    Texts(Vec<String>),
    /// Several signed numbers.
    I32s(Vec<i32>),
    /// Several times whether something holds.
    Bools(Vec<bool>),
}

/// GGUF's numbers for the types of values.
const U32: u32 = 4;
const I32: u32 = 5;
const F32: u32 = 6;
const BOOL: u32 = 7;
pub(super) const TEXT: u32 = 8;
pub(super) const ARRAY: u32 = 9;

/// Keys and tensors of a file.
pub(super) struct Header {
    keys: (u64, Vec<u8>),
    tensors: (u64, Vec<u8>),
    /// Where the values of the next tensor begin, counted from those of the first.
    offset: u64,
}

impl Header {
    pub(super) fn new() -> Self {
        Self { keys: (0, vec![]), tensors: (0, vec![]), offset: 0 }
    }

    pub(super) fn key(&mut self, name: &str, value: &MetadataValue) {
        let (count, out) = &mut self.keys;
        *count += 1;
        text(out, name);
        match value {
            MetadataValue::U32(x) => tagged(out, U32, &bytes::of_u32s([*x])),
            MetadataValue::F32(x) => tagged(out, F32, &FloatType::F32.encode(&[*x])),
            MetadataValue::Bool(x) => tagged(out, BOOL, &[u8::from(*x)]),
            MetadataValue::Text(x) => {
                tagged(out, TEXT, &[]);
                text(out, x);
            }
            MetadataValue::Texts(all) => {
                array(out, TEXT, all.len());
                all.iter().for_each(|x| text(out, x));
            }
            MetadataValue::I32s(all) => {
                array(out, I32, all.len());
                out.extend(bytes::of_i32s(all.iter().copied()));
            }
            MetadataValue::Bools(all) => {
                array(out, BOOL, all.len());
                out.extend(all.iter().map(|x| u8::from(*x)));
            }
        }
    }

    /// A tensor of a row-major shape, of ggml's type `kind`, whose values take `bytes`.
    pub(super) fn tensor(&mut self, name: &str, shape: &[usize], kind: u32, bytes: u64) {
        let (count, out) = &mut self.tensors;
        *count += 1;
        text(out, name);
        out.extend(bytes::of_u32s([shape.len() as u32]));
        // The dimension in which neighbors lie side by side comes first.
        shape.iter().rev().for_each(|size| out.extend(bytes::of_u64(*size as u64)));
        out.extend(bytes::of_u32s([kind]));
        out.extend(bytes::of_u64(self.offset));
        self.offset += bytes.next_multiple_of(ALIGNMENT);
    }

    pub(super) fn into_bytes(self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(bytes::of_u32s([VERSION]));
        out.extend(bytes::of_u64(self.tensors.0));
        out.extend(bytes::of_u64(self.keys.0));
        out.extend(self.keys.1);
        out.extend(self.tensors.1);
        out.resize(out.len().next_multiple_of(ALIGNMENT as usize), 0);
        out
    }
}

fn tagged(out: &mut Vec<u8>, kind: u32, value: &[u8]) {
    out.extend(bytes::of_u32s([kind]));
    out.extend(value);
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend(bytes::of_u64(text.len() as u64));
    out.extend(text.as_bytes());
}

fn array(out: &mut Vec<u8>, kind: u32, len: usize) {
    tagged(out, ARRAY, &bytes::of_u32s([kind]));
    out.extend(bytes::of_u64(len as u64));
}
