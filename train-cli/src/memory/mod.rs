//! Device memory: predicted before a run ([`mod@estimate`]), measured during it ([`vram`]), returned
//! between steps ([`pool`]).

pub mod estimate;
pub mod pool;
pub mod vram;
