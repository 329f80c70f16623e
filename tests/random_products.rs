//! Matrix products and attention of random shapes are their formulas in f64, in every number format of the device: the
//! products of dense operands, of few rows with NVFP4 weights as in decoding, attention within documents with its
//! gradients, and attention over a cache.

use crate::support::{
    Cpu, Cube, Random, host, matrix, on_gpu, packed, relative,
    spec::{nearest, product, quantize, transposed, wide},
    supports,
};
use backend_nvfp4::{AttentionSpec, Documents, Nvfp4Kernels, Nvfp4Tensor, Operand, Precision, Product, ops};
use burn::{
    backend::Autodiff,
    tensor::{DType, Tensor, TensorPrimitive, backend::Backend, ops::FloatTensor},
};
use burn_cubecl::CubeRuntime;

#[test]
fn products_and_attention_are_the_formula_on_the_cpu() {
    random_shapes::<Cpu>(Default::default());
}

#[test]
fn products_and_attention_are_the_formula_on_the_gpu() {
    fn on_cube<R: CubeRuntime>() {
        random_shapes::<Cube<R>>(R::Device::default());
    }
    on_gpu!(on_cube);
}

fn random_shapes<B: Nvfp4Kernels>(device: B::Device) {
    for precision in [Precision::F32, Precision::Bf16, Precision::F16] {
        if !supports::<B>(&device, precision.dtype()) {
            continue;
        }
        let mut random = Random::new(61);
        // A software GPU compiles a kernel for nearly every shape, so that a case takes a second.
        for case in 0..12 {
            dense_products::<B>(case, precision, &mut random, &device);
        }
        for case in 0..8 {
            packed_products::<B>(case, precision, &mut random, &device);
            few_rows::<B>(case, precision, &mut random, &device);
        }
        for case in 0..8 {
            attention::<B>(case, precision, &mut random, &device);
            attention_over_a_cache::<B>(case, precision, &mut random, &device);
        }
    }
}

/// The largest relative error of a sum of some hundred products that is stored in this type.
fn bound(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 2e-6,
        DType::F16 => 5e-4,
        DType::BF16 => 4e-3,
        other => panic!("{other:?} is no type of this test"),
    }
}

/// Normal numbers as the type holds them.
fn values(random: &mut Random, len: usize, dtype: DType) -> Vec<f32> {
    let rounded = |x: f32| match dtype {
        DType::F16 => half::f16::from_f32(x).to_f32(),
        DType::BF16 => half::bf16::from_f32(x).to_f32(),
        _ => x,
    };
    random.normals(len, 1.0).into_iter().map(rounded).collect()
}

fn put<B: Backend>(x: &[f32], rows: usize, cols: usize, dtype: DType, device: &B::Device) -> FloatTensor<B> {
    matrix::<B>(x, rows, cols, device).cast(dtype).into_primitive().tensor()
}

fn read<B: Backend>(x: FloatTensor<B>) -> Vec<f32> {
    host(Tensor::<B, 2>::from_primitive(TensorPrimitive::Float(x)).cast(DType::F32))
}

/// `a · bᵀ`, `a · b` and `aᵀ · b`, stored in the type of the operands and in f32.
fn dense_products<B: Nvfp4Kernels>(case: usize, precision: Precision, random: &mut Random, device: &B::Device) {
    let dtype = precision.dtype();
    // Tensor cores take multiples of 8; every other size goes another way.
    let unit = if case.is_multiple_of(3) { 1 } else { 8 };
    let [m, n, k] = [0; 3].map(|_| unit * (1 + random.below(200 / unit)));
    let (a, b) = (values(random, m * k, dtype), values(random, n * k, dtype));
    let exact = product(&wide(&a), &wide(&b), [m, n, k]);
    let dense = |x: &[f32], rows, cols| vec![Operand::Dense(put::<B>(x, rows, cols, dtype, device))];
    for (name, left, right) in [
        (Product::Nt, dense(&a, m, k), dense(&b, n, k)),
        (Product::Nn, dense(&a, m, k), dense(&transposed(&b, n, k), k, n)),
        (Product::Tn, dense(&transposed(&a, m, k), k, m), dense(&transposed(&b, n, k), k, n)),
    ] {
        for out in if dtype == DType::F32 { vec![dtype] } else { vec![dtype, DType::F32] } {
            let y = B::products(name, left.clone(), right.clone(), precision, out).remove(0);
            let error = relative(&read::<B>(y), exact.iter().copied());
            // Sums of 16-bit products in f32 may be formed in parts.
            let bound = if out == dtype { bound(out) } else { 2e-5 };
            assert!(error < bound, "case {case}: {name:?} {m}x{n}x{k} of {dtype:?} as {out:?}: {error:e}");
        }
    }
}

