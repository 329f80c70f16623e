//! `generate` does what its flags say: the prompt reaches the model as the template, the raw text or standard input has
//! it, sampling keeps the tokens that its filters keep, and text streams without half a character.

use crate::support::{
    Cpu,
    files::{F32, command, demo_file, ok, refused, run, tiny_model_with_spread},
    golden,
    scripted::{STOP, scripted_model},
};
use backend_nvfp4::{LinearSpec, Recipe};
use model_qwen3::{
    config::Qwen3Config,
    container::Container,
    model::Qwen3,
    session::Session,
    tokenizer::Tokenizer,
    weights::{self, Purpose},
};
use serde_json::{Value, json};
use std::{
    collections::BTreeSet,
    io::{Read, Write},
    path::Path,
    process::Stdio,
};

/// Runs `generate --json` on the model in folder `m`.
fn generate(dir: &Path, more: &[&str]) -> Value {
    let mut args = vec!["generate", "-m", "m", "--device", "cpu", "--json"];
    args.extend(more);
    serde_json::from_str(&ok(dir, &args)).unwrap()
}

fn ids(answer: &Value) -> Vec<u32> {
    answer["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn demo_tokenizer() -> Tokenizer {
    Tokenizer::from_file(&demo_file("tokenizer.json")).unwrap()
}

/// A model of random weights that are large enough for its greedy answer to depend on every prompt token.
fn lively_model(dir: &Path) {
    tiny_model_with_spread(&dir.join("m"), true, 0.5);
}

const GREEDY: [&str; 4] = ["--temp", "0", "--max-tokens", "8"];

/// The greedy answer to a prompt with these flags, and the number of prompt tokens.
fn greedy(dir: &Path, prompt: &str, more: &[&str]) -> (Vec<u32>, u64) {
    let answer = generate(dir, &[&["-p", prompt][..], &GREEDY, more].concat());
    (ids(&answer), answer["prompt_tokens"].as_u64().unwrap())
}

/// A cache of 8-bit numbers rounds what was read: probabilities change, and not by much.
#[test]
fn a_cache_of_bytes_rounds_what_was_read() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model_with_spread(&d.join("m"), true, 0.1);
    let first = |format: &str| {
        let flags = ["-p", "One prompt of several words.", "--logprobs", "1", "--kv-cache-dtype", format];
        generate(d, &[&flags[..], &GREEDY].concat())["logprobs"][0]["top"][0]["logprob"].as_f64().unwrap()
    };
    let [auto, fp8, alias] = ["auto", "fp8", "fp8_e4m3"].map(first);
    assert!(fp8 == alias && (1e-6..0.5).contains(&(auto - fp8).abs()), "{auto} {fp8}");
    let out = run(d, &["generate", "-m", "m", "-p", "a", "--kv-cache-dtype", "int8"]);
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.code() == Some(2) && stderr.contains("int8") && stderr.contains("fp8"), "{stderr}");
    // On the CPU a model computes in f32.
    let out = run(d, &["generate", "-m", "m", "-p", "a", "--device", "cpu", "--kv-cache-dtype", "bf16"]);
    let stderr = String::from_utf8_lossy(&out.stderr);
    let refused = "--kv-cache-dtype bf16: the model computes in f32";
    assert!(out.status.code() == Some(2) && stderr.contains(refused), "{stderr}");
}

#[test]
fn a_raw_prompt_is_the_text_itself_and_a_plain_one_is_rendered_by_the_template() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    lively_model(d);
    let user = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(greedy(d, "hi", &[]), greedy(d, user, &["--raw"]));
    let raw = greedy(d, "hi", &["--raw"]);
    assert_eq!(raw.1, demo_tokenizer().encode("hi").unwrap().len() as u64);
    assert_ne!(raw.0, greedy(d, "hi", &[]).0);
    // A prompt may begin like a flag.
    for prompt in ["- hi", "-5", "--no-flag at_all"] {
        assert_eq!(greedy(d, prompt, &["--raw"]).1, demo_tokenizer().encode(prompt).unwrap().len() as u64, "{prompt}");
    }
}

#[test]
fn a_system_prompt_comes_first_and_changes_the_answer() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    lively_model(d);
    let rendered = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n";
    let with = greedy(d, "hi", &["--system-prompt", "Be brief."]);
    assert_eq!(with, greedy(d, rendered, &["--raw"]));
    assert_ne!(with.0, greedy(d, "hi", &[]).0);
    // A raw prompt has no place for a system message, and nothing in it turns thinking on.
    for flag in ["--system-prompt=x", "--thinking"] {
        let said = refused(d, &["generate", "-m", "m", "-p", "hi", "--device", "cpu", "--raw", flag], 2);
        assert!(said.contains("cannot be used with"), "{said}");
    }
}

