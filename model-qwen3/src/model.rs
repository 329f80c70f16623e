//! Qwen3: grouped-query attention with RMS-normalized queries and keys, a SwiGLU MLP, and pre-norm blocks. Fields have
//! the names of the checkpoint. The shape letters are those of [`crate`].
//!
//! Parameters are f32 or bf16 masters, or packed NVFP4. Activations flow in the dtype of the precision that the
//! specification names. Norms, rotary angles and softmax are computed in f32, as in Hugging Face's implementation.

use crate::{
    ModelError,
    calibration::InputMaxima,
    config::Qwen3Config,
    kv_cache::{KvCache, KvPool, NewTokens},
    loss::cross_entropy_sum,
    names,
    rope::rotary,
};
use backend_nvfp4::{
    Activations, AttentionSpec, CacheFormat, Documents, LinearSpec, Nvfp4Backend, Nvfp4Kernels, Nvfp4Linear,
    QuantizeSpec, Recipe, Rotary, Stream, cached_attention, linears, ops, prompt_attention,
};
use burn::{
    module::{Module, Param},
    tensor::{
        DType, Int, Tensor, TensorData,
        backend::{AutodiffBackend, Backend},
    },
};
use std::sync::Arc;

/// Grouped-query attention.
#[derive(Module, Debug)]
pub struct Attention<B: Backend> {
    /// `[H*E, D]`.
    pub q_proj: Nvfp4Linear<B>,
    /// `[G*E, D]`.
    pub k_proj: Nvfp4Linear<B>,
    /// `[G*E, D]`.
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
    /// The attention layer.
    pub self_attn: Attention<B>,
    /// The MLP.
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
    /// The blocks, first to last.
    pub layers: Vec<Block<B>>,
    /// `[D]`.
    pub norm: Param<Tensor<B, 1>>,
    /// `[V, D]`, or `None` if the head is the embedding.
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
    /// How caches keep keys and values.
    cache: CacheFormat,
}

/// The linear layers of a block are numbered below 8, so that each has random numbers of its own.
const LINEARS: u32 = 8;
/// The first stream for rounding gradients. The optimizer uses the streams below, one for each parameter.
const GRADIENT_STREAMS: u32 = 0x4000_0000;

/// Where the M tokens of a forward stand.
#[derive(Debug, Clone)]
pub struct Places {
    /// Number of rows.
    pub rows: usize,
    /// Number of tokens of each row that the cache already holds.
    pub past: usize,
    /// The position of each token in its document, `[M]`.
    pub positions: Vec<u32>,
    /// The token of its row with which each token's document begins, `[M]`. See [`Documents::new`].
    pub starts: Vec<u32>,
}

/// What all blocks share in a forward.
#[derive(Debug, Clone)]
pub struct Context<B: Backend> {
    rotary: Rotary<B>,
    /// The documents of the rows of a batch; or, with a cache, those of each sequence that is continued.
    documents: Arc<[Documents<B>]>,
    spec: LinearSpec,
    attention: AttentionSpec,
    eps: f64,
    /// The block that computes.
    block: usize,
    /// What takes in the inputs of linear layers, in a calibration.
    inputs: Option<Arc<InputMaxima<B>>>,
}

impl<AB: AutodiffBackend> Context<AB> {
    /// The same context for the inner backend, without a calibration.
    pub fn inner(&self) -> Context<AB::InnerBackend> {
        Context {
            rotary: self.rotary.inner(),
            documents: self.documents.iter().map(Documents::inner).collect(),
            spec: self.spec,
            attention: self.attention,
            eps: self.eps,
            block: self.block,
            inputs: None,
        }
    }
}

impl<B: Nvfp4Backend> Context<B> {
    /// Shows the input of the linear layer `part`, and of those that read the same, to a calibration.
    fn show(&self, part: &str, x: &Activations<B>) {
        if let Some(inputs) = &self.inputs {
            inputs.take_in(self.block, part, x.clone().tensor());
        }
    }

