//! A run that can begin: its plan, its inputs, and the forecast of its memory. From these it makes the model, the optimizer and
//! the state of the run.

use crate::{
    CliError,
    plan::Plan,
    progress::Reading,
    report,
    run::checkpoint::{HeadStorage, TrainerState},
    run::inputs::Inputs,
    run::preflight::{self, Forecast, Undo},
    run::resume::Resumed,
    settings::{DeviceChoice, defaults::scales},
    train::chunked_adamw::{AdamwConfig, ChunkedAdamw},
    train::clip::Clipping,
    train::objective::Trainee,
    train::parameters,
    train::step::Stepper,
};
use backend_nvfp4::{LinearSpec, MasterKind, Nvfp4Kernels, Precision, Scaling};
use burn::{backend::Autodiff, module::AutodiffModule, tensor::DType};
use model_qwen3::{
    model::Qwen3,
    weights::{self, Purpose},
};

/// A plan with its inputs, on a device that computes in `spec.precision`.
pub struct Ready {
    pub(super) plan: Plan,
    pub(super) inputs: Inputs,
    pub(super) forecast: Forecast,
    pub(super) spec: LinearSpec,
    pub(super) master: MasterKind,
}

impl Ready {
    /// Reads the inputs, and refuses what needs more memory or disk than there is, or other scale levels.
    ///
    /// # Errors
    /// If an input is missing or broken, or the run is refused.
    pub fn new(
        plan: Plan,
        device: DeviceChoice,
        precision: Precision,
        resumed: Option<&Resumed>,
    ) -> Result<Self, CliError> {
        let inputs = Inputs::read(&plan, resumed.map(|resumed| &resumed.state))?;
        let (scaling, master) = (scaling(&plan, resumed), plan.master(precision));
        preflight::check_settings(&plan, &inputs, scaling, master)?;
        let forecast = Forecast::of(&plan, &inputs, device, precision);
        forecast.check(&plan, &inputs).inspect_err(|error| {
            if error.exit_code() == 4 {
                forecast.table().iter().for_each(report::line);
            }
        })?;
        let shares_scale = plan.settings.recipe.share_scales;
        let spec = LinearSpec { shares_scale, ..LinearSpec::new(plan.recipe, scaling, precision) };
        Ok(Self { plan, inputs, forecast, spec, master })
    }

    /// The model with the weights of the checkpoint, of its files, or random ones.
    pub(super) fn model<B: Nvfp4Kernels>(
        &self,
        resumed: Option<&Resumed>,
        device: &B::Device,
    ) -> Result<Qwen3<Autodiff<B>>, CliError> {
        let (config, spec, master) = (&self.inputs.config, self.spec, self.master);
        let model = match (resumed, &self.inputs.source) {
            (Some(resumed), _) => resumed.model(config, spec, master, device)?,
            (None, Some(source)) => {
                weights::load(&Reading::of(source, "loading"), config, spec, Purpose::Train(master), device)?
            }
            (None, None) => weights::random(config, spec, master, self.plan.settings.advanced.seed, device)?,
        };
        let dense = self.plan.settings.bf16_last_blocks(config.num_hidden_layers);
        Ok(self.to_train(model, self.plan.settings.model.last_trained(), dense))
    }

    /// A model as the run trains it: its master weights, of them those of the last `last` blocks, or all. The last `dense`
    /// blocks compute without quantization.
    pub(super) fn to_train<B: Nvfp4Kernels>(
        &self,
        model: Qwen3<B>,
        last: Option<usize>,
        dense: usize,
    ) -> Qwen3<Autodiff<B>> {
        let model = weights::trained(model, self.master);
        let model = match last {
            Some(last) => parameters::last_blocks(model, last),
            None => model,
        };
        model.with_bf16_last_blocks(dense)
    }

    /// The optimizer, with its states after a resume.
    pub(super) fn optimizer<B: Nvfp4Kernels>(
        &self,
        resumed: Option<&Resumed>,
        model: &Qwen3<Autodiff<B>>,
    ) -> Result<ChunkedAdamw<B>, CliError> {
        let (s, advanced) = (&self.plan.settings.optimizer, &self.plan.settings.advanced);
        let config = AdamwConfig {
            beta1: s.adam_beta1,
            beta2: s.adam_beta2,
            eps: s.adam_epsilon,
            weight_decay: s.weight_decay,
            state: self.plan.settings.memory.optimizer_state_mode,
            master: self.master,
            chunk_rows: advanced.step_chunk_rows,
            seed: advanced.seed,
            float: self.spec.precision.dtype(),
        };
        let model = model.valid();
        let mut optimizer = ChunkedAdamw::new(config, parameters::undecayed(&model));
        if let Some(resumed) = resumed {
            resumed.optimizer(&model, &mut optimizer)?;
        }
        Ok(optimizer)
    }

    /// The state of the run before its next step.
    pub(super) fn state<B: Nvfp4Kernels>(&self, resumed: Option<&Resumed>, model: &Qwen3<Autodiff<B>>) -> TrainerState {
        let (steps, head) = (self.inputs.order(&self.plan).steps, HeadStorage::of(model));
        let mut new = TrainerState::new(self.plan.settings.clone(), steps, &self.inputs.sha256, self.spec, head);
        new.thinking = self.inputs.thinking;
        match resumed {
            None => new,
            Some(resumed) => new.after(&resumed.state),
        }
    }

    /// The model with the loss that it is trained on. It trains its last `last` blocks, or all.
    pub(super) fn trainee<B: Nvfp4Kernels>(
        &self,
        model: Qwen3<Autodiff<B>>,
        last: Option<usize>,
    ) -> Trainee<Autodiff<B>> {
        let fixed = last.map_or(0, |last| model.layers.len() - last);
        Trainee::new(model, self.plan.settings.advanced.loss, fixed)
    }

    /// What makes the steps, after one with the gradient norm `last_norm`.
    pub(super) fn stepper<B: Nvfp4Kernels>(&self, optimizer: ChunkedAdamw<B>, last_norm: Option<f32>) -> Stepper<B> {
        let s = &self.plan.settings;
        Stepper {
            undo: matches!(self.forecast.undo, Undo::Copy { .. }),
            gathers: self.forecast.gathers == Some(true),
            kept: self.forecast.kept,
            pool: self.forecast.pool(),
            clipping: Clipping { clip: self.plan.clip, max_norm: s.optimizer.max_grad_norm, last_norm },
            sums_dtype: if self.master == MasterKind::F32 { DType::F32 } else { self.spec.precision.dtype() },
            optimizer,
            seed: s.advanced.seed,
            accumulation: s.optimizer.gradient_accumulation_steps,
        }
    }
}

/// The scale levels of a run's NVFP4 weights.
pub(crate) fn scaling(plan: &Plan, resumed: Option<&Resumed>) -> Scaling {
    plan.settings.recipe.scales.unwrap_or_else(|| scales(resumed.map(|resumed| resumed.state.scaling())))
}
