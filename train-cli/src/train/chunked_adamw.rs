//! AdamW, tensor by tensor: each tensor is updated as soon as its gradient is there, a chunk of rows per launch. The update
//! is in place, unless someone else holds the tensor: a checkpoint that is being written, or the copy that a bad step is
//! undone from. The arithmetic is in f32, whatever weights and moments are stored in. Once a gradient of a step was not finite,
//! the device writes nothing more in that step. A new buffer, which an update needs if someone else holds the tensor, then has
//! no defined values.

use backend_nvfp4::{
    AdamwState, AdamwStep, HeldCodes, HeldPrimitive, Judged, Master, MasterKind, Nvfp4Kernels, Nvfp4Tensor,
    QuantizeSpec, STATE_BLOCK, StateKind, Stream,
};
use burn::{
    module::ParamId,
    tensor::{DType, Shape, Tensor, TensorMetadata, TensorPrimitive, ops::FloatTensor},
};
use std::collections::{HashMap, HashSet};

/// The constants of AdamW.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamwConfig {
    /// Decay rate of the first moment.
    pub beta1: f64,
    /// Decay rate of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// How the moments of matrices are stored. The moments of norms are f32.
    pub state: StateKind,
    /// How the master weights of matrices are stored. Norms are f32.
    pub master: MasterKind,
    /// Rows of a matrix that one launch updates; 0 updates all.
    pub chunk_rows: usize,
    /// Random seed of stochastic rounding.
    pub seed: u64,
    /// The type that holds bf16 values on this device: bf16, or f32 where activations are f32.
    pub float: DType,
}

/// The state of one tensor.
#[derive(Debug, Clone)]
pub struct TensorState<B: Nvfp4Kernels> {
    /// Updates so far.
    pub steps: i32,
    /// The moments, and the residual of a master weight that has one.
    pub moments: AdamwState<B>,
}

/// AdamW with the states of the tensors that it has updated.
#[derive(Debug, Clone)]
pub struct ChunkedAdamw<B: Nvfp4Kernels> {
    config: AdamwConfig,
    undecayed: HashSet<ParamId>,
    states: HashMap<ParamId, TensorState<B>>,
}

/// What one optimizer step applies its gradients with.
#[derive(Debug, Clone, Copy)]
pub struct Rate {
    /// Learning rate.
    pub lr: f64,
    /// The factor on every gradient, from clipping.
    pub clip_factor: f64,
}

impl<B: Nvfp4Kernels> ChunkedAdamw<B> {
    /// An optimizer without states. Parameters in `undecayed` get no weight decay.
    pub fn new(config: AdamwConfig, undecayed: HashSet<ParamId>) -> Self {
        Self { config, undecayed, states: HashMap::new() }
    }

    /// The constants.
    pub fn config(&self) -> AdamwConfig {
        self.config
    }

    /// The state of a parameter; `None` before its first update.
    pub fn state(&self, id: ParamId) -> Option<&TensorState<B>> {
        self.states.get(&id)
    }

    /// Sets the state of a parameter, from a checkpoint.
    pub fn restore(&mut self, id: ParamId, state: TensorState<B>) {
        self.states.insert(id, state);
    }

    /// Drops the state of a parameter that is no longer trained.
    pub fn forget(&mut self, id: ParamId) {
        self.states.remove(&id);
    }

    /// Updates a norm's weight or a dense matrix.
    pub fn step<const RANK: usize>(
        &mut self,
        id: ParamId,
        weight: Tensor<B, RANK>,
        grad: Judged<B>,
        rate: Rate,
    ) -> Tensor<B, RANK> {
        let form = if RANK == 1 { Master::Exact } else { self.config.master.dense() };
        let kind = if RANK == 1 { StateKind::F32 } else { self.config.state };
        let (w, _) = self.step_dense(id, weight.into_primitive().tensor(), (form, kind), None, grad, rate);
        Tensor::from_primitive(TensorPrimitive::Float(w))
    }

