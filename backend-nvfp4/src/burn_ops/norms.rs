//! The norm, the rotated heads, the gate and the embedding of a transformer block. Matrices have a row for each of
//! the M tokens of all rows.

use crate::{
    attention::Rotary,
    primitive::{primitive, tensor},
};
use burn::tensor::{
    DType, Int, Shape, Tensor, TensorMetadata, activation,
    backend::Backend,
    ops::{FloatTensor, IntTensor},
};

/// Computes `x / rms(x) * w` over the columns. As in Qwen3, the quotient is computed in f32 and rounded before it is
/// weighted.
pub(crate) fn rms_norm<B: Backend>(x: FloatTensor<B>, w: FloatTensor<B>, eps: f64) -> FloatTensor<B> {
    let (x, w) = (tensor::<B, 2>(x), tensor::<B, 1>(w));
    let dtype = x.dtype();
    primitive(normal(x.cast(DType::F32), eps).0.cast(dtype) * w.cast(dtype).unsqueeze())
}

/// Returns `dx` and `dw` of [`rms_norm`].
pub(crate) fn rms_norm_backward<B: Backend>(
    x: FloatTensor<B>,
    w: FloatTensor<B>,
    dy: FloatTensor<B>,
    eps: f64,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let (x, w, dy) = (tensor::<B, 2>(x), tensor::<B, 1>(w), tensor::<B, 2>(dy));
    let dtype = x.dtype();
    let (n, scale) = normal(x.cast(DType::F32), eps);
    let dy = dy.cast(DType::F32);
    let dw = (dy.clone() * n.clone()).sum_dim(0).squeeze_dim(0);
    let g = dy * w.unsqueeze();
    let along = (g.clone() * n.clone()).mean_dim(1);
    (primitive(((g - n * along) * scale).cast(dtype)), primitive::<B, 1>(dw))
}

/// Normalizes, weights and rotates each head of `x` `[M, heads*E]`.
pub(crate) fn norm_rope<B: Backend>(
    x: FloatTensor<B>,
    w: FloatTensor<B>,
    rotary: &Rotary<B>,
    eps: f64,
) -> FloatTensor<B> {
    let ([m, c], e) = (dims(&x), w.shape()[0]);
    let dtype = x.dtype();
    let rows = tensor::<B, 2>(x).reshape([m * c / e, e]);
    let n = tensor::<B, 2>(rms_norm::<B>(primitive(rows), w, eps)).cast(DType::F32);
    let (a, b) = halves(n, m, c, e);
    let (cos, sin) = angles(rotary);
    let left = a.clone() * cos.clone() - b.clone() * sin.clone();
    primitive(Tensor::cat(vec![left, b * cos + a * sin], 2).reshape([m, c]).cast(dtype))
}

/// Returns `dx` and `dw` of [`norm_rope`].
pub(crate) fn norm_rope_backward<B: Backend>(
    x: FloatTensor<B>,
    w: FloatTensor<B>,
    rotary: &Rotary<B>,
    dy: FloatTensor<B>,
    eps: f64,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let ([m, c], e) = (dims(&x), w.shape()[0]);
    let (da, db) = halves(tensor::<B, 2>(dy).cast(DType::F32), m, c, e);
    let (cos, sin) = angles(rotary);
    let ga = da.clone() * cos.clone() + db.clone() * sin.clone();
    let g = Tensor::cat(vec![ga, db * cos - da * sin], 2).reshape([m * c / e, e]);
    let rows = tensor::<B, 2>(x).reshape([m * c / e, e]);
    let (dx, dw) = rms_norm_backward::<B>(primitive(rows), w, primitive(g), eps);
    (primitive(tensor::<B, 2>(dx).reshape([m, c])), dw)
}

/// Computes `silu(gate) * up`.
pub(crate) fn swiglu<B: Backend>(gate: FloatTensor<B>, up: FloatTensor<B>) -> FloatTensor<B> {
    primitive(activation::silu(tensor::<B, 2>(gate)) * tensor::<B, 2>(up))
}

/// Returns `dgate` and `dup` of [`swiglu`].
pub(crate) fn swiglu_backward<B: Backend>(
    gate: FloatTensor<B>,
    up: FloatTensor<B>,
    dy: FloatTensor<B>,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let dtype = gate.dtype();
    let [g, u, d] = [gate, up, dy].map(|x| tensor::<B, 2>(x).cast(DType::F32));
    let s = activation::sigmoid(g.clone());
    let dup = d.clone() * g.clone() * s.clone();
    let slope = s.clone() * (g * (s.neg() + 1.0) + 1.0);
    (primitive((d * u * slope).cast(dtype)), primitive(dup.cast(dtype)))
}

/// Sums the squares of a gradient of any shape, f32 `[1]`.
pub(crate) fn square_sum<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let x = B::float_reshape(x.clone(), Shape::new([x.shape().num_elements()]));
    let x = tensor::<B, 1>(x).cast(DType::F32);
    primitive((x.clone() * x).sum())
}

/// Looks up the rows `ids` of an embedding as `dtype`.
pub(crate) fn token_rows<B: Backend>(w: FloatTensor<B>, ids: IntTensor<B>, dtype: DType) -> FloatTensor<B> {
    primitive(tensor::<B, 2>(B::float_select(w, 0, ids)).cast(dtype))
}

/// Returns `x * r` and `r = 1 / rms(x)` for each row of an f32 matrix.
fn normal<B: Backend>(x: Tensor<B, 2>, eps: f64) -> (Tensor<B, 2>, Tensor<B, 2>) {
    let rms = (x.clone() * x.clone()).mean_dim(1).add_scalar(eps).sqrt();
    (x / rms.clone(), rms.recip())
}

/// The first and the second half of every head, `[M, heads, E/2]` each.
fn halves<B: Backend>(x: Tensor<B, 2>, m: usize, c: usize, e: usize) -> (Tensor<B, 3>, Tensor<B, 3>) {
    let x = x.reshape([m, c / e, e]);
    (x.clone().narrow(2, 0, e / 2), x.narrow(2, e / 2, e / 2))
}

/// The cosines and sines of every token, `[M, 1, E/2]` each.
fn angles<B: Backend>(rotary: &Rotary<B>) -> (Tensor<B, 3>, Tensor<B, 3>) {
    let positions = Tensor::<B, 1, Int>::from_primitive(rotary.positions.clone());
    let rows =
        |table: &FloatTensor<B>| tensor::<B, 2>(table.clone()).select(0, positions.clone()).unsqueeze_dim::<3>(1);
    (rows(&rotary.cos), rows(&rotary.sin))
}

fn dims<Value: TensorMetadata>(x: &Value) -> [usize; 2] {
    x.shape().dims()
}