#[test]
fn thinking_is_switched_off_by_an_empty_thought() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    lively_model(d);
    std::fs::copy(golden("chat/qwen3-thinking.jinja"), d.join("m/chat_template.jinja")).unwrap();
    let user = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n";
    let silent = format!("{user}<think>\n\n</think>\n\n");
    assert_eq!(greedy(d, "hi", &["--thinking=false"]), greedy(d, &silent, &["--raw"]));
    let thinking = greedy(d, user, &["--raw"]);
    assert_eq!(greedy(d, "hi", &["--thinking"]), thinking);
    assert_eq!(greedy(d, "hi", &[]), thinking, "a thinking model thinks by default");
}

#[test]
fn a_dash_reads_the_prompt_from_standard_input() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    lively_model(d);
    let expected = generate(d, &[&["-p", "你好\nworld"][..], &GREEDY].concat());
    // A byte-order mark and the last line break are no part of the prompt.
    for typed in ["你好\nworld", "你好\nworld\n", "\u{FEFF}你好\nworld\r\n"] {
        let args = [&["generate", "-m", "m", "--device", "cpu", "--json", "-p", "-"][..], &GREEDY].concat();
        let mut child =
            command(d, &args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(typed.as_bytes()).unwrap();
        let out = child.wait_with_output().unwrap();
        assert!(out.status.success());
        let answer: Value = serde_json::from_slice(&out.stdout).unwrap();
        assert_eq!(answer["prompt"], "你好\nworld", "{typed:?}");
        assert_eq!(ids(&answer), ids(&expected), "{typed:?}");
    }
}

/// Three tokens of nearly the same logit, after every token.
const CANDIDATES: [(u32, f32); 3] = [(40, 5.0), (41, 4.9), (42, 4.8)];

#[test]
fn top_k_keeps_the_k_most_likely_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    scripted_model(&d.join("m"), |_| CANDIDATES.to_vec());
    // So hot that every token of the vocabulary is nearly as likely as the next one.
    let drawn = |more: &[&str]| -> BTreeSet<u32> {
        let args = [&["-p", "a", "--raw", "--temp", "100", "--max-tokens", "40"][..], more].concat();
        ids(&generate(d, &args)).into_iter().collect()
    };
    assert_eq!(drawn(&["--top-k", "1"]), BTreeSet::from([40]));
    assert_eq!(drawn(&["--top-k", "2"]), BTreeSet::from([40, 41]));
    assert_eq!(drawn(&["--top-k", "3"]), BTreeSet::from([40, 41, 42]));
    assert!(drawn(&["--top-k", "0"]).len() > 10, "0 keeps every token");
    let of_card = drawn(&[]).len();
    assert!((10..=20).contains(&of_card), "Qwen3's model card keeps 20 tokens where no file says more: {of_card}");
    std::fs::write(d.join("m/generation_config.json"), r#"{"do_sample": true, "top_k": 2}"#).unwrap();
    assert_eq!(drawn(&[]), BTreeSet::from([40, 41]), "the model's own top-k is the default");
    assert_eq!(drawn(&["--top-k", "1"]), BTreeSet::from([40]), "a flag wins over the model's file");
    std::fs::write(d.join("m/generation_config.json"), r#"{"do_sample": true, "min_p": 1.0}"#).unwrap();
    assert_eq!(drawn(&[]), BTreeSet::from([40]), "the model's own min-p is the default");
    assert!(drawn(&["--min-p", "0"]).len() > 10);
}

#[test]
fn what_chooses_the_tokens_is_said_and_where_it_comes_from() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    lively_model(d);
    let said = |more: &[&str]| {
        let out =
            run(d, &[&["generate", "-m", "m", "-p", "a", "--max-tokens", "1", "--device", "cpu"][..], more].concat());
        assert!(out.status.success());
        let text = String::from_utf8_lossy(&out.stderr).into_owned();
        text.lines().find(|line| line.contains("by default")).unwrap().trim().to_owned()
    };
    assert_eq!(
        said(&[]),
        "sampling  temperature 0.7, top-p 0.8, top-k 20, min-p 0, repetition-penalty 1 by default, from generation_config.json"
    );
    // A flag is no default, and a greedy answer uses no filter.
    assert_eq!(
        said(&["--temp", "0"]),
        "sampling  temperature 0 by flag; repetition-penalty 1 by default, from generation_config.json"
    );
    assert!(said(&["--top-k", "5"]).starts_with("sampling  top-k 5 by flag; temperature 0.7, top-p 0.8, min-p 0, "));
    // Who asks for sampling and names no temperature means the neutral one.
    for (file, temperature) in [(r#"{"do_sample": true}"#, "1"), (r#"{"do_sample": false, "temperature": 0.7}"#, "0")] {
        std::fs::write(d.join("m/generation_config.json"), file).unwrap();
        let found = said(&[]);
        let rest = found.strip_prefix(&format!("sampling  temperature {temperature}"));
        assert!(rest.is_some_and(|rest| rest.starts_with([',', ' '])), "{file}: {found}");
    }
    std::fs::remove_file(d.join("m/generation_config.json")).unwrap();
    let card = "by default, from the model card of Qwen3";
    assert!(
        said(&[]).starts_with("sampling  temperature 0.7, top-p 0.8, top-k 20, min-p 0") && said(&[]).contains(card)
    );
    std::fs::copy(golden("chat/qwen3-thinking.jinja"), d.join("m/chat_template.jinja")).unwrap();
    assert!(
        said(&[]).starts_with("sampling  temperature 0.6, top-p 0.95, top-k 20, min-p 0") && said(&[]).contains(card)
    );
    assert!(said(&["--thinking", "false"]).starts_with("sampling  temperature 0.7, top-p 0.8"));
}

#[test]
fn several_answers_are_those_of_one_seed_after_another() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    lively_model(d);
    let drawn = |more: &[&str]| {
        ok(d, &[&["generate", "-m", "m", "--device", "cpu", "--temp", "1.5", "--max-tokens", "8"], more].concat())
    };
    let text = |seed: &str| drawn(&["-p", "hi", "--seed", seed]);
    let each = [text("5"), text("6"), text("7")];
    assert!(each[0] != each[1] && each[1] != each[2]);
    assert_eq!(
        drawn(&["-p", "hi", "--seed", "5", "--answers", "3"]),
        each.iter().map(|text| format!("{text}\n")).collect::<String>()
    );
    assert_eq!(drawn(&["-p", "hi", "--seed", "5", "--no-stream"]), each[0]);
    std::fs::write(d.join("p.txt"), "hi\nyou\n").unwrap();
    let rows = drawn(&["--prompts", "p.txt", "--seed", "5", "--answers", "3", "--batch-size", "4"]);
    let rows: Vec<Value> = rows.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let prompts: Vec<&str> = rows.iter().map(|row| row["prompt"].as_str().unwrap()).collect();
    assert_eq!(prompts, ["hi", "hi", "hi", "you", "you", "you"]);
    for (row, text) in rows.iter().zip(&each) {
        assert_eq!(format!("{}\n", row["text"].as_str().unwrap()), *text);
    }
    // The second number times two prompts is larger than any that a processor counts with.
    for (answers, reason) in [("0", "at least one answer"), ("9223372036854775808", "at most 1048576 answers")] {
        let out = run(d, &["generate", "-m", "m", "--device", "cpu", "--prompts", "p.txt", "--answers", answers]);
        let stderr = String::from_utf8_lossy(&out.stderr);
        let said = stderr.contains(&format!("--answers {answers}: ")) && stderr.contains(reason);
        assert!(out.status.code() == Some(2) && said, "{stderr}");
    }
}

