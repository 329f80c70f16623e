//! `optimizer.safetensors` of a checkpoint: the two moments of every tensor that was updated, as they are stored.
//!
//! | name | type and shape | content |
//! |---|---|---|
//! | `<tensor>.steps` | I32 `[]` | updates so far |
//! | `<tensor>.m`, `.v` | F32 or BF16 `[len]` | float moments |
//! | `<tensor>.m.codes`, `.v.codes` | U8 | 8-bit codes, or two 4-bit codes in a byte |
//! | `<tensor>.m.absmax`, `.v.absmax` | F32 `[len / 256]` | the scale of each 256 codes |
//! | `<tensor>.residual` | U8 `[len]` | the lower 8 bits of a bf16-residual master weight |

use crate::{
    CliError,
    settings::Settings,
    train::chunked_adamw::{AdamwConfig, ChunkedAdamw, TensorState},
};
use backend_nvfp4::{AdamwState, MasterKind, Moment, Nvfp4Kernels, Precision, STATE_BLOCK, StateKind};
use burn::tensor::{
    DType, Int, Shape, Tensor, TensorData, TensorMetadata, TensorPrimitive, Transaction,
    ops::{FloatTensor, IntTensor},
};
use model_qwen3::{
    ModelError,
    bytes::{self, FloatType},
    container::Container,
    model::Qwen3,
    safetensors::{SafeEntry, SafeFile, header},
    tensors::Tensors,
    weights::{PIECES, fields},
};
use safetensors::Dtype;
use std::{collections::BTreeMap, io::Write, path::Path};

/// The names of the first and of the second moment.
const MOMENTS: [&str; 2] = ["m", "v"];
const STEPS: &str = "steps";
const CODES: &str = "codes";
const ABSMAX: &str = "absmax";
const RESIDUAL: &str = "residual";

/// The name of a part of a tensor's state, or of a moment.
fn part(of: &str, name: &str) -> String {
    format!("{of}.{name}")
}

/// Writes the states of all parameters that were updated. About `transfer` bytes are read from the device at a time.
///
/// # Errors
/// If the device or the system fails.
pub(super) fn write<B: Nvfp4Kernels>(
    model: &Qwen3<B>,
    optimizer: &ChunkedAdamw<B>,
    transfer: usize,
    out: &mut dyn Write,
    path: &Path,
) -> Result<(), CliError> {
    let fields = fields(model);
    let states = fields.iter().filter_map(|(name, field)| Some((name, field.shape(), optimizer.state(field.id()?)?)));
    let (mut layout, mut contents) = (Vec::new(), Vec::new());
    for (name, shape, state) in states {
        for (suffix, dtype, shape, content) in entries(shape.iter().product(), state) {
            layout.push((part(name, &suffix), dtype, shape));
            contents.push(content);
        }
    }
    let mut put = |bytes: &[u8]| out.write_all(bytes).map_err(CliError::io(path));
    put(&header(&layout))?;
    // A transfer waits for what the device has been given to do, so that several pieces share one.
    let (mut pieces, mut size) = (vec![], 0);
    for ((name, ..), content) in layout.iter().zip(&contents) {
        for piece in content.pieces(transfer) {
            size += piece.size();
            pieces.push((name.as_str(), piece));
            if size >= transfer {
                put_all(std::mem::take(&mut pieces), path, &mut put)?;
                size = 0;
            }
        }
    }
    put_all(pieces, path, put)
}

/// The values of an entry, or a piece of them, which are not read from the device yet.
enum Values<B: Nvfp4Kernels> {
    Steps(i32),
    Floats(Tensor<B, 1>),
    Bytes(Tensor<B, 1, Int>),
}

impl<B: Nvfp4Kernels> Values<B> {
    fn floats(x: &FloatTensor<B>) -> Self {
        let flat = B::float_reshape(x.clone(), Shape::new([x.shape().num_elements()]));
        Self::Floats(Tensor::from_primitive(TensorPrimitive::Float(flat)))
    }

    fn bytes(x: &IntTensor<B>) -> Self {
        Self::Bytes(Tensor::from_primitive(B::int_reshape(x.clone(), Shape::new([x.shape().num_elements()]))))
    }

    /// Bytes in the file.
    fn size(&self) -> usize {
        match self {
            Self::Steps(_) => 4,
            Self::Floats(x) => x.shape().num_elements() * x.dtype().size(),
            Self::Bytes(x) => x.shape().num_elements(),
        }
    }

