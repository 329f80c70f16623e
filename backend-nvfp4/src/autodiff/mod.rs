//! Gradients of the operations. Each method runs the operation of the inner backend and puts the result into the graph
//! with its backward.

mod joint;
mod squares;
mod training;

pub use training::TrainingBackend;

use crate::{
    attention::{AttentionSpec, Documents, Rotary},
    held_codes::HeldPrimitive,
    kernels::{AttentionSaved, HeadGradients, Nvfp4Kernels},
    ops::{Activations, LayerWeight, LinearLayer, Nvfp4Backend},
    recipe::{LinearSpec, Precision},
    services::{DeviceMemory, MemoryUse},
    straight_through::{self, cast},
};
use burn::{
    backend::{
        Autodiff,
        autodiff::{
            checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
            grads::Gradients,
            ops::{Backward, Ops, OpsKind},
        },
    },
    tensor::{
        DType, Shape, TensorMetadata,
        backend::{AutodiffBackend, Backend},
        ops::{FloatTensor, IntTensor},
    },
};

impl<B: Nvfp4Kernels, Strategy: CheckpointStrategy> Nvfp4Backend for Autodiff<B, Strategy> {
    fn nvfp4_linears(x: Activations<Self>, layers: Vec<LinearLayer<Self>>) -> Vec<FloatTensor<Self>> {
        let (mut parents, mut inner, mut specs) = (vec![x.values.clone()], Vec::new(), Vec::new());
        for LinearLayer { weight, spec } in layers {
            let (weight, parent) = match weight {
                LayerWeight::Dense(w) => (LayerWeight::Dense(w.primitive.clone()), Some(w)),
                LayerWeight::Held { values, codes: HeldPrimitive { packed, amax, spec } } => {
                    // Both backends have the same Int tensors.
                    let codes = HeldPrimitive { packed, amax, spec };
                    (LayerWeight::Held { values: values.primitive.clone(), codes }, Some(values))
                }
                LayerWeight::Packed { packed, gradient } => (LayerWeight::Packed { packed, gradient: None }, gradient),
            };
            // A weight that is not trained stands in the graph as a leaf without gradient.
            parents.push(parent.unwrap_or_else(|| Self::from_inner(x.values.primitive.clone())));
            inner.push(LinearLayer { weight, spec });
            specs.push(spec);
        }
        let x = Activations { values: x.values.primitive, packed: x.packed };
        let (ys, saved) = straight_through::forward::<B>(x, inner);
        joint::outputs::<B, Strategy>(parents, (saved, specs), ys)
    }

    fn rms_norm(
        x: FloatTensor<Self>,
        added: Option<FloatTensor<Self>>,
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
        let (h, y) = match added {
            None => {
                let (_, y) = B::rms_norm(x.primitive.clone(), None, w.primitive.clone(), eps, spec);
                (x, y)
            }
            Some(added) => {
                let (sum, y) = B::rms_norm(x.primitive, Some(added.primitive), w.primitive.clone(), eps, spec);
                let sum = match Sum.prepare::<Strategy>([x.node, added.node]).compute_bound().stateful() {
                    OpsKind::Tracked(prep) => prep.finish((), sum),
                    OpsKind::UnTracked(prep) => prep.finish(sum),
                };
                (sum, y)
            }
        };
        let values = normed::<B, Strategy>(h.clone(), w, eps, y.values);
        (h, Activations { values, packed: y.packed })
    }

