//! The tensors of a `.dat` file, a safetensors file or a folder of shards, by name. Opening reads headers, finds the
//! entries that store one NVFP4 tensor together, and checks their types and shapes.

use crate::{
    ModelError,
    bytes::{self, FloatType},
    dat::{DatEntry, DatFile, ElementType},
    names::{self, Part, Spelling},
    safetensors::{self, SafeEntry, SafeFile, open_folder},
    tensors::{Put, Stored, Tensors, row_count, row_ranges, row_width},
};
use ::safetensors::Dtype;
use backend_nvfp4::{
    GivenScale, Packed, Scaling,
    layout::{BLOCK, scales_per_row, words_per_row},
    reference,
};
use rayon::{
    iter::{IndexedParallelIterator, ParallelIterator},
    slice::ParallelSliceMut,
};
use std::{
    collections::{HashMap, HashSet},
    ops::Range,
    path::{Path, PathBuf},
};

/// Bytes that a thread reads at a time.
const READ_AT_A_TIME: usize = 1 << 20;

/// Open files with a model's tensors.
#[derive(Debug)]
pub struct Container {
    path: PathBuf,
    dat: Option<DatFile>,
    shards: Vec<SafeFile>,
    slots: Vec<Slot>,
    by_name: HashMap<String, usize>,
    cache_scales: usize,
}

#[derive(Debug)]
struct Slot {
    name: String,
    stored: Stored,
    /// The floats; or the codes, the scales and, in two-level files, the tensor scale.
    entries: Vec<ContainerEntry>,
    /// The tensor scale of the activations that an NVFP4 weight multiplies, if the file gives one.
    input: Option<ContainerEntry>,
    /// Whether the file holds the reciprocals of tensor scales.
    reciprocal: bool,
}

#[derive(Debug, Clone)]
enum ContainerEntry {
    Dat(DatEntry),
    /// The index of the shard and an entry of it.
    Safe(usize, SafeEntry),
}

