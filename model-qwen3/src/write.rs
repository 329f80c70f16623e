//! Streams tensors to a `.dat` or a safetensors file. A dense tensor is encoded some rows at a time.

use crate::{
    ModelError,
    bytes::{self, FloatType},
    dat::{DatFile, DatWriter, ElementType},
    names::{self, Part, Spelling},
    safetensors,
    tensors::{Stored, Tensors, row_ranges},
};
use ::safetensors::Dtype;
use backend_nvfp4::{Packed, Scaling, layout::scales_per_row};
use std::io::Write;

/// Values of a dense tensor that are read at a time, and words of codes that are encoded at a time.
const CHUNK: usize = 2 << 20;

/// Writes tensors as a `.dat` file. With `like`, entries have that file's order, keys and types.
///
/// # Errors
/// If a tensor of `like` is missing or has another shape, or reading or writing fails.
pub fn write_dat<Out: Write>(
    tensors: &dyn Tensors,
    like: Option<&DatFile>,
    out: Out,
    write_error: impl Fn(std::io::Error) -> ModelError,
) -> Result<Out, ModelError> {
    let plan = match like {
        Some(original) => plan_like(tensors, original)?,
        None => plan_default(tensors),
    };
    if plan.is_empty() {
        return Err(ModelError::weights(tensors.path(), "there is no tensor to write"));
    }
    let mut writer = DatWriter::new(out, plan.len()).map_err(&write_error)?;
    let mut packed: Option<(&str, Packed)> = None;
    for entry in &plan {
        writer.entry(&entry.key, entry.element, &entry.dims).map_err(&write_error)?;
        let mut put = |bytes: &[u8]| writer.payload(bytes).map_err(&write_error);
        let Some(part) = entry.part else {
            put_floats(tensors, &entry.name, put)?;
            continue;
        };
        // The parts of one tensor follow each other, so that it is computed once.
        if packed.as_ref().is_none_or(|(name, _)| *name != entry.name) {
            drop(packed.take()); // The host never holds two of them.
            packed = Some((&entry.name, tensors.read_packed(&entry.name)?));
        }
        let (_, q) = packed.as_ref().expect("it was just read");
        put_part(q, part, &mut put)?;
    }
    Ok(writer.finish())
}

/// One entry of a `.dat` file to be written.
struct Planned {
    key: String,
    element: ElementType,
    dims: Vec<usize>,
    /// The tensor.
    name: String,
    /// What the entry holds of an NVFP4 tensor. `None` for the floats of a dense one.
    part: Option<Part>,
}

fn plan_default(tensors: &dyn Tensors) -> Vec<Planned> {
    let mut plan = Vec::new();
    for name in tensors.names() {
        match tensors.stored(&name) {
            Some(Stored::Dense { float, shape }) => {
                plan.push(Planned { key: name.clone(), element: float.into(), dims: shape, name, part: None });
            }
            Some(Stored::Packed { rows, cols, scaling }) => {
                plan.extend(parts(scaling, Spelling::Dat).iter().map(|&part| {
                    let (element, dims) = match part {
                        Part::Codes => (ElementType::U8, vec![rows, cols / 2]),
                        Part::Scales => (ElementType::F8E4m3, vec![rows, scales_per_row(cols)]),
                        Part::TensorScale => (ElementType::F32, vec![1]),
                    };
                    let key = Spelling::Dat.key(&name, part);
                    Planned { key, element, dims, name: name.clone(), part: Some(part) }
                }));
            }
            None => {}
        }
    }
    plan
}

