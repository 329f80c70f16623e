//! A prompt in one piece, in chunks of 5 and token by token gives the same logits: the mask of a chunk on a cache that
//! holds tokens is right. In every number format of the device, with dense and with NVFP4 weights, and
//! with quantized activations.

use crate::support::{Cpu, Cube, Feature, files::ok, golden, lacks, on_gpu, supports};
use backend_nvfp4::{
    CacheFormat, GivenScale, LinearSpec, MasterKind, Nvfp4Kernels, Nvfp4Linear, Nvfp4Tensor, PackedMaster,
    PackedWeight, Precision, Recipe, Scaling,
};
use burn::{
    module::Param,
    tensor::{DType, Tensor},
};
use burn_cubecl::CubeRuntime;
use kernels_cubecl::mma;
use model_qwen3::{
    config::Qwen3Config,
    container::Container,
    kv_cache::{KvCache, NewTokens},
    model::{Qwen3, ids_tensor},
    sampling::Sampling,
    session::{Answering, GenerateOptions, Session, generate, step},
    weights::{self, Purpose, Replace, to_host},
};
use std::{
    ops::ControlFlow,
    path::{Path, PathBuf},
};

#[test]
fn a_prompt_in_chunks_has_the_same_logits_on_the_cpu() {
    same_logits::<Cpu>(Default::default());
}

#[test]
fn a_prompt_in_chunks_has_the_same_logits_on_the_gpu() {
    on_gpu!(on_cube);
}

fn on_cube<R: CubeRuntime>() {
    same_logits::<Cube<R>>(R::Device::default());
}

/// Where the device has the kernel, a block of this model is one launch while tokens are decoded. Token by token it gives the
/// logits of a prompt in one piece, and sequences that are decoded together are those that are decoded alone, bit for bit.
#[test]
fn a_decoded_block_has_the_logits_of_a_prompt_in_one_piece_on_the_gpu() {
    on_gpu!(decoded_blocks);
}

/// A model whose blocks the kernel of a block takes.
fn config(intermediate_size: usize) -> Qwen3Config {
    Qwen3Config {
        vocab_size: 320,
        hidden_size: 256,
        intermediate_size,
        num_hidden_layers: 3,
        num_attention_heads: 8,
        num_key_value_heads: 2,
        head_dim: 64,
        rms_norm_eps: 1e-6,
        rope_theta: 1e6,
        max_position_embeddings: 1024,
        tie_word_embeddings: true,
        eos_token_ids: vec![],
        initializer_range: 0.05,
    }
}

fn decoded_blocks<R: CubeRuntime>() {
    let (device, config) = (R::Device::default(), config(512));
    if !supports::<Cube<R>>(&device, Precision::Bf16.dtype()) {
        return;
    }
    for (recipe, bf16_blocks) in [(Recipe::W4, 0), (Recipe::W4a4, 0), (Recipe::Bf16, 0), (Recipe::W4a4, 1)] {
        let spec = LinearSpec::new(recipe, Scaling::Two, Precision::Bf16).each_row();
        let model = weights::random::<Cube<R>>(&config, spec, MasterKind::Nvfp4, 3, &device).unwrap();
        let model = model.with_bf16_last_blocks(bf16_blocks);
        let ids: Vec<u32> = (0..131).map(|i| (i * 37 + 5) % 320).collect();
        for format in [CacheFormat::Native, CacheFormat::E4m3] {
            let model = model.clone().with_cache_format(format);
            let label = format!("{recipe:?}, {bf16_blocks} blocks in bf16, {format:?}");
            let whole = Session::new(&model, 200).unwrap().read(&ids).unwrap();
            let mut session = Session::new(&model, 200).unwrap();
            let logits = ids.iter().map(|id| session.read(&[*id]).unwrap()).last().unwrap();
            let bound = if recipe.packs_activations() { quantized_bound(Precision::Bf16) } else { 4e-2 };
            // A number that differs in its last bit may be kept as a neighboring byte.
            let bound = if format == CacheFormat::E4m3 { bound + 0.1 } else { bound };
            let difference = apart(&logits, &whole);
            assert!(difference <= bound, "{label}: {difference}");
            decoded_together_as_alone(&model, &ids, &label);
            after_another_session(&model, &ids, &whole, bound, &label);
        }
    }
}