impl Container {
    /// Opens a `.dat` file, a `.safetensors` file, or a folder with either.
    ///
    /// # Errors
    /// If there is none or it is broken.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let file = weights_file(path)?;
        if file.extension().is_some_and(|e| e == "gguf") {
            let reason = "a GGUF file is converted first: train-cli convert IN.gguf NEW-FOLDER/model.safetensors --dtype TYPE. \
                          Give the type of its matrices: nvfp4, bf16 or f16; or f32 for f32 and Q8_0";
            return Err(ModelError::weights(&file, reason));
        }
        let (path, dat, shards) = if file.extension().is_some_and(|e| e == "dat") {
            (file.as_path(), Some(DatFile::open(&file)?), vec![])
        } else if file.is_dir() {
            (path, None, open_folder(&file)?)
        } else {
            (path, None, vec![SafeFile::open(&file)?])
        };
        let mut entries: Vec<(String, ContainerEntry)> = Vec::new();
        for entry in dat.iter().flat_map(DatFile::entries) {
            entries.push((entry.key.clone(), ContainerEntry::Dat(entry.clone())));
        }
        for (i, shard) in shards.iter().enumerate() {
            entries.extend(shard.entries().iter().map(|e| (e.name.clone(), ContainerEntry::Safe(i, e.clone()))));
        }
        let mut container =
            Self { path: path.to_owned(), dat, shards, slots: vec![], by_name: HashMap::new(), cache_scales: 0 };
        container.find_tensors(&entries)?;
        Ok(container)
    }

    /// The tensors of a model whose config.json ties the head to the embedding. Its file may spell out the head all the same: a
    /// dense head with the embedding's values is the embedding, and is left out.
    ///
    /// # Errors
    /// If either cannot be read.
    pub fn without_copied_head(mut self) -> Result<Self, ModelError> {
        if self.head_is_a_copy()? {
            self.slots.retain(|slot| slot.name != names::HEAD);
            self.by_name = self.slots.iter().enumerate().map(|(i, slot)| (slot.name.clone(), i)).collect();
        }
        Ok(self)
    }

    fn head_is_a_copy(&self) -> Result<bool, ModelError> {
        let Some(head @ Stored::Dense { .. }) = self.stored(names::HEAD) else { return Ok(false) };
        if self.stored(names::EMBEDDING).is_none_or(|embedding| embedding != head) {
            return Ok(false);
        }
        for rows in row_ranges(&head.shape(), 1 << 20) {
            if self.read_rows(names::HEAD, rows.clone())? != self.read_rows(names::EMBEDDING, rows)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Makes a slot for each tensor of the entries.
    fn find_tensors(&mut self, entries: &[(String, ContainerEntry)]) -> Result<(), ModelError> {
        let by_key: HashMap<&str, &ContainerEntry> = entries.iter().map(|(key, entry)| (key.as_str(), entry)).collect();
        let inputs: HashSet<String> = entries.iter().filter_map(|(key, entry)| entry.input_scale(key)).collect();
        for (key, entry) in entries {
            if inputs.contains(key) {
                continue; // The entry of the codes takes it in.
            }
            if names::is_cache_scale(key) && entry.is_one_number() {
                self.cache_scales += 1;
                continue;
            }
            let slot = match entry.part(key) {
                None => self.dense(key, entry)?,
                Some((spelling, base, Part::Codes)) => {
                    let scale_key = spelling.key(base, Part::Scales);
                    let Some(&scales) = by_key.get(scale_key.as_str()) else {
                        return Err(self.alone(key, &scale_key));
                    };
                    let global = by_key.get(spelling.key(base, Part::TensorScale).as_str());
                    let parts = [entry, scales].into_iter().chain(global.copied()).cloned().collect();
                    let reciprocal = spelling == Spelling::CompressedTensors;
                    let input = entry.input_scale(key).and_then(|key| by_key.get(key.as_str()).copied().cloned());
                    Slot { input, reciprocal, ..self.packed(names::of_base(base), parts)? }
                }
                Some((spelling, base, Part::Scales | Part::TensorScale)) => {
                    // Two spellings have the same key for block scales.
                    let spellings = if spelling == Spelling::Dat { &[Spelling::Dat][..] } else { &Spelling::SAFE };
                    if !spellings.iter().any(|s| by_key.contains_key(s.key(base, Part::Codes).as_str())) {
                        return Err(self.alone(key, &spelling.key(base, Part::Codes)));
                    }
                    continue; // The entry of the codes takes it in.
                }
            };
            if self.by_name.insert(slot.name.clone(), self.slots.len()).is_some() {
                return Err(self.bad(format!("{:?} is stored twice", slot.name)));
            }
            self.slots.push(slot);
        }
        if self.slots.is_empty() {
            return Err(self.bad("holds no tensors".into()));
        }
        Ok(())
    }

    fn dense(&self, name: &str, entry: &ContainerEntry) -> Result<Slot, ModelError> {
        match entry.content() {
            FileContent::Floats(float) => {
                let stored = Stored::Dense { float, shape: entry.shape().to_vec() };
                Ok(Slot { name: name.to_owned(), stored, entries: vec![entry.clone()], input: None, reciprocal: false })
            }
            FileContent::Other(kind) => {
                Err(self.bad(format!("{name:?} is {kind}; weights are f16, bf16, f32 or NVFP4")))
            }
            FileContent::Bytes | FileContent::Scales => Err(self.bad(format!("{name:?} holds bytes, not floats"))),
        }
    }

    fn packed(&self, name: String, entries: Vec<ContainerEntry>) -> Result<Slot, ModelError> {
        let bad = |reason: String| self.bad(format!("{name:?}: {reason}"));
        if !matches!(entries[0].content(), FileContent::Bytes) {
            return Err(bad("its codes are not bytes (type id 0 or 100)".into()));
        }
        if !matches!(entries[1].content(), FileContent::Scales) {
            return Err(bad("its scales are not E4M3 (type id 101)".into()));
        }
        let (codes, scales) = (entries[0].shape(), entries[1].shape());
        let (rows, cols) = match (codes, scales) {
            (&[rows, half], &[scale_rows, blocks]) if scale_rows == rows && blocks * BLOCK == half * 2 => {
                (rows, half * 2)
            }
            _ => {
                return Err(bad(format!(
                    "its codes are {codes:?} and its scales {scales:?}; [N, K/2] and [N, K/16] are needed, with K a \
                     multiple of 16"
                )));
            }
        };
        let scaling = match entries.get(2) {
            None => Scaling::Single,
            Some(e)
                if matches!(e.content(), FileContent::Floats(FloatType::F32)) && e.shape().iter().all(|&d| d == 1) =>
            {
                Scaling::Two
            }
            Some(e) => return Err(bad(format!("its tensor scale has shape {:?}; one f32 is needed", e.shape()))),
        };
        Ok(Slot { name, stored: Stored::Packed { rows, cols, scaling }, entries, input: None, reciprocal: false })
    }

    /// Number of scales for a KV cache in 8 bits that the files hold beside the weights. They are no tensors of the model.
    pub fn cache_scales(&self) -> usize {
        self.cache_scales
    }

    /// The safetensors files, if the tensors come from such.
    pub fn shards(&self) -> &[SafeFile] {
        &self.shards
    }

    /// The `.dat` file, if the tensors come from one.
    pub fn dat(&self) -> Option<&DatFile> {
        self.dat.as_ref()
    }

    fn slot(&self, name: &str) -> Result<&Slot, ModelError> {
        let index = self.by_name.get(name).ok_or_else(|| ModelError::missing(&self.path, name))?;
        Ok(&self.slots[*index])
    }

    /// The type of the values of a dense tensor.
    fn float(&self, name: &str) -> Result<FloatType, ModelError> {
        let float = self.slot(name)?.stored.float();
        float.ok_or_else(|| self.bad(format!("{name:?} is NVFP4; floats are needed")))
    }

    /// The tensor scale of an NVFP4 tensor as the file holds it: 1 in single-level files.
    fn stored_scale(&self, slot: &Slot) -> Result<f32, ModelError> {
        let Some(entry) = slot.entries.get(2) else { return Ok(1.0) };
        let mut buffer = [0; 4];
        self.read(entry, 0, &mut buffer)?;
        Ok(FloatType::F32.decode(&buffer)[0])
    }

    /// Reads bytes of an entry. Several threads share a large read, because the system clears the buffer's memory while it is
    /// filled, and one thread alone takes long for that.
    fn read(&self, entry: &ContainerEntry, start: u64, buffer: &mut [u8]) -> Result<(), ModelError> {
        if buffer.len() <= READ_AT_A_TIME {
            // A single part needs no other thread.
            return self.read_part(entry, start, buffer);
        }
        let parts = buffer.par_chunks_mut(READ_AT_A_TIME).enumerate();
        parts.try_for_each(|(n, part)| self.read_part(entry, start + (n * READ_AT_A_TIME) as u64, part))
    }

    fn read_part(&self, entry: &ContainerEntry, start: u64, buffer: &mut [u8]) -> Result<(), ModelError> {
        match (entry, &self.dat) {
            (ContainerEntry::Dat(entry), Some(dat)) => dat.read(entry, start, buffer),
            (ContainerEntry::Safe(i, entry), _) => self.shards[*i].read(entry, start, buffer),
            (ContainerEntry::Dat(_), None) => unreachable!("a .dat entry comes from the open .dat file"),
        }
    }

    fn bad(&self, reason: String) -> ModelError {
        ModelError::weights(&self.path, reason)
    }

    fn alone(&self, key: &str, other: &str) -> ModelError {
        self.bad(format!("{key:?} has no {other:?} beside it; an NVFP4 tensor needs both"))
    }
}

impl Tensors for Container {
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
        let mut values = vec![];
        let float = self.float(name)?;
        self.put_rows(name, rows, &mut |bytes| {
            values = float.decode(bytes);
            Ok(())
        })?;
        Ok(values)
    }

    fn put_rows(&self, name: &str, rows: Range<usize>, put: Put) -> Result<(), ModelError> {
        let (slot, float) = (self.slot(name)?, self.float(name)?);
        let width = row_width(&slot.stored.shape());
        let mut bytes = vec![0; rows.len() * width * float.size()];
        self.read(&slot.entries[0], (rows.start * width * float.size()) as u64, &mut bytes)?;
        if !float.are_finite(&bytes) {
            let values = float.decode(&bytes);
            let at = values.iter().position(|v| !v.is_finite()).unwrap_or_default();
            let index = rows.start * width + at;
            return Err(self.bad(format!("{name:?}: {} at value {index}; weights must be finite", values[at])));
        }
        put(&bytes)
    }

    fn read_packed(&self, name: &str) -> Result<Packed, ModelError> {
        let rows = row_count(&self.slot(name)?.stored.shape());
        self.read_packed_rows(name, 0..rows)
    }

    fn read_packed_rows(&self, name: &str, rows: Range<usize>) -> Result<Packed, ModelError> {
        let slot = self.slot(name)?;
        let Stored::Packed { cols, .. } = slot.stored else {
            return Err(self.bad(format!("{name:?} is dense; NVFP4 is needed")));
        };
        let start = (rows.start * cols / 2) as u64;
        let codes =
            bytes::filled_u32s(rows.len() * words_per_row(cols), |codes| self.read(&slot.entries[0], start, codes))?;
        let mut scales = vec![0; rows.len() * scales_per_row(cols)];
        self.read(&slot.entries[1], (rows.start * scales_per_row(cols)) as u64, &mut scales)?;
        let stored = self.stored_scale(slot)?;
        // A matrix of zeros may have an infinite divisor. With other codes, it would make zeros of them.
        let damaged = stored.is_infinite() && codes.iter().any(|word| word & 0x7777_7777 != 0);
        let packed = Packed { codes, scales, global: if slot.reciprocal && !damaged { 1.0 / stored } else { stored } };
        packed.check_scales(rows.start, cols).map_err(|e| self.bad(format!("{name:?}: {e}")))?;
        Ok(packed)
    }

    fn dequantize_rows(&self, name: &str, rows: Range<usize>) -> Result<Vec<f32>, ModelError> {
        let slot = self.slot(name)?;
        let (cols, packed) = (row_width(&slot.stored.shape()), self.read_packed_rows(name, rows.clone())?);
        Ok(if slot.reciprocal {
            reference::dequantize_divided(&packed, rows.len(), cols, self.stored_scale(slot)?)
        } else {
            reference::dequantize(&packed, rows.len(), cols)
        })
    }

    fn divides(&self, name: &str) -> bool {
        self.slot(name).is_ok_and(|slot| slot.reciprocal)
    }

    fn reciprocal_scale(&self, name: &str, packed: &Packed) -> Result<f32, ModelError> {
        let slot = self.slot(name)?;
        // The file's own value, which a reciprocal of the reciprocal may miss.
        if slot.reciprocal { self.stored_scale(slot) } else { Ok(1.0 / packed.global) }
    }

    fn gives_input_scale(&self, name: &str) -> bool {
        self.slot(name).is_ok_and(|slot| slot.input.is_some())
    }

    fn input_scale(&self, name: &str) -> Result<Option<GivenScale>, ModelError> {
        let slot = self.slot(name)?;
        let Some(entry) = &slot.input else { return Ok(None) };
        if !matches!(entry.content(), FileContent::Floats(FloatType::F32)) || entry.shape().iter().any(|&d| d != 1) {
            let shape = entry.shape();
            return Err(self.bad(format!("{name:?}: the scale of its input has shape {shape:?}; one f32 is needed")));
        }
        let mut buffer = [0; 4];
        self.read(entry, 0, &mut buffer)?;
        let stored = FloatType::F32.decode(&buffer)[0];
        match if slot.reciprocal { GivenScale::of_reciprocal(stored) } else { GivenScale::of_scale(stored) } {
            Some(scale) => Ok(Some(scale)),
            None => Err(self.bad(format!("{name:?}: the scale of its input is {stored}; a positive number is needed"))),
        }
    }
}

