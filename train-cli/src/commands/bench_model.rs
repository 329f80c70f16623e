//! `bench decode` and `bench prefill`: tokens a second of a whole model with random weights, by the path that `generate`,
//! `chat` and `serve` take.

use crate::{
    CliError,
    args::{
        BenchArgs, BenchWhat,
        measuring::{BATCH_SIZES, DECODE_CONTEXT, HEAD, PREFILL_CONTEXT, W4A4},
    },
    device::{self, Job},
    memory::estimate::flops_of_prompt,
    peak, report,
    settings::HeadFormat,
};
use backend_nvfp4::{
    CacheFormat, DeviceMemory, DeviceServices, LinearSpec, MasterKind, Nvfp4Kernels, Nvfp4Linear, Nvfp4Tensor,
    PACKED_BYTES, PAGE, Precision, Recipe, Scaling, bench::Row,
};
use model_qwen3::{
    config::{LARGEST, Qwen3Config},
    file,
    model::Qwen3,
    sampling::Sampling,
    session::{Answering, GenerateOptions, Session, step},
    weights,
};
use serde_json::json;
use std::time::Instant;

/// Tokens of an answer that is measured.
const ANSWER: usize = 256;
/// Tokens of the answer to a prompt whose reading is measured.
const PREFILL_ANSWER: usize = 1;
/// Each row is the median of this many measurements. One more comes first, which compiles kernels.
const RUNS: usize = 5;

/// Runs the command.
///
/// # Errors
/// If config.json cannot be read, the model does not take the context, or the device is missing, is the CPU, or fails.
pub(super) fn run(args: BenchArgs) -> Result<(), CliError> {
    let config = match &args.config {
        Some(path) => file::read_text(path, LARGEST, "check the path")
            .and_then(|text| Qwen3Config::from_json(&text, path))
            .map_err(CliError::of_flag("--config"))?,
        None => qwen3_4b(),
    };
    let context = context(&args, config.max_position_embeddings)?;
    device::check_gpu(args.device)?;
    device::run(args.device, None, Measured { args, config, context })
}

/// Tokens of the context, for a model that takes at most `limit` with the answer.
fn context(args: &BenchArgs, limit: usize) -> Result<usize, CliError> {
    let (default, answer) =
        if args.what == BenchWhat::Prefill { (PREFILL_CONTEXT, PREFILL_ANSWER) } else { (DECODE_CONTEXT, ANSWER) };
    let context = args.context.unwrap_or(default) as usize;
    if context + answer <= limit {
        return Ok(context);
    }
    let remedy = match limit.saturating_sub(answer) {
        0 => "give a --config with a larger max_position_embeddings".to_owned(),
        most => format!("give --context {most} or less"),
    };
    Err(CliError::Usage(format!(
        "--context {context}: with an answer of {}, the model takes at most {limit}; {remedy}",
        report::count(answer, "token")
    )))
}

struct Measured {
    args: BenchArgs,
    config: Qwen3Config,
    /// Tokens of the context.
    context: usize,
}

impl Job for Measured {
    type Output = ();

    fn run<B: Nvfp4Kernels + DeviceServices>(self, device: B::Device, precision: Precision) -> Result<(), CliError> {
        let Self { args, config, context } = self;
        let recipe = if args.w4a4.unwrap_or(W4A4) { Recipe::W4a4 } else { Recipe::W4 };
        let head = args.head.unwrap_or(HEAD);
        let format = args.kv_cache_dtype.format(precision)?;
        let cache = if format == CacheFormat::E4m3 { " · the cache in 8 bits" } else { "" };
        report::label("recipe", format!("{} · the head in {}{cache}", recipe.name(), head.name()));
        let model = random_model::<B>(&config, recipe, head, precision, &device)?.with_cache_format(format);
        if args.what == BenchWhat::Prefill {
            return prefill(&model, &args, context);
        }
        let rate = copy_rate::<B>(&device);
        let batches = if args.batch_sizes.is_empty() { BATCH_SIZES.to_vec() } else { args.batch_sizes.clone() };
        for batch in batches.into_iter().map(usize::from) {
            for (name, sampling) in [("greedy", Sampling::GREEDY), ("sampled", Sampling { seed: 1, ..Sampling::CARD })]
            {
                decode(&model, &args, context, batch, name, sampling, rate)?;
            }
        }
        Ok(())
    }
}

