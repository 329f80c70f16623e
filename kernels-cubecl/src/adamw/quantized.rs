//! AdamW with quantised moments: a cube takes blocks of 256 values, whose new maxima it must know before it encodes.

use super::{
    AdamwStep, Chunk, DenseArgs, Master, Scalars, draw_of_eight, loaded,
    moments::{Coding, StateArgs, block_launch, check, codec, codes_at_once, decoded, read, store, tops},
    rounded, scalars, stepped, unit_of,
};
use crate::{
    device::{bit_casts, quick_division},
    error::{KernelError, expect_len, index},
    rng::{Cipher, cipher, philox},
};
use cubecl::prelude::*;

/// As [`super::adamw_float()`] with quantised moments. `chunk.start` is a multiple of 256; the length is a multiple of 4
/// with [`Coding::Nibbles`], of 16 with [`Coding::Nvfp4`].
///
/// # Errors
/// If the buffers do not fit or the chunk does not start at a block.
pub fn adamw_quantised<R: Runtime>(
    client: &ComputeClient<R>,
    w: DenseArgs<R>,
    grad: (ArrayArg<R>, StorageType),
    [m, v]: [StateArgs<R>; 2],
    coding: Coding,
    step: AdamwStep,
    chunk: Chunk,
) -> Result<(), KernelError> {
    const NAME: &str = "adamw quantised";
    let len = w.w.size();
    expect_len(NAME, "residual", w.residual.size(), len)?;
    check(NAME, &grad.0, [&m, &v], coding, len, chunk)?;
    let (vector, parts) = unit_of(len, chunk);
    let (count, dim, per_cube) = block_launch(chunk, vector * parts);
    // SAFETY: buffer lengths were checked; units past the chunk's end write nothing.
    unsafe {
        adamw_quantised_kernel::launch_unchecked(
            client,
            count,
            dim,
            vector,
            codes_at_once(coding, vector, vector * parts),
            w.w,
            w.residual,
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
            w.master,
            coding,
            parts,
            bit_casts(client),
            w.dtype,
            grad.1,
        );
    }
    Ok(())
}

#[cube(launch_unchecked, fast_math = quick_division(_approximate))]
fn adamw_quantised_kernel<W: Float, G: Float, N: Size, C: Size>(
    w: &mut Array<Vector<W, N>>,
    residual: &mut Array<Vector<u8, N>>,
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
    #[comptime] master: Master,
    #[comptime] coding: Coding,
    #[comptime] parts: usize,
    #[comptime] _approximate: bool,
    #[define(W)] _w_dtype: StorageType,
    #[define(G)] _g_dtype: StorageType,
) {
    let n = N::value();
    let width = comptime!(n * parts);
    let m_codec = codec(m_table, true, coding);
    let v_codec = codec(v_table, false, coding);
    let blocks = (end - start).div_ceil(256u32);
    let cube = CUBE_POS_Y * CUBE_COUNT_X + CUBE_POS_X;
    for turn in 0..per_cube {
        let own = cube * per_cube + turn;
        // Uniform: a cube takes one block at a time.
        if own < blocks {
            let first = start + own * 256u32 + UNIT_POS * comptime!(width as u32);
            let live = first < end;
            let at = (first as usize) / n;
            let mut new_m = Array::<f32>::new(width);
            let mut root = Array::<f32>::new(width);
            #[unroll]
            for i in 0..width {
                new_m[i] = 0.0f32;
                root[i] = 0.0f32;
            }
            if live {
                let mut words = Array::<u32>::new(4usize);
                if comptime!(master == Master::Stochastic) {
                    philox(first / 8u32, cipher, 0u32, &mut words);
                }
                let (m_read, m_scale) = read(m_codes, m_scales, m_absmax, &m_codec, first, width);
                let (v_read, v_scale) = read(v_codes, v_scales, v_absmax, &v_codec, first, width);
                #[unroll]
                for part in 0..parts {
                    let gradient = grad[at + part];
                    let mut weight = w[at + part];
                    let mut bytes = Vector::<u8, N>::empty();
                    if comptime!(master == Master::Residual) {
                        bytes = residual[at + part];
                    }
                    #[unroll]
                    for i in 0..n {
                        let lane = comptime!(part * n + i);
                        let old_m = decoded(&m_read, m_scale, &m_codec, lane);
                        let old_root = decoded(&v_read, v_scale, &v_codec, lane);
                        let old = loaded::<W>(weight[i], u32::cast_from(bytes[i]), master);
                        let gradient = f32::cast_from(gradient[i]);
                        let (new, m, _v, new_root) = stepped(old, old_m, old_root * old_root, gradient, s);
                        let draw = draw_of_eight(&words, first, lane, comptime!(width == 8));
                        let stored = rounded(new, draw, master);
                        weight[i] = W::cast_from(f32::reinterpret(stored & 0xFFFF_0000u32));
                        if comptime!(master == Master::Exact) {
                            weight[i] = W::cast_from(f32::reinterpret(stored));
                        }
                        bytes[i] = u8::cast_from((stored >> 8u32) & 0xFFu32);
                        new_m[lane] = m;
                        root[lane] = new_root;
                    }
                    w[at + part] = weight;
                    if comptime!(master == Master::Residual) {
                        residual[at + part] = bytes;
                    }
                }
            }
            let (m_tops, v_tops) = tops(&new_m, &root, turn, width, coding);
            if live {
                store(m_codes, m_scales, m_absmax, &new_m, m_tops, &m_codec, first, width);
                store(v_codes, v_scales, v_absmax, &root, v_tops, &v_codec, first, width);
            }
        }
    }
}
