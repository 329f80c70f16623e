//! Trains a run that can begin to its last step. Where a bad step has changed weights, the run goes back to a checkpoint, or to
//! its beginning, and is trained from there again.

use super::ready::Ready;
use crate::{
    CliError,
    data::order::Order,
    interrupt::{Interruption, SaveRequests},
    memory::vram::VramReport,
    progress::Line,
    report,
    run::beginning::Beginning,
    run::checkpoint::{HeadStorage, TrainerState},
    run::folder,
    run::journal::Journal,
    run::log,
    run::resume::{self, Resumed},
    run::sample_answers::Samples,
    run::saving::Saver,
    train::chunked_adamw::ChunkedAdamw,
    train::damp::DampedFinish,
    train::guard::{self, Back, Guard},
    train::learner,
    train::schedule::Schedule,
    train::training_loop::Run,
};
use backend_nvfp4::{DeviceServices, Nvfp4Kernels};
use burn::{backend::Autodiff, module::AutodiffModule};
use model_qwen3::model::Qwen3;
use std::sync::Arc;

/// What watches the steps of a run: for bad ones, for signals, and for the memory that they take.
struct Watchers {
    guard: Guard,
    interruption: Arc<Interruption>,
    requests: SaveRequests,
    vram: VramReport,
}

/// What a run has when its last step is made.
pub(super) struct Outcome<B: Nvfp4Kernels> {
    pub(super) model: Qwen3<B>,
    pub(super) beginning: Option<Beginning>,
    pub(super) samples: Samples,
    pub(super) journal: Journal,
    pub(super) head: HeadStorage,
}

impl Ready {
    /// Trains to the last step. Where the guard finds that a bad step has changed weights, the run goes back.
    pub(super) fn guarded<B: Nvfp4Kernels + DeviceServices>(
        &self,
        mut from: Option<Resumed>,
        signals: &Arc<Interruption>,
        requests: &SaveRequests,
        device: &B::Device,
    ) -> Result<Outcome<B>, CliError> {
        let record = from.as_ref().map(|resumed| resumed.state.guard.clone()).unwrap_or_default();
        let guard = Guard::new(self.plan.settings.advanced.guard, record);
        loop {
            let vram = VramReport::new(self.plan.settings.logging.vram_report.as_deref());
            let (interruption, requests) = (signals.clone(), requests.clone());
            let watchers = Watchers { guard: guard.clone(), interruption, requests, vram };
            let error = match self.attempt(from.as_ref(), watchers, device) {
                Ok(trained) => return Ok(trained),
                Err(error) => error,
            };
            // What a device computed that has failed says nothing about a step.
            let Some(back) = guard.back().filter(|_| !error.is_of_the_device()) else {
                // The step that ended the run was not left out.
                let left_out = log::steps_left_out(&self.plan.output_dir).unwrap_or_default();
                if left_out > 0 {
                    report::line(ended_without(left_out));
                }
                return Err(error);
            };
            let run = &self.plan.output_dir;
            from = match back {
                Back::Newest { .. } => resume::newest(run, usize::MAX)?,
                Back::Older { bad } => resume::newest(run, bad.saturating_sub(guard::FAR))?,
            };
            let to = from.as_ref().map_or(0, |resumed| resumed.state.global_step);
            let place = if to == 0 { "its beginning".to_owned() } else { format!("checkpoint-{to}") };
            match back {
                Back::Newest { bad } => report::line(format!(
                    "warning: step {bad} changed weights before its gradient was found to be not finite: the run goes back \
                     to {place} and leaves it out"
                )),
                Back::Older { bad } => {
                    guard.leave_out(to + 1..=bad, &format!("the run went back from step {bad} to {place}"));
                    report::line(format!(
                        "warning: too many steps were not finite, up to step {bad}: the run goes back to {place} and leaves \
                         out all steps between"
                    ));
                }
            }
        }
    }

