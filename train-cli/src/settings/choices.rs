//! The values of flags that choose one of several things, with the names and help that a person sees.
//!
//! Enums of this crate derive their names. Types of the backend get theirs through [`Choice`], so that no
//! enum is written twice: [`parser`] reads them from the command line, [`by_name`] from a file.

use crate::{CliError, settings::defaults};
use backend_nvfp4::{
    CacheFormat, MasterKind, Nvfp4Parts, PACKED_BYTES, Precision, Recipe, STATE_BLOCK, Scaling, StateKind,
};
use clap::{
    ValueEnum,
    builder::{PossibleValue, PossibleValuesParser, StyledStr, TypedValueParser},
};
use serde::{Deserialize, Serialize};
use std::{convert::Infallible, path::PathBuf, str::FromStr};

/// A choice that `auto` leaves to the program: `None`.
pub type Auto<T> = Option<T>;

/// A type whose values have names on the command line and in files.
pub trait Choice: Copy + PartialEq + Send + Sync + 'static {
    /// What `auto` chooses, for the help text of [`Auto`].
    const AUTO: &'static str = "";

    /// Every value with its name, other accepted names, and help.
    fn all() -> Vec<(Self, PossibleValue)>;
}

/// The name of the choice that the program makes.
pub const AUTO: &str = "auto";

impl<T: Choice> Choice for Auto<T> {
    fn all() -> Vec<(Self, PossibleValue)> {
        let auto = (None, PossibleValue::new(AUTO).help(T::AUTO));
        std::iter::once(auto).chain(T::all().into_iter().map(|(value, name)| (Some(value), name))).collect()
    }
}

/// Reads a [`Choice`] from the command line.
pub fn parser<T: Choice>() -> impl TypedValueParser<Value = T> {
    let names = T::all().into_iter().map(|(_, name)| name);
    PossibleValuesParser::new(names).map(|text| find(&text).expect("clap accepts only the names given to it"))
}

/// The name of a value on the command line and in files.
pub(crate) fn name_of<T: Choice>(value: T) -> String {
    let (_, name) = T::all().into_iter().find(|(v, _)| *v == value).expect("every value is in the list");
    name.get_name().to_owned()
}

fn find<T: Choice>(text: &str) -> Option<T> {
    T::all().into_iter().find(|(_, name)| name.matches(text, false)).map(|(value, _)| value)
}

/// Writes and reads a [`Choice`] by its name, for `#[serde(with = "by_name")]`.
pub(crate) mod by_name {
    use super::{Choice, find, name_of};
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(crate) fn serialize<T: Choice, Out: Serializer>(value: &T, s: Out) -> Result<Out::Ok, Out::Error> {
        s.serialize_str(&name_of(*value))
    }

    pub(crate) fn deserialize<'de, T: Choice, Source: Deserializer<'de>>(d: Source) -> Result<T, Source::Error> {
        let text = String::deserialize(d)?;
        find(&text).ok_or_else(|| {
            let names: Vec<String> = T::all().iter().map(|(_, name)| name.get_name().to_owned()).collect();
            Source::Error::custom(format!("unknown value {text:?}; expected one of: {}", names.join(", ")))
        })
    }
}

/// A [`Choice`] value with its name and help.
fn named<T>(value: T, name: &'static str, help: impl Into<StyledStr>) -> (T, PossibleValue) {
    (value, PossibleValue::new(name).help(help))
}

/// Bytes per parameter for people: two digits behind the point, or none where these are zeros.
fn per_parameter(bytes: f64) -> String {
    let figure = format!("{bytes:.2}");
    format!("{} bytes per parameter", figure.trim_end_matches('0').trim_end_matches('.'))
}

/// Where `--resume-from-checkpoint` finds the run or the checkpoint to resume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ResumeFrom {
    /// Nothing is resumed.
    Nothing,
    /// The newest checkpoint of the run in `--output-dir`.
    Latest,
    /// A run folder, or one of its checkpoints.
    Path(PathBuf),
}

