//! Key to field, each once. `build` asks a source for every tensor of the model by its checkpoint
//! name and shape; [`fields`] lists the same names in the same order. Nothing else spells a key.

use crate::{
    ModelError,
    checkpoint::{FloatType, Stored, Tensors, row_count, row_width},
    config::Qwen3Config,
    model::{Attention, Block, Mlp, Qwen3},
};
use backend_nvfp4::{
    LinearSpec, Master, MasterKind, Nvfp4Error, Nvfp4Kernels, Nvfp4Linear, Nvfp4Tensor, Packed, PackedMaster, Scaling,
    Stream, layout, reference,
};
use burn::{
    module::{AutodiffModule, Param, ParamId},
    tensor::{
        DType, Tensor, TensorData, TensorPrimitive,
        backend::{AutodiffBackend, Backend},
    },
};
use half::bf16;
use std::{cell::RefCell, collections::HashSet, ops::Range, path::Path};

/// What the model is loaded for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Every tensor becomes a master of this form; NVFP4 tensors are dequantised once, unless masters are NVFP4.
    Train(MasterKind),
    /// NVFP4 tensors stay packed; nothing tracks gradients.
    Infer,
}

/// Loads a model from a checkpoint.
///
/// # Errors
/// If a tensor is missing, misshapen, unknown to the model, or invalid.
pub fn load<B: Nvfp4Kernels>(
    checkpoint: &dyn Tensors,
    config: &Qwen3Config,
    spec: LinearSpec,
    purpose: Purpose,
    device: &B::Device,
) -> Result<Qwen3<B>, ModelError> {
    let copied = config.tie_word_embeddings && head_is_a_copy(checkpoint)?;
    let has_head = checkpoint.stored(HEAD).is_some() && !copied;
    if !has_head && !config.tie_word_embeddings {
        let reason = format!("no tensor {HEAD:?}, and config.json does not tie it to the embedding");
        return Err(ModelError::weights(checkpoint.path(), reason));
    }
    let master = match purpose {
        Purpose::Train(master) => Some(master),
        Purpose::Infer => None,
    };
    let forge = Forge { master, spec, device, next_id: 0 };
    let mut loader = Loader { checkpoint, forge, used: HashSet::new() };
    let model = build(config, spec, has_head, &mut loader)?;
    let mut unknown = checkpoint.names();
    unknown.retain(|n| !(loader.used.contains(n) || copied && n == HEAD));
    if !unknown.is_empty() {
        let shown = unknown[..unknown.len().min(10)].join(", ");
        let reason = format!("{} tensors that this model does not have: {shown}", unknown.len());
        return Err(ModelError::weights(checkpoint.path(), reason));
    }
    Ok(model)
}

/// A model with random weights: normal with the config's spread, norms 1. The same seed gives the
/// same model on every backend, up to the last bits of its logarithms and cosines.
///
/// # Errors
/// If the device fails.
pub fn random<B: Nvfp4Kernels>(
    config: &Qwen3Config,
    spec: LinearSpec,
    master: MasterKind,
    seed: u64,
    device: &B::Device,
) -> Result<Qwen3<B>, ModelError> {
    let std = config.initializer_range as f32;
    let mut source = Random { seed, std, forge: Forge { master: Some(master), spec, device, next_id: 0 } };
    build(config, spec, !config.tie_word_embeddings, &mut source)
}

