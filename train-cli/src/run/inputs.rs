//! What a run reads, before anything is trained: shape, text side, weights file, samples, and a digest
//! of them that a resumed run must meet again.

use crate::{
    CliError,
    data::order::Order,
    data::read as data,
    data::rows,
    data::sample::{Sample, synthetic},
    data::token_cache,
    durable,
    model_files::TextFiles,
    plan::{FitPlan, ModelSource},
    report,
    train::step::{Clip, StepMode},
};
use backend_nvfp4::{Recipe, Scaling};
use model_qwen3::{
    config::Qwen3Config,
    container::Container,
    tensors::{Stored, Tensors},
};
use std::sync::Arc;

/// What a run reads.
pub(crate) struct Inputs {
    /// The model's shape.
    pub(crate) config: Qwen3Config,
    /// Tokenizer and template.
    pub(crate) text: TextFiles,
    /// The model's file; none for random weights.
    pub(crate) source: Option<Container>,
    /// Training samples.
    pub(crate) train: Arc<Vec<Sample>>,
    /// Evaluation samples.
    pub(crate) eval: Vec<Sample>,
    /// What was read.
    pub(crate) report: data::DataReport,
    /// Of all files that decide what is trained.
    pub(crate) sha256: String,
}

impl Inputs {
    pub(crate) fn read(plan: &FitPlan) -> Result<Self, CliError> {
        let config = Qwen3Config::from_file(&plan.companions.config)?;
        if plan.train_last_layers > config.num_hidden_layers {
            let (n, layers) = (plan.train_last_layers, config.num_hidden_layers);
            return Err(CliError::Usage(format!("--train-last-layers {n}: the model has {layers}")));
        }
        check_blocks(plan, &config)?;
        let text = TextFiles::open(&plan.companions.text, &config)?;
        let source = match &plan.source {
            ModelSource::Files(files) => Some(files.open_weights()?),
            ModelSource::Random { .. } => None,
        };
        let (train, eval, report) = samples(plan, &text, &config)?;
        let mut sha256 = String::new();
        let files = plan.data.iter().chain(&plan.eval_data).cloned().chain([plan.companions.config.clone()]);
        for path in files.chain(plan.companions.text_files()) {
            sha256 += &durable::digest(&path).map_err(CliError::io(&path))?.1;
        }
        let sha256 = durable::digest_of(sha256.as_bytes());
        Ok(Self { config, text, source, train: Arc::new(train), eval, report, sha256 })
    }

    /// Scale levels: those asked for, else the model's, else two.
    pub(crate) fn scaling(&self, plan: &FitPlan) -> Scaling {
        plan.scaling.or_else(|| self.source.as_ref().and_then(packed_scaling)).unwrap_or(Scaling::Two)
    }

    pub(crate) fn order(&self, plan: &FitPlan) -> Order {
        let size = plan.batch_size * plan.accumulation;
        let limit = match plan.max_steps {
            Some(steps) => steps * size,
            None => ((self.train.len() as f64 * plan.epochs).round() as usize).max(1),
        };
        Order {
            samples: self.train.clone(),
            batch_size: plan.batch_size,
            accumulation: plan.accumulation,
            steps: limit.div_ceil(size),
            limit,
            seed: plan.seed,
            start: 0,
        }
    }

    pub(crate) fn header(&self, plan: &FitPlan, scaling: Scaling) {
        let params = report::short(self.config.num_params() as f64);
        let layers = self.config.num_hidden_layers;
        let levels = if scaling == Scaling::Two { "two-level" } else { "single-level" };
        let name = match &plan.source {
            ModelSource::Files(files) => files.weights.display().to_string(),
            ModelSource::Random { config } => format!("{} (random weights)", config.display()),
        };
        let recipe = plan.recipe.name();
        let (master, states) = (plan.adamw.master, plan.adamw.state);
        let (mode, clip) = (plan.step_mode, plan.clip);
        let clipped = match plan.max_grad_norm {
            0.0 => "no clipping".to_owned(),
            norm => format!(
                "clipped at {norm} by {} norm",
                if clip == Clip::Exact { "this step's" } else { "the last step's" }
            ),
        };
        report::label(
            "model",
            format!("{name} · {params} params · {layers} layers · recipe {recipe} · {levels} scales"),
        );
        let skipped = match (self.report.dropped.len(), self.report.truncated.len()) {
            (0, 0) => String::new(),
            (d, t) => format!(" · {d} dropped, {t} cut"),
        };
        let (train, eval) = (self.train.len(), self.eval.len());
        let (rows, tokens) = (self.report.rows, report::short(self.report.tokens as f64));
        let packed = self
            .report
            .packed
            .map_or(String::new(), |(rows, full)| format!(" · packed into {rows} rows, {:.0}% full", full * 100.0));
        let supervised = report::short(self.report.supervised_tokens as f64);
        report::label(
            "data",
            format!(
                "{rows} rows · {train} train / {eval} eval · {tokens} tokens, {supervised} supervised{skipped}{packed}"
            ),
        );
        let master = if plan.master_auto { "bf16 (f32 where activations are f32)" } else { master.name() };
        let mode = if mode == StepMode::Streaming { "streaming" } else { "whole graph" };
        report::label("step", format!("{mode} · {master} master · {} states · {clipped}", states.name()));
        let (steps, size) = (self.order(plan).steps, plan.batch_size * plan.accumulation);
        let (lr, seed) = (plan.learning_rate, plan.seed);
        report::label("plan", format!("{steps} steps × {size} sequences · lr {lr:e} · seed {seed}"));
        report::label("run", plan.output_dir.display().to_string());
    }
}

