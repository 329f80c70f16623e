//! The journal of a run: what the training loop writes between steps. Metrics and sample answers go to the logs of the run,
//! checkpoints to their folders, and the result of the run to `train_results.json`.

use crate::{
    CliError,
    data::order::{MicroBatch, Order},
    data::sample::{Origin, document_of_a_token},
    durable::FileRecord,
    memory::estimate,
    plan::Plan,
    progress, report,
    run::cadence::{self, Cost, Spent},
    run::checkpoint::{self, TrainerState},
    run::evaluations::Evaluations,
    run::folder::SUMMARY,
    run::header,
    run::inputs::Inputs,
    run::log::{self, EvaluationFigures, LeftOut, Logged, SampleAnswer, StepFigures},
    run::losses::Losses,
    run::results::Results,
    run::sample_answers::{MAX_TOKENS, Samples, beginning},
    run::saving::{Keep, Saver},
    run::tensorboard::Events,
    settings::{ReportTo, SaveStrategy, defaults::SAVING_SHARE},
    train::codes::Codes,
    train::evaluation::Evaluation,
    train::guard::Guard,
    train::pace::StillToDo,
    train::step::Stepper,
    train::training_loop::{Between, SaveWish, StepReport},
    watchdog::{Watched, Work},
};
use backend_nvfp4::Nvfp4Kernels;
use model_qwen3::{ModelError, model::Qwen3};
use std::{
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

/// Logs, evaluations and checkpoints of a run.
#[derive(Clone)]
pub struct Journal {
    plan: Arc<Plan>,
    samples: Samples,
    order: Order,
    state: TrainerState,
    guard: Guard,
    /// The NVFP4 codes before the first step, if they are known.
    codes: Option<Arc<Codes>>,
    /// When the seconds began that `state.seconds` does not count yet.
    started: Instant,
    losses: Losses,
    /// Floating-point operations that a token needs, on average.
    flops: f64,
    /// The peak of the device in TFLOP/s, if it is known.
    peak: Option<f64>,
    evaluations: Arc<Mutex<Evaluations>>,
    made: Arc<AtomicUsize>,
    /// The step of the checkpoint that was saved last. It may still be being written.
    saved: Option<usize>,
    /// Steps from one evaluation to the next; 0 evaluates the last step only.
    eval_steps: usize,
    /// How long an evaluation is expected to take.
    evaluation_cost: Cost,
    /// The events for TensorBoard, if they are wanted.
    events: Option<Events>,
    saver: Arc<Mutex<Saver>>,
    /// Whether it was said that a checkpoint is left out.
    told: bool,
    /// Whether [`LATE`] was said.
    told_of_late: bool,
    /// Whether [`BUSY`] was said.
    told_of_busy: bool,
    /// When this attempt began to train.
    began: Instant,
    /// The steps that were made before.
    began_after: usize,
    /// The time that checkpoints have taken from it.
    spent: Spent,
}

impl Journal {
    /// The journal of a run that has done `state.global_step` steps of `order`.
    ///
    /// # Errors
    /// If the logs of these steps cannot be read, or the events for TensorBoard not be written.
    pub fn new(
        plan: &Plan,
        inputs: &Inputs,
        samples: Samples,
        order: Order,
        state: TrainerState,
        guard: Guard,
        codes: Option<Arc<Codes>>,
        saver: Saver,
    ) -> Result<Self, CliError> {
        let length = document_of_a_token(&inputs.train);
        let flops = estimate::flops_a_token(&inputs.config, plan.settings.model.last_trained(), length);
        let peak = header::peak(plan, &state.precision).map(|(_, peak)| peak);
        let answers = samples.prompts.len() * MAX_TOKENS;
        let evaluation_cost = cadence::cost(plan, inputs, answers);
        let eval_steps = plan.settings.logging.eval_steps.unwrap_or_else(|| {
            let every = cadence::evaluation(plan, inputs, evaluation_cost.total());
            let steps = match every {
                every if every >= order.steps => "after the last step".to_owned(),
                1 => "after every step".to_owned(),
                every => format!("every {every} steps"),
            };
            if !inputs.eval.is_empty() || !samples.prompts.is_empty() {
                report::label("evaluate", format!("{steps}; --eval-steps changes that"));
            }
            every
        });
        let made = state.global_step;
        let evaluations = Evaluations::logged(&plan.output_dir, plan.quantize_from(order.steps))?;
        let events = match plan.settings.logging.report_to {
            ReportTo::Jsonl => None,
            ReportTo::Tensorboard => Some(Events::begin(&plan.output_dir)?),
        };
        Ok(Self {
            plan: Arc::new(plan.clone()),
            samples,
            order,
            state,
            guard,
            codes,
            started: Instant::now(),
            losses: Losses::of(&log::lines(&plan.output_dir, log::METRICS)?),
            flops,
            peak,
            evaluations: Arc::new(Mutex::new(evaluations)),
            made: Arc::new(AtomicUsize::new(made)),
            saved: None,
            eval_steps,
            evaluation_cost,
            events,
            saver: Arc::new(Mutex::new(saver)),
            told: false,
            told_of_late: false,
            told_of_busy: false,
            began: Instant::now(),
            began_after: made,
            spent: Spent::default(),
        })
    }

    /// The evaluations so far.
    fn evaluations(&self) -> MutexGuard<'_, Evaluations> {
        self.evaluations.lock().expect("no thread panics while it holds the lock")
    }

    /// The steps that are made, with those of earlier processes and those that were left out.
    pub fn made(&self) -> usize {
        self.made.load(Ordering::Acquire)
    }

    /// The best evaluation of those whose step is `kept`: its step and its loss, and whether no other loss of the run is lower.
    /// None if the run does not choose by losses.
    pub fn best(&self, kept: impl Fn(usize) -> bool) -> Option<(usize, f32, bool)> {
        let evaluations = self.evaluations();
        let (step, loss) = evaluations.best_of(kept).filter(|_| self.plan.settings.saving.load_best_model_at_end)?;
        Some((step, loss, evaluations.best() == Some((step, loss))))
    }

    /// Waits until the last checkpoint is complete. Returns its folder, the first time.
    ///
    /// # Errors
    /// If it could not be written.
    pub fn wait_for_checkpoint(&self) -> Result<Option<PathBuf>, CliError> {
        self.saver.lock().expect("no thread panics while it holds the lock").finish()
    }

    /// Lets a checkpoint that is still being written remain uncommitted, because the device failed meanwhile.
    pub fn abandon_checkpoint(&self) {
        self.saver.lock().expect("no thread panics while it holds the lock").abandon();
    }

    /// Seconds of the training, with evaluations, sample answers and checkpoints, in all processes of the run.
    pub fn seconds(&self) -> f64 {
        self.state.seconds + self.started.elapsed().as_secs_f64()
    }

    /// Writes `train_results.json` when the model after `exported` steps is exported; `changed` is the share of NVFP4 codes
    /// that changed, and `extra` describes the file of `--output-dat`. Says once more if the losses were warned of.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn finish(
        &self,
        exported: Option<usize>,
        runtime: f64,
        changed: Option<f64>,
        extra: Option<&FileRecord>,
    ) -> Result<(), CliError> {
        let (order, made) = (&self.order, self.made());
        let steps = made as f64;
        let samples = order.sequences(made) as f64;
        let evaluations = self.evaluations();
        // The log knows the losses of all processes of the run.
        let losses = Losses::of(&log::lines(&self.plan.output_dir, log::METRICS)?);
        let results = Results {
            epoch: order.epochs(made),
            global_step: made,
            train_runtime: runtime,
            train_samples: samples,
            train_samples_per_second: samples / runtime,
            train_steps_per_second: steps / runtime,
            eval_loss: evaluations.last().map(f64::from),
            exported_step: exported,
            codes_changed_pct: changed.map(|share| share * 100.0),
            steps_left_out: self.guard.record().left_out.len(),
            output_dat: extra.cloned(),
            loss_warnings: losses.warnings().to_vec(),
        };
        if !losses.warnings().is_empty() {
            let warnings = report::count(losses.warnings().len(), "warning");
            report::line(format!("warning: the run ends with {warnings} about its loss; {SUMMARY} lists them"));
        }
        results.write(&self.plan.output_dir)
    }

    /// Logs the figures of a step or of an evaluation.
    fn log(&self, line: Logged) -> Result<(), CliError> {
        log::append(&self.plan.output_dir, log::METRICS, &line)?;
        self.events.as_ref().map_or(Ok(()), |events| events.add(&line))
    }

    /// Why a checkpoint that nobody has asked for is not saved now, if there is a reason.
    fn reason_to_leave_out(&self, saver: &Saver, step: usize) -> Option<&'static str> {
        if saver.is_busy() {
            return Some("the one before is still being written");
        }
        let elapsed = self.began.elapsed().as_secs_f64();
        let steps = |until: usize| (until - self.began_after) as f64;
        let has_time = self.spent.has_time(saver.bytes(), elapsed, elapsed / steps(step) * steps(self.order.steps));
        (!has_time).then_some("checkpoints would take too much of the run's time")
    }

    /// Whether something that happens every `every` steps happens after this one. It always happens after the last step, and
    /// only there if `every` is 0.
    fn due(&self, every: usize, step: usize) -> bool {
        step == self.order.steps || every > 0 && step.is_multiple_of(every)
    }
}

