//! The calibration of `export-hf --activations nvfp4`: the model reads rows of files, and what its linear layers read is measured.
//!
//! Rows become sequences as in `eval loss`. The weights are those with which `generate` runs the model, and activations are not
//! quantized.

use crate::{
    CliError,
    args::{ActivationsArg, ExportHfArgs, HfFormat, converting::CALIBRATION_ROWS},
    data::{
        format::RowOptions,
        read::{self, DataOptions},
    },
    data_files,
    device::{self, Job},
    plan,
    progress::Line,
    report,
    run::stored_model::StoredModel,
    settings::{LossOn, Overlong},
};
use backend_nvfp4::{DeviceServices, Nvfp4Kernels, Precision, Recipe};
use model_qwen3::{calibration::InputMaxima, model::ids_tensor, tensors::Tensors, weights::to_host};
use std::{collections::BTreeMap, path::PathBuf, sync::Arc};

/// What was measured.
pub(super) struct Calibration {
    /// The largest magnitude that each linear layer read, by the name of its weight.
    pub(super) amax: BTreeMap<String, f32>,
    /// Number of sequences that the model read.
    pub(super) sequences: usize,
    /// Number of tokens in them.
    pub(super) tokens: usize,
}

/// Refuses flags of a calibration that do not fit together. Nothing is read for it.
pub(super) fn check_flags(args: &ExportHfArgs) -> Result<(), CliError> {
    let refuse = |text: &str| Err(CliError::Usage(text.to_owned()));
    let named = !args.calibration_data.is_empty();
    match (args.activations, args.format) {
        (ActivationsArg::Nvfp4, HfFormat::Bf16) => refuse(
            "--activations nvfp4: --format bf16 describes no 4-bit activations; give --format compressed-tensors or \
             --format modelopt",
        ),
        (ActivationsArg::Nvfp4, _) if !named => refuse(
            "--activations nvfp4: the scales of activations must be measured; name files like the training files with \
             --calibration-data",
        ),
        (ActivationsArg::Bf16, _) if named => {
            refuse("--calibration-data: without --activations nvfp4 nothing is measured; give both flags or neither")
        }
        (ActivationsArg::Bf16, _) if args.calibration_rows.is_some() => {
            refuse("--calibration-rows: without --activations nvfp4 nothing is measured; leave the flag out")
        }
        _ => Ok(()),
    }
}

/// Measures the activations of the model, if `--activations nvfp4` asks for it.
pub(super) fn of_model(args: &ExportHfArgs) -> Result<Option<Calibration>, CliError> {
    if args.activations == ActivationsArg::Bf16 {
        return Ok(None);
    }
    let files = data_files::all_named_by("--calibration-data", &args.calibration_data)?;
    let stored = StoredModel::open("--model", &args.model, args.tokenizer.as_deref())?;
    let rows = args.calibration_rows.map_or(CALIBRATION_ROWS, usize::from);
    let found = device::run(args.device, None, Measure { stored: &stored, files: &files, rows })?;
    let largest = found.amax.iter().max_by(|a, b| a.1.total_cmp(b.1));
    report::label(
        "inputs",
        format!(
            "measured on {}, {}{}",
            report::count(found.sequences, "sequence"),
            report::count(found.tokens, "token"),
            largest.map_or(String::new(), |(name, amax)| format!(" · the largest is {amax:.1}, read by {name}"))
        ),
    );
    Ok(Some(found))
}

/// The error of a layer whose activations have no scale.
pub(super) fn no_scale(args: &ExportHfArgs, layer: &str) -> CliError {
    let reason = format!(
        "--calibration-data: what {layer:?} reads in these rows is zero, or too large or too small for a scale; give other \
         rows"
    );
    CliError::Data { path: args.calibration_data[0].clone(), line: None, column: None, reason }
}

/// The measurement as a job.
struct Measure<'a> {
    stored: &'a StoredModel,
    files: &'a [PathBuf],
    /// Most sequences to read.
    rows: usize,
}

/// Rows after which freed buffers are given back to the device: each length leaves some of its own.
const ROWS_BETWEEN_CLEANUPS: usize = 16;

impl Job for Measure<'_> {
    type Output = Calibration;

    fn remedy(&self) -> &'static str {
        "use --device cpu, or end other programs"
    }

    fn run<B: Nvfp4Kernels + DeviceServices>(
        self,
        device: B::Device,
        precision: Precision,
    ) -> Result<Calibration, CliError> {
        let Self { stored, files, rows } = self;
        let options = DataOptions {
            format: None,
            loss_on: LossOn::default(),
            max_seq_length: plan::max_seq_length(None, stored.config.max_position_embeddings),
            overlong: Overlong::Split,
            rows: RowOptions::default(),
        };
        let (mut samples, _) = read::first(files, &stored.text, &options, rows)?;
        samples.truncate(rows);
        let model = stored.load::<B>(Recipe::W4, precision, &device)?;
        let inputs = Arc::new(InputMaxima::<B>::default());
        let line = Line::steps(0, samples.len());
        for (i, sample) in samples.iter().enumerate() {
            // A row by itself has no padding, which would be measured too.
            let ids = ids_tensor(std::slice::from_ref(&sample.ids), &stored.config, &device)?;
            let hidden = model.calibrate(ids, inputs.clone());
            // A device may leave NaN out of a maximum.
            if to_host(hidden)?.iter().any(|value| !value.is_finite()) {
                let reason = "the model computes numbers that are not finite from a row of --calibration-data: its weights are \
                              broken, or the number format overflows; try --device cpu, which computes in f32";
                return Err(CliError::corrupt(stored.weights.path(), reason));
            }
            if (i + 1).is_multiple_of(ROWS_BETWEEN_CLEANUPS) {
                B::memory_cleanup(&device);
            }
            line.set(i + 1);
        }
        let tokens = samples.iter().map(|sample| sample.ids.len()).sum();
        let amax = inputs.by_weight()?;
        // The model that the check of the export loads needs this memory.
        drop((model, inputs));
        B::memory_cleanup(&device);
        Ok(Calibration { amax, sequences: samples.len(), tokens })
    }
}
