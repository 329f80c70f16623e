//! A bit of a checkpoint that has changed on the disk is found, wherever it is: nothing resumes from such a checkpoint.
//!
//! CI flips a thousand. Every bit of a small checkpoint, and ten thousand of a larger one, are
//!
//!     cargo test --workspace --test promises -- --ignored flipped

use crate::support::{
    Random,
    files::{demo_file, ok, tiny_model},
};
use std::{
    fs,
    path::{Path, PathBuf},
};
use train_cli::{durable, run::checkpoint};

#[test]
fn a_flipped_bit_of_a_checkpoint_is_found() {
    let dir = tempfile::tempdir().unwrap();
    tiny_model(&dir.path().join("m"), true);
    let folder = saved(dir.path(), &["-m", "m", "--save-steps", "1"]);
    let mut random = Random::new(1);
    flip(&folder, (0..1000).map(|_| u64::from(random.bits())));
}

#[test]
#[ignore = "about half a million bits; a_flipped_bit_of_a_checkpoint_is_found flips a thousand"]
fn every_flipped_bit_of_a_small_checkpoint_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let text = fs::read_to_string(demo_file("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
    for (key, value) in [
        ("hidden_size", 16),
        ("intermediate_size", 16),
        ("num_hidden_layers", 1),
        ("num_attention_heads", 1),
        ("num_key_value_heads", 1),
        ("head_dim", 16),
    ] {
        config[key] = value.into();
    }
    fs::write(dir.path().join("c.json"), config.to_string()).unwrap();
    let tokenizer = demo_file("").display().to_string();
    let folder = saved(dir.path(), &["--init-config", "c.json", "--tokenizer", &tokenizer]);
    let bits: u64 = files(&folder).iter().map(|(_, bytes)| 8 * *bytes).sum();
    flip(&folder, 0..bits);
    eprintln!("{bits} bits");
}

#[test]
#[ignore = "ten thousand bits of a checkpoint of some megabytes; a_flipped_bit_of_a_checkpoint_is_found flips a thousand"]
fn ten_thousand_flipped_bits_of_a_larger_checkpoint_are_found() {
    let dir = tempfile::tempdir().unwrap();
    let (config, tokenizer) = (demo_file("config.json").display().to_string(), demo_file("").display().to_string());
    let folder = saved(dir.path(), &["--init-config", &config, "--tokenizer", &tokenizer]);
    let mut random = Random::new(2);
    flip(&folder, (0..10_000).map(|_| u64::from(random.bits())));
}

/// The checkpoint of a run of one step.
fn saved(d: &Path, model: &[&str]) -> PathBuf {
    let words =
        ["fit", "--synthetic", "--device", "cpu", "--max-seq-length", "16", "--max-steps", "1", "--eval-steps", "0"];
    ok(d, &[&words, model, &["-o", "r"]].concat());
    let folder = d.join("r/checkpoint-1");
    checkpoint::open(&folder).unwrap();
    folder
}

/// The files of a folder and their bytes, by name.
fn files(folder: &Path) -> Vec<(PathBuf, u64)> {
    let mut all: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    all.sort();
    all.into_iter().map(|path| (path.clone(), fs::metadata(path).unwrap().len())).collect()
}

/// Flips one bit after another: the bits of all files are counted through. Each must be found, and is put back.
fn flip(folder: &Path, bits: impl Iterator<Item = u64>) {
    let files: Vec<(PathBuf, Vec<u8>)> =
        files(folder).into_iter().map(|(path, _)| (path.clone(), fs::read(&path).unwrap())).collect();
    let total: u64 = files.iter().map(|(_, content)| 8 * content.len() as u64).sum();
    for bit in bits {
        let mut rest = bit % total;
        let (path, content) = files
            .iter()
            .find(|(_, content)| {
                let here = 8 * content.len() as u64;
                let found = rest < here;
                rest -= if found { 0 } else { here };
                found
            })
            .unwrap();
        let mut broken = content.clone();
        broken[(rest / 8) as usize] ^= 1 << (rest % 8);
        fs::write(path, &broken).unwrap();
        // The manifest has spaces and line ends that say nothing: a change of them may only mean the same.
        let same = || {
            let json = |bytes: &[u8]| serde_json::from_slice::<serde_json::Value>(bytes).ok();
            path.ends_with(durable::MANIFEST) && json(&broken) == json(content)
        };
        assert!(durable::verify(folder).is_err() || same(), "bit {rest} of {} is not found", path.display());
        fs::write(path, content).unwrap();
    }
    durable::verify(folder).unwrap();
}