/// A loaded model on the backend that records gradients. Every parameter is trained; NVFP4 codes are trained only if
/// masters are NVFP4.
pub fn trained<AB: AutodiffBackend>(model: Qwen3<AB::InnerBackend>, master: MasterKind) -> Qwen3<AB> {
    struct Track {
        codes: bool,
    }
    impl<AB: AutodiffBackend> Replace<AB> for Track {
        fn vector(&mut self, p: Param<Tensor<AB, 1>>) -> Param<Tensor<AB, 1>> {
            p.set_require_grad(true)
        }

        fn matrix(&mut self, p: Param<Tensor<AB, 2>>) -> Param<Tensor<AB, 2>> {
            p.set_require_grad(true)
        }

        fn linear(&mut self, linear: Nvfp4Linear<AB>) -> Nvfp4Linear<AB> {
            match linear {
                Nvfp4Linear::Master(p) => Nvfp4Linear::Master(p.set_require_grad(true)),
                Nvfp4Linear::Dense(p) => Nvfp4Linear::Dense(p.set_require_grad(true)),
                Nvfp4Linear::PackedMaster(PackedMaster { gradient, weight }) => {
                    Nvfp4Linear::PackedMaster(PackedMaster { gradient: gradient.set_require_grad(self.codes), weight })
                }
                packed @ Nvfp4Linear::Packed(_) => packed,
            }
        }
    }
    Track { codes: master == MasterKind::Nvfp4 }.model(Qwen3::from_inner(model))
}

const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

