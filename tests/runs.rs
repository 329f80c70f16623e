//! A run folder tells what the run did: `summary.md` and `loss.svg` are written however the run ends, and `runs` lists, shows
//! and compares runs. The command line is known to shells and to `man`.

use crate::support::{
    faulty_disk::{FIT, Fault, Machine},
    files::{command, names, ok, refused, run, send, tiny_model},
    skipped_for,
};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::{
    fs,
    io::{BufRead, BufReader},
    path::Path,
    process::{Command, Stdio},
};

fn fit(d: &Path, more: &[&str]) {
    let words =
        "fit -m m -d m/demo.tsv --device cpu --max-seq-length 64 --max-steps 4 --eval-steps 2 --sample-prompt who|you?";
    let words: Vec<&str> = words.split(' ').chain(more.iter().copied()).collect();
    ok(d, &words);
}

/// The lines of a run's log that have this key.
fn logged(run: &Path, key: &str) -> Vec<Value> {
    let text = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.filter(|line| line[key].is_number()).collect()
}

/// The cells of the row of a Markdown table that begins with this cell.
fn row<'a>(text: &'a str, first: &str) -> Vec<&'a str> {
    let start = format!("| {first} |");
    let line = text.lines().find(|line| line.starts_with(&start)).unwrap_or_else(|| panic!("no {first}: {text}"));
    line.trim_matches('|').split(" | ").map(str::trim).skip(1).collect()
}

#[test]
fn a_run_is_summarized_in_its_folder() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    fit(d, &["--learning-rate", "1e-3", "-o", "r"]);
    let r = d.join("r");
    let text = fs::read_to_string(r.join("summary.md")).unwrap();
    let loss = |line: &Value, key: &str| format!("{:.4}", line[key].as_f64().unwrap());
    let (steps, evaluations) = (logged(&r, "loss"), logged(&r, "eval_loss"));
    assert_eq!((steps.len(), evaluations.len()), (4, 2));
    assert!(text.starts_with("# r\n"), "{text}");
    assert_eq!(row(&text, "state"), ["complete, 4 steps"]);
    assert_eq!(row(&text, "loss of the first step"), [loss(&steps[0], "loss")]);
    assert_eq!(row(&text, "loss of the last step"), [loss(&steps[3], "loss")]);
    for line in &evaluations {
        let keys = ["eval_loss", "eval_loss_quantized", "eval_loss_master"];
        assert_eq!(row(&text, &line["step"].to_string()), keys.map(|key| loss(line, key)));
    }
    let model = fs::read(r.join("final/model.dat")).unwrap();
    let digest: String = Sha256::digest(&model).iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(row(&text, "model.dat"), [model.len().to_string(), digest]);
    assert_eq!(row(&text, "learning_rate"), ["0.001"]);
    // Evaluations and answers take a part of it.
    assert!(row(&text, "time of the training")[0].contains(':'), "{text}");
    assert!(!text.contains("| adam_beta1 |"), "a default is listed: {text}");
    assert!(text.contains("| who\\|you? |"), "a prompt with a bar breaks the table: {text}");
    assert!(text.contains("train-cli fit -m m -d m/demo.tsv"), "{text}");
    assert_eq!(text.trim_end(), ok(d, &["runs", "show", "r"]).trim_end());
    // One mark for each evaluation.
    let picture = fs::read_to_string(r.join("loss.svg")).unwrap();
    assert_eq!(picture.matches("<circle ").count(), evaluations.len(), "{picture}");
    assert!(text.contains("\n64 rows, "), "{text}");
    // Summary and picture are parts of a run, which --overwrite removes. The tokens are those of the rows that are used.
    fit(d, &["--max-rows", "20", "--overwrite", "-o", "r"]);
    let text = fs::read_to_string(r.join("summary.md")).unwrap();
    assert!(text.contains("\n64 rows, 44 rows left out by --max-rows, "), "{text}");
    // So are rows that were dropped, or cut.
    let long = format!("{}{}", "a\tb\n".repeat(12), "a\tlonger than eight tokens, which is the limit\n".repeat(3));
    fs::write(d.join("long.tsv"), long).unwrap();
    for (overlong, said) in [("drop", "15 rows, 3 rows dropped, "), ("truncate", "15 rows, 3 rows cut, ")] {
        let words =
            ["fit", "-m", "m", "-d", "long.tsv", "--device", "cpu", "--max-seq-length", "12", "--overlong", overlong];
        ok(d, &[&words[..], &["--max-steps", "1", "--overwrite", "-o", "r", "--sample-prompt", "a"]].concat());
        let text = fs::read_to_string(r.join("summary.md")).unwrap();
        assert!(text.contains(&format!("\n{said}")), "{text}");
    }
}

