//! How many NVFP4 codes training changed: codes of every quantized linear layer are kept at the beginning of a run and
//! compared with the codes of later states.

use crate::CliError;
use backend_nvfp4::{
    LinearSpec, Nvfp4Kernels, Nvfp4Linear, Nvfp4Tensor, layout::CODES_PER_WORD, reference::different_codes,
};
use model_qwen3::{
    ModelError,
    model::Qwen3,
    names,
    weights::{Field, fields},
};

/// About how many words of eight codes are kept: enough to tell the share of changed codes to four digits.
const WORDS: usize = 1 << 22;

/// Codes of every quantized linear layer: all of them in a small model, evenly spread rows in a large one.
#[derive(Debug, Clone)]
pub struct Codes {
    spec: LinearSpec,
    words: Vec<Vec<u32>>,
}

impl Codes {
    /// The codes of a model as the training forward quantizes it; none under a recipe that quantizes nothing.
    ///
    /// # Errors
    /// If the device fails.
    pub fn of<B: Nvfp4Kernels>(model: &Qwen3<B>, spec: LinearSpec) -> Result<Self, CliError> {
        let mut words = Vec::new();
        if !spec.recipe.packs_weights() {
            return Ok(Self { spec, words });
        }
        let fields = fields(model);
        let sizes = fields.iter().filter(|(_, f)| matches!(f, Field::Linear(_)));
        let all: usize = sizes.map(|(_, f)| f.shape().iter().product::<usize>() / CODES_PER_WORD).sum();
        let step = all.div_ceil(WORDS).max(1);
        for (name, field) in &fields {
            let weight = match field {
                Field::Linear(Nvfp4Linear::Master(w)) if !spec.shares_scale => {
                    Nvfp4Tensor::quantize(w.weight.val(), spec.weights())
                }
                Field::Linear(Nvfp4Linear::Master(_)) => quantized_in_its_group(name, &fields, spec),
                Field::Linear(Nvfp4Linear::PackedMaster(w)) => w.weight.clone(),
                _ => continue,
            };
            let codes = weight.codes_of_rows(step);
            words.push(codes.map_err(|source| ModelError::Nvfp4 { name: name.clone(), source })?);
        }
        Ok(Self { spec, words })
    }

    /// Codes that were kept.
    pub fn from_words(spec: LinearSpec, words: Vec<Vec<u32>>) -> Self {
        Self { spec, words }
    }

    /// The words of eight codes of each layer.
    pub fn words(&self) -> &[Vec<u32>] {
        &self.words
    }

    /// The share of codes that differ in a later state of the model; `None` if there are no codes.
    ///
    /// # Errors
    /// If the device fails.
    pub fn changed_in<B: Nvfp4Kernels>(&self, model: &Qwen3<B>) -> Result<Option<f64>, CliError> {
        Ok(changed(&self.words, &Self::of(model, self.spec)?.words))
    }
}

/// The codes of a master weight that shares its tensor scale with those that are multiplied with it.
fn quantized_in_its_group<B: Nvfp4Kernels>(
    name: &str,
    fields: &[(String, Field<'_, B>)],
    spec: LinearSpec,
) -> Nvfp4Tensor<B> {
    let group = names::multiplied_together(name);
    let master = |member: &String| match fields.iter().find(|(name, _)| name == member) {
        Some((_, Field::Linear(Nvfp4Linear::Master(w)))) => w.weight.val(),
        _ => unreachable!("the linear layers of a block are masters of one form"),
    };
    let place = group.iter().position(|member| member == name).expect("a weight is in its group");
    Nvfp4Tensor::quantize_together(group.iter().map(master).collect(), spec.weights()).remove(place)
}

fn changed(before: &[Vec<u32>], after: &[Vec<u32>]) -> Option<f64> {
    let (mut changed, mut all) = (0u64, 0u64);
    for (a, b) in before.iter().flatten().zip(after.iter().flatten()) {
        changed += different_codes(*a, *b) as u64;
        all += CODES_PER_WORD as u64;
    }
    (all > 0).then(|| changed as f64 / all as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_nibble_counts_once() {
        let (before, after) = ([vec![0x1234_5678], vec![0]], [vec![0x1234_0678], vec![0xF000_000F]]);
        assert_eq!(changed(&before, &after), Some(3.0 / 16.0));
        // 8 is minus zero, and 9 minus one half.
        assert_eq!(changed(&[vec![0x1008]], &[vec![0x9880]]), Some(1.0 / 8.0));
        assert_eq!(changed(&[], &[]), None);
    }
}
