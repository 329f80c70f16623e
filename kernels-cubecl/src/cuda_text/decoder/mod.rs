//! A transformer block for one new token of each of a few sequences, in one launch: as separate kernels, the launches of a token
//! take several times as long as the GPU needs to read the weights. ```text q, k, v = w norm(x);  h = x + w_o attention(q, k, v,
//! cache);  y = h + w_down (silu(w_gate norm(h)) * w_up norm(h)) for token { norm; q, k, v; rotate; append; attend; o; add; norm;
//! gate, up; silu; down; add }             // the plain loop ``` There is one cube a multiprocessor, and all cubes wait for each
//! other between products (`grid_arrive` and `grid_wait` in numbers.cuh), so the kernel is written in CUDA C++: CubeCL has no
//! such barrier. Numbers are rounded where the separate kernels round them ([`crate::rms_norm`], [`crate::quantize`],
//! [`mod@crate::gemv`], [`crate::rope`], [`mod@crate::swiglu`]); sums in f32 take their terms in another order, which does not
//! depend on the other tokens. Reads every weight once: bound by memory.
//!
//! | file | what it holds |
//! |---|---|
//! | `mod.rs` | the launch, and what it stores between products |
//! | `args.rs` | what a launch takes |
//! | `form.rs` | what is compiled into a kernel |
//! | `text.rs` | the definitions in front of the text |
//! | `numbers.cuh` | rounding, sums of a warp, the barrier of all cubes |
//! | `products.cuh` | activations times codes or 16-bit values |
//! | `attention.cuh` | attention over the caches |
//! | `block.cuh` | the block |

mod args;
mod form;
mod text;

use crate::{
    cuda_text::{WrittenKernel, binding},
    device::known_processors,
    error::{KernelError, index, require},
    mma,
};
use args::NAME;
pub use args::{ActivationRounding, Caches, DecoderBlock, DecoderShape, MAX_TOKENS, PAGE, Weight};
use cubecl::{
    ir::{ElemType, FloatKind},
    prelude::*,
    server::{Binding, Handle, KernelArguments, MetadataBindingInfo},
};
use form::{DecoderForm, SPLITS};

/// What a launch stores between its products. Launches one after another share it.
#[derive(Debug, Clone)]
pub struct Scratch {
    tokens: usize,
    shape: DecoderShape,
    /// The word of the barrier of all cubes; q, k and v; the result of attention; h; the gated values; prepared
    /// activations; shares of attention.
    buffers: [Handle; 7],
}

impl Scratch {
    /// Buffers for `tokens` tokens.
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
            values(hidden.max(intermediate).max(heads * head_dim)),
            client.empty(places * heads * SPLITS * (head_dim + 2) * 4),
        ];
        Self { tokens: places, shape, buffers }
    }
}

/// Whether the device has the kernel, and the kernel these sizes. A device must say how many processors it has.
pub fn fits<R: Runtime>(client: &ComputeClient<R>, shape: DecoderShape, tokens: usize) -> bool {
    let bf16 = ElemType::Float(FloatKind::BF16).into();
    mma::supported(client, bf16)
        && known_processors(client).is_some_and(|cubes| DecoderForm::new(client, shape, tokens, cubes).is_ok())
}

/// Launches the block in `cubes` cubes. All of them must run at the same time: there may be at most one for each of the
/// [`known_processors`].
///
/// # Errors
/// If a buffer does not fit the shape, there are too many cubes, or [`fits`] is false.
pub fn decoder_block<R: Runtime>(
    client: &ComputeClient<R>,
    block: DecoderBlock<R>,
    scratch: &Scratch,
    cubes: usize,
) -> Result<(), KernelError> {
    let tokens = block.caches.pasts.len();
    let most = known_processors(client).unwrap_or(0);
    require(NAME, cubes <= most, || {
        format!("{cubes} cubes wait for each other, and only {most} are certain to run at the same time")
    })?;
    let form = DecoderForm::new(client, block.shape, tokens, cubes)?.for_block(&block)?;
    block.check()?;
    require(NAME, (scratch.tokens, scratch.shape) == (form.tokens, block.shape), || {
        format!("the scratch buffers were made for {} tokens of {:?}", scratch.tokens, scratch.shape)
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
    buffers.extend([caches.keys, caches.values, caches.pages].map(binding));
    buffers.extend(scratch.buffers.iter().map(|buffer| buffer.clone().binding()));
    let words = info.len();
    let arguments = KernelArguments::new().with_buffers(buffers).with_info(MetadataBindingInfo::new(info, words));
    let cubes = CubeCount::Static(index(NAME, "cubes", cubes)?, 1, 1);
    // SAFETY: buffer lengths were checked against the shape, and the caller guarantees that every page lies within the caches; what
    // lies behind the last token is neither read nor written; all cubes run at the same time, which was checked, and a cube that
    // waits in vain ends the launch.
    unsafe { client.launch_unchecked(Box::new(WrittenKernel(form)), cubes, arguments) };
    Ok(())
}

/// The numbers that a launch passes: tokens, places for pages of each, the past of each, and the given tensor scales with their
/// reciprocals.
fn info<R: Runtime>(block: &DecoderBlock<R>, places: usize) -> Vec<u64> {
    let pasts = &block.caches.pasts;
    let mut info = vec![pasts.len() as u64, block.caches.pages_of_each() as u64];
    info.extend((0..places).map(|n| pasts.get(n).map_or(0, |past| *past as u64)));
    for rounded in block.rounded {
        let full = if let ActivationRounding::By { full } = rounded { full } else { 1.0 };
        info.extend([1.0 / full, full].map(|x| u64::from(x.to_bits())));
    }
    info
}