/// On a GPU, the hidden states of a token have the same bits whatever is computed beside it, wherever the chunks of its prompt
/// begin, and in whatever number of pieces the kernel of a block reads its activations: an MLP of 6,144 columns does not fit into
/// shared memory at once beside 16 tokens.
#[test]
fn the_bits_of_a_token_depend_on_its_own_sequence_on_the_gpu_in_16_bits() {
    fn in_16_bits<R: CubeRuntime>() {
        own_sequence::<R>(Precision::Bf16);
        own_sequence::<R>(Precision::F16);
    }
    on_gpu!(in_16_bits);
}

#[test]
fn the_bits_of_a_token_depend_on_its_own_sequence_on_the_gpu_in_f32() {
    fn in_f32<R: CubeRuntime>() {
        own_sequence::<R>(Precision::F32);
    }
    on_gpu!(in_f32);
}

#[test]
fn the_bits_of_a_token_depend_on_its_own_sequence_on_the_gpu_in_tf32() {
    fn in_tf32<R: CubeRuntime>() {
        own_sequence::<R>(Precision::Tf32);
    }
    on_gpu!(in_tf32);
}

fn own_sequence<R: CubeRuntime>(precision: Precision) {
    let device = R::Device::default();
    let is_card = mma::supported(&R::client(&device), DType::BF16.into());
    if precision == Precision::Tf32 && !is_card {
        return lacks(Feature::TensorCores);
    }
    if !supports::<Cube<R>>(&device, precision.dtype()) {
        return;
    }
    let recipes = if precision.dtype() == DType::F32 {
        [(Recipe::W4, 512), (Recipe::Bf16, 512), (Recipe::W4a4, 512)]
    } else {
        [(Recipe::W4, 6144), (Recipe::Bf16, 6144), (Recipe::W4a4, 512)]
    };
    // A software GPU takes long: there one recipe reads prompts.
    let recipes = if is_card { &recipes[..] } else { &recipes[2..] };
    let formats = if is_card { &[CacheFormat::Native, CacheFormat::E4m3][..] } else { &[CacheFormat::Native] };
    let ids = various_ids(if is_card { 1000 } else { 140 });
    let of = |recipe, columns| {
        let spec = LinearSpec::new(recipe, Scaling::Two, precision).each_row();
        weights::random::<Cube<R>>(&config(columns), spec, MasterKind::Nvfp4, 3, &device).unwrap()
    };
    let models = recipes.iter().map(|(recipe, columns)| (format!("{recipe:?}"), of(*recipe, *columns)));
    let mixed = is_card.then(|| ("a mixed model".to_owned(), mixed(of(Recipe::W4a4, 512))));
    for (name, model) in models.chain(mixed) {
        for format in formats.iter().copied() {
            let label = format!("{name} in {precision:?}, {format:?}");
            let model = model.clone().with_cache_format(format);
            let lengths = if is_card { &[1, 5, 16, 17, 40, 600, 1000][..] } else { &[1, 5, 16, 17, 40] };
            prompts_in_parts_and_together_as_alone(&model, &ids, lengths, &label);
            if is_card {
                decoded_together_as_alone(&model, &ids, &label);
                answers_together_as_alone(&model, &ids, &label);
            }
        }
    }
}

/// The model with an NVFP4 head, its last block in bf16, and tensor scales for the activations of every layer.
fn mixed<B: Nvfp4Kernels>(mut model: Qwen3<B>) -> Qwen3<B> {
    let head = Nvfp4Tensor::quantize(model.embed_tokens.val().cast(DType::F32), model.spec().weights());
    model.lm_head = Some(Nvfp4Linear::Packed(head.into()));
    model.layers = model.layers.into_iter().map(|block| Scaled.block(block)).collect();
    model.with_bf16_last_blocks(1)
}

/// Gives layers of NVFP4 weights a tensor scale for their activations, as a file may. A few activations are larger than it allows.
struct Scaled;

impl<B: Nvfp4Kernels> Replace<B> for Scaled {
    fn vector(&mut self, p: Param<Tensor<B, 1>>) -> Param<Tensor<B, 1>> {
        p
    }

    fn matrix(&mut self, p: Param<Tensor<B, 2>>) -> Param<Tensor<B, 2>> {
        p
    }

