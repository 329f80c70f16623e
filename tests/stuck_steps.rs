//! A step that never ends, as one does that waits for a device that no longer answers, ends the run by itself.

use crate::support::{
    faulty_disk::preloaded,
    files::{command, names, ok, tiny_model},
};
use std::fs;

/// The third step hangs in the report of its memory (hung_step.cpp). The clock runs a thousand times as fast, so that it has taken
/// five minutes soon.
#[test]
fn a_step_that_never_ends_ends_the_run_and_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    let Some(library) = preloaded(d, "hung_step", include_str!("support/hung_step.cpp")) else { return };
    tiny_model(&d.join("m"), true);
    let words = |output: &'static str| {
        let words = "fit -m m -d m/demo.tsv --device cpu --max-seq-length 64 --learning-rate 1e-3 --max-steps 4 --save-steps 1 \
                     --eval-steps 0 --vram-report memory.json -o";
        words.split_whitespace().chain([output]).collect::<Vec<_>>()
    };
    ok(d, &words("whole"));
    // After the report of the second step the program looks once at its memory, and then at each phase of the third step.
    let report: serde_json::Value = serde_json::from_slice(&fs::read(d.join("memory.json")).unwrap()).unwrap();
    let phases = report["Samples"].as_array().unwrap().iter().filter(|sample| sample["GlobalStep"] == 3);
    let phases: Vec<&str> = phases.map(|sample| sample["Phase"].as_str().unwrap()).collect();
    assert_eq!(phases[..2], ["batch_ready", "zero_grad_done"], "{phases:?}");
    assert_ne!(phases[2], "optimizer_step_done");

    fs::remove_file(d.join("memory.json")).unwrap();
    let mut hangs = command(d, &words("stuck"));
    hangs.env("LD_PRELOAD", &library).env("HANG_SPEED", "1000").env("HANG_AFTER", "2").env("HANG_AT", "4");
    let out = hangs.output().unwrap();
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(7), "{stderr}");
    let message = stderr.lines().last().unwrap();
    assert!(
        message.starts_with("error: step 3 has made no progress for ") && message.contains("does not answer"),
        "{stderr}"
    );
    let summary = fs::read_to_string(d.join("stuck/summary.md")).unwrap();
    assert!(summary.contains("step 3 has made no progress for ") && summary.contains("2 of 4"), "{summary}");
    assert!(names(&d.join("stuck")).contains("checkpoint-2") && !names(&d.join("stuck")).contains("checkpoint-3"));

    let mut resumed = words("stuck");
    resumed.push("--resume-from-checkpoint");
    ok(d, &resumed);
    for name in ["final/model.dat", "checkpoint-4/model.safetensors", "checkpoint-4/optimizer.safetensors"] {
        let read = |run: &str| fs::read(d.join(run).join(name)).unwrap();
        assert!(read("stuck") == read("whole"), "{name} differs");
    }
}
