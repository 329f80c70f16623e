//! Causal grouped-query attention within documents.

use crate::{
    attention::{AttentionSpec, Documents},
    kernels::{AttentionSaved, Nvfp4Kernels, matmul},
    primitive::{primitive, tensor},
};
use burn::tensor::{DType, Tensor, TensorMetadata, activation, backend::Backend, ops::FloatTensor};

/// Computes `softmax(q kᵀ / sqrt(E)) v` over the keys that each query sees: `q` `[M, H*E]`, `k` and `v` `[S, G*E]`, where
/// S counts the keys of all rows, give `[M, H*E]`. Keys behind the newest token of a row are padding, which no query sees.
pub(crate) fn attention<B: Nvfp4Kernels>(
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

/// The same over the cache of a sequence, with sums whose order depends on the keys that a token sees, and not on those that are
/// read with it.
pub(crate) fn prompt_attention<B: Nvfp4Kernels>(
    q: FloatTensor<B>,
    k: FloatTensor<B>,
    v: FloatTensor<B>,
    docs: &Documents<B>,
    spec: AttentionSpec,
) -> FloatTensor<B> {
    let [k, v] = [k, v].map(padded_keys::<B>);
    attention::<B>(q, k, v, docs, spec)
}

/// Pads keys or values `[S, G*E]` of a sequence with zeros until S is a multiple of 8. The sum of a softmax takes up to 8 keys at a
/// time, and keys that are left over in another way; so none may be left over.
fn padded_keys<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let x = tensor::<B, 2>(x);
    let [keys, columns] = x.dims();
    let missing = keys.next_multiple_of(8) - keys;
    if missing == 0 {
        return primitive(x);
    }
    let zeros = Tensor::zeros([missing, columns], (&x.device(), x.dtype()));
    primitive(Tensor::cat(vec![x, zeros], 0))
}

/// Returns `dq`, `dk` and `dv`. With the weights `p` they are `dv = pᵀ dy`, `dq = ds k` and `dk = dsᵀ q`, where
/// `ds = p (dy vᵀ - rowsum(p dy vᵀ)) / sqrt(E)`.
pub(crate) fn attention_backward<B: Nvfp4Kernels>(
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

/// The softmax of the visible scores in f32, `[rows, G, Q*T, S/rows]`. The `Q = H / G` queries of a group stand in rows.
fn weights<B: Nvfp4Kernels>(
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
    if let Some(hidden) = docs.hidden(s, &scores.device()) {
        scores = scores.mask_fill(hidden.expand([b, h, t, s]), f32::MIN);
    }
    activation::softmax(scores, 3).reshape([b, kv, rows, s])
}

/// Reshapes queries `[M, H*E]` to `[rows, G, Q*T, E]`.
fn grouped<B: Backend>(x: FloatTensor<B>, docs: &Documents<B>, spec: AttentionSpec) -> Tensor<B, 4> {
    let AttentionSpec { heads, kv_heads, head_dim, .. } = spec;
    let t = docs.tokens() / docs.rows;
    let x = tensor::<B, 2>(x).reshape([docs.rows, t, heads, head_dim]).swap_dims(1, 2);
    x.reshape([docs.rows, kv_heads, heads / kv_heads * t, head_dim])
}

/// Reshapes `[rows, G, Q*T, E]` to `[rows, T, H, E]`.
fn ungrouped<B: Backend>(x: Tensor<B, 4>, docs: &Documents<B>, spec: AttentionSpec) -> Tensor<B, 4> {
    let t = docs.tokens() / docs.rows;
    x.reshape([docs.rows, spec.heads, t, spec.head_dim]).swap_dims(1, 2)
}

/// Reshapes the keys or values of all rows `[S, G*E]` to `[rows, G, S/rows, E]`.
fn keyed<B: Backend>(x: FloatTensor<B>, docs: &Documents<B>, spec: AttentionSpec) -> Tensor<B, 4> {
    let [s, _] = dims(&x);
    tensor::<B, 2>(x).reshape([docs.rows, s / docs.rows, spec.kv_heads, spec.head_dim]).swap_dims(1, 2)
}

fn dims<Value: TensorMetadata>(x: &Value) -> [usize; 2] {
    x.shape().dims()
}
