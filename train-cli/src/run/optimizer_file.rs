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
    train::chunked_adamw::{AdamwConfig, ChunkedAdamw, TensorState},
};
use backend_nvfp4::{AdamwState, Moment, Nvfp4Kernels, STATE_BLOCK, StateKind};
use burn::tensor::{
    DType, Int, Shape, Tensor, TensorData, TensorMetadata, TensorPrimitive, Transaction,
    ops::{FloatTensor, IntTensor},
};
use model_qwen3::{
    ModelError,
    bytes::{self, FloatType},
    model::Qwen3,
    safetensors::{SafeFile, header},
    weights::{PIECES, fields},
};
use safetensors::Dtype;
use std::{io::Write, path::Path};

/// What one entry of the file holds.
enum Content<'a, B: Nvfp4Kernels> {
    Steps(i32),
    Float(&'a FloatTensor<B>),
    Bytes(&'a IntTensor<B>),
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
            layout.push((format!("{name}.{suffix}"), dtype, shape));
            contents.push(content);
        }
    }
    let mut put = |bytes: &[u8]| out.write_all(bytes).map_err(CliError::io(path));
    put(&header(&layout))?;
    // A transfer waits for what the device has been given to do, so that several pieces share one.
    let (mut pieces, mut size) = (vec![], 0);
    for piece in contents.iter().flat_map(|content| pieces_of(content, transfer)) {
        size += piece.size();
        pieces.push(piece);
        if size >= transfer {
            put_all(std::mem::take(&mut pieces), &mut put)?;
            size = 0;
        }
    }
    put_all(pieces, put)
}

/// A part of the file that is not read from the device yet.
enum Piece<B: Nvfp4Kernels> {
    Steps(i32),
    Floats(Tensor<B, 1>),
    Bytes(Tensor<B, 1, Int>),
}

impl<B: Nvfp4Kernels> Piece<B> {
    fn size(&self) -> usize {
        match self {
            Self::Steps(_) => 4,
            Self::Floats(x) => x.shape().num_elements() * x.dtype().size(),
            Self::Bytes(x) => x.shape().num_elements(),
        }
    }
}

/// The content in order, in the pieces of transfers.
fn pieces_of<'a, B: Nvfp4Kernels>(
    content: &'a Content<'_, B>,
    transfer: usize,
) -> Box<dyn Iterator<Item = Piece<B>> + 'a> {
    let ranges = |len: usize, size: usize| {
        let step = (transfer / PIECES / size).max(1);
        (0..len).step_by(step).map(move |start| start..len.min(start + step))
    };
    match content {
        Content::Steps(steps) => Box::new(std::iter::once(Piece::Steps(*steps))),
        Content::Float(x) => {
            let len = x.shape().num_elements();
            let flat = B::float_reshape((*x).clone(), Shape::new([len]));
            let flat = Tensor::<B, 1>::from_primitive(TensorPrimitive::Float(flat));
            Box::new(ranges(len, x.dtype().size()).map(move |range| Piece::Floats(flat.clone().slice([range]))))
        }
        Content::Bytes(x) => {
            let len = x.shape().num_elements();
            let flat = Tensor::<B, 1, Int>::from_primitive(B::int_reshape((*x).clone(), Shape::new([len])));
            Box::new(ranges(len, 1).map(move |range| Piece::Bytes(flat.clone().slice([range]))))
        }
    }
}