    fn norm_rope(x: FloatTensor<Self>, w: FloatTensor<Self>, rotary: &Rotary<Self>, eps: f64) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct NormRope;
        impl<B: Nvfp4Kernels> Backward<B, 2> for NormRope {
            type State = (FloatTensor<B>, FloatTensor<B>, Rotary<B>, f64);
            fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
                gradients::<B, _, 2>(ops, grads, |(x, w, rotary, eps), dy| {
                    B::norm_rope_backward(x, w, &rotary, dy, eps).into()
                });
            }
        }
        let rotary = rotary.inner();
        let y = B::norm_rope(x.primitive.clone(), w.primitive.clone(), &rotary, eps);
        match NormRope.prepare::<Strategy>([x.node, w.node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((x.primitive, w.primitive, rotary, eps), y),
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }

    fn swiglu(gate: FloatTensor<Self>, up: FloatTensor<Self>, spec: LinearSpec) -> Activations<Self> {
        #[derive(Debug)]
        struct Swiglu;
        impl<B: Nvfp4Kernels> Backward<B, 2> for Swiglu {
            type State = (FloatTensor<B>, FloatTensor<B>);
            fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
                gradients::<B, _, 2>(ops, grads, |(gate, up), dy| B::swiglu_backward(gate, up, dy).into());
            }
        }
        let y = B::swiglu(gate.primitive.clone(), up.primitive.clone(), spec);
        let values = match Swiglu.prepare::<Strategy>([gate.node, up.node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((gate.primitive, up.primitive), y.values),
            OpsKind::UnTracked(prep) => prep.finish(y.values),
        };
        Activations { values, packed: y.packed }
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
        impl<B: Nvfp4Kernels> Backward<B, 3> for Attention {
            type State = (AttentionSaved<B>, Documents<B>, AttentionSpec);
            fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
                gradients::<B, _, 3>(ops, grads, |(saved, docs, spec), dy| {
                    B::attention_backward(saved, dy, &docs, spec)
                });
            }
        }
        let docs = docs.inner();
        let [q_in, k_in, v_in] = [&q, &k, &v].map(|x| x.primitive.clone());
        let (y, lse) = B::attention_saving(q_in, k_in, v_in, &docs, spec);
        match Attention.prepare::<Strategy>([q.node, k.node, v.node]).compute_bound().stateful() {
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
        impl<B: Nvfp4Kernels> Backward<B, 2> for Head {
            type State = (HeadGradients<B>, Precision);
            fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
                let dy = grads.consume::<B>(&ops.node);
                let (HeadGradients { dh, dw }, precision) = ops.state;
                let [h, w] = ops.parents;
                if let Some(h) = h {
                    let factor = cast::<B>(B::float_reshape(dy.clone(), Shape::new([1, 1])), dh.dtype());
                    grads.register::<B>(h.id, B::float_mul(dh, factor));
                }
                if let Some(w) = w {
                    grads.register::<B>(w.id, B::head_weight_gradient(dw, cast::<B>(dy, DType::F32), precision));
                }
            }
        }
        let (h_in, w_in) = (h.primitive, w.primitive);
        match Head.prepare::<Strategy>([h.node, w.node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let out = B::head_loss_saving(h_in, w_in, targets, precision, true);
                prep.finish((out.gradients.expect("asked for"), precision), out.loss)
            }
            OpsKind::UnTracked(prep) => prep.finish(B::head_loss(h_in, w_in, targets, precision)),
        }
    }

    fn token_rows(w: FloatTensor<Self>, ids: IntTensor<Self>, dtype: DType) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct TokenRows;
        impl<B: Nvfp4Kernels> Backward<B, 1> for TokenRows {
            type State = (Shape, IntTensor<B>);
            fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
                gradients::<B, _, 1>(ops, grads, |(shape, ids), dy| {
                    let device = B::float_device(&dy);
                    let zeros = B::float_zeros(shape, &device, DType::F32.into());
                    [B::float_select_add(zeros, 0, ids, cast::<B>(dy, DType::F32))]
                });
            }
        }
        let shape = w.primitive.shape();
        let y = B::token_rows(w.primitive, ids.clone(), dtype);
        match TokenRows.prepare::<Strategy>([w.node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((shape, ids), y),
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }
}

impl<B: Nvfp4Kernels + DeviceMemory, Strategy: CheckpointStrategy> DeviceMemory for Autodiff<B, Strategy> {
    fn memory_in_use(device: &Self::Device) -> Option<MemoryUse> {
        B::memory_in_use(device)
    }
}

/// Puts `y`, the norm of x, into the graph. Its backward adds `dx` to the gradient that x has already, which came
/// through the residual connection, in the same pass.
fn normed<B: Nvfp4Kernels, Strategy: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, Strategy>>,
    w: FloatTensor<Autodiff<B, Strategy>>,
    eps: f64,
    y: FloatTensor<B>,
) -> FloatTensor<Autodiff<B, Strategy>> {
    #[derive(Debug)]
    struct RmsNorm;
    impl<B: Nvfp4Kernels> Backward<B, 2> for RmsNorm {
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
    match RmsNorm.prepare::<Strategy>([x.node, w.node]).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish((x.primitive, w.primitive, eps), y),
        OpsKind::UnTracked(prep) => prep.finish(y),
    }
}

/// Registers a gradient for each parent that is tracked. `backward` computes all of them from the state and dy.
fn gradients<B: Backend, State, const COUNT: usize>(
    ops: Ops<State, COUNT>,
    grads: &mut Gradients,
    backward: impl FnOnce(State, FloatTensor<B>) -> [FloatTensor<B>; COUNT],
) {
    let dy = grads.consume::<B>(&ops.node);
    let computed = backward(ops.state, dy);
    for (parent, gradient) in ops.parents.into_iter().zip(computed) {
        if let Some(node) = parent {
            grads.register::<B>(node.id, gradient);
        }
    }
}
