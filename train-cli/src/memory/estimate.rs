//! Predicts the device memory of a run before anything is allocated, and the arithmetic that a token needs.
//!
//! The prediction is the peak of the memory pool. The pool reuses a buffer only for buffers of the same size, so the
//! phases of a step (head, block, optimizer) do not share memory.

use crate::{data::order, plan::Plan, report};
use backend_nvfp4::{MasterKind, PACKED_BYTES, Precision, StateKind, logits_rows};
use burn::tensor::DType;
use model_qwen3::config::Qwen3Config;

/// The predicted memory of a run, in bytes.
#[derive(Debug, Clone)]
pub struct Estimate {
    /// What the memory is for, and how much.
    parts: Vec<(&'static str, f64)>,
    /// The exported model, which is on the device while it is checked.
    export: f64,
    /// The weights that are trained, and their states.
    trained: f64,
    /// The gradients of all weights that are trained.
    all_gradients: f64,
    /// The activations that a block keeps for its backward, over the longest batch.
    kept: f64,
    /// The weights that it keeps besides.
    kept_weights: f64,
    /// The tokens of the longest batch.
    tokens: f64,
    /// The blocks that are trained.
    trained_blocks: usize,
}

/// The parts of an estimate that a run has if there is memory for them: `--clip exact` decides on the first, `--recompute`
/// on the second.
const GATHERED: &str = "gradients of all blocks";
const KEPT: &str = "activations of kept blocks";
/// The copy of weights and states from which the guard undoes a step. It is held beside these parts.
const UNDO: &str = "copy for undoing a step";

/// Numbers of parameters. Norms are too small to count.
struct Sizes {
    /// The linear layers of one block.
    block: f64,
    /// The number of blocks.
    blocks: f64,
    /// The embedding.
    embedding: f64,
    /// Matrices of the embedding's size: 2 if the head is not the embedding.
    embeddings: f64,
}

impl Sizes {
    fn of(c: &Qwen3Config) -> Self {
        let (d, f) = (c.hidden_size as f64, c.intermediate_size as f64);
        let (q, kv) = ((c.num_attention_heads * c.head_dim) as f64, (c.num_key_value_heads * c.head_dim) as f64);
        Self {
            block: 2.0 * d * q + 2.0 * d * kv + 3.0 * d * f,
            blocks: c.num_hidden_layers as f64,
            embedding: c.vocab_size as f64 * d,
            embeddings: if c.tie_word_embeddings { 1.0 } else { 2.0 },
        }
    }

