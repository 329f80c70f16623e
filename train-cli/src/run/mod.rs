//! A training run on disk: the inputs it reads, the folder it writes, its journal, its checkpoints, and the models that it
//! leaves: found, read as they were trained, and recorded.

pub mod beginning;
mod cadence;
pub mod checkpoint;
mod cost;
mod destination;
pub mod evaluations;
pub mod export_format;
pub mod folder;
pub mod header;
pub mod history;
pub mod inputs;
pub mod journal;
pub mod located;
pub mod log;
mod losses;
mod old_checkpoints;
mod optimizer_file;
pub mod page;
pub mod plot;
pub mod preflight;
mod record_file;
pub mod recorded_outputs;
pub mod results;
pub mod resume;
pub mod sample_answers;
pub mod saving;
mod snapshot;
pub mod stored_model;
pub mod summary;
pub mod tensorboard;
pub mod trained;
mod waiting;
mod writer;
