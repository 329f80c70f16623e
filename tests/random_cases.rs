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
    AdamwState, AdamwStep, BlockShape, Gradient, HeadGradients, Judged, LinearSpec, MasterKind, Nvfp4Kernels,
    Nvfp4Primitive, Nvfp4Tensor, Operand, Packed, Precision, Product, QuantizeSpec, Recipe, Rotary, Rounding, Scaling,
    StateKind, Stream, Unscaled, reference,
};
use burn::tensor::{
    DType, Int, Tensor, TensorData, TensorPrimitive,
    ops::{FloatTensor, IntTensor},
};
use burn_cubecl::CubeRuntime;

/// How many cases of each kind there are: together 10,000.
const CASES: [(Kind, usize); 11] = [
    (Kind::Quantize, 2200),
    (Kind::Across, 1300),
    (Kind::Master, 600),
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
        use Kind::{Across, NormRope, Quantize, RmsNorm, Rows, Swiglu};
        matches!(self, Quantize | Across | RmsNorm | NormRope | Swiglu | Rows)
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
fn outputs<B: Nvfp4Kernels>(kind: Kind, case: u64, types: Types, device: &B::Device) -> Vec<Vec<f32>> {
    let random = Random::new(case * 31 + kind as u64);
    let stream = Stream { seed: case, step: 3, stream: 9 };
    let mut case = Case::<B> { random, types, stream, device };
    match kind {
        Kind::Quantize => case.quantized(),
        Kind::Rows => case.rounded_rows(),
        Kind::Across => case.quantized_across(),
        Kind::Master => case.quantized_master(),
        Kind::DensePacked => case.dense_times_packed(),
        Kind::PackedPacked => case.packed_times_packed(),
        Kind::RmsNorm => case.rms_norm(),
        Kind::NormRope => case.norm_rope(),
        Kind::Swiglu => case.swiglu(),
        Kind::Head => case.head(),
        Kind::Gradient => case.gradient(),
    }
}

/// Draws the inputs of a case and puts them on a device.
struct Case<'a, B: Nvfp4Kernels> {
    random: Random,
    types: Types,
    stream: Stream,
    device: &'a B::Device,
}

