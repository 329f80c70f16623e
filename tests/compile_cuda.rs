//! Every CUDA kernel compiles for cards that are not here: sm_80 (A100), sm_90a (H100, H200), sm_121a (DGX Spark).
//! NVRTC needs no GPU. `NVRTC_HOME` names its folder (`lib`, `include`); `.ci/run` fetches it.

use crate::support::skipped_for;
use cubecl::{
    Runtime,
    ir::{ElemType, FloatKind, StorageType},
};
use cudarc::nvrtc::safe::{CompileOptions, compile_ptx_with_opts};
use kernels_cubecl::cuda_source::{Source, SourceDevice, SourceRuntime, take_sources};
use std::collections::BTreeSet;

#[test]
fn every_kernel_compiles_for_three_architectures() {
    let Some(home) = std::env::var_os("NVRTC_HOME") else {
        assert!(std::env::var_os("REQUIRE_NVRTC").is_none(), "REQUIRE_NVRTC is set and NVRTC_HOME is not");
        return skipped_for("NVRTC_HOME is not set");
    };
    let include = std::path::Path::new(&home).join("include").display().to_string();
    // One after another: a launch leaves its text in one place. The compilations then share the cores.
    let jobs = [(80, "sm_80"), (90, "sm_90a"), (121, "sm_121a")].map(|(arch, name)| (name, sources(arch)));
    std::thread::scope(|scope| {
        for (arch, sources) in &jobs {
            let include = &include;
            scope.spawn(move || sources.iter().for_each(|source| compile(source, arch, include)));
        }
    });
}

/// One variant of each kernel, of AdamW's every one: its forms have names in common. What needs no tensor cores is the
/// same text for all: sm_90 says enough of it.
fn sources(arch: u32) -> Vec<Source> {
    let client = SourceRuntime::client(&SourceDevice(arch));
    kernels_cubecl::once::once(&client, StorageType::Scalar(ElemType::Float(FloatKind::BF16)), 17).unwrap();
    cubecl::future::block_on(client.sync()).unwrap();
    let mut entries = BTreeSet::new();
    let mut all = take_sources();
    let limit = if arch == 90 { 227 << 10 } else { 99 << 10 };
    for Source { entry, shared, .. } in &all {
        assert!(*shared <= limit, "{entry} for sm_{arch} wants {shared} bytes of shared memory");
    }
    let mut texts = BTreeSet::new();
    all.retain(|s| entries.insert(s.entry.clone()) | (s.entry.starts_with("adamw") && texts.insert(s.text.clone())));
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
    all.retain(|s| arch == 90 || s.text.contains("mma.sync"));
    all
}

fn compile(source: &Source, arch: &'static str, include: &str) {
    let options = CompileOptions {
        arch: Some(arch),
        include_paths: vec![include.to_owned(), format!("{include}/cccl")],
        ..Default::default()
    };
    let ptx = compile_ptx_with_opts(&source.text, options);
    let ptx = ptx.unwrap_or_else(|e| panic!("{} for {arch}: {e:?}", source.entry)).to_src();
    if source.entry.starts_with("block_scaled") {
        let instruction =
            "mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3";
        assert_eq!(ptx.matches(instruction).count(), 16, "{}: products of NVFP4 fragments", source.entry);
    }
}
