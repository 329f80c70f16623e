//! `fit --demo`: the ordinary `fit` on files inside the program: a tiny Qwen3 shape, a byte-level BPE tokenizer with
//! Qwen's chat template, and 64 English and Chinese rows that teach it who it is. assets/demo/make_demo.py makes them.

use crate::{CliError, durable, outputs::is_taken, plan::dated_folder, settings::Layer};
use std::path::Path;

const FILES: [(&str, &[u8]); 5] = [
    ("config.json", include_bytes!("../../assets/demo/config.json")),
    ("generation_config.json", include_bytes!("../../assets/demo/generation_config.json")),
    ("tokenizer.json", include_bytes!("../../assets/demo/tokenizer.json")),
    ("tokenizer_config.json", include_bytes!("../../assets/demo/tokenizer_config.json")),
    ("demo.tsv", include_bytes!("../../assets/demo/demo.tsv")),
];

/// The folder that the files are written to, as the settings name it.
const FOLDER: &str = "runs/demo-files";

const SETTINGS: &str = include_str!("../../assets/demo/settings.toml");

/// Writes the demo's files to the folder runs/demo-files. A file that is there already stays.
///
/// # Errors
/// If a file there has other content than the demo's, or a file cannot be written.
pub fn unpack() -> Result<(), CliError> {
    let files = FILES.map(|(name, bytes)| (Path::new(FOLDER).join(name), bytes));
    let (there, missing): (Vec<_>, Vec<_>) = files.into_iter().partition(|(file, _)| is_taken(file));
    for (file, bytes) in there {
        if durable::digest(&file)?.1 != durable::digest_of(bytes) {
            return Err(CliError::Usage(format!(
                "--demo: {} is not the demo's own file, and would be replaced; rename it, or train on it with --data and \
                 --init-config",
                file.display()
            )));
        }
    }
    durable::make_folder(Path::new(FOLDER))?;
    missing.into_iter().try_for_each(|(file, bytes)| durable::write_bytes(&file, bytes).map(drop))
}

/// The demo's settings, with a new run folder.
pub fn settings() -> Layer {
    let mut settings = Layer::of_toml(SETTINGS).expect("the demo's settings are valid; a test reads them");
    settings.set("output_dir", dated_folder("demo").display().to_string());
    settings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_settings_are_valid_and_name_the_folder() {
        let settings = settings().over_defaults().unwrap();
        assert_eq!(settings.model.init_config.unwrap().parent(), Some(Path::new(FOLDER)));
        assert_eq!(settings.data.data[0].parent(), Some(Path::new(FOLDER)));
    }
}
