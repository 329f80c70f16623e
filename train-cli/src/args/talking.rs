//! Flags of the commands that answer: `generate`, `chat` and `serve`.

use crate::settings::{AUTO, Auto, CacheDtype, DeviceChoice, TOKENIZER, parser};
use backend_nvfp4::Precision;
use clap::Args;
use model_qwen3::sampling::Sampling;
use std::{net::IpAddr, path::PathBuf};

/// The heading of the flags that say what is printed.
const OUTPUT: &str = "Output";

/// Flags of `generate`.
#[derive(Debug, Args)]
pub struct GenerateArgs {
    /// Which model answers.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Prompt to answer; `-` reads it from standard input
    #[arg(short, long, allow_hyphen_values = true, required_unless_present = "prompts", conflicts_with = "prompts")]
    pub prompt: Option<String>,
    /// Answer every prompt of a file: of a .jsonl file with a `prompt` or `messages` in each row, or of a text file with a
    /// prompt in each line. Answers are printed in the file's order, each as one JSON object
    #[arg(long, value_name = "FILE")]
    pub prompts: Option<PathBuf>,
    /// With --prompts or --answers: number of answers that are generated at the same time
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub batch_size: usize,
    /// System message
    #[arg(long, alias = "system", allow_hyphen_values = true)]
    pub system_prompt: Option<String>,
    /// Use the prompt unchanged, without the chat template
    #[arg(long, conflicts_with_all = ["system_prompt", "thinking"])]
    pub raw: bool,
    /// Turn thinking before the answer on or off, for models that can think [default: as in training, if a record says
    /// how it was trained; otherwise the chat template decides]
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub thinking: Option<bool>,
    /// Number format of the KV cache.
    #[command(flatten)]
    pub cache: CacheArgs,
    /// How tokens are chosen.
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Number of answers to each prompt. The first answer uses the random seed --seed, the second uses --seed plus 1, and so on
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = OUTPUT)]
    pub answers: usize,
    /// Print an answer when it is complete, instead of piece by piece
    #[arg(long, help_heading = OUTPUT)]
    pub no_stream: bool,
    /// Print one JSON object for each answer instead of its text
    #[arg(long, help_heading = OUTPUT)]
    pub json: bool,
    /// With --json or --prompts: also print, for each token of the answer, its log probability and the log probabilities of
    /// the N tokens that were most likely at that position
    #[arg(long, value_name = "N", help_heading = OUTPUT)]
    pub logprobs: Option<usize>,
}

/// Tokens of a conversation, if nobody says how many.
pub(crate) const CONTEXT: usize = 8192;

/// The help of `--context`, the maximum length of `what`. `more` is what else there is to say.
fn context_help(what: &str, more: &str) -> String {
    format!("Maximum length of {what}, in tokens{more} [default: {CONTEXT}, or the model's limit if that is lower]")
}

/// Flags of `chat`.
#[derive(Debug, Args)]
pub struct ChatArgs {
    /// Which model answers.
    #[command(flatten)]
    pub model: ModelArgs,
    /// System message
    #[arg(long, alias = "system", allow_hyphen_values = true)]
    pub system_prompt: Option<String>,
    /// Turn thinking before the answer on or off, for models that can think [default: as in training, if a record says
    /// how it was trained; otherwise the chat template decides]
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub thinking: Option<bool>,
    /// Number format of the KV cache.
    #[command(flatten)]
    pub cache: CacheArgs,
    /// Maximum length of the conversation, in tokens.
    #[arg(long, value_name = "N", help = context_help("the conversation", "; the memory for it is allocated at the start"))]
    pub context: Option<std::num::NonZeroUsize>,
    /// Read messages, and commands such as /reset, from this file instead of the terminal. The file can also be a conversation
    /// that /save wrote: then its system message and its user messages are sent again, and the model answers them anew
    #[arg(long, value_name = "FILE")]
    pub script: Option<PathBuf>,
    /// How tokens are chosen.
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Print one JSON object for each turn instead of streaming the text
    #[arg(long, help_heading = OUTPUT)]
    pub json: bool,
}

/// Which model answers, and where.
#[derive(Debug, Args)]
pub struct ModelArgs {
    /// Model to run: a model folder, a run folder, a checkpoint, a .dat file or a .safetensors file
    #[arg(short, long, value_name = "PATH", aliases = ["weight", "model-dir"])]
    pub model: PathBuf,
    /// Folder that holds tokenizer and chat template.
    #[arg(long, value_name = "DIR", help = TOKENIZER)]
    pub tokenizer: Option<PathBuf>,
    /// Quantize activations to NVFP4 too, as 4-bit inference (W4A4) does [default: true if the weights are
    /// NVFP4, and the model's files give scales for activations or its training rounded activations; otherwise false]
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub w4a4: Option<bool>,
    /// Device to run on: auto, cpu, cuda, cuda:N or vulkan
    #[arg(long, default_value_t)]
    pub device: DeviceChoice,
    /// Number format in which the model computes
    #[arg(long, alias = "dtype", default_value = AUTO, value_parser = parser::<Auto<Precision>>())]
    pub compute_dtype: Auto<Precision>,
}