fn plan_like(tensors: &dyn Tensors, original: &DatFile) -> Result<Vec<Planned>, ModelError> {
    let mut plan = Vec::new();
    for entry in original.entries() {
        let (name, part) = match Spelling::Dat.split(&entry.key) {
            None => (entry.key.clone(), None),
            Some((base, part)) => (names::of_base(base), Some(part)),
        };
        let fits = match (&tensors.stored(&name), part) {
            (Some(Stored::Dense { shape, .. }), None) => *shape == entry.dims,
            (Some(Stored::Packed { rows, cols, .. }), Some(Part::Codes)) => entry.dims == [*rows, cols / 2],
            (Some(Stored::Packed { .. }), Some(_)) => true,
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

/// Writes tensors as one safetensors file, with NVFP4 in ModelOpt's layout: codes u8 `[N, K/2]`, scales E4M3
/// `[N, K/16]` and, in two-level tensors, a tensor scale f32.
///
/// # Errors
/// If reading or writing fails.
pub fn write_safetensors<Out: Write>(
    tensors: &dyn Tensors,
    out: Out,
    write_error: impl Fn(std::io::Error) -> ModelError,
) -> Result<Out, ModelError> {
    write_shard(tensors, &tensors.names(), Spelling::ModelOpt, out, write_error)
}

/// Writes some of the tensors as a safetensors file, with NVFP4 in this spelling.
///
/// # Errors
/// If reading or writing fails.
pub fn write_shard<Out: Write>(
    tensors: &dyn Tensors,
    names: &[String],
    spelling: Spelling,
    mut out: Out,
    write_error: impl Fn(std::io::Error) -> ModelError,
) -> Result<Out, ModelError> {
    let layout: Vec<_> = names.iter().flat_map(|name| entries(tensors, name, spelling)).collect();
    let mut put = |bytes: &[u8]| out.write_all(bytes).map_err(&write_error);
    put(&safetensors::header(&layout))?;
    for name in names {
        match tensors.stored(name) {
            Some(Stored::Dense { .. }) => put_floats(tensors, name, &mut put)?,
            Some(Stored::Packed { scaling, .. }) => {
                let mut q = tensors.read_packed(name)?;
                if spelling == Spelling::CompressedTensors {
                    q.global = tensors.reciprocal_scale(name, &q)?;
                }
                parts(scaling, spelling).iter().try_for_each(|&part| put_part(&q, part, &mut put))?;
                put(&input_scale(tensors, name, spelling)?)?;
            }
            None => {}
        }
    }
    Ok(out)
}

/// The tensors of each safetensors file, in order, so that no file has more than `limit` bytes of values unless one tensor
/// has.
pub fn shards(tensors: &dyn Tensors, spelling: Spelling, limit: u64) -> Vec<Vec<String>> {
    let mut shards: Vec<Vec<String>> = vec![];
    let mut room = 0;
    for name in tensors.names() {
        let bytes = bytes_of(tensors, &name, spelling);
        match shards.last_mut() {
            Some(shard) if bytes <= room => shard.push(name),
            _ => {
                shards.push(vec![name]);
                room = limit;
            }
        }
        room = room.saturating_sub(bytes);
    }
    shards
}

/// The keys of a tensor's entries in a safetensors file.
pub fn keys(tensors: &dyn Tensors, name: &str, spelling: Spelling) -> Vec<String> {
    entries(tensors, name, spelling).into_iter().map(|(key, ..)| key).collect()
}

/// The bytes that a tensor takes in a safetensors file.
pub fn bytes_of(tensors: &dyn Tensors, name: &str, spelling: Spelling) -> u64 {
    let entries = entries(tensors, name, spelling);
    entries.iter().map(|(_, dtype, shape)| (shape.iter().product::<usize>() * dtype.bitsize() / 8) as u64).sum()
}

/// The parts of an NVFP4 tensor, in the order of files.
static PARTS: [Part; 3] = [Part::Codes, Part::Scales, Part::TensorScale];

/// The parts that a file has. A single-level tensor has no tensor scale, but compressed-tensors knows two levels only.
fn parts(scaling: Scaling, spelling: Spelling) -> &'static [Part] {
    let has_scale = scaling == Scaling::Two || spelling == Spelling::CompressedTensors;
    &PARTS[..if has_scale { 3 } else { 2 }]
}

/// The entries of a tensor in a safetensors file: key, type and shape.
fn entries(tensors: &dyn Tensors, name: &str, spelling: Spelling) -> Vec<(String, Dtype, Vec<usize>)> {
    match tensors.stored(name) {
        Some(Stored::Dense { float, shape }) => vec![(name.to_owned(), safetensors::dtype_of(float), shape)],
        Some(Stored::Packed { rows, cols, scaling }) => {
            // compressed-tensors writes a vector of one value.
            let one = if spelling == Spelling::CompressedTensors { vec![1] } else { vec![] };
            let input = spelling.input_scale(name).filter(|_| tensors.gives_input_scale(name));
            let entry = |&part: &Part| {
                let (dtype, shape) = match part {
                    Part::Codes => (Dtype::U8, vec![rows, cols / 2]),
                    Part::Scales => (Dtype::F8_E4M3, vec![rows, scales_per_row(cols)]),
                    Part::TensorScale => (Dtype::F32, one.clone()),
                };
                (spelling.key(name, part), dtype, shape)
            };
            let input = input.map(|input| (input, Dtype::F32, one.clone()));
            parts(scaling, spelling).iter().map(entry).chain(input).collect()
        }
        None => vec![],
    }
}

/// The bytes of the tensor scale of the activations that an NVFP4 tensor multiplies. There are none if none is given.
fn input_scale(tensors: &dyn Tensors, name: &str, spelling: Spelling) -> Result<Vec<u8>, ModelError> {
    if !tensors.gives_input_scale(name) {
        return Ok(vec![]);
    }
    let given = tensors.input_scale(name)?.ok_or_else(|| ModelError::missing(tensors.path(), name))?;
    let stored = if spelling == Spelling::CompressedTensors { given.reciprocal() } else { given.scale() };
    Ok(FloatType::F32.encode(&[stored]))
}

/// Writes the values of a dense tensor, some rows at a time.
fn put_floats(
    tensors: &dyn Tensors,
    name: &str,
    mut put: impl FnMut(&[u8]) -> Result<(), ModelError>,
) -> Result<(), ModelError> {
    let shape = tensors.stored(name).ok_or_else(|| ModelError::missing(tensors.path(), name))?.shape();
    row_ranges(&shape, CHUNK).try_for_each(|rows| tensors.put_rows(name, rows, &mut put))
}

/// Writes one part of an NVFP4 tensor.
fn put_part(q: &Packed, part: Part, put: &mut impl FnMut(&[u8]) -> Result<(), ModelError>) -> Result<(), ModelError> {
    match part {
        Part::Codes => q.codes.chunks(CHUNK).try_for_each(|words| put(&bytes::of_u32s(words.iter().copied()))),
        Part::Scales => put(&q.scales),
        Part::TensorScale => put(&FloatType::F32.encode(&[q.global])),
    }
}