/// A model that always answers "3" finds the number of a haystack where that is 3, and nowhere else.
#[test]
fn needles_are_counted_at_each_length_and_depth() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    let [three] = demo_tokenizer().encode("3").unwrap()[..] else { panic!("one token") };
    scripted_model(&d.join("m"), |token| vec![(if token == three { STOP } else { three }, 20.0)]);
    let flags = ["--lengths", "160,320", "--depths", "3", "--tries", "8", "--digits", "1", "--seed", "4"];
    let needle = [&["eval", "needle", "-m", "m", "--device", "cpu"][..], &flags].concat();
    ok(d, &[&needle[..], &["--write-rows", "rows.jsonl"]].concat());
    let rows = std::fs::read_to_string(d.join("rows.jsonl")).unwrap();
    // A file that is there already is not replaced.
    let said = refused(d, &[&needle[..], &["--write-rows", "rows.jsonl"]].concat(), 2);
    assert!(said.contains("--write-rows rows.jsonl: the file exists; choose another name"), "{said}");
    let answers: Vec<String> = rows
        .lines()
        .map(|row| serde_json::from_str::<Value>(row).unwrap()["messages"][1]["content"].as_str().unwrap().to_owned())
        .collect();
    let hits: Vec<usize> =
        answers.chunks(8).map(|tries| tries.iter().filter(|answer| *answer == "3").count()).collect();
    assert!(hits.len() == 6 && hits.iter().sum::<usize>() > 0, "{answers:?}");
    let found: Vec<Value> =
        ok(d, &[&needle[..], &["--json"]].concat()).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(found.len(), 2);
    for (row, (hits, length)) in found.iter().zip(hits.chunks(3).zip([160, 320])) {
        assert_eq!((row["length"].as_u64(), row["tries"].as_u64()), (Some(length), Some(24)));
        assert_eq!(row["found"].as_u64(), Some(hits.iter().sum::<usize>() as u64));
        for (depth, (found, place)) in row["depths"].as_array().unwrap().iter().zip(hits.iter().zip([0.0, 0.5, 1.0])) {
            assert_eq!((depth["found"].as_u64(), depth["depth"].as_f64()), (Some(*found as u64), Some(place)));
        }
    }
    let table = ok(d, &needle);
    assert!(table.contains("160 tokens  found") && table.contains("50%: "), "{table}");
    let preview = ok(d, &["data", "preview", "rows.jsonl", "-m", "m", "-n", "1"]);
    assert!(preview.contains(&format!("⟦{}", answers[0])), "{preview}");
    // All lengths are checked before the first is measured.
    let short = "--lengths 20: the needle and its question";
    for (flags, text) in [(["--lengths", "4096"], "at most 2048 tokens"), (["--lengths", "160,20"], short)] {
        let out = run(d, &[&["eval", "needle", "-m", "m", "--device", "cpu"][..], &flags].concat());
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.code() == Some(2) && said.contains(text) && out.stdout.is_empty(), "{said}");
    }
    // The text of the second length has a needle of its own, which is longer.
    let near = ["--lengths", "78,79", "--depths", "1", "--tries", "1", "--seed", "2"];
    let out = run(d, &[&["eval", "needle", "-m", "m", "--device", "cpu"][..], &near].concat());
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(said.contains("--lengths 79: the needle") && out.stdout.is_empty(), "{said}");
}

