//! What can be known to go wrong hours later is checked before a run takes any memory: whether its peak fits into what is
//! free on the device, and its files onto the disk. `fit`, `fit --dry-run` and `estimate` ask here.

use crate::{
    CliError, device,
    memory::{
        estimate::Estimate,
        free::{self, Disk},
        pool::Pool,
    },
    plan::Plan,
    report,
    run::inputs::Inputs,
    run::saving::Room,
    run::{checkpoint, old_checkpoints},
    settings::{
        DeviceChoice, Recompute, SaveStrategy,
        defaults::FEWEST_SPLIT,
        fields::{LEAST_KEPT, SavingSettings},
    },
};
use backend_nvfp4::{MasterKind, Precision, Scaling};
use serde_json::{Map, Value, json};
use std::{collections::BTreeMap, path::Path};

/// The forecast of a run on a device.
pub struct Forecast {
    /// The memory that it will take.
    pub estimate: Estimate,
    /// The device.
    device: DeviceChoice,
    /// What it has.
    space: Space,
    /// How a bad step is undone.
    pub undo: Undo,
    /// Where a checkpoint waits until it is written.
    pub saving: Room,
    /// Whether a step that clips by its own norm, and has one micro-batch, holds all gradients until the norm is known. It
    /// measures them in a pass of its own otherwise.
    pub gathers: Option<bool>,
    /// The number of blocks whose activations are kept from the forward pass to the backward pass.
    pub kept: usize,
}

/// How a step is undone whose gradient norm turns out not to be finite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Undo {
    /// The run ends: the guard is off.
    Never,
    /// The step knows its norm before it changes anything.
    NotNeeded,
    /// Weights and states of before the step are held until its norm is known.
    Copy {
        /// What the copy takes, in bytes.
        bytes: u64,
    },
    /// The run goes back to its newest checkpoint.
    Replay,
    /// From a copy if the device has room for it, which is not known: there is no such device here.
    Unknown {
        /// What the copy would take, in bytes.
        bytes: u64,
    },
}

impl Undo {
    fn of(plan: &Plan, estimate: &Estimate, space: Space, device: DeviceChoice) -> Self {
        let (advanced, bytes) = (&plan.settings.advanced, estimate.trained());
        match () {
            () if !advanced.guard => Self::Never,
            () if plan.needs_the_norm_first() => Self::NotNeeded,
            () if advanced.undo_copy && space.has(estimate.peak() + bytes) => Self::Copy { bytes },
            () if advanced.undo_copy && space == Space::default() && !device::is_there(device) => {
                Self::Unknown { bytes }
            }
            () => Self::Replay,
        }
    }

    /// Bytes that it takes on the device.
    fn bytes(self) -> u64 {
        if let Self::Copy { bytes } = self { bytes } else { 0 }
    }

    /// One line of the plan.
    pub fn line(self) -> String {
        match self {
            Self::Never => "off: a step whose loss or gradient is not finite ends the run".into(),
            Self::NotNeeded => "a step whose loss or gradient is not finite changes nothing".into(),
            Self::Copy { bytes } => format!(
                "a step whose gradient is not finite is undone from a copy of weights and states ({})",
                report::size(bytes)
            ),
            Self::Replay => {
                "a step whose gradient is not finite is undone by going back to the newest checkpoint".into()
            }
            Self::Unknown { bytes } => format!(
                "a step whose gradient is not finite is undone from a copy of weights and states ({}) if the device has \
                 room for it; else by going back to the newest checkpoint",
                report::size(bytes)
            ),
        }
    }
}

/// The memory of a device that a run may take, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Space {
    /// What `--memory-limit` allows.
    limit: Option<u64>,
    /// What is free, if the device says.
    free: Option<u64>,
}

impl Space {
    /// Whether there is room for `needed` bytes, and a tenth more, because a forecast is no measurement. There is none
    /// where nothing is known.
    fn has(self, needed: u64) -> bool {
        self.most().is_some_and(|most| needed <= most)
    }

    /// The memory that a run may take, if it is known: the limit, or what is free if that is less.
    fn least(self) -> Option<u64> {
        [self.limit, self.free].into_iter().flatten().min()
    }

    /// The most bytes that a forecast may have.
    fn most(self) -> Option<u64> {
        self.least().map(|room| room / 11 * 10 + room % 11 * 10 / 11)
    }
}

/// How many blocks keep their activations: as many as there is room for, unless the plan says all or none. Memory that
/// belongs to the host, or may do so, is not for this program alone, which then takes half of what is free at most.
fn kept_blocks(plan: &Plan, estimate: &Estimate, space: Space, of_the_host: Option<bool>) -> usize {
    let (memory, blocks) = (&plan.settings.memory, estimate.trained_blocks());
    match memory.recompute {
        Recompute::Always => 0,
        Recompute::Never => blocks,
        Recompute::Auto => {
            let space = Space {
                free: space.free.map(|free| if of_the_host == Some(false) { free } else { free / 2 }),
                ..space
            };
            let left = space.most().map_or(0, |most| most.saturating_sub(estimate.peak()));
            blocks.min((left / estimate.block().max(1)) as usize)
        }
    }
}

