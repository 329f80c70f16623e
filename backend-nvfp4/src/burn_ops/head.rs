//! The language-model head and its cross-entropy in one.

use crate::{
    kernels::{HeadLoss, Nvfp4Kernels},
    primitive::{primitive, tensor},
    recipe::Precision,
};
use burn::tensor::{
    DType, IndexingUpdateOp, Int, Tensor, TensorMetadata, activation,
    ops::{FloatTensor, IntTensor},
};

/// Computes the loss and, if `gradients`, both gradients. The logits of all tokens exist at once.
pub(crate) fn head_loss<B: Nvfp4Kernels>(
    h: FloatTensor<B>,
    w: FloatTensor<B>,
    targets: IntTensor<B>,
    precision: Precision,
    gradients: bool,
) -> HeadLoss<B> {
    let dtype = h.dtype();
    let [m, _] = h.shape().dims();
    let w = tensor::<B, 2>(w).cast(dtype);
    let product = |a: Tensor<B, 2>, b: Tensor<B, 2>, out| {
        tensor::<B, 2>(B::dense_matmul(primitive(a), primitive(b), precision, out))
    };
    let h = tensor::<B, 2>(h);
    let targets = Tensor::<B, 1, Int>::from_primitive(targets).reshape([m, 1]);
    let log_p = activation::log_softmax(product(h.clone(), w.clone().transpose(), dtype).cast(DType::F32), 1);
    let loss = log_p.clone().gather(1, targets.clone()).sum().neg();
    let gradients = gradients.then(|| {
        let minus_one = Tensor::<B, 2>::ones([m, 1], (&log_p.device(), DType::F32)).neg();
        let dlogits = log_p.exp().scatter(1, targets, minus_one, IndexingUpdateOp::Add).cast(dtype);
        let dh = product(dlogits.clone(), w, dtype);
        let dw = product(dlogits.transpose(), h, DType::F32);
        (primitive(dh), primitive(dw))
    });
    HeadLoss { loss: primitive(loss), gradients }
}
