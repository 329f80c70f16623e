//! Tells the program what it was built from: the versions of Burn and CubeCL, and in a release build the commit. Other
//! builds do not look at the commit, or each commit would compile the program again.

use std::{fs, process::Command};

fn main() {
    println!("cargo:rerun-if-changed=../Cargo.lock");
    let lock = fs::read_to_string("../Cargo.lock").unwrap_or_default();
    for name in ["burn", "cubecl"] {
        let version = version(&lock, name).unwrap_or("of an unknown version");
        println!("cargo:rustc-env={}_VERSION={version}", name.to_uppercase());
    }
    let release = std::env::var("PROFILE").is_ok_and(|profile| profile == "release");
    let commit = if release { commit() } else { None };
    let unknown = if release { "an unknown commit" } else { "development build" };
    println!("cargo:rustc-env=BUILT_FROM={}", commit.as_deref().unwrap_or(unknown));
}

/// The version of a package in a lock file.
fn version<'a>(lock: &'a str, name: &str) -> Option<&'a str> {
    let entry = lock.split("[[package]]").find(|entry| entry.contains(&format!("name = \"{name}\"\n")))?;
    entry.lines().find_map(|line| line.strip_prefix("version = ")).map(|version| version.trim_matches('"'))
}

/// The commit that is checked out, and whether files differ from it.
fn commit() -> Option<String> {
    // Not the index: whoever asks git for the state of the files writes it.
    let sources = ["src", "../backend-nvfp4", "../kernels-cubecl", "../model-qwen3", "../.git/logs/HEAD"];
    sources.iter().for_each(|path| println!("cargo:rerun-if-changed={path}"));
    let git = |args: &[&str]| {
        let output = Command::new("git")
            .arg("--no-optional-locks")
            .args(args)
            .output()
            .ok()
            .filter(|output| output.status.success())?;
        String::from_utf8(output.stdout).ok()
    };
    // The sources may lie in the repository of something else.
    let root = git(&["rev-parse", "--show-toplevel"])?;
    if fs::canonicalize(root.trim()).ok()? != fs::canonicalize("..").ok()? {
        return None;
    }
    let commit = git(&["rev-parse", "--short=12", "HEAD"])?;
    let changed = git(&["status", "--porcelain", "--untracked-files=no"])?;
    let suffix = if changed.trim().is_empty() { "" } else { ", changed" };
    Some(format!("commit {}{suffix}", commit.trim()))
}
