//! The end of a run: it exports the model and says what to do with it, unless a signal asks for the end. It also tells
//! whether a run that is resumed has ended already.

use super::{attempts::Outcome, ready::Ready};
use crate::{
    CliError,
    commands::export,
    durable::{self, FileRecord},
    interrupt::Interruption,
    plan::Plan,
    report,
    run::checkpoint::{self, FINAL, HeadStorage, TrainerState},
    run::evaluations::Evaluations,
    run::export_format::ExportFormat,
    run::journal::Journal,
    run::results::Results,
    run::resume::Resumed,
    run::sample_answers,
    run::trained,
    settings::{Layer, SaveStrategy, flag},
};
use backend_nvfp4::{BlockShape, DeviceServices, Nvfp4Kernels};
use burn::module::AutodiffModule;
use model_qwen3::{container::Container, model::Qwen3};
use std::path::{Path, PathBuf};

/// Why a run ends before its last step without an error.
const STALLED: &str = "the evaluation loss stopped falling";

/// Why an error or a signal ended a run, in a few words.
pub(super) fn reason(error: &CliError) -> String {
    match error {
        CliError::Interrupted { signal, .. } => format!("{} ended it", signal.name()),
        CliError::Memory { needed, limit, .. } => {
            format!("it held {}, more than --memory-limit {}", report::size(*needed), report::size(*limit))
        }
        CliError::Diverged { step, what, value, .. } => format!("the {what} of step {step} was {value}"),
        CliError::OutOfMemory { .. } => "the device was out of memory".to_owned(),
        CliError::HostIsFull { .. } => "the host was out of memory".to_owned(),
        other => format!("it failed: {other}"),
    }
}

impl Ready {
    /// Compares, exports and records a trained model. Returns why the run ended before its last step, if it did.
    pub(super) fn finish<B: Nvfp4Kernels + DeviceServices>(
        &self,
        trained: Outcome<B>,
        signals: &Interruption,
        device: &B::Device,
    ) -> Result<Option<String>, CliError> {
        let Outcome { model, beginning, samples, journal, head } = trained;
        let (runtime, last) = (journal.seconds(), self.inputs.order(&self.plan).steps);
        let made = journal.made();
        if made < last {
            report::line(format!(
                "{STALLED}: the run ends after step {made} of {last}. To extend it, resume it with a \
                 larger --early-stopping-patience"
            ));
        }
        let go_on = || self.unless_interrupted(signals, made);
        go_on()?;
        let (model, step) = self.best_or_last(model, made, &journal, device)?;
        // The export is checked in the memory that the optimizer's states and the step's buffers had.
        B::memory_cleanup(device);
        let run = &self.plan.output_dir;
        let changed = beginning.map(|beginning| beginning.compare(&model, &samples, run, step)).transpose()?.flatten();
        let exported = self.export(&model, head, &go_on)?;
        let step = exported.as_ref().map(|_| step);
        let (folder, extra) = exported.unzip();
        // The record of a complete run comes last: a resume of a run without it finishes the export.
        journal.finish(step, runtime, changed, extra.flatten().as_ref())?;
        self.conclude(folder.as_deref(), runtime, samples.prompts.first());
        Ok((made < last).then(|| STALLED.to_owned()))
    }

    /// Ends a run whose steps are made, if a signal asks for it. Its last checkpoint is complete, and a resumed run makes what is
    /// missing.
    fn unless_interrupted(&self, signals: &Interruption, step: usize) -> Result<(), CliError> {
        let Some(signal) = signals.received() else { return Ok(()) };
        let saved = checkpoint::list(&self.plan.output_dir)?.into_iter().next().map(|(_, folder)| folder);
        Err(CliError::Interrupted { signal, step, saved })
    }

    /// The model to export, and its step: that of the best checkpoint if it is wanted, else the last one.
    fn best_or_last<B: Nvfp4Kernels>(
        &self,
        last: Qwen3<B>,
        made: usize,
        journal: &Journal,
        device: &B::Device,
    ) -> Result<(Qwen3<B>, usize), CliError> {
        let run = &self.plan.output_dir;
        let mut kept = checkpoint::list(run)?;
        loop {
            let is_kept = |step| step == made || kept.iter().any(|(saved, _)| *saved == step);
            let Some((step, loss, is_lowest)) = journal.best(is_kept) else { return Ok((last, made)) };
            let which = if is_lowest { "of the run" } else { "of the checkpoints that are kept" };
            let state = match kept.iter().find(|(saved, _)| *saved == step && step != made) {
                None => Ok(None),
                Some((_, folder)) => checkpoint::open(folder).map(|state| Some((folder.clone(), state))),
            };
            match state {
                Err(error) => {
                    report::line(format!(
                        "warning: checkpoint-{step} has the lowest evaluation loss, but is broken: {error}"
                    ));
                    kept.retain(|(saved, _)| *saved != step);
                    continue;
                }
                Ok(best) => {
                    report::label("best", format!("step {step} · evaluation loss {loss:.4}, the lowest {which}"));
                    let Some((folder, state)) = best else { return Ok((last, made)) };
                    drop(last);
                    let best = Resumed { run: run.clone(), state, folder };
                    return Ok((self.model::<B>(Some(&best), device)?.valid(), step));
                }
            }
        }
    }

