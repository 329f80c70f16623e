//! An answer: its text as it grows, and its figures.

use crate::{CliError, args::SamplingArgs, model_files::TextFiles, report};
use backend_nvfp4::Nvfp4Kernels;
use model_qwen3::{
    generate::{GenerateOptions, Generation, Progress, Session, StopReason},
    sample::Sampling,
    tokenizer::TextStream,
};
use serde_json::{Value, json};
use std::{ops::ControlFlow, time::Instant};

/// How an answer ended that has as many tokens as it may have.
pub const LENGTH: &str = "length";
/// How an answer ended that was stopped by Ctrl-C.
pub const INTERRUPTED: &str = "interrupted";

/// An answer with the times it took.
pub struct Answer {
    /// The tokens.
    pub generation: Generation,
    /// Their text.
    pub text: String,
    /// Number of tokens of the prompt.
    pub prompt_tokens: usize,
    /// Number of tokens of the prompt that an earlier turn had read.
    pub cached_tokens: usize,
    seconds_to_first_token: f64,
    seconds: f64,
}

impl Answer {
    /// Answers a prompt, streams the text if `shows`, and ends early if `stops` says so.
    ///
    /// # Errors
    /// As [`Session::answer`].
    pub fn of<B: Nvfp4Kernels>(
        session: &mut Session<'_, B>,
        text: &TextFiles,
        prompt: &[u32],
        options: &GenerateOptions,
        shows: bool,
        stops: impl Fn() -> bool,
    ) -> Result<Self, CliError> {
        let cached_tokens = session.cached(prompt);
        let (mut stream, mut answer, mut failed) = (TextStream::default(), String::new(), None);
        let mut show = |piece: String| {
            if shows {
                report::stream(&piece);
            }
            answer += &piece;
        };
        let mut first_token = None;
        let started = Instant::now();
        let generation = session.answer(prompt, options, |progress| {
            if let Progress::Token(id) = progress {
                first_token.get_or_insert_with(|| started.elapsed().as_secs_f64());
                match stream.push(id, &text.tokenizer) {
                    Ok(piece) => show(piece),
                    Err(e) => failed = Some(e),
                }
            }
            if failed.is_some() || stops() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        if let Some(error) = failed {
            return Err(error.into());
        }
        // The end of an answer that stops within a character.
        show(stream.finish(&text.tokenizer)?);
        let seconds = started.elapsed().as_secs_f64();
        let seconds_to_first_token = first_token.unwrap_or(seconds);
        Ok(Self {
            generation,
            text: answer,
            prompt_tokens: prompt.len(),
            cached_tokens,
            seconds_to_first_token,
            seconds,
        })
    }

    /// Tokens a second, without the first.
    pub fn rate(&self) -> f64 {
        let (tokens, decoding) = (self.generation.ids.len(), self.seconds - self.seconds_to_first_token);
        if decoding > 0.0 { tokens.saturating_sub(1) as f64 / decoding } else { 0.0 }
    }

    /// Why it ended.
    pub fn stop(&self) -> &'static str {
        match self.generation.stop {
            StopReason::StopToken(_) => "stop",
            StopReason::MaxTokens => LENGTH,
            StopReason::Caller => INTERRUPTED,
        }
    }

    /// The answer to `question` as JSON.
    pub fn json(&self, question: &str) -> Value {
        json!({
            "prompt": question, "text": self.text, "ids": self.generation.ids, "stop": self.stop(),
            "prompt_tokens": self.prompt_tokens, "cached_tokens": self.cached_tokens, "tokens": self.generation.ids.len(),
            "seconds_to_first_token": self.seconds_to_first_token, "tokens_per_second": self.rate(),
        })
    }

    /// One line of figures.
    pub fn figures(&self) -> String {
        let cached = match self.cached_tokens {
            0 => String::new(),
            cached => format!(" ({cached} cached)"),
        };
        format!(
            "{}{cached} prompt + {} answer tokens · first after {:.2} s · {:.1} tokens/s · {}",
            self.prompt_tokens,
            self.generation.ids.len(),
            self.seconds_to_first_token,
            self.rate(),
            self.stop()
        )
    }
}

/// Checks that the sampling flags are in range.
///
/// # Errors
/// If one is not.
pub fn check(args: &SamplingArgs) -> Result<(), CliError> {
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
    Ok(())
}

/// Options by the flags, or by the model's generation_config.json where a flag is missing.
pub fn options(args: &SamplingArgs, text: &TextFiles) -> GenerateOptions {
    let model = &text.generation;
    let sampling = Sampling {
        temperature: args.temperature.or(model.temperature).unwrap_or(0.0),
        top_k: args.top_k.or(model.top_k).unwrap_or(0),
        top_p: args.top_p.or(model.top_p).unwrap_or(1.0),
        min_p: args.min_p,
        repetition_penalty: args.repetition_penalty.or(model.repetition_penalty).unwrap_or(1.0),
        seed: args.seed,
    };
    GenerateOptions { max_tokens: args.max_tokens, sampling, stop_ids: text.stop_ids.clone() }
}
