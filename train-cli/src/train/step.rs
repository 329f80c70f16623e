//! One optimizer step: its micro-batches forward and backward, its gradients clipped and applied. Two ways lead to
//! the same update.
//!
//! * `whole`: one graph from the embedding to the loss. Every activation and every gradient of the model lives at
//!   once.
//! * `streaming`: the forward keeps the input of each block and nothing else; the backward runs block by block, last
//!   to first, each rerun from its input. The optimizer takes a block's gradients before the next block's exist.
//!
//! Clipping needs the norm of all gradients before the first is applied. With one micro-batch and streaming that is a
//! pass of its own ([`Clip::Exact`]), or the last step's norm is taken for this one's ([`Clip::Previous`]).

#![allow(non_snake_case)] // Shapes are part of names, as in the model.

use crate::{
    CliError,
    data::order::MicroBatch,
    memory::vram::VramReport,
    settings::{Clip, StepMode},
    train::gradients::{Fate, Gathered, Walk},
    train::learner::Trainee,
    train::optim::{ChunkedAdamw, Rate},
};
use backend_nvfp4::Nvfp4Backend;
use burn::{
    module::AutodiffModule,
    optim::GradientsParams,
    tensor::{DType, IndexingUpdateOp, Int, Tensor, TensorData, TensorPrimitive, backend::AutodiffBackend},
};
use model_qwen3::{
    model::{Block, Context},
    weights::{Replace, to_host},
};
use std::collections::HashMap;

/// What steps are made of.
pub struct Stepper<B: Nvfp4Backend> {
    /// How the backward runs.
    pub mode: StepMode,
    /// Which norm is clipped by.
    pub clip: Clip,
    /// The norm that gradients are cut to; 0 is off.
    pub max_grad_norm: f64,
    /// The last step's norm.
    pub last_norm: Option<f32>,
    /// Type of gathered gradients.
    pub buffer: DType,
    /// The optimizer.
    pub optimizer: ChunkedAdamw<B>,
    /// The seed of what is rounded stochastically in the backward.
    pub seed: u64,
    /// Micro-batches of a full step: they count the draws of a run.
    pub accumulation: usize,
}

/// The figures of a step.
#[derive(Debug, Clone, Copy)]
pub struct Stepped {
    /// Mean loss a supervised token.
    pub loss: f32,
    /// Global gradient norm before clipping.
    pub grad_norm: f32,
}

/// A model after a step, or as far as it came.
pub type Outcome<AB, T> = (Trainee<AB>, Result<T, CliError>);

