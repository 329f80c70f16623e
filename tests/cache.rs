//! A prompt in one piece, in chunks of 5 and token by token gives the same logits: the mask of a chunk on a cache that
//! holds tokens is right. In every number format of the device, with dense and with NVFP4 weights, and
//! with quantized activations.

use crate::support::{Cpu, Cube, files::ok, golden, on_gpu, supports};
use backend_nvfp4::{LinearSpec, MasterKind, Nvfp4Kernels, Precision, Recipe, Scaling};
use burn_cubecl::CubeRuntime;
use model_qwen3::{
    config::Qwen3Config,
    container::Container,
    kv_cache::KvCache,
    model::{Qwen3, ids_tensor},
    session::Session,
    weights::{self, Purpose, to_host},
};
use std::path::{Path, PathBuf};

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

fn decoded_blocks<R: CubeRuntime>() {
    let device = R::Device::default();
    let config = Qwen3Config {
        vocab_size: 320,
        hidden_size: 256,
        intermediate_size: 512,
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
    };
    if !supports::<Cube<R>>(&device, Precision::Bf16.dtype()) {
        return;
    }
    for (recipe, bf16_blocks) in [(Recipe::W4, 0), (Recipe::W4a4, 0), (Recipe::Bf16, 0), (Recipe::W4a4, 1)] {
        let spec = LinearSpec::new(recipe, Scaling::Two, Precision::Bf16).each_row();
        let model = weights::random::<Cube<R>>(&config, spec, MasterKind::Nvfp4, 3, &device).unwrap();
        let model = model.with_bf16_last_blocks(bf16_blocks);
        let ids: Vec<u32> = (0..131).map(|i| (i * 37 + 5) % 320).collect();
        let whole = Session::new(&model, 200).unwrap().read(&ids).unwrap();
        let mut session = Session::new(&model, 200).unwrap();
        let logits = ids.iter().map(|id| session.read(&[*id]).unwrap()).last().unwrap();
        let largest = whole.iter().fold(0.0f32, |a, x| a.max(x.abs()));
        let difference = logits.iter().zip(&whole).fold(0.0f32, |most, (a, b)| most.max((a - b).abs()));
        let bound = if recipe.packs_activations() { quantized_bound(Precision::Bf16) } else { 4e-2 };
        assert!(difference <= bound * largest, "{recipe:?}: {difference} of {largest}");
        decoded_together_as_alone(&model, &ids, &format!("{recipe:?}, {bf16_blocks} blocks in bf16"));
    }
}

/// Hidden states of 18 sequences that are decoded together are those of each alone, bit for bit, also if another sequence in their
/// midst reads a prompt. The copies of the caches that decode alone do not change those that are left.
fn decoded_together_as_alone<B: Nvfp4Kernels>(model: &Qwen3<B>, ids: &[u32], label: &str) {
    let (config, device) = (model.config(), model.device());
    let hidden = |ids: Vec<u32>, sequences: &mut [(&mut KvCache<B>, usize)]| {
        to_host(model.forward_cached(ids_tensor(&[ids], config, &device).unwrap(), sequences)).unwrap()
    };
    let read = |n: usize| {
        let (prompt, mut cache) =
            (&ids[n..n + 1 + 7 * n % 90], KvCache::new(config, 120, model.spec().precision.dtype(), &device));
        hidden(prompt.to_vec(), &mut [(&mut cache, prompt.len())]);
        cache
    };
    let mut caches: Vec<KvCache<B>> = (0..18).map(read).collect();
    for step in 0..3 {
        let new: Vec<u32> = (0..18).map(|n| (n * 13 + step * 7) % 320).collect();
        let alone: Vec<Vec<f32>> =
            caches.iter().zip(&new).map(|(cache, id)| hidden(vec![*id], &mut [(&mut cache.clone(), 1)])).collect();
        let mut reader = KvCache::new(config, 120, model.spec().precision.dtype(), &device);
        let mut sequences: Vec<_> = caches.iter_mut().map(|cache| (cache, 1)).collect();
        let mut together = if step == 1 {
            let prompt = &ids[..5];
            sequences.insert(7, (&mut reader, prompt.len()));
            hidden([&new[..7], prompt, &new[7..]].concat(), &mut sequences)
        } else {
            hidden(new, &mut sequences)
        };
        if step == 1 {
            together.drain(7 * config.hidden_size..12 * config.hidden_size);
        }
        for (n, (together, alone)) in together.chunks(config.hidden_size).zip(&alone).enumerate() {
            assert!(together == alone, "{label}: sequence {n} of step {step} is another one beside others");
        }
    }
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
    let largest = whole.iter().fold(0.0f32, |a, x| a.max(x.abs()));
    for chunk in [23, 5, 1] {
        let mut session = Session::new(model, 32).unwrap();
        let logits = ids.chunks(chunk).map(|part| session.read(part).unwrap()).last().unwrap();
        assert_eq!(session.tokens(), 23);
        let difference = logits.iter().zip(&whole).fold(0.0f32, |most, (a, b)| most.max((a - b).abs()));
        assert!(difference <= bound * largest, "{label}, chunks of {chunk}: {difference} of {largest}");
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
