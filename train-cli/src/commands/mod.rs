//! One file or folder for each command of the program, and `flags`, which several of them share.

pub mod bench;
mod bench_model;
pub mod chat;
pub mod convert;
pub mod data;
mod data_make;
pub mod demo;
pub mod doctor;
pub mod estimate;
pub mod eval;
pub mod export;
pub mod export_hf;
pub mod fit;
mod flags;
pub mod generate;
pub mod inspect;
mod needle;
pub mod parity;
pub mod runs;
pub mod serve;
pub mod shell;
