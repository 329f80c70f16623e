//! A wrong flag or a wrong file ends the program with its exit code and a message that names it.

use crate::support::{
    files::{command, ok, refused, run, tiny_model},
    skipped_for,
};
use std::path::Path;

#[test]
fn wrong_input_gets_its_exit_code_and_a_plain_message() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    write_bad_inputs(d);
    for (args, code, text) in cases().into_iter().chain(refused_flags()).chain(bench_cases()).chain(remedies()) {
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let out = run(d, &args);
        let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(code), "{args:?}:\n{stderr}");
        assert!(stderr.contains(text), "{args:?} does not say {text:?}:\n{stderr}");
        assert!(!stderr.contains("panicked"), "{args:?}:\n{stderr}");
        assert!(!d.join("out/checkpoint-1").exists());
        let _ = std::fs::remove_dir_all(d.join("out"));
    }
}

/// Arguments, exit code, and a part of the message.
type Case = (Vec<String>, i32, &'static str);

fn cases() -> Vec<Case> {
    let fit = |more: &[&str]| -> Vec<String> {
        let mut args = vec!["fit", "-m", "m", "--device", "cpu", "-o", "out"];
        args.extend(more);
        args.into_iter().map(str::to_owned).collect()
    };
    vec![
        // Flags.
        (words("fit --no-such-flag"), 2, "unexpected argument"),
        // Command lines of the programs before this one.
        (words("convert --model m --dtype float16 --quant none --out x.dat"), 2, "--model: `train-cli convert IN OUT"),
        (words("export-dat --model demo --dtype float16 --out x.dat"), 2, "--dtype: `train-cli convert IN OUT"),
        (words("fit -m m -d m/demo.tsv -o 0"), 2, "--output-dir 0: -o names the run folder; use --memory-limit"),
        (words("generate -m m -p x -o 0"), 2, "-o: `train-cli fit --memory-limit SIZE`"),
        (words("chat -m m -o 0"), 2, "-o: `train-cli fit --memory-limit SIZE`"),
        (words("generate -m m hi"), 2, "hi: this word belongs to no flag; `train-cli generate --prompt TEXT`"),
        (fit(&["-d", "m/demo.tsv", "--learning-rate", "fast"]), 2, "invalid value 'fast'"),
        (fit(&["-d", "m/demo.tsv", "--learning-rate", "7"]), 2, "--learning-rate 7: the value must be between 0 and 1"),
        (fit(&["-d", "m/demo.tsv", "--batch-size", "0"]), 2, "--batch-size 0: the value must be between 1 and 1048576"),
        (fit(&["-d", "m/demo.tsv", "--max-steps", "0"]), 2, "--max-steps 0"),
        (fit(&["-d", "m/demo.tsv", "--save-total-limit", "1"]), 2, "--save-total-limit 1: the value must be between 2"),
        (fit(&["-d", "m/demo.tsv", "--recipe", "w5"]), 2, "possible values"),
        (fit(&["-d", "m/demo.tsv", "--train-last-layers", "9"]), 2, "the model has 2 layers"),
        (fit(&["-d", "m/demo.tsv", "--max-seq-length", "99999"]), 2, "the model takes at most"),
        (fit(&["-d", "m/demo.tsv", "--compute-dtype", "bf16"]), 2, "the CPU computes in f32"),
        (fit(&["-d", "m/demo.tsv", "-c", "settings.toml"]), 2, "unknown setting `learning_rat`"),
        (fit(&["-d", "m/demo.tsv", "-c", "types.toml"]), 2, "batch_size = \"two\""),
        (fit(&["-d", "m/demo.tsv", "-c", "none.toml"]), 2, "none.toml"),
        (fit(&["-d", "m/demo.tsv", "--learning-rate", "nan"]), 2, "--learning-rate nan: the number must be finite"),
        (fit(&["-d", "m/demo.tsv", "--memory-limit", "20"]), 2, "the unit is missing; write 20GiB or 20000MiB"),
        (fit(&["-d", "m/demo.tsv", "--optimizer-state-mode", "nvfp4"]), 2, "moments lie; use int4"),
        (fit(&["-d", "m/demo.tsv", "--optimizer-state-mode", "4"]), 2, "possible values: f32, int8, bf16, int4"),
        (fit(&["-d", "m/demo.tsv", "--step-mode", "whole"]), 2, "--step-mode: there is one way to make a step"),
        (fit(&["-d", "m/demo.tsv", "--offload-mv-to-cpu=true"]), 2, "--offload-mv-to-cpu: nothing is offloaded"),
        (fit(&[]), 2, "no training data"),
        (fit(&["-d", "m/demo.tsv", "--synthetic"]), 2, "--synthetic takes no --data"),
        (words("fit -d m/demo.tsv"), 2, "no model"),
        (words("generate -m m -p hi --device cpu --top-p 3"), 2, "--top-p 3: the value must be between 0 and 1"),
        (words("generate -m m -p hi --device gpu"), 2, "auto, cpu, cuda"),
        // Data.
        (fit(&["-d", "none.tsv"]), 2, "none.tsv: no such file"),
        (fit(&["-d", "no-tab.tsv"]), 3, "no-tab.tsv:4: no tab"),
        (fit(&["-d", "empty-target.tsv"]), 3, "empty-target.tsv:1: prompt or answer is empty"),
        (fit(&["-d", "empty.tsv"]), 3, "empty.tsv: no rows in it"),
        (fit(&["-d", "bad.jsonl"]), 3, "bad.jsonl:1: no assistant message"),
        (fit(&["-d", "broken.jsonl"]), 3, "broken.jsonl:1: the object does not end in this line"),
        (fit(&["-d", "norole.jsonl"]), 3, "norole.jsonl:1: message 1: no \"role\""),
        (fit(&["-d", "role.jsonl"]), 3, "message 1: role \"bot\""),
        (fit(&["-d", "parts.jsonl"]), 3, "a part that is not text"),
        (fit(&["-d", "null.jsonl"]), 3, "message 2: \"content\" must be text"),
        (fit(&["-d", "m/demo.tsv", "--output-dat", "nowhere/x.dat"]), 2, "there is no folder nowhere"),
        (fit(&["-d", "m/demo.tsv", "--output-dat", "m/demo.tsv"]), 2, "never overwritten"),
        (fit(&["-d", "m/demo.tsv", "--vram-report", "m/config.json"]), 2, "never overwritten"),
        (fit(&["-d", "m/demo.tsv", "--compute-dtype", "f16"]), 2, "gradients underflow in f16"),
        (fit(&["-d", "m/demo.tsv", "--seed", "18446744073709551615"]), 2, "--seed"),
        (fit(&["-d", "m/demo.tsv", "--max-steps", "18446744073709551615"]), 2, "--max-steps"),
        (words("fit --resume-from-checkpoint"), 2, "--output-dir"),
        (words("fit --resume-from-checkpoint m"), 2, "m"),
        (words("generate -m m -p hi --device cpu --max-tokens 18446744073709551615"), 2, "the model takes at most"),
        (fit(&["-d", "latin.tsv"]), 3, "latin.tsv:2: not UTF-8"),
        (fit(&["-d", "file.unknown"]), 3, "give --format"),
        (fit(&["-d", "long.tsv", "--max-seq-length", "32", "--overlong", "error"]), 3, "long.tsv:1:"),
        (fit(&["-d", "long.tsv", "--max-seq-length", "32"]), 3, "1 row dropped, longer than --max-seq-length 32"),
        // Models.
        (words("generate -m none -p hi --device cpu"), 2, "none"),
        (words("generate -m bad-config -p hi --device cpu"), 2, "model_type is \"llama\""),
        (words("generate -m bad-tokenizer -p hi --device cpu"), 2, "tokenizer.json"),
        (words("generate -m bad-shape -p hi --device cpu"), 6, "config.json asks for [112, 64]"),
        (words("inspect none.dat"), 2, "none.dat"),
        (words("convert m out.dat --to dat --dtype nvfp3"), 2, "possible values"),
        (words("export-dat --checkpoint nothing --output-dat x.dat"), 2, "config.json: no such file"),
        (words("export-dat -m none --output-dat x.dat"), 2, "none: no such file"),
        (words("parity -m m --expected m/model.safetensors --device cpu"), 6, "no \"input_ids\""),
    ]
}

/// Values that begin like a flag, flags that exclude each other, and an output that is there.
fn refused_flags() -> Vec<Case> {
    let cases = [
        ("generate -m m -p hi --device cpu --temperature -1", "--temperature -1: the value must be between 0 and 100"),
        (
            "fit -m m -d m/demo.tsv --device cpu --learning-rate -1",
            "--learning-rate -1: the value must be between 0 and 1",
        ),
        (
            "fit -m m -d m/demo.tsv --device cpu --warmup-steps 1.9",
            "--warmup-steps 1.9: a number of steps is whole, and a share of the run is below 1",
        ),
        (
            "fit -m m --synthetic --eval-data m/demo.tsv --device cpu",
            "--synthetic evaluates nothing; leave out --eval-data",
        ),
        (
            "fit -m m --synthetic --eval-data m/demo.tsv --load-best-model-at-end --device cpu",
            "compare evaluations, and --synthetic evaluates nothing; leave one of them out",
        ),
        (
            "fit -m m -d m/demo.tsv --device cpu --output-dat x.dat --vram-report m/../x.dat",
            "x.dat: this is the file of --output-dat; choose another",
        ),
        (
            "fit -m m -d m/demo.tsv --device cpu -o m/demo.tsv/x",
            "--output-dir m/demo.tsv/x: m/demo.tsv is a file; give a folder",
        ),
        ("parity -m m --recipe w4 -p hi --dump x.safetensors", "'--dump <FILE>'"),
        ("parity -m m --expected m/model.safetensors --raw", "'--raw'"),
        ("eval needle -m m --lengths 64 --write-rows r.jsonl --json", "--write-rows asks none"),
        (
            "export-dat -m m --output-dat taken.dat",
            "taken.dat: the file exists; choose another name, or give --overwrite",
        ),
    ];
    cases.map(|(line, text)| (words(line), 2, text)).into()
}

/// Each measurement has flags of its own, and all need a GPU.
fn bench_cases() -> Vec<Case> {
    let cases = [
        ("bench kernels --context 9", 2, "--context is a flag of bench decode and bench prefill"),
        ("bench kernels --kv-cache-dtype fp8", 2, "--kv-cache-dtype is a flag of bench decode and bench prefill"),
        ("bench prefill --batch-size 2", 2, "--batch-size is a flag of bench decode"),
        ("bench decode --filter gemm", 2, "--filter is a flag of bench kernels"),
        ("bench kernels --filter copy --device cpu", 7, "device cpu: bench measures GPUs, not the CPU; give"),
        ("bench decode --config m/config.json --device cpu", 7, "bench measures GPUs, not the CPU"),
        ("bench prefill --config m/config.json --context 16 --device cpu", 7, "bench measures GPUs, not the CPU"),
    ];
    cases.map(|(line, code, text)| (words(line), code, text)).into()
}

/// What a message says to do can be done with the command that was called.
fn remedies() -> Vec<Case> {
    let cases = [
        (
            "fit -m m --device cpu -o out -d m/demo.tsv -d m",
            "the file is named twice; name it once, and use --data-weights to repeat its rows\n",
        ),
        ("eval loss -m m --device cpu -d m/demo.tsv m", "the file is named twice; name it once\n"),
        ("generate -m nothing -p hi --device cpu", "config.json: no such file; put config.json beside the weights"),
        ("bench decode --device cpu --config none.json", "--config none.json: no such file; check the path\n"),
        (
            "bench decode --device cpu --config m/config.json --context 2000",
            "--context 2000: with an answer of 256 tokens, the model takes at most 2048; give --context 1792 or less\n",
        ),
        (
            "bench prefill --device cpu --config m/config.json",
            "--context 4096: with an answer of 1 token, the model takes at most 2048; give --context 2047 or less\n",
        ),
    ];
    cases.map(|(line, text)| (words(line), 2, text)).into()
}

/// The words of a command line without quotes.
fn words(line: &str) -> Vec<String> {
    line.split(' ').map(str::to_owned).collect()
}

fn write_bad_inputs(d: &Path) {
    let write = |name: &str, text: &str| std::fs::write(d.join(name), text).unwrap();
    write("taken.dat", "notes");
    write("no-tab.tsv", "# comment\nhello\tworld\n\nno tab here\n");
    write("empty-target.tsv", "a\t \n");
    write("empty.tsv", "\n# nothing\n");
    write("bad.jsonl", "{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}]}\n");
    write("broken.jsonl", "{\"messages\": [\n");
    write("role.jsonl", "{\"messages\": [{\"role\": \"bot\", \"content\": \"x\"}]}\n");
    let user = |content: &str| format!("{{\"role\": \"user\", \"content\": {content}}}");
    let rows = |content: &str, answer: &str| {
        format!("{{\"messages\": [{}, {{\"role\": \"assistant\", \"content\": {answer}}}]}}\n", user(content))
    };
    write("parts.jsonl", &rows("[{\"type\": \"image\"}]", "\"x\""));
    write("null.jsonl", &rows("\"x\"", "null"));
    write("norole.jsonl", "{\"messages\": [{\"content\": \"x\"}]}\n");
    std::fs::write(d.join("latin.tsv"), b"ok\tok\n\xFF\t\xFE\n").unwrap();
    write("file.unknown", "a\tb\n");
    write("settings.toml", "learning_rat = 1.0\n");
    write("types.toml", "batch_size = \"two\"\n");
    std::fs::create_dir(d.join("nothing")).unwrap();
    for name in ["bad-config", "bad-tokenizer", "bad-shape"] {
        tiny_model(&d.join(name), true);
    }
    let config = std::fs::read_to_string(d.join("m/config.json")).unwrap();
    write("bad-config/config.json", &config.replace("\"qwen3\"", "\"llama\""));
    write("bad-shape/config.json", &config.replace("\"intermediate_size\":96", "\"intermediate_size\":112"));
    write("bad-tokenizer/tokenizer.json", "{\"model\": {\"type\": \"BPE\", \"vocab\": {}, \"merges\": [\"a b\"]}}");
    let long = format!("a\t{}\n", "word ".repeat(50));
    write("long.tsv", &long);
}

#[test]
fn a_missing_device_is_an_error_and_never_another_device() {
    let dir = tempfile::tempdir().unwrap();
    tiny_model(&dir.path().join("m"), true);
    // No machine has a hundred GPUs.
    let out = run(dir.path(), &["generate", "-m", "m", "-p", "hi", "--device", "cuda:99"]);
    let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(7), "{stderr}");
    assert!(stderr.contains("device cuda:99") && !stderr.contains("panicked"), "{stderr}");
    // The program prints which device `auto` chose.
    let out = run(dir.path(), &["generate", "-m", "m", "-p", "hi", "--max-tokens", "1"]);
    assert!(String::from_utf8_lossy(&out.stderr).contains("device    c"), "cpu or cuda:0");
}