impl<B: Nvfp4Backend> Stepper<B> {
    /// Makes step `step` (counted from 1) of `batches`. The model comes back also when the step failed.
    pub fn step<AB>(
        &mut self,
        net: Trainee<AB>,
        batches: &[MicroBatch],
        step: usize,
        lr: f64,
        vram: &mut VramReport,
    ) -> Outcome<AB, Stepped>
    where
        AB: AutodiffBackend<InnerBackend = B> + Nvfp4Backend,
    {
        let mut gathered = Gathered::new(self.buffer);
        let clips = self.max_grad_norm > 0.0;
        let exact = clips && self.clip == Clip::Exact;
        let (last, earlier) = batches.split_last().expect("a step has a batch");

        // 1. All micro-batches but the last; the last too where its norm must be known first.
        let gather_all = self.mode == StepMode::Whole || exact && !earlier.is_empty();
        let gathering = if gather_all { batches } else { earlier };
        let (mut net, mut loss) = match self.gather(net, gathering, &mut gathered, step, vram) {
            (net, Ok(loss)) => (net, loss),
            (net, Err(error)) => return (net, Err(error)),
        };

        // 2. The norm, if it is needed before anything is applied.
        net.model.draw_from(self.seed, self.draw(step, batches.len() - 1));
        if gather_all {
            gathered.measure();
        } else if exact {
            let mut pass = Pass { stepper: self, gathered: &mut gathered, step, vram, fate: Fate::Measure };
            let (back, value) = pass.run(net, last);
            net = back;
            if let Err(error) = value {
                return (net, Err(error));
            }
        }
        let known = match norm(&mut gathered) {
            Ok(known) => known,
            Err(error) => return (net, Err(error)),
        };
        if let Some(norm) = known
            && let Err(error) = judge(step, loss, norm, UNTOUCHED)
        {
            return (net, Err(error));
        }
        let scale = match known.filter(|_| self.clip == Clip::Exact).or(self.last_norm).map(f64::from) {
            Some(norm) if clips && norm > self.max_grad_norm => self.max_grad_norm / (norm + 1e-6),
            _ => 1.0,
        };

        // 3. Apply: from what was gathered, or block by block with the last micro-batch.
        let fate = Fate::Apply { rate: Rate { lr, grad_scale: scale }, measured: known.is_some() };
        if gather_all {
            let grads = GradientsParams::new();
            let mut walk = Walk { grads, fate, gathered: &mut gathered, optimizer: &mut self.optimizer };
            net.model = walk.model(net.model);
        } else {
            let mut pass = Pass { stepper: self, gathered: &mut gathered, step, vram, fate };
            let (back, value) = pass.run(net, last);
            net = back;
            match value {
                Ok(value) => loss += value,
                Err(error) => return (net, Err(error)),
            }
        }
        let applied = match norm(&mut gathered).map(|late| known.or(late)) {
            Ok(Some(norm)) => norm,
            Ok(None) => return (net, Err(CliError::Usage("nothing is trained: no parameter has a gradient".into()))),
            Err(error) => return (net, Err(error)),
        };
        self.last_norm = Some(applied);
        let judged = judge(step, loss, applied, "the step was applied before that was known");
        (net, judged.map(|()| Stepped { loss, grad_norm: applied }))
    }

    /// The number of micro-batch `i` of a step in the run.
    fn draw(&self, step: usize, i: usize) -> u32 {
        ((step - 1) * self.accumulation + i) as u32
    }

    /// Adds the gradients of `batches`, the first micro-batches of a step, to those gathered; gives their loss.
    pub fn gather<AB>(
        &mut self,
        mut net: Trainee<AB>,
        batches: &[MicroBatch],
        gathered: &mut Gathered<B>,
        step: usize,
        vram: &mut VramReport,
    ) -> Outcome<AB, f32>
    where
        AB: AutodiffBackend<InnerBackend = B> + Nvfp4Backend,
    {
        let mut loss = 0.0;
        for (i, batch) in batches.iter().enumerate() {
            net.model.draw_from(self.seed, self.draw(step, i));
            let mut pass = Pass { stepper: self, gathered, step, vram, fate: Fate::Gather };
            let (back, value) = pass.run(net, batch);
            net = back;
            match value {
                Ok(value) => loss += value,
                Err(error) => return (net, Err(error)),
            }
        }
        (net, Ok(loss))
    }
}

fn norm<B: Nvfp4Backend>(gathered: &mut Gathered<B>) -> Result<Option<f32>, CliError> {
    gathered.norm().map_err(CliError::from)
}

const UNTOUCHED: &str = "nothing was updated";

/// What is not finite is not trained on.
fn judge(step: usize, loss: f32, grad_norm: f32, kept: &'static str) -> Result<(), CliError> {
    for (what, value) in [("loss", loss), ("gradient norm", grad_norm)] {
        if !value.is_finite() {
            let hint =
                "Start a new run from the last checkpoint (-m RUN/checkpoint-N) with a lower --learning-rate".into();
            return Err(CliError::Diverged { step, what, value, kept, hint });
        }
    }
    Ok(())
}

/// One micro-batch forward and backward.
struct Pass<'a, B: Nvfp4Backend> {
    stepper: &'a mut Stepper<B>,
    gathered: &'a mut Gathered<B>,
    step: usize,
    vram: &'a mut VramReport,
    fate: Fate,
}

