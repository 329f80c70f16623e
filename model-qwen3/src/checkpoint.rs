//! Tensors by name, wherever they are stored: `.dat` or safetensors, dense or NVFP4. A tensor is read
//! whole or in row ranges, so that no caller needs more than one in memory.

use crate::{
    ModelError,
    dat::{DatEntry, DatFile, ElementType},
    safetensors::{SafeEntry, SafeFile, open_folder},
};
use ::safetensors::Dtype;
use backend_nvfp4::{Scaling, reference::Packed};
use half::{bf16, f16};
use std::{
    collections::HashMap,
    ops::Range,
    path::{Path, PathBuf},
};

/// A dense float type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum FloatType {
    F16,
    Bf16,
    F32,
}

impl FloatType {
    /// Bytes a value.
    pub fn size(self) -> usize {
        if self == Self::F32 { 4 } else { 2 }
    }

    /// Name on the command line and in listings.
    pub fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
        }
    }

    /// The `.dat` type.
    pub fn element(self) -> ElementType {
        match self {
            Self::F16 => ElementType::F16,
            Self::Bf16 => ElementType::Bf16,
            Self::F32 => ElementType::F32,
        }
    }

    /// Values to little-endian bytes, rounded to nearest even.
    pub fn encode(self, values: &[f32]) -> Vec<u8> {
        match self {
            Self::F16 => values.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect(),
            Self::Bf16 => values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect(),
            Self::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        }
    }

    /// Little-endian bytes to values.
    pub fn decode(self, bytes: &[u8]) -> Vec<f32> {
        let pair = |b: &[u8]| [b[0], b[1]];
        match self {
            Self::F16 => bytes.chunks_exact(2).map(|b| f16::from_le_bytes(pair(b)).to_f32()).collect(),
            Self::Bf16 => bytes.chunks_exact(2).map(|b| bf16::from_le_bytes(pair(b)).to_f32()).collect(),
            Self::F32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        }
    }
}

/// How a tensor is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stored {
    /// Floats.
    Dense {
        /// Their type.
        float: FloatType,
        /// Their shape.
        shape: Vec<usize>,
    },
    /// NVFP4.
    Packed {
        /// Rows.
        rows: usize,
        /// Columns.
        cols: usize,
        /// Whether there is a tensor scale.
        scaling: Scaling,
    },
}

impl Stored {
    /// The tensor's logical shape.
    pub fn shape(&self) -> Vec<usize> {
        match self {
            Self::Dense { shape, .. } => shape.clone(),
            Self::Packed { rows, cols, .. } => vec![*rows, *cols],
        }
    }
}

/// Named tensors that can be read, one at a time.
pub trait Tensors {
    /// The file or folder, for messages.
    fn path(&self) -> &Path;

    /// Names, in file order.
    fn names(&self) -> Vec<String>;

    /// How a tensor is stored, if it is there.
    fn stored(&self, name: &str) -> Option<Stored>;

    /// Whether a head of this name is quantised in training: where its file holds it in NVFP4.
    fn trains_quantised(&self, name: &str) -> bool {
        matches!(self.stored(name), Some(Stored::Packed { .. }))
    }

    /// Whether training keeps this tensor's codes as they are: a run froze them.
    fn keeps_codes(&self, _name: &str) -> bool {
        false
    }

    /// Rows `rows` of a dense tensor (a vector has one row), as f32.
    ///
    /// # Errors
    /// If the tensor is missing or NVFP4, the system fails, or a value is not finite.
    fn read_rows(&self, name: &str, rows: Range<usize>) -> Result<Vec<f32>, ModelError>;

    /// An NVFP4 tensor's codes and scales.
    ///
    /// # Errors
    /// If the tensor is missing or dense, or the system fails.
    fn read_packed(&self, name: &str) -> Result<Packed, ModelError>;

    /// A dense tensor whole, as f32.
    ///
    /// # Errors
    /// As [`Self::read_rows`].
    fn read_dense(&self, name: &str) -> Result<Vec<f32>, ModelError> {
        let missing = || ModelError::weights(self.path(), format!("no tensor {name:?}"));
        let rows = row_count(&self.stored(name).ok_or_else(missing)?.shape());
        self.read_rows(name, 0..rows)
    }
}

