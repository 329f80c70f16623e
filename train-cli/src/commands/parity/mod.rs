//! `parity`: whether a model computes what it should. `fixture` compares it with values of Hugging Face, `compare` with
//! another model or another recipe, layer by layer. Both end with PASS or FAIL, and FAIL is exit code 6.

mod compare;
mod fixture;

pub use fixture::{Comparison, Difference, Parity};

use crate::{CliError, args::ParityArgs};

/// Runs the command.
///
/// # Errors
/// If a model or the fixture is broken, or a difference is larger than rounding explains.
pub fn run(args: ParityArgs) -> Result<(), CliError> {
    match &args.expected {
        Some(expected) => fixture::run(&args, expected),
        None => compare::run(&args),
    }
}
