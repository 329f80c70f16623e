//! The folder of a run: when a new run may take it, what a run that goes on must find unchanged, and one
//! process at a time in it.

use crate::{
    CliError,
    args::FitArgs,
    durable,
    plan::{self, FitPlan},
    run::checkpoint::{self, TrainerState},
    run::inputs::Inputs,
};
use backend_nvfp4::Precision;
use serde_json::json;
use std::{collections::HashSet, fs, path::PathBuf};

/// What a run writes into its folder; `--overwrite` removes these and nothing else.
const OURS: [&str; 8] = [
    "config.toml",
    "run.json",
    "data_report.json",
    "metrics.jsonl",
    "samples.jsonl",
    "train_results.json",
    "final",
    "lock",
];

fn is_ours(name: &str) -> bool {
    OURS.contains(&name) || ["checkpoint-", "stale-", ".tmp-"].iter().any(|p| name.starts_with(p))
}

/// Whether the run folder is free for a new run, or may be emptied for one.
pub(crate) fn check_free(plan: &FitPlan) -> Result<(), CliError> {
    let dir = &plan.output_dir;
    let Ok(entries) = fs::read_dir(dir) else { return Ok(()) };
    let names: Vec<String> =
        entries.filter_map(|e| e.ok().map(|e| e.file_name().to_string_lossy().into_owned())).collect();
    if names.is_empty() || plan.resume.is_some() {
        return Ok(());
    }
    if !plan.overwrite {
        let text = "is not empty: give another --output-dir, or --resume-from-checkpoint, or --overwrite";
        return Err(CliError::Usage(format!("{} {text}", dir.display())));
    }
    if let Some(name) = names.iter().find(|n| !is_ours(n)) {
        let text =
            format!("--overwrite: {} holds {name}, which is no part of a run; nothing was removed", dir.display());
        return Err(CliError::Usage(text));
    }
    let inside =
        |p: &&PathBuf| p.canonicalize().ok().zip(dir.canonicalize().ok()).is_some_and(|(p, d)| p.starts_with(d));
    if let Some(input) = plan.inputs.iter().find(inside) {
        let text = format!("--overwrite: {} is an input of this run; nothing was removed", input.display());
        return Err(CliError::Usage(text));
    }
    Ok(())
}

/// Opens the run folder for this process alone: a new one gets its first files, one that goes on loses
/// what lies behind step `resumed`.
pub(crate) fn open_folder(plan: &FitPlan, inputs: &Inputs, resumed: Option<usize>) -> Result<fs::File, CliError> {
    let dir = &plan.output_dir;
    durable::make_folder(dir)?;
    let lock = durable::lock(dir)?;
    if let Some(step) = resumed {
        durable::sweep(dir)?;
        checkpoint::set_aside_newer(dir, step)?;
        for name in ["metrics.jsonl", "samples.jsonl"] {
            drop_lines_behind(&dir.join(name), step)?;
        }
        return Ok(lock);
    }
    check_free(&FitPlan { overwrite: true, ..plan.clone() })?;
    for entry in fs::read_dir(dir).map_err(CliError::io(dir))? {
        let path = entry.map_err(CliError::io(dir))?.path();
        if path.file_name().is_some_and(|n| n != "lock") {
            durable::remove(&path)?;
        }
    }
    durable::write_bytes(&dir.join("config.toml"), toml_of(&plan.settings)?.as_bytes())?;
    let run = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "command": std::env::args().collect::<Vec<_>>(),
        "started": jiff::Timestamp::now().to_string(),
    });
    durable::write_bytes(&dir.join("run.json"), run.to_string().as_bytes())?;
    let found = serde_json::to_string_pretty(&inputs.report).expect("plain data serialises");
    durable::write_bytes(&dir.join("data_report.json"), found.as_bytes())?;
    Ok(lock)
}

/// A killed run logged steps that its checkpoint does not hold; they will be logged again.
fn drop_lines_behind(path: &std::path::Path, step: usize) -> Result<(), CliError> {
    let Ok(text) = fs::read_to_string(path) else { return Ok(()) };
    let kept = |line: &&str| {
        serde_json::from_str::<serde_json::Value>(line)
            .is_ok_and(|v| v["step"].as_u64().is_some_and(|s| s as usize <= step))
    };
    let text: String = text.lines().filter(kept).flat_map(|l| [l, "\n"]).collect();
    durable::write_bytes(path, text.as_bytes()).map(|_| ())
}

/// Refuses to go on with other data or other settings that change the numbers.
pub(crate) fn check_unchanged(
    plan: &FitPlan,
    state: &TrainerState,
    sha256: &str,
    precision: Precision,
) -> Result<(), CliError> {
    if state.precision != precision.name() {
        let (old, new) = (&state.precision, precision.name());
        return Err(CliError::Usage(format!(
            "this device computes in {new}, the checkpoint was made in {old}: --compute-dtype {old}"
        )));
    }
    if state.inputs_sha256 != sha256 {
        return Err(CliError::Usage(
            "training data, config.json, tokenizer or template changed since the checkpoint: a resumed run reads the same files".into(),
        ));
    }
    let free = [
        "output_dir",
        "output_dat",
        "eval_steps",
        "save_steps",
        "logging_steps",
        "save_total_limit",
        "sample_prompt",
        "vram_report",
        "memory_limit",
        "peak_tflops",
        "token_cache",
    ];
    let table = |s: &FitArgs| match serde_json::to_value(s) {
        Ok(serde_json::Value::Object(map)) => map,
        _ => unreachable!("settings are a table"),
    };
    // A checkpoint of an older version has no word of newer flags: they are what they were by default.
    let (old, new) = (table(&plan::defaults(state.settings.clone())), table(&plan.settings));
    let keys: HashSet<&String> = old.keys().chain(new.keys()).collect();
    for key in keys {
        if old.get(key) != new.get(key) && !free.contains(&key.as_str()) {
            let show = |v: Option<&serde_json::Value>| v.map_or("unset".into(), ToString::to_string);
            return Err(CliError::Usage(format!(
                "--{} is {}, the checkpoint was made with {}: a resumed run keeps it",
                key.replace('_', "-"),
                show(new.get(key)),
                show(old.get(key))
            )));
        }
    }
    Ok(())
}

/// Settings as config.toml holds them.
pub(crate) fn toml_of(settings: &FitArgs) -> Result<String, CliError> {
    toml::to_string(settings).map_err(|e| CliError::Usage(format!("settings: {e}")))
}
