//! Flags that this program had once, and those of the F# programs and scripts before it which have another form here. Whoever
//! types one is told what to use instead.

use clap::error::{ContextKind, ContextValue, ErrorKind};
use std::path::PathBuf;

/// Flags, each with what replaced it. A command that has a flag of such a name never asks here.
const FLAGS: &[(&str, &str)] = &[
    ("--step-mode", STEP_MODE),
    // The shape of a model.
    ("--in-features", SHAPE),
    ("--out-features", SHAPE),
    ("--max-layers", SHAPE),
    ("--path", "use --model"),
    ("--strict-load", "a file is always refused that does not fit the model's shape"),
    ("--restrict-load", "a file is always refused that does not fit the model's shape"),
    ("--quant", "use --recipe for training, --dtype for `train-cli convert`; a model runs in the format of its file"),
    // Training.
    ("--steps-per-epoch", "use --max-steps"),
    ("--use-packed-optimizer", "use --optimizer-state-mode int8 or int4"),
    ("--grad-ckpt-chunk", "use --recompute"),
    ("--step-flush-each-param", "every step does this"),
    ("--compute-grad-norm", "metrics.jsonl has the `grad_norm` of each step"),
    ("--sample-index", "rows are shuffled by --seed; give a file with the rows that you want"),
    ("--sample-mode", "rows are shuffled by --seed"),
    ("--test-max-tokens", "use --sample-prompt for the prompts; `train-cli generate` has --max-tokens"),
    ("--stop-after", "use --max-steps; --vram-report FILE has the memory of each phase of a step"),
    // Memory.
    ("--offload-mv-to-cpu", NOT_OFFLOADED),
    ("--offload-w-to-cpu", NOT_OFFLOADED),
    ("--offload-grad-to-cpu", NOT_OFFLOADED),
    ("--compact-each-step", RETURNED),
    ("--compact-after-model-load", RETURNED),
    ("--dispose-session-after-load", RETURNED),
    ("--materialize-from-packed", "use --master-weights: nvfp4 keeps the codes of the file, bf16 and f32 their values"),
    ("--profile-train-step-vram", "use --vram-report FILE"),
    ("--profile-vram", "use --vram-report FILE"),
    ("--print-tensor-byte-report", "use `train-cli estimate` for the memory of a run, `train-cli inspect` for tensors"),
    ("--cuda-mem-report", "use `train-cli fit --vram-report FILE`"),
    ("--gpu-limit-gb", "use --memory-limit, for example 20GiB"),
    ("--gpu-over-secs", CHECKED),
    ("--gpu-poll-secs", CHECKED),
    ("-l", "use --memory-limit, for example 20GiB"),
    (
        "-p",
        "a limit on memory is --memory-limit, and is checked after every step; a prompt is for `train-cli generate`",
    ),
    ("-o", GUARD_OR_OUTPUT),
    // The cache of keys and values, and how a prompt is read.
    ("--use-kvc", CACHE),
    ("--kvc-input-mode", CACHE),
    ("--kvc-backend", CACHE),
    ("--kvcacheout", CACHE),
    ("--kv-cache-out", CACHE),
    ("--tokenbytokenorpromptbyprompt", CACHE),
    ("--nokvcomputemode", CACHE),
    ("--no-kvc-mode", CACHE),
    ("--chunk-size", CACHE),
    ("--debug-kvc", "`train-cli parity` compares the results of a model with those of Hugging Face"),
    ("--target-tokens", "`train-cli generate -p - < FILE` reads a prompt of any length"),
    ("--secret", "`train-cli generate -p - < FILE` reads a prompt of any length"),
    // Kernels.
    ("--mode", KERNELS),
    ("--q4-kernel", KERNELS),
    ("--q4-cache", KERNELS),
    ("--fp4-ab", TESTED),
    ("--fp4-ab-max-calls", TESTED),
    ("--fp4-ab-explosion-rel", TESTED),
    ("--fp4-scale-check", TESTED),
    (
        "--check-logits",
        "logits that are not finite always end the command; `train-cli parity` compares them with another program's",
    ),
    // Answers and conversations.
    ("--prompt", "use `train-cli generate --prompt TEXT`"),
    ("--prompts", "use `train-cli generate --prompts FILE`"),
    ("--system", "use `train-cli chat --system-prompt TEXT`"),
    ("--max-tokens", GENERATED),
    ("--temp", GENERATED),
    ("--temperature", GENERATED),
    ("--top-p", GENERATED),
    ("--topp", GENERATED),
    ("--ignore-eos", "an answer ends at the model's stop token, or after --max-tokens"),
    ("--timing", "every answer is followed by its tokens per second; --json has them as numbers"),
    ("--ifinteractive", "use `train-cli chat`"),
    ("--stop-here", "`train-cli generate` ends after its answer, and `train-cli chat` after its script"),
    ("--turns", "use `train-cli chat --script FILE`, with a message in each line"),
    ("--followup-prompt", "use `train-cli chat --script FILE`, with a message in each line"),
    ("--interactive-reset-history", "use /reset in `train-cli chat`, also in the file of --script"),
    ("--empty-cache-each-turn", "use /reset in `train-cli chat`, also in the file of --script"),
    ("--historymode", "a conversation is always kept as messages; each turn reads only the tokens that are new"),
    ("--history-mode", "a conversation is always kept as messages; each turn reads only the tokens that are new"),
    ("--tee-object-chat-session", SAVED),
    ("--tee-object-chat-session-json", SAVED),
    ("--prompt-from-chat-session", "use `train-cli chat --script FILE.jsonl`, with a file that /save wrote"),
    ("--timeout-ms", "Ctrl-C ends an answer, and --max-tokens limits it"),
    // Files that are read and written.
    ("--model", CONVERTED),
    ("--dtype", FORMATS),
    ("--out", WRITTEN),
    ("--output", WRITTEN),
    ("--output-dir", WRITTEN),
    ("--output-dat", WRITTEN),
    ("--input-dat", "use --model; `train-cli convert IN OUT` takes the file as its first argument"),
    ("--weight", "`train-cli convert IN OUT` and `train-cli inspect FILE` take the file without a flag"),
    // Made rows.
    ("--target", "the answers of rows stand in the recipe of `train-cli data make`"),
    ("--count", "use `train-cli data make --count N`"),
    ("--train-data", "use `train-cli fit --data FILE`"),
    ("--train-last-layers", "use `train-cli fit --train-last-layers N`"),
    ("--loss", "use `train-cli fit --loss NAME`, or `train-cli eval loss` for the loss of a file"),
    ("--save-every-steps", "use `train-cli fit --save-steps N`"),
];

