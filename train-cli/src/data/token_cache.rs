//! Tokenised rows on disk: `--token-cache DIR` keeps what [`data::load`] makes of training files, and later runs read
//! that instead. A file's name is a digest of everything that decides its content: the files, the text side of the
//! model, the options. A file that is damaged is made again.
//!
//! The file is safetensors: `ids` u32 and `supervised` u8 of all tokens, `lengths` and `files` u32 a sample,
//! `prompts` u8 and `prompt_lengths` u32; its metadata hold the data report and a digest of the tensors.

use crate::{
    CliError,
    data::read::{self as data, DataOptions, DataReport, Sample},
    durable,
    model_files::TextFiles,
    plan::Plan,
    report,
};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use sha2::{Digest, Sha256};
use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

/// Of the format and of how rows become tokens: a change of either makes older files unread.
const VERSION: u32 = 1;

/// The samples of `paths`, from the plan's cache if they are in it; puts them there if not.
///
/// # Errors
/// As [`data::load`]; or if the cache cannot be written.
pub fn load(
    plan: &Plan,
    paths: &[PathBuf],
    text: &TextFiles,
    options: DataOptions,
) -> Result<(Vec<Sample>, DataReport), CliError> {
    // A pipe can be read once, and not for a digest.
    let files = paths.iter().all(|path| path.is_file());
    let Some(folder) = plan.settings.data.token_cache.as_ref().filter(|_| files) else {
        return data::load(paths, text, options);
    };
    let file = folder.join(format!("tokens-{}.safetensors", key(plan, paths, text, options)?));
    match std::fs::read(&file) {
        Ok(bytes) => match parsed(&bytes) {
            Some(found) => {
                report::line(format!("{:>11}  from {}", "tokens", file.display()));
                return Ok(found);
            }
            None => report::line(format!("{:>11}  {} is damaged: made again", "tokens", file.display())),
        },
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
        Err(e) => return Err(CliError::io(&file)(e)),
    }
    let made = data::load(paths, text, options)?;
    std::fs::create_dir_all(folder).map_err(CliError::io(folder))?;
    write(&file, &made)?;
    report::line(format!("{:>11}  kept in {}", "tokens", file.display()));
    Ok(made)
}

fn key(plan: &Plan, paths: &[PathBuf], text: &TextFiles, options: DataOptions) -> Result<String, CliError> {
    let stops = &text.stop_ids;
    let mut parts = format!("{VERSION} {} {options:?} {stops:?}", env!("CARGO_PKG_VERSION"));
    for path in paths {
        // A file that is not there is told of by whoever reads it.
        let digest = durable::digest(path).map(|(_, digest)| digest).unwrap_or_default();
        parts += &format!("\n{:?} {digest}", path.extension());
    }
    for path in plan.companions.text_files() {
        parts += &format!("\n{}", durable::digest(&path).map_err(CliError::io(&path))?.1);
    }
    Ok(durable::digest_of(parts.as_bytes())[..16].to_owned())
}

fn write(file: &Path, (samples, found): &(Vec<Sample>, DataReport)) -> Result<(), CliError> {
    let words = |values: &mut dyn Iterator<Item = u32>| values.flat_map(u32::to_le_bytes).collect::<Vec<u8>>();
    let tensors = [
        ("ids", Dtype::U32, words(&mut samples.iter().flat_map(|s| &s.ids).copied())),
        ("supervised", Dtype::U8, samples.iter().flat_map(|s| &s.supervised).map(|&s| u8::from(s)).collect()),
        ("lengths", Dtype::U32, words(&mut samples.iter().map(|s| s.ids.len() as u32))),
        ("files", Dtype::U32, words(&mut samples.iter().map(|s| s.file as u32))),
        ("prompts", Dtype::U8, samples.iter().flat_map(|s| s.prompt.bytes()).collect()),
        ("prompt_lengths", Dtype::U32, words(&mut samples.iter().map(|s| s.prompt.len() as u32))),
    ];
    let mut digest = Sha256::new();
    tensors.iter().for_each(|(_, _, bytes)| digest.update(bytes));
    let metadata = HashMap::from([
        ("report".to_owned(), serde_json::to_string(found).expect("plain data serialises")),
        ("sha256".to_owned(), durable::hex(&digest.finalize())),
    ]);
    let views = tensors.iter().map(|(name, dtype, bytes)| {
        let width = if *dtype == Dtype::U32 { 4 } else { 1 };
        (*name, TensorView::new(*dtype, vec![bytes.len() / width], bytes).expect("as long as its shape says"))
    });
    let bytes = safetensors::serialize(views, Some(metadata)).expect("six flat tensors serialise");
    durable::write_bytes(file, &bytes).map(|_| ())
}

/// What a file holds; `None` if it is not what was written.
fn parsed(bytes: &[u8]) -> Option<(Vec<Sample>, DataReport)> {
    let (_, header) = SafeTensors::read_metadata(bytes).ok()?;
    let metadata = header.metadata().as_ref()?;
    let report: DataReport = serde_json::from_str(metadata.get("report")?).ok()?;
    let tensors = SafeTensors::deserialize(bytes).ok()?;
    let data = |name: &str| tensors.tensor(name).ok().map(|t| t.data());
    let words = |name: &str| -> Option<Vec<u32>> {
        Some(data(name)?.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    };
    let mut digest = Sha256::new();
    for name in ["ids", "supervised", "lengths", "files", "prompts", "prompt_lengths"] {
        digest.update(data(name)?);
    }
    if *metadata.get("sha256")? != durable::hex(&digest.finalize()) {
        return None;
    }
    let (ids, supervised, prompts) = (words("ids")?, data("supervised")?, data("prompts")?);
    let (mut at, mut prompt_at) = (0, 0);
    let sizes = words("lengths")?.into_iter().zip(words("prompt_lengths")?).zip(words("files")?);
    let mut samples = Vec::new();
    for ((len, prompt), file) in sizes {
        let (end, prompt_end) = (at + len as usize, prompt_at + prompt as usize);
        let mask = supervised.get(at..end)?.iter().map(|&s| s == 1).collect();
        let prompt = String::from_utf8(prompts.get(prompt_at..prompt_end)?.to_vec()).ok()?;
        samples.push(Sample { file: file as usize, ..Sample::new(ids.get(at..end)?.to_vec(), mask, prompt) });
        (at, prompt_at) = (end, prompt_end);
    }
    Some((samples, report))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_come_back_and_damage_is_seen() {
        let mut samples = data::synthetic(5, 7, 100, 1);
        samples[1].prompt = "你是誰".into();
        samples[2].supervised[3] = false;
        samples[4].file = 2;
        let report = DataReport { rows: 5, dropped: vec![3], ..DataReport::default() };
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("tokens.safetensors");
        write(&file, &(samples.clone(), report)).unwrap();
        let bytes = std::fs::read(&file).unwrap();
        let (read, report) = parsed(&bytes).unwrap();
        assert_eq!((read, report.rows, report.dropped), (samples, 5, vec![3]));
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            // A flipped bit is seen, or it lies in the report or in padding and changes no sample.
            if let Some((other, _)) = parsed(&damaged) {
                assert_eq!(other, parsed(&bytes).unwrap().0, "byte {at}");
            }
            assert!(parsed(&bytes[..at]).is_none(), "cut at {at}");
        }
    }
}
