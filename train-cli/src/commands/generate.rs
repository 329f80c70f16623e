//! `generate`: answers a prompt with text that streams to standard output.

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
    config::Qwen3Config,
    generate::{GenerateOptions, Generation, StopReason, generate},
    model::Qwen3,
    sample::Sampling,
    tensors::{Stored, Tensors},
    tokenizer::TextStream,
    weights::{self, Purpose},
};
use serde_json::json;
use std::{io::Read, ops::ControlFlow, time::Instant};

/// Runs the command.
///
/// # Errors
/// If a flag is out of range, or the model cannot be loaded or run.
pub fn run(args: GenerateArgs) -> Result<(), CliError> {
    let ranges = [
        ("temperature", args.temperature, 0.0, 100.0),
        ("top-p", args.top_p, 0.0, 1.0),
        ("min-p", Some(args.min_p), 0.0, 1.0),
        ("repetition-penalty", args.repetition_penalty, 0.01, 100.0),
    ];
    for (flag, value, low, high) in ranges {
        if let Some(value) = value.filter(|value| !(low..=high).contains(value)) {
            return Err(CliError::Usage(format!("--{flag} {value}: the value must be between {low} and {high}")));
        }
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
        let model: Qwen3<B> = load(&files, &config, args.w4a4, precision, &device)?;

        let question = prompt_text(&args)?;
        let prompt = prompt_ids(&question, &args, &text)?;
        let limit = config.max_position_embeddings;
        if prompt.len().saturating_add(args.max_tokens) > limit {
            return Err(CliError::Usage(format!(
                "the prompt ({}) plus --max-tokens {} is too long: the model takes at most {limit} tokens; \
                 lower --max-tokens",
                report::count(prompt.len(), "token"),
                args.max_tokens
            )));
        }
        let options = GenerateOptions {
            max_tokens: args.max_tokens,
            sampling: sampling(&args, &text),
            stop_ids: text.stop_ids.clone(),
        };
        let answer = streamed(&model, &text, &prompt, &options, !args.json)?;
        answer.print(&question, prompt.len(), args.json);
        Ok(())
    }
}

fn load<B: Nvfp4Kernels>(
    files: &ModelFiles,
    config: &Qwen3Config,
    w4a4: bool,
    precision: Precision,
    device: &B::Device,
) -> Result<Qwen3<B>, CliError> {
    let weights = files.open_weights()?;
    let packed = weights.names().iter().any(|n| matches!(weights.stored(n), Some(Stored::Packed { .. })));
    report::label("weights", if packed { "nvfp4" } else { "dense" });
    if w4a4 && !packed {
        let text = "--w4a4: the model has no NVFP4 weights; leave --w4a4 out, or convert the model to nvfp4";
        return Err(CliError::Usage(text.into()));
    }
    // Dense weights stay dense under any recipe.
    let recipe = if w4a4 { Recipe::W4a4 } else { Recipe::W4 };
    let spec = LinearSpec::new(recipe, Scaling::Two, precision);
    Ok(weights::load(&weights, config, spec, Purpose::Infer, device)?)
}

/// Sampling by the flags, or by the model's generation_config.json where a flag is missing.
fn sampling(args: &GenerateArgs, text: &TextFiles) -> Sampling {
    let model = &text.generation;
    Sampling {
        temperature: args.temperature.or(model.temperature).unwrap_or(0.0),
        top_k: args.top_k.or(model.top_k).unwrap_or(0),
        top_p: args.top_p.or(model.top_p).unwrap_or(1.0),
        min_p: args.min_p,
        repetition_penalty: args.repetition_penalty.or(model.repetition_penalty).unwrap_or(1.0),
        seed: args.seed,
    }
}

/// An answer with the times it took.
struct Answer {
    generation: Generation,
    text: String,
    /// Text that was not streamed: the end of an answer that stops within a character.
    rest: String,
    seconds_to_first_token: f64,
    seconds: f64,
}

/// Generates an answer and prints its text as it grows, if `shows`.
fn streamed<B: Nvfp4Kernels>(
    model: &Qwen3<B>,
    text: &TextFiles,
    prompt: &[u32],
    options: &GenerateOptions,
    shows: bool,
) -> Result<Answer, CliError> {
    let (mut stream, mut answer, mut failed) = (TextStream::default(), String::new(), None);
    let mut first_token = None;
    let started = Instant::now();
    let generation = generate(model, prompt, options, |id| {
        first_token.get_or_insert_with(|| started.elapsed().as_secs_f64());
        match stream.push(id, &text.tokenizer) {
            Ok(piece) => {
                if shows {
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
    let seconds = started.elapsed().as_secs_f64();
    answer += &rest;
    let seconds_to_first_token = first_token.unwrap_or(seconds);
    Ok(Answer { generation, text: answer, rest, seconds_to_first_token, seconds })
}

impl Answer {
    /// Prints the answer as JSON, or the end of its text and its figures.
    fn print(&self, question: &str, prompt_tokens: usize, json: bool) {
        let (tokens, first) = (self.generation.ids.len(), self.seconds_to_first_token);
        let decoding = self.seconds - first;
        let rate = if decoding > 0.0 { tokens.saturating_sub(1) as f64 / decoding } else { 0.0 };
        let stop = match self.generation.stop {
            StopReason::StopToken(_) => "stop",
            StopReason::MaxTokens => "length",
            StopReason::Caller => "error",
        };
        if json {
            let row = json!({
                "prompt": question, "text": self.text, "ids": self.generation.ids, "stop": stop,
                "prompt_tokens": prompt_tokens, "tokens": tokens,
                "seconds_to_first_token": first, "tokens_per_second": rate,
            });
            return report::result(row.to_string());
        }
        report::stream(&format!("{}\n", self.rest));
        report::line(format!(
            "{prompt_tokens} prompt + {tokens} answer tokens · first after {first:.2} s · {rate:.1} tokens/s · {stop}"
        ));
    }
}

fn prompt_text(args: &GenerateArgs) -> Result<String, CliError> {
    if args.prompt != "-" {
        return Ok(args.prompt.clone());
    }
    let mut prompt = String::new();
    let read = std::io::stdin().read_to_string(&mut prompt);
    read.map_err(|e| CliError::Usage(format!("--prompt -: cannot read standard input: {e}")))?;
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
