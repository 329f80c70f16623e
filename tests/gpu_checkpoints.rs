//! Checkpoints of runs on a GPU: they are read from it in pieces, several in one transfer, while the next steps are made.

use crate::support::{
    Gpu,
    files::{demo_file, run},
    gpu, skipped,
};
use serde_json::Value;
use std::fs;

/// The name of the GPU under test; None where there is none.
pub(crate) fn device() -> Option<&'static str> {
    match gpu() {
        Gpu::Vulkan => Some("vulkan"),
        Gpu::Cuda => Some("cuda"),
        Gpu::Missing => {
            skipped();
            None
        }
    }
}

#[test]
fn a_checkpoint_holds_the_step_after_which_it_was_saved() {
    let Some(device) = device() else { return };
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    fs::create_dir(d.join("m")).unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(demo_file(name), d.join("m").join(name)).unwrap();
    }
    let mut config: Value = serde_json::from_str(&fs::read_to_string(demo_file("config.json")).unwrap()).unwrap();
    // The embedding, and with it each of its moments in f32, is exactly one piece of a transfer: 32 MiB.
    for (key, value) in
        [("hidden_size", 64), ("vocab_size", 1 << 17), ("intermediate_size", 96), ("num_hidden_layers", 1)]
    {
        config[key] = value.into();
    }
    fs::write(d.join("m/config.json"), config.to_string()).unwrap();
    let rows = demo_file("demo.tsv");
    let digests = |steps: &str| {
        let mut words = vec!["fit", "--init-config", "m/config.json", "--tokenizer", "m", "-d", rows.to_str().unwrap()];
        words.extend(["--device", device, "--compute-dtype", "f32", "--recipe", "bf16", "--max-seq-length", "32"]);
        words.extend(["--optimizer-state-mode", "f32", "--learning-rate", "1e-3", "--lr-scheduler-type", "constant"]);
        words.extend(["--val-split", "0", "--save-steps", "1", "--max-steps", steps, "-o", steps]);
        // A limit counts as room on a device that does not say how much is free.
        words.extend(["--memory-limit", "8GiB"]);
        let said = run(d, &words);
        let text = String::from_utf8_lossy(&said.stderr);
        assert!(said.status.success() && text.contains("more from the first checkpoint on"), "{text}");
        let manifest = fs::read_to_string(d.join(steps).join("checkpoint-2/manifest.json")).unwrap();
        let manifest: Value = serde_json::from_str(&manifest).unwrap();
        ["model.safetensors", "optimizer.safetensors"].map(|file| manifest["files"][file]["sha256"].clone())
    };
    // Nothing follows the second step of the one run, and the third step of the other is made beside the writing.
    assert_eq!(digests("3"), digests("2"));
}
