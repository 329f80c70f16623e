//! `export-dat`, and the export at the end of `fit`: trained weights to a file that is known to work before it gets its
//! name. `export_check.rs` checks it.

use super::export_check::{Check, CheckFile};
use crate::{
    CliError,
    args::ExportArgs,
    device,
    durable::{self, FileRecord, PendingFolder},
    model_files::{Companions, TextFiles},
    outputs::{check_dat_name, check_free, check_output},
    progress::{self, Writing},
    report,
    run::{
        checkpoint,
        export_format::ExportFormat,
        inputs::packed_scaling,
        located::{check_unchanged, located},
        stored_model::StoredModel,
        trained::Trained,
    },
    settings::defaults::SCALING,
};
use backend_nvfp4::{BlockShape, DeviceServices, LinearSpec, Nvfp4Kernels, Recipe};
use model_qwen3::{
    ModelError,
    bytes::FloatType,
    config::Qwen3Config,
    container::Container,
    model::Qwen3,
    names,
    repack::{HeadAs, Repacked},
    safetensors::WHOLE,
    tensors::{Stored, Tensors},
    weights::Live,
    write::{write_dat, write_safetensors},
};
use std::{
    io::Write,
    path::{Path, PathBuf},
};

/// Runs `export-dat`.
///
/// # Errors
/// If the model is broken, the output is an input, or the written file does not work.
pub fn run(args: ExportArgs) -> Result<(), CliError> {
    let found = located("--model", &args.model)?;
    let state = checkpoint::state_beside(&found.folder)?;
    check_unchanged(&found)?;
    let stored = StoredModel::open("--model", &found.weights, args.tokenizer.as_deref())?;
    let mut inputs = stored.files.weight_files();
    inputs.push(stored.weights.path().to_owned());
    inputs.extend(args.like.clone());
    check_output("--output-dat", &args.output_dat, &inputs)?;
    check_dat_name("--output-dat", &args.output_dat)?;
    check_free("--output-dat", &args.output_dat, args.overwrite)?;
    let StoredModel { config, text, weights: source, trained, .. } = &stored;
    if trained.as_ref().is_some_and(|trained| !trained.recipe.packs_weights()) {
        report::line("note: the run used recipe bf16; this export quantizes its weights for the first time");
    }
    let like = args.like.as_deref().map(Container::open).transpose().map_err(CliError::of_flag("--like"))?;
    let format = match &state {
        Some(state) => ExportFormat::of_checkpoint(state, config),
        None => stored_format(&stored),
    };
    let format =
        ExportFormat { scaling: args.scales.unwrap_or(format.scaling), ..format.quantized().with_head(args.head) };
    let scales = like.as_ref().and_then(|like| packed_scaling(like)).unwrap_or(format.scaling);
    if let Some(trained) = trained {
        trained.say_other_scales(scales);
    }
    let stored_as = |like| {
        let tensors = Repacked::new(source, format.store_as(like));
        if state.is_some() { tensors } else { tensors.of_finished() }
    };
    let tensors = stored_as(like.as_ref());
    if let Some(like) = &like {
        check_like(like, &tensors, &format, &stored_as(None))?;
    }
    report::unscaled_inputs(source.has_input_scales());
    write_and_check(&tensors, like.as_ref(), &args.output_dat, |path| {
        let spec = |precision| LinearSpec::new(Recipe::W4, format.scaling, precision);
        device::run(args.device, None, CheckFile { tensors: &tensors, path, config, text, spec: &spec })
    })?;
    Trained::put_beside(trained.as_ref(), &args.output_dat)
}

/// How a model that is no checkpoint is exported: what is NVFP4 stays so, and other linear layers become NVFP4 as the model's
/// training quantized them, if it did.
fn stored_format(stored: &StoredModel) -> ExportFormat {
    let trained = stored.trained.as_ref();
    let packed_head = matches!(stored.weights.stored(names::HEAD), Some(Stored::Packed { .. }));
    let dense = trained.map_or(0, |trained| trained.bf16_last_blocks);
    ExportFormat {
        scaling: packed_scaling(&stored.weights).or(trained.map(|trained| trained.scales)).unwrap_or(SCALING),
        head: if packed_head { HeadAs::OwnNvfp4 } else { HeadAs::Float(FloatType::F16) },
        recipe: trained.map_or(Recipe::W4, Trained::recipe_of_weights),
        dense_from: stored.config.num_hidden_layers.saturating_sub(dense),
        shares_scale: trained.is_some_and(|trained| trained.shares_scale),
    }
}

