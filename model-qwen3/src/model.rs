//! Qwen3: grouped-query attention with RMS-normalised queries and keys, SwiGLU MLP, pre-norm blocks.
//! Fields carry checkpoint names. Shape letters are the crate's ([`crate`]).
//!
//! Parameters are f32 masters (or packed NVFP4); activations flow in the dtype of the spec's
//! precision. Norms, rotary angles and softmax are computed in f32, as Hugging Face does.

use crate::{
    ModelError,
    config::Qwen3Config,
    kv_cache::{KvCache, LayerCache},
    loss::cross_entropy_sum,
    rope::rotary,
};
use backend_nvfp4::{
    Activations, AttentionSpec, Documents, LinearSpec, Nvfp4Backend, Nvfp4Linear, Recipe, Rotary, Stream, linears,
};
use burn::{
    module::{Module, Param},
    tensor::{DType, Int, Tensor, TensorData, TensorPrimitive, backend::Backend, ops::FloatTensor},
};

/// Grouped-query attention.
#[derive(Module, Debug)]
pub struct Attention<B: Backend> {
    /// `[H*E, D]`.
    pub q_proj: Nvfp4Linear<B>,
    /// `[K*E, D]`.
    pub k_proj: Nvfp4Linear<B>,
    /// `[K*E, D]`.
    pub v_proj: Nvfp4Linear<B>,
    /// `[D, H*E]`.
    pub o_proj: Nvfp4Linear<B>,
    /// `[E]`.
    pub q_norm: Param<Tensor<B, 1>>,
    /// `[E]`.
    pub k_norm: Param<Tensor<B, 1>>,
}

/// `down(silu(gate(x)) * up(x))`.
#[derive(Module, Debug)]
pub struct Mlp<B: Backend> {
    /// `[F, D]`.
    pub gate_proj: Nvfp4Linear<B>,
    /// `[F, D]`.
    pub up_proj: Nvfp4Linear<B>,
    /// `[D, F]`.
    pub down_proj: Nvfp4Linear<B>,
}

/// One transformer block.
#[derive(Module, Debug)]
pub struct Block<B: Backend> {
    /// Attention.
    pub self_attn: Attention<B>,
    /// MLP.
    pub mlp: Mlp<B>,
    /// `[D]`.
    pub input_layernorm: Param<Tensor<B, 1>>,
    /// `[D]`.
    pub post_attention_layernorm: Param<Tensor<B, 1>>,
}

/// The model with its head.
#[derive(Module, Debug)]
pub struct Qwen3<B: Backend> {
    /// `[V, D]`.
    pub embed_tokens: Param<Tensor<B, 2>>,
    /// Blocks, first to last.
    pub layers: Vec<Block<B>>,
    /// `[D]`.
    pub norm: Param<Tensor<B, 1>>,
    /// `[V, D]`; `None` where the head is the embedding.
    pub lm_head: Option<Nvfp4Linear<B>>,
    #[module(skip)]
    info: Info,
}

/// What a model knows besides its tensors.
#[derive(Debug, Clone)]
struct Info {
    config: Qwen3Config,
    spec: LinearSpec,
    bf16_last_blocks: usize,
}

/// Linear layers of a block, rounded up: each has random numbers of its own.
const LINEARS: u32 = 8;
/// Where the streams of gradient rounding begin; those below are the optimizer's, one a parameter.
const GRADIENT_STREAMS: u32 = 0x4000_0000;

/// What every block of one forward shares.
#[derive(Debug, Clone)]
pub struct Context<B: Backend> {
    rotary: Rotary<B>,
    documents: Documents<B>,
    spec: LinearSpec,
    attention: AttentionSpec,
    eps: f64,
}

impl<B: Nvfp4Backend> Attention<B> {
    /// `x` `[M, D]` to `[M, D]`. With a cache, new tokens also see what it holds.
    pub fn forward(
        &self,
        x_MD: Activations<B>,
        ctx: &Context<B>,
        cache: Option<(&mut LayerCache<B>, usize)>,
    ) -> Tensor<B, 2> {
        // 1. Project; normalise and rotate queries and keys head by head.
        let heads = |x: Tensor<B, 2>, norm: &Param<Tensor<B, 1>>| {
            float(B::norm_rope(primitive(x), primitive(norm.val()), &ctx.rotary, ctx.eps))
        };
        let layers = [&self.q_proj, &self.k_proj, &self.v_proj];
        let [q_MC, k_MC, v_MC] = linears(layers, x_MD, [0, 1, 2].map(|i| ctx.spec.slot(i)));
        let (q_MC, k_MC) = (heads(q_MC, &self.q_norm), heads(k_MC, &self.k_norm));
        let (k_SC, v_SC) = match cache {
            Some((layer, past)) => layer.append(k_MC, v_MC, past),
            None => (k_MC, v_MC),
        };

        // 2. Mix values, project back.
        let qkv = (primitive(q_MC), primitive(k_SC), primitive(v_SC));
        let y_MC = float(B::causal_attention(qkv.0, qkv.1, qkv.2, &ctx.documents, ctx.attention));
        self.o_proj.forward(y_MC, ctx.spec.slot(3))
    }
}

