//! The streaming step equals the step in one graph: every gradient and every updated weight, bit for bit in f32.
//! Clipping uses the norm that was asked for, frozen blocks stay, micro-batches of any size and packed rows give the
//! same sums, and a failed step leaves a usable model.

use crate::support::{
    Cpu, Cube, RECIPES,
    files::{F32, demo_file},
    host, on_gpu, supports,
};
use backend_nvfp4::{
    DeviceMemory, DeviceServices, Gradient, LinearSpec, MasterKind, Nvfp4Kernels, Nvfp4Linear, Nvfp4Parts, Precision,
    Recipe, StateKind, TrainingBackend,
    reference::{self, MASTER_ROOM},
};
use burn::{
    backend::Autodiff,
    module::{AutodiffModule, Module, Param, ParamId},
    tensor::{DType, Shape, Tensor, TensorMetadata, TensorPrimitive, ops::FloatTensor},
};
use burn_cubecl::CubeRuntime;
use model_qwen3::{
    config::Qwen3Config,
    model::{Qwen3, ids_tensor},
    weights::{self, Field, Replace, fields},
};
use std::{collections::HashSet, sync::Arc};
use train_cli::{
    CliError,
    data::order::{MicroBatch, Order},
    data::rows,
    data::sample::{Sample, synthetic},
    memory::pool::Pool,
    memory::vram::VramReport,
    run::sample_answers::packed,
    settings::{Clip, LossKind},
    train::chunked_adamw::{AdamwConfig, ChunkedAdamw, Rate},
    train::clip::Clipping,
    train::damp,
    train::gradients::{Fate, Gathered, ModuleGradients},
    train::objective::Trainee,
    train::pass::Pass,
    train::step::{Stepped, Stepper},
};

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

/// The sample answers of a run come from codes that are made once. They are those of the model as it trains.
#[test]
fn a_model_with_packed_weights_computes_what_the_trained_one_does() {
    for recipe in RECIPES {
        let spec = LinearSpec::new(recipe, F32.scaling, F32.precision);
        let model = weights::random::<Cpu>(&config(false), spec, MasterKind::F32, 5, &Default::default()).unwrap();
        let model = model.with_bf16_last_blocks(1);
        let packed = packed(&model);
        let kinds = |model: &Qwen3<Cpu>| -> Vec<bool> {
            model.layers.iter().map(|block| matches!(block.mlp.up_proj, Nvfp4Linear::Packed(_))).collect()
        };
        let packs = recipe.packs_weights();
        assert_eq!((kinds(&model), kinds(&packed)), (vec![false; 3], vec![packs, packs, false]), "{recipe:?}");
        let ids = || ids_tensor::<Cpu>(&[vec![3, 1, 4, 1, 5, 9, 2, 6]], model.config(), &Default::default()).unwrap();
        let logits = |model: &Qwen3<Cpu>| host(model.forward(ids(), |_| {}));
        assert_eq!(logits(&packed), logits(&model), "{recipe:?}");
    }
}

fn trainee<B: Nvfp4Kernels + DeviceServices>(tied: bool, recipe: Recipe, master: MasterKind) -> Trainee<Autodiff<B>> {
    trainee_in(F32.precision, tied, recipe, master)
}

fn trainee_in<B: Nvfp4Kernels + DeviceServices>(
    precision: Precision,
    tied: bool,
    recipe: Recipe,
    master: MasterKind,
) -> Trainee<Autodiff<B>> {
    let spec = LinearSpec::new(recipe, F32.scaling, precision);
    let model = weights::random::<B>(&config(tied), spec, master, 5, &Default::default()).unwrap();
    let model = weights::trained::<Autodiff<B>>(model, master);
    Trainee::new(model.with_bf16_last_blocks(1), LossKind::CrossEntropy, 0)
}

/// A way to make a step.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Way {
    /// In one graph over the whole model, which only these tests have.
    Whole,
    /// Block by block, with the graphs of so many of the three blocks kept, and the gradients held or not.
    Blocks { kept: usize, gathers: bool },
}

const STREAMING: Way = Way::Blocks { kept: 0, gathers: false };
const STREAMS: [Way; 3] = [STREAMING, Way::Blocks { kept: 2, gathers: false }, Way::Blocks { kept: 0, gathers: true }];

/// Seed of the weights' initial values and of every rounding.
const SEED: u64 = 3;

