//! The command line is frozen: every flag, its other names, its heading and its default are in a golden file, so that
//! a change of any of them is seen. `UPDATE_GOLDEN=1` writes the file anew.

use crate::support::{
    files::{commands, names, run, tiny_model},
    golden,
};
use clap::{Arg, CommandFactory, FromArgMatches};
use train_cli::{args::Cli, settings::Settings};

#[test]
fn every_flag_and_its_default_is_the_recorded_one() {
    let (mut text, mut previous) = (String::new(), String::new());
    for (name, mut command) in commands(&Cli::command()) {
        command.build();
        let flags: String = command.get_arguments().map(|arg| format!("    {}\n", line(arg))).collect();
        // `estimate` takes the flags of `fit`, and one more.
        let shown = match flags.strip_prefix(&previous).filter(|_| !previous.is_empty()) {
            Some(more) => format!("    the same flags\n{more}"),
            None => flags.clone(),
        };
        text += &format!("{name}\n{shown}");
        previous = flags;
    }
    let path = golden("cli/flags.txt");
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    let recorded = std::fs::read_to_string(&path).unwrap_or_default();
    let missing: Vec<&str> = recorded.lines().filter(|line| !text.lines().any(|l| l == *line)).collect();
    let added: Vec<&str> = text.lines().filter(|line| !recorded.lines().any(|l| l == *line)).collect();
    assert!(
        text == recorded,
        "the command line differs from {}; if that is intended, run the test with UPDATE_GOLDEN=1\n- {}\n+ {}",
        path.display(),
        missing.join("\n- "),
        added.join("\n+ ")
    );
}

/// A flag as one line: its names, its value, its default and its heading.
fn line(arg: &Arg) -> String {
    let mut names = Vec::new();
    names.extend(arg.get_short().map(|short| format!("-{short}")));
    names.extend(arg.get_long().map(|long| format!("--{long}")));
    let aliases = arg.get_all_aliases().unwrap_or_default();
    names.extend(aliases.iter().map(|alias| format!("--{alias}")));
    let mut text = names.join(", ");
    if arg.get_action().takes_values() {
        let values: Vec<_> = arg.get_possible_values().iter().map(|value| value.get_name().to_owned()).collect();
        let name = arg.get_value_names().and_then(|names| names.first()).map_or("", |name| name.as_str());
        text += &if values.is_empty() { format!(" <{name}>") } else { format!(" <{name}: {}>", values.join("|")) };
        let defaults: Vec<_> = arg.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
        if defaults.iter().any(|default| !default.is_empty()) {
            text += &format!(" = {}", defaults.join(","));
        }
    }
    if let Some(heading) = arg.get_help_heading() {
        text += &format!(" [{heading}]");
    }
    text.trim_start().to_owned()
}

#[test]
fn help_prints_the_defaults_that_a_run_has() {
    let command = Cli::command();
    let fit = command.find_subcommand("fit").unwrap();
    let matches = fit.clone().no_binary_name(true).try_get_matches_from(Vec::<String>::new()).unwrap();
    assert_eq!(Settings::from_arg_matches(&matches).unwrap(), Settings::default());
}

#[test]
fn the_ten_flags_that_most_people_need_come_first() {
    let command = Cli::command();
    let fit = command.find_subcommand("fit").unwrap();
    let first = fit.get_arguments().filter(|arg| arg.get_help_heading().is_none());
    let mut names: Vec<_> = first.map(|arg| arg.get_long().unwrap()).collect();
    names.sort_unstable();
    let expected = [
        "batch-size",
        "data",
        "demo",
        "device",
        "learning-rate",
        "max-seq-length",
        "model",
        "num-train-epochs",
        "output-dir",
        "recipe",
    ];
    assert_eq!(names, expected);
}

#[test]
fn every_help_text_is_there() {
    for (name, command) in commands(&Cli::command()) {
        for arg in command.get_arguments() {
            let help = arg.get_help().unwrap_or_else(|| panic!("{name} {} has no help", arg.get_id())).to_string();
            assert!(help.matches("in tokens").count() <= 1, "{name} {} says its unit twice: {help}", arg.get_id());
        }
    }
}

/// A wrong value of any flag ends the program with exit code 2 before it writes anything, and the message names the flag.
#[test]
fn every_flag_refuses_a_wrong_value_by_its_name() {
    let dir = tempfile::tempdir().unwrap();
    let mut tried = 0;
    let refused = |words: Vec<&str>| -> String {
        let out = run(dir.path(), &words);
        let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(2), "{words:?}: {stderr}");
        stderr
    };
    for (name, mut command) in commands(&Cli::command()) {
        command.build();
        let with = |more: &[&'static str]| name.split(' ').chain(more.iter().copied()).collect::<Vec<_>>();
        for arg in command.get_arguments().filter(|arg| arg.get_action().takes_values()) {
            let Some(long) = arg.get_long() else { continue };
            let flag = format!("--{long}");
            for value in wrong_values(arg) {
                let typed = format!("{flag}={value}");
                let stderr = refused(with(&[]).into_iter().chain([typed.as_str()]).collect());
                let said = stderr.contains(&flag) && stderr.contains(value) && !stderr.contains("panicked");
                assert!(said, "{name} {typed}: {stderr}");
                tried += 1;
            }
        }
        // So does a flag that is not there, a command line that lacks what it needs, and one with too much.
        for more in [&["--no-such-flag"][..], &["--device"], &["a", "b", "c"]] {
            refused(with(more));
            tried += 1;
        }
    }
    let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().collect();
    assert!(left.is_empty(), "{left:?} was written");
    assert!(tried >= 100, "only {tried} command lines");
}