    /// Loads the model of a checkpoint, or that of the run's beginning, and trains it to the last step.
    fn attempt<B: Nvfp4Kernels + DeviceServices>(
        &self,
        from: Option<&Resumed>,
        mut watchers: Watchers,
        device: &B::Device,
    ) -> Result<Outcome<B>, CliError> {
        let (plan, inputs) = (&self.plan, &self.inputs);
        watchers.vram.note::<B>(device, 0, "start")?;
        let model = self.model::<B>(from, device)?;
        watchers.vram.note::<B>(device, 0, "model_loaded")?;
        folder::reopen(&plan.output_dir, from.map_or(0, |resumed| resumed.state.global_step))?;
        if from.is_some() {
            // Not earlier: a newer checkpoint, which is set aside only here, may have more steps than the run now has.
            folder::record_settings(plan)?;
        }
        let optimizer = self.optimizer(from, &model)?;
        // The memory of a device with a pool is planned for training. The host has some to spare.
        let on_the_host = B::memory_in_use(device).is_none();
        let samples = Samples::of(plan, inputs, on_the_host)?;
        let beginning = match from {
            None => {
                let _line = Line::of("answering prompts before the first step");
                let is_random = inputs.source.is_none();
                Some(Beginning::record(&plan.output_dir, &model.valid(), &samples, is_random, self.spec)?)
            }
            Some(_) => Beginning::read(&plan.output_dir, self.spec),
        };
        let mut state = self.state(from, &model);
        state.answering = state.answering.or_else(|| beginning.as_ref()?.answering);
        let order = Order { start: state.global_step, ..inputs.order(plan) };
        let codes = beginning.as_ref().map(|beginning| beginning.codes.clone());
        let guard = watchers.guard.clone();
        let bytes = self.forecast.estimate.checkpoint();
        let saver = Saver::new(&plan.output_dir, &plan.companions, bytes, self.forecast.saving, on_the_host)?;
        let journal = Journal::new(plan, inputs, samples.clone(), order.clone(), state.clone(), guard, codes, saver)?;
        let trained = self.train(model, optimizer, &state, order, journal.clone(), watchers);
        // A checkpoint may still be being written, however the training ended. It waits on a device that may have failed.
        if trained.as_ref().is_err_and(CliError::is_of_the_device) {
            journal.abandon_checkpoint();
        }
        let line = Line::of("writing the last checkpoint");
        let written = journal.wait_for_checkpoint();
        drop(line);
        match (trained, written) {
            (Ok(model), Ok(_)) => Ok(Outcome { model, beginning, samples, journal, head: state.head }),
            (Ok(_), Err(error)) | (Err(error), Ok(_)) => Err(error),
            (Err(error), Err(unsaved)) => {
                // Training and writing share the device, which reports a failed launch once, to either of them.
                let shared = unsaved.is_of_the_device();
                let reason = if shared { "the device failed meanwhile".to_owned() } else { unsaved.to_string() };
                report::line(format!("warning: the last checkpoint could not be written: {reason}"));
                Err(if shared { unsaved } else { error })
            }
        }
    }

    /// Trains from the step after `state` to the last.
    fn train<B: Nvfp4Kernels + DeviceServices>(
        &self,
        model: Qwen3<Autodiff<B>>,
        optimizer: ChunkedAdamw<B>,
        state: &TrainerState,
        order: Order,
        journal: Journal,
        watchers: Watchers,
    ) -> Result<Qwen3<B>, CliError> {
        let (s, steps) = (&self.plan.settings, order.steps);
        if state.global_step >= steps {
            // But an evaluation may be missing, if a signal came in the last step.
            report::line(format!("step {} of {steps}: nothing is left to train", state.global_step));
        }
        let quantize_from = self.plan.quantize_from(steps);
        let run = Run {
            train: order,
            eval: self.inputs.eval_order(&self.plan),
            stepper: self.stepper(optimizer, state.last_norm),
            schedule: Schedule {
                peak: s.optimizer.learning_rate,
                warmup: self.plan.warmup(steps),
                total: steps,
                decay: s.optimizer.lr_scheduler_type,
            },
            recipe: self.plan.recipe,
            quantize_from,
            damped: DampedFinish::new(s.recipe.damped_finish, steps, quantize_from),
            guard: watchers.guard,
            memory_limit: self.plan.memory_limit,
            logging_steps: s.logging.logging_steps,
            vram: watchers.vram,
            interruption: watchers.interruption,
            requests: watchers.requests,
            between: Box::new(journal),
        };
        learner::run(self.trainee(model, s.model.last_trained()), run)
    }
}

/// What to say of a run that ends by an error and has left out so many steps.
fn ended_without(steps: usize) -> String {
    let were = if steps == 1 { "was" } else { "were" };
    format!("{} {were} left out before the run ended; metrics.jsonl lists them", report::count(steps, "step"))
}

#[cfg(test)]
mod tests {
    use super::ended_without;

    #[test]
    fn one_step_was_left_out_and_two_were() {
        assert!(ended_without(1).starts_with("1 step was left out"));
        assert!(ended_without(2).starts_with("2 steps were left out"));
    }
}
