//! Where golden files are, which GPU the kernel tests run on, random inputs.

pub(crate) mod emulator;
pub(crate) mod files;

use burn::tensor::{DType, Int, Tensor, TensorData};
use burn_cubecl::CubeBackend;
use cubecl::{cuda::CudaRuntime, wgpu::WgpuRuntime};
use safetensors::SafeTensors;
use std::{
    path::{Path, PathBuf},
    sync::OnceLock,
};

pub(crate) type Cpu = burn::backend::NdArray;
pub(crate) type Cube<R> = CubeBackend<R, f32, i32, u8>;

/// A file under tests/golden, also when the test binary runs from a copy of the repository.
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
        (false, _) if std::env::var_os("REQUIRE_GPU").is_some() => {
            panic!("no GPU adapter although REQUIRE_GPU is set: install mesa-vulkan-drivers")
        }
        (false, _) => Gpu::Missing,
    }
}

/// Runs `f::<Runtime>()` on the GPU under test, or says that it was skipped.
macro_rules! on_gpu {
    ($f:ident) => {
        match crate::support::gpu() {
            crate::support::Gpu::Vulkan => $f::<cubecl::wgpu::WgpuRuntime>(),
            crate::support::Gpu::Cuda => $f::<cubecl::cuda::CudaRuntime>(),
            crate::support::Gpu::Missing => crate::support::skipped(),
        }
    };
}
pub(crate) use on_gpu;

const _: Option<CudaRuntime> = None;

/// Says that a test did not run. Written past the test runner, which keeps what passing tests print.
pub(crate) fn skipped() {
    skipped_for("no Vulkan adapter (apt-get install mesa-vulkan-drivers)");
}

pub(crate) fn skipped_for(reason: &str) {
    use std::io::Write;
    let name = std::thread::current().name().unwrap_or_default().to_owned();
    let text = format!("SKIPPED {name}: {reason}\n");
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

pub(crate) fn matrix<B: burn::tensor::backend::Backend>(
    values: &[f32],
    rows: usize,
    cols: usize,
    device: &B::Device,
) -> Tensor<B, 2> {
    Tensor::from_data(TensorData::new(values.to_vec(), [rows, cols]), (device, DType::F32))
}

pub(crate) fn words<B: burn::tensor::backend::Backend>(values: Vec<u32>, device: &B::Device) -> Tensor<B, 1, Int> {
    let len = values.len();
    Tensor::from_data(TensorData::new(values, [len]), (device, DType::U32))
}

pub(crate) fn host<B: burn::tensor::backend::Backend, const D: usize>(x: Tensor<B, D>) -> Vec<f32> {
    x.into_data().iter::<f32>().collect()
}

/// `‖a - b‖ / ‖b‖`.
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
