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
//! 2110.02861). The tables have decades of equal steps, so that an entry is computed, not searched. What is stored of v is its root, which spans half the decades of v, and a root above
//! zero never becomes zero: `m / eps` cannot happen. Weights are f32 and updated in place. Moves w, m, v twice and the gradient
//! once: bound by memory.

use crate::{
    device::{bit_casts, liberties},
    error::{KernelError, expect_len, index},
    quantize::flat_launch,
    reduce::cube_max,
};
use cubecl::prelude::*;

/// Values that share one absmax in 8-bit states.
pub const STATE_BLOCK: usize = 256;
/// Blocks that a cube updates one after another with the tables it loaded.
const BLOCKS_PER_CUBE: u32 = 8;

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
    let vector = if len.is_multiple_of(4) && chunk.end.is_multiple_of(4) { 4 } else { 1 };
    let cubes = (chunk.end - chunk.start).div_ceil(STATE_BLOCK * BLOCKS_PER_CUBE as usize).max(1) as u32;
    let x = cubes.min(65_535);
    let (count, dim) = (CubeCount::Static(x, cubes.div_ceil(x), 1), CubeDim::new_1d((STATE_BLOCK / vector) as u32));
    // SAFETY: buffer lengths were checked; units past the chunk's end write nothing.
    unsafe {
        adamw_8bit_kernel::launch_unchecked(
            client,
            count,
            dim,
            vector,
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
            bit_casts(client),
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
        w[at] = moved(w[at], new_m / bias1, new_v / bias2, lr, eps, weight_decay);
    }
}

#[cube(launch_unchecked, fast_math = liberties(_approximate))]
fn adamw_8bit_kernel<N: Size>(
    w: &mut Array<Vector<f32, N>>,
    grad: &Array<Vector<f32, N>>,
    m_codes: &mut Array<Vector<u8, N>>,
    m_absmax: &mut Array<f32>,
    m_table: &Array<f32>,
    v_codes: &mut Array<Vector<u8, N>>,
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
    #[comptime] _approximate: bool,
) {
    let n = N::value();
    let mut m_values = SharedMemory::<f32>::new(256usize);
    let mut v_values = SharedMemory::<f32>::new(256usize);
    let mut at = UNIT_POS;
    while at < 256u32 {
        m_values[at as usize] = m_table[at as usize];
        v_values[at as usize] = v_table[at as usize];
        at += CUBE_DIM;
    }
    sync_cube();
    let (to_m, to_v) = (1.0f32 / bias1, 1.0f32 / bias2);
    let blocks = (end - start).div_ceil(256u32);
    let cube = CUBE_POS_Y * CUBE_COUNT_X + CUBE_POS_X;
    for turn in 0..BLOCKS_PER_CUBE {
        let own = cube * BLOCKS_PER_CUBE + turn;
        // Uniform: a cube takes one block at a time.
        if own < blocks {
            let block = (start / 256u32 + own) as usize;
            let first = start + own * 256u32 + UNIT_POS * (n as u32);
            let live = first < end;
            let at = (first as usize) / n;
            let mut new_m = Vector::<f32, N>::new(0.0f32);
            let mut root = Vector::<f32, N>::new(0.0f32);
            if live {
                let gradient = grad[at];
                let mut weight = w[at];
                let (m_bytes, v_bytes) = (m_codes[at], v_codes[at]);
                let (m_scale, v_scale) = (m_absmax[block], v_absmax[block]);
                #[unroll]
                for i in 0..n {
                    let g = gradient[i] * grad_scale;
                    let old_m = m_values[u32::cast_from(m_bytes[i]) as usize] * m_scale;
                    let old_root = v_values[u32::cast_from(v_bytes[i]) as usize] * v_scale;
                    let m = beta1 * old_m + (1.0f32 - beta1) * g;
                    let v = beta2 * (old_root * old_root) + (1.0f32 - beta2) * g * g;
                    weight[i] = moved(weight[i], m * to_m, v * to_v, lr, eps, weight_decay);
                    new_m[i] = m;
                    root[i] = v.sqrt();
                }
                w[at] = weight;
            }
            let mut m_top = 0.0f32;
            let mut v_top = 0.0f32;
            #[unroll]
            for i in 0..n {
                m_top = max(m_top, new_m[i].abs());
                v_top = max(v_top, root[i]);
            }
            let m_max = cube_max(m_top);
            let v_max = cube_max(v_top);
            if live {
                let m_unit = 1.0f32 / select(m_max > 0.0f32, m_max, 1.0f32);
                let v_unit = 1.0f32 / select(v_max > 0.0f32, v_max, 1.0f32);
                let mut m_bytes = Vector::<u8, N>::empty();
                let mut v_bytes = Vector::<u8, N>::empty();
                #[unroll]
                for i in 0..n {
                    let magnitude = nearest(&m_values, new_m[i].abs() * m_unit, 127u32, 1.0f32);
                    let code = select(new_m[i] < 0.0f32, 127u32 - min(magnitude, 127u32), 127u32 + magnitude);
                    m_bytes[i] = u8::cast_from(code);
                    let code = nearest(&v_values, root[i] * v_unit, 0u32, 2.0f32);
                    v_bytes[i] = u8::cast_from(select(root[i] > 0.0f32, max(code, 1u32), code));
                }
                m_codes[at] = m_bytes;
                v_codes[at] = v_bytes;
                if UNIT_POS == 0u32 {
                    m_absmax[block] = m_max;
                    v_absmax[block] = v_max;
                }
            }
        }
    }
}

/// `w` after one step by the corrected moments `m` and `v`.
#[cube]
fn moved(w: f32, m: f32, v: f32, lr: f32, eps: f32, weight_decay: f32) -> f32 {
    let step = lr * (m / (v.sqrt() + eps));
    let decayed = w * (1.0f32 - lr * weight_decay);
    select(step == 0.0f32, decayed, decayed - step)
}

/// Which entry from `zero` on is nearest to `x` in [0, 1], the lower one at a tie. Decade `d` of the table holds
/// `c * 2^d` means of equal intervals (`c` is `fold`), so a place is computed; only its neighbours are looked at.
#[cube]
fn nearest(table: &SharedMemory<f32>, x: f32, #[comptime] zero: u32, #[comptime] fold: f32) -> u32 {
    let scale = comptime!(fold / 0.9);
    // Per decade, places from its lower edge 0.1 on, and the place of that edge.
    let mut per_unit = comptime!(scale * 1.0e6f32).runtime();
    let mut edge = comptime!(fold - 0.1 * scale).runtime();
    #[unroll]
    for decade in 1..7u32 {
        let reached = x >= comptime!(10.0f32.powi(decade as i32 - 7)).runtime();
        let count = comptime!((1u32 << decade) as f32);
        per_unit = select(reached, comptime!(scale * count * 10.0f32.powi(6 - decade as i32)).runtime(), per_unit);
        edge = select(reached, comptime!((fold - 0.1 * scale) * count).runtime(), edge);
    }
    let last = comptime!(255 - zero);
    let top = comptime!(last as f32 - 1.0);
    let place = u32::cast_from(clamp(x * per_unit + edge - comptime!(fold - 1.0).runtime(), 1.0f32, top));
    let below = x - table[(place + zero - 1u32) as usize];
    let own = (x - table[(place + zero) as usize]).abs();
    let above = table[(place + zero + 1u32) as usize] - x;
    select(below <= own, place - 1u32, select(above < own, place + 1u32, place))
}
