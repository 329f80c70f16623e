//! AdamW in all its forms is the formula, in f64, with what each form of the weight and of the moments rounds: on the CPU
//! and on the GPU. What a form loses in the mean is nothing.

use crate::support::{Cpu, Cube, Random, host, matrix, on_gpu, packed, relative, spec};
use backend_nvfp4::{
    AdamwState, AdamwStep, Gradient, Judged, MasterKind, Moment, Nvfp4Kernels, Nvfp4Primitive, Nvfp4Tensor,
    STATE_BLOCK, StateKind, Stream, reference::philox,
};
use burn::tensor::{
    DType, Int, Shape, Tensor, TensorData, TensorMetadata, TensorPrimitive,
    ops::{FloatTensor, IntTensor},
};
use burn_cubecl::CubeRuntime;

const STATES: [StateKind; 4] = [StateKind::F32, StateKind::Bf16, StateKind::Int8, StateKind::Int4];
const MASTERS: [MasterKind; 5] =
    [MasterKind::F32, MasterKind::BF16_RESIDUAL, MasterKind::BF16, MasterKind::BF16_NEAREST, MasterKind::Nvfp4];

/// Step `t`, counted from 1, with clipping.
pub(crate) fn step(t: i32, lr: f32, seed: u64) -> AdamwStep {
    AdamwStep {
        lr,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
        bias1: 1.0 - 0.9f32.powi(t),
        bias2: 1.0 - 0.95f32.powi(t),
        clip_factor: 0.7,
        stream: Stream { seed, step: t as u32, stream: 7 },
    }
}

/// What is trained: the first weights, a gradient a step, the rate and the seed.
struct Run<'a> {
    start: &'a [f32],
    grads: &'a [Vec<f32>],
    shape: [usize; 2],
    lr: f32,
    seed: u64,
}

/// The weights that a backend holds after the steps of a run.
fn trained<B: Nvfp4Kernels>(run: &Run<'_>, master: MasterKind, state: StateKind) -> Vec<f32> {
    trained_beside::<B>(run, master, state, false)
}

/// The same. If `held`, the weights and states before each step are held while it is made, as an undo copy holds them, and must
/// stay as they are. Such a step is made in chunks of two blocks of moments, so that each launch has one cube; another step is one
/// launch of several cubes.
fn trained_beside<B: Nvfp4Kernels>(run: &Run<'_>, master: MasterKind, state: StateKind, held: bool) -> Vec<f32> {
    let device: B::Device = Default::default();
    let [rows, cols] = run.shape;
    let chunk = if held { 512 } else { (rows * cols).next_multiple_of(STATE_BLOCK) };
    let half = if B::supports_dtype(&device, DType::BF16) { DType::BF16 } else { DType::F32 };
    let mut moments = AdamwState::<B>::zeros(state, rows * cols, half, &device);
    let gradient = |grad: &[f32]| judged::<B>(matrix::<B>(grad, rows, cols, &device).into_primitive().tensor(), 0.0);
    let steps = || (1..).map(|t| step(t, run.lr, run.seed)).zip(run.grads);
    if master == MasterKind::Nvfp4 {
        let codes = packed(&spec::quantize_master(run.start));
        let mut w = Nvfp4Tensor::<B>::new(codes, rows, cols, &device).unwrap().into_primitive();
        for (step, grad) in steps() {
            let copy = held.then(|| Held::of(Weight::Codes(w.clone()), &moments));
            (w, moments) = B::adamw_packed(w, gradient(grad), moments, step, chunk);
            copy.iter().for_each(Held::assert_unchanged);
        }
        return host(Nvfp4Tensor::<B>::from_primitive(w).dequantize(DType::F32));
    }
    if master == MasterKind::BF16_RESIDUAL {
        moments = moments.with_residual(rows * cols, &device);
    }
    let (dtype, values) = match master {
        MasterKind::F32 => (DType::F32, run.start.to_vec()),
        _ => (half, run.start.iter().map(|x| half::bf16::from_f32(*x).to_f32()).collect()),
    };
    let data = TensorData::new(values, [rows * cols]);
    let mut w = Tensor::<B, 1>::from_data(data, (&device, dtype)).into_primitive().tensor();
    for (step, grad) in steps() {
        let copy = held.then(|| Held::of(Weight::Floats(w.clone()), &moments));
        (w, moments) = B::adamw(w, master.dense(), gradient(grad), moments, step, chunk);
        copy.iter().for_each(Held::assert_unchanged);
    }
    let mut values = host(Tensor::<B, 1>::from_primitive(TensorPrimitive::Float(w)));
    if let Some(residual) = moments.residual {
        for (w, r) in values.iter_mut().zip(bytes_of::<B>(residual)) {
            *w = f32::from_bits((w.to_bits() + (u32::from(r) << 8)).wrapping_sub(0x8000));
        }
    }
    values
}

