//! One file or folder for each command of the program. Several commands share `flags` and `export_check`.

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
mod export_check;
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
