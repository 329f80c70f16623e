//! AdamW with quantized moments:
//! ```text
//! for each block of 256 values {
//!     for each value { decode m and v; step; w = round(w) }
//!     absmax of m, absmax of root(v)
//!     for each value { encode m and root(v) }
//!     if wanted, codes of the new weight, in blocks of 16 values or of 16x16 (`codes.rs`)
//! }                                                                                     // the plain loop
//! ```
//! A plane, or a cube where planes have another size, takes a block at a time, because it needs the block's new maxima before it
//! encodes. A unit takes eight values, or four, or one, as the lengths allow.

use super::{
    AdamwStep, Chunk, DenseArgs, DenseBuffers, JudgedArgs, Master, Scalars,
    codes::{CodesArgs, CodesBuffers, leave_codes, leave_maximum},
    draw_of_eight, loaded,
    moments::{
        Blocks, CubeDivision, Division, MomentBuffers, STATE_BLOCK, StateArgs, Tables, block_absmax, block_of_turn,
        check, codes_at_once, decoded, loaded_tables, read, store,
    },
    rounded, scalars, stepped, stored_residual, stored_weight,
    table::Coding,
    vectors_of_unit,
};
use crate::{
    device::{bit_casts, quick_division, sequence, vector_size},
    error::KernelError,
    rng::{Cipher, cipher, philox},
};
use cubecl::prelude::*;

