//! Saving of checkpoints beside the training: a thread writes a checkpoint to the disk while the next steps are made. Until
//! it is written it waits where there is memory for it:
//!
//! * on the device: the thread holds weights and states as they were after the step. The optimizer leaves what is held as it
//!   is, and writes into other buffers;
//! * in the host's memory (`waiting.rs`): training waits until the files are made there;
//! * nowhere: training waits until they are written.
//!
//! At most one checkpoint is being written: the next one waits for it. The first step after a checkpoint is logged only when the
//! checkpoint is committed, unless that takes too long. So a kill loses no more than the steps of one save interval.
//! [`crate::durable`] commits a folder only when it is complete, so that a kill at any moment leaves the older checkpoints as
//! they are. Nothing is committed that was read from a device that has failed meanwhile.

pub use super::old_checkpoints::Keep;
use super::{
    cadence,
    checkpoint::TrainerState,
    destination::Destination,
    snapshot::{LARGE, Snapshot, write_state},
    waiting::Blocks,
    writer::Writer,
};
use crate::{
    CliError, device_failure, durable::PendingFolder, memory::host, model_files::Companions, report,
    train::chunked_adamw::ChunkedAdamw,
};
use backend_nvfp4::Nvfp4Kernels;
use model_qwen3::{model::Qwen3, weights::TRANSFER};
use std::{
    io::Write,
    path::{Path, PathBuf},
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

/// Bytes that are read from the device at a time while training waits. The device has nothing else to do then, so that a small
/// read does not wait, and the first one needs less pinned memory.
const TRANSFER_WHILE_WAITING: usize = 32 << 20;

/// Saves the checkpoints of a run.
#[derive(Debug)]
pub struct Saver {
    place: Destination,
    /// The checkpoint that is being written.
    pending: Option<Writer>,
    /// Whether the last checkpoint that training waited for was not committed in time.
    is_late: bool,
    waits: Waits,
    /// Whether the device computes on the host, so that a thread that writes takes time from the steps.
    slows_steps: bool,
    /// Seconds that writing has taken from the steps, which nobody has asked for yet.
    taken: f64,
    /// Seconds in which a thread wrote the last checkpoint, if one did.
    last: Option<f64>,
    /// The size of a checkpoint.
    bytes: u64,
}

/// Where a checkpoint waits until it is written.
#[derive(Debug)]
enum Waits {
    OnTheDevice,
    InTheHost(Blocks),
    Nowhere,
}

/// What memory a checkpoint may take until it is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Room {
    /// Memory of the device, which has enough.
    Device,
    /// Memory of the host, if it has twice as much before the training.
    Host,
    /// None: the device computes in the host's memory, or may do so, and has not enough for a second checkpoint.
    Shared,
    /// None is needed: the run saves after its last step only, or never.
    AtTheEnd,
}

impl Saver {
    /// For the run in a folder. Each checkpoint takes about `bytes`. In [`Room::Host`], so much memory is taken before the
    /// training, while the program goes on. `slows_steps` says that the device computes on the host.
    ///
    /// # Errors
    /// If there is no thread for that.
    pub fn new(
        run: &Path,
        companions: &Companions,
        bytes: u64,
        room: Room,
        slows_steps: bool,
    ) -> Result<Self, CliError> {
        let waits = Waits::of(bytes, room)?;
        let place = Destination {
            run: run.to_owned(),
            companions: companions.clone(),
            abandoned: Arc::default(),
            transfer: TRANSFER,
            reads_all: room == Room::AtTheEnd || !matches!(waits, Waits::Nowhere),
        };
        Ok(Self { place, pending: None, is_late: false, waits, slows_steps, taken: 0.0, last: None, bytes })
    }

    /// About how many bytes a checkpoint takes.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Seconds in which a thread wrote the last checkpoint, if one did.
    pub(super) fn seconds_of_last(&self) -> Option<f64> {
        self.last
    }

