//! A run compiles kernels before it needs them: it rehearses its first steps on a device that only records which kernels
//! they launch, and NVRTC compiles these into the cache that CubeCL reads. Before a model answers, its first answers are
//! rehearsed.

use crate::support::{
    Cpu,
    files::{F32, demo_file, ok},
    skipped_for,
};
use backend_nvfp4::{CacheFormat, DeviceServices, MasterKind, Nvfp4Kernels, Precision, Recipe};
use clap::Parser;
use cubecl::{Runtime, ir::DeviceProperties};
use cubecl_common::{cache::CacheOption, compilation_cache::CompilationCache};
use kernels_cubecl::{
    any_cuda::{AnyCudaDevice, AnyCudaRuntime},
    compile_ahead::{KernelCache, compile_ahead},
    cuda_source::{IsCompiled, Launch, OnLaunch, SourceDevice},
};
use model_qwen3::{
    config::Qwen3Config,
    sampling::Sampling,
    session::{GenerateOptions, Generation, Progress, Session},
    weights,
    write::write_safetensors,
};
use std::{
    cell::Cell,
    collections::{BTreeMap, BTreeSet},
    fs,
    ops::ControlFlow,
    path::Path,
    sync::{Arc, Mutex, Once, atomic::AtomicBool},
};
use train_cli::{
    CliError, ahead,
    args::{Cli, Command},
    commands::fit,
    device::{self, Job},
    run::stored_model::StoredModel,
    settings::DeviceChoice,
    talk::{
        answer::Answer,
        batch::{Batch, Listener, NewAnswer},
        first_answers::{Expected, FirstAnswers},
    },
};

/// A shape that Hopper's kernels take, with the demo's tokenizer.
const CONFIG: &str = r#"{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 256,
  "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128,
  "vocab_size": 6144, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "hidden_act": "silu",
  "tie_word_embeddings": true, "attention_bias": false, "initializer_range": 0.02}"#;

fn properties(arch: u32) -> DeviceProperties {
    // Pools work as in the program: a free buffer is used again only for one of the same size.
    static CONFIGURED: Once = Once::new();
    CONFIGURED.call_once(device::configure);
    let device = SourceDevice::new(arch, OnLaunch::Record);
    let properties = AnyCudaRuntime::client(&AnyCudaDevice::Source(device.clone())).properties().clone();
    device.give_back();
    properties
}

/// A device that stands for a GPU of compute capability `arch`, for which nothing is compiled.
fn rehearsing(arch: u32) -> SourceDevice {
    rehearsing_with(arch, Box::new(|_| false))
}

/// A device that stands for such a GPU, for which the kernels are compiled whose keys `is_compiled` accepts.
fn rehearsing_with(arch: u32, is_compiled: IsCompiled) -> SourceDevice {
    let properties = Box::new(properties(arch));
    SourceDevice::new(arch, OnLaunch::Rehearse { properties, is_compiled })
}

/// What `fit` compiles ahead in bf16 for the card that `device` stands for.
fn rehearsed(dir: &Path, device: SourceDevice, flags: &[&str]) -> Vec<Launch> {
    rehearsed_in(Precision::Bf16, dir, device, flags)
}

/// What it compiles ahead in any number format.
fn rehearsed_in(precision: Precision, dir: &Path, device: SourceDevice, flags: &[&str]) -> Vec<Launch> {
    let config = dir.join("config.json");
    fs::write(&config, CONFIG).unwrap();
    let demo = demo_file("tokenizer.json");
    let (config, tokenizer) = (config.to_str().unwrap(), demo.parent().unwrap().to_str().unwrap());
    let begin = ["train-cli", "fit", "--synthetic", "--max-seq-length", "256", "--init-config", config];
    let line = [&begin[..], &["--tokenizer", tokenizer], flags].concat();
    let Command::Fit(args) = Cli::parse_from(line).command else { panic!("this is fit") };
    let (plan, ..) = fit::planned(&args).unwrap();
    let ready = fit::Ready::new(plan, DeviceChoice::Cpu, precision, None).unwrap();
    ahead::rehearsed(device, precision, fit::FirstSteps(&ready)).unwrap()
}