/// `x · Wᵀ` and `dy · W` with NVFP4 weights of any scale levels and blocks.
fn packed_products<B: Nvfp4Kernels>(case: usize, precision: Precision, random: &mut Random, device: &B::Device) {
    let dtype = precision.dtype();
    let (m, n, k) = (1 + random.below(300), 8 * (1 + random.below(40)), 16 * (1 + random.below(20)));
    let (x, dy) = (values(random, m * k, dtype), values(random, m * n, dtype));
    let w = quantize(
        &random.normals(n * k, 1.0),
        n,
        k,
        case.is_multiple_of(2),
        case % 4 < 2 && n.is_multiple_of(16),
        nearest,
    );
    let codes = Nvfp4Tensor::<B>::new(packed(&w), n, k, device).unwrap();
    let forward = product(&wide(&x), &w.values(), [m, n, k]);
    let backward = product(&wide(&dy), &transposed(&w.values(), n, k), [m, k, n]);
    for (name, a, cols, exact) in [(Product::Nt, &x, k, forward), (Product::Nn, &dy, n, backward)] {
        let y = B::nvfp4_matmul(put::<B>(a, m, cols, dtype, device), &codes.primitive(), name, dtype);
        let error = relative(&read::<B>(y), exact);
        assert!(error < bound(dtype), "case {case}: {name:?} {m}x{n}x{k} with codes in {dtype:?}: {error:e}");
    }
}

/// One to sixteen tokens times NVFP4 weights, as in decoding.
fn few_rows<B: Nvfp4Kernels>(case: usize, precision: Precision, random: &mut Random, device: &B::Device) {
    let dtype = precision.dtype();
    let (m, n, k) = (1 + case % 16, 1 + random.below(300), 256 * (1 + random.below(4)));
    let x = values(random, m * k, dtype);
    let w = quantize(
        &random.normals(n * k, 0.1),
        n,
        k,
        case.is_multiple_of(2),
        case % 4 < 2 && n.is_multiple_of(16),
        nearest,
    );
    let exact = product(&wide(&x), &w.values(), [m, n, k]);
    let codes = Nvfp4Tensor::<B>::new(packed(&w), n, k, device).unwrap();
    let x = Operand::Dense(put::<B>(&x, m, k, dtype, device));
    let y = B::token_products(x, vec![Operand::Packed(codes.primitive())], precision).remove(0);
    let error = relative(&read::<B>(y), exact);
    assert!(error < bound(dtype), "case {case}: {m} rows times {n}x{k} in {dtype:?}: {error:e}");
}

/// Attention heads, `kv_heads` of them with keys, `e` wide.
#[derive(Debug, Clone, Copy)]
struct Heads {
    heads: usize,
    kv_heads: usize,
    e: usize,
}

impl Heads {
    fn of(case: usize, precision: Precision) -> Self {
        let (heads, kv_heads) = [(4, 2), (8, 1), (2, 2)][case % 3];
        let e = [64, 128, 16, 32][case % if precision == Precision::F32 { 4 } else { 2 }];
        Self { heads, kv_heads, e }
    }

    fn spec(self, precision: Precision) -> AttentionSpec {
        AttentionSpec { heads: self.heads, kv_heads: self.kv_heads, head_dim: self.e, precision }
    }
}

fn attention_bound(precision: Precision) -> f64 {
    match precision {
        Precision::F16 => 2e-3,
        Precision::Bf16 => 1.2e-2,
        _ => 1e-5,
    }
}

/// One or two rows of tokens, each with documents that do not see each other: values and gradients.
fn attention<B: Nvfp4Kernels>(case: usize, precision: Precision, random: &mut Random, device: &B::Device) {
    type A<B> = Autodiff<B>;
    let (dtype, heads) = (precision.dtype(), Heads::of(case, precision));
    let rows = 1 + case % 2;
    let t = [3 + random.below(20), 3 + random.below(150)][usize::from(case.is_multiple_of(4))];
    let mut starts = vec![0; rows * t];
    for row in starts.chunks_mut(t) {
        let cut = random.below(t);
        row[cut..].fill(cut as u32);
    }
    let Heads { heads: h, kv_heads: g, e } = heads;
    let [q, k, v, dy] = [h, g, g, h].map(|n| (values(random, rows * t * n * e, dtype), n * e));
    let exact = attention_by_the_formula([&q.0, &k.0, &v.0, &dy.0], &starts, [rows, t, t], heads);

    let tensor = |x: &(Vec<f32>, usize)| matrix::<A<B>>(&x.0, rows * t, x.1, device).cast(dtype).require_grad();
    let inputs = [&q, &k, &v].map(tensor);
    let docs = Documents::<A<B>>::new(rows, 0, starts.clone(), device);
    let [q, k, v] = inputs.clone();
    let y = ops::attention(q, k, v, &docs, heads.spec(precision));
    let mut ours = vec![host(y.clone().inner().cast(DType::F32))];
    let mut grads = (y * tensor(&dy).detach()).sum().backward();
    ours.extend(inputs.iter().map(|x| host(x.grad_remove(&mut grads).unwrap().cast(DType::F32))));
    for ((name, ours), exact) in ["y", "dq", "dk", "dv"].iter().zip(&ours).zip(exact) {
        let error = relative(ours, exact);
        let bound = attention_bound(precision);
        assert!(error < bound, "case {case}: {name} of {rows} rows of {t} tokens, {heads:?} in {dtype:?}: {error:e}");
    }
}

