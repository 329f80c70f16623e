//! A training run on disk: the inputs it reads, the folder it writes, its journal and its checkpoints.

pub mod beginning;
mod cadence;
pub mod checkpoint;
pub mod evaluations;
pub mod folder;
pub mod header;
pub mod inputs;
pub mod journal;
mod log;
mod optimizer_file;
pub mod plot;
pub mod preflight;
pub mod sample_answers;
pub mod saving;
pub mod summary;
mod tensorboard;
