//! Gradients of linear layers are slopes where the layer is smooth, and layers that share activations have the gradients that
//! each has alone. `recipe.rs` has the formulas of every recipe. The gradient of an embedding is a sum over the tokens of each
//! id.

use crate::support::{Cpu, Cube, RECIPES, Random, host, matrix, on_gpu, relative, supports};
use backend_nvfp4::{
    Activations, LayerWeight, LinearLayer, LinearSpec, Nvfp4Backend, Nvfp4Kernels, Nvfp4Linear, Precision, Recipe,
    Scaling, reference, segment_sum,
};
use burn::{
    backend::Autodiff,
    module::Param,
    tensor::{DType, Tensor, TensorPrimitive},
};
use burn_cubecl::CubeRuntime;

const M: usize = 21;
const N: usize = 19;
const K: usize = 48;

#[test]
fn a_smooth_layer_has_the_gradient_of_its_slope_on_the_cpu() {
    straight_through::<Cpu>(Default::default());
}

#[test]
fn a_smooth_layer_has_the_gradient_of_its_slope_on_the_gpu() {
    on_gpu!(straight_through_cube);
}

fn straight_through_cube<R: CubeRuntime>() {
    straight_through::<Cube<R>>(R::Device::default());
}

fn spec(recipe: Recipe) -> LinearSpec {
    LinearSpec::new(recipe, Scaling::Two, Precision::F32)
}

/// `sum(y * dy)` and its gradient with respect to x.
fn value_and_gradient<B: Nvfp4Kernels>(
    x: &[f32],
    w: &[f32],
    dy: &[f32],
    recipe: Recipe,
    device: &B::Device,
) -> (f32, Vec<f32>) {
    type A<B> = Autodiff<B>;
    let x = matrix::<A<B>>(x, M, K, device).require_grad();
    let w = Param::from_tensor(matrix::<A<B>>(w, N, K, device));
    let y = Nvfp4Linear::Master(w.into()).forward(x.clone(), spec(recipe));
    let value = (y * matrix::<A<B>>(dy, M, N, device)).sum();
    let dx = x.grad_remove(&mut value.clone().backward()).unwrap();
    (host(value)[0], host(dx))
}

/// Where activations are not quantized the layer is linear in x: a central difference is the gradient.
fn straight_through<B: Nvfp4Kernels>(device: B::Device) {
    let mut random = Random::new(17);
    let (x, w, dy) = (random.normals(M * K, 1.0), random.normals(N * K, 0.1), random.normals(M * N, 1.0));
    for recipe in [Recipe::Bf16, Recipe::W4] {
        let (_, dx) = value_and_gradient::<B>(&x, &w, &dy, recipe, &device);
        for at in [0, 100, M * K - 1] {
            let at_offset = |h: f32| {
                let mut moved = x.clone();
                moved[at] += h;
                value_and_gradient::<B>(&moved, &w, &dy, recipe, &device).0
            };
            let slope = at_offset(0.5) - at_offset(-0.5);
            assert!((slope - dx[at]).abs() < 2e-3 * dx[at].abs().max(1.0), "{recipe:?} x[{at}]: {slope} != {}", dx[at]);
        }
    }
}

#[test]
fn layers_that_share_activations_compute_as_each_alone_on_the_cpu() {
    sharing::<Cpu>(Default::default());
}

#[test]
fn layers_that_share_activations_compute_as_each_alone_on_the_gpu() {
    on_gpu!(sharing_cube);
}

fn sharing_cube<R: CubeRuntime>() {
    sharing::<Cube<R>>(R::Device::default());
}

