//! The test of new tokens: a small model reads them one at a time, as it does in an answer, and all at once, as it does in a
//! prompt. On a card with tensor cores, an answer's token runs through each block in one launch, and a prompt through the kernels
//! of training.

use crate::{CliError, tolerance};
use backend_nvfp4::{LinearSpec, MasterKind, Nvfp4Kernels, Precision, Recipe, Scaling};
use model_qwen3::{config::Qwen3Config, session::Session, weights};

/// The shape is one that the kernel of a block takes.
fn config() -> Qwen3Config {
    Qwen3Config {
        vocab_size: 320,
        hidden_size: 256,
        intermediate_size: 512,
        num_hidden_layers: 3,
        num_attention_heads: 8,
        num_key_value_heads: 2,
        head_dim: 64,
        rms_norm_eps: 1e-6,
        rope_theta: 1e6,
        max_position_embeddings: 256,
        tie_word_embeddings: true,
        eos_token_ids: vec![],
        initializer_range: 0.05,
    }
}

/// Tests the logits behind the last of 150 tokens, which fill two pages of the cache and begin a third.
///
/// # Errors
/// If the device fails.
pub(super) fn token_by_token<B: Nvfp4Kernels>(
    device: &B::Device,
    precision: Precision,
) -> Result<Option<String>, CliError> {
    let config = config();
    let ids: Vec<u32> = (0..150).map(|i| (i * 37 + 5) % config.vocab_size as u32).collect();
    let spec = LinearSpec::new(Recipe::W4, Scaling::Two, precision).each_row();
    let model = weights::random::<B>(&config, spec, MasterKind::Nvfp4, 3, device)?;
    let at_once = Session::new(&model, ids.len())?.read(&ids)?;
    let mut session = Session::new(&model, ids.len())?;
    let mut one_by_one = vec![];
    for id in &ids {
        one_by_one = session.read(&[*id])?;
    }
    Ok(differing(&one_by_one, &at_once, precision))
}

/// What is wrong with the logits of tokens that were read one by one, if the number format does not explain it.
fn differing(one_by_one: &[f32], at_once: &[f32], precision: Precision) -> Option<String> {
    let apart = tolerance::relative_difference(one_by_one, at_once);
    let limit = tolerance::hidden(precision, config().num_hidden_layers);
    let wrong = apart.is_nan() || apart > limit;
    wrong.then(|| {
        format!(
            "the logits behind tokens that are read one by one differ from those of a prompt by {:.2}% (limit {:.2}%)",
            apart * 100.0,
            limit * 100.0
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::backend::NdArray;

    #[test]
    fn both_ways_agree_and_a_wrong_logit_is_found() {
        assert_eq!(token_by_token::<NdArray>(&Default::default(), Precision::F32).unwrap(), None);
        let right: Vec<f32> = (0..320).map(|i| (i as f32).sin()).collect();
        for precision in [Precision::F32, Precision::Bf16] {
            assert_eq!(differing(&right, &right, precision), None);
            for wrong in [f32::NAN, right[7] + 1.0] {
                let mut made = right.clone();
                made[7] = wrong;
                assert!(differing(&made, &right, precision).is_some(), "{precision:?}, {wrong}");
            }
        }
    }
}
