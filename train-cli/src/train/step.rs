//! One optimizer step: forward and backward of its micro-batches, clipping, update. The backward runs block by block
//! ([`crate::train::streaming`]), and the optimizer takes the gradients of a block before those of the next block exist,
//! unless the norm of all must be known first.
//!
//! A step updates nothing if its loss is not finite, nor if its gradient norm is not finite and known in time. A step that
//! learns its norm while it updates can hold an undo copy: the weights and states as they were, until the norm is known.

use crate::{
    CliError,
    data::order::MicroBatch,
    memory::{pool::Pool, vram::VramReport},
    train::chunked_adamw::{ChunkedAdamw, Rate},
    train::clip::Clipping,
    train::gradients::{Fate, Gathered, ModuleGradients},
    train::objective::Trainee,
    train::pass::{Pass, check_finite},
    train::streaming::Forward,
};
use backend_nvfp4::{Nvfp4Kernels, TrainingBackend};
use burn::tensor::DType;
use model_qwen3::weights::Replace;

/// What makes optimizer steps, and what one step leaves for the next.
pub struct Stepper<B: Nvfp4Kernels> {
    /// Whether a step of one micro-batch that clips by its own norm holds all gradients until the norm is known.
    pub gathers: bool,
    /// The number of blocks, the last ones, whose graphs are kept from the forward to the backward.
    pub kept: usize,
    /// The device's memory pool.
    pub pool: Pool,
    /// How gradients are clipped.
    pub clipping: Clipping,
    /// The type of summed gradients.
    pub sums_dtype: DType,
    /// The optimizer with its states.
    pub optimizer: ChunkedAdamw<B>,
    /// Random seed of the stochastic rounding in the backward.
    pub seed: u64,
    /// Whether a step that learns its norm too late holds an undo copy.
    pub undo: bool,
    /// Micro-batches in a full step. With it each micro-batch of a run gets a number, which seeds its rounding.
    pub accumulation: usize,
}

/// The figures of a step.
#[derive(Debug, Clone, Copy)]
pub struct Stepped {
    /// Mean loss of a supervised token.
    pub loss: f32,
    /// Global gradient norm before clipping.
    pub grad_norm: f32,
}

impl<B: Nvfp4Kernels> Stepper<B> {
    /// Makes step `step` (counted from 1) of the micro-batches `batches`. After an error `net` still has its model.
    ///
    /// # Errors
    /// If the loss or the gradient norm is not finite, if no parameter is trained, or if the device fails.
    pub fn step<AB>(
        &mut self,
        net: &mut Trainee<AB>,
        batches: &[MicroBatch],
        step: usize,
        lr: f64,
        vram: &mut VramReport,
    ) -> Result<Stepped, CliError>
    where
        AB: TrainingBackend<InnerBackend = B>,
    {
        let (last, earlier) = batches.split_last().expect("the data loader makes no empty step");
        let number = |i| micro_batch_number(step, self.accumulation, i);
        let exact = self.clipping.needs_the_norm_first();
        let sums_all = exact && (self.gathers || !earlier.is_empty());
        // The gradients of one micro-batch are held as they are, so that the update is that of a step which measures them
        // in a pass of its own.
        let gathered = Gathered::new(if earlier.is_empty() { DType::F32 } else { self.sums_dtype });
        let mut pass =
            Pass { step, fate: Fate::Gather, gathered, kept: self.kept, optimizer: &mut self.optimizer, vram };

        // 1. Sum the gradients of all micro-batches, or of all but the last, whose gradients need not be kept.
        let mut loss = 0.0;
        let summed = if sums_all { batches } else { earlier };
        for (i, batch) in summed.iter().enumerate() {
            net.seed_rounding(self.seed, number(i));
            self.pool.before_batch::<AB>(&net.model().device(), batch.tokens());
            loss += pass.streaming(net, batch)?;
        }
        net.seed_rounding(self.seed, number(earlier.len()));
        self.pool.before_batch::<AB>(&net.model().device(), last.tokens());

        // 2. Measure the gradient norm, if this step is clipped by its own.
        if sums_all {
            pass.gathered.measure();
        } else if exact {
            pass.fate = Fate::Measure;
            pass.streaming(net, last)?;
        }
        let own_norm = pass.gathered.norm()?;
        if let Some(norm) = own_norm {
            check_finite(step, &[("loss", loss), ("gradient norm", norm)], false)?;
        }

        // 3. Clip and update: from the sums, or block by block with the gradients of the last micro-batch.
        let rate = Rate { lr, clip_factor: self.clipping.clip_factor(own_norm) };
        pass.fate = Fate::Apply { rate, norm_is_known: own_norm.is_some() };
        let mut undo = None;
        if sums_all {
            net.update(|model| pass.walk(ModuleGradients::default()).model(model));
        } else {
            let forward = Forward::of(net, last, self.kept);
            // While the copy's handles are held, the optimizer writes into new buffers and leaves the old ones as they are. The
            // host makes it while a GPU computes the forward.
            undo = (self.undo && own_norm.is_none()).then(|| (net.copy(), pass.optimizer.clone()));
            loss += pass.backward(net, last, forward)?;
        }

        // 4. The norm that the update measured on its way clips the next step.
        let Some(grad_norm) = own_norm.map_or_else(|| pass.gathered.norm(), |norm| Ok(Some(norm)))? else {
            return Err(CliError::Usage("nothing is trained: no parameter has a gradient".into()));
        };
        let finite = check_finite(step, &[("loss", loss), ("gradient norm", grad_norm)], undo.is_none());
        if let (Err(_), Some((model, optimizer))) = (&finite, undo) {
            (*net, self.optimizer) = (model, optimizer);
        }
        finite?;
        self.clipping.last_norm = Some(grad_norm);
        Ok(Stepped { loss, grad_norm })
    }
}

/// The number of micro-batch `i` of step `step` among all of the run, which begins with 0.
fn micro_batch_number(step: usize, accumulation: usize, i: usize) -> u32 {
    ((step - 1) * accumulation + i) as u32
}

#[cfg(test)]
mod tests {
    use super::micro_batch_number;

    /// Two micro-batches with one number would round alike.
    #[test]
    fn the_micro_batches_of_a_run_are_numbered_without_a_gap() {
        for accumulation in [1, 3] {
            let numbers =
                (1..=4).flat_map(|step| (0..accumulation).map(move |i| micro_batch_number(step, accumulation, i)));
            assert!(numbers.eq(0..4 * accumulation as u32), "{accumulation} micro-batches a step");
        }
    }
}
