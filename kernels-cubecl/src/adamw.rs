//! AdamW (Loshchilov & Hutter, arXiv 1711.05101, algorithm 2, as PyTorch orders it) over one chunk:
//! ```text
//! g = c * grad          m = b1 m + (1-b1) g          v = b2 v + (1-b2) g^2
//! w = w (1 - lr wd) - lr * (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps)
//! ```
//! `c` is the clipping coefficient. Arithmetic is f32. A step of exactly zero leaves the bits of `w` alone, so that a
//! rate of 0 is the identity, also on -0. Everything is updated in place; all of it is moved once each way: bound by memory.
//!
//! | states | stored as |
//! |---|---|
//! | f32 | as they are |
//! | bf16 | rounded stochastically: a second moment moves by 0.1 % a step, which rounding to nearest never shows |
//! | 8-bit | 256 values share an f32 absmax, a byte indexes a table of 256 values (Dettmers et al., arXiv 2110.02861) |
//! | 4-bit | the same with tables of 16 (Li et al., arXiv 2309.01507) |
//!
//! The 8-bit tables have decades of equal steps, so that an entry is computed, not searched. What is stored of v is its
//! root, which spans half the decades of v, and a root above zero never becomes zero: `m / eps` cannot happen.
//!
//! | master weights | stored as |
//! |---|---|
//! | [`Master::Exact`] | f32 |
//! | [`Master::Residual`] | bf16, and eight more bits in a byte of their own |
//! | [`Master::Stochastic`], [`Master::Nearest`] | bf16 values |
//! | NVFP4 ([`adamw_packed()`]) | codes, rounded stochastically; a block keeps its scale while that fits |

use crate::{
    codec::{e2m1_decode, e2m1_encode, e4m3_decode, e4m3_encode},
    device::{bit_casts, liberties},
    error::{KernelError, expect_blocks, expect_len, index},
    layout::{code_of, place_code, scale_index, scales_per_row, word_index, words_per_row},
    matmul::PackedArgs,
    reduce::cube_max,
    rng::{Stream, draw_of, philox},
};
use cubecl::prelude::*;

/// Values that share one absmax in quantised states.
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
    /// What stochastic rounding draws from.
    pub stream: Stream,
}

/// How a dense master weight is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Master {
    /// f32.
    Exact,
    /// A bf16 value and a byte: bits 8 to 15 of the f32 that the value was rounded from, plus half a unit.
    Residual,
    /// bf16 values, rounded up with the probability that makes the mean exact.
    Stochastic,
    /// bf16 values, rounded to nearest even: steps below half a unit are lost.
    Nearest,
}

/// Elements `[start, end)` of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    /// First element.
    pub start: usize,
    /// One past the last.
    pub end: usize,
}

/// A dense master weight.
pub struct DenseArgs<R: Runtime> {
    /// Float, of type `dtype`: f32, or bf16 for the forms that are.
    pub w: ArrayArg<R>,
    /// Its type.
    pub dtype: StorageType,
    /// u8, as long as `w`, for [`Master::Residual`]; any u8 buffer as long for the others, which leave it alone.
    pub residual: ArrayArg<R>,
    /// Its form.
    pub master: Master,
}

/// A quantised moment.
pub struct StateArgs<R: Runtime> {
    /// u8: one a value with 8 bits, one a pair (low nibble first) with 4. Of m itself, of the root of v.
    pub codes: ArrayArg<R>,
    /// f32, one for 256 values.
    pub absmax: ArrayArg<R>,
    /// f32, 256 or 16, ascending.
    pub table: ArrayArg<R>,
}

impl<R: Runtime> StateArgs<R> {
    fn check(&self, name: &'static str, len: usize, bits: u32) -> Result<(), KernelError> {
        expect_len(name, "state codes", self.codes.size(), len * bits as usize / 8)?;
        expect_len(name, "state absmax", self.absmax.size(), len.div_ceil(STATE_BLOCK))?;
        expect_len(name, "state table", self.table.size(), 1 << bits)
    }
}

