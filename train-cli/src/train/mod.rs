//! The training step, the optimizer and the loop around them.

pub mod codes;
pub mod damp;
pub mod gradients;
pub mod learner;
pub mod optim;
pub mod schedule;
pub mod step;
pub mod trained;