    /// Saves a checkpoint, and deletes those that are not to be kept. Returns its folder, or None if it is still being
    /// written; [`Self::wait`] ends when it is complete.
    ///
    /// # Errors
    /// If the device or the system fails, for this checkpoint or the one before. The older ones are unchanged.
    pub fn save<B: Nvfp4Kernels>(
        &mut self,
        model: &Qwen3<B>,
        optimizer: &ChunkedAdamw<B>,
        state: &TrainerState,
        keep: Keep,
    ) -> Result<Option<PathBuf>, CliError> {
        self.wait()?;
        let place = self.place.clone();
        let target = place.target(state.global_step);
        // Handles, not copies.
        let (model, optimizer, state) = (model.clone(), optimizer.clone(), state.clone());
        let transfer = match self.waits {
            Waits::InTheHost(_) => place.transfer.min(TRANSFER_WHILE_WAITING),
            Waits::OnTheDevice | Waits::Nowhere => place.transfer,
        };
        let content = Snapshot { model, optimizer, state, target, transfer };
        // The checkpoint's folder is begun before the next step, so that a disk that refuses it is noticed at once.
        let folder = PendingFolder::new(&content.target)?;
        let writer = match &self.waits {
            Waits::OnTheDevice => Writer::begin(move |committing| {
                place.commit(folder, keep, || drop(committing), |name, out| content.write(name, out))
            }),
            Waits::Nowhere => {
                return place.commit(folder, keep, || (), |name, out| content.write(name, out)).map(Some);
            }
            Waits::InTheHost(blocks) => {
                let files = content.in_memory(blocks)?;
                let Snapshot { state, target, .. } = content;
                Writer::begin(move |committing| {
                    let write = |name: &str, out: &mut dyn Write| match LARGE.iter().position(|large| *large == name) {
                        Some(at) => files[at].write_to(out).map_err(CliError::io(&target)),
                        None => write_state(&state, out, &target),
                    };
                    place.commit(folder, keep, || drop(committing), write)
                })
            }
        };
        self.pending = Some(writer?);
        Ok(None)
    }

    /// Waits until the checkpoint that is being written is committed, once for each checkpoint and not longer than `at_most`. If
    /// the checkpoint before was not committed in time, or no disk could write this one in time, it does not wait at all. Returns
    /// whether this one is committed; None if there is nothing to wait for.
    pub fn commits_within(&mut self, at_most: Duration) -> Option<bool> {
        let began = Instant::now();
        // What no disk can write in time is not waited for.
        let is_hopeless = cadence::at_best(self.bytes) > at_most.as_secs_f64();
        let at_most = if self.is_late || is_hopeless { Duration::ZERO } else { at_most };
        let is_committed = self.pending.as_mut()?.commits_within(at_most)?;
        self.is_late = !is_committed;
        // Elsewhere the whole time of the thread counts.
        if !self.slows_steps {
            self.taken += began.elapsed().as_secs_f64();
        }
        Some(is_committed)
    }

    /// Waits until the last checkpoint is complete. Returns its folder, the first time.
    ///
    /// # Errors
    /// If it could not be written.
    pub fn wait(&mut self) -> Result<Option<PathBuf>, CliError> {
        let Some(writer) = self.pending.take() else { return Ok(None) };
        let written = writer.join();
        // A checkpoint that was committed is whole, even if the device failed afterwards.
        if let Ok(Ok((folder, seconds))) = written {
            self.taken += if self.slows_steps { seconds } else { 0.0 };
            self.last = Some(seconds);
            return Ok(Some(folder));
        }
        // It is the cause of a panic that followed from it.
        device_failure::check()?;
        written.unwrap_or_else(|panic| std::panic::resume_unwind(panic)).map(|(folder, _)| Some(folder))
    }

    /// Seconds that writing checkpoints has taken from the steps since this was last asked: all the time of the threads that write
    /// where the device computes on the host, else the time that training has waited for a commit.
    pub fn taken_from_steps(&mut self) -> f64 {
        std::mem::take(&mut self.taken)
    }

