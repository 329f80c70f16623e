//! What the project promises, one module a promise. One binary, so that the backends are linked once.

mod support;

mod cache;
mod cli;
mod codec;
mod formats;
mod gradients;
mod hostile;
mod parity;
mod products;
mod quantizer;
mod text;
mod training;