/// Refuses a file that cannot be the model of an export. `tensors` are those of the export as the file stores them, and `own`
/// are the same without it.
fn check_like(like: &Container, tensors: &Repacked, format: &ExportFormat, own: &Repacked) -> Result<(), CliError> {
    let refuse = |reason: &str| Err(CliError::Usage(format!("--like {}: {reason}", like.path().display())));
    if like.dat().is_none() {
        return refuse("it is not a .dat file; give a .dat file");
    }
    let left_out = tensors.left_out();
    if !left_out.is_empty() {
        let names = left_out[..left_out.len().min(10)].join(", ");
        return refuse(&format!("it has no place for {names}; export without --like"));
    }
    if let Some(name) = like.names().iter().find(|name| tensors.stored(name).is_none()) {
        let shape = like.stored(name).map(|stored| stored.shape()).unwrap_or_default();
        let text = "give the file with which training began";
        return refuse(&format!("the model has no {name} of shape {shape:?}; {text}"));
    }
    let is_packed = |file: &dyn Tensors, name: &str| matches!(file.stored(name), Some(Stored::Packed { .. }));
    let stays_dense = |name: &String| {
        names::block_of(name).is_some_and(|block| block >= format.dense_from)
            || names::is_projection(name) && is_packed(like, name) && !is_packed(own, name)
    };
    if like.names().iter().any(stays_dense) || format.block() == BlockShape::Square {
        return refuse(
            "the model has linear layers that are not quantized, or scales of 16x16 values; export without --like",
        );
    }
    if format.shares_scale {
        return refuse(
            "its matrices have matrix scales of their own, but the run used --share-scales; export without --like",
        );
    }
    Ok(())
}

/// What a run exports its model as.
#[derive(Clone, Copy)]
pub struct Target<'a> {
    /// How weights are stored.
    pub format: ExportFormat,
    /// The file whose layout the export has.
    pub like: Option<&'a Container>,
    /// What the model was trained for.
    pub trained: &'a Trained,
}

/// Writes a model folder that can be loaded by itself, in place of an older one: an NVFP4 `.dat`, or bf16 safetensors for
/// recipe bf16, with config.json and tokenizer. Returns the folder.
///
/// # Errors
/// If writing fails or the written file does not work. An older folder is then untouched.
pub fn model_to_folder<B: Nvfp4Kernels + DeviceServices>(
    model: &Qwen3<B>,
    text: &TextFiles,
    companions: &Companions,
    form: &Target,
    folder: &Path,
) -> Result<PathBuf, CliError> {
    let (live, Target { format, like, trained }) = (Live::new(model), *form);
    let tensors = Repacked::new(&live, format.store_as(like));
    let mut pending = PendingFolder::new(folder)?;
    let name = if format.recipe.packs_weights() { "model.dat" } else { WHOLE };
    pending.file(name, |out| write(&tensors, like, name.ends_with(".dat"), out, folder))?;
    companions.copy_into(&mut pending)?;
    trained.write(&mut pending)?;
    // The check loads the folder as users will, with its own config.json.
    let config = Qwen3Config::from_file(&pending.path_of("config.json"))?;
    let check = Check { tensors: &tensors, path: &pending.path_of(name), config: &config, text };
    check.against(model, format, like.is_some())?;
    pending.replace()
}

/// Writes a model as a `.dat` file and checks it. Returns its size and digest.
///
/// # Errors
/// As [`model_to_folder`].
pub fn model_to_dat<B: Nvfp4Kernels + DeviceServices>(
    model: &Qwen3<B>,
    text: &TextFiles,
    form: &Target,
    path: &Path,
) -> Result<FileRecord, CliError> {
    let (live, Target { format, like, trained }) = (Live::new(model), *form);
    let tensors = Repacked::new(&live, format.store_as(like));
    let record = write_and_check(&tensors, like.filter(|_| format.recipe.packs_weights()), path, |written| {
        let check = Check { tensors: &tensors, path: written, config: model.config(), text };
        check.against(model, format, like.is_some())
    })?;
    Trained::put_beside(Some(trained), path)?;
    Ok(record)
}

/// Writes a `.dat` file that gets its name only after `check` has read it, and prints and returns its size and digest.
fn write_and_check(
    tensors: &dyn Tensors,
    like: Option<&Container>,
    path: &Path,
    check: impl FnOnce(&Path) -> Result<(), CliError>,
) -> Result<FileRecord, CliError> {
    let checked = |temporary: &Path| check(temporary).and_then(|()| Trained::forget(path));
    let sha256 = durable::write_checked(path, |out| write(tensors, like, true, out, path), checked)?;
    let bytes = std::fs::metadata(path).map_err(CliError::io(path))?.len();
    report::result(format!("{} · {bytes} bytes · sha256 {sha256}", path.display()));
    Ok(FileRecord { bytes, sha256 })
}

fn write(
    tensors: &dyn Tensors,
    like: Option<&Container>,
    dat: bool,
    out: &mut dyn Write,
    path: &Path,
) -> Result<(), CliError> {
    let failed = |e| ModelError::Io { path: path.to_owned(), source: e };
    let mut out = Writing::of(out, progress::size(tensors), "exporting");
    if dat {
        write_dat(tensors, like.and_then(Container::dat), &mut out, failed)?;
    } else {
        write_safetensors(tensors, &mut out, failed)?;
    }
    Ok(())
}
