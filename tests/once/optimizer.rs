//! The optimizer with every form of master weights and moments.

use super::zeros::{F32, Zeros};
use crate::optimizer::step;
use cubecl::ir::StorageType;
use kernels_cubecl::{
    KernelError,
    adamw::{self, Coding, Master},
    gradient,
    operands::PackedArgs,
    quantize::{self, BlockShape},
};

const MASTERS: [Master; 4] = [Master::Exact, Master::Residual, Master::Stochastic, Master::Nearest];

const CODINGS: [Coding; 2] = [Coding::Bytes, Coding::Nibbles];

/// Steps over `n` values, a multiple of 256, with a last block of 128 values; and over an odd number of values.
pub(super) fn optimizer(zeros: &Zeros, n: usize) -> Result<(), KernelError> {
    let Zeros { client, dtype, .. } = *zeros;
    let some_step = step(1, 1e-4, 1);
    for (len, masters) in [(n + 128, &MASTERS[..]), (n - 3, &MASTERS[..1])] {
        let chunk = adamw::Chunk { start: 0, end: len };
        let state = |coding: Coding, signed: bool| adamw::StateArgs {
            codes: zeros.updated(len * coding.bits() / 8, 1),
            absmax: zeros.updated(len.div_ceil(adamw::STATE_BLOCK), 4),
            table: zeros.floats(1 << coding.bits()),
            search: zeros.sized(coding.search(signed).len(), 4),
        };
        let grad = |ty: StorageType| (zeros.sized(len, ty.size()), ty);
        let judged = |ty: StorageType| adamw::JudgedArgs {
            values: zeros.sized(len, ty.size()),
            dtype: ty,
            verdict: zeros.floats(1),
        };
        for &master in masters {
            let ty = if master == Master::Exact { F32 } else { dtype };
            let dense = || adamw::DenseArgs {
                w: zeros.updated(len, ty.size()),
                dtype: ty,
                residual: (master == Master::Residual).then(|| zeros.updated(len, 1)),
                master,
            };
            for states in [F32, dtype] {
                let moments = [zeros.updated(len, states.size()), zeros.updated(len, states.size())];
                adamw::adamw_float(client, dense(), judged(F32), moments, (states, states != F32), some_step, chunk)?;
            }
            for coding in if len % 16 == 0 { &CODINGS[..] } else { &CODINGS[..1] } {
                let moments = [state(*coding, true), state(*coding, false)];
                adamw::adamw_quantized(client, dense(), judged(dtype), moments, *coding, None, some_step, chunk)?;
            }
            if len % 16 == 0 && master != Master::Exact {
                for (rows, cols, block) in [(1, len, BlockShape::Row), (16, 256, BlockShape::Square)] {
                    leave_codes(zeros, [rows, cols], block, master)?;
                }
            }
        }
        if len % 16 == 0 {
            for coding in CODINGS {
                let moments = [state(coding, true), state(coding, false)];
                let w = PackedArgs {
                    codes: zeros.updated(len / 8, 4),
                    scales: zeros.updated(len / 16, 1),
                    global: zeros.floats(1),
                    rows: 1,
                    cols: len,
                };
                adamw::adamw_packed(client, w, judged(F32), moments, coding, some_step, chunk)?;
            }
        }
        gradient::square_sum(client, zeros.floats(len), F32, (zeros.floats(1), 0), zeros.floats(1))?;
        gradient::accumulate(client, grad(dtype), grad(F32))?;
    }
    Ok(())
}

/// A step that leaves codes, and the quantizer that follows it.
fn leave_codes(zeros: &Zeros, [rows, cols]: [usize; 2], block: BlockShape, master: Master) -> Result<(), KernelError> {
    let Zeros { client, dtype, .. } = *zeros;
    // On a device without planes of 32 units, there are none in 16x16 blocks.
    let Some(maxima) = adamw::maxima_len(client, rows, cols, block) else { return Ok(()) };
    let len = rows * cols;
    let factors = || zeros.floats(quantize::AMAX_LEN);
    for coding in CODINGS {
        let state = |signed: bool| adamw::StateArgs {
            codes: zeros.updated(len * coding.bits() / 8, 1),
            absmax: zeros.updated(len.div_ceil(adamw::STATE_BLOCK), 4),
            table: zeros.floats(1 << coding.bits()),
            search: zeros.sized(coding.search(signed).len(), 4),
        };
        let dense = adamw::DenseArgs {
            w: zeros.updated(len, dtype.size()),
            dtype,
            residual: (master == Master::Residual).then(|| zeros.updated(len, 1)),
            master,
        };
        let judged = adamw::JudgedArgs { values: zeros.floats(len), dtype: F32, verdict: zeros.floats(1) };
        let (packed, maxima) = (zeros.packed(rows, cols), zeros.floats(maxima));
        let codes = Some(adamw::CodesArgs { packed, held: factors(), maxima, block });
        let (moments, chunk) = ([state(true), state(false)], adamw::Chunk { start: 0, end: len });
        adamw::adamw_quantized(client, dense, judged, moments, coding, codes, step(1, 1e-4, 1), chunk)?;
    }
    let x = zeros.sized(len, dtype.size());
    quantize::renew(client, x, dtype, factors(), factors(), zeros.packed(rows, cols), block)
}