impl FromStr for ResumeFrom {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        // Some programs write True and False. A folder of such a name can be given as ./True.
        Ok(match text.to_ascii_lowercase().as_str() {
            "false" => Self::Nothing,
            "latest" | "true" => Self::Latest,
            _ => Self::Path(text.into()),
        })
    }
}

impl Choice for Recipe {
    fn all() -> Vec<(Self, PossibleValue)> {
        vec![
            named(Self::Bf16, Self::Bf16.name(), "Nothing is quantized"),
            named(
                Self::W4,
                Self::W4.name(),
                "Each time a linear layer computes, forward or backward, it uses weights rounded to NVFP4. The rounded \
                 weights are temporary: the gradient updates the stored weights (master weights)",
            ),
            named(Self::W4a4, Self::W4a4.name(), "Weights and activations are rounded"),
            named(
                Self::Nvfp4(Nvfp4Parts::ALL),
                Self::Nvfp4(Nvfp4Parts::ALL).name(),
                "Weights, activations and gradients are rounded: all three products (one forward, two backward) multiply NVFP4 \
                 values only",
            ),
        ]
    }
}

impl Choice for Scaling {
    const AUTO: &'static str = defaults::SCALES;

    fn all() -> Vec<(Self, PossibleValue)> {
        vec![
            named(Self::Single, "single", "One 8-bit scale (E4M3) for each group of 16 values"),
            named(Self::Two, "two", "The same, and one matrix scale: an f32 number for the whole matrix"),
        ]
    }
}

impl Choice for Precision {
    const AUTO: &'static str = defaults::COMPUTE_DTYPE;

    fn all() -> Vec<(Self, PossibleValue)> {
        let also = |(value, name): (Self, PossibleValue), aliases: [&'static str; 2]| (value, name.aliases(aliases));
        vec![
            also(named(Self::F32, Self::F32.name(), "f32 without tensor cores"), ["float32", "Float32"]),
            named(
                Self::Tf32,
                Self::Tf32.name(),
                "as f32, but products of two unquantized matrices use TF32 tensor cores, which are faster and less exact; \
                 CUDA only. Products with a quantized matrix are computed as in f32. So in a model with 4-bit weights, these \
                 products use TF32: those of attention, those of linear layers that are not quantized and, in training with w4, \
                 the product that gives the gradient of a weight",
            ),
            also(named(Self::F16, Self::F16.name(), "f16; not for training"), ["float16", "Float16"]),
            also(named(Self::Bf16, Self::Bf16.name(), "bf16; CUDA only"), ["bfloat16", "BFloat16"]),
        ]
    }
}

/// The value of `--kv-cache-dtype`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CacheDtype {
    /// The number format in which the model computes.
    Auto,
    /// bf16, for a model that computes in bf16.
    Bf16,
    /// E4M3 bytes.
    Fp8,
}

impl CacheDtype {
    /// The format of the cache of a model that computes in `precision`.
    ///
    /// # Errors
    /// If bf16 was asked for, and the model computes in another format.
    pub fn format(self, precision: Precision) -> Result<CacheFormat, CliError> {
        match self {
            Self::Bf16 if precision != Precision::Bf16 => Err(CliError::Usage(format!(
                "--kv-cache-dtype bf16: the model computes in {}, and its cache has that number format or is fp8; give \
                 --compute-dtype bf16, or leave out --kv-cache-dtype",
                precision.name()
            ))),
            Self::Auto | Self::Bf16 => Ok(CacheFormat::Native),
            Self::Fp8 => Ok(CacheFormat::E4m3),
        }
    }
}

