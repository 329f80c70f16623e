//! Dense products on tensor cores, with f16 or bf16 operands and f32 sums:
//! ```text
//! Nt  y [i, j] = sum_r a[i, r] * b[j, r]
//! Nn  y [i, j] = sum_r a[i, r] * b[r, j]
//! Tn  y [i, j] = sum_r a[r, i] * b[r, j]
//! for i { for j { for r { y[i][j] += a[i][r] * b[j][r] } } }      // the plain loop, Nt
//! ```
//! A packed operand is dequantised into a 16-bit buffer first ([`crate::dequantize`]): `code * block scale`
//! is exact there, the tensor scale is applied to the finished f32 sum. That costs one pass over the weight
//! (2 to 4 % of the product at 4,096 rows) and leaves one kernel for every product.
//!
//! A cube of four planes makes 128x128 of y, or 128x160 or 128x64 where that leaves less of the device idle at the end.
//! `r` goes through shared memory in steps of 64 and a ring of three stages that cp.async fills ahead; each plane keeps
//! the sums of 64 rows and half of the columns in registers and feeds mma.sync. Two cubes share a multiprocessor: one
//! computes while the other waits. Moves `i*r + j*r + i*j` values, computes `2*i*j*r` operations: bound by the tensor
//! cores from about 300 rows on.

use crate::{
    error::{KernelError, expect_len, index},
    matmul::Product,
    mma::{Chunk, Pair, Source, fill, left, multiply, right, ring, sent, zero_sums},
};
use cubecl::prelude::*;

/// Rows of y that a cube makes, and the columns from which on further ones are in a region of their own.
const TILE: u32 = 128;
/// Values of the summed dimension in a stage.
const STEP: u32 = 64;
/// Stages of the ring.
const STAGES: usize = 3;
const UNITS: u32 = 128;
/// Chunks of the left operand in one stage.
const STAGE: u32 = TILE * STEP / 8;
/// Rows of tiles whose columns are walked together, so that both operands stay in the L2 cache.
const GROUP: u32 = 8;

/// `y[i, j]` and the length `r` of its sums.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Rows of y.
    pub i: usize,
    /// Columns of y.
    pub j: usize,
    /// Summed.
    pub r: usize,
}

impl Shape {
    /// Whether every row that is read or written in chunks of eight values is whole.
    pub fn fits(self, product: Product) -> bool {
        let Self { i, j, r } = self;
        let a = if product == Product::Tn { i } else { r };
        a.is_multiple_of(8) && j.is_multiple_of(8) && (product != Product::Nt || r.is_multiple_of(8))
    }
}

/// `out = product(a, b)` times every `scales[0]` (f32, the tensor scales): `a`, `b` of type `operand` (f16 or bf16),
/// row-major; `out` of type `result`, added to what is there if `accumulate`
/// (then without scales).
///
/// # Errors
/// If a buffer does not fit its shape or [`Shape::fits`] is false.
pub fn gemm<R: Runtime>(
    client: &ComputeClient<R>,
    a: ArrayArg<R>,
    b: ArrayArg<R>,
    scales: SequenceArg<R, Array<f32>>,
    out: ArrayArg<R>,
    types: (StorageType, StorageType),
    shape: Shape,
    product: Product,
    accumulate: bool,
) -> Result<(), KernelError> {
    let processors = client.properties().hardware.num_streaming_multiprocessors.unwrap_or(132) as usize;
    let cols = columns(shape, processors, &tile_columns(client));
    gemm_in(client, a, b, scales, out, types, shape, product, accumulate, cols)
}