/// Some files spell out a tied head. One that equals the embedding is the embedding.
fn head_is_a_copy(tensors: &dyn Tensors) -> Result<bool, ModelError> {
    let (Some(head @ Stored::Dense { .. }), Some(embedding)) = (tensors.stored(HEAD), tensors.stored(EMBEDDING)) else {
        return Ok(false);
    };
    if head != embedding {
        return Ok(false);
    }
    let (rows, step) = (row_count(&head.shape()), 4096);
    for start in (0..rows).step_by(step) {
        let range = start..(start + step).min(rows);
        if tensors.read_rows(HEAD, range.clone())? != tensors.read_rows(EMBEDDING, range)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Gives tensors by name.
trait Source<B: Backend> {
    fn vector(&mut self, name: String, len: usize) -> Result<Param<Tensor<B, 1>>, ModelError>;
    fn matrix(&mut self, name: String, shape: [usize; 2]) -> Result<Param<Tensor<B, 2>>, ModelError>;
    fn linear(&mut self, name: String, shape: [usize; 2]) -> Result<Nvfp4Linear<B>, ModelError>;
}

fn build<B: Nvfp4Kernels, S: Source<B>>(
    config: &Qwen3Config,
    spec: LinearSpec,
    has_head: bool,
    source: &mut S,
) -> Result<Qwen3<B>, ModelError> {
    let (d, e, f) = (config.hidden_size, config.head_dim, config.intermediate_size);
    let (q, kv) = (config.num_attention_heads * e, config.num_key_value_heads * e);
    let embed_tokens = source.matrix(EMBEDDING.into(), [config.vocab_size, d])?;
    let mut layers = Vec::with_capacity(config.num_hidden_layers);
    for i in 0..config.num_hidden_layers {
        let key = |part: &str| format!("model.layers.{i}.{part}.weight");
        layers.push(Block {
            self_attn: Attention {
                q_proj: source.linear(key("self_attn.q_proj"), [q, d])?,
                k_proj: source.linear(key("self_attn.k_proj"), [kv, d])?,
                v_proj: source.linear(key("self_attn.v_proj"), [kv, d])?,
                o_proj: source.linear(key("self_attn.o_proj"), [d, q])?,
                q_norm: source.vector(key("self_attn.q_norm"), e)?,
                k_norm: source.vector(key("self_attn.k_norm"), e)?,
            },
            mlp: Mlp {
                gate_proj: source.linear(key("mlp.gate_proj"), [f, d])?,
                up_proj: source.linear(key("mlp.up_proj"), [f, d])?,
                down_proj: source.linear(key("mlp.down_proj"), [d, f])?,
            },
            input_layernorm: source.vector(key("input_layernorm"), d)?,
            post_attention_layernorm: source.vector(key("post_attention_layernorm"), d)?,
        });
    }
    let norm = source.vector("model.norm.weight".into(), d)?;
    let lm_head = if has_head { Some(source.linear(HEAD.into(), [config.vocab_size, d])?) } else { None };
    Ok(Qwen3::new(config.clone(), spec, embed_tokens, layers, norm, lm_head))
}

/// A tensor of a model.
#[derive(Debug)]
pub enum Field<'a, B: Backend> {
    /// A norm's weight.
    Vector(&'a Param<Tensor<B, 1>>),
    /// The embedding.
    Matrix(&'a Param<Tensor<B, 2>>),
    /// A linear layer's weight.
    Linear(&'a Nvfp4Linear<B>),
}

/// Every tensor of a model by checkpoint name, in the order in which [`load`] reads them.
pub fn fields<B: Backend>(model: &Qwen3<B>) -> Vec<(String, Field<'_, B>)> {
    use Field::{Linear, Matrix, Vector};
    let mut out = vec![(EMBEDDING.to_owned(), Matrix(&model.embed_tokens))];
    for (i, block) in model.layers.iter().enumerate() {
        let (a, m) = (&block.self_attn, &block.mlp);
        let parts = [
            ("self_attn.q_proj", Linear(&a.q_proj)),
            ("self_attn.k_proj", Linear(&a.k_proj)),
            ("self_attn.v_proj", Linear(&a.v_proj)),
            ("self_attn.o_proj", Linear(&a.o_proj)),
            ("self_attn.q_norm", Vector(&a.q_norm)),
            ("self_attn.k_norm", Vector(&a.k_norm)),
            ("mlp.gate_proj", Linear(&m.gate_proj)),
            ("mlp.up_proj", Linear(&m.up_proj)),
            ("mlp.down_proj", Linear(&m.down_proj)),
            ("input_layernorm", Vector(&block.input_layernorm)),
            ("post_attention_layernorm", Vector(&block.post_attention_layernorm)),
        ];
        out.extend(parts.into_iter().map(|(part, f)| (format!("model.layers.{i}.{part}.weight"), f)));
    }
    out.push(("model.norm.weight".into(), Vector(&model.norm)));
    if let Some(head) = &model.lm_head {
        out.push((HEAD.into(), Linear(head)));
    }
    out
}

impl<B: Nvfp4Kernels> Field<'_, B> {
    /// The values on the host, row-major; packed weights dequantised.
    ///
    /// # Errors
    /// If the device failed.
    pub fn to_host(&self) -> Result<Vec<f32>, ModelError> {
        match *self {
            Self::Vector(p) => to_host(p.val()),
            Self::Matrix(p) | Self::Linear(Nvfp4Linear::Master(p) | Nvfp4Linear::Dense(p)) => to_host(p.val()),
            Self::Linear(Nvfp4Linear::Packed(w) | Nvfp4Linear::PackedMaster(PackedMaster { weight: w, .. })) => {
                to_host(w.dequantize(DType::F32))
            }
        }
    }
}

impl<B: Backend> Field<'_, B> {
    /// The tensor's shape.
    pub fn shape(&self) -> Vec<usize> {
        match *self {
            Self::Vector(p) => p.dims().to_vec(),
            Self::Matrix(p) => p.dims().to_vec(),
            Self::Linear(l) => l.dims().to_vec(),
        }
    }

    /// The parameter's id; packed weights have none.
    pub fn id(&self) -> Option<ParamId> {
        match *self {
            Self::Vector(p) => Some(p.id),
            Self::Matrix(p) | Self::Linear(Nvfp4Linear::Master(p) | Nvfp4Linear::Dense(p)) => Some(p.id),
            Self::Linear(Nvfp4Linear::PackedMaster(w)) => Some(w.gradient.id),
            Self::Linear(Nvfp4Linear::Packed(_)) => None,
        }
    }

    /// The codes, where the tensor is packed.
    pub fn packed(&self) -> Option<&Nvfp4Tensor<B>> {
        match *self {
            Self::Linear(Nvfp4Linear::Packed(w) | Nvfp4Linear::PackedMaster(PackedMaster { weight: w, .. })) => Some(w),
            _ => None,
        }
    }

    /// The type of the values on the device.
    fn float(&self) -> FloatType {
        let dtype = match *self {
            Self::Vector(p) => p.val().dtype(),
            Self::Matrix(p) | Self::Linear(Nvfp4Linear::Master(p) | Nvfp4Linear::Dense(p)) => p.val().dtype(),
            Self::Linear(_) => DType::F32,
        };
        match dtype {
            DType::BF16 => FloatType::Bf16,
            DType::F16 => FloatType::F16,
            _ => FloatType::F32,
        }
    }
}

/// A float tensor's values on the host.
///
/// # Errors
/// If the device failed.
pub fn to_host<B: Backend, const D: usize>(x: Tensor<B, D>) -> Result<Vec<f32>, ModelError> {
    fn failed(e: impl std::fmt::Debug) -> ModelError {
        ModelError::Device(format!("{e:?}"))
    }
    let data = x.try_into_data().map_err(failed)?;
    // `iter` would go value by value through a boxed iterator: every token does, over the vocabulary.
    Ok(match data.dtype {
        DType::F32 => data.into_vec().map_err(failed)?,
        DType::BF16 => data.into_vec::<bf16>().map_err(failed)?.into_iter().map(bf16::to_f32).collect(),
        _ => data.iter().collect(),
    })
}

/// A model's tensors, read from its device: packed weights as they are, the rest as f32.
pub struct Live<'a, B: Backend> {
    fields: Vec<(String, Field<'a, B>)>,
    // Rows are asked for one range after another: the tensor is fetched once.
    fetched: RefCell<Option<(String, Vec<f32>)>>,
}

impl<'a, B: Nvfp4Kernels> Live<'a, B> {
    /// Looks at a model.
    pub fn new(model: &'a Qwen3<B>) -> Self {
        Self { fields: fields(model), fetched: RefCell::new(None) }
    }

    fn field(&self, name: &str) -> Option<&Field<'a, B>> {
        self.fields.iter().find(|(n, _)| n == name).map(|(_, f)| f)
    }
}

impl<B: Nvfp4Kernels> Tensors for Live<'_, B> {
    fn path(&self) -> &Path {
        Path::new("model in memory")
    }

    fn names(&self) -> Vec<String> {
        self.fields.iter().map(|(n, _)| n.clone()).collect()
    }

    fn stored(&self, name: &str) -> Option<Stored> {
        let field = self.field(name)?;
        Some(match field.packed() {
            Some(w) => {
                let [rows, cols] = w.dims();
                Stored::Packed { rows, cols, scaling: Scaling::Two }
            }
            None => Stored::Dense { float: field.float(), shape: field.shape() },
        })
    }

    fn read_rows(&self, name: &str, rows: Range<usize>) -> Result<Vec<f32>, ModelError> {
        let mut fetched = self.fetched.borrow_mut();
        if fetched.as_ref().is_none_or(|(n, _)| n != name) {
            drop(fetched.take());
            let missing = || ModelError::weights(self.path(), format!("no tensor {name:?}"));
            *fetched = Some((name.to_owned(), self.field(name).ok_or_else(missing)?.to_host()?));
        }
        let (_, values) = fetched.as_ref().expect("fetched above");
        let shape = self.field(name).map(Field::shape).unwrap_or_default();
        let width = row_width(&shape);
        Ok(values[rows.start * width..rows.end * width].to_vec())
    }

    fn read_packed(&self, name: &str) -> Result<Packed, ModelError> {
        match self.field(name).and_then(Field::packed) {
            Some(w) => w.to_packed().map_err(|source| ModelError::Nvfp4 { name: name.to_owned(), source }),
            _ => Err(ModelError::weights(self.path(), format!("{name:?} is not NVFP4"))),
        }
    }
}

