//! Gradients of the operations: dense products, and the linear layer with the straight-through
//! estimator (Bengio et al., arXiv 1308.3432): where the forward read `Q(w)`, the gradient with
//! respect to `Q(w)` is handed to `w` unchanged.

mod joint;

use crate::{
    Activations, AdamwState, AdamwStep, AttentionSaved, AttentionSpec, Documents, LinearSpec, LinearWeight,
    MasterWeight, MemoryUse, Moment, Nvfp4Backend, Nvfp4Error, Nvfp4Primitive, Precision, Product, Rotary, Stream,
    bench, linear, quantize::QuantizeSpec,
};
use burn::{
    backend::{
        Autodiff,
        autodiff::{
            checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
            grads::Gradients,
            ops::{Backward, Ops, OpsKind, binary},
        },
    },
    tensor::{
        DType, FloatDType, Shape, TensorMetadata,
        backend::{AutodiffBackend, Backend},
        ops::{FloatTensor, IntTensor},
    },
};

impl<B: Nvfp4Backend, C: CheckpointStrategy> Nvfp4Backend for Autodiff<B, C> {
    fn nvfp4_quantize(x: FloatTensor<Self>, spec: QuantizeSpec) -> Nvfp4Primitive<Self> {
        outer(B::nvfp4_quantize(x.primitive, spec))
    }

    fn nvfp4_quantize_across(x: FloatTensor<Self>, spec: QuantizeSpec, rotated: bool) -> Nvfp4Primitive<Self> {
        outer(B::nvfp4_quantize_across(x.primitive, spec, rotated))
    }

    fn nvfp4_quantize_master(x: FloatTensor<Self>) -> Nvfp4Primitive<Self> {
        outer(B::nvfp4_quantize_master(x.primitive))
    }

    fn normal(dims: [usize; 2], std: f32, stream: Stream, dtype: DType, device: &Self::Device) -> FloatTensor<Self> {
        Self::from_inner(B::normal(dims, std, stream, dtype, device))
    }

    fn unfilled(dims: [usize; 2], dtype: DType, device: &Self::Device) -> FloatTensor<Self> {
        Self::from_inner(B::unfilled(dims, dtype, device))
    }

    fn nvfp4_dequantize(w: &Nvfp4Primitive<Self>, dtype: DType) -> FloatTensor<Self> {
        Self::from_inner(B::nvfp4_dequantize(&inner(w), dtype))
    }

    fn nvfp4_matmul(a: FloatTensor<Self>, w: &Nvfp4Primitive<Self>, product: Product, out: DType) -> FloatTensor<Self> {
        Self::from_inner(B::nvfp4_matmul(a.primitive, &inner(w), product, out))
    }

    fn nvfp4_matmul_packed(
        a: &Nvfp4Primitive<Self>,
        w: &Nvfp4Primitive<Self>,
        product: Product,
        operand: DType,
        out: DType,
    ) -> FloatTensor<Self> {
        Self::from_inner(B::nvfp4_matmul_packed(&inner(a), &inner(w), product, operand, out))
    }

