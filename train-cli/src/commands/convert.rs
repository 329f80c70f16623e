//! `convert`: writes a model in another container or number format, one tensor at a time. The small files of the model go
//! beside it, so that the new file can be used as it is; a GGUF file has them inside.

use crate::{
    CliError,
    args::{ContainerArg, ConvertArgs, WeightArg},
    durable,
    model_files::{Companions, ModelFiles, TextFiles, untie},
    outputs::{check_free, check_output},
    progress::{self, Writing},
    report,
    run::{
        checkpoint,
        history::is_run,
        inputs::packed_scaling,
        located::{check_unchanged, located},
        trained::Trained,
    },
    settings::{HeadFormat, defaults::SCALING},
};
use backend_nvfp4::{BlockShape, LinearSpec, Precision, Recipe, Scaling};
use model_qwen3::{
    ModelError,
    bytes::FloatType,
    chat_template::ChatTemplate,
    config::Qwen3Config,
    container::Container,
    file,
    gguf::{About, GgufFile, Matrices, Q8_OF_F32, Vocabulary, write_gguf},
    json,
    repack::{HeadAs, Repacked, StoreAs},
    safetensors::{INDEX, WHOLE},
    tensors::Tensors,
    tokenizer,
    write::{write_dat, write_safetensors},
};
use serde_json::{Map, Value};
use std::{
    io::{ErrorKind, Write},
    path::{Path, PathBuf},
};

/// Runs the command.
///
/// # Errors
/// If the input is broken, the output is an input, or writing fails.
pub fn run(args: &ConvertArgs) -> Result<(), CliError> {
    let given = ModelFiles::new(&args.input);
    let files = if given.is_gguf() { given } else { located("INPUT", &args.input)? };
    let source = Converted::open(&files, args.tokenizer.as_deref())?;
    let mut inputs = files.weight_files();
    inputs.push(source.tensors().path().to_owned());
    check_output("OUTPUT", &args.output, &inputs)?;
    check_free("OUTPUT", &args.output, args.overwrite)?;
    let container = container(args)?;
    let dtype = args.dtype.unwrap_or_else(|| dtype_of(source.tensors()));
    if checkpoint::state_beside(&files.folder)?.is_some() && dtype == WeightArg::Nvfp4 {
        let text = "is a checkpoint, whose recipe decides how its weights are quantized; write a .dat file by export-dat, and \
                    convert that";
        return Err(CliError::Usage(format!("{} {text}", files.folder.display())));
    }
    let gguf = match container {
        ContainerArg::Gguf if matches!(source, Converted::Gguf(_)) => {
            let text = "a GGUF file cannot be converted to GGUF; convert it to .safetensors, and that to .gguf";
            return Err(CliError::Usage(format!("{}: {text}", args.output.display())));
        }
        ContainerArg::Gguf => Some(Gguf::read(args, &files, source.tensors())?),
        _ if args.tokenizer.is_some() => {
            return Err(CliError::Usage("--tokenizer works only with --to gguf; leave it out".into()));
        }
        _ => None,
    };
    check_unchanged(&files)?;
    // A GGUF file with NVFP4 holds the scales of activations too.
    let keeps_inputs = gguf.is_some() && dtype == WeightArg::Nvfp4;
    report::unscaled_inputs(source.tensors().has_input_scales() && !keeps_inputs);
    let trained = source.trained(&files)?;
    let scaling = scaling(args, dtype, container, source.tensors(), trained.as_ref());
    let quantized = Quantized::of(args, dtype, trained.as_ref(), &files, scaling)?;
    let tensors = Repacked::new(source.tensors(), format(args, dtype, container, &quantized)?).of_finished();
    let mut small = if gguf.is_none() { source.small_files(&files)? } else { vec![] };
    let config = files.config_file(None);
    for (_, bytes) in small.iter_mut().filter(|(name, _)| name == "config.json") {
        undescribed(&config, bytes)?;
        if container == ContainerArg::Safetensors && dtype != WeightArg::Nvfp4 {
            untied(&config, bytes, &tensors)?;
        }
    }
    check_neighbor(&args.output, &small)?;
    let written = |out: &mut dyn Write| {
        let failed = |e| ModelError::Io { path: args.output.clone(), source: e };
        // 8-bit weights stand here in f32.
        let share = if dtype == WeightArg::Q8_0 { Q8_OF_F32 } else { 1.0 };
        let mut out = Writing::of(out, (progress::size(&tensors) as f64 * share) as u64, "converting");
        match (container, &gguf) {
            (ContainerArg::Dat, _) => write_dat(&tensors, None, &mut out, failed).map(|_| ())?,
            (_, Some(gguf)) => gguf.write(source.tensors(), gguf_matrices(dtype, &quantized), &mut out, failed)?,
            (_, None) => write_safetensors(&tensors, &mut out, failed).map(|_| ())?,
        }
        Ok(())
    };
    let sha256 = durable::write_checked(&args.output, written, |_| Trained::forget(&args.output))?;
    put_beside(&args.output, &small)?;
    match (&trained, &gguf) {
        (Some(trained), Some(_)) => trained.say_without_thoughts(),
        (trained, _) => Trained::put_beside(trained.as_ref(), &args.output)?,
    }
    let bytes = std::fs::metadata(&args.output).map_err(CliError::io(&args.output))?.len();
    let count = report::count(tensors.names().len(), "weight");
    report::result(format!("{} · {count} · {bytes} bytes · sha256 {sha256}", args.output.display()));
    Ok(())
}

