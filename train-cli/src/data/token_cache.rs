//! Tokenized rows on disk: `--token-cache DIR` keeps what [`read::load`] makes of training files, and later runs read that
//! instead.
//!
//! The name of a cache file is a digest of everything that decides its content: the training files, the model's
//! tokenizer and template, and the options. A damaged file is made again.
//!
//! A cache file is safetensors: `ids` u32 and `supervised` u8 for each token, `lengths`, `files`, `lines` and `rows` u32 and
//! `weights` f64 for each sample, `prompts` u8 and `prompt_lengths` u32. Its metadata hold the data report and a digest of the
//! tensors.

use crate::{
    CliError,
    data::{
        read::{self, DataOptions, DataReport},
        sample::{Origin, Sample},
    },
    durable,
    model_files::TextFiles,
    report,
    settings::MOST_WEIGHT,
};
use model_qwen3::{ModelError, bytes, file};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use sha2::{Digest, Sha256};
use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

/// Version of the format and of how rows become tokens. A change of either must raise it, so that older files are not
/// read.
const VERSION: u32 = 11;
/// Largest cache file that is read, which is read whole. A token takes five bytes, and its sample as much again in memory.
const LARGEST: u64 = 64 << 30;

/// Reads the samples of `paths`. With a cache folder, it takes them from there, or puts them there.
///
/// # Errors
/// As [`read::load`], or if the cache cannot be written.
pub fn load(
    cache: Option<&Path>,
    paths: &[PathBuf],
    text: &TextFiles,
    options: &DataOptions,
) -> Result<(Vec<Sample>, DataReport), CliError> {
    // A pipe can be read only once, so there is no digest of it.
    let files = paths.iter().all(|path| path.is_file());
    let Some(folder) = cache.filter(|_| files) else { return read::load(paths, text, options) };
    let kept = folder.join(format!("tokens-{}.safetensors", key(paths, text, options)?));
    let limits = Limits { files: paths.len(), vocabulary: text.tokenizer.vocab_size(), tokens: options.max_seq_length };
    match file::read_bytes(&kept, LARGEST, "") {
        Ok(bytes) => match parsed(&bytes, limits) {
            Some((samples, found)) => {
                report::line(format!("{:>11}  from {}", "tokens", kept.display()));
                found.print_notes(paths);
                return Ok((samples, found));
            }
            None => report::line(format!("{:>11}  {} is damaged; it is made again", "tokens", kept.display())),
        },
        Err(ModelError::Missing { .. }) => {}
        Err(e) => return Err(e.into()),
    }
    let made = read::load(paths, text, options)?;
    durable::make_folder(folder)?;
    write(&kept, &made)?;
    report::line(format!("{:>11}  kept in {}", "tokens", kept.display()));
    Ok(made)
}

/// The digest in the name of a cache file.
fn key(paths: &[PathBuf], text: &TextFiles, options: &DataOptions) -> Result<String, CliError> {
    let stops = &text.stop_ids;
    let mut parts = format!("{VERSION} {} {options:?} {stops:?}", env!("CARGO_PKG_VERSION"));
    for path in paths {
        // Reading the rows reports a file that cannot be read.
        let digest = durable::digest(path).map(|(_, digest)| digest).unwrap_or_default();
        parts += &format!("\n{:?} {digest}", path.extension());
    }
    for path in text.files() {
        parts += &format!("\n{}", durable::digest(&path)?.1);
    }
    Ok(durable::digest_of(parts.as_bytes())[..16].to_owned())
}

fn write(file: &Path, (samples, found): &(Vec<Sample>, DataReport)) -> Result<(), CliError> {
    let tensors = [
        ("ids", Dtype::U32, bytes::of_u32s(samples.iter().flat_map(|s| &s.ids).copied())),
        ("supervised", Dtype::U8, samples.iter().flat_map(|s| &s.supervised).map(|&s| u8::from(s)).collect()),
        ("lengths", Dtype::U32, bytes::of_u32s(samples.iter().map(|s| s.ids.len() as u32))),
        ("files", Dtype::U32, bytes::of_u32s(samples.iter().map(|s| s.origins[0].file))),
        ("lines", Dtype::U32, bytes::of_u32s(samples.iter().map(|s| s.origins[0].line))),
        ("rows", Dtype::U32, bytes::of_u32s(samples.iter().map(|s| s.origins[0].row))),
        ("weights", Dtype::F64, bytes::of_f64s(samples.iter().map(|s| s.weight))),
        ("prompts", Dtype::U8, samples.iter().flat_map(|s| s.prompt.bytes()).collect()),
        ("prompt_lengths", Dtype::U32, bytes::of_u32s(samples.iter().map(|s| s.prompt.len() as u32))),
    ];
    let mut digest = Sha256::new();
    tensors.iter().for_each(|(_, _, bytes)| digest.update(bytes));
    let metadata = HashMap::from([
        ("report".to_owned(), serde_json::to_string(found).expect("plain data serializes")),
        ("sha256".to_owned(), durable::hex(&digest.finalize())),
    ]);
    let views = tensors.iter().map(|(name, dtype, bytes)| {
        let width = dtype.bitsize() / 8;
        (
            *name,
            TensorView::new(*dtype, vec![bytes.len() / width], bytes).expect("the data are as long as the shape says"),
        )
    });
    let bytes = safetensors::serialize(views, Some(metadata)).expect("six flat tensors serialize");
    durable::write_bytes(file, &bytes).map(|_| ())
}

