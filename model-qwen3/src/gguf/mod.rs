//! Writes a model as a GGUF file (version 3), which llama.cpp and the programs that are built on it load, and reads such files.
//!
//! ```text
//! "GGUF"   version   number of tensors   number of keys
//! keys     each: name, type, value                          // sizes of the model, tokenizer, chat template
//! tensors  each: name, dimensions (fastest first), type, offset
//! values   each tensor from a multiple of 32 bytes on
//! ```
//! All numbers are little-endian. The format is defined by ggml's `docs/gguf.md`; which keys a Qwen3 needs is what
//! llama.cpp's own converter writes.

mod blocks;
mod described;
mod file_header;
mod gguf_file;
mod vocabulary;

pub use gguf_file::GgufFile;
pub use vocabulary::Vocabulary;

use crate::{
    ModelError,
    bytes::FloatType,
    config::Qwen3Config,
    names,
    repack::{HeadAs, Repacked, StoreAs},
    tensors::{Stored, Tensors, row_ranges},
};
use backend_nvfp4::{BlockShape, Packed, Scaling};
use file_header::{Header, MetadataValue};
use std::io::Write;

/// The share that 8-bit weights with their scales take of the bytes that they take in f32.
pub const Q8_OF_F32: f64 = blocks::Q8_BYTES as f64 / (4 * blocks::Q8_VALUES) as f64;

/// Values of a dense tensor that are read at a time.
const CHUNK: usize = 2 << 20;

/// How a GGUF file stores the matrices of a model. Norms are f32 in every file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Matrices {
    /// As floats.
    Float(FloatType),
    /// As 8-bit integers with an f16 scale for each 32.
    Q8,
    /// Linear layers as NVFP4, the embedding and a head of its own as f16. Weights that are NVFP4 keep their codes.
    Nvfp4 {
        /// Which values share a block scale.
        block: BlockShape,
        /// Whether matrices that are multiplied together share one tensor scale.
        shares_scale: bool,
        /// The first block whose linear layers are f16 too, unless they are NVFP4 already.
        dense_from: usize,
    },
}

/// What a GGUF file says about a model besides its tensors.
#[derive(Debug, Clone, Copy)]
pub struct About<'a> {
    /// The model's name.
    pub name: &'a str,
    /// The sizes of the model.
    pub config: &'a Qwen3Config,
    /// The tokens of the model.
    pub vocabulary: &'a Vocabulary,
    /// The source of the model's chat template.
    pub template: &'a str,
    /// The token that ends an answer.
    pub eos: u32,
    /// Whether the model was trained for 4-bit activations.
    pub packs_activations: bool,
}

/// Writes the file.
///
/// # Errors
/// If rows of a matrix do not fill whole blocks of the format, or reading or writing fails.
pub fn write_gguf<Out: Write>(
    tensors: &dyn Tensors,
    matrices: Matrices,
    about: &About<'_>,
    mut out: Out,
    write_error: impl Fn(std::io::Error) -> ModelError,
) -> Result<Out, ModelError> {
    let file = File::new(tensors, matrices);
    let entries = file.entries()?;
    let mut header = Header::new();
    for (key, value) in keys(about, matrices, &entries) {
        header.key(&key, &value);
    }
    for entry in &entries {
        header.tensor(&entry.name, &entry.shape, entry.kind.number(), entry.bytes());
    }
    let mut put = |bytes: &[u8]| out.write_all(bytes).map_err(&write_error);
    put(&header.into_bytes())?;
    for entry in &entries {
        file.put(entry, &mut put)?;
        let end = entry.bytes();
        put(&vec![0; (end.next_multiple_of(file_header::ALIGNMENT) - end) as usize])?;
    }
    Ok(out)
}

/// How the values of a tensor lie in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Float(FloatType),
    Q8,
    Nvfp4,
    /// The tensor scale of the NVFP4 tensor that stands before.
    TensorScale,
    /// The tensor scale of the activations that this NVFP4 tensor multiplies.
    InputScale,
}

impl Kind {
    /// The type of this number, if it is one that is read.
    fn of(number: u32) -> Option<Self> {
        let floats = [FloatType::F32, FloatType::F16, FloatType::Bf16].map(Self::Float);
        floats.into_iter().chain([Self::Q8, Self::Nvfp4]).find(|kind| kind.number() == number)
    }

    /// The bytes of so many values, which fill whole blocks.
    fn bytes(self, values: usize) -> u64 {
        let (block, bytes) = self.block();
        (values / block * bytes) as u64
    }