    /// Updates the master weight of a linear layer. `held` are its codes, if the step before has left any; `wanted` says how those
    /// that this one leaves are made, if it is to leave any. Returns them with the weight.
    pub fn step_master(
        &mut self,
        id: ParamId,
        weight: Tensor<B, 2>,
        held: Option<HeldCodes<B>>,
        wanted: Option<QuantizeSpec>,
        grad: Judged<B>,
        rate: Rate,
    ) -> (Tensor<B, 2>, Option<HeldCodes<B>>) {
        let (form, kind) = (self.config.master.dense(), self.config.state);
        // In f32 the largest magnitude of a weight is another one after each step, and with it all codes.
        let wanted = wanted.filter(|_| form != Master::Exact);
        let held = held.map(HeldCodes::into_primitive).filter(|codes| Some(codes.spec) == wanted);
        let (w, codes) = self.step_dense(id, weight.into_primitive().tensor(), (form, kind), held, grad, rate);
        let codes = codes.or_else(|| B::nvfp4_held(w.clone(), kind, wanted?));
        (Tensor::from_primitive(TensorPrimitive::Float(w)), codes.map(HeldCodes::from_primitive))
    }

    fn step_dense(
        &mut self,
        id: ParamId,
        w: FloatTensor<B>,
        (form, kind): (Master, StateKind),
        codes: Option<HeldPrimitive<B>>,
        grad: Judged<B>,
        rate: Rate,
    ) -> (FloatTensor<B>, Option<HeldPrimitive<B>>) {
        let shape = grad.gradient.shape();
        let mut state = self.take(id, shape.clone(), kind, form, &B::float_device(&w));
        let (step, chunk) = self.next_step(id, &mut state, shape, rate);
        state.moments.codes = codes;
        let (w, mut moments) = B::adamw(w, form, grad, state.moments, step, chunk);
        let codes = moments.codes.take();
        self.states.insert(id, TensorState { moments, ..state });
        (w, codes)
    }

    /// Updates an NVFP4 master weight.
    pub fn step_packed(&mut self, id: ParamId, weight: Nvfp4Tensor<B>, grad: Judged<B>, rate: Rate) -> Nvfp4Tensor<B> {
        let form = self.config.master.dense();
        let shape = grad.gradient.shape();
        let mut state = self.take(id, shape.clone(), self.config.state, form, &B::float_device(&grad.gradient));
        let (step, chunk) = self.next_step(id, &mut state, shape, rate);
        let (w, moments) = B::adamw_packed(weight.into_primitive(), grad, state.moments, step, chunk);
        self.states.insert(id, TensorState { moments, ..state });
        Nvfp4Tensor::from_primitive(w)
    }

    /// Takes the state of a tensor out of the table, so that the update has its only handle.
    fn take(&mut self, id: ParamId, shape: Shape, kind: StateKind, form: Master, device: &B::Device) -> TensorState<B> {
        let len = shape.num_elements();
        self.states.remove(&id).unwrap_or_else(|| {
            let moments = AdamwState::zeros(kind, len, self.config.float, device);
            let residual = form == Master::Residual;
            TensorState { steps: 0, moments: if residual { moments.with_residual(len, device) } else { moments } }
        })
    }

    /// Counts a step. Returns its scalars, and the number of elements in a launch.
    fn next_step(&self, id: ParamId, state: &mut TensorState<B>, shape: Shape, rate: Rate) -> (AdamwStep, usize) {
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
            clip_factor: rate.clip_factor as f32,
            stream: Stream { seed: c.seed, step: state.steps as u32, stream: id.val() as u32 },
        };
        let elements = shape.num_elements();
        // The quantized moments of a block share a scale, so a chunk has whole blocks.
        let chunk = match c.chunk_rows {
            0 => elements.next_multiple_of(STATE_BLOCK),
            rows => (rows * (elements / shape[0])).next_multiple_of(STATE_BLOCK),
        };
        (step, chunk)
    }
}