    fn hadamard(x: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::from_inner(B::hadamard(x.primitive))
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

    fn nvfp4_linears(x: Activations<Self>, layers: Vec<(LinearWeight<Self>, LinearSpec)>) -> Vec<FloatTensor<Self>> {
        let (mut parents, mut weights, mut specs) = (vec![x.values.clone()], Vec::new(), Vec::new());
        for (w, spec) in layers {
            let (w, parent) = match w {
                LinearWeight::Float(w) => (LinearWeight::Float(w.primitive.clone()), Some(w)),
                LinearWeight::Packed { codes, gradient } => {
                    let taking = gradient.as_ref().map(|gradient| gradient.primitive.clone());
                    (LinearWeight::Packed { codes: inner(&codes), gradient: taking }, gradient)
                }
            };
            // What is not trained stands in the graph as a leaf without gradient.
            parents.push(parent.unwrap_or_else(|| Self::from_inner(x.values.primitive.clone())));
            weights.push(w);
            specs.push(spec);
        }
        let x = Activations { values: x.values.primitive, codes: x.codes.as_ref().map(inner) };
        let (ys, saved) = linear::forward::<B>(x, weights, specs[0]);
        joint::outputs::<B, C>(parents, (saved, specs), ys)
    }

    fn rms_norm(x: FloatTensor<Self>, w: FloatTensor<Self>, eps: f64) -> FloatTensor<Self> {
        let y = B::rms_norm(x.primitive.clone(), w.primitive.clone(), eps);
        normed::<B, C>(x, w, eps, y)
    }

    fn rms_norm_activations(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        eps: f64,
        spec: LinearSpec,
    ) -> Activations<Self> {
        let y = B::rms_norm_activations(x.primitive.clone(), w.primitive.clone(), eps, spec);
        Activations { values: normed::<B, C>(x, w, eps, y.values), codes: y.codes.map(outer) }
    }

    fn add_rms_norm(
        x: FloatTensor<Self>,
        added: FloatTensor<Self>,
        w: FloatTensor<Self>,
        eps: f64,
        spec: LinearSpec,
    ) -> (FloatTensor<Self>, Activations<Self>) {
        #[derive(Debug)]
        struct Sum;
        impl<B: Backend> Backward<B, 2> for Sum {
            type State = ();
            fn backward(self, ops: Ops<(), 2>, grads: &mut Gradients, _: &mut Checkpointer) {
                gradients::<B, _, 2>(ops, grads, |(), dy| [dy.clone(), dy]);
            }
        }
        let (sum, y) = B::add_rms_norm(x.primitive, added.primitive, w.primitive.clone(), eps, spec);
        let sum: FloatTensor<Self> = match Sum.prepare::<C>([x.node, added.node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((), sum),
            OpsKind::UnTracked(prep) => prep.finish(sum),
        };
        let values = normed::<B, C>(sum.clone(), w, eps, y.values);
        (sum, Activations { values, codes: y.codes.map(outer) })
    }

    fn norm_rope(x: FloatTensor<Self>, w: FloatTensor<Self>, rotary: &Rotary<Self>, eps: f64) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct NormRope;
        impl<B: Nvfp4Backend> Backward<B, 2> for NormRope {
            type State = (FloatTensor<B>, FloatTensor<B>, Rotary<B>, f64);
            fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
                gradients::<B, _, 2>(ops, grads, |(x, w, rotary, eps), dy| {
                    B::norm_rope_backward(x, w, &rotary, dy, eps).into()
                });
            }
        }
        let rotary = Rotary {
            cos: rotary.cos.primitive.clone(),
            sin: rotary.sin.primitive.clone(),
            positions: rotary.positions.clone(),
        };
        let y = B::norm_rope(x.primitive.clone(), w.primitive.clone(), &rotary, eps);
        match NormRope.prepare::<C>([x.node, w.node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((x.primitive, w.primitive, rotary, eps), y),
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }

    fn swiglu(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self> {
        let y = B::swiglu(gate.primitive.clone(), up.primitive.clone());
        gated::<B, C>(gate, up, y)
    }

    fn swiglu_activations(gate: FloatTensor<Self>, up: FloatTensor<Self>, spec: LinearSpec) -> Activations<Self> {
        let y = B::swiglu_activations(gate.primitive.clone(), up.primitive.clone(), spec);
        Activations { values: gated::<B, C>(gate, up, y.values), codes: y.codes.map(outer) }
    }

    fn causal_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        docs: &Documents<Self>,
        spec: AttentionSpec,
    ) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct Attention;
        impl<B: Nvfp4Backend> Backward<B, 3> for Attention {
            type State = (AttentionSaved<B>, Documents<B>, AttentionSpec);
            fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
                gradients::<B, _, 3>(ops, grads, |(saved, docs, spec), dy| {
                    B::attention_backward(saved, dy, &docs, spec)
                });
            }
        }
        let docs = docs.map::<B>(Clone::clone);
        let [q_in, k_in, v_in] = [&q, &k, &v].map(|x| x.primitive.clone());
        let (y, lse) = B::attention_saving(q_in, k_in, v_in, &docs, spec);
        match Attention.prepare::<C>([q.node, k.node, v.node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let (q, k, v) = (q.primitive, k.primitive, v.primitive);
                prep.finish((AttentionSaved { q, k, v, y: y.clone(), lse }, docs, spec), y)
            }
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }

    fn head_loss(
        h: FloatTensor<Self>,
        w: FloatTensor<Self>,
        targets: IntTensor<Self>,
        precision: Precision,
    ) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct Head;
        impl<B: Nvfp4Backend> Backward<B, 2> for Head {
            type State = (FloatTensor<B>, FloatTensor<B>);
            fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
                gradients::<B, _, 2>(ops, grads, |(dh, dw), dy| {
                    let scaled = |x: FloatTensor<B>| {
                        let dy = B::float_reshape(dy.clone(), Shape::new([1, 1]));
                        let to: FloatDType = x.dtype().into();
                        let dy = if dy.dtype() == x.dtype() { dy } else { B::float_cast(dy, to) };
                        B::float_mul(x, dy)
                    };
                    [scaled(dh), scaled(dw)]
                });
            }
        }
        let (h_in, w_in) = (h.primitive, w.primitive);
        match Head.prepare::<C>([h.node, w.node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let out = B::head_loss_saving(h_in, w_in, targets, precision, true);
                prep.finish(out.gradients.expect("asked for"), out.loss)
            }
            OpsKind::UnTracked(prep) => prep.finish(B::head_loss(h_in, w_in, targets, precision)),
        }
    }

    fn adamw(
        w: MasterWeight<Self>,
        grad: FloatTensor<Self>,
        state: AdamwState<Self>,
        step: AdamwStep,
        chunk: usize,
    ) -> (MasterWeight<Self>, AdamwState<Self>) {
        let w = match w {
            MasterWeight::Dense { w, master, residual } => MasterWeight::Dense { w: w.primitive, master, residual },
            MasterWeight::Packed(w) => MasterWeight::Packed(inner(&w)),
        };
        let down = |moment: Moment<Self>| match moment {
            Moment::Float(x) => Moment::<B>::Float(x.primitive),
            Moment::Quantized { codes, absmax, table } => {
                Moment::Quantized { codes, absmax: absmax.primitive, table: table.primitive }
            }
        };
        let state = AdamwState { kind: state.kind, m: down(state.m), v: down(state.v) };
        let (w, state) = B::adamw(w, grad.primitive, state, step, chunk);
        let w = match w {
            MasterWeight::Dense { w, master, residual } => {
                MasterWeight::Dense { w: Self::from_inner(w), master, residual }
            }
            MasterWeight::Packed(w) => MasterWeight::Packed(outer(w)),
        };
        let up = |moment: Moment<B>| match moment {
            Moment::Float(x) => Moment::<Self>::Float(Self::from_inner(x)),
            Moment::Quantized { codes, absmax, table } => {
                Moment::Quantized { codes, absmax: Self::from_inner(absmax), table: Self::from_inner(table) }
            }
        };
        (w, AdamwState { kind: state.kind, m: up(state.m), v: up(state.v) })
    }

    fn token_rows(w: FloatTensor<Self>, ids: IntTensor<Self>, dtype: DType) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct TokenRows;
        impl<B: Nvfp4Backend> Backward<B, 1> for TokenRows {
            type State = (Shape, IntTensor<B>);
            fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
                gradients::<B, _, 1>(ops, grads, |(shape, ids), dy| {
                    let device = B::float_device(&dy);
                    let zeros = B::float_zeros(shape, &device, DType::F32.into());
                    let dy = if dy.dtype() == DType::F32 { dy } else { B::float_cast(dy, FloatDType::F32) };
                    [B::float_select_add(zeros, 0, ids, dy)]
                });
            }
        }
        let shape = w.primitive.shape();
        let y = B::token_rows(w.primitive, ids.clone(), dtype);
        match TokenRows.prepare::<C>([w.node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((shape, ids), y),
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }

    fn seeded(y: FloatTensor<Self>, dy: FloatTensor<Self>) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct Seeded;
        impl<B: Nvfp4Backend> Backward<B, 1> for Seeded {
            type State = FloatTensor<B>;
            fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
                gradients::<B, _, 1>(ops, grads, |dy, _| [dy]);
            }
        }
        let zero = B::seeded(y.primitive, dy.primitive.clone());
        match Seeded.prepare::<C>([y.node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(dy.primitive, zero),
            OpsKind::UnTracked(prep) => prep.finish(zero),
        }
    }

    fn tiers(device: &Self::Device) -> Vec<&'static str> {
        B::tiers(device)
    }

    fn bench_kernels(device: &Self::Device, filter: &str, show: &mut dyn FnMut(bench::Row)) -> Result<(), Nvfp4Error> {
        B::bench_kernels(device, filter, show)
    }

    fn memory_in_use(device: &Self::Device) -> Option<MemoryUse> {
        B::memory_in_use(device)
    }
}

