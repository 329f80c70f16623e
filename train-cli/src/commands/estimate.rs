//! `estimate`: predicts how much memory a run of `fit` with the same flags needs.

use crate::{CliError, args::FitArgs, commands::fit, memory::estimate::Estimate, report, settings::DeviceChoice};
use backend_nvfp4::Precision;
use model_qwen3::config::Qwen3Config;

/// Runs the command.
///
/// # Errors
/// If the flags are not those of a run, or its config.json cannot be read.
pub fn run(args: &FitArgs) -> Result<(), CliError> {
    if args.launch.demo {
        return Err(CliError::Usage("--demo is for fit only; its run needs 0.1 GiB".into()));
    }
    let (plan, ..) = fit::planned(args)?;
    let config = Qwen3Config::from_file(&plan.companions.config)?;
    // Opening the device would say what it computes in, but the device may be another machine's.
    let f32_device = matches!(plan.settings.recipe.device, DeviceChoice::Cpu | DeviceChoice::Vulkan);
    let default = if f32_device { Precision::F32 } else { Precision::Bf16 };
    let precision = plan.settings.recipe.compute_dtype.unwrap_or(default);
    for line in Estimate::of(&config, &plan, precision).table() {
        report::result(line);
    }
    Ok(())
}
