//! `chat` keeps a conversation on one cache: a later turn reads only what is new, and answers as if everything had been
//! read at once. Commands, scripts, saved conversations, a full context and Ctrl-C do what `/help` says.

use crate::support::{
    Cpu, Cube, Feature,
    files::{at_terminal, command, demo_file, no_terminal, ok, refused, run, send, tiny_model_with_spread},
    golden,
    http::Server,
    lacks, on_gpu,
    scripted::{numbers_tokenizer, scripted_model},
};
use backend_nvfp4::{CacheFormat, LinearSpec, Nvfp4Kernels, Nvfp4Linear, Precision, Recipe, Scaling};
use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use kernels_cubecl::mma;
use model_qwen3::{
    config::Qwen3Config,
    container::Container,
    model::Qwen3,
    sampling::Sampling,
    session::{GenerateOptions, Progress, Session},
    tokenizer::Tokenizer,
    weights::{self, Purpose},
};
use serde_json::{Value, json};
use std::{
    io::{Read, Write},
    ops::ControlFlow,
    path::Path,
    process::{Child, Stdio},
    sync::mpsc::Receiver,
    time::Duration,
};

const CHAT: [&str; 7] = ["chat", "-m", "m", "--device", "cpu", "--temp", "0"];

/// A model of random weights that are large enough for its greedy answer to depend on every prompt token.
fn lively_model(dir: &Path) {
    tiny_model_with_spread(&dir.join("m"), true, 0.5);
}

/// The turns of a scripted conversation.
fn turns(dir: &Path, script: &str, more: &[&str]) -> Vec<Value> {
    std::fs::write(dir.join("script.txt"), script).unwrap();
    let out = ok(dir, &[&CHAT[..], &["--max-tokens", "8", "--json", "--script", "script.txt"], more].concat());
    out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The answer to `question` behind the messages of a saved conversation, as `generate` gives it.
fn answer_behind(dir: &Path, saved: &str, question: &str) -> Value {
    answer_behind_with(dir, saved, question, &[])
}

/// The answer with more flags.
fn answer_behind_with(dir: &Path, saved: &str, question: &str, more: &[&str]) -> Value {
    let mut messages: Vec<Value> = saved.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    messages.push(json!({"role": "user", "content": question}));
    std::fs::write(dir.join("asked.jsonl"), json!({"messages": messages}).to_string()).unwrap();
    let options = ["--device", "cpu", "--temp", "0", "--max-tokens", "8", "--json", "--prompts", "asked.jsonl"];
    serde_json::from_str(&ok(dir, &[&["generate", "-m", "m"], &options[..], more].concat())).unwrap()
}

/// What a scripted conversation prints on standard error when it ends with this exit code.
fn said(dir: &Path, script: &str, more: &[&str], code: i32) -> String {
    std::fs::write(dir.join("script.txt"), script).unwrap();
    refused(dir, &[&CHAT[..], &["--script", "script.txt"], more].concat(), code)
}

#[test]
fn a_later_turn_reads_only_what_is_new_and_answers_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    lively_model(d);
    let talk = turns(d, "Who are you?\nAnd now?\n/save talk.jsonl\nOnce more.\n", &[]);
    assert_eq!(talk.len(), 3);
    assert_eq!(talk[0]["cached_tokens"], 0);
    // The last token of an answer is read with the turn behind it.
    for (turn, before) in talk[1..].iter().zip(&talk) {
        let of = |turn: &Value, key: &str| turn[key].as_u64().unwrap();
        let known = of(before, "prompt_tokens") + of(before, "tokens");
        assert!(of(turn, "cached_tokens") + 1 >= known, "{known} tokens were known: {turn}");
    }
    // The file holds the conversation when it was written; its next turn is an answer to these messages.
    let saved = std::fs::read_to_string(d.join("talk.jsonl")).unwrap();
    let roles: Vec<Value> = saved.lines().map(|l| serde_json::from_str::<Value>(l).unwrap()["role"].clone()).collect();
    assert_eq!(roles, ["user", "assistant", "user", "assistant"]);
    let loaded = turns(d, "/load talk.jsonl\nOnce more.\n", &[]);
    assert_eq!(loaded[0]["cached_tokens"], 0);
    let expected = answer_behind(d, &saved, "Once more.");
    assert_eq!((&loaded[0]["ids"], &loaded[0]["prompt_tokens"]), (&expected["ids"], &expected["prompt_tokens"]));
    // So is what its user says, as a script.
    let replayed = ok(d, &[&CHAT[..], &["--max-tokens", "8", "--json", "--script", "talk.jsonl"]].concat());
    let replayed: Vec<Value> = replayed.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((&replayed[0]["ids"], &replayed[1]["ids"]), (&talk[0]["ids"], &talk[1]["ids"]));
    // A system message of the file is not replaced by another one without a word.
    std::fs::write(d.join("system.jsonl"), format!("{{\"role\": \"system\", \"content\": \"Be short.\"}}\n{saved}"))
        .unwrap();
    let out = run(d, &[&CHAT[..], &["--script", "system.jsonl", "--system-prompt", "Be long."]].concat());
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.code() == Some(2) && said.contains("leave out --system-prompt"), "{said}");
    assert_ne!(talk[1]["ids"], talk[2]["ids"], "the model answers everything alike; the comparisons say nothing");
}