#[test]
fn the_same_seed_draws_the_same_answer_and_another_seed_another_one() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    scripted_model(&d.join("m"), |_| CANDIDATES.to_vec());
    let drawn = |seed: &str| {
        ids(&generate(d, &["-p", "a", "--raw", "--temp", "5", "--top-k", "3", "--max-tokens", "30", "--seed", seed]))
    };
    assert_eq!(drawn("1"), drawn("1"));
    assert_ne!(drawn("1"), drawn("2"));
}

#[test]
fn a_repetition_penalty_moves_each_seen_token_once() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    let prompt = "a";
    let [a] = demo_tokenizer().encode(prompt).unwrap()[..] else { panic!("one token") };
    let (b, c) = (a + 1, a + 2);
    let answer = |logits: [f32; 3], penalty: &str| {
        scripted_model(&d.join("m"), |_| vec![(a, logits[0]), (b, logits[1]), (c, logits[2])]);
        let args = ["-p", prompt, "--raw", "--temp", "0", "--max-tokens", "4", "--repetition-penalty", penalty];
        ids(&generate(d, &args))
    };
    assert_eq!(answer([3.0, 2.5, 1.0], "1"), [a, a, a, a]);
    // Token a stands in the prompt: 3.0 / 1.3 is below 2.5. Then both were seen, and a is above b again, for good.
    assert_eq!(answer([3.0, 2.5, 1.0], "1.3"), [b, a, a, a]);
    // A negative logit is multiplied: divided, it would rise.
    assert_eq!(answer([-1.0, -1.2, -2.0], "1.3"), [b, a, a, a]);
    assert_eq!(answer([3.0, 2.5, 2.4], "2"), [b, c, a, a]);
}

#[test]
fn an_answer_ends_at_the_stop_token_which_is_no_part_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    let [a] = demo_tokenizer().encode("a").unwrap()[..] else { panic!("one token") };
    scripted_model(&d.join("m"), |t| vec![(if t == a + 2 { STOP } else { (t + 1).min(STOP) }, 5.0)]);
    let answer = generate(d, &["-p", "a", "--raw", "--max-tokens", "9"]);
    assert_eq!((ids(&answer), answer["stop"].as_str()), (vec![a + 1, a + 2], Some("stop")));
    let answer = generate(d, &["-p", "a", "--raw", "--max-tokens", "1"]);
    assert_eq!((ids(&answer), answer["stop"].as_str()), (vec![a + 1], Some("length")));
}

/// Answers with the tokens of `text` over and over. Every token of it occurs once, because the last token is all that
/// the model knows.
fn singing_model(folder: &Path, text: &str) -> Vec<u32> {
    let song = demo_tokenizer().encode(text).unwrap();
    assert_eq!(song.iter().collect::<BTreeSet<_>>().len(), song.len(), "{text:?} repeats a token");
    assert!(song.len() > text.chars().count(), "{text:?} splits no character");
    scripted_model(folder, |t| {
        let at = song.iter().position(|&s| s == t).map_or(0, |at| (at + 1) % song.len());
        vec![(song[at], 5.0)]
    });
    song
}