#[test]
fn names_that_other_tools_use_work() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let plan = ok(
        d,
        &[
            "fit",
            "--dry-run",
            "--input-dat",
            "m",
            "--train-data",
            "m/demo.tsv",
            "--lr=1e-4",
            "--epochs",
            "2",
            "--iters",
            "7",
            "--per_device_train_batch_size",
            "3",
            "--grad-clip",
            "0.5",
            "--seq_len",
            "64",
            "--synthetic=false",
            "--report-to",
            "none",
            "--resume",
            "false",
        ],
    );
    for line in [
        "learning_rate = 0.0001",
        "num_train_epochs = 2.0",
        "max_steps = 7",
        "batch_size = 3",
        "max_grad_norm = 0.5",
        "max_seq_length = 64",
        "synthetic = false",
        "report_to = \"jsonl\"",
        "seed = 42",
        "recipe = \"w4\"",
    ] {
        assert!(plan.lines().any(|l| l == line), "{line:?} is missing in:\n{plan}");
    }
    assert!(!d.join("runs").exists(), "this dry run writes nothing");
}

/// The target of a link may have a name that says nothing, as in the cache of `hf download`.
#[test]
#[cfg(unix)]
fn a_model_that_a_link_names_is_called_as_the_link() {
    let dir = tempfile::tempdir().unwrap();
    tiny_model(&dir.path().join("3f2a"), true);
    std::os::unix::fs::symlink("3f2a", dir.path().join("mine")).unwrap();
    let words = "fit --dry-run -m mine -d mine/demo.tsv --device cpu --max-seq-length 64";
    let plan = run(dir.path(), &words.split(' ').collect::<Vec<_>>());
    let plan = String::from_utf8_lossy(&plan.stderr);
    assert!(plan.contains("Z_mine\n") && !plan.contains("3f2a"), "{plan}");
}

