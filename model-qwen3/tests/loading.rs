//! Loading needs little memory of the host beyond the model: it reads ranges of rows, and never a whole large tensor or
//! file. The test is a binary of its own, because the allocator counts the whole process. On the CPU backend the model
//! itself is in the host's memory and is subtracted.

use backend_nvfp4::{BlockShape, LinearSpec, MasterKind, Precision, Recipe, Scaling};
use burn::backend::NdArray;
use model_qwen3::{
    ModelError,
    bytes::FloatType,
    config::Qwen3Config,
    container::Container,
    repack::{HeadAs, Repacked, StoreAs},
    weights::{self, Live, Purpose},
    write::write_dat,
};
use peak_alloc::PeakAlloc;
use std::fs::File;

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

const CONFIG: &str = r#"{"model_type": "qwen3", "vocab_size": 60000, "hidden_size": 512, "intermediate_size": 1024,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "hidden_act": "silu",
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000, "tie_word_embeddings": true,
    "attention_bias": false, "initializer_range": 0.02}"#;

#[test]
fn only_a_range_of_rows_is_in_memory_at_a_time() {
    let folder = tempfile::tempdir().unwrap();
    let config_file = folder.path().join("config.json");
    std::fs::write(&config_file, CONFIG).unwrap();
    let config = Qwen3Config::from_file(&config_file).unwrap();
    let device = Default::default();
    let spec = |recipe| LinearSpec::new(recipe, Scaling::Two, Precision::F32);
    let nvfp4 = StoreAs::Nvfp4 {
        scaling: Scaling::Two,
        head: HeadAs::Float(FloatType::F16),
        block: BlockShape::Row,
        shares_scale: false,
        dense_from: usize::MAX,
    };
    let files = [("bf16.dat", StoreAs::Float(FloatType::Bf16)), ("nvfp4.dat", nvfp4)].map(|(name, target)| {
        let path = folder.path().join(name);
        let model = weights::random::<NdArray>(&config, spec(Recipe::Bf16), MasterKind::F32, 3, &device).unwrap();
        let failed = |source| ModelError::Io { path: path.clone(), source };
        let live = Live::new(&model);
        write_dat(&Repacked::new(&live, target), None, File::create(&path).unwrap(), failed).unwrap();
        path
    });
    let purposes = [
        (Recipe::W4, Purpose::Train(MasterKind::F32)),
        (Recipe::W4, Purpose::Train(MasterKind::Nvfp4)),
        (Recipe::W4, Purpose::Infer),
    ];
    // Two bytes a value in the file.
    let largest = config.vocab_size * config.hidden_size * 2;
    for (file, (recipe, purpose)) in files.iter().flat_map(|f| purposes.map(|p| (f, p))) {
        let before = MEMORY.current_usage();
        MEMORY.reset_peak_usage();
        let checkpoint = Container::open(file).unwrap();
        let model = weights::load::<NdArray>(&checkpoint, &config, spec(recipe), purpose, &device).unwrap();
        let (model_bytes, peak) = (MEMORY.current_usage() - before, MEMORY.peak_usage() - before);
        let passing = peak - model_bytes;
        assert!(
            passing * 5 <= largest * 6,
            "{} for {purpose:?}: {passing} bytes beyond the model, its largest tensor has {largest}",
            file.display()
        );
        assert!(model_bytes > largest, "the model is there");
        drop(model);
    }
}