/// The values of a tensor of bytes.
fn bytes_of<B: Nvfp4Kernels>(x: IntTensor<B>) -> Vec<u8> {
    let flat = Shape::new([x.shape().num_elements()]);
    Tensor::<B, 1, Int>::from_primitive(B::int_reshape(x, flat)).into_data().iter().collect()
}

/// A gradient with a verdict on its step.
pub(crate) fn judged<B: Nvfp4Kernels>(gradient: FloatTensor<B>, verdict: f32) -> Judged<B> {
    let verdict = Tensor::<B, 1>::full([1], verdict, (&B::float_device(&gradient), DType::F32));
    Judged { gradient, verdict: verdict.into_primitive().tensor() }
}

/// A weight in one of its forms.
enum Weight<B: Nvfp4Kernels> {
    Floats(FloatTensor<B>),
    Codes(Nvfp4Primitive<B>),
}

/// Handles on a weight and its state, and the bytes that they had.
struct Held<B: Nvfp4Kernels> {
    weight: Weight<B>,
    state: AdamwState<B>,
    bytes: Vec<Vec<u8>>,
}

impl<B: Nvfp4Kernels> Held<B> {
    fn of(weight: Weight<B>, state: &AdamwState<B>) -> Self {
        let mut held = Self { weight, state: state.clone(), bytes: vec![] };
        held.bytes = held.read();
        held
    }

    fn assert_unchanged(&self) {
        assert!(self.bytes == self.read(), "a step has changed what was held");
    }

    fn read(&self) -> Vec<Vec<u8>> {
        let floats = |x: &FloatTensor<B>| {
            let flat = B::float_reshape(x.clone(), Shape::new([x.shape().num_elements()]));
            Tensor::<B, 1>::from_primitive(TensorPrimitive::Float(flat)).into_data().bytes.to_vec()
        };
        let ints = |x: &IntTensor<B>| bytes_of::<B>(x.clone());
        let mut all = match &self.weight {
            Weight::Floats(w) => vec![floats(w)],
            Weight::Codes(w) => {
                let packed = Nvfp4Tensor::<B>::from_primitive(w.clone()).to_packed().unwrap();
                vec![packed.codes.iter().flat_map(|word| word.to_le_bytes()).collect(), packed.scales]
            }
        };
        for moment in [&self.state.m, &self.state.v] {
            match moment {
                Moment::Float(x) => all.push(floats(x)),
                Moment::Quantized { codes, absmax, .. } => all.extend([ints(codes), floats(absmax)]),
            }
        }
        all.extend(self.state.residual.as_ref().map(ints));
        all
    }
}