    /// Exports the trained model to `final/`, and to `--output-dat` if it is set. Returns the folder, and the size and digest
    /// of the file; `None` if nothing is saved.
    fn export<B: Nvfp4Kernels + DeviceServices>(
        &self,
        model: &Qwen3<B>,
        head: HeadStorage,
        go_on: &dyn Fn() -> Result<(), CliError>,
    ) -> Result<Option<(PathBuf, Option<FileRecord>)>, CliError> {
        let (plan, text) = (&self.plan, &self.inputs.text);
        if plan.settings.saving.save_strategy == SaveStrategy::No {
            return Ok(None);
        }
        let layers = model.layers.len();
        let dense_from = layers.saturating_sub(plan.settings.bf16_last_blocks(layers));
        let (scaling, recipe) = (self.spec.scaling, plan.recipe);
        let shares_scale = self.spec.shares_scale;
        let format = ExportFormat { scaling, head: head.into(), recipe, dense_from, shares_scale };
        let format = format.with_head(plan.settings.saving.head);
        let template = text.template_sha256.clone();
        let trained = trained::Trained::by(&plan.settings, layers, scaling, template, self.inputs.thinking);
        let form = export::Target { format, like: self.original(), trained: &trained };
        let exported = export::model_to_folder(model, text, &plan.companions, &form, &plan.output_dir.join(FINAL))?;
        report::label("export", exported.display().to_string());
        go_on()?;
        let extra = plan.settings.saving.output_dat.as_ref();
        let extra = extra.map(|file| export::model_to_dat(model, text, &form, file)).transpose()?;
        Ok(Some((exported, extra)))
    }

    /// Says that the run is done, and what to do with its export.
    fn conclude(&self, exported: Option<&Path>, runtime: f64, prompt: Option<&String>) {
        let done = report::duration(runtime);
        match exported {
            Some(exported) => {
                report::line(format!("done in {done} · {}", self.plan.output_dir.display()));
                next_steps(exported, prompt);
            }
            None => report::line(format!("done in {done} · nothing was saved, because of --save-strategy no")),
        }
    }

    /// The model's own file if its layout serves for the export: a .dat file with NVFP4 weights and the scale levels of the
    /// run, if the run quantizes every transformer block, with 1x16 scales and a tensor scale for each matrix.
    fn original(&self) -> Option<&Container> {
        let (s, spec) = (&self.plan.settings, self.spec);
        let dense = s.bf16_last_blocks(self.inputs.config.num_hidden_layers);
        let same_blocks = dense == 0 && spec.weights().block == BlockShape::Row;
        let same_scales = self.inputs.stored_scaling() == Some(spec.scaling) && !spec.shares_scale;
        let serves = same_blocks && same_scales && s.saving.head.is_none();
        self.inputs.source.as_ref().filter(|file| serves && file.dat().is_some())
    }
}

/// Whether a run whose newest checkpoint has this state has made its `steps` steps, or ended early, and has its record and
/// everything that it was to export, undamaged.
pub(super) fn is_complete(plan: &Plan, state: &TrainerState, steps: usize) -> Result<bool, CliError> {
    let (saving, run) = (&plan.settings.saving, &plan.output_dir);
    let Some(results) = Results::whole(run)? else { return Ok(false) };
    let evaluations = Evaluations::logged(run, plan.quantize_from(steps))?;
    let patience = plan.settings.logging.early_stopping_patience;
    let stalled = patience.is_some_and(|patience| evaluations.have_stalled(patience));
    // If the run was made shorter, its newest checkpoint still has the old length.
    let done = state.global_step == steps || stalled && state.max_steps == steps;
    let made = results.global_step == state.global_step;
    // Which step is exported is a setting that a resumed run may change.
    let kept = checkpoint::list(run)?;
    let best = evaluations.best_of(|step| kept.iter().any(|(saved, _)| *saved == step));
    let wanted = best.filter(|_| saving.load_best_model_at_end).map_or(state.global_step, |(step, _)| step);
    let is_wanted = results.exported_step.is_none_or(|step| step == wanted);
    let folder = plan.output_dir.join(FINAL);
    let has_copy =
        |file: &PathBuf| is_recorded(file, results.output_dat.as_ref()) && trained::Trained::is_beside(file, &folder);
    let exported = saving.save_strategy == SaveStrategy::No
        || durable::verify_listed(&folder, |_| true).is_ok() && saving.output_dat.as_ref().is_none_or(has_copy);
    Ok(done && made && is_wanted && exported)
}

