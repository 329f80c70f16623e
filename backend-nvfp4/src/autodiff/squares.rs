//! A product may leave sums of squares with the gradient of its weight. They travel beside the gradient, through a container that
//! holds one tensor for each node of the graph. Burn numbers nodes from 0 on, so that the complement of a node's number belongs to
//! no node.

use crate::{gradient::Gradient, kernels::Nvfp4Kernels};
use burn::{
    backend::{
        Autodiff,
        autodiff::{NodeId, checkpoint::strategy::CheckpointStrategy, grads::Gradients},
    },
    tensor::{backend::AutodiffBackend, ops::FloatTensor},
};
use std::sync::Arc;

/// Registers the gradient of a weight of linear layers, and its sums of squares. Only linear layers read such a weight. Where
/// several of them do, their gradients are added, and no sums of squares are left.
pub(super) fn register<B: Nvfp4Kernels>(grads: &mut Gradients, weight: NodeId, gradient: Gradient<B>) {
    let Gradient { values, squares } = gradient;
    if grads.get::<B>(&at::<B>(weight, values.clone())).is_some() {
        drop(grads.remove::<B>(&at::<B>(beside(weight), values.clone())));
    } else if let Some(squares) = squares {
        grads.register::<B>(beside(weight), squares);
    }
    grads.register::<B>(weight, values);
}

/// Takes the sums of squares of a weight's gradient out of the container, if they are there.
pub(super) fn take<B: Nvfp4Kernels, Strategy: CheckpointStrategy>(
    grads: &mut Gradients,
    weight: FloatTensor<Autodiff<B, Strategy>>,
) -> Option<FloatTensor<B>> {
    grads.remove::<B>(&at::<B>(beside(weight.node.id), weight.primitive))
}

fn beside(weight: NodeId) -> NodeId {
    NodeId { value: !weight.value }
}

/// The container is asked by tensors. This one stands for node `id`; its values are not read.
fn at<B: Nvfp4Kernels>(id: NodeId, any: FloatTensor<B>) -> FloatTensor<Autodiff<B>> {
    let mut tensor = Autodiff::<B>::from_inner(any);
    Arc::get_mut(&mut tensor.node).expect("a new tensor has the only handle on its node").id = id;
    tensor
}

#[cfg(test)]
mod tests {
    use super::{Gradient, register, take};
    use burn::{
        backend::{Autodiff, NdArray, autodiff::checkpoint::strategy::NoCheckpointing},
        tensor::{Tensor, TensorPrimitive, backend::AutodiffBackend, ops::FloatTensor},
    };

    fn vector(values: [f32; 2]) -> FloatTensor<NdArray> {
        Tensor::<NdArray, 1>::from_floats(values, &Default::default()).into_primitive().tensor()
    }

    /// Sums of squares are those of one gradient. Two gradients of a weight become one, whose squares are other ones.
    #[test]
    fn squares_lie_beside_the_gradient_of_one_product_only() {
        for (products, expected) in [(1, Some([9.0, 16.0])), (2, None), (3, None)] {
            let device = Default::default();
            let w = Tensor::<Autodiff<NdArray>, 1>::from_floats([1.0, 2.0], &device).require_grad();
            let mut grads = w.clone().sum().backward();
            drop(w.grad_remove(&mut grads));
            let leaf: FloatTensor<Autodiff<NdArray>> = w.into_primitive().tensor();
            for _ in 0..products {
                let gradient = Gradient { values: vector([3.0, 4.0]), squares: Some(vector([9.0, 16.0])) };
                register::<NdArray>(&mut grads, leaf.node.id, gradient);
            }
            let read = |x: FloatTensor<NdArray>| {
                Tensor::<NdArray, 1>::from_primitive(TensorPrimitive::Float(x)).into_data().to_vec::<f32>().ok()
            };
            let mut taken = || take::<NdArray, NoCheckpointing>(&mut grads, leaf.clone());
            assert_eq!(taken().and_then(read), expected.map(Vec::from), "{products} products");
            assert!(taken().is_none(), "they are taken once");
            let sum = Autodiff::<NdArray>::grad(&leaf, &grads).and_then(read);
            assert_eq!(sum, Some(vec![3.0 * products as f32, 4.0 * products as f32]));
        }
    }
}