const SHAPE: &str =
    "the shape of a model is that of its config.json; --init-config starts from one with random weights";
const NOT_OFFLOADED: &str =
    "nothing is offloaded; --optimizer-state-mode int4 and --master-weights nvfp4 take less memory";
const RETURNED: &str = "free memory is given back by itself; --memory-limit limits it";
const CHECKED: &str = "use --memory-limit: it is checked after every step";
const GUARD_OR_OUTPUT: &str = "`train-cli fit --memory-limit SIZE` limits memory after every step; `train-cli convert \
                               IN OUT` takes the file to write as its second argument";
const CONVERTED: &str = "`train-cli convert IN OUT --dtype TYPE` takes the model as its first argument and the file to \
                         write as its second; `train-cli inspect PATH` takes the model without a flag, too";
const FORMATS: &str = "`train-cli convert IN OUT --dtype f16` writes all weights in one number format; `export-dat` \
                       writes NVFP4, or the number formats of the file that --like names";
const CACHE: &str = "the key-value cache is always used, and a prompt is always read at once";
const KERNELS: &str =
    "a model runs in one way, with kernels that are chosen by themselves; `train-cli doctor` tests them";
const TESTED: &str = "`train-cli doctor` compares the kernels with the CPU, and `train-cli parity` whole models";
const GENERATED: &str = "`train-cli generate` and `train-cli chat` have this flag";
const SAVED: &str = "use /save FILE in `train-cli chat`; --json prints each turn as JSON";
const WRITTEN: &str = "use --output-dir for `train-cli fit` and `export-hf`, --output-dat for `export-dat`; `train-cli convert IN \
                       OUT` takes the file as its second argument";