/// The same as [`super::adamw_float()`] with quantized moments. `chunk.start` is a multiple of 256; with
/// [`Coding::Nibbles`] the length is a multiple of 4. With `codes`, the weight is a matrix, and the chunk is the whole of it.
///
/// # Errors
/// If the buffers do not fit, the chunk does not start at a block, or the kernel cannot leave such codes.
pub fn adamw_quantized<R: Runtime>(
    client: &ComputeClient<R>,
    w: DenseArgs<R>,
    grad: JudgedArgs<R>,
    moments: [StateArgs<R>; 2],
    coding: Coding,
    codes: Option<CodesArgs<R>>,
    step: AdamwStep,
    chunk: Chunk,
) -> Result<(), KernelError> {
    const NAME: &str = "adamw quantized";
    let len = grad.len();
    grad.check(NAME)?;
    w.check(NAME, len)?;
    check(NAME, &grad.values, moments.each_ref(), coding, len, chunk)?;
    let (vector, parts) = vectors_of_unit(len, chunk);
    let width = vector * parts;
    let division = match &codes {
        Some(codes) => codes.division(client, NAME, len, chunk)?,
        None => Division::new(client, chunk, width),
    };
    let (count, dim) = division.launch(chunk);
    let (m, v, tables) = StateArgs::launch(moments);
    let (form, dtype) = (StepForm { master: w.master, coding, cubes: division.cubes }, w.dtype);
    // SAFETY: buffer lengths were checked; units past the chunk's end write nothing.
    unsafe {
        adamw_quantized_kernel::launch_unchecked(
            client,
            count,
            dim,
            vector_size(client, dtype, width),
            vector_size(client, grad.dtype, width),
            codes_at_once(client, coding, width),
            w.launch(),
            grad.values,
            grad.verdict,
            m,
            v,
            tables,
            sequence(codes.map(CodesArgs::launch)),
            division.blocks(NAME, chunk)?,
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

/// The choices that are compiled into the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct StepForm {
    master: Master,
    coding: Coding,
    cubes: CubeDivision,
}

#[cube(launch_unchecked, fast_math = quick_division(_approximate))]
#[allow(clippy::too_many_arguments, reason = "a kernel takes its buffers one by one")]
fn adamw_quantized_kernel<Weight: Float, Grad: Float, Weights: Size, Grads: Size, Codes: Size>(
    dense: &mut DenseBuffers<Vector<Weight, Weights>, Vector<u8, Weights>>,
    grad: &Array<Vector<Grad, Grads>>,
    verdict: &Array<f32>,
    m: &mut MomentBuffers<Vector<u8, Codes>>,
    v: &mut MomentBuffers<Vector<u8, Codes>>,
    tables: &Tables,
    left: &mut Sequence<CodesBuffers>,
    range: Blocks,
    s: Scalars,
    cipher: &Cipher,
    #[comptime] form: StepForm,
    #[comptime] _approximate: bool,
    #[define(Weight)] _weight_dtype: StorageType,
    #[define(Grad)] _grad_dtype: StorageType,
) {
    let StepForm { master, coding, cubes } = comptime!(form);
    let width = comptime!(cubes.width);
    let (in_weights, in_grads) = (Weights::value(), Grads::value());
    let (m_table, v_table) = loaded_tables(tables, coding);
    let allowed = verdict[0usize] == 0.0f32;
    let leaves_codes = comptime!(left.len() == 1);
    let mut largest_weight = 0.0f32;
    let blocks = (range.end - range.start).div_ceil(comptime!(STATE_BLOCK as u32));
    for turn in 0..range.turns {
        let (block, unit) = block_of_turn(turn, &range, cubes);
        // All units of a block agree.
        if block < blocks {
            let first = range.start + block * comptime!(STATE_BLOCK as u32) + unit * comptime!(width as u32);
            let live = first < range.end && allowed;
            let (mut new_m, mut root) = (zeros(width), zeros(width));
            let mut new_w = Array::<Vector<Weight, Weights>>::new(comptime!(width / in_weights));
            #[unroll]
            for part in 0..comptime!(width / in_weights) {
                new_w[part] = Vector::new(Weight::new(0.0));
            }
            if live {
                let mut words = Array::<u32>::new(4usize);
                if comptime!(master == Master::Stochastic) {
                    philox(first / 8u32, cipher, 0u32, &mut words);
                }
                let (m_codes, m_absmax) = read(m, &m_table, first, width);
                let (v_codes, v_absmax) = read(v, &v_table, first, width);
                let mut gradients = Array::<Vector<Grad, Grads>>::new(comptime!(width / in_grads));
                #[unroll]
                for part in 0..comptime!(width / in_grads) {
                    gradients[part] = grad[(first as usize) / in_grads + part];
                }
                #[unroll]
                for part in 0..comptime!(width / in_weights) {
                    let at = (first as usize) / in_weights + part;
                    let mut weight = dense.w.old[at];
                    let mut bytes = Vector::<u8, Weights>::empty();
                    if comptime!(dense.residual.len() == 1) {
                        bytes = dense.residual.index(0usize).old[at];
                    }
                    #[unroll]
                    for i in 0..in_weights {
                        let lane = comptime!(part * in_weights + i);
                        let old_m = decoded(&m_codes, m_absmax, &m_table, lane);
                        let old_root = decoded(&v_codes, v_absmax, &v_table, lane);
                        let old = loaded::<Weight>(weight[i], u32::cast_from(bytes[i]), master);
                        let gradient = gradients[comptime!(lane / in_grads)];
                        let gradient = f32::cast_from(gradient[comptime!(lane % in_grads)]);
                        let (new, m, _v, new_root) = stepped(old, old_m, old_root * old_root, gradient, s);
                        let draw = draw_of_eight(&words, first, lane, comptime!(width == 8));
                        let word = rounded(new, draw, master);
                        weight[i] = stored_weight::<Weight>(word, master);
                        bytes[i] = stored_residual(word);
                        new_m[lane] = m;
                        root[lane] = new_root;
                    }
                    dense.w.new[at] = weight;
                    new_w[part] = weight;
                    if comptime!(dense.residual.len() == 1) {
                        dense.residual.index_mut(0usize).new[at] = bytes;
                    }
                }
            }
            let (m_absmax, v_absmax) = block_absmax(&new_m, &root, cubes);
            if live {
                store(m, &new_m, m_absmax, &m_table, first, width);
                store(v, &root, v_absmax, &v_table, first, width);
            }
            if comptime!(leaves_codes) {
                let top = leave_codes(left.index_mut(0usize), &new_w, first, turn, live, cubes);
                largest_weight = max(largest_weight, top);
            }
        }
    }
    if comptime!(leaves_codes) {
        leave_maximum(left.index_mut(0usize), largest_weight, allowed, cubes);
    }
}

#[cube]
fn zeros(#[comptime] width: usize) -> Array<f32> {
    let mut values = Array::<f32>::new(width);
    #[unroll]
    for i in 0..width {
        values[i] = 0.0f32;
    }
    values
}