impl<B: Nvfp4Backend> Mlp<B> {
    /// `x` `[M, D]` to `[M, D]`.
    pub fn forward(&self, x_MD: Activations<B>, spec: LinearSpec) -> Tensor<B, 2> {
        let layers = [&self.gate_proj, &self.up_proj];
        let [gate_MF, up_MF] = linears(layers, x_MD, [4, 5].map(|i| spec.slot(i)));
        let y_MF = B::swiglu_activations(primitive(gate_MF), primitive(up_MF), spec);
        let [y_MD] = linears([&self.down_proj], y_MF, [spec.slot(6)]);
        y_MD
    }
}

impl<B: Nvfp4Backend> Block<B> {
    /// `x` `[M, D]` to `[M, D]`.
    pub fn forward(
        &self,
        x_MD: Tensor<B, 2>,
        ctx: &Context<B>,
        cache: Option<(&mut LayerCache<B>, usize)>,
    ) -> Tensor<B, 2> {
        let weight = primitive(self.input_layernorm.val());
        let normed = B::rms_norm_activations(primitive(x_MD.clone()), weight, ctx.eps, ctx.spec);
        let y_MD = self.self_attn.forward(normed, ctx, cache);

        let weight = primitive(self.post_attention_layernorm.val());
        let (x_MD, normed) = B::add_rms_norm(primitive(x_MD), primitive(y_MD), weight, ctx.eps, ctx.spec);
        float(x_MD) + self.mlp.forward(normed, ctx.spec)
    }
}

impl<B: Nvfp4Backend> Qwen3<B> {
    /// Puts a model together.
    pub fn new(
        config: Qwen3Config,
        spec: LinearSpec,
        embed_tokens: Param<Tensor<B, 2>>,
        layers: Vec<Block<B>>,
        norm: Param<Tensor<B, 1>>,
        lm_head: Option<Nvfp4Linear<B>>,
    ) -> Self {
        Self { embed_tokens, layers, norm, lm_head, info: Info { config, spec, bf16_last_blocks: 0 } }
    }

    /// The model's shape.
    pub fn config(&self) -> &Qwen3Config {
        &self.info.config
    }

    /// How its linear layers compute.
    pub fn spec(&self) -> LinearSpec {
        self.info.spec
    }

    /// Computes the linear layers of the last `n` blocks without quantisation.
    #[must_use]
    pub fn with_bf16_last_blocks(mut self, n: usize) -> Self {
        self.info.bf16_last_blocks = n;
        self
    }

    /// The same weights under another recipe: what they are worth quantised, or not.
    #[must_use]
    pub fn with_recipe(mut self, recipe: Recipe) -> Self {
        self.info.spec.recipe = recipe;
        self
    }

    /// Whether block `i` is one of those.
    pub fn is_bf16(&self, i: usize) -> bool {
        i + self.info.bf16_last_blocks >= self.info.config.num_hidden_layers
    }

    /// Gives the stochastic rounding of the next passes its random numbers: those of micro-batch `step` of a run.
    pub fn draw_from(&mut self, seed: u64, step: u32) {
        self.info.spec.stream = Stream { seed, step, stream: GRADIENT_STREAMS };
    }

    /// Where its tensors are.
    pub fn device(&self) -> B::Device {
        self.embed_tokens.device()
    }

    /// Token ids `[B, T]` to the final hidden states `[B*T, D]`, normalised. With a cache B is 1.
    pub fn forward(&self, ids_BT: Tensor<B, 2, Int>, cache: Option<&mut KvCache<B>>) -> Tensor<B, 2> {
        self.forward_watched(ids_BT, cache, |_| {})
    }

    /// As [`Self::forward`], showing `watch` the embedding, each block's output but the last, and the
    /// normalised last: what Hugging Face calls `hidden_states`, `[B*T, D]` each.
    pub fn forward_watched(
        &self,
        ids_BT: Tensor<B, 2, Int>,
        mut cache: Option<&mut KvCache<B>>,
        mut watch: impl FnMut(&Tensor<B, 2>),
    ) -> Tensor<B, 2> {
        let [b, t] = ids_BT.dims();
        assert!(b == 1 || cache.is_none(), "a cache is of one sequence");
        let ctx = self.context(cache.as_ref().map_or(0, |c| c.len()), b, t);
        let mut h_MD = self.embed(ids_BT);
        for (i, block) in self.layers.iter().enumerate() {
            watch(&h_MD);
            h_MD = block.forward(h_MD, &self.of_block(&ctx, i), cache.as_mut().map(|c| c.layer(i)));
        }
        if let Some(cache) = cache {
            cache.advance(t);
        }
        let h_MD = self.final_norm(h_MD);
        watch(&h_MD);
        h_MD
    }

