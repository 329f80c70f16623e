//! The outputs that only the record of a run names. Whoever made a run folder chose the paths in its record. So a resumed run
//! replaces a file outside its folder only if the user has named the file, or the run has written it.

use super::{
    checkpoint::{CONFIG, FINAL},
    results::Results,
};
use crate::{
    CliError,
    durable::{self, FileRecord},
    report,
    settings::Layer,
};
use model_qwen3::file;
use serde::{Deserialize, de::IgnoredAny};
use std::path::{Path, PathBuf};

/// Largest memory report that is looked at: a sample has 250 bytes.
const LARGEST_REPORT: u64 = 256 << 20;

/// Refuses to resume a run if it would replace the file `named`, which only its record names, by its memory report.
///
/// # Errors
/// If it would.
pub fn check_memory_report(named: Option<&Path>) -> Result<(), CliError> {
    match named.filter(|file| file.exists() && !is_memory_report(file)) {
        Some(file) => {
            let shown = file.display();
            let text = "only the run's record names this file, and it is no memory report; give the flag to replace it";
            Err(CliError::Usage(format!("--vram-report {shown}: {text}, or give another file")))
        }
        None => Ok(()),
    }
}

/// Renames a file in whose place `run` will export its model, unless the run has exported that file.
///
/// # Errors
/// If the record of the run cannot be read, or the file cannot be renamed.
pub fn set_aside(file: &Path, run: &Path) -> Result<(), CliError> {
    if !file.exists() || is_export(file, run)? {
        return Ok(());
    }
    let aside = free_name_aside(file);
    durable::rename(file, &aside)?;
    report::line(format!("renamed {} to {}: it is not what this run exported", file.display(), aside.display()));
    Ok(())
}

/// Whether a file is what the run has exported: as its record says, or, if it was killed before it wrote that, as in `final`. If
/// the run is a copy of another one that is still there, the file is that one's.
fn is_export(file: &Path, run: &Path) -> Result<bool, CliError> {
    if is_copy(run) {
        return Ok(false);
    }
    let Ok(found) = FileRecord::of(file) else { return Ok(false) };
    let recorded = Results::whole(run)?.and_then(|results| results.output_dat);
    Ok(recorded.as_ref() == Some(&found) || durable::lists(&run.join(FINAL), &found))
}

/// Whether a run is a copy of another one that is still there: its settings name the folder of that one. Once the copy is resumed,
/// they name its own.
fn is_copy(run: &Path) -> bool {
    let settings = Layer::of_file(&run.join(CONFIG));
    let named = settings.ok().and_then(|settings| settings.get("output_dir")?.as_str().map(PathBuf::from));
    let of = |folder: &Path| folder.canonicalize().ok();
    named.and_then(|named| of(&named)).is_some_and(|named| of(run) != Some(named))
}

/// Whether a file is a memory report, which a run writes anew.
fn is_memory_report(file: &Path) -> bool {
    #[derive(Deserialize)]
    struct Report {
        #[serde(rename = "Pid")]
        _pid: IgnoredAny,
        #[serde(rename = "CreatedUtc")]
        _created: IgnoredAny,
        #[serde(rename = "Samples")]
        _samples: IgnoredAny,
    }
    let text = file::read_text(file, LARGEST_REPORT, "");
    // A list of three values would also be read as a report.
    let is_report = |text: &str| text.trim_start().starts_with('{') && serde_json::from_str::<Report>(text).is_ok();
    text.is_ok_and(|text| is_report(&text))
}

/// A name beside a file that no other one has.
fn free_name_aside(file: &Path) -> PathBuf {
    let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
    (1..)
        .map(|number| file.with_file_name(format!("{name}.kept-{number}")))
        .find(|aside| !aside.exists())
        .expect("a folder holds finitely many names")
}
