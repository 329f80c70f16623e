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
        None if args.against.is_none() && args.recipe.is_none() && args.against_recipe.is_none() => {
            let text = match args.prompt {
                Some(_) => {
                    "--prompt: two models are compared on a prompt, and there is one; give --against MODEL too, or \
                     --against-recipe RECIPE"
                }
                None => {
                    "--model has nothing to be compared with; give --expected FILE, or --prompt TEXT with --against MODEL or \
                     --against-recipe RECIPE"
                }
            };
            Err(CliError::Usage(text.into()))
        }
        None => compare::run(&args),
    }
}