#[test]
fn long_text_streams_in_whole_characters() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    for text in ["a😀語é", "漢bж𝄞", "z🦀жé"] {
        let song = singing_model(&d.join("m"), text);
        let rounds = 200 / song.len();
        let tokens = (rounds * song.len()).to_string();
        let args = ["generate", "-m", "m", "--device", "cpu", "-p", "hello", "--raw", "--max-tokens", &tokens];
        let mut child = command(d, &args).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let (mut shown, mut reads, mut buffer) = (Vec::new(), 0, [0; 4096]);
        let mut stdout = child.stdout.take().unwrap();
        loop {
            let n = stdout.read(&mut buffer).unwrap();
            if n == 0 {
                break;
            }
            // The program writes piece by piece, and a pipe hands over whole pieces.
            let piece = std::str::from_utf8(&buffer[..n]);
            assert!(piece.is_ok_and(|p| !p.contains('\u{FFFD}')), "half a character of {text:?} was shown");
            shown.extend(&buffer[..n]);
            reads += 1;
        }
        assert!(child.wait().unwrap().success());
        assert_eq!(String::from_utf8(shown).unwrap(), format!("{}\n", text.repeat(rounds)));
        assert!(reads > 5, "{text:?} came in {reads} pieces: text is shown as it grows");
        let answer = generate(d, &["-p", "hello", "--raw", "--max-tokens", &tokens]);
        assert_eq!(answer["text"], text.repeat(rounds));
    }
}

#[test]
fn an_answer_that_is_cut_within_a_character_shows_what_came_before() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    let song = singing_model(&d.join("m"), "a😀語é");
    // The text begins anew after 6 rounds; 3 more tokens are "a" and half of the next character.
    let tokens = (6 * song.len() + 3).to_string();
    let answer = generate(d, &["-p", "hello", "--raw", "--max-tokens", &tokens]);
    let text = answer["text"].as_str().unwrap();
    let rest = text.strip_prefix(&("a😀語é".repeat(6) + "a")).unwrap_or_else(|| panic!("{text}"));
    assert!(!rest.is_empty() && rest.chars().all(|c| c == '\u{FFFD}'), "{rest:?}");
    assert_eq!(ids(&answer).len(), 6 * song.len() + 3);
}

#[test]
fn an_answer_ends_in_front_of_a_stop_text() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    singing_model(&d.join("m"), "a😀語é");
    let sung = |stops: &[&str]| {
        let flags: Vec<&str> = stops.iter().flat_map(|stop| ["--stop", stop]).collect();
        let fixed = ["-p", "hello", "--raw", "--max-tokens", "60"];
        let answer = generate(d, &[&fixed[..], &flags].concat());
        let args = [&["generate", "-m", "m", "--device", "cpu"][..], &fixed, &flags].concat();
        assert_eq!(ok(d, &args), format!("{}\n", answer["text"].as_str().unwrap()), "what streams is the same");
        (answer["text"].as_str().unwrap().to_owned(), answer["stop"].as_str().unwrap().to_owned())
    };
    let ended = |text: &str| (text.to_owned(), "stop".to_owned());
    // Characters of several tokens, a text that ends one round and begins the next, and the first of two texts.
    assert_eq!(sung(&["語"]), ended("a😀"));
    assert_eq!(sung(&["éa😀"]), ended("a😀語"));
    assert_eq!(sung(&["é", "😀語"]), ended("a"));
    assert_eq!(sung(&["a"]), ended(""));
    let (text, stop) = sung(&["語x", "éaa"]);
    assert!(stop == "length" && text.starts_with("a😀語éa😀語éa"), "what only looks like a stop is shown: {text}");
    let empty = run(d, &["generate", "-m", "m", "-p", "x", "--device", "cpu", "--stop", ""]);
    assert_eq!(empty.status.code(), Some(2));
}

#[test]
fn logprobs_are_those_of_the_model_whatever_sampling_does() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    scripted_model(&d.join("m"), |_| CANDIDATES.to_vec());
    let likely: f64 = CANDIDATES.iter().map(|(_, logit)| f64::from(*logit).exp()).sum();
    let total = likely + (512.0 - 3.0) * (-9f64).exp();
    let expected = |id: u32| {
        let logit = CANDIDATES.iter().find(|(candidate, _)| *candidate == id).map_or(-9.0, |(_, logit)| *logit);
        f64::from(logit) - total.ln()
    };
    let near = |found: &Value| {
        let (id, logprob) = (found["id"].as_u64().unwrap() as u32, found["logprob"].as_f64().unwrap());
        assert!((logprob - expected(id)).abs() < 1e-3, "{found}, not {}", expected(id));
        assert_eq!(found["token"], demo_tokenizer().decode_all(&[id]).unwrap());
    };
    for more in [&["--temp", "0"][..], &["--temp", "5", "--top-k", "3", "--repetition-penalty", "2"]] {
        let args = [&["-p", "a", "--raw", "--max-tokens", "5", "--logprobs", "2"][..], more].concat();
        let answer = generate(d, &args);
        let logprobs = answer["logprobs"].as_array().unwrap();
        assert_eq!(logprobs.iter().map(|token| token["id"].as_u64().unwrap() as u32).collect::<Vec<_>>(), ids(&answer));
        for token in logprobs {
            near(token);
            let top = token["top"].as_array().unwrap();
            assert_eq!(top.iter().map(|t| t["id"].as_u64().unwrap()).collect::<Vec<_>>(), [40, 41]);
            top.iter().for_each(near);
        }
    }
    assert!(generate(d, &["-p", "a", "--raw", "--max-tokens", "1"])["logprobs"].is_null());
    let plain = run(d, &["generate", "-m", "m", "-p", "a", "--device", "cpu", "--logprobs", "2"]);
    assert_eq!(plain.status.code(), Some(2), "they are part of the JSON object");
}

