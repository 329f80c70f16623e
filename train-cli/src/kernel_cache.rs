//! The directory of compiled kernels. The first run of a build compiles them, which takes some seconds; later runs read them.
//!
//! CubeCL finds a CUDA kernel by its name and constants, not by its source. Therefore a directory serves one build of this
//! program on one model of card: its name is a hash of the executable, the model of the cards and the driver's version.
//! The variable `TRAIN_CLI_KERNEL_CACHE` moves the cache away from the user's cache directory; `off` turns it off.

use crate::durable;
use sha2::{Digest, Sha256};
use std::{
    fs,
    path::{Path, PathBuf},
    sync::OnceLock,
    time::Duration,
};

/// Where the NVIDIA driver describes itself and its cards.
const DRIVER: &str = "/proc/driver/nvidia";
const VARIABLE: &str = "TRAIN_CLI_KERNEL_CACHE";

/// The directory that holds a directory for each build. `None` if there is no place for it, or if the cache is turned off.
pub fn root() -> Option<PathBuf> {
    match std::env::var_os(VARIABLE).filter(|place| !place.is_empty()) {
        Some(place) => Some(PathBuf::from(place)).filter(|place| place.as_os_str() != "off"),
        None => Some(dirs::cache_dir()?.join("train-cli")),
    }
}

/// The directory of this build, and removes those of other builds, cards and drivers that are older than a week. `None`
/// if there is no NVIDIA driver, if its cards are of several models, if the directory cannot be made, or if the cache is
/// turned off. The executable is read once for this.
pub fn directory() -> Option<PathBuf> {
    static DIRECTORY: OnceLock<Option<PathBuf>> = OnceLock::new();
    DIRECTORY.get_or_init(found).clone()
}

fn found() -> Option<PathBuf> {
    let root = root()?;
    let cards = cards(Path::new(DRIVER))?;
    let key = key(&fs::read(std::env::current_exe().ok()?).ok()?, &cards);
    prepare(&root, &key, WEEK)
}

/// Whether kernels of this build and card are in the cache.
pub fn has_kernels() -> bool {
    directory().is_some_and(|folder| holds_files(&folder))
}

/// Whether a folder, or one inside it, holds a file that is not empty.
fn holds_files(folder: &Path) -> bool {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).any(|path| {
        if path.is_dir() { holds_files(&path) } else { fs::metadata(&path).is_ok_and(|data| data.len() > 0) }
    })
}

/// The model of all cards and the driver's version. `None` if cards are of several models.
fn cards(driver: &Path) -> Option<String> {
    let version = fs::read_to_string(driver.join("version")).ok()?;
    match models(driver)?.as_slice() {
        [model] => Some(format!("{model}\n{version}")),
        _ => None,
    }
}

/// The models of the cards that the driver lists.
fn models(driver: &Path) -> Option<Vec<String>> {
    let mut models = Vec::new();
    for card in fs::read_dir(driver.join("gpus")).ok()?.flatten() {
        let text = fs::read_to_string(card.path().join("information")).ok()?;
        models.push(text.lines().find_map(|l| l.strip_prefix("Model:"))?.trim().to_owned());
    }
    models.sort();
    models.dedup();
    Some(models)
}

/// Whether a card shares the host's memory, as those of a DGX Spark or a Jetson do.
pub fn memory_is_the_hosts() -> bool {
    const UNIFIED: [&str; 4] = ["GB10", "Orin", "Thor", "Xavier"];
    let models = models(Path::new(DRIVER)).unwrap_or_default();
    models.iter().any(|model| UNIFIED.iter().any(|part| model.contains(part)))
}

fn key(executable: &[u8], cards: &str) -> String {
    let hash = Sha256::new().chain_update(executable).chain_update(cards).finalize();
    format!("{PREFIX}{}", &durable::hex(&hash)[..HEX])
}

const PREFIX: &str = "kernels-";
/// Hexadecimal digits in a directory's name.
const HEX: usize = 16;
/// Directories of other builds are kept this long, because their processes may still read them.
const WEEK: Duration = Duration::from_secs(7 * 24 * 3600);

/// Makes the directory and removes older ones that no build uses any more.
fn prepare(root: &Path, key: &str, age: Duration) -> Option<PathBuf> {
    let own = root.join(key);
    if own.is_dir() {
        return Some(own);
    }
    durable::make_folder(&own).ok()?;
    for entry in fs::read_dir(root).ok()?.flatten() {
        let name = entry.file_name();
        let digits = name.to_str().filter(|n| *n != key).and_then(|n| n.strip_prefix(PREFIX));
        let ours = digits.is_some_and(|d| d.len() == HEX && d.bytes().all(|b| b.is_ascii_hexdigit()));
        let modified = entry.metadata().and_then(|data| data.modified()).ok();
        let since = modified.and_then(|time| time.elapsed().ok());
        if ours && since.is_some_and(|since| since >= age) {
            // A directory that stays costs disk space only.
            let _ = durable::remove(&entry.path());
        }
    }
    Some(own)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_build_or_card_has_another_directory_and_replaces_it() {
        let root = tempfile::tempdir().unwrap();
        let of = |build: &[u8], card: &str, age| prepare(root.path(), &key(build, card), age).unwrap();
        let first = of(b"build 1", "H200", WEEK);
        assert_eq!(of(b"build 1", "H200", WEEK), first);
        for others in ["kernels-cubecl", "kernels-0123456789abcdeg", "kernels-0123456789abcdef0", "mine"] {
            fs::create_dir(root.path().join(others)).unwrap();
        }
        let left = || fs::read_dir(root.path()).unwrap().count();
        let second = of(b"build 2", "H200", WEEK);
        assert!(second != first && first.exists() && left() == 6, "a young directory stays");
        let third = of(b"build 1", "GB10", Duration::ZERO);
        assert!(!first.exists() && !second.exists() && third.exists() && left() == 5);
    }

    #[test]
    fn a_cache_has_kernels_once_a_file_of_it_holds_something() {
        let cache = tempfile::tempdir().unwrap();
        fs::create_dir_all(cache.path().join("0.10/cuda")).unwrap();
        fs::write(cache.path().join("0.10/cuda/lock"), "").unwrap();
        assert!(!holds_files(cache.path()) && !holds_files(&cache.path().join("missing")));
        fs::write(cache.path().join("0.10/cuda/ptx.json.log"), "kernel").unwrap();
        assert!(holds_files(cache.path()));
    }

    #[test]
    fn cards_of_two_models_share_nothing() {
        let driver = tempfile::tempdir().unwrap();
        fs::write(driver.path().join("version"), "580").unwrap();
        let card = |place: &str, model: &str| {
            fs::create_dir_all(driver.path().join("gpus").join(place)).unwrap();
            let text = format!("Model: \t\t {model}\nIRQ: 1\n");
            fs::write(driver.path().join("gpus").join(place).join("information"), text).unwrap();
        };
        assert_eq!(cards(driver.path()), None);
        card("1", "NVIDIA H200");
        card("2", "NVIDIA H200");
        assert_eq!(cards(driver.path()).unwrap(), "NVIDIA H200\n580");
        card("3", "NVIDIA A100");
        assert_eq!(cards(driver.path()), None);
    }
}
