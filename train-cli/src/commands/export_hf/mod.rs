//! `export-hf`: a model as a Hugging Face folder that other programs load. The weights are sharded safetensors, in bf16 or in
//! NVFP4 as compressed-tensors or nvidia-modelopt spell and scale it; config.json says which. Config, tokenizer and chat
//! template come along, and a model card. With `--activations nvfp4`, or if the model's files give the scales of activations, the
//! folder gives such scales too.
//!
//! Before the folder gets its name, every tensor is read back and compared, and the folder is loaded and answers a prompt.

mod calibrate;
mod model_card;
mod origin;
mod quantization_config;

use self::{
    calibrate::{Calibration, InputScales},
    origin::ExportOrigin,
};
use super::export_check::CheckFile;
use crate::{
    CliError,
    args::{ExportHfArgs, HfFormat},
    device,
    durable::{self, PendingFolder},
    model_files::{Companions, ModelFiles, TextFiles, untie},
    outputs::{LONGEST_NAME, check_folder, check_unlisted},
    progress::Writing,
    report,
    run::{
        checkpoint,
        folder::is_of_run,
        located::{check_unchanged, located},
        trained::Trained,
    },
    settings::bytes,
};
use backend_nvfp4::{LinearSpec, Recipe, Scaling};
use model_qwen3::{
    ModelError,
    bytes::FloatType,
    config::{self, Qwen3Config},
    file,
    foreign::{Changed, Foreign, Library},
    json,
    names::Spelling,
    repack::{Repacked, StoreAs},
    safetensors::{INDEX, WHOLE},
    tensors::Tensors,
    write::{bytes_of, keys, shards, write_shard},
};
use serde_json::{Map, Value, json};
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

/// Runs the command.
///
/// # Errors
/// If the model cannot be read, the folder cannot be written, or what was written does not work.
pub fn run(args: &ExportHfArgs) -> Result<(), CliError> {
    calibrate::check_flags(args)?;
    let files = located("--model", &args.model)?;
    let place = checked_place(&args.output_dir, args.overwrite, &files)?;
    let limit = bytes("--max-shard-size", &args.max_shard_size)?;
    let companions = Companions {
        config: files.config_file(args.tokenizer.as_deref()),
        text: args.tokenizer.clone().unwrap_or_else(|| files.folder.clone()),
    };
    let config = Qwen3Config::from_file(&companions.config)?;
    let text = TextFiles::open(&companions.text, &config)?;
    let state = checkpoint::state_beside(&files.folder)?;
    check_unchanged(&files)?;
    let (source, origin) = (files.open_weights(&config)?, ExportOrigin::of(&files, state.as_ref())?);
    let inputs = calibrate::of_model(args, &source, &origin)?;
    report::unscaled_inputs(source.has_input_scales() && matches!(inputs, InputScales::None));
    let library = match args.format {
        HfFormat::Bf16 => None,
        HfFormat::CompressedTensors => Some(Library::CompressedTensors),
        HfFormat::Modelopt => Some(Library::ModelOpt),
    };
    let layers = config.num_hidden_layers;
    let trained = Trained::of(&files)?;
    let dense = trained.as_ref().map_or(0, |trained| trained.bf16_last_blocks);
    let dense_from = layers.saturating_sub(dense);
    let in_bf16 = Repacked::new(&source, StoreAs::Float(FloatType::Bf16));
    let in_nvfp4 = library.map(|library| Foreign::new(&source, library, dense_from));
    let in_nvfp4 = match (in_nvfp4, &inputs) {
        (Some(foreign), InputScales::Measured(found)) => {
            Some(foreign.with_inputs(&found.amax).map_err(|layer| calibrate::no_scale(found, &layer))?)
        }
        (Some(foreign), InputScales::Given) => Some(foreign.with_given_inputs()?),
        (foreign, _) => foreign,
    };
    let tensors: &dyn Tensors = in_nvfp4.as_ref().map_or(&in_bf16 as &dyn Tensors, |foreign| foreign);

    let thinking = trained.as_ref().and_then(|trained| trained.thinking);
    let card = model_card::of_model(&files, &what_it_holds(args.format, &inputs), &origin, thinking)?;
    let mut pending = PendingFolder::new(&place)?;
    let written = write_weights(tensors, library.map_or(Spelling::ModelOpt, Library::spelling), limit, &mut pending)?;
    write_json(&mut pending, "config.json", &config_json(&companions.config, tensors, library)?)?;
    if library == Some(Library::ModelOpt) {
        write_json(&mut pending, "hf_quant_config.json", &quantization_config::of_modelopt(tensors))?;
    }
    for path in companions.text_files() {
        pending.copy(&path, &path.file_name().unwrap_or_default().to_string_lossy())?;
    }
    pending.file("README.md", |out| out.write_all(card.as_bytes()).map_err(CliError::io(&args.output_dir)))?;

    if let Some(foreign) = &in_nvfp4 {
        say_what_changed(foreign)?;
    }
    let config = Qwen3Config::from_file(&pending.path_of("config.json"))?;
    let recipe = if matches!(inputs, InputScales::None) { Recipe::W4 } else { Recipe::W4a4 };
    let spec = |precision| LinearSpec::new(recipe, Scaling::Two, precision);
    let check = CheckFile { tensors, path: pending.path(), config: &config, text: &text, spec: &spec };
    device::run(args.device, None, check)?;
    pending.replace()?;
    if let Some(trained) = &trained {
        trained.say_without_thoughts();
    }
    report::result(format!("{} · {written} bytes of weights", args.output_dir.display()));
    Ok(())
}

