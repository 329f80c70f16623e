//! Sample answers: greedy answers to a few prompts, which show a person what a run has learned so far.

use crate::{
    CliError,
    model_files::TextFiles,
    plan::Plan,
    report,
    run::inputs::Inputs,
    run::log::{self, SampleAnswer},
    watchdog,
};
use backend_nvfp4::{LinearSpec, Nvfp4Kernels, Nvfp4Linear, Nvfp4Tensor, PackedMaster, PackedWeight};
use burn::{
    module::{Param, ParamId},
    tensor::Tensor,
};
use model_qwen3::{
    chat_template::RenderOptions,
    model::Qwen3,
    sampling::Sampling,
    session::{GenerateOptions, Generation, StopReason, generate_together},
    weights::Replace,
};
use serde_json::json;
use std::path::Path;

/// Maximum number of tokens in a sample answer.
pub(super) const MAX_TOKENS: usize = 48;

/// Prompts that are answered together, at most, where there is memory for it. The keys and values of all are held at once.
const TOGETHER: usize = 8;

/// Tokens that a chat template adds to a prompt, at most.
const TEMPLATE_TOKENS: usize = 128;

/// Prompts of a run, and what is needed to answer them.
#[derive(Debug, Clone)]
pub struct Samples {
    /// The prompts.
    pub prompts: Vec<String>,
    text: TextFiles,
    /// Whether there is memory to quantize the weights once for all tokens of the answers, and to answer several prompts together.
    /// Otherwise each token quantizes them anew, for one prompt after another.
    quantizes_once: bool,
}

impl Samples {
    /// The prompts of `--sample-prompt`, or the first of the training and of the evaluation rows. Prompts that the model
    /// has no room to answer are left out. `quantizes_once` says that there is memory for a second copy of all weights.
    ///
    /// # Errors
    /// If a prompt cannot be tokenized.
    pub fn of(plan: &Plan, inputs: &Inputs, quantizes_once: bool) -> Result<Self, CliError> {
        let mut prompts = plan.settings.logging.sample_prompt.clone();
        if prompts.is_empty() {
            let first = [inputs.train.first(), inputs.eval.first()].into_iter().flatten();
            prompts = first.map(|sample| sample.prompt.clone()).filter(|prompt| !prompt.is_empty()).collect();
        }
        let mut kept = Vec::new();
        for prompt in prompts {
            let tokens = inputs.text.tokenizer.encode(&prompt)?.len();
            if tokens + TEMPLATE_TOKENS + MAX_TOKENS <= inputs.config.max_position_embeddings {
                kept.push(prompt);
            } else {
                report::line(format!("note: a sample prompt of {tokens} tokens is too long to answer; it is left out"));
            }
        }
        let mut text = inputs.text.clone();
        text.thinking = inputs.thinking;
        Ok(Self { prompts: kept, text, quantizes_once })
    }

    /// One answer for each prompt, each on one line. An answer that was cut off ends in an ellipsis.
    ///
    /// # Errors
    /// If the model cannot be run.
    pub fn answers<B: Nvfp4Kernels>(&self, model: &Qwen3<B>) -> Result<Vec<String>, CliError> {
        let quantized = (self.quantizes_once && !self.prompts.is_empty()).then(|| quantized_once(model));
        let model = quantized.as_ref().unwrap_or(model);
        let options = GenerateOptions {
            max_tokens: MAX_TOKENS,
            sampling: Sampling::GREEDY,
            stop_ids: self.text.stop_ids.clone(),
            logprobs: None,
        };
        let mut answers = Vec::new();
        for prompts in self.prompts.chunks(if self.quantizes_once { TOGETHER } else { 1 }) {
            let ids = prompts.iter().map(|prompt| self.ids(prompt)).collect::<Result<Vec<_>, _>>()?;
            for generation in generate_together(model, &ids, &options, watchdog::moved)? {
                answers.push(self.text_of(&generation)?);
            }
        }
        Ok(answers)
    }

    /// The answers of the model after step `step` that the log of a run holds. None if it does not hold one for each prompt.
    ///
    /// # Errors
    /// If the log cannot be read.
    pub(super) fn logged(&self, run: &Path, step: usize) -> Result<Option<Vec<String>>, CliError> {
        let mut logged: Vec<SampleAnswer> = log::lines(run, log::SAMPLES)?;
        logged.retain(|line| line.step == step);
        let answer =
            |prompt: &String| logged.iter().find(|line| line.prompt == *prompt).map(|line| line.answer.clone());
        Ok(self.prompts.iter().map(answer).collect())
    }

    fn ids(&self, prompt: &str) -> Result<Vec<u32>, CliError> {
        let message = json!({"role": "user", "content": prompt});
        // As the commands ask that answer with the trained model.
        let enable_thinking = self.text.thinking;
        let options = RenderOptions { add_generation_prompt: true, enable_thinking, ..Default::default() };
        Ok(self.text.tokenizer.encode(&self.text.template.render(&[message], options)?)?)
    }

    fn text_of(&self, generation: &Generation) -> Result<String, CliError> {
        let answer = self.text.tokenizer.decode(&generation.ids)?;
        let unfinished = if generation.stop == StopReason::MaxTokens { " …" } else { "" };
        Ok(answer.replace('\n', "\\n") + unfinished)
    }
}

/// A model that computes the same, whose linear layers need not quantize their weights for each token. Where activations are not
/// quantized, they need not decode the codes either: they have the values. A model whose layers share tensor scales stays as it is.
pub fn quantized_once<B: Nvfp4Kernels>(model: &Qwen3<B>) -> Qwen3<B> {
    let mut quantized = model.clone();
    if model.spec().recipe.packs_weights() && !model.spec().shares_scale {
        let mut once = QuantizedOnce(model.spec());
        let blocks = std::mem::take(&mut quantized.layers).into_iter().enumerate();
        quantized.layers = blocks.map(|(i, block)| if model.is_bf16(i) { block } else { once.block(block) }).collect();
    }
    quantized
}

/// Replaces the weights of linear layers by what the forward pass makes of them.
struct QuantizedOnce(LinearSpec);

impl<B: Nvfp4Kernels> Replace<B> for QuantizedOnce {
    fn vector(&mut self, p: Param<Tensor<B, 1>>) -> Param<Tensor<B, 1>> {
        p
    }

    fn matrix(&mut self, p: Param<Tensor<B, 2>>) -> Param<Tensor<B, 2>> {
        p
    }

    fn linear(&mut self, linear: Nvfp4Linear<B>) -> Nvfp4Linear<B> {
        let Self(spec) = self;
        let codes = match linear {
            Nvfp4Linear::Master(weight) => Nvfp4Tensor::quantize(weight.val(), spec.weights()),
            Nvfp4Linear::PackedMaster(PackedMaster { weight, .. }) => weight,
            Nvfp4Linear::Packed(PackedWeight { weight, input: None }) => weight,
            other => return other,
        };
        if spec.recipe.packs_activations() {
            return Nvfp4Linear::Packed(codes.into());
        }
        let values = codes.dequantize(spec.precision.dtype());
        Nvfp4Linear::Dense(Param::initialized(ParamId::new(), values))
    }
}

/// The first 100 characters of a text, on one line.
pub fn beginning(text: &str) -> String {
    let text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    let cut = text.char_indices().nth(100).map_or(text.len(), |(i, _)| i);
    if cut < text.len() { format!("{} …", &text[..cut]) } else { text }
}
