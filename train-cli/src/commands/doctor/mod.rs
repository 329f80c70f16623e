//! `doctor`: checks whether this machine has what the program needs, and names the command that installs what is missing. A short
//! test on each device (`self_test.rs`) compares what its kernels compute with the reference, and new tokens with a prompt.

mod answers;
mod attention;
mod checked;
mod products;
mod self_test;

use crate::{
    CliError,
    args::DoctorArgs,
    device, device_failure, kernel_cache,
    memory::{free, free::Disk, host},
    nvrtc, report,
    settings::DeviceChoice,
};
use checked::Checked;
use cudarc::driver::{CudaContext, sys::CUdevice_attribute};
use futures_util::FutureExt;
use self_test::tested;
use std::path::Path;

/// Runs the command.
///
/// # Errors
/// None: a missing part is a result of this command, not an error.
pub fn run(args: &DoctorArgs) -> Result<(), CliError> {
    let mut checks = vec![program(), memory(), disk()];
    checks.extend(tested(DeviceChoice::Cpu));
    let cards = device_failure::quietly(|| CudaContext::device_count().unwrap_or(0)).unwrap_or(0).max(0) as usize;
    checks.extend(driver(cards > 0));
    checks.extend((0..cards).map(card));
    let tools = [tool("NVRTC", nvrtc::compiler()), tool("headers", nvrtc::headers())];
    // Without them every test on a card would fail for the same reason, which their lines name.
    let compiles = tools.iter().all(|tool| tool.good);
    checks.extend(tools);
    checks.push(cache(cards > 0));
    checks.extend((0..cards).filter(|_| compiles).flat_map(|index| tested(DeviceChoice::Cuda(index))));
    let adapters = adapters();
    let has_vulkan = adapters.good;
    checks.push(adapters);
    if has_vulkan {
        checks.extend(tested(DeviceChoice::Vulkan));
    }
    for check in &checks {
        report::result(if args.json {
            serde_json::to_string(check).expect("plain data serializes")
        } else {
            check.lines(report::width())
        });
    }
    Ok(())
}

fn tool(name: &str, found: nvrtc::Found) -> Checked {
    match found {
        Ok(found) => Checked::good(name, found),
        Err(wrong) => Checked::missing(name, wrong, nvrtc::INSTALL),
    }
}

fn program() -> Checked {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let text = format!(
        "train-cli {} · {} · {}",
        env!("CARGO_PKG_VERSION"),
        std::env::consts::ARCH,
        report::count(cores, "core")
    );
    Checked::good("program", text)
}

fn memory() -> Checked {
    let free = host::available().map_or("the system does not say how much is free".to_owned(), |free| {
        format!("{} are free on the host", report::size(free))
    });
    Checked::good("memory", free)
}

fn disk() -> Checked {
    match Disk::of(Path::new(".")) {
        Ok(disk) => Checked::good("disk", format!("{} are free in this folder", report::size(disk.free))),
        Err(error) => Checked::missing("disk", error.to_string(), "change to a folder that you can write to"),
    }
}

fn no_driver() -> String {
    format!("{}; without an NVIDIA card, use --device cpu or --device vulkan", install_driver())
}

fn install_driver() -> String {
    format!(
        "for an NVIDIA card, install driver {OLDEST} or newer: apt-get install nvidia-driver-{OLDEST} (Ubuntu; for \
         other systems see https://www.nvidia.com/drivers)"
    )
}