impl<B: Nvfp4Kernels> Between<B> for Journal {
    fn after_step(&mut self, r: &StepReport) -> Result<(), CliError> {
        self.made.store(r.step, Ordering::Release);
        let tflops = self.flops * r.tokens_per_second / 1e12;
        if let Some(warning) = self.losses.add(r.step, r.loss) {
            report::line(format!("warning: {warning}"));
        }
        self.log(Logged::Step(StepFigures {
            step: r.step,
            epoch: Some(self.order.epochs(r.step)),
            loss: r.loss.into(),
            grad_norm: Some(r.grad_norm.into()),
            learning_rate: Some(r.lr),
            tokens_per_second: Some(r.tokens_per_second),
            memory_mib: Some(r.memory_mib),
            peak_memory_mib: r.peak_memory_mib,
            model_tflops: Some(tflops),
            mfu: self.peak.map(|peak| tflops / peak),
            frozen_blocks: Some(r.frozen_blocks),
        }))
    }

    fn left_out(&mut self, step: usize, reason: &str, batches: &[MicroBatch]) -> Result<(), CliError> {
        self.made.store(step, Ordering::Release);
        let files = &self.plan.settings.data.data;
        let place = |origin: &Origin| match files.get(origin.file as usize) {
            Some(file) => origin.in_file(file),
            None => "random tokens".to_owned(),
        };
        let mut rows: Vec<String> = batches.iter().flat_map(|b| &b.origins).flatten().map(place).collect();
        rows.dedup();
        report::line(format!("warning: step {step} is left out: {reason}; its rows are {}", shortened(&rows)));
        self.log(Logged::LeftOut(LeftOut { step, left_out: reason.to_owned(), rows }))
    }