/// As [`gemm()`] in tiles of `cols` columns, one of [`tile_columns`].
///
/// # Errors
/// As [`gemm()`].
pub fn gemm_in<R: Runtime>(
    client: &ComputeClient<R>,
    a: ArrayArg<R>,
    b: ArrayArg<R>,
    scales: SequenceArg<R, Array<f32>>,
    out: ArrayArg<R>,
    (operand, result): (StorageType, StorageType),
    shape: Shape,
    product: Product,
    accumulate: bool,
    cols: usize,
) -> Result<(), KernelError> {
    const NAME: &str = "gemm";
    let Shape { i, j, r } = shape;
    expect_len(NAME, "a", a.size(), i * r)?;
    expect_len(NAME, "b", b.size(), j * r)?;
    expect_len(NAME, "out", out.size(), i * j)?;
    expect_len(NAME, "values left over in a chunk", usize::from(!shape.fits(product)), 0)?;
    expect_len(NAME, "scales of an accumulating product", if accumulate { scales.values.len() } else { 0 }, 0)?;
    expect_len(NAME, "columns of a tile that there are not", usize::from(!tile_columns(client).contains(&cols)), 0)?;
    if i == 0 || j == 0 {
        return Ok(());
    }
    let (i, j, r) = (index(NAME, "i", i)?, index(NAME, "j", j)?, index(NAME, "r", r)?);
    let count = CubeCount::Static(i.div_ceil(TILE) * j.div_ceil(cols as u32), 1, 1);
    let (a_across, b_across) = (product == Product::Tn, product != Product::Nt);
    // SAFETY: buffer lengths were checked against the shapes; copies and stores are guarded at the edges.
    unsafe {
        gemm_kernel::launch_unchecked(
            client,
            count,
            CubeDim::new_1d(UNITS),
            a,
            b,
            scales,
            out,
            i,
            j,
            r,
            cols as u32,
            a_across,
            b_across,
            accumulate,
            operand,
            result,
        );
    }
    Ok(())
}

/// The columns that a tile may have on this device: 160 need 108 KiB of shared memory.
pub fn tile_columns<R: Runtime>(client: &ComputeClient<R>) -> Vec<usize> {
    let room = client.properties().hardware.max_shared_memory_size;
    let needed = |cols: &usize| STAGES * (TILE as usize + cols) * STEP as usize * 2;
    [TILE as usize, 160, 64].into_iter().filter(|cols| needed(cols) <= room).collect()
}

/// The columns of a tile that a device of `processors` is done with first: each makes its share of tiles, whole ones; one
/// tile alone keeps two thirds of a multiprocessor busy; narrow tiles read more for a product.
fn columns(Shape { i, j, .. }: Shape, processors: usize, of: &[usize]) -> usize {
    let cost = |&cols: &usize| {
        let tiles = (i.div_ceil(TILE as usize) * j.div_ceil(cols)).div_ceil(processors);
        let alone = if tiles == 1 { 3 } else { 2 };
        let narrow = if cols < TILE as usize { 120 } else { 100 };
        tiles * cols * alone * narrow
    };
    of.iter().copied().min_by_key(cost).unwrap_or(TILE as usize)
}