/// Where a checkpoint waits in a run of so many steps, if the device has room for a copy (`fits`) or not, and its memory is the
/// host's or not.
fn room(saving: &SavingSettings, steps: usize, of_the_host: Option<bool>, fits: bool) -> Room {
    if saving.save_strategy == SaveStrategy::No {
        return Room::AtTheEnd;
    }
    match of_the_host {
        _ if fits => Room::Device,
        _ if saving.checkpoints(steps) <= 1 => Room::AtTheEnd,
        Some(false) => Room::Host,
        Some(true) | None => Room::Shared,
    }
}

/// The most checkpoints that a run of so many steps has at once, beyond the `there` that lie in its folder already. A new
/// checkpoint is complete before the oldest is deleted.
fn more_checkpoints(saving: &SavingSettings, steps: usize, there: usize) -> usize {
    (saving.kept(steps) + 1).saturating_sub(there).max(1).min(saving.checkpoints(steps))
}

/// Refuses files that do not fit onto their disks. Each has its path, the number of checkpoints to write there, and its bytes.
/// Files on one disk share what is free there.
fn check_disks(
    files: &[(&Path, usize, u64)],
    saving: &SavingSettings,
    disk_of: impl Fn(&Path) -> Result<Disk, CliError>,
) -> Result<(), CliError> {
    let mut wanted = BTreeMap::new();
    for &(path, more, bytes) in files {
        let disk = disk_of(path)?;
        let (checkpoints, needed) = wanted.entry(disk.id).or_insert((0, 0));
        *checkpoints += more;
        *needed += bytes;
        if *needed > disk.free {
            let (checkpoints, needed, free) = (*checkpoints, *needed, disk.free);
            let remedy = more_room(saving, checkpoints);
            return Err(CliError::Disk { path: path.to_owned(), checkpoints, needed, free, remedy });
        }
    }
    Ok(())
}

/// What to do if so many checkpoints and the export do not fit onto a disk.
fn more_room(saving: &SavingSettings, checkpoints: usize) -> String {
    let mut remedy = "free some, or choose another folder".to_owned();
    if checkpoints > 1 && saving.save_total_limit > LEAST_KEPT {
        remedy += ", or keep fewer checkpoints (--save-total-limit)";
    }
    if checkpoints > 1 && saving.save_steps != Some(0) && !saving.load_best_model_at_end {
        remedy += ", or save only at the end (--save-steps 0)";
    }
    remedy
}

/// Refuses settings that do not fit what the run has read. `scaling` is how many levels of scales its NVFP4 weights have, and
/// `master` how it stores master weights.
///
/// # Errors
/// If the scale levels of the run are not those that its weights need, or evaluations are compared and there are none.
pub fn check_settings(plan: &Plan, inputs: &Inputs, scaling: Scaling, master: MasterKind) -> Result<(), CliError> {
    let keeps_codes = plan.settings.recipe.damped_finish > 0.0 || master == MasterKind::Nvfp4;
    if scaling == Scaling::Single && keeps_codes {
        let text = "--damped-finish and --master-weights nvfp4 keep NVFP4 codes with two-level scales, but the scale levels \
                    of this run are single; give --scales two";
        return Err(CliError::Usage(text.into()));
    }
    if plan.settings.compares_evaluations() && inputs.eval.is_empty() {
        return Err(CliError::Usage(format!(
            "there are no evaluation rows, whose losses --early-stopping-patience and --load-best-model-at-end compare; give \
             --eval-data FILE, or at least {FEWEST_SPLIT} rows of --data, because a run with fewer holds none out"
        )));
    }
    Ok(())
}

impl Forecast {
    /// Predicts the run of a plan over its inputs on a device that computes in `precision`.
    pub fn of(plan: &Plan, inputs: &Inputs, device: DeviceChoice, precision: Precision) -> Self {
        let order = inputs.order(plan);
        let sequences = plan.settings.optimizer.batch_size.min(order.limit.max(inputs.eval.len())).max(1);
        let mut estimate = Estimate::of(&inputs.config, plan, precision, sequences, inputs.longest_row());
        let (free, of_the_host) = (free::on_device(device), free::is_the_hosts(device));
        let space = Space { limit: plan.memory_limit, free };
        let one_batch = plan.settings.optimizer.gradient_accumulation_steps == 1;
        let gathers =
            (plan.needs_the_norm_first() && one_batch).then(|| space.has(estimate.peak() + estimate.all_gradients()));
        if gathers == Some(true) {
            estimate.gather();
        }
        let kept = kept_blocks(plan, &estimate, space, of_the_host);
        estimate.keep(kept);
        let undo = Undo::of(plan, &estimate, space, device);
        let fits = space.has(estimate.peak() + undo.bytes() + estimate.trained());
        let saving = room(&plan.settings.saving, order.steps, of_the_host, fits);
        Self { estimate, device, space, undo, saving, gathers, kept }
    }