impl<B: Nvfp4Backend> Pass<'_, B> {
    fn run<AB>(&mut self, net: Trainee<AB>, batch: &MicroBatch) -> Outcome<AB, f32>
    where
        AB: AutodiffBackend<InnerBackend = B> + Nvfp4Backend,
    {
        match self.stepper.mode {
            StepMode::Whole => self.whole(net, batch),
            StepMode::Streaming => self.streaming(net, batch),
        }
    }

    fn whole<AB>(&mut self, mut net: Trainee<AB>, batch: &MicroBatch) -> Outcome<AB, f32>
    where
        AB: AutodiffBackend<InnerBackend = B> + Nvfp4Backend,
    {
        let loss = net.batch_loss(batch);
        let value = match self.loss_of(&loss.clone().inner()) {
            Ok(value) => value,
            Err(error) => return (net, Err(error)),
        };
        let grads = GradientsParams::from_grads(loss.backward(), &net);
        net.model = self.walk(grads).model(net.model);
        let noted = self.note::<AB>(&net, "backward_done");
        (net, noted.map(|()| value))
    }

    /// See the head of this file. Shapes: M tokens, D features, L blocks.
    fn streaming<AB>(&mut self, mut net: Trainee<AB>, batch: &MicroBatch) -> Outcome<AB, f32>
    where
        AB: AutodiffBackend<InnerBackend = B> + Nvfp4Backend,
    {
        // 1. Forward without a graph, each trained block's input kept.
        let frozen = net.first_trained();
        let (mut inputs, h_MD) = {
            let inner = net.valid();
            let (mut h_MD, ctx) = inner.begin(batch);
            let mut inputs = Vec::new();
            for (i, block) in inner.model.layers.iter().enumerate() {
                if i >= frozen {
                    inputs.push(h_MD.clone());
                }
                h_MD = block.forward(h_MD, &inner.model.of_block(&ctx, i), None);
            }
            (inputs, h_MD)
            // The second handle on every parameter ends here: updates are in place.
        };

        // 2. The head: loss, the gradient of its input, its own gradients.
        let h_MD = Tensor::<AB, 2>::from_inner(h_MD).require_grad();
        let loss = net.loss_of(h_MD.clone(), batch);
        let value = match self.loss_of(&loss.clone().inner()) {
            Ok(value) => value,
            Err(error) => return (net, Err(error)),
        };
        let mut grads = loss.backward();
        let mut dy_MD = h_MD.grad_remove(&mut grads).expect("the loss depends on it");
        let mut grads = GradientsParams::from_grads(grads, &net);
        let embedding = grads.remove::<B, 2>(net.model.embed_tokens.id);
        let mut walk = self.walk(grads);
        net.model.norm = walk.vector(net.model.norm);
        net.model.lm_head = net.model.lm_head.map(|head| walk.linear(head));
        let noted = self.note::<AB>(&net, "head_done");
        if let Err(error) = noted {
            return (net, Err(error));
        }

        // 3. Blocks, last to first.
        let ctx = net.context(batch);
        let mut layers = std::mem::take(&mut net.model.layers);
        let mut done = Vec::with_capacity(layers.len());
        let mut failed = None;
        while layers.len() > frozen {
            let i = layers.len() - 1;
            let block = layers.pop().expect("not empty");
            let x_MD = Tensor::<AB, 2>::from_inner(inputs.pop().expect("one a block")).require_grad();
            let ctx = net.model.of_block(&ctx, i);
            let (grads, dx_MD) = backward(&block, x_MD, &ctx, dy_MD);
            dy_MD = dx_MD;
            let noted = self.note::<AB>(&net, &format!("block_{i}_gradients"));
            done.push(self.walk(grads).block(block));
            if let Err(error) = noted.and_then(|()| self.note::<AB>(&net, &format!("block_{i}_done"))) {
                failed.get_or_insert(error);
            }
        }
        layers.extend(done.into_iter().rev());
        net.model.layers = layers;
        if let Some(error) = failed {
            return (net, Err(error));
        }

        // 4. The embedding, its rows' gradients added to those it has as a head.
        if net.model.embed_tokens.val().is_require_grad() {
            let whole = token_gradients(batch, dy_MD, embedding, net.model.embed_tokens.dims());
            let mut grads = GradientsParams::new();
            grads.register(net.model.embed_tokens.id, whole);
            net.model.embed_tokens = self.walk(grads).matrix(net.model.embed_tokens);
        }
        let noted = self.note::<AB>(&net, "backward_done");
        (net, noted.map(|()| value))
    }

    fn walk<AB>(&mut self, grads: GradientsParams) -> Walk<'_, AB>
    where
        AB: AutodiffBackend<InnerBackend = B> + Nvfp4Backend,
    {
        Walk { grads, fate: self.fate, gathered: self.gathered, optimizer: &mut self.stepper.optimizer }
    }

    /// The loss on the host, before anything is made of it.
    fn loss_of(&self, loss: &Tensor<B, 1>) -> Result<f32, CliError> {
        let value = to_host(loss.clone())?[0];
        judge(self.step, value, 0.0, UNTOUCHED)?;
        Ok(value)
    }

    fn note<AB>(&mut self, net: &Trainee<AB>, phase: &str) -> Result<(), CliError>
    where
        AB: AutodiffBackend<InnerBackend = B> + Nvfp4Backend,
    {
        // A pass that only measures is one phase.
        let phase = match (self.fate, phase) {
            (Fate::Measure, "backward_done") => "norm_done",
            (Fate::Measure, _) => return Ok(()),
            (_, phase) => phase,
        };
        self.vram.note::<AB>(&net.model.device(), self.step, phase)
    }
}

