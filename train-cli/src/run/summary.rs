//! What the files of a run folder say about a run, in words, in a table and as a curve. A run writes it into its folder when
//! it ends, also with an error or after a signal: `summary.md` and `loss.svg`. `runs` shows and compares the summaries of
//! several runs.

use super::{
    checkpoint::{self, CONFIG, FINAL},
    evaluations::Evaluations,
    folder::{DATA_REPORT, LOSS, SUMMARY},
    history::{Call, History},
    log::{self, EvaluationFigures, LeftOut, Logged, SampleAnswer, StepFigures},
    losses::Losses,
    page::{Content, Page, Section},
    plot::{self, Curve},
    record_file,
    results::Results,
};
use crate::{
    CliError, durable, report,
    settings::{Settings, defaults::quantized_from},
    table::Table,
    toml_text,
};
use model_qwen3::file;
use serde_json::{Map, Value, json};
use std::{
    io::ErrorKind,
    path::{Path, PathBuf},
};

/// Most bytes of a small file of a run that is read. `data_report.json` lists every line of the data that was left out.
const LONGEST: u64 = 1 << 30;

/// A run, as its files tell it.
#[derive(Debug, Clone)]
pub struct Summary {
    /// The run folder.
    pub folder: PathBuf,
    /// The settings of the run by name, without those that are not given.
    pub settings: Map<String, Value>,
    /// How it was made.
    history: Option<History>,
    /// Rows and tokens of its data.
    data: Value,
    steps: Vec<StepFigures>,
    evaluations: Vec<EvaluationFigures>,
    left_out: Vec<LeftOut>,
    /// The last answer to each prompt.
    samples: Vec<SampleAnswer>,
    /// The steps of the checkpoints that are there, in order.
    checkpoints: Vec<usize>,
    /// The totals of a complete run.
    results: Option<Results>,
    /// Files of the export: name, bytes, SHA-256.
    exported: Vec<(String, u64, String)>,
}

impl Summary {
    /// Reads a run folder.
    ///
    /// # Errors
    /// If it is no run folder, or a file cannot be read.
    pub fn read(run: &Path) -> Result<Self, CliError> {
        let config = run.join(CONFIG);
        let none = |reason: &str| Err(CliError::Usage(format!("{} is no run folder: {reason}", run.display())));
        match config.try_exists() {
            Ok(true) => {}
            Err(error) if error.kind() != ErrorKind::NotADirectory => return Err(CliError::io(&config)(error)),
            Ok(false) | Err(_) => return none("it has no config.toml"),
        }
        let text = file::read_text(&config, LONGEST, "")?;
        let settings: Value = toml_text::parse(&text).map_err(|e| CliError::corrupt(&config, e))?;
        let history = History::read(run)?;
        // Other programs have a file of this name, too. A run of an older version has no run.json.
        if history.is_none() && settings.get("recipe").is_none() {
            return none("no run has written its config.toml");
        }
        let (mut steps, mut evaluations, mut left_out) = (vec![], vec![], vec![]);
        for line in log::lines(run, log::METRICS)? {
            match line {
                Logged::Step(line) => steps.push(line),
                Logged::Evaluation(line) => evaluations.push(line),
                Logged::LeftOut(line) => left_out.push(line),
            }
        }
        let mut samples: Vec<SampleAnswer> = log::lines(run, log::SAMPLES)?;
        let last = samples.last().map(|answer| answer.step);
        samples.retain(|answer| Some(answer.step) == last);
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let files = record_file::read(&run.join(FINAL).join(durable::MANIFEST), LONGEST)?
            .map(|manifest: Value| manifest["files"].clone());
        let exported = files.iter().filter_map(Value::as_object).flatten();
        Ok(Self {
            folder: run.to_owned(),
            settings: settings.as_object().cloned().unwrap_or_default(),
            history,
            data: record_file::read(&run.join(DATA_REPORT), LONGEST)?.unwrap_or_default(),
            steps,
            evaluations,
            left_out,
            samples,
            checkpoints: checkpoint::list(run)?.into_iter().rev().map(|(step, _)| step).collect(),
            results: Results::read(run)?,
            exported: exported
                .map(|(name, file)| (name.clone(), file["bytes"].as_u64().unwrap_or(0), text(&file["sha256"])))
                .collect(),
        })
    }

    /// A name for each of some runs: that of its folder, or if several folders have the same, its path.
    pub fn names(runs: &[Self]) -> Vec<String> {
        let names: Vec<String> = runs.iter().map(Self::name).collect();
        let is_alone = |name: &String| names.iter().filter(|other| *other == name).count() == 1;
        let path = |run: &Self| run.folder.display().to_string();
        runs.iter().zip(&names).map(|(run, name)| if is_alone(name) { name.clone() } else { path(run) }).collect()
    }