/// `y`, the normalised x, in the graph. Its backward adds to the gradient that x has already, which is that of the residual
/// around what x is normalised for, in the same pass.
fn normed<B: Nvfp4Backend, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    w: FloatTensor<Autodiff<B, C>>,
    eps: f64,
    y: FloatTensor<B>,
) -> FloatTensor<Autodiff<B, C>> {
    #[derive(Debug)]
    struct RmsNorm;
    impl<B: Nvfp4Backend> Backward<B, 2> for RmsNorm {
        type State = (FloatTensor<B>, FloatTensor<B>, f64);
        fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
            let so_far = ops.parents[0].as_ref().and_then(|node| {
                let mut x = Autodiff::<B>::from_inner(ops.state.0.clone());
                x.node = node.clone();
                let there = grads.get::<B>(&x).is_some_and(|gradient| gradient.dtype() == ops.state.0.dtype());
                if there { grads.remove::<B>(&x) } else { None }
            });
            gradients::<B, _, 2>(ops, grads, |(x, w, eps), dy| B::rms_norm_backward(x, w, dy, so_far, eps).into());
        }
    }
    match RmsNorm.prepare::<C>([x.node, w.node]).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish((x.primitive, w.primitive, eps), y),
        OpsKind::UnTracked(prep) => prep.finish(y),
    }
}

