//! Device memory: [`estimate`] predicts it before a run, [`free`] says what there is, [`vram`] measures it, [`pool`]
//! returns it between steps of a training, [`surplus`] while a model answers. [`host`] counts the memory of the host.

pub mod estimate;
pub mod free;
pub mod host;
pub mod pool;
pub mod surplus;
pub mod vram;