    /// Waits for the last checkpoint of the run, as [`Self::wait`] does. The memory in which it waited goes back to the system.
    ///
    /// # Errors
    /// If it could not be written.
    pub fn finish(&mut self) -> Result<Option<PathBuf>, CliError> {
        self.waits = Waits::Nowhere;
        self.wait()
    }

    /// The checkpoint that is being written is not committed: the device failed, and what is read from it may be wrong.
    pub fn abandon(&self) {
        self.place.abandoned.store(true, Ordering::Release);
    }

    /// Whether the last checkpoint is still being written.
    pub fn is_busy(&self) -> bool {
        self.pending.as_ref().is_some_and(|writer| !writer.is_finished())
    }

    /// Does not wait: tells whether the checkpoint that was being written could not be.
    ///
    /// # Errors
    /// If it could not be written.
    pub fn check(&mut self) -> Result<(), CliError> {
        if self.pending.as_ref().is_some_and(Writer::is_finished) { self.wait().map(|_| ()) } else { Ok(()) }
    }
}

impl Waits {
    /// Where checkpoints of so many bytes wait. A warning says if it is nowhere.
    fn of(bytes: u64, room: Room) -> Result<Self, CliError> {
        let (free, shown) = (host::available(), report::size(bytes));
        let reason = match (room, free) {
            (Room::Device, _) => return Ok(Self::OnTheDevice),
            (Room::AtTheEnd, _) => return Ok(Self::Nowhere),
            (Room::Shared, _) => "no memory is known in which it could wait".to_owned(),
            // As much again is left for whatever else happens meanwhile.
            (Room::Host, Some(free)) if free / 2 >= bytes => {
                report::label(
                    "saving",
                    format!("a checkpoint waits in {shown} of the host's memory until it is written"),
                );
                return Ok(Self::InTheHost(Blocks::taking(bytes)?));
            }
            (Room::Host, Some(free)) => format!("the host has {} of free memory", report::size(free)),
            (Room::Host, None) => "the host does not say how much memory is free".to_owned(),
        };
        report::line(format!("warning: training waits while a checkpoint of {shown} is written: {reason}"));
        Ok(Self::Nowhere)
    }
}

