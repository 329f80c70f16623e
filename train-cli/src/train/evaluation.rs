//! The loss on the evaluation samples: as the run computes, with quantized weights, and with the master weights.

use crate::{
    CliError,
    data::order::Order,
    progress,
    train::objective::Trainee,
    watchdog::{Watched, Work},
};
use backend_nvfp4::{Nvfp4Kernels, Recipe};
use model_qwen3::weights::to_host;

/// The figures of an evaluation.
#[derive(Debug, Clone)]
pub struct Evaluation {
    /// The optimizer step after which it was made, counted from 1.
    pub step: usize,
    /// Mean loss of a supervised token under the run's recipe.
    pub loss: f32,
    /// The loss with quantized weights and nothing else quantized.
    pub quantized_loss: f32,
    /// The loss of the master weights, with nothing quantized.
    pub master_loss: f32,
}

/// Evaluates a model after step `step`.
///
/// # Errors
/// If the device fails.
pub fn evaluate<B: Nvfp4Kernels>(net: &Trainee<B>, samples: &Order, step: usize) -> Result<Evaluation, CliError> {
    progress::doing("evaluating");
    let _watched = Watched::begin(Work::Evaluation(step));
    let loss = mean_loss(net, samples)?;
    let loss_under = |recipe| {
        if net.model().spec().recipe == recipe {
            return Ok(loss);
        }
        let mut other = net.clone();
        other.update(|model| model.with_recipe(recipe));
        mean_loss(&other, samples)
    };
    let (quantized_loss, master_loss) = (loss_under(Recipe::W4)?, loss_under(Recipe::Bf16)?);
    Ok(Evaluation { step, loss, quantized_loss, master_loss })
}

/// The micro-batches divide their sums by the number of all supervised tokens, so their losses add up to the mean.
fn mean_loss<B: Nvfp4Kernels>(net: &Trainee<B>, samples: &Order) -> Result<f32, CliError> {
    let mut sum = 0.0;
    for batch in samples.micro_batches() {
        sum += f64::from(to_host(net.batch_loss(&batch))?[0]);
    }
    Ok(sum as f32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{data::sample::synthetic, settings::LossKind, watchdog};
    use backend_nvfp4::{LinearSpec, MasterKind, Precision, Scaling};
    use burn::backend::NdArray;
    use model_qwen3::{config::Qwen3Config, weights};
    use std::{path::Path, sync::Arc};

    #[test]
    fn an_evaluation_is_watched() {
        let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo/config.json");
        let config = Qwen3Config::from_file(&config).unwrap();
        let spec = LinearSpec::new(Recipe::W4, Scaling::Two, Precision::F32);
        let model = weights::random::<NdArray>(&config, spec, MasterKind::F32, 3, &Default::default()).unwrap();
        let net = Trainee::new(model, LossKind::CrossEntropy, 0);
        let samples = Arc::new(synthetic(2, 4, config.vocab_size, 1));
        let order = Order {
            samples,
            batch_size: 1,
            accumulation: 1,
            steps: 2,
            limit: 2,
            seed: 0,
            start: 0,
            made: Default::default(),
        };
        assert!(!watchdog::has_seen_an_evaluation());
        let evaluation = evaluate(&net, &order, 5).unwrap();
        assert!(evaluation.loss.is_finite() && watchdog::has_seen_an_evaluation());
    }
}