fn optimizer<B: Nvfp4Kernels + DeviceServices>(master: MasterKind, state: StateKind) -> ChunkedAdamw<B> {
    let config = AdamwConfig {
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
        state,
        master,
        chunk_rows: 0,
        seed: SEED,
        float: DType::F32,
    };
    ChunkedAdamw::new(config, HashSet::new())
}

fn stepper<B: Nvfp4Kernels + DeviceServices>(
    way: Way,
    max_norm: f64,
    master: MasterKind,
    state: StateKind,
) -> Stepper<B> {
    let Way::Blocks { kept, gathers } = way else { panic!("no stepper makes one graph") };
    Stepper {
        gathers,
        kept,
        pool: Pool::new(None, 0, 0),
        undo: false,
        clipping: Clipping { clip: Clip::Exact, max_norm, last_norm: None },
        sums_dtype: DType::F32,
        optimizer: optimizer(master, state),
        seed: SEED,
        accumulation: 4,
    }
}

/// Makes a step without a memory report.
fn step(
    stepper: &mut Stepper<Cpu>,
    net: &mut Trainee<Autodiff<Cpu>>,
    batches: &[MicroBatch],
    number: usize,
) -> Result<Stepped, CliError> {
    stepper.step(net, batches, number, LR, &mut VramReport::new(None))
}

const LR: f64 = 1e-3;

/// Forward and backward in one graph. Returns the loss.
fn one_graph<B: Nvfp4Kernels + DeviceServices>(
    net: &mut Trainee<Autodiff<B>>,
    batch: &MicroBatch,
    pass: &mut Pass<'_, B>,
) -> f32 {
    let loss = net.batch_loss(batch);
    let value = host(loss.clone().inner())[0];
    let grads = ModuleGradients::of(&*net, loss.backward());
    net.update(|model| pass.walk(grads).model(model));
    value
}

/// Sums the gradients of the micro-batches of a step as a step does. Returns the loss.
fn sum_gradients<B: Nvfp4Kernels + DeviceServices>(
    way: Way,
    net: &mut Trainee<Autodiff<B>>,
    (number, batches): (usize, &[MicroBatch]),
    pass: &mut Pass<'_, B>,
) -> f32 {
    let mut loss = 0.0;
    if let Way::Blocks { kept, .. } = way {
        pass.kept = kept;
    }
    for (i, batch) in batches.iter().enumerate() {
        net.seed_rounding(SEED, ((number - 1) * 4 + i) as u32);
        loss += match way {
            Way::Whole => one_graph(net, batch, pass),
            Way::Blocks { .. } => pass.streaming(net, batch).unwrap(),
        };
    }
    loss
}

/// A list of values for each parameter, by its name.
type Named = Vec<(String, Vec<f32>)>;

/// The values of every parameter by name.
fn values(net: &Trainee<Autodiff<Cpu>>) -> Named {
    values_of(net)
}

fn values_of<B: Nvfp4Kernels>(net: &Trainee<Autodiff<B>>) -> Named {
    let inner = net.valid();
    fields(inner.model()).into_iter().map(|(name, field)| (name, weights::to_host(field.matrix()).unwrap())).collect()
}

fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

/// The names of the parameters whose bits differ.
fn differing(a: &Named, b: &Named) -> Vec<String> {
    assert!(a.iter().map(|(name, _)| name).eq(b.iter().map(|(name, _)| name)), "the same parameters");
    let pairs = a.iter().zip(b);
    pairs.filter(|((_, a), (_, b))| !same_bits(a, b)).map(|((name, _), _)| name.clone()).collect()
}

/// Four samples of unequal length, with tokens that repeat.
fn samples() -> Vec<Sample> {
    let all = synthetic(4, 40, 90, 3);
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
        made: Default::default(),
    };
    order.step(0)
}

/// The values of a tensor of any rank.
fn flat<B: Nvfp4Kernels + DeviceServices>(values: &FloatTensor<B>) -> Vec<f32> {
    let len = values.shape().num_elements();
    let values = B::float_reshape(values.clone(), Shape::new([len]));
    host(Tensor::<B, 1>::from_primitive(TensorPrimitive::Float(values)))
}

/// The sum of a parameter's gradients: what the optimizer would get. It stays among the sums.
fn sum_of<B: Nvfp4Kernels>(gathered: &mut Gathered<B>, id: ParamId) -> Option<FloatTensor<B>> {
    let fate = Fate::Apply { rate: Rate { lr: LR, clip_factor: 1.0 }, norm_is_known: true };
    let sum = gathered.settle(id, None, fate)?.0.gradient;
    gathered.settle(id, Some(Gradient::unmeasured(sum.clone())), Fate::Gather);
    Some(sum)
}

