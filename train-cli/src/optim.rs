//! AdamW over a module, as Burn's `Optimizer`: each tensor is updated in place, some rows a launch,
//! its gradient dropped at once. Arithmetic is f32 whatever the states are stored in.

use backend_nvfp4::{AdamwState, AdamwStep, Nvfp4Backend, StateKind};
use burn::{
    module::{AutodiffModule, ModuleMapper, Param, ParamId},
    optim::{GradientsParams, LearningRate, MultiGradientsParams, Optimizer},
    tensor::{Tensor, TensorPrimitive, backend::AutodiffBackend},
};
use std::collections::{HashMap, HashSet};

/// The constants of AdamW.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamwConfig {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// How moments are stored.
    pub state: StateKind,
    /// Rows of a matrix in one launch; 0 takes all.
    pub chunk_rows: usize,
}

/// The state of one tensor.
#[derive(Debug, Clone)]
pub struct TensorState<B: Nvfp4Backend> {
    /// Updates so far.
    pub steps: i32,
    /// The moments.
    pub moments: AdamwState<B>,
}

/// The optimizer.
#[derive(Debug, Clone)]
pub struct ChunkedAdamw<B: Nvfp4Backend> {
    config: AdamwConfig,
    undecayed: HashSet<ParamId>,
    states: HashMap<ParamId, TensorState<B>>,
    /// Factor on every gradient of the next step: the clipping coefficient.
    pub grad_scale: f64,
}

impl<B: Nvfp4Backend> ChunkedAdamw<B> {
    /// An optimizer without state; parameters in `undecayed` get no weight decay.
    pub fn new(config: AdamwConfig, undecayed: HashSet<ParamId>) -> Self {
        Self { config, undecayed, states: HashMap::new(), grad_scale: 1.0 }
    }

    /// The state of a parameter, if it was ever updated.
    pub fn state(&self, id: ParamId) -> Option<&TensorState<B>> {
        self.states.get(&id)
    }

    /// Puts back a state.
    pub fn restore(&mut self, id: ParamId, state: TensorState<B>) {
        self.states.insert(id, state);
    }

    fn update<const D: usize>(
        &mut self,
        id: ParamId,
        weight: Tensor<B, D>,
        grad: Tensor<B, D>,
        lr: f64,
    ) -> Tensor<B, D> {
        let c = self.config;
        let (shape, device) = (weight.shape(), weight.device());
        let zero = || TensorState { steps: 0, moments: AdamwState::zeros(c.state, shape.clone(), &device) };
        let mut state = self.states.remove(&id).unwrap_or_else(zero);
        state.steps += 1;
        let step = AdamwStep {
            lr: lr as f32,
            beta1: c.beta1 as f32,
            beta2: c.beta2 as f32,
            eps: c.eps as f32,
            weight_decay: if self.undecayed.contains(&id) { 0.0 } else { c.weight_decay as f32 },
            bias1: (1.0 - c.beta1.powi(state.steps)) as f32,
            bias2: (1.0 - c.beta2.powi(state.steps)) as f32,
            grad_scale: self.grad_scale as f32,
        };
        let elements = shape.num_elements();
        let row = elements / shape[0];
        // 8-bit states share a scale over 256 elements: chunks start at such blocks.
        let chunk = match c.chunk_rows {
            0 => elements.next_multiple_of(256),
            rows => (rows * row).next_multiple_of(256),
        };
        let (weight, grad) = (weight.into_primitive().tensor(), grad.into_primitive().tensor());
        let (weight, moments) = B::adamw(weight, grad, state.moments, step, chunk);
        self.states.insert(id, TensorState { steps: state.steps, moments });
        Tensor::from_primitive(TensorPrimitive::Float(weight))
    }
}

impl<AB, M> Optimizer<M, AB> for ChunkedAdamw<AB::InnerBackend>
where
    AB: AutodiffBackend,
    AB::InnerBackend: Nvfp4Backend,
    M: AutodiffModule<AB>,
{
    // Checkpoints are written by `crate::checkpoint`, which keeps dtypes; Burn's records do not.
    type Record = ();

    fn step(&mut self, lr: LearningRate, module: M, mut grads: GradientsParams) -> M {
        module.map(&mut Mapper::<AB> { optimizer: self, grads: &mut grads, lr })
    }

    fn step_multi(&mut self, lr: LearningRate, module: M, mut grads: MultiGradientsParams) -> M {
        let (grads, _) = grads.grads.remove(0);
        self.step(lr, module, grads)
    }

    fn to_record(&self) {}

    fn load_record(self, (): ()) -> Self {
        self
    }
}

struct Mapper<'a, AB>
where
    AB: AutodiffBackend,
    AB::InnerBackend: Nvfp4Backend,
{
    optimizer: &'a mut ChunkedAdamw<AB::InnerBackend>,
    grads: &'a mut GradientsParams,
    lr: f64,
}

impl<AB> ModuleMapper<AB> for Mapper<'_, AB>
where
    AB: AutodiffBackend,
    AB::InnerBackend: Nvfp4Backend,
{
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<AB, D>>) -> Param<Tensor<AB, D>> {
        let Some(grad) = self.grads.remove::<AB::InnerBackend, D>(param.id) else { return param };
        let (id, weight, mapper) = param.consume();
        let weight = self.optimizer.update(id, weight.inner(), grad, self.lr);
        Param::from_mapped_value(id, Tensor::from_inner(weight).require_grad(), mapper)
    }
}
