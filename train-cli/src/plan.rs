//! Settings to a checked plan. What can be refused without reading data or loading a model is refused here. A plan is not changed
//! afterwards. (What depends on the model or the device, too, is decided by `run/preflight.rs`.)

use crate::{
    CliError, data_files,
    model_files::{Companions, ModelFiles},
    outputs::{check_dat_name, check_folder, check_output, check_output_folder, check_outside, resolved},
    settings::{
        Clip, Nvfp4Part, SaveStrategy, Settings, bytes,
        defaults::{MAX_SEQ_LENGTH, RUNS, SHORTEST_SEQUENCE, clips_exactly_by_default, master_weights, quantized_from},
        fields::RANGES,
        flag, not_recordable,
    },
};
use backend_nvfp4::{MasterKind, Precision, Recipe, Scaling, StateKind};
use model_qwen3::file;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// A training run, checked.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The settings that the plan was made from.
    pub settings: Settings,
    /// Where the model comes from.
    pub source: ModelSource,
    /// config.json, tokenizer and chat template of the model.
    pub companions: Companions,
    /// Which matrix products are quantized, and how.
    pub recipe: Recipe,
    /// Which gradient norm clipping uses.
    pub clip: Clip,
    /// Limit on device memory, in bytes.
    pub memory_limit: Option<u64>,
    /// The run folder.
    pub output_dir: PathBuf,
    /// Every file that the run reads. None of them is overwritten.
    pub inputs: Vec<PathBuf>,
}

/// Where a model comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelSource {
    /// From files.
    Files(ModelFiles),
    /// From random weights in the shape of a config.json.
    Random {
        /// The config.json.
        config: PathBuf,
    },
}

impl Plan {
    /// Checks settings and resolves what they leave open.
    ///
    /// # Errors
    /// If they are incomplete, contradictory or out of range, or an output is an input.
    pub fn new(settings: Settings) -> Result<Self, CliError> {
        Self::made(settings, None)
    }

    /// As [`Self::new`], in a run folder that the program has found a name for: several runs may begin at once.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn in_folder(settings: Settings, folder: PathBuf) -> Result<Self, CliError> {
        Self::made(settings, Some(folder))
    }

    fn made(mut settings: Settings, folder: Option<PathBuf>) -> Result<Self, CliError> {
        // The checks below turn the settings into a table, and a table cannot hold a path that is not UTF-8.
        can_be_recorded(&settings)?;
        in_range(&settings)?;
        check_warmup(&settings)?;
        no_path_is_empty(&mut settings)?;
        consistent(&settings)?;
        let mut settings = with_files(settings)?;
        // Now the files of folders are known, too.
        can_be_recorded(&settings)?;
        if let (Some(named), Some(folder)) = (&mut settings.saving.output_dir, &folder) {
            named.clone_from(folder);
        }
        let s = &settings;
        let source = source(s)?;
        let companions = companions(s, &source);
        if matches!(source, ModelSource::Random { .. }) {
            let hint = "give the config.json of a model, or the folder that holds it";
            file::open(&companions.config, hint).map_err(CliError::of_flag("--init-config"))?;
        }
        let output_dir = folder.or_else(|| s.saving.output_dir.clone()).unwrap_or_else(|| new_run_folder(&source));
        for (flag, folder) in [("--output-dir", Some(&output_dir)), ("--tokenizer", s.model.tokenizer.as_ref())] {
            if let Some(folder) = folder {
                check_folder(flag, folder)?;
            }
        }
        let inputs = inputs(s, &source, &companions);
        check_outputs(s, &output_dir, &inputs)?;
        Ok(Self {
            recipe: s.recipe.resolved(),
            clip: s.optimizer.clip.unwrap_or_else(|| default_clip(s)),
            memory_limit: s.memory.memory_limit.as_deref().map(|text| bytes("--memory-limit", text)).transpose()?,
            source,
            companions,
            output_dir,
            inputs,
            settings,
        })
    }

    /// How master weights are stored on a device that computes in `precision`.
    pub fn master(&self, precision: Precision) -> MasterKind {
        self.settings.memory.master_weights.unwrap_or_else(|| master_weights(precision))
    }

    /// Whether a step must know its own gradient norm before it updates anything.
    pub fn needs_the_norm_first(&self) -> bool {
        self.clip.needs_the_norm_first(self.settings.optimizer.max_grad_norm)
    }

    /// The first step, counted from 0, that uses the recipe, in a run of `steps` steps.
    pub fn quantize_from(&self, steps: usize) -> usize {
        quantized_from(self.settings.recipe.quantize_from, steps)
    }

    /// Steps of the warm-up in a run of `steps` steps.
    pub fn warmup(&self, steps: usize) -> usize {
        let given = self.settings.optimizer.warmup_steps;
        if given < 1.0 { (given * steps as f64).round() as usize } else { given as usize }
    }

    /// Number of sequences in an optimizer step.
    pub fn sequences_per_step(&self) -> usize {
        self.settings.optimizer.batch_size * self.settings.optimizer.gradient_accumulation_steps
    }
}