/// Prompts of a file are answered together, and each as if it were alone.
#[test]
fn prompts_of_a_file_are_answered_as_if_each_were_alone() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model_with_spread(&d.join("m"), true, 0.3);
    let prompts = ["Hello", "你好，請介紹自己", "a b c d e f g h i j k l m n o p q r s t", "🎈", "1+1="];
    let sampled = ["--temperature", "1.2", "--seed", "9", "--max-tokens", "20", "--logprobs", "1", "--device", "cpu"];
    let alone: Vec<Value> = prompts
        .iter()
        .map(|p| {
            let words = [&["generate", "-m", "m", "--json", "-p", p], &sampled[..]].concat();
            serde_json::from_str(&ok(d, &words)).unwrap()
        })
        .collect();
    std::fs::write(d.join("p.txt"), prompts.join("\n\n") + "\n").unwrap();
    // The content of some messages comes in parts.
    let content = |p: &str| if p.is_ascii() { json!(p) } else { json!([{"type": "text", "text": p}]) };
    let row = |p: &str| json!({"messages": [{"role": "user", "content": content(p)}]}).to_string();
    std::fs::write(d.join("p.jsonl"), prompts.map(row).join("\n")).unwrap();
    // Fewer places than prompts, so that prompts are read while other answers are made.
    for (file, places) in [("p.txt", "1"), ("p.txt", "2"), ("p.jsonl", "8")] {
        let words = [&["generate", "-m", "m", "--prompts", file, "--batch-size", places], &sampled[..]].concat();
        let lines = ok(d, &words);
        let found: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(found.len(), prompts.len());
        for (found, alone) in found.iter().zip(&alone) {
            for key in ["ids", "text", "stop", "prompt_tokens"] {
                assert_eq!(found[key], alone[key], "{file}, {places} at once: {key}");
            }
            for (a, b) in found["logprobs"].as_array().unwrap().iter().zip(alone["logprobs"].as_array().unwrap()) {
                assert_eq!(a, b, "{file}, {places} at once");
            }
        }
    }
    // The extension says what a file is, in upper case, too.
    std::fs::copy(d.join("p.jsonl"), d.join("P.JSONL")).unwrap();
    let upper = ok(d, &["generate", "-m", "m", "--device", "cpu", "--prompts", "P.JSONL", "--max-tokens", "1"]);
    assert!(serde_json::from_str::<Value>(upper.lines().next().unwrap()).unwrap()["prompt"].is_array(), "{upper}");
    for name in ["p.json", "p.Parquet", "p.arrow"] {
        std::fs::write(d.join(name), "[\n{\"prompt\": \"a\"}\n]\n").unwrap();
        let stderr = refused(d, &["generate", "-m", "m", "--device", "cpu", "--prompts", name], 2);
        assert!(stderr.contains(&format!("--prompts {name}: give a .jsonl file, or a text")), "{stderr}");
    }
    // The answers of training rows would be read as a part of the prompts.
    let stderr = refused(d, &["generate", "-m", "m", "--device", "cpu", "--prompts", "m/demo.tsv"], 2);
    assert!(
        stderr.contains("m/demo.tsv: its rows have answers") && stderr.contains("cut -f 1 m/demo.tsv >"),
        "{stderr}"
    );
    // Every prompt is checked before the first one is answered.
    let long = json!({"prompt": "word ".repeat(3000)}).to_string();
    for (row, reason) in [
        ("{\"prompt\": \"\"}", "the prompt has no tokens; write one, or leave out --raw"),
        (long.as_str(), "the model takes at most 2048 with its answer; shorten the prompt"),
    ] {
        std::fs::write(d.join("e.jsonl"), format!("{{\"prompt\": \"a\"}}\n{row}\n")).unwrap();
        let out = run(d, &["generate", "-m", "m", "--device", "cpu", "--prompts", "e.jsonl", "--raw"]);
        let stderr = String::from_utf8_lossy(&out.stderr);
        let said = stderr.contains("--prompts, line 2: ") && stderr.contains(reason);
        assert!(out.status.code() == Some(2) && said && out.stdout.is_empty(), "{stderr}");
    }
    // A conversation has one system message: that of its row, or that of the flag.
    let with_system = json!({"messages": [{"role": "system", "content": "b"}, {"role": "user", "content": "a"}]});
    std::fs::write(d.join("s.jsonl"), with_system.to_string()).unwrap();
    let system = ["generate", "-m", "m", "--device", "cpu", "--prompts", "s.jsonl", "--system-prompt", "c"];
    let stderr = refused(d, &system, 2);
    assert!(stderr.contains("--prompts, line 1: the row has a system message; leave out --system-prompt"), "{stderr}");
    let out = run(d, &[&system[..7], &["--max-tokens", "1"]].concat());
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() && stderr.contains("1 answer · 1 answer token in "), "{stderr}");
    for (content, message) in [
        ("", "no prompt"),
        ("{\"prompt\": 1}", "p.jsonl:1: a row needs"),
        ("{\"prompt\": \"a\"}\n[]", "p.jsonl:2: a row needs"),
        ("{\"prompt\": \"a\"}\n{\"prompt\": \"b\", \"max_tokens\": 1}", "p.jsonl:2: the key \"max_tokens\" of a row"),
        ("{\"messages\": [1]}", "p.jsonl:1: message 1: "),
        ("{\"messages\": [{\"role\": \"weird\", \"content\": \"a\"}]}", "p.jsonl:1: message 1: the role \"weird\""),
        ("{\"messages\": [{\"role\": \"user\", \"content\": 5}]}", "p.jsonl:1: message 1: its content"),
    ] {
        std::fs::write(d.join("p.jsonl"), content).unwrap();
        let out = run(d, &["generate", "-m", "m", "--device", "cpu", "--prompts", "p.jsonl"]);
        let stderr = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.code() == Some(3) && stderr.contains(message), "{content}: {stderr}");
    }
}