/// The loss of a step, and its gradients by name.
fn gradients<B: Nvfp4Kernels + DeviceServices>(
    way: Way,
    tied: bool,
    recipe: Recipe,
    master: MasterKind,
    batches: &[MicroBatch],
) -> (f32, Named) {
    let mut net = trainee::<B>(tied, recipe, master);
    let (mut optimizer, mut vram) = (optimizer(master, StateKind::F32), VramReport::new(None));
    let gathered = Gathered::new(DType::F32);
    let mut pass = Pass { step: 1, fate: Fate::Gather, gathered, kept: 0, optimizer: &mut optimizer, vram: &mut vram };
    let loss = sum_gradients(way, &mut net, (1, batches), &mut pass);
    let found = fields(net.model()).into_iter().map(|(name, field)| {
        let sum = sum_of(&mut pass.gathered, field.id().unwrap());
        let grad = flat::<B>(&sum.unwrap_or_else(|| panic!("{name} has no gradient")));
        assert_eq!(grad.len(), field.shape().iter().product::<usize>(), "{name}");
        (name, grad)
    });
    (loss, found.collect())
}

fn streaming_is_whole<B: Nvfp4Kernels + DeviceServices>() {
    let batches = batches(2);
    for (tied, recipe) in RECIPES.into_iter().flat_map(|r| [(true, r), (false, r)]) {
        let of = |way| gradients::<B>(way, tied, recipe, MasterKind::F32, &batches);
        let (a, whole) = of(Way::Whole);
        assert!(whole.iter().all(|(_, grad)| grad.iter().any(|g| *g != 0.0)), "every parameter has a gradient");
        for way in STREAMS {
            let (b, streamed) = of(way);
            assert_eq!(a.to_bits(), b.to_bits(), "{recipe:?}, {way:?}: loss");
            assert_eq!(differing(&whole, &streamed), [""; 0], "{recipe:?}, {way:?}, tied {tied}");
        }
    }
}

/// Products sum the squares of the gradients that they make where their kernels can. The norm is that of the gradients as they are
/// stored, whether they are held or dropped.
#[test]
fn the_norm_of_a_pass_is_that_of_its_gradients_on_the_gpu() {
    fn run<R: CubeRuntime>() {
        for precision in [Precision::F32, Precision::Bf16] {
            if supports::<Cube<R>>(&R::Device::default(), precision.dtype()) {
                RECIPES.iter().for_each(|recipe| norm_of_gradients::<Cube<R>>(precision, *recipe));
            }
        }
    }
    on_gpu!(run);
}

fn norm_of_gradients<B: Nvfp4Kernels + DeviceServices>(precision: Precision, recipe: Recipe) {
    let run = |fate| {
        let mut net = trainee_in::<B>(precision, true, recipe, MasterKind::F32);
        let (mut optimizer, mut vram) = (optimizer(MasterKind::F32, StateKind::F32), VramReport::new(None));
        let gathered = Gathered::new(DType::F32);
        let mut pass = Pass { step: 1, fate, gathered, kept: 0, optimizer: &mut optimizer, vram: &mut vram };
        sum_gradients(STREAMING, &mut net, (1, &batches(2)[..1]), &mut pass);
        pass.gathered.measure();
        let norm = pass.gathered.norm().unwrap().unwrap();
        let stored = fields(net.model()).into_iter().filter_map(|(_, field)| sum_of(&mut pass.gathered, field.id()?));
        let squares: f64 = stored.flat_map(|grad| flat::<B>(&grad)).map(|g| f64::from(g).powi(2)).sum();
        (norm, squares.sqrt())
    };
    let ((dropped, _), (held, stored)) = (run(Fate::Measure), run(Fate::Gather));
    assert_eq!(
        dropped.to_bits(),
        held.to_bits(),
        "{recipe:?} in {precision:?}: whether gradients are held changes the norm"
    );
    let error = (f64::from(held) / stored - 1.0).abs();
    assert!(error < 1e-5, "{recipe:?} in {precision:?}: the norm is {held}, that of the stored gradients {stored}");
}

#[test]
fn streaming_gives_every_gradient_of_one_graph_on_the_cpu() {
    streaming_is_whole::<Cpu>();
}

#[test]
fn streaming_gives_every_gradient_of_one_graph_on_the_gpu() {
    fn run<R: CubeRuntime>() {
        streaming_is_whole::<Cube<R>>();
    }
    on_gpu!(run);
}

