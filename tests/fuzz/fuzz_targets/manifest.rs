//! Any bytes as the manifest of a folder with one other file.
#![no_main]

use train_cli::durable;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    fuzz::file("config.json", b"{}");
    let path = fuzz::file("manifest.json", bytes);
    let _ = durable::verify(path.parent().expect("the file is in a folder"));
});