/// `y`, the gated up, in the graph.
fn gated<B: Nvfp4Backend, C: CheckpointStrategy>(
    gate: FloatTensor<Autodiff<B, C>>,
    up: FloatTensor<Autodiff<B, C>>,
    y: FloatTensor<B>,
) -> FloatTensor<Autodiff<B, C>> {
    #[derive(Debug)]
    struct Swiglu;
    impl<B: Nvfp4Backend> Backward<B, 2> for Swiglu {
        type State = (FloatTensor<B>, FloatTensor<B>);
        fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
            gradients::<B, _, 2>(ops, grads, |(gate, up), dy| B::swiglu_backward(gate, up, dy).into());
        }
    }
    match Swiglu.prepare::<C>([gate.node, up.node]).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish((gate.primitive, up.primitive), y),
        OpsKind::UnTracked(prep) => prep.finish(y),
    }
}

/// Hands each parent that is tracked its gradient, all of which `backward` computes from the state and dy.
fn gradients<B: Backend, S, const N: usize>(
    ops: Ops<S, N>,
    grads: &mut Gradients,
    backward: impl FnOnce(S, FloatTensor<B>) -> [FloatTensor<B>; N],
) {
    let dy = grads.consume::<B>(&ops.node);
    let computed = backward(ops.state, dy);
    for (parent, gradient) in ops.parents.into_iter().zip(computed) {
        if let Some(node) = parent {
            grads.register::<B>(node.id, gradient);
        }
    }
}

/// Int tensors are the inner backend's own.
fn inner<B: Backend, C: CheckpointStrategy>(w: &Nvfp4Primitive<Autodiff<B, C>>) -> Nvfp4Primitive<B> {
    Nvfp4Primitive { codes: w.codes.clone(), scales: w.scales.clone(), global: w.global.clone() }
}

fn outer<B: Backend, C: CheckpointStrategy>(w: Nvfp4Primitive<B>) -> Nvfp4Primitive<Autodiff<B, C>> {
    Nvfp4Primitive { codes: w.codes, scales: w.scales, global: w.global }
}
