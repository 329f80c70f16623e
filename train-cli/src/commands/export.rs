//! `export-dat`, and the export at the end of `fit`: trained weights to a file that is known to work before it gets its
//! name.
//!
//! Every tensor of the written file is read back and compared with what was to be written, without tolerance. Then the
//! file is loaded for inference and answers a prompt. `fit` also has the trained model in memory and compares the logits
//! of both; see `Check::differs_by_at_most` for how far they may differ.

use crate::{
    CliError,
    args::ExportArgs,
    device::{self, Job},
    durable::{self, PendingFolder},
    model_files::{Companions, TextFiles, Trained},
    outputs::{check_dat_name, check_output},
    progress::{self, Writing},
    report,
    run::checkpoint::{self, Head},
};
use backend_nvfp4::{BlockShape, DeviceServices, LinearSpec, Nvfp4Kernels, Precision, Recipe, Scaling};
use model_qwen3::{
    ModelError,
    bytes::FloatType,
    chat_template::RenderOptions,
    config::Qwen3Config,
    container::Container,
    generate::{GenerateOptions, Session, generate},
    model::Qwen3,
    repack::{Repacked, StoreAs},
    sample::Sampling,
    tensors::{Stored, Tensors, row_ranges},
    weights::{self, Live, Purpose},
    write::{write_dat, write_safetensors},
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
    let entries = std::fs::read_dir(&args.checkpoint).map_err(CliError::io(&args.checkpoint))?;
    let mut inputs: Vec<PathBuf> = entries.filter_map(|e| e.ok().map(|e| e.path())).collect();
    inputs.extend(args.like.clone());
    check_output(&args.output_dat, &inputs)?;
    check_dat_name("--output-dat", &args.output_dat)?;
    if !state.settings.recipe.recipe.packs_weights() {
        report::line("note: the run used recipe bf16; this export quantizes its weights for the first time");
    }
    let config = Qwen3Config::from_file(&args.checkpoint.join("config.json"))?;
    let text = TextFiles::open(&args.checkpoint, &config)?;
    let source = Container::open(&args.checkpoint.join(checkpoint::MODEL))?;
    let like = args.like.as_deref().map(Container::open).transpose()?;
    let (recipe, dense) = (state.settings.recipe.resolved(), state.settings.recipe.bf16_last_blocks);
    // A checkpoint of recipe bf16 is quantized as recipe w4 does it.
    let recipe = if recipe.packs_weights() { recipe } else { Recipe::W4 };
    let format = ExportFormat {
        scaling: args.scales.unwrap_or(state.scaling()),
        head: state.head == Head::Nvfp4,
        recipe,
        dense_from: config.num_hidden_layers.saturating_sub(dense),
    };
    if let Some(like) = &like {
        check_like(like, &format, dense)?;
    }
    let tensors = Repacked::new(&source, format.store_as(like.as_ref()));
    let left_out = tensors.left_out();
    if let Some(like) = like.as_ref().filter(|_| !left_out.is_empty()) {
        let names = left_out[..left_out.len().min(10)].join(", ");
        let text = format!("--like {}: it has no place for {names}; export without --like", like.path().display());
        return Err(CliError::Usage(text));
    }
    write_and_check(&tensors, like.as_ref(), &args.output_dat, |path| {
        let spec = |precision| LinearSpec::new(Recipe::W4, format.scaling, precision);
        device::run(args.device, None, CheckFile { tensors: &tensors, path, config: &config, text: &text, spec: &spec })
    })
}

/// Refuses a file that cannot be the model of an export.
fn check_like(like: &Container, format: &ExportFormat, dense: usize) -> Result<(), CliError> {
    let refuse = |reason: &str| Err(CliError::Usage(format!("--like {}: {reason}", like.path().display())));
    if like.dat().is_none() {
        return refuse("it is not a .dat file; give a .dat file");
    }
    if dense > 0 || format.block() == BlockShape::Square {
        return refuse("the run left blocks unquantized or used scales of 16x16 values; export without --like");
    }
    Ok(())
}

/// How a trained model is exported.
#[derive(Debug, Clone, Copy)]
pub struct ExportFormat {
    /// Whether NVFP4 tensors have a scale of their own.
    pub scaling: Scaling,
    /// Whether a head that is not the embedding is NVFP4.
    pub head: bool,
    /// The recipe of the run. A run with recipe bf16 exports no NVFP4.
    pub recipe: Recipe,
    /// The first block that the recipe does not quantize.
    pub dense_from: usize,
}