    fn evaluates(&self, step: usize) -> bool {
        self.due(self.eval_steps, step)
    }

    fn misses_evaluation(&self, step: usize, has_rows: bool) -> Result<bool, CliError> {
        if !Between::<B>::evaluates(self, step) {
            return Ok(false);
        }
        if has_rows {
            return Ok(!self.evaluations().has(step));
        }
        let answers: Vec<SampleAnswer> = log::lines(&self.plan.output_dir, log::SAMPLES)?;
        Ok(!self.samples.prompts.is_empty() && answers.iter().all(|answer| answer.step != step))
    }

    fn ahead(&self, step: usize) -> StillToDo {
        let (steps, saving) = (self.order.steps, &self.plan.settings.saving);
        let saves = match saving.save_strategy {
            SaveStrategy::No => 0,
            SaveStrategy::Steps => due_after(saving.save_every(steps), step, steps),
        };
        let evaluations = due_after(self.eval_steps, step, steps);
        let Cost { passes, answers } = self.evaluation_cost;
        let saver = self.saver.lock().expect("no thread panics while it holds the lock");
        let (at_best, written) = (cadence::at_best(saver.bytes()), saver.seconds_of_last());
        let answer_seconds = self.state.answering.map(|seconds| seconds * self.samples.prompts.len() as f64);
        StillToDo {
            evaluations,
            saves,
            pass_cost: passes,
            answer_cost: answers,
            answer_seconds,
            save_seconds: self.spent.last().unwrap_or(at_best),
            last_save_seconds: written.or(self.spent.last()).unwrap_or(at_best),
            saving_share: saving.save_steps.is_none().then_some(SAVING_SHARE),
        }
    }

