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
//! One launch can make several products, where that gains: those of one operand with several others (the layers that
//! read the same activations), whose tiles then fill the device together, or the sum of several, which is one long sum
//! whose operands lie in different buffers.
//!
//! A cube of four planes makes 128x128 of y, or 128x160 or 128x64 where that leaves less of the device idle at the end.
//! `r` goes through shared memory in steps of 64 and a ring of three stages that cp.async fills ahead; each plane keeps
//! the sums of 64 rows and half of the columns in registers and feeds mma.sync. Two cubes share a multiprocessor: one
//! computes while the other waits. Moves `i*r + j*r + i*j` values, computes `2*i*j*r` operations: bound by the tensor
//! cores from about 300 rows on.

use crate::{
    device::processors,
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
    /// That of a product of matrices of these rows and columns.
    pub fn of(product: Product, [a_rows, a_cols]: [usize; 2], [b_rows, b_cols]: [usize; 2]) -> Self {
        match product {
            Product::Nt => Self { i: a_rows, j: b_rows, r: a_cols },
            Product::Nn => Self { i: a_rows, j: b_cols, r: a_cols },
            Product::Tn => Self { i: a_cols, j: b_cols, r: a_rows },
        }
    }

    /// Whether every row that is read or written in chunks of eight values is whole.
    pub fn fits(self, product: Product) -> bool {
        let Self { i, j, r } = self;
        let a = if product == Product::Tn { i } else { r };
        a.is_multiple_of(8) && j.is_multiple_of(8) && (product != Product::Nt || r.is_multiple_of(8))
    }
}

/// One product, or several of one launch: `out = product(a, b)` times the tensor scales.
pub struct Gemm<R: Runtime> {
    /// Left operands of type `types.0` (f16 or bf16), row-major: one a product, or one for all.
    pub a: Vec<ArrayArg<R>>,
    /// Right operands, likewise.
    pub b: Vec<ArrayArg<R>>,
    /// f32 `[1]`: as many for each product, the first product's first.
    pub scales: Vec<ArrayArg<R>>,
    /// Results of type `types.1`: one a product, or one for the sum of all.
    pub out: Vec<ArrayArg<R>>,
    /// Types of operands and results.
    pub types: (StorageType, StorageType),
    /// A shape a product. Those of one launch differ in what their shared operand, or their sum, leaves open.
    pub shapes: Vec<Shape>,
    /// How operands are stored.
    pub product: Product,
    /// Whether the product is added to what is in `out`: one product, without scales.
    pub accumulate: bool,
}

impl<R: Runtime> Gemm<R> {
    /// One product.
    pub fn one(
        a: ArrayArg<R>,
        b: ArrayArg<R>,
        scales: Vec<ArrayArg<R>>,
        out: ArrayArg<R>,
        types: (StorageType, StorageType),
        shape: Shape,
        product: Product,
    ) -> Self {
        let (a, b, out, shapes) = (vec![a], vec![b], vec![out], vec![shape]);
        Self { a, b, scales, out, types, shapes, product, accumulate: false }
    }

    /// Whether several products become one sum.
    fn summed(&self) -> bool {
        self.shapes.len() > 1 && self.out.len() == 1
    }

