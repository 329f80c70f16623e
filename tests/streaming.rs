//! The streaming step is the whole graph's: every gradient bit for bit, the same update; batches of any cut and packed
//! rows give one sum.

use crate::support::{
    Cpu, Cube,
    files::{F32, demo_file},
    host, on_gpu,
};
use backend_nvfp4::{
    LinearSpec, MasterKind, Nvfp4Backend, Nvfp4Parts, Recipe, StateKind,
    reference::{self, MASTER_ROOM},
};
use burn::{
    backend::Autodiff,
    module::AutodiffModule,
    tensor::{DType, Shape, Tensor, TensorMetadata, TensorPrimitive},
};
use burn_cubecl::CubeRuntime;
use model_qwen3::{
    config::Qwen3Config,
    weights::{self, fields},
};
use std::{collections::HashSet, sync::Arc};
use train_cli::{
    data::order::{MicroBatch, Order},
    data::read::{self as data, Sample},
    data::rows,
    memory::vram::VramReport,
    settings::{Clip, LossKind, StepMode},
    train::gradients::Gathered,
    train::learner::Trainee,
    train::optim::{AdamwConfig, ChunkedAdamw},
    train::step::{Stepped, Stepper},
};

const RECIPES: [Recipe; 4] = [Recipe::Bf16, Recipe::W4, Recipe::W4a4, Recipe::Nvfp4(Nvfp4Parts::ALL)];

fn config(tied: bool) -> Qwen3Config {
    let text = std::fs::read_to_string(demo_file("config.json")).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
    json["num_hidden_layers"] = 3.into();
    json["tie_word_embeddings"] = tied.into();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.json");
    std::fs::write(&path, json.to_string()).unwrap();
    Qwen3Config::from_file(&path).unwrap()
}

fn trainee<B: Nvfp4Backend>(tied: bool, recipe: Recipe, master: MasterKind) -> Trainee<Autodiff<B>> {
    let spec = LinearSpec::new(recipe, F32.scaling, F32.precision);
    let model = weights::random::<Autodiff<B>>(&config(tied), spec, master, 5, &Default::default()).unwrap();
    Trainee::new(model.with_bf16_last_blocks(1), LossKind::CrossEntropy, 0)
}

fn stepper<B: Nvfp4Backend>(mode: StepMode, clip: f64, master: MasterKind, state: StateKind) -> Stepper<B> {
    let config = AdamwConfig {
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
        state,
        master,
        chunk_rows: 0,
        seed: 3,
        float: DType::F32,
    };
    Stepper {
        mode,
        clip: Clip::Exact,
        max_grad_norm: clip,
        last_norm: None,
        buffer: DType::F32,
        optimizer: ChunkedAdamw::new(config, HashSet::new()),
        seed: 3,
        accumulation: 4,
    }
}

/// Four samples of unequal length, tokens that repeat.
fn samples() -> Vec<Sample> {
    let all = data::synthetic(4, 40, 90, 3);
    [19, 4, 33, 26]
        .iter()
        .zip(all)
        .map(|(&len, mut s)| {
            s.ids.truncate(len);
            s.supervised.truncate(len);
            s.supervised[len / 2] = false;
            s
        })
        .collect()
}

fn batches(batch_size: usize) -> Vec<MicroBatch> {
    let order = Order {
        samples: Arc::new(samples()),
        batch_size,
        accumulation: 4 / batch_size,
        steps: 1,
        limit: 4,
        seed: 0,
        start: 0,
    };
    order.step(0)
}

/// The gradients of a step by name, and its loss.
fn gradients<B: Nvfp4Backend>(
    mode: StepMode,
    tied: bool,
    recipe: Recipe,
    master: MasterKind,
    batches: &[MicroBatch],
) -> (f32, Vec<(String, Vec<f32>)>) {
    let mut gathered = Gathered::new(DType::F32);
    let mut stepper = stepper::<B>(mode, 0.0, master, StateKind::F32);
    let net = trainee::<B>(tied, recipe, master);
    let (net, loss) = stepper.gather(net, batches, &mut gathered, 1, &mut VramReport::new(None));
    let found = fields(&net.model).into_iter().map(|(name, field)| {
        let grad = gathered.get(field.id().unwrap()).unwrap_or_else(|| panic!("{name} has no gradient")).clone();
        assert_eq!(grad.shape().num_elements(), field.shape().iter().product::<usize>(), "{name}");
        let flat = B::float_reshape(grad, Shape::new([field.shape().iter().product()]));
        (name, host(Tensor::<B, 1>::from_primitive(TensorPrimitive::Float(flat))))
    });
    let found = found.collect();
    (loss.unwrap(), found)
}

