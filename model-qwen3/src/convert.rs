//! The same tensors in another format. [`Converted`] shows a checkpoint as it will be after
//! conversion, computing each tensor when it is read; the writers stream it to a file; a model loaded
//! from it is what a model loaded from that file must be. At most one tensor is in memory.

use crate::{
    ModelError,
    checkpoint::{Checkpoint, FloatType, Stored, Tensors, row_count, row_width},
    dat::{DatFile, DatWriter, ElementType},
    safetensors,
};
use ::safetensors::Dtype;
use backend_nvfp4::{
    Block, QuantizeSpec, Rounding, Scaling, View,
    layout::{scales_per_row, words_per_row},
    reference::{self, Packed},
};
use std::{io::Write, ops::Range, path::Path};

/// Bytes of a dense tensor that are read at a time.
const CHUNK: usize = 8 << 20;

/// What tensors become.
#[derive(Debug, Clone, Copy)]
pub enum Target<'a> {
    /// All dense, of one type.
    Float(FloatType),
    /// Linear layers NVFP4, the rest f16, as the origin's files are.
    Nvfp4 {
        /// With or without a tensor scale.
        scaling: Scaling,
        /// Whether a separate head is quantised too.
        head: bool,
        /// Which values share a scale.
        block: Block,
        /// The first transformer block whose linear layers stay dense.
        dense_from: usize,
    },
    /// As an existing `.dat` stores each of them. An untouched tensor keeps its bytes.
    Like(&'a Checkpoint),
}

/// A checkpoint as it will be after conversion.
#[derive(Clone, Copy)]
pub struct Converted<'a> {
    source: &'a dyn Tensors,
    target: Target<'a>,
}

impl<'a> Converted<'a> {
    /// Shows `source` as `target`.
    pub fn new(source: &'a dyn Tensors, target: Target<'a>) -> Self {
        Self { source, target }
    }

    /// Names of the source that the target has no place for.
    pub fn left_out(&self) -> Vec<String> {
        let names = self.names();
        self.source.names().into_iter().filter(|n| !names.contains(n)).collect()
    }

    /// Where a tensor's values come from: a tied head that the original spells out is the embedding.
    fn origin(&self, name: &str) -> String {
        if name == "lm_head.weight" && self.source.stored(name).is_none() {
            "model.embed_tokens.weight".to_owned()
        } else {
            name.to_owned()
        }
    }

    fn source_values(&self, name: &str, rows: Range<usize>) -> Result<Vec<f32>, ModelError> {
        match self.source.stored(name) {
            Some(Stored::Packed { cols, .. }) => {
                let q = self.source.read_packed(name)?;
                let codes = q.codes[rows.start * words_per_row(cols)..rows.end * words_per_row(cols)].to_vec();
                let scales = q.scales[rows.start * scales_per_row(cols)..rows.end * scales_per_row(cols)].to_vec();
                Ok(reference::dequantize(&Packed { codes, scales, global: q.global }, rows.len(), cols))
            }
            _ => self.source.read_rows(name, rows),
        }
    }
}

