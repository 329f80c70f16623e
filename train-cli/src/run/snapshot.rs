//! What a checkpoint is made from: handles on the weights and states after a step, which become its files.

use super::{
    checkpoint::{MODEL, OPTIMIZER, TrainerState},
    optimizer_file,
    waiting::{Blocks, WaitingFile},
};
use crate::{CliError, train::chunked_adamw::ChunkedAdamw};
use backend_nvfp4::Nvfp4Kernels;
use model_qwen3::{ModelError, model::Qwen3, weights::Live, write::write_safetensors};
use std::{
    io::Write,
    path::{Path, PathBuf},
    thread,
};

/// The large files of a checkpoint, which are made at the same time.
pub(super) const LARGE: [&str; 2] = [MODEL, OPTIMIZER];

/// What a checkpoint is made from.
pub(super) struct Snapshot<B: Nvfp4Kernels> {
    pub(super) model: Qwen3<B>,
    pub(super) optimizer: ChunkedAdamw<B>,
    pub(super) state: TrainerState,
    /// The checkpoint's folder.
    pub(super) target: PathBuf,
    /// Bytes that are read from the device at a time.
    pub(super) transfer: usize,
}

impl<B: Nvfp4Kernels> Snapshot<B> {
    /// Writes one of the [`LARGE`] files, or the state.
    pub(super) fn write(&self, name: &str, out: &mut dyn Write) -> Result<(), CliError> {
        match name {
            MODEL => {
                let weights = Live::new(&self.model).in_transfers_of(self.transfer);
                write_safetensors(&weights, out, |e| ModelError::io(&self.target, "")(e))?;
                Ok(())
            }
            OPTIMIZER => optimizer_file::write(&self.model, &self.optimizer, self.transfer, out, &self.target),
            _ => write_state(&self.state, out, &self.target),
        }
    }

    /// The [`LARGE`] files, made in the host's memory. While one waits for the device, the other is copied.
    pub(super) fn in_memory(&self, blocks: &Blocks) -> Result<[WaitingFile; 2], CliError> {
        let made = |name: &str| {
            let mut file = blocks.file();
            self.write(name, &mut file).map(|()| file)
        };
        thread::scope(|scope| {
            let first = thread::Builder::new().spawn_scoped(scope, || made(LARGE[0]));
            let first = first.map_err(CliError::no_thread("checkpoint"))?;
            let second = made(LARGE[1]);
            Ok([first.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?, second?])
        })
    }
}

/// Writes the state of a run besides its tensors.
pub(super) fn write_state(state: &TrainerState, out: &mut dyn Write, target: &Path) -> Result<(), CliError> {
    let text = serde_json::to_string_pretty(state).expect("plain data is always valid JSON");
    out.write_all(text.as_bytes()).map_err(CliError::io(target))
}