/// The kernel of products by `mma.sync`.
const MMA_SYNC: &str = "gemm_kernel";

#[test]
fn every_recipe_is_rehearsed() {
    let dir = tempfile::tempdir().unwrap();
    let written = ["hopper_attention_forward", "hopper_attention_keys", "hopper_attention_queries", "hopper_gemm"];
    let mut gemms = Vec::new();
    // AdamW leaves codes of weights that are quantized, unless gradients are summed first.
    for (flags, leaves_codes) in [
        (&["--recipe", "bf16"][..], false),
        (&["--recipe", "w4a4", "--gradient-accumulation-steps", "2"], false),
        (&["--recipe", "nvfp4"], true),
        (&["--recipe", "w4", "--master-weights", "nvfp4", "--optimizer-state-mode", "int4"], false),
        (&["--recipe", "w4", "--train-last-layers", "3"], true),
    ] {
        let launches = rehearsed(dir.path(), rehearsing(90), flags);
        let names: BTreeSet<&str> = launches.iter().map(|launch| launch.entry.as_str()).collect();
        let hopper = names.iter().filter(|name| name.starts_with("hopper")).copied().collect::<Vec<_>>();
        assert_eq!(hopper, written, "{flags:?}");
        // `tiers` relies on this, and does not name products by mma.sync on a Hopper card.
        assert!(!names.iter().any(|name| name.starts_with(MMA_SYNC)), "{flags:?}: {names:?}");
        let keys: BTreeSet<u128> = launches.iter().map(|launch| launch.key).collect();
        assert_eq!(keys.len(), launches.len(), "{flags:?}: a kernel was recorded twice");
        let optimizers = launches.iter().filter(|launch| launch.entry.starts_with("adamw_quantized")).count();
        assert_eq!(optimizers, if leaves_codes { 2 } else { 1 }, "{flags:?}: forms of AdamW");
        gemms.push(launches.iter().filter(|launch| launch.entry == "hopper_gemm").count());
    }
    // The forward of each of q + k + v, o, gate + up, down and the head has other operands than its gradients.
    assert!(gemms.iter().all(|count| *count >= 8), "{gemms:?} forms of the product");
    // In f32, products and attention have kernels of their own.
    let flags = ["--recipe", "w4", "--master-weights", "f32"];
    let in_f32 = rehearsed_in(Precision::F32, dir.path(), rehearsing(90), &flags);
    assert!(in_f32.len() > 30 && in_f32.iter().all(|launch| !launch.entry.starts_with("hopper")), "{}", in_f32.len());
    // No other card has kernels in CUDA C++ for training.
    let others = rehearsed(dir.path(), rehearsing(80), &["--recipe", "w4a4"]);
    assert!(others.len() > 40 && others.iter().all(|launch| !launch.entry.starts_with("hopper")), "{}", others.len());
    assert!(others.iter().any(|launch| launch.entry.starts_with(MMA_SYNC)));
}

#[test]
fn what_is_compiled_is_not_recorded() {
    let dir = tempfile::tempdir().unwrap();
    let launches = rehearsed(dir.path(), rehearsing(90), &["--recipe", "w4"]);
    let (mut compiled, left): (BTreeSet<u128>, _) =
        (launches.iter().map(|launch| launch.key).collect(), launches[7].key);
    compiled.remove(&left);
    let device = rehearsing_with(90, Box::new(move |key| compiled.contains(&key)));
    let recorded = rehearsed(dir.path(), device, &["--recipe", "w4"]);
    assert_eq!(recorded.iter().map(|launch| launch.key).collect::<Vec<_>>(), [left]);
}