    /// The same in pieces, of which several fit into a transfer of so many bytes.
    fn pieces(&self, transfer: usize) -> Box<dyn Iterator<Item = Self> + '_> {
        let ranges = |len: usize, size: usize| {
            let step = (transfer / PIECES / size).max(1);
            (0..len).step_by(step).map(move |start| start..len.min(start + step))
        };
        match self {
            Self::Steps(steps) => Box::new(std::iter::once(Self::Steps(*steps))),
            Self::Floats(x) => {
                let ranges = ranges(x.shape().num_elements(), x.dtype().size());
                Box::new(ranges.map(|range| Self::Floats(x.clone().slice([range]))))
            }
            Self::Bytes(x) => {
                let ranges = ranges(x.shape().num_elements(), 1);
                Box::new(ranges.map(|range| Self::Bytes(x.clone().slice([range]))))
            }
        }
    }
}

/// Writes pieces, each with the name of its entry. They are read in one transfer. Refuses values that are not finite: a run
/// that resumed with them would be lost.
fn put_all<B: Nvfp4Kernels>(
    pieces: Vec<(&str, Values<B>)>,
    path: &Path,
    mut put: impl FnMut(&[u8]) -> Result<(), CliError>,
) -> Result<(), CliError> {
    let mut transfer = Transaction::<B>::default();
    // Each name, and what need not be read. The transfer takes the pieces: Burn's CPU backend reads a buffer that something else
    // holds value by value.
    let mut parts = vec![];
    for (name, piece) in pieces {
        let known = match piece {
            Values::Steps(steps) => Some(steps),
            Values::Floats(x) => {
                transfer = transfer.register(x);
                None
            }
            Values::Bytes(x) => {
                transfer = transfer.register(x);
                None
            }
        };
        parts.push((name, known));
    }
    // CubeCL panics over a transfer of nothing.
    let reads = parts.iter().any(|(_, known)| known.is_none());
    let data = if reads { transfer.try_execute() } else { Ok(vec![]) };
    let mut data = data.map_err(|e| ModelError::Device(format!("optimizer state: {e:?}")))?.into_iter();
    parts.into_iter().try_for_each(|(name, known)| match known {
        Some(steps) => put(&bytes::of_i32s([steps])),
        None => match data.next().expect("a transfer gives what was registered") {
            data if data.dtype.is_float() && !is_finite(&data) => {
                Err(CliError::corrupt(path, format!("{name:?} holds values that are not finite; it is not saved")))
            }
            data if data.dtype.is_float() || data.dtype == DType::U8 => put(&data.bytes),
            // The CPU holds bytes in wider numbers.
            data => put(&data.iter().collect::<Vec<u8>>()),
        },
    })
}

/// Whether all of these floats, which are bf16 or f32, are finite.
fn is_finite(data: &TensorData) -> bool {
    let ty = if data.dtype == DType::BF16 { FloatType::Bf16 } else { FloatType::F32 };
    ty.are_finite(&data.bytes)
}

type WrittenEntry<B> = (String, Dtype, Vec<usize>, Values<B>);

/// The entries of a tensor of `len` values, in file order.
fn entries<B: Nvfp4Kernels>(len: usize, state: &TensorState<B>) -> Vec<WrittenEntry<B>> {
    let mut entries = vec![(STEPS.to_owned(), Dtype::I32, vec![], Values::Steps(state.steps))];
    for (name, moment) in MOMENTS.into_iter().zip([&state.moments.m, &state.moments.v]) {
        match moment {
            Moment::Float(x) => entries.push((name.to_owned(), float_of(x.dtype()).1, vec![len], Values::floats(x))),
            Moment::Quantized { codes, absmax, .. } => {
                entries.push((part(name, CODES), Dtype::U8, codes.shape().to_vec(), Values::bytes(codes)));
                let scales = vec![len.div_ceil(STATE_BLOCK)];
                entries.push((part(name, ABSMAX), Dtype::F32, scales, Values::floats(absmax)));
            }
        }
    }
    if let Some(residual) = &state.moments.residual {
        entries.push((RESIDUAL.to_owned(), Dtype::U8, vec![len], Values::bytes(residual)));
    }
    entries
}

/// How the states of a run's tensors are stored.
#[derive(Debug, Clone, Copy)]
pub(super) struct StateLayout {
    /// The form of the moments of matrices.
    kind: StateKind,
    /// The type of float moments in [`StateKind::Bf16`].
    float: Dtype,
    /// Whether a matrix has a residual.
    residual: bool,
}

/// An entry that the state of a tensor has.
struct StateEntry {
    suffix: String,
    dtype: Dtype,
    shape: Vec<usize>,
    /// Whether its floats are at least 0.
    positive: bool,
}