/// Writes pieces, which are read in one transfer.
fn put_all<B: Nvfp4Kernels>(
    pieces: Vec<Piece<B>>,
    mut put: impl FnMut(&[u8]) -> Result<(), CliError>,
) -> Result<(), CliError> {
    let (mut transfer, mut reads) = (Transaction::<B>::default(), false);
    for piece in &pieces {
        transfer = match piece {
            Piece::Steps(_) => continue,
            Piece::Floats(x) => transfer.register(x.clone()),
            Piece::Bytes(x) => transfer.register(x.clone()),
        };
        reads = true;
    }
    // CubeCL panics over a transfer of nothing.
    let data = if reads { transfer.try_execute() } else { Ok(vec![]) };
    let mut data = data.map_err(|e| ModelError::Device(format!("optimizer state: {e:?}")))?.into_iter();
    let mut next = || data.next().expect("a transfer gives what was registered");
    pieces.iter().try_for_each(|piece| match piece {
        Piece::Steps(steps) => put(&bytes::of_i32s([*steps])),
        Piece::Floats(_) => put(&next().bytes),
        Piece::Bytes(_) => match next() {
            data if data.dtype == DType::U8 => put(&data.bytes),
            // The CPU holds bytes in wider numbers.
            data => put(&data.iter().collect::<Vec<u8>>()),
        },
    })
}

type Entry<'a, B> = (String, Dtype, Vec<usize>, Content<'a, B>);

/// The entries of a tensor of `len` values, in file order.
fn entries<B: Nvfp4Kernels>(len: usize, state: &TensorState<B>) -> Vec<Entry<'_, B>> {
    let mut entries = vec![("steps".to_owned(), Dtype::I32, vec![], Content::Steps(state.steps))];
    for (part, moment) in [("m", &state.moments.m), ("v", &state.moments.v)] {
        match moment {
            Moment::Float(x) => entries.push((part.to_owned(), float_of(x.dtype()).1, vec![len], Content::Float(x))),
            Moment::Quantized { codes, absmax, .. } => {
                entries.push((format!("{part}.codes"), Dtype::U8, codes.shape().to_vec(), Content::Bytes(codes)));
                let scales = vec![len.div_ceil(STATE_BLOCK)];
                entries.push((format!("{part}.absmax"), Dtype::F32, scales, Content::Float(absmax)));
            }
        }
    }
    if let Some(residual) = &state.moments.residual {
        entries.push(("residual".to_owned(), Dtype::U8, vec![len], Content::Bytes(residual)));
    }
    entries
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
    let reader = Reader { path, file: SafeFile::open(path)?, device: model.device(), config: optimizer.config(), done };
    for (name, field) in fields(model) {
        let Some(id) = field.id().filter(|_| reader.has(&format!("{name}.steps"))) else { continue };
        optimizer.restore(id, reader.state(&name, &field.shape())?);
    }
    Ok(())
}

/// Reads the states of tensors.
struct Reader<'a, B: Nvfp4Kernels> {
    path: &'a Path,
    file: SafeFile,
    device: B::Device,
    config: AdamwConfig,
    /// Steps of the run.
    done: usize,
}

impl<B: Nvfp4Kernels> Reader<'_, B> {
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
        let steps = bytes::to_i32s(&self.bytes(&format!("{name}.steps"), 4)?)[0];
        if usize::try_from(steps).map_or(true, |steps| steps > self.done) {
            let text = format!("\"{name}.steps\" counts {steps} updates in a run of {} steps", self.done);
            return Err(CliError::corrupt(self.path, text));
        }
        let (m, v) = (format!("{name}.m"), format!("{name}.v"));
        let residual = format!("{name}.residual");
        let residual = self.has(&residual).then(|| self.bytes(&residual, len)).transpose()?.map(|bytes| {
            let data = TensorData::new(bytes, [len]);
            let residual = Tensor::<B, 1, Int>::from_data(data, (&self.device, DType::U8)).into_primitive();
            self.launch();
            residual
        });
        let (m, v) = (self.moment(&m, kind, true, len)?, self.moment(&v, kind, false, len)?);
        Ok(TensorState { steps, moments: AdamwState { kind, m, v, residual } })
    }

    /// A moment of `len` values; the codes of the first moment and of the second have different tables.
    fn moment(&self, name: &str, kind: StateKind, first: bool, len: usize) -> Result<Moment<B>, CliError> {
        if let Some(coding) = kind.coding() {
            let codes = self.bytes(&format!("{name}.codes"), len * coding.bits() / 8)?;
            let absmax = self.bytes(&format!("{name}.absmax"), len.div_ceil(STATE_BLOCK) * 4)?;
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