    /// Rows of the embedding, `[B*T, D]`.
    pub fn embed(&self, ids_BT: Tensor<B, 2, Int>) -> Tensor<B, 2> {
        let [b, t] = ids_BT.dims();
        let ids = ids_BT.reshape([b * t]).into_primitive();
        float(B::token_rows(primitive(self.embed_tokens.val()), ids, self.info.spec.precision.dtype()))
    }

    /// The context as block `i` sees it: its own random numbers, its own recipe.
    pub fn of_block(&self, ctx: &Context<B>, i: usize) -> Context<B> {
        let mut spec = ctx.spec.slot(i as u32 * LINEARS);
        if self.is_bf16(i) {
            spec.recipe = Recipe::Bf16;
        }
        Context { spec, ..ctx.clone() }
    }

    /// Angles and visibility for `t` new tokens behind `past` old ones in each of `rows` rows, a row one document.
    pub fn context(&self, past: usize, rows: usize, t: usize) -> Context<B> {
        let positions = (0..rows).flat_map(|_| (past..past + t).map(|p| p as u32)).collect();
        self.context_of(past, rows, positions, vec![0; rows * t])
    }

    /// As [`Self::context`] for any positions and documents: see [`Documents::new`].
    pub fn context_of(&self, past: usize, rows: usize, positions: Vec<u32>, starts: Vec<u32>) -> Context<B> {
        let Info { config, spec, .. } = &self.info;
        let device = self.device();
        Context {
            rotary: rotary::<B>(positions, config.head_dim, config.rope_theta, &device),
            documents: Documents::new(rows, past, starts, &device),
            spec: *spec,
            attention: AttentionSpec {
                heads: config.num_attention_heads,
                kv_heads: config.num_key_value_heads,
                head_dim: config.head_dim,
                precision: spec.precision,
            },
            eps: config.rms_norm_eps,
        }
    }

    /// The norm before the head.
    pub fn final_norm(&self, h_MD: Tensor<B, 2>) -> Tensor<B, 2> {
        float(B::rms_norm(primitive(h_MD), primitive(self.norm.val()), self.info.config.rms_norm_eps))
    }

    /// Normalised hidden states `[M, D]` to logits `[M, V]` in f32.
    pub fn logits(&self, h_MD: Tensor<B, 2>) -> Tensor<B, 2> {
        let logits_MV = match &self.lm_head {
            Some(head) => head.forward(h_MD, self.info.spec.slot(self.layers.len() as u32 * LINEARS)),
            None => Nvfp4Linear::Dense(self.embed_tokens.clone()).forward(h_MD, self.info.spec),
        };
        logits_MV.cast(DType::F32)
    }

    /// Sum over rows of `-log softmax(logits)[target]`, f32 `[1]`. Divide by the number of supervised tokens of the
    /// whole optimizer step, so that batches of unequal length weigh tokens alike. `targets` holds M ids.
    pub fn loss_sum(&self, h_MD: Tensor<B, 2>, targets: &[i64]) -> Tensor<B, 1> {
        assert_eq!(h_MD.dims()[0], targets.len(), "one target a row");
        let weight = match &self.lm_head {
            None => &self.embed_tokens,
            Some(Nvfp4Linear::Dense(weight)) => weight,
            Some(Nvfp4Linear::Master(weight)) if self.info.spec.recipe == Recipe::Bf16 => weight,
            // A head that is quantised on the way computes its logits as its other layers do.
            Some(_) => return cross_entropy_sum(self.logits(h_MD), targets),
        };
        let ids: Vec<i32> = targets.iter().map(|&t| t as i32).collect();
        let ids = Tensor::<B, 1, Int>::from_data(TensorData::new(ids, [targets.len()]), &h_MD.device());
        let (h, w) = (primitive(h_MD), primitive(weight.val()));
        let loss = B::head_loss(h, w, ids.into_primitive(), self.info.spec.precision);
        Tensor::from_primitive(TensorPrimitive::Float(loss))
    }
}

fn primitive<B: Backend, const D: usize>(x: Tensor<B, D>) -> FloatTensor<B> {
    x.into_primitive().tensor()
}

fn float<B: Backend>(x: FloatTensor<B>) -> Tensor<B, 2> {
    Tensor::from_primitive(TensorPrimitive::Float(x))
}

/// Ids as an Int tensor `[B, T]`.
///
/// # Errors
/// If an id is outside the vocabulary.
pub fn ids_tensor<B: Backend>(
    ids: &[Vec<u32>],
    config: &Qwen3Config,
    device: &B::Device,
) -> Result<Tensor<B, 2, Int>, ModelError> {
    let t = ids.iter().map(Vec::len).max().unwrap_or(0);
    let mut flat = vec![0i32; ids.len() * t];
    for (row, ids) in ids.iter().enumerate() {
        for (column, &id) in ids.iter().enumerate() {
            if id as usize >= config.vocab_size {
                let limit = config.vocab_size - 1;
                return Err(ModelError::TooLarge { what: "token id", value: id as usize, limit });
            }
            flat[row * t + column] = id as i32;
        }
    }
    Ok(Tensor::from_data(TensorData::new(flat, [ids.len(), t]), device))
}
