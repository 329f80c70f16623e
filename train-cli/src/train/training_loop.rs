//! The loop over the steps of a run. Each step: micro-batches, learning rate, recipe and frozen blocks, the optimizer
//! step, its report, an evaluation and a checkpoint where they are due.

use crate::{
    CliError,
    data::order::{MicroBatch, Order},
    device,
    interrupt::{Interruption, SaveRequests},
    memory::vram::VramReport,
    train::damp::{self, DampedFinish},
    train::evaluation::{self, Evaluation},
    train::guard::Guard,
    train::objective::Trainee,
    train::schedule::Schedule,
    train::step::{Stepped, Stepper},
    watchdog::{Watched, Work},
};
use backend_nvfp4::{Nvfp4Kernels, Recipe, TrainingBackend};
use burn::module::AutodiffModule;
use model_qwen3::model::Qwen3;
use std::{
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

/// Training waits for a checkpoint at most as long as this many steps take, so that waiting makes a run that saves every 100 steps at
/// most 5 % longer.
const WAITED_STEPS: f64 = 5.0;

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

/// What is still to be done between steps, if the run makes all its steps.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StillToDo {
    /// Number of evaluations, with their sample answers.
    pub evaluations: usize,
    /// Number of checkpoints.
    pub saves: usize,
    /// Expected time of the passes of an evaluation, in steps. It counts until the first evaluation was measured.
    pub pass_cost: f64,
    /// Expected time of the sample answers of an evaluation, in steps, for a large model on a GPU.
    pub answer_cost: f64,
    /// Seconds that these answers took before the first step, if that was measured.
    pub answer_seconds: Option<f64>,
    /// Seconds that training waited for the last checkpoint; 0 if there was none.
    pub save_seconds: f64,
    /// The share of the time that checkpoints before the last one may take, if those that would take more are left out.
    pub saving_share: Option<f64>,
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
        pace.add_step(seconds, &made);
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
        device::check()?;
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

/// A stopwatch.
struct StepClock(Instant);

impl StepClock {
    fn new() -> Self {
        Self(Instant::now())
    }

    /// Seconds since the last lap.
    fn lap(&mut self) -> f64 {
        let now = Instant::now();
        (now - std::mem::replace(&mut self.0, now)).as_secs_f64()
    }
}

/// How long things took so far.
#[derive(Debug, Clone, Default)]
struct Mean {
    /// Seconds of the first, in which kernels are compiled and buffers allocated.
    first: Option<f64>,
    /// Seconds of the others.
    others: f64,
    count: usize,
}

impl Mean {
    fn add(&mut self, seconds: f64) {
        if self.first.is_none() {
            self.first = Some(seconds);
        } else {
            self.others += seconds;
            self.count += 1;
        }
    }

    /// The mean without the first. None until there are two.
    fn settled(&self) -> Option<f64> {
        (self.count > 0).then(|| self.others / self.count as f64)
    }

    /// Seconds of the next one: the mean without the first, if there were others.
    fn next(&self) -> Option<f64> {
        self.settled().or(self.first)
    }
}

/// How long the parts of a run take, from those that were made.
#[derive(Debug, Clone, Default)]
struct Pace {
    steps: Mean,
    evaluations: Mean,
}

impl Pace {
    /// Counts the time of a step that was made. One that the guard leaves out is skipped or undone, and says nothing about the
    /// others.
    fn add_step(&mut self, seconds: f64, step: &Guarded) {
        if let Guarded::Made(_) = step {
            self.steps.add(seconds);
        }
    }

    /// Seconds until the end of a run that still makes so many steps, and what is `ahead` between them. None until two steps are
    /// measured, unless nothing is left.
    ///
    /// Until the first evaluation, sample answers are expected to take as long as those before the first step. These may have
    /// waited for kernels. So their time counts only if it is shorter than the estimate from counts of tokens. That estimate is for
    /// a large model on a GPU, where a token of an answer takes as long as 84 tokens of a step; a small model on a CPU needs a
    /// tenth of that.
    fn left(&self, steps: usize, ahead: StillToDo) -> Option<f64> {
        if steps + ahead.evaluations + ahead.saves == 0 {
            return Some(0.0);
        }
        let step = self.steps.settled()?;
        let answers = (ahead.answer_cost * step).min(ahead.answer_seconds.unwrap_or(f64::INFINITY));
        let evaluation = self.evaluations.next().unwrap_or(ahead.pass_cost * step + answers);
        let others = steps as f64 * step + ahead.evaluations as f64 * evaluation;
        let last = ahead.saves.min(1) as f64 * ahead.save_seconds;
        let share = ahead.saving_share.map_or(f64::INFINITY, |share| share * others);
        let before = (ahead.saves as f64 * ahead.save_seconds - last).min(share);
        Some(others + last + before)
    }
}

#[cfg(test)]
mod tests {
    use super::{Guarded, Pace, Stepped, StillToDo};

    #[test]
    fn the_time_left_counts_evaluations_and_checkpoints_to_come() {
        let mut pace = Pace::default();
        let ahead = StillToDo {
            evaluations: 3,
            pass_cost: 1.0,
            answer_cost: 3.0,
            answer_seconds: Some(1000.0),
            ..StillToDo::default()
        };
        // The first step says nothing about the others: kernels were compiled in it.
        assert_eq!(pace.left(10, ahead), None);
        pace.steps.add(5.0);
        assert_eq!(pace.left(10, ahead), None);
        assert_eq!(pace.left(0, StillToDo::default()), Some(0.0), "nothing is left, whatever a step takes");
        pace.steps.add(1.0);
        pace.steps.add(3.0);
        assert_eq!(pace.left(10, ahead), Some(10.0 * 2.0 + 3.0 * 4.0 * 2.0));
        // What was measured replaces what was expected.
        pace.evaluations.add(7.0);
        let ahead = StillToDo { saves: 2, save_seconds: 11.0, ..ahead };
        assert_eq!(pace.left(10, ahead), Some(20.0 + 3.0 * 7.0 + 2.0 * 11.0));
        assert_eq!(pace.left(0, StillToDo { evaluations: 1, saves: 1, ..ahead }), Some(18.0));
        assert_eq!(pace.left(0, StillToDo::default()), Some(0.0));
    }

    /// The last checkpoint is always written, and those before it take no more than their share.
    #[test]
    fn the_time_left_counts_no_checkpoints_that_are_left_out() {
        let mut pace = Pace::default();
        (0..3).for_each(|_| pace.steps.add(1.0));
        let ahead = StillToDo { saves: 20, save_seconds: 11.0, saving_share: Some(0.02), ..StillToDo::default() };
        assert_eq!(pace.left(100, ahead), Some(100.0 + 11.0 + 2.0));
        // Short ones are all written, and so are those that somebody has asked for.
        assert_eq!(pace.left(100, StillToDo { save_seconds: 0.0625, ..ahead }), Some(100.0 + 20.0 * 0.0625));
        assert_eq!(pace.left(1000, StillToDo { saves: 2, saving_share: None, ..ahead }), Some(1000.0 + 2.0 * 11.0));
    }

    #[test]
    fn a_step_that_is_left_out_says_nothing_about_the_time_of_the_others() {
        let mut pace = Pace::default();
        for _ in 0..3 {
            pace.add_step(1.0, &Guarded::Made(Stepped { loss: 1.0, grad_norm: 1.0 }));
            pace.add_step(0.0, &Guarded::LeftOut("the loss is NaN".into()));
        }
        assert_eq!(pace.left(10, StillToDo::default()), Some(10.0));
    }

    /// A small model on a CPU: 20 steps of 0.1 s, and an evaluation at the end, whose answers took 0.2 s before the first step.
    #[test]
    fn answers_before_the_first_step_say_how_long_answers_take() {
        let mut pace = Pace::default();
        let ahead = StillToDo {
            evaluations: 1,
            pass_cost: 0.5,
            answer_cost: 42.0,
            answer_seconds: Some(0.2),
            ..StillToDo::default()
        };
        for _ in 0..10 {
            pace.steps.add(0.1);
        }
        let left = |answer_seconds| pace.left(10, StillToDo { answer_seconds, ..ahead }).unwrap_or_default();
        assert!((left(Some(0.2)) - (1.0 + 0.05 + 0.2)).abs() < 1e-9, "{}", left(Some(0.2)));
        // Without them, only counts of tokens are known.
        assert!((left(None) - (1.0 + 0.05 + 4.2)).abs() < 1e-9, "{}", left(None));
    }
}
