//! The journal of a run: what the training loop writes between steps. Metrics and sample answers go to `.jsonl` files,
//! checkpoints to their folders, and the result of the run to `train_results.json`.

use crate::{
    CliError,
    data::order::Order,
    durable,
    memory::estimate,
    plan::Plan,
    report,
    run::checkpoint::{self, TrainerState},
    run::inputs::Inputs,
    run::sample::{Samples, beginning},
    settings::SaveStrategy,
    train::codes::Codes,
    train::evaluation::Evaluation,
    train::step::Stepper,
    train::training_loop::{Between, StepReport},
};
use backend_nvfp4::Nvfp4Kernels;
use model_qwen3::model::Qwen3;
use serde_json::json;
use std::{
    path::PathBuf,
    sync::{Arc, Mutex},
};

/// Logs, evaluations and checkpoints of a run.
#[derive(Clone)]
pub struct Journal {
    plan: Arc<Plan>,
    samples: Samples,
    order: Order,
    state: TrainerState,
    /// The NVFP4 codes before the first step; none in a resumed run.
    codes: Option<Arc<Codes>>,
    /// Floating-point operations per token.
    flops: f64,
    last_eval: Arc<Mutex<Option<f32>>>,
}

impl Journal {
    /// The journal of a run that has done `state.global_step` steps of `order`.
    pub fn new(
        plan: &Plan,
        inputs: &Inputs,
        samples: Samples,
        order: Order,
        state: TrainerState,
        codes: Option<Arc<Codes>>,
    ) -> Self {
        let limit = inputs.config.max_position_embeddings;
        let flops = estimate::flops_a_token(&inputs.config, plan.max_seq_length(limit));
        Self { plan: Arc::new(plan.clone()), samples, order, state, codes, flops, last_eval: Arc::default() }
    }

    /// Writes `train_results.json` after the last step; `codes_changed` is the share of NVFP4 codes that changed.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn finish(&self, runtime: f64, codes_changed: Option<f64>) -> Result<(), CliError> {
        let (order, start) = (&self.order, self.state.global_step);
        let steps = order.steps.saturating_sub(start) as f64;
        let samples = order.limit.saturating_sub(start * self.plan.sequences_per_step()) as f64;
        let result = json!({
            "epoch": order.epochs(order.steps),
            "global_step": order.steps,
            "train_runtime": runtime,
            "train_samples": samples,
            "train_samples_per_second": samples / runtime,
            "train_steps_per_second": steps / runtime,
            "eval_loss": *self.last_eval.lock().expect("no thread panics while it holds the lock"),
            "codes_changed_pct": codes_changed.map(|share| share * 100.0),
        });
        let text = serde_json::to_string_pretty(&result).expect("plain data is always valid JSON");
        durable::write_bytes(&self.plan.output_dir.join("train_results.json"), text.as_bytes()).map(|_| ())
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

    fn evaluates(&self, step: usize) -> bool {
        self.due(self.plan.settings.logging.eval_steps, step)
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
        let saving = &self.plan.settings.saving;
        if saving.save_strategy == SaveStrategy::No || !(forced || self.due(saving.save_steps, step)) {
            return Ok(None);
        }
        self.state.global_step = step;
        self.state.epoch = self.order.epochs(step);
        self.state.last_norm = stepper.clipping.last_norm;
        let (run, files, keep) = (&self.plan.output_dir, &self.plan.companions, saving.save_total_limit);
        let saved = checkpoint::save(run, files, model, &stepper.optimizer, &self.state, keep)?;
        report::line(format!("{:>11}  {}", "saved", saved.display()));
        Ok(Some(saved))
    }
}
