//! Products with packed operands on devices without tensor cores. With `w = code * scale * g` ([`crate::layout`]):
//! ```text
//! Nt  y [i, j] = sum_r a[i, r] * w[j, r]     forward: activations times weights
//! Nn  dx[i, j] = sum_r a[i, r] * w[r, j]     dgrad: output gradient times weights
//! Tn  dw[i, j] = sum_r a[r, i] * w[r, j]     wgrad: output gradient times packed activations
//! for i { for j { for r { y[i][j] += a[i][r] * w[j][r] } } }      // the plain loop, Nt
//! ```
//! The left operand is dense (f32, f16 or bf16) or, for `Nt`, packed. It has any number of rows; the columns of a
//! packed operand are a multiple of 16.
//!
//! A cube of 256 units makes a 64x64 tile. 16 values of `r` at a time go to shared memory, decoded; each unit keeps
//! 4x4 sums in f32. `code * scale` is exact in f32, and the tensor scales are applied once, to the finished sum. No
//! operation of planes or tensor cores is used, so that every device can run it. Bound by f32 arithmetic.

use crate::{
    codec::{e2m1_decode, e4m3_decode},
    error::{KernelError, expect_len, index, require},
    layout::{code_of, scale_index, word_index},
    operands::{PackedArgs, PackedBuffers, Product},
};
use cubecl::prelude::*;

const TILE: usize = 64;

/// `out = product(a, w)`, where `a` (row-major, with `a_rows` rows) and `out` are dense, of type `dtype`.
///
/// # Errors
/// If a buffer does not fit its shape or the summed dimensions differ.
pub fn matmul_dense_packed<R: Runtime>(
    client: &ComputeClient<R>,
    a: ArrayArg<R>,
    a_rows: usize,
    w: PackedArgs<R>,
    out: ArrayArg<R>,
    dtype: StorageType,
    product: Product,
) -> Result<(), KernelError> {
    const NAME: &str = "matmul dense x packed";
    w.check(NAME)?;
    let (i, j, r) = match product {
        Product::Nt => (a_rows, w.rows, w.cols),
        Product::Nn => (a_rows, w.cols, w.rows),
        Product::Tn => (a.size() / a_rows.max(1), w.cols, w.rows),
    };
    if product == Product::Tn {
        require(NAME, a_rows == r, || format!("a has {a_rows} rows and w has {r}; both are summed over"))?;
    }
    expect_len(NAME, "a", a.size(), i * r)?;
    expect_len(NAME, "out", out.size(), i * j)?;
    if i == 0 || j == 0 {
        return Ok(());
    }
    // SAFETY: buffer lengths were checked against the shapes; tiles are guarded at their edges.
    unsafe {
        dense_packed_kernel::launch_unchecked(
            client,
            tiles(i, j),
            CubeDim::new_1d(256),
            a,
            w.launch(),
            out,
            index(NAME, "i", i)?,
            index(NAME, "j", j)?,
            index(NAME, "r", r)?,
            product == Product::Tn,
            product == Product::Nt,
            dtype,
        );
    }
    Ok(())
}

/// `out[i, j] = sum_r a[i, r] * w[j, r]` with both operands packed along `r`; `out` of type `dtype`.
///
/// # Errors
/// If a buffer does not fit its shape or the summed dimensions differ.
pub fn matmul_packed_packed<R: Runtime>(
    client: &ComputeClient<R>,
    a: PackedArgs<R>,
    w: PackedArgs<R>,
    out: ArrayArg<R>,
    dtype: StorageType,
) -> Result<(), KernelError> {
    const NAME: &str = "matmul packed x packed";
    a.check_product(NAME, &w, &out)?;
    if a.rows == 0 || w.rows == 0 {
        return Ok(());
    }
    let (i, j, r) = (index(NAME, "i", a.rows)?, index(NAME, "j", w.rows)?, index(NAME, "r", w.cols)?);
    // SAFETY: buffer lengths were checked against the shapes; tiles are guarded at their edges.
    unsafe {
        packed_packed_kernel::launch_unchecked(
            client,
            tiles(i as usize, j as usize),
            CubeDim::new_1d(256),
            a.launch(),
            w.launch(),
            out,
            i,
            j,
            r,
            dtype,
        );
    }
    Ok(())
}

fn tiles(i: usize, j: usize) -> CubeCount {
    CubeCount::Static(j.div_ceil(TILE) as u32, i.div_ceil(TILE) as u32, 1)
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments, reason = "a kernel takes its buffers one by one")]
fn dense_packed_kernel<F: Float>(
    a: &Array<F>,
    w: &PackedBuffers<u32, u8>,
    out: &mut Array<F>,
    i_len: u32,
    j_len: u32,
    r_len: u32,
    #[comptime] a_is_r_by_i: bool,
    #[comptime] w_is_j_by_r: bool,
    #[define(F)] _dtype: StorageType,
) {
    let mut left = SharedMemory::<f32>::new(1024usize);
    let mut right = SharedMemory::<f32>::new(1024usize);
    let mut sums = zero_sums();
    let mut r0 = 0u32;
    while r0 < r_len {
        load_dense(a, &mut left, CUBE_POS_Y * 64u32, r0, i_len, r_len, a_is_r_by_i);
        load_packed(w, &mut right, CUBE_POS_X * 64u32, r0, j_len, r_len, w_is_j_by_r);
        sync_cube();
        accumulate(&left, &right, &mut sums);
        sync_cube();
        r0 += 16u32;
    }
    store(&sums, out, w.global[0], i_len, j_len);
}