#[cube(launch_unchecked)]
fn gemm_kernel<F: Float, O: Float>(
    a: &Array<Chunk<F>>,
    b: &Array<Chunk<F>>,
    scales: &Sequence<Array<f32>>,
    out: &mut Array<Pair<O>>,
    i_len: u32,
    j_len: u32,
    r_len: u32,
    #[comptime] cols: u32,
    #[comptime] a_across: bool,
    #[comptime] b_across: bool,
    #[comptime] accumulate: bool,
    #[define(F)] _operand: StorageType,
    #[define(O)] _result: StorageType,
) {
    let mut a_tiles = SharedMemory::<Chunk<F>>::new_aligned(comptime!(STAGES * STAGE as usize), 128usize);
    let b_stage = comptime!(cols * STEP / 8);
    let mut b_tiles = SharedMemory::<Chunk<F>>::new_aligned(comptime!(STAGES * b_stage as usize), 128usize);
    let filled = ring(STAGES);
    let (i0, j0) = corner(i_len, j_len, cols);
    let plane_i = (UNIT_POS / 64u32) * 64u32;
    let plane_j = UNIT_POS / 32u32 % 2u32;
    // Blocks of eight columns that a plane makes.
    let blocks = comptime!(cols as usize / 16);
    let mut sums = zero_sums(comptime!(blocks * 4));
    if comptime!(accumulate) {
        load::<O>(&mut sums, out, i0 + plane_i, j0, plane_j, i_len, j_len, blocks);
    }

    let steps = r_len.div_ceil(STEP);
    #[unroll]
    for stage in 0..comptime!(STAGES - 1) {
        let ahead = comptime!(stage as u32).runtime();
        if ahead < steps {
            fill_operand::<F>(
                a,
                &mut a_tiles,
                comptime!(stage as u32 * STAGE),
                i0,
                ahead,
                i_len,
                r_len,
                TILE,
                a_across,
            );
            let base = comptime!(stage as u32 * b_stage);
            fill_operand::<F>(b, &mut b_tiles, base, j0, ahead, j_len, r_len, cols, b_across);
            sent(&filled, stage);
        }
    }
    let mut step = 0u32;
    let mut phase = 0u32;
    while step < steps {
        #[unroll]
        for stage in 0..STAGES {
            let now = step + comptime!(stage as u32);
            if now < steps {
                filled.index(stage).wait_parity(phase);
                // Nobody reads the stage before this one any more: it is filled anew.
                sync_cube();
                let ahead = now + comptime!(STAGES as u32 - 1);
                let freed = comptime!((stage + STAGES - 1) % STAGES);
                if ahead < steps {
                    let base = comptime!(freed as u32 * STAGE);
                    fill_operand::<F>(a, &mut a_tiles, base, i0, ahead, i_len, r_len, TILE, a_across);
                    let base = comptime!(freed as u32 * b_stage);
                    fill_operand::<F>(b, &mut b_tiles, base, j0, ahead, j_len, r_len, cols, b_across);
                    sent(&filled, freed);
                }
                multiply_stage::<F>(
                    &a_tiles,
                    &b_tiles,
                    &mut sums,
                    comptime!(stage as u32),
                    plane_i,
                    plane_j,
                    cols,
                    a_across,
                    b_across,
                );
            }
        }
        step += comptime!(STAGES as u32);
        phase ^= 1u32;
    }

    let mut factor = 1.0f32;
    #[unroll]
    for s in 0..scales.len() {
        factor *= scales.index(s)[0];
    }
    store::<O>(&sums, out, factor, i0 + plane_i, j0, plane_j, i_len, j_len, blocks);
}

/// Where this cube's tile begins. Cubes walk `GROUP` rows of tiles column by column.
#[cube]
fn corner(i_len: u32, j_len: u32, #[comptime] width: u32) -> (u32, u32) {
    let rows = i_len.div_ceil(TILE);
    let cols = j_len.div_ceil(width);
    let first = CUBE_POS_X / (GROUP * cols) * GROUP;
    let height = min(rows - first, GROUP);
    let within = CUBE_POS_X % (GROUP * cols);
    ((first + within % height) * TILE, (within / height) * width)
}

/// One operand's `outer` outer indices by 64 summed ones. Where they are stored across, those from 128 on follow the others.
#[cube]
fn fill_operand<F: Float>(
    x: &Array<Chunk<F>>,
    tiles: &mut SharedMemory<Chunk<F>>,
    base: u32,
    outer0: u32,
    step: u32,
    outer_len: u32,
    r_len: u32,
    #[comptime] outer: u32,
    #[comptime] across: bool,
) {
    if comptime!(across) {
        let source = Source { rows: r_len, stride: outer_len / 8u32, end: outer_len / 8u32 };
        let width = comptime!(outer.min(TILE) / 8);
        fill(x, source, step * STEP, outer0 / 8u32, tiles, base, STEP, width, UNITS);
        if comptime!(outer > TILE) {
            let (more, base) = (outer0 / 8u32 + comptime!(TILE / 8), base + comptime!(STEP * TILE / 8));
            fill(x, source, step * STEP, more, tiles, base, STEP, comptime!((outer - TILE) / 8), UNITS);
        }
    } else {
        let source = Source { rows: outer_len, stride: r_len / 8u32, end: r_len / 8u32 };
        fill(x, source, outer0, step * 8u32, tiles, base, outer, comptime!(STEP / 8), UNITS);
    }
}

/// The first column of a plane's block of eight within a tile: half of the first 64 or 128 columns, then half of the rest.
#[cube]
fn column_of(plane_j: u32, #[comptime] block: u32, #[comptime] blocks: u32) -> u32 {
    if comptime!(block >= 8) {
        plane_j * 16u32 + comptime!(TILE + (block - 8) * 8)
    } else {
        plane_j * comptime!(blocks.min(8) * 8) + comptime!(block * 8)
    }
}

