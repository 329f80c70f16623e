//! AdamW (Loshchilov & Hutter, arXiv 1711.05101, algorithm 2, as PyTorch orders it) over one chunk:
//! ```text
//! g = c * grad          m = b1 m + (1-b1) g          v = b2 v + (1-b2) g^2
//! w = w (1 - lr wd) - lr * (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps)
//! ```
//! `c` is the clipping coefficient. A step of exactly zero leaves the bits of `w` alone, so that a
//! rate of 0 is the identity, also on -0.
//!
//! States are f32, or 8-bit: 256 consecutive values share an f32 absmax, a byte indexes a sorted
//! table of 256 values in [-1, 1] or [0, 1], rounding to the nearest entry (Dettmers et al., arXiv
//! 2110.02861). What is stored of v is its root, which spans half the decades of v, and a root above
//! zero never becomes zero: `m / eps` cannot happen. Weights are f32 and updated in place. Moves w, m, v twice and the gradient
//! once: bound by memory.

use crate::{
    error::{KernelError, expect_len, index},
    quantize::{cube_max, flat_launch},
};
use cubecl::prelude::*;

/// Values that share one absmax in 8-bit states.
pub const STATE_BLOCK: usize = 256;

/// The scalars of one step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamwStep {
    /// Learning rate.
    pub lr: f32,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Decoupled weight decay.
    pub weight_decay: f32,
    /// `1 - beta1^t`.
    pub bias1: f32,
    /// `1 - beta2^t`.
    pub bias2: f32,
    /// Factor on the gradient (clipping).
    pub grad_scale: f32,
}

/// Elements `[start, end)` of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    /// First element.
    pub start: usize,
    /// One past the last.
    pub end: usize,
}

/// Updates `w`, `m` and `v` (all f32, equally long as `grad`) in place over `chunk`.
///
/// # Errors
/// If the buffers differ in length or the chunk lies outside them.
pub fn adamw_f32<R: Runtime>(
    client: &ComputeClient<R>,
    w: ArrayArg<R>,
    grad: ArrayArg<R>,
    m: ArrayArg<R>,
    v: ArrayArg<R>,
    step: AdamwStep,
    chunk: Chunk,
) -> Result<(), KernelError> {
    const NAME: &str = "adamw";
    let len = w.size();
    for (name, arg) in [("grad", &grad), ("m", &m), ("v", &v)] {
        expect_len(NAME, name, arg.size(), len)?;
    }
    check_chunk(chunk, len)?;
    let (count, dim) = flat_launch(chunk.end - chunk.start);
    // SAFETY: all four buffers hold `len` elements and the chunk lies inside.
    unsafe {
        adamw_f32_kernel::launch_unchecked(
            client,
            count,
            dim,
            w,
            grad,
            m,
            v,
            index(NAME, "chunk start", chunk.start)?,
            index(NAME, "chunk end", chunk.end)?,
            step.lr,
            step.beta1,
            step.beta2,
            step.eps,
            step.weight_decay,
            step.bias1,
            step.bias2,
            step.grad_scale,
        );
    }
    Ok(())
}

/// The 8-bit state of one moment.
pub struct StateArgs<R: Runtime> {
    /// u8, one a value: of m itself, of the root of v.
    pub codes: ArrayArg<R>,
    /// f32, one for 256 values.
    pub absmax: ArrayArg<R>,
    /// f32, 256, ascending.
    pub table: ArrayArg<R>,
}

/// As [`adamw_f32`] with 8-bit states. `chunk.start` is a multiple of 256.
///
/// # Errors
/// If the buffers do not fit or the chunk does not start at a block.
pub fn adamw_8bit<R: Runtime>(
    client: &ComputeClient<R>,
    w: ArrayArg<R>,
    grad: ArrayArg<R>,
    m: StateArgs<R>,
    v: StateArgs<R>,
    step: AdamwStep,
    chunk: Chunk,
) -> Result<(), KernelError> {
    const NAME: &str = "adamw 8-bit";
    let len = w.size();
    expect_len(NAME, "grad", grad.size(), len)?;
    for state in [&m, &v] {
        expect_len(NAME, "state codes", state.codes.size(), len)?;
        expect_len(NAME, "state absmax", state.absmax.size(), len.div_ceil(STATE_BLOCK))?;
        expect_len(NAME, "state table", state.table.size(), 256)?;
    }
    check_chunk(chunk, len)?;
    expect_len(NAME, "chunk start modulo 256", chunk.start % STATE_BLOCK, 0)?;
    let (count, dim) = flat_launch(chunk.end - chunk.start);
    // SAFETY: buffer lengths were checked; units past the chunk's end write nothing.
    unsafe {
        adamw_8bit_kernel::launch_unchecked(
            client,
            count,
            dim,
            w,
            grad,
            m.codes,
            m.absmax,
            m.table,
            v.codes,
            v.absmax,
            v.table,
            index(NAME, "chunk start", chunk.start)?,
            index(NAME, "chunk end", chunk.end)?,
            step.lr,
            step.beta1,
            step.beta2,
            step.eps,
            step.weight_decay,
            step.bias1,
            step.bias2,
            step.grad_scale,
        );
    }
    Ok(())
}