impl StateLayout {
    /// The form in a run with these settings, whose activations have this number format.
    pub(super) fn of(settings: &Settings, precision: &str) -> Self {
        let float = if precision == Precision::Bf16.name() { Dtype::BF16 } else { Dtype::F32 };
        let residual = settings.memory.master_weights == Some(MasterKind::BF16_RESIDUAL);
        Self { kind: settings.memory.optimizer_state_mode, float, residual }
    }

    /// The entries of a tensor of this shape.
    fn entries(&self, shape: &[usize]) -> Vec<StateEntry> {
        let len: usize = shape.iter().product();
        let wanted = |suffix, dtype, shape, positive| StateEntry { suffix, dtype, shape, positive };
        let norm = shape.len() == 1;
        let mut all = vec![wanted(STEPS.to_owned(), Dtype::I32, vec![], true)];
        match self.kind.coding().filter(|_| !norm) {
            Some(coding) => {
                let (codes, scales) = (vec![len * coding.bits() / 8], vec![len.div_ceil(STATE_BLOCK)]);
                for moment in MOMENTS {
                    all.push(wanted(part(moment, CODES), Dtype::U8, codes.clone(), true));
                    all.push(wanted(part(moment, ABSMAX), Dtype::F32, scales.clone(), true));
                }
            }
            None => {
                let float = if norm || self.kind == StateKind::F32 { Dtype::F32 } else { self.float };
                // The second moment is a mean of squares.
                let moments = MOMENTS.into_iter().zip([false, true]);
                all.extend(moments.map(|(name, positive)| wanted(name.to_owned(), float, vec![len], positive)));
            }
        }
        all.extend((self.residual && !norm).then(|| wanted(RESIDUAL.to_owned(), Dtype::U8, vec![len], true)));
        all
    }
}

/// Judges a file without a device: it holds whole states of the tensors of `weights` and nothing else, its floats are
/// finite, and no state counts more updates than the `done` steps of the run.
///
/// # Errors
/// If something of that is not so, or the file cannot be read.
pub(super) fn judge(path: &Path, weights: &Container, form: StateLayout, done: usize) -> Result<(), CliError> {
    let bad = |text: String| CliError::corrupt(path, text);
    let file = SafeFile::open(path)?;
    let mut left: BTreeMap<&str, &SafeEntry> = file.entries().iter().map(|e| (e.name.as_str(), e)).collect();
    for name in weights.names() {
        let Some(stored) = weights.stored(&name).filter(|_| left.contains_key(format!("{name}.steps").as_str())) else {
            continue;
        };
        for StateEntry { suffix, dtype, shape, positive } in form.entries(&stored.shape()) {
            let key = format!("{name}.{suffix}");
            let entry = left.remove(key.as_str()).ok_or_else(|| bad(format!("there is no {key:?}")))?;
            if (entry.dtype, &entry.shape) != (dtype, &shape) {
                let (found, found_shape) = (entry.dtype, &entry.shape);
                return Err(bad(format!("{key:?} is {found:?} {found_shape:?}; it must be {dtype:?} {shape:?}")));
            }
            match dtype {
                Dtype::I32 => drop(counted(bytes::to_i32s(&file.read_all(entry)?)[0], &key, done).map_err(bad)?),
                Dtype::U8 => {}
                _ => values(&file, entry, positive)?,
            }
        }
    }
    match left.first_key_value() {
        None => Ok(()),
        Some((key, _)) => Err(bad(format!("{key:?} is no state of a tensor of this checkpoint"))),
    }
}

/// A number of updates, if a run of `done` steps can have made it.
fn counted(steps: i32, key: &str, done: usize) -> Result<i32, String> {
    let possible = usize::try_from(steps).is_ok_and(|steps| steps <= done);
    if possible { Ok(steps) } else { Err(format!("{key:?} counts {steps} updates in a run of {done} steps")) }
}

/// Refuses floats that are not finite, or below 0 where they must not be.
fn values(file: &SafeFile, entry: &SafeEntry, positive: bool) -> Result<(), CliError> {
    const AT_A_TIME: u64 = 4 << 20;
    let float = if entry.dtype == Dtype::BF16 { FloatType::Bf16 } else { FloatType::F32 };
    let mut buffer = Vec::new();
    for start in (0..entry.bytes).step_by(AT_A_TIME as usize) {
        buffer.resize(AT_A_TIME.min(entry.bytes - start) as usize, 0);
        file.read(entry, start, &mut buffer)?;
        let bad = |value: &&f32| !value.is_finite() || positive && **value < 0.0;
        if let Some(value) = float.decode(&buffer).iter().find(bad) {
            return Err(CliError::corrupt(file.path(), format!("{:?} holds the value {value}", entry.name)));
        }
    }
    Ok(())
}