/// Writes a model of random weights into a folder, with its text files: `model.safetensors` and, in NVFP4, `x.dat`.
fn write_model(d: &Path) {
    fs::write(d.join("config.json"), CONFIG).unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        fs::copy(demo_file(name), d.join(name)).unwrap();
    }
    let config = Qwen3Config::from_file(&d.join("config.json")).unwrap();
    let model = weights::random::<Cpu>(&config, F32, MasterKind::F32, 11, &Default::default()).unwrap();
    let out = fs::File::create(d.join("model.safetensors")).unwrap();
    write_safetensors(&weights::Live::new(&model), out, |e| panic!("{e}")).unwrap();
    ok(d, &["convert", "model.safetensors", "x.dat", "--dtype", "nvfp4"]);
}

/// A model that is made and answers no prompt or one.
struct Answered<'a> {
    stored: &'a StoredModel,
    recipe: Recipe,
    cache: CacheFormat,
    /// Whether the model is an outline, and not loaded with all its blocks.
    outline: bool,
    prompt: Option<usize>,
}

impl Job for Answered<'_> {
    type Output = ();

    fn run<B: Nvfp4Kernels + DeviceServices>(self, device: B::Device, precision: Precision) -> Result<(), CliError> {
        let Self { stored, recipe, cache, outline, prompt } = self;
        let model = match outline {
            true => stored.outline::<B>(recipe, precision, &device)?,
            false => stored.load::<B>(recipe, precision, &device)?,
        };
        let model = model.with_cache_format(cache);
        let Some(prompt) = prompt else { return Ok(()) };
        // A greedy answer to the prompt, and others to a prompt of one token: drawn from few tokens and from all, and with a
        // penalty.
        let penalized = Sampling { repetition_penalty: 1.3, ..Sampling::GREEDY };
        let drawn = [20, 30, 100].map(|top_k| (1, Sampling { top_k, ..Sampling::CARD }));
        for (prompt, sampling) in [(prompt, Sampling::GREEDY), (1, penalized)].into_iter().chain(drawn) {
            let options = GenerateOptions { max_tokens: 2, sampling, stop_ids: vec![], logprobs: None };
            let mut session = Session::new(&model, prompt + 2)?;
            session.answer(&vec![0; prompt], &options, |_| ControlFlow::Continue(()))?;
        }
        Ok(())
    }
}

/// A model, and how it answers on a card.
struct Case {
    file: &'static str,
    recipe: Recipe,
    arch: u32,
    precision: Precision,
    cache: CacheFormat,
}

/// The names of kernels by their keys.
type Kernels = BTreeMap<u128, String>;

/// The kernels that a job launches. The text of each is made once for all jobs: that takes most of the time of a rehearsal.
fn heard(arch: u32, precision: Precision, job: impl Job<Output = ()>) -> Kernels {
    static KNOWN: Mutex<Kernels> = Mutex::new(BTreeMap::new());
    let asked = Arc::<Mutex<BTreeSet<u128>>>::default();
    let hears = asked.clone();
    let is_compiled = move |key| {
        hears.lock().unwrap().insert(key);
        KNOWN.lock().unwrap().contains_key(&key)
    };
    let launches = ahead::rehearsed(rehearsing_with(arch, Box::new(is_compiled)), precision, job).unwrap();
    let mut known = KNOWN.lock().unwrap();
    known.extend(launches.into_iter().map(|launch| (launch.key, launch.entry)));
    asked.lock().unwrap().iter().map(|key| (*key, known[key].clone())).collect()
}

