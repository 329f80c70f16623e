//! Several outputs of one operation, in a graph whose operations have one output each. Linear layers that read the same
//! activations are such an operation.
//!
//! ```text
//! x, weights -> [linears] -> (stand-in) -> [output 0] -> y0
//!                                       -> [output 1] -> y1
//! ```
//! The backward of an output puts its gradient where the operation finds it, and gives the stand-in some gradient, whose
//! value nobody reads. When all outputs that the loss depends on have done so, the backward of the operation runs.

use super::squares;
use crate::{
    kernels::Nvfp4Kernels,
    recipe::LinearSpec,
    straight_through::{self, SavedLinears},
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
    tensor::{backend::Backend, ops::FloatTensor},
};
use std::sync::{Arc, Mutex, PoisonError};

/// Puts the outputs `ys` of layers into the graph. Their `parents` are the activations and the weight of each layer.
pub(super) fn outputs<B: Nvfp4Kernels, Strategy: CheckpointStrategy>(
    parents: Vec<FloatTensor<Autodiff<B, Strategy>>>,
    state: (SavedLinears<B>, Vec<LinearSpec>),
    ys: Vec<FloatTensor<B>>,
) -> Vec<FloatTensor<Autodiff<B, Strategy>>> {
    let arrived = Arrived(Arc::new(Mutex::new(ys.iter().map(|_| None).collect())));
    let state = (state.0, state.1, arrived.clone());
    // The graph needs the number of parents at compile time.
    let operation = match parents.len() {
        2 => operation::<B, Strategy, 2>(parents, state),
        3 => operation::<B, Strategy, 3>(parents, state),
        4 => operation::<B, Strategy, 4>(parents, state),
        n => panic!("{} layers read the same activations, one to three are expected", n - 1),
    };
    let output = |(i, y)| match Output.prepare::<Strategy>([operation.node.clone()]).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish((arrived.clone(), i), y),
        OpsKind::UnTracked(prep) => prep.finish(y),
    };
    ys.into_iter().enumerate().map(output).collect()
}

/// The gradients that have arrived, one place for each output.
#[derive(Debug, Clone)]
struct Arrived<B: Backend>(Arc<Mutex<Vec<Option<FloatTensor<B>>>>>);

impl<B: Backend> Arrived<B> {
    fn put(&self, i: usize, dy: FloatTensor<B>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)[i] = Some(dy);
    }

    fn is_empty(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().all(Option::is_none)
    }

    fn take(&self) -> Vec<Option<FloatTensor<B>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter_mut().map(Option::take).collect()
    }
}

type State<B> = (SavedLinears<B>, Vec<LinearSpec>, Arrived<B>);

fn operation<B: Nvfp4Kernels, Strategy: CheckpointStrategy, const PARENTS: usize>(
    parents: Vec<FloatTensor<Autodiff<B, Strategy>>>,
    state: State<B>,
) -> FloatTensor<Autodiff<B, Strategy>> {
    let parents: [FloatTensor<Autodiff<B, Strategy>>; PARENTS] = parents.try_into().expect("their number was matched");
    let stand_in = parents[0].primitive.clone();
    match Linears.prepare::<Strategy>(parents.map(|parent| parent.node)).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(state, stand_in),
        OpsKind::UnTracked(prep) => prep.finish(stand_in),
    }
}

#[derive(Debug)]
struct Linears;

impl<B: Nvfp4Kernels, const PARENTS: usize> Backward<B, PARENTS> for Linears {
    type State = State<B>;
    fn backward(self, ops: Ops<Self::State, PARENTS>, grads: &mut Gradients, _: &mut Checkpointer) {
        drop(grads.consume::<B>(&ops.node));
        let (saved, specs, arrived) = ops.state;
        let wanted = ops.parents.each_ref().map(Option::is_some);
        let (dx, dws) = straight_through::backward::<B>(arrived.take(), saved, &specs, &wanted);
        let mut parents = ops.parents.into_iter();
        if let (Some(x), Some(dx)) = (parents.next().flatten(), dx) {
            grads.register::<B>(x.id, dx);
        }
        for (weight, dw) in parents.zip(dws) {
            if let (Some(weight), Some(dw)) = (weight, dw) {
                squares::register::<B>(grads, weight.id, dw);
            }
        }
    }
}

#[derive(Debug)]
struct Output;

impl<B: Backend> Backward<B, 1> for Output {
    type State = (Arrived<B>, usize);
    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let (dy, (arrived, i)) = (grads.consume::<B>(&ops.node), ops.state);
        let [operation] = ops.parents;
        if let Some(operation) = operation {
            if arrived.is_empty() {
                grads.register::<B>(operation.id, dy.clone());
            }
            arrived.put(i, dy);
        }
    }
}