/// What an entry's type says about its content.
enum FileContent {
    Floats(FloatType),
    Bytes,
    Scales,
    /// A type that weights do not have.
    Other(String),
}

impl ContainerEntry {
    fn content(&self) -> FileContent {
        match self {
            Self::Dat(entry) => match entry.element {
                ElementType::U8 | ElementType::F4x2 => FileContent::Bytes,
                ElementType::F8E4m3 => FileContent::Scales,
                other => other.float().map_or_else(|| FileContent::Other(other.name().to_owned()), FileContent::Floats),
            },
            Self::Safe(_, entry) => match entry.dtype {
                Dtype::U8 => FileContent::Bytes,
                Dtype::F8_E4M3 => FileContent::Scales,
                other => safetensors::float_of(other)
                    .map_or_else(|| FileContent::Other(format!("{other:?}")), FileContent::Floats),
            },
        }
    }

    fn shape(&self) -> &[usize] {
        match self {
            Self::Dat(entry) => &entry.dims,
            Self::Safe(_, entry) => &entry.shape,
        }
    }

    /// Whether the entry is a single float.
    fn is_one_number(&self) -> bool {
        matches!(self.content(), FileContent::Floats(_)) && self.shape().iter().all(|&size| size == 1)
    }

    /// If the entry with this key holds codes: the key of the tensor scale of the activations that these multiply.
    fn input_scale(&self, key: &str) -> Option<String> {
        match self.part(key)? {
            (spelling, base, Part::Codes) => spelling.input_scale(base),
            _ => None,
        }
    }

