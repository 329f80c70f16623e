//! Where compiled kernels are kept: the first run of a build compiles them for some twenty seconds, later runs read them.
//!
//! CubeCL looks a CUDA kernel up by its name and constants, not by its source. So a directory serves one build of this
//! program on one kind of card: its name is a hash of the executable, the cards' model and the driver's version.
//! `TRAIN_CLI_KERNEL_CACHE` names another place than the user's cache directory; `off` turns it off.

use crate::durable;
use sha2::{Digest, Sha256};
use std::{
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

/// Where the driver tells of itself.
const DRIVER: &str = "/proc/driver/nvidia";
/// The variable that moves the cache, or turns it off.
const VARIABLE: &str = "TRAIN_CLI_KERNEL_CACHE";

/// This build's directory; those of other builds, cards and drivers are removed once they are a week old. `None` where there is no NVIDIA driver, where its cards
/// are of several models, where nothing can be written, or if it is turned off.
pub fn directory() -> Option<PathBuf> {
    let place = std::env::var_os(VARIABLE).filter(|p| !p.is_empty());
    if place.as_ref().is_some_and(|p| p == "off") {
        return None;
    }
    let root = match place {
        Some(place) => PathBuf::from(place),
        None => dirs::cache_dir()?.join("train-cli"),
    };
    let cards = cards(Path::new(DRIVER))?;
    let key = key(&fs::read(std::env::current_exe().ok()?).ok()?, &cards);
    prepare(&root, &key, WEEK).ok()
}

/// The driver's version and the model that all its cards are of.
fn cards(driver: &Path) -> Option<String> {
    let version = fs::read_to_string(driver.join("version")).ok()?;
    match models(driver)?.as_slice() {
        [model] => Some(format!("{model}\n{version}")),
        _ => None,
    }
}

/// The models of NVIDIA cards that the driver names in its folder.
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

/// Whether a card's memory is the host's: a DGX Spark's, a Jetson's.
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
/// Digits of a directory's name.
const HEX: usize = 16;
/// A process may still read from younger ones.
const WEEK: Duration = Duration::from_secs(7 * 24 * 3600);

/// Makes the directory and removes its forerunners.
fn prepare(root: &Path, key: &str, age: Duration) -> io::Result<PathBuf> {
    let own = root.join(key);
    if own.is_dir() {
        return Ok(own);
    }
    fs::create_dir_all(&own)?;
    for entry in fs::read_dir(root)?.flatten() {
        let name = entry.file_name();
        let digits = name.to_str().filter(|n| *n != key).and_then(|n| n.strip_prefix(PREFIX));
        let ours = digits.is_some_and(|d| d.len() == HEX && d.bytes().all(|b| b.is_ascii_hexdigit()));
        let old = || entry.metadata()?.modified()?.elapsed().map_err(io::Error::other);
        if ours && old().is_ok_and(|since| since >= age) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
    Ok(own)
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
        assert!(second != first && first.exists() && left() == 6, "a young one stays");
        let third = of(b"build 1", "GB10", Duration::ZERO);
        assert!(!first.exists() && !second.exists() && third.exists() && left() == 5);
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
