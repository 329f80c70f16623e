//! Qwen3: grouped-query attention with RMS-normalised queries and keys, SwiGLU MLP, pre-norm blocks.
//! Fields carry checkpoint names. Shape letters are the crate's ([`crate`]).
//!
//! Parameters are f32 masters (or packed NVFP4); activations flow in the dtype of the spec's
//! precision. Norms, rotary angles and softmax are computed in f32, as Hugging Face does.

use crate::{
    ModelError,
    config::Qwen3Config,
    kv_cache::{KvCache, LayerCache},
    rope::Rope,
};
use backend_nvfp4::{LinearSpec, Nvfp4Backend, Nvfp4Linear, matmul};
use burn::{
    module::{Module, Param},
    tensor::{Bool, DType, Int, Tensor, TensorData, activation, backend::Backend},
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
}

/// What every block of one forward shares.
#[derive(Debug, Clone)]
pub struct Context<B: Backend> {
    rope: Rope<B>,
    /// True where a query must not look, `[T, S]`; `None` for a single query, which sees everything.
    hidden_TS: Option<Tensor<B, 2, Bool>>,
    spec: LinearSpec,
    heads: usize,
    kv_heads: usize,
    eps: f64,
}

impl<B: Nvfp4Backend> Attention<B> {
    /// `x` `[B, T, D]` to `[B, T, D]`. With a cache, new tokens also see what it holds.
    pub fn forward(
        &self,
        x_BTD: Tensor<B, 3>,
        ctx: &Context<B>,
        cache: Option<(&mut LayerCache<B>, usize)>,
    ) -> Tensor<B, 3> {
        let [b, t, d] = x_BTD.dims();
        let (h, k) = (ctx.heads, ctx.kv_heads);
        let e = self.q_norm.dims()[0];
        let x_MD = x_BTD.reshape([b * t, d]);
        let heads = |y: Tensor<B, 2>, n: usize| y.reshape([b, t, n, e]);

        // 1. Project; normalise queries and keys over the head.
        let q_BTHE = rms_norm(heads(self.q_proj.forward(x_MD.clone(), ctx.spec), h), &self.q_norm, ctx.eps);
        let k_BTKE = rms_norm(heads(self.k_proj.forward(x_MD.clone(), ctx.spec), k), &self.k_norm, ctx.eps);
        let v_BTKE = heads(self.v_proj.forward(x_MD, ctx.spec), k);

        // 2. Rotate.
        let q_BHTE = ctx.rope.rotate(q_BTHE.swap_dims(1, 2));
        let k_BKTE = ctx.rope.rotate(k_BTKE.swap_dims(1, 2));
        let v_BKTE = v_BTKE.swap_dims(1, 2);
        let (k_BKSE, v_BKSE) = match cache {
            Some((layer, past)) => layer.append(k_BKTE, v_BKTE, past),
            None => (k_BKTE, v_BKTE),
        };
        let s = k_BKSE.dims()[2];

        // 3. Scores in f32. The G queries of a group stand in rows, so that keys are not repeated.
        let rows = h / k * t;
        let precision = ctx.spec.precision;
        let scores = matmul(q_BHTE.reshape([b, k, rows, e]), k_BKSE.swap_dims(2, 3), precision);
        let mut scores_BHTS = scores.cast(DType::F32).reshape([b, h, t, s]) / (e as f64).sqrt();
        if let Some(hidden) = &ctx.hidden_TS {
            let hidden = hidden.clone().unsqueeze::<4>().expand([b, h, t, s]);
            scores_BHTS = scores_BHTS.mask_fill(hidden, f32::MIN);
        }
        let weights = activation::softmax(scores_BHTS, 3).cast(precision.dtype()).reshape([b, k, rows, s]);

        // 4. Mix values, project back.
        let y_BHTE = matmul(weights, v_BKSE, precision).reshape([b, h, t, e]);
        let y_MD = y_BHTE.swap_dims(1, 2).reshape([b * t, h * e]);
        self.o_proj.forward(y_MD, ctx.spec).reshape([b, t, d])
    }
}

impl<B: Nvfp4Backend> Mlp<B> {
    /// `x` `[M, D]` to `[M, D]`.
    pub fn forward(&self, x_MD: Tensor<B, 2>, spec: LinearSpec) -> Tensor<B, 2> {
        let gate_MF = activation::silu(self.gate_proj.forward(x_MD.clone(), spec));
        let up_MF = self.up_proj.forward(x_MD, spec);
        self.down_proj.forward(gate_MF * up_MF, spec)
    }
}