#[test]
fn flags_win_over_the_config_file_and_the_file_over_defaults() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let file = "model = \"elsewhere\"\ndata = [\"m/demo.tsv\"]\nlearning_rate = 0.5\nbatch_size = 3\n";
    std::fs::write(d.join("settings.toml"), file).unwrap();
    let plan = ok(d, &["fit", "--dry-run", "-c", "settings.toml", "-m", "m", "--learning-rate", "0.25"]);
    for line in ["model = \"m\"", "learning_rate = 0.25", "batch_size = 3", "weight_decay = 0.0", "clip = \"auto\""] {
        assert!(plan.lines().any(|l| l == line), "{line:?} is missing in:\n{plan}");
    }
    // The two ways to say how long a run is are one setting here.
    std::fs::write(d.join("settings.toml"), format!("{file}max_steps = 5\n")).unwrap();
    for (typed, length) in [
        (&["--num-train-epochs", "2"][..], "num_train_epochs = 2.0"),
        (&["--num-train-epochs", "2", "--max-steps", "7"], "max_steps = 7"),
        (&[], "max_steps = 5"),
    ] {
        let plan = ok(d, &[&["fit", "--dry-run", "-c", "settings.toml", "-m", "m"], typed].concat());
        assert!(plan.lines().any(|l| l == length), "{length:?} is missing in:\n{plan}");
        assert_eq!(plan.contains("max_steps"), length.contains("max_steps"), "{plan}");
    }
    // The outputs that the file names may be those of another run.
    for key in ["output_dat", "vram_report"] {
        let output = if key == "output_dat" { "there.dat" } else { "there.json" };
        std::fs::write(d.join(output), "what another run wrote").unwrap();
        std::fs::write(d.join("settings.toml"), format!("{file}{key} = {output:?}\n")).unwrap();
        let words = ["fit", "-c", "settings.toml", "-m", "m", "--dry-run"];
        let said = refused(d, &words, 2);
        let flag = key.replace('_', "-");
        assert!(
            said.contains(&format!("--{flag} ")) && said.contains("the file exists; choose another name"),
            "{said}"
        );
        ok(d, &[&words[..], &["--overwrite"]].concat());
        let typed = ["fit", "-m", "m", "-d", "m/demo.tsv", "--dry-run", &format!("--{flag}"), output];
        assert!(refused(d, &typed, 2).contains("the file exists; choose another name"));
        ok(d, &[&typed[..], &["--overwrite"]].concat());
        assert_eq!(std::fs::read_to_string(d.join(output)).unwrap(), "what another run wrote");
    }
}

