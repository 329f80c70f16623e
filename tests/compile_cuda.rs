//! Every CUDA kernel compiles for GPUs that the machine does not have: sm_80 (A100), sm_90a (H100, H200), sm_121a (DGX
//! Spark). NVRTC needs no GPU. `NVRTC_HOME` names its folder (`lib`, `include`), which `.ci/run` fetches.
//!
//! A large kernel takes NVRTC 15 s, and most texts are the same for the three architectures. So one text of each kernel
//! is compiled for all of them, and every other text for one of them in turn.

use crate::support::skipped_for;
use cubecl::{
    Runtime,
    ir::{ElemType, FloatKind, StorageType},
};
use cudarc::nvrtc::safe::{CompileOptions, compile_ptx_with_opts};
use kernels_cubecl::cuda_source::{Launch, SourceDevice, SourceRuntime};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::atomic::{AtomicUsize, Ordering},
};

const ARCHITECTURES: [(u32, &str); 3] = [(80, "sm_80"), (90, "sm_90a"), (121, "sm_121a")];

#[test]
fn every_kernel_compiles_for_three_architectures() {
    let Some(home) = std::env::var_os("NVRTC_HOME") else {
        assert!(std::env::var_os("REQUIRE_NVRTC").is_none(), "REQUIRE_NVRTC is set and NVRTC_HOME is not");
        return skipped_for("NVRTC_HOME is not set");
    };
    let include = std::path::Path::new(&home).join("include").display().to_string();
    let jobs = jobs();
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

/// Every text with the architectures for which it is compiled.
fn jobs() -> Vec<(Launch, &'static str)> {
    let mut texts: BTreeMap<String, (Launch, Vec<&'static str>)> = BTreeMap::new();
    for (arch, name) in ARCHITECTURES {
        for launch in launches(arch) {
            texts.entry(launch.identity()).or_insert((launch, Vec::new())).1.push(name);
        }
    }
    let (mut entries, mut jobs) = (BTreeSet::new(), Vec::new());
    for (launch, architectures) in texts.into_values() {
        let turn = jobs.len() % architectures.len();
        let first = entries.insert(launch.entry.clone());
        let chosen = architectures.into_iter().enumerate().filter(|(i, _)| first || *i == turn);
        jobs.extend(chosen.map(|(_, arch)| (launch.clone(), arch)).collect::<Vec<_>>());
    }
    jobs
}

/// What `once` launches on a device, each text once or more.
fn launches(arch: u32) -> Vec<Launch> {
    let device = SourceDevice::recording(arch);
    let client = SourceRuntime::client(&device);
    kernels_cubecl::once::once(&client, StorageType::Scalar(ElemType::Float(FloatKind::BF16)), 17).unwrap();
    cubecl::future::block_on(client.sync()).unwrap();
    let all = device.take_launches();
    let limit = client.properties().hardware.max_shared_memory_size;
    for Launch { entry, shared, .. } in &all {
        assert!(*shared <= limit, "{entry} for sm_{arch} needs {shared} bytes of shared memory");
    }
    let entries: BTreeSet<&str> = all.iter().map(|launch| launch.entry.as_str()).collect();
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
    all
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
