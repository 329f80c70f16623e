//! AdamW on an NVFP4 master with quantised moments: four units share a block of 16 weights and its scale.

use super::{
    AdamwStep, Chunk, Scalars,
    moments::{BLOCKS_PER_CUBE, StateArgs, block_launch, block_maxima, check, decoded, encoded, tables},
    scalars, stepped,
};
use crate::{
    codec::{e2m1_decode, e2m1_encode, e4m3_decode, e4m3_encode},
    device::{bit_casts, liberties},
    error::{KernelError, expect_blocks, index},
    layout::{code_of, place_code, scale_index, word_index},
    matmul::PackedArgs,
    rng::{draw_of, philox},
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
    bits: u32,
    step: AdamwStep,
    chunk: Chunk,
) -> Result<(), KernelError> {
    const NAME: &str = "adamw packed";
    let len = w.rows * w.cols;
    w.check(NAME)?;
    check(NAME, &grad.0, [&m, &v], bits, len, chunk)?;
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
                    let old_m = decoded(m_bytes, m_scale, &m_values, i, bits);
                    let old_root = decoded(v_bytes, v_scale, &v_values, i, bits);
                    let old = e2m1_decode(code_of(packed, first + (i as u32))) * unit;
                    let (new, m, _v, new_root) =
                        stepped(old, old_m, old_root * old_root, f32::cast_from(gradient[i]), s);
                    new_w[i] = new;
                    new_m[i] = m;
                    root[i] = new_root;
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
                m_codes[at] = encoded(&new_m, m_max, &m_values, 0usize, true, bits);
                v_codes[at] = encoded(&root, v_max, &v_values, 0usize, false, bits);
                if UNIT_POS == 0u32 {
                    m_absmax[block] = m_max;
                    v_absmax[block] = v_max;
                }
            }
        }
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
