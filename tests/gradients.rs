//! Gradients of the linear layer: against finite differences where the function is smooth, against
//! the straight-through formula where it is a staircase; and AdamW against its f32 reference.

use crate::support::{Cpu, Cube, Random, host, matrix, on_gpu, relative};
use backend_nvfp4::{LinearSpec, LinearWeight, Nvfp4Backend, Nvfp4Tensor, Precision, Recipe, Scaling, reference};
use burn::{
    backend::Autodiff,
    tensor::{DType, Tensor, TensorPrimitive},
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
}

fn spec(recipe: Recipe) -> LinearSpec {
    LinearSpec::new(recipe, Scaling::Two, Precision::F32)
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
    let y = {
        let w = LinearWeight::Float(w.clone().into_primitive().tensor());
        A::<B>::nvfp4_linear(x.clone().into_primitive().tensor(), w, spec(recipe))
    };
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