/// The place of the folder, if it can be written. A link stands for the folder that it leads to, which may be on a larger disk.
///
/// # Errors
/// If the folder holds something other than an older export, is a part of a run, or the model is read from it.
fn checked_place(folder: &Path, overwrite: bool, files: &ModelFiles) -> Result<PathBuf, CliError> {
    let refuse = |reason: &str| Err(CliError::Usage(format!("--output-dir {}: {reason}", folder.display())));
    let parent = durable::parent(folder);
    if !parent.is_dir() {
        return refuse(&format!("there is no folder {}; create it first", parent.display()));
    }
    if let (Ok(written), Ok(read)) = (folder.canonicalize(), files.folder.canonicalize())
        && read.starts_with(&written)
    {
        return refuse("the model is read from there; choose another");
    }
    check_folder("--output-dir", folder)?;
    if folder.file_name().is_some_and(|name| name.len() > LONGEST_NAME) {
        return refuse(&format!("the name has more than {LONGEST_NAME} bytes; choose a shorter one"));
    }
    let place = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    check_unlisted("--output-dir", folder, durable::parent(&place))?;
    if checkpoint::is_checkpoint(folder) || is_of_run(&place) {
        return refuse("it is a part of a run, such as a checkpoint or the run's export; choose another folder");
    }
    let is_empty = !folder.exists() || durable::is_untouched(folder)?;
    if !is_empty && !overwrite {
        return refuse("it is not empty; choose another, or --overwrite");
    }
    if !is_empty && !folder.join(durable::MANIFEST).exists() {
        return refuse("it has no manifest.json, so train-cli did not export it; choose another folder");
    }
    durable::probe(durable::parent(&place), &place).map(|()| place)
}

