//! The blocks over caches: the newest tokens of answers as one operation, where the backend has it, and prompts block by block.

use crate::{
    kv_cache::{KvCache, NewTokens},
    model::{Qwen3, below_each_other},
    rope::rotary,
};
use backend_nvfp4::{CacheBuffer, DecodeBlock, DecodeTokens, Nvfp4Kernels, decode_blocks};
use burn::tensor::{DType, Int, Tensor, TensorData, backend::Backend};

impl<B: Nvfp4Kernels> Qwen3<B> {
    /// Maps new tokens `[1, M]` of several sequences, one sequence after another, to the final hidden states `[M, D]`,
    /// normalized. Each sequence is its cache and its new tokens. These also see the tokens that the cache
    /// holds, and are appended to it. What is computed for a token depends on the tokens of its own sequence alone, and on which of
    /// them are an answer's; it does not depend on how many tokens of a prompt are read at a time.
    pub fn forward_cached(
        &self,
        ids_RT: Tensor<B, 2, Int>,
        sequences: &mut [(&mut KvCache<B>, NewTokens)],
    ) -> Tensor<B, 2> {
        let h_MD = self.embed(ids_RT);
        let h_MD = self.blocks_cached(h_MD, sequences);
        sequences.iter_mut().for_each(|(cache, new)| cache.advance(new.count()));
        self.final_norm(h_MD)
    }

    /// Maps the embeddings `[M, D]` of the new tokens of several sequences to hidden states `[M, D]`. Answers are computed by
    /// themselves, so that their numbers do not depend on whether others read prompts.
    fn blocks_cached(&self, h_MD: Tensor<B, 2>, sequences: &mut [(&mut KvCache<B>, NewTokens)]) -> Tensor<B, 2> {
        let all: Vec<NewTokens> = sequences.iter().map(|(_, new)| *new).collect();
        if all.iter().all(|new| new.is_answer()) {
            return self.newest_tokens(h_MD, sequences);
        }
        if !all.iter().any(|new| new.is_answer()) {
            return self.block_by_block(h_MD, sequences);
        }
        let counts: Vec<usize> = all.iter().map(|new| new.count()).collect();
        let (mut of_answers, mut of_prompts) = (Vec::new(), Vec::new());
        for (new, rows) in all.iter().zip(rows_of_each(&h_MD, &counts)) {
            if new.is_answer() { of_answers.push(rows) } else { of_prompts.push(rows) }
        }
        let (answers, prompts): (Vec<_>, Vec<_>) =
            sequences.iter_mut().map(|(cache, new)| (&mut **cache, *new)).partition(|(_, new)| new.is_answer());
        let decoded = self.newest_tokens(below_each_other(of_answers), &answers);
        let read = self.block_by_block(below_each_other(of_prompts), &prompts);
        let counts_read: Vec<usize> = prompts.iter().map(|(_, new)| new.count()).collect();
        let mut read = rows_of_each(&read, &counts_read).into_iter();
        let mut decoded = rows_of_each(&decoded, &vec![1; answers.len()]).into_iter();
        let in_order = all.iter().filter_map(|new| if new.is_answer() { decoded.next() } else { read.next() });
        below_each_other(in_order.collect())
    }

    /// Maps the embeddings `[M, D]` of the newest tokens of answers to hidden states `[M, D]`.
    fn newest_tokens(&self, h_MD: Tensor<B, 2>, sequences: &[(&mut KvCache<B>, NewTokens)]) -> Tensor<B, 2> {
        self.decode(&h_MD, sequences).unwrap_or_else(|| self.block_by_block(h_MD, sequences))
    }

    /// Maps the embeddings `[M, D]` of one new token of each sequence to hidden states `[M, D]`, and appends keys and values to
    /// the caches. `None` if not all have their pages in one pool, or the backend has no such operation for this model.
    fn decode(&self, h_MD: &Tensor<B, 2>, sequences: &[(&mut KvCache<B>, NewTokens)]) -> Option<Tensor<B, 2>> {
        let pool = sequences.first()?.0.pool().clone();
        if sequences.iter().any(|(cache, _)| !cache.pool().is_same(&pool)) {
            return None;
        }
        let config = self.config();
        let pasts: Vec<usize> = sequences.iter().map(|(cache, _)| cache.tokens()).collect();
        let positions = pasts.iter().map(|past| *past as u32).collect();
        let tokens = DecodeTokens {
            rotary: rotary::<B>(positions, config.head_dim, config.rope_theta, &self.device()),
            pages: self.pages_of_each(sequences).into_primitive(),
            pasts,
            attention: self.attention_spec(),
            eps: config.rms_norm_eps,
        };
        let mut blocks: Vec<_> = (0..self.layers.len()).map(|i| self.decode_block(i, pool.take(i))).collect();
        let decoded = decode_blocks(h_MD.clone(), &mut blocks, &tokens);
        blocks.into_iter().enumerate().for_each(|(i, block)| pool.put(i, block.cache));
        decoded
    }

    /// The pages of each sequence, `[M, n]`. Shorter rows end with pages that are not read.
    fn pages_of_each(&self, sequences: &[(&mut KvCache<B>, NewTokens)]) -> Tensor<B, 2, Int> {
        let most = sequences.iter().map(|(cache, _)| cache.pages().len()).max().unwrap_or(0);
        let row = |(cache, _): &(&mut KvCache<B>, NewTokens)| -> Vec<u32> {
            let pages = cache.pages().iter().map(|page| *page as u32);
            pages.chain(std::iter::repeat(0)).take(most).collect()
        };
        let all: Vec<u32> = sequences.iter().flat_map(row).collect();
        // Uploaded flat: CUDA pads the rows of a matrix.
        let data = TensorData::new(all, [sequences.len() * most]);
        Tensor::<B, 1, Int>::from_data(data, (&self.device(), DType::U32)).reshape([sequences.len(), most])
    }

    /// Block `i` as the operation takes it, with its KV cache.
    fn decode_block(&self, i: usize, cache: [CacheBuffer<B>; 2]) -> DecodeBlock<B> {
        let block = &self.layers[i];
        let (attention, mlp) = (&block.self_attn, &block.mlp);
        let spec = self.spec_of_block(self.spec().each_row(), i);
        let norms = [&block.input_layernorm, &attention.q_norm, &attention.k_norm, &block.post_attention_layernorm];
        let layers = [
            &attention.q_proj,
            &attention.k_proj,
            &attention.v_proj,
            &attention.o_proj,
            &mlp.gate_proj,
            &mlp.up_proj,
            &mlp.down_proj,
        ];
        DecodeBlock {
            norms: norms.map(|norm| norm.val().into_primitive().tensor()),
            layers: layers.map(|layer| layer.operation(spec)),
            cache,
        }
    }
}

/// The rows of each sequence, if these have so many of them.
fn rows_of_each<B: Backend>(x: &Tensor<B, 2>, counts: &[usize]) -> Vec<Tensor<B, 2>> {
    let mut end = 0;
    let rows = |count: &usize| {
        end += count;
        x.clone().slice(end - count..end)
    };
    counts.iter().map(rows).collect()
}
