//! `eval needle`: hides a number in long texts and asks a model for it. It prints how often the model finds it, for each length
//! and each depth. With `--write-rows` it writes such texts as training rows instead, so that a model can learn to copy.

use super::flags;
use crate::{
    CliError,
    args::NeedleArgs,
    data::haystack::{Haystack, Series},
    device::{self, Job},
    durable,
    model_files::TextFiles,
    outputs::check_new_output,
    report,
    run::stored_model::StoredModel,
    settings::extensions,
    talk::{
        first_answers::Expected,
        loaded::{Loaded, Opened},
    },
};
use backend_nvfp4::{DeviceMemory, DeviceServices, Nvfp4Kernels, Precision};
use model_qwen3::{
    sampling::Sampling,
    session::{GenerateOptions, Session},
};
use serde_json::json;
use std::{ops::ControlFlow, path::Path, time::Instant};

/// Tokens of an answer besides those of the number: a model may put words around it.
const WORDS: usize = 24;

/// Runs the command.
///
/// # Errors
/// If a flag is out of range, or the model cannot be read or run.
pub(super) fn run(args: NeedleArgs) -> Result<(), CliError> {
    for (flag, value) in [("--depths", args.depths), ("--tries", args.tries), ("--digits", args.digits)] {
        if value == 0 {
            return Err(CliError::Usage(format!("{flag} 0: the value must be at least 1")));
        }
    }
    if args.digits > 10 {
        return Err(CliError::Usage(format!(
            "--digits {}: all digits of a number are different; give at most 10",
            args.digits
        )));
    }
    match &args.write_rows {
        Some(_) if args.json => {
            Err(CliError::Usage("--json says what a model found, and --write-rows asks none; leave one out".into()))
        }
        Some(path) => write_rows(&args, path),
        None => {
            let (device, precision) = (args.model.device, args.model.compute_dtype);
            device::run(device, precision, Needle(args))
        }
    }
}

impl NeedleArgs {
    /// How deep the needle lies in each of the texts: from 0 to 1, or in the middle if there is only one depth.
    fn depth(&self, i: usize) -> f64 {
        if self.depths == 1 { 0.5 } else { i as f64 / (self.depths - 1) as f64 }
    }

    /// The depths and the attempts at each of them.
    fn attempts(&self) -> impl Iterator<Item = (usize, usize)> {
        (0..self.depths).flat_map(move |depth| (0..self.tries).map(move |attempt| (depth, attempt)))
    }

    fn series(&self) -> Series {
        Series { seed: self.seed, digits: self.digits }
    }

    /// The number of a text in the series. Lengths, depths and attempts are counted from 0.
    fn number(&self, length: usize, depth: usize, attempt: usize) -> u32 {
        ((length * self.depths + depth) * self.tries + attempt) as u32
    }

    /// The text of an attempt.
    fn haystack(&self, text: &TextFiles, length: usize, depth: usize, attempt: usize) -> Result<Haystack, CliError> {
        self.series().haystack(text, self.number(length, depth, attempt), self.lengths[length], self.depth(depth))
    }

    /// Refuses lengths that the model does not take, or that have no room for the needle of one of their texts.
    fn check(&self, limit: usize, text: &TextFiles) -> Result<(), CliError> {
        if let Some(length) = self.lengths.iter().find(|length| **length > limit) {
            let text = format!("the model takes at most {limit} tokens; give --lengths up to {limit}");
            return Err(CliError::Usage(format!("--lengths {length}: {text}")));
        }
        for (l, length) in self.lengths.iter().enumerate() {
            for (depth, attempt) in self.attempts() {
                self.series().check(text, self.number(l, depth, attempt), *length)?;
            }
        }
        Ok(())
    }
}

