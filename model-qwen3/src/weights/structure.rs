//! Which field of a model holds which tensor: [`build`] fills the fields, [`fields`] lists them under the same names in
//! the same order, [`Replace`] exchanges them.

use crate::{
    ModelError,
    bytes::FloatType,
    config::Qwen3Config,
    model::{Attention, Block, Mlp, Qwen3},
    names::{
        DOWN_PROJ, EMBEDDING, FINAL_NORM, GATE_PROJ, HEAD, INPUT_LAYERNORM, K_NORM, K_PROJ, O_PROJ,
        POST_ATTENTION_LAYERNORM, Q_NORM, Q_PROJ, UP_PROJ, V_PROJ, in_block,
    },
};
use backend_nvfp4::{LinearSpec, MasterWeight, Nvfp4Kernels, Nvfp4Linear, Nvfp4Tensor, PackedMaster, PackedWeight};
use burn::{
    module::{Param, ParamId},
    tensor::{DType, Tensor, backend::Backend},
};

/// Gives the tensors of a model by name.
pub(super) trait Source<B: Backend> {
    /// The weight of a norm.
    fn vector(&mut self, name: &str, len: usize) -> Result<Param<Tensor<B, 1>>, ModelError>;
    /// The embedding.
    fn matrix(&mut self, name: &str, shape: [usize; 2]) -> Result<Param<Tensor<B, 2>>, ModelError>;
    /// The weight of a linear layer.
    fn linear(&mut self, name: &str, shape: [usize; 2]) -> Result<Nvfp4Linear<B>, ModelError>;
}

/// Builds a model from the tensors of a source.
pub(super) fn build<B: Nvfp4Kernels, Origin: Source<B>>(
    config: &Qwen3Config,
    spec: LinearSpec,
    has_head: bool,
    source: &mut Origin,
) -> Result<Qwen3<B>, ModelError> {
    let (d, e, f) = (config.hidden_size, config.head_dim, config.intermediate_size);
    let (q, kv) = (config.num_attention_heads * e, config.num_key_value_heads * e);
    let embed_tokens = source.matrix(EMBEDDING, [config.vocab_size, d])?;
    let mut layers = Vec::with_capacity(config.num_hidden_layers);
    for i in 0..config.num_hidden_layers {
        let name = |part| in_block(i, part);
        layers.push(Block {
            self_attn: Attention {
                q_proj: source.linear(&name(Q_PROJ), [q, d])?,
                k_proj: source.linear(&name(K_PROJ), [kv, d])?,
                v_proj: source.linear(&name(V_PROJ), [kv, d])?,
                o_proj: source.linear(&name(O_PROJ), [d, q])?,
                q_norm: source.vector(&name(Q_NORM), e)?,
                k_norm: source.vector(&name(K_NORM), e)?,
            },
            mlp: Mlp {
                gate_proj: source.linear(&name(GATE_PROJ), [f, d])?,
                up_proj: source.linear(&name(UP_PROJ), [f, d])?,
                down_proj: source.linear(&name(DOWN_PROJ), [d, f])?,
            },
            input_layernorm: source.vector(&name(INPUT_LAYERNORM), d)?,
            post_attention_layernorm: source.vector(&name(POST_ATTENTION_LAYERNORM), d)?,
        });
    }
    let norm = source.vector(FINAL_NORM, d)?;
    let lm_head = if has_head { Some(source.linear(HEAD, [config.vocab_size, d])?) } else { None };
    Ok(Qwen3::new(config.clone(), spec, embed_tokens, layers, norm, lm_head))
}

/// The names of all matrices that a model with so many blocks can have, in the order in which [`build`] asks for them.
pub(super) fn matrices(blocks: usize) -> impl Iterator<Item = String> {
    let parts = [Q_PROJ, K_PROJ, V_PROJ, O_PROJ, GATE_PROJ, UP_PROJ, DOWN_PROJ];
    let of_blocks = (0..blocks).flat_map(move |i| parts.map(|part| in_block(i, part)));
    std::iter::once(EMBEDDING.to_owned()).chain(of_blocks).chain([HEAD.to_owned()])
}