/// What the samples of a cache file keep to. A digest says only that a file is as someone wrote it.
#[derive(Clone, Copy)]
struct Limits {
    files: usize,
    vocabulary: usize,
    /// Tokens of a sample.
    tokens: usize,
}

/// The samples of a cache file. `None` if the file is damaged, or holds what training files cannot hold.
fn parsed(file: &[u8], limits: Limits) -> Option<(Vec<Sample>, DataReport)> {
    let (_, header) = SafeTensors::read_metadata(file).ok()?;
    let metadata = header.metadata().as_ref()?;
    let report: DataReport = serde_json::from_str(metadata.get("report")?).ok()?;
    let tensors = SafeTensors::deserialize(file).ok()?;
    let data = |name: &str| tensors.tensor(name).ok().map(|t| t.data());
    let words = |name: &str| data(name).map(bytes::to_u32s);
    let mut digest = Sha256::new();
    for name in ["ids", "supervised", "lengths", "files", "lines", "rows", "weights", "prompts", "prompt_lengths"] {
        digest.update(data(name)?);
    }
    if *metadata.get("sha256")? != durable::hex(&digest.finalize()) {
        return None;
    }
    let (ids, supervised, prompts) = (words("ids")?, data("supervised")?, data("prompts")?);
    let (mut at, mut prompt_at) = (0, 0);
    let (lengths, files, lines) = (words("lengths")?, words("files")?, words("lines")?);
    let weights = bytes::to_f64s(data("weights")?);
    let origins = files.into_iter().zip(lines).zip(words("rows")?);
    let origins = origins.map(|((file, line), row)| Origin { file, line, row });
    let sizes = lengths.into_iter().zip(words("prompt_lengths")?).zip(origins.zip(weights));
    let mut samples = Vec::new();
    for ((len, prompt), (origin, weight)) in sizes {
        let (end, prompt_end) = (at + len as usize, prompt_at + prompt as usize);
        let mask = supervised.get(at..end)?.iter().map(|&s| s == 1).collect();
        let prompt = String::from_utf8(prompts.get(prompt_at..prompt_end)?.to_vec()).ok()?;
        let sample = Sample::new(ids.get(at..end)?.to_vec(), mask, prompt);
        let known = sample.ids.iter().all(|id| (*id as usize) < limits.vocabulary);
        let fits = (2..=limits.tokens).contains(&sample.ids.len()) && sample.supervised_tokens() > 0;
        if !known || !fits || origin.file as usize >= limits.files || !(0.0..=MOST_WEIGHT).contains(&weight) {
            return None;
        }
        samples.push(Sample { origins: vec![origin], weight, ..sample });
        (at, prompt_at) = (end, prompt_end);
    }
    let whole = at == ids.len() && at == supervised.len() && prompt_at == prompts.len();
    let whole = whole && report.notes.iter().all(|(file, _)| *file < limits.files);
    (whole && !samples.is_empty() && samples.len() == report.samples).then_some((samples, report))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::sample::synthetic;

    /// The limits are those of the samples below.
    fn parsed(file: &[u8]) -> Option<(Vec<Sample>, DataReport)> {
        super::parsed(file, Limits { files: 3, vocabulary: 100, tokens: 7 })
    }

    #[test]
    fn samples_come_back_and_damage_is_found() {
        let mut samples = synthetic(5, 7, 100, 1);
        samples[1].prompt = "你是誰".into();
        samples[2].supervised[3] = false;
        samples[3].weight = 2.5;
        samples[4].origins = vec![Origin { file: 2, line: 7, row: 3 }];
        let dropped = vec![Origin { file: 1, line: 3, row: 0 }];
        let notes = vec![(1, "it has a note".to_owned())];
        let report = DataReport { rows: 5, samples: 5, dropped, notes, ..DataReport::default() };
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("tokens.safetensors");
        write(&file, &(samples.clone(), report.clone())).unwrap();
        let bytes = std::fs::read(&file).unwrap();
        let (read, found) = parsed(&bytes).unwrap();
        assert_eq!((read, found.rows, found.dropped, found.notes), (samples, 5, report.dropped, report.notes));
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            // A flipped bit in the report or in padding changes no sample; any other must be seen.
            if let Some((other, _)) = parsed(&damaged) {
                assert_eq!(other, parsed(&bytes).unwrap().0, "byte {at}");
            }
            assert!(parsed(&bytes[..at]).is_none(), "cut at {at}");
        }
    }
}