impl Tensors for Converted<'_> {
    fn path(&self) -> &Path {
        self.source.path()
    }

    fn names(&self) -> Vec<String> {
        match self.target {
            Target::Like(original) => original.names(),
            _ => self.source.names(),
        }
    }

    fn stored(&self, name: &str) -> Option<Stored> {
        let shape = self.source.stored(&self.origin(name))?.shape();
        Some(match self.target {
            Target::Float(float) => Stored::Dense { float, shape },
            Target::Like(original) => original.stored(name)?,
            Target::Nvfp4 { scaling, head, dense_from, .. }
                if is_quantised(name, head, dense_from) && shape.len() == 2 && shape[1] % 16 == 0 =>
            {
                Stored::Packed { rows: shape[0], cols: shape[1], scaling }
            }
            Target::Nvfp4 { .. } => Stored::Dense { float: FloatType::F16, shape },
        })
    }

    fn read_rows(&self, name: &str, rows: Range<usize>) -> Result<Vec<f32>, ModelError> {
        let values = self.source_values(&self.origin(name), rows)?;
        let Some(Stored::Dense { float, .. }) = self.stored(name) else {
            return Err(ModelError::weights(self.path(), format!("{name:?} becomes NVFP4")));
        };
        let rounded = float.decode(&float.encode(&values));
        if let Some(at) = rounded.iter().position(|v| !v.is_finite()) {
            let reason = format!("{name:?}: {} does not fit {}; use bf16 or f32", values[at], float.name());
            return Err(ModelError::weights(self.path(), reason));
        }
        Ok(rounded)
    }

    fn read_packed(&self, name: &str) -> Result<Packed, ModelError> {
        let Some(Stored::Packed { rows, cols, scaling }) = self.stored(name) else {
            return Err(ModelError::weights(self.path(), format!("{name:?} stays dense")));
        };
        let origin = self.origin(name);
        if let Some(Stored::Packed { scaling: old, .. }) = self.source.stored(&origin)
            && old == scaling
        {
            return self.source.read_packed(&origin);
        }
        let values = self.source_values(&origin, 0..rows)?;
        Ok(match self.target {
            Target::Like(original) => reference::requantize(&values, rows, cols, &original.read_packed(name)?, scaling),
            Target::Nvfp4 { block, .. } => {
                let spec = QuantizeSpec { scaling, block, rounding: Rounding::Nearest };
                reference::quantize(&values, View::row_major(rows, cols), spec)
            }
            Target::Float(_) => unreachable!("a float target packs nothing"),
        })
    }
}

fn is_quantised(name: &str, head: bool, dense_from: usize) -> bool {
    let block = name.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next()?.parse().ok());
    name.contains("_proj.") && block.is_none_or(|i: usize| i < dense_from) || head && name == "lm_head.weight"
}

/// One entry of a `.dat` file to be written.
struct Planned {
    key: String,
    element: ElementType,
    dims: Vec<usize>,
    name: String,
    part: Part,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Floats,
    Codes,
    Scales,
    Global,
}

/// Writes tensors as a `.dat` file. With `like`, entries have that file's order, keys and types.
///
/// # Errors
/// If a tensor of `like` is missing or of another shape, or reading or writing fails.
pub fn write_dat<W: Write>(
    tensors: &dyn Tensors,
    like: Option<&DatFile>,
    out: W,
    write_error: impl Fn(std::io::Error) -> ModelError,
) -> Result<W, ModelError> {
    let plan = match like {
        Some(original) => plan_like(tensors, original)?,
        None => plan_default(tensors),
    };
    if plan.is_empty() {
        return Err(ModelError::weights(tensors.path(), "nothing to write"));
    }
    let mut writer = DatWriter::new(out, plan.len()).map_err(&write_error)?;
    let mut packed: Option<(String, Packed)> = None;
    for entry in &plan {
        writer.entry(&entry.key, entry.element, &entry.dims).map_err(&write_error)?;
        if entry.part == Part::Floats {
            each_chunk(tensors, &entry.name, |bytes| writer.payload(bytes).map_err(&write_error))?;
            continue;
        }
        // Codes and scales of one tensor follow each other: it is computed once.
        if packed.as_ref().is_none_or(|(name, _)| *name != entry.name) {
            drop(packed.take()); // before the next one is read
            packed = Some((entry.name.clone(), tensors.read_packed(&entry.name)?));
        }
        let (_, q) = packed.as_ref().expect("set above");
        match entry.part {
            Part::Codes => q.codes.chunks(CHUNK / 4).try_for_each(|words| {
                let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
                writer.payload(&bytes)
            }),
            Part::Scales => writer.payload(&q.scales),
            Part::Global | Part::Floats => writer.payload(&q.global.to_le_bytes()),
        }
        .map_err(&write_error)?;
    }
    Ok(writer.finish())
}

fn plan_default(tensors: &dyn Tensors) -> Vec<Planned> {
    let mut plan = Vec::new();
    for name in tensors.names() {
        let mut push = |suffix: &str, element, dims, part| {
            plan.push(Planned { key: format!("{name}{suffix}"), element, dims, name: name.clone(), part });
        };
        match tensors.stored(&name) {
            Some(Stored::Dense { float, shape }) => push("", float.element(), shape, Part::Floats),
            Some(Stored::Packed { rows, cols, scaling }) => {
                push(".qdata", ElementType::U8, vec![rows, cols / 2], Part::Codes);
                push(".scale", ElementType::F8E4m3, vec![rows, cols / 16], Part::Scales);
                if scaling == Scaling::Two {
                    push(".scale_2", ElementType::F32, vec![1], Part::Global);
                }
            }
            None => {}
        }
    }
    plan
}