/// Measures answers that are made together, each after a prompt of its own.
fn decode<B: Nvfp4Kernels + DeviceMemory>(
    model: &Qwen3<B>,
    args: &BenchArgs,
    context: usize,
    batch: usize,
    name: &str,
    sampling: Sampling,
    rate: Option<f64>,
) -> Result<(), CliError> {
    let prompts: Vec<Vec<u32>> = (0..batch).map(|n| ids(model, context, n)).collect();
    let options = GenerateOptions { max_tokens: ANSWER, sampling, stop_ids: vec![], logprobs: None };
    let capacity = context + ANSWER;
    let pool = model.pool(batch * capacity.next_multiple_of(PAGE))?;
    let session =
        |_: &Vec<u32>| Session::of_pool(model, &pool, &[], capacity).expect("the pool has room for all answers");
    let mut sessions: Vec<_> = prompts.iter().map(session).collect();
    let mut seconds = Vec::new();
    for _ in 0..=RUNS {
        let mut answers = sessions
            .iter_mut()
            .zip(&prompts)
            .map(|(session, prompt)| Answering::new(session, prompt, &options))
            .collect::<Result<Vec<_>, _>>()?;
        // Until every answer has its first token, the device also reads prompts.
        let (mut start, mut before) = (None, 0);
        while answers.iter().any(|answer| !answer.has_ended()) {
            let mut open: Vec<_> =
                sessions.iter_mut().zip(&mut answers).filter(|(_, answer)| !answer.has_ended()).collect();
            step(&mut open)?;
            if start.is_none() && answers.iter().all(|answer| !answer.generated().ids.is_empty()) {
                (start, before) = (Some(Instant::now()), made(&answers));
            }
        }
        let elapsed = start.map_or(f64::NAN, |start| start.elapsed().as_secs_f64());
        seconds.push(elapsed / (made(&answers) - before) as f64);
    }
    let token = median(&mut seconds);
    // Each step reads all weights once, and the keys and values of each answer up to its middle.
    let bytes = weight_bytes(model) / batch as f64 + cache_bytes(model, context + ANSWER / 2);
    let share = rate.map(|rate| bytes / token / rate);
    let of_rate = share.map_or(String::new(), |share| format!(" · {:.0} % of the memory's rate", share * 100.0));
    let memory = B::memory_in_use(&model.device()).map(|memory| memory.reserved >> 20);
    let reserved = memory.map_or(String::new(), |mib| format!(" · {mib} MiB reserved"));
    let on_the_card = device::in_use(args.device).map(|bytes| bytes >> 20);
    let used = on_the_card.map_or(String::new(), |mib| format!(", {mib} MiB in use on the card"));
    let per_second = 1.0 / token;
    show(
        args,
        format!(
            "decode · {batch} at a time · context {context} · {name} · {per_second:.0} tokens/s{of_rate}{reserved}{used}"
        ),
        json!({
            "what": "decode", "answers": batch, "context": context, "choice": name, "tokens_per_second": per_second,
            "share_of_memory_rate": share, "memory_mib": memory, "card_memory_mib": on_the_card,
        }),
    );
    Ok(())
}

/// Measures how fast a prompt is read, up to the first token of the answer.
fn prefill<B: Nvfp4Kernels>(model: &Qwen3<B>, args: &BenchArgs, context: usize) -> Result<(), CliError> {
    let options =
        GenerateOptions { max_tokens: PREFILL_ANSWER, sampling: Sampling::GREEDY, stop_ids: vec![], logprobs: None };
    let mut session = Session::new(model, context + PREFILL_ANSWER)?;
    let mut seconds = Vec::new();
    for run in 0..=RUNS {
        session.forget();
        let prompt = ids(model, context, run);
        let start = Instant::now();
        session.answer(&prompt, &options, |_| std::ops::ControlFlow::Continue(()))?;
        seconds.push(start.elapsed().as_secs_f64());
    }
    let seconds = median(&mut seconds);
    let rate = context as f64 / seconds;
    let flops = flops_of_prompt(model.config(), context as f64);
    let peak = peak::card(args.device).and_then(|card| peak::by_name(&card));
    let share = peak.map(|peak| flops / seconds / (peak * 1e12));
    let of_peak = share.map_or(String::new(), |share| format!(" · {:.0} % of the card's peak", share * 100.0));
    show(
        args,
        format!("prefill · context {context} · {rate:.0} tokens/s{of_peak}"),
        json!({ "what": "prefill", "context": context, "tokens_per_second": rate, "share_of_peak": share }),
    );
    Ok(())
}