/// Makes parameters: ids, types, forms of masters.
struct Forge<'a, B: Backend> {
    /// `None` for inference.
    master: Option<MasterKind>,
    spec: LinearSpec,
    device: &'a B::Device,
    next_id: u64,
}

/// Values of a tensor that go to the device at once: what the host holds of it, in f32.
const PART: usize = 1 << 20;

impl<B: Nvfp4Kernels> Forge<'_, B> {
    /// The type in which a dense matrix lies on the device, and whether the host rounds its values to bf16 first: where
    /// masters are bf16, also in f32 where activations are f32. What is not trained lies there as it is multiplied.
    fn dense(&self) -> (DType, bool) {
        let computed = self.spec.precision.dtype();
        match self.master.map(MasterKind::dense) {
            None => (computed, false),
            Some(Master::Exact) => (DType::F32, false),
            Some(_) => (computed, true),
        }
    }

    /// A tensor of `shape` as `dtype`, a range of rows after another. The host never holds all of it.
    fn tensor<E>(
        &self,
        shape: [usize; 2],
        (dtype, bf16): (DType, bool),
        mut rows: impl FnMut(Range<usize>) -> Result<Vec<f32>, E>,
    ) -> Result<Tensor<B, 2>, E> {
        let [count, width] = shape;
        let mut tensor = Tensor::<B, 2>::from_primitive(TensorPrimitive::Float(B::unfilled(shape, dtype, self.device)));
        let step = (PART / width.max(1)).max(1);
        for start in (0..count).step_by(step) {
            let range = start..(start + step).min(count);
            let mut values = rows(range.clone())?;
            let part = [range.len(), width];
            let data = if bf16 && dtype == DType::BF16 {
                TensorData::new(values.into_iter().map(bf16::from_f32).collect(), part)
            } else {
                if bf16 {
                    values.iter_mut().for_each(|v| *v = bf16::from_f32(*v).to_f32());
                }
                TensorData::new(values, part)
            };
            tensor = tensor.slice_assign([range, 0..width], Tensor::from_data(data, (self.device, dtype)));
        }
        Ok(tensor)
    }

    fn vector(&mut self, values: Vec<f32>) -> Param<Tensor<B, 1>> {
        let len = values.len();
        self.param(Tensor::from_data(TensorData::new(values, [len]), (self.device, DType::F32)))
    }

    /// A matrix on the device as a dense matrix.
    fn matrix_of(&mut self, values: Tensor<B, 2>) -> Result<Param<Tensor<B, 2>>, ModelError> {
        let (dtype, bf16) = self.dense();
        let rounded = if bf16 && dtype == DType::F32 { rounded_to_bf16(values)? } else { values.cast(dtype) };
        Ok(self.param(rounded))
    }

    /// A matrix on the device as a master weight of a linear layer.
    fn linear_of(&mut self, values: Tensor<B, 2>) -> Result<Nvfp4Linear<B>, ModelError> {
        if self.master != Some(MasterKind::Nvfp4) {
            return Ok(Nvfp4Linear::Master(self.matrix_of(values)?));
        }
        let weight = B::nvfp4_quantize_master(values.into_primitive().tensor());
        Ok(self.packed_master(Nvfp4Tensor::from_primitive(weight)))
    }

    fn packed_master(&mut self, weight: Nvfp4Tensor<B>) -> Nvfp4Linear<B> {
        let gradient = self.param(Tensor::zeros([1, 1], (self.device, DType::F32)));
        Nvfp4Linear::PackedMaster(PackedMaster::new(weight, gradient))
    }

    /// A parameter with a stable id.
    fn param<const D: usize>(&mut self, tensor: Tensor<B, D>) -> Param<Tensor<B, D>> {
        self.next_id += 1;
        Param::initialized(ParamId::from(self.next_id), tensor)
    }
}

