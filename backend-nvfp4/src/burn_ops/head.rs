//! The language-model head and its cross-entropy in one.

use crate::{
    kernels::{HeadGradients, HeadLoss, HeadWeightGradient, Nvfp4Kernels},
    primitive::{primitive, tensor},
    recipe::Precision,
};
use burn::tensor::{
    DType, IndexingUpdateOp, Int, Shape, Tensor, TensorMetadata, activation,
    ops::{FloatTensor, IntTensor},
};

/// Computes the loss and, if `gradients`, both gradients, that of `w` up to its product. The logits of all tokens exist at once.
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
        let dh = primitive(product(dlogits.clone(), w, dtype));
        HeadGradients { dh, dw: HeadWeightGradient { sum: None, dlogits: primitive(dlogits), h: primitive(h) } }
    });
    HeadLoss { loss: primitive(loss), gradients }
}

/// Completes the gradient of the head's weight: `dlogitsᵀ · h * factor` in f32.
pub(crate) fn head_weight_gradient<B: Nvfp4Kernels>(
    rest: HeadWeightGradient<B>,
    factor: FloatTensor<B>,
    precision: Precision,
) -> FloatTensor<B> {
    let product = B::dense_matmul(B::float_transpose(rest.dlogits), rest.h, precision, DType::F32);
    let sum = match rest.sum {
        Some(sum) => B::float_add(sum, product),
        None => product,
    };
    B::float_mul(sum, B::float_reshape(factor, Shape::new([1, 1])))
}