/// An outline of a model launches the kernels of the model. Making the outline and loading the model launch others.
fn same_kernels(d: &Path, case: &Case, prompts: &[usize]) {
    let Case { file, recipe, arch, precision, cache } = *case;
    let label = format!("{file}, {}, sm_{arch}, {precision:?}, {cache:?}", recipe.name());
    let stored = StoredModel::open("--model", &d.join(file), Some(d)).unwrap();
    let launched =
        |outline, prompt| heard(arch, precision, Answered { stored: &stored, recipe, cache, outline, prompt });
    let (outline, loaded) = (launched(true, None), launched(false, None));
    for prompt in prompts.iter().copied() {
        let expected = Expected { steps: vec![vec![prompt]], together: 1 };
        let rehearsed = heard(arch, precision, FirstAnswers { stored: &stored, recipe, cache, expected });
        let answered = launched(false, Some(prompt));
        // How many units fill a buffer depends on its length, and a rehearsal has a short answer besides.
        let of_answers = |mut kernels: Kernels| {
            kernels.retain(|key, name| {
                !outline.contains_key(key) && !loaded.contains_key(key) && !name.starts_with("full_kernel")
            });
            kernels
        };
        let (rehearsed, answered) = (of_answers(rehearsed), of_answers(answered));
        assert!(answered.len() > 5, "{label}: {answered:?}");
        let by_mma_sync = rehearsed.values().any(|name| name.starts_with(MMA_SYNC));
        assert!(arch != 90 || !by_mma_sync, "{label}: {rehearsed:?}");
        assert_eq!(rehearsed, answered, "{label}, {prompt} tokens");
    }
}

#[test]
fn the_rehearsal_of_answers_launches_the_kernels_of_answers() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    write_model(d);
    // Two of its six blocks have dense weights.
    let line = "fit -m model.safetensors --tokenizer . --synthetic --max-seq-length 32 --max-steps 1 --recipe w4a4 \
                --bf16-last-blocks 2 --device cpu -o r";
    ok(d, &line.split_whitespace().collect::<Vec<_>>());
    let in_bf16 =
        |file, recipe, arch| Case { file, recipe, arch, precision: Precision::Bf16, cache: CacheFormat::Native };
    for case in [
        in_bf16("x.dat", Recipe::W4, 90),
        in_bf16("x.dat", Recipe::W4a4, 90),
        in_bf16("x.dat", Recipe::W4a4, 80),
        in_bf16("model.safetensors", Recipe::W4, 90),
        in_bf16("r/final", Recipe::W4a4, 90),
    ] {
        same_kernels(d, &case, &[1, 20, 700, 1024 - 3]);
        let Case { file, recipe, arch, precision, cache } = case;
        // Five answers end one after another: there are forms for one, two, four and eight tokens.
        let stored = StoredModel::open("--model", &d.join(file), Some(d)).unwrap();
        let job = FirstAnswers { stored: &stored, recipe, cache, expected: Expected { steps: vec![], together: 5 } };
        let blocks = heard(arch, precision, job).values().filter(|name| name.contains("decoder_block")).count();
        let kinds = if file == "r/final" { 2 } else { 1 };
        assert_eq!(blocks, 4 * kinds, "{file}, {}", recipe.name());
    }
}

/// So it is with an 8-bit cache, an NVFP4 head and given scales of activations, and in the other number formats.
#[test]
fn the_rehearsal_knows_every_cache_head_scale_and_format() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    write_model(d);
    ok(d, &["convert", "model.safetensors", "head.dat", "--dtype", "nvfp4", "--head", "nvfp4"]);
    let line = "export-hf -m model.safetensors --tokenizer . -o given --format compressed-tensors --activations nvfp4 \
                --calibration-data rows.txt --calibration-rows 1 --device cpu";
    fs::write(d.join("rows.txt"), "Who are you?").unwrap();
    ok(d, &line.split_whitespace().collect::<Vec<_>>());
    let [native, bytes] = [CacheFormat::Native, CacheFormat::E4m3];
    for (file, recipe, precision, cache) in [
        ("x.dat", Recipe::W4a4, Precision::Bf16, bytes),
        ("head.dat", Recipe::W4, Precision::Bf16, native),
        ("given", Recipe::W4a4, Precision::Bf16, native),
        ("x.dat", Recipe::W4, Precision::F16, bytes),
        ("x.dat", Recipe::W4, Precision::F32, native),
        ("x.dat", Recipe::W4a4, Precision::Tf32, native),
    ] {
        same_kernels(d, &Case { file, recipe, arch: 90, precision, cache }, &[20, 700]);
    }
}