    /// The run's name: that of its folder.
    pub fn name(&self) -> String {
        let path = self.folder.canonicalize().unwrap_or_else(|_| self.folder.clone());
        path.file_name().map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into_owned())
    }

    /// The figures of the run, with their names.
    pub fn figures(&self) -> Vec<(&'static str, String)> {
        let memory = self.memory();
        let seconds = self.results.as_ref().map(|results| results.train_runtime);
        let (lowest, last) = (self.lowest(), self.evaluations.last());
        let mut figures = vec![
            ("state", self.state()),
            ("loss of the first step", shown(self.steps.first().map(|line| line.loss))),
            ("loss of the last step", shown(self.steps.last().map(|line| line.loss))),
            ("evaluation loss", shown(last.map(|line| line.eval_loss))),
            ("evaluation loss, weights in 4 bits", shown(last.and_then(|line| line.eval_loss_quantized))),
            ("evaluation loss, master weights", shown(last.and_then(|line| line.eval_loss_master))),
            (
                "lowest evaluation loss",
                lowest.map_or("–".to_owned(), |(step, loss)| format!("{loss:.4} after step {step}")),
            ),
            ("tokens/s, median", self.median_speed().map_or("–".to_owned(), |speed| format!("{speed:.0}"))),
            ("memory, largest", memory.last().map_or("–".to_owned(), |mib| format!("{mib:.0} MiB"))),
            ("time of the training", seconds.map_or("–".to_owned(), report::duration)),
        ];
        if !self.checkpoints.is_empty() {
            figures.push(("checkpoints", self.checkpoints()));
        }
        if let Some(step) = self.results.as_ref().and_then(|results| results.exported_step) {
            figures.push(("exported", format!("step {step}")));
        }
        if !self.left_out.is_empty() {
            figures.push(("steps that were left out", self.left_out.len().to_string()));
        }
        let warnings = Losses::of_steps(&self.steps).warnings().len();
        if warnings > 0 {
            figures.push(("warnings about the loss", warnings.to_string()));
        }
        figures
    }

    /// The figures of the run as numbers, by their names in its files. What there is not is null.
    pub fn numbers(&self) -> Map<String, Value> {
        let (last, lowest, results) = (self.evaluations.last(), self.lowest(), self.results.as_ref());
        let numbers = json!({
            "run": self.name(),
            "folder": self.folder.display().to_string(),
            "started": self.first().map(|call| &call.started),
            "complete": results.is_some(),
            "steps": self.made(),
            "planned_steps": self.history.as_ref().and_then(|history| history.steps),
            "ended_by": self.history.as_ref().and_then(|history| history.ended.as_ref()),
            "first_loss": self.steps.first().map(|line| line.loss),
            "loss": self.steps.last().map(|line| line.loss),
            "eval_loss": last.map(|line| line.eval_loss),
            "eval_loss_quantized": last.and_then(|line| line.eval_loss_quantized),
            "eval_loss_master": last.and_then(|line| line.eval_loss_master),
            "lowest_eval_loss": lowest.map(|(_, loss)| loss),
            "lowest_eval_step": lowest.map(|(step, _)| step),
            "tokens_per_second": self.median_speed(),
            "memory_mib": self.memory().last(),
            "train_runtime": results.map(|results| results.train_runtime),
            "checkpoints": self.checkpoints,
            "exported_step": results.and_then(|results| results.exported_step),
            "steps_left_out": self.left_out.len(),
        });
        numbers.as_object().cloned().unwrap_or_default()
    }

    /// Everything that the summary shows, as one JSON object.
    pub fn json(&self) -> Value {
        let mut all = self.numbers();
        let pairs =
            self.samples.iter().map(|SampleAnswer { prompt, answer, .. }| json!({"prompt": prompt, "answer": answer}));
        let calls = self.history.iter().flat_map(History::calls);
        let calls = calls.map(|call| json!({"started": call.started, "after": call.after, "command": call.line()}));
        let files = self.exported.iter();
        let files = files.map(|(file, bytes, sha256)| json!({"file": file, "bytes": bytes, "sha256": sha256}));
        all.extend([
            ("command".to_owned(), json!(self.first().map(Call::line))),
            ("commands".to_owned(), calls.collect::<Vec<_>>().into()),
            ("settings".to_owned(), self.settings.clone().into()),
            ("data".to_owned(), self.data.clone()),
            ("evaluations".to_owned(), json!(self.evaluations)),
            ("samples".to_owned(), pairs.collect::<Vec<_>>().into()),
            ("left_out".to_owned(), json!(self.left_out)),
            ("exported".to_owned(), files.collect::<Vec<_>>().into()),
        ]);
        all.into()
    }

    /// The memory of the steps: their peaks if these are known, else what was held after each.
    fn memory(&self) -> Vec<f64> {
        let peaks = self.sorted(|step| step.peak_memory_mib.map(|mib| mib as f64));
        if peaks.is_empty() { self.sorted(|step| step.memory_mib.map(|mib| mib as f64)) } else { peaks }
    }

    /// The median of the steps' tokens in a second.
    fn median_speed(&self) -> Option<f64> {
        median(&self.sorted(|step| step.tokens_per_second))
    }

    /// A figure of all steps, from the smallest to the largest.
    fn sorted(&self, figure: impl Fn(&StepFigures) -> Option<f64>) -> Vec<f64> {
        let mut all: Vec<f64> = self.steps.iter().filter_map(figure).collect();
        all.sort_by(f64::total_cmp);
        all
    }

    /// The number of steps that are made. The last one may have been left out.
    fn made(&self) -> usize {
        let steps = self.steps.iter().map(|line| line.step);
        let last = || steps.chain(self.left_out.iter().map(|line| line.step)).max().unwrap_or(0);
        self.results.as_ref().map_or_else(last, |results| results.global_step)
    }

    /// Whether the run is complete, how many steps it has made, and why it ended if that was early.
    fn state(&self) -> String {
        let made = self.made();
        let planned = self.history.as_ref().and_then(|history| history.steps).filter(|planned| *planned > made);
        let steps = match planned {
            Some(planned) => format!("{made} of {}", report::count(planned, "step")),
            None => report::count(made, "step"),
        };
        let complete = if self.results.is_some() { "complete" } else { "not complete" };
        match self.history.as_ref().and_then(|history| history.ended.as_ref()) {
            Some(reason) => format!("{complete}, {steps}; {reason}"),
            None => format!("{complete}, {steps}"),
        }
    }

    /// The command line that started the run.
    fn first(&self) -> Option<&Call> {
        self.history.as_ref().map(|history| &history.first)
    }

    /// The lowest evaluation loss by which the run would choose a step, and that step.
    fn lowest(&self) -> Option<(usize, f64)> {
        let share = self.settings.get("quantize_from").and_then(Value::as_f64).unwrap_or(0.0);
        let steps = self.history.as_ref().and_then(|history| history.steps).unwrap_or_else(|| self.made());
        let best = Evaluations::of(&self.evaluations, quantized_from(share, steps)).best();
        best.map(|(step, loss)| (step, f64::from(loss)))
    }

    /// The steps of the checkpoints, with a mark at the newest and at the best one.
    fn checkpoints(&self) -> String {
        let marked = |step: &usize| {
            let best = self.lowest().is_some_and(|(lowest, _)| lowest == *step);
            let marks = [(self.checkpoints.last() == Some(step), "newest"), (best, "lowest evaluation loss")];
            let marks: Vec<&str> = marks.into_iter().filter(|(is, _)| *is).map(|(_, mark)| mark).collect();
            if marks.is_empty() { format!("step {step}") } else { format!("step {step} ({})", marks.join(", ")) }
        };
        self.checkpoints.iter().map(marked).collect::<Vec<_>>().join(", ")
    }

    /// When the run was started, as its folder records it.
    pub fn started(&self) -> &str {
        self.first().map_or("–", Call::time)
    }

    /// A setting, as a person would write it.
    pub fn setting(&self, key: &str) -> String {
        match self.settings.get(key) {
            None => "–".to_owned(),
            Some(Value::String(text)) => text.clone(),
            Some(Value::Array(all)) => {
                let all = all.iter().map(|one| one.as_str().map_or_else(|| one.to_string(), str::to_owned));
                all.collect::<Vec<_>>().join(", ")
            }
            Some(other) => other.to_string(),
        }
    }

    /// The losses of the steps and of the evaluations.
    pub fn curves(&self) -> [Curve; 2] {
        let training = self.steps.iter().map(|line| (line.step as f64, line.loss)).collect();
        let evaluation = self.evaluations.iter().map(|line| (line.step as f64, line.eval_loss)).collect();
        [
            Curve { name: "training".into(), points: training, marked: false },
            Curve { name: "evaluation".into(), points: evaluation, marked: true },
        ]
    }

    /// The summary as a page.
    pub fn page(&self) -> Page {
        let plain = |content| Section { heading: None, content };
        let headed = |heading, content| Section { heading: Some(heading), content };
        let mut sections = Vec::new();
        for (i, call) in self.history.iter().flat_map(History::calls).enumerate() {
            let begins = match (i, call.after) {
                (0, 0) => format!("Started {} (UTC):", call.time()),
                (_, 0) => format!("Started again {}:", call.time()),
                (_, step) => format!("Resumed {}, after step {step}:", call.time()),
            };
            sections.push(plain(Content::Text(begins)));
            sections.push(plain(Content::Command(call.line())));
        }
        let figures = self.figures().into_iter().map(|(name, value)| vec![name.to_owned(), value]);
        sections.push(plain(Content::Table(Table::new(&["", ""], figures))));
        sections.push(plain(Content::Picture("losses", self.folder.join(LOSS))));
        sections.push(headed("Data", Content::Text(self.data())));
        sections.push(headed("Evaluations", Content::Table(self.evaluations_table())));
        if !self.samples.is_empty() {
            let rows = self.samples.iter().map(|line| vec![line.prompt.clone(), line.answer.clone()]);
            sections.push(headed("Last answers", Content::Table(Table::new(&["prompt", "answer"], rows))));
        }
        if !self.left_out.is_empty() {
            let row = |line: &LeftOut| vec![line.step.to_string(), line.left_out.clone(), line.rows.join(", ")];
            let table = Table::new(&["step", "reason", "rows"], self.left_out.iter().map(row));
            sections.push(headed("Steps that were left out", Content::Table(table.with_numbers(&[0]))));
        }
        let losses = Losses::of_steps(&self.steps);
        if !losses.warnings().is_empty() {
            sections.push(headed("Warnings about the loss", Content::List(losses.warnings().to_vec())));
        }
        if !self.exported.is_empty() {
            let row =
                |(name, bytes, sha256): &(String, u64, String)| vec![name.clone(), bytes.to_string(), sha256.clone()];
            let table = Table::new(&["file", "bytes", "SHA-256"], self.exported.iter().map(row));
            sections.push(headed("Exported files", Content::Table(table.with_numbers(&[1]))));
        }
        let defaults = Settings::default().table();
        let changed = self.settings.keys().filter(|key| defaults.get(*key) != self.settings.get(*key));
        let changed = changed.map(|key| vec![key.clone(), self.setting(key)]);
        let table = Table::new(&["setting", "value"], changed);
        sections.push(headed("Settings that are not the defaults", Content::Table(table)));
        Page { title: self.name(), sections }
    }

    /// Rows and tokens of the data.
    fn data(&self) -> String {
        let count = |key: &str| self.data[key].as_u64();
        let shown = |key: &str| count(key).map_or("–".to_owned(), |n| n.to_string());
        let rows = |n: u64| report::count(n as usize, "row");
        let read = count("rows").map_or("– rows".to_owned(), rows);
        let left_out = count("left_out").filter(|n| *n > 0);
        let left_out = left_out.map_or_else(String::new, |n| format!(", {} left out by --max-rows", rows(n)));
        let lost =
            [(self.data["dropped"].as_array().map(|rows| rows.len() as u64), "dropped"), (count("truncated"), "cut")];
        let lost = lost.into_iter().filter_map(|(n, what)| Some(format!(", {} {what}", rows(n.filter(|n| *n > 0)?))));
        let left_out = left_out + &lost.collect::<String>();
        let (tokens, counted) = (shown("tokens"), shown("supervised_tokens"));
        format!("{read}{left_out}, {tokens} tokens, of which the loss counts {counted}.")
    }

    fn evaluations_table(&self) -> Table {
        let rows = self.evaluations.iter().map(|line| {
            let losses = [Some(line.eval_loss), line.eval_loss_quantized, line.eval_loss_master];
            std::iter::once(line.step.to_string()).chain(losses.map(shown)).collect()
        });
        let heads = ["step", "as in training", "weights in 4 bits", "master weights"];
        Table::new(&heads, rows).with_numbers(&[0, 1, 2, 3])
    }
}

