//! AdamW on an NVFP4 master weight with quantized moments:
//! ```text
//! for each block of 256 values {
//!     for each value { decode w, m and v; step }
//!     for each 16 values { choose the scale; w = round stochastically to a code }
//!     encode m and root(v)
//! }                                                                                     // the plain loop
//! ```
//! A unit takes a word of eight codes; two units share 16 values and their scale.

use super::{
    AdamwStep, Buffers, Chunk, JudgedArgs, Scalars, Updated,
    moments::{
        Blocks, CubeDivision, Division, MomentBuffers, STATE_BLOCK, StateArgs, Tables, block_absmax, block_of_turn,
        check, codes_at_once, decoded, loaded_tables, read, store,
    },
    scalars, stepped,
    table::Coding,
};
use crate::{
    codec::{e2m1_bounded, e2m1_decode, e2m1_word, e4m3_decode, e4m3_scale},
    device::{bit_casts, quick_division, vector_size},
    error::{KernelError, expect_blocks, expect_len},
    layout::{code_of, scale_index, scales_per_row, word_index, words_per_row},
    operands::PackedArgs,
    rng::{Cipher, cipher, philox},
};
use cubecl::prelude::*;

/// The same as [`super::adamw_quantized()`] for an NVFP4 master weight. A new value is rounded stochastically to a
/// code on the scale of its 16 values. They keep their scale while their largest magnitude lies in the upper half of
/// its reach; otherwise they get the smallest scale that reaches it.
///
/// # Errors
/// If the buffers do not fit, the chunk does not start at a block of 256 values, or its end is not a multiple of 16.
pub fn adamw_packed<R: Runtime>(
    client: &ComputeClient<R>,
    w: PackedArgs<R, Updated<R>>,
    grad: JudgedArgs<R>,
    moments: [StateArgs<R>; 2],
    coding: Coding,
    step: AdamwStep,
    chunk: Chunk,
) -> Result<(), KernelError> {
    const NAME: &str = "adamw packed";
    let len = w.rows * w.cols;
    expect_blocks(NAME, "columns of the weight", w.cols)?;
    w.codes.check(NAME, "codes", w.rows * words_per_row(w.cols))?;
    w.scales.check(NAME, "scales", w.rows * scales_per_row(w.cols))?;
    expect_len(NAME, "tensor scale", w.global.size(), 1)?;
    grad.check(NAME)?;
    check(NAME, &grad.values, moments.each_ref(), coding, len, chunk)?;
    expect_blocks(NAME, "end of the chunk", chunk.end)?;
    let division = Division::new(client, chunk, 8);
    let (count, dim) = division.launch(chunk);
    let (m, v, tables) = StateArgs::launch(moments);
    // SAFETY: buffer lengths were checked; units past the chunk's end write nothing.
    unsafe {
        adamw_packed_kernel::launch_unchecked(
            client,
            count,
            dim,
            vector_size(client, grad.dtype, 8),
            codes_at_once(client, coding, 8),
            w.codes.launch(),
            w.scales.launch(),
            w.global,
            grad.values,
            grad.verdict,
            m,
            v,
            tables,
            division.blocks(NAME, chunk)?,
            scalars(&step),
            cipher(step.stream),
            (coding, division.cubes),
            bit_casts(client),
            grad.dtype,
        );
    }
    Ok(())
}

