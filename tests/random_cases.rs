//! Random cases of the portable kernels against the CPU backend, which runs the scalar reference or Burn's own tensor
//! operations, on ragged and smallest shapes, with extreme scales, zeros and subnormals among the values; and more of them
//! in 16 bits where the device has the types. `random_products.rs` has the products and attention, whose kernels need
//! tensor cores.
//!
//! There are ten thousand cases. A software GPU takes six minutes for them, so that CI takes every tenth. All of them:
//!
//!     cargo test --workspace --test promises -- --ignored ten_thousand_cases

use crate::support::{Cpu, Cube, Random, host, matrix, on_gpu, supports};
use backend_nvfp4::{
    AdamwState, AdamwStep, BlockShape, LinearSpec, MasterKind, Nvfp4Kernels, Nvfp4Tensor, Precision, Product,
    QuantizeSpec, Recipe, Rotary, Rounding, Scaling, StateKind, Stream,
};
use burn::tensor::{DType, Int, Tensor, TensorData, TensorPrimitive, ops::FloatTensor};
use burn_cubecl::CubeRuntime;

/// How many cases of each kind there are: together 10,000.
const CASES: [(Kind, usize); 12] = [
    (Kind::Quantize, 2200),
    (Kind::Across, 800),
    (Kind::Master, 600),
    (Kind::Hadamard, 500),
    (Kind::DensePacked, 1800),
    (Kind::PackedPacked, 900),
    (Kind::RmsNorm, 700),
    (Kind::NormRope, 600),
    (Kind::Swiglu, 600),
    (Kind::Head, 200),
    (Kind::Gradient, 700),
    (Kind::Rows, 400),
];

#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Quantize,
    Across,
    Master,
    Hadamard,
    DensePacked,
    PackedPacked,
    RmsNorm,
    NormRope,
    Swiglu,
    Head,
    Gradient,
    Rows,
}

#[test]
fn portable_kernels_equal_the_reference() {
    fn every_tenth<R: CubeRuntime>() {
        compare::<R>(10);
    }
    on_gpu!(every_tenth);
}

#[test]
#[ignore = "a software GPU takes six minutes; portable_kernels_equal_the_reference takes every tenth case"]
fn ten_thousand_cases_equal_the_reference() {
    fn each<R: CubeRuntime>() {
        compare::<R>(1);
    }
    assert_eq!(CASES.iter().map(|(_, n)| n).sum::<usize>(), 10_000);
    on_gpu!(each);
}

/// Compares one case in `every`.
fn compare<R: CubeRuntime>(every: usize) {
    for (kind, count) in CASES {
        (0..count as u64).step_by(every).for_each(|case| compare_case::<R>(kind, case, DType::F32));
    }
    for dtype in [DType::F16, DType::BF16] {
        if !supports::<Cube<R>>(&R::Device::default(), dtype) {
            continue;
        }
        // The other kinds read f32 alone.
        for (kind, count) in CASES.into_iter().filter(|(kind, _)| kind.reads_16_bits()) {
            (0..count as u64 / 8).step_by(every).for_each(|case| compare_case::<R>(kind, case, dtype));
        }
    }
}

