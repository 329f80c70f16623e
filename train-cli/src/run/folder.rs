//! The folder of a run: when a new run may use it, what a resumed run must find unchanged, and a lock that keeps it to
//! one process at a time.

use crate::{
    CliError, durable,
    plan::Plan,
    report,
    run::beginning,
    run::checkpoint::{self, CONFIG, FINAL, STALE},
    run::history::{self, History, RECORD, is_run},
    run::inputs::Inputs,
    run::old_checkpoints,
    run::results::RESULTS,
    run::resume::{self, Resumed},
    run::{log, tensorboard},
    settings::Change,
    train::damp::DampedFinish,
};
use backend_nvfp4::Precision;
use std::{
    fs,
    path::{Path, PathBuf},
};

/// The summary of a run in its folder.
pub const SUMMARY: &str = "summary.md";

/// The picture of its losses.
pub const LOSS: &str = "loss.svg";

/// Whether a run writes this path into its folder. Nothing need be there yet.
pub fn is_of_run(path: &Path) -> bool {
    is_run(durable::parent(path)) && path.file_name().is_some_and(|name| is_ours(&name.to_string_lossy()))
}

/// Checks that the run folder is free for a new run, or that `overwrite` may empty it.
///
/// # Errors
/// If it is neither.
pub fn check_free(plan: &Plan, overwrite: bool) -> Result<(), CliError> {
    let dir = &plan.output_dir;
    let Ok(entries) = fs::read_dir(dir) else { return Ok(()) };
    if durable::is_untouched(dir)? {
        return Ok(());
    }
    let mut names = entries.filter_map(|e| e.ok().map(|e| e.file_name().to_string_lossy().into_owned()));
    let usage = |text: String| Err(CliError::Usage(text));
    if !overwrite {
        let text = "is not empty; give another --output-dir, or --resume-from-checkpoint, or --overwrite";
        return usage(format!("{} {text}", dir.display()));
    }
    if let Some(name) = names.find(|name| !is_ours(name)) {
        let text = "which is no part of a run; nothing was removed";
        return usage(format!("--overwrite: {} holds {name}, {text}", dir.display()));
    }
    let inside =
        |p: &&PathBuf| p.canonicalize().ok().zip(dir.canonicalize().ok()).is_some_and(|(p, d)| p.starts_with(d));
    if let Some(input) = plan.inputs.iter().find(inside) {
        return usage(format!("--overwrite: {} is an input of this run; nothing was removed", input.display()));
    }
    Ok(())
}

/// Refuses the folder of a run that was to begin again, if another process has trained in it since that was decided.
///
/// # Errors
/// If the folder holds a checkpoint or an export.
pub fn check_not_begun(dir: &Path) -> Result<(), CliError> {
    if checkpoint::list(dir)?.is_empty() && !resume::has_results(dir)? {
        return Ok(());
    }
    let text = "another train-cli has trained here just now; give the command again to resume its run";
    Err(CliError::Usage(format!("{}: {text}", dir.display())))
}

/// What the rows of the data are, in JSON.
pub(super) const DATA_REPORT: &str = "data_report.json";

/// What a run writes into its folder; `--overwrite` removes these files and folders only.
const OURS: [&str; 11] = [
    CONFIG,
    beginning::FILE,
    RECORD,
    DATA_REPORT,
    log::METRICS,
    log::SAMPLES,
    RESULTS,
    SUMMARY,
    LOSS,
    FINAL,
    durable::LOCK,
];

fn is_ours(name: &str) -> bool {
    let checkpoint = match name.strip_prefix(STALE) {
        Some(aside) => aside.split_once('-').map_or("", |(_time, checkpoint)| checkpoint),
        None => name,
    };
    let temporary = durable::is_temporary(name) || name == durable::aside_name(FINAL);
    let events = tensorboard::is_events(name);
    OURS.contains(&name) || temporary || events || checkpoint::step_of(Path::new(checkpoint)).is_some()
}

/// The folder of a run, kept to this process. What was made for a run that does not begin goes with it: the lock's file, the
/// folder, and the folders above it.
pub struct Lock {
    _file: fs::File,
    /// The files and folders that did not exist, the innermost first.
    made: Vec<PathBuf>,
}