/// The loss of sequences of 24 tokens, each token read by itself, and how many tokens were predicted.
fn token_by_token(model: &Qwen3<Cpu>, ids: &[u32]) -> (f64, u32) {
    let (mut sum, mut count) = (0.0, 0);
    for sequence in ids.chunks(24) {
        let mut session = Session::new(model, 24).unwrap();
        for pair in sequence.windows(2) {
            let logits = session.read(&pair[..1]).unwrap();
            let all: f64 = logits.iter().map(|x| f64::from(*x).exp()).sum();
            sum -= f64::from(logits[pair[1] as usize]) - all.ln();
            count += 1;
        }
    }
    (sum, count)
}

/// The loss of a text is the mean of the negative logarithms of its tokens' probabilities, each after those before it.
#[test]
fn the_loss_of_a_text_is_that_of_its_tokens_one_by_one() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model_with_spread(&d.join("m"), true, 0.1);
    let text = "One line of text.\nAnd a second one, 還有中文 🎈.\n".repeat(2);
    std::fs::write(d.join("t.txt"), &text).unwrap();
    let mut ids = demo_tokenizer().encode(&text).unwrap();
    ids.extend(demo_tokenizer().id("<|endoftext|>"));

    let config = Qwen3Config::from_file(&d.join("m/config.json")).unwrap();
    let weights = Container::open(&d.join("m")).unwrap();
    let model: Qwen3<Cpu> = weights::load(&weights, &config, F32, Purpose::Infer, &Default::default()).unwrap();
    let (sum, count) = token_by_token(&model, &ids);
    let eval = ["eval", "loss", "-m", "m", "-d", "t.txt", "--max-seq-length", "24", "--json", "--device", "cpu"];
    let found: Value = serde_json::from_str(&ok(d, &eval)).unwrap();
    let (loss, expected) = (found["loss"].as_f64().unwrap(), sum / f64::from(count));
    assert!((loss - expected).abs() < 1e-5, "{loss} {expected}");
    assert_eq!(
        (found["supervised_tokens"].as_i64(), found["tokens"].as_i64()),
        (Some(count.into()), Some(ids.len() as i64))
    );
    assert!((found["perplexity"].as_f64().unwrap() - loss.exp()).abs() < 1e-9);

    // Several sequences at once, and under recipes: bf16 leaves f32 weights as they are, and the others quantize them, each
    // in its own way.
    let recipes = ["bf16", "w4", "w4a4", "nvfp4"].map(|recipe| ["--recipe", recipe]).concat();
    let words = [&eval[..], &recipes, &["--batch-size", "4"]].concat();
    let lines: Vec<Value> = ok(d, &words).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let losses: Vec<f64> = lines.iter().map(|line| line["loss"].as_f64().unwrap()).collect();
    assert!((losses[0] - expected).abs() < 1e-5, "{losses:?} {expected}");
    assert!(losses.windows(2).all(|pair| (pair[0] - pair[1]).abs() > 1e-5), "{losses:?}");

    // With quantized activations `eval loss` measures what `generate` runs, however many sequences are computed at once.
    std::fs::create_dir(d.join("p")).unwrap();
    ok(d, &["convert", "m", "p/model.dat", "--to", "dat", "--dtype", "nvfp4"]);
    let weights = Container::open(&d.join("p/model.dat")).unwrap();
    let spec = LinearSpec { recipe: Recipe::W4a4, ..F32 };
    let model: Qwen3<Cpu> = weights::load(&weights, &config, spec, Purpose::Infer, &Default::default()).unwrap();
    let (sum, count) = token_by_token(&model, &ids);
    for rows in ["1", "4"] {
        let words = ["eval", "loss", "-m", "p", "-d", "t.txt", "--max-seq-length", "24", "--json", "--device", "cpu"];
        let line = ok(d, &[&words[..], &["--w4a4", "--batch-size", rows]].concat());
        let found = serde_json::from_str::<Value>(&line).unwrap()["loss"].as_f64().unwrap();
        let expected = sum / f64::from(count);
        assert!((found - expected).abs() < 1e-4, "{rows} at a time: {found} {expected}");
    }
    // Weights that are NVFP4 already keep their values under every recipe.
    let words = ["eval", "loss", "-m", "p", "-d", "t.txt", "--max-seq-length", "24", "--json", "--device", "cpu"];
    let of = |flags: &[&str]| -> Vec<f64> {
        let lines = ok(d, &[&words[..], flags].concat());
        lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["loss"].as_f64().unwrap()).collect()
    };
    let found = of(&["--recipe", "bf16", "--recipe", "w4", "--recipe", "w4a4"]);
    let [exact, rounded] = [of(&[])[0], of(&["--w4a4"])[0]];
    assert!((found[0] - exact).abs() < 1e-4 && (found[1] - exact).abs() < 1e-6, "{found:?} {exact}");
    assert!((found[2] - rounded).abs() < 1e-6 && (rounded - exact).abs() > 1e-5, "{found:?} {exact} {rounded}");
}