/// All weights after three steps of the same micro-batches.
fn trained(
    way: Way,
    max_norm: f64,
    recipe: Recipe,
    (master, state): (MasterKind, StateKind),
    batches: &[MicroBatch],
) -> (Named, Vec<Stepped>) {
    let mut net = trainee::<Cpu>(true, recipe, master);
    let steps = if way == Way::Whole {
        let (mut optimizer, mut vram) = (optimizer(master, state), VramReport::new(None));
        (1..=3)
            .map(|step| {
                let gathered = Gathered::new(DType::F32);
                let (fate, kept) = (Fate::Gather, 0);
                let mut pass = Pass { step, fate, gathered, kept, optimizer: &mut optimizer, vram: &mut vram };
                let loss = sum_gradients(way, &mut net, (step, batches), &mut pass);
                pass.gathered.measure();
                let grad_norm = pass.gathered.norm().unwrap().unwrap();
                let clipping = Clipping { clip: Clip::Exact, max_norm, last_norm: None };
                let rate = Rate { lr: LR, clip_factor: clipping.clip_factor(Some(grad_norm)) };
                pass.fate = Fate::Apply { rate, norm_is_known: true };
                net.update(|model| pass.walk(ModuleGradients::default()).model(model));
                Stepped { loss, grad_norm }
            })
            .collect()
    } else {
        let mut stepper = stepper(way, max_norm, master, state);
        (1..=3).map(|number| step(&mut stepper, &mut net, batches, number).unwrap()).collect()
    };
    (values(&net), steps)
}

#[test]
fn every_way_gives_the_same_update() {
    let one = batches(4);
    for (recipe, master, state) in [
        (Recipe::Bf16, MasterKind::F32, StateKind::F32),
        (Recipe::W4, MasterKind::F32, StateKind::Int8),
        (Recipe::W4a4, MasterKind::BF16, StateKind::Int4),
        (Recipe::Nvfp4(Nvfp4Parts::ALL), MasterKind::BF16_RESIDUAL, StateKind::Bf16),
        (Recipe::W4, MasterKind::Nvfp4, StateKind::Int8),
        (Recipe::W4, MasterKind::Nvfp4, StateKind::Int4),
    ] {
        // One micro-batch with and without clipping, and two, whose gradients are summed.
        for (max_norm, batches) in [(0.0, &one), (0.05, &one), (0.05, &batches(2))] {
            let of = |way| trained(way, max_norm, recipe, (master, state), batches);
            let (whole, a) = of(Way::Whole);
            for way in STREAMS {
                let (streamed, b) = of(way);
                let what = format!("{recipe:?}, {way:?}, {master:?}, {state:?}, clip {max_norm}");
                assert_eq!(differing(&whole, &streamed), [""; 0], "{what}");
                for (a, b) in a.iter().zip(&b) {
                    assert!((a.loss - b.loss).abs() <= 1e-6 * a.loss && (a.grad_norm / b.grad_norm - 1.0).abs() < 1e-5);
                }
            }
            assert!(a[2].loss < a[0].loss, "{recipe:?}: it learns");
        }
    }
}

#[test]
fn micro_batches_of_any_size_give_the_same_sums() {
    for recipe in [Recipe::Bf16, Recipe::W4] {
        let of = |size| gradients::<Cpu>(STREAMING, true, recipe, MasterKind::F32, &batches(size));
        let (loss, four) = of(4);
        for size in [2, 1] {
            let (l, other) = of(size);
            assert!((l - loss).abs() < 2e-6 * loss, "batches of {size}: loss {l}, {loss}");
            close(&four, &other, &format!("batches of {size}"));
        }
    }
}

#[test]
fn packed_rows_give_the_gradients_of_separate_rows() {
    let samples = samples();
    let divisor = samples.iter().map(Sample::supervised_tokens).sum();
    let apart = MicroBatch::new(&samples.iter().collect::<Vec<_>>(), divisor);
    let rows = rows::pack(samples, 60);
    assert!(rows.len() == 2 && rows.iter().any(|r| r.documents.len() > 1));
    // No token predicts the first token of a document, packed or not.
    let packed = MicroBatch::new(&rows.iter().collect::<Vec<_>>(), divisor);
    for recipe in [Recipe::Bf16, Recipe::W4] {
        let of = |batch: &MicroBatch| {
            let batches = std::slice::from_ref(batch);
            gradients::<Cpu>(STREAMING, true, recipe, MasterKind::F32, batches)
        };
        let ((a, apart), (b, packed)) = (of(&apart), of(&packed));
        assert!((a - b).abs() < 2e-6 * a, "loss {a} apart, {b} packed");
        close(&apart, &packed, "packed");
    }
}