fn streaming_is_whole<B: Nvfp4Backend>() {
    let batches = batches(2);
    for (tied, recipe) in RECIPES.into_iter().flat_map(|r| [(true, r), (false, r)]) {
        let of = |mode| gradients::<B>(mode, tied, recipe, MasterKind::F32, &batches);
        let ((a, whole), (b, streamed)) = (of(StepMode::Whole), of(StepMode::Streaming));
        assert_eq!(a.to_bits(), b.to_bits(), "{recipe:?}: loss");
        for ((name, whole), (_, streamed)) in whole.iter().zip(&streamed) {
            assert!(whole.iter().any(|g| *g != 0.0), "{name} has a gradient");
            let same = whole.iter().zip(streamed).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{recipe:?}, tied {tied}: {name} differs");
        }
    }
}

#[test]
fn every_gradient_is_the_whole_graphs_on_the_cpu() {
    streaming_is_whole::<Cpu>();
}

#[test]
fn every_gradient_is_the_whole_graphs_on_the_gpu() {
    fn run<R: CubeRuntime>() {
        streaming_is_whole::<Cube<R>>();
    }
    on_gpu!(run);
}

/// All weights after three steps of one batch.
fn trained(
    mode: StepMode,
    clip: f64,
    recipe: Recipe,
    master: MasterKind,
    state: StateKind,
    batches: &[MicroBatch],
) -> (Vec<f32>, Vec<Stepped>) {
    let mut stepper = stepper::<Cpu>(mode, clip, master, state);
    let mut net = trainee::<Cpu>(true, recipe, master);
    let mut steps = Vec::new();
    for step in 1..=3 {
        let (back, stepped) = stepper.step(net, batches, step, 1e-3, &mut VramReport::new(None));
        net = back;
        steps.push(stepped.unwrap());
    }
    let inner = net.valid();
    let values = fields(&inner.model).iter().flat_map(|(_, f)| f.to_host().unwrap()).collect();
    (values, steps)
}