/// The same by the formula in f64 (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2), each result stored as its form
/// stores it.
fn by_the_formula(run: &Run<'_>, master: MasterKind, state: StateKind) -> Vec<f64> {
    let mut codes = spec::quantize_master(run.start);
    let mut w: Vec<f64> = match master {
        MasterKind::Nvfp4 => codes.values(),
        MasterKind::F32 => spec::wide(run.start),
        _ => run.start.iter().map(|x| half::bf16::from_f32(*x).to_f64()).collect(),
    };
    let (mut m, mut v) = (vec![0.0f64; w.len()], vec![0.0f64; w.len()]);
    for (t, grad) in run.grads.iter().enumerate() {
        let s = step(t as i32 + 1, run.lr, run.seed);
        let [lr, beta1, beta2, eps, decay, bias1, bias2] =
            [s.lr, s.beta1, s.beta2, s.eps, s.weight_decay, s.bias1, s.bias2].map(f64::from);
        for (i, g) in grad.iter().enumerate() {
            let g = f64::from(*g) * f64::from(s.clip_factor);
            m[i] = beta1 * m[i] + (1.0 - beta1) * g;
            v[i] = beta2 * v[i] + (1.0 - beta2) * g * g;
            let update = m[i] / bias1 / ((v[i] / bias2).sqrt() + eps);
            w[i] = w[i] * (1.0 - lr * decay) - lr * update;
        }
        let values: Vec<f32> = w.iter().map(|x| *x as f32).collect();
        if master == MasterKind::Nvfp4 {
            spec::repack(&mut codes, &values, s.stream);
            w = codes.values();
        } else {
            w = values.iter().enumerate().map(|(i, x)| f64::from(stored_weight(*x, i, master, s.stream))).collect();
        }
        (m, v) = stored_moments(&m, &v, state, s.stream);
    }
    w
}

/// The value that a dense master keeps of `x`, value `i` of its tensor.
fn stored_weight(x: f32, i: usize, master: MasterKind, stream: Stream) -> f32 {
    let bits = x.to_bits();
    match master {
        MasterKind::F32 => x,
        // 16 bits and 8 more, the last of them rounded.
        MasterKind::BF16_RESIDUAL => f32::from_bits((bits + 0x80) & !0xFF),
        MasterKind::BF16_NEAREST => half::bf16::from_f32(x).to_f32(),
        MasterKind::BF16 => {
            // A draw of 16 bits: a word of the generator serves two values.
            let draw = philox((i / 8) as u32, stream)[i % 8 / 2] >> (i % 2 * 16) & 0xFFFF;
            f32::from_bits((bits + draw) & !0xFFFF)
        }
        MasterKind::Nvfp4 => unreachable!("codes are written by blocks"),
    }
}

/// What the forms of the moments keep of both.
fn stored_moments(m: &[f64], v: &[f64], state: StateKind, stream: Stream) -> (Vec<f64>, Vec<f64>) {
    match state {
        StateKind::F32 => (m.to_vec(), v.to_vec()),
        StateKind::Bf16 => {
            let other = Stream { stream: stream.stream ^ 0x8000_0000, ..stream };
            let kept = |x: f64, draw: u32| f64::from(f32::from_bits(((x as f32).to_bits() + draw) & !0xFFFF));
            let word = |i: usize| philox((i / 4) as u32, other)[i % 4];
            let m = m.iter().enumerate().map(|(i, x)| kept(*x, word(i) >> 16));
            let v = v.iter().enumerate().map(|(i, x)| kept(*x, word(i) & 0xFFFF));
            (m.collect(), v.collect())
        }
        StateKind::Int8 => {
            let unsigned = dynamic(8, false);
            let root: Vec<f64> = v.iter().map(|x| x.sqrt()).collect();
            let mut kept = block_wise(&root, &unsigned);
            // A root above zero stays above zero, at the smallest entry.
            for (kept, root) in kept.chunks_mut(256).zip(root.chunks(256)) {
                let largest = root.iter().fold(0.0f64, |a, x| a.max(*x));
                let lost = |(kept, root): &(&mut f64, &f64)| **kept == 0.0 && **root > 0.0;
                kept.iter_mut().zip(root).filter(lost).for_each(|(kept, _)| *kept = unsigned[1] * largest);
            }
            (block_wise(m, &dynamic(8, true)), kept.iter().map(|r| r * r).collect())
        }
        StateKind::Int4 => {
            // Sixteenths without zero.
            let linear: Vec<f64> = (1..=16).map(|i| f64::from(i) / 16.0).collect();
            let root: Vec<f64> = v.iter().map(|x| x.sqrt()).collect();
            let kept = block_wise(&root, &linear);
            (block_wise(m, &dynamic(4, true)), kept.iter().map(|r| r * r).collect())
        }
    }
}