/// Backward through one block, rerun from its input, from the gradient of its output: the gradients of its parameters
/// and of its input.
fn backward<AB>(
    block: &Block<AB>,
    x_MD: Tensor<AB, 2>,
    ctx: &Context<AB>,
    dy_MD: Tensor<AB::InnerBackend, 2>,
) -> (GradientsParams, Tensor<AB::InnerBackend, 2>)
where
    AB: AutodiffBackend + Nvfp4Backend,
    AB::InnerBackend: Nvfp4Backend,
{
    let y_MD = block.forward(x_MD.clone(), ctx, None).into_primitive().tensor();
    let dy_MD = Tensor::<AB, 2>::from_inner(dy_MD).into_primitive().tensor();
    let start = Tensor::<AB, 1>::from_primitive(TensorPrimitive::Float(AB::seeded(y_MD, dy_MD)));
    let mut grads = start.backward();
    let dx_MD = x_MD.grad_remove(&mut grads).expect("the output depends on it");
    (GradientsParams::from_grads(grads, block), dx_MD)
}

/// The gradient of the embedding `[V, D]`, f32: that of its rows where tokens were looked up, `dy` `[M, D]`, and what
/// it has as a head. Rows of one token are summed first, in order: a whole graph's sums are the same, bit for bit.
fn token_gradients<B: Nvfp4Backend>(
    batch: &MicroBatch,
    dy_MD: Tensor<B, 2>,
    head: Option<Tensor<B, 2>>,
    dims: [usize; 2],
) -> Tensor<B, 2> {
    let (device, t) = (dy_MD.device(), batch.tokens_a_row());
    let mut places = HashMap::new();
    let mut unique = Vec::new();
    let mut place = Vec::with_capacity(t * batch.ids.len());
    for row in &batch.ids {
        for i in 0..t {
            // Rows are padded with token 0.
            let id = row.get(i).copied().unwrap_or(0) as i32;
            place.push(*places.entry(id).or_insert_with(|| {
                unique.push(id);
                unique.len() as i32 - 1
            }));
        }
    }
    let ints = |v: Vec<i32>| {
        let len = v.len();
        Tensor::<B, 1, Int>::from_data(TensorData::new(v, [len]), &device)
    };
    // As many rows in every batch, or each would leave a buffer of another size behind; the last ones add zeros.
    unique.resize(place.len(), 0);
    let rows = Tensor::<B, 2>::zeros([place.len(), dims[1]], (&device, DType::F32));
    let rows = rows.select_assign(0, ints(place), dy_MD.cast(DType::F32), IndexingUpdateOp::Add);
    let whole = head.unwrap_or_else(|| Tensor::zeros(dims, (&device, DType::F32)));
    whole.select_assign(0, ints(unique), rows, IndexingUpdateOp::Add)
}
