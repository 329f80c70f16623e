//! Chat templates, token ids and decoded text equal those of Hugging Face, and a stream of tokens shows the same text.

use crate::support::{files::real_tokenizer, golden_bytes};
use model_qwen3::{
    chat_template::{ChatTemplate, RenderOptions},
    tokenizer::{TextStream, Tokenizer},
};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;

#[test]
fn chat_templates_render_as_hugging_face_does() {
    let template = |name: &str| {
        let source = golden_bytes(&format!("chat/qwen3-{name}.jinja"));
        ChatTemplate::new(String::from_utf8(source).unwrap()).unwrap()
    };
    let (instruct, thinking) = (template("instruct-2507"), template("thinking"));
    let cases: Vec<Value> = serde_json::from_slice(&golden_bytes("chat/chat.json")).unwrap();
    assert!(cases.len() > 100);
    for case in &cases {
        let template = if case["template"] == "thinking" { &thinking } else { &instruct };
        let options = RenderOptions {
            tools: Some(&case["tools"]).filter(|t| !t.is_null()),
            add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap(),
            enable_thinking: case["enable_thinking"].as_bool(),
        };
        let text = template.render(case["messages"].as_array().unwrap(), options).unwrap();
        assert_eq!(text, case["expected"].as_str().unwrap(), "{} of {}", case["name"], case["template"]);
    }
}

#[test]
fn the_real_tokenizer_gives_hugging_faces_ids() {
    let dir = tempfile::tempdir().unwrap();
    let path = real_tokenizer(dir.path());
    let golden: Value = serde_json::from_slice(&golden_bytes("tokenizer/encodings.json")).unwrap();
    let digest: String = Sha256::digest(std::fs::read(&path).unwrap()).iter().map(|b| format!("{b:02x}")).collect();
    assert_eq!(golden["tokenizer_sha256"], digest);
    let tokenizer = Tokenizer::from_file(&path).unwrap();
    for case in golden["encodings"].as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        let ids: Vec<u32> = case["ids"].as_array().unwrap().iter().map(|i| i.as_u64().unwrap() as u32).collect();
        assert_eq!(tokenizer.encode(text).unwrap(), ids, "{text:?}");

        // A stream shows the same text piece by piece and never half a character.
        let mut stream = TextStream::default();
        let mut shown = String::new();
        for id in &ids {
            let piece = stream.push(*id, &tokenizer).unwrap();
            assert!(!piece.contains('\u{FFFD}') || text.contains('\u{FFFD}'), "{text:?} showed {piece:?}");
            shown += &piece;
        }
        shown += &stream.finish(&tokenizer).unwrap();
        assert_eq!(shown, tokenizer.decode(&ids).unwrap(), "{text:?}");

        // So do the bytes of its tokens.
        let bytes: Vec<u8> = ids.iter().flat_map(|id| tokenizer.bytes(*id).unwrap()).collect();
        assert_eq!(String::from_utf8(bytes).unwrap(), tokenizer.decode_all(&ids).unwrap(), "{text:?}");
    }
    // Qwen3's first tokens are the 256 bytes.
    let single: BTreeSet<u8> = (0..256).flat_map(|id| tokenizer.bytes(id).unwrap()).collect();
    assert_eq!(single.len(), 256);
    let names = ["<|im_end|>", "<think>"].map(|name| tokenizer.id(name).unwrap());
    assert_eq!(names.map(|id| tokenizer.bytes(id)), [b"<|im_end|>".to_vec(), b"<think>".to_vec()].map(Some));
    assert_eq!(names.map(|id| tokenizer.is_special(id)), [true, false]);
    assert_eq!(tokenizer.bytes(tokenizer.vocab_size() as u32), None);
}

/// The file needs no more memory than a hostile one may take, also without the spaces that make it twice as long.
#[test]
fn the_shortest_form_of_the_real_tokenizer_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = real_tokenizer(dir.path());
    let ids = |path| Tokenizer::from_file(path).unwrap().encode("Who are you?").unwrap();
    let (long, text) = (ids(&path), std::fs::read_to_string(&path).unwrap());
    let short = serde_json::from_str::<Value>(&text).unwrap().to_string();
    assert!(short.len() < text.len() * 2 / 3, "{} of {} bytes", short.len(), text.len());
    std::fs::write(&path, short).unwrap();
    assert_eq!(ids(&path), long);
}

/// A byte that begins or continues a character, again and again, ends none. The stream shows it all the same: otherwise it would
/// decode all tokens for each one.
#[test]
fn bytes_of_characters_that_never_end_are_shown() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = Tokenizer::from_file(&real_tokenizer(dir.path())).unwrap();
    let unfinished = |id: &u32| tokenizer.decode(&[*id]).is_ok_and(|text| text == "\u{FFFD}");
    let ids: Vec<u32> = (0..256).filter(unfinished).collect();
    assert!(ids.len() > 100, "{ids:?}");
    for id in ids {
        let mut stream = TextStream::default();
        let mut shown = Vec::new();
        for _ in 0..1000 {
            shown.push(stream.push(id, &tokenizer).unwrap());
        }
        assert!(shown.iter().filter(|piece| !piece.is_empty()).count() >= 5, "token {id}");
        // A text that goes on is shown again.
        stream.push(9707, &tokenizer).unwrap();
        let piece = stream.push(1879, &tokenizer).unwrap();
        assert_eq!(piece, tokenizer.decode(&[1879]).unwrap(), "token {id}");
    }
}
