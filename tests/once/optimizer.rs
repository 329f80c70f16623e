//! The optimizer with every form of master weights and moments.

use super::zeros::{F32, STREAM, Zeros};
use cubecl::ir::StorageType;
use kernels_cubecl::{
    KernelError,
    adamw::{self, AdamwStep, Coding, Master},
    gradient,
    operands::PackedArgs,
};

const MASTERS: [Master; 4] = [Master::Exact, Master::Residual, Master::Stochastic, Master::Nearest];

/// A step of which nobody reads the result.
const SOME_STEP: AdamwStep = AdamwStep {
    lr: 1e-4,
    beta1: 0.9,
    beta2: 0.95,
    eps: 1e-8,
    weight_decay: 0.1,
    bias1: 0.1,
    bias2: 0.05,
    clip_factor: 1.0,
    stream: STREAM,
};

const CODINGS: [Coding; 2] = [Coding::Bytes, Coding::Nibbles];

/// Steps over `n` values, a multiple of 256, with a last block of 128 values; and over an odd number of values.
pub(super) fn optimizer(zeros: &Zeros, n: usize) -> Result<(), KernelError> {
    let Zeros { client, dtype, .. } = *zeros;
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
                adamw::adamw_float(client, dense(), judged(F32), moments, (states, states != F32), SOME_STEP, chunk)?;
            }
            for coding in if len % 16 == 0 { &CODINGS[..] } else { &CODINGS[..1] } {
                let moments = [state(*coding, true), state(*coding, false)];
                adamw::adamw_quantized(client, dense(), judged(dtype), moments, *coding, SOME_STEP, chunk)?;
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
                adamw::adamw_packed(client, w, judged(F32), moments, coding, SOME_STEP, chunk)?;
            }
        }
        gradient::square_sum(client, zeros.floats(len), F32, (zeros.floats(1), 0), zeros.floats(1))?;
        gradient::accumulate(client, grad(dtype), grad(F32))?;
    }
    Ok(())
}
