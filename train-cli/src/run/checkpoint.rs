//! Training state on disk: `checkpoint-<step>/` with masters as they are stored, optimizer states with the masters'
//! lower bits, the state of the run and the model's small files, committed by [`crate::durable`]. What a step sees is a
//! function of its number, so these, that number and the last gradient norm are all that a resumed run needs.

use crate::{
    CliError,
    args::FitArgs,
    durable::{self, PendingFolder},
    model_files::Companions,
    plan, report,
    train::optim::{ChunkedAdamw, TensorState},
};
use backend_nvfp4::{AdamwState, Moment, Nvfp4Backend, Nvfp4Linear, Recipe, Scaling, StateKind};
use burn::tensor::{DType, Int, Tensor, TensorData, TensorMetadata, TensorPrimitive};
use model_qwen3::{
    ModelError,
    bytes::{self, FloatType},
    model::Qwen3,
    safetensors::{SafeFile, header},
    weights::{Live, fields, to_host},
    write::write_safetensors,
};
use safetensors::Dtype;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// File names in a checkpoint.
pub const MODEL: &str = "model.safetensors";
const OPTIMIZER: &str = "optimizer.safetensors";
const STATE: &str = "trainer_state.json";

/// How a head is stored in files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Head {
    /// It is the embedding.
    Tied,
    /// Its own tensor, not quantised.
    Dense,
    /// Its own tensor, NVFP4.
    Nvfp4,
}

impl Head {
    /// The head of a model.
    pub fn of<B: Nvfp4Backend>(model: &Qwen3<B>) -> Self {
        match &model.lm_head {
            None => Self::Tied,
            Some(Nvfp4Linear::Dense(_)) => Self::Dense,
            Some(_) => Self::Nvfp4,
        }
    }
}

/// The state of a run besides its tensors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainerState {
    /// Of this layout.
    pub version: u32,
    /// Optimizer steps done.
    pub global_step: usize,
    /// Steps of the run.
    pub max_steps: usize,
    /// Epochs done.
    pub epoch: f64,
    /// SHA-256 of training files, config.json, tokenizer and template.
    pub inputs_sha256: String,
    /// Number format of the run.
    pub precision: String,
    /// How the head is stored.
    pub head: Head,
    /// Whether exports have a tensor scale.
    pub two_level: bool,
    /// The gradient norm of the last step: the next may be clipped by it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_norm: Option<f32>,
    /// The run's settings.
    pub settings: FitArgs,
}

impl TrainerState {
    /// The recipe of the run and how many last blocks it leaves alone.
    pub fn recipe(&self) -> (Recipe, usize) {
        (plan::recipe(&self.settings), self.settings.bf16_last_blocks.unwrap_or(0))
    }

    /// Scale levels of exports.
    pub fn scaling(&self) -> Scaling {
        if self.two_level { Scaling::Two } else { Scaling::Single }
    }
}

/// Moves checkpoints newer than `step` aside: a run that goes on from an older one makes its own.
///
/// # Errors
/// If the system fails.
pub fn set_aside_newer(run: &Path, step: usize) -> Result<(), CliError> {
    for (newer, path) in list(run)?.into_iter().filter(|(s, _)| *s > step) {
        let time = jiff::Timestamp::now().strftime("%Y%m%dT%H%M%SZ").to_string();
        let aside = run.join(format!("stale-{time}-checkpoint-{newer}"));
        durable::rename(&path, &aside)?;
        report::line(format!("moved {} to {}", path.display(), aside.display()));
    }
    Ok(())
}

/// Saves a checkpoint into a run folder and removes the oldest beyond `keep`.
///
/// # Errors
/// If the device or the system fails; then the older checkpoints are untouched.
pub fn save<B: Nvfp4Backend>(
    run: &Path,
    companions: &Companions,
    model: &Qwen3<B>,
    optimizer: &ChunkedAdamw<B>,
    state: &TrainerState,
    keep: usize,
) -> Result<PathBuf, CliError> {
    let target = run.join(format!("checkpoint-{}", state.global_step));
    let mut folder = PendingFolder::new(&target)?;
    folder.file(MODEL, |out| {
        let failed = |e| ModelError::io(&target, "")(e);
        write_safetensors(&Live::new(model), out, failed)?;
        Ok(())
    })?;
    folder.file(OPTIMIZER, |out| write_optimizer(model, optimizer, out, &target))?;
    let text = serde_json::to_string_pretty(state).expect("plain data serialises");
    folder.file(STATE, |out| out.write_all(text.as_bytes()).map_err(CliError::io(&target)))?;
    companions.copy_into(&mut folder)?;
    let committed = folder.commit()?;
    for (_, old) in list(run)?.into_iter().skip(keep) {
        durable::remove(&old)?;
    }
    Ok(committed)
}