/// Writes the summary and the curve of a run into its folder.
///
/// # Errors
/// If a file of the run cannot be read, or they cannot be written.
pub fn write(run: &Path) -> Result<(), CliError> {
    let summary = Summary::read(run)?;
    durable::write_bytes(&run.join(LOSS), plot::svg("loss", &summary.curves()).as_bytes())?;
    durable::write_bytes(&run.join(SUMMARY), summary.page().markdown().as_bytes()).map(|_| ())
}

/// A loss, if there is one.
fn shown(loss: Option<f64>) -> String {
    loss.map_or("–".to_owned(), |loss| format!("{loss:.4}"))
}

/// The median of values in order: of an even number of them, the mean of the two in the middle.
fn median(sorted: &[f64]) -> Option<f64> {
    let (below, above) = (sorted.get(sorted.len().saturating_sub(1) / 2)?, sorted.get(sorted.len() / 2)?);
    Some(f64::midpoint(*below, *above))
}

#[cfg(test)]
mod tests {
    use super::median;

    #[test]
    fn a_median_lies_in_the_middle() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0]), Some(3.0));
        assert_eq!(median(&[1.0, 4.0]), Some(2.5));
        assert_eq!(median(&[1.0, 2.0, 9.0]), Some(2.0));
        assert_eq!(median(&[1.0, 2.0, 3.0, 9.0]), Some(2.5));
    }
}
