//! Flags of the commands that write a model in another form, and of `inspect`, which lists what a file holds.

use crate::settings::{
    DeviceChoice, HeadFormat, TOKENIZER,
    defaults::{MAX_SEQ_LENGTH, SCALING_NAME},
    parser,
};
use backend_nvfp4::Scaling;
use clap::{Args, ValueEnum};
use std::path::PathBuf;

/// Flags of `export-dat`.
#[derive(Debug, Args)]
pub struct ExportArgs {
    /// Model to export: a checkpoint, a run folder, a model folder, a .dat file or a .safetensors file
    #[arg(short, long, alias = "checkpoint", value_name = "PATH")]
    pub model: PathBuf,
    /// Folder that holds tokenizer and chat template.
    #[arg(long, value_name = "DIR", help = TOKENIZER)]
    pub tokenizer: Option<PathBuf>,
    /// .dat file to write
    #[arg(long, value_name = "FILE")]
    pub output_dat: PathBuf,
    /// Write the file in the form of this .dat file: with the same names, order and number formats of tensors, and with matrix
    /// scales only if its NVFP4 weights have them. Cannot be combined with --scales, nor with --head
    #[arg(long, value_name = "FILE")]
    pub like: Option<PathBuf>,
    /// Which scales NVFP4 weights have.
    #[arg(long, conflicts_with = "like", value_parser = parser::<Scaling>(), help = format!(
        "Which scales NVFP4 weights have [default: those of the model, if its weights are NVFP4; otherwise those that are given in \
         the record of its training (trained.json, or trainer_state.json in a checkpoint); `{SCALING_NAME}` if there is no record]"
    ))]
    pub scales: Option<Scaling>,
    /// How the output head is stored [default: for a checkpoint whose run was given --head, that value. Otherwise it depends on the
    /// source: the file with which training began (for a checkpoint), or the model itself (for any other model). If the source has
    /// an NVFP4 head, the head is stored in NVFP4. If it has a separate head in any other format, the head is stored in f16. If its
    /// head is the embedding, no head is stored]
    #[arg(long, conflicts_with = "like")]
    pub head: Option<HeadFormat>,
    /// Replace an older file
    #[arg(long)]
    pub overwrite: bool,
    /// Device that checks the written file: auto, cpu, cuda, cuda:N or vulkan
    #[arg(long, default_value_t)]
    pub device: DeviceChoice,
}

/// The format that `export-hf` writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum HfFormat {
    /// Every weight in bf16
    Bf16,
    /// Linear layers in NVFP4, in the layout of compressed-tensors
    CompressedTensors,
    /// Linear layers in NVFP4, in the layout of nvidia-modelopt
    Modelopt,
}

/// How the folder of `export-hf` tells other programs to compute with activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ActivationsArg {
    /// Activations are not quantized
    Bf16,
    /// The activations that linear layers read are NVFP4. Their scales are those of the model's files, or they are measured on
    /// --calibration-data. Layers that read the same activations share one scale
    Nvfp4,
}

/// Sequences that a model reads to measure its activations, if nobody says how many.
pub(crate) const CALIBRATION_ROWS: usize = 64;