fn close(a: &Named, b: &Named, what: &str) {
    for ((name, a), (_, b)) in a.iter().zip(b) {
        let error = crate::support::relative(a, b.iter().map(|x| f64::from(*x)));
        assert!(error < 2e-5, "{what}: {name} is {error} off");
    }
}

/// The norm that gradients are clipped to: far below the norms of these steps.
const MAX_NORM: f64 = 0.05;

/// Three steps whose gradient norms differ: of one micro-batch, of another, and of two.
fn unequal_steps() -> [Vec<MicroBatch>; 3] {
    [batches(4), batches(1)[1..2].to_vec(), batches(2)]
}

/// All weights after [`unequal_steps`]: gradients are summed, their norm is measured on the host, and they are
/// multiplied by what `scale` makes of the norms up to and including this step's.
fn clipped_by_hand(scale: impl Fn(&[f64]) -> f64) -> (Named, Vec<f64>) {
    let mut net = trainee::<Cpu>(true, Recipe::Bf16, MasterKind::F32);
    let (mut optimizer, mut vram) = (optimizer(MasterKind::F32, StateKind::F32), VramReport::new(None));
    let mut norms = Vec::new();
    for (number, batches) in (1..).zip(unequal_steps()) {
        let gathered = Gathered::new(DType::F32);
        let mut pass =
            Pass { step: number, fate: Fate::Gather, gathered, kept: 0, optimizer: &mut optimizer, vram: &mut vram };
        sum_gradients(Way::Whole, &mut net, (number, &batches), &mut pass);
        let ids = fields(net.model()).into_iter().map(|(_, field)| field.id().unwrap());
        let grads = ids.flat_map(|id| flat::<Cpu>(&sum_of(&mut pass.gathered, id).unwrap()));
        norms.push(grads.map(|g| f64::from(g).powi(2)).sum::<f64>().sqrt());
        pass.fate = Fate::Apply { rate: Rate { lr: LR, clip_factor: scale(&norms) }, norm_is_known: true };
        net.update(|model| pass.walk(ModuleGradients::default()).model(model));
    }
    (values(&net), norms)
}

#[test]
fn gradients_are_clipped_by_the_norm_that_was_asked_for() {
    let (unclipped, norms) = clipped_by_hand(|_| 1.0);
    assert!(norms.iter().all(|norm| *norm > 2.0 * MAX_NORM), "clipping acts in every step: {norms:?}");
    assert!(norms.windows(2).all(|n| (n[0] / n[1] - 1.0).abs() > 0.1), "the norms differ: {norms:?}");
    let by = |norm: f64| MAX_NORM / (norm + 1e-6);
    // The first step has no previous norm: it is not clipped.
    let previous = |norms: &[f64]| norms.iter().rev().nth(1).map_or(1.0, |norm| by(*norm));
    let exact = |norms: &[f64]| by(norms[norms.len() - 1]);
    let by_hand = [(Clip::Exact, clipped_by_hand(exact)), (Clip::Previous, clipped_by_hand(previous))];
    for (clip, (expected, norms)) in by_hand {
        for way in STREAMS {
            let mut stepper = stepper(way, MAX_NORM, MasterKind::F32, StateKind::F32);
            stepper.clipping.clip = clip;
            let mut net = trainee::<Cpu>(true, Recipe::Bf16, MasterKind::F32);
            for ((number, batches), norm) in (1..).zip(unequal_steps()).zip(&norms) {
                let stepped = step(&mut stepper, &mut net, &batches, number).unwrap();
                let relative = f64::from(stepped.grad_norm) / norm - 1.0;
                assert!(relative.abs() < 1e-5, "{clip:?}, {way:?}, step {number}: norm {}", stepped.grad_norm);
                assert_eq!(stepper.clipping.last_norm, Some(stepped.grad_norm));
            }
            // The factors differ in the last bits of the norm only; a step without clipping moves weights by far more.
            let found = values(&net);
            let distance = |a: &Named| {
                let pairs = a.iter().zip(&found).flat_map(|((_, a), (_, b))| a.iter().zip(b));
                pairs.map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>().sqrt()
            };
            let (error, effect) = (distance(&expected), distance(&unclipped));
            assert!(error < 1e-3 * effect, "{clip:?}, {way:?}: {error} off, clipping moves weights by {effect}");
        }
    }
}

