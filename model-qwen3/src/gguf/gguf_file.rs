//! Reads a GGUF file (version 2 or 3): its keys, and its tensors by their Hugging Face names.
//!
//! Opening reads what stands before the values and checks every declared size against the bytes that remain. Lists of numbers
//! that nobody asks for are not kept.

use super::{
    Kind, blocks,
    file_header::{ALIGNMENT, ARRAY, TEXT},
};
use crate::{
    ModelError,
    bytes::{FloatType, Number},
    file::{self, read_at},
    names::{self, GgufPart},
    tensors::{Stored, Tensors, row_count, row_width},
};
use backend_nvfp4::{GivenScale, Packed, Scaling};
use std::{
    collections::HashMap,
    fs::File,
    io::{BufReader, Read},
    ops::Range,
    path::{Path, PathBuf},
};

/// Most keys, and most tensors. A Qwen3-32B has some 40 and 1,200.
const MOST_ENTRIES: u64 = 65_536;
/// Most values of all lists together. A Qwen3 has 460,000.
const MOST_VALUES: u64 = 1 << 20;
/// The list of numbers that is wanted: the kinds of tokens.
pub(super) const KINDS: &str = "tokenizer.ggml.token_type";
/// Highest rank of a tensor. ggml knows no higher one.
const HIGHEST_RANK: u32 = 4;

/// An open GGUF file. What stands before the values is in memory.
#[derive(Debug)]
pub struct GgufFile {
    path: PathBuf,
    file: File,
    keys: HashMap<String, ReadValue>,
    tensors: Vec<Tensor>,
    by_name: HashMap<String, usize>,
}

/// The value of a key.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum ReadValue {
    /// A number, or whether something holds (0 or 1).
    Number(f64),
    Text(String),
    Numbers(Vec<f64>),
    Texts(Vec<String>),
}

/// A tensor of the file.
#[derive(Debug)]
struct Tensor {
    /// The Hugging Face name of the tensor.
    name: String,
    shape: Vec<usize>,
    kind: Kind,
    /// Where its values begin in the file.
    at: u64,
    /// Where its tensor scale is, if it is NVFP4 and has one.
    scale: Option<u64>,
    /// Where the tensor scale of its activations is, if it is NVFP4 and the file gives one.
    input: Option<u64>,
}

impl GgufFile {
    /// Opens a file and reads what stands before its values.
    ///
    /// # Errors
    /// If the file cannot be read, is no GGUF file, or holds a tensor that a Qwen3 does not have or in a format that is not
    /// read.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let (file, size) = file::open(path, "give a .gguf file")?;
        let mut head = Preamble { path, input: BufReader::new(&file), at: 0, size, values_left: MOST_VALUES };
        if head.take::<4>()? != *b"GGUF" {
            return Err(head.bad("it does not begin with \"GGUF\""));
        }
        let version: u32 = head.next()?;
        if !(2..=3).contains(&version) {
            return Err(head.bad(format!("it has version {version}; versions 2 and 3 are read")));
        }
        let (tensors, keys) = (head.count("tensors", MOST_ENTRIES)?, head.count("keys", MOST_ENTRIES)?);
        let mut found = HashMap::new();
        for _ in 0..keys {
            let key = head.text()?;
            let value = head.value(key == KINDS)?;
            if found.insert(key.clone(), value).is_some() {
                return Err(head.bad(format!("the key {key:?} stands twice")));
            }
        }
        let declared = (0..tensors).map(|_| head.tensor()).collect::<Result<Vec<_>, _>>()?;
        let alignment = match found.get("general.alignment") {
            None => ALIGNMENT,
            Some(ReadValue::Number(n)) if *n >= 1.0 && *n <= 65536.0 => *n as u64,
            Some(other) => return Err(head.bad(format!("general.alignment is {other:?}"))),
        };
        let values = head.at.next_multiple_of(alignment);
        let tensors = placed(&head, declared, values)?;
        drop(head);
        let mut by_name = HashMap::new();
        for (i, tensor) in tensors.iter().enumerate() {
            if by_name.insert(tensor.name.clone(), i).is_some() {
                return Err(ModelError::weights(path, format!("{:?} is stored twice", tensor.name)));
            }
        }
        Ok(Self { path: path.to_owned(), file, keys: found, tensors, by_name })
    }

    /// The flags with which `train-cli convert` keeps most of the file's matrices: the codes of NVFP4 ones, otherwise all values.
    pub fn flags_of_convert(&self) -> &'static str {
        let matrices = || self.tensors.iter().filter(|tensor| tensor.shape.len() > 1);
        if matrices().any(|tensor| tensor.kind == Kind::Nvfp4) {
            // A dense head would become NVFP4.
            let has_head = self.by_name.contains_key(names::HEAD);
            return if has_head { "--dtype nvfp4 --head bf16" } else { "--dtype nvfp4" };
        }
        let only = |float| matrices().all(|tensor| tensor.kind == Kind::Float(float));
        if only(FloatType::F16) {
            "--dtype f16"
        } else if only(FloatType::Bf16) {
            "--dtype bf16"
        } else {
            // An 8-bit integer times an f16 scale has more bits than f16 or bf16.
            "--dtype f32"
        }
    }

    /// The value of a key.
    pub(super) fn key(&self, name: &str) -> Option<&ReadValue> {
        self.keys.get(name)
    }

    fn tensor(&self, name: &str) -> Result<&Tensor, ModelError> {
        let index = self.by_name.get(name).ok_or_else(|| ModelError::missing(&self.path, name))?;
        Ok(&self.tensors[*index])
    }

    /// The bytes of some rows of a tensor.
    fn rows(&self, tensor: &Tensor, rows: Range<usize>) -> Result<Vec<u8>, ModelError> {
        let width = row_width(&tensor.shape);
        let mut bytes = vec![0; tensor.kind.bytes(rows.len() * width) as usize];
        read_at(&self.file, &self.path, tensor.at + tensor.kind.bytes(rows.start * width), &mut bytes)?;
        Ok(bytes)
    }

    pub(super) fn bad(&self, reason: impl Into<String>) -> ModelError {
        ModelError::weights(&self.path, reason.into())
    }
}

