//! What Vulkan says about the adapter on which CubeCL's default device computes: how much of its memory is free, and whether
//! that is the host's memory.
//!
//! It has nothing to do with kernels, and is here because asking a driver is unsafe code, all of which is in this crate.

use ash::{ext, vk};
use cubecl::wgpu::{AutoGraphicsApi, GraphicsApi};
use cubecl_common::future;
use std::sync::OnceLock;
use wgpu::{DeviceType, Instance, InstanceDescriptor, PowerPreference, RequestAdapterOptions, hal};

/// A GPU, or a driver that computes on the CPU.
#[derive(Debug)]
pub struct Adapter(wgpu::Adapter);

/// The adapter that `WgpuDevice::DefaultDevice` takes. None if there is none, or if CUBECL_WGPU_DEFAULT_DEVICE chooses one.
pub fn default_adapter() -> Option<&'static Adapter> {
    static FOUND: OnceLock<Option<Adapter>> = OnceLock::new();
    FOUND.get_or_init(find).as_ref()
}

/// Chooses as `request_adapter` of cubecl-wgpu does, which is private.
fn find() -> Option<Adapter> {
    if std::env::var_os("CUBECL_WGPU_DEFAULT_DEVICE").is_some() {
        return None;
    }
    let instance = Instance::new(InstanceDescriptor {
        backends: AutoGraphicsApi::backend().into(),
        ..InstanceDescriptor::new_without_display_handle()
    });
    let options = RequestAdapterOptions {
        power_preference: PowerPreference::HighPerformance,
        force_fallback_adapter: false,
        compatible_surface: None,
    };
    future::block_on(instance.request_adapter(&options)).ok().map(Adapter)
}

impl Adapter {
    /// What its driver calls it.
    pub fn name(&self) -> String {
        self.0.get_info().name
    }

    /// Whether its memory is the host's; None if it does not say.
    pub fn memory_is_the_hosts(&self) -> Option<bool> {
        match self.0.get_info().device_type {
            DeviceType::Cpu | DeviceType::IntegratedGpu => Some(true),
            DeviceType::DiscreteGpu => Some(false),
            DeviceType::VirtualGpu | DeviceType::Other => None,
        }
    }

    /// Bytes that this process can still take of its memory; None if it does not say.
    pub fn free(&self) -> Option<u64> {
        // Mesa's driver for the CPU gives its heap a size that has nothing to do with the memory that there is.
        if self.0.get_info().device_type == DeviceType::Cpu {
            return None;
        }
        // SAFETY: the adapter is only queried, and none of its handles is destroyed.
        let adapter = unsafe { self.0.as_hal::<hal::api::Vulkan>() }?;
        let (instance, able) = (adapter.shared_instance(), adapter.physical_device_capabilities());
        let version = instance.instance_api_version().min(able.properties().api_version);
        if version < vk::API_VERSION_1_1 || !able.supports_extension(ext::memory_budget::NAME) {
            return None;
        }
        let mut budget = vk::PhysicalDeviceMemoryBudgetPropertiesEXT::default();
        let mut memory = vk::PhysicalDeviceMemoryProperties2::default().push_next(&mut budget);
        let (instance, device) = (instance.raw_instance(), adapter.raw_physical_device());
        // SAFETY: the device is one of this instance, and `adapter` keeps both. Both support Vulkan 1.1, which has this function,
        // and the device supports the extension that defines the structure of the answer.
        unsafe { instance.get_physical_device_memory_properties2(device, &mut memory) };
        let memory = memory.memory_properties;
        most_free(memory.memory_heaps_as_slice(), &budget)
    }
}

/// Free bytes of the device's heap that has the most of them. A buffer lies in one heap.
fn most_free(heaps: &[vk::MemoryHeap], budget: &vk::PhysicalDeviceMemoryBudgetPropertiesEXT<'_>) -> Option<u64> {
    let said = budget.heap_budget.iter().zip(&budget.heap_usage);
    let of_the_device = |heap: &vk::MemoryHeap| heap.flags.contains(vk::MemoryHeapFlags::DEVICE_LOCAL);
    let own = heaps.iter().zip(said).filter(|(heap, _)| of_the_device(heap));
    own.map(|(_, (budget, used))| budget.saturating_sub(*used)).max()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_the_host_is_not_that_of_a_card() {
        let mut budget = vk::PhysicalDeviceMemoryBudgetPropertiesEXT::default();
        let heap = |flags| vk::MemoryHeap { size: 1000, flags };
        let (card, host) = (heap(vk::MemoryHeapFlags::DEVICE_LOCAL), heap(vk::MemoryHeapFlags::empty()));
        budget.heap_budget[..3].copy_from_slice(&[900, 700, 200]);
        budget.heap_usage[..3].copy_from_slice(&[0, 100, 0]);
        assert_eq!(most_free(&[host, card, card], &budget), Some(600));
        // Other programs can leave less than this one holds already.
        budget.heap_usage[..3].copy_from_slice(&[0, 800, 300]);
        assert_eq!(most_free(&[host, card, card], &budget), Some(0));
        assert_eq!(most_free(&[host], &budget), None);
    }
}
