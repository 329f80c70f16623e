//! AdamW (Loshchilov & Hutter, arXiv 1711.05101, algorithm 2, as PyTorch orders it) over one chunk:
//! ```text
//! g = c * grad          m = b1 m + (1-b1) g          v = b2 v + (1-b2) g^2
//! w = w (1 - lr wd) - lr / (1-b1^t) * m / (sqrt(v) / sqrt(1-b2^t) + eps)
//! for i in chunk { decode m, v, w; step; round w; encode m, v }                     // the plain loop
//! ```
//! `c` is the clipping coefficient. Arithmetic is f32. A step of exactly zero leaves the bits of `w` alone, so that a
//! rate of 0 is the identity, also on -0. Everything is updated in place; all of it is moved once each way: bound by memory.
//!
//! | states | stored as |
//! |---|---|
//! | f32 | as they are |
//! | bf16 | rounded stochastically: a second moment moves by 0.1 % a step, which rounding to nearest never shows |
//! | 8-bit | 256 values share an f32 absmax, a byte indexes a table of 256 values (Dettmers et al., arXiv 2110.02861) |
//! | 4-bit | the same with tables of 16 (Li et al., arXiv 2309.01507) |
//! | NVFP4 | E2M1 codes, an E4M3 scale for 16 values, and of 256 the absmax in the place of a tensor's |
//!
//! The 8-bit tables have decades of equal steps, so that an entry is computed, not searched. What is stored of v is its
//! root, which spans half the decades of v, and a root above zero never becomes zero: `m / eps` cannot happen.
//!
//! | master weights | stored as |
//! |---|---|
//! | [`Master::Exact`] | f32 |
//! | [`Master::Residual`] | bf16, and eight more bits in a byte of their own |
//! | [`Master::Stochastic`], [`Master::Nearest`] | bf16 values |
//! | NVFP4 ([`adamw_packed()`]) | codes, rounded stochastically; a block keeps its scale while that fits |

use crate::{
    error::{KernelError, expect_len},
    rng::Stream,
};
use cubecl::prelude::*;

mod float;
mod moments;
mod packed;
mod quantised;
mod table;

pub use float::adamw_float;
pub use moments::{Coding, NVFP4_LEAST, NVFP4_UNIT, STATE_BLOCK, StateArgs};
pub use packed::adamw_packed;
pub use quantised::adamw_quantised;

/// The scalars of one step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamwStep {
    /// Learning rate.
    pub lr: f32,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Decoupled weight decay.
    pub weight_decay: f32,
    /// `1 - beta1^t`.
    pub bias1: f32,
    /// `1 - beta2^t`.
    pub bias2: f32,
    /// Factor on the gradient (clipping).
    pub grad_scale: f32,
    /// What stochastic rounding draws from.
    pub stream: Stream,
}

/// How a dense master weight is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Master {
    /// f32.
    Exact,
    /// A bf16 value and a byte: bits 8 to 15 of the f32 that the value was rounded from, plus half a unit.
    Residual,
    /// bf16 values, rounded up with the probability that makes the mean exact.
    Stochastic,
    /// bf16 values, rounded to nearest even: steps below half a unit are lost.
    Nearest,
}

/// Elements `[start, end)` of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    /// First element.
    pub start: usize,
    /// One past the last.
    pub end: usize,
}

/// A dense master weight.
pub struct DenseArgs<R: Runtime> {
    /// Float, of type `dtype`: f32, or bf16 for the forms that are.
    pub w: ArrayArg<R>,
    /// Its type.
    pub dtype: StorageType,
    /// u8, as long as `w`, for [`Master::Residual`]; any u8 buffer as long for the others, which leave it alone.
    pub residual: ArrayArg<R>,
    /// Its form.
    pub master: Master,
}

fn check_chunk(chunk: Chunk, len: usize) -> Result<(), KernelError> {
    expect_len("adamw", "chunk start", chunk.start.min(chunk.end), chunk.start)?;
    expect_len("adamw", "chunk end", chunk.end.min(len), chunk.end)
}

