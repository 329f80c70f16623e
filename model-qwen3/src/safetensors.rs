//! Hugging Face safetensors: one file, or the shards that `model.safetensors.index.json` lists. The `safetensors` crate
//! parses and validates headers. Payloads are read by position and never mapped.

use crate::{
    ModelError,
    bytes::{FloatType, Number, of_u64},
    file::{self, read_at, read_text},
    json,
};
use ::safetensors::{Dtype, tensor::Metadata};
use std::{
    collections::BTreeMap,
    fs::File,
    io::Read,
    path::{Path, PathBuf},
};

/// The weights of a folder that has one safetensors file.
pub const WHOLE: &str = "model.safetensors";
/// The list of a folder's shards.
pub const INDEX: &str = "model.safetensors.index.json";
/// Largest header that is read. Qwen3-32B needs 80 KiB; 16 MiB leaves room and bounds memory.
const LARGEST_HEADER: u64 = 16 << 20;

/// The safetensors type of floats.
pub fn dtype_of(float: FloatType) -> Dtype {
    match float {
        FloatType::F16 => Dtype::F16,
        FloatType::Bf16 => Dtype::BF16,
        FloatType::F32 => Dtype::F32,
    }
}

/// The type of dense weights that a safetensors type is, if it is one.
pub(crate) fn float_of(dtype: Dtype) -> Option<FloatType> {
    match dtype {
        Dtype::F16 => Some(FloatType::F16),
        Dtype::BF16 => Some(FloatType::Bf16),
        Dtype::F32 => Some(FloatType::F32),
        _ => None,
    }
}

/// One tensor of a safetensors file.
#[derive(Debug, Clone)]
pub struct SafeEntry {
    /// Name of the tensor.
    pub name: String,
    /// Type of its values.
    pub dtype: Dtype,
    /// Shape of the tensor.
    pub shape: Vec<usize>,
    /// Position of its payload in the file.
    pub offset: u64,
    /// Size of its payload in bytes.
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
    /// If the file cannot be read or its header is broken.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let broken = |reason: String| {
            ModelError::weights(path, format!("{reason}; the file is damaged, cut off or not a safetensors file"))
        };
        let (mut file, size) = file::open(path, "give a .safetensors file")?;
        let mut length = [0; 8];
        if size < 8 {
            return Err(broken(format!("the file has {size} bytes, fewer than a header")));
        }
        file.read_exact(&mut length).map_err(ModelError::io(path, ""))?;
        let header = u64::of_bytes(length);
        if header > LARGEST_HEADER.min(size - 8) {
            let left = size - 8;
            let reason = format!(
                "header of {header} bytes declared; the file has {left}, and at most {LARGEST_HEADER} are read"
            );
            return Err(broken(reason));
        }
        let mut buffer = vec![0; header as usize];
        file.read_exact(&mut buffer).map_err(ModelError::io(path, ""))?;
        let text = std::str::from_utf8(&buffer).map_err(|e| broken(format!("header: {e}")))?;
        // Parsing checks that offsets follow each other without holes and that they fit the shapes.
        let metadata: Metadata =
            json::parse(text).and_then(serde_json::from_value).map_err(|e| broken(format!("header: {e}")))?;
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
        // No bytes stand for the other dimensions of a shape with a 0, so that they may be any number.
        let others = |e: &SafeEntry| e.shape.iter().filter(|d| **d > 0).fold(1u64, |n, d| n.saturating_mul(*d as u64));
        if let Some(entry) = entries.iter().find(|e| e.shape.contains(&0) && others(e) > size) {
            let SafeEntry { name, shape, .. } = entry;
            let reason =
                format!("{name:?} has the shape {shape:?}, which has more rows or columns than the file bytes");
            return Err(broken(reason));
        }
        entries.sort_by_key(|e| e.offset);
        let end = entries.last().map_or(start, |e| e.offset + e.bytes);
        if end != size {
            return Err(broken(format!("the tensors end at byte {end}, but the file at {size}")));
        }
        Ok(Self { path: path.to_owned(), file, entries })
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file's tensors, in file order.
    pub fn entries(&self) -> &[SafeEntry] {
        &self.entries
    }

    /// The tensor with this name.
    pub fn entry(&self, name: &str) -> Option<&SafeEntry> {
        self.entries.iter().find(|e| e.name == name)
    }

    /// Fills `buffer` from byte `start` of a tensor's payload.
    ///
    /// # Errors
    /// If the system fails.
    pub fn read(&self, entry: &SafeEntry, start: u64, buffer: &mut [u8]) -> Result<(), ModelError> {
        debug_assert!(start + buffer.len() as u64 <= entry.bytes);
        read_at(&self.file, &self.path, entry.offset + start, buffer)
    }

    /// Reads the whole payload of a tensor.
    ///
    /// # Errors
    /// If the system fails.
    pub fn read_all(&self, entry: &SafeEntry) -> Result<Vec<u8>, ModelError> {
        let mut buffer = file::zeros(&self.path, entry.bytes)?;
        self.read(entry, 0, &mut buffer)?;
        Ok(buffer)
    }
}

/// The beginning of a safetensors file, up to its payloads: the length of the header, and the header in JSON. The
/// payloads of the tensors must follow in the order of `layout`.
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
    let mut out = of_u64(text.len() as u64).to_vec();
    out.extend(text.as_bytes());
    out
}

/// Whether a folder holds a model's safetensors.
pub(crate) fn in_folder(folder: &Path) -> bool {
    folder.join(WHOLE).exists() || folder.join(INDEX).exists()
}

/// Opens the safetensors of a folder: the one file, or the shards of its index.
///
/// # Errors
/// If a shard is missing, its name leaves the folder, or index and shards disagree.
pub(crate) fn open_folder(folder: &Path) -> Result<Vec<SafeFile>, ModelError> {
    let index = folder.join(INDEX);
    if !index.exists() {
        return Ok(vec![SafeFile::open(&folder.join(WHOLE))?]);
    }
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let text = read_text(&index, LARGEST_HEADER, "")?;
    let Index { weight_map } =
        json::parse(&text).and_then(serde_json::from_value).map_err(|e| ModelError::parse(&index, e))?;
    let mut names: Vec<&String> = weight_map.values().collect();
    names.sort();
    names.dedup();
    let mut files = Vec::new();
    let mut seen = 0;
    for name in names {
        if Path::new(name).file_name().is_none_or(|n| n != name.as_str()) {
            return Err(ModelError::parse(&index, format!("the shard {name:?} is not a plain file name")));
        }
        let file = SafeFile::open(&folder.join(name)).map_err(|error| match error {
            ModelError::Missing { path, .. } => {
                let hint =
                    "the model's index names it, so the model is not complete; download the file, too".to_owned();
                ModelError::Missing { path, hint }
            }
            other => other,
        })?;
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
        let reason = format!("the index lists {} tensors, the shards hold {seen}", weight_map.len());
        return Err(ModelError::parse(&index, reason));
    }
    Ok(files)
}
