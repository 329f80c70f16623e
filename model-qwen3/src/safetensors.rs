//! Hugging Face safetensors: one file, or shards listed in `model.safetensors.index.json`. Headers are
//! parsed and validated by the `safetensors` crate; payloads are read by position, never mapped.

use crate::{ModelError, error::read_text};
use ::safetensors::{Dtype, tensor::Metadata};
use std::{
    collections::BTreeMap,
    fs::File,
    io::{Read, Seek, SeekFrom},
    path::{Path, PathBuf},
};

/// Largest header. Qwen3-32B needs 80 KiB; 16 MiB leaves room and bounds memory.
const LARGEST_HEADER: u64 = 16 << 20;

/// One tensor of a safetensors file.
#[derive(Debug, Clone)]
pub struct SafeEntry {
    /// Its name.
    pub name: String,
    /// Its type.
    pub dtype: Dtype,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Where its payload starts in the file.
    pub offset: u64,
    /// Bytes of its payload.
    pub bytes: u64,
}

/// An open safetensors file.
#[derive(Debug)]
pub struct SafeFile {
    path: PathBuf,
    file: File,
    entries: Vec<SafeEntry>,
}

impl SafeFile {
    /// Opens a file and checks its header against its size.
    ///
    /// # Errors
    /// If it cannot be read or the header is broken.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let mut file = File::open(path).map_err(ModelError::io(path, "a safetensors file is needed"))?;
        let size = file.metadata().map_err(ModelError::io(path, ""))?.len();
        let mut length = [0; 8];
        if size < 8 {
            return Err(ModelError::parse(path, format!("{size} bytes: shorter than a header")));
        }
        file.read_exact(&mut length).map_err(ModelError::io(path, ""))?;
        let header = u64::from_le_bytes(length);
        if header > LARGEST_HEADER.min(size - 8) {
            let reason = format!("header of {header} bytes declared, {} left, at most {LARGEST_HEADER} read", size - 8);
            return Err(ModelError::parse(path, reason));
        }
        let mut buffer = vec![0; header as usize];
        file.read_exact(&mut buffer).map_err(ModelError::io(path, ""))?;
        // Checks that offsets follow each other without holes and fit shapes.
        let metadata: Metadata = serde_json::from_slice(&buffer).map_err(|e| ModelError::parse(path, e))?;
        let start = 8 + header;
        let mut entries: Vec<SafeEntry> = metadata
            .tensors()
            .into_iter()
            .map(|(name, info)| SafeEntry {
                name,
                dtype: info.dtype,
                shape: info.shape.clone(),
                offset: start + info.data_offsets.0 as u64,
                bytes: (info.data_offsets.1 - info.data_offsets.0) as u64,
            })
            .collect();
        entries.sort_by_key(|e| e.offset);
        let end = entries.last().map_or(start, |e| e.offset + e.bytes);
        if end != size {
            return Err(ModelError::parse(path, format!("tensors end at byte {end}, the file at {size}")));
        }
        Ok(Self { path: path.to_owned(), file, entries })
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its tensors, by position.
    pub fn entries(&self) -> &[SafeEntry] {
        &self.entries
    }

    /// Reads `buffer.len()` bytes of an entry's payload, from byte `start` of it on.
    ///
    /// # Errors
    /// If the system fails.
    pub fn read(&self, entry: &SafeEntry, start: u64, buffer: &mut [u8]) -> Result<(), ModelError> {
        debug_assert!(start + buffer.len() as u64 <= entry.bytes);
        let mut file = &self.file;
        file.seek(SeekFrom::Start(entry.offset + start))
            .and_then(|_| file.read_exact(buffer))
            .map_err(ModelError::io(&self.path, ""))
    }
}

/// Length and JSON header of a file whose tensors follow in this order.
pub fn header(layout: &[(String, Dtype, Vec<usize>)]) -> Vec<u8> {
    let mut map = serde_json::Map::new();
    map.insert("__metadata__".into(), serde_json::json!({"format": "pt"}));
    let mut end = 0;
    for (name, dtype, shape) in layout {
        let bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
        let offsets = [end, end + bytes];
        map.insert(name.clone(), serde_json::json!({"dtype": dtype, "shape": shape, "data_offsets": offsets}));
        end += bytes;
    }
    let mut text = serde_json::Value::Object(map).to_string();
    // Payloads start at a multiple of 8.
    text.extend(std::iter::repeat_n(' ', text.len().next_multiple_of(8) - text.len()));
    let mut out = (text.len() as u64).to_le_bytes().to_vec();
    out.extend(text.as_bytes());
    out
}

/// The files of a folder: `model.safetensors`, or the shards of its index.
///
/// # Errors
/// If a shard is missing, its name leaves the folder, or index and shards disagree.
pub fn open_folder(folder: &Path) -> Result<Vec<SafeFile>, ModelError> {
    let index = folder.join("model.safetensors.index.json");
    if !index.exists() {
        return Ok(vec![SafeFile::open(&folder.join("model.safetensors"))?]);
    }
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let text = read_text(&index, LARGEST_HEADER, "")?;
    let Index { weight_map } = serde_json::from_str(&text).map_err(|e| ModelError::parse(&index, e))?;
    let mut names: Vec<&String> = weight_map.values().collect();
    names.sort();
    names.dedup();
    let mut files = Vec::new();
    let mut seen = 0;
    for name in names {
        if Path::new(name).file_name().is_none_or(|n| n != name.as_str()) {
            return Err(ModelError::parse(&index, format!("shard {name:?} is not a plain file name")));
        }
        let file = SafeFile::open(&folder.join(name))?;
        for entry in file.entries() {
            if weight_map.get(&entry.name) != Some(name) {
                let reason = format!("{name} holds {:?}, which the index does not place there", entry.name);
                return Err(ModelError::parse(&index, reason));
            }
            seen += 1;
        }
        files.push(file);
    }
    if seen != weight_map.len() {
        let reason = format!("{} tensors listed, the shards hold {seen}", weight_map.len());
        return Err(ModelError::parse(&index, reason));
    }
    Ok(files)
}