#[test]
fn the_version_names_what_the_program_was_built_from() {
    let out = ok(Path::new("."), &["--version"]);
    let manifest = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.toml")).unwrap();
    for (name, pin) in [("Burn", "\nburn = "), ("CubeCL", "\ncubecl = ")] {
        let pinned = manifest.split(pin).nth(1).unwrap().split('"').nth(1).unwrap().trim_start_matches('=');
        assert!(out.contains(&format!("{name} {pinned}")), "{name} {pinned}: {out}");
    }
    assert!(out.contains("CUDA, Vulkan") && out.starts_with("train-cli "), "{out}");
    let commit = out.split("commit ").nth(1).is_some_and(|rest| rest.bytes().take(12).all(|b| b.is_ascii_hexdigit()));
    assert!(commit || out.contains("development build"), "{out}");
}

#[test]
fn doctor_says_what_there_is_and_what_to_do_about_the_rest() {
    let dir = tempfile::tempdir().unwrap();
    let text = ok(dir.path(), &["doctor", "--json"]);
    let lines: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let named = |name: &str| lines.iter().find(|line| line["name"] == name).unwrap_or_else(|| panic!("{name}: {text}"));
    for name in ["program", "memory", "disk"] {
        assert_eq!(named(name)["good"], true, "{text}");
    }
    // The card, what compiles its kernels, and Vulkan: each is good, or the command that installs it is shown.
    for (name, command) in [
        ("card", "apt-get install nvidia-driver-580 "),
        ("NVRTC", "pip install --target cuda 'nvidia-cuda-nvrtc==13.*' "),
        ("headers", "pip install --target cuda 'nvidia-cuda-nvrtc==13.*' "),
        ("vulkan", "apt-get install mesa-vulkan-drivers libvulkan1"),
    ] {
        let line = named(name);
        assert!(line["good"] == true || line["remedy"].as_str().is_some_and(|r| r.contains(command)), "{line}");
    }
    // Both say of which CUDA they are.
    for name in ["NVRTC", "headers"].into_iter().filter(|name| named(name)["good"] == true) {
        assert!(named(name)["found"].as_str().is_some_and(|found| found.contains(" · CUDA 1")), "{text}");
    }
    assert!(named("kernels")["found"].as_str().is_some_and(|kept| kept.contains("kept in ")), "{text}");
    // Each tier of each device that is there is compared by itself, and timed.
    let agrees = |name: &str| {
        let line = named(name);
        let found = line["found"].as_str().unwrap_or_default();
        let with = if name.ends_with("token by token") { "a prompt" } else { "the reference" };
        assert!(
            line["good"] == true && found.starts_with(&format!("agrees with {with} · ")) && found.ends_with(" s"),
            "{line}"
        );
    };
    ["cpu quantizer", "cpu portable product", "cpu portable gradients", "cpu portable attention"]
        .iter()
        .for_each(|name| agrees(name));
    let vulkan = named("vulkan");
    if vulkan["good"] == true {
        ["vulkan quantizer", "vulkan portable product", "vulkan portable gradients", "vulkan portable attention"]
            .iter()
            .for_each(|name| agrees(name));
        let found = vulkan["found"].as_str().unwrap();
        let (adapters, taken) = found.split_once(" · --device vulkan takes ").unwrap();
        assert!(adapters.contains('(') && taken.ends_with(" are free"), "{vulkan}");
    } else {
        skipped_for(&format!("doctor finds no Vulkan: {vulkan}"));
    }
    if named("card")["good"] == true {
        assert!(named("driver")["good"] == true, "{text}");
        for tier in ["quantizer", "portable product", "portable attention", "tensor cores", "few rows (decode)"] {
            agrees(&format!("cuda:0 {tier}"));
        }
        for tier in ["gradients", "both in NVFP4", "attention", "attention over a cache", "token by token"] {
            agrees(&format!("cuda:0 {tier}"));
        }
    }
    assert!(ok(dir.path(), &["doctor"]).contains("ok  memory"));
}