#[cube(launch_unchecked)]
fn packed_packed_kernel<F: Float>(
    a: &PackedBuffers<u32, u8>,
    w: &PackedBuffers<u32, u8>,
    out: &mut Array<F>,
    i_len: u32,
    j_len: u32,
    r_len: u32,
    #[define(F)] _dtype: StorageType,
) {
    let mut left = SharedMemory::<f32>::new(1024usize);
    let mut right = SharedMemory::<f32>::new(1024usize);
    let mut sums = zero_sums();
    let mut r0 = 0u32;
    while r0 < r_len {
        load_packed(a, &mut left, CUBE_POS_Y * 64u32, r0, i_len, r_len, true);
        load_packed(w, &mut right, CUBE_POS_X * 64u32, r0, j_len, r_len, true);
        sync_cube();
        accumulate(&left, &right, &mut sums);
        sync_cube();
        r0 += 16u32;
    }
    store(&sums, out, a.global[0] * w.global[0], i_len, j_len);
}

#[cube]
fn zero_sums() -> Array<f32> {
    let mut sums = Array::<f32>::new(16usize);
    #[unroll]
    for i in 0..16usize {
        sums[i] = 0.0f32;
    }
    sums
}

/// Loads 64 values of `i` by 16 of `r` into `tile[r * 64 + i]`, zero outside the matrix.
#[cube]
fn load_dense<F: Float>(
    a: &Array<F>,
    tile: &mut SharedMemory<f32>,
    i0: u32,
    r0: u32,
    i_len: u32,
    r_len: u32,
    #[comptime] r_by_i: bool,
) {
    for pass in 0..4u32 {
        // Neighboring units read neighboring addresses.
        let slot = pass * 256u32 + UNIT_POS;
        let (i, r) = if comptime!(r_by_i) { (slot % 64u32, slot / 64u32) } else { (slot / 16u32, slot % 16u32) };
        let row = i0 + i;
        let col = r0 + r;
        let mut value = 0.0f32;
        if row < i_len && col < r_len {
            if comptime!(r_by_i) {
                value = f32::cast_from(a[(col as usize) * (i_len as usize) + (row as usize)]);
            } else {
                value = f32::cast_from(a[(row as usize) * (r_len as usize) + (col as usize)]);
            }
        }
        tile[(r * 64u32 + i) as usize] = value;
    }
}

/// The same as `load_dense` for a packed matrix, without its tensor scale.
#[cube]
fn load_packed(
    w: &PackedBuffers<u32, u8>,
    tile: &mut SharedMemory<f32>,
    j0: u32,
    r0: u32,
    j_len: u32,
    r_len: u32,
    #[comptime] j_by_r: bool,
) {
    for pass in 0..4u32 {
        let slot = pass * 256u32 + UNIT_POS;
        let (j, r) = if comptime!(j_by_r) { (slot / 16u32, slot % 16u32) } else { (slot % 64u32, slot / 64u32) };
        let outer = j0 + j;
        let inner = r0 + r;
        let mut value = 0.0f32;
        if outer < j_len && inner < r_len {
            if comptime!(j_by_r) {
                value = value_at(w, outer, inner, r_len);
            } else {
                value = value_at(w, inner, outer, j_len);
            }
        }
        tile[(r * 64u32 + j) as usize] = value;
    }
}

/// The value at (`row`, `col`) of a packed matrix, without its tensor scale.
#[cube]
fn value_at(w: &PackedBuffers<u32, u8>, row: u32, col: u32, cols: u32) -> f32 {
    let word = w.codes[word_index(row, col, cols)];
    let scale = u32::cast_from(w.scales[scale_index(row, col, cols)]);
    e2m1_decode(code_of(word, col)) * e4m3_decode(scale)
}

/// Adds 16 outer products to the unit's 4x4 sums.
#[cube]
fn accumulate(left: &SharedMemory<f32>, right: &SharedMemory<f32>, sums: &mut Array<f32>) {
    let i = (UNIT_POS / 16u32) * 4u32;
    let j = (UNIT_POS % 16u32) * 4u32;
    let mut a = Array::<f32>::new(4usize);
    let mut b = Array::<f32>::new(4usize);
    for r in 0..16u32 {
        #[unroll]
        for step in 0..4u32 {
            a[step as usize] = left[(r * 64u32 + i + step) as usize];
            b[step as usize] = right[(r * 64u32 + j + step) as usize];
        }
        #[unroll]
        for p in 0..4usize {
            #[unroll]
            for q in 0..4usize {
                sums[p * 4usize + q] += a[p] * b[q];
            }
        }
    }
}

#[cube]
fn store<F: Float>(sums: &Array<f32>, out: &mut Array<F>, scale: f32, i_len: u32, j_len: u32) {
    let i = CUBE_POS_Y * 64u32 + (UNIT_POS / 16u32) * 4u32;
    let j = CUBE_POS_X * 64u32 + (UNIT_POS % 16u32) * 4u32;
    #[unroll]
    for p in 0..4u32 {
        #[unroll]
        for q in 0..4u32 {
            if i + p < i_len && j + q < j_len {
                let at = ((i + p) as usize) * (j_len as usize) + ((j + q) as usize);
                out[at] = F::cast_from(sums[(p * 4u32 + q) as usize] * scale);
            }
        }
    }
}