/// The version of NVIDIA's driver, as the kernel's module says. None if there is no card and no driver, which the line of the
/// cards says.
fn driver(has_card: bool) -> Option<Checked> {
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let module = read("/sys/module/nvidia/version").map(|text| text.trim().to_owned());
    // NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Tue ...
    let proc = || {
        let text = read("/proc/driver/nvidia/version")?;
        let numbers = |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
        text.lines().next()?.split_whitespace().find(numbers).map(str::to_owned)
    };
    let version = module.or_else(proc);
    match (version, has_card) {
        (Some(version), true) => {
            let major = version.split('.').next().and_then(|major| major.parse::<u32>().ok());
            match major {
                Some(major) if major < OLDEST => Some(Checked::missing("driver", version, install_driver())),
                _ => Some(Checked::good("driver", version)),
            }
        }
        (Some(version), false) => {
            Some(Checked::missing("card", format!("driver {version} shows no card"), no_driver()))
        }
        (None, true) => Some(Checked::good("driver", "it answers; the system does not say its version")),
        (None, false) => Some(Checked::missing("card", "no NVIDIA card, or no driver that answers", no_driver())),
    }
}

/// The oldest driver that is known to work.
const OLDEST: u32 = 580;

/// An NVIDIA card.
fn card(index: usize) -> Checked {
    let name = if index == 0 { "card".to_owned() } else { format!("card {index}") };
    let ask = || -> Option<String> {
        let card = CudaContext::new(index).ok()?;
        let number = |attribute| card.attribute(attribute).unwrap_or(0);
        let major = number(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
        let minor = number(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
        let free = free::on_device(DeviceChoice::Cuda(index)).map_or("?".to_owned(), report::size);
        Some(format!("{} · compute capability {major}.{minor} · {free} are free", card.name().ok()?))
    };
    match device_failure::quietly(ask).flatten() {
        Some(card) => Checked::good(name, card),
        None => Checked::missing(name, "it does not answer", no_driver()),
    }
}

/// The adapters that Vulkan's drivers offer, and which of them --device vulkan takes.
fn adapters() -> Checked {
    let ask = || {
        let instance = wgpu::Instance::new(wgpu::InstanceDescriptor {
            backends: wgpu::Backends::VULKAN,
            ..wgpu::InstanceDescriptor::new_without_display_handle()
        });
        let found = instance.enumerate_adapters(wgpu::Backends::VULKAN).now_or_never().unwrap_or_default();
        found.into_iter().map(|adapter| shown(&adapter.get_info())).collect::<Vec<String>>()
    };
    match device_failure::quietly(ask).unwrap_or_default() {
        found if found.is_empty() => Checked::missing("vulkan", "no driver for Vulkan is found", VULKAN),
        found => Checked::good("vulkan", found.into_iter().chain(taken()).collect::<Vec<String>>().join(" · ")),
    }
}

/// The adapter that --device vulkan takes, if that is known.
fn taken() -> Option<String> {
    let name = device::vulkan_adapter()?.name();
    let free = match free::on_device(DeviceChoice::Vulkan) {
        Some(free) => format!("where {} are free", report::size(free)),
        None => "which does not say how much memory is free".to_owned(),
    };
    Some(format!("--device vulkan takes {name}, {free}"))
}

fn shown(adapter: &wgpu::AdapterInfo) -> String {
    let kind = match adapter.device_type {
        wgpu::DeviceType::DiscreteGpu => "a card",
        wgpu::DeviceType::IntegratedGpu => "integrated",
        wgpu::DeviceType::VirtualGpu => "virtual",
        wgpu::DeviceType::Cpu => "it computes on the CPU",
        wgpu::DeviceType::Other => "of another kind",
    };
    format!("{} ({kind}, {} {})", adapter.name, adapter.driver, adapter.driver_info).replace(" )", ")")
}

const VULKAN: &str = "only --device vulkan needs a Vulkan driver: apt-get install mesa-vulkan-drivers libvulkan1";

/// Where the compiled kernels of cards are kept.
fn cache(has_card: bool) -> Checked {
    let kept = match (kernel_cache::directory(), kernel_cache::root()) {
        (Some(folder), _) => format!("kept in {}", folder.display()),
        (None, Some(root)) if !has_card => {
            format!("compiled kernels of an NVIDIA card would be kept in {}", root.display())
        }
        (None, _) => "not kept: each process compiles them again".to_owned(),
    };
    Checked::good("kernels", kept)
}