#[derive(Debug, Clone)]
enum Part {
    Dat(DatEntry),
    Safe(usize, SafeEntry),
}

#[derive(Debug)]
struct Slot {
    name: String,
    stored: Stored,
    /// The floats; or codes, scales and perhaps the tensor scale.
    parts: Vec<Part>,
}

/// The tensors of a model, by checkpoint name (`model.layers.0.mlp.up_proj.weight`, …).
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    dat: Option<DatFile>,
    shards: Vec<SafeFile>,
    slots: Vec<Slot>,
    by_name: HashMap<String, usize>,
}

impl Checkpoint {
    /// Opens a `.dat` file, a `.safetensors` file, or a folder with either.
    ///
    /// # Errors
    /// If there is none or it is broken.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let file = weights_file(path)?;
        if file.extension().is_some_and(|e| e == "dat") {
            Self::from_dat(DatFile::open(&file)?)
        } else if file.is_dir() {
            Self::from_safetensors(path, open_folder(&file)?)
        } else {
            Self::from_safetensors(path, vec![SafeFile::open(&file)?])
        }
    }

    /// Pairs the entries of an open `.dat` file.
    ///
    /// # Errors
    /// If a pair is incomplete or its shapes do not fit.
    pub fn from_dat(dat: DatFile) -> Result<Self, ModelError> {
        let parts = dat.entries().iter().map(|e| (e.key.clone(), Part::Dat(e.clone()))).collect();
        let path = dat.path().to_owned();
        Self { path, dat: Some(dat), shards: vec![], slots: vec![], by_name: HashMap::new() }.paired(parts)
    }

    fn from_safetensors(path: &Path, shards: Vec<SafeFile>) -> Result<Self, ModelError> {
        let mut parts: Vec<(String, Part)> = Vec::new();
        for (i, shard) in shards.iter().enumerate() {
            parts.extend(shard.entries().iter().map(|e| (e.name.clone(), Part::Safe(i, e.clone()))));
        }
        Self { path: path.to_owned(), dat: None, shards, slots: vec![], by_name: HashMap::new() }.paired(parts)
    }

    fn paired(mut self, parts: Vec<(String, Part)>) -> Result<Self, ModelError> {
        let names: HashMap<String, Part> = parts.iter().cloned().collect();
        for (key, part) in &parts {
            let (name, slot) = if let Some((base, scale_key, global_key)) = pair_of(key, part) {
                let scale = names.get(&scale_key).cloned().ok_or_else(|| {
                    ModelError::weights(&self.path, format!("{key:?} has no {scale_key:?} beside it"))
                })?;
                let mut parts = vec![part.clone(), scale];
                parts.extend(names.get(&global_key).cloned());
                (base.clone(), self.packed(base, parts)?)
            } else if let Some(codes) = codes_key_of(key, &names) {
                if !names.contains_key(&codes) {
                    let reason = format!("{key:?} has no {codes:?} beside it");
                    return Err(ModelError::weights(&self.path, reason));
                }
                continue;
            } else {
                (key.clone(), self.dense(key.clone(), part.clone())?)
            };
            if self.by_name.insert(name.clone(), self.slots.len()).is_some() {
                return Err(ModelError::weights(&self.path, format!("{name:?} is stored twice")));
            }
            self.slots.push(slot);
        }
        if self.slots.is_empty() {
            return Err(ModelError::weights(&self.path, "holds no tensors"));
        }
        Ok(self)
    }

    fn dense(&self, name: String, part: Part) -> Result<Slot, ModelError> {
        let (kind, shape) = describe(&part);
        let float = match kind {
            Kind::Float(float) => float,
            Kind::Other(kind) => {
                let reason = format!("{name:?} is {kind}: weights are f16, bf16, f32 or NVFP4");
                return Err(ModelError::weights(&self.path, reason));
            }
            Kind::Bytes | Kind::Scales => {
                return Err(ModelError::weights(&self.path, format!("{name:?} holds bytes, not floats")));
            }
        };
        Ok(Slot { name, stored: Stored::Dense { float, shape }, parts: vec![part] })
    }

    fn packed(&self, name: String, parts: Vec<Part>) -> Result<Slot, ModelError> {
        let bad = |reason: String| ModelError::weights(&self.path, format!("{name:?}: {reason}"));
        let (codes_kind, codes) = describe(&parts[0]);
        let (scale_kind, scales) = describe(&parts[1]);
        let ([rows, half], [scale_rows, blocks]) = (two(&codes), two(&scales));
        if !matches!(codes_kind, Kind::Bytes) {
            return Err(bad("codes are not bytes (type id 0 or 100)".into()));
        }
        if !matches!(scale_kind, Kind::Scales) {
            return Err(bad("scales are not E4M3 (type id 101)".into()));
        }
        let cols = half * 2;
        if codes.len() != 2
            || scales.len() != 2
            || !cols.is_multiple_of(16)
            || scale_rows != rows
            || blocks * 16 != cols
        {
            return Err(bad(format!(
                "codes {codes:?} and scales {scales:?}: [N, K/2] and [N, K/16] are needed, K a multiple of 16"
            )));
        }
        let scaling = match parts.get(2).map(describe) {
            None => Scaling::Single,
            Some((Kind::Float(FloatType::F32), shape)) if shape.iter().product::<usize>() == 1 => Scaling::Two,
            Some((_, shape)) => return Err(bad(format!("tensor scale of shape {shape:?}: one f32 is needed"))),
        };
        Ok(Slot { name, stored: Stored::Packed { rows, cols, scaling }, parts })
    }

    /// The safetensors files behind it, if it is those.
    pub fn shards(&self) -> &[SafeFile] {
        &self.shards
    }

    /// The `.dat` file behind it, if it is one.
    pub fn dat(&self) -> Option<&DatFile> {
        self.dat.as_ref()
    }

    fn slot(&self, name: &str) -> Result<&Slot, ModelError> {
        let missing = || ModelError::weights(&self.path, format!("no tensor {name:?}"));
        self.by_name.get(name).map(|&i| &self.slots[i]).ok_or_else(missing)
    }

    fn read(&self, part: &Part, start: u64, buffer: &mut [u8]) -> Result<(), ModelError> {
        match (part, &self.dat) {
            (Part::Dat(entry), Some(dat)) => dat.read(entry, start, buffer),
            (Part::Safe(i, entry), _) => self.shards[*i].read(entry, start, buffer),
            (Part::Dat(_), None) => unreachable!("parts come from the files beside them"),
        }
    }
}