impl Choice for CacheDtype {
    fn all() -> Vec<(Self, PossibleValue)> {
        let (fp8, name) = named(
            Self::Fp8,
            "fp8",
            "8-bit numbers (E4M3), which take half the memory of bf16; they have four significant bits (three stored, one implied), so \
             answers may differ from those with the default",
        );
        vec![
            named(
                Self::Auto,
                AUTO,
                "The number format in which the model computes; by default bf16 on CUDA and f32 elsewhere",
            ),
            named(Self::Bf16, "bf16", "bf16; refused unless the model computes in bf16"),
            (fp8, name.alias("fp8_e4m3")),
        ]
    }
}

impl Choice for MasterKind {
    const AUTO: &'static str = defaults::MASTER_WEIGHTS;

    fn all() -> Vec<(Self, PossibleValue)> {
        let also = |(value, name): (Self, PossibleValue), aliases: [&'static str; 3]| (value, name.aliases(aliases));
        vec![
            also(named(Self::F32, Self::F32.name(), "f32: 4 bytes per parameter"), ["float32", "Float32", "fp32"]),
            named(
                Self::BF16_RESIDUAL,
                Self::BF16_RESIDUAL.name(),
                "24 bits, or 3 bytes per parameter: the optimizer updates all 24, and the layers compute with the bf16 number that is \
                 nearest to the weight",
            ),
            also(
                named(
                    Self::BF16,
                    Self::BF16.name(),
                    "bf16, rounded up or down at random so that small updates count on average: 2 bytes per parameter",
                ),
                ["bfloat16", "BFloat16", "bf-16"],
            ),
            named(
                Self::BF16_NEAREST,
                Self::BF16_NEAREST.name(),
                "bf16 rounded to nearest, for comparison: small updates are lost",
            ),
            named(
                Self::Nvfp4,
                Self::Nvfp4.name(),
                format!(
                    "NVFP4, rounded up or down at random: {}; the embedding stays bf16",
                    per_parameter(PACKED_BYTES)
                ),
            ),
        ]
    }
}

impl Choice for StateKind {
    fn all() -> Vec<(Self, PossibleValue)> {
        let also = |(value, name): (Self, PossibleValue), aliases: [&'static str; 2]| (value, name.aliases(aliases));
        let kind = |kind: Self, help: String| named(kind, kind.name(), help);
        let bytes = |kind: Self| per_parameter(kind.bytes());
        let coded = |bits: usize, kind: Self| {
            format!("{bits}-bit codes, and a scale for each {STATE_BLOCK} values: {}", bytes(kind))
        };
        vec![
            kind(Self::F32, format!("f32: {}", bytes(Self::F32))),
            also(kind(Self::Int8, coded(8, Self::Int8)), ["8bit", "8-bit"]),
            kind(Self::Bf16, format!("bf16, rounded up or down at random: {}", bytes(Self::Bf16))),
            also(kind(Self::Int4, coded(4, Self::Int4)), ["4bit", "4-bit"]),
        ]
    }
}

/// A part of recipe nvfp4 that can be left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Nvfp4Part {
    /// Each square of 16x16 weights has one scale, so that a matrix and its transpose are rounded alike (the blocks of the name are
    /// these squares, not transformer layers). If you switch this off, each 16 weights of a row have one scale
    SquareBlocks,
    /// Before the product that gives the weight gradient, both matrices are multiplied by a random Hadamard matrix in groups of
    /// 16 values. It spreads a very large value over its group. Otherwise such a value would make the scale of the group too
    /// coarse for the other 15
    Hadamard,
    /// Gradients are rounded up or down at random, so that the errors cancel on average. If you switch this off, they are
    /// rounded to the nearest value
    Stochastic,
}

/// How a data file is read. The rows of a JSON format are objects, one in each line or all in one array, or the rows of a
/// Parquet table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// JSON rows {"messages": [{"role": ..., "content": ...}, ...]}, as in OpenAI's interface
    Messages,
    /// JSON rows {"conversations": [{"from": "human", "value": ...}, ...]}
    Sharegpt,
    /// JSON rows {"instruction": ..., "input": ..., "output": ...}
    Alpaca,
    /// JSON rows {"prompt": ..., "completion": ...}
    #[value(alias = "prompt-completion")]
    Completion,
    /// JSON rows {"text": ...}, each a document; the loss counts every token
    Documents,
    /// Each line is a prompt, a tab and the answer; lines that start with # are comments, and a first line with the names of
    /// the columns is left out
    Tsv,
    /// One document, or several if --document-separator is given, cut into sequences; the loss counts every token
    Text,
}