/// Refuses what a run would write besides its folder, if it cannot be written, is one of `inputs`, or lies in the folder.
fn check_outputs(s: &Settings, output_dir: &Path, inputs: &[PathBuf]) -> Result<(), CliError> {
    if let Some(cache) = &s.data.token_cache {
        check_output_folder("--token-cache", cache)?;
        check_outside("--token-cache", cache, output_dir)?;
    }
    for (flag, output) in [("--output-dat", &s.saving.output_dat), ("--vram-report", &s.logging.vram_report)] {
        if let Some(output) = output {
            check_outside(flag, output, output_dir)?;
            check_output(flag, output, inputs)?;
        }
    }
    let Some(output) = &s.saving.output_dat else { return Ok(()) };
    check_dat_name("--output-dat", output)?;
    if s.logging.vram_report.as_deref().map(resolved) == Some(resolved(output)) {
        let shown = output.display();
        return Err(CliError::Usage(format!(
            "--vram-report {shown}: this is the file of --output-dat; choose another"
        )));
    }
    Ok(())
}

/// The settings with the files that folders and patterns stand for, each of which is there. Each has the weight of its folder
/// or pattern.
fn with_files(mut settings: Settings) -> Result<Settings, CliError> {
    let data = &mut settings.data;
    let remedy = "name it once, and use --data-weights to repeat its rows";
    let files = data_files::named_by("--data", &data.data, remedy)?;
    if let Some(file) = &data.eval_data {
        data_files::check("--eval-data", file)?;
    }
    let each = files.iter().zip(&data.data_weights);
    data.data_weights = each.flat_map(|(files, weight)| vec![*weight; files.len()]).collect();
    data.data = files.concat();
    Ok(settings)
}

/// Maximum length of a sequence, for a model that takes `limit` tokens: as wanted, else [`MAX_SEQ_LENGTH`], or the limit if it is
/// lower.
///
/// # Errors
/// If a longer one is wanted than the model takes, or one in which nothing is predicted.
pub fn max_seq_length(wanted: Option<usize>, limit: usize) -> Result<usize, CliError> {
    match wanted {
        None => Ok(MAX_SEQ_LENGTH.min(limit)),
        Some(length) if length < SHORTEST_SEQUENCE => Err(CliError::Usage(format!(
            "--max-seq-length {length}: nothing is predicted in so short a sequence; choose at least {SHORTEST_SEQUENCE}"
        ))),
        Some(length) if length <= limit => Ok(length),
        Some(length) => Err(CliError::Usage(format!(
            "--max-seq-length {length}: the model takes at most {limit} tokens; choose at most {limit}"
        ))),
    }
}

/// The norm by which a run clips, if nobody chooses one.
fn default_clip(s: &Settings) -> Clip {
    if clips_exactly_by_default(s.optimizer.gradient_accumulation_steps) { Clip::Exact } else { Clip::Previous }
}

