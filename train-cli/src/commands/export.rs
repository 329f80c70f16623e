//! Trained weights to a file that is known to work: written, read back, and compared with the model
//! in memory (logits and 16 greedy tokens) before anyone is told that it is done.

use crate::{
    CliError,
    args::ExportArgs,
    device::{self, Job},
    durable::{self, PendingFolder},
    model_files::{Companions, TextFiles},
    outputs::check_output,
    report,
    run::checkpoint::{self, Head},
};
use backend_nvfp4::{Block, DeviceServices, LinearSpec, Nvfp4Kernels, Precision, Recipe, Scaling};
use model_qwen3::{
    ModelError,
    chat_template::RenderOptions,
    checkpoint::{Checkpoint, FloatType, Tensors},
    config::Qwen3Config,
    convert::{self, Converted, write_dat, write_safetensors},
    generate::{GenerateOptions, generate, prefill},
    kv_cache::KvCache,
    model::Qwen3,
    sample::Sampling,
    weights::{self, Live, Purpose},
};
use serde_json::json;
use std::{
    io::Write,
    ops::ControlFlow,
    path::{Path, PathBuf},
};

/// Runs `export-dat`.
///
/// # Errors
/// If the checkpoint is broken, the output is an input, or the written file does not work.
pub fn run(args: ExportArgs) -> Result<(), CliError> {
    let state = checkpoint::open(&args.checkpoint)?;
    let source = args.checkpoint.join(checkpoint::MODEL);
    let entries = std::fs::read_dir(&args.checkpoint).map_err(CliError::io(&args.checkpoint))?;
    let mut inputs: Vec<PathBuf> = entries.filter_map(|e| e.ok().map(|e| e.path())).collect();
    inputs.extend(args.like.clone());
    check_output(&args.output_dat, &inputs)?;
    if state.settings.recipe.recipe == Recipe::Bf16 {
        report::line("note: trained with recipe bf16; its weights are quantised now, for the first time");
    }
    let config = Qwen3Config::from_file(&args.checkpoint.join("config.json"))?;
    let text = TextFiles::open(&args.checkpoint, &config)?;
    let source = Checkpoint::open(&source)?;
    let like = args.like.as_deref().map(Checkpoint::open).transpose()?;
    if let Some(like) = &like
        && like.dat().is_none()
    {
        return Err(CliError::Usage(format!("--like {}: a .dat file is needed", like.path().display())));
    }
    let (recipe, dense) = (state.settings.recipe.resolved(), state.settings.recipe.bf16_last_blocks);
    if like.is_some()
        && (dense > 0 || LinearSpec::new(recipe, Scaling::Two, Precision::F32).weights().block == Block::Square)
    {
        let text = "--like: this run left blocks unquantised, or shared scales over 16x16 values; export without it";
        return Err(CliError::Usage(text.into()));
    }
    let scaling = args.scales.unwrap_or(state.scaling());
    let target = match &like {
        Some(like) => convert::Target::Like(like),
        None => {
            // A checkpoint of recipe bf16 is quantised as recipe w4 would.
            let recipe = if recipe == Recipe::Bf16 { Recipe::W4 } else { recipe };
            let target = Target {
                scaling,
                head: state.head == Head::Nvfp4,
                recipe,
                dense_from: config.num_hidden_layers.saturating_sub(dense),
            };
            target.nvfp4()
        }
    };
    let view = Converted::new(&source, target);
    let spec = |precision| LinearSpec::new(Recipe::W4, scaling, precision);
    complete(&view, like.as_ref())?;
    let (bytes, sha256) = write(&view, like.as_ref(), &args.output_dat, |path| {
        device::run(args.device, None, Check { view: &view, path, config: &config, text: &text, spec: &spec })
    })?;
    report::result(format!("{} · {bytes} bytes · sha256 {sha256}", args.output_dat.display()));
    Ok(())
}

/// How a model in memory is exported.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// Scale levels.
    pub scaling: Scaling,
    /// Whether a separate head is NVFP4.
    pub head: bool,
    /// The recipe it was trained with: `bf16` exports no NVFP4.
    pub recipe: Recipe,
    /// The first block that the recipe does not quantise.
    pub dense_from: usize,
}

impl Target {
    fn of<'a>(&self, like: Option<&'a Checkpoint>) -> convert::Target<'a> {
        match (self.recipe, like) {
            (Recipe::Bf16, _) => convert::Target::Float(FloatType::Bf16),
            (_, Some(like)) => convert::Target::Like(like),
            (_, None) => self.nvfp4(),
        }
    }

    /// NVFP4, with the blocks that training quantised by.
    fn nvfp4(&self) -> convert::Target<'static> {
        let block = self.spec(Precision::F32).weights().block;
        convert::Target::Nvfp4 { scaling: self.scaling, head: self.head, block, dense_from: self.dense_from }
    }

    fn spec(&self, precision: Precision) -> LinearSpec {
        LinearSpec::new(self.recipe, self.scaling, precision)
    }
}

