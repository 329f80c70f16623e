//! NVFP4 device kernels. They are written once in CubeCL, which compiles them for CUDA, for Vulkan and for its other
//! targets; those in [`cuda_text`] are CUDA C++, because they use instructions that CubeCL does not have.
//!
//! NVFP4 is a 4-bit float format: a value is a 4-bit code times a scale that 16 values share. [`layout`] says where
//! codes and scales lie in memory. A *packed* matrix is stored that way; a *dense* one holds plain floats.
//!
//! | file | what it computes |
//! |---|---|
//! | [`layout`] | positions of codes and scales: nibble order and block length |
//! | [`operands`] | what products read: the storage order of operands, and the buffers of a packed matrix |
//! | `codec` | E2M1 and E4M3 to and from f32, by integer operations |
//! | [`rng`], [`mod@normal`] | the random bits of stochastic rounding (Philox4x32-10), and normal random numbers |
//! | [`quantize`] | a dense matrix to codes, block scales and tensor scale |
//! | [`dequantize`] | a packed matrix to a dense one: `value = code * block scale * tensor scale` |
//! | [`e4m3`] | numbers of a cache to E4M3 bytes and back |
//! | [`hadamard`] | the random Hadamard transform of 16 columns |
//! | [`mma`], [`mod@gemm`] | tensor-core fragments, and the matrix product made of them: forward, dgrad, wgrad |
//! | [`mod@gemv`] | a few rows times a packed matrix, whose codes are decoded in registers |
//! | [`mod@block_scaled`] | two packed matrices on tensor cores that read NVFP4 |
//! | [`matmul`] | products with packed operands on devices without tensor cores |
//! | [`attention`], [`decode_attention`] | causal grouped-query attention: forward, backward, and over a long cache |
//! | [`cuda_text`] | the kernels that are written in CUDA C++, and how they are launched |
//! | [`cuda_text::hopper`] | products and attention on Hopper's own instructions |
//! | [`cuda_text::decoder`] | a whole transformer block for a few tokens, in one launch |
//! | [`mod@rms_norm`], [`rope`], [`mod@swiglu`] | the small operations of a transformer block, with their gradients |
//! | [`mod@column_sums`] | sums of columns, the last step of a norm's weight gradient |
//! | [`mod@cross_entropy`] | the loss, and its gradient in place of the logits |
//! | [`penalty`], [`mod@likeliest`], [`mod@draw`] | logits after a penalty, the largest logits of each row, and the drawn token |
//! | [`mod@segment_sum`] | the gradient of an embedding, from the gradients of its tokens |
//! | [`gradient`] | the sum of squares for the global norm, and the sum of micro-batches |
//! | [`adamw`] | one AdamW update of a chunk, for every way to store moments and master weights |
//! | [`mod@bench`] | times the kernels that take most of the time, at the shapes of Qwen3-4B |
//! | [`device`] | what launches ask of a device, and how many cubes they start |
//! | [`host_memory`] | how a program ends when the host has no more memory |
//! | [`vulkan`] | whose memory the default adapter of Vulkan has, and how much of it is free |
//! | [`any_cuda`] | the CUDA runtime, whose devices are GPUs or those of [`cuda_source`] |
//! | [`cuda_source`] | devices that record kernels as CUDA C++ instead of running them |
//! | [`compile_ahead`] | compiles recorded kernels on all processors, before a device needs them |
//!
//! # Which device runs what
//! [`mod@gemm`], [`mod@gemv`], [`attention`] and [`decode_attention`] need 16-bit tensor cores, `ldmatrix` and
//! `cp.async` ([`mma::supported`]), which CubeCL offers on CUDA from sm_80 on and not on Vulkan. [`cuda_text::decoder`] needs
//! CUDA and bf16 tensor cores, [`cuda_text::hopper`] sm_90, [`mod@block_scaled`] sm_120 or sm_121. All other kernels are
//! portable.
//!
//! # Letters
//! A letter has one meaning in this crate. Matrices that no letter describes have `rows` and `cols`.
//!
//! | letter | meaning |
//! |---|---|
//! | `T` | tokens of a call: rows of queries |
//! | `S` | tokens that are attended to: rows of keys and values, `past + T` |
//! | `H` | query heads |
//! | `G` | key heads, a divisor of `H`: each serves a *group* of `H / G` query heads |
//! | `E` | values of a head |
//! | `i`, `j` | row and column of a product's result `y[i, j]`; `i_len`, `j_len` count them |
//! | `r` | the index that a product sums over; `r_len` counts it |
//! | `c` | a column, in formulas |
//! | `x`, `y` | input and output of an operation; `dx`, `dy` are the gradients of the loss with respect to them |
//! | `q`, `k`, `v` | queries, keys and values of attention |
//! | `w` | a weight |
//! | `g` | a tensor scale |
//! | `R`, `F`, `N` | type parameters: the runtime, a float type, the length of a vector |
//!
//! The indices of `T`, `S`, `H` and `E` are `t`, `s`, `h` and `e`. Other lower-case names are defined in the formula that
//! uses them. Three groups of names come from elsewhere: [`adamw`] keeps the letters of its paper (`g` is the gradient, `m` and
//! `v` are the moments of step `t`); PTX names its instructions by three numbers, such as `m16n8k16` for 16 rows, 8 columns
//! and sums of 16 products; and in CUDA texts, lane (`g`, `t`) of a warp is thread `t` of its group `g`, as in PTX's tables of
//! fragments.
//!
//! # Launches
//! This crate knows no model, no file but the cache of compiled kernels ([`compile_ahead`]), and of the tensor library only the
//! mark of a device, which [`any_cuda`] needs. A launch function takes buffers as [`cubecl::prelude::ArrayArg`], checks their
//! lengths against the shapes ([`KernelError`]) and queues the kernel. Errors of the device, such as out of memory, surface at
//! the next synchronization. A kernel takes a buffer that may be missing, or of which there may be several, as a `Sequence`:
//! none, one, or one for each item.

// Launching a kernel is unsafe in CubeCL; each launch states why its lengths hold.
#![allow(unsafe_code)]

pub mod adamw;
pub mod any_cuda;
pub mod attention;
pub mod bench;
pub mod block_scaled;
mod codec;
pub mod column_sums;
pub mod compile_ahead;
pub mod cross_entropy;
pub mod cuda_source;
pub mod cuda_text;
pub mod decode_attention;
pub mod dequantize;
pub mod device;
pub mod draw;
pub mod e4m3;
mod error;
pub mod gemm;
pub mod gemv;
pub mod gradient;
pub mod hadamard;
pub mod host_memory;
pub mod layout;
pub mod likeliest;
pub mod matmul;
pub mod mma;
pub mod normal;
pub mod operands;
pub mod penalty;
pub mod quantize;
mod reduce;
pub mod rms_norm;
pub mod rng;
pub mod rope;
pub mod segment_sum;
pub mod swiglu;
pub mod vulkan;

pub use error::KernelError;
