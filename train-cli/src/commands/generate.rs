//! `generate`: answers a prompt with text that streams to standard output.

use crate::{
    CliError,
    args::GenerateArgs,
    device::{self, Job},
    model_files::TextFiles,
    report,
    talk::{
        answer::{self, Answer},
        loaded::Loaded,
    },
};
use backend_nvfp4::{DeviceServices, Nvfp4Kernels, Precision};
use model_qwen3::{
    chat_template::RenderOptions,
    generate::{GenerateOptions, Session},
};
use serde_json::json;
use std::io::Read;

/// Runs the command.
///
/// # Errors
/// If a flag is out of range, or the model cannot be loaded or run.
pub fn run(args: GenerateArgs) -> Result<(), CliError> {
    answer::check(&args.sampling)?;
    device::run(args.model.device, args.model.compute_dtype, Generate(args))
}

struct Generate(GenerateArgs);

impl Job for Generate {
    type Output = ();

    fn run<B: Nvfp4Kernels + DeviceServices>(self, device: B::Device, precision: Precision) -> Result<(), CliError> {
        let args = self.0;
        let Loaded { model, text } = Loaded::<B>::new(&args.model, precision, &device)?;
        let question = prompt_text(&args)?;
        let prompt = prompt_ids(&question, &args, &text)?;
        let (limit, answer) = (model.config().max_position_embeddings, args.sampling.max_tokens);
        let capacity = prompt.len().saturating_add(answer);
        if capacity > limit {
            return Err(CliError::Usage(format!(
                "the prompt ({}) plus --max-tokens {answer} is too long: the model takes at most {limit} tokens; lower \
                 --max-tokens",
                report::count(prompt.len(), "token"),
            )));
        }
        let options = GenerateOptions { logprobs: args.logprobs, ..answer::options(&args.sampling, &text) };
        let mut session = Session::new(&model, capacity)?;
        let answer = Answer::of(&mut session, &text, &prompt, &options, &args.sampling.stop, !args.json, || false)?;
        if args.json {
            let mut found = answer.json(&question);
            if args.logprobs.is_some() {
                found["logprobs"] = answer.logprobs(&text.tokenizer)?;
            }
            report::result(found.to_string());
        } else {
            report::stream("\n");
            report::line(answer.figures());
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
