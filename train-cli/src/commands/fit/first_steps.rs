//! The rehearsal of a run: its first steps, for a model of the run's shapes but of few blocks, on a device that only records
//! which kernels they launch. These are compiled before the run needs them ([`crate::ahead`]).

use super::ready::Ready;
use crate::{CliError, device::Job, memory::vram::VramReport};
use backend_nvfp4::{DeviceServices, Nvfp4Kernels, Precision};
use model_qwen3::weights;

/// The first steps of this run.
pub struct FirstSteps<'a>(pub &'a Ready);

impl Job for FirstSteps<'_> {
    type Output = ();

    fn run<B: Nvfp4Kernels + DeviceServices>(self, device: B::Device, _: Precision) -> Result<(), CliError> {
        let Self(ready) = self;
        let order = ready.inputs.order(&ready.plan);
        // One block of each kind: one that is quantized, and one that computes in bf16, if there are both.
        let mut config = ready.inputs.config.clone();
        let (all, dense) = (config.num_hidden_layers, ready.plan.settings.bf16_last_blocks(config.num_hidden_layers));
        config.num_hidden_layers = if dense == 0 || dense >= all { 1 } else { 2 };
        let model = weights::random::<B>(&config, ready.spec, ready.master, 0, &device)?;
        let last = ready.plan.settings.model.last_trained().map(|last| last.min(config.num_hidden_layers));
        let model = ready.to_train(model, last, dense.min(1));
        let optimizer = ready.optimizer(None, &model)?;
        let mut stepper = ready.stepper(optimizer, None);
        let keeps = stepper.kept > 0;
        let mut net = ready.trainee(model, last);
        // The second step clips by the norm of the first. If graphs are kept, it leaves codes, and the third step others in their
        // place.
        for step in 1..=order.steps.min(if keeps { 3 } else { 2 }) {
            // A block that is run again in the backward launches what a kept one does first, and the forward without a graph.
            stepper.kept = if keeps && step > 1 { config.num_hidden_layers } else { 0 };
            let mut batches = order.step(step - 1);
            // Those between the second micro-batch and the last launch the kernels of the second.
            if batches.len() > 3 {
                batches.drain(2..batches.len() - 1);
            }
            stepper.step(&mut net, &batches, step, 0.0, &mut VramReport::new(None))?;
        }
        Ok(())
    }
}