/// A tensor of a model.
#[derive(Debug)]
pub enum Field<'a, B: Backend> {
    /// The weight of a norm.
    Vector(&'a Param<Tensor<B, 1>>),
    /// The embedding.
    Matrix(&'a Param<Tensor<B, 2>>),
    /// The weight of a linear layer.
    Linear(&'a Nvfp4Linear<B>),
}

/// Every tensor of a model under its checkpoint name, in the order in which [`load()`](super::load()) reads them.
pub fn fields<B: Backend>(model: &Qwen3<B>) -> Vec<(String, Field<'_, B>)> {
    use Field::{Linear, Matrix, Vector};
    let mut out = vec![(EMBEDDING.to_owned(), Matrix(&model.embed_tokens))];
    for (i, block) in model.layers.iter().enumerate() {
        let (a, m) = (&block.self_attn, &block.mlp);
        let parts = [
            (Q_PROJ, Linear(&a.q_proj)),
            (K_PROJ, Linear(&a.k_proj)),
            (V_PROJ, Linear(&a.v_proj)),
            (O_PROJ, Linear(&a.o_proj)),
            (Q_NORM, Vector(&a.q_norm)),
            (K_NORM, Vector(&a.k_norm)),
            (GATE_PROJ, Linear(&m.gate_proj)),
            (UP_PROJ, Linear(&m.up_proj)),
            (DOWN_PROJ, Linear(&m.down_proj)),
            (INPUT_LAYERNORM, Vector(&block.input_layernorm)),
            (POST_ATTENTION_LAYERNORM, Vector(&block.post_attention_layernorm)),
        ];
        out.extend(parts.into_iter().map(|(part, field)| (in_block(i, part), field)));
    }
    out.push((FINAL_NORM.to_owned(), Vector(&model.norm)));
    if let Some(head) = &model.lm_head {
        out.push((HEAD.to_owned(), Linear(head)));
    }
    out
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

    /// The parameter's id. Packed weights that are not trained have none.
    pub fn id(&self) -> Option<ParamId> {
        match *self {
            Self::Vector(p) => Some(p.id),
            Self::Matrix(p)
            | Self::Linear(Nvfp4Linear::Master(MasterWeight { weight: p, .. }) | Nvfp4Linear::Dense(p)) => Some(p.id),
            Self::Linear(Nvfp4Linear::PackedMaster(w)) => Some(w.gradient.id),
            Self::Linear(Nvfp4Linear::Packed(_)) => None,
        }
    }

    /// The NVFP4 tensor, if the weight is packed.
    pub fn packed(&self) -> Option<&Nvfp4Tensor<B>> {
        match *self {
            Self::Linear(linear) => linear.codes(),
            Self::Vector(_) | Self::Matrix(_) => None,
        }
    }

    /// The type of the values on the device.
    pub(super) fn float(&self) -> FloatType {
        let dtype = match *self {
            Self::Vector(p) => p.val().dtype(),
            Self::Matrix(p)
            | Self::Linear(Nvfp4Linear::Master(MasterWeight { weight: p, .. }) | Nvfp4Linear::Dense(p)) => {
                p.val().dtype()
            }
            Self::Linear(_) => DType::F32,
        };
        match dtype {
            DType::BF16 => FloatType::Bf16,
            DType::F16 => FloatType::F16,
            _ => FloatType::F32,
        }
    }
}

impl<B: Nvfp4Kernels> Field<'_, B> {
    /// The values as a matrix on the device; a vector is one row. Packed weights are dequantized to f32.
    pub fn matrix(&self) -> Tensor<B, 2> {
        match *self {
            Self::Vector(p) => p.val().unsqueeze(),
            Self::Matrix(p)
            | Self::Linear(Nvfp4Linear::Master(MasterWeight { weight: p, .. }) | Nvfp4Linear::Dense(p)) => p.val(),
            Self::Linear(
                Nvfp4Linear::Packed(PackedWeight { weight, .. })
                | Nvfp4Linear::PackedMaster(PackedMaster { weight, .. }),
            ) => weight.dequantize(DType::F32),
        }
    }
}

/// Takes each tensor of a model and returns the one that replaces it. An optimizer walks a model with it.
pub trait Replace<B: Backend> {
    /// Replaces the weight of a norm.
    fn vector(&mut self, p: Param<Tensor<B, 1>>) -> Param<Tensor<B, 1>>;
    /// Replaces the embedding.
    fn matrix(&mut self, p: Param<Tensor<B, 2>>) -> Param<Tensor<B, 2>>;
    /// Replaces the weight of a linear layer.
    fn linear(&mut self, l: Nvfp4Linear<B>) -> Nvfp4Linear<B>;

    /// Replaces all tensors of a block.
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

    /// Replaces all tensors of a model.
    fn model(&mut self, mut model: Qwen3<B>) -> Qwen3<B> {
        model.embed_tokens = self.matrix(model.embed_tokens);
        model.layers = model.layers.into_iter().map(|b| self.block(b)).collect();
        model.norm = self.vector(model.norm);
        model.lm_head = model.lm_head.map(|head| self.linear(head));
        model
    }
}

/// The model without the codes that the optimizer has left beside master weights. Whoever holds a second handle on a model holds it
/// without them, because codes that are held elsewhere cannot be written over.
pub fn without_codes<B: Backend>(model: Qwen3<B>) -> Qwen3<B> {
    struct WithoutCodes;
    impl<B: Backend> Replace<B> for WithoutCodes {
        fn vector(&mut self, p: Param<Tensor<B, 1>>) -> Param<Tensor<B, 1>> {
            p
        }

        fn matrix(&mut self, p: Param<Tensor<B, 2>>) -> Param<Tensor<B, 2>> {
            p
        }

        fn linear(&mut self, linear: Nvfp4Linear<B>) -> Nvfp4Linear<B> {
            match linear {
                Nvfp4Linear::Master(MasterWeight { weight, .. }) => Nvfp4Linear::Master(weight.into()),
                other => other,
            }
        }
    }
    WithoutCodes.model(model)
}