/// A tensor as the file declares it: its name there, shape, ggml's number of its type, and where its values begin.
struct Declared {
    name: String,
    shape: Vec<usize>,
    kind: u32,
    offset: u64,
}

/// The tensors of a model, whose values begin at byte `values` of the file. Tensor scales become parts of their tensors.
fn placed(head: &Preamble<'_, impl Read>, declared: Vec<Declared>, values: u64) -> Result<Vec<Tensor>, ModelError> {
    let (mut scales, mut inputs) = (HashMap::new(), HashMap::new());
    let mut tensors: Vec<(String, Tensor)> = vec![];
    for Declared { name, shape, kind, offset } in declared {
        let kind = Kind::of(kind).ok_or_else(|| {
            head.bad(format!("{name:?} has ggml's type {kind}; F32, F16, BF16, Q8_0 and NVFP4 are read"))
        })?;
        let (block, _) = kind.block();
        let count = shape.iter().try_fold(1usize, |count, size| count.checked_mul(*size));
        let whole = shape.last().is_some_and(|cols| cols.is_multiple_of(block)) && count.is_some_and(|count| count > 0);
        let end = count.filter(|count| whole && *count as u64 <= head.size).map(|count| kind.bytes(count));
        let at = values.checked_add(offset);
        let fits = at.zip(end).and_then(|(at, bytes)| at.checked_add(bytes)).is_some_and(|end| end <= head.size);
        let (Some(at), true) = (at, fits) else {
            let text = "does not fit into the file, which is damaged or cut off";
            return Err(head.bad(format!("{name:?} of shape {shape:?} {text}")));
        };
        let (base, part) = names::split_gguf(&name);
        if part != GgufPart::Values {
            if kind != Kind::Float(FloatType::F32) || count != Some(1) {
                return Err(head.bad(format!("{name:?} has shape {shape:?}; a tensor scale is one f32")));
            }
            if part == GgufPart::Scale { &mut scales } else { &mut inputs }.insert(base.to_owned(), at);
            continue;
        }
        let ours = names::of_gguf(&name)
            .ok_or_else(|| head.bad(format!("it holds {name:?}, which a dense Qwen3 does not have")))?;
        let base = base.to_owned();
        tensors.push((base, Tensor { name: ours, shape, kind, at, scale: None, input: None }));
    }
    for (base, tensor) in &mut tensors {
        (tensor.scale, tensor.input) = (scales.remove(base), inputs.remove(base));
        if (tensor.scale.is_some() || tensor.input.is_some()) && tensor.kind != Kind::Nvfp4 {
            return Err(head.bad(format!("{base:?} has a tensor scale, but is not NVFP4")));
        }
    }
    if let Some(base) = scales.keys().chain(inputs.keys()).next() {
        return Err(head.bad(format!("{base:?} has a tensor scale and no tensor")));
    }
    let tensors: Vec<Tensor> = tensors.into_iter().map(|(_, tensor)| tensor).collect();
    let mut places: Vec<(u64, u64)> = tensors.iter().map(|t| (t.at, t.kind.bytes(t.shape.iter().product()))).collect();
    places.sort_unstable();
    if places.windows(2).any(|pair| pair[0].0 + pair[0].1 > pair[1].0) {
        return Err(head.bad("two tensors overlap"));
    }
    if tensors.is_empty() {
        return Err(head.bad("it holds no tensors"));
    }
    Ok(tensors)
}

