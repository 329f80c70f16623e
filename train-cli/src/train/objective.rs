//! The training objective: a model with the loss that it is trained on. The loss of a micro-batch is the sum over its
//! supervised tokens, divided by the number of supervised tokens in the whole optimizer step, so that the losses of
//! the micro-batches of a step add up to the mean.
//!
//! The model lies in a slot that it can be taken from: an update consumes a parameter and puts the new one back, so
//! that no second handle on its buffer keeps the update from being in place. An update cannot fail, so a step that
//! fails leaves the model in the slot.
//!
//! Shape letters are those of [`crate`].

#![allow(non_snake_case)] // Shapes are part of names, as in the model.

use crate::{data::order::MicroBatch, settings::LossKind, watchdog};
use backend_nvfp4::Nvfp4Backend;
use burn::{
    module::Module,
    tensor::{Tensor, TensorData, backend::Backend},
};
use model_qwen3::{
    loss::{IGNORE, hidden_l1_sum, shifted_targets},
    model::{Block, Context, Places, Qwen3, ids_tensor},
    weights::without_codes,
};

/// A model with the loss that it is trained on.
#[derive(Module, Debug)]
pub struct Trainee<B: Backend> {
    /// Empty only while [`Self::update`] runs.
    slot: Option<Qwen3<B>>,
    #[module(skip)]
    loss: LossKind,
    #[module(skip)]
    first_trained: usize,
}

impl<B: Backend> Trainee<B> {
    /// Pairs a model with its loss. Block `first_trained` is the first that is trained; above 0 the embedding is not
    /// trained either.
    pub fn new(model: Qwen3<B>, loss: LossKind, first_trained: usize) -> Self {
        Self { slot: Some(model), loss, first_trained }
    }

    /// The model.
    pub fn model(&self) -> &Qwen3<B> {
        self.slot.as_ref().expect("`update` puts the model back")
    }

    /// Takes the model out, without its loss and without codes that the optimizer has left.
    pub fn into_model(self) -> Qwen3<B> {
        without_codes(self.slot.expect("`update` puts the model back"))
    }

    /// A second handle on the model, without codes that the optimizer has left.
    #[must_use]
    pub fn copy(&self) -> Self {
        let mut copy = self.clone();
        copy.update(without_codes);
        copy
    }

    /// Replaces the model by what `change` makes of it. No other handle on its tensors is alive meanwhile, so
    /// `change` can update them in place.
    pub fn update(&mut self, change: impl FnOnce(Qwen3<B>) -> Qwen3<B>) {
        self.slot = self.slot.take().map(change);
    }

    /// Replaces block `i`, as [`Self::update`] replaces the model.
    pub fn update_block(&mut self, i: usize, change: impl FnOnce(Block<B>) -> Block<B>) {
        self.update(|mut model| {
            let block = model.layers.remove(i);
            model.layers.insert(i, change(block));
            model
        });
    }

    /// The backward ends at this block; at 0 it continues to the embedding.
    pub fn first_trained(&self) -> usize {
        self.first_trained
    }
}

impl<B: Nvfp4Backend> Trainee<B> {
    /// Seeds the stochastic rounding of the next passes: those over micro-batch `number` of the run.
    pub fn seed_rounding(&mut self, seed: u64, number: u32) {
        self.update(|mut model| {
            model.draw_from(seed, number);
            model
        });
    }

    /// The loss of a micro-batch, `[1]`, computed in one graph.
    pub fn batch_loss(&self, batch: &MicroBatch) -> Tensor<B, 1> {
        let context = self.context(batch);
        let mut h_MD = self.embedded(batch);
        for (i, block) in self.model().layers.iter().enumerate() {
            watchdog::moved();
            h_MD = block.forward(h_MD, &self.model().of_block(&context, i));
        }
        self.head_loss(h_MD, batch)
    }

    /// The input of the first block, `[M, D]`.
    pub fn embedded(&self, batch: &MicroBatch) -> Tensor<B, 2> {
        let model = self.model();
        let ids = ids_tensor(&batch.padded(), model.config(), &model.device());
        model.embed(ids.expect("the data loader checks ids against the vocabulary"))
    }

    /// What every block is told of a micro-batch: the positions of its tokens, and the documents that each of them attends to.
    pub fn context(&self, batch: &MicroBatch) -> Context<B> {
        let (positions, starts) = batch.places();
        self.model().context(&[Places { rows: batch.ids.len(), past: 0, positions, starts }])
    }

    /// The loss of a micro-batch, `[1]`, from the last block's output `[M, D]`.
    pub fn head_loss(&self, h_MD: Tensor<B, 2>, batch: &MicroBatch) -> Tensor<B, 1> {
        let targets = shifted_targets(&batch.ids, &batch.supervised, batch.tokens_a_row());
        let h_MD = self.model().final_norm(h_MD);
        let sum = match self.loss {
            LossKind::CrossEntropy => self.cross_entropy(h_MD, &targets),
            LossKind::HiddenL1 => self.hidden_l1(h_MD, &targets, batch.tokens_a_row()),
        };
        sum / batch.divisor as f64
    }

    /// Sum of the cross-entropies of supervised tokens. Logits are V wide, so only supervised rows get any.
    fn cross_entropy(&self, h_MD: Tensor<B, 2>, targets: &[i64]) -> Tensor<B, 1> {
        let device = h_MD.device();
        let rows: Vec<i32> = (0..targets.len()).filter(|&i| targets[i] != IGNORE).map(|i| i as i32).collect();
        let supervised: Vec<i64> = targets.iter().copied().filter(|&target| target != IGNORE).collect();
        let count = rows.len();
        if count == 0 {
            return Tensor::zeros([1], &device);
        }
        let h_MD = if count == targets.len() {
            h_MD
        } else {
            h_MD.select(0, Tensor::from_data(TensorData::new(rows, [count]), &device))
        };
        self.model().loss_sum(h_MD, &supervised)
    }

    /// Sum over supervised tokens of the mean absolute difference between the hidden state and the embedding of the
    /// next token.
    fn hidden_l1(&self, h_MD: Tensor<B, 2>, targets: &[i64], tokens_a_row: usize) -> Tensor<B, 1> {
        let model = self.model();
        let next: Vec<Vec<u32>> =
            targets.chunks(tokens_a_row).map(|row| row.iter().map(|&id| id.max(0) as u32).collect()).collect();
        let next = ids_tensor(&next, model.config(), &model.device()).expect("targets are token ids");
        let kept = targets.iter().map(|&target| if target == IGNORE { 0.0 } else { 1.0 }).collect();
        hidden_l1_sum(h_MD, model.embed(next).detach(), kept)
    }
}
