//! What a run takes from the device, before anything is allocated, and how much arithmetic a token is.
//!
//! The sum counts what the memory pool holds at its peak: buffers of a size are reused for that size only, so the
//! phases of a step (head, block, optimizer) do not share what they free. doc/training.md compares it with runs.

use crate::{
    data::order,
    plan::Plan,
    settings::{Clip, StepMode},
};
use backend_nvfp4::{MasterKind, Precision, Recipe, StateKind};
use burn::tensor::DType;
use model_qwen3::config::Qwen3Config;

/// Bytes by what they are for.
#[derive(Debug, Clone)]
pub struct Estimate {
    parts: Vec<(&'static str, f64)>,
    /// Of the model that is exported, on the device while it is checked.
    export: f64,
}

/// The sizes that count: parameters of a block's linear layers, of the embedding (and head), of norms.
struct Sizes {
    block: f64,
    blocks: f64,
    embedding: f64,
    heads: f64,
}

impl Sizes {
    fn of(c: &Qwen3Config) -> Self {
        let (d, f) = (c.hidden_size as f64, c.intermediate_size as f64);
        let (q, kv) = ((c.num_attention_heads * c.head_dim) as f64, (c.num_key_value_heads * c.head_dim) as f64);
        Self {
            block: 2.0 * d * q + 2.0 * d * kv + 3.0 * d * f,
            blocks: c.num_hidden_layers as f64,
            embedding: c.vocab_size as f64 * d,
            heads: if c.tie_word_embeddings { 1.0 } else { 2.0 },
        }
    }

    fn linear(&self) -> f64 {
        self.block * self.blocks
    }
}

impl Estimate {
    /// Of a plan that computes in `precision`.
    pub fn of(c: &Qwen3Config, plan: &Plan, precision: Precision) -> Self {
        let s = Sizes::of(c);
        let (optimizer, memory) = (&plan.settings.optimizer, &plan.settings.memory);
        let value = precision.dtype().size() as f64;
        let master = plan.master(precision);
        let length = order::padded_len(plan.max_seq_length(c.max_position_embeddings));
        let tokens = (optimizer.batch_size * length) as f64;
        // With --train-last-layers only these have gradients, states and kept inputs.
        let (trained, all) = match plan.settings.model.train_last_layers {
            0 => (s.blocks, true),
            last => ((last as f64).min(s.blocks), false),
        };
        let whole = memory.step_mode == StepMode::Whole;
        // bf16 values take four bytes where the device computes in f32.
        let dense = if master == MasterKind::F32 { 4.0 } else { value };
        let linear = if master == MasterKind::Nvfp4 { 0.5625 } else { dense };
        let dense_values = s.embedding * s.heads;
        let params = s.linear() + dense_values;
        let embedding = if all { s.embedding } else { 0.0 };
        let trained_params = trained * s.block + if all { dense_values } else { 0.0 };
        let residual = if master == MasterKind::Bf16Residual { trained_params } else { 0.0 };

        // Gradients: f32 out of the products, kept in the buffer's type where they are gathered.
        let gathers = whole || optimizer.gradient_accumulation_steps > 1;
        let buffer = if master == MasterKind::F32 { 4.0 } else { value };
        let both_passes =
            optimizer.gradient_accumulation_steps > 1 && !(plan.clip == Clip::Exact && optimizer.max_grad_norm > 0.0);
        // Streaming, a separate head's is gone when the embedding's is made.
        let mut gradients = if whole { 4.0 * trained_params } else { 4.0 * (embedding + s.block) };
        gradients += if gathers { buffer * trained_params } else { 0.0 };
        gradients += if both_passes { 4.0 * s.block } else { 0.0 };

        let states = memory.optimizer_state_mode;
        let states = if states == StateKind::Bf16 { 2.0 * value } else { states.bytes() };
        let (d, f) = (c.hidden_size as f64, c.intermediate_size as f64);
        let (q, kv) = ((c.num_attention_heads * c.head_dim) as f64, (c.num_key_value_heads * c.head_dim) as f64);
        let inputs = tokens * d * value * trained;
        // Of a block's graph and its backward, where gradients take the place of gate and up; without kernels, attention
        // keeps its weights.
        let mut block = tokens * value * (13.0 * d + 7.0 * q + 8.0 * kv + 4.0 * f);
        if precision.dtype() == DType::F32 {
            block += 6.0 * 4.0 * tokens * length as f64 * c.num_attention_heads as f64;
        }
        let graph = if whole { block * trained } else { inputs + block };
        // The weights of a layer in the products' type, and their codes.
        let copies =
            if plan.recipe == Recipe::Bf16 && dense == value { 0.0 } else { s.block * 0.5625 + 4.0 * d * f * value };
        let cast = if dense == value { 0.0 } else { s.embedding * value };
        let logits = ((300 << 20) as f64).min(tokens * c.vocab_size as f64 * value * 3.0) + cast + 4.0 * tokens * d;
        Self {
            parts: vec![
                ("weights", linear * s.linear() + dense * dense_values + residual),
                ("optimizer states", states * trained_params),
                ("gradients", gradients),
                (if whole { "activations" } else { "block inputs and one block" }, graph + copies),
                ("head", logits),
            ],
            export: if plan.recipe == Recipe::Bf16 { 2.0 * params } else { 0.5625 * s.linear() + 4.0 * dense_values },
        }
    }

    /// The peak of training.
    pub fn peak(&self) -> u64 {
        self.parts.iter().map(|(_, bytes)| bytes).sum::<f64>() as u64
    }

    /// A line a part.
    pub fn table(&self) -> Vec<String> {
        let gib = |bytes: f64| format!("{:>9.2} GiB", bytes / f64::from(1 << 30));
        let mut lines: Vec<String> = self.parts.iter().map(|(name, b)| format!("{name:<28}{}", gib(*b))).collect();
        lines.push(format!("{:<28}{}", "peak of training", gib(self.peak() as f64)));
        lines.push(format!("{:<28}{}", "export (after training)", gib(self.parts[0].1 + self.export)));
        lines.push("without the driver's own memory, half a GiB on CUDA".into());
        lines
    }
}

/// Floating-point operations that training needs for a token in sequences of `t`: six a parameter of the products, and
/// attention's, of which causality leaves half. What is computed a second time does not count.
pub fn flops_a_token(c: &Qwen3Config, t: usize) -> f64 {
    let s = Sizes::of(c);
    let attention = (c.num_attention_heads * c.head_dim * c.num_hidden_layers * t) as f64;
    6.0 * (s.linear() + s.embedding) + 6.0 * attention
}

/// Bytes as people write them.
pub fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30))
}