impl ExportFormat {
    /// How tensors are stored: as in `like`, or in NVFP4 with the blocks by which training quantized.
    fn store_as<'a>(&self, like: Option<&'a Container>) -> StoreAs<'a> {
        match (self.recipe.packs_weights(), like) {
            (false, _) => StoreAs::Float(FloatType::Bf16),
            (true, Some(like)) => StoreAs::Like(like),
            (true, None) => StoreAs::Nvfp4 {
                scaling: self.scaling,
                head: self.head,
                block: self.block(),
                dense_from: self.dense_from,
            },
        }
    }

    /// Which values share a block scale.
    fn block(&self) -> BlockShape {
        self.spec(Precision::F32).weights().block
    }

    fn spec(&self, precision: Precision) -> LinearSpec {
        LinearSpec::new(self.recipe, self.scaling, precision)
    }
}

/// Writes a model folder that can be loaded by itself, in place of an older one: an NVFP4 `.dat`, or bf16 safetensors for
/// recipe bf16, with config.json and tokenizer. Returns the folder.
///
/// # Errors
/// If writing fails or the written file does not work. An older folder is then untouched.
pub fn model_to_folder<B: Nvfp4Kernels>(
    model: &Qwen3<B>,
    text: &TextFiles,
    companions: &Companions,
    format: ExportFormat,
    like: Option<&Container>,
    folder: &Path,
) -> Result<PathBuf, CliError> {
    let live = Live::new(model);
    let tensors = Repacked::new(&live, format.store_as(like));
    let mut pending = PendingFolder::new(folder)?;
    let name = if format.recipe.packs_weights() { "model.dat" } else { "model.safetensors" };
    pending.file(name, |out| write(&tensors, like, name.ends_with(".dat"), out, folder))?;
    companions.copy_into(&mut pending)?;
    Trained::write(format.recipe, &mut pending)?;
    // The check loads the folder as users will, with its own config.json.
    let config = Qwen3Config::from_file(&pending.path_of("config.json"))?;
    let check = Check { tensors: &tensors, path: &pending.path_of(name), config: &config, text };
    check.against(model, format, like.is_some())?;
    pending.replace()
}

/// Writes a model as a `.dat` file and checks it.
///
/// # Errors
/// As [`model_to_folder`].
pub fn model_to_dat<B: Nvfp4Kernels>(
    model: &Qwen3<B>,
    text: &TextFiles,
    format: ExportFormat,
    like: Option<&Container>,
    path: &Path,
) -> Result<(), CliError> {
    let live = Live::new(model);
    let tensors = Repacked::new(&live, format.store_as(like));
    write_and_check(&tensors, like.filter(|_| format.recipe.packs_weights()), path, |written| {
        let check = Check { tensors: &tensors, path: written, config: model.config(), text };
        check.against(model, format, like.is_some())
    })
}

/// Writes a `.dat` file that gets its name only after `check` has read it, and prints its size and digest.
fn write_and_check(
    tensors: &dyn Tensors,
    like: Option<&Container>,
    path: &Path,
    check: impl FnOnce(&Path) -> Result<(), CliError>,
) -> Result<(), CliError> {
    let sha256 = durable::write_checked(path, |out| write(tensors, like, true, out, path), check)?;
    let bytes = std::fs::metadata(path).map_err(CliError::io(path))?.len();
    report::result(format!("{} · {bytes} bytes · sha256 {sha256}", path.display()));
    Ok(())
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

/// The check of `export-dat` and `export-hf`, as a job.
pub(super) struct CheckFile<'a> {
    /// What was to be written.
    pub(super) tensors: &'a dyn Tensors,
    /// The file or folder that was written.
    pub(super) path: &'a Path,
    /// The model's config.
    pub(super) config: &'a Qwen3Config,
    /// Its tokenizer and chat template.
    pub(super) text: &'a TextFiles,
    /// How its linear layers compute.
    pub(super) spec: &'a dyn Fn(Precision) -> LinearSpec,
}

impl Job for CheckFile<'_> {
    type Output = ();

    fn run<B: Nvfp4Kernels + DeviceServices>(self, device: B::Device, precision: Precision) -> Result<(), CliError> {
        let check = Check { tensors: self.tensors, path: self.path, config: self.config, text: self.text };
        let compared = check.read_back()?;
        let answer = check.answer_of_file::<B>((self.spec)(precision), &device)?;
        let tokens = report::count(answer.ids.len(), "token");
        report::label("check", format!("{compared} read back equal what was to be written · {tokens} generated"));
        Ok(())
    }
}

/// A written file and what it should hold.
struct Check<'a> {
    /// What was to be written.
    tensors: &'a dyn Tensors,
    path: &'a Path,
    config: &'a Qwen3Config,
    text: &'a TextFiles,
}