    /// Refuses a run for which there is not enough memory or disk.
    ///
    /// # Errors
    /// If it needs more memory than `--memory-limit`, more than is free on the device, or more of the disk than is free.
    pub fn check(&self, plan: &Plan, inputs: &Inputs) -> Result<(), CliError> {
        self.check_memory()?;
        self.check_disk(plan, inputs.order(plan).steps)
    }

    fn check_memory(&self) -> Result<(), CliError> {
        let needed = self.estimate.peak();
        match (self.space.limit, self.space.free) {
            (Some(limit), _) if needed > limit => Err(CliError::Memory { needed, limit, stopped: None }),
            // A larger limit makes no memory free.
            (_, Some(free)) if needed > free => Err(CliError::Full { device: self.device.to_string(), needed, free }),
            _ => Ok(()),
        }
    }

    /// Refuses a run whose files do not fit onto the disk: the checkpoints that it will have beside those that are there,
    /// and the export.
    fn check_disk(&self, plan: &Plan, steps: usize) -> Result<(), CliError> {
        let saving = &plan.settings.saving;
        if saving.save_strategy == SaveStrategy::No {
            return Ok(());
        }
        let export = self.estimate.exported();
        let there = if plan.output_dir.exists() { checkpoint::list(&plan.output_dir)?.len() } else { 0 };
        let checkpoints = more_checkpoints(saving, steps, there);
        let bytes = checkpoints as u64 * self.estimate.checkpoint() + export;
        let mut files = vec![(plan.output_dir.as_path(), checkpoints, bytes)];
        files.extend(saving.output_dat.as_deref().map(|file| (file, 0, export)));
        let checked = check_disks(&files, saving, Disk::of);
        if matches!(checked, Err(CliError::Disk { .. })) {
            old_checkpoints::note_stale(&plan.output_dir);
        }
        checked
    }

    /// The peak of training with the undo copy, in bytes.
    fn peak(&self) -> u64 {
        self.estimate.peak() + self.undo.bytes()
    }

    /// What the run needs, and what is free.
    fn memory(&self) -> String {
        let free = match self.space.free {
            Some(free) => format!("{} are free", report::size(free)),
            None => "the device does not say how much is free".to_owned(),
        };
        let peak = format!("about {} on {} at the peak", report::size(self.peak()), self.device);
        match self.saving {
            Room::Device => {
                let more = report::size(self.estimate.trained());
                format!("{peak}, and {more} more from the first checkpoint on; {free}")
            }
            Room::Host | Room::Shared | Room::AtTheEnd => format!("{peak}; {free}"),
        }
    }

    /// The device's memory pool before the first step.
    pub fn pool(&self) -> Pool {
        let beside = if self.saving == Room::Device { self.estimate.trained() } else { 0 };
        Pool::new(self.space.limit, self.kept as u64 * self.estimate.block_a_token(), self.peak() + beside)
    }

    /// The parts of the memory and their totals, one line for each.
    pub fn table(&self) -> Vec<String> {
        let mut lines = self.estimate.table(self.undo.bytes());
        if matches!(self.device, DeviceChoice::Cuda(_)) {
            lines.push("Not counted: about 0.5 GiB that the CUDA driver takes.".into());
        }
        lines
    }

    /// The forecast with its numbers, in bytes.
    pub fn json(&self) -> Value {
        let parts: Map<String, Value> =
            self.estimate.parts().map(|(name, bytes)| (name.replace(' ', "_"), bytes.into())).collect();
        let needed = self.estimate.peak();
        json!({
            "parts": parts,
            "peak_without_undo_copy": needed,
            "undo_copy": self.undo.bytes(),
            "peak": self.peak(),
            "checkpoint": self.estimate.checkpoint(),
            "exported": self.estimate.exported(),
            "kept_blocks": self.kept,
            "trained_blocks": self.estimate.trained_blocks(),
            "memory_limit": self.space.limit,
            "free": self.space.free,
            "fits": self.space.least().map(|room| needed <= room),
        })
    }