/// Three layers of one operation are three operations: outputs, the sum of their dx, each dW; also when a layer is not
/// trained, or the loss does not depend on one.
fn sharing<B: Nvfp4Kernels>(device: B::Device) {
    const ROWS: [usize; 3] = [32, 16, 48];
    let mut random = Random::new(41);
    let (x, dys) = (random.normals(M * K, 1.0), ROWS.map(|n| random.normals(M * n, 1.0)));
    let weights = ROWS.map(|n| random.normals(n * K, 0.1));
    for recipe in RECIPES {
        for precision in [Precision::F32, Precision::Bf16] {
            if !supports::<B>(&device, precision.dtype()) {
                continue;
            }
            let spec = LinearSpec::new(recipe, Scaling::Two, precision);
            for (layers, frozen, unused) in [
                (&[0, 1, 2][..], None, None),
                (&[0, 2], None, None),
                (&[0, 1, 2], Some(1), None),
                (&[0, 1, 2], None, Some(2)),
            ] {
                let run = |of: &[usize]| {
                    let x = matrix::<Autodiff<B>>(&x, M, K, &device).cast(precision.dtype()).require_grad();
                    let parameter = |&i: &usize| {
                        let w = matrix::<Autodiff<B>>(&weights[i], ROWS[i], K, &device);
                        if frozen == Some(i) { w } else { w.require_grad() }
                    };
                    let w: Vec<_> = of.iter().map(parameter).collect();
                    // What is not trained may be codes.
                    let given = w.iter().zip(of).map(|(w, &i)| {
                        let weight = if frozen == Some(i) {
                            let w = w.clone().inner().into_primitive().tensor();
                            LayerWeight::Packed { packed: B::nvfp4_quantize(w, spec.weights()), gradient: None }
                        } else {
                            LayerWeight::Dense(w.clone().into_primitive().tensor())
                        };
                        LinearLayer { weight, spec: spec.slot(i as u32) }
                    });
                    let ys = Autodiff::<B>::nvfp4_linears(Activations::from(x.clone()), given.collect());
                    let ys: Vec<_> = ys
                        .into_iter()
                        .map(|y| Tensor::<Autodiff<B>, 2>::from_primitive(TensorPrimitive::Float(y)))
                        .collect();
                    let values: Vec<_> = ys.iter().map(|y| host(y.clone().inner().cast(DType::F32))).collect();
                    let used = ys.into_iter().zip(of).filter(|(_, i)| unused != Some(**i));
                    let loss = used
                        .map(|(y, &i)| (y.cast(DType::F32) * matrix::<Autodiff<B>>(&dys[i], M, ROWS[i], &device)).sum())
                        .reduce(|a, b| a + b);
                    let Some(loss) = loss else { return (values, None, vec![None]) };
                    let mut grads = loss.backward();
                    let dx = x.grad_remove(&mut grads).map(|dx| host(dx.cast(DType::F32)));
                    (values, dx, w.iter().map(|w| w.grad_remove(&mut grads).map(host)).collect::<Vec<_>>())
                };
                let label = format!("{recipe:?} {precision:?} {layers:?} frozen {frozen:?} unused {unused:?}");
                let bound = if precision == Precision::F32 { 1e-6 } else { 1e-2 };
                let wide = |v: &[f32]| v.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
                let (ys, dx, dws) = run(layers);
                let mut sum = vec![0.0f64; M * K];
                for ((&i, y), dw) in layers.iter().zip(&ys).zip(&dws) {
                    let (alone_y, alone_dx, alone_dw) = run(&[i]);
                    assert!(relative(y, wide(&alone_y[0])) < bound, "{label}: y of {i}");
                    assert_eq!(
                        dw.is_some(),
                        alone_dw[0].is_some() && unused != Some(i) && frozen != Some(i),
                        "{label}: {i}"
                    );
                    if let (Some(dw), Some(alone)) = (dw, &alone_dw[0]) {
                        assert!(relative(dw, wide(alone)) < bound, "{label}: dw of {i}");
                    }
                    if let Some(alone) = alone_dx {
                        sum.iter_mut().zip(alone).for_each(|(s, x)| *s += f64::from(x));
                    }
                }
                assert!(relative(&dx.unwrap(), sum) < bound, "{label}: dx");
            }
        }
    }
}

#[test]
fn the_gradient_of_an_embedding_adds_the_rows_of_each_id_on_the_gpu() {
    on_gpu!(embedding_cube);
}

fn embedding_cube<R: CubeRuntime>() {
    let mut random = Random::new(42);
    for (tokens, vocabulary, cols) in [(1, 3, 16), (300, 7, 130), (257, 1000, 515), (64, 64, 2560)] {
        let ids: Vec<u32> = (0..tokens).map(|_| random.below(vocabulary) as u32).collect();
        let (gradient, dy) = (random.normals(vocabulary * cols, 1.0), random.normals(tokens * cols, 1.0));
        for dtype in [DType::F32, DType::BF16] {
            let device = R::Device::default();
            if !supports::<Cube<R>>(&device, dtype) {
                continue;
            }
            let dy = matrix::<Cube<R>>(&dy, tokens, cols, &device).cast(dtype);
            let rounded = host(dy.clone().cast(DType::F32));
            let found = host(segment_sum(matrix(&gradient, vocabulary, cols, &device), &ids, dy));
            let mut expected = gradient.clone();
            reference::segment_sum(&mut expected, &ids, &rounded, cols);
            assert!(found == expected, "{tokens} tokens of {vocabulary}, {cols} columns, {dtype:?}: the bits differ");
            // The reference is the sum of the formula.
            let mut exact: Vec<f64> = gradient.iter().map(|x| f64::from(*x)).collect();
            for (token, id) in ids.iter().enumerate() {
                (0..cols).for_each(|c| exact[*id as usize * cols + c] += f64::from(rounded[token * cols + c]));
            }
            assert!(exact.iter().zip(&expected).all(|(a, b)| (a - f64::from(*b)).abs() < 1e-4));
        }
    }
}