/// Writes the weights in as many files as `limit` asks for, with an index if there are several. Returns their bytes.
fn write_weights(
    tensors: &dyn Tensors,
    spelling: Spelling,
    limit: u64,
    pending: &mut PendingFolder,
) -> Result<u64, CliError> {
    let shards = shards(tensors, spelling, limit);
    let mut weight_map = BTreeMap::new();
    let mut total = 0;
    for (n, names) in shards.iter().enumerate() {
        let file = match shards.len() {
            1 => WHOLE.to_owned(),
            all => format!("model-{:05}-of-{all:05}.safetensors", n + 1),
        };
        let path = pending.path_of(&file);
        pending.file(&file, |out| {
            let failed = |e| ModelError::Io { path: path.clone(), source: e };
            let bytes = names.iter().map(|name| bytes_of(tensors, name, spelling)).sum();
            let part = if shards.len() > 1 { format!(" {}/{}", n + 1, shards.len()) } else { String::new() };
            let mut out = Writing::of(out, bytes, &format!("exporting{part}"));
            write_shard(tensors, names, spelling, &mut out, failed).map(|_| ()).map_err(CliError::from)
        })?;
        for name in names {
            total += bytes_of(tensors, name, spelling);
            weight_map.extend(keys(tensors, name, spelling).into_iter().map(|key| (key, file.clone())));
        }
    }
    if shards.len() > 1 {
        let index = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
        write_json(pending, INDEX, &index)?;
    }
    Ok(total)
}

fn write_json(pending: &mut PendingFolder, name: &str, value: &Value) -> Result<(), CliError> {
    let text = serde_json::to_string_pretty(value).expect("a JSON value serializes") + "\n";
    let path = pending.path_of(name);
    pending.file(name, |out| out.write_all(text.as_bytes()).map_err(CliError::io(&path)))
}

/// The model's config.json with the type of its weights and how they are quantized.
fn config_json(path: &Path, tensors: &dyn Tensors, library: Option<Library>) -> Result<Value, CliError> {
    let text = file::read_text(path, config::LARGEST, "give a model with a config.json")?;
    let mut config: Map<String, Value> =
        json::parse(&text).and_then(serde_json::from_value).map_err(|e| CliError::corrupt(path, e))?;
    config.remove("quantization_config");
    config.insert("torch_dtype".into(), "bfloat16".into());
    if let Some(dtype) = config.get_mut("dtype") {
        *dtype = "bfloat16".into();
    }
    untie(&mut config, tensors);
    if let Some(library) = library {
        config.insert("quantization_config".into(), quantization_config::of_config(tensors, library));
    }
    Ok(Value::Object(config))
}

/// Says how many codes and block scales of NVFP4 weights differ from those of the model, because matrices that are multiplied
/// together share a tensor scale.
fn say_what_changed(tensors: &Foreign) -> Result<(), CliError> {
    let Changed { codes, of_codes, scales, of_scales } = tensors.changed()?;
    if of_codes == 0 {
        return Ok(());
    }
    let share = |part: usize, all: usize| format!("{part} of {all} ({:.2}%)", part as f64 / all as f64 * 100.0);
    report::label(
        "scales",
        format!(
            "q, k and v share a matrix scale, and so do gate and up. This changed {} 4-bit codes and {} products of 8-bit \
             scale and matrix scale",
            share(codes, of_codes),
            share(scales, of_scales)
        ),
    );
    Ok(())
}

/// What the model card says about the numbers in the folder.
fn what_it_holds(format: HfFormat, inputs: &InputScales) -> String {
    let (activations, algorithm) = match inputs {
        InputScales::None => ("activations are not quantized".to_owned(), "W4A16_NVFP4"),
        InputScales::Given => ("activations are NVFP4 too, with tensor scales that the model gave".to_owned(), "NVFP4"),
        InputScales::Measured(Calibration { sequences, tokens, .. }) => {
            let (sequences, tokens) = (report::count(*sequences, "sequence"), report::count(*tokens, "token"));
            (format!("activations are NVFP4 too, with tensor scales that {sequences} ({tokens}) gave"), "NVFP4")
        }
    };
    let nvfp4 = format!(
        "Linear layers are NVFP4 (4-bit codes, an 8-bit scale for 16 values), other weights bf16; {activations}. The layout is \
         that of"
    );
    match format {
        HfFormat::Bf16 => "All weights are bf16.".to_owned(),
        HfFormat::CompressedTensors => format!("{nvfp4} compressed-tensors (`nvfp4-pack-quantized`)."),
        HfFormat::Modelopt => format!("{nvfp4} nvidia-modelopt (`{algorithm}`)."),
    }
}
