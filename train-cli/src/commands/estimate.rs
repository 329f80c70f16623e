//! `estimate`: predicts how much memory a run of `fit` with the same flags needs.

use crate::{
    CliError, args::EstimateArgs, commands::fit, device, report, run::inputs::Inputs, run::preflight::Forecast,
};
use serde_json::json;

/// Runs the command.
///
/// # Errors
/// If the flags are not those of a run, or its inputs cannot be read.
pub fn run(args: &EstimateArgs) -> Result<(), CliError> {
    if args.fit.launch.demo {
        return Err(CliError::Usage("--demo is for fit only; its run needs 0.1 GiB".into()));
    }
    let (plan, ..) = fit::planned(&args.fit)?;
    let inputs = Inputs::read(&plan)?;
    let device = device::resolved(plan.settings.recipe.device);
    let precision = device::precision(device, plan.settings.recipe.compute_dtype);
    let forecast = Forecast::of(&plan, &inputs, device, precision);
    if args.json {
        let mut line = forecast.json();
        line["device"] = json!(device.to_string());
        line["compute_dtype"] = json!(precision.name());
        line["longest_row"] = json!(inputs.longest_row());
        report::result(line.to_string());
        return Ok(());
    }
    report::chosen_device(&device.to_string(), precision);
    report::label("rows", format!("the longest has {} tokens", inputs.longest_row()));
    forecast.lines().into_iter().for_each(|(label, line)| report::label(label, line));
    forecast.estimate.table().into_iter().for_each(report::result);
    Ok(())
}