    /// The lines of the plan about memory, each with its label.
    pub fn lines(&self) -> Vec<(&'static str, String)> {
        let held = report::size(self.estimate.all_gradients());
        let clip = match self.gathers {
            Some(true) => Some(format!("the gradients of a step are held until their norm is known ({held})")),
            Some(false) if self.space == Space::default() => Some(format!(
                "a first backward pass measures the gradients, unless the device says that it has room to hold them ({held})"
            )),
            Some(false) => {
                Some(format!("a first backward pass measures the gradients: there is no room to hold them ({held})"))
            }
            None => None,
        };
        let mut lines: Vec<_> = clip.map(|line| ("clipping", line)).into_iter().collect();
        lines.extend([("recompute", self.recompute()), ("memory", self.memory()), ("guard", self.undo.line())]);
        lines
    }

    /// Which blocks run twice.
    fn recompute(&self) -> String {
        let (kept, blocks) = (self.kept, self.estimate.trained_blocks());
        let bytes = report::size(kept as u64 * self.estimate.block());
        match kept {
            0 if self.space == Space::default() => format!(
                "all {blocks} blocks run a second time in the backward pass, unless the device says that it has room for \
                 their activations"
            ),
            0 => format!("all {blocks} blocks run a second time in the backward pass"),
            all if all == blocks => format!("no block runs a second time; their activations take up to {bytes}"),
            _ => format!(
                "{} of {blocks} blocks run a second time in the backward pass; the activations of the others take up to \
                 {bytes}",
                blocks - kept
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Disk, Path, Room, SaveStrategy, SavingSettings, Space, check_disks, more_checkpoints, room};

    #[test]
    fn room_is_the_least_of_what_is_known() {
        let has = |limit, free, needed| Space { limit, free }.has(needed);
        for (limit, free, fits) in [
            (None, None, false),
            (Some(110), None, true),
            (Some(109), None, false),
            (None, Some(110), true),
            (None, Some(109), false),
            (Some(1000), Some(109), false),
            (Some(109), Some(1000), false),
            (Some(110), Some(1000), true),
        ] {
            assert_eq!(has(limit, free, 100), fits, "limit {limit:?}, free {free:?}");
        }
    }

    #[test]
    fn only_a_run_that_saves_while_it_trains_takes_memory_for_checkpoints() {
        let (own, shared) = (Some(false), Some(true));
        for (save_steps, of_the_host, fits, expected) in [
            (Some(10), own, true, Room::Device),
            (Some(10), own, false, Room::Host),
            (None, own, false, Room::Host),
            (Some(0), own, false, Room::AtTheEnd),
            (Some(100), own, false, Room::AtTheEnd),
            (Some(10), shared, true, Room::Device),
            (Some(10), shared, false, Room::Shared),
            (Some(10), None, false, Room::Shared),
        ] {
            let saving = SavingSettings { save_steps, ..SavingSettings::default() };
            assert_eq!(room(&saving, 100, of_the_host, fits), expected, "{save_steps:?} {of_the_host:?} {fits}");
            let never = SavingSettings { save_strategy: SaveStrategy::No, ..saving };
            assert_eq!(room(&never, 100, of_the_host, fits), Room::AtTheEnd, "it saves nothing");
        }
    }

    #[test]
    fn the_error_of_a_full_disk_names_what_would_be_written_there() {
        let refused = |dat_disk: u64, save_total_limit: usize, save_steps: Option<usize>| {
            let files = [(Path::new("r"), 3, 30 << 10), (Path::new("x.dat"), 0, 12 << 10)];
            let disk_of = |path: &Path| {
                let id = if path == Path::new("r") { 1 } else { dat_disk };
                Ok(Disk { id, free: if id == 1 { 40 << 10 } else { 11 << 10 } })
            };
            let saving = SavingSettings { save_total_limit, save_steps, ..SavingSettings::default() };
            check_disks(&files, &saving, disk_of).unwrap_err().to_string()
        };
        let own =
            "x.dat: the export needs 12 KiB, but 11 KiB are free on this disk; free some, or choose another folder";
        assert_eq!(refused(2, 5, None), own);
        let shared = "x.dat: 3 checkpoints and the export need 42 KiB, but 40 KiB are free on this disk; free some, or choose \
                      another folder";
        assert_eq!(refused(1, 2, None), format!("{shared}, or save only at the end (--save-steps 0)"));
        assert_eq!(refused(1, 3, Some(0)), format!("{shared}, or keep fewer checkpoints (--save-total-limit)"));
        assert_eq!(refused(1, 2, Some(0)), shared);
    }

    #[test]
    fn a_new_checkpoint_is_complete_before_the_oldest_is_deleted() {
        for (save_total_limit, there, expected) in [(2, 0, 3), (2, 2, 1), (2, 5, 1), (50, 0, 16), (50, 40, 11)] {
            let saving = SavingSettings { save_steps: Some(1), save_total_limit, ..SavingSettings::default() };
            assert_eq!(
                more_checkpoints(&saving, 16, there),
                expected,
                "{save_total_limit} are kept, {there} are there"
            );
        }
    }
}
