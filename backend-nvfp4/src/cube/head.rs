//! The language-model head and its cross-entropy in one: `sum over rows of -log softmax(h · wᵀ)[target]`.
//!
//! The loss and, where they are wanted, both gradients come from one pass over the tokens. The logits of a chunk of
//! tokens become their gradient in place and are used up before the logits of the next chunk exist, because the whole
//! logits of a long batch would be larger than everything else (V is 151,936). Only those of the last chunk wait for the
//! factor of the loss.

use super::{
    launch::{arg, dims, empty, launched},
    products,
};
use crate::{
    kernels::{HeadGradients, HeadLoss, HeadWeightGradient, logits_rows},
    recipe::Precision,
};
use burn::tensor::{DType, Shape, Slice, backend::Backend};
use burn_cubecl::{
    CubeRuntime,
    kernel::{cast, into_contiguous},
    tensor::CubeTensor,
};
use kernels_cubecl::{cross_entropy::cross_entropy, gradient};

/// Computes the loss and, if `gradients`, both gradients, that of `w` up to its last product.
pub(super) fn head_loss<B, R>(
    h: CubeTensor<R>,
    w: CubeTensor<R>,
    targets: CubeTensor<R>,
    precision: Precision,
    gradients: bool,
) -> HeadLoss<B>
where
    R: CubeRuntime,
    B: Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
{
    let (h, targets) = (into_contiguous(h), into_contiguous(targets));
    let ([m, _], [v, _], dtype) = (dims(&h), dims(&w), h.dtype);
    let w = if w.dtype == dtype { w } else { cast(w, dtype) };
    let f32_only = precision == Precision::F32;
    let rows = logits_rows(m, v, dtype.size());
    let one = |like: &CubeTensor<R>| B::float_ones(Shape::new([1]), &B::float_device(like), DType::F32.into());
    let (mut loss, mut dh, mut dw) = (None, Vec::new(), None::<HeadWeightGradient<B>>);
    for start in (0..m).step_by(rows) {
        let end = (start + rows).min(m);
        let chunk = |x: CubeTensor<R>| into_contiguous(B::float_slice(x, &[Slice::from(start..end)]));
        let (h, targets) =
            (chunk(h.clone()), into_contiguous(B::int_slice(targets.clone(), &[Slice::from(start..end)])));
        let dw_so_far = dw.take().map(|dw| products::accumulated(dw.sum, dw.dlogits, dw.h, one(&h), f32_only));
        let logits = into_contiguous(products::dense(h.clone(), B::float_transpose(w.clone()), f32_only, dtype));
        let losses = empty(&h, [end - start], DType::F32);
        let client = &h.client;
        let shape = [end - start, v];
        launched(cross_entropy(client, arg(&logits), arg(&targets), arg(&losses), dtype.into(), shape, gradients));
        // Burn's sum adds with atomics, in another order each time.
        let sum = empty(&losses, [1], DType::F32);
        launched(gradient::sum(&losses.client, arg(&losses), arg(&sum)));
        loss = Some(loss.map_or(sum.clone(), |so_far| B::float_add(so_far, sum)));
        if gradients {
            dh.push(products::dense(logits.clone(), w.clone(), f32_only, dtype));
            dw = Some(HeadWeightGradient { sum: dw_so_far, dlogits: logits, h });
        }
    }
    let loss = loss.unwrap_or_else(|| B::float_zeros(Shape::new([1]), &B::float_device(&h), DType::F32.into()));
    let gradients =
        dw.map(|dw| HeadGradients { dh: if dh.len() == 1 { dh.remove(0) } else { B::float_cat(dh, 0) }, dw });
    HeadLoss { loss, gradients }
}
