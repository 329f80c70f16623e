//! NVIDIA's runtime compiler and its headers: whether they are there, whether they work, and of which CUDA they are.

use crate::device_failure::quietly;
use cudarc::nvrtc::{CompileOptions, compile_ptx, compile_ptx_with_opts};

/// The oldest CUDA whose compiler and headers the kernels were tried with.
const OLDEST: u32 = 13;

/// What installs both.
pub const INSTALL: &str = "only an NVIDIA card needs it; install the CUDA 13 toolkit, or: pip install --target cuda \
                       'nvidia-cuda-nvrtc==13.*' 'nvidia-cuda-runtime==13.*' 'nvidia-cuda-crt==13.*' \
                       'nvidia-cuda-cccl==13.*', then set CUDA_PATH and LD_LIBRARY_PATH as doc/guide/first-run.md says";

/// What was found of one of them, or else what is wrong.
pub type Found = Result<String, String>;

/// What is wrong with either of them, if a card could not compile a kernel.
pub fn missing() -> Option<String> {
    compiler().err().or_else(|| headers().err())
}

/// The library, by what it makes of a kernel.
pub fn compiler() -> Found {
    match quietly(|| compile_ptx("extern \"C\" __global__ void f() {}").map_err(|e| e.to_string())) {
        Some(Ok(ptx)) => judged(release(&ptx.to_src()), "it compiles"),
        Some(Err(error)) => Err(error),
        None => Err("the library libnvrtc is not found".into()),
    }
}

/// The headers that kernels include, where CubeCL looks for them.
pub fn headers() -> Found {
    let Some(folder) = quietly(cubecl::cuda::install::include_path) else {
        return Err("no CUDA headers are found".into());
    };
    let shown = folder.display().to_string();
    let compile = || {
        let options = CompileOptions { include_paths: vec![shown.clone()], ..CompileOptions::default() };
        let text = "#include <cuda_bf16.h>\nextern \"C\" __global__ void f(__nv_bfloat16 *x) { x[0] = x[1]; }";
        compile_ptx_with_opts(text, options).is_ok()
    };
    match quietly(compile) {
        Some(true) => {
            let version = std::fs::read_to_string(folder.join("cuda.h")).ok().and_then(|text| defined(&text));
            judged(version, &shown)
        }
        _ => Err(format!("cuda_bf16.h does not compile in {shown}")),
    }
}

/// What works is good, unless it is known to be too old.
fn judged(version: Option<(u32, u32)>, found: &str) -> Found {
    match version {
        Some((major, minor)) if major < OLDEST => {
            Err(format!("{found} · CUDA {major}.{minor}, which is too old: the kernels need CUDA {OLDEST}"))
        }
        Some((major, minor)) => Ok(format!("{found} · CUDA {major}.{minor}")),
        None => Ok(found.to_owned()),
    }
}

/// The release that PTX names in a comment: `// Cuda compilation tools, release 13.0, V13.0.88`.
fn release(ptx: &str) -> Option<(u32, u32)> {
    let (_, rest) = ptx.split_once("Cuda compilation tools, release ")?;
    let (major, rest) = rest.split_once('.')?;
    let minor = rest.split(|c: char| !c.is_ascii_digit()).next()?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// The version that `cuda.h` defines: `#define CUDA_VERSION 13000`.
fn defined(header: &str) -> Option<(u32, u32)> {
    let (_, rest) = header.split_once("#define CUDA_VERSION ")?;
    let version: u32 = rest.split_whitespace().next()?.parse().ok()?;
    Some((version / 1000, version % 1000 / 10))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_compiler_or_header_is_missing() {
        let ptx =
            |release: &str| format!("//\n// Cuda compilation tools, release {release}\n// Based on NVVM 20.0.0\n//\n");
        for (version, good) in [
            (release(&ptx("13.0, V13.0.88")), true),
            (release(&ptx("13.5, V13.5.21")), true),
            (release(&ptx("12.9, V12.9.86")), false),
            (defined("\n#define CUDA_VERSION 13020\n"), true),
            (defined("#define CUDA_VERSION 12040 \n"), false),
        ] {
            assert!(version.is_some());
            assert_eq!(judged(version, "it compiles").is_ok(), good, "{version:?}");
        }
        assert_eq!((release(&ptx("13.5, V13")), defined("#define CUDA_VERSION 12040")), (Some((13, 5)), Some((12, 4))));
        assert_eq!((release("// .version 8.0"), defined("")), (None, None));
        assert!(judged(None, "it compiles").is_ok(), "what works is not refused for saying no version");
    }
}
