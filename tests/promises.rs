//! What the project promises, one module for each promise. All but those of rehearsals.rs are one program, so that the backends
//! are linked once.

// A test fails by panicking.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

mod support;

mod architecture;
mod best_model;
mod blocks;
mod cache;
mod calibration;
mod chat;
mod cli;
mod cli_flags;
mod codec;
mod data_command;
mod data_formats;
mod data_make;
mod data_options;
mod disk_faults;
mod docs;
mod emulated;
mod flipped_bits;
mod foreign;
mod formats;
mod generation;
mod gguf;
mod gpu_checkpoints;
mod gradients;
mod guard;
mod head;
mod held_codes;
mod hostile;
mod kills;
mod likeliest;
mod loading;
mod mutated_files;
mod once;
mod optimizer;
mod parity;
mod paths;
mod power_loss;
mod products;
mod progress;
mod quantizer;
mod random_cases;
mod random_products;
mod recipe;
mod reliability;
mod resume;
mod round_trips;
mod run_folders;
mod runs;
mod serve;
mod shared_scales;
mod stored_models;
mod streaming;
mod stuck_steps;
mod terminal;
mod text;
mod training;