/// For devices that know no bf16: by way of the host.
fn rounded_to_bf16<B: Backend>(x: Tensor<B, 2>) -> Result<Tensor<B, 2>, ModelError> {
    let (device, dims) = (x.device(), x.dims());
    let values: Vec<f32> = to_host(x)?.into_iter().map(|v| bf16::from_f32(v).to_f32()).collect();
    Ok(Tensor::from_data(TensorData::new(values, dims), (&device, DType::F32)))
}

struct Loader<'a, B: Backend> {
    checkpoint: &'a dyn Tensors,
    forge: Forge<'a, B>,
    used: HashSet<String>,
}

impl<B: Nvfp4Kernels> Loader<'_, B> {
    fn expect(&mut self, name: &str, shape: &[usize]) -> Result<Stored, ModelError> {
        let found = self.checkpoint.stored(name).ok_or_else(|| {
            ModelError::weights(self.checkpoint.path(), format!("no tensor {name:?} of shape {shape:?}"))
        })?;
        if found.shape() != shape {
            let reason = format!("{name:?} has shape {:?}, config.json asks for {shape:?}", found.shape());
            return Err(ModelError::weights(self.checkpoint.path(), reason));
        }
        self.used.insert(name.to_owned());
        Ok(found)
    }

    /// A dense matrix of the file in the given form.
    fn dense(&self, name: &str, shape: [usize; 2], form: (DType, bool)) -> Result<Tensor<B, 2>, ModelError> {
        self.forge.tensor(shape, form, |rows| self.checkpoint.read_rows(name, rows))
    }

    /// An NVFP4 matrix of the file, its scales checked.
    fn packed(&self, name: &str, [rows, cols]: [usize; 2]) -> Result<Nvfp4Tensor<B>, ModelError> {
        let packed = self.checkpoint.read_packed(name)?;
        let tensor = Nvfp4Tensor::new(packed, rows, cols, self.forge.device).map_err(nvfp4(name))?;
        // CubeCL counts uploaded bytes in 32 bits until a kernel is launched: more than 4 GiB of codes need one between.
        drop(Tensor::<B, 1>::zeros([1], self.forge.device));
        Ok(tensor)
    }
}