/// Without a Vulkan driver and without CUDA's headers, the lines for people name the commands that install them.
#[test]
fn doctor_names_the_command_that_installs_what_is_missing() {
    let dir = tempfile::tempdir().unwrap();
    let mut doctor = command(dir.path(), &["doctor"]);
    doctor.env("VK_DRIVER_FILES", "/nowhere").env("VK_ICD_FILENAMES", "/nowhere").env("CUDA_PATH", "/nowhere");
    let out = doctor.env("TRAIN_CLI_KERNEL_CACHE", "off").output().unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    assert!(out.status.success(), "{text}");
    let remedy = |name: &str| {
        let mut lines = text.lines().skip_while(|line| !line.starts_with(&format!("–   {name} ")));
        lines.nth(1).unwrap_or_else(|| panic!("{name} is not missing: {text}")).trim()
    };
    assert!(remedy("vulkan").ends_with("apt-get install mesa-vulkan-drivers libvulkan1"), "{text}");
    let packages = "pip install --target cuda 'nvidia-cuda-nvrtc==13.*' 'nvidia-cuda-runtime==13.*' \
                    'nvidia-cuda-crt==13.*' 'nvidia-cuda-cccl==13.*'";
    assert!(remedy("headers").contains(packages), "{text}");
    assert!(text.contains("ok  kernels                       not kept: each process compiles them again"), "{text}");
}

