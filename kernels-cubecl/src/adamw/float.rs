//! AdamW with float moments: each unit takes eight values, or four, or one, as the lengths allow.

use super::{
    AdamwStep, Chunk, DenseArgs, Master, Scalars, check_chunk, draw_of_eight, loaded, rounded, scalars, stepped,
    unit_of,
};
use crate::{
    device::flat_launch,
    error::{KernelError, expect_len, index},
    rng::{Cipher, cipher, philox},
};
use cubecl::prelude::*;

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
    let (vector, parts) = unit_of(len, chunk);
    let (count, dim) = flat_launch((chunk.end - chunk.start).div_ceil(vector * parts));
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
            scalars(&step),
            cipher(step.stream),
            w.master,
            states.1,
            parts,
            w.dtype,
            grad.1,
            states.0,
        );
    }
    Ok(())
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
    cipher: &Cipher,
    #[comptime] master: Master,
    #[comptime] round_states: bool,
    #[comptime] parts: usize,
    #[define(W)] _w_dtype: StorageType,
    #[define(G)] _g_dtype: StorageType,
    #[define(S)] _s_dtype: StorageType,
) {
    let n = N::value();
    let first = start + (ABSOLUTE_POS as u32) * comptime!((n * parts) as u32);
    if first < end {
        let mut words = Array::<u32>::new(4usize);
        if comptime!(master == Master::Stochastic) {
            philox(first / 8u32, cipher, 0u32, &mut words);
        }
        #[unroll]
        for part in 0..parts {
            let at = (first as usize) / n + part;
            let gradient = grad[at];
            let (mut weight, mut new_m, mut new_v) = (w[at], m[at], v[at]);
            let mut bytes = Vector::<u8, N>::empty();
            if comptime!(master == Master::Residual) {
                bytes = residual[at];
            }
            let mut more = Array::<u32>::new(4usize);
            if comptime!(round_states) {
                let four = (first + comptime!((part * n) as u32)) / 4u32;
                philox(four, cipher, 0x8000_0000u32, &mut more);
            }
            #[unroll]
            for i in 0..n {
                let old = loaded::<W>(weight[i], u32::cast_from(bytes[i]), master);
                let (old_m, old_v) = (f32::cast_from(new_m[i]), f32::cast_from(new_v[i]));
                let (new, m, v, _root) = stepped(old, old_m, old_v, f32::cast_from(gradient[i]), s);
                let draw = draw_of_eight(&words, first, comptime!(part * n + i), comptime!(n * parts == 8));
                let stored = rounded(new, draw, master);
                weight[i] = W::cast_from(f32::reinterpret(stored & 0xFFFF_0000u32));
                if comptime!(master == Master::Exact) {
                    weight[i] = W::cast_from(f32::reinterpret(stored));
                }
                bytes[i] = u8::cast_from((stored >> 8u32) & 0xFFu32);
                if comptime!(round_states) {
                    let draw = if comptime!(n == 4) { more[i] } else { more[(first % 4u32) as usize] };
                    let m = rounded(m, draw >> 16u32, comptime!(Master::Stochastic));
                    let v = rounded(v, draw & 0xFFFFu32, comptime!(Master::Stochastic));
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
}