/// Writes a model folder that can be loaded by itself: NVFP4 `.dat`, or bf16 safetensors for the
/// `bf16` recipe, with config and tokenizer. Returns the folder.
///
/// # Errors
/// If writing fails or what was written does not work.
pub fn model_to_folder<B: Nvfp4Kernels>(
    model: &Qwen3<B>,
    text: &TextFiles,
    companions: &Companions,
    target: Target,
    like: Option<&Checkpoint>,
    folder: &Path,
) -> Result<PathBuf, CliError> {
    let live = Live::new(model);
    let view = Converted::new(&live, target.of(like));
    let mut pending = PendingFolder::new(folder)?;
    let name = if target.recipe == Recipe::Bf16 { "model.safetensors" } else { "model.dat" };
    pending.file(name, |out| put(&view, like, name.ends_with(".dat"), out, folder))?;
    companions.copy_into(&mut pending)?;
    // The folder is checked as it will be loaded, with its own config.json.
    let config = Qwen3Config::from_file(&pending.path_of("config.json"))?;
    let spec = target.spec(model.spec().precision);
    compare::<B>(&view, &pending.path_of(name), &config, text, spec, &model.device())?;
    if folder.exists() {
        std::fs::remove_dir_all(folder).map_err(CliError::io(folder))?;
    }
    pending.commit()
}

/// Writes a model as a `.dat` file and checks it.
///
/// # Errors
/// As [`model_to_folder`].
pub fn model_to_dat<B: Nvfp4Kernels>(
    model: &Qwen3<B>,
    text: &TextFiles,
    target: Target,
    like: Option<&Checkpoint>,
    path: &Path,
) -> Result<(), CliError> {
    let live = Live::new(model);
    let view = Converted::new(&live, target.of(like));
    let spec = target.spec(model.spec().precision);
    let (bytes, sha256) = write(&view, like.filter(|_| target.recipe != Recipe::Bf16), path, |written| {
        compare::<B>(&view, written, model.config(), text, spec, &model.device())
    })?;
    report::result(format!("{} · {bytes} bytes · sha256 {sha256}", path.display()));
    Ok(())
}

/// A trained tensor that the original has no place for is not dropped silently.
fn complete(view: &Converted<'_>, like: Option<&Checkpoint>) -> Result<(), CliError> {
    match (view.left_out().as_slice(), like) {
        ([], _) | (_, None) => Ok(()),
        (names, Some(like)) => {
            let text = format!("--like {}: has no place for {}", like.path().display(), names.join(", "));
            Err(CliError::Usage(text))
        }
    }
}

/// Writes a `.dat` file that appears only after `check` has read it.
fn write(
    view: &dyn Tensors,
    like: Option<&Checkpoint>,
    path: &Path,
    check: impl FnOnce(&Path) -> Result<(), CliError>,
) -> Result<(u64, String), CliError> {
    let sha256 = durable::write_checked(path, |out| put(view, like, true, out, path), check)?;
    let bytes = std::fs::metadata(path).map_err(CliError::io(path))?.len();
    Ok((bytes, sha256))
}

fn put(
    view: &dyn Tensors,
    like: Option<&Checkpoint>,
    dat: bool,
    out: &mut dyn Write,
    path: &Path,
) -> Result<(), CliError> {
    let failed = |e| ModelError::Io { path: path.to_owned(), source: e };
    if dat {
        write_dat(view, like.and_then(Checkpoint::dat), out, failed)?;
    } else {
        write_safetensors(view, out, failed)?;
    }
    Ok(())
}

struct Check<'a> {
    view: &'a dyn Tensors,
    path: &'a Path,
    config: &'a Qwen3Config,
    text: &'a TextFiles,
    spec: &'a dyn Fn(Precision) -> LinearSpec,
}

impl Job for Check<'_> {
    type Output = ();

    fn run<B: Nvfp4Kernels + DeviceServices>(self, device: B::Device, precision: Precision) -> Result<(), CliError> {
        compare::<B>(self.view, self.path, self.config, self.text, (self.spec)(precision), &device)
    }
}

/// Loads the written file and compares it with the model that the file was made of.
fn compare<B: Nvfp4Kernels>(
    intended: &dyn Tensors,
    written: &Path,
    config: &Qwen3Config,
    text: &TextFiles,
    spec: LinearSpec,
    device: &B::Device,
) -> Result<(), CliError> {
    let prompt = text.template.render(
        &[json!({"role": "user", "content": "Who are you? 你是誰？"})],
        RenderOptions { add_generation_prompt: true, ..Default::default() },
    )?;
    let prompt = text.tokenizer.encode(&prompt)?;
    let observe = |tensors: &dyn Tensors| -> Result<_, CliError> {
        let model: Qwen3<B> = weights::load(tensors, config, spec, Purpose::Infer, device)?;
        let mut cache = KvCache::new(config, prompt.len(), spec.precision.dtype(), device);
        let logits = prefill(&model, &prompt, &mut cache, 512)?;
        let options = GenerateOptions { max_tokens: 16, sampling: Sampling::GREEDY, stop_ids: vec![] };
        let ids = generate(&model, &prompt, &options, |_| ControlFlow::Continue(()))?.ids;
        Ok((logits, ids))
    };
    let (logits, ids) = observe(intended)?;
    let (logits_read, ids_read) = observe(&Checkpoint::open(written)?)?;
    let worst = logits.iter().zip(&logits_read).fold(0.0f32, |a, (x, y)| a.max((x - y).abs()));
    let equal = ids.iter().zip(&ids_read).filter(|(a, b)| a == b).count();
    if worst != 0.0 || ids != ids_read {
        let reason = format!(
            "read back, it differs from the model it was made of: max |Δlogit| {worst}, {equal}/16 greedy tokens equal"
        );
        return Err(CliError::corrupt(written, reason));
    }
    report::label("check", format!("reloaded · {equal}/16 greedy tokens equal · max |Δlogit| {worst}"));
    Ok(())
}
