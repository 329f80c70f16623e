//! How checkpoints spell the names of a model's tensors. No other file spells one.
//!
//! A tensor has its Hugging Face name, for example `model.layers.3.self_attn.q_proj.weight`. A container stores an NVFP4
//! tensor as two or three entries, whose keys are the name and a suffix:
//!
//! | spelling | codes | block scales | tensor scale |
//! |---|---|---|---|
//! | `.dat` | `NAME.qdata` | `NAME.scale` | `NAME.scale_2` |
//! | ModelOpt, in safetensors | `NAME` | `NAME_scale` | `NAME_scale_2` |
//! | compressed-tensors, in safetensors | `NAME_packed` | `NAME_scale` | `NAME_global_scale`, its reciprocal |
//!
//! Where activations are NVFP4 too, safetensors give the tensor scale of a layer's activations beside its weight:
//! `LAYER.input_scale` in ModelOpt's spelling, and `LAYER.input_global_scale`, its reciprocal, in that of compressed-tensors.
//!
//! Some `.dat` files leave `.weight` out of the keys of NVFP4 tensors (`….q_proj.qdata`). They are read, too.

/// The embedding.
pub const EMBEDDING: &str = "model.embed_tokens.weight";
/// The norm before the head.
pub const FINAL_NORM: &str = "model.norm.weight";
/// The head, where it is not the embedding.
pub const HEAD: &str = "lm_head.weight";

pub(crate) const Q_PROJ: &str = "self_attn.q_proj";
pub(crate) const K_PROJ: &str = "self_attn.k_proj";
pub(crate) const V_PROJ: &str = "self_attn.v_proj";
pub(crate) const O_PROJ: &str = "self_attn.o_proj";
pub(crate) const Q_NORM: &str = "self_attn.q_norm";
pub(crate) const K_NORM: &str = "self_attn.k_norm";
pub(crate) const GATE_PROJ: &str = "mlp.gate_proj";
pub(crate) const UP_PROJ: &str = "mlp.up_proj";
pub(crate) const DOWN_PROJ: &str = "mlp.down_proj";
pub(crate) const INPUT_LAYERNORM: &str = "input_layernorm";
pub(crate) const POST_ATTENTION_LAYERNORM: &str = "post_attention_layernorm";

const BLOCKS: &str = "model.layers.";
const WEIGHT: &str = ".weight";

/// The name of a part of a transformer block.
pub(crate) fn in_block(block: usize, part: &str) -> String {
    format!("{BLOCKS}{block}.{part}{WEIGHT}")
}

/// The name of the layer that has this weight, for example `model.norm`.
pub fn layer(weight: &str) -> &str {
    weight.strip_suffix(WEIGHT).unwrap_or(weight)
}

/// The name of a transformer block, for example `model.layers.3`.
pub fn block(index: usize) -> String {
    format!("{BLOCKS}{index}")
}

/// The index of the transformer block that a tensor belongs to, if it belongs to one.
pub fn block_of(name: &str) -> Option<usize> {
    name.strip_prefix(BLOCKS)?.split('.').next()?.parse().ok()
}

/// The name of the same part of another block. A name outside blocks stays.
pub(crate) fn with_block(name: &str, block: usize) -> String {
    let part = name.strip_prefix(BLOCKS).and_then(|rest| rest.split_once('.'));
    part.map_or_else(|| name.to_owned(), |(_, part)| format!("{BLOCKS}{block}.{part}"))
}

/// Whether a tensor is the weight of a linear layer inside a transformer block.
pub fn is_projection(name: &str) -> bool {
    name.contains("_proj.")
}

/// The linear layers that engines multiply as one matrix with this one, itself included.
pub fn multiplied_together(name: &str) -> Vec<String> {
    let groups: [&[&str]; 2] = [&[Q_PROJ, K_PROJ, V_PROJ], &[GATE_PROJ, UP_PROJ]];
    let own = |block: usize| groups.iter().find(|group| group.iter().any(|part| in_block(block, part) == name));
    match block_of(name).and_then(|block| Some((block, own(block)?))) {
        Some((block, group)) => group.iter().map(|part| in_block(block, part)).collect(),
        None => vec![name.to_owned()],
    }
}

/// The parts of a block in the order in which Hugging Face's model lists them, and their names in a GGUF file.
const GGUF_PARTS: [(&str, &str); 11] = [
    (Q_PROJ, "attn_q"),
    (K_PROJ, "attn_k"),
    (V_PROJ, "attn_v"),
    (O_PROJ, "attn_output"),
    (Q_NORM, "attn_q_norm"),
    (K_NORM, "attn_k_norm"),
    (GATE_PROJ, "ffn_gate"),
    (UP_PROJ, "ffn_up"),
    (DOWN_PROJ, "ffn_down"),
    (INPUT_LAYERNORM, "attn_norm"),
    (POST_ATTENTION_LAYERNORM, "ffn_norm"),
];

