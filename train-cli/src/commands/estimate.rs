//! `estimate`: predicts how much memory a run of `fit` with the same flags needs. It refuses the settings that `fit`
//! refuses. It needs no device: a run for which there is too little memory or disk is predicted, too.

use crate::{
    CliError,
    args::EstimateArgs,
    commands::fit,
    device, report,
    run::inputs::Inputs,
    run::preflight::{self, Forecast},
    settings::DeviceChoice,
};
use serde_json::json;

/// Runs the command.
///
/// # Errors
/// If the flags are not those of a run, or its inputs cannot be read.
pub fn run(args: &EstimateArgs) -> Result<(), CliError> {
    if args.fit.launch.demo {
        return Err(CliError::Usage("--demo is for fit only; its run needs about 100 MiB".into()));
    }
    let (plan, resumed, _) = fit::planned(&args.fit)?;
    let device = device::resolved(plan.settings.recipe.device);
    let precision = device::precision(device, plan.settings.recipe.compute_dtype);
    device::check_precision(device, precision)?;
    // `cuda` describes a card that may be elsewhere. A number means one of this machine.
    if matches!(device, DeviceChoice::Cuda(index) if index > 0) && !device::is_there(device) {
        let reason = "not found; give --device cuda for a forecast without a card".to_owned();
        return Err(CliError::Device { device: device.to_string(), reason });
    }
    let inputs = Inputs::read(&plan, resumed.as_ref().map(|resumed| &resumed.state))?;
    let scaling = fit::scaling(&plan, resumed.as_ref());
    preflight::check_settings(&plan, &inputs, scaling, plan.master(precision))?;
    let forecast = Forecast::of(&plan, &inputs, device, precision);
    if args.json {
        let mut line = forecast.json();
        line["device"] = json!(device.to_string());
        line["compute_dtype"] = json!(precision.name());
        line["device_is_there"] = json!(device::is_there(device));
        line["longest_row"] = json!(inputs.longest_row());
        line["refused"] = json!(forecast.check(&plan, &inputs).err().map(|error| error.to_string()));
        report::result(line.to_string());
        return Ok(());
    }
    report::chosen_device(&device.to_string(), precision);
    if !device::is_there(device) {
        report::label("", format!("{device} is not there; this is a forecast without a device"));
    }
    report::label("rows", format!("the longest has {} tokens", inputs.longest_row()));
    forecast.lines().into_iter().for_each(|(label, line)| report::label(label, line));
    forecast.table().into_iter().for_each(report::result);
    if let Err(error) = forecast.check(&plan, &inputs) {
        report::line(format!("warning: fit would refuse this run: {error}"));
    }
    Ok(())
}
