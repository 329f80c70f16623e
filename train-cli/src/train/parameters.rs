//! Which parameters a run trains, and which of them decay.

use backend_nvfp4::Nvfp4Kernels;
use burn::{
    backend::Autodiff,
    module::{Module, ParamId},
};
use model_qwen3::{
    model::Qwen3,
    weights::{Field, fields},
};
use std::collections::HashSet;

/// Trains only the last `last` blocks and the final norm.
pub fn last_blocks<B: Nvfp4Kernels>(mut model: Qwen3<Autodiff<B>>, last: usize) -> Qwen3<Autodiff<B>> {
    let fixed = model.layers.len() - last;
    model.embed_tokens = model.embed_tokens.no_grad();
    model.lm_head = model.lm_head.map(Module::no_grad);
    let blocks = model.layers.into_iter().enumerate();
    model.layers = blocks.map(|(i, block)| if i < fixed { block.no_grad() } else { block }).collect();
    model
}

/// Parameters without weight decay: norms and the embedding.
pub fn undecayed<B: Nvfp4Kernels>(model: &Qwen3<B>) -> HashSet<ParamId> {
    let linear = |field: &Field<'_, B>| matches!(field, Field::Linear(_));
    fields(model).iter().filter(|(_, field)| !linear(field)).filter_map(|(_, field)| field.id()).collect()
}