/// Values of a vector, and vectors that a unit takes: eight values where the lengths allow it.
fn unit_of(len: usize, chunk: Chunk) -> (usize, usize) {
    let fits = |n: usize| [len, chunk.start, chunk.end].iter().all(|length| length.is_multiple_of(n));
    if fits(8) {
        (4, 2)
    } else if fits(4) {
        (4, 1)
    } else {
        (1, 1)
    }
}

/// [`AdamwStep`] on the device.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Scalars {
    /// `lr / (1 - beta1^t)`.
    rate: f32,
    beta1: f32,
    beta2: f32,
    eps: f32,
    /// `1 - lr wd`.
    decay: f32,
    /// `1 / sqrt(1 - beta2^t)`.
    root_scale: f32,
    grad_scale: f32,
}

fn scalars<R: Runtime>(s: &AdamwStep) -> ScalarsLaunch<R> {
    ScalarsLaunch::new(
        s.lr / s.bias1,
        s.beta1,
        s.beta2,
        s.eps,
        1.0 - s.lr * s.weight_decay,
        1.0 / s.bias2.sqrt(),
        s.grad_scale,
    )
}

/// A weight, its moments and the second one's root after one step.
#[cube]
fn stepped(w: f32, m: f32, v: f32, grad: f32, s: Scalars) -> (f32, f32, f32, f32) {
    let g = grad * s.grad_scale;
    let m = s.beta1 * m + (1.0f32 - s.beta1) * g;
    let v = s.beta2 * v + (1.0f32 - s.beta2) * g * g;
    // Cheaper than a root, and as good to a few last places; below 1e-38 it is too small, which eps covers.
    let finite = min(v, 3.4e38f32);
    let root = finite * max(finite, 1.0e-38f32).inverse_sqrt();
    let step = s.rate * m / (root * s.root_scale + s.eps);
    let decayed = w * s.decay;
    (select(step == 0.0f32, decayed, decayed - step), m, v, root)
}

/// The 16 bits that value `first + lane` draws of four words for eight values; `whole` if `first` is the first of eight.
#[cube]
fn draw_of_eight(draws: &Array<u32>, first: u32, #[comptime] lane: usize, #[comptime] whole: bool) -> u32 {
    if comptime!(whole) {
        (draws[comptime!(lane / 2)] >> comptime!((lane % 2 * 16) as u32)) & 0xFFFFu32
    } else {
        let at = (first + comptime!(lane as u32)) % 8u32;
        (draws[(at / 2u32) as usize] >> (at % 2u32 * 16u32)) & 0xFFFFu32
    }
}

/// A stored master weight as f32.
#[cube]
fn loaded<W: Float>(w: W, residual: u32, #[comptime] master: Master) -> f32 {
    let value = f32::cast_from(w);
    if comptime!(master == Master::Residual) {
        f32::reinterpret(u32::reinterpret(value) + (residual << 8u32) - 0x8000u32)
    } else {
        value
    }
}

/// The bits of `x` as `master` stores it: bf16 in the upper half, a residual in the next eight bits. `draw` is 16 bits.
#[cube]
fn rounded(x: f32, draw: u32, #[comptime] master: Master) -> u32 {
    let bits = u32::reinterpret(x);
    if comptime!(master == Master::Exact) {
        bits
    } else {
        let add = if comptime!(master == Master::Stochastic) {
            draw
        } else if comptime!(master == Master::Nearest) {
            0x7FFFu32 + ((bits >> 16u32) & 1u32)
        } else {
            // Half a unit of 24 bits, and half of one of 16, which the residual is counted from.
            0x8080u32.runtime()
        };
        let kept = if comptime!(master == Master::Residual) { 0xFFFF_FF00u32 } else { 0xFFFF_0000u32 };
        let finite = (bits & 0x7F80_0000u32) != 0x7F80_0000u32;
        select(finite, (bits + add) & kept, bits)
    }
}