/// Updates `w`, `m` and `v` over `chunk`; the moments are float of type `states.0`, rounded to bf16 values if `states.1`,
/// the gradient of type `grad.1`.
///
/// # Errors
/// If the buffers differ in length or the chunk lies outside them.
pub fn adamw_float<R: Runtime>(
    client: &ComputeClient<R>,
    w: DenseArgs<R>,
    grad: (ArrayArg<R>, StorageType),
    [m, v]: [ArrayArg<R>; 2],
    states: (StorageType, bool),
    step: AdamwStep,
    chunk: Chunk,
) -> Result<(), KernelError> {
    const NAME: &str = "adamw";
    let len = w.w.size();
    for (name, arg) in [("grad", &grad.0), ("m", &m), ("v", &v), ("residual", &w.residual)] {
        expect_len(NAME, name, arg.size(), len)?;
    }
    check_chunk(chunk, len)?;
    let vector = vector_of(len, chunk);
    let (count, dim) = crate::quantize::flat_launch((chunk.end - chunk.start).div_ceil(vector));
    // SAFETY: all buffers hold `len` elements and the chunk lies inside.
    unsafe {
        adamw_float_kernel::launch_unchecked(
            client,
            count,
            dim,
            vector,
            w.w,
            w.residual,
            grad.0,
            m,
            v,
            index(NAME, "chunk start", chunk.start)?,
            index(NAME, "chunk end", chunk.end)?,
            scalars(step),
            w.master,
            states.1,
            w.dtype,
            grad.1,
            states.0,
        );
    }
    Ok(())
}

/// As [`adamw_float()`] with moments of 8 or 4 `bits`. `chunk.start` is a multiple of 256; with 4 bits the length is
/// a multiple of 4.
///
/// # Errors
/// If the buffers do not fit or the chunk does not start at a block.
pub fn adamw_quantised<R: Runtime>(
    client: &ComputeClient<R>,
    w: DenseArgs<R>,
    grad: (ArrayArg<R>, StorageType),
    [m, v]: [StateArgs<R>; 2],
    bits: u32,
    step: AdamwStep,
    chunk: Chunk,
) -> Result<(), KernelError> {
    const NAME: &str = "adamw quantised";
    let len = w.w.size();
    expect_len(NAME, "grad", grad.0.size(), len)?;
    expect_len(NAME, "residual", w.residual.size(), len)?;
    for state in [&m, &v] {
        state.check(NAME, len, bits)?;
    }
    check_chunk(chunk, len)?;
    expect_len(NAME, "chunk start modulo 256", chunk.start % STATE_BLOCK, 0)?;
    let vector = vector_of(len, chunk);
    if bits == 4 {
        expect_len(NAME, "length modulo 4", len % 4, 0)?;
    }
    let (count, dim) = block_launch(chunk, vector);
    // SAFETY: buffer lengths were checked; units past the chunk's end write nothing.
    unsafe {
        adamw_quantised_kernel::launch_unchecked(
            client,
            count,
            dim,
            vector,
            vector * bits as usize / 8,
            w.w,
            w.residual,
            grad.0,
            m.codes,
            m.absmax,
            m.table,
            v.codes,
            v.absmax,
            v.table,
            index(NAME, "chunk start", chunk.start)?,
            index(NAME, "chunk end", chunk.end)?,
            scalars(step),
            w.master,
            bits,
            bit_casts(client),
            w.dtype,
            grad.1,
        );
    }
    Ok(())
}

