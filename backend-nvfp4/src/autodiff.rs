//! Gradients of the operations: dense products, and the linear layer with the straight-through
//! estimator (Bengio et al., arXiv 1308.3432): where the forward read `Q(w)`, the gradient with
//! respect to `Q(w)` is handed to `w` unchanged.

use crate::{
    AdamwState, AdamwStep, LinearSpec, MemoryUse, Nvfp4Backend, Nvfp4Primitive, Precision, Product,
    linear::{self, Saved},
    optim::Moment8,
    quantize::QuantizeSpec,
};
use burn::{
    backend::{
        Autodiff,
        autodiff::{
            checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
            grads::Gradients,
            ops::{Backward, Ops, OpsKind, binary, unary},
        },
    },
    tensor::{
        DType, TensorMetadata,
        backend::{AutodiffBackend, Backend},
        ops::FloatTensor,
    },
};

impl<B: Nvfp4Backend, C: CheckpointStrategy> Nvfp4Backend for Autodiff<B, C> {
    fn nvfp4_quantize(x: FloatTensor<Self>, spec: QuantizeSpec) -> Nvfp4Primitive<Self> {
        outer(B::nvfp4_quantize(x.primitive, spec))
    }

    fn nvfp4_dequantize(w: &Nvfp4Primitive<Self>, dtype: DType) -> FloatTensor<Self> {
        Self::from_inner(B::nvfp4_dequantize(&inner(w), dtype))
    }

    fn nvfp4_matmul(a: FloatTensor<Self>, w: &Nvfp4Primitive<Self>, product: Product) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct FrozenWeight;
        impl<B: Nvfp4Backend> Backward<B, 1> for FrozenWeight {
            type State = Nvfp4Primitive<B>;
            fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
                let w = ops.state;
                unary::<B, _>(ops.parents, ops.node, grads, |dy| B::nvfp4_matmul(dy, &w, Product::Nn));
            }
        }
        let w = inner(w);
        let y = B::nvfp4_matmul(a.primitive, &w, product);
        match FrozenWeight.prepare::<C>([a.node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                assert_eq!(product, Product::Nt, "only the forward product is differentiable");
                prep.finish(w, y)
            }
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }

    fn nvfp4_matmul_packed(a: &Nvfp4Primitive<Self>, w: &Nvfp4Primitive<Self>, dtype: DType) -> FloatTensor<Self> {
        Self::from_inner(B::nvfp4_matmul_packed(&inner(a), &inner(w), dtype))
    }

    fn dense_matmul(
        lhs: FloatTensor<Self>,
        rhs: FloatTensor<Self>,
        precision: Precision,
        out: DType,
    ) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct Matmul;
        impl<B: Nvfp4Backend> Backward<B, 2> for Matmul {
            type State = (B::FloatTensorPrimitive, B::FloatTensorPrimitive, Precision);
            fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
                let (lhs, rhs, precision) = ops.state;
                let (lhs_dtype, rhs_dtype) = (lhs.dtype(), rhs.dtype());
                binary::<B, _, _>(
                    ops.parents,
                    ops.node,
                    grads,
                    |dy| B::dense_matmul(dy, B::float_transpose(rhs), precision, lhs_dtype),
                    |dy| B::dense_matmul(B::float_transpose(lhs), dy, precision, rhs_dtype),
                );
            }
        }
        let y = B::dense_matmul(lhs.primitive.clone(), rhs.primitive.clone(), precision, out);
        match Matmul.prepare::<C>([lhs.node, rhs.node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((lhs.primitive, rhs.primitive, precision), y),
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }

    fn nvfp4_linear(x: FloatTensor<Self>, w: FloatTensor<Self>, spec: LinearSpec) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct Linear;
        impl<B: Nvfp4Backend> Backward<B, 2> for Linear {
            type State = (Saved<B>, LinearSpec);
            fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
                let (saved, spec) = ops.state;
                binary::<B, _, _>(
                    ops.parents,
                    ops.node,
                    grads,
                    |dy| linear::dgrad::<B>(dy, &saved, spec),
                    |dy| linear::wgrad::<B>(dy, &saved, spec),
                );
            }
        }
        let (y, saved) = linear::forward::<B>(x.primitive, w.primitive, spec);
        match Linear.prepare::<C>([x.node, w.node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((saved, spec), y),
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }

    fn adamw(
        w: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        state: AdamwState<Self>,
        step: AdamwStep,
        chunk: usize,
    ) -> (FloatTensor<Self>, AdamwState<Self>) {
        let down =
            |m: Moment8<Self>| Moment8::<B> { codes: m.codes, absmax: m.absmax.primitive, table: m.table.primitive };
        let state = match state {
            AdamwState::F32 { m, v } => AdamwState::F32 { m: m.primitive, v: v.primitive },
            AdamwState::Int8 { m, v } => AdamwState::Int8 { m: down(m), v: down(v) },
        };
        let (w, state) = B::adamw(w.primitive, grad.primitive, state, step, chunk);
        let up = |m: Moment8<B>| Moment8::<Self> {
            codes: m.codes,
            absmax: Self::from_inner(m.absmax),
            table: Self::from_inner(m.table),
        };
        let state = match state {
            AdamwState::F32 { m, v } => AdamwState::F32 { m: Self::from_inner(m), v: Self::from_inner(v) },
            AdamwState::Int8 { m, v } => AdamwState::Int8 { m: up(m), v: up(v) },
        };
        (Self::from_inner(w), state)
    }

    fn memory_in_use(device: &Self::Device) -> Option<MemoryUse> {
        B::memory_in_use(device)
    }
}

/// Int tensors are the inner backend's own.
fn inner<B: Backend, C: CheckpointStrategy>(w: &Nvfp4Primitive<Autodiff<B, C>>) -> Nvfp4Primitive<B> {
    Nvfp4Primitive { codes: w.codes.clone(), scales: w.scales.clone(), global: w.global.clone() }
}

fn outer<B: Backend, C: CheckpointStrategy>(w: Nvfp4Primitive<B>) -> Nvfp4Primitive<Autodiff<B, C>> {
    Nvfp4Primitive { codes: w.codes, scales: w.scales, global: w.global }
}
