//! Checks of paths before the work begins. A file that a command will write is no input, can be written, and lies in no checkpoint
//! or export; what a run writes besides its folder lies outside of it. A flag that takes a folder does not name a file.

use crate::{CliError, durable};
use std::{
    io::ErrorKind,
    path::{Path, PathBuf},
};

/// Most bytes of an output's name. A name may have 255; the file's name before it is complete (`.tmp-1234567-name`) and that of
/// the record of its training (`name.trained.json`) are longer.
pub const LONGEST_NAME: usize = 225;

/// Whether something is at a path. A link that leads nowhere is the user's, too, and must not be replaced.
pub fn is_taken(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

/// Refuses a file that is there already, unless `overwrite` allows to replace it. `flag` names it in the error.
///
/// # Errors
/// If it must not be replaced.
pub fn check_free(flag: &str, output: &Path, overwrite: bool) -> Result<(), CliError> {
    if is_taken(output) && !overwrite {
        let text = "the file exists; choose another name, or give --overwrite";
        return Err(CliError::Usage(format!("{flag} {}: {text}", output.display())));
    }
    Ok(())
}

/// Refuses an output that is an input, or that could not be written after hours of work. `flag` names it in the error.
///
/// # Errors
/// If `output` is one of `inputs`, is no regular file, has too long a name or that of a folder, or lies in a folder that does not
/// exist, cannot be written, or is a checkpoint or an export.
pub fn check_output(flag: &str, output: &Path, inputs: &[PathBuf]) -> Result<(), CliError> {
    let refuse = |text: String| Err(CliError::Usage(format!("{flag} {}: {text}", output.display())));
    if output.canonicalize().is_ok_and(|written| inputs.iter().any(|input| same_file(input, &written))) {
        return refuse(
            "this file is an input of this command, and inputs are never overwritten; choose another".into(),
        );
    }
    let folder = durable::parent(output);
    if !folder.is_dir() {
        return refuse(format!("there is no folder {}; create it first", folder.display()));
    }
    check_unlisted(flag, output, folder)?;
    let name = output.file_name().unwrap_or_default();
    if name.len() > LONGEST_NAME {
        return refuse(format!(
            "the name has {} bytes; at most {LONGEST_NAME} leave room for the names of the file before it is complete and of \
             its record; choose a shorter one",
            name.len()
        ));
    }
    if let Ok(found) = output.metadata()
        && !found.is_file()
    {
        let what = if found.is_dir() { "a folder" } else { "a pipe or a device" };
        return refuse(format!("this is {what}; give the name of a file"));
    }
    if output.as_os_str().to_string_lossy().ends_with(std::path::is_separator) {
        return refuse("this is the name of a folder; leave out the separator at its end".into());
    }
    durable::probe(folder, output)
}

/// Refuses an output as [`check_output`] does, and one that is there already.
///
/// # Errors
/// As [`check_output`], or if something is at the path.
pub fn check_new_output(flag: &str, output: &Path, inputs: &[PathBuf]) -> Result<(), CliError> {
    check_output(flag, output, inputs)?;
    if is_taken(output) {
        return Err(CliError::Usage(format!("{flag} {}: the file exists; choose another name", output.display())));
    }
    Ok(())
}

/// Refuses an output in `folder`, if this is a checkpoint or an export. `flag` names the output in the error.
///
/// # Errors
/// If `folder` is a checkpoint or an export.
pub fn check_unlisted(flag: &str, output: &Path, folder: &Path) -> Result<(), CliError> {
    if !durable::is_listed_folder(folder) {
        return Ok(());
    }
    let text = "is a checkpoint or an export, and holds only the files that its manifest lists; choose another folder";
    Err(CliError::Usage(format!("{flag} {}: {} {text}", output.display(), folder.display())))
}

/// Refuses a folder for outputs that is no folder, or that is or would be in a checkpoint or an export. It need not be there yet.
///
/// # Errors
/// If it is no folder, or lies or would lie in a checkpoint or an export.
pub fn check_output_folder(flag: &str, path: &Path) -> Result<(), CliError> {
    check_folder(flag, path)?;
    let mut above = path.ancestors().map(|folder| if folder == Path::new("") { Path::new(".") } else { folder });
    let there = above.find(|folder| folder.exists());
    there.map_or(Ok(()), |folder| check_unlisted(flag, path, folder))
}

/// Refuses an output that lies, or would lie, in the folder of the run that writes it. `flag` names the output in the error.
///
/// # Errors
/// If the output is inside the run folder.
pub fn check_outside(flag: &str, output: &Path, run: &Path) -> Result<(), CliError> {
    let inside = |path: &Path| resolved(path).starts_with(resolved(run));
    // A link in the run folder would be replaced there, wherever it leads.
    if !inside(output) && !inside(durable::parent(output)) {
        return Ok(());
    }
    let text = "must be outside the run folder, which holds the files of the run only; give the flag with another path";
    Err(CliError::Usage(format!("{flag} {}: this {text}", output.display())))
}

/// A path without links and `..`, as far as it is there.
pub fn resolved(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let there = path.ancestors().find_map(|above| Some((above.canonicalize().ok()?, path.strip_prefix(above).ok()?)));
    there.map_or_else(|| path.clone(), |(real, rest)| real.join(rest))
}

/// Refuses a file, a pipe or a device where `flag` takes a folder. The folder need not be there yet, nor the one above it.
///
/// # Errors
/// If something else than a folder is at the path, or above it.
pub fn check_folder(flag: &str, path: &Path) -> Result<(), CliError> {
    let Some(there) = path.ancestors().find(|above| above.symlink_metadata().is_ok()) else { return Ok(()) };
    let what = match there.metadata() {
        Ok(found) if found.is_dir() => return Ok(()),
        Ok(found) if found.is_file() => "a file",
        Ok(_) => "a pipe or a device",
        Err(error) if error.kind() == ErrorKind::NotFound => "a link that leads nowhere",
        // What is wrong shows when the folder is used.
        Err(_) => return Ok(()),
    };
    let name = if there == path { "this".to_owned() } else { there.display().to_string() };
    Err(CliError::Usage(format!("{flag} {}: {name} is {what}; give a folder", path.display())))
}

/// Refuses a `.dat` output whose name does not end in `.dat`: other commands tell a file's format by its name.
///
/// # Errors
/// If it does not.
pub fn check_dat_name(flag: &str, output: &Path) -> Result<(), CliError> {
    if output.extension().is_some_and(|extension| extension == "dat") {
        return Ok(());
    }
    Err(CliError::Usage(format!("{flag} {}: the name must end in .dat", output.display())))
}

/// Whether `input` is the existing file `written`, by whatever name or link.
fn same_file(input: &Path, written: &Path) -> bool {
    input.canonicalize().is_ok_and(|input| input == written) || same_inode(input, written)
}

#[cfg(unix)]
fn same_inode(a: &Path, b: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    match (a.metadata(), b.metadata()) {
        (Ok(a), Ok(b)) => (a.dev(), a.ino()) == (b.dev(), b.ino()),
        _ => false,
    }
}

#[cfg(not(unix))]
fn same_inode(_: &Path, _: &Path) -> bool {
    false
}
