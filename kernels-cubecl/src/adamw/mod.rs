//! AdamW (Loshchilov & Hutter, arXiv 1711.05101, algorithm 2, in PyTorch's order) over one chunk of a tensor: ```text grad =
//! clip_factor * gradient      m = beta1 m + (1 - beta1) grad      v = beta2 v + (1 - beta2) grad^2 w = w (1 - lr * decay) - lr /
//! (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps) for each element of the chunk { decode m, v, w; step; round and store
//! w; encode m, v }     // the plain loop ``` Nothing is written if a gradient of the step was not finite, which the device knows
//! ([`JudgedArgs`]). `clip_factor` is at most 1 and the same for all gradients of a step. Arithmetic is f32. A step of exactly
//! zero leaves the bits of `w` alone, so that a learning rate of 0 is the identity, also on -0. Every buffer is read once and
//! written once: bound by memory. A step writes over what it reads, or into other buffers ([`Updated`]), which takes no longer
//! and leaves what it has read as it is.
//!
//! | moments | stored as |
//! |---|---|
//! | f32 | f32 |
//! | bf16 | rounded stochastically: a second moment moves by 0.1 % a step, which rounding to nearest would lose |
//! | 8-bit | 256 values share an f32 `absmax`; a byte indexes a table of 256 values (Dettmers et al., arXiv 2110.02861) |
//! | 4-bit | the same with tables of 16 values (Li et al., arXiv 2309.01507) |
//!
//! Of the second moment the root is stored, which spans half the decades. A root above zero is never stored as zero: dividing by
//! `eps` alone cannot happen.
//!
//! | master weights | stored as |
//! |---|---|
//! | [`Master::Exact`] | f32 |
//! | [`Master::Residual`] | bf16, and eight more bits in a byte of their own |
//! | [`Master::Stochastic`], [`Master::Nearest`] | bf16 |
//! | NVFP4 ([`adamw_packed()`]) | codes, rounded stochastically; a block keeps its scale while its values fit |
//!
//! A step of a dense master weight with quantized moments can leave the weight's NVFP4 codes besides ([`CodesArgs`]).

use crate::{
    device::sequence,
    error::{KernelError, expect_len, require},
    rng::Stream,
};
use cubecl::prelude::*;

mod codes;
mod float;
mod moments;
mod nvfp4_master;
mod quantized;
mod table;

pub use codes::{CodesArgs, maxima_len};
pub use float::adamw_float;
pub use moments::{STATE_BLOCK, StateArgs};
pub use nvfp4_master::adamw_packed;
pub use quantized::adamw_quantized;
pub use table::Coding;

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
    /// Factor on the gradient, from clipping.
    pub clip_factor: f32,
    /// The random numbers of stochastic rounding.
    pub stream: Stream,
}

/// How a dense master weight is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Master {
    /// f32.
    Exact,
    /// A bf16 value, and a byte that continues it: bits 8 to 15 of the f32 that was rounded, plus half a unit.
    Residual,
    /// bf16, rounded up or down at random, with the probabilities that make the expected value exact.
    Stochastic,
    /// bf16, rounded to nearest even: steps below half a unit are lost.
    Nearest,
}

/// Elements `[start, end)` of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    /// First element.
    pub start: usize,
    /// One past the last element.
    pub end: usize,
}

/// A gradient, and the verdict on the gradients of its step ([`crate::gradient::square_sum()`]).
pub struct JudgedArgs<R: Runtime> {
    /// The gradient, float of type `dtype`.
    pub values: ArrayArg<R>,
    /// The type of the gradient.
    pub dtype: StorageType,
    /// f32, one value. A step changes nothing if it is not 0.
    pub verdict: ArrayArg<R>,
}

impl<R: Runtime> JudgedArgs<R> {
    /// The number of values.
    fn len(&self) -> usize {
        self.values.size()
    }

    /// Refuses a verdict that has not one value.
    fn check(&self, kernel: &'static str) -> Result<(), KernelError> {
        expect_len(kernel, "verdict", self.verdict.size(), 1)
    }
}

/// A buffer that a step reads, and the one of the same length that it writes: the same one twice, or another.
pub struct Updated<R: Runtime> {
    /// What the step reads.
    pub old: ArrayArg<R>,
    /// What it writes.
    pub new: ArrayArg<R>,
}

impl<R: Runtime> Updated<R> {
    /// Refuses buffers that have not `len` elements.
    fn check(&self, kernel: &'static str, name: &'static str, len: usize) -> Result<(), KernelError> {
        expect_len(kernel, name, self.old.size(), len)?;
        expect_len(kernel, name, self.new.size(), len)
    }

    /// The buffers as a kernel takes them.
    fn launch<Value: CubePrimitive>(self) -> BuffersLaunch<Value, R> {
        BuffersLaunch::new(self.old, self.new)
    }
}

/// [`Updated`] on the device.
#[derive(CubeType, CubeLaunch)]
struct Buffers<Value: CubePrimitive> {
    old: Array<Value>,
    new: Array<Value>,
}

/// A dense master weight.
pub struct DenseArgs<R: Runtime> {
    /// The weight, float of type `dtype`: f32 for [`Master::Exact`], otherwise bf16.
    pub w: Updated<R>,
    /// The type of `w`.
    pub dtype: StorageType,
    /// u8, as long as `w`: present for [`Master::Residual`] only.
    pub residual: Option<Updated<R>>,
    /// How the weight is stored.
    pub master: Master,
}

