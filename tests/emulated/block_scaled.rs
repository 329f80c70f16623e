//! `block_scaled` on GPUs whose tensor cores read NVFP4, against f64.

use super::gpu::{BF16, ExactProduct, F16, F32, Gpu, matrix};
use crate::support::Random;
use cubecl::ir::StorageType;
use kernels_cubecl::block_scaled;

/// Every type of result, where the device has such tensor cores.
pub(super) fn every(gpu: &Gpu) {
    assert_eq!(block_scaled::supported(&gpu.client), gpu.arch >= 120, "sm_{}", gpu.arch);
    if block_scaled::supported(&gpu.client) {
        for ty in [BF16, F16, F32] {
            run(gpu, ty).unwrap_or_else(|e| panic!("sm_{} to {ty:?}: {e}", gpu.arch));
        }
    }
}

/// Ragged rows and columns, three steps of the summed dimension.
pub(super) fn run(gpu: &Gpu, ty: StorageType) -> Result<(), String> {
    let mut random = Random::new(17);
    // One instruction sums over 64 values.
    let (rows, cols, depth) = (75, 138, 3 * 64);
    let (a, w) = (gpu.packed(&mut random, rows, depth), gpu.packed(&mut random, cols, depth));
    let y = gpu.room(rows * cols, ty);
    block_scaled::block_scaled(&gpu.client, a.args(), w.args(), y.arg(), ty).map_err(|e| e.to_string())?;
    let (left, right) = (matrix(&a.values, rows, depth), matrix(&w.values, cols, depth).reversed_axes());
    let exact = ExactProduct::new(left, right, a.global.values[0] * w.global.values[0]);
    gpu.compare("block_scaled", &y, |at| exact.at(at / cols, at % cols))
}
