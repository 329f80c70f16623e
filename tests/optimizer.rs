//! AdamW in all its forms: f32 against the formula, every master and every state against the CPU's, and what a form
//! loses is what its bits say: in the mean nothing.

use crate::support::{Cpu, Cube, Random, host, matrix, on_gpu, relative};
use backend_nvfp4::{AdamwState, AdamwStep, MasterKind, Nvfp4Kernels, Nvfp4Tensor, StateKind, Stream, reference};
use burn::tensor::{DType, Tensor, TensorData, TensorPrimitive};
use burn_cubecl::CubeRuntime;

const STATES: [StateKind; 4] = [StateKind::F32, StateKind::Bf16, StateKind::Int8, StateKind::Int4];
const MASTERS: [MasterKind; 5] =
    [MasterKind::F32, MasterKind::Bf16Residual, MasterKind::Bf16, MasterKind::Bf16Nearest, MasterKind::Nvfp4];

fn step(t: i32, lr: f32, seed: u64) -> AdamwStep {
    AdamwStep {
        lr,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
        bias1: 1.0 - 0.9f32.powi(t),
        bias2: 1.0 - 0.95f32.powi(t),
        grad_scale: 0.7,
        stream: Stream { seed, step: t as u32, stream: 7 },
    }
}

/// Weights after some steps with these gradients, in a form.
fn trained<B: Nvfp4Kernels>(
    w: &[f32],
    grads: &[Vec<f32>],
    [rows, cols]: [usize; 2],
    master: MasterKind,
    state: StateKind,
    lr: f32,
    seed: u64,
) -> Vec<f32> {
    let device: B::Device = Default::default();
    let half = if B::supports_dtype(&device, DType::BF16) { DType::BF16 } else { DType::F32 };
    let mut moments = AdamwState::<B>::zeros(state, rows * cols, half, &device);
    let gradient = |grad: &[f32]| matrix::<B>(grad, rows, cols, &device).into_primitive().tensor();
    if master == MasterKind::Nvfp4 {
        let packed = Nvfp4Tensor::<B>::new(reference::quantize_master(w, rows, cols), rows, cols, &device).unwrap();
        let mut w = packed.into_primitive();
        for (t, grad) in grads.iter().enumerate() {
            (w, moments) = B::adamw_packed(w, gradient(grad), moments, step(t as i32 + 1, lr, seed), 512);
        }
        return host(Nvfp4Tensor::<B>::from_primitive(w).dequantize(DType::F32));
    }
    if master == MasterKind::Bf16Residual {
        moments = moments.with_residual(rows * cols, &device);
    }
    let dtype = if master == MasterKind::F32 { DType::F32 } else { half };
    let rounded = |x: &f32| if master == MasterKind::F32 { *x } else { half::bf16::from_f32(*x).to_f32() };
    let data = TensorData::new(w.iter().map(rounded).collect::<Vec<_>>(), [rows * cols]);
    let mut w = Tensor::<B, 1>::from_data(data, (&device, dtype)).into_primitive().tensor();
    for (t, grad) in grads.iter().enumerate() {
        (w, moments) = B::adamw(w, master.dense(), gradient(grad), moments, step(t as i32 + 1, lr, seed), 512);
    }
    let mut values = host(Tensor::<B, 1>::from_primitive(TensorPrimitive::Float(w)));
    if let Some(residual) = moments.residual {
        let bytes = backend_nvfp4::read_words::<B>(residual).unwrap();
        for (w, r) in values.iter_mut().zip(bytes) {
            *w = f32::from_bits((w.to_bits() + (r << 8)).wrapping_sub(0x8000));
        }
    }
    values
}

/// Gradients over four decades within a block, as an embedding has.
fn wide(random: &mut Random, len: usize) -> Vec<f32> {
    random.normals(len, 1.0).iter().enumerate().map(|(i, g)| g * 10f32.powi(-(i as i32 % 4))).collect()
}