fn check_chunk(chunk: Chunk, len: usize) -> Result<(), KernelError> {
    expect_len("adamw", "chunk start", chunk.start.min(chunk.end), chunk.start)?;
    expect_len("adamw", "chunk end", chunk.end.min(len), chunk.end)
}

#[cube(launch_unchecked)]
fn adamw_f32_kernel(
    w: &mut Array<f32>,
    grad: &Array<f32>,
    m: &mut Array<f32>,
    v: &mut Array<f32>,
    start: u32,
    end: u32,
    lr: f32,
    beta1: f32,
    beta2: f32,
    eps: f32,
    weight_decay: f32,
    bias1: f32,
    bias2: f32,
    grad_scale: f32,
) {
    let at = (start as usize) + ABSOLUTE_POS;
    if at < (end as usize) {
        let g = grad[at] * grad_scale;
        let new_m = beta1 * m[at] + (1.0f32 - beta1) * g;
        let new_v = beta2 * v[at] + (1.0f32 - beta2) * g * g;
        m[at] = new_m;
        v[at] = new_v;
        w[at] = moved(w[at], new_m, new_v, lr, eps, weight_decay, bias1, bias2);
    }
}

#[cube(launch_unchecked)]
fn adamw_8bit_kernel(
    w: &mut Array<f32>,
    grad: &Array<f32>,
    m_codes: &mut Array<u8>,
    m_absmax: &mut Array<f32>,
    m_table: &Array<f32>,
    v_codes: &mut Array<u8>,
    v_absmax: &mut Array<f32>,
    v_table: &Array<f32>,
    start: u32,
    end: u32,
    lr: f32,
    beta1: f32,
    beta2: f32,
    eps: f32,
    weight_decay: f32,
    bias1: f32,
    bias2: f32,
    grad_scale: f32,
) {
    let at = (start as usize) + ABSOLUTE_POS;
    let live = at < (end as usize);
    let block = at / 256usize;
    let mut new_m = 0.0f32;
    let mut new_v = 0.0f32;
    if live {
        let g = grad[at] * grad_scale;
        let old_m = m_table[u32::cast_from(m_codes[at]) as usize] * m_absmax[block];
        let old_root = v_table[u32::cast_from(v_codes[at]) as usize] * v_absmax[block];
        let old_v = old_root * old_root;
        new_m = beta1 * old_m + (1.0f32 - beta1) * g;
        new_v = beta2 * old_v + (1.0f32 - beta2) * g * g;
        w[at] = moved(w[at], new_m, new_v, lr, eps, weight_decay, bias1, bias2);
    }
    let m_max = cube_max(new_m.abs());
    let root = new_v.sqrt();
    let v_max = cube_max(root);
    if live {
        m_codes[at] = u8::cast_from(nearest(m_table, new_m / select(m_max > 0.0f32, m_max, 1.0f32)));
        let v_code = nearest(v_table, root / select(v_max > 0.0f32, v_max, 1.0f32));
        v_codes[at] = u8::cast_from(select(root > 0.0f32, max(v_code, 1u32), v_code));
        if UNIT_POS == 0u32 {
            m_absmax[block] = m_max;
            v_absmax[block] = v_max;
        }
    }
}

#[cube]
fn moved(w: f32, m: f32, v: f32, lr: f32, eps: f32, weight_decay: f32, bias1: f32, bias2: f32) -> f32 {
    let step = lr * ((m / bias1) / ((v / bias2).sqrt() + eps));
    let decayed = w * (1.0f32 - lr * weight_decay);
    select(step == 0.0f32, decayed, decayed - step)
}

/// Index of the table entry nearest to `x`, the lower one at a tie.
#[cube]
fn nearest(table: &Array<f32>, x: f32) -> u32 {
    let mut low = 0u32;
    let mut high = 255u32;
    while high - low > 1u32 {
        let middle = (low + high) / 2u32;
        if table[middle as usize] <= x {
            low = middle;
        } else {
            high = middle;
        }
    }
    let below = x - table[low as usize];
    let above = table[high as usize] - x;
    select(above < below, high, low)
}
