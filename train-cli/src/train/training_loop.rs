//! The loop over the steps of a run. Each step: micro-batches, learning rate, recipe and frozen blocks, the optimizer
//! step, its report, an evaluation and a checkpoint where they are due.

use crate::{
    CliError,
    data::order::{MicroBatch, Order},
    device_failure,
    interrupt::{Interruption, SaveRequests},
    memory::vram::VramReport,
    train::damp::{self, DampedFinish},
    train::evaluation::{self, Evaluation},
    train::guard::Guard,
    train::objective::Trainee,
    train::pace::{Pace, StepClock, StillToDo},
    train::schedule::Schedule,
    train::step::{Stepped, Stepper},
    watchdog::{Watched, Work},
};
use backend_nvfp4::{Nvfp4Kernels, Recipe, TrainingBackend};
use burn::module::AutodiffModule;
use model_qwen3::model::Qwen3;
use std::{path::PathBuf, sync::Arc, time::Duration};

/// Training waits for a checkpoint at most as long as this many steps take, so that waiting makes a run that saves every 100
/// steps at most 4 % longer. The copy from which a checkpoint is written takes time, too: the fifth percent is for it.
const WAITED_STEPS: f64 = 4.0;

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
    /// Signals that ask for a checkpoint after a step.
    pub requests: SaveRequests,
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

    /// What the run still does besides the steps after step `step`, counted from 1.
    fn ahead(&self, step: usize) -> StillToDo;

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

    /// Called once a step is made, before it is logged: waits for a checkpoint of an earlier step that is still being written, but
    /// not longer than `at_most`. A kill then loses no more steps than those of one save interval.
    fn complete_checkpoint(&mut self, at_most: Duration);

    /// Saves a checkpoint if one is due or wanted, unless saving is off; only then is `model` asked for. If the run stops
    /// before its last step, the checkpoint is complete when this returns its folder. Otherwise it may still be being written
    /// while the next steps are made.
    ///
    /// # Errors
    /// If the device fails or a file cannot be written.
    fn maybe_save(
        &mut self,
        model: &dyn Fn() -> Qwen3<B>,
        stepper: &Stepper<B>,
        step: usize,
        wanted: SaveWish,
    ) -> Result<Option<PathBuf>, CliError>;
}

/// Whether a checkpoint is wanted after a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SaveWish {
    /// If one is due.
    IfDue,
    /// Somebody has asked for one.
    Asked,
    /// The run stops after this step: a signal came, it exceeded its memory, or its loss stopped falling.
    AtTheEnd,
}