fn nvfp4(name: &str) -> impl Fn(Nvfp4Error) -> ModelError {
    move |source| ModelError::Nvfp4 { name: name.to_owned(), source }
}

impl<B: Nvfp4Kernels> Source<B> for Loader<'_, B> {
    fn vector(&mut self, name: String, len: usize) -> Result<Param<Tensor<B, 1>>, ModelError> {
        self.expect(&name, &[len])?;
        let values = self.checkpoint.read_dense(&name)?;
        Ok(self.forge.vector(values))
    }

    fn matrix(&mut self, name: String, shape: [usize; 2]) -> Result<Param<Tensor<B, 2>>, ModelError> {
        if let Stored::Packed { .. } = self.expect(&name, &shape)? {
            let values = self.packed(&name, shape)?.dequantize(DType::F32);
            return self.forge.matrix_of(values);
        }
        let values = self.dense(&name, shape, self.forge.dense())?;
        Ok(self.forge.param(values))
    }

    fn linear(&mut self, name: String, shape: [usize; 2]) -> Result<Nvfp4Linear<B>, ModelError> {
        let stored = self.expect(&name, &shape)?;
        let [rows, cols] = shape;
        match (self.forge.master, stored) {
            (None, Stored::Packed { .. }) => {
                self.forge.next_id += 1;
                Ok(Nvfp4Linear::Packed(self.packed(&name, shape)?))
            }
            // A head that its file keeps dense stays dense; so does all that is not trained.
            (None, Stored::Dense { .. }) => Ok(Nvfp4Linear::Dense(self.matrix(name, shape)?)),
            (Some(_), _) if name == HEAD && !self.checkpoint.trains_quantised(&name) => {
                Ok(Nvfp4Linear::Dense(self.matrix(name, shape)?))
            }
            (Some(_), Stored::Packed { .. }) if self.checkpoint.keeps_codes(&name) => {
                let packed = self.packed(&name, shape)?;
                Ok(self.forge.packed_master(packed))
            }
            (Some(MasterKind::Nvfp4), Stored::Packed { .. }) => {
                // Scales are checked before anything is computed with them.
                let packed = self.packed(&name, shape)?.to_packed().map_err(nvfp4(&name))?;
                let roomy = reference::with_room(packed, rows, cols);
                let weight = Nvfp4Tensor::new(roomy, rows, cols, self.forge.device).map_err(nvfp4(&name))?;
                Ok(self.forge.packed_master(weight))
            }
            (Some(_), Stored::Packed { .. }) => {
                let values = self.packed(&name, shape)?.dequantize(DType::F32);
                self.forge.linear_of(values)
            }
            (Some(MasterKind::Nvfp4), Stored::Dense { .. }) => {
                if !cols.is_multiple_of(layout::BLOCK) {
                    return Err(nvfp4(&name)(Nvfp4Error::Columns { cols }));
                }
                let values = self.dense(&name, shape, (DType::F32, false))?;
                self.forge.linear_of(values)
            }
            (Some(_), Stored::Dense { .. }) => {
                let values = self.dense(&name, shape, self.forge.dense())?;
                Ok(Nvfp4Linear::Master(self.forge.param(values)))
            }
        }
    }
}

