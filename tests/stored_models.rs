//! One way in: every command that takes a model takes a Hugging Face folder, a file, a run folder and a checkpoint. A model runs
//! as it was trained, whatever names it, because its training is recorded; a checkpoint answers as its export does.

use crate::support::{
    files::{demo_file, ok, refused, run, tiny_model_with_spread},
    http::Server,
};
use model_qwen3::{
    container::Container,
    tensors::{Stored, Tensors},
};
use serde_json::Value;
use std::{fs, path::Path};

const FIT: [&str; 12] = [
    "fit",
    "-m",
    "m",
    "-d",
    "m/demo.tsv",
    "--max-steps",
    "2",
    "--device",
    "cpu",
    "--eval-steps",
    "0",
    "--max-seq-length",
];

/// Trains the model in folder `m` for two steps.
fn fit(d: &Path, more: &[&str]) {
    ok(d, &[&FIT[..], &["64"], more].concat());
}

/// Answers a prompt, and says what the program said about the model.
fn answer(d: &Path, model: &str, more: &[&str]) -> (Value, String) {
    let words =
        ["generate", "-m", model, "-p", "Hello", "--temp", "0", "--max-tokens", "6", "--json", "--device", "cpu"];
    let out = run(d, &[&words[..], &["--logprobs", "3"], more].concat());
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.success(), "{model}: {said}");
    let answer: Value = serde_json::from_slice(&out.stdout).unwrap();
    // JSON holds the shortest digits that give the same f32, so that equal texts are equal bits.
    (serde_json::json!([answer["ids"], answer["logprobs"]]), said)
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))).unwrap()
}

#[test]
fn every_command_takes_every_form_of_a_model() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model_with_spread(&d.join("m"), true, 0.1);
    fit(d, &["-o", "r", "--output-dat", "x.dat"]);
    fs::create_dir(d.join("unfinished")).unwrap();
    ok(d, &["convert", "m", "half.safetensors", "--dtype", "bf16"]);
    for file in ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        fs::remove_file(d.join(file)).unwrap();
    }
    let copy = |from: &str, to: &str| {
        fs::create_dir_all(d.join(to)).unwrap();
        for entry in fs::read_dir(d.join(from)).unwrap() {
            let path = entry.unwrap().path();
            fs::copy(&path, d.join(to).join(path.file_name().unwrap())).unwrap();
        }
    };
    copy("r/checkpoint-2", "unfinished/checkpoint-2");
    fs::copy(d.join("r/config.toml"), d.join("unfinished/config.toml")).unwrap();
    fs::write(d.join("hello.txt"), "Hello\n").unwrap();
    let forms =
        ["m", "m/model.safetensors", "half.safetensors", "r", "unfinished", "r/checkpoint-2", "r/final", "x.dat"];
    for form in forms {
        let tokenizer = if ["half.safetensors", "x.dat"].contains(&form) { &["--tokenizer", "m"][..] } else { &[] };
        let cpu = ["--device", "cpu"];
        let dat = format!("{}.dat", form.replace(['/', '.'], "-"));
        let plan = ["-d", "m/demo.tsv", "--max-steps", "1", "-o", "new"];
        let folder = format!("out/{dat}");
        fs::create_dir_all(d.join(&folder)).unwrap();
        let (copied, exported) = (format!("{folder}/model.safetensors"), format!("{folder}/hf"));
        for words in [
            [&["generate", "-m", form, "-p", "a", "--max-tokens", "1"][..], &cpu, tokenizer].concat(),
            [&["eval", "loss", "-m", form, "-d", "m/demo.tsv", "--batch-size", "8"][..], &cpu, tokenizer].concat(),
            [&["eval", "needle", "-m", form, "--lengths", "192", "--depths", "1", "--tries", "1"], &cpu[..], tokenizer]
                .concat(),
            [&["export-dat", "-m", form, "--output-dat", &dat][..], &cpu, tokenizer].concat(),
            [&["fit", "-m", form, "--dry-run"][..], &plan, &cpu, tokenizer].concat(),
            [&["estimate", "-m", form][..], &plan, &cpu, tokenizer].concat(),
            [&["parity", "-m", form, "-p", "a", "--recipe", "bf16", "--against-recipe", "bf16"][..], &cpu, tokenizer]
                .concat(),
            [&["data", "preview", "m/demo.tsv", "-m", form, "-n", "1"][..], tokenizer].concat(),
            [&["chat", "-m", form, "--script", "hello.txt", "--max-tokens", "1"][..], &cpu, tokenizer].concat(),
            [&["export-hf", "-m", form, "-o", &exported][..], &cpu, tokenizer].concat(),
            vec!["convert", form, &copied, "--dtype", "bf16"],
            vec!["inspect", form, "--verify"],
        ] {
            ok(d, &words);
        }
        let server = Server::start(d, &[&["-m", form, "--context", "64"][..], tokenizer].concat());
        let reply =
            server.ask("/v1/completions", &serde_json::json!({"prompt": "a", "max_tokens": 1, "ignore_eos": true}));
        assert_eq!(reply["usage"]["completion_tokens"], 1, "{form}");
    }
    // What has no tokenizer says how to give one, and what is not there is named.
    for (model, text) in [("x.dat", "--tokenizer"), ("nowhere", "nowhere: no such file")] {
        for command in [
            &["generate", "-p", "a"][..],
            &["export-dat", "--output-dat", "y.dat"],
            &["parity", "-p", "a", "--recipe", "w4"],
        ] {
            let out = run(d, &[command, &["-m", model]].concat());
            let said = String::from_utf8_lossy(&out.stderr);
            assert!(!out.status.success() && said.contains(text), "{command:?} {model}: {said}");
        }
    }
}

