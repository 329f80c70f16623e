//! What a block computes besides its linear layers is its formula, and its gradients are the formula's slopes: every
//! backend against f64 and its finite differences. `random_products.rs` has the kernels of 16-bit types.

use crate::support::{Cpu, Cube, Random, host, matrix, on_gpu, relative};
use backend_nvfp4::{AttentionSpec, Documents, LinearSpec, Nvfp4Kernels, Precision, Recipe, Rotary, Scaling, ops};
use burn::{
    backend::Autodiff,
    tensor::{Int, Tensor, TensorData, backend::Backend, ops::FloatTensor},
};
use burn_cubecl::CubeRuntime;

const EPS: f64 = 1e-6;

#[test]
fn blocks_and_their_gradients_are_the_formula_on_the_cpu() {
    gradients::<Cpu>(Default::default());
}

#[test]
fn blocks_and_their_gradients_are_the_formula_on_the_gpu() {
    on_gpu!(gradients_cube);
}

fn gradients_cube<R: CubeRuntime>() {
    gradients::<Cube<R>>(R::Device::default());
}

fn primitive<B: Backend, const D: usize>(x: Tensor<B, D>) -> FloatTensor<B> {
    x.into_primitive().tensor()
}

/// Compares autodiff of `sum(f(inputs) * dy)` with central differences of `expected`, an f64 formula of the inputs.
fn check<B: Nvfp4Kernels>(
    name: &str,
    inputs: &[(Vec<f32>, [usize; 2])],
    device: &B::Device,
    run: impl Fn(&[Tensor<Autodiff<B>, 2>]) -> Tensor<Autodiff<B>, 2>,
    expected: impl Fn(&[Vec<f64>]) -> Vec<f64>,
) {
    let tensors: Vec<_> =
        inputs.iter().map(|(v, [r, c])| matrix::<Autodiff<B>>(v, *r, *c, device).require_grad()).collect();
    let y = run(&tensors);
    let dims = y.dims();
    let dy = Random::new(99).normals(dims[0] * dims[1], 1.0);
    let wide: Vec<Vec<f64>> = inputs.iter().map(|(v, _)| v.iter().map(|x| f64::from(*x)).collect()).collect();
    let values = expected(&wide);
    let error = relative(&host(y.clone().inner()), values.iter().copied());
    assert!(error < 2e-6, "{name}: values differ by {error}");

    let mut grads = (y * matrix::<Autodiff<B>>(&dy, dims[0], dims[1], device)).sum().backward();
    let value = |inputs: &[Vec<f64>]| -> f64 { expected(inputs).iter().zip(&dy).map(|(y, d)| y * f64::from(*d)).sum() };
    for (i, tensor) in tensors.iter().enumerate() {
        let ours = host(tensor.grad_remove(&mut grads).unwrap());
        let slopes = (0..ours.len()).map(|at| {
            let mut moved = wide.clone();
            let h = 1e-5;
            moved[i][at] += h;
            let up = value(&moved);
            moved[i][at] -= 2.0 * h;
            (up - value(&moved)) / (2.0 * h)
        });
        let error = relative(&ours, slopes);
        assert!(error < 1e-5, "{name}: gradient {i} differs by {error}");
    }
}

fn normalized(x: &[f64], w: &[f64]) -> Vec<f64> {
    let n = w.len();
    x.chunks(n)
        .flat_map(|row| {
            let scale = (row.iter().map(|v| v * v).sum::<f64>() / n as f64 + EPS).sqrt().recip();
            row.iter().zip(w).map(move |(v, w)| v * scale * w).collect::<Vec<_>>()
        })
        .collect()
}

fn gradients<B: Nvfp4Kernels>(device: B::Device) {
    let mut random = Random::new(5);
    norms_and_gates::<B>(&mut random, &device);
    rotated_heads::<B>(&mut random, &device);
    attention::<B>(&mut random, &device);
    head::<B>(&mut random, &device);
}