/// The tensors outside blocks, and their names in a GGUF file.
const GGUF_WHOLE: [(&str, &str); 3] = [(EMBEDDING, "token_embd"), (FINAL_NORM, "output_norm"), (HEAD, "output")];

/// Names in the order in which Hugging Face's model lists its tensors: the embedding, the blocks, the final norm, the head.
/// Names that a model does not have stand behind.
pub(crate) fn in_model_order(mut names: Vec<String>) -> Vec<String> {
    let whole = |name: &str| [EMBEDDING, "", FINAL_NORM, HEAD].iter().position(|known| *known == name).unwrap_or(4);
    names.sort_by_cached_key(|name| match block_of(name) {
        Some(block) => {
            let part = GGUF_PARTS.iter().position(|(part, _)| in_block(block, part) == *name);
            (1, block, part.unwrap_or(GGUF_PARTS.len()))
        }
        None => (whole(name), 0, 0),
    });
    names
}

/// The name of a tensor in a GGUF file, if it has one there.
pub(crate) fn in_gguf(name: &str) -> Option<String> {
    if let Some((_, plain)) = GGUF_WHOLE.into_iter().find(|(whole, _)| *whole == name) {
        return Some(format!("{plain}{WEIGHT}"));
    }
    let block = block_of(name)?;
    let (_, part) = GGUF_PARTS.into_iter().find(|(part, _)| in_block(block, part) == name)?;
    Some(format!("blk.{block}.{part}{WEIGHT}"))
}

/// The name of the tensor that a GGUF file calls `name`, if a model has it.
pub(crate) fn of_gguf(name: &str) -> Option<String> {
    let plain = name.strip_suffix(WEIGHT)?;
    if let Some((whole, _)) = GGUF_WHOLE.into_iter().find(|(_, theirs)| *theirs == plain) {
        return Some(whole.to_owned());
    }
    let (block, theirs) = plain.strip_prefix("blk.")?.split_once('.')?;
    let (part, _) = GGUF_PARTS.into_iter().find(|(_, part)| *part == theirs)?;
    // A block has one spelling: 007 is none.
    block.parse::<usize>().ok().filter(|index| index.to_string() == block).map(|index| in_block(index, part))
}

/// How the names of the scales of an NVFP4 tensor end in a GGUF file.
const GGUF_SCALE: &str = ".scale";
const GGUF_INPUT_SCALE: &str = ".input_scale";

/// The name of the tensor scale of an NVFP4 tensor in a GGUF file.
pub(crate) fn scale_in_gguf(name: &str) -> String {
    format!("{}{GGUF_SCALE}", layer(name))
}

/// The name of the tensor scale of the activations that an NVFP4 tensor multiplies, in a GGUF file.
pub(crate) fn input_scale_in_gguf(name: &str) -> String {
    format!("{}{GGUF_INPUT_SCALE}", layer(name))
}

/// Whether a key is that of a scale for a KV cache in 8 bits, which llm-compressor and nvidia-modelopt put beside the weights.
pub(crate) fn is_cache_scale(key: &str) -> bool {
    const ENDS: [&str; 7] = [
        ".self_attn.q_scale",
        ".self_attn.k_scale",
        ".self_attn.v_scale",
        ".self_attn.k_proj.k_scale",
        ".self_attn.v_proj.v_scale",
        ".self_attn.k_proj.output_scale",
        ".self_attn.v_proj.output_scale",
    ];
    ENDS.iter().any(|end| key.ends_with(end))
}

/// What an entry of a GGUF file is of the tensor that it belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GgufPart {
    Values,
    Scale,
    InputScale,
}

/// Takes the name of an entry of a GGUF file apart: what all entries of its tensor have in common, and what it is of the tensor.
pub(crate) fn split_gguf(name: &str) -> (&str, GgufPart) {
    let ends = [(GGUF_SCALE, GgufPart::Scale), (GGUF_INPUT_SCALE, GgufPart::InputScale), (WEIGHT, GgufPart::Values)];
    let split = ends.into_iter().find_map(|(end, part)| Some((name.strip_suffix(end)?, part)));
    split.unwrap_or((name, GgufPart::Values))
}

