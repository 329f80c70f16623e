//! Gradients on their way from the backward to the optimizer: gathered over micro-batches, measured for the global
//! norm, or applied and dropped at once.

use crate::train::optim::{ChunkedAdamw, Rate};
use backend_nvfp4::{Nvfp4Kernels, Nvfp4Linear, PackedMaster, TrainingBackend};
use burn::{
    module::{AutodiffModule, Param, ParamId},
    optim::GradientsParams,
    tensor::{DType, Tensor, TensorMetadata, TensorPrimitive, ops::FloatTensor},
};
use model_qwen3::{ModelError, weights::Replace, weights::to_host};
use std::collections::HashMap;

/// What becomes of gradients.
#[derive(Debug, Clone, Copy)]
pub enum Fate {
    /// They are added to those gathered so far.
    Gather,
    /// Their squares are summed; they are dropped.
    Measure,
    /// With those gathered so far they go to the optimizer; their squares are summed on the way unless they were before.
    Apply {
        /// Learning rate and clipping.
        rate: Rate,
        /// Whether the norm is known already.
        measured: bool,
    },
}

/// Gradients of earlier micro-batches, and the squares of those that went by.
#[derive(Debug)]
pub struct Gathered<B: Nvfp4Kernels> {
    sums: HashMap<ParamId, FloatTensor<B>>,
    squares: Vec<Tensor<B, 1>>,
    dtype: DType,
}

impl<B: Nvfp4Kernels> Gathered<B> {
    /// Nothing gathered; sums of matrices are kept as `dtype`.
    pub fn new(dtype: DType) -> Self {
        Self { sums: HashMap::new(), squares: vec![], dtype }
    }

    /// What was gathered for a parameter.
    pub fn get(&self, id: ParamId) -> Option<&FloatTensor<B>> {
        self.sums.get(&id)
    }

    /// The root of the squares that went by since the last call; `None` if no gradient did.
    ///
    /// # Errors
    /// If the device failed.
    pub fn norm(&mut self) -> Result<Option<f32>, ModelError> {
        if self.squares.is_empty() {
            return Ok(None);
        }
        let sums = to_host(Tensor::cat(std::mem::take(&mut self.squares), 0))?;
        Ok(Some(sums.iter().map(|&s| f64::from(s)).sum::<f64>().sqrt() as f32))
    }

    /// Counts what was gathered as gone by.
    pub fn measure(&mut self) {
        // In the order of parameters: a sum of floats depends on it.
        let mut ids: Vec<_> = self.sums.keys().copied().collect();
        ids.sort_by_key(|id| id.val());
        for id in ids {
            let sum = self.sums[&id].clone();
            self.count(&sum);
        }
    }

    fn count(&mut self, grad: &FloatTensor<B>) {
        self.squares.push(Tensor::from_primitive(TensorPrimitive::Float(B::square_sum(grad.clone()))));
    }

    /// The gradient that is to be applied now, if it is.
    fn settle(&mut self, id: ParamId, grad: Option<FloatTensor<B>>, fate: Fate) -> Option<(FloatTensor<B>, Rate)> {
        let (sum, fresh) = match (self.sums.remove(&id), grad) {
            (None, None) => return None,
            (Some(sum), None) => (sum, false),
            (None, Some(grad)) => (grad, true),
            (Some(sum), Some(grad)) => (B::accumulated(sum, grad), false),
        };
        match fate {
            Fate::Gather => {
                let narrow = fresh && sum.shape().rank() > 1 && sum.dtype() != self.dtype;
                let sum = if narrow { B::float_cast(sum, self.dtype.into()) } else { sum };
                self.sums.insert(id, sum);
                None
            }
            Fate::Measure => {
                self.count(&sum);
                None
            }
            Fate::Apply { rate, measured } => {
                if !measured {
                    self.count(&sum);
                }
                Some((sum, rate))
            }
        }
    }
}

/// Walks over tensors of a model with their gradients.
pub struct Walk<'a, AB>
where
    AB: TrainingBackend,
{
    /// Gradients of these tensors; what is not in it has none.
    pub grads: GradientsParams,
    /// What becomes of them.
    pub fate: Fate,
    /// Those of earlier micro-batches.
    pub gathered: &'a mut Gathered<AB::InnerBackend>,
    /// Where they go.
    pub optimizer: &'a mut ChunkedAdamw<AB::InnerBackend>,
}

impl<AB> Walk<'_, AB>
where
    AB: TrainingBackend,
{
    fn param<const D: usize>(&mut self, param: Param<Tensor<AB, D>>) -> Param<Tensor<AB, D>> {
        let grad = self.grads.remove::<AB::InnerBackend, D>(param.id).map(|g| g.into_primitive().tensor());
        let Some((grad, rate)) = self.gathered.settle(param.id, grad, self.fate) else { return param };
        let (id, weight, mapper) = param.consume();
        let weight = self.optimizer.step(id, weight.inner(), grad, rate);
        Param::from_mapped_value(id, Tensor::from_inner(weight).require_grad(), mapper)
    }
}

impl<AB> Replace<AB> for Walk<'_, AB>
where
    AB: TrainingBackend,
{
    fn vector(&mut self, p: Param<Tensor<AB, 1>>) -> Param<Tensor<AB, 1>> {
        self.param(p)
    }

    fn matrix(&mut self, p: Param<Tensor<AB, 2>>) -> Param<Tensor<AB, 2>> {
        self.param(p)
    }

    fn linear(&mut self, linear: Nvfp4Linear<AB>) -> Nvfp4Linear<AB> {
        match linear {
            Nvfp4Linear::Master(p) => Nvfp4Linear::Master(self.param(p)),
            Nvfp4Linear::Dense(p) => Nvfp4Linear::Dense(self.param(p)),
            Nvfp4Linear::Packed(w) => Nvfp4Linear::Packed(w),
            Nvfp4Linear::PackedMaster(PackedMaster { gradient, mut weight }) => {
                let id = gradient.id;
                let grad = self.grads.remove::<AB::InnerBackend, 2>(id).map(|g| g.into_primitive().tensor());
                if let Some((grad, rate)) = self.gathered.settle(id, grad, self.fate) {
                    let inner = weight.valid();
                    drop(weight);
                    weight = AutodiffModule::from_inner(self.optimizer.step_packed(id, inner, grad, rate));
                }
                Nvfp4Linear::PackedMaster(PackedMaster { gradient, weight })
            }
        }
    }
}
