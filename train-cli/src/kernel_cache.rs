//! Where compiled CUDA kernels are kept: the first run of a build compiles them for some twenty seconds, later runs
//! read them.
//!
//! CubeCL looks a kernel up by its name and constants, not by its source. So a directory serves one build of this
//! program on one kind of card: its name is a hash of the executable, the cards' model and the driver's version.
//! `TRAIN_CLI_KERNEL_CACHE` names another place than the user's cache directory; `off` turns it off.

use sha2::{Digest, Sha256};
use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// Where the driver tells of itself.
const DRIVER: &str = "/proc/driver/nvidia";
/// The variable that moves the cache, or turns it off.
const VARIABLE: &str = "TRAIN_CLI_KERNEL_CACHE";

/// This build's directory; those of other builds are removed. `None` where there is no NVIDIA driver, where its cards
/// are of several models, where nothing can be written, or if it is turned off.
pub fn directory() -> Option<PathBuf> {
    let place = std::env::var_os(VARIABLE);
    if place.as_ref().is_some_and(|p| p == "off") {
        return None;
    }
    let root = match place {
        Some(place) => PathBuf::from(place),
        None => dirs::cache_dir()?.join("train-cli"),
    };
    let cards = cards(Path::new(DRIVER))?;
    let key = key(&fs::read(std::env::current_exe().ok()?).ok()?, &cards);
    prepare(&root, &key).ok()
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
    let hex: String = hash.iter().take(8).map(|b| format!("{b:02x}")).collect();
    format!("kernels-{hex}")
}

/// Makes the directory and removes its forerunners.
fn prepare(root: &Path, key: &str) -> io::Result<PathBuf> {
    let own = root.join(key);
    if own.is_dir() {
        return Ok(own);
    }
    fs::create_dir_all(&own)?;
    for entry in fs::read_dir(root)?.flatten() {
        let name = entry.file_name();
        let forerunner = name.to_str().is_some_and(|n| n.starts_with("kernels-") && n != key);
        if forerunner {
            // One that another process has open goes on without it.
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
        let first = prepare(root.path(), &key(b"build 1", "H200")).unwrap();
        assert_eq!(prepare(root.path(), &key(b"build 1", "H200")).unwrap(), first);
        fs::write(root.path().join("not ours"), "kept").unwrap();
        for other in [key(b"build 2", "H200"), key(b"build 1", "GB10")] {
            assert!(!prepare(root.path(), &other).unwrap().ends_with(first.file_name().unwrap()));
        }
        let left: Vec<_> = fs::read_dir(root.path()).unwrap().flatten().map(|e| e.file_name()).collect();
        assert_eq!(left.len(), 2, "{left:?}");
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
