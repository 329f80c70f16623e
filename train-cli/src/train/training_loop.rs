//! The loop over the steps of a run. Each step: micro-batches, learning rate, recipe and frozen blocks, the optimizer
//! step, its report, an evaluation and a checkpoint where they are due.

use crate::{
    CliError,
    data::order::{MicroBatch, Order},
    device,
    interrupt::Interruption,
    memory::vram::VramReport,
    train::damp::{self, DampedFinish},
    train::evaluation::{self, Evaluation},
    train::guard::Guard,
    train::objective::Trainee,
    train::schedule::Schedule,
    train::step::{Stepped, Stepper},
    watchdog,
};
use backend_nvfp4::{Nvfp4Kernels, Recipe, TrainingBackend};
use burn::{data::dataloader::DataLoader, module::AutodiffModule};
use model_qwen3::model::Qwen3;
use std::{path::PathBuf, sync::Arc, time::Instant};

/// What a run needs besides the model.
pub struct Run<B: Nvfp4Kernels> {
    /// Training samples in order.
    pub train: Order,
    /// Evaluation samples; may be empty.
    pub eval: Order,
    /// What makes the steps, with the optimizer; after a resume, with its states.
    pub stepper: Stepper<B>,
    /// The learning rate.
    pub schedule: Schedule,
    /// The recipe.
    pub recipe: Recipe,
    /// The first step, counted from 0, that uses the recipe; earlier steps quantize nothing.
    pub quantize_from: usize,
    /// When blocks freeze on their codes.
    pub damped: DampedFinish,
    /// What happens after a step whose loss or gradient is not finite.
    pub guard: Guard,
    /// Limit on device memory after a step, in bytes.
    pub memory_limit: Option<u64>,
    /// Steps between progress lines.
    pub logging_steps: usize,
    /// Memory report.
    pub vram: VramReport,
    /// Signals that end the run after a step.
    pub interruption: Arc<Interruption>,
    /// Logs, evaluations and checkpoints.
    pub between: Box<dyn Between<B>>,
}

/// What a run does between steps: logs, samples and checkpoints.
pub trait Between<B: Nvfp4Kernels>: Send {
    /// Logs a step.
    ///
    /// # Errors
    /// If a file cannot be written.
    fn after_step(&mut self, report: &StepReport) -> Result<(), CliError>;

    /// Logs a step that is left out, and why.
    ///
    /// # Errors
    /// If a file cannot be written.
    fn left_out(&mut self, step: usize, reason: &str, batches: &[MicroBatch]) -> Result<(), CliError>;

    /// Whether step `step`, counted from 1, is followed by an evaluation.
    fn evaluates(&self, step: usize) -> bool;

    /// Whether step `step` was followed by no evaluation, or by no sample answers if there are no rows to evaluate, although
    /// it should have been.
    ///
    /// # Errors
    /// If a file cannot be read.
    fn misses_evaluation(&self, step: usize, has_rows: bool) -> Result<bool, CliError>;

    /// Whether the run ends here, because the evaluation losses have stopped falling.
    fn ends_early(&self) -> bool;

    /// Logs an evaluation.
    ///
    /// # Errors
    /// If the device fails or a file cannot be written.
    fn after_evaluation(&mut self, model: &Qwen3<B>, evaluation: &Evaluation) -> Result<(), CliError>;

    /// Logs sample answers of the model after step `step`.
    ///
    /// # Errors
    /// If the device fails or a file cannot be written.
    fn samples(&mut self, model: &Qwen3<B>, step: usize) -> Result<(), CliError>;

    /// Saves a checkpoint if one is due or `forced`, unless saving is off. A forced one is complete when this returns its
    /// folder; the next steps may be made while another is written.
    ///
    /// # Errors
    /// If the device fails or a file cannot be written.
    fn maybe_save(
        &mut self,
        model: &Qwen3<B>,
        stepper: &Stepper<B>,
        step: usize,
        forced: bool,
    ) -> Result<Option<PathBuf>, CliError>;
}

/// The figures of a step.
#[derive(Debug, Clone, Default)]
pub struct StepReport {
    /// Optimizer step, counted from 1.
    pub step: usize,
    /// Mean loss of a supervised token.
    pub loss: f32,
    /// Global gradient norm before clipping.
    pub grad_norm: f32,
    /// Learning rate.
    pub lr: f64,
    /// Tokens per second, without padding.
    pub tokens_per_second: f64,
    /// Device memory in MiB.
    pub memory_mib: u64,
    /// Seconds until the end of the run, estimated.
    pub eta: f64,
    /// Blocks that are frozen on their codes.
    pub frozen_blocks: usize,
}

