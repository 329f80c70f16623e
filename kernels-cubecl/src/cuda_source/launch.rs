//! What a launch consists of, and the list of devices that record or execute launches.

use cubecl::ir::DeviceProperties;
use cubecl_common::hash::StableHash;
use cubecl_cpp::{
    cuda::{CudaDialect, mma::CudaWmmaCompiler},
    shared::CppCompiler,
};
use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard},
};

pub(crate) type Compiler = CppCompiler<CudaDialect<CudaWmmaCompiler>>;

/// One launch: the text of its kernel, and the arguments that the CUDA runtime would pass to it.
#[derive(Debug, Clone)]
pub struct Launch {
    /// The key under which CubeCL keeps the compiled kernel.
    pub key: StableHash,
    /// Name of the kernel's entry point.
    pub entry: String,
    /// CUDA C++.
    pub text: String,
    /// Bytes of shared memory.
    pub shared: usize,
    /// Cubes in each dimension (CUDA's grid).
    pub cubes: [u32; 3],
    /// Units of a cube in each dimension (CUDA's block).
    pub units: [u32; 3],
    /// Tensor maps, the first arguments. The first buffer arguments are the buffers behind them.
    pub maps: Vec<TensorMap>,
    /// The buffer that each buffer argument points to. Arguments that are the same memory have the same number.
    pub arguments: Vec<usize>,
    /// The constant `info` argument: scalars and static metadata, then the dynamic metadata.
    pub info: Vec<u64>,
    /// Words of `info` before the dynamic metadata, which is passed as one more buffer where there is any.
    pub static_info: usize,
}

impl Launch {
    /// The kernel's text without what differs from one compilation of the kernel to the next.
    pub fn identity(&self) -> String {
        identity(&self.text)
    }
}

/// How the copy engine finds boxes of a row-major matrix in a buffer. Boxes in shared memory have the 128-byte swizzle.
#[derive(Debug, Clone, Copy)]
pub struct TensorMap {
    /// Rows and columns of the matrix.
    pub dims: [usize; 2],
    /// Rows and columns of a box.
    pub tile: [usize; 2],
    /// Bytes of a number.
    pub size: usize,
}

/// Runs a launch on its buffers. The error text says what the kernel did wrong.
pub type Executor = Arc<dyn Fn(&Launch, &mut [Vec<u8>]) -> Result<(), String> + Send + Sync>;

/// What a device is, and the launches that it has recorded.
#[derive(Default)]
pub(super) struct Entry {
    pub(super) arch: u32,
    pub(super) executor: Option<Executor>,
    pub(super) launches: Vec<Launch>,
    /// What a device knows that stands for another.
    pub(super) rehearsed: Option<Rehearsed>,
    /// The first error since the last synchronization.
    pub(super) error: Option<String>,
    /// Whether the device was given back, so that the next one of its architecture may take its place.
    pub(super) idle: bool,
}

/// Says of a kernel's key whether the kernel is compiled.
pub type IsCompiled = Box<dyn Fn(StableHash) -> bool + Send>;

/// What a device knows that stands for another: the properties of the other, which kernels are compiled for it, and the keys of
/// those that were launched.
pub(super) struct Rehearsed {
    pub(super) properties: DeviceProperties,
    pub(super) is_compiled: IsCompiled,
    pub(super) seen: HashSet<StableHash>,
}

static DEVICES: Mutex<Vec<Entry>> = Mutex::new(Vec::new());

pub(super) fn devices() -> MutexGuard<'static, Vec<Entry>> {
    DEVICES.lock().expect("nothing panics while it holds the list of devices")
}

/// What the texts of one kernel have in common. CubeCL numbers temporaries through the whole process. It writes types,
/// declarations of variables, and arrays in shared memory with their offsets, in an order that differs from compilation to
/// compilation.
fn identity(text: &str) -> String {
    const NAME: &str = "_tmp_";
    let (mut types, mut others, mut in_type) = (Vec::new(), String::new(), false);
    for line in text.lines() {
        if line.starts_with("// Shared ") {
            continue;
        }
        if let Some((array, _offset)) = line.split_once("dynamic_shared_mem[").filter(|_| line.contains("_cast<")) {
            types.push(array.to_owned());
            continue;
        }
        if is_declaration(line) {
            types.push(line.to_owned());
            continue;
        }
        if line.starts_with("struct __align__") {
            types.push(String::new());
            in_type = true;
        }
        match types.last_mut() {
            Some(last) if in_type => last.push_str(line),
            _ => others.extend([line, "\n"]),
        }
        in_type &= line != "};";
    }
    types.sort_unstable();
    let mut parts = others.split(NAME);
    let mut out = types.concat() + parts.next().unwrap_or_default();
    let mut numbers = HashMap::new();
    for part in parts {
        let digits = part.bytes().take_while(u8::is_ascii_digit).count();
        let next = numbers.len();
        let number = *numbers.entry(&part[..digits]).or_insert(next);
        out.push_str(&format!("{NAME}{number}{}", &part[digits..]));
    }
    out
}

/// Whether a line declares a variable that is assigned to later: `float l_mut_7;`.
fn is_declaration(line: &str) -> bool {
    let name = line.split_once(' ').and_then(|(_type, rest)| rest.strip_prefix("l_mut_")?.strip_suffix(';'));
    name.is_some_and(|number| number.bytes().all(|byte| byte.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::identity;

    #[test]
    fn texts_of_one_kernel_are_the_same() {
        let types = ["struct __align__(4) a {\n  x;\n};\n", "struct __align__(8) b {\n};\n"];
        let text = |[one, other]: [&str; 2], n: usize| format!("{one}{other}f(_tmp_{n}, _tmp_{});\n_tmp_{n};\n", n + 5);
        assert_eq!(identity(&text(types, 3)), identity(&text([types[1], types[0]], 90)));
        assert_ne!(identity("f(_tmp_1, _tmp_2);"), identity("f(_tmp_1, _tmp_1);"));
        let array = |name: &str, at: usize| {
            format!("// Shared array size: 2, 4 bytes\nT *{name} = reinterpret_cast<T*>(&dynamic_shared_mem[{at}]);\n")
        };
        assert_eq!(identity(&(array("a", 0) + &array("b", 4))), identity(&(array("b", 0) + &array("a", 8))));
        assert_ne!(identity(&array("a", 0)), identity(&array("b", 0)));
        let (one, other) = ("float l_mut_7;\n", "uint32 l_mut_12;\n");
        let ended = |text: String| identity(&(text + "l_mut_7 = float(1.0);\n"));
        assert_eq!(ended(one.to_owned() + other), ended(other.to_owned() + one));
        assert_ne!(ended(one.to_owned() + other), ended(one.to_owned()));
    }
}
