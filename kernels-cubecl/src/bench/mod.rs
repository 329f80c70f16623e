//! Times the kernels that take most of the time, at the shapes of Qwen3-4B, on the device that is there.
//!
//! Data are random. The weights of the decode rows rotate through more memory than the L2 cache holds. The rate of a
//! plain copy is measured first, as bytes read plus bytes written; what is bound by memory is compared with it. [`run`]
//! times the groups of kernels in the order of this table:
//!
//! | file | kernels |
//! |---|---|
//! | `timing.rs` | how a kernel is timed; the copy |
//! | `quantizers.rs` | quantize, dequantize |
//! | `small_operations.rs` | norms, rotation, gate, cross-entropy |
//! | `optimizer.rs` | AdamW, sums of gradients |
//! | `products.rs` | matrix products of layers and head |
//! | `attention.rs` | attention, and attention over a cache |
//! | `decode.rs` | products of a few tokens |
//! | `decoder.rs` | a whole block of a few tokens; the most likely tokens |

use crate::{KernelError, block_scaled, cuda_text::hopper, mma};
use cubecl::{
    ir::{ElemType, FloatKind},
    prelude::*,
};
use timing::Bench;

mod attention;
mod decode;
mod decoder;
mod optimizer;
mod products;
mod quantizers;
mod small_operations;
mod timing;

pub use timing::Row;

const BF16: StorageType = StorageType::Scalar(ElemType::Float(FloatKind::BF16));
const F32: StorageType = StorageType::Scalar(ElemType::Float(FloatKind::F32));

/// The ways to compute products with packed operands that the program uses on the device. The first one that takes a shape computes
/// it.
pub fn tiers<R: Runtime>(client: &ComputeClient<R>) -> Vec<&'static str> {
    let tensor_cores = mma::supported(client, BF16);
    let is_hopper = hopper::is_hopper(client);
    let all = [
        (tensor_cores, "decode, up to 16 rows (gemv)"),
        (tensor_cores && block_scaled::trusted(client), "packed x packed on NVFP4 tensor cores (block_scaled)"),
        (is_hopper, "dequantize, Hopper's tensor cores by wgmma (gemm)"),
        (tensor_cores && !is_hopper, "dequantize, 16-bit tensor cores by mma.sync (gemm)"),
        (true, "portable (matmul)"),
    ];
    all.into_iter().filter_map(|(there, name)| there.then_some(name)).collect()
}

/// Times the kernels whose name contains `filter`, and hands each row to `show` as soon as it is measured. The first
/// row is the copy, whatever the filter.
///
/// # Errors
/// If the device has no bf16 tensor cores or fails.
pub fn run<R: Runtime>(client: &ComputeClient<R>, filter: &str, show: &mut dyn FnMut(Row)) -> Result<(), KernelError> {
    if !mma::supported(client, BF16) {
        return Err(KernelError::Device { reason: "these rows need a device with bf16 tensor cores".into() });
    }
    let bench = Bench::new(client, filter);
    bench.copy(show)?;
    bench.quantizers(show)?;
    bench.small_operations(show)?;
    bench.optimizer(show)?;
    bench.products(show)?;
    bench.attention(show)?;
    bench.decode(show)?;
    bench.decode_attention(show)?;
    bench.decoder(show)
}