#[cube(launch_unchecked, fast_math = quick_division(_approximate))]
#[allow(clippy::too_many_arguments, reason = "a kernel takes its buffers one by one")]
fn adamw_packed_kernel<Grad: Float, N: Size, Lanes: Size>(
    codes: &mut Buffers<u32>,
    scales: &mut Buffers<u8>,
    global: &Array<f32>,
    grad: &Array<Vector<Grad, N>>,
    verdict: &Array<f32>,
    m: &mut MomentBuffers<Vector<u8, Lanes>>,
    v: &mut MomentBuffers<Vector<u8, Lanes>>,
    tables: &Tables,
    range: Blocks,
    s: Scalars,
    cipher: &Cipher,
    #[comptime] form: (Coding, CubeDivision),
    #[comptime] _approximate: bool,
    #[define(Grad)] _grad_dtype: StorageType,
) {
    let (coding, cubes) = comptime!(form);
    let n = N::value();
    let parts = comptime!(8 / n);
    let (m_table, v_table) = loaded_tables(tables, coding);
    // Where a block has a cube: the largest magnitude of every unit's weights, for the other unit of its 16. Two sets take turns,
    // so that a unit that reads late still finds its own.
    let mut w_tops = SharedMemory::<f32>::new(64usize);
    let g_scale = global[0];
    let allowed = verdict[0usize] == 0.0f32;
    let blocks = (range.end - range.start).div_ceil(comptime!(STATE_BLOCK as u32));
    for turn in 0..range.turns {
        let (block, unit) = block_of_turn(turn, &range, cubes);
        // All units of a block agree.
        if block < blocks {
            let first = range.start + block * comptime!(STATE_BLOCK as u32) + unit * 8u32;
            let live = first < range.end && allowed;
            let at = (first as usize) / n;
            // The matrix is contiguous, so its words and scales are those of one long row.
            let (word, scale) = (word_index(0u32, first, 8u32), scale_index(0u32, first, 16u32));
            let mut new_w = Array::<f32>::new(8usize);
            let mut new_m = Array::<f32>::new(8usize);
            let mut root = Array::<f32>::new(8usize);
            #[unroll]
            for i in 0..8usize {
                new_w[i] = 0.0f32;
                new_m[i] = 0.0f32;
                root[i] = 0.0f32;
            }
            let mut byte = 0u32;
            if live {
                byte = u32::cast_from(scales.old[scale]);
                let scale_value = e4m3_decode(byte) * g_scale;
                let packed = codes.old[word];
                let (m_codes, m_absmax) = read(m, &m_table, first, 8usize);
                let (v_codes, v_absmax) = read(v, &v_table, first, 8usize);
                #[unroll]
                for part in 0..parts {
                    let gradient = grad[at + part];
                    #[unroll]
                    for i in 0..n {
                        let lane = comptime!(part * n + i);
                        let old_m = decoded(&m_codes, m_absmax, &m_table, lane);
                        let old_root = decoded(&v_codes, v_absmax, &v_table, lane);
                        let old = e2m1_decode(code_of(packed, comptime!(lane as u32))) * scale_value;
                        let gradient = f32::cast_from(gradient[i]);
                        let (new, m, _v, new_root) = stepped(old, old_m, old_root * old_root, gradient, s);
                        new_w[lane] = new;
                        new_m[lane] = m;
                        root[lane] = new_root;
                    }
                }
            }
            let top = largest_of(&new_w);
            let own_top = turn % 2u32 * 32u32 + unit;
            if comptime!(cubes.at_once == 1) {
                w_tops[own_top as usize] = top;
            }
            let (m_absmax, v_absmax) = block_absmax(&new_m, &root, cubes);
            let amax = if comptime!(cubes.at_once == 1) {
                max(top, w_tops[(own_top ^ 1u32) as usize])
            } else {
                max(top, plane_shuffle_xor(top, 1u32))
            };
            let kept = fitting_scale(amax, byte, g_scale);
            let scale_value = e4m3_decode(kept) * g_scale;
            let inverse = select(scale_value > 0.0f32, 1.0f32 / scale_value, 0.0f32);
            let mut words = Array::<u32>::new(4usize);
            philox(first / 8u32, cipher, 0u32, &mut words);
            #[unroll]
            for i in 0..8usize {
                new_w[i] = e2m1_bounded(new_w[i] * inverse);
            }
            if live {
                codes.new[word] = e2m1_word(&new_w, 0usize, &words, 2usize, true);
                if unit & 1u32 == 0u32 {
                    scales.new[scale] = u8::cast_from(kept);
                }
                store(m, &new_m, m_absmax, &m_table, first, 8usize);
                store(v, &root, v_absmax, &v_table, first, 8usize);
            }
        }
    }
}

/// The largest magnitude of a unit's values.
#[cube]
fn largest_of(values: &Array<f32>) -> f32 {
    let mut top = 0.0f32;
    #[unroll]
    for i in 0..8usize {
        top = max(top, values[i].abs());
    }
    top
}

/// The scale of 16 NVFP4 weights: the one they have if `amax` lies in the upper half of its reach, otherwise the
/// smallest that reaches it.
#[cube]
fn fitting_scale(amax: f32, byte: u32, global: f32) -> u32 {
    let reach = e4m3_decode(byte) * global * 6.0f32;
    let fits = amax <= reach && amax * 2.0f32 > reach;
    let (near, value) = e4m3_scale(min(amax / (global * 6.0f32), 448.0f32));
    let short = value * global * 6.0f32 < amax;
    let fresh = min(near + select(short, 1u32, 0u32), 0x7Eu32);
    select(fits || amax == 0.0f32, byte, fresh)
}
