//! What a transformer block computes besides its linear layers: norms, rotated heads, the gate, attention.
//!
//! The functions here are these operations in Burn's own tensors: what the CPU runs, and what kernels are compared
//! with. Each has its gradient written out, as the kernels have. Matrices are `[M, C]`, M tokens of all rows.

use crate::{Nvfp4Backend, Precision, linear::matmul, tensor::float};
use burn::tensor::{
    Bool, DType, Int, Tensor, TensorData, TensorMetadata, activation,
    backend::Backend,
    ops::{FloatTensor, IntTensor},
};
use std::sync::Arc;

/// Rotary angles and where each token stands.
#[derive(Debug, Clone)]
pub struct Rotary<B: Backend> {
    /// f32 `[L, E/2]`.
    pub cos: FloatTensor<B>,
    /// f32 `[L, E/2]`.
    pub sin: FloatTensor<B>,
    /// `[M]`: a token's line in the tables.
    pub positions: IntTensor<B>,
}

/// Which tokens see each other: M tokens in rows, each row cut into documents, a token sees its own up to itself.
#[derive(Debug, Clone)]
pub struct Documents<B: Backend> {
    /// Rows of the batch.
    pub rows: usize,
    /// Tokens of each row that came in earlier calls.
    pub past: usize,
    /// `[M]`: the first key of a token's document, counted over all rows.
    pub starts: IntTensor<B>,
    /// `[M]`: one past the last.
    pub ends: IntTensor<B>,
    /// As `starts`, counted in the row.
    row_starts: Arc<[u32]>,
}

impl<B: Backend> Documents<B> {
    /// `row_starts[m]` is the first key that token `m` sees in its row, whose keys are `past` old and M/rows new ones.
    /// It never falls within a row.
    pub fn new(rows: usize, past: usize, row_starts: Vec<u32>, device: &B::Device) -> Self {
        let len = row_starts.len();
        let t = len / rows.max(1);
        let mut ends = vec![0i32; len];
        for m in (0..len).rev() {
            let last = (m + 1) % t == 0 || row_starts[m + 1] != row_starts[m];
            ends[m] = if last { m as i32 + 1 } else { ends[m + 1] };
        }
        let starts: Vec<i32> = row_starts.iter().enumerate().map(|(m, s)| (m / t * t) as i32 + *s as i32).collect();
        let ints = |v: Vec<i32>| Tensor::<B, 1, Int>::from_data(TensorData::new(v, [len]), device).into_primitive();
        Self { rows, past, starts: ints(starts), ends: ints(ends), row_starts: row_starts.into() }
    }

    /// Tokens, M.
    pub fn tokens(&self) -> usize {
        self.row_starts.len()
    }

    /// With the inner backend's tensors, which are the same.
    pub(crate) fn map<C: Backend>(&self, int: impl Fn(&IntTensor<B>) -> IntTensor<C>) -> Documents<C> {
        Documents {
            rows: self.rows,
            past: self.past,
            starts: int(&self.starts),
            ends: int(&self.ends),
            row_starts: self.row_starts.clone(),
        }
    }

    /// True where a query must not look, `[rows, 1, T, S]`; `None` if every query sees everything.
    fn hidden(&self, device: &B::Device) -> Option<Tensor<B, 4, Bool>> {
        let t = self.tokens() / self.rows.max(1);
        let s = self.past + t;
        if t == 1 && self.row_starts.iter().all(|start| *start == 0) {
            return None;
        }
        let sees = |m: usize, j: usize| j >= self.row_starts[m] as usize && j <= self.past + m % t;
        let mask: Vec<bool> = (0..self.tokens()).flat_map(|m| (0..s).map(move |j| !sees(m, j))).collect();
        Some(Tensor::from_data(TensorData::new(mask, [self.rows, 1, t, s]), device))
    }
}

/// The sizes of an attention layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionSpec {
    /// Query heads, H.
    pub heads: usize,
    /// Key and value heads, K.
    pub kv_heads: usize,
    /// E.
    pub head_dim: usize,
    /// Number format of its products.
    pub precision: Precision,
}

/// What the backward of attention reads.
#[derive(Debug, Clone)]
pub struct AttentionSaved<B: Backend> {
    /// `[M, H*E]`.
    pub q: FloatTensor<B>,
    /// `[S, K*E]` of all rows.
    pub k: FloatTensor<B>,
    /// `[S, K*E]` of all rows.
    pub v: FloatTensor<B>,
    /// `[M, H*E]`.
    pub y: FloatTensor<B>,
    /// f32 `[H, M]`, from kernels that keep it.
    pub lse: Option<FloatTensor<B>>,
}

/// `x / rms(x) * w` over the columns: in f32, rounded, then weighted, as Qwen3 does.
pub(crate) fn rms_norm<B: Backend>(x: FloatTensor<B>, w: FloatTensor<B>, eps: f64) -> FloatTensor<B> {
    let (x, w) = (float::<B, 2>(x), float::<B, 1>(w));
    let dtype = x.dtype();
    primitive(normal(x.cast(DType::F32), eps).0.cast(dtype) * w.cast(dtype).unsqueeze())
}