/// As [`adamw_quantised()`] for an NVFP4 master: the new value of a code is rounded stochastically on its block's
/// scale, which is kept while the block's amax lies in its upper half and else becomes the smallest that holds it.
///
/// # Errors
/// If the buffers do not fit or the chunk does not start at a block.
pub fn adamw_packed<R: Runtime>(
    client: &ComputeClient<R>,
    w: PackedArgs<R>,
    grad: (ArrayArg<R>, StorageType),
    [m, v]: [StateArgs<R>; 2],
    bits: u32,
    step: AdamwStep,
    chunk: Chunk,
) -> Result<(), KernelError> {
    const NAME: &str = "adamw packed";
    let len = w.rows * w.cols;
    expect_blocks(NAME, "columns", w.cols)?;
    expect_len(NAME, "codes", w.codes.size(), w.rows * words_per_row(w.cols))?;
    expect_len(NAME, "scales", w.scales.size(), w.rows * scales_per_row(w.cols))?;
    expect_len(NAME, "global", w.global.size(), 1)?;
    expect_len(NAME, "grad", grad.0.size(), len)?;
    for state in [&m, &v] {
        state.check(NAME, len, bits)?;
    }
    check_chunk(chunk, len)?;
    expect_len(NAME, "chunk start modulo 256", chunk.start % STATE_BLOCK, 0)?;
    expect_blocks(NAME, "chunk end", chunk.end)?;
    let (count, dim) = block_launch(chunk, 4);
    // SAFETY: buffer lengths were checked; units past the chunk's end write nothing.
    unsafe {
        adamw_packed_kernel::launch_unchecked(
            client,
            count,
            dim,
            4,
            bits as usize / 2,
            w.codes,
            w.scales,
            w.global,
            grad.0,
            m.codes,
            m.absmax,
            m.table,
            v.codes,
            v.absmax,
            v.table,
            index(NAME, "chunk start", chunk.start)?,
            index(NAME, "chunk end", chunk.end)?,
            scalars(step),
            bits,
            bit_casts(client),
            grad.1,
        );
    }
    Ok(())
}

fn check_chunk(chunk: Chunk, len: usize) -> Result<(), KernelError> {
    expect_len("adamw", "chunk start", chunk.start.min(chunk.end), chunk.start)?;
    expect_len("adamw", "chunk end", chunk.end.min(len), chunk.end)
}

/// Values that a unit takes at once.
fn vector_of(len: usize, chunk: Chunk) -> usize {
    if [len, chunk.start, chunk.end].iter().all(|n| n.is_multiple_of(4)) { 4 } else { 1 }
}

fn block_launch(chunk: Chunk, vector: usize) -> (CubeCount, CubeDim) {
    let cubes = (chunk.end - chunk.start).div_ceil(STATE_BLOCK * BLOCKS_PER_CUBE as usize).max(1) as u32;
    let x = cubes.min(65_535);
    (CubeCount::Static(x, cubes.div_ceil(x), 1), CubeDim::new_1d((STATE_BLOCK / vector) as u32))
}

/// [`AdamwStep`] on the device.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Scalars {
    lr: f32,
    beta1: f32,
    beta2: f32,
    eps: f32,
    weight_decay: f32,
    bias1: f32,
    bias2: f32,
    grad_scale: f32,
    key_low: u32,
    key_high: u32,
    step: u32,
    stream: u32,
}

fn scalars<R: Runtime>(s: AdamwStep) -> ScalarsLaunch<R> {
    let Stream { seed, step, stream } = s.stream;
    ScalarsLaunch::new(
        s.lr,
        s.beta1,
        s.beta2,
        s.eps,
        s.weight_decay,
        s.bias1,
        s.bias2,
        s.grad_scale,
        seed as u32,
        (seed >> 32) as u32,
        step,
        stream,
    )
}

