//! A CubeCL runtime without a GPU. A launch becomes CUDA C++ text together with its grid, buffers and scalars, which the
//! device either records or hands to an executor. Tests compile the recorded text for GPUs that the machine does not
//! have, and run it on the CPU.

mod properties;
mod server;

use cubecl::{
    Runtime,
    client::ComputeClient,
    device::DeviceId,
    prelude::ArrayArg,
    server::Handle,
    zspace::{Shape, Strides},
};
use cubecl_common::device::Device;
use cubecl_cpp::{
    cuda::{CudaDialect, mma::CudaWmmaCompiler},
    shared::CppCompiler,
};
use server::SourceServer;
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard},
};

type Compiler = CppCompiler<CudaDialect<CudaWmmaCompiler>>;

/// One launch: the text of its kernel, and the arguments that the CUDA runtime would pass to it.
#[derive(Debug, Clone)]
pub struct Launch {
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

/// Runs a launch on its buffers. The error text says what the kernel did wrong.
pub type Executor = Arc<dyn Fn(&Launch, &mut [Vec<u8>]) -> Result<(), String> + Send + Sync>;

/// A device that is known by its compute capability only. The number is its place in the list of devices.
#[derive(Debug, Clone, Default)]
pub struct SourceDevice(u16);

/// What a device is, and the launches that it has recorded.
#[derive(Default)]
struct Entry {
    arch: u32,
    executor: Option<Executor>,
    launches: Vec<Launch>,
}

static DEVICES: Mutex<Vec<Entry>> = Mutex::new(Vec::new());

fn devices() -> MutexGuard<'static, Vec<Entry>> {
    DEVICES.lock().expect("nothing panics while it holds the list of devices")
}

impl SourceDevice {
    /// A new device of compute capability `arch` (90 is 9.0) that records launches and computes nothing.
    pub fn recording(arch: u32) -> Self {
        Self::add(Entry { arch, ..Entry::default() })
    }

    /// A new device of compute capability `arch` that runs each launch by `executor`. An error of the executor is the
    /// error of the next read or synchronization.
    pub fn running(arch: u32, executor: Executor) -> Self {
        Self::add(Entry { arch, executor: Some(executor), ..Entry::default() })
    }

    /// Returns the launches that were recorded since the last call. Synchronize the client first.
    pub fn take_launches(&self) -> Vec<Launch> {
        devices().get_mut(usize::from(self.0)).map(|entry| std::mem::take(&mut entry.launches)).unwrap_or_default()
    }

    fn add(entry: Entry) -> Self {
        let mut devices = devices();
        devices.push(entry);
        Self(u16::try_from(devices.len() - 1).expect("fewer than 65,536 devices"))
    }
}

impl Device for SourceDevice {
    fn from_id(id: DeviceId) -> Self {
        Self(id.index_id)
    }

    fn to_id(&self) -> DeviceId {
        DeviceId { type_id: 0, index_id: self.0 }
    }
}

/// The whole buffer as an argument of values of `size` bytes each.
pub fn array(handle: &Handle, size: usize) -> ArrayArg<SourceRuntime> {
    // SAFETY: the length is the buffer's own.
    unsafe { ArrayArg::from_raw_parts(handle.clone(), handle.size_in_used() as usize / size) }
}

/// What the texts of one kernel have in common. CubeCL numbers temporaries through the whole process, and writes types in
/// an order that differs between processes.
fn identity(text: &str) -> String {
    const NAME: &str = "_tmp_";
    let (mut types, mut others, mut in_type) = (Vec::new(), String::new(), false);
    for line in text.lines() {
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

/// The runtime of these devices.
#[derive(Debug, Clone)]
pub struct SourceRuntime;

impl Runtime for SourceRuntime {
    type Compiler = Compiler;
    type Server = SourceServer;
    type Device = SourceDevice;

    fn client(device: &SourceDevice) -> ComputeClient<Self> {
        ComputeClient::load(device)
    }

    fn name(_: &ComputeClient<Self>) -> &'static str {
        "cuda source"
    }

    fn require_array_lengths() -> bool {
        true
    }

    fn max_cube_count() -> (u32, u32, u32) {
        (i32::MAX as u32, 65535, 65535)
    }

    fn can_read_tensor(_: &Shape, _: &Strides) -> bool {
        true
    }

    fn target_properties() -> cubecl::ir::TargetProperties {
        cubecl::cuda::CudaRuntime::target_properties()
    }

    fn enumerate_devices(_: u16, _: &()) -> Vec<DeviceId> {
        Vec::new()
    }
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
    }
}
