//! The journal of a run: what the training loop writes between steps. Metrics and sample answers go to `.jsonl` files,
//! checkpoints to their folders, and the result of the run to `train_results.json`.

use crate::{
    CliError,
    data::order::{MicroBatch, Order},
    data::sample::Origin,
    durable,
    memory::estimate,
    plan::Plan,
    report,
    run::checkpoint::TrainerState,
    run::folder::RESULTS,
    run::inputs::Inputs,
    run::sample::{Samples, beginning},
    run::saving::Saver,
    settings::SaveStrategy,
    train::codes::Codes,
    train::evaluation::Evaluation,
    train::guard::Guard,
    train::step::Stepper,
    train::training_loop::{Between, StepReport},
};
use backend_nvfp4::Nvfp4Kernels;
use model_qwen3::model::Qwen3;
use serde_json::json;
use std::{
    collections::VecDeque,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Instant,
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
    started: Instant,
    losses: Losses,
    /// Floating-point operations per token.
    flops: f64,
    last_eval: Arc<Mutex<Option<f32>>>,
    saver: Arc<Mutex<Saver>>,
}

impl Journal {
    /// The journal of a run that has done `state.global_step` steps of `order`.
    pub fn new(
        plan: &Plan,
        inputs: &Inputs,
        samples: Samples,
        order: Order,
        state: TrainerState,
        guard: Guard,
        codes: Option<Arc<Codes>>,
        saver: Saver,
    ) -> Self {
        let limit = inputs.config.max_position_embeddings;
        let flops = estimate::flops_a_token(&inputs.config, plan.max_seq_length(limit));
        let last_eval = last_evaluation(&plan.output_dir);
        Self {
            plan: Arc::new(plan.clone()),
            samples,
            order,
            state,
            guard,
            codes,
            started: Instant::now(),
            losses: Losses::default(),
            flops,
            last_eval: Arc::new(Mutex::new(last_eval)),
            saver: Arc::new(Mutex::new(saver)),
        }
    }

    /// Waits until the last checkpoint is complete. Returns its folder, the first time.
    ///
    /// # Errors
    /// If it could not be written.
    pub fn wait_for_checkpoint(&self) -> Result<Option<PathBuf>, CliError> {
        self.saver.lock().expect("no thread panics while it holds the lock").wait()
    }

    /// Lets a checkpoint that is still being written remain uncommitted, because the device failed meanwhile.
    pub fn abandon_checkpoint(&self) {
        self.saver.lock().expect("no thread panics while it holds the lock").abandon();
    }

    /// Seconds that the steps of the run took, with those of earlier processes.
    pub fn seconds(&self) -> f64 {
        self.state.seconds + self.started.elapsed().as_secs_f64()
    }

    /// Writes `train_results.json` after the last step; `codes_changed` is the share of NVFP4 codes that changed.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn finish(&self, runtime: f64, codes_changed: Option<f64>) -> Result<(), CliError> {
        let (order, steps, samples) = (&self.order, self.order.steps as f64, self.order.limit as f64);
        let result = json!({
            "epoch": order.epochs(order.steps),
            "global_step": order.steps,
            "train_runtime": runtime,
            "train_samples": samples,
            "train_samples_per_second": samples / runtime,
            "train_steps_per_second": steps / runtime,
            "eval_loss": *self.last_eval.lock().expect("no thread panics while it holds the lock"),
            "codes_changed_pct": codes_changed.map(|share| share * 100.0),
            "steps_left_out": self.guard.record().left_out.len(),
        });
        let text = serde_json::to_string_pretty(&result).expect("plain data is always valid JSON");
        durable::write_bytes(&self.plan.output_dir.join(RESULTS), text.as_bytes()).map(|_| ())
    }

    fn log(&self, file: &str, line: serde_json::Value) -> Result<(), CliError> {
        durable::append_line(&self.plan.output_dir.join(file), &line.to_string())
    }

    /// Whether something that happens every `every` steps happens after this one. Unset is a twentieth of the run, 0 is
    /// never; it always happens after the last step.
    fn due(&self, every: Option<usize>, step: usize) -> bool {
        let every = every.unwrap_or_else(|| self.order.steps.div_ceil(20));
        step == self.order.steps || every > 0 && step.is_multiple_of(every)
    }
}

impl<B: Nvfp4Kernels> Between<B> for Journal {
    fn after_step(&mut self, r: &StepReport) -> Result<(), CliError> {
        let tflops = self.flops * r.tokens_per_second / 1e12;
        if let Some(warning) = self.losses.add(r.step, r.loss) {
            report::line(format!("warning: {warning}"));
        }
        self.log(
            "metrics.jsonl",
            json!({
                "step": r.step, "epoch": self.order.epochs(r.step), "loss": r.loss, "grad_norm": r.grad_norm,
                "learning_rate": r.lr, "tokens_per_second": r.tokens_per_second, "memory_mib": r.memory_mib,
                "model_tflops": tflops,
                "mfu": self.plan.settings.logging.peak_tflops.map(|peak| tflops / peak),
                "frozen_blocks": r.frozen_blocks,
            }),
        )
    }

    fn left_out(&mut self, step: usize, reason: &str, batches: &[MicroBatch]) -> Result<(), CliError> {
        let files = &self.plan.settings.data.data;
        let place = |origin: &Origin| match (files.get(origin.file as usize), origin.line) {
            (Some(file), 0) => file.display().to_string(),
            (Some(file), line) => format!("{}:{line}", file.display()),
            (None, _) => "random tokens".to_owned(),
        };
        let mut rows: Vec<String> = batches.iter().flat_map(|b| &b.origins).flatten().map(place).collect();
        rows.dedup();
        report::line(format!("warning: step {step} is left out: {reason}; its rows are {}", shortened(&rows)));
        self.log("metrics.jsonl", json!({"step": step, "left_out": reason, "rows": rows}))
    }

