//! An outline of a model: few blocks, and no values. A rehearsal with it launches the kernels of the model, in less time and with
//! less memory.

use super::load::{Purpose, load};
use crate::{
    ModelError,
    config::Qwen3Config,
    model::Qwen3,
    names::{block_of, is_projection, with_block},
    tensors::{Stored, Tensors, row_width},
};
use backend_nvfp4::{GivenScale, LinearSpec, Nvfp4Kernels, Packed};
use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    ops::Range,
    path::Path,
};

/// Makes the outline, for inference, of the model that `tensors` hold: one block of each kind, with matrices that have no values.
/// Two blocks are of one kind if the same layers are NVFP4, and the same layers have a scale for their activations.
///
/// # Errors
/// As [`load()`].
pub fn outline<B: Nvfp4Kernels>(
    tensors: &dyn Tensors,
    config: &Qwen3Config,
    spec: LinearSpec,
    device: &B::Device,
) -> Result<Qwen3<B>, ModelError> {
    let blocks = one_of_each_kind(tensors);
    let config = Qwen3Config { num_hidden_layers: blocks.len(), ..config.clone() };
    let outline = Outline { tensors, blocks };
    load(&outline, &config, spec, Purpose::Infer, device)
}

/// The first block of each kind, in order.
fn one_of_each_kind(tensors: &dyn Tensors) -> Vec<usize> {
    let mut kinds: BTreeMap<usize, BlockKind> = BTreeMap::new();
    for name in tensors.names().into_iter().filter(|name| is_projection(name)) {
        if let Some(block) = block_of(&name) {
            let packed = matches!(tensors.stored(&name), Some(Stored::Packed { .. }));
            let layer = (with_block(&name, 0), packed, tensors.gives_input_scale(&name));
            kinds.entry(block).or_default().insert(layer);
        }
    }
    let mut known = HashSet::new();
    kinds.into_iter().filter(|(_, kind)| known.insert(kind.clone())).map(|(block, _)| block).collect()
}

/// For each layer of a block its name, whether it is NVFP4, and whether it has a scale for its activations.
type BlockKind = BTreeSet<(String, bool, bool)>;

/// Tensors without values, in the types and shapes of a model's tensors.
struct Outline<'a> {
    tensors: &'a dyn Tensors,
    /// The blocks of the model that this one has.
    blocks: Vec<usize>,
}

impl Outline<'_> {
    /// The name that a tensor has in the model.
    fn origin(&self, name: &str) -> String {
        match block_of(name).and_then(|block| self.blocks.get(block)) {
            Some(block) => with_block(name, *block),
            None => name.to_owned(),
        }
    }
}

impl Tensors for Outline<'_> {
    fn path(&self) -> &Path {
        self.tensors.path()
    }

    /// None: who loads this model asks for all that it has.
    fn names(&self) -> Vec<String> {
        Vec::new()
    }

    fn stored(&self, name: &str) -> Option<Stored> {
        self.tensors.stored(&self.origin(name))
    }

    fn is_outline(&self) -> bool {
        true
    }

    /// Vectors are zeros.
    fn read_rows(&self, name: &str, rows: Range<usize>) -> Result<Vec<f32>, ModelError> {
        let stored = self.stored(name).ok_or_else(|| ModelError::missing(self.path(), name))?;
        Ok(vec![0.0; rows.len() * row_width(&stored.shape())])
    }

    fn read_packed(&self, name: &str) -> Result<Packed, ModelError> {
        Err(ModelError::missing(self.path(), name))
    }

    fn gives_input_scale(&self, name: &str) -> bool {
        self.tensors.gives_input_scale(&self.origin(name))
    }

    fn input_scale(&self, name: &str) -> Result<Option<GivenScale>, ModelError> {
        self.tensors.input_scale(&self.origin(name))
    }
}
