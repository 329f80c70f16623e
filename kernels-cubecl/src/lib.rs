//! NVFP4 device kernels, written once in CubeCL and run on CUDA, Vulkan and whatever else it reaches.
//!
//! | file | what it computes |
//! |---|---|
//! | [`layout`] | where a code and a scale lie: nibble order and block length |
//! | [`codec`] | E2M1 and E4M3 to and from f32, by integer operations |
//! | [`rng`], [`mod@normal`] | Philox4x32-10, the counter-based generator behind stochastic rounding; normal numbers of it |
//! | [`quantize`] | dense matrix to codes, block scales and tensor scale |
//! | [`dequantize`] | the way back: `value = code * block scale * tensor scale` |
//! | [`hadamard`] | random Hadamard transform over 16 columns |
//! | [`mma`], [`mod@gemm`] | tensor-core fragments and the product made of them: forward, dgrad, wgrad |
//! | [`mod@gemv`] | a few rows times a packed matrix, read as codes |
//! | [`mod@block_scaled`] | two packed matrices on tensor cores that read NVFP4 |
//! | [`matmul`] | products with packed operands where there are no tensor cores |
//! | [`attention`], [`decode_attention`] | causal grouped-query attention, forward, backward and over a cache |
//! | [`mod@rms_norm`], [`rope`], [`mod@swiglu`] | the small operations of a block, with their gradients |
//! | [`mod@column_sums`] | what remains of a norm's weight gradient |
//! | [`mod@cross_entropy`] | a loss and its gradient in place of the logits |
//! | [`gradient`] | squares summed for the global norm, micro-batches summed up |
//! | [`adamw`] | one AdamW update over a chunk: four forms of states, five of master weights |
//! | [`mod@bench`], [`mod@once`] | every kernel timed; every kernel launched once, for compile checks |
//! | `cuda_source` (a feature) | a runtime that writes kernels down as CUDA C++ instead of running them |
//!
//! This crate knows no tensor library, no model and no file. A launch takes buffers as
//! [`cubecl::prelude::ArrayArg`], checks their lengths against the shapes, and queues the kernel:
//! device errors (out of memory, a failed compile) surface at the next synchronisation.

// Launching a kernel is unsafe by nature; each launch states why its lengths hold.
#![allow(unsafe_code)]

pub mod adamw;
pub mod attention;
pub mod bench;
pub mod block_scaled;
pub mod codec;
pub mod column_sums;
pub mod cross_entropy;
#[cfg(feature = "cuda-source")]
pub mod cuda_source;
pub mod decode_attention;
pub mod dequantize;
mod device;
mod error;
pub mod gemm;
pub mod gemv;
pub mod gradient;
pub mod hadamard;
pub mod layout;
pub mod matmul;
pub mod mma;
pub mod normal;
pub mod once;
pub mod quantize;
mod reduce;
pub mod rms_norm;
pub mod rng;
pub mod rope;
pub mod swiglu;

pub use error::KernelError;
