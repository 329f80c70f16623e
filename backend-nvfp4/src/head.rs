//! The language-model head and its cross-entropy in one: `sum over rows of -log softmax(h · wᵀ)[target]`.
//!
//! The loss and, where they are wanted, both gradients come from one pass over the tokens: a chunk's logits become
//! their gradient in place and are used up before the next chunk's exist. Whole logits of a long batch would outweigh
//! everything else (V is 151,936).

use crate::{Nvfp4Backend, Precision, tensor::float};
use burn::tensor::{
    DType, Int, Tensor, TensorMetadata, activation,
    backend::Backend,
    ops::{FloatTensor, IntTensor},
};

/// Bytes that a chunk's logits may take.
pub(crate) const CHUNK_BYTES: usize = 300 << 20;

/// A loss and what the backward needs of it.
#[derive(Debug, Clone)]
pub struct HeadLoss<B: Backend> {
    /// f32 `[1]`.
    pub loss: FloatTensor<B>,
    /// dh `[M, D]` in the type of h, dw `[V, D]` f32, for a gradient of 1.
    pub gradients: Option<(FloatTensor<B>, FloatTensor<B>)>,
}

/// Rows of a chunk: a multiple of 128 that keeps the logits in [`CHUNK_BYTES`].
pub(crate) fn chunk_rows(vocabulary: usize, value_bytes: usize) -> usize {
    (CHUNK_BYTES / (vocabulary * value_bytes) / 128 * 128).max(128)
}

/// In Burn's own operations, without chunks: what the CPU runs.
pub(crate) fn head_loss<B: Nvfp4Backend>(
    h: FloatTensor<B>,
    w: FloatTensor<B>,
    targets: IntTensor<B>,
    precision: Precision,
    gradients: bool,
) -> HeadLoss<B> {
    let dtype = h.dtype();
    let [m, _] = h.shape().dims();
    let w = float::<B, 2>(w).cast(dtype);
    let product = |a: Tensor<B, 2>, b: Tensor<B, 2>, out| {
        let (a, b) = (a.into_primitive().tensor(), b.into_primitive().tensor());
        float::<B, 2>(B::dense_matmul(a, b, precision, out))
    };
    let h = float::<B, 2>(h);
    let targets = Tensor::<B, 1, Int>::from_primitive(targets).reshape([m, 1]);
    let log_p = activation::log_softmax(product(h.clone(), w.clone().transpose(), dtype).cast(DType::F32), 1);
    let loss = log_p.clone().gather(1, targets.clone()).sum().neg();
    let gradients = gradients.then(|| {
        let minus_one = Tensor::<B, 2>::ones([m, 1], (&log_p.device(), DType::F32)).neg();
        let dlogits = log_p.exp().scatter(1, targets, minus_one, burn::tensor::IndexingUpdateOp::Add).cast(dtype);
        let dh = product(dlogits.clone(), w, dtype);
        let dw = product(dlogits.transpose(), h, DType::F32);
        (dh.into_primitive().tensor(), dw.into_primitive().tensor())
    });
    HeadLoss { loss: loss.into_primitive().tensor(), gradients }
}