/// What the loop tells its caller as it happens.
pub enum Event {
    /// A step was made.
    Step(StepReport),
    /// An evaluation was made.
    Evaluation(Evaluation),
}

/// Trains `net` over `train`, evaluates it on `valid`, and tells `tell` of every step and evaluation.
///
/// # Errors
/// If training diverges, the device fails, device memory exceeds the limit, or a file cannot be written. `net` still
/// has its model.
pub fn train<AB: TrainingBackend>(
    net: &mut Trainee<AB>,
    mut run: Run<AB::InnerBackend>,
    train: &dyn DataLoader<AB, MicroBatch>,
    valid: &dyn DataLoader<AB::InnerBackend, MicroBatch>,
    tell: &mut dyn FnMut(Event),
) -> Result<(), CliError> {
    let device = net.model().device();
    // Loading leaves freed buffers behind.
    AB::memory_cleanup(&device);
    let mut clock = Clock::new(run.train.start, run.train.steps);
    let mut micro_batches = train.iter();
    let mut step = run.train.start;
    if step > 0 && run.between.misses_evaluation(step, valid.num_items() > 0)? {
        // A signal or a limit had ended the run between this step and its evaluation.
        let recipe = run.recipe_of(step - 1);
        net.update(|model| model.with_recipe(recipe));
        run.evaluate(&net.valid(), valid, step, tell)?;
    }
    while !run.between.ends_early()
        && let Some(batches) = run.next_step::<AB>(&mut *micro_batches, step + 1, &device)?
    {
        let frozen_blocks = run.prepare(net, step);
        let lr = run.schedule.at(step);
        step += 1;
        run.vram.note::<AB>(&device, step, "zero_grad_done")?;
        let made = run.guarded_step(net, &batches, step, lr)?;
        run.vram.note::<AB>(&device, step, "optimizer_step_done")?;
        run.vram.write()?;
        let held = run.vram.held::<AB>(&device);
        let trimmed = run.stepper.pool.after_step::<AB>(&device, held);

        let (tokens_per_second, eta) = clock.after_step(step, &batches);
        let memory_mib = held >> 20;
        match made {
            Guarded::Made(Stepped { loss, grad_norm }) => {
                let report =
                    StepReport { step, loss, grad_norm, lr, tokens_per_second, memory_mib, eta, frozen_blocks };
                run.between.after_step(&report)?;
                tell(Event::Step(report));
            }
            Guarded::LeftOut(reason) => run.between.left_out(step, &reason, &batches)?,
        }

        // This second handle on every parameter must end with the iteration, or no update would be in place.
        let inner = net.valid();
        let interrupted = run.interruption.received();
        let evaluates = interrupted.is_none() && run.between.evaluates(step);
        if evaluates {
            // An evaluation has buffers of other sizes than a step.
            run.stepper.pool.give_back::<AB>(&device);
            run.evaluate(&inner, valid, step, tell)?;
        }
        // If the pool has just been trimmed, the step may have needed less than was held.
        let exceeded = run.memory_limit.filter(|limit| held > *limit && !trimmed);
        let stops = exceeded.is_some() || interrupted.is_some() || run.between.ends_early();
        device::check()?;
        let saved = run.between.maybe_save(inner.model(), &run.stepper, step, stops)?;
        if evaluates {
            // Evaluation, samples and a checkpoint leave freed buffers of other sizes behind.
            run.stepper.pool.give_back::<AB>(&device);
        }
        if let Some(limit) = exceeded {
            return Err(CliError::Memory { needed: held, limit, saved: Some(stopped(step, saved)) });
        }
        if let Some(signal) = interrupted {
            return Err(CliError::Interrupted { signal, step, saved });
        }
        clock.start_step();
    }
    Ok(())
}

impl<B: Nvfp4Kernels> Run<B> {
    /// The micro-batches of step `step`, counted from 1; `None` after the last step.
    fn next_step<AB: TrainingBackend<InnerBackend = B>>(
        &mut self,
        micro_batches: &mut dyn Iterator<Item = MicroBatch>,
        step: usize,
        device: &AB::Device,
    ) -> Result<Option<Vec<MicroBatch>>, CliError> {
        let mut batches = Vec::new();
        for batch in micro_batches {
            self.vram.note::<AB>(device, step, "batch_ready")?;
            let ends_step = batch.ends_step;
            batches.push(batch);
            if ends_step {
                return Ok(Some(batches));
            }
        }
        Ok(None)
    }