impl Tensors for Checkpoint {
    fn path(&self) -> &Path {
        &self.path
    }

    fn names(&self) -> Vec<String> {
        self.slots.iter().map(|s| s.name.clone()).collect()
    }

    fn stored(&self, name: &str) -> Option<Stored> {
        self.by_name.get(name).map(|&i| self.slots[i].stored.clone())
    }

    fn read_rows(&self, name: &str, rows: Range<usize>) -> Result<Vec<f32>, ModelError> {
        let slot = self.slot(name)?;
        let Stored::Dense { float, shape } = &slot.stored else {
            return Err(ModelError::weights(&self.path, format!("{name:?} is NVFP4, floats are needed")));
        };
        let width = row_width(shape) * float.size();
        let mut bytes = vec![0; rows.len() * width];
        self.read(&slot.parts[0], (rows.start * width) as u64, &mut bytes)?;
        let values = float.decode(&bytes);
        if let Some(at) = values.iter().position(|v| !v.is_finite()) {
            let reason = format!("{name:?}: {} at value {}", values[at], rows.start * row_width(shape) + at);
            return Err(ModelError::weights(&self.path, reason));
        }
        Ok(values)
    }

    fn read_packed(&self, name: &str) -> Result<Packed, ModelError> {
        let slot = self.slot(name)?;
        let Stored::Packed { rows, cols, .. } = slot.stored else {
            return Err(ModelError::weights(&self.path, format!("{name:?} is dense, NVFP4 is needed")));
        };
        let mut codes = vec![0; rows * cols / 2];
        let mut scales = vec![0; rows * cols / 16];
        self.read(&slot.parts[0], 0, &mut codes)?;
        self.read(&slot.parts[1], 0, &mut scales)?;
        let mut global = 1.0f32.to_le_bytes();
        if let Some(part) = slot.parts.get(2) {
            self.read(part, 0, &mut global)?;
        }
        let codes = codes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        Ok(Packed { codes, scales, global: f32::from_le_bytes(global) })
    }
}

