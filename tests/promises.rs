//! What the project promises, one module a promise. One binary, so that the backends are linked once.

// A test that fails says so by panicking.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

mod support;

mod blocks;
mod cache;
mod cli;
mod cli_flags;
mod codec;
mod compile_cuda;
mod docs;
mod every_kernel;
mod formats;
mod gradients;
mod hostile;
mod optimizer;
mod parity;
mod products;
mod quantizer;
mod random_cases;
mod streaming;
mod text;
mod training;
