//! A model's tensors with its linear layers in NVFP4 as compressed-tensors or nvidia-modelopt spell and quantize it. Other
//! tensors are bf16.
//!
//! NVFP4 weights keep their codes and block scales. Inference engines multiply q, k and v as one matrix, and gate and up as
//! another, which needs one tensor scale for each of the two: matrices that have a smaller one are rescaled, and
//! [`Foreign::changed`] counts the codes and block scales that this changes. Dense weights are quantized by the library's own
//! formula.
//!
//! If [`Foreign::with_inputs`] knows the largest magnitudes of what layers read, these get tensor scales for 4-bit activations.
//! [`Foreign::with_given_inputs`] keeps those that the source has.

use crate::{
    ModelError,
    bytes::FloatType,
    maxima::Maxima,
    names::{self, Spelling},
    repack::{Repacked, StoreAs},
    tensors::{Stored, Tensors},
};
use backend_nvfp4::{
    GivenScale, Packed, Scaling,
    layout::BLOCK,
    reference::{self, Dialect},
};
use std::{collections::BTreeMap, ops::Range, path::Path};

/// A library that stores NVFP4.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Library {
    /// compressed-tensors, whose format vLLM calls `nvfp4-pack-quantized`.
    CompressedTensors,
    /// nvidia-modelopt, which exports `W4A16_NVFP4` and `NVFP4`.
    ModelOpt,
}

impl Library {
    /// How the keys of NVFP4 tensors are spelled.
    pub fn spelling(self) -> Spelling {
        if self == Self::CompressedTensors { Spelling::CompressedTensors } else { Spelling::ModelOpt }
    }

    /// How weights that were stored in `float` are quantized.
    fn dialect(self, float: FloatType) -> Dialect {
        match self {
            Self::CompressedTensors => Dialect::CompressedTensors(float.dtype()),
            Self::ModelOpt => Dialect::ModelOpt,
        }
    }

    /// The tensor scale of activations with this largest magnitude, as the library computes it in f32.
    fn input_scale(self, amax: f32) -> Option<GivenScale> {
        match self {
            // The factor that the library computes of it would be infinite.
            _ if !(reference::FULL_SCALE / amax).is_finite() => None,
            Self::CompressedTensors => GivenScale::of_reciprocal(self.dialect(FloatType::F32).divisor(amax)),
            Self::ModelOpt => GivenScale::of_scale(amax / reference::FULL_SCALE),
        }
    }

    /// This scale as a reader of the library's file gets it: the file holds either the scale or its reciprocal, rounded, and the
    /// reader computes the other number from that.
    fn held(self, given: GivenScale) -> GivenScale {
        let held = match self {
            Self::CompressedTensors => GivenScale::of_reciprocal(given.reciprocal()),
            Self::ModelOpt => GivenScale::of_scale(given.scale()),
        };
        // If the other number is not finite, reading the file back says so.
        held.unwrap_or(given)
    }
}

/// How many codes and block scales of NVFP4 weights an export changes, and of how many.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Changed {
    /// Codes that differ.
    pub codes: usize,
    /// All codes.
    pub of_codes: usize,
    /// Block scales that were rounded.
    pub scales: usize,
    /// All block scales.
    pub of_scales: usize,
}

/// A model's tensors as another library stores them.
pub struct Foreign<'a> {
    source: &'a dyn Tensors,
    /// The tensors that stay dense.
    dense: Repacked<'a>,
    library: Library,
    /// The first block whose dense linear layers stay dense.
    dense_from: usize,
    maxima: Maxima<'a>,
    /// The tensor scale of what each linear layer reads, where activations are NVFP4 too.
    inputs: BTreeMap<String, GivenScale>,
}

impl<'a> Foreign<'a> {
    /// Shows `source` as `library` stores it. Of a source without NVFP4, the linear layers of all blocks before
    /// `dense_from` are quantized.
    pub fn new(source: &'a dyn Tensors, library: Library, dense_from: usize) -> Self {
        // What a file with NVFP4 keeps dense stays dense.
        let dense_from = if source.holds_nvfp4() { 0 } else { dense_from };
        let dense = Repacked::new(source, StoreAs::Float(FloatType::Bf16));
        Self { source, dense, library, dense_from, maxima: Maxima::new(source), inputs: BTreeMap::new() }
    }

    /// Gives the activations of each NVFP4 layer a tensor scale. `amax` has the largest magnitude of what a layer reads, by the
    /// name of its weight. Layers that engines multiply together get one scale, that of the largest.
    ///
    /// # Errors
    /// The name of a layer without a magnitude, or with one that has no scale because it is zero, too small or not finite.
    pub fn with_inputs(mut self, amax: &BTreeMap<String, f32>) -> Result<Self, String> {
        let mut inputs = BTreeMap::new();
        for name in self.names() {
            if !matches!(self.stored(&name), Some(Stored::Packed { .. })) {
                continue;
            }
            let together = names::multiplied_together(&name);
            let finite = |name: &String| amax.get(name).copied().filter(|amax| amax.is_finite());
            let magnitudes: Option<Vec<f32>> = together.iter().map(finite).collect();
            let largest = magnitudes.and_then(|all| all.into_iter().reduce(f32::max));
            match largest.and_then(|amax| self.library.input_scale(amax)) {
                Some(scale) => inputs.insert(name, scale),
                None => return Err(name),
            };
        }
        self.inputs = inputs;
        Ok(self)
    }