    fn ends_early(&self) -> bool {
        let patience = self.plan.settings.logging.early_stopping_patience;
        patience.is_some_and(|patience| self.evaluations().have_stalled(patience))
    }

    fn after_evaluation(&mut self, model: &Qwen3<B>, r: &Evaluation) -> Result<(), CliError> {
        self.evaluations().add(r.step, r.loss);
        let changed = match &self.codes {
            Some(before) => before.changed_in(model)?,
            None => None,
        };
        self.log(Logged::Evaluation(EvaluationFigures {
            step: r.step,
            eval_loss: r.loss.into(),
            eval_perplexity: Some(r.loss.exp().into()),
            eval_loss_quantized: Some(r.quantized_loss.into()),
            eval_loss_master: Some(r.master_loss.into()),
            codes_changed_pct: changed.map(|share| share * 100.0),
        }))
    }

    fn samples(&mut self, model: &Qwen3<B>, step: usize) -> Result<(), CliError> {
        progress::doing("answering prompts");
        let watched = Watched::begin(Work::Samples(step));
        let answers = self.samples.answers(model);
        drop(watched);
        progress::doing("training");
        let answers = match answers {
            // The guard judges the steps. It must not matter whether there are sample answers between them.
            Err(CliError::Model(ModelError::NotANumber)) => {
                report::line(format!("warning: no sample answers after step {step}: the model computes NaN"));
                return Ok(());
            }
            answers => answers?,
        };
        for (prompt, answer) in self.samples.prompts.iter().zip(answers) {
            report::line(format!("{:>11}  {} → {}", "sample", beginning(prompt), beginning(&answer)));
            let line = SampleAnswer { step, prompt: prompt.clone(), answer };
            log::append(&self.plan.output_dir, log::SAMPLES, &line)?;
        }
        Ok(())
    }

    fn complete_checkpoint(&mut self, at_most: Duration) {
        let saver = self.saver.clone();
        let mut saver = saver.lock().expect("no thread panics while it holds the lock");
        if saver.commits_within(at_most) == Some(false) && !std::mem::replace(&mut self.told_of_late, true) {
            report::line(LATE);
        }
    }