/// Refuses an empty path. The command line refuses it before, but a config file or the record of a run may have one.
fn no_path_is_empty(settings: &mut Settings) -> Result<(), CliError> {
    match settings.paths().find(|(_, path)| path.as_os_str().is_empty()) {
        Some((flag, _)) => {
            Err(CliError::Usage(format!("{flag}: the path is empty; give one, or leave the setting out")))
        }
        None => Ok(()),
    }
}

/// Refuses a path that is not UTF-8. The command line refuses it before, but it may come from a folder of data files, or from the
/// working directory.
fn can_be_recorded(settings: &Settings) -> Result<(), CliError> {
    match settings.absolute().paths().find(|(_, path)| path.to_str().is_none()) {
        Some((flag, path)) => Err(CliError::Usage(not_recordable(flag, path))),
        None => Ok(()),
    }
}

/// Refuses numbers outside [`RANGES`].
fn in_range(s: &Settings) -> Result<(), CliError> {
    let table = s.table();
    for (key, low, high) in RANGES {
        let given = match &table[key] {
            Value::Array(list) => list.as_slice(),
            one => std::slice::from_ref(one),
        };
        for value in given {
            let Some(number) = value.as_f64().filter(|number| !(low..=high).contains(number)) else { continue };
            let shown = value.as_u64().map_or_else(|| number.to_string(), |count| count.to_string());
            let range = if high == f64::MAX { format!("at least {low}") } else { format!("between {low} and {high}") };
            return Err(CliError::Usage(format!("{} {shown}: the value must be {range}", flag(key))));
        }
    }
    Ok(())
}

/// Refuses a warm-up that is neither a whole number of steps nor a share of the run.
fn check_warmup(s: &Settings) -> Result<(), CliError> {
    let warmup = s.optimizer.warmup_steps;
    if warmup >= 1.0 && warmup.fract() != 0.0 {
        let text = "a number of steps is whole, and a share of the run is below 1";
        return Err(CliError::Usage(format!("--warmup-steps {warmup}: {text}")));
    }
    Ok(())
}