/// Puts the states of a file back into an optimizer, after `done` steps.
///
/// # Errors
/// If the file does not fit the model, or counts more updates than steps.
pub(super) fn read<B: Nvfp4Kernels>(
    path: &Path,
    model: &Qwen3<B>,
    optimizer: &mut ChunkedAdamw<B>,
    done: usize,
) -> Result<(), CliError> {
    let reader =
        StateReader { path, file: SafeFile::open(path)?, device: model.device(), config: optimizer.config(), done };
    for (name, field) in fields(model) {
        let Some(id) = field.id().filter(|_| reader.has(&format!("{name}.steps"))) else { continue };
        optimizer.restore(id, reader.state(&name, &field.shape())?);
    }
    Ok(())
}

/// Reads the states of tensors.
struct StateReader<'a, B: Nvfp4Kernels> {
    path: &'a Path,
    file: SafeFile,
    device: B::Device,
    config: AdamwConfig,
    /// Steps of the run.
    done: usize,
}

impl<B: Nvfp4Kernels> StateReader<'_, B> {
    fn has(&self, name: &str) -> bool {
        self.file.entry(name).is_some()
    }

    fn bytes(&self, name: &str, expected: usize) -> Result<Vec<u8>, CliError> {
        let entry =
            self.file.entry(name).ok_or_else(|| CliError::corrupt(self.path, format!("there is no {name:?}")))?;
        if entry.bytes != expected as u64 {
            let text = format!("{name:?} has {} bytes; its shape needs {expected}", entry.bytes);
            return Err(CliError::corrupt(self.path, text));
        }
        Ok(self.file.read_all(entry)?)
    }

    fn state(&self, name: &str, shape: &[usize]) -> Result<TensorState<B>, CliError> {
        let len = shape.iter().product();
        let kind = if shape.len() == 1 { StateKind::F32 } else { self.config.state };
        let key = part(name, STEPS);
        let steps = bytes::to_i32s(&self.bytes(&key, 4)?)[0];
        let steps = counted(steps, &key, self.done).map_err(|text| CliError::corrupt(self.path, text))?;
        let [m, v] = MOMENTS.map(|moment| part(name, moment));
        let residual = part(name, RESIDUAL);
        let residual = self.has(&residual).then(|| self.bytes(&residual, len)).transpose()?.map(|bytes| {
            let data = TensorData::new(bytes, [len]);
            let residual = Tensor::<B, 1, Int>::from_data(data, (&self.device, DType::U8)).into_primitive();
            self.launch();
            residual
        });
        let (m, v) = (self.moment(&m, kind, true, len)?, self.moment(&v, kind, false, len)?);
        Ok(TensorState { steps, moments: AdamwState { kind, m, v, residual, codes: None } })
    }

    /// A moment of `len` values; the codes of the first moment and of the second have different tables.
    fn moment(&self, name: &str, kind: StateKind, first: bool, len: usize) -> Result<Moment<B>, CliError> {
        if let Some(coding) = kind.coding() {
            let codes = self.bytes(&part(name, CODES), len * coding.bits() / 8)?;
            let absmax = self.bytes(&part(name, ABSMAX), len.div_ceil(STATE_BLOCK) * 4)?;
            let absmax = FloatType::F32.decode(&absmax);
            return Ok(Moment::from_bytes(kind, first, codes, absmax, &self.device));
        }
        let dtype = if kind == StateKind::Bf16 { self.config.float } else { DType::F32 };
        let float = float_of(dtype).0;
        let values = float.decode(&self.bytes(name, len * float.size())?);
        let values = Tensor::<B, 1>::from_data(TensorData::new(values, [len]), (&self.device, dtype));
        self.launch();
        Ok(Moment::Float(values.into_primitive().tensor()))
    }

    /// CubeCL counts uploaded bytes in 32 bits until a kernel is launched: launches one after each upload.
    fn launch(&self) {
        drop(Tensor::<B, 1>::zeros([1], &self.device));
    }
}

/// How a float type is written: as bf16 or as f32.
fn float_of(dtype: DType) -> (FloatType, Dtype) {
    if dtype == DType::BF16 { (FloatType::Bf16, Dtype::BF16) } else { (FloatType::F32, Dtype::F32) }
}