#[test]
fn a_run_that_is_stopped_is_summarized_too() {
    let Some(machine) = Machine::new() else { return };
    let events = ["--report-to", "tensorboard"];
    let words: Vec<&str> = FIT.split_whitespace().chain(events).collect();
    let operations = machine.operations(&words);
    let r = machine.folder().join("r");
    // A signal while the run trains, which is in the middle of its disk operations.
    for at in [operations / 3, operations / 2, operations * 2 / 3] {
        machine.empty();
        let out = machine.fit(&events, Fault::Signal { at, number: 2 });
        if out.status.code() == Some(130) && r.join("metrics.jsonl").exists() {
            let text = fs::read_to_string(r.join("summary.md")).unwrap();
            let steps = logged(&r, "loss").len();
            assert_eq!(
                row(&text, "state"),
                [match steps {
                    6 => "not complete, 6 steps; SIGINT ended it".to_owned(),
                    made => format!("not complete, {made} of 6 steps; SIGINT ended it"),
                }]
            );
            let listed = ok(&machine.folder(), &["runs", "list", "."]);
            assert!(listed.contains("steps; SIGINT ended it"), "{listed}");
            // The curve and the events have the steps that were made, too.
            assert_eq!((drawn(&r), events_of(&r)), (steps, steps));
            let resumed = machine.fit(&["--resume-from-checkpoint", "--report-to", "tensorboard"], Fault::Nothing);
            assert!(resumed.status.success());
            assert_eq!(row(&fs::read_to_string(r.join("summary.md")).unwrap(), "state"), ["complete, 6 steps"]);
            assert_eq!((drawn(&r), events_of(&r)), (6, 6));
            return;
        }
    }
    panic!("no signal found the run at its steps");
}

/// The number of points of the training curve in a run's picture.
fn drawn(run: &Path) -> usize {
    let picture = fs::read_to_string(run.join("loss.svg")).unwrap();
    let curve = picture.lines().find(|line| line.contains("stroke=\"#0072B2\" stroke-width=\"2\"")).unwrap();
    curve.split("points=\"").nth(1).unwrap().split('"').next().unwrap().split_whitespace().count()
}

/// The number of steps whose loss is in a run's file of events for TensorBoard.
fn events_of(run: &Path) -> usize {
    let name = names(run).into_iter().find(|name| name.starts_with("events.out.tfevents.")).expect("a file of events");
    let (bytes, tag) = (fs::read(run.join(name)).unwrap(), b"train/loss");
    bytes.windows(tag.len()).filter(|part| **part == tag[..]).count()
}