    /// The part of an NVFP4 tensor that the entry with this key stores. `None` for a dense tensor.
    fn part<'k>(&self, key: &'k str) -> Option<(Spelling, &'k str, Part)> {
        if let Some((base, part)) = Spelling::Dat.split(key) {
            return Some((Spelling::Dat, base, part));
        }
        if matches!(self, Self::Dat(_)) {
            return None;
        }
        if matches!(self.content(), FileContent::Bytes) && names::may_hold_codes(key) {
            return Some((Spelling::ModelOpt, key, Part::Codes));
        }
        Spelling::SAFE.into_iter().find_map(|spelling| spelling.split(key).map(|(base, part)| (spelling, base, part)))
    }
}

/// The weights that a path stands for: a file itself, a folder of safetensors, or the only `.dat` of a folder.
fn weights_file(path: &Path) -> Result<PathBuf, ModelError> {
    if !path.exists() {
        let hint = "give a model folder, or a .dat or .safetensors file; convert also takes a .gguf file".to_owned();
        return Err(ModelError::Missing { path: path.to_owned(), hint });
    }
    if !path.is_dir() || safetensors::in_folder(path) {
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
        0 => {
            let text = "the folder holds neither model.safetensors nor a .dat file; give a model's folder, or its file";
            Err(ModelError::folder(path, text))
        }
        n => Err(ModelError::folder(path, format!("the folder holds {n} .dat files; name one of them"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dat::DatWriter;

    /// Threads share one file, and must not move each other's place in it.
    #[test]
    fn a_large_tensor_is_read_in_parts() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.dat");
        let rows = 3 * READ_AT_A_TIME / 4 + 5;
        let values: Vec<f32> = (0..rows).map(|n| n as f32).collect();
        let mut writer = DatWriter::new(Vec::new(), 1).unwrap();
        writer.entry("model.norm.weight", ElementType::F32, &[rows, 1]).unwrap();
        writer.payload(bytemuck::cast_slice(&values)).unwrap();
        std::fs::write(&path, writer.finish()).unwrap();
        let container = Container::open(&path).unwrap();
        for _ in 0..20 {
            assert!(container.read_rows("model.norm.weight", 0..rows).unwrap() == values);
        }
    }
}
