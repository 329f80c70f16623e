//! `fit --demo`: the ordinary `fit` on files that travel inside the binary: a tiny Qwen3 shape, a
//! byte-level BPE tokenizer with Qwen's chat template, and 64 English and Chinese who-are-you rows.
//! assets/demo/make_demo.py makes them.

use crate::{
    CliError,
    args::{FitArgs, StateArg},
    device::DeviceChoice,
    durable,
};
use std::path::Path;

const FILES: [(&str, &[u8]); 5] = [
    ("config.json", include_bytes!("../../assets/demo/config.json")),
    ("generation_config.json", include_bytes!("../../assets/demo/generation_config.json")),
    ("tokenizer.json", include_bytes!("../../assets/demo/tokenizer.json")),
    ("tokenizer_config.json", include_bytes!("../../assets/demo/tokenizer_config.json")),
    ("demo.tsv", include_bytes!("../../assets/demo/demo.tsv")),
];

/// What the demo shows besides an ordinary run.
#[derive(Debug, Clone)]
pub struct Demo {
    /// Prompts answered before and after.
    pub prompts: Vec<String>,
}

/// Writes the demo's files below `runs/` and fills in what the flags leave open.
///
/// # Errors
/// If writing fails.
pub fn unpack(flags: &mut FitArgs) -> Result<Demo, CliError> {
    let folder = Path::new("runs/demo-files");
    durable::make_folder(folder)?;
    for (name, bytes) in FILES {
        durable::write_bytes(&folder.join(name), bytes)?;
    }
    if flags.model.is_none() {
        flags.init_config.get_or_insert(folder.join("config.json"));
    }
    flags.data.get_or_insert(vec![folder.join("demo.tsv")]);
    flags.device.get_or_insert(DeviceChoice::Cpu);
    flags.learning_rate.get_or_insert(2e-3);
    flags.batch_size.get_or_insert(8);
    flags.gradient_accumulation_steps.get_or_insert(1);
    flags.num_train_epochs.get_or_insert(8.0);
    flags.optimizer_state_mode.get_or_insert(StateArg::F32);
    flags.val_split.get_or_insert(0.06);
    flags.eval_steps.get_or_insert(20);
    flags.save_steps.get_or_insert(30);
    flags.logging_steps.get_or_insert(5);
    let time = jiff::Timestamp::now().strftime("%Y%m%dT%H%M%SZ").to_string();
    flags.output_dir.get_or_insert_with(|| Path::new("runs").join(format!("{time}_demo")));
    Ok(Demo { prompts: vec!["Who are you?".into(), "你是誰？".into()] })
}
