//! AdamW on an NVFP4 master with quantised moments: a unit takes a word of eight codes, two share a block and its scale.

use super::{
    AdamwStep, Chunk, Scalars,
    moments::{Coding, StateArgs, block_launch, check, codec, codes_at_once, decoded, read, store, tops},
    scalars, stepped,
};
use crate::{
    codec::{e2m1_bounded, e2m1_decode, e2m1_word, e4m3_decode, e4m3_scale},
    device::{bit_casts, quick_division},
    error::{KernelError, expect_blocks, index},
    layout::{code_of, scale_index, word_index},
    matmul::PackedArgs,
    rng::{Cipher, cipher, philox},
};
use cubecl::prelude::*;

/// As [`super::adamw_quantised()`] for an NVFP4 master: the new value of a code is rounded stochastically on its block's
/// scale, which is kept while the block's amax lies in its upper half and else becomes the smallest that holds it.
///
/// # Errors
/// If the buffers do not fit or the chunk does not start at a block.
pub fn adamw_packed<R: Runtime>(
    client: &ComputeClient<R>,
    w: PackedArgs<R>,
    grad: (ArrayArg<R>, StorageType),
    [m, v]: [StateArgs<R>; 2],
    coding: Coding,
    step: AdamwStep,
    chunk: Chunk,
) -> Result<(), KernelError> {
    const NAME: &str = "adamw packed";
    let len = w.rows * w.cols;
    w.check(NAME)?;
    check(NAME, &grad.0, [&m, &v], coding, len, chunk)?;
    expect_blocks(NAME, "chunk end", chunk.end)?;
    let (count, dim, per_cube) = block_launch(chunk, 8);
    // SAFETY: buffer lengths were checked; units past the chunk's end write nothing.
    unsafe {
        adamw_packed_kernel::launch_unchecked(
            client,
            count,
            dim,
            4,
            codes_at_once(coding, 4, 8),
            w.codes,
            w.scales,
            w.global,
            grad.0,
            m.codes,
            m.scales,
            m.absmax,
            m.table,
            v.codes,
            v.scales,
            v.absmax,
            v.table,
            index(NAME, "chunk start", chunk.start)?,
            index(NAME, "chunk end", chunk.end)?,
            per_cube,
            scalars(&step),
            cipher(step.stream),
            coding,
            bit_casts(client),
            grad.1,
        );
    }
    Ok(())
}

#[cube(launch_unchecked, fast_math = quick_division(_approximate))]
fn adamw_packed_kernel<G: Float, N: Size, C: Size>(
    codes: &mut Array<u32>,
    scales: &mut Array<u8>,
    global: &Array<f32>,
    grad: &Array<Vector<G, N>>,
    m_codes: &mut Array<Vector<u8, C>>,
    m_scales: &mut Array<u8>,
    m_absmax: &mut Array<f32>,
    m_table: &Array<f32>,
    v_codes: &mut Array<Vector<u8, C>>,
    v_scales: &mut Array<u8>,
    v_absmax: &mut Array<f32>,
    v_table: &Array<f32>,
    start: u32,
    end: u32,
    per_cube: u32,
    s: Scalars,
    cipher: &Cipher,
    #[comptime] coding: Coding,
    #[comptime] _approximate: bool,
    #[define(G)] _g_dtype: StorageType,
) {
    let n = N::value();
    let parts = comptime!(8 / n);
    let m_codec = codec(m_table, true, coding);
    let v_codec = codec(v_table, false, coding);
    // What a unit tells the other one of its block of 16 weights; turns alternate, so that a late reader keeps its own.
    let mut w_tops = SharedMemory::<f32>::new(64usize);
    let g_scale = global[0];
    let blocks = (end - start).div_ceil(256u32);
    let cube = CUBE_POS_Y * CUBE_COUNT_X + CUBE_POS_X;
    for turn in 0..per_cube {
        let own = cube * per_cube + turn;
        if own < blocks {
            let first = start + own * 256u32 + UNIT_POS * 8u32;
            let live = first < end;
            let at = (first as usize) / n;
            // The matrix is contiguous: as one row of all its columns it has the same words and scales.
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
                byte = u32::cast_from(scales[scale]);
                let unit = e4m3_decode(byte) * g_scale;
                let packed = codes[word];
                let (m_read, m_scale) = read(m_codes, m_scales, m_absmax, &m_codec, first, 8usize);
                let (v_read, v_scale) = read(v_codes, v_scales, v_absmax, &v_codec, first, 8usize);
                #[unroll]
                for part in 0..parts {
                    let gradient = grad[at + part];
                    #[unroll]
                    for i in 0..n {
                        let lane = comptime!(part * n + i);
                        let old_m = decoded(&m_read, m_scale, &m_codec, lane);
                        let old_root = decoded(&v_read, v_scale, &v_codec, lane);
                        let old = e2m1_decode(code_of(packed, comptime!(lane as u32))) * unit;
                        let gradient = f32::cast_from(gradient[i]);
                        let (new, m, _v, new_root) = stepped(old, old_m, old_root * old_root, gradient, s);
                        new_w[lane] = new;
                        new_m[lane] = m;
                        root[lane] = new_root;
                    }
                }
            }
            let mut top = 0.0f32;
            #[unroll]
            for i in 0..8usize {
                top = max(top, new_w[i].abs());
            }
            let told = turn % 2u32 * 32u32 + UNIT_POS;
            w_tops[told as usize] = top;
            let (m_tops, v_tops) = tops(&new_m, &root, turn, 8usize, coding);
            let amax = max(top, w_tops[(told ^ 1u32) as usize]);
            let kept = fitting_scale(amax, byte, g_scale);
            let unit = e4m3_decode(kept) * g_scale;
            let inverse = select(unit > 0.0f32, 1.0f32 / unit, 0.0f32);
            let mut words = Array::<u32>::new(4usize);
            philox(first / 8u32, cipher, 0u32, &mut words);
            #[unroll]
            for i in 0..8usize {
                new_w[i] = e2m1_bounded(new_w[i] * inverse);
            }
            if live {
                codes[word] = e2m1_word(&new_w, 0usize, &words, 2usize, true);
                if UNIT_POS & 1u32 == 0u32 {
                    scales[scale] = u8::cast_from(kept);
                }
                store(m_codes, m_scales, m_absmax, &new_m, m_tops, &m_codec, first, 8usize);
                store(v_codes, v_scales, v_absmax, &root, v_tops, &v_codec, first, 8usize);
            }
        }
    }
}

/// The scale of a block of NVFP4 weights: the one it has if `amax` lies in its upper half, else the smallest that holds it.
#[cube]
fn fitting_scale(amax: f32, byte: u32, global: f32) -> u32 {
    let reach = e4m3_decode(byte) * global * 6.0f32;
    let fits = amax <= reach && amax * 2.0f32 > reach;
    let (near, value) = e4m3_scale(min(amax / (global * 6.0f32), 448.0f32));
    let short = value * global * 6.0f32 < amax;
    let fresh = min(near + select(short, 1u32, 0u32), 0x7Eu32);
    select(fits || amax == 0.0f32, byte, fresh)
}
