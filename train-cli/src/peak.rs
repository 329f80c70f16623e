//! The peak speed of NVIDIA cards, by which model FLOPs utilization (MFU) is counted: dense products of bf16 with sums in f32.

use crate::{device, device_failure, settings::DeviceChoice};
use cudarc::driver::CudaContext;

/// Words of a card's name, and TFLOP/s. A card has the first entry of which its name has all words. The figures are those of
/// NVIDIA's data sheets, for some cards of the architecture's white paper; those with sparsity are halved. (GB10, in a DGX Spark,
/// is not here: NVIDIA's figure of it is for FP4 with sparsity.)
const CARDS: [(&[&str], f64); 14] = [
    (&["B200"], 2250.0),
    (&["H200", "NVL"], 835.0),
    (&["H200"], 989.0),
    (&["H100", "NVL"], 835.0),
    (&["H100", "PCIe"], 756.0),
    (&["H100"], 989.0),
    (&["A100"], 312.0),
    (&["A30"], 165.0),
    (&["L40S"], 362.0),
    (&["L4"], 121.0),
    (&["RTX", "A6000"], 155.0),
    (&["RTX", "5090"], 209.5),
    (&["RTX", "4090"], 165.0),
    (&["RTX", "3090"], 71.0),
];

/// Words with which a name means another card, or a part of one.
const OTHERS: [&str; 7] = ["Laptop", "Mobile", "Max", "Ti", "SUPER", "D", "MIG"];

/// The name of a CUDA device.
pub fn card(device: DeviceChoice) -> Option<String> {
    let DeviceChoice::Cuda(index) = device::resolved(device) else { return None };
    let ask = || CudaContext::new(index).and_then(|context| context.name()).ok();
    device_failure::quietly(ask).flatten()
}

/// The peak in TFLOP/s of the card with this name, if it is in the table.
pub fn by_name(name: &str) -> Option<f64> {
    let words: Vec<&str> = name.split([' ', '-']).collect();
    if words.iter().any(|word| OTHERS.contains(word)) {
        return None;
    }
    CARDS.iter().find(|(wanted, _)| wanted.iter().all(|word| words.contains(word))).map(|(_, peak)| *peak)
}

#[cfg(test)]
mod tests {
    use super::by_name;

    #[test]
    fn a_card_is_known_by_whole_words_of_its_name() {
        for (name, peak) in [
            ("NVIDIA H200", Some(989.0)),
            ("NVIDIA H100 80GB HBM3", Some(989.0)),
            ("NVIDIA H100 PCIe", Some(756.0)),
            ("NVIDIA H100 NVL", Some(835.0)),
            ("NVIDIA A100-SXM4-80GB", Some(312.0)),
            ("NVIDIA L4", Some(121.0)),
            ("NVIDIA L40S", Some(362.0)),
            ("NVIDIA L40", None),
            ("NVIDIA GeForce RTX 4090", Some(165.0)),
            ("NVIDIA GeForce RTX 4090D", None),
            ("NVIDIA GeForce RTX 3060", None),
            ("NVIDIA GeForce RTX 3090 Ti", None),
            ("NVIDIA GeForce RTX 4090 D", None),
            ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
            ("NVIDIA H200 MIG 1g.18gb", None),
            ("NVIDIA GB10", None),
        ] {
            assert_eq!(by_name(name), peak, "{name}");
        }
    }
}