    fn linear(&mut self, linear: Nvfp4Linear<B>) -> Nvfp4Linear<B> {
        let Nvfp4Linear::PackedMaster(PackedMaster { weight, .. }) = linear else {
            panic!("the weights of this model are NVFP4")
        };
        Nvfp4Linear::Packed(PackedWeight { weight, input: GivenScale::of_scale(2.0 / 2688.0) })
    }
}

/// Token ids of the vocabulary of [`config`].
fn various_ids(count: u32) -> Vec<u32> {
    (0..count).map(|i| (i * i * 7 + i * 37 + 5) % 320).collect()
}

/// On the CPU, too, the hidden states of a token have the same bits whatever is computed beside it. Sums take eight terms at a time
/// there, and the parts of the prompts have numbers of tokens that eight does not divide.
#[test]
fn the_bits_of_a_token_depend_on_its_own_sequence_on_the_cpu() {
    let ids = various_ids(140);
    for (recipe, master) in [(Recipe::Bf16, MasterKind::F32), (Recipe::W4a4, MasterKind::Nvfp4)] {
        let spec = LinearSpec::new(recipe, Scaling::Two, Precision::F32).each_row();
        let model = weights::random::<Cpu>(&config(512), spec, master, 3, &Default::default()).unwrap();
        let label = format!("{recipe:?} on the CPU");
        prompts_in_parts_and_together_as_alone(&model, &ids, &[1, 5, 16, 17, 40], &label);
        // With NVFP4 weights, each product dequantizes them, which takes too long for answers here.
        if recipe == Recipe::Bf16 {
            answers_together_as_alone(&model, &ids, &label);
        }
    }
}

/// Hidden states of a prompt in one piece are those of its parts, and those beside another prompt, bit for bit.
fn prompts_in_parts_and_together_as_alone<B: Nvfp4Kernels>(
    model: &Qwen3<B>,
    ids: &[u32],
    lengths: &[usize],
    label: &str,
) {
    let (config, device) = (model.config(), model.device());
    let hidden = |ids: &[u32], sequences: &mut [(&mut KvCache<B>, NewTokens)]| {
        to_host(model.forward_cached(ids_tensor(&[ids.to_vec()], config, &device).unwrap(), sequences)).unwrap()
    };
    let pool = model.pool(2 * 1024).unwrap();
    for length in lengths.iter().copied() {
        let prompt = &ids[..length];
        let mut cache = pool.cache(&[], length).unwrap();
        let alone = hidden(prompt, &mut [(&mut cache, NewTokens::Prompt(length))]);
        cache.rewind(0);
        let (other, mut others) = (&ids[100..140], pool.cache(&[], 40).unwrap());
        let mut both = [(&mut others, NewTokens::Prompt(40)), (&mut cache, NewTokens::Prompt(length))];
        let together = hidden(&[other, prompt].concat(), &mut both).split_off(40 * config.hidden_size);
        assert!(together == alone, "{label}: a prompt of {length} tokens beside another one");
        let parts = [1, 12, length.saturating_sub(4), length - 1];
        for first in parts.into_iter().filter(|first| (1..length).contains(first)) {
            cache.rewind(0);
            let mut part = |tokens: &[u32]| hidden(tokens, &mut [(&mut cache, NewTokens::Prompt(tokens.len()))]);
            let found = [part(&prompt[..first]), part(&prompt[first..])].concat();
            assert!(found == alone, "{label}: a prompt of {length} tokens, read from token {first} on");
        }
    }
}