impl Format {
    /// The name on the command line and in files.
    pub fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

impl Choice for Format {
    const AUTO: &'static str = "by the file name; in JSON files also by the keys of the first row, and in Parquet and Arrow tables by the \
                                names of the columns";

    fn all() -> Vec<(Self, PossibleValue)> {
        Self::value_variants().iter().filter_map(|format| Some((*format, format.to_possible_value()?))).collect()
    }
}

/// Which tokens are supervised.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum LossOn {
    /// Every assistant turn with its end token, except messages that have "weight": 0
    #[default]
    #[value(alias = "completion")]
    Assistant,
    /// Every token
    All,
}

/// What happens to a row that is longer than the limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Overlong {
    /// Refuse to start the run
    Error,
    /// Leave such rows out, and report how many
    Drop,
    /// Cut off the end of such rows, and report how many were cut
    Truncate,
    /// Cut such rows into several sequences that do not attend to each other
    Split,
}

/// The loss function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
pub enum LossKind {
    /// Cross-entropy over the tokens that --loss-on chooses
    #[value(name = "ce", alias = "cross-entropy", alias = "token-ce")]
    #[serde(rename = "ce")]
    CrossEntropy,
    /// L1 distance between hidden states and the embeddings of the next tokens, for debugging
    #[value(name = "scalar", alias = "l1", alias = "scalar-l1")]
    #[serde(rename = "scalar")]
    HiddenL1,
}

/// The learning rate after warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Decay {
    /// Half a cosine, down to zero
    Cosine,
    /// A straight line, down to zero
    Linear,
    /// No decay
    Constant,
}

/// Which blocks are run a second time in the backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Recompute {
    /// As few blocks as possible: the run keeps the activations of as many blocks as there is room for, and runs the others twice.
    /// There is room if 1.1 times the predicted memory of the run, which includes the kept activations, fits into --memory-limit
    /// (if it is given) and into the free memory. If the device uses the memory of the host (as the CPU does), or does not
    /// say whether it does, only half of the free memory counts
    Auto,
    /// Every block: this needs the least memory
    Always,
    /// No block: all activations are kept
    Never,
}

/// Which gradient norm clipping uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Clip {
    /// The norm of this step.
    Exact,
    /// The norm of the previous step.
    Previous,
}

impl Clip {
    /// Whether a step must know its own norm before it updates anything. A largest norm of 0 turns clipping off.
    pub fn needs_the_norm_first(self, max_norm: f64) -> bool {
        self == Self::Exact && max_norm > 0.0
    }
}

impl Choice for Clip {
    const AUTO: &'static str = defaults::CLIP;

    fn all() -> Vec<(Self, PossibleValue)> {
        vec![
            named(
                Self::Exact,
                "exact",
                "The norm of this step. Without gradient accumulation, the gradients of the whole model are held until the norm is \
                 known; where they do not fit, a first backward pass computes the norm, and a second one updates the weights",
            ),
            named(Self::Previous, "previous", "The norm of the step before; the first step is not clipped"),
        ]
    }
}

/// How an export with NVFP4 weights stores the output head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum HeadFormat {
    /// In NVFP4. If the head is tied (the embedding is the head), the file has the embedding in f16 and an NVFP4 copy of it as
    /// head, which makes answers faster
    Nvfp4,
    /// In bf16, if the source has a head of its own (a separate head, or an NVFP4 copy of the embedding). Otherwise the embedding is
    /// the head, too: no head is stored, and the embedding is in f16. (The source is the file with which training began, for fit and
    /// for a checkpoint given to export-dat; otherwise it is the model given to export-dat, or the input of convert)
    Bf16,
}

