//! A training run on disk: the folder it writes, the inputs it reads, its checkpoints.

pub mod checkpoint;
pub mod folder;
pub mod inputs;
