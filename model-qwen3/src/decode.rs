//! The blocks over caches: the newest tokens of answers as one operation, where the backend has it, and prompts block by block.

use crate::{
    kv_cache::{KvCache, NewTokens},
    model::Qwen3,
    rope::rotary,
};
use backend_nvfp4::{CacheBuffer, DecodeBlock, DecodeTokens, Nvfp4Kernels, decode_blocks};
use burn::tensor::{DType, Int, Tensor, TensorData};

impl<B: Nvfp4Kernels> Qwen3<B> {
    /// Maps new tokens `[1, M]` of several sequences, one sequence after another, to the final hidden states `[M, D]`,
    /// normalized. Each sequence is its cache and its new tokens: either all sequences have [`NewTokens::Prompt`], or all have
    /// [`NewTokens::Answer`]. New tokens also see the tokens that the cache holds, and are appended to it. What is computed for a
    /// token depends only on the tokens of its own sequence, and on which of them were read as an answer's. It does not depend on
    /// how many tokens of a prompt are read at a time.
    ///
    /// # Panics
    /// If prompts and answers are mixed, or the caches of answers belong to different pools.
    pub fn forward_cached(
        &self,
        ids_RT: Tensor<B, 2, Int>,
        sequences: &mut [(&mut KvCache<B>, NewTokens)],
    ) -> Tensor<B, 2> {
        let answers = sequences.iter().filter(|(_, new)| new.is_answer()).count();
        assert!(answers == 0 || answers == sequences.len(), "prompts and answers are read by different operations");
        let h_MD = self.embed(ids_RT);
        let decoded = if answers > 0 { self.decode(&h_MD, sequences) } else { None };
        let h_MD = decoded.unwrap_or_else(|| self.block_by_block(h_MD, sequences));
        sequences.iter_mut().for_each(|(cache, new)| cache.advance(new.count()));
        self.final_norm(h_MD)
    }

    /// Maps the embeddings `[M, D]` of one new token of each sequence to hidden states `[M, D]`, and appends keys and values to
    /// the caches. `None` if the backend has no such operation for this model.
    fn decode(&self, h_MD: &Tensor<B, 2>, sequences: &[(&mut KvCache<B>, NewTokens)]) -> Option<Tensor<B, 2>> {
        let pool = sequences.first()?.0.pool().clone();
        assert!(sequences.iter().all(|(cache, _)| cache.pool().is_same(&pool)), "answers of one forward have one pool");
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