/// Values that no flag of this kind takes.
fn wrong_values(arg: &Arg) -> &'static [&'static str] {
    if !arg.get_possible_values().is_empty() {
        return &["nonsense"];
    }
    match arg.get_value_names().and_then(|names| names.first()).map_or("", |name| name.as_str()) {
        "N" | "SHARE" | "RATE" | "NORM" | "VALUE" => &["many", "-1", "1e999"],
        // Their range is checked once the other flags are there.
        "P" | "FACTOR" | "TEMPERATURE" | "TFLOPS" | "DIFFERENCE" => &["many"],
        "DEVICE" => &["gpu", "cuda:x"],
        // Nothing is at the empty path. Other wrong paths need the other flags of a command.
        "PATH" | "FILE" | "DIR" | "RUN" => &[""],
        _ => &[],
    }
}

/// Paths that these flags of `fit` and `estimate` do not take: nothing is there, or something of another kind.
const WRONG_PATHS: [(&str, &[&str]); 11] = [
    ("--model", &["none"]),
    ("--init-config", &["none.json", "pipe", "/dev/null"]),
    ("--tokenizer", &["none", "pipe", "/dev/null", "m/demo.tsv"]),
    ("--data", &["none.tsv", "none*.tsv", "pipe", "/dev/zero", "empty"]),
    ("--eval-data", &["none.tsv", "pipe", "/dev/zero", "folder_m"]),
    ("--token-cache", &["pipe", "/dev/null", "m/demo.tsv"]),
    ("--output-dir", &["pipe", "/dev/null", "m/demo.tsv"]),
    ("--output-dat", &["nowhere/x.dat", "pipe", "/dev/null", "folder_m", "m/demo.tsv", "x.bin"]),
    ("--vram-report", &["nowhere/x.json", "pipe", "/dev/null", "folder_m", "m/demo.tsv"]),
    ("--config", &["none.toml"]),
    ("--resume-from-checkpoint", &["none"]),
];

/// A path that a flag does not take ends the program with exit code 2 before it writes anything. The message names the flag and
/// the path.
#[test]
fn every_wrong_path_is_refused_by_its_flag() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    std::fs::create_dir(d.join("empty")).unwrap();
    // No message holds this name by chance.
    std::fs::create_dir(d.join("folder_m")).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(d.join("pipe")).status().unwrap().success());
    let listed = || [names(d), names(&d.join("m"))];
    let before = listed();
    let refused = |words: &[&str], flag: &str, path: &str| {
        let out = run(d, words);
        let stderr = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{words:?}: {stderr}");
        let is_named = |line: &str| line.starts_with("error: ") && line.contains(flag) && line.contains(path);
        assert!(stderr.lines().any(is_named), "{words:?}: {stderr}");
        assert_eq!(listed(), before, "{words:?} has written something");
    };
    for command in ["fit", "estimate"] {
        for (flag, path) in WRONG_PATHS.iter().flat_map(|(flag, paths)| paths.iter().map(move |path| (*flag, *path))) {
            let others =
                [("--init-config", "m"), ("--data", "m/demo.tsv"), ("--output-dir", "r"), ("--max-steps", "1")];
            let model = flag == "--model";
            let others = others.into_iter().filter(|(name, _)| *name != flag && !(model && *name == "--init-config"));
            let words = others.flat_map(|(flag, value)| [flag, value]);
            let words: Vec<&str> = [command, "--device", "cpu", flag, path].into_iter().chain(words).collect();
            refused(&words, flag, path);
        }
    }
    let calibrated = "export-hf -m m -o out --format modelopt --activations nvfp4 --device cpu --calibration-data";
    for (words, flag, path) in [
        ("generate -p a --device cpu -m", "--model", "none"),
        ("generate -m m --device cpu --prompts", "--prompts", "none.jsonl"),
        ("generate -m m -p a --device cpu --tokenizer", "--tokenizer", "pipe"),
        ("data stats m/demo.tsv -m m --tokenizer", "--tokenizer", "m/demo.tsv"),
        ("chat -m m --device cpu --script", "--script", "none.txt"),
        ("serve -m m --device cpu --port 0 --api-key-file", "--api-key-file", "none"),
        ("eval loss -m m --device cpu --data", "--data", "none.tsv"),
        ("eval needle -m m --device cpu --lengths 64 --write-rows", "--write-rows", "nowhere/x.jsonl"),
        ("export-dat --output-dat x.dat --device cpu -m", "--model", "none"),
        ("export-dat -m m --device cpu --output-dat", "--output-dat", "nowhere/x.dat"),
        ("export-dat -m m --device cpu --output-dat x.dat --like", "--like", "none.dat"),
        (calibrated, "--calibration-data", "none.tsv"),
        ("parity -m m --device cpu --expected", "--expected", "none.safetensors"),
        ("parity -m m --device cpu --expected m/model.safetensors --dump", "--dump", "/dev/null"),
        ("parity -m m --device cpu -p a --against", "--against", "none"),
        ("bench decode --device cpu --config", "--config", "none.json"),
        ("convert m --dtype bf16", "OUTPUT", "nowhere/x.dat"),
        ("inspect", "PATH", "none"),
    ] {
        refused(&words.split(' ').chain([path]).collect::<Vec<_>>(), flag, path);
    }
}