    fn check(&self) -> Result<(), KernelError> {
        let parts = self.shapes.len();
        let several = |name, got: usize, shared: bool| {
            let shared = shared && got == 1;
            expect_len(NAME, name, got, if shared { 1 } else { parts })
        };
        several("left operands", self.a.len(), self.b.len() == parts && !self.summed())?;
        several("right operands", self.b.len(), self.a.len() == parts && !self.summed())?;
        several("results", self.out.len(), self.a.len() == parts && self.b.len() == parts)?;
        expect_len(NAME, "scales left over", self.scales.len() % parts.max(1), 0)?;
        let plain = if self.accumulate { self.scales.len() + parts - 1 } else { 0 };
        expect_len(NAME, "scales or further products of an accumulating one", plain, 0)?;
        let first = self.shapes[0];
        for (p, shape @ Shape { i, j, r }) in self.shapes.iter().copied().enumerate() {
            expect_len(NAME, "a", self.a[p.min(self.a.len() - 1)].size(), i * r)?;
            expect_len(NAME, "b", self.b[p.min(self.b.len() - 1)].size(), j * r)?;
            expect_len(NAME, "out", self.out[p.min(self.out.len() - 1)].size(), i * j)?;
            expect_len(NAME, "values left over in a chunk", usize::from(!shape.fits(self.product)), 0)?;
            expect_len(NAME, "empty products among several", usize::from(parts > 1 && i * j * r == 0), 0)?;
            let alike = if self.summed() { i == first.i && j == first.j } else { r == first.r };
            expect_len(NAME, "products of another kind", usize::from(!alike), 0)?;
        }
        Ok(())
    }
}

const NAME: &str = "gemm";

/// Launches it, in the tiles that the device is done with first.
///
/// # Errors
/// If a buffer does not fit its shape, [`Shape::fits`] is false, or the products do not go together.
pub fn gemm<R: Runtime>(client: &ComputeClient<R>, products: Gemm<R>) -> Result<(), KernelError> {
    let shapes = if products.summed() { &products.shapes[..1] } else { &products.shapes };
    let cols = columns(shapes, processors(client), &tile_columns(client));
    gemm_in(client, products, cols)
}

/// As [`gemm()`] in tiles of `cols` columns, one of [`tile_columns`].
///
/// # Errors
/// As [`gemm()`].
pub fn gemm_in<R: Runtime>(client: &ComputeClient<R>, products: Gemm<R>, cols: usize) -> Result<(), KernelError> {
    products.check()?;
    expect_len(NAME, "columns of a tile that there are not", usize::from(!tile_columns(client).contains(&cols)), 0)?;
    let tiles = |shape: &Shape| shape.i.div_ceil(TILE as usize) * shape.j.div_ceil(cols);
    let count = if products.summed() { tiles(&products.shapes[0]) } else { products.shapes.iter().map(tiles).sum() };
    if count == 0 {
        return Ok(());
    }
    let Shape { i, j, r } = products.shapes[0];
    let (a_across, b_across) = (products.product == Product::Tn, products.product != Product::Nt);
    // SAFETY: buffer lengths were checked against the shapes; copies and stores are guarded at the edges.
    unsafe {
        gemm_kernel::launch_unchecked(
            client,
            CubeCount::Static(index(NAME, "tiles", count)?, 1, 1),
            CubeDim::new_1d(UNITS),
            several(products.a),
            several(products.b),
            several(products.scales),
            several(products.out),
            index(NAME, "i", i)?,
            index(NAME, "j", j)?,
            index(NAME, "r", r)?,
            cols as u32,
            a_across,
            b_across,
            products.accumulate,
            products.types.0,
            products.types.1,
        );
    }
    Ok(())
}

/// Whether these products gain by one launch: where one alone has so few tiles that its last wave is much of it, or sums so
/// short that filling the ring is. Else its larger code costs more.
pub fn gains_together<R: Runtime>(client: &ComputeClient<R>, shapes: &[Shape], summed: bool) -> bool {
    let tiles = |s: &Shape| s.i.div_ceil(TILE as usize) * s.j.div_ceil(TILE as usize);
    let short = |s: &Shape| if summed { s.r < 64 * STEP as usize } else { tiles(s) < 3 * processors(client) };
    shapes.len() > 1 && shapes.iter().any(short)
}

fn several<R: Runtime, C: CubePrimitive>(args: Vec<ArrayArg<R>>) -> SequenceArg<R, Array<C>> {
    let mut all = SequenceArg::new();
    args.into_iter().for_each(|arg| all.push(arg));
    all
}

