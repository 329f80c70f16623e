//! Attention by the flash kernels where they take the shape, and in Burn's own tensors elsewhere.

use super::launch::{arg, dims, empty, launched};
use crate::{
    attention::{AttentionSpec, Documents},
    burn_ops,
    kernels::{AttentionSaved, Nvfp4Kernels},
};
use burn::tensor::{DType, backend::Backend};
use burn_cubecl::{CubeRuntime, kernel::into_contiguous, tensor::CubeTensor};
use kernels_cubecl::{
    attention::{self, AttentionShape, Instructions},
    decode_attention, mma,
};

/// See [`Nvfp4Kernels::attention_saving`].
pub(super) fn attention_saving<B, R>(
    q: CubeTensor<R>,
    k: CubeTensor<R>,
    v: CubeTensor<R>,
    docs: &Documents<B>,
    spec: AttentionSpec,
) -> (CubeTensor<R>, Option<CubeTensor<R>>)
where
    R: CubeRuntime,
    B: Nvfp4Kernels + Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
{
    let Some(shape) = flash_shape(&q, docs, spec) else {
        return (burn_ops::attention::<B>(q, k, v, docs, spec), None);
    };
    let [q, k, v] = [q, k, v].map(into_contiguous);
    let y = empty(&q, dims(&q), q.dtype);
    let lse = empty(&q, [spec.heads, docs.tokens()], DType::F32);
    let qkv = [arg(&q), arg(&k), arg(&v)];
    let dtype = q.dtype.into();
    let by = Instructions::of(&q.client, dtype);
    launched(attention::forward(&q.client, by, qkv, arg(&docs.starts), arg(&y), arg(&lse), dtype, shape));
    (y, Some(lse))
}

/// See [`Nvfp4Kernels::prompt_attention`].
pub(super) fn prompt_attention<B, R>(
    q: CubeTensor<R>,
    k: CubeTensor<R>,
    v: CubeTensor<R>,
    docs: &Documents<B>,
    spec: AttentionSpec,
) -> CubeTensor<R>
where
    R: CubeRuntime,
    B: Nvfp4Kernels + Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
{
    match flash_shape(&q, docs, spec) {
        Some(_) => attention_saving(q, k, v, docs, spec).0,
        None => burn_ops::prompt_attention::<B>(q, k, v, docs, spec),
    }
}

/// See [`Nvfp4Kernels::cached_attention`].
pub(super) fn cached_attention<B, R>(
    q: CubeTensor<R>,
    k: CubeTensor<R>,
    v: CubeTensor<R>,
    docs: &Documents<B>,
    spec: AttentionSpec,
) -> CubeTensor<R>
where
    R: CubeRuntime,
    B: Nvfp4Kernels + Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
{
    let shape = flash_shape(&q, docs, spec).filter(|shape| docs.past > 0 && decode_attention::fits(*shape));
    let Some(shape) = shape else { return prompt_attention(q, k, v, docs, spec) };
    let [q, k, v] = [q, k, v].map(into_contiguous);
    let y = empty(&q, dims(&q), q.dtype);
    let (qkv, starts, dtype) = ([arg(&q), arg(&k), arg(&v)], arg(&docs.starts), q.dtype.into());
    launched(decode_attention::decode_attention(&q.client, qkv, starts, arg(&y), dtype, shape));
    y
}

/// See [`Nvfp4Kernels::attention_backward`].
pub(super) fn attention_backward<B, R>(
    saved: AttentionSaved<B>,
    dy: CubeTensor<R>,
    docs: &Documents<B>,
    spec: AttentionSpec,
) -> [CubeTensor<R>; 3]
where
    R: CubeRuntime,
    B: Nvfp4Kernels + Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
{
    let (Some(lse), Some(shape)) = (saved.lse.clone(), flash_shape(&saved.q, docs, spec)) else {
        return burn_ops::attention_backward::<B>(saved, dy, docs, spec);
    };
    let [q, k, v, dy] = [saved.q, saved.k, saved.v, dy].map(into_contiguous);
    let [dq, dk, dv] = [&q, &k, &v].map(|x| empty(x, dims(x), x.dtype));
    let delta = empty(&q, [spec.heads, docs.tokens()], DType::F32);
    let (client, dtype) = (&q.client, q.dtype.into());
    let by = Instructions::of(client, dtype);
    let read = || attention::Saved { q: arg(&q), k: arg(&k), v: arg(&v), lse: arg(&lse) };
    launched(attention::delta(client, arg(&dy), arg(&saved.y), arg(&delta), dtype, shape));
    launched(attention::backward_kv(
        client,
        by,
        read(),
        arg(&dy),
        arg(&delta),
        arg(&docs.starts),
        arg(&docs.ends),
        [arg(&dk), arg(&dv)],
        dtype,
        shape,
    ));
    let starts = arg(&docs.starts);
    launched(attention::backward_q(client, by, read(), arg(&dy), arg(&delta), starts, arg(&dq), dtype, shape));
    [dq, dk, dv]
}

/// The call as the attention kernels take it, or `None` where they do not.
fn flash_shape<B, R>(q: &CubeTensor<R>, docs: &Documents<B>, spec: AttentionSpec) -> Option<AttentionShape>
where
    R: CubeRuntime,
    B: Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
{
    let AttentionSpec { heads, kv_heads, head_dim, .. } = spec;
    let queries = docs.tokens();
    let shape = AttentionShape { queries, keys: queries + docs.past, past: docs.past, heads, kv_heads, head_dim };
    // In rows with a past, old and new keys alternate from row to row.
    let flat = docs.rows == 1 || docs.past == 0;
    (flat && q.dtype != DType::F32 && shape.fits() && mma::supported(&q.client, q.dtype.into())).then_some(shape)
}
