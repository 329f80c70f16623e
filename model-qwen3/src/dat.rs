//! The `.dat` container of TorchSharp's exportsd, byte for byte:
//! ```text
//! file    = LEB128(entries) entry*
//! entry   = LEB128(key bytes) key LEB128(type id) LEB128(rank) LEB128(dim)* payload
//! payload = product(dims) * element size bytes, row-major, little-endian, no padding
//! ```
//! The format has no magic number, no checksum and no index: a reader walks the entries and seeks over payloads.
//! Opening a file reads its headers only, allocates no more than they hold, and checks every declared size against the
//! bytes that remain. Type ids are those of ATen's scalar types, with 100 for FP4 and 101 for FP8.

use crate::{
    ModelError,
    bytes::FloatType,
    file::{self, read_at},
};
use std::{
    fs::File,
    io::{BufReader, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

/// Longest key that is read. The longest key of Qwen3 has 54 bytes; 4 KiB leaves room and bounds memory.
const LONGEST_KEY: u64 = 4096;
/// Most entries that are read. Qwen3-32B in NVFP4 has about 1,800; 65,536 leaves room and bounds memory.
const MOST_ENTRIES: u64 = 65_536;
/// Highest rank that is read. The tensors of Qwen3 have rank 2 at most.
const HIGHEST_RANK: u64 = 8;

/// An element type of the container.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum ElementType {
    U8,
    I8,
    I16,
    I32,
    I64,
    F16,
    F32,
    F64,
    Bool,
    Bf16,
    /// float4_e2m1fn_x2. One element is a byte with two codes.
    F4x2,
    /// float8_e4m3fn.
    F8E4m3,
}

/// Each type with its id, its size in bytes and its name.
const TYPES: [(ElementType, u64, usize, &str); 12] = [
    (ElementType::U8, 0, 1, "u8"),
    (ElementType::I8, 1, 1, "i8"),
    (ElementType::I16, 2, 2, "i16"),
    (ElementType::I32, 3, 4, "i32"),
    (ElementType::I64, 4, 8, "i64"),
    (ElementType::F16, 5, 2, "f16"),
    (ElementType::F32, 6, 4, "f32"),
    (ElementType::F64, 7, 8, "f64"),
    (ElementType::Bool, 11, 1, "bool"),
    (ElementType::Bf16, 15, 2, "bf16"),
    (ElementType::F4x2, 100, 1, "f4e2m1x2"),
    (ElementType::F8E4m3, 101, 1, "f8e4m3"),
];

impl ElementType {
    /// The type with this id, if the format knows it.
    fn from_id(id: u64) -> Option<Self> {
        TYPES.iter().find(|t| t.1 == id).map(|t| t.0)
    }

    fn row(self) -> &'static (Self, u64, usize, &'static str) {
        TYPES.iter().find(|t| t.0 == self).expect("every type has a row")
    }

    /// The type's id in files.
    pub fn id(self) -> u64 {
        self.row().1
    }

    /// Bytes in an element.
    pub fn size(self) -> usize {
        self.row().2
    }

    /// The type's name in listings.
    pub fn name(self) -> &'static str {
        self.row().3
    }

    /// The type of dense weights that this is, if it is one.
    pub(crate) fn float(self) -> Option<FloatType> {
        match self {
            Self::F16 => Some(FloatType::F16),
            Self::Bf16 => Some(FloatType::Bf16),
            Self::F32 => Some(FloatType::F32),
            _ => None,
        }
    }
}

impl From<FloatType> for ElementType {
    fn from(float: FloatType) -> Self {
        match float {
            FloatType::F16 => Self::F16,
            FloatType::Bf16 => Self::Bf16,
            FloatType::F32 => Self::F32,
        }
    }
}

/// One entry of a `.dat` file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DatEntry {
    /// Key of the entry.
    pub key: String,
    /// Type of its elements.
    pub element: ElementType,
    /// Shape of its tensor.
    pub dims: Vec<usize>,
    /// Position of its payload in the file.
    pub offset: u64,
    /// Size of its payload in bytes.
    pub bytes: u64,
}