impl HeadFormat {
    /// Its name in flags and on the screen.
    pub fn name(self) -> &'static str {
        match self {
            Self::Nvfp4 => "nvfp4",
            Self::Bf16 => "bf16",
        }
    }
}

/// Whether a run saves anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum SaveStrategy {
    /// Save checkpoints and export the trained model
    Steps,
    /// Save no checkpoint and no export, for measurements
    No,
}

/// Where the figures of a run go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum ReportTo {
    /// Only to the file metrics.jsonl, which every run needs and writes. `none` means the same
    #[value(alias = "none")]
    #[serde(alias = "none")]
    Jsonl,
    /// Also to a file of events for TensorBoard, in the run folder
    Tensorboard,
}

/// A device as the user names it: `auto`, `cpu`, `cuda`, `cuda:1`, `vulkan`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum DeviceChoice {
    /// The first CUDA device if there is one, else the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// A CUDA device by index.
    Cuda(usize),
    /// The default Vulkan adapter.
    Vulkan,
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.to_ascii_lowercase();
        let index = || text.strip_prefix("cuda:").and_then(|index| index.parse().ok());
        match text.as_str() {
            AUTO => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(0)),
            "vulkan" => Ok(Self::Vulkan),
            _ => index().map(Self::Cuda).ok_or_else(|| "expected auto, cpu, cuda, cuda:N or vulkan".to_owned()),
        }
    }
}

impl TryFrom<String> for DeviceChoice {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<DeviceChoice> for String {
    fn from(device: DeviceChoice) -> Self {
        device.to_string()
    }
}

impl std::fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Auto => f.write_str(AUTO),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(index) => write!(f, "cuda:{index}"),
            Self::Vulkan => f.write_str("vulkan"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_is_found_by_its_name_and_its_aliases() {
        assert_eq!(find::<StateKind>("8bit"), Some(StateKind::Int8));
        assert_eq!(find::<Auto<Precision>>("auto"), Some(None));
        assert_eq!(find::<Auto<Precision>>("bfloat16"), Some(Some(Precision::Bf16)));
        assert_eq!(find::<StateKind>("nvfp4"), None);
        assert_eq!(find::<Scaling>(defaults::SCALING_NAME), Some(defaults::SCALING));
    }

    #[test]
    fn a_cache_in_bf16_belongs_to_a_model_in_bf16() {
        let bf16 = |precision| CacheDtype::Bf16.format(precision).ok();
        assert_eq!(bf16(Precision::Bf16), Some(CacheFormat::Native));
        assert!([Precision::F32, Precision::Tf32, Precision::F16].map(bf16).iter().all(Option::is_none));
        assert_eq!(CacheDtype::Auto.format(Precision::F32).ok(), Some(CacheFormat::Native));
        assert_eq!(CacheDtype::Fp8.format(Precision::F32).ok(), Some(CacheFormat::E4m3));
    }

    #[test]
    fn a_device_is_read_as_it_is_written() {
        for text in ["auto", "cpu", "cuda:0", "cuda:7", "vulkan"] {
            assert_eq!(text.parse::<DeviceChoice>().unwrap().to_string(), text);
        }
        assert!("gpu".parse::<DeviceChoice>().is_err() && "cuda:x".parse::<DeviceChoice>().is_err());
        // As older scripts write them.
        assert_eq!("CUDA".parse::<DeviceChoice>(), Ok(DeviceChoice::Cuda(0)));
        let from = |text: &str| text.parse::<ResumeFrom>().unwrap();
        assert_eq!([from("True"), from("False")], [ResumeFrom::Latest, ResumeFrom::Nothing]);
        assert_eq!(from("./True"), ResumeFrom::Path("./True".into()));
    }
}