/// Values of a flag, and what replaced them.
const VALUES: [(&str, &[&str], &str); 5] = [
    ("--output-dir", &[OVER_SECS], RUN_FOLDER),
    (
        "--optimizer-state-mode",
        &["fp4", "nvfp4"],
        "a 4-bit float has no code between 0 and a twelfth of the largest, where most moments lie; use int4",
    ),
    ("--report-to", &["wandb", "mlflow", "all"], "use tensorboard, or read metrics.jsonl"),
    ("--master-weights", &["float16", "fp16", "half", "f16"], "f16 cannot hold small updates; use bf16 or f32"),
    ("--train-last-layers", &["-1", "-2"], "use 0 to train all parameters"),
];

/// The value of the guard's `-o`, the seconds above a limit after which it ended a program: at once.
const OVER_SECS: &str = "0";

const RUN_FOLDER: &str = "-o names the run folder; use --memory-limit for a limit on memory, which is checked after \
                          every step, and ./0 for a run folder of this name";

/// Refuses the value that the guard of the F# programs took after `-o`, where this program takes a run folder.
///
/// # Errors
/// If the path is that value.
pub(crate) fn not_of_the_guard(path: PathBuf) -> Result<PathBuf, &'static str> {
    if path.as_os_str() == OVER_SECS { Err(RUN_FOLDER) } else { Ok(path) }
}

/// What to do with a word that belongs to no flag. One of the origin's scripts took its prompt so.
const WORD: &str = "this word belongs to no flag; `train-cli generate --prompt TEXT` takes a prompt, and a value with spaces \
                    or a pattern such as 'rows/*.jsonl' needs quotation marks";

/// What to do with flags in front of which no command stands.
const COMMAND: &str = "the command comes first: `train-cli fit` trains, `train-cli generate` asks a model, and `train-cli --help` \
                       lists the others";

/// The same for a command that takes words without flags, as `inspect FILE` does, and now has one too many.
const WORD_TOO_MANY: &str = "this word is one too many; a value with spaces or a pattern such as 'rows/*.jsonl' needs \
                             quotation marks";

/// What to do with a second path of a model: the origin took its folder and its file.
const MODEL: &str =
    "name the model once, by its folder or its file; --tokenizer FOLDER names its tokenizer if that lies elsewhere";

/// What replaced `--step-mode`, which older runs have recorded.
pub const STEP_MODE: &str = "there is one way to make a step; --recompute decides which blocks run twice, and --clip exact \
                             clips by the norm of the step itself";

/// What to use instead of the flag or value that an error of clap is about, if it is one of these. An error of our own, which has
/// no context, is its own answer: clap would print the usage of the whole program below it.
pub fn answer(error: &clap::Error) -> Option<String> {
    if error.kind() == ErrorKind::ValueValidation && error.context().next().is_none() {
        let text = error.to_string();
        let first = text.lines().next().unwrap_or_default();
        return Some(first.strip_prefix("error: ").unwrap_or(first).to_owned());
    }
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    let typed = text(ContextKind::InvalidArg)?;
    let flag = typed.split([' ', '=']).next().unwrap_or_default();
    match error.kind() {
        ErrorKind::UnknownArgument if !typed.starts_with('-') => {
            let usage = error.get(ContextKind::Usage).map(ToString::to_string).unwrap_or_default();
            let words: Vec<&str> = usage.split_whitespace().collect();
            // The value of a flag stands behind it.
            let takes_words = words.windows(2).any(|two| two[1].starts_with('<') && !two[0].starts_with('-'));
            Some(format!("{typed}: {}", if takes_words { WORD_TOO_MANY } else { WORD }))
        }
        // The main program of the origin had no commands.
        ErrorKind::UnknownArgument if of_no_command(error) => Some(format!("{flag}: {COMMAND}")),
        ErrorKind::UnknownArgument => {
            let (_, answer) = FLAGS.iter().find(|(name, _)| name.eq_ignore_ascii_case(flag))?;
            Some(format!("{flag}: {answer}"))
        }
        ErrorKind::InvalidValue | ErrorKind::ValueValidation => {
            let value = text(ContextKind::InvalidValue)?;
            // The answer to one negative number holds for every other.
            let same = |known: &&str| known.eq_ignore_ascii_case(value) || is_negative(known) && is_negative(value);
            let known = VALUES.iter().find(|(name, values, _)| *name == flag && values.iter().any(same));
            let answer = known.map(|(.., answer)| (*answer).to_owned());
            answer.or_else(|| in_small_letters(error, value)).map(|answer| format!("{flag} {value}: {answer}"))
        }
        // A flag that is given twice conflicts with itself.
        ErrorKind::ArgumentConflict if flag == "--model" => {
            let prior = error.get(ContextKind::PriorArg);
            prior.is_none_or(|prior| prior.to_string().starts_with(flag)).then(|| format!("{flag}: {MODEL}"))
        }
        _ => None,
    }
}

