//! One shot, chunks of 5 and token by token give the same logits: the mask of a chunk on a non-empty
//! cache is right.

use crate::support::{Cpu, Cube, files::F32, golden, on_gpu};
use backend_nvfp4::Nvfp4Kernels;
use burn_cubecl::CubeRuntime;
use model_qwen3::{
    config::Qwen3Config,
    container::Container,
    generate::prefill,
    kv_cache::KvCache,
    model::{Qwen3, ids_tensor},
    weights::{self, Purpose, to_host},
};

#[test]
fn chunked_prefill_on_the_cpu() {
    same_logits::<Cpu>(Default::default());
}

#[test]
fn chunked_prefill_on_the_gpu() {
    on_gpu!(on_cube);
}

fn on_cube<R: CubeRuntime>() {
    same_logits::<Cube<R>>(R::Device::default());
}

fn same_logits<B: Nvfp4Kernels>(device: B::Device) {
    for fixture in ["tiny-tied", "tiny-untied"] {
        let folder = golden(&format!("hf-qwen3/{fixture}"));
        let config = Qwen3Config::from_file(&folder.join("config.json")).unwrap();
        let checkpoint = Container::open(&folder).unwrap();
        let model: Qwen3<B> = weights::load(&checkpoint, &config, F32, Purpose::Infer, &device).unwrap();
        let ids: Vec<u32> = (0..23).map(|i| (i * 37 + 5) % 300).collect();
        let last = |chunk| {
            let mut cache = KvCache::new(&config, 32, F32.precision.dtype(), &device);
            let logits = prefill(&model, &ids, &mut cache, chunk).unwrap();
            assert_eq!(cache.len(), 23);
            logits
        };
        let uncached = model.forward(ids_tensor(std::slice::from_ref(&ids), &config, &device).unwrap(), |_| {});
        let uncached = uncached.narrow(0, 22, 1);
        let whole = to_host(model.logits(uncached)).unwrap();
        let largest = whole.iter().fold(0.0f32, |a, x| a.max(x.abs()));
        for chunk in [23, 5, 1] {
            for (a, b) in last(chunk).iter().zip(&whole) {
                assert!((a - b).abs() <= 1e-5 * largest, "{fixture}, chunks of {chunk}: {a} and {b}");
            }
        }
    }
}
