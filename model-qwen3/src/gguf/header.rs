//! The beginning of a GGUF file, up to the values of its first tensor.

/// Tensors begin at multiples of so many bytes.
pub(super) const ALIGNMENT: u64 = 32;

/// The value of a key.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value {
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
const TEXT: u32 = 8;
const ARRAY: u32 = 9;

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

    pub(super) fn key(&mut self, name: &str, value: &Value) {
        let (count, out) = &mut self.keys;
        *count += 1;
        text(out, name);
        match value {
            Value::U32(x) => tagged(out, U32, &x.to_le_bytes()),
            Value::F32(x) => tagged(out, F32, &x.to_le_bytes()),
            Value::Bool(x) => tagged(out, BOOL, &[u8::from(*x)]),
            Value::Text(x) => {
                tagged(out, TEXT, &[]);
                text(out, x);
            }
            Value::Texts(all) => {
                array(out, TEXT, all.len());
                all.iter().for_each(|x| text(out, x));
            }
            Value::I32s(all) => {
                array(out, I32, all.len());
                all.iter().for_each(|x| out.extend(x.to_le_bytes()));
            }
            Value::Bools(all) => {
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
        out.extend((shape.len() as u32).to_le_bytes());
        // The dimension in which neighbors lie side by side comes first.
        shape.iter().rev().for_each(|size| out.extend((*size as u64).to_le_bytes()));
        out.extend(kind.to_le_bytes());
        out.extend(self.offset.to_le_bytes());
        self.offset += bytes.next_multiple_of(ALIGNMENT);
    }

    pub(super) fn into_bytes(self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend(self.tensors.0.to_le_bytes());
        out.extend(self.keys.0.to_le_bytes());
        out.extend(self.keys.1);
        out.extend(self.tensors.1);
        out.resize(out.len().next_multiple_of(ALIGNMENT as usize), 0);
        out
    }
}

fn tagged(out: &mut Vec<u8>, kind: u32, bytes: &[u8]) {
    out.extend(kind.to_le_bytes());
    out.extend(bytes);
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn array(out: &mut Vec<u8>, kind: u32, len: usize) {
    tagged(out, ARRAY, &kind.to_le_bytes());
    out.extend((len as u64).to_le_bytes());
}
