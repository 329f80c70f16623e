//! Any bytes as a tokenizer.json, which then encodes a text.
#![no_main]

use model_qwen3::tokenizer::Tokenizer;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(tokenizer) = Tokenizer::from_file(&fuzz::file("tokenizer.json", bytes)) {
        let _ = tokenizer.encode("Hello, 你好!");
    }
});