/// How keys and values of past tokens are kept.
#[derive(Debug, Clone, Copy, Args)]
pub struct CacheArgs {
    /// Number format in which the keys and values of past tokens (KV cache) are kept
    #[arg(long, value_name = "FORMAT", default_value = AUTO, value_parser = parser::<CacheDtype>())]
    pub kv_cache_dtype: CacheDtype,
}

/// Flags of `serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Which model answers.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Address to listen on: 127.0.0.1 serves this machine only, 0.0.0.0 also other machines, and then --api-key-file is
    /// required
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub host: IpAddr,
    /// Port to listen on; 0 lets the system choose one
    #[arg(long, value_name = "N", default_value_t = 8080)]
    pub port: u16,
    /// File with a key that requests must send (Authorization: Bearer KEY). A file that other users can read is refused
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// The model's name in replies [default: the name of its file or folder]
    #[arg(long, value_name = "NAME")]
    pub model_name: Option<String>,
    /// Number format of the KV cache.
    #[command(flatten)]
    pub cache: CacheArgs,
    /// Maximum length of a prompt and its answer, in tokens.
    #[arg(long, value_name = "N", help = context_help("a prompt and its answer", ""))]
    pub context: Option<std::num::NonZeroUsize>,
    /// Number of answers that are made at once; others wait
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub parallel: usize,
    /// Number of tokens that the KV cache holds for all prompts and answers together, at least --context. Its memory is allocated
    /// at the start. If it is smaller than --parallel times --context, a request may have to wait until there is room. Earlier
    /// prompts stay in the cache while there is free room, so that a prompt which begins like one of them is read faster [default:
    /// --parallel times --context]
    #[arg(long, value_name = "N")]
    pub kv_cache_tokens: Option<usize>,
}

/// The help of a flag whose default the model card of Qwen3 gives where generation_config.json is missing.
fn of_card(what: &str, value: impl Fn(Sampling) -> f32) -> String {
    let (answers, thinks) = (value(Sampling::CARD), value(Sampling::CARD_THINKING));
    let or = if answers == thinks { String::new() } else { format!(", or {thinks} if the model thinks") };
    let lacking = value(Sampling::GREEDY);
    format!(
        "{what} [default: if there is a generation_config.json, its value, or {lacking} if it gives none; if there is no such file, \
         {answers}{or}]"
    )
}

/// The help of a flag that changes nothing unless generation_config.json says so.
fn or_neutral(what: &str, value: impl Fn(Sampling) -> f32) -> String {
    format!("{what} [default: the value of generation_config.json; if there is none, {}]", value(Sampling::GREEDY))
}

/// How tokens are chosen.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// Maximum number of tokens in an answer
    #[arg(
        short = 'n',
        long,
        value_name = "N",
        alias = "max-new-tokens",
        allow_negative_numbers = true,
        default_value_t = 256
    )]
    pub max_tokens: usize,
    /// Divides the logits.
    #[arg(long, alias = "temp", allow_negative_numbers = true, help = of_card(
        "Sampling temperature; 0 always takes the most likely token. In generation_config.json, `do_sample: false` means 0, and \
         `do_sample: true` without a temperature means 1",
        |s| s.temperature,
    ))]
    pub temperature: Option<f32>,
    /// The probability of the tokens that are kept.
    #[arg(long, value_name = "P", alias = "topp", allow_negative_numbers = true, help = of_card(
        "Sample only from the most likely tokens: as many as are needed for their probabilities to add up to this value (nucleus sampling)",
        |s| s.top_p,
    ))]
    pub top_p: Option<f32>,
    /// The number of the tokens that are kept.
    #[arg(long, value_name = "N", allow_negative_numbers = true, help = of_card("Number of most likely tokens to sample from; 0 takes all", |s| s.top_k as f32))]
    pub top_k: Option<usize>,
    /// The least probability of the tokens that are kept.
    #[arg(long, value_name = "P", allow_negative_numbers = true, help = or_neutral("Minimum probability, relative to the most likely token (min-p)", |s| s.min_p))]
    pub min_p: Option<f32>,
    /// The penalty on tokens that already occurred.
    #[arg(long, value_name = "FACTOR", allow_negative_numbers = true, help = or_neutral(
        "Penalty on tokens that already occurred; 1 turns it off",
        |s| s.repetition_penalty,
    ))]
    pub repetition_penalty: Option<f32>,
    /// End the answer before this text; may be given several times
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub stop: Vec<String>,
    /// Random seed for sampling
    #[arg(long, value_name = "N", allow_negative_numbers = true, default_value_t = 42)]
    pub seed: u64,
}
