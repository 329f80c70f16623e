//! A transformer block for one new token of each of a few sequences, in one launch: as separate kernels, the launches of a
//! token take several times as long as the GPU needs to read the weights.
//! ```text
//! q, k, v = w norm(x);  h = x + w_o attention(q, k, v, cache);  y = h + w_down (silu(w_gate norm(h)) * w_up norm(h))
//! for token { norm; q, k, v; rotate; append; attend; o; add; norm; gate, up; silu; down; add }             // the plain loop
//! ```
//! There is one cube a multiprocessor, and all cubes wait for each other between products (`grid_barrier` in numbers.cuh), so
//! the kernel is written in CUDA C++: CubeCL has no such barrier. Numbers are rounded where the separate kernels round them
//! ([`crate::rms_norm`], [`crate::quantize`], [`mod@crate::gemv`], [`crate::rope`], [`mod@crate::swiglu`]); sums in f32 take
//! their terms in another order, which does not depend on the other tokens. Reads every weight once: bound by memory.
//!
//! | file | what it holds |
//! |---|---|
//! | `mod.rs` | what a launch takes, and its checks |
//! | `form.rs` | what is compiled into a kernel |
//! | `text.rs` | the definitions in front of the text |
//! | `numbers.cuh` | rounding, sums of a warp, the barrier of all cubes |
//! | `products.cuh` | activations times codes or 16-bit values |
//! | `attention.cuh` | attention over the caches |
//! | `block.cuh` | the block |

mod form;
mod text;

use crate::{
    cuda_text::{WrittenKernel, binding},
    device::processors,
    error::{KernelError, expect_len, index, require},
    matmul::PackedArgs,
    mma,
};
use cubecl::{
    ir::{ElemType, FloatKind},
    prelude::*,
    server::{Binding, Handle, KernelArguments, MetadataBindingInfo},
};
use form::{Form, SPLITS};

const NAME: &str = "decoder block";
/// The most tokens of a launch.
pub const MAX_TOKENS: usize = 16;

/// The sizes of a block.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DecoderShape {
    /// D, the values of a hidden state.
    pub hidden: usize,
    /// F, the values of the MLP.
    pub intermediate: usize,
    /// H, query heads.
    pub heads: usize,
    /// G, key heads.
    pub kv_heads: usize,
    /// E, the values of a head.
    pub head_dim: usize,
    /// The epsilon of the norms.
    pub eps: f32,
}

/// A weight: codes, or 16-bit values (`[rows, cols]`, bf16).
pub enum Weight<R: Runtime> {
    /// NVFP4 codes.
    Packed(PackedArgs<R>),
    /// bf16.
    Dense(ArrayArg<R>),
}

/// How the activations of a product are rounded.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rounded {
    /// To bf16 alone.
    Not,
    /// To NVFP4, each token with a tensor scale of its own ([`crate::quantize::rounded_rows`]).
    EachRow,
    /// To NVFP4 with the tensor scale `1 / full`.
    By {
        /// The reciprocal of the scale.
        full: f32,
    },
}

/// Keys and values of one sequence, `[capacity, G, E]` in bf16 each.
pub struct Cache<R: Runtime> {
    /// The keys.
    pub keys: ArrayArg<R>,
    /// The values.
    pub values: ArrayArg<R>,
    /// Number of tokens that they hold. The new token is written behind them.
    pub past: usize,
}

/// A block and its tokens.
pub struct DecoderBlock<R: Runtime> {
    /// The sizes.
    pub shape: DecoderShape,
    /// Hidden states `[tokens, D]`, bf16.
    pub x: ArrayArg<R>,
    /// The result, likewise.
    pub y: ArrayArg<R>,
    /// The weights of the norms, f32: before attention (D), of queries and of keys (E), before the MLP (D).
    pub norms: [ArrayArg<R>; 4],
    /// Cosines and sines, f32, lines of E/2; the line of each token, u32.
    pub rotary: [ArrayArg<R>; 3],
    /// q, k, v, o, gate, up and down. Weights that read the same activations are all packed, or all dense.
    pub weights: [Weight<R>; 7],
    /// How the activations of q, k and v, of o, of gate and up, and of down are rounded.
    pub rounded: [Rounded; 4],
    /// One cache a token.
    pub caches: Vec<Cache<R>>,
}

/// What a launch stores between its products. Launches one after another share it.
#[derive(Debug, Clone)]
pub struct Room {
    tokens: usize,
    shape: DecoderShape,
    /// The word of the barrier of all cubes; q, k and v; the result of attention; h; the gated values; shares of attention.
    buffers: [Handle; 6],
}

impl Room {
    /// Room for `tokens` tokens.
    pub fn new<R: Runtime>(client: &ComputeClient<R>, shape: DecoderShape, tokens: usize) -> Self {
        let DecoderShape { hidden, intermediate, heads, kv_heads, head_dim, .. } = shape;
        let places = form::places(tokens);
        let values = |each: usize| client.empty(places * each * 2);
        let buffers = [
            client.create_from_slice(&[0; 4]),
            values((heads + 2 * kv_heads) * head_dim),
            values(heads * head_dim),
            values(hidden),
            values(intermediate),
            client.empty(places * heads * SPLITS * (head_dim + 2) * 4),
        ];
        Self { tokens: places, shape, buffers }
    }
}