/// An open `.dat` file. Its headers are in memory, its payloads on disk.
#[derive(Debug)]
pub struct DatFile {
    path: PathBuf,
    file: File,
    entries: Vec<DatEntry>,
}

impl DatFile {
    /// Opens a file and reads its headers.
    ///
    /// # Errors
    /// If the file cannot be read or a header is broken. The message names the entry and the offset.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let (file, size) = file::open(path, "give a .dat file")?;
        let entries = Walker { path, input: BufReader::new(&file), at: 0, size }.entries()?;
        Ok(Self { path: path.to_owned(), file, entries })
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file's entries, in file order.
    pub fn entries(&self) -> &[DatEntry] {
        &self.entries
    }

    /// Fills `buffer` from byte `start` of an entry's payload.
    ///
    /// # Errors
    /// If the system fails.
    pub(crate) fn read(&self, entry: &DatEntry, start: u64, buffer: &mut [u8]) -> Result<(), ModelError> {
        debug_assert!(start + buffer.len() as u64 <= entry.bytes);
        read_at(&self.file, &self.path, entry.offset + start, buffer)
    }
}

struct Walker<'a, Input> {
    path: &'a Path,
    input: Input,
    at: u64,
    size: u64,
}

impl<Input: Read + Seek> Walker<'_, Input> {
    fn entries(mut self) -> Result<Vec<DatEntry>, ModelError> {
        let count = self.leb128("header", "entry count")?;
        if count > MOST_ENTRIES {
            return Err(self.bad("header", format!("{count} entries declared; at most {MOST_ENTRIES} are read")));
        }
        let mut entries: Vec<DatEntry> = Vec::new();
        let mut keys = std::collections::HashSet::new();
        for i in 0..count {
            let entry = self.entry(i)?;
            if !keys.insert(entry.key.clone()) {
                return Err(self.bad(&name(i, &entry.key), "an earlier entry has the same key"));
            }
            entries.push(entry);
        }
        if self.at != self.size {
            let reason = format!("the file goes on after the last of {count} entries, to byte {}", self.size);
            return Err(self.bad("end", reason));
        }
        Ok(entries)
    }

    fn entry(&mut self, i: u64) -> Result<DatEntry, ModelError> {
        let at = format!("entry {i}");
        let length = self.leb128(&at, "key length")?;
        if length == 0 || length > LONGEST_KEY.min(self.size - self.at) {
            let left = self.size - self.at;
            let reason = format!("key of {length} bytes; the file has {left} left, and keys have 1 to {LONGEST_KEY}");
            return Err(self.bad(&at, reason));
        }
        let mut key = vec![0; length as usize];
        self.bytes(&mut key, &at, "key")?;
        let key = String::from_utf8(key).map_err(|_| self.bad(&at, "the key is not UTF-8"))?;
        if key.chars().any(char::is_control) {
            return Err(self.bad(&at, format!("the key {key:?} holds control characters")));
        }
        let at = name(i, &key);
        let id = self.leb128(&at, "type id")?;
        let element = ElementType::from_id(id).ok_or_else(|| self.bad(&at, format!("unknown type id {id}")))?;
        let rank = self.leb128(&at, "rank")?;
        if rank > HIGHEST_RANK {
            return Err(self.bad(&at, format!("rank {rank}; at most {HIGHEST_RANK} is read")));
        }
        let mut dims = Vec::with_capacity(rank as usize);
        for _ in 0..rank {
            dims.push(self.leb128(&at, "dimension")?);
        }
        let shape = dims.iter().map(u64::to_string).collect::<Vec<_>>().join("x");
        let left = self.size - self.at;
        let bytes =
            dims.iter().try_fold(element.size() as u64, |a, &d| a.checked_mul(d)).filter(|&b| b <= left).ok_or_else(
                || self.bad(&at, format!("{shape} of {} declared; {left} bytes left in file", element.name())),
            )?;
        if bytes == 0 {
            return Err(self.bad(&at, format!("shape {shape} holds nothing; every tensor has values")));
        }
        let offset = self.at;
        self.input.seek(SeekFrom::Start(offset + bytes)).map_err(ModelError::io(self.path, ""))?;
        self.at += bytes;
        let dims = dims.into_iter().map(|d| d as usize).collect();
        Ok(DatEntry { key, element, dims, offset, bytes })
    }

    /// Reads an unsigned LEB128 number, which must have at most 64 bits and its shortest form.
    fn leb128(&mut self, at: &str, what: &str) -> Result<u64, ModelError> {
        let mut value = 0u64;
        for shift in (0..70).step_by(7) {
            let mut byte = [0];
            self.bytes(&mut byte, at, what)?;
            let group = u64::from(byte[0] & 0x7F);
            if shift == 63 && group > 1 {
                break;
            }
            value |= group << shift;
            if byte[0] & 0x80 == 0 {
                if group == 0 && shift > 0 {
                    return Err(self.bad(at, format!("{what}: the LEB128 number has a zero last byte")));
                }
                return Ok(value);
            }
        }
        Err(self.bad(at, format!("{what}: the LEB128 number has more than 64 bits")))
    }

    fn bytes(&mut self, buffer: &mut [u8], at: &str, what: &str) -> Result<(), ModelError> {
        if buffer.len() as u64 > self.size - self.at {
            return Err(self.bad(at, format!("the file ends within the {what}")));
        }
        self.input.read_exact(buffer).map_err(ModelError::io(self.path, ""))?;
        self.at += buffer.len() as u64;
        Ok(())
    }

    fn bad(&self, at: &str, reason: impl ToString) -> ModelError {
        ModelError::Dat { path: self.path.to_owned(), at: at.to_owned(), offset: self.at, reason: reason.to_string() }
    }
}