/// Recipe nvfp4 quantises along output features and tokens too: those are cut into blocks of 16.
fn check_blocks(plan: &FitPlan, config: &Qwen3Config) -> Result<(), CliError> {
    if !matches!(plan.recipe, Recipe::Nvfp4(_)) {
        return Ok(());
    }
    let keys = config.num_key_value_heads * config.head_dim;
    for (what, size) in [("num_key_value_heads * head_dim", keys), ("vocab_size", config.vocab_size)] {
        if !size.is_multiple_of(16) {
            return Err(CliError::Usage(format!(
                "--recipe nvfp4: {what} is {size}, no multiple of 16; take w4 or w4a4"
            )));
        }
    }
    Ok(())
}

/// The scale levels of a file's NVFP4 tensors, if it has any.
pub(crate) fn packed_scaling(source: &Container) -> Option<Scaling> {
    source.names().iter().find_map(|n| match source.stored(n) {
        Some(Stored::Packed { scaling, .. }) => Some(scaling),
        _ => None,
    })
}

type Samples = (Vec<Sample>, Vec<Sample>, data::DataReport);

fn samples(plan: &FitPlan, text: &TextFiles, config: &Qwen3Config) -> Result<Samples, CliError> {
    let mut options = plan.options;
    let limit = config.max_position_embeddings;
    if options.max_seq_length > limit {
        if let Some(asked) = plan.settings.max_seq_length {
            return Err(CliError::Usage(format!("--max-seq-length {asked}: the model takes at most {limit}")));
        }
        options.max_seq_length = limit;
    }
    if plan.data.is_empty() {
        let rows = plan.max_steps.unwrap_or(8) * plan.batch_size * plan.accumulation;
        let made = synthetic(rows, options.max_seq_length, config.vocab_size, plan.seed);
        let (rows, tokens) = (made.len(), made.iter().map(|s| s.ids.len()).sum());
        let report = data::DataReport { rows, samples: rows, tokens, supervised_tokens: tokens, ..Default::default() };
        return Ok((made, vec![], report));
    }
    let (all, mut report) = token_cache::load(plan.token_cache.as_deref(), &plan.data, text, options)?;
    let (mut train, mut eval) = match &plan.eval_data {
        Some(path) => {
            (all, token_cache::load(plan.token_cache.as_deref(), std::slice::from_ref(path), text, options)?.0)
        }
        None => rows::split(all, plan.val_split, plan.seed),
    };
    train = rows::weigh(train, &plan.data_weights, plan.seed);
    if plan.packing {
        train = rows::pack(train, options.max_seq_length);
        eval = rows::pack(eval, options.max_seq_length);
        let tokens: usize = train.iter().map(|s| s.ids.len()).sum();
        report.packed = Some((train.len(), tokens as f64 / (train.len() * options.max_seq_length) as f64));
    }
    Ok((train, eval, report))
}

pub(crate) fn eval_order(samples: Vec<Sample>, batch_size: usize) -> Order {
    // One step holds all batches, so that each loss is divided by all supervised tokens.
    let n = samples.len();
    Order {
        samples: Arc::new(samples),
        batch_size,
        accumulation: n.div_ceil(batch_size).max(1),
        steps: usize::from(n > 0),
        limit: n,
        seed: 0,
        start: 0,
    }
}
