//! The files that `--data` names: a file itself, the files of a folder, or those that fit a pattern such as `rows/*.jsonl`.

use crate::{
    CliError, report,
    settings::extensions::{known, reader},
};
use model_qwen3::file;
use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

/// Largest training file that is read whole. What is made of its rows takes several times as much memory.
const LARGEST: u64 = 64 << 30;

/// The bytes of a training file whose format needs the whole file in memory.
///
/// # Errors
/// If it is no regular file, is too large, or cannot be read.
pub fn read_whole(path: &Path) -> Result<Vec<u8>, CliError> {
    let (_, size) = file::open(path, "check the path")?;
    if size > LARGEST {
        let (size, most) = (report::size(size), report::size(LARGEST));
        let reason = format!(
            "the file has {size}, and at most {most} are read at once; split it, or write it as Parquet, which is read row \
             by row"
        );
        return Err(CliError::data(path, None, reason));
    }
    Ok(file::read_bytes(path, LARGEST, "check the path")?)
}

/// The files that each of these paths of `flag` names, in the order of their names. A folder stands for the files in it that
/// have a known extension, but for `.md` and hidden files. A pattern that is the name of a file stands for that file. `remedy`
/// says what to do about a file that is named twice.
///
/// # Errors
/// If a folder or a pattern names no file, a folder cannot be read, a file is named twice, is not there or is no regular one.
pub fn named_by(flag: &str, paths: &[PathBuf], remedy: &str) -> Result<Vec<Vec<PathBuf>>, CliError> {
    let files = paths.iter().map(|path| one(flag, path)).collect::<Result<Vec<_>, _>>()?;
    files.iter().flatten().try_for_each(|file| check(flag, file))?;
    check_once(flag, &files, remedy)?;
    Ok(files)
}

/// The same as one list.
///
/// # Errors
/// As [`named_by`].
pub fn all_named_by(flag: &str, paths: &[PathBuf]) -> Result<Vec<PathBuf>, CliError> {
    named_by(flag, paths, "name it once").map(|files| files.concat())
}

/// Refuses the path of a data file that `flag` names, if no file is there.
///
/// # Errors
/// If nothing is there, or no regular file.
pub fn check(flag: &str, path: &Path) -> Result<(), CliError> {
    file::open(path, "check the path").map(drop).map_err(CliError::of_flag(flag))
}

/// Refuses a file that folders and patterns name twice: its rows would count twice, and could be held out and trained on.
fn check_once(flag: &str, files: &[Vec<PathBuf>], remedy: &str) -> Result<(), CliError> {
    let mut seen = BTreeSet::new();
    for file in files.iter().flatten() {
        if !seen.insert(file.canonicalize().unwrap_or_else(|_| file.clone())) {
            return Err(CliError::Usage(format!("{flag} {}: the file is named twice; {remedy}", file.display())));
        }
    }
    Ok(())
}

fn one(flag: &str, path: &Path) -> Result<Vec<PathBuf>, CliError> {
    let none = |what: &str| CliError::Usage(format!("{flag} {}: {what}", path.display()));
    if path.is_dir() {
        let mut files = Vec::new();
        for entry in fs::read_dir(path).map_err(CliError::io(path))? {
            let file = entry.map_err(CliError::io(path))?.path();
            // A broken link is an error of the check of all files.
            if !file.is_dir() && is_of_folder(&file) {
                files.push(file);
            }
        }
        files.sort();
        return if files.is_empty() { Err(none(&format!("no {} file is in this folder", known()))) } else { Ok(files) };
    }
    match path.to_str().filter(|text| !path.exists() && text.contains(['*', '?', '['])) {
        Some(pattern) => {
            let found = glob::glob(pattern).map_err(|e| none(&format!("the pattern is wrong: {e}")))?;
            // The crate returns names in alphabetical order.
            let files = found.collect::<Result<Vec<_>, _>>().map_err(|e| CliError::io(path)(e.into()))?;
            let files: Vec<PathBuf> = files.into_iter().filter(|file| !file.is_dir()).collect();
            if files.is_empty() { Err(none("no file fits this pattern")) } else { Ok(files) }
        }
        None => Ok(vec![path.to_owned()]),
    }
}

/// Whether a folder stands for this file, too. A `.md` file in a folder of data is about the data. A hidden file is something
/// that an editor or a file system left.
fn is_of_folder(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default();
    // Hugging Face's library `datasets` puts these two beside its tables.
    let about = name == "dataset_info.json" || name == "state.json";
    let is_hidden = name.as_encoded_bytes().starts_with(b".");
    !about && !is_hidden && path.extension().is_some_and(|e| !e.eq_ignore_ascii_case("md")) && reader(path).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_and_patterns_stand_for_their_files() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str| dir.path().join(name);
        let left_out = ["notes.pdf", "README.md", "OLD.MD", "state.json", "dataset_info.json", ".a.tsv", ".tsv"];
        for name in ["D.TSV", "b.jsonl", "a.tsv", "c[1].txt"].into_iter().chain(left_out) {
            fs::write(file(name), "").unwrap();
        }
        fs::create_dir(file("inner")).unwrap();
        let named = |name: &str| one("--data", &file(name)).map_err(|e| e.to_string());
        assert_eq!(named("").unwrap(), [file("D.TSV"), file("a.tsv"), file("b.jsonl"), file("c[1].txt")]);
        assert_eq!(named("*.jsonl").unwrap(), [file("b.jsonl")]);
        // A file of that name is no pattern. A name that nothing has is an error of the check of all files.
        assert_eq!(named("c[1].txt").unwrap(), [file("c[1].txt")]);
        assert_eq!(named("missing.tsv").unwrap(), [file("missing.tsv")]);
        assert!(named("inner").unwrap_err().contains(".parquet"), "{:?}", named("inner"));
        assert!(named("*.csv").unwrap_err().contains("no file fits"), "{:?}", named("*.csv"));
        let all_of = |names: [&str; 2]| all_named_by("--data", &names.map(file)).unwrap_err().to_string();
        let twice = all_of(["", "*.tsv"]);
        assert!(twice.starts_with("--data ") && twice.contains("a.tsv: the file is named twice"), "{twice}");
        let missing = all_of(["", "missing.tsv"]);
        assert!(missing.starts_with("--data ") && missing.contains("missing.tsv: no such file"), "{missing}");
    }
}