/// Answers to prompts of many lengths, several at once, each of which begins where there is room.
struct ManyAnswered<'a> {
    stored: &'a StoredModel,
    recipe: Recipe,
}

/// Answers that are made at once.
const TOGETHER: usize = 3;

/// Hears how many answers are complete.
struct Ended<'a>(&'a Cell<usize>);

impl Listener for Ended<'_> {
    fn hear(&mut self, _piece: &str, _generation: &Generation) {}

    fn complete(self, answer: Result<Answer, CliError>) {
        assert!(answer.is_ok(), "{:?}", answer.err());
        self.0.set(self.0.get() + 1);
    }
}

impl Job for ManyAnswered<'_> {
    type Output = ();

    fn run<B: Nvfp4Kernels + DeviceServices>(self, device: B::Device, precision: Precision) -> Result<(), CliError> {
        let model = self.stored.load::<B>(self.recipe, precision, &device)?;
        let options = GenerateOptions { max_tokens: 3, sampling: Sampling::GREEDY, stop_ids: vec![], logprobs: None };
        let ended = Cell::new(0);
        let mut batch = Batch::new(&model, &self.stored.text, 4096, TOGETHER)?;
        let lengths = [20, 140, 300, 513, 7, 700, 400, 1, 129, 384, 90, 60, 260, 1000];
        let mut waiting = lengths.iter().enumerate();
        let mut next = waiting.next();
        while ended.get() < lengths.len() {
            while let Some((n, length)) = next.filter(|(_, length)| batch.has_room(**length, &options)) {
                // No prompt begins like another.
                let prompt = vec![n as u32; *length];
                batch.begin(NewAnswer { prompt, options: options.clone(), ends: vec![], listener: Ended(&ended) })?;
                next = waiting.next();
            }
            batch.step()?;
        }
        Ok(())
    }
}

#[test]
fn answers_to_many_prompts_launch_the_kernels_of_the_rehearsal() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    write_model(d);
    for (recipe, arch) in [(Recipe::W4a4, 90), (Recipe::W4, 80)] {
        let stored = StoredModel::open("--model", &d.join("x.dat"), Some(d)).unwrap();
        let expected = Expected::unknown(TOGETHER);
        let job = FirstAnswers { stored: &stored, recipe, cache: CacheFormat::Native, expected };
        let rehearsed = heard(arch, Precision::Bf16, job);
        let loading = Answered { stored: &stored, recipe, cache: CacheFormat::Native, outline: false, prompt: None };
        let loading = heard(arch, Precision::Bf16, loading);
        let mut answered = heard(arch, Precision::Bf16, ManyAnswered { stored: &stored, recipe });
        // How many units copy a part of a matrix depends on the length of the part.
        answered.retain(|key, name| !loading.contains_key(key) && !name.starts_with("copy_kernel"));
        let (known, missing): (Kernels, Kernels) =
            answered.into_iter().partition(|(key, _)| rehearsed.contains_key(key));
        assert!(known.len() > 15, "{}", known.len());
        assert!(missing.is_empty(), "{}, sm_{arch}: {missing:?}", recipe.name());
    }
}

/// Answers of many tokens. Before each of them it notes the bytes that the device has reserved.
struct LongAnswers<'a> {
    stored: &'a StoredModel,
    sampling: Sampling,
    /// The notes of each answer.
    reserved: &'a Mutex<Vec<Vec<u64>>>,
}

/// How many answers are made, at most, until one takes no memory.
const ANSWERS: usize = 20;

/// Whether no token takes memory behind the first eight, which fill the device's lists of buffers that can be used again.
fn is_steady(reserved: &[u64]) -> bool {
    let rest = &reserved[8..];
    assert!(rest.len() > 250 && rest[0] > 0, "{reserved:?}");
    rest.iter().all(|bytes| *bytes == rest[0])
}

