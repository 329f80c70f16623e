//! Any bytes as a tokenizer.json, which then encodes a text. A panic of the tokenizer library becomes an error, and is no
//! finding.
#![no_main]

use model_qwen3::tokenizer::Tokenizer;
use std::sync::Once;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    static QUIET: Once = Once::new();
    // A panic that nobody catches still ends the process, because it cannot leave this function.
    QUIET.call_once(|| std::panic::set_hook(Box::new(|_| {})));
    if let Ok(tokenizer) = Tokenizer::from_file(&fuzz::file("tokenizer.json", bytes)) {
        let _ = tokenizer.encode("Hello, 你好!");
    }
});