/// The dynamic table of Dettmers et al. (arXiv 2110.02861, section 2.1): zero, one, and in each decade below one twice as
/// many evenly spaced means as in the decade below.
fn dynamic(bits: i32, signed: bool) -> Vec<f64> {
    let mut table = vec![0.0, 1.0];
    let mut count = if signed { 1 } else { 2 };
    for decade in (0..bits - 1).rev() {
        for i in 0..count {
            let mean = 0.1 + 0.9 * (f64::from(i) + 0.5) / f64::from(count);
            let entry = mean * 10f64.powi(-decade);
            table.push(entry);
            if signed {
                table.push(-entry);
            }
        }
        count *= 2;
    }
    table.sort_by(f64::total_cmp);
    table
}

/// Each value as the nearest entry of the table times the largest of its 256; the lower entry at a tie.
fn block_wise(values: &[f64], table: &[f64]) -> Vec<f64> {
    let block = |block: &[f64]| -> Vec<f64> {
        let largest = block.iter().fold(0.0f64, |a, x| a.max(x.abs()));
        let unit = if largest > 0.0 { largest } else { 1.0 };
        let nearest = |x: &f64| {
            let distance = |t: &f64| (t - x / unit).abs();
            table.iter().copied().reduce(|a, b| if distance(&b) < distance(&a) { b } else { a }).unwrap() * largest
        };
        block.iter().map(nearest).collect()
    };
    values.chunks(256).flat_map(block).collect()
}

/// Gradients over four decades within a block, as an embedding has.
fn wide_gradients(random: &mut Random, len: usize) -> Vec<f32> {
    random.normals(len, 1.0).iter().enumerate().map(|(i, g)| g * 10f32.powi(-(i as i32 % 4))).collect()
}

fn every_form_is_the_formula<B: Nvfp4Kernels>() {
    let mut random = Random::new(29);
    // Lengths of which a unit of the kernel takes eight values, four, one; the first is longer than a block of 256.
    for shape @ [rows, cols] in [[37, 48], [1, 16], [16, 256], [5, 52], [3, 85]] {
        let start = random.normals(rows * cols, 0.05);
        let grads: Vec<_> = (0..4).map(|_| wide_gradients(&mut random, rows * cols)).collect();
        let run = Run { start: &start, grads: &grads, shape, lr: 1e-3, seed: 11 };
        for (master, state) in MASTERS.iter().flat_map(|m| STATES.iter().map(move |s| (*m, *s))) {
            let packed = master == MasterKind::Nvfp4;
            if packed && (matches!(state, StateKind::F32 | StateKind::Bf16) || cols % 16 != 0)
                || state == StateKind::Int4 && rows * cols % 4 != 0
            {
                continue;
            }
            let ours = trained::<B>(&run, master, state);
            assert!(
                ours == trained_beside::<B>(&run, master, state, true),
                "{master:?}, {state:?}, {shape:?}: a copy is held, and the step is made in chunks"
            );
            let exact = by_the_formula(&run, master, state);
            // f32 and f64 differ in the last bits of f32: then a value may be rounded to the other side, which for weights
            // of 24 bits is as near as 2^-15.
            let share = if master == MasterKind::BF16_RESIDUAL { 4e-5 } else { 2e-6 };
            let apart = |(a, b): &(&f32, &f64)| (f64::from(**a) - **b).abs() > share * b.abs().max(1e-2);
            let count = ours.iter().zip(&exact).filter(apart).count();
            assert!(count * 200 <= ours.len(), "{master:?}, {state:?}, {shape:?}: {count} of {} differ", ours.len());
            assert_ne!(ours, trained::<B>(&Run { grads: &[], ..run }, master, state), "the steps move the weights");
        }
    }
}