/// Only config.json says which of a model's blocks are its last ones, which stay dense. A file without it can be converted to
/// what does not depend on them.
#[test]
fn a_lone_file_with_dense_blocks_is_converted() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model_with_spread(&d.join("m"), true, 0.3);
    fit(d, &["-o", "r", "--recipe", "nvfp4", "--bf16-last-blocks", "1"]);
    fs::create_dir(d.join("lone")).unwrap();
    ok(d, &["export-dat", "-m", "r", "--output-dat", "lone/x.dat", "--device", "cpu"]);
    ok(d, &["convert", "lone/x.dat", "x.safetensors", "--dtype", "f32"]);
    ok(d, &["convert", "lone/x.dat", "x.gguf", "--dtype", "q8-0", "--tokenizer", "m"]);
    let said = refused(d, &["convert", "lone/x.dat", "y.dat", "--dtype", "nvfp4"], 2);
    assert!(said.contains("lone/config.json: the last blocks of this model stay unquantized"), "{said}");
}

/// A copy in floats gets the codes again that training gave to the weights, whatever shares its scales.
#[test]
fn a_dense_copy_is_quantized_as_its_training_did() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model_with_spread(&d.join("m"), true, 0.3);
    for flags in [
        &["--recipe", "nvfp4", "--bf16-last-blocks", "0"][..],
        &["--recipe", "nvfp4", "--bf16-last-blocks", "0", "--nvfp4-without", "square-blocks"],
        &["--recipe", "w4", "--share-scales"],
    ] {
        fit(d, &[&["-o", "r", "--overwrite"], flags].concat());
        fs::create_dir_all(d.join("dense")).unwrap();
        ok(d, &["convert", "r", "dense/m.dat", "--dtype", "f32", "--overwrite"]);
        ok(d, &["convert", "dense/m.dat", "x.dat", "--dtype", "nvfp4", "--overwrite"]);
        ok(d, &["export-dat", "-m", "dense/m.dat", "--output-dat", "y.dat", "--overwrite", "--device", "cpu"]);
        let packed = |path: &str| {
            let file = Container::open(&d.join(path)).unwrap();
            let names = file.names().into_iter();
            let packed = names.filter(|name| matches!(file.stored(name), Some(Stored::Packed { .. })));
            packed.map(|name| (file.read_packed(&name).unwrap(), name)).collect::<Vec<_>>()
        };
        let trained = packed("r/final/model.dat");
        assert!(!trained.is_empty());
        for copy in ["x.dat", "y.dat"] {
            let copied = packed(copy);
            assert_eq!(copied.len(), trained.len(), "{flags:?} {copy}");
            for ((a, name), (b, _)) in trained.iter().zip(&copied) {
                assert!(a.codes == b.codes && a.scales == b.scales, "{flags:?} {copy}: {name}");
            }
        }
    }
}