/// A run's checkpoints, newest first.
fn list(run: &Path) -> Result<Vec<(usize, PathBuf)>, CliError> {
    let mut found: Vec<(usize, PathBuf)> = Vec::new();
    for entry in std::fs::read_dir(run).map_err(CliError::io(run))? {
        let path = entry.map_err(CliError::io(run))?.path();
        let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        if let Some(step) = name.strip_prefix("checkpoint-").and_then(|s| s.parse().ok()) {
            found.push((step, path));
        }
    }
    found.sort_by_key(|(step, _)| std::cmp::Reverse(*step));
    Ok(found)
}

/// The newest checkpoint of a run that verifies; broken newer ones are named.
///
/// # Errors
/// If there is none.
pub fn latest(run: &Path) -> Result<PathBuf, CliError> {
    for (_, path) in list(run)? {
        match durable::verify(&path) {
            Ok(()) => return Ok(path),
            Err(error) => report::line(format!("warning: skipping {}: {error}", path.display())),
        }
    }
    Err(CliError::Usage(format!("{}: no checkpoint to go on from", run.display())))
}

/// Reads the state of a checkpoint after verifying all its files.
///
/// # Errors
/// If the checkpoint is broken.
pub fn open(folder: &Path) -> Result<TrainerState, CliError> {
    if !folder.is_dir() {
        return Err(CliError::Usage(format!("{}: no such checkpoint folder", folder.display())));
    }
    durable::verify(folder)?;
    let path = folder.join(STATE);
    let text = std::fs::read_to_string(&path).map_err(|e| CliError::corrupt(&path, e))?;
    let state: TrainerState = serde_json::from_str(&text).map_err(|e| CliError::corrupt(&path, e))?;
    if state.version != 1 {
        return Err(CliError::corrupt(&path, format!("version {}, this program reads 1", state.version)));
    }
    Ok(state)
}

fn write_optimizer<B: Nvfp4Backend>(
    model: &Qwen3<B>,
    optimizer: &ChunkedAdamw<B>,
    out: &mut dyn std::io::Write,
    path: &Path,
) -> Result<(), CliError> {
    let fields = fields(model);
    let states: Vec<_> =
        fields.iter().filter_map(|(name, field)| Some((name, field.shape(), optimizer.state(field.id()?)?))).collect();
    let mut layout = Vec::new();
    for (name, shape, state) in &states {
        let len: usize = shape.iter().product();
        layout.push((format!("{name}.steps"), Dtype::I32, vec![]));
        let moments = &state.moments;
        for (part, moment) in [("m", &moments.m), ("v", &moments.v)] {
            match moment {
                Moment::Float(x) => layout.push((format!("{name}.{part}"), float_of(x.dtype()).1, vec![len])),
                Moment::Quantised { codes, .. } => {
                    layout.push((format!("{name}.{part}.codes"), Dtype::U8, codes.shape().to_vec()));
                    layout.push((format!("{name}.{part}.absmax"), Dtype::F32, vec![len.div_ceil(256)]));
                }
                Moment::Nvfp4 { codes, scales, .. } => {
                    layout.push((format!("{name}.{part}.codes"), Dtype::U8, codes.shape().to_vec()));
                    layout.push((format!("{name}.{part}.scales"), Dtype::U8, scales.shape().to_vec()));
                    layout.push((format!("{name}.{part}.absmax"), Dtype::F32, vec![len.div_ceil(256)]));
                }
            }
        }
        if state.residual.is_some() {
            layout.push((format!("{name}.residual"), Dtype::U8, vec![len]));
        }
    }
    let mut put = |bytes: &[u8]| out.write_all(bytes).map_err(CliError::io(path));
    put(&header(&layout))?;
    for (_, _, state) in states {
        put(&bytes::of_i32s([state.steps]))?;
        for moment in [&state.moments.m, &state.moments.v] {
            match moment {
                Moment::Float(x) => put(&float_of(x.dtype()).0.encode(&host::<B>(x)?))?,
                Moment::Quantised { codes, absmax, .. } => {
                    put(&bytes_of::<B>(codes)?)?;
                    put(&FloatType::F32.encode(&host::<B>(absmax)?))?;
                }
                Moment::Nvfp4 { codes, scales, absmax } => {
                    put(&bytes_of::<B>(codes)?)?;
                    put(&bytes_of::<B>(scales)?)?;
                    put(&FloatType::F32.encode(&host::<B>(absmax)?))?;
                }
            }
        }
        if let Some(residual) = &state.residual {
            put(&bytes_of::<B>(residual)?)?;
        }
    }
    Ok(())
}