#[test]
fn every_form_is_the_formula_on_the_cpu() {
    every_form_is_the_formula::<Cpu>();
}

#[test]
fn every_form_is_the_formula_on_the_gpu() {
    fn on_cube<R: CubeRuntime>() {
        every_form_is_the_formula::<Cube<R>>();
    }
    on_gpu!(on_cube);
}

/// The codes of both moments after a first step, two in a byte for four bits.
fn codes_of_a_first_step<B: Nvfp4Kernels>(grad: &[f32], state: StateKind) -> Vec<Vec<u8>> {
    let device: B::Device = Default::default();
    let moments = AdamwState::<B>::zeros(state, grad.len(), DType::F32, &device);
    let gradient = judged::<B>(matrix::<B>(grad, 1, grad.len(), &device).into_primitive().tensor(), 0.0);
    let w = Tensor::<B, 2>::zeros([1, grad.len()], &device).into_primitive().tensor();
    let (_, state) = B::adamw(w, MasterKind::F32.dense(), gradient, moments, step(1, 0.1, 3), grad.len());
    let codes = |moment: Moment<B>| match moment {
        Moment::Quantized { codes, .. } => bytes_of::<B>(codes),
        Moment::Float(_) => unreachable!("the moments are quantized"),
    };
    vec![codes(state.m), codes(state.v)]
}

/// Values beside the border of two codes may get either, because a device divides and takes roots in its own way: two in a million
/// do for 8 bits.
#[test]
fn the_codes_of_moments_are_those_of_the_reference_on_the_gpu() {
    fn different<R: CubeRuntime>() {
        let mut random = Random::new(23);
        let mut grad = wide_gradients(&mut random, 1 << 20);
        grad.iter_mut().step_by(7).for_each(|g| *g = 0.0);
        grad.iter_mut().step_by(5).for_each(|g| *g = g.abs());
        grad[1024..2048].fill(0.0);
        for state in [StateKind::Int8, StateKind::Int4] {
            let expected = codes_of_a_first_step::<Cpu>(&grad, state);
            let found = codes_of_a_first_step::<Cube<R>>(&grad, state);
            for (moment, (expected, found)) in expected.iter().zip(&found).enumerate() {
                let other: Vec<usize> = (0..expected.len()).filter(|i| expected[*i] != found[*i]).collect();
                let far = |i: &&usize| {
                    let nibbles = [0, 4].map(|s| (expected[**i] >> s & 15).abs_diff(found[**i] >> s & 15));
                    let bytes = expected[**i].abs_diff(found[**i]);
                    if state == StateKind::Int8 { bytes > 1 } else { nibbles.iter().any(|d| *d > 1) }
                };
                assert_eq!(
                    other.iter().find(far),
                    None,
                    "{state:?}, moment {moment}: a code is not beside the expected one"
                );
                assert!(other.len() * 10_000 < grad.len(), "{state:?}, moment {moment}: {} codes differ", other.len());
            }
        }
    }
    on_gpu!(different);
}