/// The first `blocks` blocks and the embedding are not trained.
fn frozen_below(blocks: usize, recipe: Recipe) -> Trainee<Autodiff<Cpu>> {
    let mut model = trainee::<Cpu>(true, recipe, MasterKind::F32).into_model();
    model.embed_tokens = model.embed_tokens.no_grad();
    let layers = std::mem::take(&mut model.layers).into_iter().enumerate();
    model.layers = layers.map(|(i, block)| if i < blocks { block.no_grad() } else { block }).collect();
    Trainee::new(model, LossKind::CrossEntropy, blocks)
}

#[test]
fn frozen_blocks_stay_and_the_others_train_alike_in_every_way() {
    for (recipe, batches) in [(Recipe::Bf16, batches(4)), (Recipe::W4a4, batches(2))] {
        let of = |way| {
            let mut stepper = stepper(way, MAX_NORM, MasterKind::F32, StateKind::F32);
            let mut net = frozen_below(2, recipe);
            let before = values(&net);
            for number in 1..=2 {
                step(&mut stepper, &mut net, &batches, number).unwrap();
            }
            let after = values(&net);
            let trained = |name: &str| name.starts_with("model.layers.2.") || name == "model.norm.weight";
            let expected: Vec<_> = after.iter().map(|(name, _)| name.clone()).filter(|name| trained(name)).collect();
            assert_eq!(differing(&before, &after), expected, "{recipe:?}, {way:?}");
            after
        };
        for way in &STREAMS[1..] {
            assert_eq!(differing(&of(STREAMING), &of(*way)), [""; 0], "{recipe:?}, {way:?}");
        }
    }
}

#[test]
fn blocks_frozen_on_their_codes_keep_them_in_every_way() {
    let of = |way| {
        let mut stepper = stepper(way, MAX_NORM, MasterKind::F32, StateKind::F32);
        let mut net = trainee::<Cpu>(true, Recipe::W4, MasterKind::F32);
        step(&mut stepper, &mut net, &batches(4), 1).unwrap();
        net.update(|model| damp::freeze(model, 1, &mut stepper.optimizer));
        let before = values(&net);
        step(&mut stepper, &mut net, &batches(4), 2).unwrap();
        let after = values(&net);
        let frozen = |name: &str| name.starts_with("model.layers.0.") && name.contains("_proj");
        let expected: Vec<_> = after.iter().map(|(name, _)| name.clone()).filter(|name| !frozen(name)).collect();
        assert_eq!(differing(&before, &after), expected, "{way:?}");
        after
    };
    for way in &STREAMS[1..] {
        assert_eq!(differing(&of(STREAMING), &of(*way)), [""; 0], "{way:?}");
    }
}

#[test]
fn a_step_that_fails_before_its_update_changes_nothing() {
    for way in STREAMS {
        for clip in [Clip::Exact, Clip::Previous] {
            let fresh = || {
                let mut stepper = stepper(way, MAX_NORM, MasterKind::F32, StateKind::F32);
                stepper.clipping.clip = clip;
                (stepper, trainee::<Cpu>(true, Recipe::W4, MasterKind::F32))
            };
            let (mut stepper, mut net) = fresh();
            let before = values(&net);
            // A divisor of 0 makes the loss of the second micro-batch infinite.
            let mut bad = batches(2);
            bad[1].divisor = 0;
            let error = step(&mut stepper, &mut net, &bad, 1).unwrap_err();
            assert!(matches!(error, CliError::Diverged { what: "loss", .. }), "{error}");
            assert_eq!(differing(&before, &values(&net)), [""; 0], "{way:?}, {clip:?}: {error}");

            // The next step is the step that the model makes without the failure.
            let (mut other, mut untouched) = fresh();
            step(&mut stepper, &mut net, &batches(2), 1).unwrap();
            step(&mut other, &mut untouched, &batches(2), 1).unwrap();
            assert_eq!(differing(&values(&untouched), &values(&net)), [""; 0], "{way:?}, {clip:?}");
        }
    }
}

/// Weights of the final norm that leave the loss finite, and make the squares of the gradients overflow.
fn with_a_steep_head() -> Trainee<Autodiff<Cpu>> {
    let mut net = trainee::<Cpu>(true, Recipe::Bf16, MasterKind::F32);
    net.update(|mut model| {
        let (id, weight, mapper) = model.norm.consume();
        let steep = Tensor::from_inner(weight.inner() * 1e25).require_grad();
        model.norm = Param::from_mapped_value(id, steep, mapper);
        model
    });
    net
}