/// With a tokenizer that spells each token in one way only, a conversation that keeps its tokens answers as one whose messages
/// are all read anew: also where a stop token ends the answers, after `/undo`, and where the template leaves an empty thought out
/// of the turns before the last.
#[test]
fn a_kept_conversation_answers_as_one_that_is_read_anew() {
    const QUESTIONS: [&str; 3] = ["<5><90>", "<7><300>", "<11><411>"];
    /// The tokenizer makes a token of each of its characters.
    const THOUGHT: &str = "<think>";
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    lively_model(d);
    let vocabulary = Qwen3Config::from_file(&d.join("m/config.json")).unwrap().vocab_size;
    std::fs::write(d.join("m/tokenizer.json"), numbers_tokenizer(vocabulary).to_string()).unwrap();
    let of = |turn: &Value, key: &str| turn[key].as_u64().unwrap();
    let ids = |turn: &Value| -> Vec<u64> { turn["ids"].as_array().unwrap().iter().flat_map(Value::as_u64).collect() };
    let stops_at = |id: u64| {
        let settings = json!({"eos_token_id": id}).to_string();
        std::fs::write(d.join("m/generation_config.json"), settings).unwrap();
    };
    let script = format!("{}\n/undo\n{}\n", QUESTIONS.join("\n"), QUESTIONS[2]);
    let kept_is_anew = |more: &[&str], is_dropped: bool| {
        let talk = turns(d, &script, more);
        assert_eq!(talk.len(), 4);
        // The third turn is taken back and said once more.
        assert_eq!(talk[2]["ids"], talk[3]["ids"], "{more:?}");
        let mut saved = String::new();
        for (turn, question) in talk.iter().zip(QUESTIONS) {
            let anew = answer_behind_with(d, &saved, question, more);
            for key in ["ids", "prompt_tokens", "text", "stop"] {
                assert_eq!(turn[key], anew[key], "{more:?}, {question}: {key}");
            }
            saved += &format!("{}\n", json!({"role": "user", "content": question}));
            saved += &format!("{}\n", json!({"role": "assistant", "content": turn["text"]}));
        }
        for (before, turn) in talk.iter().zip(&talk[1..3]) {
            let (prompt, cached) = (of(before, "prompt_tokens"), of(turn, "cached_tokens"));
            // The last token of an answer is read with the turn behind it.
            let kept = if is_dropped { prompt - THOUGHT.len() as u64 } else { prompt + of(before, "tokens") - 1 };
            assert!(cached >= kept, "{more:?}: {kept} tokens were known: {turn}");
            assert_eq!(cached < prompt, is_dropped, "{more:?}: {turn}");
        }
        talk
    };
    stops_at(vocabulary as u64 - 1);
    let talk = kept_is_anew(&[], false);
    assert!(talk.iter().all(|turn| turn["stop"] == "length"), "{talk:?}");
    // A token that only the second answer has ends it now.
    let (first, second) = (ids(&talk[0]), ids(&talk[1]));
    let length = second.iter().position(|id| !first.contains(id)).expect("the second answer is another one");
    stops_at(second[length]);
    let stopped = kept_is_anew(&[], false);
    assert_eq!((of(&stopped[1], "tokens"), &stopped[1]["stop"]), (length as u64, &json!("stop")));

    let path = d.join("m/tokenizer_config.json");
    let mut settings: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let empty = format!("{{%- if enable_thinking is false %}}{{{{- '{THOUGHT}' }}}}{{%- endif %}}");
    let template = format!("{}{empty}", settings["chat_template"].as_str().unwrap().trim_end());
    settings["chat_template"] = template.into();
    std::fs::write(&path, settings.to_string()).unwrap();
    let without = kept_is_anew(&["--thinking", "false"], true);
    let with = kept_is_anew(&["--thinking", "true"], false);
    // `/think` does what the flag does.
    for (word, flagged) in [("off", &without), ("on", &with)] {
        let said = turns(d, &format!("/think {word}\n{}\n", QUESTIONS[0]), &[]);
        for key in ["ids", "prompt_tokens"] {
            assert_eq!(said[0][key], flagged[0][key], "/think {word}: {key}");
        }
    }
    assert_eq!(of(&without[0], "prompt_tokens"), of(&with[0], "prompt_tokens") + THOUGHT.len() as u64);
}

