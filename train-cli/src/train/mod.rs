//! Training: the loop over steps, one optimizer step, and what a step is made of.
//!
//! A reader who follows one training step opens these files from top to bottom:
//!
//! | file | what it holds |
//! |---|---|
//! | [`learner`] | everything that Burn's Learner needs: the strategy, the metrics, the progress lines |
//! | [`training_loop`] | the loop over steps: schedule, step, evaluation, checkpoint |
//! | [`guard`] | steps whose loss or gradient is not finite are left out |
//! | [`evaluation`] | the loss on the evaluation samples |
//! | [`damp`] | the damped finish: blocks freeze on their NVFP4 codes near the end of a run |
//! | [`schedule`] | the learning rate of each step |
//! | [`step`] | one optimizer step |
//! | [`streaming`] | forward and backward of one micro-batch, block by block |
//! | [`pass`] | what a pass over a micro-batch needs besides the model |
//! | [`objective`] | the model with its loss |
//! | [`clip`] | gradient clipping |
//! | [`gradients`] | gradients are summed, measured, or given to the optimizer |
//! | [`optim`] | AdamW, tensor by tensor |
//! | [`trained`] | which parameters a run trains, and which of them decay |
//! | [`codes`] | how many NVFP4 codes a run changed |

pub mod clip;
pub mod codes;
pub mod damp;
pub mod evaluation;
pub mod gradients;
pub mod guard;
pub mod learner;
pub mod objective;
pub mod optim;
pub mod pass;
pub mod schedule;
pub mod step;
pub mod streaming;
pub mod trained;
pub mod training_loop;