impl Lock {
    /// Makes the folder of a run, and keeps it to this process until the lock is dropped.
    ///
    /// # Errors
    /// If another process uses the folder, or it cannot be written.
    pub fn of(dir: &Path) -> Result<Self, CliError> {
        let file = dir.join(durable::LOCK);
        let made = file.ancestors().take_while(|path| !path.as_os_str().is_empty() && !path.exists());
        let made = made.map(Path::to_owned).collect();
        durable::make_folder(dir)?;
        let lock = Self { _file: durable::lock(dir)?, made };
        durable::probe(dir, dir)?;
        Ok(lock)
    }

    /// As [`Lock::of`], in a folder that is new: `dir`, or if that exists `dir-2`, `dir-3` and so on. Returns which one it is.
    ///
    /// # Errors
    /// If a folder cannot be made or written.
    pub fn of_new(dir: &Path) -> Result<(Self, PathBuf), CliError> {
        let name = dir.file_name().unwrap_or_default().to_string_lossy();
        let (mut free, mut number) = (dir.to_owned(), 1);
        let above = dir.ancestors().skip(1).take_while(|path| !path.as_os_str().is_empty() && !path.exists());
        let above: Vec<_> = above.map(Path::to_owned).collect();
        while !durable::make_new_folder(&free)? {
            number += 1;
            free = dir.with_file_name(format!("{name}-{number}"));
        }
        let mut lock = Self::of(&free)?;
        lock.made.push(free.clone());
        lock.made.extend(above);
        Ok((lock, free))
    }

    /// The run begins: its folder stays.
    pub fn begins(&mut self) {
        self.made.clear();
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // An empty folder more does no harm.
        let _ = self.made.iter().try_for_each(|path| match path.is_dir() {
            true => durable::remove_empty(path),
            false => durable::remove(path),
        });
    }
}

/// Empties the folder of a new run and writes its first files. One that `restarts` keeps the command line that started it.
///
/// # Errors
/// If the folder holds other files, or it cannot be written.
pub fn create(plan: &Plan, inputs: &Inputs, restarts: bool) -> Result<(), CliError> {
    let dir = &plan.output_dir;
    check_free(plan, true)?;
    let earlier = if restarts { History::read(dir).unwrap_or_default() } else { None };
    let mut names = vec![];
    for entry in fs::read_dir(dir).map_err(CliError::io(dir))? {
        names.push(entry.map_err(CliError::io(dir))?.file_name().to_string_lossy().into_owned());
    }
    // Should the process be killed meanwhile, the rest must not look like what a complete run leaves.
    names.sort_by_key(|name| !resume::is_result(name));
    names
        .iter()
        .filter(|name| *name != durable::LOCK)
        .try_for_each(|name| durable::remove_unless_held(&dir.join(name)))?;
    record_settings(plan)?;
    history::begin(dir, earlier, inputs.order(plan).steps)?;
    let found = serde_json::to_string_pretty(&inputs.report).expect("plain data is always valid JSON");
    durable::write_bytes(&dir.join(DATA_REPORT), found.as_bytes()).map(|_| ())
}

/// Writes the settings of a run into its folder. A resumed run may have others.
///
/// # Errors
/// If the folder cannot be written.
pub fn record_settings(plan: &Plan) -> Result<(), CliError> {
    let text = plan.settings.absolute().toml()?;
    durable::write_bytes(&plan.output_dir.join(CONFIG), text.as_bytes()).map(|_| ())
}

/// Removes from the folder of a run that resumes after `step` what it wrote after that step.
///
/// # Errors
/// If the folder cannot be written.
pub fn reopen(dir: &Path, step: usize) -> Result<(), CliError> {
    // The run is not complete any more, whatever it exported before.
    for name in [RESULTS, SUMMARY, LOSS] {
        if dir.join(name).exists() {
            durable::remove(&dir.join(name))?;
        }
    }
    durable::finish_replacement(&dir.join(FINAL))?;
    old_checkpoints::set_aside_newer(dir, step)?;
    log::drop_after(dir, step)?;
    tensorboard::remove(dir)?;
    durable::sweep(dir)
}