#[test]
fn f32_is_the_formula() {
    let shape @ [rows, cols] = [37, 48];
    let mut random = Random::new(23);
    let start = random.normals(rows * cols, 0.05);
    let grads: Vec<_> = (0..10).map(|_| wide(&mut random, rows * cols)).collect();
    let (mut w, mut m, mut v) = (start.clone(), vec![0.0; start.len()], vec![0.0; start.len()]);
    for (t, grad) in grads.iter().enumerate() {
        reference::adamw(&mut w, grad, &mut m, &mut v, step(t as i32 + 1, 1e-3, 11));
    }
    let got = trained::<Cpu>(&start, &grads, shape, MasterKind::F32, StateKind::F32, 1e-3, 11);
    assert_eq!(got, w);
    let moved = |to: &[f32]| -> Vec<f32> { to.iter().zip(&start).map(|(a, b)| a - b).collect() };
    for (state, bound) in [(StateKind::Bf16, 0.02), (StateKind::Int8, 0.1), (StateKind::Int4, 0.7)] {
        let other = trained::<Cpu>(&start, &grads, shape, MasterKind::F32, state, 1e-3, 11);
        let error = relative(&moved(&other), moved(&w).into_iter().map(f64::from));
        assert!(error < bound, "{state:?} moved the weights {error} away from f32 states");
    }
}

#[test]
fn every_form_on_the_gpu_is_the_cpus() {
    fn run<R: CubeRuntime>() {
        let mut random = Random::new(29);
        // Eight values a unit, four, one.
        for shape @ [rows, cols] in [[37, 48], [1, 16], [16, 256], [5, 52], [3, 85]] {
            let start = random.normals(rows * cols, 0.05);
            let grads: Vec<_> = (0..3).map(|_| wide(&mut random, rows * cols)).collect();
            for (master, state) in MASTERS.iter().flat_map(|m| STATES.iter().map(move |s| (*m, *s))) {
                let packed = master == MasterKind::Nvfp4;
                if packed && (matches!(state, StateKind::F32 | StateKind::Bf16) || cols % 16 != 0)
                    || state == StateKind::Int4 && rows * cols % 4 != 0
                {
                    continue;
                }
                let cpu = trained::<Cpu>(&start, &grads, shape, master, state, 1e-3, 11);
                let gpu = trained::<Cube<R>>(&start, &grads, shape, master, state, 1e-3, 11);
                // A last bit apart, a value may be rounded to the other side.
                let apart = |(a, b): &(&f32, &f32)| (*a - *b).abs() > 2e-6 * b.abs().max(1e-2);
                let count = cpu.iter().zip(&gpu).filter(apart).count();
                assert!(count * 100 <= cpu.len(), "{master:?}, {state:?}, {shape:?}: {count} of {} differ", cpu.len());
            }
        }
    }
    on_gpu!(run);
}

/// The origin's 4-bit master moved by 0 % of what f32 AdamW moves at this rate.
#[test]
fn twenty_small_steps_move_every_master_as_f32() {
    let shape @ [rows, cols] = [512, 1024];
    let mut random = Random::new(31);
    let start = random.normals(rows * cols, 0.02);
    let direction = random.normals(rows * cols, 1.0);
    let grads: Vec<Vec<f32>> = (0..20).map(|_| direction.iter().map(|d| d + 0.5 * random.normal()).collect()).collect();
    let of = |master, seed| {
        // What a form holds at the beginning, and after the steps.
        let before = trained::<Cpu>(&start, &[], shape, master, StateKind::Int8, 5e-5, seed);
        let after = trained::<Cpu>(&start, &grads, shape, master, StateKind::Int8, 5e-5, seed);
        after.iter().zip(before).map(|(a, b)| f64::from(a - b)).collect::<Vec<_>>()
    };
    let exact = of(MasterKind::F32, 0);
    let square: f64 = exact.iter().map(|d| d * d).sum();
    for (master, moves) in MASTERS.map(|m| (m, m != MasterKind::Bf16Nearest)) {
        // Rounding to 4 bits is nine times as loud as these steps: several draws are averaged.
        let draws = if master == MasterKind::Nvfp4 { 6 } else { 1 };
        let share = |seed| of(master, seed).iter().zip(&exact).map(|(a, b)| a * b).sum::<f64>() / square;
        let along = (0..draws).map(share).sum::<f64>() / draws as f64;
        assert_eq!((along - 1.0).abs() < 0.02, moves, "{master:?} moved by {along} of what f32 moves");
    }
}