/// A combination of settings, whether a run has it, and why it is refused. `RECIPE` in the reason stands for the chosen recipe.
type Rule = (bool, &'static str);

/// Refuses settings that exclude each other.
fn consistent(s: &Settings) -> Result<(), CliError> {
    if let Some((_, text)) = files(s).into_iter().chain(number_formats(s)).find(|(broken, _)| *broken) {
        return Err(CliError::Usage(text.replace("RECIPE", s.recipe.recipe.name())));
    }
    let (files, weights) = (s.data.data.len(), s.data.data_weights.len());
    if weights > 0 && weights != files {
        let text = "give one weight for each file";
        return Err(CliError::Usage(format!("--data-weights has {weights} values for {files} --data files; {text}")));
    }
    Ok(())
}

/// The combinations that are refused of what a run reads and writes.
fn files(s: &Settings) -> Vec<Rule> {
    let (data, files) = (&s.data, s.data.data.len());
    let chooses = s.compares_evaluations();
    vec![
        (data.data.is_empty() && !data.synthetic, "there is no training data; give --data FILE, or --synthetic"),
        (data.synthetic && files > 0, "--synthetic takes no --data: it trains on random tokens; leave one of them out"),
        (data.synthetic && data.max_rows.is_some(), "--synthetic has no rows to choose from; leave out --max-rows"),
        (
            data.synthetic && (data.weight_column.is_some() || data.document_separator.is_some()),
            "--synthetic has no rows and no documents; leave out --weight-column and --document-separator",
        ),
        (data.synthetic && data.token_cache.is_some(), "--synthetic has no rows to cache; leave out --token-cache"),
        (
            data.synthetic && chooses,
            "--early-stopping-patience and --load-best-model-at-end compare evaluations, and --synthetic evaluates nothing; leave \
             one of them out",
        ),
        (data.synthetic && data.eval_data.is_some(), "--synthetic evaluates nothing; leave out --eval-data"),
        (
            s.saving.save_strategy == SaveStrategy::No && s.saving.output_dat.is_some(),
            "--save-strategy no writes no --output-dat; leave one of them out",
        ),
        (
            s.saving.save_strategy == SaveStrategy::No && s.saving.load_best_model_at_end,
            "--save-strategy no saves no model that --load-best-model-at-end could load; leave one of them out",
        ),
        (
            chooses && data.val_split == 0.0 && data.eval_data.is_none(),
            "--early-stopping-patience and --load-best-model-at-end compare evaluation losses; give --eval-data FILE, or \
             --val-split above 0",
        ),
        (
            chooses && s.logging.eval_steps == Some(0),
            "--early-stopping-patience and --load-best-model-at-end compare evaluations; give --eval-steps above 0",
        ),
        (
            chooses && s.recipe.damped_finish > 0.0,
            "--damped-finish changes the last part of a run, which --early-stopping-patience and \
             --load-best-model-at-end may leave out; leave one of them out",
        ),
    ]
}

/// The combinations that are refused of the number formats in which it computes.
fn number_formats(s: &Settings) -> Vec<Rule> {
    let recipe = &s.recipe;
    let packed = s.memory.master_weights == Some(MasterKind::Nvfp4);
    let float_states = matches!(s.memory.optimizer_state_mode, StateKind::F32 | StateKind::Bf16);
    let plain = !recipe.recipe.packs_weights();
    vec![
        (
            plain && recipe.scales.is_some(),
            "--scales changes nothing: --recipe RECIPE quantizes nothing; leave one of them out",
        ),
        (
            plain && recipe.share_scales,
            "--share-scales changes nothing: --recipe RECIPE quantizes nothing; leave one of them out",
        ),
        (
            recipe.share_scales && recipe.scales == Some(Scaling::Single),
            "--share-scales changes nothing: with --scales single no matrix has a matrix scale; leave one of them out",
        ),
        (
            recipe.share_scales && packed,
            "--share-scales needs dense master weights, because each NVFP4 master weight keeps its own matrix scale; choose \
             --master-weights other than nvfp4",
        ),
        (
            plain && s.saving.head.is_some(),
            "--head changes nothing: --recipe RECIPE exports no NVFP4 weights; leave one of them out",
        ),
        (packed && float_states, "--master-weights nvfp4 needs --optimizer-state-mode int8 or int4"),
        (packed && plain, "--master-weights nvfp4 keeps no weights for --recipe RECIPE to read; take --recipe w4"),
        (
            packed && recipe.bf16_last_blocks.is_some_and(|blocks| blocks > 0),
            "--bf16-last-blocks needs dense master weights; choose --master-weights other than nvfp4",
        ),
        (
            packed && recipe.nvfp4_without.contains(&Nvfp4Part::SquareBlocks),
            "--nvfp4-without square-blocks changes nothing: --master-weights nvfp4 always has 1x16 blocks; leave it out",
        ),
        (
            recipe.damped_finish > 0.0 && (plain || packed),
            "--damped-finish freezes dense master weights on their NVFP4 codes; it needs a recipe that quantizes, and \
             --master-weights other than nvfp4",
        ),
        (
            recipe.damped_finish > 0.0 && recipe.scales == Some(Scaling::Single),
            "--damped-finish needs --scales two: frozen codes have two-level scales",
        ),
        (
            recipe.quantize_from > 0.0 && (plain || packed),
            "--quantize-from needs a recipe that quantizes, and --master-weights other than nvfp4",
        ),
        (
            recipe.quantize_from > 0.0
                && recipe.damped_finish > 0.0
                && recipe.quantize_from + recipe.damped_finish > 1.0,
            "--damped-finish would begin before --quantize-from; their sum must be at most 1",
        ),
        (
            !recipe.nvfp4_without.is_empty() && !matches!(recipe.recipe, Recipe::Nvfp4(_)),
            "--nvfp4-without needs --recipe nvfp4",
        ),
        (
            recipe.compute_dtype == Some(Precision::F16),
            "--compute-dtype f16 cannot train: gradients underflow in f16; choose bf16 or f32",
        ),
    ]
}

fn source(s: &Settings) -> Result<ModelSource, CliError> {
    match (&s.model.model, &s.model.init_config) {
        (Some(model), None) => ModelFiles::new(model).refuse_gguf().map(ModelSource::Files),
        (None, Some(config)) => Ok(ModelSource::Random { config: config.clone() }),
        (Some(_), Some(_)) => {
            Err(CliError::Usage("--model and --init-config exclude each other; leave one of them out".into()))
        }
        (None, None) => {
            Err(CliError::Usage("there is no model; give --model PATH or --init-config FILE, or try --demo".into()))
        }
    }
}

fn companions(s: &Settings, source: &ModelSource) -> Companions {
    let (folder, config) = match source {
        ModelSource::Files(files) => (files.folder.clone(), files.config_file(s.model.tokenizer.as_deref())),
        ModelSource::Random { config } if config.is_dir() => (config.clone(), config.join("config.json")),
        ModelSource::Random { config } => (ModelFiles::new(config).folder, config.clone()),
    };
    Companions { config, text: s.model.tokenizer.clone().unwrap_or(folder) }
}

fn new_run_folder(source: &ModelSource) -> PathBuf {
    let name = match source {
        ModelSource::Files(files) => files.name(),
        ModelSource::Random { config } => ModelFiles::new(config).name(),
    };
    dated_folder(&name)
}

/// The folder of a run that begins now, if nobody names one. Runs that begin in the same second get the same name, and the
/// later ones a number behind it (`train-cli/src/run/folder.rs:Lock::of_new`).
pub(crate) fn dated_folder(name: &str) -> PathBuf {
    PathBuf::from(RUNS).join(format!("{}_{name}", jiff::Timestamp::now().strftime("%Y%m%dT%H%M%SZ")))
}

fn inputs(s: &Settings, source: &ModelSource, companions: &Companions) -> Vec<PathBuf> {
    let mut inputs = s.data.data.clone();
    inputs.extend(s.data.eval_data.clone());
    inputs.push(companions.config.clone());
    inputs.extend(companions.text_files());
    if let ModelSource::Files(files) = source {
        inputs.extend(files.weight_files());
    }
    inputs
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::Layer;

    #[test]
    fn every_number_has_a_range() {
        let table = Settings::default().table();
        // Also numbers that have no default, and lists of numbers.
        let takes = |key: &str| ["1", "1.0", "[1.0]"].iter().any(|n| Layer::of_toml(&format!("{key} = {n}")).is_ok());
        let numbers: Vec<&str> = table.keys().map(String::as_str).filter(|key| takes(key)).collect();
        assert!(["learning_rate", "max_steps", "data_weights"].iter().all(|key| numbers.contains(key)), "{numbers:?}");
        for key in numbers {
            assert!(RANGES.iter().any(|(name, ..)| *name == key), "{key} has no range");
        }
        assert!(RANGES.iter().all(|(key, ..)| table.contains_key(*key)));
    }

    #[test]
    fn an_empty_path_is_refused_by_its_flag() {
        for key in
            ["model", "init_config", "tokenizer", "eval_data", "token_cache", "output_dir", "output_dat", "vram_report"]
        {
            let mut layer = Layer::of_toml("synthetic = true").unwrap();
            layer.set(key, String::new());
            let error = Plan::new(layer.over_defaults().unwrap()).unwrap_err();
            assert!(
                error.exit_code() == 2 && error.to_string().starts_with(&format!("{}: the path is empty", flag(key))),
                "{error}"
            );
        }
        let layer = Layer::of_toml("data = [\"\"]").unwrap();
        assert!(
            Plan::new(layer.over_defaults().unwrap()).unwrap_err().to_string().starts_with("--data: the path is empty")
        );
    }

    #[test]
    fn clipping_uses_this_steps_norm_where_it_is_free() {
        let clip = |accumulation| {
            let mut s = Settings::default();
            s.optimizer.gradient_accumulation_steps = accumulation;
            default_clip(&s)
        };
        assert_eq!([clip(1), clip(2)], [Clip::Previous, Clip::Exact]);
    }
}