/// `dx` and `dw`.
pub(crate) fn rms_norm_backward<B: Backend>(
    x: FloatTensor<B>,
    w: FloatTensor<B>,
    dy: FloatTensor<B>,
    eps: f64,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let (x, w, dy) = (float::<B, 2>(x), float::<B, 1>(w), float::<B, 2>(dy));
    let dtype = x.dtype();
    let (n, scale) = normal(x.cast(DType::F32), eps);
    let dy = dy.cast(DType::F32);
    let dw = (dy.clone() * n.clone()).sum_dim(0).squeeze_dim(0);
    let g = dy * w.unsqueeze();
    let along = (g.clone() * n.clone()).mean_dim(1);
    (primitive(((g - n * along) * scale).cast(dtype)), primitive::<B, 1>(dw))
}

/// Each head of `x` `[M, heads*E]` normalised, weighted and rotated.
pub(crate) fn norm_rope<B: Backend>(
    x: FloatTensor<B>,
    w: FloatTensor<B>,
    rotary: &Rotary<B>,
    eps: f64,
) -> FloatTensor<B> {
    let ([m, c], e) = (dims(&x), w.shape()[0]);
    let dtype = x.dtype();
    let rows = float::<B, 2>(x).reshape([m * c / e, e]);
    let n = float::<B, 2>(rms_norm::<B>(primitive(rows), w, eps)).cast(DType::F32);
    let (a, b) = halves(n, m, c, e);
    let (cos, sin) = lines(rotary);
    let left = a.clone() * cos.clone() - b.clone() * sin.clone();
    primitive(Tensor::cat(vec![left, b * cos + a * sin], 2).reshape([m, c]).cast(dtype))
}

/// `dx` and `dw`.
pub(crate) fn norm_rope_backward<B: Backend>(
    x: FloatTensor<B>,
    w: FloatTensor<B>,
    rotary: &Rotary<B>,
    dy: FloatTensor<B>,
    eps: f64,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let ([m, c], e) = (dims(&x), w.shape()[0]);
    let (da, db) = halves(float::<B, 2>(dy).cast(DType::F32), m, c, e);
    let (cos, sin) = lines(rotary);
    let ga = da.clone() * cos.clone() + db.clone() * sin.clone();
    let g = Tensor::cat(vec![ga, db * cos - da * sin], 2).reshape([m * c / e, e]);
    let rows = float::<B, 2>(x).reshape([m * c / e, e]);
    let (dx, dw) = rms_norm_backward::<B>(primitive(rows), w, primitive(g), eps);
    (primitive(float::<B, 2>(dx).reshape([m, c])), dw)
}

/// `silu(gate) * up`.
pub(crate) fn swiglu<B: Backend>(gate: FloatTensor<B>, up: FloatTensor<B>) -> FloatTensor<B> {
    primitive(activation::silu(float::<B, 2>(gate)) * float::<B, 2>(up))
}

/// `dgate` and `dup`.
pub(crate) fn swiglu_backward<B: Backend>(
    gate: FloatTensor<B>,
    up: FloatTensor<B>,
    dy: FloatTensor<B>,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let dtype = gate.dtype();
    let [g, u, d] = [gate, up, dy].map(|x| float::<B, 2>(x).cast(DType::F32));
    let s = activation::sigmoid(g.clone());
    let dup = d.clone() * g.clone() * s.clone();
    let slope = s.clone() * (g * (s.neg() + 1.0) + 1.0);
    (primitive((d * u * slope).cast(dtype)), primitive(dup.cast(dtype)))
}

/// Causal grouped-query attention within documents: `q` `[M, H*E]`, `k`, `v` `[S, K*E]` to `[M, H*E]`.
pub(crate) fn attention<B: Nvfp4Backend>(
    q: FloatTensor<B>,
    k: FloatTensor<B>,
    v: FloatTensor<B>,
    docs: &Documents<B>,
    spec: AttentionSpec,
) -> FloatTensor<B> {
    let [m, c] = dims(&q);
    let weights = weights(grouped(q, docs, spec), keyed(k, docs, spec), docs, spec);
    let y = matmul(weights.cast(spec.precision.dtype()), keyed(v, docs, spec), spec.precision);
    primitive(ungrouped(y, docs, spec).reshape([m, c]))
}