impl SaveWish {
    /// After a step with which the run `stops`, or during which somebody has `asked` for a checkpoint.
    fn after_step(stops: bool, asked: bool) -> Self {
        match (stops, asked) {
            (true, _) => Self::AtTheEnd,
            (false, true) => Self::Asked,
            (false, false) => Self::IfDue,
        }
    }
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
    /// Device memory in MiB that the run holds after the step.
    pub memory_mib: u64,
    /// The most device memory in MiB that the step took, if the device has a pool that tells.
    pub peak_memory_mib: Option<u64>,
    /// Seconds until the end of the run, estimated. None after the first step, in which kernels are compiled and memory is
    /// allocated.
    pub eta: Option<f64>,
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

/// Trains `net` over the micro-batches of the run, and tells `tell` of every step and evaluation.
///
/// # Errors
/// If training diverges, the device fails, device memory exceeds the limit, or a file cannot be written. `net` still
/// has its model.
pub fn train<AB: TrainingBackend>(
    net: &mut Trainee<AB>,
    mut run: Run<AB::InnerBackend>,
    micro_batches: &mut dyn Iterator<Item = MicroBatch>,
    tell: &mut dyn FnMut(Event),
) -> Result<(), CliError> {
    let device = net.model().device();
    // Loading leaves freed buffers behind.
    AB::memory_cleanup(&device);
    let mut step = run.train.start;
    if step > 0 && run.between.misses_evaluation(step, run.eval.steps > 0)? {
        // A signal or a limit had ended the run between this step and its evaluation.
        let recipe = run.recipe_of(step - 1);
        net.update(|model| model.with_recipe(recipe));
        run.evaluate(&net.valid(), step, tell)?;
    }
    let (mut clock, mut pace, mut frozen_blocks, total) = (StepClock::new(), Pace::default(), 0, run.train.steps);
    while !run.between.ends_early()
        && let Some(batches) = run.next_step::<AB>(micro_batches, step + 1, &device)?
    {
        frozen_blocks = run.prepare(net, step, frozen_blocks);
        let lr = run.schedule.at(step);
        step += 1;
        run.vram.note::<AB>(&device, step, "zero_grad_done")?;
        let made = run.guarded_step(net, &batches, step, lr)?;
        run.vram.note::<AB>(&device, step, "optimizer_step_done")?;
        run.vram.write()?;
        let memory = AB::memory_in_use(&device);
        let held = run.vram.held(memory);
        let peak_memory_mib = run.stepper.pool.peak_of_step(memory).map(|bytes| bytes >> 20);
        let trimmed = run.stepper.pool.after_step::<AB>(&device, memory, held);

        let seconds = clock.lap();
        let tokens_per_second =
            batches.iter().flat_map(|batch| &batch.ids).map(Vec::len).sum::<usize>() as f64 / seconds;
        pace.add_step(seconds, matches!(made, Guarded::Made(_)));
        run.between.complete_checkpoint(Duration::from_secs_f64(WAITED_STEPS * pace.steps.settled().unwrap_or(0.0)));
        let (memory_mib, ahead) = (held >> 20, run.between.ahead(step));
        match made {
            Guarded::Made(Stepped { loss, grad_norm }) => {
                let eta = pace.left(total - step, ahead);
                let report = StepReport {
                    step,
                    loss,
                    grad_norm,
                    lr,
                    tokens_per_second,
                    memory_mib,
                    peak_memory_mib,
                    eta,
                    frozen_blocks,
                };
                run.between.after_step(&report)?;
                tell(Event::Step(report));
            }
            Guarded::LeftOut(reason) => run.between.left_out(step, &reason, &batches)?,
        }

        let interrupted = run.interruption.received();
        let evaluates = interrupted.is_none() && run.between.evaluates(step);
        if evaluates {
            // An evaluation has buffers of other sizes than a step.
            run.stepper.pool.give_back::<AB>(&device);
            clock.lap();
            run.evaluate(&net.valid(), step, tell)?;
            pace.evaluations.add(clock.lap());
        }
        // A signal may have come during the evaluation.
        let interrupted = interrupted.or_else(|| run.interruption.received());
        // If the pool has just been trimmed, the step may have needed less than was held.
        let exceeded = run.memory_limit.filter(|limit| held > *limit && !trimmed);
        let stops = exceeded.is_some() || interrupted.is_some() || run.between.ends_early();
        device_failure::check()?;
        let wanted = SaveWish::after_step(stops, run.requests.take());
        let saved = run.between.maybe_save(&|| net.valid().into_model(), &run.stepper, step, wanted)?;
        if evaluates {
            // Evaluation, samples and a checkpoint leave freed buffers of other sizes behind.
            run.stepper.pool.give_back::<AB>(&device);
        }
        if let Some(limit) = exceeded {
            return Err(CliError::Memory { needed: held, limit, stopped: Some((step, saved)) });
        }
        if let Some(signal) = interrupted {
            return Err(CliError::Interrupted { signal, step, saved });
        }
        clock.lap();
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
        let watched = Watched::begin(Work::Step(step));
        let stepped = self.stepper.step(net, batches, step, lr, &mut self.vram);
        drop(watched);
        // What a device computes after a failure is no reason to leave a step out, nor to save it.
        device_failure::check()?;
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
    fn evaluate(&mut self, net: &Trainee<B>, step: usize, tell: &mut dyn FnMut(Event)) -> Result<(), CliError> {
        let has_rows = self.eval.steps > 0;
        let evaluation = has_rows.then(|| evaluation::evaluate(net, &self.eval, step)).transpose()?;
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

    /// Brings the model to the recipe of step `step`, counted from 0, and freezes the blocks that are frozen in this step, of which
    /// this process has frozen `before`. Returns the number of frozen blocks.
    fn prepare<AB: TrainingBackend<InnerBackend = B>>(
        &mut self,
        net: &mut Trainee<AB>,
        step: usize,
        before: usize,
    ) -> usize {
        let recipe = self.recipe_of(step);
        net.update(|model| model.with_recipe(recipe));
        let frozen = self.damped.frozen(step, net.model().layers.len());
        // A resumed run loads the blocks that froze in earlier steps as frozen, and these stay as they are. If it was made shorter,
        // further blocks freeze in its first step.
        if frozen > before {
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