/// The number format of the output if nobody names one: NVFP4 if the input has NVFP4 weights. Says so.
fn dtype_of(source: &dyn Tensors) -> WeightArg {
    let (dtype, said) = if source.holds_nvfp4() {
        (WeightArg::Nvfp4, "nvfp4, as in the input")
    } else {
        (WeightArg::Bf16, "bf16, because the input has no NVFP4 weights")
    };
    report::label("dtype", said);
    dtype
}

/// A model that is read.
enum Converted {
    Files(Container),
    Gguf(GgufFile),
}

impl Converted {
    fn open(files: &ModelFiles, tokenizer: Option<&Path>) -> Result<Self, CliError> {
        if files.is_gguf() {
            return Ok(Self::Gguf(GgufFile::open(&files.weights).map_err(CliError::of_flag("INPUT"))?));
        }
        Ok(Self::Files(match Qwen3Config::from_file(&files.config_file(tokenizer)) {
            Ok(config) => files.open_weights(&config)?,
            // Weights can be converted alone. If their config.json is needed, other checks say what is wrong with it.
            Err(_) => Container::open(&files.weights)?,
        }))
    }

    fn tensors(&self) -> &dyn Tensors {
        match self {
            Self::Files(container) => container,
            Self::Gguf(file) => file,
        }
    }

    /// What the model was trained for, if it is known.
    fn trained(&self, files: &ModelFiles) -> Result<Option<Trained>, CliError> {
        match self {
            Self::Files(_) => Trained::of(files),
            Self::Gguf(_) => Ok(None),
        }
    }

    /// The model's small files by name: those that lie beside its weights, or what a GGUF file says.
    fn small_files(&self, files: &ModelFiles) -> Result<Vec<(String, Vec<u8>)>, CliError> {
        if let Self::Gguf(file) = self {
            let made = file.small_files()?.into_iter();
            return Ok(made.map(|(name, text)| (name.to_owned(), text.into_bytes())).collect());
        }
        let companions = Companions { config: files.config_file(None), text: files.folder.clone() };
        let all = companions.text_files().chain([companions.config.clone()]);
        let read = |path: PathBuf| {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            Ok((name, file::read_bytes(&path, tokenizer::LARGEST, "")?))
        };
        all.filter(|path| path.exists()).map(read).collect()
    }
}

/// The bytes of a config.json, which was read from `path`, for these tensors: it says whether the head is the embedding.
fn untied(path: &Path, bytes: &mut Vec<u8>, tensors: &dyn Tensors) -> Result<(), CliError> {
    let mut config = object(path, bytes)?;
    if untie(&mut config, tensors) {
        *bytes = serde_json::to_vec_pretty(&config).expect("a JSON value serializes");
    }
    Ok(())
}

/// The bytes of a config.json that describes no format of another library: the weights are not in it any more.
fn undescribed(path: &Path, bytes: &mut Vec<u8>) -> Result<(), CliError> {
    let mut config = object(path, bytes)?;
    if config.remove("quantization_config").is_some() {
        *bytes = serde_json::to_vec_pretty(&config).expect("a JSON value serializes");
    }
    Ok(())
}

/// The JSON object of a config.json, which was read from `path`.
fn object(path: &Path, bytes: &[u8]) -> Result<Map<String, Value>, CliError> {
    let bad = |reason: String| CliError::corrupt(path, reason);
    let text = std::str::from_utf8(bytes).map_err(|e| bad(e.to_string()))?;
    json::parse(text).and_then(serde_json::from_value).map_err(|e| bad(e.to_string()))
}