fn name(i: u64, key: &str) -> String {
    format!("entry {i} {key:?}")
}

/// Writes a `.dat` file from front to back, without keeping payloads.
#[derive(Debug)]
pub struct DatWriter<Out> {
    out: Out,
    entries_left: usize,
    bytes_left: u64,
}

impl<Out: Write> DatWriter<Out> {
    /// Starts a file with this number of entries.
    ///
    /// # Errors
    /// If the system fails.
    pub fn new(mut out: Out, entries: usize) -> std::io::Result<Self> {
        write_leb128(&mut out, entries as u64)?;
        Ok(Self { out, entries_left: entries, bytes_left: 0 })
    }

    /// Starts an entry. Calls of [`Self::payload`] write its payload.
    ///
    /// # Errors
    /// If the system fails.
    ///
    /// # Panics
    /// If the payload of the entry before is incomplete, or there are more entries than announced.
    pub fn entry(&mut self, key: &str, element: ElementType, dims: &[usize]) -> std::io::Result<()> {
        assert_eq!(self.bytes_left, 0, "the payload of the entry before {key} is incomplete");
        self.entries_left = self.entries_left.checked_sub(1).expect("no more entries than announced");
        self.bytes_left = (dims.iter().product::<usize>() * element.size()) as u64;
        write_leb128(&mut self.out, key.len() as u64)?;
        self.out.write_all(key.as_bytes())?;
        write_leb128(&mut self.out, element.id())?;
        write_leb128(&mut self.out, dims.len() as u64)?;
        dims.iter().try_for_each(|&d| write_leb128(&mut self.out, d as u64))
    }

    /// Writes the next part of the entry's payload.
    ///
    /// # Errors
    /// If the system fails.
    ///
    /// # Panics
    /// If the payload is longer than the entry's shape says.
    pub fn payload(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.bytes_left = self.bytes_left.checked_sub(bytes.len() as u64).expect("the payload fits its shape");
        self.out.write_all(bytes)
    }

    /// Ends the file and returns the output.
    ///
    /// # Panics
    /// If entries or payload bytes are missing.
    pub fn finish(self) -> Out {
        assert_eq!((self.entries_left, self.bytes_left), (0, 0), "the file is complete");
        self.out
    }
}

fn write_leb128(out: &mut impl Write, mut value: u64) -> std::io::Result<()> {
    loop {
        let byte = (value & 0x7F) as u8;
        value >>= 7;
        if value == 0 {
            return out.write_all(&[byte]);
        }
        out.write_all(&[byte | 0x80])?;
    }
}
