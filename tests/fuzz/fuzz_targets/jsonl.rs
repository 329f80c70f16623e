//! Any bytes as training rows, with the demo's tokenizer.
#![no_main]

use model_qwen3::config::Qwen3Config;
use std::{path::Path, sync::OnceLock};
use train_cli::{
    data::format::RowOptions,
    data::read::{self, DataOptions},
    model_files::TextFiles,
    settings::{LossOn, Overlong},
};

const OPTIONS: DataOptions =
    DataOptions { format: None, loss_on: LossOn::Assistant, max_seq_length: 64, overlong: Overlong::Split, rows: RowOptions { separator: None, weight: None } };

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    static TEXT: OnceLock<TextFiles> = OnceLock::new();
    let text = TEXT.get_or_init(|| {
        let demo = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../train-cli/assets/demo"));
        let config = Qwen3Config::from_file(&demo.join("config.json")).expect("the demo has a config");
        TextFiles::open(demo, &config).expect("the demo has a tokenizer")
    });
    let _ = read::load(&[fuzz::file("a.jsonl", bytes)], text, &OPTIONS);
});
