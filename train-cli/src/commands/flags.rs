//! What the flags mean that several commands share: which model answers, how long its context is, and how its tokens are chosen.

use crate::{
    CliError,
    args::{CONTEXT, ModelArgs, SamplingArgs},
    model_files::TextFiles,
    talk::loaded::Wanted,
};
use backend_nvfp4::CacheFormat;
use model_qwen3::{sampling::Sampling, session::GenerateOptions};
use std::num::NonZeroUsize;

/// The model that the flags name, with caches of this format.
pub(super) fn wanted(args: &ModelArgs, cache: CacheFormat) -> Wanted<'_> {
    Wanted { model: &args.model, tokenizer: args.tokenizer.as_deref(), w4a4: args.w4a4, cache, device: args.device }
}

/// The tokens of a context by `--context`, for a model that takes at most `limit`.
///
/// # Errors
/// If more are asked for.
pub(super) fn context(asked: Option<NonZeroUsize>, limit: usize) -> Result<usize, CliError> {
    let context = asked.map_or(CONTEXT.min(limit), usize::from);
    if context > limit {
        return Err(CliError::Usage(format!(
            "--context {context}: the model takes at most {limit} tokens; give --context {limit} or less"
        )));
    }
    Ok(context)
}

/// Checks that the sampling flags are in range. `before` is what a person typed in front of a name: `--`, or `/set ` in a
/// conversation.
///
/// # Errors
/// If one is not.
pub(super) fn check(args: &SamplingArgs, before: &str) -> Result<(), CliError> {
    let ranges = [
        ("temperature", args.temperature, 0.0..=100.0),
        ("top-p", args.top_p, Sampling::TOP_P),
        ("min-p", args.min_p, Sampling::MIN_P),
        ("repetition-penalty", args.repetition_penalty, Sampling::REPETITION_PENALTY),
    ];
    if args.stop.iter().any(String::is_empty) {
        return Err(CliError::Usage("--stop \"\": the text is empty; leave --stop out".into()));
    }
    for (name, value, range) in ranges {
        if let Some(value) = value.filter(|value| !range.contains(value)) {
            let (low, high) = range.into_inner();
            return Err(CliError::Usage(format!("{before}{name} {value}: the value must be between {low} and {high}")));
        }
    }
    Ok(())
}

/// Options by the flags, or by the defaults of the model where a flag is missing. `thinking` says whether it is asked to think.
pub(super) fn options(args: &SamplingArgs, text: &TextFiles, thinking: Option<bool>) -> GenerateOptions {
    let (model, _) = text.sampling(thinking);
    let sampling = Sampling {
        temperature: args.temperature.unwrap_or(model.temperature),
        top_k: args.top_k.unwrap_or(model.top_k),
        top_p: args.top_p.unwrap_or(model.top_p),
        min_p: args.min_p.unwrap_or(model.min_p),
        repetition_penalty: args.repetition_penalty.unwrap_or(model.repetition_penalty),
        seed: args.seed,
    };
    GenerateOptions { max_tokens: args.max_tokens, sampling, stop_ids: text.stop_ids.clone(), logprobs: None }
}