/// What one entry of an NVFP4 tensor holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// Two codes in each byte.
    Codes,
    /// One E4M3 scale for each block of 16 values.
    Scales,
    /// One f32 scale for the tensor, in two-level files.
    TensorScale,
}

/// How a container spells the keys of an NVFP4 tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spelling {
    /// The spelling of `.dat` files.
    Dat,
    /// The spelling of nvidia-modelopt.
    ModelOpt,
    /// The spelling of compressed-tensors, which stores the reciprocal of the tensor scale.
    CompressedTensors,
}

impl Spelling {
    /// The spellings of safetensors.
    pub(crate) const SAFE: [Self; 2] = [Self::ModelOpt, Self::CompressedTensors];

    fn suffix(self, part: Part) -> &'static str {
        match (self, part) {
            (Self::Dat, Part::Codes) => ".qdata",
            (Self::Dat, Part::Scales) => ".scale",
            (Self::Dat, Part::TensorScale) => ".scale_2",
            (Self::ModelOpt, Part::Codes) => "",
            (Self::ModelOpt, Part::Scales) => "_scale",
            (Self::ModelOpt, Part::TensorScale) => "_scale_2",
            (Self::CompressedTensors, Part::Codes) => "_packed",
            (Self::CompressedTensors, Part::Scales) => "_scale",
            (Self::CompressedTensors, Part::TensorScale) => "_global_scale",
        }
    }

    /// The key of a part. `base` is the tensor's name, or what [`Self::split`] returned.
    pub(crate) fn key(self, base: &str, part: Part) -> String {
        format!("{base}{}", self.suffix(part))
    }

    /// The key of the tensor scale of the activations that the weight `name` multiplies. `.dat` files have none.
    pub(crate) fn input_scale(self, name: &str) -> Option<String> {
        let suffix = match self {
            Self::Dat => return None,
            Self::ModelOpt => ".input_scale",
            Self::CompressedTensors => ".input_global_scale",
        };
        Some(format!("{}{suffix}", name.strip_suffix(WEIGHT)?))
    }

    /// Splits a key into its base and the part that its suffix names.
    pub(crate) fn split(self, key: &str) -> Option<(&str, Part)> {
        let mut parts = [Part::Codes, Part::TensorScale, Part::Scales].into_iter();
        parts.find_map(|part| {
            let base = key.strip_suffix(self.suffix(part)).filter(|_| !self.suffix(part).is_empty())?;
            (self == Self::Dat || base.ends_with(WEIGHT)).then_some((base, part))
        })
    }
}

/// The name of the NVFP4 tensor whose keys begin with `base`.
pub(crate) fn of_base(base: &str) -> String {
    format!("{}{WEIGHT}", base.strip_suffix(WEIGHT).unwrap_or(base))
}

/// Whether a safetensors entry of bytes with this key holds codes in ModelOpt's spelling.
pub(crate) fn may_hold_codes(key: &str) -> bool {
    key.ends_with(WEIGHT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_a_tensor_are_found_by_their_keys() {
        let name = in_block(12, Q_PROJ);
        assert_eq!(name, "model.layers.12.self_attn.q_proj.weight");
        assert_eq!((block_of(&name), block_of(HEAD)), (Some(12), None));
        assert_eq!((with_block(&name, 3), with_block(HEAD, 3)), (in_block(3, Q_PROJ), HEAD.to_owned()));
        for part in [Part::Codes, Part::Scales, Part::TensorScale] {
            let key = Spelling::Dat.key(&name, part);
            assert_eq!(Spelling::Dat.split(&key), Some((name.as_str(), part)), "{key}");
        }
        for part in [Part::Scales, Part::TensorScale] {
            let key = Spelling::ModelOpt.key(&name, part);
            assert_eq!(Spelling::ModelOpt.split(&key), Some((name.as_str(), part)), "{key}");
        }
        for part in [Part::Codes, Part::Scales, Part::TensorScale] {
            let key = Spelling::CompressedTensors.key(&name, part);
            assert_eq!(Spelling::CompressedTensors.split(&key), Some((name.as_str(), part)), "{key}");
        }
        let [k, v] = [K_PROJ, V_PROJ].map(|part| in_block(12, part));
        assert_eq!(multiplied_together(&k), [name.clone(), k.clone(), v]);
        assert_eq!(multiplied_together(HEAD), [HEAD]);
        assert_eq!(Spelling::Dat.split(&name), None);
        assert_eq!(Spelling::ModelOpt.split("input_scale"), None);
        assert_eq!(of_base("model.layers.12.self_attn.q_proj"), name);
        assert_eq!(of_base(&name), name);
    }
}
