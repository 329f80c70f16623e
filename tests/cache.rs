//! A prompt in one piece, in chunks of 5 and token by token gives the same logits: the mask of a chunk on a cache that
//! holds tokens is right. In every number format of the device, with dense and with NVFP4 weights, and
//! with quantized activations.

use crate::support::{Cpu, Cube, files::ok, golden, on_gpu, supports};
use backend_nvfp4::{LinearSpec, Nvfp4Kernels, Precision, Recipe, Scaling};
use burn_cubecl::CubeRuntime;
use model_qwen3::{
    config::Qwen3Config,
    container::Container,
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
        assert_eq!(session.len(), 23);
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