/// One or two new tokens that see every token of a cache.
fn attention_over_a_cache<B: Nvfp4Kernels>(case: usize, precision: Precision, random: &mut Random, device: &B::Device) {
    let (dtype, heads) = (precision.dtype(), Heads::of(case, precision));
    let (past, t) = (1 + random.below(300), 1 + case % 2);
    let Heads { heads: h, kv_heads: g, e } = heads;
    let [(q, _), (k, _), (v, _)] =
        [(t, h), (past + t, g), (past + t, g)].map(|(rows, n)| (values(random, rows * n * e, dtype), n));
    let dy = vec![0.0; q.len()];
    let [exact, ..] = attention_by_the_formula([&q, &k, &v, &dy], &vec![0; t], [1, t, past + t], heads);
    let docs = Documents::<B>::new(1, past, vec![0; t], device);
    let [q, k, v] =
        [(q, t, h), (k, past + t, g), (v, past + t, g)].map(|(x, r, n)| put::<B>(&x, r, n * e, dtype, device));
    let y = B::cached_attention(q, k, v, &docs, heads.spec(precision));
    let error = relative(&read::<B>(y), exact);
    let bound = attention_bound(precision);
    assert!(error < bound, "case {case}: {t} tokens behind {past}, {heads:?} in {dtype:?}: {error:e}");
}

/// `y`, `dq`, `dk` and `dv` of causal attention. A token sees the keys of its row from its document's start to itself;
/// the last of the keys belong to the tokens.
fn attention_by_the_formula(
    [q, k, v, dy]: [&[f32]; 4],
    starts: &[u32],
    [rows, t, keys]: [usize; 3],
    Heads { heads, kv_heads, e }: Heads,
) -> [Vec<f64>; 4] {
    let [q, k, v, dy] = [q, k, v, dy].map(wide);
    let scale = 1.0 / (e as f64).sqrt();
    let mut out = [&q, &q, &k, &v].map(|x| vec![0.0; x.len()]);
    let [y, dq, dk, dv] = &mut out;
    for (token, &start) in starts[..rows * t].iter().enumerate() {
        let (row, own) = (token / t * keys, token % t + keys - t);
        let seen: Vec<usize> = (start as usize..=own).map(|key| row + key).collect();
        for head in 0..heads {
            let at = (token * heads + head) * e;
            let key_at = |key: usize| (key * kv_heads + head / (heads / kv_heads)) * e;
            let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f64>();
            let scores: Vec<f64> = seen.iter().map(|&j| scale * dot(&q[at..at + e], &k[key_at(j)..][..e])).collect();
            let top = scores.iter().fold(f64::MIN, |a, s| a.max(*s));
            let sum: f64 = scores.iter().map(|s| (s - top).exp()).sum();
            let p: Vec<f64> = scores.iter().map(|s| (s - top).exp() / sum).collect();
            let dp: Vec<f64> = seen.iter().map(|&j| dot(&dy[at..at + e], &v[key_at(j)..][..e])).collect();
            let mean = dot(&p, &dp);
            for ((&j, p), dp) in seen.iter().zip(&p).zip(&dp) {
                let ds = scale * p * (dp - mean);
                for c in 0..e {
                    y[at + c] += p * v[key_at(j) + c];
                    dv[key_at(j) + c] += p * dy[at + c];
                    dq[at + c] += ds * k[key_at(j) + c];
                    dk[key_at(j) + c] += ds * q[at + c];
                }
            }
        }
    }
    out
}

/// The formula's own gradients are its slopes.
#[test]
fn the_formula_of_attention_has_its_own_slopes() {
    let heads = Heads { heads: 4, kv_heads: 2, e: 4 };
    let (starts, shape) = ([0, 0, 0, 2, 2], [1, 5, 5]);
    let mut random = Random::new(67);
    let inputs = [16, 8, 8, 16].map(|n| random.normals(5 * n, 1.0));
    let of =
        |inputs: &[Vec<f32>; 4]| attention_by_the_formula([0, 1, 2, 3].map(|i| &inputs[i][..]), &starts, shape, heads);
    let value =
        |inputs: &[Vec<f32>; 4]| of(inputs)[0].iter().zip(&inputs[3]).map(|(y, d)| y * f64::from(*d)).sum::<f64>();
    let gradients = of(&inputs);
    for (input, at) in [(0, 7), (0, 77), (1, 0), (1, 33), (2, 5), (2, 39)] {
        let moved = |h: f32| {
            let mut inputs = inputs.clone();
            inputs[input][at] += h;
            (f64::from(inputs[input][at]), value(&inputs))
        };
        let ((x1, up), (x0, down)) = (moved(1e-2), moved(-1e-2));
        let slope = (up - down) / (x1 - x0);
        assert!((slope - gradients[input + 1][at]).abs() < 1e-4, "input {input} at {at}");
    }
}
