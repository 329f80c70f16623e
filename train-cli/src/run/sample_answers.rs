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
use backend_nvfp4::{LinearSpec, Nvfp4Kernels, Nvfp4Linear, Nvfp4Tensor};
use burn::{module::Param, tensor::Tensor};
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

/// The same for a model of random weights, whose answers end nowhere and say nothing.
pub(super) const MAX_TOKENS_OF_RANDOM: usize = 8;

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
    /// Whether the weights are quantized once for all tokens of the answers, which takes memory for their codes, and several
    /// prompts are answered together. Otherwise each token quantizes them anew, for one prompt after another.
    packs: bool,
}

impl Samples {
    /// The prompts of `--sample-prompt`, or the first of the training and of the evaluation rows. Prompts that the model
    /// has no room to answer are left out. `packs` says that there is memory for the codes of all weights.
    ///
    /// # Errors
    /// If a prompt cannot be tokenized.
    pub fn of(plan: &Plan, inputs: &Inputs, packs: bool) -> Result<Self, CliError> {
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
        Ok(Self { prompts: kept, text, packs })
    }

    /// One answer for each prompt, each on one line. An answer that was cut off ends in an ellipsis.
    ///
    /// # Errors
    /// If the model cannot be run.
    pub fn answers<B: Nvfp4Kernels>(&self, model: &Qwen3<B>) -> Result<Vec<String>, CliError> {
        self.answers_within(MAX_TOKENS, model)
    }

    /// Answers of at most `max_tokens` tokens.
    ///
    /// # Errors
    /// As [`Self::answers`].
    pub(super) fn answers_within<B: Nvfp4Kernels>(
        &self,
        max_tokens: usize,
        model: &Qwen3<B>,
    ) -> Result<Vec<String>, CliError> {
        let packed = (self.packs && !self.prompts.is_empty()).then(|| packed(model));
        let model = packed.as_ref().unwrap_or(model);
        let options = GenerateOptions {
            max_tokens,
            sampling: Sampling::GREEDY,
            stop_ids: self.text.stop_ids.clone(),
            logprobs: None,
        };
        let mut answers = Vec::new();
        for prompts in self.prompts.chunks(if self.packs { TOGETHER } else { 1 }) {
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

/// A model whose linear layers have the codes that its forward pass would make of their weights. It computes the same. A
/// model whose layers share tensor scales stays as it is.
pub fn packed<B: Nvfp4Kernels>(model: &Qwen3<B>) -> Qwen3<B> {
    let mut packed = model.clone();
    if model.spec().recipe.packs_weights() && !model.spec().shares_scale {
        let mut packing = Quantizing(model.spec());
        let blocks = std::mem::take(&mut packed.layers).into_iter().enumerate();
        packed.layers = blocks.map(|(i, block)| if model.is_bf16(i) { block } else { packing.block(block) }).collect();
    }
    packed
}

/// Quantizes the weights of linear layers.
struct Quantizing(LinearSpec);

impl<B: Nvfp4Kernels> Replace<B> for Quantizing {
    fn vector(&mut self, p: Param<Tensor<B, 1>>) -> Param<Tensor<B, 1>> {
        p
    }

    fn matrix(&mut self, p: Param<Tensor<B, 2>>) -> Param<Tensor<B, 2>> {
        p
    }

    fn linear(&mut self, linear: Nvfp4Linear<B>) -> Nvfp4Linear<B> {
        match linear {
            Nvfp4Linear::Master(master) => {
                Nvfp4Linear::Packed(Nvfp4Tensor::quantize(master.weight.val(), self.0.weights()).into())
            }
            other => other,
        }
    }
}

/// The first 100 characters of a text, on one line.
pub fn beginning(text: &str) -> String {
    let text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    let cut = text.char_indices().nth(100).map_or(text.len(), |(i, _)| i);
    if cut < text.len() { format!("{} …", &text[..cut]) } else { text }
}