    /// The output projection of attention.
    fn projected(&self, o_proj: &Nvfp4Linear<B>, y_MHE: Tensor<B, 2>) -> Tensor<B, 2> {
        let y_MHE = Activations::from(y_MHE);
        self.show(names::O_PROJ, &y_MHE);
        let [y_MD] = linears([o_proj], y_MHE, [self.spec.slot(3)]);
        y_MD
    }
}

impl<B: Nvfp4Backend> Attention<B> {
    /// Maps normalized hidden states `[M, D]` to `[M, D]`.
    pub fn forward(&self, x_MD: Activations<B>, ctx: &Context<B>) -> Tensor<B, 2> {
        let [q_MHE, k_MGE, v_MGE] = self.project(x_MD, ctx);
        let y_MHE = ops::attention(q_MHE, k_MGE, v_MGE, &ctx.documents[0], ctx.attention);
        ctx.projected(&self.o_proj, y_MHE)
    }

    /// Queries, keys and values. Queries and keys are normalized and rotated head by head.
    fn project(&self, x_MD: Activations<B>, ctx: &Context<B>) -> [Tensor<B, 2>; 3] {
        ctx.show(names::Q_PROJ, &x_MD);
        let layers = [&self.q_proj, &self.k_proj, &self.v_proj];
        let [q_MHE, k_MGE, v_MGE] = linears(layers, x_MD, [0, 1, 2].map(|i| ctx.spec.slot(i)));
        let q_MHE = ops::norm_rope(q_MHE, self.q_norm.val(), &ctx.rotary, ctx.eps);
        let k_MGE = ops::norm_rope(k_MGE, self.k_norm.val(), &ctx.rotary, ctx.eps);
        [q_MHE, k_MGE, v_MGE]
    }
}

impl<B: Nvfp4Backend> Mlp<B> {
    /// Maps normalized hidden states `[M, D]` to `[M, D]`.
    pub fn forward(&self, x_MD: Activations<B>, ctx: &Context<B>) -> Tensor<B, 2> {
        ctx.show(names::GATE_PROJ, &x_MD);
        let layers = [&self.gate_proj, &self.up_proj];
        let [gate_MF, up_MF] = linears(layers, x_MD, [4, 5].map(|i| ctx.spec.slot(i)));
        let y_MF = ops::swiglu(gate_MF, up_MF, ctx.spec);
        ctx.show(names::DOWN_PROJ, &y_MF);
        let [y_MD] = linears([&self.down_proj], y_MF, [ctx.spec.slot(6)]);
        y_MD
    }
}

impl<B: Nvfp4Backend> Block<B> {
    /// Maps hidden states `[M, D]` to `[M, D]`.
    pub fn forward(&self, x_MD: Tensor<B, 2>, ctx: &Context<B>) -> Tensor<B, 2> {
        self.around(x_MD, ctx, |n_MD| self.self_attn.forward(n_MD, ctx))
    }

    /// `h = x + attention(norm(x))`, then `h + mlp(norm(h))`.
    fn around(
        &self,
        x_MD: Tensor<B, 2>,
        ctx: &Context<B>,
        attention: impl FnOnce(Activations<B>) -> Tensor<B, 2>,
    ) -> Tensor<B, 2> {
        let (x_MD, n_MD) = ops::rms_norm(x_MD, None, self.input_layernorm.val(), ctx.eps, ctx.spec);
        let a_MD = attention(n_MD);
        let (h_MD, n_MD) = ops::rms_norm(x_MD, Some(a_MD), self.post_attention_layernorm.val(), ctx.eps, ctx.spec);
        h_MD + self.mlp.forward(n_MD, ctx)
    }
}

impl<B: Nvfp4Backend> Qwen3<B> {
    /// Maps token ids `[R, T]` to the final hidden states `[M, D]`, normalized. Shows `watch` the embedding, the output
    /// of each block but the last, and the normalized last, which Hugging Face calls `hidden_states`, `[M, D]` each.
    pub fn forward(&self, ids_RT: Tensor<B, 2, Int>, watch: impl FnMut(&Tensor<B, 2>)) -> Tensor<B, 2> {
        let ctx = self.context(&[Places::of_rows(ids_RT.dims())]);
        self.forward_in(&ctx, ids_RT, watch)
    }