impl Job for LongAnswers<'_> {
    type Output = ();

    fn run<B: Nvfp4Kernels + DeviceServices>(self, device: B::Device, precision: Precision) -> Result<(), CliError> {
        let model = self.stored.load::<B>(Recipe::W4a4, precision, &device)?;
        let options = GenerateOptions { max_tokens: 300, sampling: self.sampling, stop_ids: vec![], logprobs: None };
        for _ in 0..ANSWERS {
            let mut reserved = vec![];
            let mut session = Session::new(&model, 20 + options.max_tokens)?;
            // Loading and earlier answers leave hundreds of free buffers behind, from which a token could take its own unseen.
            B::memory_cleanup(&device);
            session.answer(&[0; 20], &options, |progress| {
                if let Progress::Token(_) = progress {
                    reserved.push(B::memory_in_use(&device).unwrap().reserved);
                }
                ControlFlow::Continue(())
            })?;
            self.reserved.lock().unwrap().push(reserved.clone());
            if is_steady(&reserved) {
                break;
            }
        }
        Ok(())
    }
}

/// While an answer is made, the device gives no more memory: also where the answer crosses pages of the cache. The program drops a
/// buffer while the device's thread asks for the next one, so that on a busy machine a list sometimes gets a buffer more. So one
/// of many answers has to take nothing. If each token kept a buffer, no answer would.
#[test]
fn decoding_reserves_no_memory() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    write_model(d);
    let stored = StoredModel::open("--model", &d.join("x.dat"), Some(d)).unwrap();
    for arch in [80, 90] {
        for sampling in [Sampling::GREEDY, Sampling::CARD] {
            let reserved = Mutex::new(vec![]);
            heard(arch, Precision::Bf16, LongAnswers { stored: &stored, sampling, reserved: &reserved });
            let reserved = reserved.into_inner().unwrap();
            assert!(is_steady(reserved.last().unwrap()), "sm_{arch}: {reserved:?}");
        }
    }
}

/// A conversation whose turns all have another length.
struct Turns<'a> {
    stored: &'a StoredModel,
    /// What the pool held beside the buffers in use, after each turn.
    spare: &'a Mutex<Vec<u64>>,
}

impl Job for Turns<'_> {
    type Output = ();

    fn run<B: Nvfp4Kernels + DeviceServices>(self, device: B::Device, precision: Precision) -> Result<(), CliError> {
        let model = self.stored.load::<B>(Recipe::W4a4, precision, &device)?;
        let options = GenerateOptions { max_tokens: 2, sampling: Sampling::GREEDY, stop_ids: vec![], logprobs: None };
        let mut session = Session::new(&model, 1024)?;
        for turn in 0..100 {
            let prompt = vec![turn; 200 + 4 * turn as usize];
            Answer::of(&mut session, &self.stored.text, &prompt, &options, &[], false, || false)?;
            let memory = B::memory_in_use(&device).unwrap();
            self.spare.lock().unwrap().push(memory.reserved - memory.in_use);
        }
        Ok(())
    }
}

/// Each length of a prompt leaves buffers behind that no other length uses again. They are given back before there are many.
#[test]
fn prompts_of_many_lengths_leave_little_behind() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    write_model(d);
    let stored = StoredModel::open("--model", &d.join("x.dat"), Some(d)).unwrap();
    let spare = Mutex::new(vec![]);
    let job = Turns { stored: &stored, spare: &spare };
    heard(90, Precision::Bf16, job);
    let spare = spare.into_inner().unwrap();
    // One turn may leave a few MB more than the 128 MiB at which they are given back.
    assert!(spare.len() == 100 && spare.iter().all(|bytes| *bytes < 144 << 20), "{spare:?}");
    assert!(spare.windows(2).any(|pair| pair[1] < pair[0]), "the turns are too few to give anything back: {spare:?}");
}

/// The number of tiles of rows decides how wide the tiles of a product are, and a chunk of an unknown prompt has one to four.
#[test]
fn prompts_that_are_not_known_have_each_number_of_tiles() {
    let read: Vec<usize> = Expected::unknown(1).steps.iter().map(|step| step[0] - 1).collect();
    let tiles: BTreeSet<usize> = read.iter().map(|rows| rows.min(&512).div_ceil(128)).collect();
    assert_eq!(tiles, BTreeSet::from([1, 2, 3, 4]), "{read:?}");
}

