//! Any bytes as a config.json.
#![no_main]

use model_qwen3::config::Qwen3Config;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| drop(Qwen3Config::from_file(&fuzz::file("config.json", bytes))));