/// One stage: four steps of 16 along `r`, each 4 left and 4 (or 2, 5) pairs of right operands.
#[cube]
fn multiply_stage<F: Float>(
    a_tiles: &SharedMemory<Chunk<F>>,
    b_tiles: &SharedMemory<Chunk<F>>,
    sums: &mut Sequence<Array<Pair<f32>>>,
    #[comptime] stage: u32,
    plane_i: u32,
    plane_j: u32,
    #[comptime] cols: u32,
    #[comptime] a_across: bool,
    #[comptime] b_across: bool,
) {
    let a_base = comptime!(stage * STAGE);
    let b_base = comptime!(stage * cols * STEP / 8);
    let a_width = comptime!(if a_across { TILE / 8 } else { STEP / 8 });
    let b_width = comptime!(if b_across { cols.min(TILE) / 8 } else { STEP / 8 });
    let groups = comptime!(cols as usize / 32);
    let first = plane_j * comptime!(cols.min(TILE) / 2);
    #[unroll]
    for part in 0..4u32 {
        let mut rows = Sequence::<Array<Pair<F>>>::new();
        #[unroll]
        for f in 0..4u32 {
            rows.push(left::<F>(a_tiles, a_base, plane_i, comptime!(f * 16), part, a_width, a_across));
        }
        #[unroll]
        for g in 0..groups {
            let cols = if comptime!(g < 4) {
                right::<F>(b_tiles, b_base, first, comptime!(g as u32 * 16), part, b_width, b_across)
            } else if comptime!(b_across) {
                let base = comptime!(b_base + STEP * TILE / 8);
                right::<F>(b_tiles, base, plane_j * 16u32, 0u32, part, comptime!((cols - TILE) / 8), true)
            } else {
                right::<F>(b_tiles, b_base, plane_j * 16u32, TILE, part, b_width, false)
            };
            #[unroll]
            for half in 0..2usize {
                #[unroll]
                for f in 0..4usize {
                    let sum = sums.index_mut(comptime!((f * groups + g) * 2 + half));
                    multiply::<F>(rows.index(f), &cols, half, sum);
                }
            }
        }
    }
}

#[cube]
fn store<O: Float>(
    sums: &Sequence<Array<Pair<f32>>>,
    out: &mut Array<Pair<O>>,
    factor: f32,
    i0: u32,
    j0: u32,
    plane_j: u32,
    i_len: u32,
    j_len: u32,
    #[comptime] blocks: usize,
) {
    let row = i0 + UNIT_POS_PLANE / 4u32;
    let col = j0 + (UNIT_POS_PLANE % 4u32) * 2u32;
    #[unroll]
    for f in 0..4usize {
        #[unroll]
        for g in 0..blocks {
            let sum = sums.index(comptime!(f * blocks + g));
            let j = col + column_of(plane_j, comptime!(g as u32), comptime!(blocks as u32));
            #[unroll]
            for half in 0..2usize {
                let i = row + comptime!(f as u32 * 16 + half as u32 * 8);
                if i < i_len && j < j_len {
                    let at = ((i as usize) * (j_len as usize) + (j as usize)) / 2usize;
                    out[at] = Pair::<O>::cast_from(sum[half] * Pair::new(factor));
                }
            }
        }
    }
}

/// The other way: starts the sums from `out`.
#[cube]
fn load<O: Float>(
    sums: &mut Sequence<Array<Pair<f32>>>,
    out: &Array<Pair<O>>,
    i0: u32,
    j0: u32,
    plane_j: u32,
    i_len: u32,
    j_len: u32,
    #[comptime] blocks: usize,
) {
    let row = i0 + UNIT_POS_PLANE / 4u32;
    let col = j0 + (UNIT_POS_PLANE % 4u32) * 2u32;
    #[unroll]
    for f in 0..4usize {
        #[unroll]
        for g in 0..blocks {
            let sum = sums.index_mut(comptime!(f * blocks + g));
            let j = col + column_of(plane_j, comptime!(g as u32), comptime!(blocks as u32));
            #[unroll]
            for half in 0..2usize {
                let i = row + comptime!(f as u32 * 16 + half as u32 * 8);
                if i < i_len && j < j_len {
                    sum[half] = Pair::cast_from(out[((i as usize) * (j_len as usize) + (j as usize)) / 2usize]);
                }
            }
        }
    }
}