    /// The same as [`Self::forward`]. Shows `inputs` what each linear layer of the blocks reads.
    pub fn calibrate(&self, ids_RT: Tensor<B, 2, Int>, inputs: Arc<InputMaxima<B>>) -> Tensor<B, 2> {
        let ctx = self.context(&[Places::of_rows(ids_RT.dims())]);
        self.forward_in(&Context { inputs: Some(inputs), ..ctx }, ids_RT, |_| {})
    }

    fn forward_in(
        &self,
        ctx: &Context<B>,
        ids_RT: Tensor<B, 2, Int>,
        mut watch: impl FnMut(&Tensor<B, 2>),
    ) -> Tensor<B, 2> {
        let mut h_MD = self.embed(ids_RT);
        for (i, block) in self.layers.iter().enumerate() {
            watch(&h_MD);
            h_MD = block.forward(h_MD, &self.of_block(ctx, i));
        }
        let h_MD = self.final_norm(h_MD);
        watch(&h_MD);
        h_MD
    }

    /// Looks up the embeddings of token ids `[R, T]`, `[M, D]`.
    pub fn embed(&self, ids_RT: Tensor<B, 2, Int>) -> Tensor<B, 2> {
        let ids_M = ids_RT.flatten(0, 1);
        ops::token_rows(self.embed_tokens.val(), ids_M, self.info.spec.precision.dtype())
    }

    /// The norm before the head.
    pub fn final_norm(&self, h_MD: Tensor<B, 2>) -> Tensor<B, 2> {
        let Info { config, spec, .. } = &self.info;
        let (_, n_MD) = ops::rms_norm(h_MD, None, self.norm.val(), config.rms_norm_eps, spec.unquantized());
        n_MD.tensor()
    }

    /// Maps normalized hidden states `[M, D]` to logits `[M, V]` in f32.
    pub fn logits(&self, h_MD: Tensor<B, 2>) -> Tensor<B, 2> {
        self.logits_by(h_MD, self.info.spec)
    }

    fn logits_by(&self, h_MD: Tensor<B, 2>, spec: LinearSpec) -> Tensor<B, 2> {
        let logits_MV = match &self.lm_head {
            Some(head) => head.forward(h_MD, spec.slot(self.layers.len() as u32 * LINEARS)),
            None => Nvfp4Linear::Dense(self.embed_tokens.clone()).forward(h_MD, spec),
        };
        logits_MV.cast(DType::F32)
    }

    /// Sums `-log softmax(logits)[target]` over rows, f32 `[1]`. `targets` holds M ids. The caller divides by the
    /// number of supervised tokens of the whole optimizer step, so that tokens weigh the same in batches of unequal
    /// length.
    pub fn loss_sum(&self, h_MD: Tensor<B, 2>, targets: &[i64]) -> Tensor<B, 1> {
        assert_eq!(h_MD.dims()[0], targets.len(), "one target a row");
        let weight = match &self.lm_head {
            None => &self.embed_tokens,
            Some(Nvfp4Linear::Dense(weight)) => weight,
            Some(Nvfp4Linear::Master(head)) if !self.info.spec.recipe.packs_weights() => &head.weight,
            // A head that the recipe quantizes computes its logits like any other linear layer.
            Some(_) => return cross_entropy_sum(self.logits(h_MD), targets),
        };
        let ids: Vec<i32> = targets.iter().map(|&t| t as i32).collect();
        let ids = Tensor::from_data(TensorData::new(ids, [targets.len()]), &h_MD.device());
        ops::head_loss(h_MD, weight.val(), ids, self.info.spec.precision)
    }

