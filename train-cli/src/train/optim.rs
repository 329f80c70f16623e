//! AdamW over a model, tensor by tensor: each is updated in place, some rows a launch, as soon as its gradient is
//! there. Arithmetic is f32 whatever weights and states are stored in.

use backend_nvfp4::{
    AdamwState, AdamwStep, Master, MasterKind, MasterWeight, Nvfp4Kernels, Nvfp4Tensor, StateKind, Stream,
};
use burn::{
    module::ParamId,
    tensor::{
        DType, Int, Shape, Tensor, TensorMetadata, TensorPrimitive,
        ops::{FloatTensor, IntTensor},
    },
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
    /// How moments of matrices are stored; those of norms are f32.
    pub state: StateKind,
    /// How matrices are stored.
    pub master: MasterKind,
    /// Rows of a matrix in one launch; 0 takes all.
    pub chunk_rows: usize,
    /// Of stochastic rounding.
    pub seed: u64,
    /// The type that holds bf16 values on this device: bf16, or f32 where activations are f32.
    pub float: DType,
}

/// The state of one tensor.
#[derive(Debug, Clone)]
pub struct TensorState<B: Nvfp4Kernels> {
    /// Updates so far.
    pub steps: i32,
    /// The moments.
    pub moments: AdamwState<B>,
    /// The lower bits of a master that has them, U8 `[len]`.
    pub residual: Option<IntTensor<B>>,
}

/// The optimizer.
#[derive(Debug, Clone)]
pub struct ChunkedAdamw<B: Nvfp4Kernels> {
    config: AdamwConfig,
    undecayed: HashSet<ParamId>,
    states: HashMap<ParamId, TensorState<B>>,
}

/// One optimizer step's rate and the factor on its gradients.
#[derive(Debug, Clone, Copy)]
pub struct Rate {
    /// Learning rate.
    pub lr: f64,
    /// The clipping coefficient.
    pub grad_scale: f64,
}

impl<B: Nvfp4Kernels> ChunkedAdamw<B> {
    /// An optimizer without state; parameters in `undecayed` get no weight decay.
    pub fn new(config: AdamwConfig, undecayed: HashSet<ParamId>) -> Self {
        Self { config, undecayed, states: HashMap::new() }
    }

    /// The constants.
    pub fn config(&self) -> AdamwConfig {
        self.config
    }

    /// The state of a parameter, if it was ever updated.
    pub fn state(&self, id: ParamId) -> Option<&TensorState<B>> {
        self.states.get(&id)
    }

    /// Puts back a state.
    pub fn restore(&mut self, id: ParamId, state: TensorState<B>) {
        self.states.insert(id, state);
    }

    /// Drops the state of a parameter that is trained no more.
    pub fn forget(&mut self, id: ParamId) {
        self.states.remove(&id);
    }

    /// Steps a norm's weight or a dense matrix.
    pub fn step<const D: usize>(
        &mut self,
        id: ParamId,
        weight: Tensor<B, D>,
        grad: FloatTensor<B>,
        rate: Rate,
    ) -> Tensor<B, D> {
        let w = weight.into_primitive().tensor();
        let master = if D == 1 { Master::Exact } else { self.config.master.dense() };
        let kind = if D == 1 { StateKind::F32 } else { self.config.state };
        let residual = master == Master::Residual;
        let state = self.take(id, w.shape(), kind, residual, &B::float_device(&w));
        let weight = MasterWeight::Dense { w, master, residual: state.residual.clone() };
        match self.apply(id, weight, grad, state, rate) {
            MasterWeight::Dense { w, .. } => Tensor::from_primitive(TensorPrimitive::Float(w)),
            MasterWeight::Packed(_) => unreachable!("a step keeps the form"),
        }
    }

    /// Steps an NVFP4 master.
    pub fn step_packed(
        &mut self,
        id: ParamId,
        weight: Nvfp4Tensor<B>,
        grad: FloatTensor<B>,
        rate: Rate,
    ) -> Nvfp4Tensor<B> {
        let [rows, cols] = weight.dims();
        let device = B::float_device(&grad);
        let state = self.take(id, Shape::new([rows, cols]), self.config.state, false, &device);
        match self.apply(id, MasterWeight::Packed(weight.into_primitive()), grad, state, rate) {
            MasterWeight::Packed(p) => Nvfp4Tensor::from_primitive(p),
            MasterWeight::Dense { .. } => unreachable!("a step keeps the form"),
        }
    }

    /// The state of a tensor, out of the table: it is updated in place.
    fn take(
        &mut self,
        id: ParamId,
        shape: Shape,
        kind: StateKind,
        residual: bool,
        device: &B::Device,
    ) -> TensorState<B> {
        let len = shape.num_elements();
        self.states.remove(&id).unwrap_or_else(|| TensorState {
            steps: 0,
            moments: AdamwState::zeros(kind, len, self.config.float, device),
            // Half a unit: the weight is what its bf16 value says.
            residual: residual.then(|| Tensor::<B, 1, Int>::full([len], 128, (device, DType::U8)).into_primitive()),
        })
    }

    fn apply(
        &mut self,
        id: ParamId,
        mut weight: MasterWeight<B>,
        grad: FloatTensor<B>,
        mut state: TensorState<B>,
        rate: Rate,
    ) -> MasterWeight<B> {
        // The only handle of the residual is the weight's, or it would be copied.
        state.residual = None;
        state.steps += 1;
        let c = self.config;
        let step = AdamwStep {
            lr: rate.lr as f32,
            beta1: c.beta1 as f32,
            beta2: c.beta2 as f32,
            eps: c.eps as f32,
            weight_decay: if self.undecayed.contains(&id) { 0.0 } else { c.weight_decay as f32 },
            bias1: (1.0 - c.beta1.powi(state.steps)) as f32,
            bias2: (1.0 - c.beta2.powi(state.steps)) as f32,
            grad_scale: rate.grad_scale as f32,
            stream: Stream { seed: c.seed, step: state.steps as u32, stream: id.val() as u32 },
        };
        let shape = grad.shape();
        let elements = shape.num_elements();
        // Quantised states share a scale over 256 elements: chunks start at such blocks.
        let chunk = match c.chunk_rows {
            0 => elements.next_multiple_of(256),
            rows => (rows * (elements / shape[0])).next_multiple_of(256),
        };
        let moments;
        (weight, moments) = B::adamw(weight, grad, state.moments, step, chunk);
        if let MasterWeight::Dense { residual, .. } = &weight {
            state.residual.clone_from(residual);
        }
        self.states.insert(id, TensorState { moments, ..state });
        weight
    }
}
