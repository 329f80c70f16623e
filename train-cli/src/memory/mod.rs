//! Device memory: [`mod@estimate`] predicts it before a run, [`vram`] measures it, [`pool`] returns it between steps.

pub mod estimate;
pub mod pool;
pub mod vram;
