//! AdamW with quantized moments:
//! ```text
//! for each block of 256 values {
//!     for each value { decode m and v; step; w = round(w) }
//!     absmax of m, absmax of root(v)
//!     for each value { encode m and root(v) }
//! }                                                                                     // the plain loop
//! ```
//! A cube takes a block at a time, because it needs the block's new maxima before it encodes.

use super::{
    AdamwStep, Chunk, DenseArgs, DenseBuffers, JudgedArgs, Master, Scalars, draw_of_eight, loaded,
    moments::{
        Blocks, BlocksLaunch, MomentBuffers, STATE_BLOCK, StateArgs, Tables, block_absmax, block_launch,
        blocks_per_cube, check, codes_at_once, decoded, loaded_tables, read, store,
    },
    rounded, scalars, stepped, stored_residual, stored_weight,
    table::Coding,
    vectors_of_unit,
};
use crate::{
    device::{bit_casts, quick_division},
    error::{KernelError, index},
    rng::{Cipher, cipher, philox},
};
use cubecl::prelude::*;

/// The same as [`super::adamw_float()`] with quantized moments. `chunk.start` is a multiple of 256; with
/// [`Coding::Nibbles`] the length is a multiple of 4.
///
/// # Errors
/// If the buffers do not fit or the chunk does not start at a block.
pub fn adamw_quantized<R: Runtime>(
    client: &ComputeClient<R>,
    w: DenseArgs<R>,
    grad: JudgedArgs<R>,
    moments: [StateArgs<R>; 2],
    coding: Coding,
    step: AdamwStep,
    chunk: Chunk,
) -> Result<(), KernelError> {
    const NAME: &str = "adamw quantized";
    let len = grad.len();
    grad.check(NAME)?;
    w.check(NAME, len)?;
    check(NAME, &grad.values, moments.each_ref(), coding, len, chunk)?;
    let (vector, parts) = vectors_of_unit(len, chunk);
    let (count, dim) = block_launch(chunk, vector * parts);
    let (m, v, tables) = StateArgs::launch(moments);
    let (form, dtype) = (StepForm { master: w.master, coding, parts }, w.dtype);
    // SAFETY: buffer lengths were checked; units past the chunk's end write nothing.
    unsafe {
        adamw_quantized_kernel::launch_unchecked(
            client,
            count,
            dim,
            vector,
            codes_at_once(coding, vector, vector * parts),
            w.launch(),
            grad.values,
            grad.verdict,
            m,
            v,
            tables,
            BlocksLaunch::new(
                index(NAME, "chunk start", chunk.start)?,
                index(NAME, "chunk end", chunk.end)?,
                blocks_per_cube(chunk) as u32,
            ),
            scalars(&step),
            cipher(step.stream),
            form,
            bit_casts(client),
            dtype,
            grad.dtype,
        );
    }
    Ok(())
}

/// The choices that are compiled into the kernel. `parts` is the number of vectors that a unit takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct StepForm {
    master: Master,
    coding: Coding,
    parts: usize,
}

#[cube(launch_unchecked, fast_math = quick_division(_approximate))]
#[allow(clippy::too_many_arguments, reason = "a kernel takes its buffers one by one")]
fn adamw_quantized_kernel<Weight: Float, Grad: Float, N: Size, Codes: Size>(
    dense: &mut DenseBuffers<Vector<Weight, N>, Vector<u8, N>>,
    grad: &Array<Vector<Grad, N>>,
    verdict: &Array<f32>,
    m: &mut MomentBuffers<Vector<u8, Codes>>,
    v: &mut MomentBuffers<Vector<u8, Codes>>,
    tables: &Tables,
    range: Blocks,
    s: Scalars,
    cipher: &Cipher,
    #[comptime] form: StepForm,
    #[comptime] _approximate: bool,
    #[define(Weight)] _weight_dtype: StorageType,
    #[define(Grad)] _grad_dtype: StorageType,
) {
    let StepForm { master, coding, parts } = comptime!(form);
    let n = N::value();
    let width = comptime!(n * parts);
    let (m_table, v_table) = loaded_tables(tables, coding);
    let allowed = verdict[0usize] == 0.0f32;
    let blocks = (range.end - range.start).div_ceil(comptime!(STATE_BLOCK as u32));
    let cube = CUBE_POS_Y * CUBE_COUNT_X + CUBE_POS_X;
    for turn in 0..range.per_cube {
        let own = cube * range.per_cube + turn;
        // All units agree: a cube takes one block at a time.
        if own < blocks {
            let first = range.start + own * comptime!(STATE_BLOCK as u32) + UNIT_POS * comptime!(width as u32);
            let live = first < range.end && allowed;
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
                let (m_codes, m_absmax) = read(m, &m_table, first, width);
                let (v_codes, v_absmax) = read(v, &v_table, first, width);
                #[unroll]
                for part in 0..parts {
                    let gradient = grad[at + part];
                    let mut weight = dense.w.old[at + part];
                    let mut bytes = Vector::<u8, N>::empty();
                    if comptime!(dense.residual.len() == 1) {
                        bytes = dense.residual.index(0usize).old[at + part];
                    }
                    #[unroll]
                    for i in 0..n {
                        let lane = comptime!(part * n + i);
                        let old_m = decoded(&m_codes, m_absmax, &m_table, lane);
                        let old_root = decoded(&v_codes, v_absmax, &v_table, lane);
                        let old = loaded::<Weight>(weight[i], u32::cast_from(bytes[i]), master);
                        let gradient = f32::cast_from(gradient[i]);
                        let (new, m, _v, new_root) = stepped(old, old_m, old_root * old_root, gradient, s);
                        let draw = draw_of_eight(&words, first, lane, comptime!(width == 8));
                        let word = rounded(new, draw, master);
                        weight[i] = stored_weight::<Weight>(word, master);
                        bytes[i] = stored_residual(word);
                        new_m[lane] = m;
                        root[lane] = new_root;
                    }
                    dense.w.new[at + part] = weight;
                    if comptime!(dense.residual.len() == 1) {
                        dense.residual.index_mut(0usize).new[at + part] = bytes;
                    }
                }
            }
            let (m_absmax, v_absmax) = block_absmax(&new_m, &root, width);
            if live {
                store(m, &new_m, m_absmax, &m_table, first, width);
                store(v, &root, v_absmax, &v_table, first, width);
            }
        }
    }
}