/// A row in which the loss counts nothing does not change the mean, and a note says how many such rows there are.
#[test]
fn rows_in_which_the_loss_counts_nothing_are_said() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model_with_spread(&d.join("m"), true, 0.1);
    let row = |(content, weight): (&str, u32)| {
        let answer = json!({"role": "assistant", "content": content, "weight": weight});
        json!({"messages": [{"role": "user", "content": "a"}, answer]}).to_string() + "\n"
    };
    let loss = |name: &str, rows: [(&str, u32); 2], note: Option<&str>| {
        std::fs::write(d.join(name), rows.map(row).concat()).unwrap();
        let out = run(d, &["eval", "loss", "-m", "m", "-d", name, "--json", "--device", "cpu"]);
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(out.status.success(), "{said}");
        assert_eq!(said.lines().find(|line| line.starts_with("note: ")), note, "{name}");
        serde_json::from_slice::<Value>(&out.stdout).unwrap()["loss"].as_f64().unwrap()
    };
    let all = loss("all.jsonl", [("b", 1), ("b", 1)], None);
    let some = loss("some.jsonl", [("b", 1), ("Other words.", 0)], Some("note: the loss counts nothing in 1 row"));
    assert!((all - some).abs() < 1e-5, "{all} {some}");
}

/// Weights that are finite and too large give NaN, which is no failure of the device.
#[test]
fn a_model_that_computes_nan_is_broken() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    // The logit of token 1 is 0 times a number beyond the largest.
    scripted_model(&d.join("m"), |_| vec![(1, 0.0)]);
    let file = d.join("m/model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let place = {
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let norm = tensors.tensor("model.norm.weight").unwrap().data().as_ptr_range();
        let start = bytes.as_ptr() as usize;
        norm.start as usize - start..norm.end as usize - start
    };
    bytes[place].chunks_mut(4).for_each(|value| value.copy_from_slice(&f32::MAX.to_le_bytes()));
    std::fs::write(&file, bytes).unwrap();
    let out = run(d, &["generate", "-m", "m", "-p", "a", "--device", "cpu"]);
    let error = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.code() == Some(6) && error.contains("the model computed NaN"), "{error}");
}

/// From the start of the program to the first byte of the answer, on the CPU. The fastest of some runs counts: other tests take
/// time on the same cores.
#[test]
fn the_first_token_of_the_demo_model_comes_within_half_a_second() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    ok(d, &["fit", "--demo", "--max-steps", "1", "--device", "cpu", "-o", "r"]);
    let args = ["generate", "-m", "r", "-p", "Who are you?", "--temp", "0", "--max-tokens", "4", "--device", "cpu"];
    let once = || {
        let began = std::time::Instant::now();
        let mut child = command(d, &args).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        child.stdout.take().unwrap().read_exact(&mut [0]).unwrap();
        let took = began.elapsed();
        // What comes behind the first byte has no reader any more.
        let _ = child.wait();
        took
    };
    let fastest = (0..8).map(|_| once()).min().unwrap();
    eprintln!("first byte after {fastest:?}");
    assert!(fastest.as_secs_f64() <= 0.5, "{fastest:?}");
}