impl Tensors for GgufFile {
    fn path(&self) -> &Path {
        &self.path
    }

    fn names(&self) -> Vec<String> {
        self.tensors.iter().map(|tensor| tensor.name.clone()).collect()
    }

    fn stored(&self, name: &str) -> Option<Stored> {
        let tensor = self.tensor(name).ok()?;
        Some(match (tensor.kind, &tensor.shape[..]) {
            (Kind::Float(float), shape) => Stored::Dense { float, shape: shape.to_vec() },
            // An 8-bit integer times an f16 scale has more bits than f16 or bf16.
            (Kind::Q8, shape) => Stored::Dense { float: FloatType::F32, shape: shape.to_vec() },
            (Kind::Nvfp4 | Kind::TensorScale | Kind::InputScale, shape) => {
                let scaling = if tensor.scale.is_some() { Scaling::Two } else { Scaling::Single };
                Stored::Packed { rows: row_count(shape), cols: row_width(shape), scaling }
            }
        })
    }

    fn read_rows(&self, name: &str, rows: Range<usize>) -> Result<Vec<f32>, ModelError> {
        let tensor = self.tensor(name)?;
        let bytes = self.rows(tensor, rows)?;
        let values = match tensor.kind {
            Kind::Float(float) => float.decode(&bytes),
            Kind::Q8 => blocks::of_q8(&bytes),
            Kind::Nvfp4 | Kind::TensorScale | Kind::InputScale => {
                return Err(self.bad(format!("{name:?} is NVFP4; floats are needed")));
            }
        };
        match values.iter().find(|value| !value.is_finite()) {
            Some(value) => Err(self.bad(format!("{name:?} holds the value {value}; weights must be finite"))),
            None => Ok(values),
        }
    }

    fn gives_input_scale(&self, name: &str) -> bool {
        self.tensor(name).is_ok_and(|tensor| tensor.input.is_some())
    }

    fn input_scale(&self, name: &str) -> Result<Option<GivenScale>, ModelError> {
        let Some(at) = self.tensor(name)?.input else { return Ok(None) };
        let mut bytes = [0; 4];
        read_at(&self.file, &self.path, at, &mut bytes)?;
        let stored = f32::of_bytes(bytes);
        match GivenScale::of_scale(stored) {
            Some(given) => Ok(Some(given)),
            None => Err(self.bad(format!("{name:?}: the scale of its input is {stored}; a positive number is needed"))),
        }
    }

    fn read_packed(&self, name: &str) -> Result<Packed, ModelError> {
        let rows = row_count(&self.tensor(name)?.shape);
        self.read_packed_rows(name, 0..rows)
    }

    fn read_packed_rows(&self, name: &str, rows: Range<usize>) -> Result<Packed, ModelError> {
        let tensor = self.tensor(name)?;
        if tensor.kind != Kind::Nvfp4 {
            return Err(self.bad(format!("{name:?} is dense; NVFP4 is needed")));
        }
        let mut global = 1.0;
        if let Some(at) = tensor.scale {
            let mut bytes = [0; 4];
            read_at(&self.file, &self.path, at, &mut bytes)?;
            global = f32::of_bytes(bytes);
        }
        let packed = Packed { global, ..blocks::of_nvfp4(&self.rows(tensor, rows.clone())?) };
        packed.check_scales(rows.start, row_width(&tensor.shape)).map_err(|e| self.bad(format!("{name:?}: {e}")))?;
        Ok(packed)
    }
}

/// What stands before the values of a file, read from its beginning.
struct Preamble<'a, Input> {
    path: &'a Path,
    input: Input,
    at: u64,
    size: u64,
    /// How many values the lists that follow may have.
    values_left: u64,
}