struct Random<'a, B: Backend> {
    seed: u64,
    std: f32,
    forge: Forge<'a, B>,
}

impl<B: Nvfp4Kernels> Random<'_, B> {
    fn normal(&self, shape: [usize; 2], dtype: DType) -> Tensor<B, 2> {
        let stream = Stream { seed: self.seed, step: 0, stream: self.forge.next_id as u32 };
        let values = B::normal(shape, self.std, stream, dtype, self.forge.device);
        Tensor::from_primitive(TensorPrimitive::Float(values))
    }
}

impl<B: Nvfp4Kernels> Source<B> for Random<'_, B> {
    fn vector(&mut self, _: String, len: usize) -> Result<Param<Tensor<B, 1>>, ModelError> {
        Ok(self.forge.vector(vec![1.0; len]))
    }

    fn matrix(&mut self, _: String, shape: [usize; 2]) -> Result<Param<Tensor<B, 2>>, ModelError> {
        let values = self.normal(shape, self.forge.dense().0);
        self.forge.matrix_of(values)
    }

    fn linear(&mut self, name: String, shape: [usize; 2]) -> Result<Nvfp4Linear<B>, ModelError> {
        if name == HEAD {
            return Ok(Nvfp4Linear::Dense(self.matrix(name, shape)?));
        }
        // What is quantised is not rounded before.
        let packed = self.forge.master == Some(MasterKind::Nvfp4);
        let values = self.normal(shape, if packed { DType::F32 } else { self.forge.dense().0 });
        self.forge.linear_of(values)
    }
}

/// Takes tensors and gives back what stands in their place: how an optimizer walks a model.
pub trait Replace<B: Backend> {
    /// A norm's weight.
    fn vector(&mut self, p: Param<Tensor<B, 1>>) -> Param<Tensor<B, 1>>;
    /// The embedding.
    fn matrix(&mut self, p: Param<Tensor<B, 2>>) -> Param<Tensor<B, 2>>;
    /// A linear layer's weight.
    fn linear(&mut self, l: Nvfp4Linear<B>) -> Nvfp4Linear<B>;

    /// All tensors of a block.
    fn block(&mut self, block: Block<B>) -> Block<B> {
        let Block { self_attn: a, mlp: m, input_layernorm, post_attention_layernorm } = block;
        Block {
            self_attn: Attention {
                q_proj: self.linear(a.q_proj),
                k_proj: self.linear(a.k_proj),
                v_proj: self.linear(a.v_proj),
                o_proj: self.linear(a.o_proj),
                q_norm: self.vector(a.q_norm),
                k_norm: self.vector(a.k_norm),
            },
            mlp: Mlp {
                gate_proj: self.linear(m.gate_proj),
                up_proj: self.linear(m.up_proj),
                down_proj: self.linear(m.down_proj),
            },
            input_layernorm: self.vector(input_layernorm),
            post_attention_layernorm: self.vector(post_attention_layernorm),
        }
    }

    /// All tensors of a model.
    fn model(&mut self, mut model: Qwen3<B>) -> Qwen3<B> {
        model.embed_tokens = self.matrix(model.embed_tokens);
        model.layers = model.layers.into_iter().map(|b| self.block(b)).collect();
        model.norm = self.vector(model.norm);
        model.lm_head = model.lm_head.map(|head| self.linear(head));
        model
    }
}