    /// The linear layers of all blocks.
    fn linear(&self) -> f64 {
        self.block * self.blocks
    }
}

impl Estimate {
    /// Predicts the memory of a plan that computes in `precision`, whose largest micro-batch has `sequences` sequences, and whose
    /// longest sequence has `longest` tokens.
    pub fn of(c: &Qwen3Config, plan: &Plan, precision: Precision, sequences: usize, longest: usize) -> Self {
        let s = Sizes::of(c);
        let (optimizer, memory) = (&plan.settings.optimizer, &plan.settings.memory);
        let value = precision.dtype().size() as f64;
        let master = plan.master(precision);
        let length = order::padded_len(longest);
        let tokens = (sequences * length) as f64;
        // With --train-last-layers only the last blocks have gradients, optimizer states and stored inputs.
        let last = plan.settings.model.last_trained();
        let (trained, all) = (last.map_or(s.blocks, |last| s.blocks.min(last as f64)), last.is_none());
        // Masters of bf16 take four bytes on a device that computes in f32.
        let dense_bytes = if master == MasterKind::F32 { 4.0 } else { value };
        let linear_bytes = if master == MasterKind::Nvfp4 { PACKED_BYTES } else { dense_bytes };
        let dense_values = s.embedding * s.embeddings;
        let params = s.linear() + dense_values;
        let embedding = if all { s.embedding } else { 0.0 };
        let trained_params = trained * s.block + if all { dense_values } else { 0.0 };
        let residual = if master == MasterKind::BF16_RESIDUAL { trained_params } else { 0.0 };

        // The products give f32 gradients. Where they are gathered, they are stored in the type of the sums.
        let gathers = optimizer.gradient_accumulation_steps > 1;
        let sum_bytes = if master == MasterKind::F32 { 4.0 } else { value };
        let both_passes = gathers && !plan.needs_the_norm_first();
        // When the embedding's gradient is made, that of a separate head is no longer there.
        let mut gradients = 4.0 * (embedding + s.block);
        gradients += if gathers { sum_bytes * trained_params } else { 0.0 };
        gradients += if both_passes { 4.0 * s.block } else { 0.0 };

        let states = memory.optimizer_state_mode;
        let states = if states == StateKind::Bf16 { 2.0 * value } else { states.bytes() };
        let (d, f) = (c.hidden_size as f64, c.intermediate_size as f64);
        let (q, kv) = ((c.num_attention_heads * c.head_dim) as f64, (c.num_key_value_heads * c.head_dim) as f64);
        let inputs = tokens * d * value * trained;
        // The graph of a block and its backward pass, in which gradients replace gate and up. Attention in f32 has no
        // fused kernel and stores its weights.
        let mut block = tokens * value * (13.0 * d + 7.0 * q + 8.0 * kv + 4.0 * f);
        let attention = 6.0 * 4.0 * tokens * length as f64 * c.num_attention_heads as f64;
        if precision.dtype() == DType::F32 {
            block += attention;
        }
        // What the graph alone holds: two residuals and two norms; q, k and attention's output before and after; gate, up and
        // their product. Of these, the inputs of the linear layers may be packed; a recipe that packs gradients packs them once
        // more, across, and needs them as they are.
        let inputs_of_layers = 2.0 * d + q + f;
        let keeps_codes = plan.recipe.packs_activations() && plan.recipe.packs_gradients().is_none();
        let packed = if keeps_codes { (value - PACKED_BYTES) * inputs_of_layers } else { 0.0 };
        let kept = tokens * (value * (4.0 * d + 3.0 * q + 3.0 * kv + 3.0 * f) - packed);
        // And the weights as the products took them, where these are not the master weights.
        let dense_blocks = !plan.recipe.packs_weights()
            || plan.settings.bf16_last_blocks(c.num_hidden_layers) > 0
            || plan.settings.recipe.quantize_from > 0.0;
        let kept_weights = match master {
            _ if dense_bytes != value && dense_blocks => s.block * value,
            MasterKind::Nvfp4 => 0.0,
            _ if plan.recipe.packs_weights() => s.block * PACKED_BYTES,
            _ => 0.0,
        };
        // The weights of a layer in the type of the products, and their codes.
        let copies = if plan.recipe.packs_weights() || dense_bytes != value {
            s.block * PACKED_BYTES + 4.0 * d * f * value
        } else {
            0.0
        };
        let cast = if dense_bytes == value { 0.0 } else { s.embedding * value };
        let head = logits(c, tokens, precision) + cast + 4.0 * tokens * d;
        Self {
            parts: vec![
                ("weights", linear_bytes * s.linear() + dense_bytes * dense_values + residual),
                ("optimizer states", states * trained_params),
                ("gradients", gradients),
                ("block inputs and one block", inputs + block + copies),
                ("head", head),
                (GATHERED, 0.0),
                (KEPT, 0.0),
            ],
            kept,
            kept_weights,
            all_gradients: 4.0 * trained_params,
            tokens,
            trained_blocks: trained as usize,
            trained: linear_bytes * trained * s.block
                + if all { dense_bytes * dense_values } else { 0.0 }
                + residual
                + states * trained_params,
            export: if plan.recipe.packs_weights() {
                PACKED_BYTES * s.linear() + 4.0 * dense_values
            } else {
                2.0 * params
            },
        }
    }

    /// Keeps the activations of `blocks` blocks.
    pub fn keep(&mut self, blocks: usize) {
        self.set(KEPT, blocks as f64 * (self.kept + self.kept_weights));
    }

    /// Holds the gradients of a step until their norm is known.
    pub fn gather(&mut self) {
        self.set(GATHERED, self.all_gradients);
    }

    fn set(&mut self, part: &str, bytes: f64) {
        self.parts.iter_mut().filter(|(name, _)| *name == part).for_each(|(_, held)| *held = bytes);
    }

    /// The gradients of all weights that are trained, in bytes.
    pub fn all_gradients(&self) -> u64 {
        self.all_gradients as u64
    }

    /// What a block keeps over the longest batch, in bytes.
    pub fn block(&self) -> u64 {
        (self.kept + self.kept_weights) as u64
    }

    /// The activations that a block keeps over one token, in bytes.
    pub fn block_a_token(&self) -> u64 {
        (self.kept / self.tokens.max(1.0)) as u64
    }

    /// The number of blocks that are trained.
    pub fn trained_blocks(&self) -> usize {
        self.trained_blocks
    }

    /// The peak of training, in bytes.
    pub fn peak(&self) -> u64 {
        self.parts.iter().map(|(_, bytes)| bytes).sum::<f64>() as u64
    }