/// Compares a case on values that `dtype` holds: the GPU computes in that type and the CPU in f32.
fn compare_case<R: CubeRuntime>(kind: Kind, case: u64, dtype: DType) {
    let inputs = |own: DType| Types { own, rounded: dtype };
    let expected = outputs::<Cpu>(kind, case, inputs(DType::F32), &Default::default());
    let ours = outputs::<Cube<R>>(kind, case, inputs(dtype), &R::Device::default());
    let exact = matches!(kind, Kind::Quantize | Kind::Across | Kind::Master | Kind::Rows);
    // In f32, sums of some hundred terms in another order; in 16 bits, a few roundings to 8 or 11 significant bits.
    let share = match dtype {
        DType::F16 => 4e-3,
        DType::BF16 => 3e-2,
        _ => 2e-5,
    };
    assert_eq!(ours.len(), expected.len());
    for (i, (ours, expected)) in ours.iter().zip(&expected).enumerate() {
        assert_eq!(ours.len(), expected.len(), "{kind:?} {case}, output {i}");
        let top = expected.iter().fold(0.0f32, |a, x| a.max(x.abs()));
        for (at, (a, b)) in ours.iter().zip(expected).enumerate() {
            // Values below the normal numbers may be flushed to zero.
            let same = if exact { a.to_bits() == b.to_bits() } else { (a - b).abs() <= share * top + 1e-37 };
            let label = format!("{kind:?} {case} in {dtype:?}, output {i} at {at}");
            assert!(same, "{label}: {a:e}, the reference has {b:e} (largest {top:e})");
        }
    }
}

impl Kind {
    fn reads_16_bits(self) -> bool {
        use Kind::{Across, Hadamard, NormRope, Quantize, RmsNorm, Rows, Swiglu};
        matches!(self, Quantize | Across | Hadamard | RmsNorm | NormRope | Swiglu | Rows)
    }
}

/// The type that a backend's values have, and the type that they are rounded to before.
#[derive(Debug, Clone, Copy)]
struct Types {
    own: DType,
    rounded: DType,
}

/// Values of one of several kinds: ordinary, of any scale, all or half of them zero, subnormal, with an outlier.
fn values(random: &mut Random, len: usize, rounded: DType) -> Vec<f32> {
    let short = match rounded {
        DType::F16 => |x: f32| half::f16::from_f32(x).to_f32(),
        DType::BF16 => |x: f32| half::bf16::from_f32(x).to_f32(),
        _ => return wild_values(random, len),
    };
    random.normals(len, 1.0).into_iter().map(short).collect()
}

fn wild_values(random: &mut Random, len: usize) -> Vec<f32> {
    let std = 10f32.powi(random.below(7) as i32 - 4);
    let mut out = random.normals(len, std);
    match random.below(8) {
        0 => out.fill(0.0),
        1 => out.iter_mut().step_by(2).for_each(|x| *x = 0.0),
        2 => out.iter_mut().for_each(|x| *x *= 1e-40 / std),
        3 => out[random.below(len)] = 1e4 * std,
        4 => out.iter_mut().for_each(|x| *x = -x.abs()),
        _ => {}
    }
    out
}