/// Refuses to resume with other data, or with other settings that change what a step computes.
///
/// # Errors
/// If something differs from the checkpoint's record.
pub fn check_unchanged(plan: &Plan, inputs: &Inputs, resumed: &Resumed, precision: Precision) -> Result<(), CliError> {
    let usage = |text: String| Err(CliError::Usage(text));
    let state = &resumed.state;
    let (steps, done, sha256) = (inputs.order(plan).steps, state.global_step, &inputs.sha256);
    if state.precision != precision.name() {
        let (old, new) = (&state.precision, precision.name());
        return usage(format!(
            "this device computes in {new}, but the checkpoint was made in {old}; give --compute-dtype {old}"
        ));
    }
    if state.inputs_sha256 != *sha256 {
        let text = "training data, config.json, tokenizer or chat template changed since the checkpoint; a resumed run \
                    must read the same files";
        return usage(text.into());
    }
    if let Some(Change { flag, before, now }) = plan.settings.absolute().changed_since(&state.settings.absolute()) {
        let now = now.map_or(format!("{flag} is not set"), |now| format!("{flag} is {now}"));
        let before = before.map_or(format!("without {flag}"), |before| format!("with {flag} {before}"));
        return usage(format!("{now}, but the checkpoint was made {before}; a resumed run cannot change it"));
    }
    // The epoch is a number of sequences divided by those of the data. Another number of these leaves a fraction.
    let sequences = state.epoch * inputs.train.len() as f64;
    if !plan.settings.data.synthetic && (sequences - sequences.round()).abs() > 1e-3 {
        report::line(
            "warning: this version chooses other rows for training and evaluation than the one that saved the checkpoint: rows \
             that were held out may be trained on. To keep them apart, start a new run from the checkpoint's weights",
        );
    }
    if done > steps {
        let longer = if plan.settings.optimizer.max_steps.is_some() { "--max-steps" } else { "--num-train-epochs" };
        return usage(format!(
            "the checkpoint has made {done} steps, and the run would have {steps}; give a larger {longer}"
        ));
    }
    if steps != state.max_steps && done < steps {
        check_new_length(plan, inputs, resumed, steps)?;
    }
    Ok(())
}

/// Says what changes in the next steps, because the run now has `steps` steps. Refuses this length if frozen blocks would have to
/// learn again: their master weights are gone.
fn check_new_length(plan: &Plan, inputs: &Inputs, resumed: &Resumed, steps: usize) -> Result<(), CliError> {
    let (done, before) = (resumed.state.global_step, resumed.state.max_steps);
    let blocks = inputs.config.num_hidden_layers;
    let dense = plan.settings.bf16_last_blocks(blocks);
    // Blocks that are not trained have nothing to learn.
    let untrained = plan.settings.model.last_trained().map_or(0, |last| blocks.saturating_sub(last));
    let frozen = |steps, step| {
        let finish = DampedFinish::new(plan.settings.recipe.damped_finish, steps, plan.quantize_from(steps));
        finish.frozen(step, blocks).min(blocks - dense).saturating_sub(untrained)
    };
    if done > 0 && frozen(before, done - 1) > frozen(steps, done) {
        let first = (0..done).find(|step| frozen(before, *step) > 0).unwrap_or_default();
        let older = match first {
            0 => String::new(),
            first => format!("resume a checkpoint of at most {}, or ", report::count(first, "step")),
        };
        return Err(CliError::Usage(format!(
            "the run would have {steps} steps instead of {before}, but by --damped-finish it has frozen {} already, which cannot \
             learn again; {older}start a new run from the weights: train-cli fit -m {}",
            report::count(frozen(before, done - 1), "block"),
            report::quoted(&resumed.folder.display().to_string())
        )));
    }
    let text = "the learning rate follows the schedule of the new length";
    report::line(format!("note: the run now has {steps} steps, {before} before; {text}"));
    let unquantized = plan.quantize_from(steps);
    if plan.quantize_from(before) < done && done < unquantized {
        report::line(format!(
            "note: by --quantize-from, the steps up to {unquantized} of the longer run train without quantization again"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::Lock;

    #[test]
    fn folders_that_nobody_named_get_numbers() {
        let dir = tempfile::tempdir().unwrap();
        let wanted = dir.path().join("runs/now_m");
        let (first, one) = Lock::of_new(&wanted).unwrap();
        let (mut second, two) = Lock::of_new(&wanted).unwrap();
        assert_eq!((&one, &two), (&wanted, &dir.path().join("runs/now_m-2")));
        // The folder of a run that does not begin goes, and its name is free again.
        second.begins();
        drop((first, second));
        assert!(!one.exists() && two.exists());
        let (_third, three) = Lock::of_new(&wanted).unwrap();
        assert_eq!(three, wanted);
        let (_fourth, four) = Lock::of_new(&wanted).unwrap();
        assert_eq!(four, dir.path().join("runs/now_m-3"));
    }
}