    /// Gives the activations of each NVFP4 layer the tensor scale that the source gives them. Layers that engines multiply together
    /// get one scale, the largest.
    ///
    /// # Errors
    /// If a scale is broken, or a layer has none.
    pub fn with_given_inputs(mut self) -> Result<Self, ModelError> {
        let mut inputs = BTreeMap::new();
        for name in self.names() {
            if !matches!(self.stored(&name), Some(Stored::Packed { .. })) {
                continue;
            }
            let mut largest: Option<GivenScale> = None;
            for part in names::multiplied_together(&name) {
                let Some(given) = self.source.input_scale(&part)? else {
                    let reason = format!(
                        "it gives the activations of some layers a scale, and none to those of {part:?}; measure them with \
                         --activations nvfp4 --calibration-data FILES, or leave them out with --activations bf16"
                    );
                    return Err(ModelError::weights(self.path(), reason));
                };
                if largest.is_none_or(|largest| largest.scale() < given.scale()) {
                    largest = Some(given);
                }
            }
            inputs.extend(largest.map(|scale| (name, self.library.held(scale))));
        }
        self.inputs = inputs;
        Ok(self)
    }

    /// What a shared tensor scale changes in weights that are NVFP4 already.
    ///
    /// # Errors
    /// If a tensor cannot be read.
    pub fn changed(&self) -> Result<Changed, ModelError> {
        let mut changed = Changed::default();
        for name in self.names() {
            let Some(Stored::Packed { rows, cols, .. }) = self.source.stored(&name) else { continue };
            if !matches!(self.stored(&name), Some(Stored::Packed { .. })) {
                continue;
            }
            changed.of_codes += rows * cols;
            changed.of_scales += rows * cols / BLOCK;
            if self.shared_scale(&name)? == self.source.read_packed_rows(&name, 0..0)?.global {
                continue;
            }
            let (own, ours) = (self.source.read_packed(&name)?, self.read_packed(&name)?);
            let value = |scale: &u8, packed: &Packed| reference::e4m3_decode(*scale) * packed.global;
            changed.scales +=
                own.scales.iter().zip(&ours.scales).filter(|(a, b)| value(a, &own) != value(b, &ours)).count();
            let words = own.codes.iter().zip(&ours.codes);
            changed.codes += words.map(|(a, b)| reference::different_codes(*a, *b)).sum::<usize>();
        }
        Ok(changed)
    }

    /// The largest tensor scale of the NVFP4 matrices that share one with this one.
    fn shared_scale(&self, name: &str) -> Result<f32, ModelError> {
        let mut shared = 0.0f32;
        for name in names::multiplied_together(name) {
            if matches!(self.source.stored(&name), Some(Stored::Packed { .. })) {
                shared = shared.max(self.source.read_packed_rows(&name, 0..0)?.global);
            }
        }
        Ok(shared)
    }
}

impl Tensors for Foreign<'_> {
    fn path(&self) -> &Path {
        self.source.path()
    }

    fn names(&self) -> Vec<String> {
        self.source.names()
    }

    fn stored(&self, name: &str) -> Option<Stored> {
        let packed = match self.source.stored(name)? {
            Stored::Packed { .. } => true,
            Stored::Dense { .. } => names::block_of(name).is_some_and(|block| block < self.dense_from),
        };
        let dense = self.dense.stored(name)?;
        match dense.shape()[..] {
            [rows, cols] if packed && names::is_projection(name) && cols.is_multiple_of(BLOCK) => {
                Some(Stored::Packed { rows, cols, scaling: Scaling::Two })
            }
            _ => Some(dense),
        }
    }

    fn read_rows(&self, name: &str, rows: Range<usize>) -> Result<Vec<f32>, ModelError> {
        self.dense.read_rows(name, rows)
    }

    fn reciprocal_scale(&self, name: &str, packed: &Packed) -> Result<f32, ModelError> {
        match self.source.stored(name) {
            // The library's own value, which a reciprocal of the reciprocal may miss.
            Some(Stored::Dense { float, .. }) => Ok(self.library.dialect(float).divisor(self.maxima.together(name)?)),
            Some(Stored::Packed { .. }) if self.source.read_packed_rows(name, 0..0)?.global == packed.global => {
                self.source.reciprocal_scale(name, packed)
            }
            _ => Ok(1.0 / packed.global),
        }
    }

    fn gives_input_scale(&self, name: &str) -> bool {
        self.inputs.contains_key(name)
    }

    fn input_scale(&self, name: &str) -> Result<Option<GivenScale>, ModelError> {
        Ok(self.inputs.get(name).copied())
    }

    fn read_packed(&self, name: &str) -> Result<Packed, ModelError> {
        let mut packed = match self.source.stored(name) {
            Some(Stored::Packed { cols, .. }) => {
                let (own, shared) = (self.source.read_packed(name)?, self.shared_scale(name)?);
                if shared == own.global { own } else { reference::rescale(&own, cols, shared) }
            }
            Some(Stored::Dense { float, shape }) => {
                let values = self.source.read_dense(name)?;
                self.library.dialect(float).quantize(&values, shape[1], self.maxima.together(name)?)
            }
            None => return Err(ModelError::missing(self.path(), name)),
        };
        if self.library == Library::CompressedTensors {
            // What a reader of the file gets, which holds the reciprocal.
            packed.global = 1.0 / self.reciprocal_scale(name, &packed)?;
        }
        Ok(packed)
    }
}
