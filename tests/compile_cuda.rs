//! Every CUDA kernel compiles for GPUs that the machine does not have: sm_80 (A100), sm_90a (H100, H200), sm_121a (DGX
//! Spark), in every variant that the plans of `emulated` choose. NVRTC needs no GPU. `NVRTC_HOME` names its folder
//! (`lib`, `include`), which `.ci/run` fetches.

use crate::{
    emulated::{self, gpu::Gpu},
    support::skipped_for,
};
use cubecl::ir::{ElemType, FloatKind, StorageType};
use cudarc::nvrtc::safe::{CompileOptions, compile_ptx_with_opts};
use kernels_cubecl::cuda_source::Launch;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::atomic::{AtomicUsize, Ordering},
};

#[test]
fn every_kernel_compiles_for_three_architectures() {
    let Some(home) = std::env::var_os("NVRTC_HOME") else {
        assert!(std::env::var_os("REQUIRE_NVRTC").is_none(), "REQUIRE_NVRTC is set and NVRTC_HOME is not");
        return skipped_for("NVRTC_HOME is not set");
    };
    let include = std::path::Path::new(&home).join("include").display().to_string();
    let jobs: Vec<(Launch, &'static str)> = [(80, "sm_80"), (90, "sm_90a"), (121, "sm_121a")]
        .into_iter()
        .flat_map(|(arch, name)| launches(arch).into_iter().map(move |launch| (launch, name)))
        .collect();
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(2, usize::from) {
            scope.spawn(|| {
                while let Some((launch, arch)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    compile(launch, arch, &include);
                }
            });
        }
    });
}

/// One launch of each text: every tensor-core kernel in every variant, and the other kernels as `once` launches them.
/// A kernel without tensor cores has one text for all architectures, so sm_90 stands for all.
fn launches(arch: u32) -> Vec<Launch> {
    let gpu = Gpu::recording(arch);
    kernels_cubecl::once::once(&gpu.client, StorageType::Scalar(ElemType::Float(FloatKind::BF16)), 17).unwrap();
    emulated::every(&gpu);
    cubecl::future::block_on(gpu.client.sync()).unwrap();
    let limit = gpu.client.properties().hardware.max_shared_memory_size;
    let mut texts = BTreeMap::new();
    for launch in gpu.device.take_launches() {
        let Launch { entry, shared, .. } = &launch;
        assert!(*shared <= limit, "{entry} for sm_{arch} needs {shared} bytes of shared memory");
        texts.insert(launch.identity(), launch);
    }
    let entries: BTreeSet<&str> = texts.values().map(|launch| launch.entry.as_str()).collect();
    let expected = [
        "gemm",
        "gemv",
        "column_sums",
        "forward",
        "backward_kv",
        "backward_q",
        "split",
        "quantize",
        "amax_rotated",
        "normal",
        "square_sum",
        "accumulate",
        "adamw_float",
        "adamw_quantized",
        "adamw_packed",
    ];
    for kernel in expected {
        assert!(entries.iter().any(|e| e.starts_with(kernel)), "no {kernel} kernel among {entries:?}");
    }
    assert_eq!(entries.iter().any(|e| e.starts_with("block_scaled")), arch == 121, "{entries:?}");
    texts.retain(|_, launch| arch == 90 || launch.text.contains("mma.sync"));
    texts.into_values().collect()
}

fn compile(launch: &Launch, arch: &'static str, include: &str) {
    let options = CompileOptions {
        arch: Some(arch),
        include_paths: vec![include.to_owned(), format!("{include}/cccl")],
        ..Default::default()
    };
    let ptx = compile_ptx_with_opts(&launch.text, options);
    let ptx = ptx.unwrap_or_else(|e| panic!("{} for {arch}: {e:?}", launch.entry)).to_src();
    if launch.entry.starts_with("block_scaled") {
        let instruction =
            "mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3";
        assert_eq!(ptx.matches(instruction).count(), 16, "{}: products of NVFP4 fragments", launch.entry);
    }
}