/// NVFP4 master weights have scales of 16 values of a row, also under the recipe whose squares share one.
#[test]
fn packed_masters_are_recorded_without_square_blocks() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model_with_spread(&d.join("m"), true, 0.3);
    let packed = ["--master-weights", "nvfp4", "--optimizer-state-mode", "int8"];
    for (flags, recorded) in [(&packed[..], Value::from(false)), (&[], Value::Null)] {
        fit(d, &[&["-o", "r", "--overwrite", "--recipe", "nvfp4"], flags].concat());
        assert_eq!(json(&d.join("r/final/trained.json"))["square_blocks"], recorded, "{flags:?}");
    }
}

/// Masters are quantized while they are read, exactly as the export quantizes them: tokens and logarithms are equal in bits.
#[test]
fn a_checkpoint_answers_as_its_export() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model_with_spread(&d.join("m"), true, 0.3);
    for (recipe, more) in [
        ("w4", &["--bf16-last-blocks", "1"][..]),
        ("w4a4", &["--scales", "single"]),
        ("w4a4", &["--master-weights", "nvfp4", "--optimizer-state-mode", "int8"]),
        ("nvfp4", &[]),
        ("bf16", &[]),
    ] {
        fit(d, &[&["-o", "r", "--overwrite", "--recipe", recipe], more].concat());
        let (own, said) = answer(d, "r/checkpoint-2", &[]);
        assert_eq!(own, answer(d, "r/final", &[]).0, "{recipe} {more:?}");
        let expected = match recipe {
            "bf16" => "weights   dense",
            "w4" => "nvfp4, activations not quantized, as in training (w4)",
            _ => "nvfp4, activations nvfp4, as in training",
        };
        assert!(said.contains(expected), "{recipe}: {said}");
        let masters = ["convert", "r/checkpoint-2", "masters.safetensors", "--dtype", "f32", "--overwrite"];
        ok(d, &masters);
        if recipe != "bf16" {
            ok(d, &["export-dat", "-m", "r/checkpoint-2", "--output-dat", "x.dat", "--device", "cpu"]);
            assert_eq!(own, answer(d, "x.dat", &["--tokenizer", "m"]).0, "{recipe} {more:?}");
            fs::remove_file(d.join("x.dat")).unwrap();
        }
        if !more.contains(&"nvfp4") {
            assert_ne!(own, answer(d, "masters.safetensors", &["--tokenizer", "m"]).0, "{recipe}: nothing was rounded");
        }
    }
}