#[cube(launch_unchecked)]
fn adamw_float_kernel<W: Float, G: Float, S: Float, N: Size>(
    w: &mut Array<Vector<W, N>>,
    residual: &mut Array<Vector<u8, N>>,
    grad: &Array<Vector<G, N>>,
    m: &mut Array<Vector<S, N>>,
    v: &mut Array<Vector<S, N>>,
    start: u32,
    end: u32,
    s: Scalars,
    #[comptime] master: Master,
    #[comptime] round_states: bool,
    #[define(W)] _w_dtype: StorageType,
    #[define(G)] _g_dtype: StorageType,
    #[define(S)] _s_dtype: StorageType,
) {
    let n = N::value();
    let first = start + (ABSOLUTE_POS as u32) * (n as u32);
    if first < end {
        let at = (first as usize) / n;
        let gradient = grad[at];
        let (mut weight, mut new_m, mut new_v) = (w[at], m[at], v[at]);
        let mut bytes = Vector::<u8, N>::empty();
        if comptime!(master == Master::Residual) {
            bytes = residual[at];
        }
        let mut draws = Array::<u32>::new(4usize);
        let mut more = Array::<u32>::new(4usize);
        if comptime!(master == Master::Stochastic || round_states) {
            philox(first / 4u32, s.step, s.stream, s.key_low, s.key_high, &mut draws);
        }
        if comptime!(round_states) {
            philox(first / 4u32, s.step, s.stream ^ 0x8000_0000u32, s.key_low, s.key_high, &mut more);
        }
        #[unroll]
        for i in 0..n {
            let lane = ((first + (i as u32)) % 4u32) as usize;
            let old = loaded::<W>(weight[i], u32::cast_from(bytes[i]), master);
            let (old_m, old_v) = (f32::cast_from(new_m[i]), f32::cast_from(new_v[i]));
            let (new, m, v) = stepped(old, old_m, old_v, f32::cast_from(gradient[i]), s);
            let stored = rounded(new, draws[lane] & 0xFFFFu32, master);
            weight[i] = W::cast_from(f32::reinterpret(stored & 0xFFFF_0000u32));
            if comptime!(master == Master::Exact) {
                weight[i] = W::cast_from(f32::reinterpret(stored));
            }
            bytes[i] = u8::cast_from((stored >> 8u32) & 0xFFu32);
            if comptime!(round_states) {
                let m = rounded(m, draws[lane] >> 16u32, comptime!(Master::Stochastic));
                let v = rounded(v, more[lane] & 0xFFFFu32, comptime!(Master::Stochastic));
                new_m[i] = S::cast_from(f32::reinterpret(m));
                new_v[i] = S::cast_from(f32::reinterpret(v));
            } else {
                new_m[i] = S::cast_from(m);
                new_v[i] = S::cast_from(v);
            }
        }
        w[at] = weight;
        m[at] = new_m;
        v[at] = new_v;
        if comptime!(master == Master::Residual) {
            residual[at] = bytes;
        }
    }
}

#[cube(launch_unchecked, fast_math = liberties(_approximate))]
fn adamw_quantised_kernel<W: Float, G: Float, N: Size, C: Size>(
    w: &mut Array<Vector<W, N>>,
    residual: &mut Array<Vector<u8, N>>,
    grad: &Array<Vector<G, N>>,
    m_codes: &mut Array<Vector<u8, C>>,
    m_absmax: &mut Array<f32>,
    m_table: &Array<f32>,
    v_codes: &mut Array<Vector<u8, C>>,
    v_absmax: &mut Array<f32>,
    v_table: &Array<f32>,
    start: u32,
    end: u32,
    s: Scalars,
    #[comptime] master: Master,
    #[comptime] bits: u32,
    #[comptime] _approximate: bool,
    #[define(W)] _w_dtype: StorageType,
    #[define(G)] _g_dtype: StorageType,
) {
    let n = N::value();
    let (m_values, v_values) = tables(m_table, v_table, bits);
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
            let mut new_m = Array::<f32>::new(n);
            let mut root = Array::<f32>::new(n);
            #[unroll]
            for i in 0..n {
                new_m[i] = 0.0f32;
                root[i] = 0.0f32;
            }
            if live {
                let gradient = grad[at];
                let mut weight = w[at];
                let mut bytes = Vector::<u8, N>::empty();
                if comptime!(master == Master::Residual) {
                    bytes = residual[at];
                }
                let mut draws = Array::<u32>::new(4usize);
                if comptime!(master == Master::Stochastic) {
                    philox(first / 4u32, s.step, s.stream, s.key_low, s.key_high, &mut draws);
                }
                let (m_bytes, v_bytes) = (m_codes[at], v_codes[at]);
                let (m_scale, v_scale) = (m_absmax[block], v_absmax[block]);
                #[unroll]
                for i in 0..n {
                    let old_m = m_values[state_code(m_bytes, i, bits) as usize] * m_scale;
                    let old_root = v_values[state_code(v_bytes, i, bits) as usize] * v_scale;
                    let old = loaded::<W>(weight[i], u32::cast_from(bytes[i]), master);
                    let (new, m, v) = stepped(old, old_m, old_root * old_root, f32::cast_from(gradient[i]), s);
                    let lane = ((first + (i as u32)) % 4u32) as usize;
                    let stored = rounded(new, draws[lane] & 0xFFFFu32, master);
                    weight[i] = W::cast_from(f32::reinterpret(stored & 0xFFFF_0000u32));
                    if comptime!(master == Master::Exact) {
                        weight[i] = W::cast_from(f32::reinterpret(stored));
                    }
                    bytes[i] = u8::cast_from((stored >> 8u32) & 0xFFu32);
                    new_m[i] = m;
                    root[i] = v.sqrt();
                }
                w[at] = weight;
                if comptime!(master == Master::Residual) {
                    residual[at] = bytes;
                }
            }
            let (m_max, v_max) = block_maxima(&new_m, &root, n);
            if live {
                m_codes[at] = encoded(&new_m, m_max, &m_values, true, bits);
                v_codes[at] = encoded(&root, v_max, &v_values, false, bits);
                if UNIT_POS == 0u32 {
                    m_absmax[block] = m_max;
                    v_absmax[block] = v_max;
                }
            }
        }
    }
}