/// Whether the device has the kernel, and the kernel these sizes.
pub fn fits<R: Runtime>(client: &ComputeClient<R>, shape: DecoderShape, tokens: usize) -> bool {
    let bf16 = ElemType::Float(FloatKind::BF16).into();
    mma::supported(client, bf16) && Form::new(client, shape, tokens, processors(client)).is_ok()
}

/// Launches the block.
///
/// # Errors
/// If a buffer does not fit the shape or [`fits`] is false.
pub fn decoder_block<R: Runtime>(
    client: &ComputeClient<R>,
    block: DecoderBlock<R>,
    room: &Room,
) -> Result<(), KernelError> {
    decoder_block_in(client, block, room, processors(client))
}

/// The same with this number of cubes, which must not be more than run at the same time.
///
/// # Errors
/// The same as [`decoder_block`].
pub fn decoder_block_in<R: Runtime>(
    client: &ComputeClient<R>,
    block: DecoderBlock<R>,
    room: &Room,
    cubes: usize,
) -> Result<(), KernelError> {
    let tokens = block.caches.len();
    let form = Form::new(client, block.shape, tokens, cubes)?.with(&block.weights, block.rounded)?;
    block.check()?;
    require(NAME, (room.tokens, room.shape) == (form.tokens, block.shape), || {
        format!("the room was made for {} tokens of {:?}", room.tokens, room.shape)
    })?;
    let info = info(&block, form.tokens);
    let DecoderBlock { x, y, norms, rotary, weights, caches, .. } = block;
    let mut buffers: Vec<Binding> = vec![binding(x), binding(y)];
    buffers.extend(norms.into_iter().chain(rotary).map(binding));
    for weight in weights {
        match weight {
            Weight::Packed(w) => buffers.extend([binding(w.codes), binding(w.scales), binding(w.global)]),
            Weight::Dense(w) => buffers.push(binding(w)),
        }
    }
    let keys = |cache: Cache<R>| [binding(cache.keys), binding(cache.values)];
    let mut all: Vec<[Binding; 2]> = caches.into_iter().map(keys).collect();
    // Places without a token take the first cache, which is not read for them.
    all.resize(form.tokens, all[0].clone());
    buffers.extend(all.into_iter().flatten());
    buffers.extend(room.buffers.iter().map(|buffer| buffer.clone().binding()));
    let words = info.len();
    let arguments = KernelArguments::new().with_buffers(buffers).with_info(MetadataBindingInfo::new(info, words));
    let cubes = CubeCount::Static(index(NAME, "cubes", cubes)?, 1, 1);
    // SAFETY: buffer lengths were checked against the shape; what lies behind the last token is neither read nor written; all
    // cubes run at the same time, and a cube that waits in vain ends the launch.
    unsafe { client.launch_unchecked(Box::new(WrittenKernel(form)), cubes, arguments) };
    Ok(())
}

impl<R: Runtime> DecoderBlock<R> {
    fn check(&self) -> Result<(), KernelError> {
        let DecoderShape { hidden, intermediate, heads, kv_heads, head_dim, .. } = self.shape;
        let tokens = self.caches.len();
        let (queries, keys) = (heads * head_dim, kv_heads * head_dim);
        for (name, arg, len) in [
            ("x", &self.x, tokens * hidden),
            ("y", &self.y, tokens * hidden),
            ("norm before attention", &self.norms[0], hidden),
            ("norm of queries", &self.norms[1], head_dim),
            ("norm of keys", &self.norms[2], head_dim),
            ("norm before the MLP", &self.norms[3], hidden),
            ("lines", &self.rotary[2], tokens),
        ] {
            expect_len(NAME, name, arg.size(), len)?;
        }
        let rows = [queries, keys, keys, hidden, intermediate, intermediate, hidden];
        let cols = [hidden, hidden, hidden, queries, hidden, hidden, intermediate];
        for (weight, (rows, cols)) in self.weights.iter().zip(rows.into_iter().zip(cols)) {
            match weight {
                Weight::Packed(w) => {
                    w.check(NAME)?;
                    require(NAME, (w.rows, w.cols) == (rows, cols), || {
                        format!("a weight is {} x {}, the shape needs {rows} x {cols}", w.rows, w.cols)
                    })?;
                }
                Weight::Dense(w) => expect_len(NAME, "a weight", w.size(), rows * cols)?,
            }
        }
        for Cache { keys: k, values: v, past } in &self.caches {
            require(NAME, k.size() == v.size() && k.size() / keys > *past, || {
                format!("a cache with room for {} tokens holds {past} already", k.size() / keys)
            })?;
        }
        Ok(())
    }
}

/// The numbers that a launch passes: tokens, the past of each, and the given tensor scales with their reciprocals.
fn info<R: Runtime>(block: &DecoderBlock<R>, places: usize) -> Vec<u64> {
    let mut info = vec![block.caches.len() as u64];
    info.extend((0..places).map(|n| block.caches.get(n).map_or(0, |cache| cache.past as u64)));
    for rounded in block.rounded {
        let full = if let Rounded::By { full } = rounded { full } else { 1.0 };
        info.extend([1.0 / full, full].map(|x| u64::from(x.to_bits())));
    }
    info
}