    /// The angles and the visibility of tokens: those of a batch, or of several sequences one after another.
    pub fn context(&self, places: &[Places]) -> Context<B> {
        let Info { config, spec, .. } = &self.info;
        let device = self.device();
        let positions = places.iter().flat_map(|p| p.positions.iter().copied()).collect();
        let documents = places.iter().map(|p| Documents::new(p.rows, p.past, p.starts.clone(), &device));
        Context {
            rotary: rotary::<B>(positions, config.head_dim, config.rope_theta, &device),
            documents: documents.collect(),
            spec: *spec,
            attention: self.attention_spec(),
            eps: config.rms_norm_eps,
            block: 0,
            inputs: None,
        }
    }

    /// The context of block `i`, with the random numbers and the recipe of that block.
    pub fn of_block(&self, ctx: &Context<B>, i: usize) -> Context<B> {
        Context { spec: self.spec_of_block(ctx.spec, i), block: i, ..ctx.clone() }
    }

    /// How each weight of block `i` is quantized by itself, if it is.
    pub fn codes_of_block(&self, i: usize) -> Option<QuantizeSpec> {
        self.spec_of_block(self.info.spec, i).codes_of_one()
    }

    /// The specification of block `i`.
    pub(crate) fn spec_of_block(&self, spec: LinearSpec, i: usize) -> LinearSpec {
        let spec = spec.slot(i as u32 * LINEARS);
        if self.is_bf16(i) { spec.unquantized() } else { spec }
    }

    /// The sizes of attention.
    pub(crate) fn attention_spec(&self) -> AttentionSpec {
        let Info { config, spec, .. } = &self.info;
        AttentionSpec {
            heads: config.num_attention_heads,
            kv_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
            precision: spec.precision,
        }
    }
}

impl<B: Nvfp4Kernels> Qwen3<B> {
    /// A pool with room for `tokens` tokens of all sequences together.
    ///
    /// # Errors
    /// If the format of caches does not take the sizes of the model.
    pub fn pool(&self, tokens: usize) -> Result<KvPool<B>, ModelError> {
        let Info { config, spec, cache, .. } = &self.info;
        KvPool::new(config, tokens, *cache, spec.precision.dtype(), &self.device())
    }

    /// Computes the blocks one after another, each by separate operations, for parts of prompts or for the newest tokens of
    /// answers.
    pub(crate) fn block_by_block(
        &self,
        mut h_MD: Tensor<B, 2>,
        sequences: &[(&mut KvCache<B>, NewTokens)],
    ) -> Tensor<B, 2> {
        let places: Vec<Places> =
            sequences.iter().map(|(cache, new)| Places::of_rows([1, new.count()]).after(cache.tokens())).collect();
        let ctx = self.context(&places);
        let spec = ctx.spec.each_row();
        let answers = sequences.iter().all(|(_, new)| new.is_answer());
        let ctx = Context { spec: if answers { spec.of_newest_tokens() } else { spec }, ..ctx };
        let caches: Vec<&KvCache<B>> = sequences.iter().map(|(cache, _)| &**cache).collect();
        for (i, block) in self.layers.iter().enumerate() {
            h_MD = block.forward_cached(h_MD, &self.of_block(&ctx, i), &caches);
        }
        h_MD
    }

    /// Maps results `[M, D]` of [`Self::forward_cached`], each the newest token of a sequence, to logits `[M, V]` in f32, each row
    /// by itself.
    pub fn logits_cached(&self, h_MD: Tensor<B, 2>) -> Tensor<B, 2> {
        self.logits_by(h_MD, self.info.spec.each_row().of_newest_tokens())
    }
}

impl<B: Nvfp4Kernels> Block<B> {
    fn forward_cached(&self, x_MD: Tensor<B, 2>, ctx: &Context<B>, caches: &[&KvCache<B>]) -> Tensor<B, 2> {
        self.around(x_MD, ctx, |n_MD| self.self_attn.forward_cached(n_MD, ctx, caches))
    }
}