/// The columns that a tile may have on this device: 160 need 108 KiB of shared memory.
pub fn tile_columns<R: Runtime>(client: &ComputeClient<R>) -> Vec<usize> {
    let room = client.properties().hardware.max_shared_memory_size;
    let needed = |cols: &usize| STAGES * (TILE as usize + cols) * STEP as usize * 2;
    [TILE as usize, 160, 64].into_iter().filter(|cols| needed(cols) <= room).collect()
}

/// The columns of a tile that a device of `processors` is done with first: each makes its share of tiles, whole ones; one
/// tile alone keeps two thirds of a multiprocessor busy; narrow tiles read more for a product.
fn columns(shapes: &[Shape], processors: usize, of: &[usize]) -> usize {
    let cost = |&cols: &usize| {
        let tiles: usize = shapes.iter().map(|s| s.i.div_ceil(TILE as usize) * s.j.div_ceil(cols)).sum();
        let tiles = tiles.div_ceil(processors);
        let alone = if tiles == 1 { 3 } else { 2 };
        let narrow = if cols < TILE as usize { 120 } else { 100 };
        tiles * cols * alone * narrow
    };
    of.iter().copied().min_by_key(cost).unwrap_or(TILE as usize)
}

#[cube(launch_unchecked)]
fn gemm_kernel<F: Float, O: Float>(
    a: &Sequence<Array<Chunk<F>>>,
    b: &Sequence<Array<Chunk<F>>>,
    scales: &Sequence<Array<f32>>,
    out: &mut Sequence<Array<Pair<O>>>,
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
    let mut tiles = Tiles::<F> {
        a: SharedMemory::new_aligned(comptime!(STAGES * STAGE as usize), 128usize),
        b: SharedMemory::new_aligned(comptime!(STAGES * (cols * STEP / 8) as usize), 128usize),
    };
    let parts = comptime!(a.len().max(b.len()));
    let form = comptime!(Form { cols, a_across, b_across });
    // Each product has code of its own, so that the loop does not ask where its operands lie.
    if comptime!(parts > 1 && out.len() == 1) {
        let at = corner(CUBE_POS_X, i_len, j_len, cols);
        let mut sums = zero_sums(form.sums());
        let mut scale = 1.0f32;
        #[unroll]
        for p in 0..parts {
            let factor = factor_of(scales, p, parts);
            // What is worth nothing is left out: the sums could not be brought to a scale of 0 and back.
            if factor != 0.0f32 {
                if comptime!(scales.len() >= parts) {
                    times(&mut sums, scale / factor);
                }
                scale = factor;
                let r_len = (a.index(p).len() * 8usize / (i_len as usize)) as u32;
                let place = Place { i0: at.0, j0: at.1, i_len, j_len, r_len };
                add_product::<F>(a.index(p), b.index(p), &mut tiles, &mut sums, place, form);
            }
        }
        let place = Place { i0: at.0, j0: at.1, i_len, j_len, r_len };
        store::<O>(&sums, out.index_mut(0usize), scale, place, form);
    } else {
        let mut first = 0u32;
        #[unroll]
        for p in 0..parts {
            // What the products do not share follows from the lengths of their operands.
            let (a, b) = (
                a.index(if comptime!(a.len() > 1) { p } else { 0usize }),
                b.index(if comptime!(b.len() > 1) { p } else { 0usize }),
            );
            let mut i_own = i_len;
            let mut j_own = j_len;
            if comptime!(parts > 1) {
                i_own = (a.len() * 8usize / (r_len as usize)) as u32;
                j_own = (b.len() * 8usize / (r_len as usize)) as u32;
            }
            let end = first + i_own.div_ceil(TILE) * j_own.div_ceil(cols);
            if comptime!(parts == 1) || (CUBE_POS_X >= first && CUBE_POS_X < end) {
                let at = corner(CUBE_POS_X - first, i_own, j_own, cols);
                let place = Place { i0: at.0, j0: at.1, i_len: i_own, j_len: j_own, r_len };
                let mut sums = zero_sums(form.sums());
                if comptime!(accumulate) {
                    load::<O>(&mut sums, out.index(p), place, form);
                }
                add_product::<F>(a, b, &mut tiles, &mut sums, place, form);
                store::<O>(&sums, out.index_mut(p), factor_of(scales, p, parts), place, form);
            }
            first = end;
        }
    }
}