/// What a model says to the prompt of the check.
struct Answer {
    /// The logits of the first token.
    logits: Vec<f32>,
    /// The most likely tokens.
    ids: Vec<u32>,
}

impl Check<'_> {
    /// Reads the file back, and compares the forward pass of its model with that of the trained model in memory, under the
    /// run's own recipe.
    fn against<B: Nvfp4Kernels>(&self, model: &Qwen3<B>, format: ExportFormat, like: bool) -> Result<(), CliError> {
        let compared = self.read_back()?;
        let trained = self.answer(model)?;
        let spec = format.spec(model.spec().precision);
        let exported = self.answer_of_file::<B>(spec, &model.device())?;
        let difference = relative_difference(&exported.logits, &trained.logits);
        let limit = Self::differs_by_at_most(format.recipe, like);
        let equal = exported.ids.iter().zip(&trained.ids).take_while(|(a, b)| a == b).count();
        let found = format!(
            "its logits differ from those of the trained model in memory by {:.2}% (limit {:.0}%), {equal}/{} greedy \
             tokens equal",
            difference * 100.0,
            limit * 100.0,
            trained.ids.len()
        );
        if difference.is_nan() || difference > limit {
            return Err(CliError::corrupt(self.path, format!("{found}; the export is not the trained model")));
        }
        report::label("check", format!("{compared} read back equal what was to be written"));
        report::label("", found);
        Ok(())
    }

    /// How far logits may differ from those of the model in memory, relative to their norm. They cannot be equal: the
    /// export rounds embedding and norms to 16 bits. Quantized activations amplify a rounding to a step of their codes,
    /// and an export like an older file keeps block scales of that file. Two unrelated models differ by 140%.
    fn differs_by_at_most(recipe: Recipe, like: bool) -> f64 {
        let like = like && recipe.packs_weights();
        if recipe.packs_activations() || like { 0.5 } else { 0.1 }
    }

    /// Compares every tensor of the file with what was to be written, bit by bit. Returns what was compared.
    fn read_back(&self) -> Result<String, CliError> {
        let file = Container::open(self.path)?;
        let names = self.tensors.names();
        for name in &names {
            let stored = self.tensors.stored(name);
            let equal = stored == file.stored(name)
                && match stored {
                    None => false,
                    Some(Stored::Packed { .. }) => self.tensors.read_packed(name)? == file.read_packed(name)?,
                    Some(Stored::Dense { shape, .. }) => {
                        let mut equal = true;
                        for rows in row_ranges(&shape, 1 << 21) {
                            equal &= self.tensors.read_rows(name, rows.clone())? == file.read_rows(name, rows)?;
                        }
                        equal
                    }
                };
            if !equal {
                let reason = format!("{name:?} is not what was written; the disk may be damaged");
                return Err(CliError::corrupt(self.path, reason));
            }
        }
        Ok(report::count(names.len(), "tensor"))
    }

    /// Loads the file for inference and asks its model.
    fn answer_of_file<B: Nvfp4Kernels>(&self, spec: LinearSpec, device: &B::Device) -> Result<Answer, CliError> {
        let file = Container::open(self.path)?;
        self.answer::<B>(&weights::load(&file, self.config, spec, Purpose::Infer, device)?)
    }

    fn answer<B: Nvfp4Kernels>(&self, model: &Qwen3<B>) -> Result<Answer, CliError> {
        let prompt = self.text.template.render(
            &[json!({"role": "user", "content": "Who are you? 你是誰？"})],
            RenderOptions { add_generation_prompt: true, ..Default::default() },
        )?;
        let prompt = self.text.tokenizer.encode(&prompt)?;
        let logits = Session::new(model, prompt.len())?.read(&prompt)?;
        let options = GenerateOptions { max_tokens: 16, sampling: Sampling::GREEDY, stop_ids: vec![], logprobs: None };
        let ids = generate(model, &prompt, &options, |_| ControlFlow::Continue(()))?.ids;
        Ok(Answer { logits, ids })
    }
}

/// `‖a - b‖ / ‖b‖`.
fn relative_difference(a: &[f32], b: &[f32]) -> f64 {
    let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
    let difference = squares(&mut a.iter().zip(b).map(|(a, b)| f64::from(*a) - f64::from(*b)));
    (difference / squares(&mut b.iter().map(|b| f64::from(*b))).max(f64::MIN_POSITIVE)).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_difference_of_logits_is_relative_to_their_norm() {
        assert_eq!(relative_difference(&[3.0, 4.0], &[3.0, 4.0]), 0.0);
        assert_eq!(relative_difference(&[3.0, 4.5], &[3.0, 4.0]), 0.1);
        assert!(relative_difference(&[f32::NAN, 0.0], &[1.0, 1.0]).is_nan());
    }
}
