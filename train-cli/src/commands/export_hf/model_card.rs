//! The model card of an export: what the folder is, how its model was trained, and the figures of the step that is exported.

use super::origin::ExportOrigin;
use crate::{
    CliError,
    model_files::ModelFiles,
    report,
    run::{evaluations::Evaluations, trained::WITHOUT_THOUGHTS},
};
use std::path::Path;

/// The model card. `what` says which numbers the folder holds, and `thinking` whether the training rows have thoughts.
///
/// # Errors
/// If the log of the run cannot be read.
pub(super) fn of_model(
    files: &ModelFiles,
    what: &str,
    origin: &ExportOrigin,
    thinking: Option<bool>,
) -> Result<String, CliError> {
    let name = origin.run.as_deref().and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned());
    let name = name.unwrap_or_else(|| files.name());
    let mut card = format!(
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n# {name}\n\nA Qwen3 model. {what}\n"
    );
    if let Some(settings) = &origin.settings {
        let trained = match settings.model.last_trained() {
            None => "All parameters".to_owned(),
            Some(count) => format!("The last {} and the final norm", report::count(count, "block")),
        };
        let steps = origin.step.map_or_else(String::new, |steps| format!(", {}", report::count(steps, "step")));
        card += &format!(
            "\n## Training\n{trained} were trained with train-cli {}: recipe {}{steps}.\n",
            env!("CARGO_PKG_VERSION"),
            settings.recipe.resolved().name(),
        );
    }
    if thinking == Some(false) {
        card += &format!("\nNote: {WITHOUT_THOUGHTS}.\n");
    }
    let figures = figures(origin)?;
    if !figures.is_empty() {
        card += "\n| result | value |\n|---|---|\n";
        figures.iter().for_each(|(key, value)| card += &format!("| {key} | {value} |\n"));
    }
    Ok(card)
}

/// The figures of the step whose model is exported, by the names of Hugging Face's Trainer. Those of the whole run are left out if
/// it made further steps.
fn figures(origin: &ExportOrigin) -> Result<Vec<(&'static str, String)>, CliError> {
    let (Some(run), Some(step)) = (&origin.run, origin.step) else { return Ok(vec![]) };
    let mut figures = vec![("global_step", step.to_string())];
    let loss = Evaluations::logged(run, 0)?.after(step);
    figures.extend(loss.map(|loss| ("eval_loss", format!("{loss:.4}"))));
    if let Some(results) = origin.results.as_ref().filter(|results| results.global_step == step) {
        figures.extend([
            ("epoch", format!("{:.2}", results.epoch)),
            ("train_runtime", format!("{:.1} s", results.train_runtime)),
            ("train_samples", format!("{:.0}", results.train_samples)),
            ("train_samples_per_second", format!("{:.2}", results.train_samples_per_second)),
            ("train_steps_per_second", format!("{:.2}", results.train_steps_per_second)),
            ("steps_left_out", results.steps_left_out.to_string()),
        ]);
        figures.extend(results.codes_changed_pct.map(|share| ("codes_changed_pct", format!("{share:.2} %"))));
    }
    Ok(figures)
}
