//! Flags that this program had once, and those of the F# program before it which have another form here. Whoever types one
//! is told what to use instead.

use clap::error::{ContextKind, ContextValue, ErrorKind};

/// A flag, and what replaced it.
const FLAGS: [(&str, &str); 35] = [
    ("--step-mode", STEP_MODE),
    ("--in-features", SHAPE),
    ("--out-features", SHAPE),
    ("--max-layers", SHAPE),
    ("--steps-per-epoch", "use --max-steps"),
    ("--use-packed-optimizer", "use --optimizer-state-mode int8 or int4"),
    ("--grad-ckpt-chunk", "use --recompute"),
    ("--offload-mv-to-cpu", NOT_OFFLOADED),
    ("--offload-w-to-cpu", NOT_OFFLOADED),
    ("--offload-grad-to-cpu", NOT_OFFLOADED),
    ("--step-flush-each-param", "every step does this"),
    ("--compact-each-step", "free memory is given back by itself; --memory-limit limits it"),
    ("--compact-after-model-load", "free memory is given back by itself; --memory-limit limits it"),
    ("--profile-train-step-vram", "use --vram-report FILE"),
    ("--profile-vram", "use --vram-report FILE"),
    ("--strict-load", "a file is always refused that does not fit the model's shape"),
    ("--restrict-load", "a file is always refused that does not fit the model's shape"),
    ("--sample-index", "rows are shuffled by --seed; give a file with the rows that you want"),
    ("--sample-mode", "rows are shuffled by --seed"),
    ("--test-max-tokens", "use --sample-prompt for the prompts; `train-cli generate` has --max-tokens"),
    ("--gpu-limit-gb", "use --memory-limit, for example 20GiB"),
    ("--gpu-over-secs", "use --memory-limit: it is checked after every step"),
    ("--gpu-poll-secs", "use --memory-limit: it is checked after every step"),
    ("--quant", "use --recipe"),
    ("--use-kvc", CACHE),
    ("--kvc-input-mode", CACHE),
    ("--kvc-backend", CACHE),
    ("--kvcacheout", CACHE),
    ("--kv-cache-out", CACHE),
    ("--tokenbytokenorpromptbyprompt", CACHE),
    ("--nokvcomputemode", CACHE),
    (
        "--check-logits",
        "logits that are not finite always end the command; `train-cli parity` compares them with another program's",
    ),
    ("--ifinteractive", "use `train-cli chat`"),
    ("--turns", "use `train-cli chat --script FILE`"),
    ("--timeout-ms", "Ctrl-C ends an answer, and --max-tokens limits it"),
];

const SHAPE: &str =
    "the shape of a model is that of its config.json; --init-config starts from one with random weights";
const NOT_OFFLOADED: &str =
    "nothing is offloaded; --optimizer-state-mode int4 and --master-weights nvfp4 take less memory";
const CACHE: &str = "the key-value cache is always used, and a prompt is always read at once";

/// Values of a flag, and what replaced them.
const VALUES: [(&str, &[&str], &str); 4] = [
    (
        "--optimizer-state-mode",
        &["fp4", "nvfp4"],
        "a 4-bit float has no code between 0 and a twelfth of the largest, where most moments lie; use int4",
    ),
    ("--report-to", &["none"], "metrics.jsonl is always written, because a resumed run reads it; leave the flag out"),
    ("--report-to", &["wandb", "mlflow", "all"], "use tensorboard, or read metrics.jsonl"),
    ("--master-weights", &["float16", "fp16", "half", "f16"], "f16 cannot hold small updates; use bf16 or f32"),
];

/// What replaced `--step-mode`, which older runs have recorded.
pub const STEP_MODE: &str = "there is one way to make a step; --recompute decides which blocks run twice, and --clip exact \
                             clips by the norm of the step itself";

/// What to use instead of the flag or value that an error of clap is about, if it is one of these.
pub fn answer(error: &clap::Error) -> Option<String> {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    let flag = text(ContextKind::InvalidArg)?.split([' ', '=']).next().unwrap_or_default();
    match error.kind() {
        ErrorKind::UnknownArgument => {
            let (_, answer) = FLAGS.iter().find(|(name, _)| name.eq_ignore_ascii_case(flag))?;
            Some(format!("{flag}: {answer}"))
        }
        ErrorKind::InvalidValue => {
            let value = text(ContextKind::InvalidValue)?;
            let (.., answer) = VALUES.iter().find(|(name, values, _)| *name == flag && values.contains(&value))?;
            Some(format!("{flag} {value}: {answer}"))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::{FLAGS, VALUES, answer};
    use crate::args::Cli;
    use clap::Parser;

    #[test]
    fn every_flag_and_value_that_was_replaced_is_answered() {
        for command in ["fit", "generate"] {
            for (flag, text) in FLAGS {
                let error = Cli::try_parse_from(["train-cli", command, flag, "true"]).unwrap_err();
                assert_eq!(answer(&error), Some(format!("{flag}: {text}")), "{error}");
            }
        }
        for (flag, values, text) in VALUES {
            for value in values {
                let error = Cli::try_parse_from(["train-cli", "fit", flag, value]).unwrap_err();
                assert_eq!(answer(&error), Some(format!("{flag} {value}: {text}")), "{error}");
            }
        }
        let error = Cli::try_parse_from(["train-cli", "fit", "--no-such-flag"]).unwrap_err();
        assert_eq!(answer(&error), None);
    }
}