#[cube(launch_unchecked, fast_math = liberties(_approximate))]
fn adamw_packed_kernel<G: Float, N: Size, C: Size>(
    codes: &mut Array<u32>,
    scales: &mut Array<u8>,
    global: &Array<f32>,
    grad: &Array<Vector<G, N>>,
    m_codes: &mut Array<Vector<u8, C>>,
    m_absmax: &mut Array<f32>,
    m_table: &Array<f32>,
    v_codes: &mut Array<Vector<u8, C>>,
    v_absmax: &mut Array<f32>,
    v_table: &Array<f32>,
    start: u32,
    end: u32,
    s: Scalars,
    #[comptime] bits: u32,
    #[comptime] _approximate: bool,
    #[define(G)] _g_dtype: StorageType,
) {
    let n = N::value();
    let (m_values, v_values) = tables(m_table, v_table, bits);
    // What a unit tells the three others of its block of 16 weights, and its neighbour of their word.
    let mut tops = SharedMemory::<f32>::new(64usize);
    let mut halves = SharedMemory::<u32>::new(64usize);
    let g_scale = global[0];
    let blocks = (end - start).div_ceil(256u32);
    let cube = CUBE_POS_Y * CUBE_COUNT_X + CUBE_POS_X;
    for turn in 0..BLOCKS_PER_CUBE {
        let own = cube * BLOCKS_PER_CUBE + turn;
        if own < blocks {
            let block = (start / 256u32 + own) as usize;
            let first = start + own * 256u32 + UNIT_POS * 4u32;
            let live = first < end;
            let at = (first as usize) / 4usize;
            // The matrix is contiguous: as one row of all its columns it has the same words and scales.
            let (word, scale) = (word_index(0u32, first, 8u32), scale_index(0u32, first, 16u32));
            let mut new_w = Array::<f32>::new(n);
            let mut new_m = Array::<f32>::new(n);
            let mut root = Array::<f32>::new(n);
            #[unroll]
            for i in 0..n {
                new_w[i] = 0.0f32;
                new_m[i] = 0.0f32;
                root[i] = 0.0f32;
            }
            let mut byte = 0u32;
            if live {
                let gradient = grad[at];
                byte = u32::cast_from(scales[scale]);
                let unit = e4m3_decode(byte) * g_scale;
                let packed = codes[word];
                let (m_bytes, v_bytes) = (m_codes[at], v_codes[at]);
                let (m_scale, v_scale) = (m_absmax[block], v_absmax[block]);
                #[unroll]
                for i in 0..n {
                    let old_m = m_values[state_code(m_bytes, i, bits) as usize] * m_scale;
                    let old_root = v_values[state_code(v_bytes, i, bits) as usize] * v_scale;
                    let old = e2m1_decode(code_of(packed, first + (i as u32))) * unit;
                    let (new, m, v) = stepped(old, old_m, old_root * old_root, f32::cast_from(gradient[i]), s);
                    new_w[i] = new;
                    new_m[i] = m;
                    root[i] = v.sqrt();
                }
            }
            let mut top = 0.0f32;
            #[unroll]
            for i in 0..n {
                top = max(top, new_w[i].abs());
            }
            let (m_max, v_max) = block_maxima(&new_m, &root, n);
            tops[UNIT_POS as usize] = top;
            sync_cube();
            let group = UNIT_POS / 4u32 * 4u32;
            let mut amax = 0.0f32;
            #[unroll]
            for i in 0..4u32 {
                amax = max(amax, tops[(group + i) as usize]);
            }
            let kept = fitting_scale(amax, byte, g_scale);
            let unit = e4m3_decode(kept) * g_scale;
            let inverse = select(unit > 0.0f32, 1.0f32 / unit, 0.0f32);
            let mut draws = Array::<u32>::new(4usize);
            philox(first / 8u32, s.step, s.stream, s.key_low, s.key_high, &mut draws);
            let odd = UNIT_POS % 2u32;
            let mut half = 0u32;
            #[unroll]
            for i in 0..4u32 {
                let draw = draw_of(draws[(odd * 2u32 + comptime!(i / 2)) as usize], comptime!(i % 2));
                half += place_code(e2m1_encode(new_w[i as usize] * inverse, draw, true), i);
            }
            halves[UNIT_POS as usize] = half;
            sync_cube();
            if live {
                if odd == 0u32 {
                    codes[word] = half | (halves[(UNIT_POS + 1u32) as usize] << 16u32);
                }
                if UNIT_POS == group {
                    scales[scale] = u8::cast_from(kept);
                }
                m_codes[at] = encoded(&new_m, m_max, &m_values, true, bits);
                v_codes[at] = encoded(&root, v_max, &v_values, false, bits);
                if UNIT_POS == 0u32 {
                    m_absmax[block] = m_max;
                    v_absmax[block] = v_max;
                }
            }
        }
    }
}