    fn evaluates(&self, step: usize) -> bool {
        self.due(self.plan.settings.logging.eval_steps, step)
    }

    fn misses_evaluation(&self, step: usize) -> bool {
        let made = |line: &serde_json::Value| line["step"] == step && line["eval_loss"].is_number();
        Between::<B>::evaluates(self, step) && !lines(&self.plan.output_dir).iter().any(made)
    }

    fn after_evaluation(&mut self, model: &Qwen3<B>, r: &Evaluation) -> Result<(), CliError> {
        *self.last_eval.lock().expect("no thread panics while it holds the lock") = Some(r.loss);
        let changed = match &self.codes {
            Some(before) => before.changed_in(model)?,
            None => None,
        };
        self.log(
            "metrics.jsonl",
            json!({
                "step": r.step, "eval_loss": r.loss, "eval_perplexity": r.loss.exp(),
                "eval_loss_quantised": r.quantized_loss, "eval_loss_master": r.master_loss,
                "codes_changed_pct": changed.map(|share| share * 100.0),
            }),
        )?;
        for (prompt, answer) in self.samples.prompts.iter().zip(self.samples.answers(model)?) {
            self.log("samples.jsonl", json!({"step": r.step, "prompt": prompt, "answer": answer}))?;
            report::line(format!("{:>11}  {prompt} → {}", "sample", beginning(&answer)));
        }
        Ok(())
    }

    fn maybe_save(
        &mut self,
        model: &Qwen3<B>,
        stepper: &Stepper<B>,
        step: usize,
        forced: bool,
    ) -> Result<Option<PathBuf>, CliError> {
        let saver = self.saver.clone();
        let mut saver = saver.lock().expect("no thread panics while it holds the lock");
        saver.check()?;
        let saving = &self.plan.settings.saving;
        if saving.save_strategy == SaveStrategy::No
            || !(forced || self.due(Some(saving.save_every(self.order.steps)), step))
        {
            return Ok(None);
        }
        self.state.global_step = step;
        self.state.epoch = self.order.epochs(step);
        self.state.last_norm = stepper.clipping.last_norm;
        self.state.guard = self.guard.record();
        self.state.seconds = self.seconds();
        self.started = Instant::now();
        let run = &self.plan.output_dir;
        // What was logged of the steps of a checkpoint is not lost before the checkpoint is.
        ["metrics.jsonl", "samples.jsonl"].iter().try_for_each(|log| durable::sync_file(&run.join(log)))?;
        saver.save(model, &stepper.optimizer, &self.state)?;
        if forced { saver.wait() } else { Ok(None) }
    }
}

/// The last evaluation loss in the log of a run that is resumed.
fn last_evaluation(run: &Path) -> Option<f32> {
    lines(run).iter().rev().find_map(|line| line["eval_loss"].as_f64()).map(|loss| loss as f32)
}

/// The lines that a run has logged so far.
fn lines(run: &Path) -> Vec<serde_json::Value> {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap_or_default();
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
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

/// The losses of the last steps, which tell whether one stands out.
#[derive(Debug, Clone, Default)]
struct Losses {
    last: VecDeque<f32>,
    /// The median of the first losses.
    first: Option<f32>,
    warned: bool,
}

/// Losses whose median is compared with the next loss.
const RECENT: usize = 20;
/// A loss that is so many times the median stands out.
const SPIKE: f32 = 3.0;

impl Losses {
    /// Adds a loss. Returns a warning if it stands out, or if losses have risen above those at the beginning.
    fn add(&mut self, step: usize, loss: f32) -> Option<String> {
        let median = (self.last.len() >= RECENT).then(|| median(&self.last));
        self.last.push_back(loss);
        if self.last.len() > RECENT {
            self.last.pop_front();
        }
        let median = median?;
        let first = *self.first.get_or_insert(median);
        if loss > SPIKE * median {
            return Some(format!(
                "the loss of step {step} is {loss:.3}, the median of the {RECENT} before is {median:.3}"
            ));
        }
        if median > 1.5 * first && !std::mem::replace(&mut self.warned, true) {
            return Some(format!(
                "the loss has risen from {first:.3} to {median:.3} (medians of {RECENT} steps): the run diverges; stop it, \
                 and start again with a lower --learning-rate"
            ));
        }
        None
    }
}

fn median(losses: &VecDeque<f32>) -> f32 {
    let mut sorted: Vec<f32> = losses.iter().copied().collect();
    sorted.sort_by(f32::total_cmp);
    sorted[sorted.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_that_stands_out_or_rises_is_warned_of() {
        let mut losses = Losses::default();
        let warnings = |losses: &mut Losses, values: &[f32]| -> Vec<String> {
            values.iter().enumerate().filter_map(|(step, loss)| losses.add(step, *loss)).collect()
        };
        assert!(warnings(&mut losses, &[2.0; 30]).is_empty());
        let spike = warnings(&mut losses, &[7.0, 2.0]);
        assert!(spike.len() == 1 && spike[0].contains("7.000") && spike[0].contains("2.000"), "{spike:?}");
        let risen = warnings(&mut losses, &[4.0; 60]);
        assert!(risen.len() == 1 && risen[0].contains("from 2.000 to 4.000"), "{risen:?}");
    }
}