/// What is said looks like the lines of the file that mark who speaks.
#[test]
fn a_conversation_saved_as_text_goes_on_and_can_be_replayed() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    lively_model(d);
    let quoted = "\"\"\"\nassistant:\n\n> 你好 🎈\n# train-cli transcript\n\"\"\"\n";
    let files = "/save talk.txt\n/save talk.jsonl\n/save CAPITALS.JSONL\n";
    let script = format!("/system Be short.\nWho are you?\n{quoted}{files}Once more.\n");
    let talk = turns(d, &script, &[]);
    assert_eq!(talk.len(), 3);
    assert_ne!(talk[0]["ids"], talk[2]["ids"], "the model answers everything alike; the comparisons say nothing");
    let text = std::fs::read_to_string(d.join("talk.txt")).unwrap();
    assert!(text.starts_with("# train-cli transcript\n\nsystem:\n> Be short.\n\nuser:\n> Who are you?\n"), "{text}");
    let loaded = turns(d, "Forgotten.\n/load talk.txt\nOnce more.\n/save again.jsonl\n", &[]);
    // Every message is what it was.
    let [saved, again] = ["talk.jsonl", "again.jsonl"].map(|name| std::fs::read_to_string(d.join(name)).unwrap());
    let expected = answer_behind(d, &saved, "Once more.");
    assert_eq!((&loaded[1]["ids"], &loaded[1]["prompt_tokens"]), (&expected["ids"], &expected["prompt_tokens"]));
    assert!(saved.lines().count() == 5 && again.starts_with(&saved), "{saved}{again}");
    assert_eq!(std::fs::read_to_string(d.join("CAPITALS.JSONL")).unwrap(), saved);
    let replayed = ok(d, &[&CHAT[..], &["--max-tokens", "8", "--json", "--script", "talk.txt"]].concat());
    let replayed: Vec<Value> = replayed.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(replayed.len(), 2);
    for (replayed, first) in replayed.iter().zip(&talk) {
        assert_eq!((&replayed["prompt"], &replayed["ids"]), (&first["prompt"], &first["ids"]));
    }
    // A damaged file is refused with the line, by both.
    std::fs::write(d.join("talk.txt"), text.replacen("user:", "User:", 1)).unwrap();
    assert!(said(d, "/load talk.txt\n", &[], 3).contains("talk.txt:6: \"User:\" is no role"));
    let refused = run(d, &[&CHAT[..], &["--script", "talk.txt"]].concat());
    assert!(String::from_utf8_lossy(&refused.stderr).contains("talk.txt:6: \"User:\" is no role"));
    assert_eq!(refused.status.code(), Some(3));
}

#[test]
fn commands_change_the_conversation() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    lively_model(d);
    let ids = |talk: &[Value], i: usize| talk[i]["ids"].clone();
    let plain = turns(d, "Hello\nWho?\n", &[]);
    let undone = turns(d, "Hello\nSomething else\n/undo\nWho?\n", &[]);
    assert_eq!(ids(&undone, 2), ids(&plain, 1), "/undo left something");
    assert_ne!(ids(&undone, 1), ids(&plain, 1));
    let reset = turns(d, "Something else\n/reset\nHello\n", &[]);
    assert_eq!(ids(&reset, 1), ids(&plain, 0), "/reset left something");
    let system = turns(d, "Hello\n/reset\n/system Be short.\nHello\n/reset\n/system\nHello\n", &[]);
    assert_eq!(ids(&system, 1), ids(&turns(d, "Hello\n", &["--system-prompt", "Be short."]), 0));
    assert_eq!((ids(&system, 0), ids(&system, 2)), (ids(&plain, 0), ids(&plain, 0)));
    assert_ne!(ids(&system, 0), ids(&system, 1));
    let set = turns(d, "/set max-tokens 3\nHello\n/set temperature 1.5\n/set seed 1\nHello\n/exit\nHello\n", &[]);
    assert_eq!(set.iter().map(|turn| turn["tokens"].as_u64().unwrap()).collect::<Vec<_>>(), [3, 3]);
    let lines = turns(d, "\"\"\"\nHello\nyou\n\"\"\"\nHello\\\nyou\n", &[]);
    assert_eq!(
        lines.iter().map(|turn| turn["prompt"].as_str().unwrap()).collect::<Vec<_>>(),
        ["Hello\nyou", "Hello\nyou"]
    );
}