/// Values in a row: a vector is one row.
pub fn row_width(shape: &[usize]) -> usize {
    if shape.len() < 2 { shape.iter().product() } else { shape[1..].iter().product() }
}

/// Rows: a vector is one row.
pub fn row_count(shape: &[usize]) -> usize {
    if shape.len() < 2 { 1 } else { shape[0] }
}

/// The weights that a path stands for: the file itself, a folder of safetensors, its only `.dat`.
fn weights_file(path: &Path) -> Result<PathBuf, ModelError> {
    if !path.exists() {
        let hint = "give a model folder, a .dat file or a .safetensors file".to_owned();
        return Err(ModelError::Missing { path: path.to_owned(), hint });
    }
    if path.is_file() {
        return Ok(path.to_owned());
    }
    if path.join("model.safetensors").exists() || path.join("model.safetensors.index.json").exists() {
        return Ok(path.to_owned());
    }
    let mut dats: Vec<PathBuf> = std::fs::read_dir(path)
        .map_err(ModelError::io(path, ""))?
        .filter_map(|e| e.ok().map(|e| e.path()))
        .filter(|p| p.extension().is_some_and(|e| e == "dat"))
        .collect();
    dats.sort();
    match dats.len() {
        1 => Ok(dats.remove(0)),
        0 => Err(ModelError::weights(path, "holds neither model.safetensors nor a .dat file")),
        n => Err(ModelError::weights(path, format!("holds {n} .dat files: name one of them"))),
    }
}

enum Kind {
    Float(FloatType),
    Bytes,
    Scales,
    Other(String),
}

fn describe(part: &Part) -> (Kind, Vec<usize>) {
    match part {
        Part::Dat(e) => {
            let kind = match e.element {
                ElementType::F16 => Kind::Float(FloatType::F16),
                ElementType::Bf16 => Kind::Float(FloatType::Bf16),
                ElementType::F32 => Kind::Float(FloatType::F32),
                ElementType::U8 | ElementType::F4x2 => Kind::Bytes,
                ElementType::F8E4m3 => Kind::Scales,
                other => Kind::Other(other.name().to_owned()),
            };
            (kind, e.dims.clone())
        }
        Part::Safe(_, e) => {
            let kind = match e.dtype {
                Dtype::F16 => Kind::Float(FloatType::F16),
                Dtype::BF16 => Kind::Float(FloatType::Bf16),
                Dtype::F32 => Kind::Float(FloatType::F32),
                Dtype::U8 => Kind::Bytes,
                Dtype::F8_E4M3 => Kind::Scales,
                other => Kind::Other(format!("{other:?}")),
            };
            (kind, e.shape.clone())
        }
    }
}

fn two(shape: &[usize]) -> [usize; 2] {
    [shape.first().copied().unwrap_or(0), shape.get(1).copied().unwrap_or(0)]
}

/// For a key that holds codes: the tensor's name, the key of its scales and that of its tensor scale.
/// `.dat` has `X.weight.qdata|scale|scale_2` (or without `.weight`), ModelOpt's safetensors
/// `X.weight` as u8 with `X.weight_scale|weight_scale_2`.
fn pair_of(key: &str, part: &Part) -> Option<(String, String, String)> {
    if let Some(base) = key.strip_suffix(".qdata") {
        let name = base.strip_suffix(".weight").unwrap_or(base);
        return Some((format!("{name}.weight"), format!("{base}.scale"), format!("{base}.scale_2")));
    }
    match (part, describe(part).0) {
        (Part::Safe(..), Kind::Bytes) if key.ends_with(".weight") => {
            Some((key.to_owned(), format!("{key}_scale"), format!("{key}_scale_2")))
        }
        _ => None,
    }
}

/// For a key that holds a scale: the key of its codes.
fn codes_key_of(key: &str, names: &HashMap<String, Part>) -> Option<String> {
    for suffix in [".scale_2", ".scale"] {
        if let Some(base) = key.strip_suffix(suffix) {
            return Some(format!("{base}.qdata"));
        }
    }
    for suffix in ["_scale_2", "_scale"] {
        if let Some(base) = key.strip_suffix(suffix).filter(|b| b.ends_with(".weight")) {
            return Some(base.to_owned()).filter(|_| matches!(names.get(key), Some(Part::Safe(..))));
        }
    }
    None
}