/// Both tables in shared memory.
#[cube]
fn tables(m_table: &Array<f32>, v_table: &Array<f32>, #[comptime] bits: u32) -> (SharedMemory<f32>, SharedMemory<f32>) {
    let mut m_values = SharedMemory::<f32>::new(comptime!(1usize << bits));
    let mut v_values = SharedMemory::<f32>::new(comptime!(1usize << bits));
    let mut at = UNIT_POS;
    while at < comptime!(1u32 << bits) {
        m_values[at as usize] = m_table[at as usize];
        v_values[at as usize] = v_table[at as usize];
        at += CUBE_DIM;
    }
    sync_cube();
    (m_values, v_values)
}

/// A weight and its moments after one step.
#[cube]
fn stepped(w: f32, m: f32, v: f32, grad: f32, s: Scalars) -> (f32, f32, f32) {
    let g = grad * s.grad_scale;
    let m = s.beta1 * m + (1.0f32 - s.beta1) * g;
    let v = s.beta2 * v + (1.0f32 - s.beta2) * g * g;
    let step = s.lr * ((m / s.bias1) / ((v / s.bias2).sqrt() + s.eps));
    let decayed = w * (1.0f32 - s.lr * s.weight_decay);
    (select(step == 0.0f32, decayed, decayed - step), m, v)
}

/// A stored master weight as f32.
#[cube]
fn loaded<W: Float>(w: W, residual: u32, #[comptime] master: Master) -> f32 {
    let value = f32::cast_from(w);
    if comptime!(master == Master::Residual) {
        f32::reinterpret(u32::reinterpret(value) + (residual << 8u32) - 0x8000u32)
    } else {
        value
    }
}