/// `/stats` counts the tokens of the conversation, whatever the cache still holds.
#[test]
fn stats_follow_the_conversation() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    // The tokenizer gives the text of this model's answers the tokens that the model made, so that a loaded conversation has as
    // many.
    endless_model(d);
    let script =
        "/stats\nHello\n/stats\n/save talk.jsonl\nAnd now?\n/undo\n/stats\n/undo\n/stats\nWho?\n/reset\n/stats\n";
    let stderr = said(d, &format!("{script}/load talk.jsonl\n/stats\n"), &["--max-tokens", "8"], 0);
    // After each of the three answers, and in /stats, stands how fast it was.
    let rates: Vec<f64> =
        stderr.lines().filter_map(|line| line.split_once(" tokens/s")?.0.rsplit_once(' ')?.1.parse().ok()).collect();
    assert!(rates.len() > 3 && rates.iter().all(|rate| *rate > 0.0), "{rates:?}: {stderr}");
    let mut lines = stderr.lines().filter(|line| line.contains(" tokens") && line.contains(" messages, "));
    let mut next = || {
        let line = lines.next().unwrap_or_else(|| panic!("too few lines of /stats: {stderr}"));
        let (messages, rest) = line.split_once(" messages, ").unwrap();
        let (tokens, rest) = rest.split_once(" of 2048 tokens").unwrap();
        (messages.parse::<usize>().unwrap(), tokens.parse::<usize>().unwrap(), rest.to_owned())
    };
    let nothing = (0, 0, String::new());
    assert_eq!(next(), nothing);
    let (messages, tokens, cached) = next();
    // The cache holds what was read and answered, and not what the template puts behind the answer.
    assert!(messages == 2 && tokens > 10 && cached.starts_with(" (") && cached.ends_with(" cached)"), "{stderr}");
    let undone = next();
    assert_eq!((undone.0, undone.1), (2, tokens), "/undo: {stderr}");
    assert_eq!((next(), next()), (nothing.clone(), nothing), "/undo and /reset: {stderr}");
    let loaded = next();
    assert_eq!((loaded.0, loaded.1), (2, tokens), "/load: {stderr}");
}