    /// ggml's number for the type.
    fn number(self) -> u32 {
        match self {
            Self::Float(FloatType::F32) | Self::TensorScale | Self::InputScale => 0,
            Self::Float(FloatType::F16) => 1,
            Self::Q8 => 8,
            Self::Float(FloatType::Bf16) => 30,
            Self::Nvfp4 => 40,
        }
    }

    /// Values of a block, and its bytes.
    fn block(self) -> (usize, usize) {
        match self {
            Self::Float(float) => (1, float.size()),
            Self::TensorScale | Self::InputScale => (1, 4),
            Self::Q8 => (blocks::Q8_VALUES, blocks::Q8_BYTES),
            Self::Nvfp4 => (blocks::NVFP4_VALUES, blocks::NVFP4_BYTES),
        }
    }
}

/// A tensor of the file.
struct Entry {
    /// The name of the tensor in the file.
    name: String,
    /// The tensor of the model that it holds.
    source: String,
    shape: Vec<usize>,
    kind: Kind,
}

impl Entry {
    fn bytes(&self) -> u64 {
        self.kind.bytes(self.shape.iter().product())
    }
}

struct File<'a> {
    source: &'a dyn Tensors,
    matrices: Matrices,
    /// The source as floats of the matrices' type, or of f32.
    dense: Repacked<'a>,
    /// The source with its dense linear layers in NVFP4.
    packed: Repacked<'a>,
    /// Whether the source holds NVFP4. What such a file keeps dense stays dense.
    has_codes: bool,
}

impl<'a> File<'a> {
    fn new(source: &'a dyn Tensors, matrices: Matrices) -> Self {
        let (float, (block, shares_scale, dense_from)) = match matrices {
            Matrices::Float(float) => (float, (BlockShape::Row, false, 0)),
            Matrices::Q8 => (FloatType::F32, (BlockShape::Row, false, 0)),
            Matrices::Nvfp4 { block, shares_scale, dense_from } => (FloatType::F16, (block, shares_scale, dense_from)),
        };
        let nvfp4 = StoreAs::Nvfp4 {
            scaling: Scaling::Two,
            head: HeadAs::Float(FloatType::F16),
            block,
            shares_scale,
            dense_from,
        };
        let dense = Repacked::new(source, StoreAs::Float(float));
        Self { source, matrices, dense, packed: Repacked::new(source, nvfp4), has_codes: source.holds_nvfp4() }
    }

    /// The tensors of the file in order. Each NVFP4 tensor is followed by its tensor scale, and by that of its activations if
    /// the source gives one.
    fn entries(&self) -> Result<Vec<Entry>, ModelError> {
        let mut entries = Vec::new();
        for source in self.source.names() {
            let name = names::in_gguf(&source)
                .ok_or_else(|| ModelError::weights(self.source.path(), format!("GGUF has no place for {source:?}")))?;
            let stored = self.source.stored(&source).ok_or_else(|| ModelError::missing(self.source.path(), &source))?;
            let (shape, kind) = (stored.shape(), self.kind(&source, &stored));
            let (values, _) = kind.block();
            if shape.last().is_none_or(|cols| !cols.is_multiple_of(values)) {
                let cols = shape.last().copied().unwrap_or_default();
                let reason = format!(
                    "{source:?} has shape {shape:?}: its K = {cols} is not a multiple of {values}, as blocks of this number \
                     format in GGUF files need; use --dtype bf16"
                );
                return Err(ModelError::Format { path: self.source.path().to_owned(), reason });
            }
            let (scale, input) = (names::scale_in_gguf(&name), names::input_scale_in_gguf(&name));
            let beside = |name, kind| Entry { name, source: source.clone(), shape: vec![1], kind };
            entries.push(Entry { name, source: source.clone(), shape, kind });
            if kind == Kind::Nvfp4 {
                entries.push(beside(scale, Kind::TensorScale));
                if self.source.gives_input_scale(&source) {
                    entries.push(beside(input, Kind::InputScale));
                }
            }
        }
        Ok(entries)
    }

    fn kind(&self, name: &str, stored: &Stored) -> Kind {
        let is_packed = matches!(stored, Stored::Packed { .. });
        let becomes_packed = |dense_from| !self.has_codes && names::block_of(name).is_some_and(|b| b < dense_from);
        match self.matrices {
            _ if stored.shape().len() < 2 => Kind::Float(FloatType::F32),
            Matrices::Float(float) => Kind::Float(float),
            Matrices::Q8 => Kind::Q8,
            Matrices::Nvfp4 { dense_from, .. }
                if names::is_projection(name) && (is_packed || becomes_packed(dense_from)) =>
            {
                Kind::Nvfp4
            }
            Matrices::Nvfp4 { .. } => Kind::Float(FloatType::F16),
        }
    }

