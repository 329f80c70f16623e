//! What a run reads before it trains: the model's shape, tokenizer and weights file, the samples, and a digest of the
//! files, which a resumed run must find unchanged.

use crate::{
    CliError,
    data::format::RowOptions,
    data::order::{Made, Order},
    data::read::{self, DataOptions, DataReport},
    data::rows,
    data::sample::{Sample, synthetic},
    data::token_cache,
    durable,
    model_files::TextFiles,
    plan::{self, ModelSource, Plan},
    report,
    run::checkpoint::TrainerState,
};
use backend_nvfp4::Scaling;
use model_qwen3::{
    config::Qwen3Config,
    container::Container,
    tensors::{Stored, Tensors},
    tokenizer::Tokenizer,
};
use std::{path::PathBuf, sync::Arc};

/// What a run reads.
pub struct Inputs {
    /// The model's shape.
    pub config: Qwen3Config,
    /// Maximum length of a sequence, in tokens.
    pub max_seq_length: usize,
    /// Tokenizer and chat template.
    pub text: TextFiles,
    /// The weights file; none for random weights.
    pub source: Option<Container>,
    /// Training samples.
    pub train: Arc<Vec<Sample>>,
    /// Evaluation samples.
    pub eval: Vec<Sample>,
    /// Counts of rows and tokens.
    pub report: DataReport,
    /// Whether the answers of training rows think, if they come from a chat template that knows thoughts.
    pub thinking: Option<bool>,
    /// SHA-256 of all files that decide what a step computes.
    pub sha256: String,
    /// Steps and sequences that the run had made when it was resumed. Zero for a new run.
    made: Made,
}

impl Inputs {
    /// Reads the inputs of a plan, for a run that resumes from `state` if there is one.
    ///
    /// # Errors
    /// If a file is missing or broken, or the plan does not fit the model.
    pub fn read(plan: &Plan, state: Option<&TrainerState>) -> Result<Self, CliError> {
        let config = Qwen3Config::from_file(&plan.companions.config)?;
        fits(plan, &config)?;
        let chosen = &plan.settings.data;
        let max_seq_length = plan::max_seq_length(chosen.max_seq_length, config.max_position_embeddings)?;
        let text = TextFiles::open(&plan.companions.text, &config)?;
        let source = match &plan.source {
            ModelSource::Files(files) => Some(files.open_weights(&config)?),
            ModelSource::Random { .. } => None,
        };
        let (train, eval, report) = samples(plan, &text, max_seq_length, config.vocab_size)?;
        let files = chosen.data.iter().chain(&chosen.eval_data).chain([&plan.companions.config]).cloned();
        let mut digests = String::new();
        for path in files.chain(plan.companions.text_files()) {
            digests += &durable::digest(&path)?.1;
        }
        let sha256 = durable::digest_of(digests.as_bytes());
        // Random tokens say nothing about thoughts.
        let thinking = if chosen.synthetic { None } else { thinks(&train, &text.tokenizer)? };
        let made = made(plan, state, train.len());
        let train = Arc::new(train);
        Ok(Self { config, max_seq_length, text, source, train, eval, report, thinking, sha256, made })
    }

    /// Scale levels of the model file's NVFP4 tensors, if it has any.
    pub fn stored_scaling(&self) -> Option<Scaling> {
        self.source.as_ref().and_then(|source| packed_scaling(source))
    }

    /// Tokens of the longest row, of training or evaluation.
    pub fn longest_row(&self) -> usize {
        self.train.iter().chain(&self.eval).map(|sample| sample.ids.len()).max().unwrap_or(0)
    }

    /// The order of training samples over the run.
    pub fn order(&self, plan: &Plan) -> Order {
        let (s, size, made) = (&plan.settings.optimizer, plan.sequences_per_step(), self.made);
        let (steps, limit) = match s.max_steps {
            Some(steps) => (steps, made.sequences + steps.saturating_sub(made.steps) * size),
            None => {
                let limit = ((self.train.len() as f64 * s.num_train_epochs).round() as usize).max(1);
                let steps = match limit.checked_sub(made.sequences) {
                    Some(left) => made.steps.saturating_add(left.div_ceil(size)),
                    // The run would end before the step that it resumes from. A later check of this number refuses it.
                    None => limit.div_ceil(size),
                };
                (steps, limit)
            }
        };
        Order {
            samples: self.train.clone(),
            batch_size: s.batch_size,
            accumulation: s.gradient_accumulation_steps,
            steps,
            limit,
            seed: plan.settings.advanced.seed,
            start: 0,
            made,
        }
    }

    /// The evaluation samples as one step of many micro-batches: every loss is divided by all supervised tokens.
    pub fn eval_order(&self, plan: &Plan) -> Order {
        let (count, batch_size) = (self.eval.len(), plan.settings.optimizer.batch_size);
        Order {
            samples: Arc::new(self.eval.clone()),
            batch_size,
            accumulation: count.div_ceil(batch_size).max(1),
            steps: usize::from(count > 0),
            limit: count,
            seed: 0,
            start: 0,
            made: Made::default(),
        }
    }
}

/// What a run over `rows` training rows had made when `state` was saved. Nothing for a new run.
fn made(plan: &Plan, state: Option<&TrainerState>, rows: usize) -> Made {
    let Some(&TrainerState { global_step: steps, epoch, .. }) = state else { return Made::default() };
    let full = steps.saturating_mul(plan.sequences_per_step());
    let sequences = (epoch * rows as f64).round() as usize;
    // The number of random rows depends on --max-steps, which may have another value now.
    let sequences = if plan.settings.data.synthetic { full } else { sequences.clamp(steps, full) };
    Made { steps, sequences }
}

