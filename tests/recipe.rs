//! What each recipe multiplies, as formulas in f64: the forward, dgrad and wgrad of a linear layer, with the quantized
//! operands that the recipe names. A transform on one operand only, a wrong block shape, or a draw of the wrong stream
//! gives another result.
//!
//! Every input is a multiple of 1/64 below 4, so that the Hadamard transform is exact in f32 and codes are equal, not near.

use crate::support::{
    Cpu, Cube, Random, host, matrix, on_gpu, relative,
    spec::{nearest, product, quantize, rotated, rounded_rows, stochastic, transposed, wide},
};
use backend_nvfp4::{
    BlockShape, LinearSpec, Nvfp4Kernels, Nvfp4Linear, Nvfp4Parts, Precision, Recipe, Scaling, Stream,
};
use burn::{backend::Autodiff, module::Param};
use burn_cubecl::CubeRuntime;

/// Numbers of tokens: one that is padded to 32 for wgrad, and one of whole blocks, whose gradients are quantized for dgrad and
/// wgrad at once.
const M: [usize; 2] = [21, 32];
/// Output features; input features.
const N: usize = 32;
const K: usize = 48;

const STREAM: Stream = Stream { seed: 0x0123_4567_89AB_CDEF, step: 3, stream: 4 };

/// Activations `[M, K]`, weight `[N, K]` and output gradient `[M, N]`.
struct Inputs {
    m: usize,
    x: Vec<f32>,
    w: Vec<f32>,
    dy: Vec<f32>,
}

impl Inputs {
    fn new(m: usize) -> Self {
        let mut random = Random::new(53);
        let mut draw = |len: usize, spread: f32| -> Vec<f32> {
            random.normals(len, spread).iter().map(|v| (v.clamp(-3.9, 3.9) * 64.0).round() / 64.0).collect()
        };
        Self { m, x: draw(m * K, 1.0), w: draw(N * K, 0.5), dy: draw(m * N, 0.7) }
    }
}

/// `y`, `dx` and `dW` of `sum(y * dy)`.
type Results = [Vec<f64>; 3];

/// What a recipe computes by its definition.
fn expected(inputs: &Inputs, spec: LinearSpec) -> Results {
    let Inputs { m, x, w, dy } = inputs;
    let m = *m;
    let two_level = spec.scaling == Scaling::Two;
    let square = match spec.recipe {
        Recipe::Bf16 | Recipe::W4 | Recipe::W4a4 => false,
        Recipe::Nvfp4(parts) => parts.square_blocks,
    };
    let quantized_w = quantize(w, N, K, two_level, square, nearest).values();
    let quantized_x = quantize(x, m, K, true, false, nearest).values();
    let (used_x, used_w) = match spec.recipe {
        Recipe::Bf16 => (wide(x), wide(w)),
        Recipe::W4 => (wide(x), quantized_w),
        Recipe::W4a4 | Recipe::Nvfp4(_) => (quantized_x, quantized_w),
    };
    let y = product(&used_x, &used_w, [m, N, K]);
    let columns_of_w = transposed(&used_w, N, K);
    let parts = match spec.recipe {
        Recipe::Bf16 | Recipe::W4 | Recipe::W4a4 => {
            let dx = product(&wide(dy), &columns_of_w, [m, K, N]);
            let dw = product(&transposed(&wide(dy), m, N), &transposed(&used_x, m, K), [N, K, m]);
            return [y, dx, dw];
        }
        Recipe::Nvfp4(parts) => parts,
    };

    let gradient = |values: &[f32], rows: usize, cols: usize, stream: Stream| {
        if parts.stochastic {
            quantize(values, rows, cols, true, false, stochastic(stream)).values()
        } else {
            quantize(values, rows, cols, true, false, nearest).values()
        }
    };
    let dx = product(&gradient(dy, m, N, STREAM), &columns_of_w, [m, K, N]);

    // wgrad sums over the tokens: both operands are transposed, padded with zeros to blocks of 16 tokens, rotated along
    // the tokens, and quantized along them.
    let padded = m.next_multiple_of(16);
    let across = |values: &[f32], cols: usize| -> Vec<f32> {
        let mut rows = values.to_vec();
        rows.resize(padded * cols, 0.0);
        let columns = transposed(&rows, padded, cols);
        if parts.hadamard { rotated(&columns).into_iter().map(|v| v as f32).collect() } else { columns }
    };
    let dy_across = gradient(&across(dy, N), N, padded, Stream { stream: STREAM.stream + 1, ..STREAM });
    let x_across = quantize(&across(x, K), K, padded, true, false, nearest).values();
    [y, dx, product(&dy_across, &x_across, [N, K, padded])]
}

/// What a backend computes.
fn computed<B: Nvfp4Kernels>(inputs: &Inputs, spec: LinearSpec, device: &B::Device) -> [Vec<f32>; 3] {
    let x = matrix::<Autodiff<B>>(&inputs.x, inputs.m, K, device).require_grad();
    let w = matrix::<Autodiff<B>>(&inputs.w, N, K, device).require_grad();
    let y = Nvfp4Linear::Master(Param::from_tensor(w.clone()).into()).forward(x.clone(), spec);
    let values = host(y.clone().inner());
    let mut grads = (y * matrix::<Autodiff<B>>(&inputs.dy, inputs.m, N, device)).sum().backward();
    [values, host(x.grad_remove(&mut grads).unwrap()), host(w.grad_remove(&mut grads).unwrap())]
}

