//! Training: the loop over steps, one optimizer step, and what a step is made of.
//!
//! A reader who follows one training step opens these files from top to bottom:
//!
//! | file | what it holds |
//! |---|---|
//! | [`learner`] | everything that Burn's Learner needs: the strategy, the metrics, the progress lines |
//! | [`training_loop`] | the loop over steps: schedule, step, evaluation, checkpoint |
//! | [`schedule`] | the learning rate of each step |
//! | [`damp`] | the damped finish: blocks freeze on their NVFP4 codes near the end of a run |
//! | [`guard`] | steps whose loss or gradient is not finite are left out |
//! | [`step`] | one optimizer step |
//! | [`clip`] | gradient clipping |
//! | [`streaming`] | forward and backward of one micro-batch, block by block |
//! | [`objective`] | the model with its loss |
//! | [`pass`] | what a pass over a micro-batch needs besides the model |
//! | [`gradients`] | gradients are summed, measured, or given to the optimizer |
//! | [`chunked_adamw`] | AdamW, tensor by tensor |
//!
//! These serve the run around the step:
//!
//! | file | what it holds |
//! |---|---|
//! | [`parameters`] | which parameters a run trains, and which of them decay |
//! | [`pace`] | how long the rest of a run takes |
//! | [`evaluation`] | the loss on the evaluation samples |
//! | [`codes`] | how many NVFP4 codes a run changed |

pub mod chunked_adamw;
pub mod clip;
pub mod codes;
pub mod damp;
pub mod evaluation;
pub mod gradients;
pub mod guard;
pub mod learner;
pub mod objective;
pub mod pace;
pub mod parameters;
pub mod pass;
pub mod schedule;
pub mod step;
pub mod streaming;

pub mod training_loop;
