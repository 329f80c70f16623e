//! NVFP4 in scalar Rust: the specification. Every backend is held to these functions, bit for bit for codes and scales and
//! within stated bounds for products. The CPU backend and the file converter run them as they are.
//!
//! Sources: OCP Microscaling Formats v1.0, §5.3.3 (E2M1); OCP 8-bit Floating Point v1.0 (E4M3); NVIDIA, "Pretraining LLMs
//! with NVFP4", arXiv 2509.25149, appendix C (two-level scaling); Salmon et al., SC 2011 (Philox).

mod adamw;
mod codec;
mod dialects;
mod draw;
mod hadamard;
mod moments;
mod quantize;
mod random;
mod requantize;
mod segment_sum;
mod threads;

pub use adamw::{adamw, repack, round};
pub(crate) use adamw::{round_states, unpacked, unrounded};
pub use codec::{
    E2M1, E4M3_MAX, code, different_codes, e2m1_decode, e2m1_encode, e2m1_encode_stochastic, e4m3_decode, e4m3_encode,
    word_of,
};
pub use dialects::{Dialect, dequantize_divided};
pub use draw::{draw, likeliest};
pub use hadamard::hadamard;
pub(crate) use moments::{decode_moment, encode_moment};
pub use quantize::{
    FULL_SCALE, MASTER_ROOM, dequantize, quantize, quantize_master, quantize_sharing, rounded_by, rounded_rows,
    tensor_amax,
};
pub use random::{draw_of, normals, philox};
pub use requantize::{requantize, rescale, with_room};
pub use segment_sum::segment_sum;
