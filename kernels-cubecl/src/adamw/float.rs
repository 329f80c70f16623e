//! AdamW with float moments:
//! ```text
//! for each element of the chunk { step; w = round(w); m = round(m); v = round(v) }     // the plain loop
//! ```
//! A unit takes eight values, or four, or one, as the lengths allow.

use super::{
    AdamwStep, Buffers, Chunk, ChunkOnDevice, ChunkOnDeviceLaunch, DenseArgs, DenseBuffers, JudgedArgs, Master,
    Scalars, Updated, check_chunk, draw_of_eight, loaded, rounded, scalars, stepped, stored_residual, stored_weight,
    vectors_of_unit,
};
use crate::{
    device::flat_launch,
    error::{KernelError, index},
    rng::{Cipher, cipher, philox},
};
use cubecl::prelude::*;

/// Makes a step of `w`, `m` and `v` over `chunk`, or none if the verdict on the gradients of the step is not 0. The moments are
/// float of type `states.0` and rounded to bf16 values if `states.1`.
///
/// # Errors
/// If the buffers differ in length or the chunk lies outside them.
pub fn adamw_float<R: Runtime>(
    client: &ComputeClient<R>,
    w: DenseArgs<R>,
    grad: JudgedArgs<R>,
    [m, v]: [Updated<R>; 2],
    states: (StorageType, bool),
    step: AdamwStep,
    chunk: Chunk,
) -> Result<(), KernelError> {
    const NAME: &str = "adamw";
    let len = grad.len();
    grad.check(NAME)?;
    w.check(NAME, len)?;
    m.check(NAME, "m", len)?;
    v.check(NAME, "v", len)?;
    check_chunk(NAME, chunk, len)?;
    let (vector, parts) = vectors_of_unit(len, chunk);
    let (count, dim) = flat_launch((chunk.end - chunk.start).div_ceil(vector * parts));
    let (master, dtype) = (w.master, w.dtype);
    // SAFETY: all buffers hold `len` elements and the chunk lies inside.
    unsafe {
        adamw_float_kernel::launch_unchecked(
            client,
            count,
            dim,
            vector,
            w.launch(),
            grad.values,
            grad.verdict,
            m.launch(),
            v.launch(),
            ChunkOnDeviceLaunch::new(index(NAME, "chunk start", chunk.start)?, index(NAME, "chunk end", chunk.end)?),
            scalars(&step),
            cipher(step.stream),
            master,
            states.1,
            parts,
            dtype,
            grad.dtype,
            states.0,
        );
    }
    Ok(())
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments, reason = "a kernel takes its buffers one by one")]
fn adamw_float_kernel<Weight: Float, Grad: Float, State: Float, N: Size>(
    dense: &mut DenseBuffers<Vector<Weight, N>, Vector<u8, N>>,
    grad: &Array<Vector<Grad, N>>,
    verdict: &Array<f32>,
    m: &mut Buffers<Vector<State, N>>,
    v: &mut Buffers<Vector<State, N>>,
    chunk: ChunkOnDevice,
    s: Scalars,
    cipher: &Cipher,
    #[comptime] master: Master,
    #[comptime] round_states: bool,
    #[comptime] parts: usize,
    #[define(Weight)] _weight_dtype: StorageType,
    #[define(Grad)] _grad_dtype: StorageType,
    #[define(State)] _state_dtype: StorageType,
) {
    let n = N::value();
    let first = chunk.start + (ABSOLUTE_POS as u32) * comptime!((n * parts) as u32);
    if first < chunk.end && verdict[0usize] == 0.0f32 {
        let mut words = Array::<u32>::new(4usize);
        if comptime!(master == Master::Stochastic) {
            philox(first / 8u32, cipher, 0u32, &mut words);
        }
        #[unroll]
        for part in 0..parts {
            let at = (first as usize) / n + part;
            let gradient = grad[at];
            let (mut weight, mut new_m, mut new_v) = (dense.w.old[at], m.old[at], v.old[at]);
            let mut bytes = Vector::<u8, N>::empty();
            if comptime!(dense.residual.len() == 1) {
                bytes = dense.residual.index(0usize).old[at];
            }
            let mut more = Array::<u32>::new(4usize);
            if comptime!(round_states) {
                let four = (first + comptime!((part * n) as u32)) / 4u32;
                philox(four, cipher, 0x8000_0000u32, &mut more);
            }
            #[unroll]
            for i in 0..n {
                let old = loaded::<Weight>(weight[i], u32::cast_from(bytes[i]), master);
                let (old_m, old_v) = (f32::cast_from(new_m[i]), f32::cast_from(new_v[i]));
                let (new, m, v, _root) = stepped(old, old_m, old_v, f32::cast_from(gradient[i]), s);
                let draw = draw_of_eight(&words, first, comptime!(part * n + i), comptime!(n * parts == 8));
                let word = rounded(new, draw, master);
                weight[i] = stored_weight::<Weight>(word, master);
                bytes[i] = stored_residual(word);
                if comptime!(round_states) {
                    let draw = if comptime!(n == 4) { more[i] } else { more[(first % 4u32) as usize] };
                    let m = rounded(m, draw >> 16u32, comptime!(Master::Stochastic));
                    let v = rounded(v, draw & 0xFFFFu32, comptime!(Master::Stochastic));
                    new_m[i] = State::cast_from(f32::reinterpret(m));
                    new_v[i] = State::cast_from(f32::reinterpret(v));
                } else {
                    new_m[i] = State::cast_from(m);
                    new_v[i] = State::cast_from(v);
                }
            }
            dense.w.new[at] = weight;
            m.new[at] = new_m;
            v.new[at] = new_v;
            if comptime!(dense.residual.len() == 1) {
                dense.residual.index_mut(0usize).new[at] = bytes;
            }
        }
    }
}