/// The ring of stages.
#[derive(CubeType)]
struct Tiles<F: Float> {
    a: SharedMemory<Chunk<F>>,
    b: SharedMemory<Chunk<F>>,
}

/// How a product's operands are stored, and the columns of its tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Form {
    cols: u32,
    a_across: bool,
    b_across: bool,
}

impl Form {
    /// Blocks of eight columns that a plane makes.
    fn blocks(self) -> usize {
        self.cols as usize / 16
    }

    /// Fragments of sums that a plane keeps.
    fn sums(self) -> usize {
        self.blocks() * 4
    }
}

/// A cube's tile of a product.
#[derive(CubeType, Clone, Copy)]
struct Place {
    i0: u32,
    j0: u32,
    i_len: u32,
    j_len: u32,
    r_len: u32,
}

/// Where a tile begins. Cubes walk `GROUP` rows of tiles column by column.
#[cube]
fn corner(tile: u32, i_len: u32, j_len: u32, #[comptime] width: u32) -> (u32, u32) {
    let rows = i_len.div_ceil(TILE);
    let cols = j_len.div_ceil(width);
    let first = tile / (GROUP * cols) * GROUP;
    let height = min(rows - first, GROUP);
    let within = tile % (GROUP * cols);
    ((first + within % height) * TILE, (within / height) * width)
}

/// The tensor scales of product `part`, multiplied.
#[cube]
fn factor_of(scales: &Sequence<Array<f32>>, #[comptime] part: usize, #[comptime] parts: usize) -> f32 {
    let each = comptime!(scales.len() / parts);
    let mut factor = 1.0f32;
    #[unroll]
    for s in 0..each {
        factor *= scales.index(comptime!(part * each + s))[0];
    }
    factor
}

/// The sums so far in the tensor scales of the product that comes next.
#[cube]
fn times(sums: &mut Sequence<Array<Pair<f32>>>, ratio: f32) {
    #[unroll]
    for i in 0..sums.len() {
        let sum = sums.index_mut(i);
        sum[0usize] *= Pair::new(ratio);
        sum[1usize] *= Pair::new(ratio);
    }
}

/// Adds a product's tile to the sums.
#[cube]
fn add_product<F: Float>(
    a: &Array<Chunk<F>>,
    b: &Array<Chunk<F>>,
    tiles: &mut Tiles<F>,
    sums: &mut Sequence<Array<Pair<f32>>>,
    at: Place,
    #[comptime] form: Form,
) {
    // Another product's last stages may still be read.
    sync_cube();
    let filled = ring(STAGES);
    let steps = at.r_len.div_ceil(STEP);
    #[unroll]
    for stage in 0..comptime!(STAGES - 1) {
        let ahead = comptime!(stage as u32).runtime();
        if ahead < steps {
            fill_stage(a, b, tiles, ahead, at, comptime!(stage as u32), form);
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
                    fill_stage(a, b, tiles, ahead, at, comptime!(freed as u32), form);
                    sent(&filled, freed);
                }
                multiply_stage::<F>(tiles, sums, comptime!(stage as u32), form);
            }
        }
        step += comptime!(STAGES as u32);
        phase ^= 1u32;
    }
}

