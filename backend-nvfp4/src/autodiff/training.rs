//! The backend that a training step runs on: a backward that begins in the middle of a model, and what it leaves.

use super::squares;
use crate::{kernels::Nvfp4Kernels, ops::Nvfp4Backend, services::DeviceMemory};
use burn::{
    backend::{
        Autodiff,
        autodiff::{
            checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
            grads::Gradients,
            ops::{Backward, Ops, OpsKind},
        },
    },
    tensor::{DType, Shape, Tensor, backend::AutodiffBackend, ops::FloatTensor},
};

/// The backend that a training step runs on: it records the operations of an inner backend in a graph.
pub trait TrainingBackend: AutodiffBackend<InnerBackend: Nvfp4Kernels> + Nvfp4Backend + DeviceMemory {
    /// Runs the backward of everything that `y` depends on, beginning with the gradient `dy` of `y`.
    fn backward_from<const RANK: usize>(y: Tensor<Self, RANK>, dy: Tensor<Self::InnerBackend, RANK>)
    -> Self::Gradients;

    /// Takes out the sums of squares that a product has left with the gradient of `weight` ([`Gradient::squares`]).
    ///
    /// [`Gradient::squares`]: crate::Gradient::squares
    fn take_squares<const RANK: usize>(
        grads: &mut Self::Gradients,
        weight: Tensor<Self, RANK>,
    ) -> Option<FloatTensor<Self::InnerBackend>>;
}

impl<B: Nvfp4Kernels + DeviceMemory, Strategy: CheckpointStrategy> TrainingBackend for Autodiff<B, Strategy> {
    fn backward_from<const RANK: usize>(y: Tensor<Self, RANK>, dy: Tensor<B, RANK>) -> Self::Gradients {
        let (y, dy) = (y.into_primitive().tensor(), dy.into_primitive().tensor());
        // A graph ends in a scalar. This one is zero, and its backward hands `dy` to `y`.
        let zero = B::float_zeros(Shape::new([1]), &B::float_device(&dy), DType::F32.into());
        let root = match Seeded.prepare::<Strategy>([y.node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(dy, zero),
            OpsKind::UnTracked(prep) => prep.finish(zero),
        };
        Self::backward(root)
    }

    fn take_squares<const RANK: usize>(
        grads: &mut Self::Gradients,
        weight: Tensor<Self, RANK>,
    ) -> Option<FloatTensor<B>> {
        squares::take::<B, Strategy>(grads, weight.into_primitive().tensor())
    }
}

#[derive(Debug)]
struct Seeded;

impl<B: Nvfp4Kernels> Backward<B, 1> for Seeded {
    type State = FloatTensor<B>;
    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        drop(grads.consume::<B>(&ops.node));
        let [y] = ops.parents;
        if let Some(node) = y {
            grads.register::<B>(node.id, ops.state);
        }
    }
}