impl<B: Nvfp4Backend> Block<B> {
    /// `x` `[B, T, D]` to `[B, T, D]`.
    pub fn forward(
        &self,
        x_BTD: Tensor<B, 3>,
        ctx: &Context<B>,
        cache: Option<(&mut LayerCache<B>, usize)>,
    ) -> Tensor<B, 3> {
        let [b, t, d] = x_BTD.dims();
        let normed = rms_norm(x_BTD.clone(), &self.input_layernorm, ctx.eps);
        let x_BTD = x_BTD + self.self_attn.forward(normed, ctx, cache);
        let normed = rms_norm(x_BTD.clone(), &self.post_attention_layernorm, ctx.eps);
        let mlp = self.mlp.forward(normed.reshape([b * t, d]), ctx.spec);
        x_BTD + mlp.reshape([b, t, d])
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
        Self { embed_tokens, layers, norm, lm_head, info: Info { config, spec } }
    }

    /// The model's shape.
    pub fn config(&self) -> &Qwen3Config {
        &self.info.config
    }

    /// How its linear layers compute.
    pub fn spec(&self) -> LinearSpec {
        self.info.spec
    }

    /// Where its tensors are.
    pub fn device(&self) -> B::Device {
        self.embed_tokens.device()
    }

    /// Token ids `[B, T]` to the final hidden states `[B, T, D]`, normalised.
    pub fn forward(&self, ids_BT: Tensor<B, 2, Int>, cache: Option<&mut KvCache<B>>) -> Tensor<B, 3> {
        self.forward_watched(ids_BT, cache, |_| {})
    }

    /// As [`Self::forward`], showing `watch` the embedding, each block's output but the last, and the
    /// normalised last: what Hugging Face calls `hidden_states`.
    pub fn forward_watched(
        &self,
        ids_BT: Tensor<B, 2, Int>,
        mut cache: Option<&mut KvCache<B>>,
        mut watch: impl FnMut(&Tensor<B, 3>),
    ) -> Tensor<B, 3> {
        let t = ids_BT.dims()[1];
        let ctx = self.context(cache.as_ref().map_or(0, |c| c.len()), t);
        let mut h_BTD = self.embed(ids_BT);
        for (i, block) in self.layers.iter().enumerate() {
            watch(&h_BTD);
            h_BTD = block.forward(h_BTD, &ctx, cache.as_mut().map(|c| c.layer(i)));
        }
        if let Some(cache) = cache {
            cache.advance(t);
        }
        let h_BTD = self.final_norm(h_BTD);
        watch(&h_BTD);
        h_BTD
    }

    /// Rows of the embedding, `[B, T, D]`.
    pub fn embed(&self, ids_BT: Tensor<B, 2, Int>) -> Tensor<B, 3> {
        let [b, t] = ids_BT.dims();
        let rows = self.embed_tokens.val().select(0, ids_BT.reshape([b * t]));
        rows.cast(self.info.spec.precision.dtype()).reshape([b, t, self.info.config.hidden_size])
    }

    /// Angles and mask for `t` new tokens behind `past` old ones.
    pub fn context(&self, past: usize, t: usize) -> Context<B> {
        let Info { config, spec } = &self.info;
        let device = self.device();
        let s = past + t;
        let hidden_TS = (t > 1).then(|| {
            let mask: Vec<bool> = (0..t).flat_map(|i| (0..s).map(move |j| j > past + i)).collect();
            Tensor::<B, 2, Bool>::from_data(TensorData::new(mask, [t, s]), &device)
        });
        Context {
            rope: Rope::new(past, t, config.head_dim, config.rope_theta, spec.precision.dtype(), &device),
            hidden_TS,
            spec: *spec,
            heads: config.num_attention_heads,
            kv_heads: config.num_key_value_heads,
            eps: config.rms_norm_eps,
        }
    }

    /// The norm before the head.
    pub fn final_norm(&self, h_BTD: Tensor<B, 3>) -> Tensor<B, 3> {
        rms_norm(h_BTD, &self.norm, self.info.config.rms_norm_eps)
    }

    /// Normalised hidden states `[M, D]` to logits `[M, V]` in f32.
    pub fn logits(&self, h_MD: Tensor<B, 2>) -> Tensor<B, 2> {
        let logits_MV = match &self.lm_head {
            Some(head) => head.forward(h_MD, self.info.spec),
            None => Nvfp4Linear::Dense(self.embed_tokens.clone()).forward(h_MD, self.info.spec),
        };
        logits_MV.cast(DType::F32)
    }
}

/// `x / rms(x) * weight` over the last dimension: in f32, cast back, then weighted, as Qwen3 does.
fn rms_norm<B: Backend, const D: usize>(x: Tensor<B, D>, weight: &Param<Tensor<B, 1>>, eps: f64) -> Tensor<B, D> {
    let dtype = x.dtype();
    let x = x.cast(DType::F32);
    let rms = (x.clone() * x.clone()).mean_dim(D - 1).add_scalar(eps).sqrt();
    (x / rms).cast(dtype) * weight.val().cast(dtype).unsqueeze()
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