/// An error of a setting's value is one line, as those of other wrong values are.
#[test]
#[cfg(unix)]
fn a_wrong_setting_is_answered_in_one_line() {
    use std::{ffi::OsStr, os::unix::ffi::OsStrExt};
    let dir = tempfile::tempdir().unwrap();
    for (flag, value, expected) in [
        ("--learning-rate", &b"nan"[..], "error: --learning-rate nan: the number must be finite\n"),
        (
            "-o",
            b"r\xff",
            "error: --output-dir r\u{fffd}: the path is not UTF-8, so that config.toml cannot record it; rename it\n",
        ),
    ] {
        let mut fit = command(dir.path(), &["fit", "-m", "m", "-d", "rows.tsv", flag]);
        let out = fit.arg(OsStr::from_bytes(value)).output().unwrap();
        assert_eq!((out.status.code(), String::from_utf8_lossy(&out.stderr).as_ref()), (Some(2), expected));
    }
}

/// A command line cannot give an empty path, but a config file can.
#[test]
fn an_empty_path_in_a_config_file_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    for (key, flag) in [("model", "--model"), ("token_cache", "--token-cache")] {
        std::fs::write(dir.path().join("c.toml"), format!("synthetic = true\n{key} = \"\"\n")).unwrap();
        let out = run(dir.path(), &["fit", "--config", "c.toml"]);
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.code() == Some(2) && said.contains(&format!("{flag}: the path is empty")), "{key}: {said}");
    }
}