#[test]
fn what_cannot_be_done_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    lively_model(d);
    assert!(said(d, "/rest\n", &[], 2).contains("/rest: there is no such command"));
    assert!(said(d, "/undo\n", &[], 2).contains("nothing was said yet"));
    assert!(said(d, "\"\"\"\n/help\n", &[], 2).contains("error: the \"\"\" is not closed; write"));
    assert!(said(d, "/set top-p 7\n", &[], 2).contains("error: /set top-p 7: the value must be between 0 and 1"));
    for (name, value, wanted) in [
        ("seed", "-1", "whole number, at least 0"),
        ("top-k", "1.5", "whole number, at least 0"),
        ("top-p", "x", "number"),
    ] {
        let stderr = said(d, &format!("/set {name} {value}\n"), &[], 2);
        assert!(stderr.contains(&format!("/set {name} {value}: the value must be a {wanted}\n")), "{stderr}");
    }
    assert!(said(d, "/set color 7\n", &[], 2).contains("there is no such setting"));
    assert!(said(d, "/load none.jsonl\n", &[], 2).contains("none.jsonl"));
    let weights = std::fs::read(d.join("m/model.safetensors")).unwrap();
    std::fs::create_dir(d.join("folder")).unwrap();
    std::os::unix::fs::symlink(d.join("m/model.safetensors"), d.join("link.txt")).unwrap();
    std::fs::write(d.join("notes.txt"), "mine").unwrap();
    for (path, reason) in [
        ("/dev/null", "a pipe or a device"),
        ("folder", "a folder"),
        ("nowhere/talk.txt", "there is no folder nowhere"),
        ("m/model.safetensors", "is an input of this command"),
        ("m/tokenizer.json", "is an input of this command"),
        ("link.txt", "is an input of this command"),
        ("script.txt", "is an input of this command"),
        ("notes.txt", "neither written nor loaded it; choose another name"),
    ] {
        let stderr = said(d, &format!("/save {path}\n"), &[], 2);
        assert!(stderr.contains(reason), "{path}: {stderr}");
    }
    assert!(!Path::new("/dev/null").is_file(), "/dev/null was replaced by a file");
    assert!(std::fs::read(d.join("m/model.safetensors")).unwrap() == weights);
    assert_eq!(std::fs::read(d.join("notes.txt")).unwrap(), b"mine");
    let twice = said(d, "/save own.txt\n/save own.txt\n", &[], 0);
    assert!(twice.contains("\nsaved own.txt\nreplaced own.txt\n"), "{twice}");
    std::fs::write(d.join("bad.jsonl"), "{\"role\": \"user\", \"content\": \"a\"}\n{}\n").unwrap();
    assert!(said(d, "/load bad.jsonl\n", &[], 3).contains("bad.jsonl:2: a message needs"));
    let full = said(d, "Hello\nHello\nHello\nHello\n", &["--context", "40"], 2);
    assert!(full.contains("the context ends at 40; take messages back with /undo"), "{full}");
    let refused = said(d, "Hello\n", &["--context", "100000000"], 2);
    assert!(refused.contains("--context 100000000: the model takes at most"), "{refused}");
    // An answer ends where the context does.
    let cut = said(d, "Hello\n", &["--context", "24", "--max-tokens", "100"], 0);
    assert!(cut.contains("context 24 of 24") && cut.contains("cut because the context is full"), "{cut}");
}

/// No shell reads what is entered, so that the program itself knows `~/`.
#[test]
#[cfg(unix)]
fn a_saved_conversation_may_lie_in_the_users_folder() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    lively_model(d);
    std::fs::create_dir(d.join("user")).unwrap();
    std::fs::write(d.join("script.txt"), "/save ~/talk.txt\n/load ~/talk.txt\n").unwrap();
    let mut chat = command(d, &[&CHAT[..], &["--script", "script.txt"]].concat());
    let out = chat.env("HOME", d.join("user")).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    assert!(d.join("user/talk.txt").is_file());
}

/// Some editors put a byte order mark in front of a text.
#[test]
fn a_byte_order_mark_is_no_part_of_a_conversation() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    lively_model(d);
    let nothing = "0 messages, 0 of 2048 tokens";
    let stderr = said(d, "\u{feff}/stats\n", &["--max-tokens", "2"], 0);
    assert!(stderr.contains("sampling  temperature 0 by flag; repetition-penalty 1 by default"), "{stderr}");
    assert!(stderr.contains(nothing), "{stderr}");
    let input = std::fs::File::open(d.join("script.txt")).unwrap();
    let out = command(d, &[&CHAT[..], &["--max-tokens", "2"]].concat()).stdin(input).output().unwrap();
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() && stderr.contains(nothing), "{stderr}");
    for (name, text) in [
        ("talk.jsonl", "{\"role\": \"user\", \"content\": \"a\"}\n"),
        ("talk.txt", "# train-cli transcript\nuser:\n> a\n"),
    ] {
        std::fs::write(d.join(name), format!("\u{feff}{text}")).unwrap();
        let stderr = said(d, &format!("/load {name}\n"), &[], 0);
        assert!(stderr.contains(&format!("1 message from {name}")), "{stderr}");
    }
}

/// A model whose answers are as long as they may be, and say nothing but `z`.
#[cfg(unix)]
fn endless_model(dir: &Path) {
    let [z] = Tokenizer::from_file(&demo_file("tokenizer.json")).unwrap().encode("z").unwrap()[..] else {
        panic!("one token")
    };
    scripted_model(&dir.join("m"), |_| vec![(z, 20.0)]);
}

