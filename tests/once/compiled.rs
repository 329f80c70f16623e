//! Every CUDA kernel compiles for GPUs that the machine does not have: sm_80 (A100), sm_90a (H100, H200), sm_121a (DGX
//! Spark). NVRTC needs no GPU. `NVRTC_HOME` names its folder (`lib`, `include`), which `.ci/run` fetches.
//!
//! A kernel has up to fifty texts, one for each of its compile-time choices, and NVRTC takes 10 s for a large one. Texts
//! differ in what they compute with, and in lengths and offsets; only the former can be refused by NVRTC alone, because
//! the emulator (`tests/emulated`) compiles the rest of C++ too. So every CUDA intrinsic, type and instruction of every text is
//! compiled for each architecture once, and besides a few texts of each architecture that a seed draws. All texts are compiled
//! by hand:
//!
//!     cargo test --workspace --test promises -- --ignored every_text_compiles

use super::{Zeros, once};
use cubecl::{
    Runtime,
    ir::{ElemType, FloatKind, StorageType},
};
use cudarc::nvrtc::safe::{CompileOptions, compile_ptx_with_opts};
use kernels_cubecl::{
    any_cuda::{AnyCudaDevice, AnyCudaRuntime},
    cuda_source::{Launch, OnLaunch, SourceDevice},
};
use std::{
    collections::BTreeSet,
    fs,
    io::Write,
    path::{Path, PathBuf},
    sync::{
        OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
};

/// The kernels that are written in CUDA C++: those for Hopper, and one for every architecture.
const HOPPER: [&str; 4] =
    ["hopper_gemm", "hopper_attention_forward", "hopper_attention_keys", "hopper_attention_queries"];
const DECODER: &str = "decoder_block";
/// Kernels in whose place Hopper has its own.
const NOT_ON_HOPPER: [&str; 3] = ["forward_kernel", "backward_kv_kernel", "backward_q_kernel"];
const ARCHITECTURES: [(u32, &str); 3] = [(80, "sm_80"), (90, "sm_90a"), (121, "sm_121a")];

#[test]
fn every_kernel_compiles_for_three_architectures() {
    compile_all(chosen);
}

#[test]
#[ignore = "it takes a quarter of an hour; every_kernel_compiles_for_three_architectures compiles a choice"]
fn every_text_compiles_for_three_architectures() {
    compile_all(|launches| launches);
}

/// Compiles what `choose` takes from the texts of each architecture.
fn compile_all(choose: fn(Vec<Launch>) -> Vec<Launch>) {
    let Some(home) = std::env::var_os("NVRTC_HOME") else {
        let required = ["REQUIRE_NVRTC", "REQUIRE_GPU"].into_iter().find(|name| std::env::var_os(name).is_some());
        assert_eq!(required, None, "NVRTC_HOME is not set, although this is");
        // The test runner hides what passing tests print, so the line is written past it; `.ci/run` repeats it at its end.
        let _ =
            std::io::stderr().write_all(b"SKIPPED: the compile check of every CUDA kernel: NVRTC_HOME is not set\n");
        return;
    };
    let include = std::path::Path::new(&home).join("include").display().to_string();
    let jobs: Vec<(Launch, &str)> = ARCHITECTURES
        .iter()
        .flat_map(|(arch, name)| choose(texts(*arch)).into_iter().map(move |l| (l, *name)))
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

/// Texts of each architecture that are compiled besides, and the seed that draws them. Another seed draws others.
const DRAWN: usize = 8;
const SEED: u64 = 14;

/// The shortest text of each kernel, texts that together hold everything that any text computes with, and a draw of the others.
fn chosen(mut launches: Vec<Launch>) -> Vec<Launch> {
    launches.sort_by_key(|launch| launch.text.len());
    let (mut entries, mut seen) = (BTreeSet::new(), BTreeSet::new());
    let (mut chosen, mut others): (Vec<Launch>, Vec<Launch>) = launches.into_iter().partition(|launch| {
        let names = kernels().iter().map(String::as_str).chain(HOPPER).chain([DECODER]);
        let name = names.filter(|name| launch.entry.starts_with(*name)).max_by_key(|name| name.len());
        let kernel = entries.insert(name);
        let instructions = instructions(&launch.text);
        let new = !instructions.is_subset(&seen);
        seen.extend(instructions);
        kernel || new
    });
    let mut state = SEED;
    for _ in 0..DRAWN.min(others.len()) {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        chosen.push(others.swap_remove((state >> 33) as usize % others.len()));
    }
    chosen
}

/// What a text computes with: CUDA's intrinsics and types (`__name`, `cuda::name`), and the instructions of inline assembly.
fn instructions(text: &str) -> BTreeSet<String> {
    let names = text.split(|c: char| !(c.is_alphanumeric() || "_.:".contains(c)));
    let cudas = |name: &&str| {
        name.starts_with("__")
            || name.starts_with("cuda::")
            || name.contains(".sync.")
            || name.starts_with("cp.")
            || name.starts_with("mbarrier")
    };
    // Vectors are named by their type and length.
    names.filter(cudas).map(|name| name.trim_end_matches(|c: char| c == '_' || c.is_ascii_digit()).to_owned()).collect()
}

/// What `once` launches on a device in bf16 and in f16, each kernel once.
fn texts(arch: u32) -> Vec<Launch> {
    let mut seen = BTreeSet::new();
    let launches = [FloatKind::BF16, FloatKind::F16].into_iter().flat_map(|kind| launches(arch, kind));
    launches.filter(|launch| seen.insert(launch.key)).collect()
}

/// What `once` launches on a device for one type, which must be every kernel.
fn launches(arch: u32, kind: FloatKind) -> Vec<Launch> {
    let device = SourceDevice::new(arch, OnLaunch::Record);
    let source = AnyCudaDevice::Source(device.clone());
    let client = AnyCudaRuntime::client(&source);
    let dtype = StorageType::Scalar(ElemType::Float(kind));
    once(&Zeros { client: &client, device: &source, dtype }, 17).unwrap();
    cubecl::future::block_on(client.sync()).unwrap();
    let all = device.take_launches();
    device.give_back();
    let limit = client.properties().hardware.max_shared_memory_size;
    for Launch { entry, shared, .. } in &all {
        assert!(*shared <= limit, "{entry} for sm_{arch} needs {shared} bytes of shared memory");
    }
    for kernel in kernels() {
        let launched = all.iter().any(|launch| launch.entry.starts_with(kernel));
        let expected = match kernel.as_str() {
            "block_scaled_kernel" => arch == 121,
            kernel => arch != 90 || !NOT_ON_HOPPER.contains(&kernel),
        };
        assert_eq!(launched, expected, "whether `once` launches {kernel} on sm_{arch} for {kind:?}");
    }
    let written = HOPPER.map(|name| (name, arch == 90)).into_iter().chain([(DECODER, kind == FloatKind::BF16)]);
    for (written, expected) in written {
        let launched = all.iter().any(|launch| launch.entry == written);
        assert_eq!(launched, expected, "whether `once` launches {written} on sm_{arch} for {kind:?}");
    }
    all
}

/// The kernels in the sources, except those that only measure.
fn kernels() -> &'static [String] {
    static NAMES: OnceLock<Vec<String>> = OnceLock::new();
    NAMES.get_or_init(|| {
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels-cubecl/src");
        let measured = sources.join("bench");
        let files = rust_files(&sources).into_iter().filter(|file| !file.starts_with(&measured));
        let names: Vec<String> = files.flat_map(|file| kernels_in(&fs::read_to_string(file).unwrap())).collect();
        assert!(names.len() > 30, "{names:?}");
        names
    })
}

/// The names of the functions of a source that CubeCL compiles to kernels.
fn kernels_in(source: &str) -> Vec<String> {
    let attributes = source.split("#[cube(launch_unchecked").skip(1);
    attributes.filter_map(|text| Some(text.split_once("fn ")?.1.split(['<', '(']).next()?.to_owned())).collect()
}

fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { rust_files(&path) } else { vec![path] }).collect()
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