/// Answers have the same tokens and logarithms of probabilities alone, beside 20 others, and when the pool already has their
/// prompts.
fn answers_together_as_alone<B: Nvfp4Kernels>(model: &Qwen3<B>, ids: &[u32], label: &str) {
    let options = |seed: u64| GenerateOptions {
        max_tokens: 6,
        sampling: Sampling { temperature: 1.2, top_k: 40, seed, ..Sampling::GREEDY },
        stop_ids: vec![],
        logprobs: Some(3),
    };
    let prompts: Vec<&[u32]> = (0..21).map(|n| &ids[n % 3..n % 3 + 1 + n * n * 7 % 90]).collect();
    let alone = |n: usize| generate(model, prompts[n], &options(n as u64), |_| ControlFlow::Continue(())).unwrap();
    let alone: Vec<_> = (0..prompts.len()).map(alone).collect();
    let pool = model.pool(prompts.len() * 112).unwrap();
    for round in ["in a new pool", "in a pool that has read the prompts"] {
        let begin = |prompt: &&[u32]| Session::of_pool(model, &pool, prompt, prompt.len() + 6).unwrap();
        let mut sessions: Vec<_> = prompts.iter().map(begin).collect();
        let begun = sessions.iter_mut().zip(&prompts).enumerate();
        let mut answers: Vec<_> =
            begun.map(|(n, (session, prompt))| Answering::new(session, prompt, &options(n as u64)).unwrap()).collect();
        while answers.iter().any(|answer| !answer.has_ended()) {
            let open = sessions.iter_mut().zip(&mut answers).filter(|(_, answer)| !answer.has_ended());
            step(&mut open.collect::<Vec<_>>()).unwrap();
        }
        sessions.into_iter().for_each(Session::end);
        for (n, (answer, alone)) in answers.into_iter().zip(&alone).enumerate() {
            let answer = answer.into_generation().unwrap();
            assert_eq!(answer.ids, alone.ids, "{label}: answer {n} {round}");
            assert_eq!(answer.logprobs, alone.logprobs, "{label}: answer {n} {round}");
        }
    }
}

/// Hidden states of 18 sequences that are decoded together are those of each alone, bit for bit. What a sequence has decoded
/// alone, it forgets before it decodes the same with the others.
fn decoded_together_as_alone<B: Nvfp4Kernels>(model: &Qwen3<B>, ids: &[u32], label: &str) {
    let (config, device) = (model.config(), model.device());
    let hidden = |ids: Vec<u32>, sequences: &mut [(&mut KvCache<B>, NewTokens)]| {
        to_host(model.forward_cached(ids_tensor(&[ids], config, &device).unwrap(), sequences)).unwrap()
    };
    let pool = model.pool(18 * 128).unwrap();
    let read = |n: usize| {
        let (prompt, mut cache) = (&ids[n..n + 1 + 7 * n % 90], pool.cache(&[], 120).unwrap());
        hidden(prompt.to_vec(), &mut [(&mut cache, NewTokens::Prompt(prompt.len()))]);
        cache
    };
    let mut caches: Vec<KvCache<B>> = (0..18).map(read).collect();
    for step in 0..3 {
        let new: Vec<u32> = (0..18).map(|n| (n * 13 + step * 7) % 320).collect();
        let decoded_alone = |(cache, id): (&mut KvCache<B>, &u32)| {
            let hidden = hidden(vec![*id], &mut [(&mut *cache, NewTokens::Answer)]);
            cache.rewind(cache.tokens() - 1);
            hidden
        };
        let alone: Vec<Vec<f32>> = caches.iter_mut().zip(&new).map(decoded_alone).collect();
        let mut sequences: Vec<_> = caches.iter_mut().map(|cache| (cache, NewTokens::Answer)).collect();
        let together = hidden(new, &mut sequences);
        for (n, (together, alone)) in together.chunks(config.hidden_size).zip(&alone).enumerate() {
            assert!(together == alone, "{label}: sequence {n} of step {step} is another one beside others");
        }
    }
}

/// The largest difference of two lists of logits, as a share of the largest of the second list.
fn apart(found: &[f32], expected: &[f32]) -> f32 {
    let largest = expected.iter().fold(0.0f32, |a, x| a.max(x.abs()));
    found.iter().zip(expected).fold(0.0f32, |most, (a, b)| most.max((a - b).abs())) / largest
}

/// The dense file of a fixture and an NVFP4 one that the program made of it.
fn weight_files(dir: &Path, fixture: &Path) -> [PathBuf; 2] {
    let packed = dir.join("packed.dat");
    let (from, to) = (fixture.to_str().unwrap(), packed.to_str().unwrap());
    ok(Path::new("."), &["convert", from, to, "--to", "dat", "--dtype", "nvfp4"]);
    [fixture.to_owned(), packed]
}

/// The bound with quantized activations: a difference in the last bit can move a value to the next code, which is up to a
/// third of it away. In 16 bits this happens to some values in a hundred.
fn quantized_bound(precision: Precision) -> f32 {
    if precision == Precision::F32 { 0.1 } else { 0.25 }
}