    fn maybe_save(
        &mut self,
        model: &dyn Fn() -> Qwen3<B>,
        stepper: &Stepper<B>,
        step: usize,
        wanted: SaveWish,
    ) -> Result<Option<PathBuf>, CliError> {
        let saver = self.saver.clone();
        let mut saver = saver.lock().expect("no thread panics while it holds the lock");
        saver.check()?;
        self.spent.add_to_last(saver.taken_from_steps());
        let saving = &self.plan.settings.saving;
        let there = if saving.load_best_model_at_end { checkpoint::list(&self.plan.output_dir)? } else { vec![] };
        // Of an evaluation that is better, but has no checkpoint any more, nothing can be exported.
        let kept = |one| one == step || Some(one) == self.saved || there.iter().any(|(saved, _)| *saved == one);
        let best = self.best(kept).map(|(step, ..)| step);
        let of_period = saving.keep_period.is_some_and(|period| step.is_multiple_of(period));
        let (asked, ends) = (wanted == SaveWish::Asked, wanted == SaveWish::AtTheEnd);
        let needed = asked || ends || best == Some(step) || of_period || step == self.order.steps;
        let due = needed || self.due(saving.save_every(self.order.steps), step);
        let saves = saving.save_strategy != SaveStrategy::No;
        if asked {
            report::line(answer_to_request(step, saves));
        }
        if !saves || !due {
            return Ok(None);
        }
        // Nobody has asked for this one, and it would cost too much time, or have to wait for the one before.
        let optional = !needed && saving.save_steps.is_none();
        if let Some(reason) = optional.then(|| self.reason_to_leave_out(&saver, step)).flatten() {
            if !std::mem::replace(&mut self.told, true) {
                report::line(format!(
                    "note: no checkpoint after step {step}: {reason}. --save-steps N leaves none out"
                ));
            }
            return Ok(None);
        }
        let keep = Keep { newest: saving.save_total_limit, period: saving.keep_period, best };
        self.state.global_step = step;
        self.state.epoch = self.order.epochs(step);
        self.state.last_norm = stepper.clipping.last_norm;
        self.state.guard = self.guard.record();
        self.state.seconds = self.seconds();
        self.started = Instant::now();
        if saver.is_busy() && step < self.order.steps && !ends && !std::mem::replace(&mut self.told_of_busy, true) {
            report::line(BUSY);
        }
        progress::doing("saving a checkpoint");
        // What was logged of the steps of a checkpoint is not lost before the checkpoint is.
        log::sync(&self.plan.output_dir)?;
        let written = saver.save(&model(), &stepper.optimizer, &self.state, keep)?;
        // The one before may have been waited for.
        self.spent.add_to_last(saver.taken_from_steps());
        self.spent.add(self.started.elapsed().as_secs_f64());
        self.saved = Some(step);
        progress::doing("training");
        if ends && written.is_none() { saver.wait() } else { Ok(written) }
    }
}

/// Said once if training does not wait until a checkpoint is written.
const LATE: &str = "note: training does not wait until a checkpoint is written, because that takes too long. A kill before it is \
                    written loses up to two save intervals";

/// Said once if training waits for the checkpoint before, in the middle of a run.
const BUSY: &str = "note: a checkpoint is due while the one before is still being written, and training waits for that one. It waits \
                    less if checkpoints are further apart";

/// What to say to somebody who asks for a checkpoint by a signal.
fn answer_to_request(step: usize, saves: bool) -> String {
    if saves {
        format!("SIGUSR1: the run saves a checkpoint after step {step} and continues")
    } else {
        format!("SIGUSR1: the run saves no checkpoint after step {step}, because of --save-strategy no; it continues")
    }
}

/// How often something still happens after step `step` that happens every `every` steps, and after the last one.
fn due_after(every: usize, step: usize, last: usize) -> usize {
    if step >= last {
        return 0;
    }
    match every {
        0 => 1,
        every => last.div_ceil(every) - step / every,
    }
}

/// The first of a list, and how many follow.
fn shortened(rows: &[String]) -> String {
    const SHOWN: usize = 4;
    let first = rows.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", ");
    match rows.len().saturating_sub(SHOWN) {
        0 => first,
        more => format!("{first} and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_still_due_is_counted() {
        let by_hand = |every: usize, step: usize, last: usize| {
            (step + 1..=last).filter(|step| *step == last || every > 0 && step.is_multiple_of(every)).count()
        };
        for (every, last) in [(0, 7), (1, 7), (2, 7), (3, 7), (7, 7), (9, 7), (4, 8), (5, 1)] {
            for step in 0..=last {
                assert_eq!(due_after(every, step, last), by_hand(every, step, last), "{every} {step} {last}");
            }
        }
    }
}