fn norms_and_gates<B: Nvfp4Kernels>(random: &mut Random, device: &B::Device) {
    let plain = LinearSpec::new(Recipe::Bf16, Scaling::Two, Precision::F32);
    // Odd numbers of rows; columns that make one vector and several vectors of a unit of the kernel.
    for (rows, cols) in [(1, 4), (5, 24), (19, 136)] {
        let x = random.normals(rows * cols, 1.0);
        let w = random.normals(cols, 0.3).iter().map(|v| v + 1.0).collect::<Vec<_>>();
        check::<B>(
            "rms_norm",
            &[(x.clone(), [rows, cols]), (w, [1, cols])],
            device,
            |t| ops::rms_norm(t[0].clone(), None, t[1].clone().reshape([cols]), EPS, plain).1.tensor(),
            |v| normalized(&v[0], &v[1]),
        );
        // The norm's backward adds to the gradient that its input has already, of a leaf and of a sum.
        let added = random.normals(rows * cols, 1.0);
        let w = random.normals(cols, 0.3).iter().map(|v| v + 1.0).collect::<Vec<_>>();
        check::<B>(
            "x + rms_norm(x)",
            &[(x.clone(), [rows, cols]), (w.clone(), [1, cols])],
            device,
            |t| {
                let (x, normed) = ops::rms_norm(t[0].clone(), None, t[1].clone().reshape([cols]), EPS, plain);
                x + normed.tensor()
            },
            |v| v[0].iter().zip(normalized(&v[0], &v[1])).map(|(x, n)| x + n).collect(),
        );
        check::<B>(
            "sum and norm",
            &[(x.clone(), [rows, cols]), (added, [rows, cols]), (w, [1, cols])],
            device,
            |t| {
                let (x, added, w) = (t[0].clone(), t[1].clone(), t[2].clone().reshape([cols]));
                let (sum, n) = ops::rms_norm(x, Some(added), w, EPS, plain);
                sum + n.tensor()
            },
            |v| {
                let sum: Vec<f64> = v[0].iter().zip(&v[1]).map(|(x, a)| x + a).collect();
                sum.iter().zip(normalized(&sum, &v[2])).map(|(x, n)| x + n).collect()
            },
        );
        let up = random.normals(rows * cols, 1.0);
        check::<B>(
            "swiglu",
            &[(x, [rows, cols]), (up, [rows, cols])],
            device,
            |t| ops::swiglu(t[0].clone(), t[1].clone(), plain).tensor(),
            |v| v[0].iter().zip(&v[1]).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect(),
        );
    }
}

fn rotated_heads<B: Nvfp4Kernels>(random: &mut Random, device: &B::Device) {
    type A<B> = Autodiff<B>;
    for (rows, heads, e) in [(3, 1, 16), (5, 3, 32), (2, 8, 64)] {
        let positions: Vec<i32> = (0..rows as i32).map(|i| (i * 7) % 11).collect();
        let (cos, sin) = angles(11, e / 2);
        let rotary = Rotary::<A<B>> {
            cos: primitive(matrix::<A<B>>(&cos, 11, e / 2, device)),
            sin: primitive(matrix::<A<B>>(&sin, 11, e / 2, device)),
            positions: ints::<B>(&positions, device).into_primitive(),
        };
        let x = random.normals(rows * heads * e, 1.0);
        let w = random.normals(e, 0.3).iter().map(|v| v + 1.0).collect::<Vec<_>>();
        check::<B>(
            "norm_rope",
            &[(x, [rows, heads * e]), (w, [1, e])],
            device,
            |t| ops::norm_rope(t[0].clone(), t[1].clone().reshape([e]), &rotary, EPS),
            |v| {
                let mut y = normalized(&v[0], &v[1]);
                for (i, head) in y.chunks_mut(e).enumerate() {
                    let line = positions[i / heads] as usize * (e / 2);
                    for c in 0..e / 2 {
                        let (a, b) = (head[c], head[c + e / 2]);
                        let (cos, sin) = (f64::from(cos[line + c]), f64::from(sin[line + c]));
                        (head[c], head[c + e / 2]) = (a * cos - b * sin, b * cos + a * sin);
                    }
                }
                y
            },
        );
    }
}

