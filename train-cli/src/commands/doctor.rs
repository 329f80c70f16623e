//! `doctor`: checks whether this machine has what the program needs, and names the command that installs what is missing. A short test on
//! each GPU compares a quantization and a matrix product with the CPU's code.

use crate::{
    CliError,
    args::DoctorArgs,
    device::{self, Job},
    kernel_cache,
    memory::{free, free::Disk, host},
    report,
    settings::DeviceChoice,
};
use backend_nvfp4::{
    BlockShape, DeviceServices, Nvfp4Kernels, Nvfp4Tensor, Precision, Product, QuantizeSpec, Rounding, Scaling, View,
    reference,
};
use burn::tensor::{DType, Tensor, TensorData, TensorPrimitive};
use cudarc::{
    driver::{CudaContext, sys::CUdevice_attribute},
    nvrtc::{CompileOptions, compile_ptx, compile_ptx_with_opts},
};
use model_qwen3::weights::to_host;
use serde::Serialize;
use std::path::Path;

/// Runs the command.
///
/// # Errors
/// None: a missing part is a result of this command, not an error.
pub fn run(args: &DoctorArgs) -> Result<(), CliError> {
    let mut checks = vec![program(), memory(), disk()];
    let driver = driver();
    let has_card = driver.good;
    checks.push(driver);
    if has_card {
        checks.extend([compiler(), headers(), cache()]);
        checks.push(tested("cuda", DeviceChoice::Cuda(0)));
    }
    checks.push(tested("vulkan", DeviceChoice::Vulkan));
    for check in &checks {
        report::result(if args.json {
            serde_json::to_string(check).expect("plain data serializes")
        } else {
            check.lines()
        });
    }
    Ok(())
}

/// One thing that was looked at.
#[derive(Debug, Serialize)]
struct Check {
    name: &'static str,
    good: bool,
    found: String,
    /// What to do, if it is not good.
    #[serde(skip_serializing_if = "Option::is_none")]
    remedy: Option<&'static str>,
}

impl Check {
    fn good(name: &'static str, found: impl Into<String>) -> Self {
        Self { name, good: true, found: found.into(), remedy: None }
    }

    fn missing(name: &'static str, found: impl Into<String>, remedy: &'static str) -> Self {
        Self { name, good: false, found: found.into(), remedy: Some(remedy) }
    }

    fn lines(&self) -> String {
        let mark = if self.good { "ok" } else { "–" };
        let first = format!("{mark:<3} {:<10} {}", self.name, self.found);
        self.remedy.map_or(first.clone(), |remedy| format!("{first}\n               {remedy}"))
    }
}

fn program() -> Check {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let text = format!(
        "train-cli {} · {} · {}",
        env!("CARGO_PKG_VERSION"),
        std::env::consts::ARCH,
        report::count(cores, "core")
    );
    Check::good("program", text)
}

fn memory() -> Check {
    let free = host::available().map_or("the system does not say how much is free".to_owned(), |free| {
        format!("{} are free on the host", report::gib(free))
    });
    Check::good("memory", free)
}

fn disk() -> Check {
    match Disk::of(Path::new(".")) {
        Ok(disk) => Check::good("disk", format!("{} are free in this folder", report::gib(disk.free))),
        Err(error) => Check::missing("disk", error.to_string(), "change to a folder that you can write to"),
    }
}

const DRIVER: &str = "without an NVIDIA card with driver 580 or newer, use --device cpu or --device vulkan";

