//! What the project promises, one module a promise. One binary, so that the backends are linked once.

mod support;

mod codec;
mod gradients;
mod parity;
mod products;
mod quantizer;