impl<B: Nvfp4Kernels> Case<'_, B> {
    fn below(&mut self, n: usize) -> usize {
        self.random.below(n)
    }

    fn values(&mut self, len: usize) -> Vec<f32> {
        values(&mut self.random, len, self.types.rounded)
    }

    fn put(&self, v: &[f32], rows: usize, cols: usize) -> FloatTensor<B> {
        matrix::<B>(v, rows, cols, self.device).cast(self.types.own).into_primitive().tensor()
    }

    /// Draws a matrix and puts it on the device.
    fn matrix(&mut self, rows: usize, cols: usize) -> FloatTensor<B> {
        let values = self.values(rows * cols);
        self.put(&values, rows, cols)
    }

    /// A vector in f32.
    fn vector(&self, v: Vec<f32>) -> FloatTensor<B> {
        let len = v.len();
        Tensor::<B, 1>::from_data(TensorData::new(v, [len]), self.device).into_primitive().tensor()
    }

    fn ints(&self, v: Vec<i32>) -> IntTensor<B> {
        let len = v.len();
        Tensor::<B, 1, Int>::from_data(TensorData::new(v, [len]), self.device).into_primitive()
    }

    fn spec(&mut self, rows: usize) -> QuantizeSpec {
        QuantizeSpec {
            scaling: if self.below(3) == 0 { Scaling::Single } else { Scaling::Two },
            block: if rows.is_multiple_of(16) && self.below(2) == 0 { BlockShape::Square } else { BlockShape::Row },
            rounding: if self.below(2) == 0 { Rounding::Nearest } else { Rounding::Stochastic(self.stream) },
        }
    }

    fn quantized(&mut self) -> Vec<Vec<f32>> {
        let (rows, cols) = ([1, 16, 32, 1 + self.below(40)][self.below(4)], 16 * (1 + self.below(8)));
        let spec = self.spec(rows);
        let x = self.matrix(rows, cols);
        let q = Nvfp4Tensor::<B>::from_primitive(B::nvfp4_quantize(x, spec));
        let back = host(q.dequantize(DType::F32));
        let mut out = bytes(&q);
        out.push(back);
        out
    }

    fn rounded_rows(&mut self) -> Vec<Vec<f32>> {
        let (rows, cols) = (1 + self.below(40), 16 * (1 + self.below(40)));
        let x = self.matrix(rows, cols);
        vec![of::<B>(B::nvfp4_rounded_rows(x))]
    }

    fn quantized_across(&mut self) -> Vec<Vec<f32>> {
        let (rows, both) = (16 * (1 + self.below(4)), self.below(2) == 0);
        let cols = if both { 16 * (1 + self.below(3)) } else { 1 + self.below(40) };
        let spec = QuantizeSpec { block: BlockShape::Row, ..self.spec(1) };
        let rotated = self.below(2) == 0;
        // Rotated sums of extreme values may differ by a bit, and then in a code: they are left to the plain cases.
        let short = self.types.rounded != DType::F32;
        let x = if rotated && !short { self.random.normals(rows * cols, 0.1) } else { self.values(rows * cols) };
        let x = self.put(&x, rows, cols);
        if both {
            let along = self.spec(rows);
            let (along, across) = B::nvfp4_operands(x, along, spec, rotated);
            return [bytes(&Nvfp4Tensor::<B>::from_primitive(along)), rounded::<B>(across, [cols, rows])].concat();
        }
        bytes(&Nvfp4Tensor::<B>::from_primitive(B::nvfp4_quantize_across(x, spec, rotated)))
    }

    fn quantized_master(&mut self) -> Vec<Vec<f32>> {
        let (rows, cols) = (1 + self.below(30), 16 * (1 + self.below(8)));
        let x = self.matrix(rows, cols);
        bytes(&Nvfp4Tensor::<B>::from_primitive(B::nvfp4_quantize_master(x)))
    }

    /// Products of `x [m, k]`, `w [n, k]` and `dy [m, n]`: the three matrices, and `x` and `w` in NVFP4.
    fn operands(&mut self) -> (FloatTensor<B>, FloatTensor<B>, [Nvfp4Primitive<B>; 2]) {
        let (m, n, k) = (1 + self.below(40), 1 + self.below(40), 16 * (1 + self.below(6)));
        let spec = QuantizeSpec { scaling: self.spec(1).scaling, block: BlockShape::Row, rounding: Rounding::Nearest };
        let (x, w, dy) = (self.matrix(m, k), self.matrix(n, k), self.matrix(m, n));
        let packed = [B::nvfp4_quantize(x.clone(), spec), B::nvfp4_quantize(w, spec)];
        (x, dy, packed)
    }

    fn dense_times_packed(&mut self) -> Vec<Vec<f32>> {
        let (x, dy, [xq, wq]) = self.operands();
        vec![
            of::<B>(B::nvfp4_matmul(x, &wq, Product::Nt, DType::F32)),
            of::<B>(B::nvfp4_matmul(dy.clone(), &wq, Product::Nn, DType::F32)),
            of::<B>(B::nvfp4_matmul(dy, &xq, Product::Tn, DType::F32)),
        ]
    }

    fn packed_times_packed(&mut self) -> Vec<Vec<f32>> {
        let (_, _, [xq, wq]) = self.operands();
        vec![of::<B>(B::nvfp4_matmul_packed(&xq, &wq, Product::Nt, DType::F32, DType::F32))]
    }

    fn rms_norm(&mut self) -> Vec<Vec<f32>> {
        let (rows, cols) = (1 + self.below(20), 1 + self.below(300));
        let (x, w, dy) = (self.matrix(rows, cols), self.random.normals(cols, 1.0), self.matrix(rows, cols));
        let w = self.vector(w);
        let (_, y) = B::rms_norm(x.clone(), None, w.clone(), 1e-6, plain());
        let (dx, dw) = B::rms_norm_backward(x, w, dy, None, 1e-6);
        vec![of::<B>(y.values), of::<B>(dx), flat::<B>(dw)]
    }

    fn norm_rope(&mut self) -> Vec<Vec<f32>> {
        // A unit of the kernel takes several heads from 64 tokens on.
        let rows = if self.below(8) == 0 { 64 + self.below(3) } else { 1 + self.below(9) };
        let (heads, e) = (1 + self.below(8), 16 << self.below(4));
        let (x, w) = (self.matrix(rows, heads * e), self.random.normals(e, 1.0));
        let dy = self.matrix(rows, heads * e);
        let angles: Vec<f32> = (0..11 * e / 2).map(|i| (i / (e / 2)) as f32 / (1 + i % (e / 2)) as f32).collect();
        let table = |f: fn(f32) -> f32| {
            let values: Vec<f32> = angles.iter().map(|a| f(*a)).collect();
            matrix::<B>(&values, 11, e / 2, self.device).into_primitive().tensor()
        };
        let (cos, sin) = (table(f32::cos), table(f32::sin));
        let positions = (0..rows).map(|_| self.below(11) as i32).collect();
        let rotary = Rotary::<B> { cos, sin, positions: self.ints(positions) };
        let w = self.vector(w);
        let y = B::norm_rope(x.clone(), w.clone(), &rotary, 1e-6);
        let (dx, dw) = B::norm_rope_backward(x, w, &rotary, dy, 1e-6);
        vec![of::<B>(y), of::<B>(dx), flat::<B>(dw)]
    }

    fn swiglu(&mut self) -> Vec<Vec<f32>> {
        let (rows, cols) = (1 + self.below(20), 1 + self.below(100));
        let [gate, up, dy] = [0; 3].map(|_| self.matrix(rows, cols));
        let y = B::swiglu(gate.clone(), up.clone(), plain());
        let (dgate, dup) = B::swiglu_backward(gate, up, dy);
        vec![of::<B>(y.values), of::<B>(dgate), of::<B>(dup)]
    }

    fn head(&mut self) -> Vec<Vec<f32>> {
        let (m, d, v) = (1 + self.below(20), 1 + self.below(40), 2 + self.below(200));
        let (h, w) = (self.random.normals(m * d, 1.0), self.random.normals(v * d, 1.0));
        let targets = (0..m).map(|_| self.below(v) as i32).collect();
        let (h, w, targets) = (self.put(&h, m, d), self.put(&w, v, d), self.ints(targets));
        let out = B::head_loss_saving(h, w, targets, Precision::F32, true);
        let HeadGradients { dh, dw } = out.gradients.unwrap();
        let factor = self.random.uniform() + 0.5;
        let factor = self.vector(vec![factor]);
        let dw = B::head_weight_gradient(dw, factor, Precision::F32);
        vec![flat::<B>(out.loss), of::<B>(dh), of::<B>(dw)]
    }

    /// A square sum, a sum of gradients, and a step of AdamW.
    fn gradient(&mut self) -> Vec<Vec<f32>> {
        let (rows, cols) = (1 + self.below(30), 1 + self.below(100));
        let (x, sum) = (self.matrix(rows, cols), self.matrix(rows, cols));
        let (w, grad) = (self.random.normals(rows * cols, 0.1), self.random.normals(rows * cols, 1.0));
        let (w, grad) = (self.put(&w, rows, cols), self.put(&grad, rows, cols));
        let state = AdamwState::<B>::zeros(StateKind::F32, rows * cols, DType::F32, self.device);
        let step = AdamwStep {
            lr: 0.01,
            beta1: 0.9,
            beta2: 0.99,
            eps: 1e-8,
            weight_decay: 0.1,
            bias1: 0.1,
            bias2: 0.01,
            clip_factor: 0.5,
            stream: self.stream,
        };
        let chunk = 256 * (1 + self.below(4));
        let place = self.below(3);
        let zeros = |n| Tensor::<B, 1>::zeros([n], (self.device, DType::F32)).into_primitive().tensor();
        let (squares, verdict) = B::square_sum(Gradient::unmeasured(x.clone()), (zeros(3), place), zeros(1));
        let grad = Judged { gradient: grad, verdict: verdict.clone() };
        let (w, _) = B::adamw(w, MasterKind::F32.dense(), grad, state, step, chunk);
        vec![flat::<B>(squares), flat::<B>(verdict), of::<B>(B::accumulated(sum, x)), of::<B>(w)]
    }
}