#[test]
fn what_a_model_was_trained_for_goes_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model_with_spread(&d.join("m"), true, 0.3);
    fit(d, &["-o", "r", "--recipe", "w4a4", "--bf16-last-blocks", "1", "--scales", "single", "--output-dat", "x.dat"]);
    let record = json(&d.join("r/final/trained.json"));
    assert_eq!(record["recipe"], "w4a4");
    assert_eq!((&record["bf16_last_blocks"], &record["scales"]), (&1.into(), &"single".into()));
    assert_eq!(record["chat_template_sha256"].as_str().map(str::len), Some(64));
    assert_eq!(json(&d.join("x.dat.trained.json")), record);
    // Other scales than in training are said, and without a flag there are none.
    let export = ["export-dat", "-m", "r/checkpoint-2", "--device", "cpu", "--output-dat"];
    let convert = ["convert", "r", "--dtype", "nvfp4"];
    for words in [[&export[..], &["y.dat"]].concat(), [&convert[..], &["z.dat"]].concat()] {
        let file = words[words.len() - 1];
        let others = "scales    two, unlike in training (single)";
        let out = run(d, &[&words[..], &["--scales", "two"]].concat());
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success() && said.contains(others), "{file}: {said}");
        let two = json(&d.join(format!("{file}.trained.json")));
        // The record is about training.
        assert_eq!((&two["recipe"], &two["scales"]), (&"w4a4".into(), &"single".into()));
        fs::remove_file(d.join(file)).unwrap();
        let out = run(d, &words);
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success() && !said.contains("unlike in training"), "{file}: {said}");
        assert_eq!(json(&d.join(format!("{file}.trained.json"))), record);
    }
    // A flag that says what training did changes nothing.
    ok(d, &[&convert[..], &["same.dat", "--scales", "single"]].concat());
    assert_eq!(json(&d.join("same.dat.trained.json")), record);
    // Nobody types --w4a4.
    let trained = answer(d, "r/final", &[]).0;
    for file in ["x.dat", "y.dat", "z.dat", "r/final/model.dat"] {
        let (found, said) = answer(d, file, &["--tokenizer", "m"]);
        assert_eq!(found, trained, "{file}");
        assert!(said.contains("as in training (w4a4)") && !said.contains("template"), "{file}: {said}");
    }
    let (_, said) = answer(d, "x.dat", &["--tokenizer", "m", "--w4a4", "false"]);
    assert!(said.contains("unlike in training (w4a4)"), "{said}");
    // Another chat template is said.
    fs::create_dir(d.join("other")).unwrap();
    for file in ["tokenizer.json", "config.json", "generation_config.json"] {
        fs::copy(d.join("m").join(file), d.join("other").join(file)).unwrap();
    }
    fs::write(d.join("other/chat_template.jinja"), "{{ messages[0].content }}").unwrap();
    let (_, said) = answer(d, "x.dat", &["--tokenizer", "other"]);
    assert!(said.contains("differs from the one in training"), "{said}");
    // A file that takes the place of a trained one has no record of it. An old record has the recipe alone.
    ok(d, &["convert", "m", "x.dat", "--dtype", "nvfp4", "--overwrite"]);
    assert!(!d.join("x.dat.trained.json").exists());
    fs::write(d.join("x.dat.trained.json"), r#"{"recipe": "w4a4"}"#).unwrap();
    assert!(answer(d, "x.dat", &[]).1.contains("as in training (w4a4)"));
    fs::write(d.join("x.dat.trained.json"), r#"{"recipe": "w5"}"#).unwrap();
    let out = run(d, &["generate", "-m", "x.dat", "-p", "a"]);
    assert!(out.status.code() == Some(6) && String::from_utf8_lossy(&out.stderr).contains("w5"));
}

/// Rows whose template writes an empty thought train a model that does not think, and it is asked so.
#[test]
fn a_model_thinks_if_its_rows_did() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model_with_spread(&d.join("m"), true, 0.3);
    fs::copy(crate::support::golden("chat/qwen3-thinking.jinja"), d.join("m/chat_template.jinja")).unwrap();
    let tokenizer = fs::read_to_string(demo_file("tokenizer.json")).unwrap();
    let mut tokenizer: Value = serde_json::from_str(&tokenizer).unwrap();
    // The demo's tokenizer has no marks of thoughts; two rare tokens become them.
    let vocabulary = tokenizer["model"]["vocab"].as_object().unwrap().len();
    let added = tokenizer["added_tokens"].as_array().unwrap().len();
    assert!(vocabulary + added >= 500, "{vocabulary} {added}");
    let mut marks = Vec::new();
    for (mark, id) in [("<think>", 512), ("</think>", 513)] {
        marks.push(serde_json::json!({
            "id": id, "content": mark, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            "special": false,
        }));
    }
    tokenizer["added_tokens"].as_array_mut().unwrap().extend(marks);
    let mut config = json(&d.join("m/config.json"));
    config["vocab_size"] = 528.into();
    fs::create_dir(d.join("t")).unwrap();
    fs::write(d.join("t/config.json"), config.to_string()).unwrap();
    fs::write(d.join("t/tokenizer.json"), tokenizer.to_string()).unwrap();
    // A question that somebody asks without saying whether to think is refused.
    let unsaid = "{%- if messages[0].content == 'asked' and enable_thinking is not defined %}{{ raise_exception('unsaid') }}{%- endif %}";
    let template = fs::read_to_string(d.join("m/chat_template.jinja")).unwrap();
    fs::write(d.join("t/chat_template.jinja"), format!("{unsaid}{template}")).unwrap();
    fs::copy(d.join("m/generation_config.json"), d.join("t/generation_config.json")).unwrap();
    let row = |answer: &str| serde_json::json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}]});
    for (answers, thinking) in [(["b", "c"], false), (["b", "<think>\nhm\n</think>\n\nc"], true)] {
        fs::write(d.join("rows.jsonl"), answers.map(|a| row(a).to_string()).join("\n")).unwrap();
        let words =
            ["fit", "--init-config", "t/config.json", "-d", "rows.jsonl", "--max-steps", "1", "--device", "cpu"];
        // Sample answers are asked as later ones are.
        ok(d, &[&words[..], &["--val-split", "0", "-o", "r", "--overwrite", "--sample-prompt", "asked"]].concat());
        assert_eq!(json(&d.join("r/final/trained.json"))["thinking"], thinking);
        // What has no place for the record says how to ask.
        for words in [
            &["export-hf", "-m", "r", "-o", "hf", "--device", "cpu", "--overwrite"][..],
            &["convert", "r", "x.gguf", "--dtype", "bf16", "--overwrite"],
        ] {
            let out = run(d, words);
            let said = String::from_utf8_lossy(&out.stderr);
            let told = said.contains("enable_thinking false (in train-cli: --thinking false)");
            assert!(out.status.success() && told != thinking, "{words:?}: {said}");
        }
        let card = fs::read_to_string(d.join("hf/README.md")).unwrap();
        assert_eq!(card.contains("enable_thinking false"), !thinking, "{card}");
        for model in ["r/final", "r/checkpoint-1"] {
            let own = answer(d, model, &[]).0;
            let flag = ["--thinking", if thinking { "true" } else { "false" }];
            assert_eq!(own, answer(d, model, &flag).0, "{model}");
            let (_, said) = answer(d, model, &["--thinking", if thinking { "false" } else { "true" }]);
            assert!(said.contains("unlike in training"), "{said}");
        }
    }
    // Without a file that says more, a model that is asked to think draws as one that thinks.
    fs::remove_file(d.join("r/final/generation_config.json")).unwrap();
    fs::write(d.join("script"), "/exit").unwrap();
    for (asked, temperature) in [("true", "temperature 0.6"), ("false", "temperature 0.7")] {
        let words = ["chat", "-m", "r/final", "--device", "cpu", "--thinking", asked, "--script", "script"];
        let out = run(d, &words);
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success() && said.contains(temperature), "{asked}: {said}");
    }
}