    /// What a step changes, in bytes: the weights that are trained, and their states.
    pub fn trained(&self) -> u64 {
        self.trained as u64
    }

    /// The size of a checkpoint, in bytes: weights and optimizer states.
    pub fn checkpoint(&self) -> u64 {
        (self.parts[0].1 + self.parts[1].1) as u64
    }

    /// The size of the exported model, in bytes.
    pub fn exported(&self) -> u64 {
        self.export as u64
    }

    /// Each part in bytes, by its name.
    pub fn parts(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.parts.iter().map(|(name, bytes)| (*name, *bytes as u64))
    }

    /// One line for each part, for a copy from which a step is undone, and for the totals, all in one unit.
    pub fn table(&self, undo_copy: u64) -> Vec<String> {
        let (peak, export) = ((self.peak() + undo_copy) as f64, self.parts[0].1 + self.export);
        let (unit, unit_name) = report::unit(peak.max(export) as u64);
        let line = |(name, bytes): (&str, f64)| format!("{name:<28}{:>9.2} {unit_name}", bytes / unit);
        let parts = self.parts.iter().copied().chain([(UNDO, undo_copy as f64)]);
        let parts = parts.filter(|(name, bytes)| ![GATHERED, KEPT, UNDO].contains(name) || *bytes > 0.0);
        parts.chain([("peak of training", peak), ("export (after training)", export)]).map(line).collect()
    }
}

/// Floating-point operations that training needs for each token of a document of `length` tokens: two for each parameter of the
/// matrix products in the forward pass and four in the backward pass, and those of attention, of which causality leaves half. If
/// only the last `last` blocks are trained, the others have no backward pass, and that of the head has two, because it
/// is not trained. Recomputation does not count.
pub fn flops_a_token(c: &Qwen3Config, last: Option<usize>, length: f64) -> f64 {
    let (s, block) = (Sizes::of(c), products_of_block(c, length));
    let trained = last.map_or(s.blocks, |last| s.blocks.min(last as f64));
    let head = if last.is_none() { 4.0 } else { 2.0 };
    2.0 * (s.blocks * block + s.embedding) + 4.0 * trained * block + head * s.embedding
}

/// Floating-point operations that reading a prompt of `length` tokens needs. The head computes the logits of its last token only.
pub fn flops_of_prompt(c: &Qwen3Config, length: f64) -> f64 {
    let s = Sizes::of(c);
    2.0 * (length * s.blocks * products_of_block(c, length) + s.embedding)
}

/// Multiplications that a block makes for a token of a document of `length` tokens: one for each parameter of its matrices, and
/// those of attention, of which causality leaves half.
fn products_of_block(c: &Qwen3Config, length: f64) -> f64 {
    Sizes::of(c).block + (c.num_attention_heads * c.head_dim) as f64 * length
}

/// Bytes of the logits that the head of a step holds.
fn logits(c: &Qwen3Config, tokens: f64, precision: Precision) -> f64 {
    let value = precision.dtype().size();
    let rows = |tokens: f64| logits_rows(tokens as usize, c.vocab_size, value) as f64;
    let (chunk, short) = (rows(tokens), rows(0.0));
    // The rows that remain after the last full chunk have a second buffer, of up to the same size. For short chunks the other
    // parts, which are estimated too high, have room for it. What a long chunk has more is counted for both buffers.
    (short + 2.0 * (chunk - short)).min(3.0 * tokens) * (c.vocab_size * value) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Training makes three times the products of a forward pass, in which the head computes the logits of every token.
    #[test]
    fn a_prompt_needs_a_third_of_training_without_the_logits_of_earlier_tokens() {
        let c = Qwen3Config {
            vocab_size: 1000,
            hidden_size: 64,
            intermediate_size: 160,
            num_hidden_layers: 3,
            num_attention_heads: 4,
            num_key_value_heads: 2,
            head_dim: 16,
            rms_norm_eps: 1e-6,
            rope_theta: 10_000.0,
            max_position_embeddings: 512,
            tie_word_embeddings: true,
            eos_token_ids: vec![],
            initializer_range: 0.02,
        };
        // By hand: q and o 64x64, k and v 64x32, gate, up and down 64x160; 64 values of each of 10 tokens in two products, halved.
        let block = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160 + 64 * 10;
        assert_eq!(flops_of_prompt(&c, 10.0), (2 * (10 * 3 * block + 1000 * 64)) as f64);
        let logits_of_nine = (2 * 9 * 1000 * 64) as f64;
        assert_eq!(flops_of_prompt(&c, 10.0), 10.0 * flops_a_token(&c, None, 10.0) / 3.0 - logits_of_nine);
    }
}