/// How a moment's float type is written.
fn float_of(dtype: DType) -> (FloatType, Dtype) {
    if dtype == DType::BF16 { (FloatType::Bf16, Dtype::BF16) } else { (FloatType::F32, Dtype::F32) }
}

fn bytes_of<B: Nvfp4Backend>(x: &B::IntTensorPrimitive) -> Result<Vec<u8>, ModelError> {
    let words = backend_nvfp4::read_words::<B>(x.clone())
        .map_err(|source| ModelError::Nvfp4 { name: "optimizer state".into(), source })?;
    Ok(words.into_iter().map(|c| c as u8).collect())
}

fn host<B: Nvfp4Backend>(x: &B::FloatTensorPrimitive) -> Result<Vec<f32>, ModelError> {
    // The rank given here is not used: the data is read flat.
    to_host(Tensor::<B, 1>::from_primitive(TensorPrimitive::Float(flat::<B>(x.clone()))))
}

fn flat<B: Nvfp4Backend>(x: B::FloatTensorPrimitive) -> B::FloatTensorPrimitive {
    use burn::tensor::TensorMetadata;
    let len = x.shape().num_elements();
    B::float_reshape(x, burn::tensor::Shape::new([len]))
}

/// CubeCL counts uploaded bytes in 32 bits until a kernel is launched.
fn launch<B: Nvfp4Backend>(device: &B::Device) {
    drop(Tensor::<B, 1>::zeros([1], device));
}

/// Puts the optimizer's states back.
///
/// # Errors
/// If the file does not fit the model.
pub fn load_optimizer<B: Nvfp4Backend>(
    folder: &Path,
    model: &Qwen3<B>,
    optimizer: &mut ChunkedAdamw<B>,
) -> Result<(), CliError> {
    let path = folder.join(OPTIMIZER);
    let file = SafeFile::open(&path)?;
    let find = |name: &str| file.entries().iter().find(|e| e.name == name);
    let read = |name: &str, expected: usize| -> Result<Vec<u8>, CliError> {
        let entry = find(name).ok_or_else(|| CliError::corrupt(&path, format!("no {name:?}")))?;
        if entry.bytes != expected as u64 {
            return Err(CliError::corrupt(&path, format!("{name:?} has {} bytes, {expected} needed", entry.bytes)));
        }
        let mut buffer = vec![0; expected];
        file.read(entry, 0, &mut buffer)?;
        Ok(buffer)
    };
    let device = model.device();
    for (name, field) in fields(model) {
        let (Some(id), Some(_)) = (field.id(), find(&format!("{name}.steps"))) else { continue };
        let shape = field.shape();
        let len: usize = shape.iter().product();
        let steps = bytes::to_i32s(&read(&format!("{name}.steps"), 4)?)[0];
        let kind = if shape.len() == 1 { StateKind::F32 } else { optimizer.config().state };
        let moment = |part: &str, first: bool| -> Result<Moment<B>, CliError> {
            let name = format!("{name}.{part}");
            if let Some(coding) = kind.coding() {
                let codes = read(&format!("{name}.codes"), len * coding.bits() / 8)?;
                let scales = match kind {
                    StateKind::Nvfp4 => Some(read(&format!("{name}.scales"), len / 16)?),
                    _ => None,
                };
                let absmax = FloatType::F32.decode(&read(&format!("{name}.absmax"), len.div_ceil(256) * 4)?);
                return Ok(Moment::from_bytes(kind, first, codes, scales, absmax, &device));
            }
            let dtype = if kind == StateKind::Bf16 { optimizer.config().float } else { DType::F32 };
            let float = float_of(dtype).0;
            let values = float.decode(&read(&name, len * float.size())?);
            let flat = Tensor::<B, 1>::from_data(TensorData::new(values, [len]), (&device, dtype));
            launch::<B>(&device);
            Ok(Moment::Float(flat.into_primitive().tensor()))
        };
        let moments = AdamwState { kind, m: moment("m", true)?, v: moment("v", false)? };
        let residual = match find(&format!("{name}.residual")) {
            None => None,
            Some(_) => {
                let data = TensorData::new(read(&format!("{name}.residual"), len)?, [len]);
                let residual = Tensor::<B, 1, Int>::from_data(data, (&device, DType::U8)).into_primitive();
                launch::<B>(&device);
                Some(residual)
            }
        };
        optimizer.restore(id, TensorState { steps, moments, residual });
    }
    Ok(())
}
