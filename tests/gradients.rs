//! Gradients of the linear layer: against finite differences where the function is smooth, against
//! the straight-through formula where it is a staircase; and AdamW against its f32 reference.

use crate::support::{Cpu, Cube, Random, host, matrix, on_gpu, relative};
use backend_nvfp4::{
    AdamwState, AdamwStep, LinearSpec, Nvfp4Backend, Nvfp4Tensor, Precision, Recipe, Scaling, StateKind, reference,
    reference_adamw,
};
use burn::{
    backend::Autodiff,
    tensor::{DType, Shape, Tensor, TensorPrimitive},
};
use burn_cubecl::CubeRuntime;

const M: usize = 21;
const N: usize = 19;
const K: usize = 48;

#[test]
fn straight_through_on_the_cpu() {
    straight_through::<Cpu>(Default::default());
}

#[test]
fn straight_through_on_the_gpu() {
    on_gpu!(straight_through_cube);
}

fn straight_through_cube<R: CubeRuntime>() {
    straight_through::<Cube<R>>(R::Device::default());
    adamw_equals_reference::<Cube<R>>(R::Device::default());
}

#[test]
fn adamw_on_the_cpu() {
    adamw_equals_reference::<Cpu>(Default::default());
}

fn spec(recipe: Recipe) -> LinearSpec {
    LinearSpec { recipe, scaling: Scaling::Two, precision: Precision::F32 }
}

/// `sum(y * dy)` and its gradients with respect to x and w.
fn value_and_gradients<B: Nvfp4Backend>(
    x: &[f32],
    w: &[f32],
    dy: &[f32],
    recipe: Recipe,
    device: &B::Device,
) -> (f32, Vec<f32>, Vec<f32>) {
    type A<B> = Autodiff<B>;
    let x = matrix::<A<B>>(x, M, K, device).require_grad();
    let w = matrix::<A<B>>(w, N, K, device).require_grad();
    let y =
        A::<B>::nvfp4_linear(x.clone().into_primitive().tensor(), w.clone().into_primitive().tensor(), spec(recipe));
    let y = Tensor::<A<B>, 2>::from_primitive(TensorPrimitive::Float(y));
    let value = (y * matrix::<A<B>>(dy, M, N, device)).sum();
    let mut grads = value.clone().backward();
    let (dx, dw) = (x.grad_remove(&mut grads).unwrap(), w.grad_remove(&mut grads).unwrap());
    (host(value)[0], host(dx), host(dw))
}

fn straight_through<B: Nvfp4Backend>(device: B::Device) {
    let mut random = Random::new(17);
    let (x, w, dy) = (random.normals(M * K, 1.0), random.normals(N * K, 0.1), random.normals(M * N, 1.0));
    let quantised = |v: &[f32], rows, spec| {
        host(Nvfp4Tensor::quantize(matrix::<B>(v, rows, K, &device), spec).dequantize(DType::F32))
    };
    let wq = quantised(&w, N, spec(Recipe::W4).weights());
    let xq = quantised(&x, M, spec(Recipe::W4a4).activations());
    let transpose = |v: &[f32], rows: usize, cols: usize| -> Vec<f32> {
        (0..rows * cols).map(|i| v[i % rows * cols + i / rows]).collect()
    };
    for (recipe, x_used, w_used) in [(Recipe::Bf16, &x, &w), (Recipe::W4, &x, &wq), (Recipe::W4a4, &xq, &wq)] {
        let (_, dx, dw) = value_and_gradients::<B>(&x, &w, &dy, recipe, &device);
        let expected_dx = reference::matmul_nt(&dy, &transpose(w_used, N, K), M, K, N);
        let expected_dw = reference::matmul_nt(&transpose(&dy, M, N), &transpose(x_used, M, K), N, K, M);
        assert!(relative(&dx, expected_dx) < 2e-6, "{recipe:?} dx");
        assert!(relative(&dw, expected_dw) < 2e-6, "{recipe:?} dw");
    }
    // Smooth in x where activations are not quantised, and linear: central differences are exact.
    for recipe in [Recipe::Bf16, Recipe::W4] {
        let (_, dx, _) = value_and_gradients::<B>(&x, &w, &dy, recipe, &device);
        for at in [0, 100, M * K - 1] {
            let at_offset = |h: f32| {
                let mut moved = x.clone();
                moved[at] += h;
                value_and_gradients::<B>(&moved, &w, &dy, recipe, &device).0
            };
            let slope = (at_offset(0.5) - at_offset(-0.5)) / 1.0;
            assert!((slope - dx[at]).abs() < 2e-3 * dx[at].abs().max(1.0), "{recipe:?} x[{at}]: {slope} != {}", dx[at]);
        }
    }
}

fn adamw_equals_reference<B: Nvfp4Backend>(device: B::Device) {
    let (rows, cols) = (37, 48);
    let len = rows * cols;
    let mut random = Random::new(23);
    let mut w = random.normals(len, 0.05);
    let (mut m, mut v) = (vec![0.0; len], vec![0.0; len]);
    let shape = Shape::new([rows, cols]);
    let mut on_device = matrix::<B>(&w, rows, cols, &device).into_primitive().tensor();
    let mut small = on_device.clone();
    let mut state = AdamwState::zeros(StateKind::F32, shape.clone(), &device);
    let mut small_state = AdamwState::zeros(StateKind::Int8, shape, &device);
    let start = w.clone();
    for t in 1..=10 {
        // Gradients over four decades within a block, as an embedding has.
        let grad: Vec<f32> =
            random.normals(len, 1.0).iter().enumerate().map(|(i, g)| g * 10f32.powi(-(i as i32 % 4))).collect();
        let step = AdamwStep {
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            bias1: 1.0 - 0.9f32.powi(t),
            bias2: 1.0 - 0.95f32.powi(t),
            grad_scale: 0.7,
        };
        reference_adamw(&mut w, &grad, &mut m, &mut v, step);
        let g = || matrix::<B>(&grad, rows, cols, &device).into_primitive().tensor();
        (on_device, state) = B::adamw(on_device, g(), state, step, 512);
        (small, small_state) = B::adamw(small, g(), small_state, step, 512);
    }
    let full = host(Tensor::<B, 2>::from_primitive(TensorPrimitive::Float(on_device)));
    for (a, b) in full.iter().zip(&w) {
        assert!((a - b).abs() <= 1e-6 * b.abs().max(1e-3), "f32 states: {a} != {b}");
    }
    let small = host(Tensor::<B, 2>::from_primitive(TensorPrimitive::Float(small)));
    let moved = |to: &[f32]| -> Vec<f32> { to.iter().zip(&start).map(|(a, b)| a - b).collect() };
    let error = relative(&moved(&small), moved(&w).into_iter().map(f64::from));
    assert!(error < 0.1, "8-bit states moved the weights {error} away from f32 states");
}
