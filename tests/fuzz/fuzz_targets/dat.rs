//! Any bytes as a `.dat` file.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fuzz::read_all(&fuzz::file("a.dat", bytes)));