/// Whether an error is about words in front of which no command stands.
fn of_no_command(error: &clap::Error) -> bool {
    let usage = error.get(ContextKind::Usage).map(ToString::to_string).unwrap_or_default();
    let mut words = usage.split_whitespace().skip_while(|word| !word.ends_with("train-cli")).skip(1);
    words.all(|word| word.starts_with(['[', '<']))
}

/// Whether a value is a negative whole number.
fn is_negative(value: &str) -> bool {
    value.strip_prefix('-').is_some_and(|digits| !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()))
}

/// The answer to a value that the flag takes, but in small letters.
fn in_small_letters(error: &clap::Error, value: &str) -> Option<String> {
    let Some(ContextValue::Strings(valid)) = error.get(ContextKind::ValidValue) else { return None };
    let meant = valid.iter().find(|valid| valid.eq_ignore_ascii_case(value))?;
    Some(format!("values are written in small letters; use {meant}"))
}

#[cfg(test)]
mod tests {
    use super::{FLAGS, VALUES, answer};
    use crate::args::Cli;
    use clap::{Parser, error::ErrorKind};

    #[test]
    fn every_flag_and_value_that_was_replaced_is_answered() {
        for (flag, text) in FLAGS {
            // Flags that no command but `completions` lacks are asked for there.
            let error = Cli::try_parse_from(["train-cli", "completions", "bash", flag, "true"]).unwrap_err();
            assert_eq!(answer(&error), Some(format!("{flag}: {text}")), "{error}");
        }
        for (flag, values, text) in VALUES {
            for value in values {
                let error = Cli::try_parse_from(["train-cli", "fit", flag, value]).unwrap_err();
                assert_eq!(answer(&error), Some(format!("{flag} {value}: {text}")), "{error}");
                // Older scripts wrote NVFP4 and Float16.
                let value = value.to_uppercase();
                let error = Cli::try_parse_from(["train-cli", "fit", flag, &value]).unwrap_err();
                assert_eq!(answer(&error), Some(format!("{flag} {value}: {text}")), "{error}");
            }
        }
        for (flag, value, text) in [
            ("--train-last-layers", "-3", "use 0 to train all parameters"),
            ("--optimizer-state-mode", "Int8", "values are written in small letters; use int8"),
            ("--synthetic", "True", "values are written in small letters; use true"),
        ] {
            let error = Cli::try_parse_from(["train-cli", "fit", flag, value]).unwrap_err();
            assert_eq!(answer(&error), Some(format!("{flag} {value}: {text}")), "{error}");
        }
        let error = Cli::try_parse_from(["train-cli", "fit", "--no-such-flag"]).unwrap_err();
        assert_eq!(answer(&error), None);
        // The origin named the folder of a model and its file; both name the model here.
        for file in ["--weight", "--input-dat"] {
            let line = ["train-cli", "fit", "--model-dir", "m", file, "w.dat", "--seed", "1"];
            let answer = answer(&Cli::try_parse_from(line).unwrap_err()).expect("an answer");
            assert!(answer.starts_with("--model: name the model once"), "{file}: {answer}");
        }
        let error = Cli::try_parse_from(["train-cli", "fit", "--seed", "1", "--seed", "2"]).unwrap_err();
        assert_eq!(answer(&error), None, "{error}");
    }