#[test]
fn runs_are_listed_and_compared() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    fit(d, &["--learning-rate", "1e-3", "-o", "runs/one"]);
    fit(d, &["--learning-rate", "1e-4", "--recipe", "w4a4", "-o", "runs/two"]);
    fs::create_dir(d.join("runs/notes")).unwrap();
    // Another program may have a file of the same name.
    fs::create_dir(d.join("runs/.cargo")).unwrap();
    fs::write(d.join("runs/.cargo/config.toml"), "[build]\njobs = 2\n").unwrap();
    // A link to a run has the name of the run; two of one name are told apart by their paths.
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink("one", d.join("runs/latest")).unwrap();
        let list = ok(d, &["runs", "list"]);
        assert!(list.contains("runs/latest ") && list.contains("runs/one "), "{list}");
        fs::remove_file(d.join("runs/latest")).unwrap();
    }
    assert!(run(d, &["runs", "list"]).stderr.is_empty());
    let list = ok(d, &["runs", "list"]);
    let lines: Vec<&str> = list.lines().collect();
    assert!(lines.len() == 3 && lines[1].starts_with("one ") && lines[2].starts_with("two "), "{list}");
    assert!(
        lines[1].contains(" w4 ") && lines[2].contains(" w4a4 ") && lines[2].contains("complete, 4 steps"),
        "{list}"
    );
    let objects = |words: &[&str]| -> Vec<Value> {
        ok(d, words).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let logged_loss = |run: &str| logged(&d.join(run), "loss")[3]["loss"].clone();
    let listed = objects(&["runs", "list", "--json"]);
    assert_eq!(listed.len(), 2);
    assert_eq!((&listed[0]["run"], &listed[1]["run"]), (&"one".into(), &"two".into()));
    assert_eq!((&listed[1]["complete"], &listed[1]["steps"]), (&true.into(), &4.into()));
    assert_eq!((&listed[0]["loss"], &listed[1]["loss"]), (&logged_loss("runs/one"), &logged_loss("runs/two")));
    let [shown] = &objects(&["runs", "show", "runs/two", "--json"])[..] else { panic!("one object") };
    assert_eq!((&shown["settings"]["recipe"], &shown["settings"]["batch_size"]), (&"w4a4".into(), &1.into()));
    assert_eq!(shown["eval_loss"], logged(&d.join("runs/two"), "eval_loss")[1]["eval_loss"]);
    assert!(shown["eval_loss_quantized"].is_f64() && shown["eval_loss_master"].is_f64(), "{shown}");
    assert_eq!(shown["evaluations"].as_array().unwrap().len(), 2);
    assert!(shown["samples"][0]["prompt"] == "who|you?" && shown["data"]["rows"] == 64, "{shown}");
    assert!(shown["exported"].as_array().unwrap().iter().any(|file| file["file"] == "model.dat"), "{shown}");
    let differ = objects(&["runs", "compare", "runs/one", "runs/two", "--json"]);
    let settings: Vec<&Value> = differ.iter().map(|run| &run["settings"]).collect();
    assert_eq!(settings[0], &json!({"learning_rate": 1e-3, "recipe": "w4"}));
    assert_eq!(settings[1], &json!({"learning_rate": 1e-4, "recipe": "w4a4"}));
    assert_eq!(differ[1]["loss"], logged_loss("runs/two"));
    let compared = ok(d, &["runs", "compare", "runs/one", "runs/two", "--markdown", "--plot", "both.svg"]);
    assert_eq!(row(&compared, "learning_rate"), ["0.001", "0.0001"]);
    assert_eq!(row(&compared, "recipe"), ["w4", "w4a4"]);
    let last = |run: &str| format!("{:.4}", logged(&d.join(run), "loss")[3]["loss"].as_f64().unwrap());
    assert_eq!(row(&compared, "loss of the last step"), [last("runs/one"), last("runs/two")]);
    assert!(!compared.contains("max_steps") && !compared.contains("output_dir"), "{compared}");
    let picture = fs::read_to_string(d.join("both.svg")).unwrap();
    assert!(picture.contains("one, training") && picture.contains("two, evaluation"), "{picture}");
    // Runs whose folders have the same name have their paths.
    let same = ok(d, &["runs", "compare", "runs/one", "./runs/one", "--markdown", "--plot", "same.svg"]);
    assert!(same.starts_with("|  | runs/one | ./runs/one |\n"), "{same}");
    assert!(fs::read_to_string(d.join("same.svg")).unwrap().contains("./runs/one, training"));
    // No file is replaced by a picture, and no link, even if it leads nowhere.
    let log = fs::read(d.join("runs/one/metrics.jsonl")).unwrap();
    let mut taken = vec!["runs/one/metrics.jsonl", "both.svg"];
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink("nowhere", d.join("link.svg")).unwrap();
        taken.push("link.svg");
    }
    for plot in taken {
        let out = run(d, &["runs", "compare", "runs/one", "runs/two", "--plot", plot]);
        assert_eq!(out.status.code(), Some(2), "{plot}");
        assert!(out.stdout.is_empty(), "the file is found to exist after the table is printed: {plot}");
    }
    assert!(fs::read(d.join("runs/one/metrics.jsonl")).unwrap() == log);
    // A damaged run does not hide the others.
    fs::create_dir(d.join("runs/broken")).unwrap();
    fs::write(d.join("runs/broken/config.toml"), "= 3").unwrap();
    assert!(ok(d, &["runs", "list"]).contains("one "));
    let foreign = ["runs", "show", "runs/.cargo"];
    for words in [&["runs", "show", "m"][..], &foreign, &["runs", "list", "m"], &["runs", "compare", "runs/one"]] {
        assert_eq!(run(d, words).status.code(), Some(2), "{words:?}");
    }
    for folder in ["nowhere", "m/config.json"] {
        let stderr = refused(d, &["runs", "list", folder], 2);
        let refusal = format!("{folder}: there is no such folder; give the folder that holds your run folders");
        assert!(stderr.contains(&refusal), "{stderr}");
    }
}