/// Ctrl-C ends an answer, and with it a conversation that nobody types.
#[test]
#[cfg(unix)]
fn ctrl_c_ends_a_conversation_without_a_terminal() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    endless_model(d);
    std::fs::write(d.join("script.txt"), "Hello\nAgain\n").unwrap();
    for more in [&["--script", "script.txt"][..], &[]] {
        let input = std::fs::File::open(d.join("script.txt")).unwrap();
        let mut chat = command(d, &[&CHAT[..], &["--max-tokens", "100000"], more].concat());
        let mut chat = chat.stdin(input).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        // The first piece of the answer shows that it is being made.
        chat.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        send(&chat, "-INT");
        let out = chat.wait_with_output().unwrap();
        let stderr = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(130), "{stderr}");
        let figures: Vec<&str> = stderr.lines().filter(|line| line.contains("answer tokens")).collect();
        assert!(figures.len() == 1 && figures[0].contains(" · interrupted · context "), "{stderr}");
        assert!(stderr.ends_with("error: SIGINT stopped the answer, and with it the conversation\n"), "{stderr}");
    }
}

/// At a terminal Ctrl-C stops the answer and not the program, and discards a message of several lines.
#[test]
#[cfg(unix)]
fn ctrl_c_at_a_terminal_does_not_end_the_program() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    endless_model(d);
    let Some(mut chat) = Terminal::of(d, "xterm", "--max-tokens 100000") else { return };
    chat.wait_for("> ");
    chat.types("Hello\r");
    chat.wait_for("zzz");
    chat.types("\x03");
    chat.wait_for(" interrupted");
    chat.wait_for("> ");
    chat.types("\"\"\"\r");
    chat.wait_for("… ");
    chat.types("one\x03");
    chat.wait_for("> ");
    // Ctrl-D sends nothing of a message that is not complete.
    chat.types("\"\"\"\r");
    chat.wait_for("… ");
    chat.types("\x04");
    chat.wait_for("is not closed");
    chat.wait_for("> ");
    chat.types("/set max-tokens 3\r");
    chat.wait_for("> ");
    chat.types("Again\r");
    chat.wait_for("+ 3 answer tokens");
    chat.exit();
}

/// What a person types is kept for later conversations, where the arrow keys find it.
#[test]
#[cfg(unix)]
fn a_later_conversation_remembers_what_was_typed() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    endless_model(d);
    let Some(mut chat) = Terminal::of(d, "xterm", "--max-tokens 3") else { return };
    chat.wait_for("> ");
    chat.types("Remembered\r");
    chat.wait_for("+ 3 answer tokens");
    chat.exit();
    let Some(mut chat) = Terminal::of(d, "xterm", "--max-tokens 3") else { return };
    chat.wait_for("> ");
    // Up twice: over the `/exit` of before.
    chat.types("\x1b[A");
    chat.wait_for("/exit");
    chat.types("\x1b[A");
    chat.wait_for("Remembered");
    chat.types("\r");
    chat.wait_for("+ 3 answer tokens");
    chat.exit();
}

/// Results that go to a file are only the results: what a person types is drawn on the terminal.
#[test]
#[cfg(unix)]
fn a_file_of_results_holds_no_marks_of_the_terminal() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    endless_model(d);
    let Some(mut chat) = Terminal::of(d, "xterm", "--max-tokens 3 --json > talk.jsonl") else { return };
    chat.wait_for("> ");
    chat.types("Hello\r");
    chat.wait_for("+ 3 answer tokens");
    chat.exit();
    let results = std::fs::read_to_string(d.join("talk.jsonl")).unwrap();
    let answer: Value = serde_json::from_str(&results).unwrap_or_else(|e| panic!("{e}: {results:?}"));
    assert_eq!(answer["prompt"], "Hello");
}

/// At a terminal without raw mode, such as the one in Emacs, Ctrl-C sends a signal also while a line is typed.
#[test]
#[cfg(unix)]
fn ctrl_c_at_a_terminal_without_raw_mode_discards_a_line() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    endless_model(d);
    let Some(mut chat) = Terminal::of(d, "dumb", "--max-tokens 100000") else { return };
    chat.wait_for("> ");
    chat.types("Forgotten\x03");
    chat.wait_for("^C");
    chat.types("/help\n");
    chat.wait_for("/stats");
    chat.wait_for("> ");
    chat.types("Hello\n");
    chat.wait_for("zzz");
    chat.types("\x03");
    chat.wait_for(" interrupted");
    chat.exit();
}

/// The program at a terminal, which util-linux's `script` makes.
#[cfg(unix)]
struct Terminal {
    program: Child,
    shown: Receiver<Vec<u8>>,
    /// What was shown and not waited for.
    rest: Vec<u8>,
}

