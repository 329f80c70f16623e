//! `gemv` by the plans that it makes for the layers of Qwen3, against f64.

use super::gpu::{BF16, ExactProduct, F16, Gpu, PackedData, matrix};
use crate::support::Random;
use cubecl::ir::StorageType;
use kernels_cubecl::gemv::{Gemv, GemvPlan, gemv};

/// Rows and columns of the layers of Qwen3-0.6B and Qwen3-4B: of one launch together, and summed.
pub(super) const SMALL: [(usize, usize); 10] = [
    (4096, 1024),
    (6144, 1024),
    (1024, 2048),
    (1024, 3072),
    (151_936, 1024),
    (6144, 2560),
    (19_456, 2560),
    (2560, 4096),
    (2560, 9728),
    (151_936, 2560),
];

/// The layers of Qwen3-1.7B, 8B, 14B and 32B.
pub(super) const LARGE: [(usize, usize); 19] = [
    (4096, 2048),
    (12_288, 2048),
    (2048, 2048),
    (2048, 6144),
    (151_936, 2048),
    (6144, 4096),
    (24_576, 4096),
    (4096, 4096),
    (4096, 12_288),
    (151_936, 4096),
    (7168, 5120),
    (34_816, 5120),
    (5120, 5120),
    (5120, 17_408),
    (151_936, 5120),
    (10_240, 5120),
    (51_200, 5120),
    (5120, 8192),
    (5120, 25_600),
];

/// The plans for these layers that differ, with the number of tokens they are for and the columns of the weights.
fn plans(gpu: &Gpu, layers: &[(usize, usize)], ty: StorageType) -> Vec<(GemvPlan, usize, usize)> {
    let mut plans: Vec<(GemvPlan, usize, usize)> = Vec::new();
    for &(n, k) in layers {
        // Tokens are rounded up to a power of two: 3 and 11 leave rows free.
        for rows in [1, 2, 3, 8, 11] {
            let plan = GemvPlan::new(&gpu.client, rows, n, k, ty);
            if plans.iter().all(|(other, ..)| *other != plan) {
                plans.push((plan, rows, k));
            }
        }
    }
    plans
}

/// Every plan for these layers in bf16, and every eighth in f16: the type changes how values are converted, and nothing else.
pub(super) fn every(gpu: &Gpu, layers: &[(usize, usize)]) {
    by_plans(gpu, layers, BF16, |_| true);
    by_plans(gpu, layers, F16, |number| number.is_multiple_of(8));
}

/// The plans for all layers in f16 that `takes` accepts, which is asked once for each.
pub(super) fn in_f16(gpu: &Gpu, mut takes: impl FnMut() -> bool) {
    by_plans(gpu, &[&SMALL[..], &LARGE].concat(), F16, |_| takes());
}

/// Multiplies few rows of weights: they are not part of the plan. `takes` says which plans are tried, by their numbers.
fn by_plans(gpu: &Gpu, layers: &[(usize, usize)], ty: StorageType, mut takes: impl FnMut(usize) -> bool) {
    let plans = plans(gpu, layers, ty).into_iter().enumerate();
    for (number, (plan, rows, k)) in plans.filter(|(number, _)| takes(*number)) {
        let weights: &[usize] = [&[21usize][..], &[21, 8], &[8, 16, 5]][number % 3];
        let label = format!("gemv of {rows} x {k} with {weights:?} by {plan:?}");
        run(gpu, plan, rows, k, weights, ty).unwrap_or_else(|e| panic!("sm_{} {label}: {e}", gpu.arch));
    }
}

pub(super) fn run(
    gpu: &Gpu,
    plan: GemvPlan,
    rows: usize,
    k: usize,
    weights: &[usize],
    ty: StorageType,
) -> Result<(), String> {
    let mut random = Random::new(k as u64 + rows as u64);
    let x = gpu.normal(&mut random, rows * k, ty);
    let weights: Vec<PackedData> = weights.iter().map(|n| gpu.packed(&mut random, *n, k)).collect();
    let ys: Vec<_> = weights.iter().map(|w| gpu.room(rows * w.rows, ty)).collect();
    let launch = Gemv {
        x: x.arg(),
        rows,
        weights: weights.iter().map(PackedData::args).collect(),
        ys: ys.iter().map(|y| y.arg()).collect(),
        dtype: ty,
    };
    gemv(&gpu.client, launch, plan).map_err(|e| e.to_string())?;
    for (w, y) in weights.iter().zip(&ys) {
        let (tokens, weight) = (matrix(&x.values, rows, k), matrix(&w.values, w.rows, k));
        let exact = ExactProduct::new(tokens, weight.reversed_axes(), w.global.values[0]);
        gpu.compare("y", y, |at| exact.at(at / w.rows, at % w.rows))?;
    }
    Ok(())
}
