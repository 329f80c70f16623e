//! The blocks of a model for one new token of each sequence: one launch a block, where the kernel takes it.

use super::launch::{arg, dims, empty, launched, writable};
use crate::{
    cache::CacheBuffer,
    decode::{DecodeBlock, DecodeTokens},
    kernels::Nvfp4Kernels,
    ops::{LayerWeight, LinearLayer},
    recipe::ActivationScale,
};
use burn::tensor::{DType, backend::Backend};
use burn_cubecl::{CubeRuntime, kernel::into_contiguous, tensor::CubeTensor};
use kernels_cubecl::{
    cuda_text::decoder::{self, ActivationRounding, Caches, DecoderBlock, DecoderShape, Scratch, Weight},
    device::processors,
};
use std::ops::Range;

/// See [`Nvfp4Kernels::decode_blocks`].
pub(super) fn decode_blocks<B, R>(
    x: CubeTensor<R>,
    blocks: &mut [DecodeBlock<B>],
    tokens: &DecodeTokens<B>,
) -> Option<CubeTensor<R>>
where
    R: CubeRuntime,
    B: Nvfp4Kernels + Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
{
    let shape = shape(&x, blocks.first()?, tokens)?;
    let count = tokens.pasts.len();
    let most = (1..=count.min(decoder::MAX_TOKENS)).rev().find(|most| decoder::fits(&x.client, shape, *most))?;
    let roundings: Vec<[ActivationRounding; 4]> = blocks.iter().map(rounded).collect::<Option<_>>()?;
    // More tokens than a launch takes go through the blocks one group after another.
    let groups = (0..count).step_by(most).map(|first| first..count.min(first + most));
    let of_group = |rows: Range<usize>| {
        let whole = rows.len() == count;
        let lines = tokens.rotary.positions.clone();
        let lines = if whole { lines } else { B::int_slice(lines, &[rows.clone().into()]) };
        let own = if whole { x.clone() } else { B::float_slice(x.clone(), &[rows.clone().into()]) };
        let pages = tokens.pages.clone();
        let pages = into_contiguous(if whole { pages } else { B::int_slice(pages, &[rows.clone().into()]) });
        let scratch = Scratch::new(&x.client, shape, rows.len());
        let group = Group { rows, lines: into_contiguous(lines), pages, scratch };
        let launch = |x, (block, rounded)| group.launch(x, block, rounded, tokens, shape);
        blocks.iter_mut().zip(roundings.iter().copied()).fold(into_contiguous(own), launch)
    };
    let mut parts: Vec<_> = groups.map(of_group).collect();
    Some(if parts.len() == 1 { parts.remove(0) } else { B::float_cat(parts, 0) })
}

/// Tokens that go through the blocks together.
struct Group<R: CubeRuntime> {
    rows: Range<usize>,
    /// The line of each token in the tables of angles.
    lines: CubeTensor<R>,
    /// The pages of each token's sequence.
    pages: CubeTensor<R>,
    scratch: Scratch,
}

impl<R: CubeRuntime> Group<R> {
    /// Launches a block.
    fn launch<B>(
        &self,
        x: CubeTensor<R>,
        block: &mut DecodeBlock<B>,
        rounded: [ActivationRounding; 4],
        tokens: &DecodeTokens<B>,
        shape: DecoderShape,
    ) -> CubeTensor<R>
    where
        B: Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
    {
        let weights = block.layers.each_ref().map(|layer| match &layer.weight {
            LayerWeight::Packed { packed, .. } => Weight::Packed(packed.args()),
            LayerWeight::Dense(w) | LayerWeight::Held { values: w, .. } => Weight::Dense(arg(w)),
        });
        let contiguous = |x: &CubeTensor<R>| arg(&into_contiguous(x.clone()));
        let y = empty(&x, dims(&x), x.dtype);
        let [keys, values] = block.cache.each_mut().map(|buffer| {
            let (CacheBuffer::Native(x) | CacheBuffer::E4m3(x)) = buffer;
            // Nothing else may hold the buffer, so that it is written in place: the result takes its place meanwhile.
            let taken = std::mem::replace(x, y.clone());
            *x = writable(taken);
            arg(x)
        });
        let caches = Caches {
            keys,
            values,
            bytes: matches!(block.cache[0], CacheBuffer::E4m3(_)),
            pages: arg(&self.pages),
            pasts: tokens.pasts[self.rows.clone()].to_vec(),
        };
        let rotary = [contiguous(&tokens.rotary.cos), contiguous(&tokens.rotary.sin), arg(&self.lines)];
        let norms = block.norms.each_ref().map(contiguous);
        let own = DecoderBlock { shape, x: arg(&x), y: arg(&y), norms, rotary, weights, rounded, caches };
        launched(decoder::decoder_block(&x.client, own, &self.scratch, processors(&x.client)));
        y
    }
}

/// The sizes of a block, or `None` if the numbers are not bf16.
fn shape<B, R>(x: &CubeTensor<R>, block: &DecodeBlock<B>, tokens: &DecodeTokens<B>) -> Option<DecoderShape>
where
    R: CubeRuntime,
    B: Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
{
    let of_bf16 = |x: &CubeTensor<R>| x.dtype == DType::BF16;
    let takes = |buffer: &CacheBuffer<B>| match buffer {
        CacheBuffer::Native(x) => of_bf16(x),
        CacheBuffer::E4m3(_) => true,
    };
    let [intermediate, _] = block.layers[4].weight.dims();
    (of_bf16(x) && block.cache.iter().all(takes)).then(|| DecoderShape {
        hidden: dims(x)[1],
        intermediate,
        heads: tokens.attention.heads,
        kv_heads: tokens.attention.kv_heads,
        head_dim: tokens.attention.head_dim,
        eps: tokens.eps as f32,
    })
}

/// How the activations of each product are rounded. `None` where the kernel does not take the block: a weight that is quantized
/// in the forward, 16-bit values of another type, layers that read the same activations in two ways.
fn rounded<B, R>(block: &DecodeBlock<B>) -> Option<[ActivationRounding; 4]>
where
    R: CubeRuntime,
    B: Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
{
    let of_layer = |layer: &LinearLayer<B>| {
        let packed = match &layer.weight {
            LayerWeight::Packed { .. } => true,
            LayerWeight::Dense(w) | LayerWeight::Held { values: w, .. } => {
                if layer.spec.recipe.packs_weights() || w.dtype != DType::BF16 || !w.is_contiguous() {
                    return None;
                }
                false
            }
        };
        let rounded = match layer.spec.activation_scale {
            _ if !layer.spec.recipe.packs_activations() => ActivationRounding::Not,
            ActivationScale::EachRow => ActivationRounding::EachRow,
            ActivationScale::Given(scale) => ActivationRounding::By { full: scale.reciprocal() },
            ActivationScale::AllRows => return None,
        };
        Some((packed, rounded))
    };
    let of_group = |layers: &[LinearLayer<B>]| {
        let first = of_layer(&layers[0])?;
        layers.iter().all(|layer| of_layer(layer) == Some(first)).then_some(first.1)
    };
    Some([
        of_group(&block.layers[..3])?,
        of_group(&block.layers[3..4])?,
        of_group(&block.layers[4..6])?,
        of_group(&block.layers[6..])?,
    ])
}