#[cfg(unix)]
impl Terminal {
    /// Starts a conversation at a terminal of this type. The history of typed lines is kept in `dir`, too.
    fn of(dir: &Path, kind: &str, more: &str) -> Option<Self> {
        let mut script = at_terminal(dir, 120, &format!("{} {more}", CHAT.join(" ")));
        script.env("TERM", kind).env("XDG_STATE_HOME", dir).stdin(Stdio::piped()).stdout(Stdio::piped());
        let Ok(mut program) = script.spawn() else {
            no_terminal();
            return None;
        };
        let mut output = program.stdout.take().unwrap();
        let (sender, shown) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let mut piece = [0; 4096];
            while let Ok(n @ 1..) = output.read(&mut piece) {
                let _ = sender.send(piece[..n].to_vec());
            }
        });
        Some(Self { program, shown, rest: vec![] })
    }

    fn types(&mut self, keys: &str) {
        let input = self.program.stdin.as_mut().unwrap();
        input.write_all(keys.as_bytes()).and_then(|()| input.flush()).unwrap();
    }

    /// Ends the conversation, which must succeed.
    fn exit(mut self) {
        self.wait_for("> ");
        self.types("/exit\r");
        assert!(self.program.wait().unwrap().success());
    }

    /// Waits until `text` is shown, and forgets it and what was shown before it.
    fn wait_for(&mut self, text: &str) {
        loop {
            if let Some(at) = self.rest.windows(text.len()).position(|part| part == text.as_bytes()) {
                self.rest.drain(..at + text.len());
                return;
            }
            match self.shown.recv_timeout(Duration::from_secs(60)) {
                Ok(more) => self.rest.extend(more),
                Err(_) => {
                    let _ = self.program.kill();
                    panic!("{text:?} was not shown: {}", String::from_utf8_lossy(&self.rest));
                }
            }
        }
    }
}