impl<R: Runtime> DenseArgs<R> {
    /// Refuses a weight that has not `len` values, and a residual that is missing, superfluous or of another length.
    fn check(&self, kernel: &'static str, len: usize) -> Result<(), KernelError> {
        self.w.check(kernel, "w", len)?;
        let needed = self.master == Master::Residual;
        require(kernel, self.residual.is_some() == needed, || {
            let (state, rule) = if needed { ("missing", "needs one") } else { ("present", "takes none") };
            format!("the residual is {state}, but {:?} {rule}", self.master)
        })?;
        self.residual.iter().try_for_each(|residual| residual.check(kernel, "residual", len))
    }

    /// The buffers as a kernel takes them.
    fn launch<Weight: CubePrimitive, Byte: CubePrimitive>(self) -> DenseBuffersLaunch<Weight, Byte, R> {
        DenseBuffersLaunch::new(self.w.launch(), sequence(self.residual.map(|buffers| buffers.launch())))
    }
}

fn check_chunk(kernel: &'static str, Chunk { start, end }: Chunk, len: usize) -> Result<(), KernelError> {
    require(kernel, start <= end && end <= len, || {
        format!("the chunk from {start} to {end} is not inside a tensor of {len} values")
    })
}

/// The length of a vector, and the number of vectors that a unit takes: eight values where all lengths allow it.
fn vectors_of_unit(len: usize, chunk: Chunk) -> (usize, usize) {
    let fits = |n: usize| [len, chunk.start, chunk.end].iter().all(|length| length.is_multiple_of(n));
    if fits(8) {
        (4, 2)
    } else if fits(4) {
        (4, 1)
    } else {
        (1, 1)
    }
}

/// The scalars of an [`AdamwStep`] as kernels use them.
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
    clip_factor: f32,
}

/// A chunk on the device.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct ChunkOnDevice {
    start: u32,
    end: u32,
}

/// The buffers of a dense master weight on the device: vectors of the weight, and of its residual if there is one.
#[derive(CubeType, CubeLaunch)]
struct DenseBuffers<Weight: CubePrimitive, Byte: CubePrimitive> {
    w: Buffers<Weight>,
    residual: Sequence<Buffers<Byte>>,
}

fn scalars<R: Runtime>(s: &AdamwStep) -> ScalarsLaunch<R> {
    ScalarsLaunch::new(
        s.lr / s.bias1,
        s.beta1,
        s.beta2,
        s.eps,
        1.0 - s.lr * s.weight_decay,
        1.0 / s.bias2.sqrt(),
        s.clip_factor,
    )
}

/// One step of one value. Returns the new weight, the new moments and the root of the second moment.
#[cube]
fn stepped(w: f32, m: f32, v: f32, grad: f32, s: Scalars) -> (f32, f32, f32, f32) {
    let g = grad * s.clip_factor;
    let m = s.beta1 * m + (1.0f32 - s.beta1) * g;
    let v = s.beta2 * v + (1.0f32 - s.beta2) * g * g;
    // An inverse root is cheaper than a root and differs in the last places only. Below 1e-38 it is too small, which
    // `eps` covers.
    let finite = min(v, 3.4e38f32);
    let root = finite * max(finite, 1.0e-38f32).inverse_sqrt();
    let step = s.rate * m / (root * s.root_scale + s.eps);
    let decayed = w * s.decay;
    (select(step == 0.0f32, decayed, decayed - step), m, v, root)
}

/// Extracts the 16 random bits of value `first + lane` from four words that serve eight values; `whole` if `first` is
/// the first of the eight.
#[cube]
fn draw_of_eight(draws: &Array<u32>, first: u32, #[comptime] lane: usize, #[comptime] whole: bool) -> u32 {
    if comptime!(whole) {
        (draws[comptime!(lane / 2)] >> comptime!((lane % 2 * 16) as u32)) & 0xFFFFu32
    } else {
        let at = (first + comptime!(lane as u32)) % 8u32;
        (draws[(at / 2u32) as usize] >> (at % 2u32 * 16u32)) & 0xFFFFu32
    }
}

/// Decodes a stored master weight.
#[cube]
fn loaded<Weight: Float>(w: Weight, residual: u32, #[comptime] master: Master) -> f32 {
    let value = f32::cast_from(w);
    if comptime!(master == Master::Residual) {
        f32::reinterpret(u32::reinterpret(value) + (residual << 8u32) - 0x8000u32)
    } else {
        value
    }
}

/// Rounds `x` as `master` stores it: bf16 in the upper half of the word, the residual in the next eight bits. `draw`
/// has 16 random bits.
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
            // Half a unit of the 24 bits that are kept, plus half a unit of bf16, from which the residual is counted.
            0x8080u32.runtime()
        };
        let kept = if comptime!(master == Master::Residual) { 0xFFFF_FF00u32 } else { 0xFFFF_0000u32 };
        let finite = (bits & 0x7F80_0000u32) != 0x7F80_0000u32;
        select(finite, (bits + add) & kept, bits)
    }
}

/// The weight in the word that [`rounded()`] makes.
#[cube]
fn stored_weight<Weight: Float>(word: u32, #[comptime] master: Master) -> Weight {
    let bits = if comptime!(master == Master::Exact) { word } else { word & 0xFFFF_0000u32 };
    Weight::cast_from(f32::reinterpret(bits))
}

/// The residual in the word that [`rounded()`] makes.
#[cube]
fn stored_residual(word: u32) -> u8 {
    u8::cast_from((word >> 8u32) & 0xFFu32)
}