impl Drop for Saver {
    /// The checkpoint that is being written is completed, even if the training ends by a panic.
    fn drop(&mut self) {
        // A thread that panicked has said so.
        if let Some(Ok(Err(error))) = self.pending.take().map(Writer::join) {
            report::line(format!("warning: the last checkpoint could not be written: {error}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::checkpoint::{HeadStorage, MODEL, OPTIMIZER, STATE},
        *,
    };
    use crate::{
        durable,
        settings::Settings,
        train::chunked_adamw::{AdamwConfig, ChunkedAdamw, Rate, TensorState},
    };
    use backend_nvfp4::{AdamwState, Judged, LinearSpec, MasterKind, Moment, Precision, Recipe, Scaling, StateKind};
    use burn::{
        backend::NdArray,
        module::Param,
        tensor::{DType, Tensor},
    };
    use model_qwen3::{config::Qwen3Config, weights};
    use std::{
        fs,
        io::{Seek, SeekFrom},
        sync::mpsc,
        thread,
    };

    /// What a run has between two steps.
    struct AfterAStep {
        model: Qwen3<NdArray>,
        optimizer: ChunkedAdamw<NdArray>,
        state: TrainerState,
    }

    impl AfterAStep {
        /// After one step, so that there is a state to write.
        fn new() -> Self {
            let config = Qwen3Config::from_file(&companions().config).unwrap();
            let spec = LinearSpec::new(Recipe::W4, Scaling::Two, Precision::F32);
            let model = weights::random::<NdArray>(&config, spec, MasterKind::F32, 3, &Default::default()).unwrap();
            let adamw = AdamwConfig {
                beta1: 0.9,
                beta2: 0.999,
                eps: 1e-8,
                weight_decay: 0.0,
                state: StateKind::Int8,
                master: MasterKind::F32,
                chunk_rows: 0,
                seed: 1,
                float: DType::F32,
            };
            let optimizer = ChunkedAdamw::new(adamw, Default::default());
            let state = TrainerState::new(Settings::default(), 5, "", spec, HeadStorage::of(&model));
            let mut trained = Self { model, optimizer, state };
            trained.step();
            trained
        }

        /// Updates the embedding by itself. It gives away its handles, so that only a checkpoint keeps others.
        fn step(&mut self) {
            let Self { model, optimizer, .. } = self;
            let none = Param::from_tensor(Tensor::zeros([1, 1], &Default::default()));
            let (id, weight, mapper) = std::mem::replace(&mut model.embed_tokens, none).consume();
            let gradient = Tensor::<NdArray, 2>::from_data(weight.to_data(), &Default::default());
            let rate = Rate { lr: 1e-3, clip_factor: 1.0 };
            let gradient = Judged {
                gradient: gradient.into_primitive().tensor(),
                verdict: Tensor::<NdArray, 1>::zeros([1], &Default::default()).into_primitive().tensor(),
            };
            let updated = optimizer.step(id, weight, gradient, rate);
            model.embed_tokens = Param::from_mapped_value(id, updated, mapper);
        }

        /// Saves to a folder of its own.
        fn saved(&self, saver: &mut Saver) -> Option<PathBuf> {
            fs::create_dir_all(&saver.place.run).unwrap();
            let keep = Keep { newest: 2, period: None, best: None };
            saver.save(&self.model, &self.optimizer, &self.state, keep).unwrap()
        }
    }

    fn companions() -> Companions {
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo");
        Companions { config: demo.join("config.json"), text: demo }
    }

    fn saver(run: &Path, bytes: u64, room: Room) -> Saver {
        Saver::new(run, &companions(), bytes, room, true).unwrap()
    }

    fn manifest(run: &Path) -> Vec<u8> {
        let checkpoint = run.join("checkpoint-0");
        durable::verify(&checkpoint).unwrap();
        fs::read(checkpoint.join(durable::MANIFEST)).unwrap()
    }

    #[test]
    fn a_checkpoint_is_the_same_wherever_it_waits() {
        let dir = tempfile::tempdir().unwrap();
        let saved = |name: &str, bytes: u64, room: Room| {
            let run = dir.path().join(name);
            let (mut trained, mut saver) = (AfterAStep::new(), saver(&run, bytes, room));
            let direct = trained.saved(&mut saver);
            // The next step must not change what is being written.
            trained.step();
            let beside = saver.wait().unwrap();
            // One of the two says where the checkpoint is.
            assert_eq!([&direct, &beside].into_iter().flatten().collect::<Vec<_>>(), [&run.join("checkpoint-0")]);
            assert!(fs::metadata(run.join("checkpoint-0").join(OPTIMIZER)).unwrap().len() > 10_000, "it has no state");
            (beside.is_some(), manifest(&run))
        };
        // No host has memory for a checkpoint of so many bytes.
        let [direct, shared] = [saved("direct", u64::MAX, Room::Host), saved("shared", 1, Room::Shared)];
        let [host, device] = [saved("host", 1, Room::Host), saved("device", u64::MAX, Room::Device)];
        assert_eq!([direct.0, shared.0, host.0, device.0], [false, false, cfg!(target_os = "linux"), true]);
        assert!([shared.1, host.1, device.1].iter().all(|manifest| *manifest == direct.1), "the manifests differ");
    }

    /// Training waits for a checkpoint that is committed in time. After one that was not, it does not wait for the next.
    #[test]
    fn training_waits_for_a_checkpoint_that_is_committed_in_time() {
        let dir = tempfile::tempdir().unwrap();
        let (mut saver, hour) = (saver(dir.path(), 1, Room::Device), Duration::from_secs(3600));
        // Begins a checkpoint, which is committed when what this returns is dropped.
        let begun = |saver: &mut Saver| {
            let (held, until_dropped) = mpsc::channel::<()>();
            let path = dir.path().to_owned();
            let write = move |committing| {
                assert!(until_dropped.recv().is_err());
                drop(committing);
                Ok(path)
            };
            saver.pending = Some(Writer::begin(write).unwrap());
            held
        };
        assert_eq!(saver.commits_within(hour), None, "nothing is written");
        drop(begun(&mut saver));
        assert_eq!(saver.commits_within(hour), Some(true));
        assert_eq!(saver.commits_within(hour), None, "training has waited already");
        saver.wait().unwrap();
        for at_most in [Duration::from_millis(1), hour] {
            let held = begun(&mut saver);
            assert_eq!(saver.commits_within(at_most), Some(false), "it is not committed");
            drop(held);
            saver.wait().unwrap();
        }
        // One that needs no waiting.
        drop(begun(&mut saver));
        while saver.is_busy() {
            thread::yield_now();
        }
        assert_eq!(saver.commits_within(hour), Some(true));
        saver.wait().unwrap();
        drop(begun(&mut saver));
        assert_eq!(saver.commits_within(hour), Some(true), "training waits again");
    }

    /// Where the device has its own processors, training loses only the time that it waits for a commit.
    #[test]
    fn waiting_for_a_commit_counts_where_the_whole_time_does_not() {
        let dir = tempfile::tempdir().unwrap();
        for (slows_steps, counts) in [(true, false), (false, true)] {
            let mut saver = saver(dir.path(), 1, Room::Device);
            saver.slows_steps = slows_steps;
            let (_held, until_dropped) = mpsc::channel::<()>();
            let path = dir.path().to_owned();
            saver.pending =
                Some(Writer::begin(move |_| until_dropped.recv().map_or(Ok(path), |()| unreachable!())).unwrap());
            assert_eq!(saver.commits_within(Duration::from_millis(2)), Some(false));
            assert_eq!(saver.taken_from_steps() >= 0.002, counts);
        }
    }

    /// Where the device computes on the host, a thread that writes a checkpoint takes its whole time from the steps.
    #[test]
    fn the_time_of_a_writing_thread_counts_where_it_slows_steps() {
        let dir = tempfile::tempdir().unwrap();
        let trained = AfterAStep::new();
        for (name, slows_steps) in [("host", true), ("device", false)] {
            let run = dir.path().join(name);
            let mut saver = saver(&run, 1, Room::Device);
            saver.slows_steps = slows_steps;
            trained.saved(&mut saver);
            assert_eq!(saver.taken_from_steps(), 0.0, "{name}: the thread has not been waited for");
            saver.wait().unwrap();
            assert_eq!(saver.taken_from_steps() > 0.0, slows_steps, "{name}");
            assert_eq!(saver.taken_from_steps(), 0.0, "{name}: it counts once");
        }
    }

    #[test]
    fn a_checkpoint_is_the_same_in_however_many_transfers_it_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let trained = AfterAStep::new();
        let saved = |transfer: usize| {
            let run = dir.path().join(transfer.to_string());
            let mut saver = saver(&run, 1, Room::Device);
            saver.place.transfer = transfer;
            trained.saved(&mut saver);
            saver.wait().unwrap();
            manifest(&run)
        };
        let whole = saved(TRANSFER);
        let shape = trained.model.embed_tokens.dims();
        // A row and a half, a state's codes without one, and exactly a state's codes.
        for transfer in [shape[1] * 6, shape[0] * shape[1] - 1, shape[0] * shape[1]] {
            assert_eq!(saved(transfer), whole, "{transfer} bytes at a time");
        }
    }

    #[test]
    fn the_older_checkpoint_stays_if_the_new_one_cannot_be_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let saver = saver(dir.path(), 1, Room::Host);
        let keep = Keep { newest: 1, period: None, best: None };
        let commit = |step: usize, damages: bool| {
            let folder = PendingFolder::new(&saver.place.target(step)).unwrap();
            let weights = folder.path_of(MODEL);
            saver.place.commit(
                folder,
                keep,
                || (),
                |name, out| {
                    // The disk loses the end of the weights after they were written.
                    if damages && name == STATE {
                        fs::OpenOptions::new().write(true).open(&weights).unwrap().set_len(5).unwrap();
                    }
                    out.write_all(b"the content of the file").map_err(CliError::io(&weights))
                },
            )
        };
        commit(1, false).unwrap();
        let error = commit(2, true).unwrap_err().to_string();
        assert!(error.contains(MODEL) && error.contains("5 bytes"), "{error}");
        assert!(dir.path().join("checkpoint-1").exists(), "the good checkpoint is gone");
        commit(3, false).unwrap();
        assert!(!dir.path().join("checkpoint-1").exists(), "the limit on checkpoints is not kept");
    }

    #[test]
    fn a_large_file_that_the_disk_has_changed_is_found_unless_training_waits() {
        let dir = tempfile::tempdir().unwrap();
        let content = vec![7_u8; 17 << 20];
        let commit = |step: usize, room: Room| {
            let saver = saver(dir.path(), 1, room);
            let folder = PendingFolder::new(&saver.place.target(step)).unwrap();
            let weights = folder.path_of(MODEL);
            let keep = Keep { newest: 1, period: None, best: None };
            saver.place.commit(
                folder,
                keep,
                || (),
                |name, out| {
                    // The disk changes a byte of the weights after they were written. Their size stays.
                    if step > 1 && name == STATE {
                        let mut file = fs::OpenOptions::new().write(true).open(&weights).unwrap();
                        file.seek(SeekFrom::Start(16 << 20)).unwrap();
                        file.write_all(b"x").unwrap();
                    }
                    out.write_all(&content).map_err(CliError::io(&weights))
                },
            )
        };
        commit(1, Room::Device).unwrap();
        for (step, room) in [(2, Room::Device), (3, Room::AtTheEnd)] {
            let error = commit(step, room).unwrap_err();
            assert!(error.exit_code() == 6 && error.to_string().contains(MODEL), "{room:?}: {error}");
            assert!(dir.path().join("checkpoint-1").exists(), "{room:?}: the good checkpoint is gone");
        }
        commit(4, Room::Shared).unwrap();
    }

    #[test]
    fn an_optimizer_state_that_is_not_finite_is_not_saved() {
        let dir = tempfile::tempdir().unwrap();
        let mut trained = AfterAStep::new();
        let width = trained.model.norm.val().dims()[0];
        let float = |value: f32| {
            let moment = Tensor::<NdArray, 1>::full([width], value, &Default::default());
            Moment::Float(moment.into_primitive().tensor())
        };
        for (m, v) in [(f32::NAN, 1.0), (0.0, f32::INFINITY), (0.0, 1.0)] {
            let moments = AdamwState { kind: StateKind::F32, m: float(m), v: float(v), residual: None, codes: None };
            trained.optimizer.restore(trained.model.norm.id, TensorState { steps: 1, moments });
            let mut saver = saver(dir.path(), 1, Room::Device);
            trained.saved(&mut saver);
            match saver.wait() {
                Ok(_) => assert_eq!((m, v), (0.0, 1.0)),
                Err(error) => {
                    assert!(error.to_string().contains("model.norm.weight"), "{error}");
                    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "something is left");
                }
            }
        }
        assert!(dir.path().join("checkpoint-0").exists());
    }

    #[test]
    fn nothing_is_committed_that_was_read_from_a_failed_device() {
        let dir = tempfile::tempdir().unwrap();
        let mut saver = saver(dir.path(), 1, Room::Device);
        saver.abandon();
        AfterAStep::new().saved(&mut saver);
        let error = saver.wait().unwrap_err();
        assert!(error.is_of_the_device(), "{error}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "something is left");
    }
}