/// Writes the texts as training rows.
fn write_rows(args: &NeedleArgs, path: &Path) -> Result<(), CliError> {
    if !extensions::is_jsonl(path) {
        return Err(CliError::Usage(format!("--write-rows {}: the name must end in .jsonl", path.display())));
    }
    let stored = StoredModel::open("--model", &args.model.model, args.model.tokenizer.as_deref())?;
    check_new_output("--write-rows", path, &stored.files.weight_files())?;
    args.check(stored.config.max_position_embeddings, &stored.text)?;
    let mut rows = 0;
    durable::write_file(path, |out| {
        for length in 0..args.lengths.len() {
            for (depth, attempt) in args.attempts() {
                let haystack = args.haystack(&stored.text, length, depth, attempt)?;
                out.write_all(format!("{}\n", haystack.row()).as_bytes()).map_err(CliError::io(path))?;
                rows += 1;
            }
        }
        Ok(())
    })?;
    report::result(format!("{} · {}", path.display(), report::count(rows, "row")));
    Ok(())
}

struct Needle(NeedleArgs);

impl Job for Needle {
    type Output = ();

    fn remedy(&self) -> &'static str {
        "give smaller --lengths"
    }

    fn run<B: Nvfp4Kernels + DeviceServices>(self, device: B::Device, precision: Precision) -> Result<(), CliError> {
        let args = self.0;
        let mut opened = Opened::new(flags::wanted(&args.model, args.cache.kv_cache_dtype.format(precision)?))?;
        args.check(opened.config().max_position_embeddings, opened.text())?;
        let loaded = opened.load::<B>(Some(Expected::unknown(1)), precision, &device)?;
        for (l, length) in args.lengths.iter().enumerate() {
            let started = Instant::now();
            let mut found = Vec::new();
            for depth in 0..args.depths {
                let mut hits = 0;
                for attempt in 0..args.tries {
                    let haystack = args.haystack(&loaded.text, l, depth, attempt)?;
                    hits += usize::from(finds(&loaded, &haystack)?);
                }
                found.push(hits);
            }
            print(&args, *length, &found, started.elapsed().as_secs_f64());
        }
        Ok(())
    }
}

/// Whether the model's answer holds the number.
fn finds<B: Nvfp4Kernels + DeviceMemory>(loaded: &Loaded<B>, haystack: &Haystack) -> Result<bool, CliError> {
    let Loaded { model, text, .. } = loaded;
    let room = model.config().max_position_embeddings - haystack.prompt.len();
    let max_tokens = (text.tokenizer.encode(&haystack.answer)?.len() + WORDS).min(room);
    let options =
        GenerateOptions { max_tokens, sampling: Sampling::GREEDY, stop_ids: text.stop_ids.clone(), logprobs: None };
    let mut session = Session::new(model, haystack.prompt.len() + max_tokens)?;
    let answer = session.answer(&haystack.prompt, &options, |_| ControlFlow::Continue(()))?;
    Ok(text.tokenizer.decode(&answer.ids)?.contains(&haystack.answer))
}

/// Prints how often the number was found in texts of a length, at each depth and at all of them.
fn print(args: &NeedleArgs, length: usize, found: &[usize], seconds: f64) {
    let (all, tries) = (found.iter().sum::<usize>(), found.len() * args.tries);
    let share = all as f64 / tries as f64;
    if args.json {
        let depths: Vec<_> =
            (0..found.len()).map(|i| json!({"depth": args.depth(i), "found": found[i], "tries": args.tries})).collect();
        let row = json!({
            "length": length, "found": all, "tries": tries, "share": share, "depths": depths, "seconds": seconds,
        });
        return report::result(row.to_string());
    }
    let depths: Vec<String> =
        (0..found.len()).map(|i| format!("{:.0}%: {}/{}", args.depth(i) * 100.0, found[i], args.tries)).collect();
    report::result(format!(
        "{length:>7} tokens  found {all} of {tries} ({:.1}%) · at depth {} · {seconds:.1} s",
        share * 100.0,
        depths.join(", ")
    ));
}
