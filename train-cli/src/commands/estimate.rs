//! `estimate`: predicts how much device memory a run of `fit` with the same flags needs.

use crate::{CliError, args::FitArgs, device::DeviceChoice, memory::estimate::Estimate, plan, report};
use backend_nvfp4::Precision;
use model_qwen3::config::Qwen3Config;

/// Runs the command.
///
/// # Errors
/// If `fit` would refuse the flags, or config.json cannot be read.
pub fn run(flags: FitArgs) -> Result<(), CliError> {
    if flags.demo {
        return Err(CliError::Usage("estimate --demo: the demo needs 0.1 GiB; give a --model".into()));
    }
    let plan = plan::fit(flags)?;
    let config = Qwen3Config::from_file(&plan.companions.config)?;
    let f32 = matches!(plan.device, DeviceChoice::Cpu | DeviceChoice::Vulkan);
    let precision = plan.precision.unwrap_or(if f32 { Precision::F32 } else { Precision::Bf16 });
    Estimate::of(&config, &plan, precision).table().iter().for_each(report::result);
    Ok(())
}