/// The bits of `x` as `master` stores it: bf16 in the upper half, a residual in the next eight bits. `draw` is 16 bits.
#[cube]
fn rounded(x: f32, draw: u32, #[comptime] master: Master) -> u32 {
    let bits = u32::reinterpret(x);
    if comptime!(master == Master::Exact) {
        bits
    } else {
        let add = if comptime!(master == Master::Stochastic) {
            draw
        } else if comptime!(master == Master::Nearest) {
            0x7FFFu32 + ((bits >> 16u32) & 1u32)
        } else {
            // Half a unit of 24 bits, and half of one of 16, which the residual is counted from.
            0x8080u32.runtime()
        };
        let kept = if comptime!(master == Master::Residual) { 0xFFFF_FF00u32 } else { 0xFFFF_0000u32 };
        let finite = (bits & 0x7F80_0000u32) != 0x7F80_0000u32;
        select(finite, (bits + add) & kept, bits)
    }
}

/// The scale of a block of NVFP4 weights: the one it has if `amax` lies in its upper half, else the smallest that holds it.
#[cube]
fn fitting_scale(amax: f32, byte: u32, global: f32) -> u32 {
    let reach = e4m3_decode(byte) * global * 6.0f32;
    let fits = amax <= reach && amax * 2.0f32 > reach;
    let near = e4m3_encode(u32::reinterpret(min(amax / (global * 6.0f32), 448.0f32)));
    let short = e4m3_decode(near) * global * 6.0f32 < amax;
    let fresh = min(near + select(short, 1u32, 0u32), 0x7Eu32);
    select(fits || amax == 0.0f32, byte, fresh)
}

/// The code of value `i` in what a unit read.
#[cube]
fn state_code<C: Size>(codes: Vector<u8, C>, #[comptime] i: usize, #[comptime] bits: u32) -> u32 {
    if comptime!(bits == 8) {
        u32::cast_from(codes[i])
    } else {
        (u32::cast_from(codes[comptime!(i / 2)]) >> comptime!((i % 2 * 4) as u32)) & 15u32
    }
}

/// The largest magnitudes of a block's moments.
#[cube]
fn block_maxima(m: &Array<f32>, root: &Array<f32>, #[comptime] n: usize) -> (f32, f32) {
    let mut m_top = 0.0f32;
    let mut v_top = 0.0f32;
    #[unroll]
    for i in 0..n {
        m_top = max(m_top, m[i].abs());
        v_top = max(v_top, root[i]);
    }
    (cube_max(m_top), cube_max(v_top))
}

/// The codes of a unit's values: nearest table entries, the lower at a tie.
#[cube]
fn encoded<C: Size>(
    values: &Array<f32>,
    absmax: f32,
    table: &SharedMemory<f32>,
    #[comptime] signed: bool,
    #[comptime] bits: u32,
) -> Vector<u8, C> {
    let unit = 1.0f32 / select(absmax > 0.0f32, absmax, 1.0f32);
    let mut out = Vector::<u8, C>::empty();
    #[unroll]
    for i in 0..C::value() {
        if comptime!(bits == 4) {
            let low = nearest_of_16(table, values[comptime!(i * 2)] * unit);
            let high = nearest_of_16(table, values[comptime!(i * 2 + 1)] * unit);
            out[i] = u8::cast_from(low | (high << 4u32));
        } else if comptime!(signed) {
            let magnitude = nearest(table, values[i].abs() * unit, 127u32, 1.0f32);
            out[i] = u8::cast_from(select(values[i] < 0.0f32, 127u32 - min(magnitude, 127u32), 127u32 + magnitude));
        } else {
            let code = nearest(table, values[i] * unit, 0u32, 2.0f32);
            out[i] = u8::cast_from(select(values[i] > 0.0f32, max(code, 1u32), code));
        }
    }
    out
}

/// Which of 16 ascending entries is nearest to `x`, the lower one at a tie.
#[cube]
fn nearest_of_16(table: &SharedMemory<f32>, x: f32) -> u32 {
    let mut code = 0u32;
    #[unroll]
    for i in 0..15usize {
        let passed = table[comptime!(i + 1)] - x < x - table[i];
        code += select(passed, 1u32, 0u32);
    }
    code
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