/// The lowest evaluation loss is that by which a run chooses a step: no loss from before --quantize-from counts, and none that is
/// NaN. A loss that is NaN is shown, and no older one in its place.
#[test]
fn the_lowest_evaluation_loss_is_that_by_which_a_run_chooses() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let words = "fit -m m -d m/demo.tsv --device cpu --max-seq-length 64 --max-steps 4 --eval-steps 1 --quantize-from 0.5 \
                 --sample-prompt a -o r";
    ok(d, &words.split_whitespace().collect::<Vec<_>>());
    let log = d.join("r/metrics.jsonl");
    let lines = fs::read_to_string(&log).unwrap();
    let changed = lines.lines().map(|line| {
        let mut line: Value = serde_json::from_str(line).unwrap();
        match (line["eval_loss"].is_number(), line["step"].as_u64()) {
            (true, Some(1)) => line["eval_loss"] = 0.5.into(),
            (true, Some(3)) => line["eval_loss"] = 1.25.into(),
            (true, Some(4)) => line["eval_loss"] = Value::Null,
            _ => {}
        }
        format!("{line}\n")
    });
    fs::write(&log, changed.collect::<String>()).unwrap();
    let shown: Value = serde_json::from_str(&ok(d, &["runs", "show", "r", "--json"])).unwrap();
    assert_eq!((&shown["lowest_eval_step"], &shown["lowest_eval_loss"]), (&3.into(), &1.25.into()));
    assert!(shown["eval_loss"].is_null() && shown["evaluations"].as_array().unwrap().len() == 4, "{shown}");
    let text = ok(d, &["runs", "show", "r"]);
    assert_eq!(row(&text, "lowest evaluation loss"), ["1.2500 after step 3"]);
    assert_eq!((row(&text, "evaluation loss"), row(&text, "4")[0]), (vec!["NaN"], "NaN"));
}

/// Runs that begin in the same second, as those of a sweep do, each get a folder of their own.
#[test]
fn runs_that_begin_at_once_have_folders_of_their_own() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let words: Vec<&str> =
        "fit -m m -d m/demo.tsv --device cpu --max-seq-length 64 --max-steps 1 --sample-prompt a".split(' ').collect();
    let demo = ["fit", "--demo", "--max-steps", "1", "--sample-prompt", "a"];
    for (words, name, runs) in [(&words[..], "_m", 6), (&demo, "_demo", 3)] {
        let begun: Vec<_> = (0..runs)
            .map(|_| command(d, words).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap())
            .collect();
        for run in begun {
            let out = run.wait_with_output().unwrap();
            let stderr = String::from_utf8_lossy(&out.stderr);
            assert!(out.status.success(), "{stderr}");
            // The folder that the run names is its own, and complete.
            let folder = stderr.lines().find_map(|line| line.trim().strip_prefix("run ")).unwrap().trim().to_owned();
            assert!(d.join(&folder).join("train_results.json").exists(), "{folder}: {stderr}");
            let text = fs::read_to_string(d.join(&folder).join("config.toml")).unwrap();
            let recorded = text.lines().find(|line| line.starts_with("output_dir = "));
            assert!(recorded.is_none_or(|line| line.ends_with(&format!("{folder}\""))), "{folder}: {recorded:?}");
        }
        let made: Vec<String> = names(&d.join("runs")).into_iter().filter(|folder| folder.contains(name)).collect();
        assert_eq!(made.len(), runs, "{made:?}");
        assert!(
            made.iter().any(|folder| folder.ends_with(&format!("{name}-2"))),
            "no two began in one second: {made:?}"
        );
    }
}