/// Flags of `export-hf`.
#[derive(Debug, Args)]
pub struct ExportHfArgs {
    /// Model to export: a run folder, a checkpoint, a model folder, or a .dat or .safetensors file
    #[arg(short, long, alias = "checkpoint", value_name = "PATH")]
    pub model: PathBuf,
    /// Folder that holds tokenizer and chat template.
    #[arg(long, value_name = "DIR", help = TOKENIZER)]
    pub tokenizer: Option<PathBuf>,
    /// Folder to write
    #[arg(short, long, value_name = "DIR")]
    pub output_dir: PathBuf,
    /// Format of the weights
    #[arg(long, default_value = "bf16")]
    pub format: HfFormat,
    /// Whether programs that load the folder quantize activations: nvfp4 (with an NVFP4 --format only) or bf16 [default: nvfp4 if
    /// the model's files give the scales of activations and --format is one with NVFP4; otherwise bf16]
    #[arg(long)]
    pub activations: Option<ActivationsArg>,
    /// With --activations nvfp4: files whose rows the model reads to measure its activations; folders of such files, or
    /// patterns such as 'rows/*.jsonl'. The formats are those of fit --data [default: the
    /// training files of the model's run. But if the model's files have activation scales and --calibration-rows is not given, no
    /// file is read, and the activation scales of the model's files are exported]
    #[arg(long, value_name = "PATH", num_args = 1..)]
    pub calibration_data: Vec<PathBuf>,
    /// Sequences that the model reads.
    #[arg(long, value_name = "N", help = format!(
        "Number of sequences of --calibration-data that the model reads, from the beginning of the files. A row of more than \
         {MAX_SEQ_LENGTH} tokens is several sequences [default: {CALIBRATION_ROWS}]"
    ))]
    pub calibration_rows: Option<std::num::NonZeroUsize>,
    /// Largest size of one file of weights
    #[arg(long, default_value = "5GB", alias = "shard", value_name = "SIZE")]
    pub max_shard_size: String,
    /// Replace an older export in the folder
    #[arg(long)]
    pub overwrite: bool,
    /// Device that measures activations and checks the written folder: auto, cpu, cuda, cuda:N or vulkan
    #[arg(long, default_value_t)]
    pub device: DeviceChoice,
}

/// The container that `convert` writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ContainerArg {
    /// The .dat container
    Dat,
    /// One safetensors file
    Safetensors,
    /// A GGUF file with config, tokenizer and chat template; tried with llama.cpp
    Gguf,
}

/// The number format that `convert` writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum WeightArg {
    /// NVFP4 for linear layers, and for the head if the model has a separate one and --head does not say otherwise; f16 for
    /// embedding and norms. (In a GGUF file the head is f16, and norms are f32)
    Nvfp4,
    /// 8-bit integers with a scale for each 32 weights; GGUF only
    #[value(alias = "q8_0")]
    Q8_0,
    /// f16
    #[value(alias = "float16")]
    F16,
    /// bf16
    #[value(alias = "bfloat16")]
    Bf16,
    /// f32
    F32,
}

/// Flags of `convert`.
#[derive(Debug, Args)]
pub struct ConvertArgs {
    /// Model to read: a model folder, a run folder, a checkpoint (not with --dtype nvfp4), or a .dat, .safetensors or .gguf file
    pub input: PathBuf,
    /// File to write. A GGUF file contains config and tokenizer. For a .dat or .safetensors file, convert puts config.json and the
    /// tokenizer's files into the same folder, unless they are there already
    pub output: PathBuf,
    /// For a GGUF output: folder that holds tokenizer and chat template, and config.json too if there is none beside the model
    /// [default: the model's folder]
    #[arg(long, value_name = "DIR")]
    pub tokenizer: Option<PathBuf>,
    /// Container to write [default: by the extension of the output]
    #[arg(long)]
    pub to: Option<ContainerArg>,
    /// Number format of the written weights [default: nvfp4 if the input has NVFP4 weights, otherwise bf16]
    #[arg(long)]
    pub dtype: Option<WeightArg>,
    /// Which scales NVFP4 weights have.
    #[arg(long, value_parser = parser::<Scaling>(), help = format!(
        "Which scales NVFP4 weights have [default: those of the input, if its weights are NVFP4; otherwise those that are given in \
         the record of its training (trained.json); `{SCALING_NAME}` if there is no record]"
    ))]
    pub scales: Option<Scaling>,
    /// With --dtype nvfp4, in .dat and .safetensors files: how the output head is stored [default: NVFP4 for a separate
    /// head; a tied head (one that is the embedding) is not stored a second time]
    #[arg(long)]
    pub head: Option<HeadFormat>,
    /// Replace an older file
    #[arg(long)]
    pub overwrite: bool,
}

/// Flags of `inspect`.
#[derive(Debug, Args)]
pub struct InspectArgs {
    /// Model to read: a .dat file, a .safetensors file, a model folder, a run folder or a checkpoint
    pub path: PathBuf,
    /// Print one JSON object per line
    #[arg(long)]
    pub json: bool,
    /// Read every byte: check that scales are valid, that values are finite, and that the files match the folder's
    /// manifest.json if it has one
    #[arg(long)]
    pub verify: bool,
}