#[test]
fn an_infinite_norm_stops_the_run_and_leaves_every_parameter_in_the_model() {
    for way in STREAMS {
        for (clip, undo) in [(Clip::Exact, false), (Clip::Previous, false), (Clip::Previous, true)] {
            let mut stepper = stepper(way, MAX_NORM, MasterKind::F32, StateKind::F32);
            (stepper.clipping.clip, stepper.undo) = (clip, undo);
            let mut net = with_a_steep_head();
            let before = values(&net);
            let error = step(&mut stepper, &mut net, &batches(4), 1).unwrap_err();
            assert!(matches!(error, CliError::Diverged { what: "gradient norm", .. }), "{error}");
            // A step that clips by the previous norm learns its own after the update, which a copy undoes. Only the gradient
            // of the final norm is finite here and comes first; after the next one the device changes nothing.
            let late = clip == Clip::Previous && !undo;
            assert_eq!(error.to_string().contains("nothing was updated"), !late, "{error}");
            let moved: &[&str] = if late { &["model.norm.weight"] } else { &[] };
            assert_eq!(differing(&before, &values(&net)), moved, "{way:?}, {clip:?}, undo {undo}");
            let has_a_state = stepper.optimizer.state(net.model().embed_tokens.id).is_some();
            assert_eq!(has_a_state, late, "{way:?}, {clip:?}, undo {undo}");
            let _ = host(net.batch_loss(&batches(4)[0]).inner());
        }
    }
}

/// A first block in which the squares of one gradient overflow, that of `down_proj`. The loss is finite, and so are all other
/// gradients.
fn with_a_steep_first_block<B: Nvfp4Kernels + DeviceServices>() -> Trainee<Autodiff<B>> {
    fn scaled<AB: TrainingBackend>(linear: Nvfp4Linear<AB>, factor: f64) -> Nvfp4Linear<AB> {
        let param = |p: Param<Tensor<AB, 2>>| {
            let (id, weight, mapper) = p.consume();
            Param::from_mapped_value(id, Tensor::from_inner(weight.inner() * factor).require_grad(), mapper)
        };
        match linear {
            Nvfp4Linear::Master(p) => Nvfp4Linear::Master(param(p.weight).into()),
            Nvfp4Linear::Dense(p) => Nvfp4Linear::Dense(param(p)),
            other => other,
        }
    }
    let mut net = trainee::<B>(false, Recipe::Bf16, MasterKind::F32);
    net.update_block(0, |mut block| {
        block.mlp.up_proj = scaled(block.mlp.up_proj, 1e25);
        block.mlp.down_proj = scaled(block.mlp.down_proj, 1e-25);
        block
    });
    net
}

/// Where nothing undoes a step, the device stops it: what is updated before the bad gradient is known has moved, and nothing
/// after it.
#[test]
fn no_tensor_is_updated_after_a_gradient_that_is_not_finite() {
    fn check<B: Nvfp4Kernels + DeviceServices>() {
        for (way, state) in [(STREAMING, StateKind::F32), (STREAMS[1], StateKind::Int8), (STREAMS[1], StateKind::Int4)]
        {
            let mut stepper = stepper::<B>(way, MAX_NORM, MasterKind::F32, state);
            stepper.clipping.clip = Clip::Previous;
            let mut net = with_a_steep_first_block::<B>();
            let before = values_of(&net);
            let error = stepper.step(&mut net, &batches(1), 1, 1e-3, &mut VramReport::new(None)).unwrap_err();
            assert!(matches!(error, CliError::Diverged { what: "gradient norm", .. }), "{error}");
            let changed = differing(&before, &values_of(&net));
            let moved = |name: &str| changed.iter().any(|changed| changed == name);
            let earlier =
                ["lm_head.weight", "model.layers.1.mlp.down_proj.weight", "model.layers.0.mlp.up_proj.weight"];
            assert!(earlier.iter().all(|name| moved(name)), "{state:?}: {changed:?}");
            assert!(!moved("model.layers.0.mlp.down_proj.weight"), "{state:?}: {changed:?}");
            assert!(!moved("model.embed_tokens.weight"), "{state:?}: {changed:?}");
        }
    }
    check::<Cpu>();
    fn on_cube<R: CubeRuntime>() {
        check::<Cube<R>>();
    }
    on_gpu!(on_cube);
}

