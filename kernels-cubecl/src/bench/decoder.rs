//! Times a whole block of a decoded token, and the choice of the most likely tokens.

use super::{
    BF16, Row,
    timing::{Bench, Data},
};
use crate::{
    KernelError,
    cuda_text::decoder::{self, ActivationRounding, Caches, DecoderBlock, DecoderShape, PAGE, Scratch, Weight},
    device::processors,
    e4m3::BYTES_PER_WORD,
    likeliest,
    operands::PackedArgs,
};
use cubecl::prelude::*;

/// The sizes of Qwen3-4B.
const SHAPE: DecoderShape =
    DecoderShape { hidden: 2560, intermediate: 9728, heads: 32, kv_heads: 8, head_dim: 128, eps: 1e-6 };
const VOCABULARY: usize = 151_936;
/// Sets of weights in turn, so that none is still in a cache.
const SETS: usize = 4;

impl<R: Runtime> Bench<'_, R> {
    pub(super) fn decoder(&self, show: &mut dyn FnMut(Row)) -> Result<(), KernelError> {
        for (tokens, past, bytes) in [(1, 1024, false), (1, 16_384, false), (1, 16_384, true), (16, 1024, false)] {
            self.decoder_block(show, tokens, past, bytes)?;
        }
        for (rows, count) in [(1, 1), (1, 20), (16, 20)] {
            let (x, out) = (self.bytes(rows * VOCABULARY * 4, 1), self.bytes(rows * likeliest::words(count) * 4, 2));
            let bytes = (rows * VOCABULARY * 4) as f64;
            self.row(show, "likeliest", format!("{count} of {rows} x {VOCABULARY}"), (Some(bytes), None), |_| {
                let out = self.arg(&out, rows * likeliest::words(count));
                likeliest::likeliest(self.client, self.arg(&x, rows * VOCABULARY), out, [rows, VOCABULARY], count)
            })?;
        }
        Ok(())
    }

    fn decoder_block(
        &self,
        show: &mut dyn FnMut(Row),
        tokens: usize,
        past: usize,
        cache_bytes: bool,
    ) -> Result<(), KernelError> {
        const NAME: &str = "decoder block";
        if !NAME.contains(self.filter) || !decoder::fits(self.client, SHAPE, tokens) {
            return Ok(());
        }
        let DecoderShape { hidden, intermediate, heads, kv_heads, head_dim, .. } = SHAPE;
        let (queries, keys) = (heads * head_dim, kv_heads * head_dim);
        let sizes = [
            (queries, hidden),
            (keys, hidden),
            (keys, hidden),
            (hidden, queries),
            (intermediate, hidden),
            (intermediate, hidden),
            (hidden, intermediate),
        ];
        let matrix = |n: usize, (rows, cols): (usize, usize)| {
            (self.bytes(rows * cols / 2, n as u32 + 1), self.bytes(rows * cols / 16, n as u32 + 90))
        };
        let set = |set: usize| sizes.iter().enumerate().map(|(n, size)| matrix(7 * set + n, *size)).collect();
        let sets: Vec<Vec<(Data<'_>, Data<'_>)>> = (0..SETS).map(set).collect();
        let ones = |len: usize| self.words(vec![1.0f32.to_bits(); len]);
        let norms = [hidden, head_dim, head_dim, hidden].map(ones);
        let angles = ones(tokens * head_dim / 2);
        let (lines, global) = (self.words((0..tokens as u32).collect()), self.words(vec![1e-4f32.to_bits()]));
        let (x, y) = (self.values(tokens * hidden), self.values(tokens * hidden));
        let pages = (past + 1).div_ceil(PAGE);
        let (room, size) = (tokens * pages * PAGE * keys, if cache_bytes { 1 } else { BF16.size() });
        // Zero bytes are zeros in both formats.
        let caches = [1, 2].map(|n| self.bytes(room * size, n));
        let table = self.words((0..(tokens * pages) as u32).collect());
        let scratch = Scratch::new(self.client, SHAPE, tokens);
        let weights: usize = sizes.iter().map(|(rows, cols)| rows * cols / 16 * 9).sum();
        let bytes = (weights + tokens * past * keys * 2 * size) as f64;
        let kept = if cache_bytes { " in 8 bits" } else { "" };
        self.row(show, NAME, format!("{tokens} tokens, w4a4, over {past}{kept}"), (Some(bytes), None), |i| {
            let weight = |n: usize| {
                let ((rows, cols), (codes, scales)) = (sizes[n], &sets[i % SETS][n]);
                let (codes, scales) = (self.arg(codes, rows * cols / 8), self.arg(scales, rows * cols / 16));
                Weight::Packed(PackedArgs { codes, scales, global: self.arg(&global, 1), rows, cols })
            };
            let len = if cache_bytes { room / BYTES_PER_WORD } else { room };
            let [keys, values] = caches.each_ref().map(|x| self.arg(x, len));
            let caches = Caches {
                keys,
                values,
                bytes: cache_bytes,
                pages: self.arg(&table, tokens * pages),
                pasts: vec![past; tokens],
            };
            let block = DecoderBlock {
                shape: SHAPE,
                x: self.arg(&x, tokens * hidden),
                y: self.arg(&y, tokens * hidden),
                norms: [0, 1, 2, 3].map(|n: usize| self.arg(&norms[n], [hidden, head_dim, head_dim, hidden][n])),
                rotary: [
                    self.arg(&angles, tokens * head_dim / 2),
                    self.arg(&angles, tokens * head_dim / 2),
                    self.arg(&lines, tokens),
                ],
                weights: std::array::from_fn(weight),
                rounded: [ActivationRounding::EachRow; 4],
                caches,
            };
            decoder::decoder_block(self.client, block, &scratch, processors(self.client))
        })
    }
}