fn plain() -> LinearSpec {
    LinearSpec::new(Recipe::Bf16, Scaling::Two, Precision::F32)
}

fn of<B: Nvfp4Kernels>(x: FloatTensor<B>) -> Vec<f32> {
    host(Tensor::<B, 2>::from_primitive(TensorPrimitive::Float(x)))
}

fn flat<B: Nvfp4Kernels>(x: FloatTensor<B>) -> Vec<f32> {
    host(Tensor::<B, 1>::from_primitive(TensorPrimitive::Float(x)))
}

/// The bytes of codes and block scales, and the tensor scale.
/// What a product reads of a quantized matrix, in either form: each `code * scale`, and the tensor scale.
fn rounded<B: Nvfp4Kernels>(x: Operand<B>, [rows, cols]: [usize; 2]) -> Vec<Vec<f32>> {
    match x {
        Operand::Packed(codes) => {
            let packed = Nvfp4Tensor::<B>::from_primitive(codes).to_packed().unwrap();
            vec![reference::dequantize(&Packed { global: 1.0, ..packed.clone() }, rows, cols), vec![packed.global]]
        }
        Operand::Unscaled(Unscaled { values, global }) => {
            let words: Vec<u32> = Tensor::<B, 1, Int>::from_primitive(global).into_data().iter().collect();
            vec![of::<B>(values), vec![f32::from_bits(words[0])]]
        }
        Operand::Dense(_) => panic!("the matrix is not quantized"),
    }
}

fn bytes<B: Nvfp4Kernels>(q: &Nvfp4Tensor<B>) -> Vec<Vec<f32>> {
    let packed = q.to_packed().unwrap();
    let codes = packed.codes.iter().flat_map(|w| w.to_le_bytes()).chain(packed.scales);
    vec![codes.map(f32::from).collect(), vec![packed.global]]
}