/// NVFP4 master weights have nearly the gradients of the f32 master weights that they were quantized from: they point the
/// same way, and their sizes agree.
#[test]
fn codes_have_the_gradients_of_their_values() {
    let batches = batches(4);
    let (a, packed) = gradients::<Cpu>(STREAMING, true, Recipe::W4, MasterKind::Nvfp4, &batches);
    // The forward quantizes f32 masters without the headroom that the scales of NVFP4 masters have, so the codes are
    // nearly the same.
    let (b, master) = gradients::<Cpu>(STREAMING, true, Recipe::W4, MasterKind::F32, &batches);
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

/// The graphs that a step keeps are gone when its loss is refused, or the next step would have theirs and its own.
#[test]
fn a_refused_loss_leaves_no_graph_behind() {
    fn on_cube<R: CubeRuntime>() {
        let mut net = trainee::<Cube<R>>(false, Recipe::Bf16, MasterKind::F32);
        let mut held_after = |divisor: Option<usize>| {
            let mut batch = batches(4).remove(0);
            batch.divisor = divisor.unwrap_or(batch.divisor);
            let (mut optimizer, mut vram) = (optimizer(MasterKind::F32, StateKind::F32), VramReport::new(None));
            let (fate, gathered) = (Fate::Measure, Gathered::new(DType::F32));
            let mut pass = Pass { step: 1, fate, gathered, kept: 3, optimizer: &mut optimizer, vram: &mut vram };
            assert_eq!(pass.streaming(&mut net, &batch).is_ok(), divisor.is_none());
            drop(pass);
            Cube::<R>::memory_in_use(&net.model().device()).unwrap().in_use
        };
        held_after(None);
        let good = held_after(None);
        // A divisor of 0 makes the loss infinite.
        let bad = held_after(Some(0));
        assert!(bad <= good + 4096, "{good} bytes are held after a good step, {bad} after a bad one");
    }
    on_gpu!(on_cube);
}

/// Where the graph of a block is kept, the optimizer leaves the codes of its weights, which the next step reads. This changes no
/// number, and nobody else holds the codes.
#[test]
fn codes_that_the_optimizer_leaves_change_no_number_on_the_gpu() {
    fn coded<B: Nvfp4Kernels>(model: &Qwen3<B>) -> usize {
        let coded = |field: &Field<'_, B>| matches!(field, Field::Linear(Nvfp4Linear::Master(w)) if w.codes.is_some());
        fields(model).iter().filter(|(_, field)| coded(field)).count()
    }
    fn on_cube<R: CubeRuntime>() {
        for (recipe, master, state) in [
            (Recipe::W4a4, MasterKind::BF16, StateKind::Int8),
            (Recipe::W4, MasterKind::BF16_RESIDUAL, StateKind::Int4),
        ] {
            let run = |kept| {
                let mut net = trainee::<Cube<R>>(true, recipe, master);
                let mut stepper = stepper::<Cube<R>>(Way::Blocks { kept, gathers: false }, 0.05, master, state);
                let steps = (1..=4).map(|number| {
                    // The largest weight of a matrix moves in the third step at the latest.
                    let lr = if number == 3 { 0.1 } else { 1e-4 };
                    let stepped = stepper.step(&mut net, &batches(4), number, lr, &mut VramReport::new(None)).unwrap();
                    [stepped.loss.to_bits(), stepped.grad_norm.to_bits()]
                });
                let steps: Vec<_> = steps.collect();
                // Of three blocks the last one is not quantized. A block has seven matrices.
                assert_eq!(
                    coded(net.valid().model()),
                    7 * kept.saturating_sub(1),
                    "{recipe:?}, {kept} graphs are kept"
                );
                assert_eq!(coded(net.copy().valid().model()), 0, "the copy from which a step is undone");
                // An evaluation that quantizes otherwise, or not at all, reads the values.
                for other in RECIPES {
                    let [left, none] = [net.valid(), net.copy().valid()].map(|mut net| {
                        net.update(|model| model.with_recipe(other));
                        host(net.batch_loss(&batches(4)[0]))[0]
                    });
                    assert_eq!(left.to_bits(), none.to_bits(), "{recipe:?} evaluated as {other:?}");
                }
                assert_eq!(coded(&net.valid().into_model()), 0, "the model that is saved");
                (values_of(&net), steps)
            };
            let ((quantized, a), (left, b)) = (run(0), run(3));
            assert_eq!(a, b, "{recipe:?}: losses and norms");
            assert_eq!(differing(&quantized, &left), [""; 0], "{recipe:?}");
        }
    }
    on_gpu!(on_cube);
}