/// CubeCL has opened its cache long before kernels are compiled ahead.
#[test]
fn an_open_cache_finds_what_was_compiled_ahead() {
    let Some(home) = std::env::var_os("NVRTC_HOME") else {
        assert!(std::env::var_os("REQUIRE_NVRTC").is_none(), "REQUIRE_NVRTC is set and NVRTC_HOME is not");
        return skipped_for("NVRTC_HOME is not set");
    };
    assert!(Path::new(&home).is_dir());
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("cache");
    let option = || CacheOption::default().name("cuda").root(&folder);
    let launches = rehearsed(dir.path(), rehearsing(90), &["--recipe", "w4a4"]);
    // One that is written in CUDA C++, and one that CubeCL generates, which includes headers of CUDA.
    let of = |name| launches.iter().find(|launch| launch.entry.starts_with(name)).unwrap().clone();
    let mut launches = vec![of("hopper_gemm"), of("swiglu_kernel")];
    assert!(launches[1].text.contains("#include <cuda"), "{}", launches[1].text);
    launches.push(Launch {
        entry: "three".into(),
        text: "extern \"C\" __global__ void three() {}".into(),
        ..launches[0].clone()
    });
    launches[2].key = 3;
    let mut cache = KernelCache::open(&folder);
    let mut open = CompilationCache::<u128, serde_json::Value>::new("ptx", option());
    let told = Mutex::new(vec![]);
    let compiled = |cache: &mut KernelCache, launches: &[Launch]| {
        let tell = |done: usize, all: usize| told.lock().unwrap().push((done, all));
        compile_ahead(launches, 90, Some(Path::new(&home)), cache, &AtomicBool::new(false), &tell)
    };
    assert_eq!(compiled(&mut cache, &launches).unwrap(), 3);
    // The count that a terminal shows grows by one with each kernel.
    assert_eq!(std::mem::take(&mut *told.lock().unwrap()), [(1, 3), (2, 3), (3, 3)]);
    // The device adds a kernel of its own, and sees the others from then on.
    open.insert(7, serde_json::json!({"entrypoint_name": "own", "shared_mem_bytes": 0, "ptx": []})).unwrap();
    for launch in &launches {
        let kernel = open.get(&launch.key).expect("the kernel that was compiled ahead");
        assert_eq!(
            (&kernel["entrypoint_name"], &kernel["shared_mem_bytes"]),
            (&launch.entry.clone().into(), &launch.shared.into())
        );
        let code = kernel["ptx"].as_array().unwrap();
        let magic: Vec<i64> = code.iter().take(4).filter_map(serde_json::Value::as_i64).collect();
        assert_eq!(magic, [0x7f, b'E'.into(), b'L'.into(), b'F'.into()], "machine code is an ELF file");
    }
    assert_eq!(compiled(&mut cache, &launches).unwrap(), 0, "nothing is compiled twice");
    assert!(told.lock().unwrap().is_empty(), "nothing is told of kernels that the cache has");
    let mut later = KernelCache::open(&folder);
    assert!(
        launches.iter().all(|launch| later.has(launch.key)) && !later.has(4),
        "a later process knows what is compiled"
    );
    assert_eq!(compiled(&mut later, &launches).unwrap(), 0, "nor by a later process");
    launches[2] = Launch { key: 4, text: "this is no C++ ".repeat(20), ..launches[2].clone() };
    launches.push(Launch { key: 5, text: "extern \"C\" __global__ void three() {}".into(), ..launches[2].clone() });
    let error = compiled(&mut cache, &launches).unwrap_err().to_string();
    assert!(error.contains("three") && error.contains("this"), "{error}");
    launches.remove(2);
    let mut opened = KernelCache::open(&folder);
    assert_eq!(compiled(&mut opened, &launches).unwrap(), 0, "a kernel that compiles is kept beside one that does not");
}