/// `dq`, `dk`, `dv`. With `p` the weights: `dv = pᵀ dy`, `ds = p (dy vᵀ - rowsum(p dy vᵀ)) / sqrt(E)`,
/// `dq = ds k`, `dk = dsᵀ q`.
pub(crate) fn attention_backward<B: Nvfp4Backend>(
    saved: AttentionSaved<B>,
    dy: FloatTensor<B>,
    docs: &Documents<B>,
    spec: AttentionSpec,
) -> [FloatTensor<B>; 3] {
    let (q_dims, k_dims) = (dims(&saved.q), dims(&saved.k));
    let (dtype, precision) = (spec.precision.dtype(), spec.precision);
    let (q, k, v) = (grouped(saved.q, docs, spec), keyed(saved.k, docs, spec), keyed(saved.v, docs, spec));
    let dy = grouped(dy, docs, spec);
    let p = weights(q.clone(), k.clone(), docs, spec);
    let dv = matmul(p.clone().cast(dtype).swap_dims(2, 3), dy.clone(), precision);
    let dp = matmul(dy, v.swap_dims(2, 3), precision).cast(DType::F32);
    let along = (p.clone() * dp.clone()).sum_dim(3);
    let ds = (p * (dp - along) / (spec.head_dim as f64).sqrt()).cast(dtype);
    let dq = matmul(ds.clone(), k, precision);
    let dk = matmul(ds.swap_dims(2, 3), q, precision);
    let flat = |x: Tensor<B, 4>| primitive(x.swap_dims(1, 2).reshape(k_dims));
    [primitive(ungrouped(dq, docs, spec).reshape(q_dims)), flat(dk), flat(dv)]
}

/// Softmax of the visible scores in f32, `[rows, K, G*T, S]`: the G queries of a group stand in rows.
fn weights<B: Nvfp4Backend>(
    q: Tensor<B, 4>,
    k: Tensor<B, 4>,
    docs: &Documents<B>,
    spec: AttentionSpec,
) -> Tensor<B, 4> {
    let [b, kv, rows, _] = q.dims();
    let s = k.dims()[2];
    let (h, t) = (spec.heads, rows * kv / spec.heads);
    let scores = matmul(q, k.swap_dims(2, 3), spec.precision).cast(DType::F32).reshape([b, h, t, s]);
    let mut scores = scores / (spec.head_dim as f64).sqrt();
    if let Some(hidden) = docs.hidden(&scores.device()) {
        scores = scores.mask_fill(hidden.expand([b, h, t, s]), f32::MIN);
    }
    activation::softmax(scores, 3).reshape([b, kv, rows, s])
}

/// `[M, H*E]` to `[rows, K, G*T, E]`.
fn grouped<B: Backend>(x: FloatTensor<B>, docs: &Documents<B>, spec: AttentionSpec) -> Tensor<B, 4> {
    let AttentionSpec { heads, kv_heads, head_dim, .. } = spec;
    let t = docs.tokens() / docs.rows;
    let x = float::<B, 2>(x).reshape([docs.rows, t, heads, head_dim]).swap_dims(1, 2);
    x.reshape([docs.rows, kv_heads, heads / kv_heads * t, head_dim])
}

/// The way back, `[rows, T, H, E]`.
fn ungrouped<B: Backend>(x: Tensor<B, 4>, docs: &Documents<B>, spec: AttentionSpec) -> Tensor<B, 4> {
    let t = docs.tokens() / docs.rows;
    x.reshape([docs.rows, spec.heads, t, spec.head_dim]).swap_dims(1, 2)
}

/// `[S, K*E]` of all rows to `[rows, K, S, E]`.
fn keyed<B: Backend>(x: FloatTensor<B>, docs: &Documents<B>, spec: AttentionSpec) -> Tensor<B, 4> {
    let s = docs.past + docs.tokens() / docs.rows;
    float::<B, 2>(x).reshape([docs.rows, s, spec.kv_heads, spec.head_dim]).swap_dims(1, 2)
}

/// `x * r` and `r = 1 / rms(x)`, rows in f32.
fn normal<B: Backend>(x: Tensor<B, 2>, eps: f64) -> (Tensor<B, 2>, Tensor<B, 2>) {
    let rms = (x.clone() * x.clone()).mean_dim(1).add_scalar(eps).sqrt();
    (x / rms.clone(), rms.recip())
}

/// The first and second half of every head, `[M, heads, E/2]`.
fn halves<B: Backend>(x: Tensor<B, 2>, m: usize, c: usize, e: usize) -> (Tensor<B, 3>, Tensor<B, 3>) {
    let x = x.reshape([m, c / e, e]);
    (x.clone().narrow(2, 0, e / 2), x.narrow(2, e / 2, e / 2))
}

/// cos and sin of every token, `[M, 1, E/2]`.
fn lines<B: Backend>(rotary: &Rotary<B>) -> (Tensor<B, 3>, Tensor<B, 3>) {
    let positions = Tensor::<B, 1, Int>::from_primitive(rotary.positions.clone());
    let line = |table: &FloatTensor<B>| float::<B, 2>(table.clone()).select(0, positions.clone()).unsqueeze_dim::<3>(1);
    (line(&rotary.cos), line(&rotary.sin))
}

fn dims<T: TensorMetadata>(x: &T) -> [usize; 2] {
    x.shape().dims()
}

fn primitive<B: Backend, const D: usize>(x: Tensor<B, D>) -> FloatTensor<B> {
    x.into_primitive().tensor()
}
