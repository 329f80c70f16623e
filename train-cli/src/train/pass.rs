//! One pass over a micro-batch, forward and backward: what it needs besides the model. The pass itself is in
//! [`crate::train::streaming`].

use crate::{
    CliError,
    memory::vram::VramReport,
    train::chunked_adamw::ChunkedAdamw,
    train::gradients::{Fate, Gathered, ModuleGradients, Walk},
    train::objective::Trainee,
    watchdog,
};
use backend_nvfp4::{Nvfp4Kernels, TrainingBackend};
use burn::tensor::Tensor;
use model_qwen3::weights::to_host;

/// What the passes of one optimizer step share.
pub struct Pass<'a, B: Nvfp4Kernels> {
    /// The optimizer step, counted from 1.
    pub step: usize,
    /// What happens to the gradients of the next pass.
    pub fate: Fate,
    /// The gradients that earlier passes of this step summed.
    pub gathered: Gathered<B>,
    /// The number of blocks, the last ones, whose graphs are kept from the forward to the backward.
    pub kept: usize,
    /// The optimizer that gradients are given to.
    pub optimizer: &'a mut ChunkedAdamw<B>,
    /// The memory report.
    pub vram: &'a mut VramReport,
}

impl<B: Nvfp4Kernels> Pass<'_, B> {
    /// Makes a walk over the tensors of a model that `grads` belong to.
    pub fn walk<AB>(&mut self, grads: ModuleGradients<B>) -> Walk<'_, AB>
    where
        AB: TrainingBackend<InnerBackend = B>,
    {
        Walk { grads, fate: self.fate, gathered: &mut self.gathered, optimizer: self.optimizer, codes: None }
    }

    /// Reads a loss, and refuses one that is not finite before its gradients are used.
    ///
    /// # Errors
    /// If the loss is not finite or the device fails.
    pub fn finite_loss(&self, loss: Tensor<B, 1>) -> Result<f32, CliError> {
        let value = to_host(loss)?[0];
        check_finite(self.step, &[("loss", value)], false)?;
        Ok(value)
    }

    /// Notes the end of a phase in the memory report, and that the step has made progress. A pass that only measures is one
    /// phase.
    ///
    /// # Errors
    /// If the device fails.
    pub fn note<AB>(&mut self, net: &Trainee<AB>, phase: &str) -> Result<(), CliError>
    where
        AB: TrainingBackend<InnerBackend = B>,
    {
        watchdog::moved();
        let phase = match (self.fate, phase) {
            (Fate::Measure, "backward_done") => "norm_done",
            (Fate::Measure, _) => return Ok(()),
            (_, phase) => phase,
        };
        self.vram.note::<AB>(&net.model().device(), self.step, phase)
    }
}

/// Refuses figures of a step that are not finite; `updated` says whether the step has updated weights.
///
/// # Errors
/// If a figure is infinite or not a number.
pub fn check_finite(step: usize, figures: &[(&'static str, f32)], updated: bool) -> Result<(), CliError> {
    let Some(&(what, value)) = figures.iter().find(|(_, value)| !value.is_finite()) else { return Ok(()) };
    let hint = "Start a new run from the last checkpoint (-m RUN/checkpoint-N) with a lower --learning-rate".into();
    Err(CliError::Diverged { step, what, value, updated, hint })
}