/// Refuses an output in the folder of another model: the config.json there would stay, and the output would not load; or the
/// folder would still stand for its shards. In a run folder, the config.json of this model would hide the checkpoints.
fn check_neighbor(output: &Path, files: &[(String, Vec<u8>)]) -> Result<(), CliError> {
    let refuse = |text: String| {
        let shown = output.display();
        Err(CliError::Usage(format!("OUTPUT {shown}: {text}; choose another folder")))
    };
    let folder = durable::parent(output);
    if output.file_name().is_some_and(|name| name == WHOLE) && folder.join(INDEX).exists() {
        let text = format!("{} holds shards and {INDEX}, which would still be loaded in its place", folder.display());
        return refuse(text);
    }
    let path = folder.join("config.json");
    let Some((_, bytes)) = files.iter().find(|(name, _)| name == "config.json") else { return Ok(()) };
    if is_run(folder) {
        let text = "is a run folder, and a config.json there would hide its checkpoints";
        return refuse(format!("{} {text}", folder.display()));
    }
    if !path.is_file() {
        return Ok(());
    }
    let ours = std::str::from_utf8(bytes).ok().and_then(|text| Qwen3Config::from_json(text, &path).ok());
    // If the config of this model cannot be read, other checks say so.
    let Some(ours) = ours else { return Ok(()) };
    let reason = match Qwen3Config::from_file(&path) {
        Ok(theirs) => match ours.differs_from(&theirs) {
            None => return Ok(()),
            Some((field, ours, theirs)) => format!("{field} is {theirs}, and {ours} in this model"),
        },
        Err(error) => error.to_string(),
    };
    refuse(format!("this model would not load with the config.json that is in the folder ({reason})"))
}

/// Writes the small files of a model into the folder of `output`. A file that is there stays as it is.
fn put_beside(output: &Path, files: &[(String, Vec<u8>)]) -> Result<(), CliError> {
    let folder = output.parent().unwrap_or(Path::new(""));
    let mut written = vec![];
    for (name, bytes) in files {
        let path = folder.join(name);
        // A link that leads nowhere is something of the user's, too.
        if path.symlink_metadata().is_err_and(|error| error.kind() == ErrorKind::NotFound) {
            durable::write_bytes(&path, bytes)?;
            written.push(name.as_str());
        } else if !path.is_file()
            || durable::digest(&path).map_or(true, |(_, found)| found != durable::digest_of(bytes))
        {
            report::line(format!("note: kept {}; the model's file of that name differs", path.display()));
        }
    }
    if !written.is_empty() {
        report::label("beside it", written.join(", "));
    }
    Ok(())
}

/// The container that the name of the output tells, which `--to` may say too.
fn container(args: &ConvertArgs) -> Result<ContainerArg, CliError> {
    let all = [(ContainerArg::Dat, "dat"), (ContainerArg::Safetensors, "safetensors"), (ContainerArg::Gguf, "gguf")];
    let named = all.into_iter().find(|(_, extension)| args.output.extension().is_some_and(|found| found == *extension));
    match (args.to, named) {
        (asked, Some((container, _))) if asked.is_none_or(|asked| asked == container) => Ok(container),
        _ => {
            let asked = all.into_iter().find(|(container, _)| Some(*container) == args.to);
            let expected = asked.map_or(".dat, .safetensors or .gguf".to_owned(), |(_, name)| format!(".{name}"));
            Err(CliError::Usage(format!("{}: the name must end in {expected}", args.output.display())))
        }
    }
}

/// How dense weights become NVFP4: as the model's training quantized them.
struct Quantized {
    scaling: Scaling,
    block: BlockShape,
    shares_scale: bool,
    /// The first block whose linear layers stay dense.
    dense_from: usize,
}

impl Quantized {
    fn of(
        args: &ConvertArgs,
        dtype: WeightArg,
        trained: Option<&Trained>,
        files: &ModelFiles,
        scaling: Scaling,
    ) -> Result<Self, CliError> {
        let dense_blocks = trained.map_or(0, |trained| trained.bf16_last_blocks);
        let dense_from = if dense_blocks == 0 || dtype != WeightArg::Nvfp4 {
            usize::MAX
        } else {
            let config = files.config_file(args.tokenizer.as_deref());
            if !config.exists() && args.tokenizer.is_none() {
                let text = "the last blocks of this model stay unquantized, and only its config.json says which they are; put it there";
                return Err(CliError::Usage(format!("{}: {text}", config.display())));
            }
            Qwen3Config::from_file(&config)?.num_hidden_layers.saturating_sub(dense_blocks)
        };
        let recipe = trained.map_or(Recipe::W4, Trained::recipe_of_weights);
        let block = LinearSpec::new(recipe, scaling, Precision::F32).weights().block;
        // A tensor scale that is shared takes two levels.
        let shares_scale = scaling == Scaling::Two && trained.is_some_and(|trained| trained.shares_scale);
        Ok(Self { scaling, block, shares_scale, dense_from })
    }
}