/// Prints a row in the form that was asked for.
fn show(args: &BenchArgs, text: String, row: serde_json::Value) {
    report::result(if args.json { row.to_string() } else { text });
}

/// Number of tokens that were generated so far.
fn made<B: Nvfp4Kernels>(answers: &[Answering<B>]) -> usize {
    answers.iter().map(|answer| answer.generated().ids.len()).sum()
}

/// The median without the first measurement, which compiled kernels.
fn median(seconds: &mut [f64]) -> f64 {
    let measured = &mut seconds[1..];
    measured.sort_by(f64::total_cmp);
    measured[measured.len() / 2]
}

/// Tokens of a prompt.
fn ids<B: Nvfp4Kernels>(model: &Qwen3<B>, count: usize, number: usize) -> Vec<u32> {
    let vocabulary = model.config().vocab_size;
    (0..count).map(|i| ((i * 7919 + number * 104_729 + 11) % vocabulary) as u32).collect()
}

fn random_model<B: Nvfp4Kernels>(
    config: &Qwen3Config,
    recipe: Recipe,
    head: HeadFormat,
    precision: Precision,
    device: &B::Device,
) -> Result<Qwen3<B>, CliError> {
    let spec = LinearSpec::new(recipe, Scaling::Two, precision);
    let mut model = weights::random::<B>(config, spec, MasterKind::Nvfp4, 1, device)?;
    if head == HeadFormat::Nvfp4 {
        let values = model.embed_tokens.val().into_primitive().tensor();
        let codes = B::nvfp4_quantize(values, spec.weights());
        model.lm_head = Some(Nvfp4Linear::Packed(Nvfp4Tensor::from_primitive(codes).into()));
    }
    Ok(model)
}

/// Bytes of weights that a token reads: those of the blocks in NVFP4, and the head.
fn weight_bytes<B: Nvfp4Kernels>(model: &Qwen3<B>) -> f64 {
    let c = model.config();
    let (d, f) = (c.hidden_size, c.intermediate_size);
    let (queries, keys) = (c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim);
    let blocks = c.num_hidden_layers * d * (2 * queries + 2 * keys + 3 * f);
    let head = if matches!(model.lm_head, Some(Nvfp4Linear::Packed(_))) { PACKED_BYTES } else { 2.0 };
    blocks as f64 * PACKED_BYTES + (c.vocab_size * d) as f64 * head
}

/// Bytes of keys and values of `tokens` tokens.
fn cache_bytes<B: Nvfp4Kernels>(model: &Qwen3<B>, tokens: usize) -> f64 {
    let c = model.config();
    let size = if model.cache_format() == CacheFormat::E4m3 { 1 } else { model.spec().precision.dtype().size() };
    (2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * size * tokens) as f64
}

/// Bytes a second of a plain copy, where the backend measures it.
fn copy_rate<B: DeviceServices>(device: &B::Device) -> Option<f64> {
    let mut rate = None;
    let mut take = |row: Row| rate = rate.or(row.bytes.map(|bytes| bytes / row.seconds));
    // No kernel has this name: the copy alone is measured.
    let measured = B::bench_kernels(device, "the copy alone", &mut take);
    measured.ok().and(rate)
}

/// The sizes of Qwen3-4B.
fn qwen3_4b() -> Qwen3Config {
    Qwen3Config {
        vocab_size: 151_936,
        hidden_size: 2560,
        intermediate_size: 9728,
        num_hidden_layers: 36,
        num_attention_heads: 32,
        num_key_value_heads: 8,
        head_dim: 128,
        rms_norm_eps: 1e-6,
        rope_theta: 1_000_000.0,
        max_position_embeddings: 262_144,
        tie_word_embeddings: true,
        eos_token_ids: vec![],
        initializer_range: 0.02,
    }
}
