//! `generate`: a prompt to an answer, streamed.

use crate::{
    CliError,
    args::GenerateArgs,
    device::{self, Job},
    model_files::{ModelFiles, TextFiles},
    report,
};
use backend_nvfp4::{DeviceServices, LinearSpec, Nvfp4Kernels, Precision, Recipe, Scaling};
use model_qwen3::{
    chat_template::RenderOptions,
    checkpoint::{Stored, Tensors},
    config::Qwen3Config,
    generate::{GenerateOptions, StopReason, generate},
    model::Qwen3,
    sample::Sampling,
    tokenizer::TextStream,
    weights::{self, Purpose},
};
use serde_json::json;
use std::{io::Read, ops::ControlFlow, time::Instant};

/// Runs the command.
///
/// # Errors
/// If the model cannot be loaded or run.
pub fn run(args: GenerateArgs) -> Result<(), CliError> {
    if args.temperature.is_some_and(|t| !(0.0..=100.0).contains(&t)) {
        return Err(CliError::Usage("--temperature: between 0 and 100".into()));
    }
    for (flag, p) in [("top-p", args.top_p), ("min-p", Some(args.min_p))] {
        if p.is_some_and(|p| !(0.0..=1.0).contains(&p)) {
            return Err(CliError::Usage(format!("--{flag}: between 0 and 1")));
        }
    }
    if args.repetition_penalty.is_some_and(|p| !(0.01..=100.0).contains(&p)) {
        return Err(CliError::Usage("--repetition-penalty: between 0.01 and 100".into()));
    }
    device::run(args.device, args.compute_dtype, Generate(args))
}

struct Generate(GenerateArgs);

impl Job for Generate {
    type Output = ();

    fn run<B: Nvfp4Kernels + DeviceServices>(self, device: B::Device, precision: Precision) -> Result<(), CliError> {
        let args = self.0;
        let files = ModelFiles::new(&args.model);
        let config = Qwen3Config::from_file(&files.config_file(args.tokenizer.as_deref()))?;
        let text = TextFiles::open(args.tokenizer.as_ref().unwrap_or(&files.folder), &config)?;
        let checkpoint = files.checkpoint()?;
        let packed = checkpoint.names().iter().any(|n| matches!(checkpoint.stored(n), Some(Stored::Packed { .. })));
        report::label("weights", if packed { "nvfp4" } else { "dense" });
        if args.w4a4 && !packed {
            return Err(CliError::Usage("--w4a4: the model has no NVFP4 weights".into()));
        }
        let recipe = if args.w4a4 { Recipe::W4a4 } else { Recipe::W4 };
        let spec = LinearSpec::new(recipe, Scaling::Two, precision);
        let model: Qwen3<B> = weights::load(&checkpoint, &config, spec, Purpose::Infer, &device)?;

        let asked = prompt_text(&args)?;
        let prompt = prompt_ids(&asked, &args, &text)?;
        let g = &text.generation;
        let sampling = Sampling {
            temperature: args.temperature.or(g.temperature).unwrap_or(0.0),
            top_k: args.top_k.or(g.top_k).unwrap_or(0),
            top_p: args.top_p.or(g.top_p).unwrap_or(1.0),
            min_p: args.min_p,
            repetition_penalty: args.repetition_penalty.or(g.repetition_penalty).unwrap_or(1.0),
            seed: args.seed,
        };
        let options = GenerateOptions { max_tokens: args.max_tokens, sampling, stop_ids: text.stop_ids.clone() };
        let (mut stream, mut answer, mut failed) = (TextStream::default(), String::new(), None);
        let mut first_token = None;
        let started = Instant::now();
        let generation = generate(&model, &prompt, &options, |id| {
            first_token.get_or_insert_with(|| started.elapsed().as_secs_f64());
            match stream.push(id, &text.tokenizer) {
                Ok(piece) => {
                    if !args.json {
                        report::stream(&piece);
                    }
                    answer += &piece;
                    ControlFlow::Continue(())
                }
                Err(e) => {
                    failed = Some(e);
                    ControlFlow::Break(())
                }
            }
        })?;
        if let Some(error) = failed {
            return Err(error.into());
        }
        let rest = stream.finish(&text.tokenizer)?;
        answer += &rest;
        let total = started.elapsed().as_secs_f64();
        let prefill = first_token.unwrap_or(total);
        let decoded = generation.ids.len().saturating_sub(1) as f64;
        let rate = if total > prefill { decoded / (total - prefill) } else { 0.0 };
        let stop = match generation.stop {
            StopReason::StopToken(_) => "stop",
            StopReason::MaxTokens => "length",
            StopReason::Caller => "error",
        };
        if args.json {
            report::result(
                json!({
                    "prompt": asked, "text": answer, "ids": generation.ids, "stop": stop,
                    "prompt_tokens": prompt.len(), "tokens": generation.ids.len(),
                    "seconds_to_first_token": prefill, "tokens_per_second": rate,
                })
                .to_string(),
            );
        } else {
            report::stream(&format!("{rest}\n"));
            report::line(format!(
                "{} prompt + {} answer tokens · first after {prefill:.2} s · {rate:.1} tokens/s · {stop}",
                prompt.len(),
                generation.ids.len()
            ));
        }
        Ok(())
    }
}

fn prompt_text(args: &GenerateArgs) -> Result<String, CliError> {
    if args.prompt != "-" {
        return Ok(args.prompt.clone());
    }
    let mut prompt = String::new();
    let read = std::io::stdin().read_to_string(&mut prompt);
    read.map_err(|e| CliError::Usage(format!("--prompt -: {e}")))?;
    Ok(prompt.trim_start_matches('\u{FEFF}').trim_end_matches(['\r', '\n']).to_owned())
}

fn prompt_ids(prompt: &str, args: &GenerateArgs, text: &TextFiles) -> Result<Vec<u32>, CliError> {
    if args.raw {
        return Ok(text.tokenizer.encode(prompt)?);
    }
    let mut messages = Vec::new();
    if let Some(system) = &args.system_prompt {
        messages.push(json!({"role": "system", "content": system}));
    }
    messages.push(json!({"role": "user", "content": prompt}));
    let options = RenderOptions { add_generation_prompt: true, enable_thinking: args.thinking, ..Default::default() };
    Ok(text.tokenizer.encode(&text.template.render(&messages, options)?)?)
}