/// The recipe nvfp4 with each choice of its parts.
fn recipes() -> Vec<Recipe> {
    let parts = (0..8u32).map(|bits| Nvfp4Parts {
        square_blocks: bits & 1 > 0,
        hadamard: bits & 2 > 0,
        stochastic: bits & 4 > 0,
    });
    [Recipe::Bf16, Recipe::W4, Recipe::W4a4].into_iter().chain(parts.map(Recipe::Nvfp4)).collect()
}

fn every_recipe_is_its_formula<B: Nvfp4Kernels>(device: B::Device) {
    M.into_iter().for_each(|m| recipes_are_their_formulas::<B>(&Inputs::new(m), &device));
}

fn recipes_are_their_formulas<B: Nvfp4Kernels>(inputs: &Inputs, device: &B::Device) {
    for (recipe, scaling) in recipes().into_iter().flat_map(|r| [(r, Scaling::Two), (r, Scaling::Single)]) {
        let spec = LinearSpec { stream: STREAM, ..LinearSpec::new(recipe, scaling, Precision::F32) };
        let (ours, exact) = (computed::<B>(inputs, spec, device), expected(inputs, spec));
        for ((name, ours), exact) in ["y", "dx", "dW"].into_iter().zip(&ours).zip(exact) {
            let error = relative(ours, exact);
            assert!(
                error < 2e-6,
                "{name} of {recipe:?} with {scaling:?} scales and {} tokens differs by {error:e}",
                inputs.m
            );
        }
    }
}

/// In inference the activations of each row have a scale of their own. Nothing else of a forward changes.
fn inference_is_its_formula<B: Nvfp4Kernels>(device: B::Device) {
    let inputs = Inputs::new(M[0]);
    for recipe in recipes() {
        let spec = LinearSpec { stream: STREAM, ..LinearSpec::new(recipe, Scaling::Two, Precision::F32) };
        let w = quantize(&inputs.w, N, K, true, spec.block == BlockShape::Square, nearest).values();
        let [training, ..] = expected(&inputs, spec);
        let rows = product(&rounded_rows(&inputs.x, K), &w, [inputs.m, N, K]);
        let quantized = recipe.packs_activations();
        let exact = if quantized { rows } else { training.clone() };
        let layer = Nvfp4Linear::Master(Param::from_tensor(matrix::<B>(&inputs.w, N, K, &device)).into());
        let ours = host(layer.forward(matrix::<B>(&inputs.x, inputs.m, K, &device), spec.each_row()));
        let error = relative(&ours, exact);
        assert!(error < 2e-6, "y of {recipe:?} differs by {error:e}");
        assert!(!quantized || relative(&ours, training) > 1e-3, "{recipe:?}: the scales of rows make no difference");
    }
}

#[test]
fn every_recipe_is_its_formula_on_the_cpu() {
    every_recipe_is_its_formula::<Cpu>(Default::default());
    inference_is_its_formula::<Cpu>(Default::default());
}

#[test]
fn every_recipe_is_its_formula_on_the_gpu() {
    fn on_cube<R: CubeRuntime>() {
        every_recipe_is_its_formula::<Cube<R>>(R::Device::default());
        inference_is_its_formula::<Cube<R>>(R::Device::default());
    }
    on_gpu!(on_cube);
}

/// The formulas of two recipes are far apart, further than any bound of this file: a test that takes one for the other
/// cannot pass.
#[test]
fn the_formulas_tell_the_recipes_apart() {
    let inputs = Inputs::new(M[0]);
    let results = recipes().into_iter().map(|recipe| {
        let spec = LinearSpec { stream: STREAM, ..LinearSpec::new(recipe, Scaling::Two, Precision::F32) };
        expected(&inputs, spec).concat()
    });
    let results: Vec<Vec<f64>> = results.collect();
    for (i, a) in results.iter().enumerate() {
        for b in &results[..i] {
            let narrow: Vec<f32> = a.iter().map(|v| *v as f32).collect();
            assert!(relative(&narrow, b.iter().copied()) > 1e-2);
        }
    }
    // The transform cancels in the exact product: rotating one operand of two changes it, rotating both does not.
    let m = inputs.m;
    let (dy, x) = (transposed(&inputs.dy, m, N), transposed(&inputs.x, m, K));
    let tokens = 16;
    let first =
        |v: &[f32], rows: usize| -> Vec<f32> { (0..rows).flat_map(|r| v[r * m..][..tokens].to_vec()).collect() };
    let (dy, x) = (first(&dy, N), first(&x, K));
    let exact = product(&wide(&dy), &wide(&x), [N, K, tokens]);
    let error = |a: &[f64], b: &[f64]| {
        let y: Vec<f32> = product(a, b, [N, K, tokens]).iter().map(|v| *v as f32).collect();
        relative(&y, exact.iter().copied())
    };
    assert!(error(&rotated(&dy), &rotated(&x)) < 1e-6);
    assert!(error(&rotated(&dy), &wide(&x)) > 0.5);
}