/// The first NVIDIA card.
fn driver() -> Check {
    let ask = || -> Option<String> {
        let card = CudaContext::new(0).ok()?;
        let number = |attribute| card.attribute(attribute).unwrap_or(0);
        let major = number(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
        let minor = number(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
        let free = free::on_device(DeviceChoice::Cuda(0)).map_or("?".to_owned(), report::gib);
        Some(format!("{} · compute capability {major}.{minor} · {free} are free", card.name().ok()?))
    };
    match device::quietly(ask).flatten() {
        Some(card) => Check::good("card", card),
        None => Check::missing("card", "no NVIDIA card, or no driver that answers", DRIVER),
    }
}

const NVRTC: &str = "pip install --target cuda 'nvidia-cuda-nvrtc==13.*' 'nvidia-cuda-runtime==13.*' \
                     'nvidia-cuda-crt==13.*' 'nvidia-cuda-cccl==13.*', then set CUDA_PATH and LD_LIBRARY_PATH as \
                     doc/guide/first-run.md says";

/// NVIDIA's runtime compiler.
fn compiler() -> Check {
    match device::quietly(|| compile_ptx("extern \"C\" __global__ void f() {}").map_err(|e| e.to_string())) {
        Some(Ok(_)) => Check::good("NVRTC", "compiles"),
        Some(Err(error)) => Check::missing("NVRTC", error, NVRTC),
        None => Check::missing("NVRTC", "the library libnvrtc is not found", NVRTC),
    }
}

/// The headers that kernels include, where CubeCL looks for them.
fn headers() -> Check {
    let Some(folder) = device::quietly(cubecl::cuda::install::include_path) else {
        return Check::missing("headers", "no CUDA headers are found", NVRTC);
    };
    let shown = folder.display().to_string();
    let compile = || {
        let options = CompileOptions { include_paths: vec![shown.clone()], ..CompileOptions::default() };
        let text = "#include <cuda_bf16.h>\nextern \"C\" __global__ void f(__nv_bfloat16 *x) { x[0] = x[1]; }";
        compile_ptx_with_opts(text, options).is_ok()
    };
    match device::quietly(compile) {
        Some(true) => Check::good("headers", shown),
        _ => Check::missing("headers", format!("cuda_bf16.h does not compile in {shown}"), NVRTC),
    }
}

/// Where compiled kernels are kept.
fn cache() -> Check {
    match kernel_cache::directory() {
        Some(folder) => Check::good("kernels", format!("kept in {}", folder.display())),
        None => Check::good("kernels", "not kept: each process compiles them again"),
    }
}

/// Runs the test on a device.
fn tested(name: &'static str, choice: DeviceChoice) -> Check {
    let remedy = match choice {
        DeviceChoice::Vulkan => "a Vulkan driver is optional: apt-get install mesa-vulkan-drivers",
        _ => "please report this with the output of train-cli bench kernels",
    };
    match device::run(choice, None, Test) {
        Ok(Ok(tiers)) => Check::good(name, format!("agrees with the CPU · {tiers}")),
        Ok(Err(wrong)) => Check::missing(name, wrong, remedy),
        Err(error) => Check::missing(name, error.to_string(), remedy),
    }
}

/// Compares a quantization and a product with the CPU's code. The result names the device's tiers, or what is wrong.
struct Test;

/// Rows of both matrices, and their columns.
const SHAPE: [usize; 3] = [32, 64, 256];

impl Job for Test {
    type Output = Result<String, String>;

    fn run<B: Nvfp4Kernels + DeviceServices>(
        self,
        device: B::Device,
        precision: Precision,
    ) -> Result<Self::Output, CliError> {
        let [m, n, k] = SHAPE;
        let values = |len: usize, seed: f32| -> Vec<f32> { (0..len).map(|i| (i as f32 * 0.37 + seed).sin()).collect() };
        let (x, w) = (values(m * k, 0.0), values(n * k, 1.0));
        let tensor = |values: &[f32], dims: [usize; 2], dtype| {
            Tensor::<B, 2>::from_data(TensorData::new(values.to_vec(), dims), (&device, dtype))
        };
        let spec = QuantizeSpec { scaling: Scaling::Two, block: BlockShape::Row, rounding: Rounding::Nearest };
        let packed = Nvfp4Tensor::quantize(tensor(&w, [n, k], DType::F32), spec);
        let expected = reference::quantize(&w, View::row_major(n, k), spec);
        let failed = |e: backend_nvfp4::Nvfp4Error| CliError::DeviceFailed(e.to_string());
        if packed.to_packed().map_err(failed)? != expected {
            return Ok(Err("quantizes to other bytes than the CPU".into()));
        }
        let x = tensor(&x, [m, k], precision.dtype());
        let left = to_host(x.clone())?;
        let product = B::nvfp4_matmul(x.into_primitive().tensor(), &packed.primitive(), Product::Nt, DType::F32);
        let product = to_host(Tensor::<B, 2>::from_primitive(TensorPrimitive::Float(product)))?;
        let right = reference::dequantize(&expected, n, k);
        for (i, y) in product.iter().enumerate() {
            let (row, column) = (&left[i / n * k..][..k], &right[i % n * k..][..k]);
            let terms = || row.iter().zip(column).map(|(a, b)| f64::from(*a) * f64::from(*b));
            let (sum, size) = (terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>());
            if (f64::from(*y) - sum).abs() > 1e-5 * size {
                return Ok(Err(format!("multiplies wrongly: {y} instead of {sum}")));
            }
        }
        Ok(Ok(B::tiers(&device).join(" · ")))
    }
}