/// The export of a run answers as it was trained, whichever path names it.
#[test]
fn a_run_folder_answers_as_it_was_trained() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    lively_model(d);
    let fit = ["fit", "-m", "m", "-d", "m/demo.tsv", "--max-steps", "2", "--device", "cpu", "--eval-steps", "0"];
    ok(d, &[&fit[..], &["-o", "r", "--recipe", "w4a4"]].concat());
    let answer = |model: &str, more: &[&str]| {
        let args =
            ["generate", "-m", model, "-p", "Hello", "--temp", "0", "--max-tokens", "8", "--json", "--device", "cpu"];
        let out = run(d, &[&args, more].concat());
        let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(out.status.success(), "{stderr}");
        (serde_json::from_slice::<Value>(&out.stdout).unwrap()["ids"].clone(), stderr)
    };
    let (trained, said) = answer("r/final", &[]);
    assert!(said.contains("nvfp4, activations nvfp4, as in training (w4a4)"), "{said}");
    for path in ["r", "r/final/model.dat"] {
        assert_eq!(answer(path, &[]).0, trained, "{path}");
    }
    assert_eq!(answer("r", &["--w4a4"]).0, trained);
    // So do a conversation and a server.
    std::fs::write(d.join("script.txt"), "Hello\n").unwrap();
    let chat = ["chat", "-m", "r", "--device", "cpu", "--temp", "0", "--max-tokens", "8", "--json", "--script"];
    let turn: Value = serde_json::from_str(&ok(d, &[&chat[..], &["script.txt"]].concat())).unwrap();
    assert_eq!(turn["ids"], trained);
    let server = Server::start(d, &["-m", "r", "--context", "256"]);
    let body = json!({"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 8});
    assert_eq!(server.ask("/v1/chat/completions", &body)["choices"][0]["message"]["content"], turn["text"]);
    drop(server);
    let (other, said) = answer("r", &["--w4a4", "false"]);
    assert!(said.contains("activations not quantized, unlike in training (w4a4)"), "{said}");
    assert_ne!(other, trained);
    // Without an export, the newest checkpoint answers, as the export did.
    std::fs::remove_dir_all(d.join("r/final")).unwrap();
    let (found, said) = answer("r", &[]);
    assert!(said.contains("r/checkpoint-2") && said.contains("as in training (w4a4)"), "{said}");
    assert_eq!(found, trained);
}

/// Ten turns, read by a session that keeps its cache, token by token, and all anew for each turn: three times, with the same
/// tokens each time. With a cache of 8-bit numbers, with weights in NVFP4, and with activations in NVFP4, too.
#[test]
fn every_way_to_read_a_conversation_gives_the_same_tokens() {
    for (recipe, packed) in [(Recipe::Bf16, false), (Recipe::W4, true), (Recipe::W4a4, true)] {
        same_in_every_way::<Cpu>(LinearSpec::new(recipe, Scaling::Two, Precision::F32).each_row(), packed);
    }
}

/// Where products and attention have kernels of their own, so that the bits of a token depend on its own sequence alone.
#[test]
fn every_way_to_read_a_conversation_gives_the_same_tokens_on_the_gpu() {
    fn on_cube<R: CubeRuntime>() {
        if !mma::supported(&R::client(&Default::default()), DType::BF16.into()) {
            return lacks(Feature::TensorCores);
        }
        for (recipe, precision, packed) in [
            (Recipe::Bf16, Precision::F32, false),
            (Recipe::Bf16, Precision::Bf16, false),
            (Recipe::W4, Precision::F32, true),
            (Recipe::W4, Precision::Bf16, true),
        ] {
            same_in_every_way::<Cube<R>>(LinearSpec::new(recipe, Scaling::Two, precision).each_row(), packed);
        }
    }
    on_gpu!(on_cube);
}

/// Reads conversations with the weights of the fixtures, or with their codes if `packed`.
fn same_in_every_way<B: Nvfp4Kernels>(spec: LinearSpec, packed: bool) {
    let dir = tempfile::tempdir().unwrap();
    for (fixture, format) in [
        ("tiny-tied", CacheFormat::Native),
        ("tiny-untied", CacheFormat::Native),
        ("tiny-tied", CacheFormat::E4m3),
        ("tiny-untied", CacheFormat::E4m3),
    ] {
        let folder = golden(&format!("hf-qwen3/{fixture}")).canonicalize().unwrap();
        let config = Qwen3Config::from_file(&folder.join("config.json")).unwrap();
        let codes = dir.path().join(fixture).join("model.dat");
        if packed && !codes.exists() {
            std::fs::create_dir(dir.path().join(fixture)).unwrap();
            let (from, to) = (folder.to_str().unwrap(), codes.to_str().unwrap());
            ok(dir.path(), &["convert", from, to, "--to", "dat", "--dtype", "nvfp4"]);
        }
        let weights = Container::open(if packed { &codes } else { &folder }).unwrap();
        let model: Qwen3<B> = weights::load(&weights, &config, spec, Purpose::Infer, &Default::default()).unwrap();
        assert_eq!(matches!(model.layers[0].mlp.up_proj, Nvfp4Linear::Packed(_)), packed);
        let model = model.with_cache_format(format);
        let label = format!("{fixture}, {format:?}, {} in {:?}", spec.recipe.name(), spec.precision);
        let capacity = 256.min(config.max_position_embeddings);
        let options = GenerateOptions { max_tokens: 6, sampling: Sampling::GREEDY, stop_ids: vec![], logprobs: None };
        let go = |_: Progress| ControlFlow::Continue(());
        let mut expected: Option<Vec<Vec<u32>>> = None;
        for mode in ["kept", "token by token", "anew"].repeat(3) {
            let mut session = Session::new(&model, capacity).unwrap();
            let (mut conversation, mut answers) = (Vec::new(), Vec::new());
            for turn in 0..10u32 {
                conversation.extend((0..5).map(|i| (turn * 31 + i * 17 + 3) % config.vocab_size as u32));
                if mode == "anew" {
                    session = Session::new(&model, capacity).unwrap();
                }
                if mode == "token by token" {
                    let nothing = GenerateOptions { max_tokens: 0, ..options.clone() };
                    for read in session.tokens() + 1..conversation.len() {
                        session.answer(&conversation[..read], &nothing, go).unwrap();
                    }
                }
                let cached = session.cached(&conversation);
                let ids = session.answer(&conversation, &options, go).unwrap().ids;
                match mode {
                    "kept" => assert!(cached + 6 >= conversation.len(), "{cached} of {} were kept", conversation.len()),
                    "anew" => assert_eq!(cached, 0),
                    _ => assert_eq!(cached + 1, conversation.len()),
                }
                conversation.extend(&ids);
                answers.push(ids);
            }
            let first = expected.get_or_insert_with(|| answers.clone());
            assert_eq!(&answers, first, "{label}, {mode}");
        }
        let answers = expected.unwrap();
        assert!(answers.iter().collect::<std::collections::BTreeSet<_>>().len() > 3, "{}", json!(answers));
    }
}