/// Small steps are not lost: the origin's 4-bit master moved by 0 % of what f32 AdamW moves at this rate.
#[test]
fn twenty_small_steps_move_every_master_but_the_nearest_as_the_formula() {
    let shape @ [rows, cols] = [512, 1024];
    let mut random = Random::new(31);
    let start = random.normals(rows * cols, 0.02);
    let direction = random.normals(rows * cols, 1.0);
    let grads: Vec<Vec<f32>> = (0..20).map(|_| direction.iter().map(|d| d + 0.5 * random.normal()).collect()).collect();
    let run = |grads, seed| Run { start: &start, grads, shape, lr: 5e-5, seed };
    let exact: Vec<f64> = by_the_formula(&run(&grads, 0), MasterKind::F32, StateKind::F32);
    let exact: Vec<f64> = exact.iter().zip(&start).map(|(a, b)| a - f64::from(*b)).collect();
    let square: f64 = exact.iter().map(|d| d * d).sum();
    for (master, moves) in MASTERS.map(|m| (m, m != MasterKind::BF16_NEAREST)) {
        // Rounding to 4 bits is nine times as loud as these steps: several draws are averaged.
        let draws = if master == MasterKind::Nvfp4 { 6 } else { 1 };
        let share = |seed| {
            let before = trained::<Cpu>(&run(&[], seed), master, StateKind::Int8);
            let after = trained::<Cpu>(&run(&grads, seed), master, StateKind::Int8);
            let moved = after.iter().zip(before).map(|(a, b)| f64::from(a - b));
            moved.zip(&exact).map(|(a, b)| a * b).sum::<f64>() / square
        };
        let along = (0..draws).map(share).sum::<f64>() / draws as f64;
        assert_eq!((along - 1.0).abs() < 0.02, moves, "{master:?} moved by {along} of what the formula moves");
    }
}

#[test]
fn a_rate_of_zero_moves_nothing() {
    let shape @ [rows, cols] = [32, 64];
    let mut random = Random::new(37);
    let start = random.normals(rows * cols, 0.02);
    let grads = vec![random.normals(rows * cols, 1.0); 3];
    for master in MASTERS {
        let run = |grads| Run { start: &start, grads, shape, lr: 0.0, seed: 11 };
        let before = trained::<Cpu>(&run(&[]), master, StateKind::Int8);
        assert_eq!(trained::<Cpu>(&run(&grads), master, StateKind::Int8), before, "{master:?}");
    }
}

/// How far ten steps with other moments end from f32 moments, as a share of the way. The bounds are what was measured
/// and a tenth more.
#[test]
fn quantized_moments_move_the_weights_nearly_as_f32_moments() {
    let shape @ [rows, cols] = [37, 48];
    let mut random = Random::new(23);
    let start = random.normals(rows * cols, 0.05);
    let grads: Vec<_> = (0..10).map(|_| wide_gradients(&mut random, rows * cols)).collect();
    let run = Run { start: &start, grads: &grads, shape, lr: 1e-3, seed: 11 };
    let moved = |to: Vec<f64>| -> Vec<f64> { to.iter().zip(&start).map(|(a, b)| a - f64::from(*b)).collect() };
    let exact = moved(by_the_formula(&run, MasterKind::F32, StateKind::F32));
    for (state, bound) in
        [(StateKind::F32, 1e-4), (StateKind::Bf16, 0.02), (StateKind::Int8, 0.1), (StateKind::Int4, 0.7)]
    {
        let ours = moved(spec::wide(&trained::<Cpu>(&run, MasterKind::F32, state)));
        let ours: Vec<f32> = ours.iter().map(|x| *x as f32).collect();
        let error = relative(&ours, exact.iter().copied());
        eprintln!("{state:?} moved the weights {error}");
        assert!(error < bound, "{state:?} moved the weights {error} away from f32 moments");
    }
}