/// A run that is complete goes on if it is resumed with more passes over its data, and ends as a run of that length would, but
/// for the learning rate of the steps that it had made.
#[test]
fn a_complete_run_goes_on_with_more_epochs() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let words = "fit -m m -d m/demo.tsv --device cpu --max-seq-length 64 --batch-size 16 --val-split 0 --sample-prompt a --lr 1e-3 \
                 --lr-scheduler-type constant --warmup-steps 0";
    let words: Vec<&str> = words.split_whitespace().collect();
    let with = |more: &[&str]| ok(d, &[&words[..], more].concat());
    with(&["-o", "r"]);
    let results = |run: &str| -> Value {
        serde_json::from_slice(&fs::read(d.join(run).join("train_results.json")).unwrap()).unwrap()
    };
    let first = results("r");
    let steps = first["global_step"].as_u64().unwrap();
    assert!(steps > 1 && first["epoch"] == 1.0, "{first}");
    // Without more to do, it is complete.
    let out = run(d, &["fit", "--resume-from-checkpoint", "r"]);
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() && said.contains("is complete at step"), "{said}");
    assert!(said.contains("resume it with a larger --num-train-epochs"), "{said}");
    let before = fs::read(d.join("r/final/model.dat")).unwrap();
    ok(d, &["fit", "--resume", "r", "--num-train-epochs", "3"]);
    let longer = results("r");
    assert!(longer["global_step"] == 3 * steps && longer["epoch"] == 3.0, "{longer}");
    let logged_steps: Vec<u64> =
        logged(&d.join("r"), "loss").iter().map(|line| line["step"].as_u64().unwrap()).collect();
    assert_eq!(logged_steps, (1..=3 * steps).collect::<Vec<_>>());
    let after = fs::read(d.join("r/final/model.dat")).unwrap();
    assert!(after != before, "the export is that of the longer run");
    // A little more than an epoch may have no further step.
    let out = run(d, &["fit", "--resume", "r", "--num-train-epochs", "3.0001"]);
    let said = String::from_utf8_lossy(&out.stderr);
    let ended = "--num-train-epochs 3 ended it, and 3.0001 epochs have no further step. To extend it";
    assert!(out.status.success() && said.contains(ended), "{said}");
    // It cannot become shorter than it is, and says which flag is too small.
    let out = run(d, &["fit", "--resume", "r", "--num-train-epochs", "2"]);
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.code() == Some(2) && said.contains("give a larger --num-train-epochs"), "{said}");
    // With a constant learning rate, it is the run of three passes.
    with(&["-o", "whole", "--num-train-epochs", "3"]);
    assert!(fs::read(d.join("whole/final/model.dat")).unwrap() == after);
}

/// SIGUSR1 asks for a checkpoint: the run saves one after the step in which the signal arrives, goes on, and exports what it
/// would have exported.
#[test]
fn a_signal_asks_for_a_checkpoint_and_the_run_goes_on() {
    if cfg!(not(target_os = "linux")) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let words = "fit -m m -d m/demo.tsv --device cpu --max-seq-length 64 --max-steps 200 --learning-rate 1e-3 --save-steps 0 \
                 --eval-steps 0 --sample-prompt a";
    let signaled = |more: &[&str]| {
        let words: Vec<&str> = words.split_whitespace().chain(more.iter().copied()).collect();
        let mut child = command(d, &words).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut said = String::new();
        for line in BufReader::new(child.stderr.take().unwrap()).lines() {
            let line = line.unwrap();
            if line.trim_start().starts_with("2/200 ") {
                send(&child, "-USR1");
            }
            said += &(line + "\n");
        }
        assert!(child.wait().unwrap().success(), "{said}");
        said
    };
    let said = signaled(&["-o", "asked"]);
    let step = said.split("SIGUSR1: the run saves a checkpoint after step ").nth(1).unwrap_or_else(|| panic!("{said}"));
    let step: usize = step.split(' ').next().unwrap().parse().unwrap();
    assert!((2..200).contains(&step) && said.matches("SIGUSR1").count() == 1, "{said}");
    let asked = format!("checkpoint-{step}");
    assert!(said.contains(&format!("saved  asked/{asked}\n")), "{said}");
    assert!(names(&d.join("asked")).is_superset(&[asked.clone(), "checkpoint-200".to_owned()].into()));
    assert_eq!(logged(&d.join("asked"), "loss").len(), 200);
    let exported = |run: &str| fs::read(d.join(run).join("final/model.dat")).unwrap();
    let whole = exported("asked");
    // The checkpoint is one from which the run can be resumed.
    fs::remove_dir_all(d.join("asked/checkpoint-200")).unwrap();
    ok(d, &["fit", "--resume-from-checkpoint", "asked"]);
    assert!(exported("asked") == whole);
    // A run that saves nothing says so, and goes on, too.
    let said = signaled(&["-o", "none", "--save-strategy", "no"]);
    assert!(said.contains("SIGUSR1: the run saves no checkpoint after step "), "{said}");
    assert!(!names(&d.join("none")).iter().any(|name| name.starts_with("checkpoint-")));
}