fn plan_like(tensors: &dyn Tensors, original: &DatFile) -> Result<Vec<Planned>, ModelError> {
    let mut plan = Vec::new();
    for entry in original.entries() {
        let (base, part) = [(".qdata", Part::Codes), (".scale_2", Part::Global), (".scale", Part::Scales)]
            .iter()
            .find_map(|(suffix, part)| entry.key.strip_suffix(suffix).map(|base| (base, *part)))
            .unwrap_or((&entry.key, Part::Floats));
        let name = match part {
            Part::Floats => base.to_owned(),
            _ => format!("{}.weight", base.strip_suffix(".weight").unwrap_or(base)),
        };
        let stored = tensors.stored(&name);
        let fits = match (&stored, part) {
            (Some(Stored::Dense { shape, .. }), Part::Floats) => *shape == entry.dims,
            (Some(Stored::Packed { rows, cols, .. }), Part::Codes) => entry.dims == [*rows, cols / 2],
            (Some(Stored::Packed { .. }), _) => true,
            _ => false,
        };
        if !fits {
            let reason = format!("the model has no counterpart of {:?} with shape {:?}", entry.key, entry.dims);
            return Err(ModelError::weights(original.path(), reason));
        }
        let (key, element, dims) = (entry.key.clone(), entry.element, entry.dims.clone());
        plan.push(Planned { key, element, dims, name, part });
    }
    Ok(plan)
}

/// Writes tensors as one safetensors file; NVFP4 in ModelOpt's layout (`weight` u8 `[N, K/2]`,
/// `weight_scale` E4M3, `weight_scale_2` f32).
///
/// # Errors
/// If reading or writing fails.
pub fn write_safetensors<W: Write>(
    tensors: &dyn Tensors,
    mut out: W,
    write_error: impl Fn(std::io::Error) -> ModelError,
) -> Result<W, ModelError> {
    let mut layout = Vec::new();
    let names = tensors.names();
    for name in &names {
        match tensors.stored(name) {
            Some(Stored::Dense { float, shape }) => {
                let dtype = match float {
                    FloatType::F16 => Dtype::F16,
                    FloatType::Bf16 => Dtype::BF16,
                    FloatType::F32 => Dtype::F32,
                };
                layout.push((name.clone(), dtype, shape));
            }
            Some(Stored::Packed { rows, cols, .. }) => {
                layout.push((name.clone(), Dtype::U8, vec![rows, cols / 2]));
                layout.push((format!("{name}_scale"), Dtype::F8_E4M3, vec![rows, cols / 16]));
                layout.push((format!("{name}_scale_2"), Dtype::F32, vec![]));
            }
            None => {}
        }
    }
    let mut put = |bytes: &[u8]| out.write_all(bytes).map_err(&write_error);
    put(&safetensors::header(&layout))?;
    for name in &names {
        match tensors.stored(name) {
            Some(Stored::Dense { .. }) => each_chunk(tensors, name, &mut put)?,
            Some(Stored::Packed { .. }) => {
                let q = tensors.read_packed(name)?;
                for words in q.codes.chunks(CHUNK / 4) {
                    put(&words.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>())?;
                }
                put(&q.scales)?;
                put(&q.global.to_le_bytes())?;
            }
            None => {}
        }
    }
    Ok(out)
}

/// Encodes a dense tensor, some rows at a time.
fn each_chunk(
    tensors: &dyn Tensors,
    name: &str,
    mut put: impl FnMut(&[u8]) -> Result<(), ModelError>,
) -> Result<(), ModelError> {
    let Some(Stored::Dense { float, shape }) = tensors.stored(name) else {
        return Err(ModelError::weights(tensors.path(), format!("{name:?} is not dense")));
    };
    let rows = row_count(&shape);
    let step = (CHUNK / (row_width(&shape) * 4).max(1)).max(1);
    for start in (0..rows).step_by(step) {
        put(&float.encode(&tensors.read_rows(name, start..(start + step).min(rows))?))?;
    }
    Ok(())
}