/// Starts the copies of step `step` into a stage.
#[cube]
fn fill_stage<F: Float>(
    a: &Array<Chunk<F>>,
    b: &Array<Chunk<F>>,
    tiles: &mut Tiles<F>,
    step: u32,
    at: Place,
    #[comptime] stage: u32,
    #[comptime] form: Form,
) {
    let Form { cols, a_across, b_across } = comptime!(form);
    let base = comptime!(stage * STAGE);
    fill_operand::<F>(a, &mut tiles.a, base, at.i0, step, at.i_len, at.r_len, TILE, a_across);
    let base = comptime!(stage * cols * STEP / 8);
    fill_operand::<F>(b, &mut tiles.b, base, at.j0, step, at.j_len, at.r_len, cols, b_across);
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
    tiles: &Tiles<F>,
    sums: &mut Sequence<Array<Pair<f32>>>,
    #[comptime] stage: u32,
    #[comptime] form: Form,
) {
    let Form { cols, a_across, b_across } = comptime!(form);
    let (plane_i, plane_j) = own_rows_and_half();
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
            rows.push(left::<F>(&tiles.a, a_base, plane_i, comptime!(f * 16), part, a_width, a_across));
        }
        #[unroll]
        for g in 0..groups {
            let cols = if comptime!(g < 4) {
                right::<F>(&tiles.b, b_base, first, comptime!(g as u32 * 16), part, b_width, b_across)
            } else if comptime!(b_across) {
                let base = comptime!(b_base + STEP * TILE / 8);
                right::<F>(&tiles.b, base, plane_j * 16u32, 0u32, part, comptime!((cols - TILE) / 8), true)
            } else {
                right::<F>(&tiles.b, b_base, plane_j * 16u32, TILE, part, b_width, false)
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

/// The first of a plane's 64 rows of a tile, and which half of its columns it has.
#[cube]
fn own_rows_and_half() -> (u32, u32) {
    ((UNIT_POS / 64u32) * 64u32, UNIT_POS / 32u32 % 2u32)
}

#[cube]
fn store<O: Float>(
    sums: &Sequence<Array<Pair<f32>>>,
    out: &mut Array<Pair<O>>,
    factor: f32,
    at: Place,
    #[comptime] form: Form,
) {
    let (row, col, plane_j) = own_corner(at);
    let blocks = form.blocks();
    #[unroll]
    for f in 0..4usize {
        #[unroll]
        for g in 0..blocks {
            let sum = sums.index(comptime!(f * blocks + g));
            let j = col + column_of(plane_j, comptime!(g as u32), comptime!(blocks as u32));
            #[unroll]
            for half in 0..2usize {
                let i = row + comptime!(f as u32 * 16 + half as u32 * 8);
                if i < at.i_len && j < at.j_len {
                    let to = ((i as usize) * (at.j_len as usize) + (j as usize)) / 2usize;
                    out[to] = Pair::<O>::cast_from(sum[half] * Pair::new(factor));
                }
            }
        }
    }
}

/// The other way: starts the sums from `out`.
#[cube]
fn load<O: Float>(sums: &mut Sequence<Array<Pair<f32>>>, out: &Array<Pair<O>>, at: Place, #[comptime] form: Form) {
    let (row, col, plane_j) = own_corner(at);
    let blocks = form.blocks();
    #[unroll]
    for f in 0..4usize {
        #[unroll]
        for g in 0..blocks {
            let sum = sums.index_mut(comptime!(f * blocks + g));
            let j = col + column_of(plane_j, comptime!(g as u32), comptime!(blocks as u32));
            #[unroll]
            for half in 0..2usize {
                let i = row + comptime!(f as u32 * 16 + half as u32 * 8);
                if i < at.i_len && j < at.j_len {
                    let from = ((i as usize) * (at.j_len as usize) + (j as usize)) / 2usize;
                    sum[half] = Pair::cast_from(out[from]);
                }
            }
        }
    }
}

/// The first row and column whose sums this lane has, and which half of the tile's columns is its plane's.
#[cube]
fn own_corner(at: Place) -> (u32, u32, u32) {
    let (plane_i, plane_j) = own_rows_and_half();
    (at.i0 + plane_i + UNIT_POS_PLANE / 4u32, at.j0 + (UNIT_POS_PLANE % 4u32) * 2u32, plane_j)
}
