//! NVFP4 as a Burn backend extension.
//!
//! A model is written over [`Nvfp4Backend`], whose operations are all differentiable, and calls the functions of
//! [`ops`]. `NdArray` (running the scalar [`mod@reference`]) and `CubeBackend` on any runtime (launching
//! `kernels-cubecl`) implement it, and so does `Autodiff` of either. [`Nvfp4Kernels`] has what only the inner backends
//! compute, and [`DeviceServices`] has what a program asks of a device.
//!
//! # Letters
//! A capital letter has one meaning in this crate. Matrices that no letter describes have `rows` and `cols`.
//!
//! | letter | meaning |
//! |---|---|
//! | `M` | tokens of all rows: rows of activations |
//! | `K`, `N` | input and output features of a linear layer |
//! | `D` | hidden size |
//! | `F` | MLP size |
//! | `V` | vocabulary |
//! | `H` | query heads |
//! | `G` | key and value heads |
//! | `Q` | queries of a group, `H / G` |
//! | `E` | head size |
//! | `T` | new tokens of a row |
//! | `S` | keys of all rows |
//! | `L` | rows of a table |
//! | `B`, `R` | type parameters: the backend, the CubeCL runtime |
//!
//! In formulas, `W` is the weight matrix of a linear layer.

#![forbid(unsafe_code)]

mod asked;
mod attention;
mod autodiff;
mod burn_ops;
mod cache;
mod cache_rows;
mod cube;
mod decode;
mod draw;
mod error;
mod gradient;
mod held_codes;
mod kernels;
mod linear;
mod ndarray;
pub mod ops;
mod optim;
mod packed;
mod primitive;
mod recipe;
pub mod reference;
mod services;
mod straight_through;

pub use asked::Asked;
pub use attention::{AttentionSpec, Documents, Rotary};
pub use autodiff::TrainingBackend;
pub use cache::{CacheBuffer, CacheFormat};
pub use decode::{DecodeBlock, DecodeTokens, PAGE};
pub use draw::{Draw, Drawn, DrawnToken, Penalty};
pub use error::Nvfp4Error;
pub use gradient::Gradient;
pub use held_codes::{HeldCodes, HeldPrimitive};
pub use kernels::{
    AttentionSaved, HeadGradients, HeadLoss, HeadWeightGradient, Nvfp4Kernels, cached_attention, decode_blocks, draw,
    logits_rows, penalize, prompt_attention, segment_sum, words_of,
};
pub use kernels_cubecl::{
    adamw::{AdamwStep, Master, STATE_BLOCK},
    bench, host_memory, layout,
    operands::Product,
    quantize::{self, BlockShape, QuantizeSpec, Rounding, Scaling, View},
    rng::Stream,
};
pub use linear::{MasterWeight, Nvfp4Linear, PackedMaster, PackedWeight, linears};
pub use ops::{Activations, LayerWeight, LinearLayer, Nvfp4Backend};
pub use optim::{AdamwState, Judged, MasterKind, Moment, StateKind};
pub use packed::{Nvfp4Primitive, Nvfp4Tensor, Operand, PACKED_BYTES, Packed, Unscaled};
pub use recipe::{ActivationScale, GivenScale, LinearSpec, Nvfp4Parts, Precision, Recipe};
pub use services::{DeviceMemory, DeviceServices, MemoryUse};