/// Refuses a new length of a run if the command line gives one, and no step would be made because of another setting.
///
/// # Errors
/// If it does.
pub(super) fn check_length(typed: &Layer, plan: &Plan, state: &TrainerState, steps: usize) -> Result<(), CliError> {
    let (run, before) = (&plan.output_dir, state.settings.table());
    // A command line that is given again may have the length that the run has.
    let changed = |key: &str| typed.get(key).filter(|value| before.get(key) != Some(*value));
    let Some((key, value)) = LENGTHS.into_iter().find_map(|key| Some((key, changed(key)?))) else { return Ok(()) };
    // JSON writes 3.0 for 3 passes.
    let value = value.as_f64().map_or_else(|| value.to_string(), |number| number.to_string());
    let (wanted, done) = (format!("{} {value}", flag(key)), state.global_step);
    let overridden = key == EPOCHS && (done == steps || typed.get("max_steps").is_none());
    if let Some(most) = plan.settings.optimizer.max_steps.filter(|_| overridden) {
        return Err(CliError::Usage(format!(
            "{wanted}: --max-steps {most} in the settings of {} overrides --num-train-epochs; give --max-steps N, where N is \
             larger than {done}",
            run.display()
        )));
    }
    let patience = plan.settings.logging.early_stopping_patience.filter(|_| done < steps);
    let Some(patience) = patience else { return Ok(()) };
    if !Evaluations::logged(run, plan.quantize_from(steps))?.up_to(done).have_stalled(patience) {
        return Ok(());
    }
    Err(CliError::Usage(format!(
        "{wanted}: {} ended after step {done} because {STALLED}, and a longer run would end there too; also give \
         --early-stopping-patience N, where N is larger than {patience}",
        run.display()
    )))
}

/// The settings that say how long a run is. The first overrides the other.
const LENGTHS: [&str; 2] = ["max_steps", EPOCHS];
const EPOCHS: &str = "num_train_epochs";

/// What to say of a run of `steps` steps that is complete: which setting ended it, and how it can be extended.
pub(super) fn completed(plan: &Plan, state: &TrainerState, steps: usize) -> String {
    let (run, epochs) = (plan.output_dir.display(), plan.settings.optimizer.num_train_epochs);
    let (ended_by, wanted) = match plan.settings.optimizer.max_steps {
        _ if state.global_step < steps => (STALLED.to_owned(), "a larger --early-stopping-patience".to_owned()),
        Some(most) => {
            let ended_by = format!("--max-steps {most} ended it, and overrides --num-train-epochs");
            (ended_by, format!("--max-steps N, where N is larger than {most}"))
        }
        None => {
            let made = state.settings.optimizer.num_train_epochs;
            let more =
                if epochs > made { format!(", and {epochs} epochs have no further step") } else { String::new() };
            (format!("--num-train-epochs {made} ended it{more}"), "a larger --num-train-epochs".to_owned())
        }
    };
    format!("{run} is complete at step {}: {ended_by}. To extend it, resume it with {wanted}", state.global_step)
}

/// Whether a file is there as the record of a run describes it.
fn is_recorded(file: &Path, record: Option<&FileRecord>) -> bool {
    record.is_some_and(|expected| FileRecord::of(file).is_ok_and(|found| found == *expected))
}

/// Says what to do with an export.
fn next_steps(exported: &Path, prompt: Option<&String>) {
    // A prompt of several lines, or a long one, is no part of a command that people copy.
    let short = prompt.filter(|prompt| sample_answers::beginning(prompt) == **prompt);
    let prompt = short.map_or("hello", String::as_str);
    // As a word of its own, a prompt that begins with a dash would be read as a flag.
    let flag = if prompt.starts_with('-') { "--prompt=" } else { "-p " };
    let folder = report::quoted(&exported.display().to_string());
    report::line("next:");
    report::command(format!("train-cli generate -m {folder} {flag}{}", report::quoted(prompt)));
    report::command(format!("train-cli chat -m {folder}"));
    report::command(format!("train-cli inspect {folder} --verify"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_to_end_early_reads_differently() {
        let diverged =
            CliError::Diverged { step: 7, what: "loss", value: f32::NAN, updated: false, hint: String::new() };
        assert_eq!(reason(&diverged), "the loss of step 7 was NaN");
        let memory = CliError::Memory { needed: 3 << 30, limit: 2 << 30, stopped: None };
        assert_eq!(reason(&memory), "it held 3.0 GiB, more than --memory-limit 2.0 GiB");
        assert_eq!(reason(&CliError::Usage("the reason".into())), "it failed: the reason");
    }
}