fn attention<B: Nvfp4Kernels>(random: &mut Random, device: &B::Device) {
    type A<B> = Autodiff<B>;
    // Two rows of tokens, the second with two documents; two query heads share each key head.
    let (h, k, e, t) = (4, 2, 8, 5);
    let starts = vec![0, 0, 0, 0, 0, 0, 0, 0, 3, 3];
    let docs = Documents::<A<B>>::new(2, 0, starts.clone(), device);
    let spec = AttentionSpec { heads: h, kv_heads: k, head_dim: e, precision: Precision::F32 };
    let [q, key, v] = [h, k, k].map(|n| (random.normals(2 * t * n * e, 1.0), [2 * t, n * e]));
    check::<B>(
        "attention",
        &[q, key, v],
        device,
        |x| ops::attention(x[0].clone(), x[1].clone(), x[2].clone(), &docs, spec),
        |x| reference_attention(&x[0], &x[1], &x[2], &starts, t, [h, k, e]),
    );
}

fn head<B: Nvfp4Kernels>(random: &mut Random, device: &B::Device) {
    type A<B> = Autodiff<B>;
    let (m, d, vocabulary) = (7, 12, 20);
    let targets: Vec<i32> = (0..m as i32).map(|i| (i * 5) % 20).collect();
    check::<B>(
        "head_loss",
        &[(random.normals(m * d, 1.0), [m, d]), (random.normals(vocabulary * d, 0.5), [vocabulary, d])],
        device,
        |x| {
            let ids = ints::<A<B>>(&targets, device);
            ops::head_loss(x[0].clone(), x[1].clone(), ids, Precision::F32).reshape([1, 1])
        },
        |x| {
            let loss = |i: usize| {
                let dot = |j: usize| -> f64 { (0..d).map(|c| x[0][i * d + c] * x[1][j * d + c]).sum() };
                let logits: Vec<f64> = (0..vocabulary).map(dot).collect();
                logits.iter().map(|l| l.exp()).sum::<f64>().ln() - logits[targets[i] as usize]
            };
            vec![(0..m).map(loss).sum()]
        },
    );
}

fn angles(lines: usize, half: usize) -> (Vec<f32>, Vec<f32>) {
    let angle = |i: usize| (i / half) as f32 * 0.7f32.powi((i % half) as i32);
    ((0..lines * half).map(|i| angle(i).cos()).collect(), (0..lines * half).map(|i| angle(i).sin()).collect())
}

fn ints<B: Backend>(values: &[i32], device: &B::Device) -> Tensor<B, 1, Int> {
    Tensor::from_data(TensorData::new(values.to_vec(), [values.len()]), device)
}

fn reference_attention(
    q: &[f64],
    k: &[f64],
    v: &[f64],
    starts: &[u32],
    t: usize,
    [heads, kv_heads, e]: [usize; 3],
) -> Vec<f64> {
    let mut y = vec![0.0; q.len()];
    for m in 0..starts.len() {
        let row = m / t * t;
        for h in 0..heads {
            let g = h / (heads / kv_heads);
            let query = &q[(m * heads + h) * e..][..e];
            let keys = row + starts[m] as usize..m + 1;
            let score = |j: usize| -> f64 {
                let key = &k[(j * kv_heads + g) * e..][..e];
                query.iter().zip(key).map(|(a, b)| a * b).sum::<f64>() / (e as f64).sqrt()
            };
            let weights: Vec<f64> = keys.clone().map(|j| score(j).exp()).collect();
            let sum: f64 = weights.iter().sum();
            for (j, weight) in keys.zip(weights) {
                for c in 0..e {
                    y[(m * heads + h) * e + c] += weight / sum * v[(j * kv_heads + g) * e + c];
                }
            }
        }
    }
    y
}

/// The loss for debugging: the mean absolute difference of a row, summed over the rows that count.
#[test]
fn hidden_l1_is_the_mean_absolute_difference_of_the_kept_rows() {
    let rows = |values: &[f32]| matrix::<Cpu>(values, 3, 2, &Default::default());
    let (hidden, next) = (rows(&[1.0, 2.0, 5.0, -1.0, 0.5, 0.25]), rows(&[3.0, 1.5, -2.0, 7.0, 0.25, 1.0]));
    let loss = host(model_qwen3::loss::hidden_l1_sum(hidden, next, vec![1.0, 0.0, 1.0]));
    assert_eq!(loss, [(2.0 + 0.5) / 2.0 + (0.25 + 0.75) / 2.0]);
}