fn same(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

#[test]
fn both_modes_give_the_same_update() {
    let one = batches(4);
    for (recipe, master, state) in [
        (Recipe::Bf16, MasterKind::F32, StateKind::F32),
        (Recipe::W4, MasterKind::F32, StateKind::Int8),
        (Recipe::W4a4, MasterKind::Bf16, StateKind::Int4),
        (Recipe::Nvfp4(Nvfp4Parts::ALL), MasterKind::Bf16Residual, StateKind::Bf16),
        (Recipe::W4, MasterKind::Nvfp4, StateKind::Int8),
        (Recipe::W4, MasterKind::Nvfp4, StateKind::Nvfp4),
    ] {
        // One micro-batch with and without clipping; two, whose gradients are gathered.
        for (clip, batches) in [(0.0, &one), (0.05, &one), (0.05, &batches(2))] {
            let of = |mode| trained(mode, clip, recipe, master, state, batches);
            let ((whole, a), (streamed, b)) = (of(StepMode::Whole), of(StepMode::Streaming));
            assert!(same(&whole, &streamed), "{recipe:?}, {master:?}, {state:?}, clip {clip}");
            for (a, b) in a.iter().zip(&b) {
                assert!((a.loss - b.loss).abs() <= 1e-6 * a.loss && (a.grad_norm / b.grad_norm - 1.0).abs() < 1e-5);
            }
            assert!(a[2].loss < a[0].loss, "{recipe:?}: it learns");
        }
    }
}

#[test]
fn four_by_one_is_two_by_two_is_one_by_four() {
    for recipe in [Recipe::Bf16, Recipe::W4] {
        let of = |size| gradients::<Cpu>(StepMode::Streaming, true, recipe, MasterKind::F32, &batches(size));
        let (loss, four) = of(4);
        for size in [2, 1] {
            let (l, other) = of(size);
            assert!((l - loss).abs() < 2e-6 * loss, "batches of {size}: loss {l}, {loss}");
            close(&four, &other, &format!("batches of {size}"));
        }
    }
}

#[test]
fn packed_is_unpacked() {
    let samples = samples();
    let divisor = samples.iter().map(Sample::supervised_tokens).sum();
    let apart = MicroBatch::new(&samples.iter().collect::<Vec<_>>(), divisor);
    let rows = rows::pack(samples, 60);
    assert!(rows.len() == 2 && rows.iter().any(|r| r.documents.len() > 1));
    // The first token of a document is predicted by none, packed or not.
    let packed = MicroBatch::new(&rows.iter().collect::<Vec<_>>(), divisor);
    for recipe in [Recipe::Bf16, Recipe::W4] {
        let of = |batch: &MicroBatch| {
            gradients::<Cpu>(StepMode::Streaming, true, recipe, MasterKind::F32, std::slice::from_ref(batch))
        };
        let ((a, apart), (b, packed)) = (of(&apart), of(&packed));
        assert!((a - b).abs() < 2e-6 * a, "loss {a} apart, {b} packed");
        close(&apart, &packed, "packed");
    }
}

fn close(a: &[(String, Vec<f32>)], b: &[(String, Vec<f32>)], what: &str) {
    for ((name, a), (_, b)) in a.iter().zip(b) {
        let error = crate::support::relative(a, b.iter().map(|x| f64::from(*x)));
        assert!(error < 2e-5, "{what}: {name} is {error} off");
    }
}

#[test]
fn clipping_by_the_last_norm_is_one_step_late() {
    let one = batches(4);
    let mut stepper = stepper::<Cpu>(StepMode::Streaming, 0.05, MasterKind::F32, StateKind::F32);
    stepper.clip = Clip::Previous;
    let mut net = trainee::<Cpu>(true, Recipe::Bf16, MasterKind::F32);
    let (back, first) = stepper.step(net, &one, 1, 0.0, &mut VramReport::new(None));
    net = back;
    assert_eq!(stepper.last_norm, Some(first.unwrap().grad_norm));
    // With a rate of 0 the norm stays: the second step is clipped by what it would be clipped by exactly.
    let (_, second) = stepper.step(net, &one, 2, 1e-3, &mut VramReport::new(None));
    let (_, exact) = trained(StepMode::Streaming, 0.05, Recipe::Bf16, MasterKind::F32, StateKind::F32, &one);
    assert_eq!(second.unwrap().grad_norm.to_bits(), exact[0].grad_norm.to_bits());
}

/// An NVFP4 master gives the gradients of an f32 master with the same values.
#[test]
fn codes_have_the_gradients_of_their_values() {
    let batches = batches(4);
    let (a, packed) = gradients::<Cpu>(StepMode::Streaming, true, Recipe::W4, MasterKind::Nvfp4, &batches);
    // The f32 master quantises in the forward, without the room of a master's scales: nearly the same codes.
    let (b, master) = gradients::<Cpu>(StepMode::Streaming, true, Recipe::W4, MasterKind::F32, &batches);
    assert!((a - b).abs() < 0.01 * b, "{a} {b}");
    for ((name, packed), (_, master)) in packed.iter().zip(&master) {
        let error = crate::support::relative(packed, master.iter().map(|x| f64::from(*x)));
        assert!(error < 0.3, "{name}: {error}");
    }
    let values = [0.5f32; 32];
    let packed = reference::quantize_master(&[0.3f32, -1.0, 0.02, 5.0].repeat(16), 4, 16);
    let roomy = reference::with_room(packed.clone(), 4, 16);
    assert_eq!(reference::dequantize(&roomy, 4, 16), reference::dequantize(&packed, 4, 16));
    assert_eq!(roomy.global, packed.global * MASTER_ROOM);
    let room = reference::quantize_master(&values, 2, 16);
    assert!((room.global * 2688.0 - 0.5 * MASTER_ROOM).abs() < 1e-6);
}
