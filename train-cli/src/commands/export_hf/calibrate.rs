//! The scales of activations that `export-hf` writes: those that the model's files give, or those of a calibration, for which the
//! model reads rows of files, and what its linear layers read is measured.
//!
//! Rows become sequences as in `eval loss`. The weights are those with which `generate` runs the model, and activations are not
//! quantized.

use super::origin::ExportOrigin;
use crate::{
    CliError,
    args::{ActivationsArg, ExportHfArgs, HfFormat, converting::CALIBRATION_ROWS},
    data::{
        format::RowOptions,
        read::{self, DataOptions},
    },
    data_files,
    device::{self, Job},
    memory::surplus::Surplus,
    plan,
    progress::Line,
    report,
    run::stored_model::StoredModel,
    settings::{Auto, Format, LossOn, Overlong},
};
use backend_nvfp4::{DeviceServices, Nvfp4Kernels, Precision, Recipe};
use model_qwen3::{
    calibration::InputMaxima, container::Container, model::ids_tensor, tensors::Tensors, weights::to_host,
};
use std::{collections::BTreeMap, path::PathBuf, sync::Arc};

/// The scales of activations that an export writes.
pub(super) enum InputScales {
    /// None, because activations are not quantized.
    None,
    /// Those that the model's files give.
    Given,
    /// Those of what was measured.
    Measured(Calibration),
}

/// What was measured.
pub(super) struct Calibration {
    /// The first file that was read.
    file: PathBuf,
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
        (Some(ActivationsArg::Nvfp4), HfFormat::Bf16) => refuse(
            "--activations nvfp4: --format bf16 describes no 4-bit activations; give --format compressed-tensors or \
             --format modelopt",
        ),
        (Some(ActivationsArg::Nvfp4), _) => Ok(()),
        _ if named => refuse(
            "--calibration-data: activations are measured only if --activations nvfp4 is given; give both flags or neither",
        ),
        _ if args.calibration_rows.is_some() => refuse(
            "--calibration-rows: activations are measured only if --activations nvfp4 is given; give it too, or leave the flag out",
        ),
        _ => Ok(()),
    }
}

/// The scales of the model's activations: measured on files that are named; else those that its files give, if the format has a
/// place for them; else, if `--activations nvfp4` asks for some, measured on the rows of its training run.
pub(super) fn of_model(
    args: &ExportHfArgs,
    source: &Container,
    origin: &ExportOrigin,
) -> Result<InputScales, CliError> {
    let measures = !args.calibration_data.is_empty() || args.calibration_rows.is_some();
    let given = source.has_input_scales() && args.format != HfFormat::Bf16 && !measures;
    match args.activations {
        Some(ActivationsArg::Bf16) => Ok(InputScales::None),
        _ if given => {
            report::label("inputs", "activations have the scales that the model's files give");
            Ok(InputScales::Given)
        }
        None => Ok(InputScales::None),
        Some(ActivationsArg::Nvfp4) => measured(args, &CalibrationRows::of(args, origin)?).map(InputScales::Measured),
    }
}

/// The rows that a calibration reads.
struct CalibrationRows {
    files: Vec<PathBuf>,
    format: Auto<Format>,
    options: RowOptions,
    /// Most sequences to read.
    most: usize,
    /// Whether they are those of the model's training.
    of_run: bool,
}

impl CalibrationRows {
    /// Those that are named, or those of the model's training.
    fn of(args: &ExportHfArgs, origin: &ExportOrigin) -> Result<Self, CliError> {
        let most = args.calibration_rows.map_or(CALIBRATION_ROWS, usize::from);
        if !args.calibration_data.is_empty() {
            let files = data_files::all_named_by("--calibration-data", &args.calibration_data)?;
            return Ok(Self { files, format: None, options: RowOptions::default(), most, of_run: false });
        }
        let none = |why: &str| {
            CliError::Usage(format!(
                "--activations nvfp4: the scales of activations must be measured{why}; name files like the training files with \
                 --calibration-data"
            ))
        };
        let data = origin.settings.as_ref().map(|settings| &settings.data).filter(|data| !data.data.is_empty());
        let data = data.ok_or_else(|| none(""))?;
        let gone =
            |error: CliError| none(&format!(", and the training files of the model's run cannot be read ({error})"));
        let files = data_files::all_named_by("--data", &data.data).map_err(gone)?;
        let options = RowOptions { separator: data.document_separator.clone(), weight: None };
        Ok(Self { files, format: data.format, options, most, of_run: true })
    }

    /// Their names, if they were not given.
    fn named(&self) -> String {
        if !self.of_run {
            return String::new();
        }
        let names: Vec<String> = self.files.iter().take(3).map(|file| file.display().to_string()).collect();
        let more = if self.files.len() > names.len() { " and more" } else { "" };
        format!(" of the training rows, {}{more}", names.join(", "))
    }
}

/// Measures the activations of the model on rows.
fn measured(args: &ExportHfArgs, rows: &CalibrationRows) -> Result<Calibration, CliError> {
    let stored = StoredModel::open("--model", &args.model, args.tokenizer.as_deref())?;
    let found = device::run(args.device, None, Measure { stored: &stored, rows })?;
    let largest = found.amax.iter().max_by(|a, b| a.1.total_cmp(b.1));
    report::label(
        "inputs",
        format!(
            "measured on {}, {}{}{}",
            report::count(found.sequences, "sequence"),
            report::count(found.tokens, "token"),
            rows.named(),
            largest.map_or(String::new(), |(name, amax)| format!(" · the largest is {amax:.1}, read by {name}"))
        ),
    );
    Ok(found)
}

/// The error of a layer whose activations have no scale.
pub(super) fn no_scale(found: &Calibration, layer: &str) -> CliError {
    let reason = format!(
        "what {layer:?} reads in these rows is zero, or too large or too small for a scale; give other rows with \
         --calibration-data"
    );
    CliError::data(&found.file, None, reason)
}

/// The measurement as a job.
struct Measure<'a> {
    stored: &'a StoredModel,
    rows: &'a CalibrationRows,
}

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
        let Self { stored, rows } = self;
        let options = DataOptions {
            format: rows.format,
            loss_on: LossOn::default(),
            max_seq_length: plan::max_seq_length(None, stored.config.max_position_embeddings)?,
            overlong: Overlong::Split,
            rows: rows.options.clone(),
        };
        let (mut samples, _) = read::first(&rows.files, &stored.text, &options, rows.most)?;
        samples.truncate(rows.most);
        let model = stored.load::<B>(Recipe::W4, precision, &device)?;
        let inputs = Arc::new(InputMaxima::<B>::default());
        let (line, mut surplus) = (Line::steps(0, samples.len()), Surplus::default());
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
            surplus.after_step::<B>(&device, true);
            line.set(i + 1);
        }
        let tokens = samples.iter().map(|sample| sample.ids.len()).sum();
        let amax = inputs.by_weight()?;
        // The model that the check of the export loads needs this memory.
        drop((model, inputs));
        B::memory_cleanup(&device);
        let file = rows.files.first().cloned().unwrap_or_default();
        Ok(Calibration { file, amax, sequences: samples.len(), tokens })
    }
}
