//! The blocks for one new token of each sequence, where the backend computes them as one operation.

use crate::{kv_cache::KvCache, model::Qwen3, rope::rotary};
use backend_nvfp4::{DecodeBlock, DecodeTokens, Nvfp4Kernels, decode_blocks};
use burn::tensor::{Tensor, TensorPrimitive};

impl<B: Nvfp4Kernels> Qwen3<B> {
    /// Maps the embeddings `[M, D]` of one new token of each sequence to hidden states `[M, D]`, and appends keys and values to
    /// the caches. `None` if a sequence has more than one new token, or the backend has no such operation for this model.
    pub(crate) fn decode(
        &self,
        h_MD: &Tensor<B, 2>,
        sequences: &mut [(&mut KvCache<B>, usize)],
    ) -> Option<Tensor<B, 2>> {
        if sequences.iter().any(|(_, tokens)| *tokens != 1) {
            return None;
        }
        let config = self.config();
        let pasts: Vec<usize> = sequences.iter().map(|(cache, _)| cache.len()).collect();
        let positions = pasts.iter().map(|past| *past as u32).collect();
        let tokens = DecodeTokens {
            rotary: rotary::<B>(positions, config.head_dim, config.rope_theta, &self.device()),
            pasts,
            attention: self.attention_spec(),
            eps: config.rms_norm_eps,
        };
        let mut blocks: Vec<_> = (0..self.layers.len()).map(|i| self.decode_block(i, sequences)).collect();
        let decoded = decode_blocks(h_MD.clone(), &mut blocks, &tokens);
        for (i, block) in blocks.into_iter().enumerate() {
            for ((cache, _), [k, v]) in sequences.iter_mut().zip(block.caches) {
                cache.layer(i).put([k, v].map(|x| Tensor::from_primitive(TensorPrimitive::Float(x))));
            }
        }
        decoded
    }

    /// Block `i` as the operation takes it. The caches of its layer are empty until they are put back.
    fn decode_block(&self, i: usize, sequences: &mut [(&mut KvCache<B>, usize)]) -> DecodeBlock<B> {
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
            caches: sequences
                .iter_mut()
                .map(|(cache, _)| cache.layer(i).take().map(|x| x.into_primitive().tensor()))
                .collect(),
        }
    }
}