impl<Input: Read> Preamble<'_, Input> {
    fn bad(&self, reason: impl Into<String>) -> ModelError {
        ModelError::weights(self.path, format!("{}, at byte {}", reason.into(), self.at))
    }

    /// Refuses a length that the rest of the file does not have.
    fn left(&self, bytes: u64) -> Result<(), ModelError> {
        if bytes > self.size - self.at {
            let left = self.size - self.at;
            return Err(self.bad(format!("{bytes} bytes are declared, and {left} are left; it is damaged or cut off")));
        }
        Ok(())
    }

    fn take<const SIZE: usize>(&mut self) -> Result<[u8; SIZE], ModelError> {
        self.left(SIZE as u64)?;
        let mut bytes = [0; SIZE];
        self.input.read_exact(&mut bytes).map_err(ModelError::io(self.path, ""))?;
        self.at += SIZE as u64;
        Ok(bytes)
    }

    /// Reads a number of the type that is wanted.
    fn next<Wanted: Number<SIZE>, const SIZE: usize>(&mut self) -> Result<Wanted, ModelError> {
        self.take().map(Wanted::of_bytes)
    }

    /// A number of things, at most `most`, each of which takes at least a byte. `what` names them.
    fn count(&mut self, what: &str, most: u64) -> Result<u64, ModelError> {
        let count: u64 = self.next()?;
        if count > most {
            return Err(self.bad(format!(
                "{count} {what} are declared; at most {MOST_ENTRIES} keys, as many tensors, and {MOST_VALUES} values in all \
                 lists together are read"
            )));
        }
        self.left(count)?;
        Ok(count)
    }

    fn text(&mut self) -> Result<String, ModelError> {
        let length: u64 = self.next()?;
        self.left(length)?;
        let mut bytes = vec![0; length as usize];
        self.input.read_exact(&mut bytes).map_err(ModelError::io(self.path, ""))?;
        self.at += length;
        String::from_utf8(bytes).map_err(|_| self.bad("a text is not UTF-8"))
    }

    /// The value of a key. A list of numbers is empty unless `keeps` says that it is wanted.
    fn value(&mut self, keeps: bool) -> Result<ReadValue, ModelError> {
        match self.next()? {
            TEXT => self.text().map(ReadValue::Text),
            ARRAY => {
                let (kind, count) = (self.next()?, self.count("values of a list", self.values_left)?);
                self.values_left -= count;
                match kind {
                    TEXT => (0..count).map(|_| self.text()).collect::<Result<_, _>>().map(ReadValue::Texts),
                    kind => {
                        let mut all = vec![];
                        for _ in 0..count {
                            let number = self.number(kind)?;
                            all.extend(keeps.then_some(number));
                        }
                        Ok(ReadValue::Numbers(all))
                    }
                }
            }
            kind => self.number(kind).map(ReadValue::Number),
        }
    }

    /// A number of one of GGUF's types.
    fn number(&mut self, kind: u32) -> Result<f64, ModelError> {
        Ok(match kind {
            0 | 7 => f64::from(self.next::<u8, _>()?),
            1 => f64::from(self.next::<i8, _>()?),
            2 => f64::from(self.next::<u16, _>()?),
            3 => f64::from(self.next::<i16, _>()?),
            4 => f64::from(self.next::<u32, _>()?),
            5 => f64::from(self.next::<i32, _>()?),
            6 => f64::from(self.next::<f32, _>()?),
            10 => self.next::<u64, _>()? as f64,
            11 => self.next::<i64, _>()? as f64,
            12 => self.next()?,
            kind => return Err(self.bad(format!("a value has the type {kind}, which is not known"))),
        })
    }

    fn tensor(&mut self) -> Result<Declared, ModelError> {
        let (name, rank): (_, u32) = (self.text()?, self.next()?);
        if !(1..=HIGHEST_RANK).contains(&rank) {
            return Err(self.bad(format!("{name:?} has rank {rank}; ranks from 1 to {HIGHEST_RANK} are read")));
        }
        let sizes = (0..rank).map(|_| self.next()).collect::<Result<Vec<u64>, _>>()?;
        // The dimension in which neighbors lie side by side comes first.
        let shape = sizes.into_iter().rev().map(usize::try_from).collect::<Result<_, _>>();
        let shape = shape.map_err(|_| self.bad(format!("{name:?} is too large")))?;
        Ok(Declared { name, shape, kind: self.next()?, offset: self.next()? })
    }
}
