//! What can be known to go wrong hours later is checked before a run takes any memory: whether its peak fits into what is
//! free on the device, and its files onto the disk. `fit`, `fit --dry-run` and `estimate` ask here.

use crate::{
    CliError,
    memory::{estimate::Estimate, free},
    plan::Plan,
    report,
    run::inputs::Inputs,
    settings::{DeviceChoice, SaveStrategy},
};
use backend_nvfp4::Precision;

/// The forecast of a run on a device.
pub struct Forecast {
    /// The memory that it will take.
    pub estimate: Estimate,
    /// The device, and what it computes in.
    device: DeviceChoice,
    /// Bytes that are free on the device, if it says.
    free: Option<u64>,
}

impl Forecast {
    /// Predicts the run of a plan over its inputs on a device that computes in `precision`.
    pub fn of(plan: &Plan, inputs: &Inputs, device: DeviceChoice, precision: Precision) -> Self {
        let estimate = Estimate::of(&inputs.config, plan, precision, inputs.longest_row());
        Self { estimate, device, free: free::on_device(device) }
    }

    /// Refuses a run that needs more memory than `--memory-limit`, or without it more than is free.
    ///
    /// # Errors
    /// If it does.
    pub fn check_memory(&self, plan: &Plan) -> Result<(), CliError> {
        let needed = self.estimate.peak();
        if let Some(limit) = plan.memory_limit {
            return match needed > limit {
                true => Err(self.refused(CliError::Memory { needed, limit, saved: None })),
                false => Ok(()),
            };
        }
        match self.free.filter(|free| needed > *free) {
            Some(free) => Err(self.refused(CliError::Full { device: self.device.to_string(), needed, free })),
            None => Ok(()),
        }
    }

    /// Refuses a run whose files do not fit onto the disk: two checkpoints, one of which is being written, and the export.
    ///
    /// # Errors
    /// If they do not.
    pub fn check_disk(&self, plan: &Plan) -> Result<(), CliError> {
        let saving = &plan.settings.saving;
        if saving.save_strategy == SaveStrategy::No {
            return Ok(());
        }
        let export = self.estimate.exported();
        let mut files = vec![(&plan.output_dir, 2 * self.estimate.checkpoint() + export)];
        files.extend(saving.output_dat.as_ref().map(|file| (file, export)));
        for (path, needed) in files {
            let free = free::on_disk(path)?;
            if needed > free {
                return Err(CliError::Disk { path: path.clone(), needed, free });
            }
        }
        Ok(())
    }

    /// One line: what the run needs, and what is free.
    pub fn line(&self) -> String {
        let free = match self.free {
            Some(free) => format!("{} are free", report::gib(free)),
            None => "the device does not say how much is free".to_owned(),
        };
        format!("about {} on {} at the peak; {free}", report::gib(self.estimate.peak()), self.device)
    }

    fn refused(&self, error: CliError) -> CliError {
        self.estimate.table().iter().for_each(report::line);
        error
    }
}