    /// Makes step `step`, counted from 1, unless the guard leaves it out.
    fn guarded_step<AB: TrainingBackend<InnerBackend = B>>(
        &mut self,
        net: &mut Trainee<AB>,
        batches: &[MicroBatch],
        step: usize,
        lr: f64,
    ) -> Result<Guarded, CliError> {
        if let Some(reason) = self.guard.leaves_out(step) {
            return Ok(Guarded::LeftOut(reason));
        }
        let watched = watchdog::Step::begin(step);
        let stepped = self.stepper.step(net, batches, step, lr, &mut self.vram);
        drop(watched);
        // What a device computes after a failure is no reason to leave a step out, nor to save it.
        device::check()?;
        match stepped {
            Ok(stepped) => Ok(Guarded::Made(stepped)),
            Err(CliError::Diverged { step, what, value, updated, hint }) => {
                let reason = format!("the {what} is {value}");
                if self.guard.found_bad(step, reason.clone(), updated) {
                    return Ok(Guarded::LeftOut(reason));
                }
                Err(CliError::Diverged { step, what, value, updated, hint })
            }
            Err(error) => Err(error),
        }
    }

    /// Evaluates the model after step `step`, if there are samples to evaluate it on, and lets it answer prompts.
    fn evaluate(
        &mut self,
        net: &Trainee<B>,
        valid: &dyn DataLoader<B, MicroBatch>,
        step: usize,
        tell: &mut dyn FnMut(Event),
    ) -> Result<(), CliError> {
        let evaluation = (valid.num_items() > 0).then(|| evaluation::evaluate(net, valid, step)).transpose()?;
        if let Some(evaluation) = &evaluation {
            self.between.after_evaluation(net.model(), evaluation)?;
        }
        self.between.samples(net.model(), step)?;
        evaluation.into_iter().for_each(|evaluation| tell(Event::Evaluation(evaluation)));
        Ok(())
    }

    /// The recipe of step `step`, counted from 0.
    fn recipe_of(&self, step: usize) -> Recipe {
        if step < self.quantize_from { Recipe::Bf16 } else { self.recipe }
    }

    /// Brings the model to the recipe of step `step`, counted from 0, and freezes the blocks that freeze from this step on.
    /// Returns the number of frozen blocks.
    fn prepare<AB: TrainingBackend<InnerBackend = B>>(&mut self, net: &mut Trainee<AB>, step: usize) -> usize {
        let recipe = self.recipe_of(step);
        net.update(|model| model.with_recipe(recipe));
        let blocks = net.model().layers.len();
        let frozen = self.damped.frozen(step, blocks);
        // A resumed run loads the blocks that froze in earlier steps as frozen.
        if frozen > step.checked_sub(1).map_or(0, |before| self.damped.frozen(before, blocks)) {
            net.update(|model| damp::freeze(model, frozen, &mut self.stepper.optimizer));
        }
        frozen
    }
}

/// What became of a step.
enum Guarded {
    Made(Stepped),
    /// The step is left out for a reason, and has changed nothing.
    LeftOut(String),
}

/// How a run that exceeded its memory limit ended.
fn stopped(step: usize, saved: Option<PathBuf>) -> String {
    match saved {
        Some(folder) => format!("stopped after step {step} and saved it as {}", folder.display()),
        None => format!("stopped after step {step}; nothing was saved, because saving is off"),
    }
}

/// Times the steps of a run.
struct Clock {
    first: usize,
    total: usize,
    run_started: Instant,
    step_started: Instant,
}

impl Clock {
    /// Starts a run, and its first step.
    fn new(first: usize, total: usize) -> Self {
        let now = Instant::now();
        Self { first, total, run_started: now, step_started: now }
    }

    fn start_step(&mut self) {
        self.step_started = Instant::now();
    }

    /// Tokens per second of the step that made `step` steps done, and the seconds that the run still takes.
    fn after_step(&self, step: usize, batches: &[MicroBatch]) -> (f64, f64) {
        let tokens: usize = batches.iter().flat_map(|batch| &batch.ids).map(Vec::len).sum();
        let seconds_a_step = self.run_started.elapsed().as_secs_f64() / (step - self.first) as f64;
        let tokens_per_second = tokens as f64 / self.step_started.elapsed().as_secs_f64();
        (tokens_per_second, seconds_a_step * (self.total - step) as f64)
    }
}
