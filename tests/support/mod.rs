//! What tests share: golden files, the GPU under test and what it lacks, random inputs, and tensors on the host.

pub(crate) mod emulator;
pub(crate) mod faulty_disk;
pub(crate) mod files;
pub(crate) mod http;
pub(crate) mod scripted;
pub(crate) mod spec;

use backend_nvfp4::{Nvfp4Parts, Recipe};
use burn::tensor::{DType, Int, Tensor, TensorData, backend::Backend};
use burn_cubecl::CubeBackend;
use cubecl::wgpu::WgpuRuntime;
use safetensors::SafeTensors;
use std::{
    any::TypeId,
    path::{Path, PathBuf},
    sync::{
        OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
};

/// Every recipe, the last with all its parts.
pub(crate) const RECIPES: [Recipe; 4] = [Recipe::Bf16, Recipe::W4, Recipe::W4a4, Recipe::Nvfp4(Nvfp4Parts::ALL)];

pub(crate) type Cpu = burn::backend::NdArray;
pub(crate) type Cube<R> = CubeBackend<R, f32, i32, u8>;

/// The path of a file under tests/golden, also when the test program runs from a copy of the repository.
pub(crate) fn golden(name: &str) -> PathBuf {
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden").join(name);
    if built.exists() { built } else { Path::new("tests/golden").join(name) }
}

pub(crate) fn golden_bytes(name: &str) -> Vec<u8> {
    let path = golden(name);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

pub(crate) fn floats(file: &SafeTensors<'_>, key: &str) -> Vec<f32> {
    let data = file.tensor(key).unwrap_or_else(|e| panic!("{key}: {e}")).data();
    data.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// The device that kernel tests run on: Vulkan unless `TEST_GPU=cuda` or `TEST_GPU=none`.
pub(crate) enum Gpu {
    Vulkan,
    Cuda,
    Missing,
}

pub(crate) fn gpu() -> Gpu {
    static FOUND: OnceLock<bool> = OnceLock::new();
    let wanted = std::env::var("TEST_GPU").unwrap_or_else(|_| "vulkan".into());
    let found = *FOUND.get_or_init(|| match wanted.as_str() {
        "none" => false,
        "cuda" => true,
        _ => std::panic::catch_unwind(|| <WgpuRuntime as cubecl::Runtime>::client(&Default::default())).is_ok(),
    });
    match (found, wanted.as_str()) {
        (true, "cuda") => Gpu::Cuda,
        (true, _) => Gpu::Vulkan,
        (false, _) => Gpu::Missing,
    }
}

/// Runs `f::<Runtime>()` on the GPU under test. Without a GPU the test is skipped, or fails if `REQUIRE_GPU` is set.
macro_rules! on_gpu {
    ($f:ident) => {
        match crate::support::gpu() {
            crate::support::Gpu::Vulkan => $f::<cubecl::wgpu::WgpuRuntime>(),
            crate::support::Gpu::Cuda => $f::<kernels_cubecl::any_cuda::AnyCudaRuntime>(),
            crate::support::Gpu::Missing => crate::support::skipped(),
        }
    };
}
pub(crate) use on_gpu;

/// What a GPU can lack. This alone excuses a test, or a part of one, from running where `REQUIRE_GPU` is set.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Feature {
    /// Matrix instructions on 16-bit values.
    TensorCores,
    /// Hopper's own matrix instructions.
    Hopper,
    /// Storage and arithmetic of this float type.
    Float(DType),
}

/// Whether a device computes in a float type. A GPU that does not is counted; the CPU computes in f32 by design.
pub(crate) fn supports<B: Backend>(device: &B::Device, dtype: DType) -> bool {
    let supported = B::supports_dtype(device, dtype);
    if !supported && TypeId::of::<B>() != TypeId::of::<Cpu>() {
        lacks(Feature::Float(dtype));
    }
    supported
}

/// Counts a test, or a part of one, whose feature the GPU lacks.
pub(crate) fn lacks(missing: Feature) {
    let device = if let Gpu::Cuda = gpu() { "CUDA" } else { "Vulkan" };
    let missing = match missing {
        Feature::TensorCores => "tensor cores".to_owned(),
        Feature::Hopper => "matrix instructions of Hopper".to_owned(),
        Feature::Float(dtype) => format!("{dtype:?} arithmetic"),
    };
    count_skip(&format!("the {device} device has no {missing}"));
}

/// Counts a test that needs a GPU where there is none. Fails if `REQUIRE_GPU` is set.
pub(crate) fn skipped() {
    skipped_for("no GPU adapter was found; install mesa-vulkan-drivers");
}

/// Counts a test that does not run for a reason other than a feature of the GPU. Fails if `REQUIRE_GPU` is set.
pub(crate) fn skipped_for(reason: &str) {
    assert!(std::env::var_os("REQUIRE_GPU").is_none(), "REQUIRE_GPU is set, but the test cannot run: {reason}");
    count_skip(reason);
}

/// Says on standard error which test does not run, why, and how many there were so far. The test runner hides what passing
/// tests print, so the line is written past it; `.ci/run` repeats these lines at its end.
fn count_skip(reason: &str) {
    use std::io::Write;
    static SKIPPED: AtomicUsize = AtomicUsize::new(0);
    let count = SKIPPED.fetch_add(1, Ordering::Relaxed) + 1;
    let name = std::thread::current().name().unwrap_or_default().to_owned();
    let text = format!("SKIPPED {count}: {name}: {reason}\n");
    let _ = std::io::stderr().write_all(text.as_bytes());
}

/// A small, seeded generator of test inputs.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0xD1B5_4A32_D192_ED03)
    }

    pub(crate) fn bits(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 32) as u32
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.bits() as usize % n
    }

    /// Uniform in (0, 1).
    pub(crate) fn uniform(&mut self) -> f32 {
        (self.bits() >> 8) as f32 / 16_777_216.0 + 2e-8
    }

    pub(crate) fn normal(&mut self) -> f32 {
        (-2.0 * self.uniform().ln()).sqrt() * (std::f32::consts::TAU * self.uniform()).cos()
    }

    pub(crate) fn normals(&mut self, len: usize, std: f32) -> Vec<f32> {
        (0..len).map(|_| self.normal() * std).collect()
    }
}

pub(crate) fn matrix<B: Backend>(values: &[f32], rows: usize, cols: usize, device: &B::Device) -> Tensor<B, 2> {
    Tensor::from_data(TensorData::new(values.to_vec(), [rows, cols]), (device, DType::F32))
}

pub(crate) fn words<B: Backend>(values: Vec<u32>, device: &B::Device) -> Tensor<B, 1, Int> {
    let len = values.len();
    Tensor::from_data(TensorData::new(values, [len]), (device, DType::U32))
}

pub(crate) fn host<B: Backend, const D: usize>(x: Tensor<B, D>) -> Vec<f32> {
    x.into_data().iter::<f32>().collect()
}

/// Codes and scales of the specification as the program holds them.
pub(crate) fn packed(q: &spec::Quantized) -> backend_nvfp4::Packed {
    backend_nvfp4::Packed { codes: q.words(), scales: q.scales.clone(), global: q.global }
}

/// The relative error `‖a - b‖ / ‖b‖`.
pub(crate) fn relative(a: &[f32], b: impl IntoIterator<Item = f64>) -> f64 {
    let (mut diff, mut norm) = (0.0, 0.0);
    let mut count = 0;
    for (x, y) in a.iter().zip(b) {
        diff += (f64::from(*x) - y).powi(2);
        norm += y * y;
        count += 1;
    }
    assert_eq!(count, a.len());
    (diff / norm.max(1e-300)).sqrt()
}