/// A sample prompt of several lines is printed on one line, and the command to copy has a short prompt instead.
#[test]
fn a_prompt_of_several_lines_is_printed_on_one() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let prompt = format!("one\ntwo\u{1b}[31m {}", "long ".repeat(40));
    let words =
        "fit -m m -d m/demo.tsv --device cpu --max-seq-length 64 --max-steps 1 --eval-steps 1 -o r --sample-prompt";
    let words: Vec<&str> = words.split(' ').chain([prompt.as_str()]).collect();
    let out = run(d, &words);
    let said = String::from_utf8(out.stderr).unwrap();
    assert!(out.status.success() && said.contains("sample  one two [31m long "), "{said}");
    assert!(!said.contains("\u{1b}[31m") && !said.contains(&"long ".repeat(30)), "{said}");
    assert!(said.contains("train-cli generate -m r/final -p hello\n"), "{said}");
    // A prompt that begins with a dash is no flag of that command.
    let words = "fit -m m -d m/demo.tsv --device cpu --max-seq-length 64 --max-steps 1 -o dash --sample-prompt=-x";
    let said = String::from_utf8(run(d, &words.split(' ').collect::<Vec<_>>()).stderr).unwrap();
    let printed = said.lines().find_map(|line| line.trim().strip_prefix("train-cli generate ")).expect("a command");
    assert_eq!(printed, "-m dash/final --prompt=-x");
    ok(d, &format!("generate {printed} --max-tokens 1 --device cpu").split(' ').collect::<Vec<_>>());
}

/// A run says when it evaluates only if it does.
#[test]
fn a_run_without_evaluations_says_nothing_of_them() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let evaluates = |words: &str| {
        let all = format!("fit -m m --device cpu --max-seq-length 64 --max-steps 2 --save-strategy no {words}");
        let out = run(d, &all.split(' ').collect::<Vec<_>>());
        let said = String::from_utf8(out.stderr).unwrap();
        assert!(out.status.success(), "{said}");
        said.contains("--eval-steps changes that")
    };
    assert!(!evaluates("--synthetic -o a"));
    assert!(evaluates("-d m/demo.tsv --val-split 0 --sample-prompt a -o b"));
}

/// Paths that were relative when a run began mean the same files when it is resumed from another working directory, and when
/// its config file is used there.
#[test]
fn relative_paths_of_a_run_are_found_from_another_working_directory() {
    let dir = tempfile::tempdir().unwrap();
    let (d, elsewhere) = (dir.path().join("d"), dir.path().join("elsewhere"));
    tiny_model(&d.join("m"), true);
    fs::create_dir(&elsewhere).unwrap();
    let rows = fs::read_to_string(d.join("m/demo.tsv")).unwrap();
    fs::write(d.join("eval.tsv"), rows.lines().take(3).map(|row| format!("{row}\n")).collect::<String>()).unwrap();
    let paths =
        "--tokenizer m --eval-data eval.tsv --token-cache cache --output-dat out.dat --vram-report vram.json -o r";
    fit(&d, &paths.split(' ').collect::<Vec<_>>());
    let made = names(&d);
    let config = fs::read_to_string(d.join("r/config.toml")).unwrap();
    let root = d.canonicalize().unwrap().display().to_string();
    for (key, path) in [
        ("tokenizer", "m"),
        ("eval_data", "eval.tsv"),
        ("token_cache", "cache"),
        ("output_dat", "out.dat"),
        ("vram_report", "vram.json"),
        ("output_dir", "r"),
    ] {
        let line = format!("{key} = \"{root}/{path}\"");
        assert!(config.lines().any(|found| found == line), "no {line} in {config}");
    }
    assert!(config.contains(&format!("data = [\"{root}/m/demo.tsv\"]")), "{config}");
    // What the run writes besides its folder is written to the same files again.
    for file in ["out.dat", "vram.json"] {
        fs::remove_file(d.join(file)).unwrap();
    }
    ok(&elsewhere, &["fit", "--resume-from-checkpoint", "../d/r", "--max-steps", "5"]);
    assert_eq!(logged(&d.join("r"), "loss").len(), 5);
    assert_eq!(names(&d), made);
    // The folder of a new run is a path of the command line.
    let new = ["fit", "--config", "../d/r/config.toml", "-o", "new", "--output-dat", "new.dat", "--vram-report"];
    ok(&elsewhere, &[&new[..], &["new.json", "--dry-run"]].concat());
    assert!(names(&elsewhere).is_empty(), "{:?}", names(&elsewhere));
}