/// Whether a learned answer holds a thought; None if no answer holds the marks of one. Templates put empty marks in front of
/// an answer that does not think.
fn thinks(samples: &[Sample], tokenizer: &Tokenizer) -> Result<Option<bool>, CliError> {
    let (Some(open), Some(close)) = (tokenizer.id("<think>"), tokenizer.id("</think>")) else { return Ok(None) };
    let mut found = None;
    for sample in samples {
        let mut opened = None;
        for (i, id) in sample.ids.iter().enumerate() {
            if *id == open {
                opened = Some(i);
            }
            if let Some(from) = opened.filter(|_| *id == close && sample.supervised[i]) {
                if !tokenizer.decode(&sample.ids[from + 1..i])?.trim().is_empty() {
                    return Ok(Some(true));
                }
                found = Some(false);
            }
        }
    }
    Ok(found)
}

/// The scale levels of a file's NVFP4 tensors, if it has any.
pub fn packed_scaling(source: &dyn Tensors) -> Option<Scaling> {
    source.names().iter().find_map(|name| match source.stored(name) {
        Some(Stored::Packed { scaling, .. }) => Some(scaling),
        _ => None,
    })
}

/// Refuses a plan that the model's shape does not allow.
fn fits(plan: &Plan, config: &Qwen3Config) -> Result<(), CliError> {
    let (last, layers) = (plan.settings.model.train_last_layers, config.num_hidden_layers);
    if last > layers {
        let text = format!("--train-last-layers {last}: the model has {layers} layers; choose at most {layers}");
        return Err(CliError::Usage(text));
    }
    let dense = plan.settings.bf16_last_blocks(layers);
    if dense > layers {
        let text = format!("--bf16-last-blocks {dense}: the model has {layers} layers; choose at most {layers}");
        return Err(CliError::Usage(text));
    }
    if plan.recipe.packs_gradients().is_none() {
        return Ok(());
    }
    // Packed gradients cut output features and tokens into blocks of 16, too.
    let keys = config.num_key_value_heads * config.head_dim;
    for (what, size) in [("num_key_value_heads * head_dim", keys), ("vocab_size", config.vocab_size)] {
        if !size.is_multiple_of(16) {
            let text = format!(
                "--recipe {}: {what} is {size}, which is not a multiple of 16; take w4 or w4a4",
                plan.recipe.name()
            );
            return Err(CliError::Usage(text));
        }
    }
    Ok(())
}

/// Number of steps of random tokens where the settings name none.
const SYNTHETIC_STEPS: usize = 8;

/// The training rows, the evaluation rows, and what was found in their files.
type Split = (Vec<Sample>, Vec<Sample>, DataReport);

/// Reads the samples of a plan, or makes them of `vocabulary` tokens. None is longer than `max_seq_length`.
fn samples(plan: &Plan, text: &TextFiles, max_seq_length: usize, vocabulary: usize) -> Result<Split, CliError> {
    let (s, seed) = (&plan.settings.data, plan.settings.advanced.seed);
    if s.synthetic {
        let rows = plan.settings.optimizer.max_steps.unwrap_or(SYNTHETIC_STEPS) * plan.sequences_per_step();
        let made = synthetic(rows, max_seq_length, vocabulary, seed);
        let (rows, tokens) = (made.len(), made.iter().map(|s| s.ids.len()).sum());
        let report = DataReport { rows, samples: rows, tokens, supervised_tokens: tokens, ..Default::default() };
        return Ok((made, vec![], report));
    }
    let rows = RowOptions { separator: s.document_separator.clone(), weight: s.weight_column.clone() };
    let files: Vec<PathBuf> = s.data.iter().chain(&s.eval_data).cloned().collect();
    read::check_separator(&files, s.format, rows.separator.as_deref())?;
    let options = DataOptions { format: s.format, loss_on: s.loss_on, overlong: s.overlong, max_seq_length, rows };
    let cache = s.token_cache.as_deref();
    let (mut all, mut report) = token_cache::load(cache, &s.data, text, &options)?;
    if let Some(most) = s.max_rows {
        (all, report.left_out) = rows::choose(all, most, seed);
        report.samples = all.len();
        report.tokens = all.iter().map(|s| s.ids.len()).sum();
        report.supervised_tokens = all.iter().map(Sample::supervised_tokens).sum();
    }
    let (mut train, mut eval) = match &s.eval_data {
        // The weights of rows say how often they are trained on. Evaluation takes each once.
        Some(path) => {
            let options = DataOptions { rows: RowOptions { weight: None, ..options.rows.clone() }, ..options };
            let (eval, found) = token_cache::load(cache, std::slice::from_ref(path), text, &options)?;
            let lost = found.lost(max_seq_length);
            if !lost.is_empty() {
                let (rows, lost) = (report::count(found.rows, "row"), lost.join(" · "));
                report::line(format!("note: --eval-data {}: {rows} · {lost}", path.display()));
            }
            (all, eval)
        }
        None => rows::split(all, s.val_split, seed),
    };
    let (count, sum) = (train.len(), train.iter().map(|sample| sample.weight).sum::<f64>());
    train = rows::weigh(train, &s.data_weights, seed);
    if let Some(column) = s.weight_column.as_ref().filter(|_| train.is_empty()) {
        let rows = report::count(count, "row");
        let text = format!("the weights of {rows} are {sum:.3} together, which is less than one row; give larger ones");
        return Err(CliError::Usage(format!("--weight-column {column}: {text}")));
    }
    if s.packing {
        train = rows::pack(train, max_seq_length);
        eval = rows::pack(eval, max_seq_length);
        let tokens: usize = train.iter().map(|s| s.ids.len()).sum();
        report.packed = Some((train.len(), tokens as f64 / (train.len() * max_seq_length) as f64));
    }
    Ok((train, eval, report))
}