/// A rate of 0 is the identity, in every form.
#[test]
fn a_rate_of_zero_moves_nothing() {
    let shape @ [rows, cols] = [32, 64];
    let mut random = Random::new(37);
    let start = random.normals(rows * cols, 0.02);
    let grads = vec![random.normals(rows * cols, 1.0); 3];
    for master in MASTERS {
        let before = trained::<Cpu>(&start, &[], shape, master, StateKind::Int8, 0.0, 11);
        assert_eq!(trained::<Cpu>(&start, &grads, shape, master, StateKind::Int8, 0.0, 11), before, "{master:?}");
    }
}

/// Regression with noise: the loss after 300 steps with quantized moments, as a share of the loss with f32 moments. Four
/// bits are slow where features that share a block span two decades, as their gradients then do.
#[test]
fn what_quantised_moments_leave_of_the_loss() {
    for (base, bounds) in [(2.0, [1.05, 2.0]), (10.0, [1.05, 5.0])] {
        let exact = left(StateKind::F32, base);
        for (state, bound) in [StateKind::Int8, StateKind::Int4].into_iter().zip(bounds) {
            let share = left(state, base) / exact;
            assert!(share < bound, "{state:?} leaves {share} of what f32 leaves, features by {base}");
        }
    }
}

/// The loss that is left, of three kinds of features, each smaller than the one before by `base`.
fn left(state: StateKind, base: f32) -> f64 {
    let [outputs, features, batch] = [16usize, 64, 8];
    let device = Default::default();
    let scale = |f: usize| base.powi(-((f % 3) as i32));
    let mut random = Random::new(41);
    let target = random.normals(outputs * features, 1.0);
    let mut w = Tensor::<Cpu, 1>::zeros([outputs * features], &device).into_primitive().tensor();
    let mut moments = AdamwState::<Cpu>::zeros(state, outputs * features, DType::F32, &device);
    let mut values = vec![0.0f32; outputs * features];
    for t in 1..=300 {
        let mut grad = vec![0.0f32; outputs * features];
        for _ in 0..batch {
            let x: Vec<f32> = (0..features).map(|f| scale(f) * random.normal()).collect();
            for (row, grad) in grad.chunks_mut(features).enumerate() {
                let off = |(i, x): (usize, &f32)| (values[row * features + i] - target[row * features + i]) * x;
                let error = x.iter().enumerate().map(off).sum::<f32>() + 0.1 * random.normal();
                grad.iter_mut().zip(&x).for_each(|(g, x)| *g += error * x / batch as f32);
            }
        }
        let grad = matrix::<Cpu>(&grad, outputs, features, &device).into_primitive().tensor();
        let plain = AdamwStep { weight_decay: 0.0, grad_scale: 1.0, ..step(t, 0.05 * (1.0 - t as f32 / 300.0), 0) };
        (w, moments) = Cpu::adamw(w, MasterKind::F32.dense(), grad, moments, plain, 256);
        values = host(Tensor::<Cpu, 1>::from_primitive(TensorPrimitive::Float(w.clone())));
    }
    let square = |i: usize| f64::from((values[i] - target[i]) * scale(i % features)).powi(2);
    (0..values.len()).map(square).sum()
}