fn same_in_chunks<B: Nvfp4Kernels>(model: &Qwen3<B>, bound: f32, label: &str) {
    let ids: Vec<u32> = (0..23).map(|i| (i * 37 + 5) % 300).collect();
    let tensor = ids_tensor(std::slice::from_ref(&ids), model.config(), &model.device()).unwrap();
    let uncached = model.forward(tensor, |_| {});
    let whole = to_host(model.logits(uncached.narrow(0, 22, 1))).unwrap();
    for chunk in [23, 5, 1] {
        let mut session = Session::new(model, 32).unwrap();
        let logits = ids.chunks(chunk).map(|part| session.read(part).unwrap()).last().unwrap();
        assert_eq!(session.tokens(), 23);
        let difference = apart(&logits, &whole);
        assert!(difference <= bound, "{label}, chunks of {chunk}: {difference}");
    }
    after_another_session(model, &ids, &whole, bound, label);
    in_bytes(&model.clone().with_cache_format(CacheFormat::E4m3), &ids, &whole, bound, label);
}

/// What another session of the pool has read of a prompt need not be read again: full pages are shared, the last one is copied.
fn after_another_session<B: Nvfp4Kernels>(model: &Qwen3<B>, ids: &[u32], whole: &[f32], bound: f32, label: &str) {
    let (same, room) = (ids.len() * 4 / 5, ids.len() + 8);
    let other: Vec<u32> = ids[..same].iter().copied().chain([ids[same] + 1, 7, 8]).collect();
    let pool = model.pool(3 * room).unwrap();
    let begin = |prompt: &[u32]| Session::of_pool(model, &pool, prompt, room).unwrap();
    let mut first = begin(&other);
    first.read(&other).unwrap();
    first.end();
    let mut second = begin(ids);
    assert_eq!(second.tokens(), same, "{label}");
    let difference = apart(&second.read(&ids[same..]).unwrap(), whole);
    assert!(difference <= bound, "{label}, after another session: {difference}");
}

/// With a cache of 8-bit numbers, a prompt in one piece, in chunks and token by token has logits within a bound of each other, and
/// within the error of four significant bits of those of a cache that rounds nothing.
fn in_bytes<B: Nvfp4Kernels>(model: &Qwen3<B>, ids: &[u32], exact: &[f32], bound: f32, label: &str) {
    let in_chunks = |chunk: usize| {
        let mut session = Session::new(model, 32).unwrap();
        ids.chunks(chunk).map(|part| session.read(part).unwrap()).last().unwrap()
    };
    let whole = in_chunks(23);
    let difference = apart(&whole, exact);
    // Quantized activations turn small differences into large ones.
    let most = if bound < 0.1 { 0.25 } else { 0.5 };
    assert!((1e-4..most).contains(&difference), "{label}, 8 bits: {difference}");
    for chunk in [5, 1] {
        // A number that differs in its last bit may be kept as a neighboring byte.
        let (difference, bound) = (apart(&in_chunks(chunk), &whole), bound.max(0.02));
        assert!(difference <= bound, "{label}, 8 bits, chunks of {chunk}: {difference}");
    }
}

fn same_logits<B: Nvfp4Kernels>(device: B::Device) {
    for fixture in ["tiny-tied", "tiny-untied"] {
        let folder = golden(&format!("hf-qwen3/{fixture}")).canonicalize().unwrap();
        let config = Qwen3Config::from_file(&folder.join("config.json")).unwrap();
        let dir = tempfile::tempdir().unwrap();
        for file in weight_files(dir.path(), &folder) {
            // Roundings of a format, of which some dozens add up over the blocks.
            for (precision, bound) in [(Precision::F32, 1e-5), (Precision::F16, 5e-3), (Precision::Bf16, 4e-2)] {
                if !supports::<B>(&device, precision.dtype()) {
                    continue;
                }
                for (recipe, bound) in [(Recipe::W4, bound), (Recipe::W4a4, quantized_bound(precision))] {
                    let checkpoint = Container::open(&file).unwrap();
                    let spec = LinearSpec::new(recipe, Scaling::Two, precision).each_row();
                    let model: Qwen3<B> = weights::load(&checkpoint, &config, spec, Purpose::Infer, &device).unwrap();
                    let label = format!("{}, {recipe:?} in {precision:?}", file.display());
                    same_in_chunks(&model, bound, &label);
                }
            }
        }
    }
}