    /// Every flag of the F# programs and scripts is taken by the command that does their work, or answered there.
    #[test]
    fn every_flag_of_the_origin_is_taken_or_answered() {
        const FIT: &str = "fit";
        const TALK: [&str; 2] = ["generate -m m -p x", "chat -m m"];
        let asked = |command: &str, flag: &str, value: &str| {
            let words = command.split(' ').chain([flag, value]).filter(|word| !word.is_empty());
            let Err(error) = Cli::try_parse_from(std::iter::once("train-cli").chain(words)) else { return };
            assert!(
                error.kind() == ErrorKind::ArgumentConflict || answer(&error).is_some(),
                "{command} {flag} {value}: {error}"
            );
        };
        for line in TRAINING.lines().map(str::trim).filter(|line| !line.is_empty()) {
            for (flag, value) in line.split(" · ").map(|flag| flag.split_once(' ').unwrap_or((flag, ""))) {
                asked(FIT, flag, value);
            }
        }
        for (flag, value) in TALKING.lines().flat_map(|line| line.trim().split(" · ")).filter_map(|f| f.split_once(' '))
        {
            TALK.iter().for_each(|command| asked(command, flag, value));
        }
        for (flag, value) in [("--output", "x.tsv"), ("--target", "x"), ("--count", "100"), ("--seed", "1")] {
            asked("data make recipe.toml -o x.tsv", flag, value);
        }
        for (flag, value) in [("--model", "m"), ("--dtype", "float16"), ("--quant", "none"), ("--out", "x.dat")] {
            asked("convert a b.dat", flag, value);
            asked("export-dat -m m --output-dat b.dat", flag, value);
        }
    }

    /// Whole command lines of the origin, as a person types them, are answered: none of them ends with a bare error of clap.
    #[test]
    fn whole_command_lines_of_the_origin_are_answered() {
        for (line, begins) in [
            ("convert --model M --dtype float16 --quant none --out x.dat", "--model: `train-cli convert IN OUT"),
            ("convert M x.dat --dtype float16 --quant none", "--quant: use --recipe for training, --dtype for"),
            ("export-dat --model demo --dtype float16 --quant none --out x.dat", "--dtype: `train-cli convert IN OUT"),
            ("fit --gpu-limit-gb 108 --gpu-over-secs 0 --gpu-poll-secs 0.5", "--gpu-limit-gb: use --memory-limit"),
            ("fit -l 108 -o 0 -p 0.5", "-l: use --memory-limit"),
            ("fit -m m -d x.tsv -o 0", "--output-dir 0: -o names the run folder; use --memory-limit"),
            ("generate -m m -p x -o 0", "-o: `train-cli fit --memory-limit SIZE`"),
            ("chat -m m -o 0", "-o: `train-cli fit --memory-limit SIZE`"),
            ("generate -m m hi", "hi: this word belongs to no flag; `train-cli generate --prompt TEXT`"),
            ("chat -m m hi", "hi: this word belongs to no flag; `train-cli generate --prompt TEXT`"),
            ("--model-dir m --lr 1e-3", "--model-dir: the command comes first: `train-cli fit` trains"),
            ("inspect a.dat b.dat", "b.dat: this word is one too many; a value with spaces"),
        ] {
            let error = Cli::try_parse_from(format!("train-cli {line}").split(' ')).unwrap_err();
            assert!(answer(&error).is_some_and(|answer| answer.starts_with(begins)), "{line}: {:?}", answer(&error));
        }
        // A folder of this name can be named all the same.
        assert!(Cli::try_parse_from(["train-cli", "fit", "-o", "./0"]).is_ok());
    }