/// A changed bit in an export's weights is found before another file is made of them.
#[test]
fn no_file_is_made_of_an_export_that_has_changed() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model_with_spread(&d.join("m"), true, 0.1);
    fit(d, &["-o", "r"]);
    let path = d.join("r/final/model.dat");
    let mut bytes = fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&path, &bytes).unwrap();
    let cpu = ["--device", "cpu"];
    for model in ["r", "r/final", "r/final/model.dat"] {
        for words in [
            [&["export-dat", "-m", model, "--output-dat", "x.dat"][..], &cpu].concat(),
            [&["export-hf", "-m", model, "--output-dir", "x"][..], &cpu].concat(),
            vec!["convert", model, "x.safetensors", "--dtype", "bf16"],
        ] {
            let out = run(d, &words);
            let stderr = String::from_utf8_lossy(&out.stderr);
            let expected = stderr.contains("model.dat: SHA-256") && stderr.contains("delete manifest.json");
            assert!(out.status.code() == Some(6) && expected, "{words:?}: {}: {stderr}", out.status);
        }
    }
    // A checkpoint, too.
    let path = d.join("r/checkpoint-2/model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&path, &bytes).unwrap();
    let out = run(d, &["convert", "r/checkpoint-2", "x.safetensors", "--dtype", "bf16"]);
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.code() == Some(6) && stderr.contains("model.safetensors"), "{}: {stderr}", out.status);
    // A manifest of another program says nothing, nor does that of an export about a file that it does not list.
    fs::create_dir(d.join("others")).unwrap();
    for name in
        ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors"]
    {
        fs::copy(d.join("m").join(name), d.join("others").join(name)).unwrap();
    }
    fs::write(d.join("others/manifest.json"), "{\"name\": \"a web page\"}").unwrap();
    ok(d, &["convert", "others", "y.safetensors", "--dtype", "bf16"]);
    fs::copy(d.join("m/model.safetensors"), d.join("r/final/other.safetensors")).unwrap();
    ok(d, &["convert", "r/final/other.safetensors", "z.safetensors", "--dtype", "bf16"]);
    assert!(!["x", "x.dat", "x.safetensors"].iter().any(|name| d.join(name).exists()));
    fs::remove_file(d.join("r/final/manifest.json")).unwrap();
    ok(d, &["export-dat", "-m", "r/final", "--output-dat", "x.dat", "--device", "cpu"]);
}