/// A complete run that is resumed says which setting ended it and what extends it: --max-steps stays the setting of a run, and
/// overrides --num-train-epochs.
#[test]
fn a_complete_run_says_what_extends_it() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let resumed = |words: &[&str]| {
        let out = run(d, &[&["fit", "--resume-from-checkpoint", "r"], words].concat());
        assert!(out.status.success());
        String::from_utf8(out.stderr).unwrap()
    };
    fit(d, &["-o", "r"]);
    let said = resumed(&[]);
    let remedy = "r is complete at step 4: --max-steps 4 ended it, and overrides --num-train-epochs. To extend it, \
                  resume it with --max-steps N, where N is larger than 4";
    assert!(said.contains(remedy), "{said}");
    // A length that another setting overrides is refused: nothing would be trained.
    let out = run(d, &["fit", "--resume-from-checkpoint", "r", "--num-train-epochs", "3"]);
    let said = String::from_utf8(out.stderr).unwrap();
    assert!(
        out.status.code() == Some(2)
            && said.contains("--num-train-epochs 3: --max-steps 4 in the settings of r overrides"),
        "{said}"
    );
    assert!(said.contains("give --max-steps N, where N is larger than 4"), "{said}");
    // The length that the run has is none that changes it.
    assert!(resumed(&["--max-steps", "4"]).contains("is complete at step 4"));
    assert!(!resumed(&["--max-steps", "5"]).contains("is complete"));
    assert_eq!(logged(&d.join("r"), "loss").len(), 5);
    assert!(resumed(&[]).contains("r is complete at step 5: --max-steps 5 ended it"));
    // The summary has both command lines, and not those that made nothing.
    let summary = fs::read_to_string(d.join("r/summary.md")).unwrap();
    let commands: Vec<&str> = summary.lines().filter(|line| line.starts_with("    train-cli fit ")).collect();
    assert_eq!(commands.len(), 2, "{summary}");
    assert!(commands[0].contains("-m m -d m/demo.tsv"), "{summary}");
    assert!(commands[1].ends_with("fit --resume-from-checkpoint r --max-steps 5"), "{summary}");
    assert!(summary.contains(", after step 4:"), "{summary}");
}

#[test]
fn shells_and_man_know_the_command_line() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = ok(d, &["completions", shell]);
        assert!(script.contains("learning-rate") && script.contains("export-hf"), "{shell}: {script}");
    }
    let page = ok(d, &["man", "data", "preview"]);
    assert!(page.contains(".TH") && page.contains("max\\-seq\\-length"), "{page}");
    assert!(ok(d, &["man"]).contains("export\\-dat"));
    assert_eq!(run(d, &["man", "train"]).status.code(), Some(2));
}

#[test]
fn bash_completes_the_words_of_each_command() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    fs::write(d.join("script"), ok(d, &["completions", "bash"])).unwrap();
    // Bash calls the function that the script registers, with the program, the word to complete, and the word before it.
    let ask = r#"source ./script; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); of=$(complete -p train-cli); of=${of#*-F }
        ${of%% *} "$1" "${!#}" "${@: -2:1}"; printf "%s\n" "${COMPREPLY[@]}""#;
    for (words, expected) in [
        (&["export-h"][..], "export-hf"),
        (&["data", "st"], "stats"),
        (&["fit", "--learning-"], "--learning-rate"),
        (&["data", "stats", "--max-"], "--max-seq-length"),
    ] {
        let mut bash = Command::new("bash");
        let Ok(out) = bash.args(["-c", ask, "bash", "train-cli"]).args(words).current_dir(d).output() else {
            return skipped_for("bash is not installed");
        };
        assert_eq!(String::from_utf8_lossy(&out.stdout).trim_end(), expected, "{words:?}: {out:?}");
    }
}
