//! Defaults that depend on the model or on the run, or that several commands share, beside the help that states them.

use backend_nvfp4::{MasterKind, Precision, Scaling};

/// The folder of run folders, if nobody names one.
pub const RUNS: &str = "runs";

/// Most training rows that are held out for evaluation.
pub const MOST_EVALUATED: usize = 200;

/// Fewest rows of which some are held out for evaluation.
pub const FEWEST_SPLIT: usize = 10;

/// Maximum length of a training sequence in tokens, if none is given and the model takes as many.
pub const MAX_SEQ_LENGTH: usize = 2048;

/// Fewest tokens of a sequence: the first one predicts the second.
pub const SHORTEST_SEQUENCE: usize = 2;

/// The help of a flag for the maximum length of a sequence.
pub(crate) fn longest(what: &str) -> String {
    format!("{what} [default: {MAX_SEQ_LENGTH}, or the model's limit if that is lower]")
}

/// Parts of a run after which it saves and evaluates, if nobody says how often.
const PARTS: usize = 20;

/// Number of steps of such a part, in a run of so many steps.
pub(crate) fn part_of_the_run(steps: usize) -> usize {
    steps.div_ceil(PARTS)
}

/// The first step, counted from 0, that uses the recipe, if this share of a run of so many steps trains without it. At least the
/// last step uses it.
pub fn quantized_from(share: f64, steps: usize) -> usize {
    ((share * steps as f64).round() as usize).min(steps.saturating_sub(1))
}

/// For recipe nvfp4, one block in so many is not quantized, at the end of the model. Its authors advise that, and without such
/// blocks the loss is about 1 % higher (doc/notebook/training.md).
pub(super) const BF16_BLOCK_IN: usize = 6;

/// The help of `--bf16-last-blocks`.
pub(super) fn advised_blocks() -> String {
    format!(
        "Number of blocks (transformer layers) at the end of the model whose linear layers are not quantized [default: 0. \
         With --recipe nvfp4, unless --master-weights nvfp4 is given, too: the number of blocks divided by {BF16_BLOCK_IN}, rounded up]"
    )
}

/// Share of the time of the steps that evaluations may take if nobody says how often a run evaluates. With [`SAVING_SHARE`] it is
/// a tenth.
pub const EVALUATION_SHARE: f64 = 0.08;

/// Share of a run's time that checkpoints may take from training if nobody says how often a run saves.
pub const SAVING_SHARE: f64 = 0.02;

/// The help of a flag whose default is a part of the run.
pub(super) fn parts_of_the_run(what: &str, but: &str) -> String {
    format!("{what} [default: the steps of the run divided by {PARTS}{but}]")
}

/// The number format in which a model computes, if nobody names one.
pub fn compute_dtype(on_cuda: bool) -> Precision {
    if on_cuda { Precision::Bf16 } else { Precision::F32 }
}

/// The help of that default.
pub(super) const COMPUTE_DTYPE: &str = "bf16 on CUDA, f32 elsewhere";

/// How master weights are stored where activations have this number format, if nobody says how. With `tf32` activations are f32.
pub fn master_weights(precision: Precision) -> MasterKind {
    if precision == Precision::Bf16 { MasterKind::BF16 } else { MasterKind::F32 }
}

/// The help of that default.
pub(super) const MASTER_WEIGHTS: &str = "bf16 if the model computes in bf16 (--compute-dtype), else f32";

/// Whether clipping uses the norm of the same step, if nobody says which norm it uses. This norm costs nothing extra where all
/// gradients exist before the first is applied. Elsewhere it takes the memory of all gradients or a second pass, and the previous
/// step's norm is used.
pub fn clips_exactly_by_default(gradient_accumulation_steps: usize) -> bool {
    gradient_accumulation_steps > 1
}

/// The help of that default.
pub(super) const CLIP: &str =
    "`exact` if gradients are accumulated, because it then costs nothing; otherwise `previous`";

/// Which scales NVFP4 weights get, if nobody chooses them and the model does not say which it has.
pub const SCALING: Scaling = Scaling::Two;
/// The name of [`SCALING`] on the command line, for help that states it.
pub(crate) const SCALING_NAME: &str = "two";

/// Which scales the NVFP4 weights of a run have, if nobody chooses them. `begun_with` are those with which a resumed run began:
/// older versions took those of the model file.
pub fn scales(begun_with: Option<Scaling>) -> Scaling {
    begun_with.unwrap_or(SCALING)
}

/// The help of that default.
pub(super) const SCALES: &str = "a new run uses `two` (scales of groups and of matrices), even if the NVFP4 weights of its model \
                                 file have no scale for the whole matrix; a resumed run keeps the scales with which it began";
