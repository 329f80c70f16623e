//! Any bytes as a safetensors file.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fuzz::read_all(&fuzz::file("a.safetensors", bytes)));
