//! Damped finish: over the last part of a run, blocks freeze on their NVFP4 codes one after another, first to last, so
//! that the exported model is as good as the master weights. Without it, straight-through weights swing across code
//! thresholds to the last step. Whatever is not frozen yet trains on and makes up for the blocks that are. A frozen
//! linear layer keeps its codes up to the export, byte for byte.

use crate::train::chunked_adamw::ChunkedAdamw;
use backend_nvfp4::{LinearSpec, Nvfp4Kernels, Nvfp4Linear, Nvfp4Tensor, PackedMaster, TrainingBackend};
use burn::{
    module::{AutodiffModule, Module, Param},
    tensor::{DType, Tensor},
};
use model_qwen3::model::{Attention, Block, Mlp, Qwen3};

/// When blocks freeze.
#[derive(Debug, Clone, Copy)]
pub struct DampedFinish {
    /// The first step of the finish, counted from 0.
    pub start: usize,
    /// Steps of the run.
    pub total: usize,
}

/// The share of the finish after which the last block freezes. Norms, embedding and head train to the end.
const LAST_BLOCK_AT: f64 = 0.8;

impl DampedFinish {
    /// A finish over the last `share` of `total` steps. No block freezes before step `from`, counted from 0, where the recipe
    /// begins.
    pub fn new(share: f64, total: usize, from: usize) -> Self {
        let start = total - (total as f64 * share).round() as usize;
        Self { start: start.max(from), total }
    }

    /// How many of `blocks` blocks are frozen in step `step`, counted from 0.
    pub fn frozen(&self, step: usize, blocks: usize) -> usize {
        if step < self.start || self.start == self.total {
            return 0;
        }
        let done = (step - self.start + 1) as f64 / (self.total - self.start) as f64;
        ((done / LAST_BLOCK_AT * blocks as f64) as usize).min(blocks)
    }
}

/// Freezes the first `blocks` blocks of a model on their codes. Blocks that are frozen already, or that compute in
/// bf16, stay as they are.
pub fn freeze<AB: TrainingBackend>(
    mut model: Qwen3<AB>,
    blocks: usize,
    optimizer: &mut ChunkedAdamw<AB::InnerBackend>,
) -> Qwen3<AB> {
    let mut on_codes = OnCodes { spec: model.spec(), optimizer };
    let freezes: Vec<bool> = (0..model.layers.len()).map(|i| i < blocks && !model.is_bf16(i)).collect();
    let layers = std::mem::take(&mut model.layers).into_iter().zip(freezes);
    model.layers = layers.map(|(block, freezes)| if freezes { on_codes.block(block) } else { block }).collect();
    model
}

/// Replaces the master weights of linear layers by their codes.
struct OnCodes<'a, B: Nvfp4Kernels> {
    spec: LinearSpec,
    optimizer: &'a mut ChunkedAdamw<B>,
}

impl<B: Nvfp4Kernels> OnCodes<'_, B> {
    fn block<AB: TrainingBackend<InnerBackend = B>>(&mut self, block: Block<AB>) -> Block<AB> {
        let Block { self_attn: a, mlp: m, input_layernorm, post_attention_layernorm } = block;
        let [q_proj, k_proj, v_proj] = self.together([a.q_proj, a.k_proj, a.v_proj]);
        let [gate_proj, up_proj] = self.together([m.gate_proj, m.up_proj]);
        let ([o_proj], [down_proj]) = (self.together([a.o_proj]), self.together([m.down_proj]));
        let self_attn = Attention { q_proj, k_proj, v_proj, o_proj, q_norm: a.q_norm, k_norm: a.k_norm };
        Block { self_attn, mlp: Mlp { gate_proj, up_proj, down_proj }, input_layernorm, post_attention_layernorm }
    }

    /// Freezes layers that read the same activations, and may share a tensor scale.
    fn together<AB: TrainingBackend<InnerBackend = B>, const LAYERS: usize>(
        &mut self,
        layers: [Nvfp4Linear<AB>; LAYERS],
    ) -> [Nvfp4Linear<AB>; LAYERS] {
        let master = |layer: &Nvfp4Linear<AB>| match layer {
            Nvfp4Linear::Master(master) => Some(master.weight.val().inner()),
            _ => None,
        };
        let (masters, spec) = (layers.iter().filter_map(master), self.spec.weights());
        let codes: Vec<_> = if self.spec.shares_scale {
            Nvfp4Tensor::quantize_together(masters.collect(), spec)
        } else {
            masters.map(|master| Nvfp4Tensor::quantize(master, spec)).collect()
        };
        let mut codes = codes.into_iter();
        layers.map(|layer| match layer {
            Nvfp4Linear::Master(master) => self.frozen(&master.weight, codes.next().expect("each master has codes")),
            other => other,
        })
    }

    fn frozen<AB: TrainingBackend<InnerBackend = B>>(
        &mut self,
        p: &Param<Tensor<AB, 2>>,
        codes: Nvfp4Tensor<B>,
    ) -> Nvfp4Linear<AB> {
        let weight = AutodiffModule::from_inner(codes);
        // The gradient's parameter keeps the id of the weight; its value is never read.
        let gradient = Param::initialized(p.id, Tensor::zeros([1, 1], (&p.device(), DType::F32)));
        self.optimizer.forget(p.id);
        Nvfp4Linear::PackedMaster(PackedMaster::new(weight, gradient)).no_grad()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_freeze_one_after_another_and_the_last_well_before_the_end() {
        let finish = DampedFinish::new(0.2, 100, 0);
        let frozen: Vec<usize> = (0..100).map(|step| finish.frozen(step, 8)).collect();
        assert!(frozen[..81].iter().all(|n| *n == 0), "{frozen:?}");
        assert!(frozen.windows(2).all(|w| w[0] <= w[1] && w[1] - w[0] <= 1), "{frozen:?}");
        assert!(frozen[95] == 8 && frozen[94] < 8, "{frozen:?}");
        assert!((0..100).all(|step| DampedFinish::new(0.0, 100, 99).frozen(step, 8) == 0));
    }
}