    /// The codes of a linear layer: those of the source, if it has some. The tensor scale of single-level ones is 1.
    fn nvfp4(&self, name: &str) -> Result<Packed, ModelError> {
        match self.source.stored(name) {
            Some(Stored::Packed { .. }) => self.source.read_packed(name),
            _ => self.packed.read_packed(name),
        }
    }

    /// Writes the values of a tensor.
    fn put(&self, entry: &Entry, put: &mut dyn FnMut(&[u8]) -> Result<(), ModelError>) -> Result<(), ModelError> {
        let name = &entry.source;
        match entry.kind {
            Kind::Nvfp4 => put(&blocks::nvfp4(&self.nvfp4(name)?, entry.shape[0], entry.shape[1])),
            Kind::TensorScale => put(&FloatType::F32.encode(&[self.nvfp4(name)?.global])),
            Kind::InputScale => match self.source.input_scale(name)? {
                Some(given) => put(&FloatType::F32.encode(&[given.scale()])),
                None => Err(ModelError::missing(self.source.path(), name)),
            },
            Kind::Q8 => {
                let mut rows = row_ranges(&entry.shape, CHUNK);
                rows.try_for_each(|rows| put(&blocks::q8(&self.dense.read_rows(name, rows)?)))
            }
            // Norms are f32 whatever the matrices are.
            Kind::Float(float) => {
                let in_f32 = Repacked::new(self.source, F32);
                let values = if entry.shape.len() < 2 { &in_f32 } else { &self.dense };
                let mut rows = row_ranges(&entry.shape, CHUNK);
                rows.try_for_each(|rows| put(&float.encode(&values.read_rows(name, rows)?)))
            }
        }
    }
}

const F32: StoreAs<'static> = StoreAs::Float(FloatType::F32);

/// The keys of the file.
fn keys(about: &About<'_>, matrices: Matrices, entries: &[Entry]) -> Vec<(String, MetadataValue)> {
    let c = about.config;
    let file_type = match matrices {
        Matrices::Float(FloatType::F32) => 0,
        Matrices::Float(FloatType::F16) => 1,
        Matrices::Q8 => 7,
        Matrices::Float(FloatType::Bf16) => 32,
        Matrices::Nvfp4 { .. } => 39,
    };
    let text = |text: &str| MetadataValue::Text(text.to_owned());
    let mut keys = vec![
        ("general.architecture".to_owned(), text("qwen3")),
        ("general.type".to_owned(), text("model")),
        ("general.name".to_owned(), text(about.name)),
        ("general.file_type".to_owned(), MetadataValue::U32(file_type)),
        ("general.quantization_version".to_owned(), MetadataValue::U32(2)),
    ];
    let sizes = [
        ("block_count", c.num_hidden_layers),
        ("context_length", c.max_position_embeddings),
        ("embedding_length", c.hidden_size),
        ("feed_forward_length", c.intermediate_size),
        ("attention.head_count", c.num_attention_heads),
        ("attention.head_count_kv", c.num_key_value_heads),
        ("attention.key_length", c.head_dim),
        ("attention.value_length", c.head_dim),
    ];
    keys.extend(sizes.into_iter().map(|(key, size)| (format!("qwen3.{key}"), MetadataValue::U32(size as u32))));
    keys.push(("qwen3.rope.freq_base".into(), MetadataValue::F32(c.rope_theta as f32)));
    keys.push(("qwen3.attention.layer_norm_rms_epsilon".into(), MetadataValue::F32(c.rms_norm_eps as f32)));
    let packed: Vec<String> = entries.iter().filter(|e| e.kind == Kind::Nvfp4).map(|e| e.name.clone()).collect();
    if !packed.is_empty() && !about.packs_activations {
        // Cards that multiply NVFP4 would quantize activations to 4 bits, which these weights were not trained for.
        keys.push(("general.tensor_extra.prec_a4".into(), MetadataValue::Bools(vec![false; packed.len()])));
        keys.push(("general.tensor_extra.name".into(), MetadataValue::Texts(packed)));
    }
    keys.extend(about.vocabulary.keys(c.vocab_size));
    keys.push(("tokenizer.ggml.eos_token_id".into(), MetadataValue::U32(about.eos)));
    keys.push(("tokenizer.chat_template".into(), text(about.template)));
    keys
}