/// The scale levels of NVFP4 weights: those that somebody asks for, those of the model's NVFP4 weights, or those of its training.
/// Says so if training had others. A GGUF file always has a scale for each matrix.
fn scaling(
    args: &ConvertArgs,
    dtype: WeightArg,
    container: ContainerArg,
    source: &dyn Tensors,
    trained: Option<&Trained>,
) -> Scaling {
    let of_training = trained.map_or(SCALING, |trained| trained.scales);
    if dtype != WeightArg::Nvfp4 || container == ContainerArg::Gguf {
        return of_training;
    }
    let scaling = args.scales.or_else(|| packed_scaling(source)).unwrap_or(of_training);
    if let Some(trained) = trained {
        trained.say_other_scales(scaling);
    }
    scaling
}

/// How tensors are stored in containers that are not GGUF.
fn format(
    args: &ConvertArgs,
    dtype: WeightArg,
    container: ContainerArg,
    quantized: &Quantized,
) -> Result<StoreAs<'static>, CliError> {
    let has_place = dtype == WeightArg::Nvfp4 && container != ContainerArg::Gguf;
    for (flag, given) in [("--head", args.head.is_some()), ("--scales", args.scales.is_some())] {
        if given && !has_place {
            let text = "works only with --dtype nvfp4, in .dat and .safetensors files; leave it out";
            return Err(CliError::Usage(format!("{flag} {text}")));
        }
    }
    Ok(match dtype {
        WeightArg::Nvfp4 => StoreAs::Nvfp4 {
            scaling: quantized.scaling,
            head: match args.head {
                None => HeadAs::OwnNvfp4,
                Some(HeadFormat::Nvfp4) => HeadAs::Nvfp4,
                Some(HeadFormat::Bf16) => HeadAs::Float(FloatType::Bf16),
            },
            block: quantized.block,
            shares_scale: quantized.shares_scale,
            dense_from: quantized.dense_from,
        },
        WeightArg::F16 => StoreAs::Float(FloatType::F16),
        WeightArg::Bf16 => StoreAs::Float(FloatType::Bf16),
        WeightArg::F32 => StoreAs::Float(FloatType::F32),
        WeightArg::Q8_0 if container == ContainerArg::Gguf => StoreAs::Float(FloatType::F32),
        WeightArg::Q8_0 => {
            return Err(CliError::Usage("--dtype q8-0: only GGUF files hold 8-bit weights; use --to gguf".into()));
        }
    })
}

/// How matrices are stored in a GGUF file.
fn gguf_matrices(dtype: WeightArg, quantized: &Quantized) -> Matrices {
    let Quantized { block, shares_scale, dense_from, .. } = *quantized;
    match dtype {
        WeightArg::Nvfp4 => Matrices::Nvfp4 { block, shares_scale, dense_from },
        WeightArg::Q8_0 => Matrices::Q8,
        WeightArg::F16 => Matrices::Float(FloatType::F16),
        WeightArg::Bf16 => Matrices::Float(FloatType::Bf16),
        WeightArg::F32 => Matrices::Float(FloatType::F32),
    }
}

/// What a GGUF file holds besides the weights.
struct Gguf {
    name: String,
    config: Qwen3Config,
    vocabulary: Vocabulary,
    template: String,
    eos: u32,
    packs_activations: bool,
}

impl Gguf {
    fn read(args: &ConvertArgs, files: &ModelFiles, tensors: &dyn Tensors) -> Result<Self, CliError> {
        let folder = args.tokenizer.as_ref().unwrap_or(&files.folder);
        let config = Qwen3Config::from_file(&files.config_file(args.tokenizer.as_deref()))?;
        let vocabulary = Vocabulary::from_file(&folder.join("tokenizer.json"))?;
        let text = TextFiles::open(folder, &config)?;
        let first = |ids: &[u32]| ids.first().copied();
        // The end of a turn, where the model has one.
        let named = text.tokenizer.id("<|im_end|>").or_else(|| first(text.eos_token_ids()));
        let eos = named.or_else(|| first(&text.stop_ids)).unwrap_or_default();
        let trained = Trained::of(files)?;
        Ok(Self {
            name: ModelFiles::new(&args.input).name(),
            config,
            vocabulary,
            template: ChatTemplate::source(folder)?,
            eos,
            packs_activations: tensors.has_input_scales()
                || trained.is_some_and(|trained| trained.recipe.packs_activations()),
        })
    }

    fn write(
        &self,
        source: &dyn Tensors,
        matrices: Matrices,
        out: &mut dyn Write,
        failed: impl Fn(std::io::Error) -> ModelError,
    ) -> Result<(), ModelError> {
        let about = About {
            name: &self.name,
            config: &self.config,
            vocabulary: &self.vocabulary,
            template: &self.template,
            eos: self.eos,
            packs_activations: self.packs_activations,
        };
        write_gguf(source, matrices, &about, out, failed).map(|_| ())
    }
}