/// Once a gradient of a step was not finite, the verdict is not 0, and a step leaves weights and states as they are, in every
/// form.
#[test]
fn a_step_with_a_verdict_changes_nothing() {
    fn check<B: Nvfp4Kernels>() {
        let device: B::Device = Default::default();
        let zero = || Tensor::<B, 1>::zeros([1], (&device, DType::F32)).into_primitive().tensor();
        for (value, expected) in [(1.0f32, 0.0f32), (f32::INFINITY, 1.0), (f32::NAN, 1.0), (1e30, 1.0)] {
            let mut grad = vec![0.5f32; 3 * 600];
            grad[777] = value;
            let x = matrix::<B>(&grad, 3, 600, &device).into_primitive().tensor();
            let (_, verdict) = B::square_sum(Gradient::unmeasured(x), (zero(), 0), zero());
            let read =
                |verdict: FloatTensor<B>| host(Tensor::<B, 1>::from_primitive(TensorPrimitive::Float(verdict)))[0];
            assert_eq!(read(verdict.clone()), expected, "a gradient with {value}");
            // A verdict stays, whatever comes after.
            let fine = || matrix::<B>(&[1.0; 16], 1, 16, &device).into_primitive().tensor();
            let after = B::square_sum(Gradient::unmeasured(fine()), (zero(), 0), verdict).1;
            assert_eq!(read(after), expected, "after a gradient with {value}");
            // The squares that a product has summed are judged as the values would be.
            let squares = Tensor::<B, 1>::from_floats([4.0, value * value, 5.0], &device).into_primitive().tensor();
            let measured = Gradient { values: fine(), squares: Some(squares) };
            let (sums, verdict) = B::square_sum(measured, (zero(), 0), zero());
            assert_eq!(read(verdict), expected, "after a product with {value}");
            if expected == 0.0 {
                assert_eq!(read(sums), 9.0 + value * value, "the sum of what a product has summed");
            }
        }
        let (rows, cols) = (4, 272);
        let values: Vec<f32> = Random::new(5).normals(rows * cols, 0.1);
        let gradient =
            |verdict: f32| judged::<B>(matrix::<B>(&values, rows, cols, &device).into_primitive().tensor(), verdict);
        let half = if B::supports_dtype(&device, DType::BF16) { DType::BF16 } else { DType::F32 };
        for state in STATES {
            for master in MASTERS {
                let float = matches!(state, StateKind::F32 | StateKind::Bf16);
                if master == MasterKind::Nvfp4 && float {
                    continue;
                }
                let mut moments = AdamwState::<B>::zeros(state, rows * cols, half, &device);
                if master == MasterKind::BF16_RESIDUAL {
                    moments = moments.with_residual(rows * cols, &device);
                }
                let bytes = |w: Weight<B>, m: &AdamwState<B>| Held::of(w, m).bytes;
                let [before, after, allowed] = if master == MasterKind::Nvfp4 {
                    let codes = packed(&spec::quantize_master(&values));
                    let w = Nvfp4Tensor::<B>::new(codes, rows, cols, &device).unwrap().into_primitive();
                    let before = bytes(Weight::Codes(w.clone()), &moments);
                    let (w, moments) = B::adamw_packed(w, gradient(1.0), moments, step(1, 0.1, 3), 512);
                    let after = bytes(Weight::Codes(w.clone()), &moments);
                    let (w, moments) = B::adamw_packed(w, gradient(0.0), moments, step(1, 0.1, 3), 512);
                    [before, after, bytes(Weight::Codes(w), &moments)]
                } else {
                    let dtype = if master == MasterKind::F32 { DType::F32 } else { half };
                    let data = TensorData::new(values.clone(), [rows * cols]);
                    let w = Tensor::<B, 1>::from_data(data, (&device, dtype)).into_primitive().tensor();
                    let before = bytes(Weight::Floats(w.clone()), &moments);
                    let (w, moments) = B::adamw(w, master.dense(), gradient(1.0), moments, step(1, 0.1, 3), 512);
                    let after = bytes(Weight::Floats(w.clone()), &moments);
                    let (w, moments) = B::adamw(w, master.dense(), gradient(0.0), moments, step(1, 0.1, 3), 512);
                    [before, after, bytes(Weight::Floats(w), &moments)]
                };
                assert!(before == after, "{master:?}, {state:?}: a step with a verdict has changed something");
                assert!(before != allowed, "{master:?}, {state:?}: a step without one has changed nothing");
            }
        }
    }
    check::<Cpu>();
    fn on_cube<R: CubeRuntime>() {
        check::<Cube<R>>();
    }
    on_gpu!(on_cube);
}
