//! `eval loss`: how well a model predicts the rows of files: the mean loss of a token and its perplexity, as the
//! model runs or, for dense weights, under recipes that quantize them.

use super::flags;
use crate::{
    CliError,
    args::{EvalCommand, EvalLossArgs},
    commands::needle,
    data::{
        format::RowOptions,
        order::MicroBatch,
        read::{self, DataOptions},
        sample::Sample,
    },
    data_files,
    device::{self, Job},
    memory::surplus::Surplus,
    model_files::TextFiles,
    plan, report,
    run::stored_model::StoredModel,
    settings::{LossKind, Overlong},
    talk::loaded::Opened,
    train::objective::Trainee,
};
use backend_nvfp4::{CacheFormat, DeviceMemory, DeviceServices, Nvfp4Kernels, Precision};
use model_qwen3::{config::Qwen3Config, model::Qwen3, weights::to_host};
use serde_json::json;
use std::time::Instant;

/// Runs the command.
///
/// # Errors
/// If a file or the model cannot be read or run.
pub fn run(command: EvalCommand) -> Result<(), CliError> {
    let args = match command {
        EvalCommand::Loss(args) => args,
        EvalCommand::Needle(args) => return needle::run(args),
    };
    if args.batch_size == 0 {
        return Err(CliError::Usage("--batch-size 0: at least one row must be computed at a time".into()));
    }
    device::run(args.model.device, args.model.compute_dtype, EvalLoss(args))
}

struct EvalLoss(EvalLossArgs);

impl Job for EvalLoss {
    type Output = ();

    fn remedy(&self) -> &'static str {
        "give a smaller --max-seq-length or --batch-size"
    }

    fn run<B: Nvfp4Kernels + DeviceServices>(self, device: B::Device, precision: Precision) -> Result<(), CliError> {
        let args = self.0;
        if args.recipes.is_empty() {
            let mut opened = Opened::new(flags::wanted(&args.model, CacheFormat::Native))?;
            let config = opened.config().clone();
            let samples = samples(&args, opened.text(), &config)?;
            let model = opened.load::<B>(None, precision, &device)?.model;
            return measure(&args, model, &samples, "as it runs");
        }
        let stored = StoredModel::open("--model", &args.model.model, args.model.tokenizer.as_deref())?;
        let samples = samples(&args, &stored.text, &stored.config)?;
        for recipe in &args.recipes {
            measure(&args, stored.load_under::<B>(*recipe, precision, &device)?, &samples, recipe.name())?;
        }
        Ok(())
    }
}

/// The sequences to measure. Says how many rows have no token that the loss counts.
fn samples(args: &EvalLossArgs, text: &TextFiles, config: &Qwen3Config) -> Result<Vec<Sample>, CliError> {
    let wanted = args.max_seq_length.map(usize::from);
    let max_seq_length = plan::max_seq_length(wanted, config.max_position_embeddings)?;
    let overlong = Overlong::Split;
    let files = data_files::all_named_by("--data", &args.data)?;
    read::check_separator(&files, args.format, args.document_separator.as_deref())?;
    let rows = RowOptions { separator: args.document_separator.clone(), weight: None };
    let options = DataOptions { format: args.format, loss_on: args.loss_on, max_seq_length, overlong, rows };
    let (samples, found) = read::load(&files, text, &options)?;
    if !found.dropped.is_empty() {
        report::line(format!("note: the loss counts nothing in {}", report::count(found.dropped.len(), "row")));
    }
    Ok(samples)
}

/// Measures one form of a model and prints what it found.
fn measure<B: Nvfp4Kernels + DeviceMemory>(
    args: &EvalLossArgs,
    model: Qwen3<B>,
    samples: &[Sample],
    form: &str,
) -> Result<(), CliError> {
    let started = Instant::now();
    let net = Trainee::new(model, LossKind::CrossEntropy, 0);
    let (mut sum, mut surplus, device) = (0.0, Surplus::default(), net.model().device());
    for rows in samples.chunks(args.batch_size) {
        let batch = MicroBatch::new(&rows.iter().collect::<Vec<_>>(), 1);
        sum += f64::from(to_host(net.batch_loss(&batch))?[0]);
        surplus.after_step::<B>(&device, true);
    }
    let count = |of: fn(&Sample) -> usize| samples.iter().map(of).sum::<usize>();
    let (tokens, counted) = (count(|s| s.ids.len()), count(Sample::supervised_tokens));
    let (loss, seconds) = (sum / counted.max(1) as f64, started.elapsed().as_secs_f64());
    if args.json {
        let found = json!({
            "form": form, "loss": loss, "perplexity": loss.exp(), "sequences": samples.len(), "tokens": tokens,
            "supervised_tokens": counted, "seconds": seconds,
        });
        report::result(found.to_string());
    } else {
        report::result(format!(
            "{form:<12} loss {loss:.4} · perplexity {:.3} · {counted} of {tokens} tokens in {} · {:.0} tokens/s",
            loss.exp(),
            report::count(samples.len(), "sequence"),
            tokens as f64 / seconds
        ));
    }
    Ok(())
}