/// Every result of the operations of a kind for the inputs of a case.
#[allow(clippy::too_many_lines, reason = "a table with an arm for each kind")]
fn outputs<B: Nvfp4Kernels>(kind: Kind, case: u64, types: Types, device: &B::Device) -> Vec<Vec<f32>> {
    let mut random = Random::new(case * 31 + kind as u64);
    let r = &mut random;
    let of = |x: FloatTensor<B>| host(Tensor::<B, 2>::from_primitive(TensorPrimitive::Float(x)));
    let flat = |x: FloatTensor<B>| host(Tensor::<B, 1>::from_primitive(TensorPrimitive::Float(x)));
    let put = |v: &[f32], rows: usize, cols: usize| {
        matrix::<B>(v, rows, cols, device).cast(types.own).into_primitive().tensor()
    };
    let floats = |v: &[f32], rows: usize, cols: usize| matrix::<B>(v, rows, cols, device).into_primitive().tensor();
    let values = |random: &mut Random, len: usize| values(random, len, types.rounded);
    let ints = |v: Vec<i32>| {
        let len = v.len();
        Tensor::<B, 1, Int>::from_data(TensorData::new(v, [len]), device).into_primitive()
    };
    let stream = Stream { seed: case, step: 3, stream: 9 };
    let spec = |r: &mut Random, rows: usize| QuantizeSpec {
        scaling: if r.below(3) == 0 { Scaling::Single } else { Scaling::Two },
        block: if rows.is_multiple_of(16) && r.below(2) == 0 { BlockShape::Square } else { BlockShape::Row },
        rounding: if r.below(2) == 0 { Rounding::Nearest } else { Rounding::Stochastic(stream) },
    };
    let bytes = |q: Nvfp4Tensor<B>| {
        let packed = q.to_packed().unwrap();
        let codes = packed.codes.iter().flat_map(|w| w.to_le_bytes()).chain(packed.scales);
        vec![codes.map(f32::from).collect(), vec![packed.global]]
    };
    let plain = LinearSpec::new(Recipe::Bf16, Scaling::Two, Precision::F32);
    match kind {
        Kind::Quantize => {
            let (rows, cols) = ([1, 16, 32, 1 + r.below(40)][r.below(4)], 16 * (1 + r.below(8)));
            let spec = spec(r, rows);
            let x = values(r, rows * cols);
            let q = Nvfp4Tensor::<B>::from_primitive(B::nvfp4_quantize(put(&x, rows, cols), spec));
            let back = host(q.dequantize(DType::F32));
            let mut out = bytes(q);
            out.push(back);
            out
        }
        Kind::Rows => {
            let (rows, cols) = (1 + r.below(40), 16 * (1 + r.below(40)));
            vec![of(B::nvfp4_rounded_rows(put(&values(r, rows * cols), rows, cols)))]
        }
        Kind::Across => {
            let (rows, cols) = (16 * (1 + r.below(4)), 1 + r.below(40));
            let (spec, rotated) = (QuantizeSpec { block: BlockShape::Row, ..spec(r, 1) }, r.below(2) == 0);
            // Rotated sums of extreme values may differ by a bit, and then in a code: they are left to the plain cases.
            let short = types.rounded != DType::F32;
            let x = if rotated && !short { r.normals(rows * cols, 0.1) } else { values(r, rows * cols) };
            bytes(Nvfp4Tensor::from_primitive(B::nvfp4_quantize_across(put(&x, rows, cols), spec, rotated)))
        }
        Kind::Master => {
            let (rows, cols) = (1 + r.below(30), 16 * (1 + r.below(8)));
            bytes(Nvfp4Tensor::from_primitive(B::nvfp4_quantize_master(put(&values(r, rows * cols), rows, cols))))
        }
        Kind::Hadamard => {
            let (rows, cols) = (1 + r.below(40), 16 * (1 + r.below(8)));
            vec![of(B::hadamard(put(&values(r, rows * cols), rows, cols)))]
        }
        Kind::DensePacked | Kind::PackedPacked => {
            let (m, n, k) = (1 + r.below(40), 1 + r.below(40), 16 * (1 + r.below(6)));
            let rounding = Rounding::Nearest;
            let spec = QuantizeSpec { scaling: spec(r, 1).scaling, block: BlockShape::Row, rounding };
            let (x, w, dy) = (values(r, m * k), values(r, n * k), values(r, m * n));
            let x = put(&x, m, k);
            let (xq, wq) = (B::nvfp4_quantize(x.clone(), spec), B::nvfp4_quantize(put(&w, n, k), spec));
            let (dy, f32) = (put(&dy, m, n), DType::F32);
            if kind == Kind::PackedPacked {
                return vec![of(B::nvfp4_matmul_packed(&xq, &wq, Product::Nt, f32, f32))];
            }
            vec![
                of(B::nvfp4_matmul(x, &wq, Product::Nt, f32)),
                of(B::nvfp4_matmul(dy.clone(), &wq, Product::Nn, f32)),
                of(B::nvfp4_matmul(dy, &xq, Product::Tn, f32)),
            ]
        }
        Kind::RmsNorm => {
            let (rows, cols) = (1 + r.below(20), 1 + r.below(300));
            let (x, w, dy) = (values(r, rows * cols), r.normals(cols, 1.0), values(r, rows * cols));
            let w = Tensor::<B, 1>::from_data(TensorData::new(w, [cols]), device).into_primitive().tensor();
            let (x, dy) = (put(&x, rows, cols), put(&dy, rows, cols));
            let (_, y) = B::rms_norm(x.clone(), None, w.clone(), 1e-6, plain);
            let (dx, dw) = B::rms_norm_backward(x, w, dy, None, 1e-6);
            vec![of(y.values), of(dx), flat(dw)]
        }
        Kind::NormRope => {
            // A unit of the kernel takes several heads from 64 tokens on.
            let rows = if r.below(8) == 0 { 64 + r.below(3) } else { 1 + r.below(9) };
            let (heads, e) = (1 + r.below(8), 16 << r.below(4));
            let (x, w) = (values(r, rows * heads * e), r.normals(e, 1.0));
            let dy = values(r, rows * heads * e);
            let angles: Vec<f32> = (0..11 * e / 2).map(|i| (i / (e / 2)) as f32 / (1 + i % (e / 2)) as f32).collect();
            let table = |f: fn(f32) -> f32| floats(&angles.iter().map(|a| f(*a)).collect::<Vec<_>>(), 11, e / 2);
            let positions = ints((0..rows).map(|_| r.below(11) as i32).collect());
            let rotary = Rotary::<B> { cos: table(f32::cos), sin: table(f32::sin), positions };
            let w = Tensor::<B, 1>::from_data(TensorData::new(w, [e]), device).into_primitive().tensor();
            let (x, dy) = (put(&x, rows, heads * e), put(&dy, rows, heads * e));
            let y = B::norm_rope(x.clone(), w.clone(), &rotary, 1e-6);
            let (dx, dw) = B::norm_rope_backward(x, w, &rotary, dy, 1e-6);
            vec![of(y), of(dx), flat(dw)]
        }
        Kind::Swiglu => {
            let (rows, cols) = (1 + r.below(20), 1 + r.below(100));
            let [gate, up, dy] = [0; 3].map(|_| put(&values(r, rows * cols), rows, cols));
            let y = B::swiglu(gate.clone(), up.clone(), plain);
            let (dgate, dup) = B::swiglu_backward(gate, up, dy);
            vec![of(y.values), of(dgate), of(dup)]
        }
        Kind::Head => {
            let (m, d, v) = (1 + r.below(20), 1 + r.below(40), 2 + r.below(200));
            let (h, w) = (r.normals(m * d, 1.0), r.normals(v * d, 1.0));
            let targets = ints((0..m).map(|_| r.below(v) as i32).collect());
            let out = B::head_loss_saving(put(&h, m, d), put(&w, v, d), targets, Precision::F32, true);
            let (dh, dw) = out.gradients.unwrap();
            vec![flat(out.loss), of(dh), of(dw)]
        }
        Kind::Gradient => {
            let (rows, cols) = (1 + r.below(30), 1 + r.below(100));
            let (x, sum) = (values(r, rows * cols), values(r, rows * cols));
            let (w, grad) = (r.normals(rows * cols, 0.1), r.normals(rows * cols, 1.0));
            let (x, sum) = (put(&x, rows, cols), put(&sum, rows, cols));
            let (w, form) = (put(&w, rows, cols), MasterKind::F32.dense());
            let state = AdamwState::<B>::zeros(StateKind::F32, rows * cols, DType::F32, device);
            let step = AdamwStep {
                lr: 0.01,
                beta1: 0.9,
                beta2: 0.99,
                eps: 1e-8,
                weight_decay: 0.1,
                bias1: 0.1,
                bias2: 0.01,
                clip_factor: 0.5,
                stream,
            };
            let (w, _) = B::adamw(w, form, put(&grad, rows, cols), state, step, 256 * (1 + r.below(4)));
            vec![flat(B::square_sum(x.clone())), of(B::accumulated(sum, x)), of(w)]
        }
    }
}