    /// The main program, `Train.OneStep`, `Train.WhoAmI.AndExportDat`, the guard, and `run-train-step-full-nvfp4`.
    const TRAINING: &str = "
        --model-dir m · --config c.toml · --tokenizer t · --weight w.dat · --device cuda · --epochs 1 · --steps-per-epoch 10
        --batch-size 2 · --in-features 1024 · --out-features 1024 · --max-layers 2 · --synthetic true · --use-kvc false
        --seq-len 8 · --lr 1e-3 · --loss-mode scalar · --loss ce · --loss l1 · --loss scalar-l1 · --loss cross-entropy
        --loss token-ce · --master-dtype bfloat16 · --master-dtype float16 · --master-dtype fp16 · --master-dtype half
        --master-dtype bf16 · --master-dtype float32 · --master-dtype fp32 · --master-dtype BFloat16 · --master-dtype Float16
        --device CUDA · --optimizer-state-mode NVFP4 · --optimizer-state-mode FP4 · --train-last-layers -3
        --use-packed-optimizer true
        --optimizer-state-mode int8 · --optimizer-state-mode nvfp4 · --optimizer-state-mode fp4 · --optimizer-state-mode 8bit
        --optimizer-state-mode 8-bit · --grad-ckpt-chunk 0 · --optimizer-step-chunk-rows 32 · --offload-mv-to-cpu false
        --offload-w-to-cpu false · --offload-grad-to-cpu false · --step-flush-each-param true
        --profile-train-step-vram false · --train-step-vram-report r.json · --checkpoint-dir ./checkpoints
        --save-every-steps 0 · --resume false · --strict-load true · --restrict-load true
        --train-data t.txt · --vram-report r.json · --sample-index 0 · --step-chunk-rows 16
        --input-dat m.dat · --output-dat o.dat · --steps 6 · --train-last-layers 0 · --train-last-layers -1
        --test-max-tokens 12 · --compute-dtype float16 · --compute-dtype float32 · --sample-mode random · --seed 20260226
        --grad-clip 0.5 · --compact-each-step true · --log-every 10
        --gpu-limit-gb 108 · -l 108 · --gpu-over-secs 0 · --gpu-poll-secs 0.5 · -p 0.5 · -o 0
        --dtype bfloat16 · --beta1 .9 · --beta2 .999 · --eps 1e-8 · --weight-decay .01 · --materialize-from-packed false
        --compute-grad-norm false · --dispose-session-after-load true · --compact-after-model-load true
        --print-tensor-byte-report true · --stop-after none · --profile-vram true";

    /// `check-stageE`, `run-training` and its variants, `run-long-context`, and `run2`.
    const TALKING: &str = "
        --model-dir m · --weight w.dat · --device cuda · --dtype float16 · --dtype Float16 · --quant fp4 · --mode bridge
        --use-kvc true · --kvc-input-mode pbp · --max-tokens 32 · --temp 0 · --top-p 1 · --topp 1 · --seed 123 · --prompt x
        --ifInteractive true · --check-logits true · --timing false · --ignore-eos false · --stop-here true
        --interactive-reset-history true · --timeout-ms 60000 · --KVCacheOut true · --kv-cache-out true · --kvcacheout true
        --empty-cache-each-turn true · --TokenByTokenOrPromptByPrompt pbp · --NoKVComputeMode ephemeral-kvc
        --no-kvc-mode full-replay · --tee-object-chat-session s.txt · --tee-object-chat-session-json s.jsonl
        --kvc-backend fp2-model · --turns 1 · --followup-prompt continue. · --target-tokens 64000 · --chunk-size 4000
        --secret x · --path m · --system x · --q4-kernel x · --q4-cache x · --HistoryMode tokens · --debug-kvc true
        --cuda-mem-report true · --fp4-ab true · --fp4-scale-check true · --fp4-ab-max-calls 64
        --fp4-ab-explosion-rel 0.5 · --prompt-from-chat-session s.jsonl";
}