impl<B: Nvfp4Kernels> Attention<B> {
    fn forward_cached(&self, x_MD: Activations<B>, ctx: &Context<B>, caches: &[&KvCache<B>]) -> Tensor<B, 2> {
        let qkv_M = self.project(x_MD, ctx);
        let mut first = 0;
        let attend = |(cache, documents): (&&KvCache<B>, &Documents<B>)| {
            let tokens = first..first + documents.tokens();
            first = tokens.end;
            // The linear layers take the tokens of all sequences together. Attention takes one sequence after another.
            let [q_THE, k_TGE, v_TGE] = qkv_M.each_ref().map(|x| x.clone().slice(tokens.clone()));
            let [k_SGE, v_SGE] = cache.append(ctx.block, [k_TGE, v_TGE]);
            if ctx.spec.newest_tokens {
                cached_attention(q_THE, k_SGE, v_SGE, documents, ctx.attention)
            } else {
                prompt_attention(q_THE, k_SGE, v_SGE, documents, ctx.attention)
            }
        };
        let y: Vec<_> = caches.iter().zip(ctx.documents.iter()).map(attend).collect();
        ctx.projected(&self.o_proj, below_each_other(y))
    }
}

impl<B: Backend> Qwen3<B> {
    /// Puts a model together.
    pub fn new(
        config: Qwen3Config,
        spec: LinearSpec,
        embed_tokens: Param<Tensor<B, 2>>,
        layers: Vec<Block<B>>,
        norm: Param<Tensor<B, 1>>,
        lm_head: Option<Nvfp4Linear<B>>,
    ) -> Self {
        Self {
            embed_tokens,
            layers,
            norm,
            lm_head,
            info: Info { config, spec, bf16_last_blocks: 0, cache: CacheFormat::Native },
        }
    }

    /// The sizes of the model.
    pub fn config(&self) -> &Qwen3Config {
        &self.info.config
    }

    /// How the linear layers compute.
    pub fn spec(&self) -> LinearSpec {
        self.info.spec
    }

    /// Computes the linear layers of the last `n` blocks without quantization.
    #[must_use]
    pub fn with_bf16_last_blocks(mut self, n: usize) -> Self {
        self.info.bf16_last_blocks = n;
        self
    }

    /// The format in which caches keep keys and values.
    pub fn cache_format(&self) -> CacheFormat {
        self.info.cache
    }

    /// The same weights with caches that keep keys and values in this format.
    #[must_use]
    pub fn with_cache_format(mut self, format: CacheFormat) -> Self {
        self.info.cache = format;
        self
    }

    /// The same weights under another recipe.
    #[must_use]
    pub fn with_recipe(mut self, recipe: Recipe) -> Self {
        self.info.spec.recipe = recipe;
        self
    }

    /// Whether block `i` is one of the last blocks, which compute without quantization.
    pub fn is_bf16(&self, i: usize) -> bool {
        i + self.info.bf16_last_blocks >= self.info.config.num_hidden_layers
    }

    /// Sets the random numbers with which the next passes round gradients: those of micro-batch `step` of a run.
    pub fn draw_from(&mut self, seed: u64, step: u32) {
        self.info.spec.stream = Stream { seed, step, stream: GRADIENT_STREAMS };
    }

    /// The device of the tensors.
    pub fn device(&self) -> B::Device {
        self.embed_tokens.device()
    }
}

impl Places {
    /// `rows` rows of `tokens` new tokens, `[rows, tokens]`. Each row is one document.
    pub fn of_rows([rows, tokens]: [usize; 2]) -> Self {
        let positions = (0..rows).flat_map(|_| (0..tokens).map(|p| p as u32)).collect();
        Self { rows, past: 0, positions, starts: vec![0; rows * tokens] }
    }

    /// The same tokens behind `past` tokens that the cache holds.
    #[must_use]
    pub fn after(mut self, past: usize) -> Self {
        self.past = past;
        self.positions.iter_mut().for_each(|position| *position += past as u32);
        self
    }
}

/// Matrices one below the other. One alone is not copied.
pub(crate) fn below_each_other<B: Backend>(mut parts: Vec<Tensor<B, 2>>) -> Tensor<B, 2> {
    if parts.len() == 1 { parts.remove(0) } else { Tensor::cat(parts, 0) }
}

/// Makes an Int tensor `[R, T]` of ids. Shorter rows are padded with 0.
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
