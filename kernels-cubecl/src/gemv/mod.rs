//! Few rows times a packed weight, as decoding needs it: `y[m, n] = sum_k x[m, k] * code[n, k] * scale[n, k / 16]`
//! times the tensor scales, for at most 16 rows of f16 or bf16.
//! ```text
//! for m { for n { for k { y[m][n] += x[m][k] * w[n][k] } } }                       // the plain loop
//! ```
//! The weight is the left operand of mma.sync m16n8k16, the tokens are the right one (`gemv/span.rs`). A tile is 16 rows
//! of the weight, or eight where there are few. Its columns are shared out among planes, in spans of 256, until there are
//! enough planes to keep the device busy; their sums meet in shared memory. A plane has one or two spans on their way
//! while it multiplies another. The tokens' values lie in shared memory, all of them or what the next step multiplies,
//! which cp.async brings during this one. One launch can serve several weights, those of layers that read the same
//! activations. The weight's rows and columns are compiled in: a model has five shapes, and nothing is read or divided
//! before the first load of codes. Moves 4.5 bits a weight: bound by memory, next by decoding (some two instructions a code
//! for one token, three for more).

mod plan;
mod span;

use crate::{
    error::{KernelError, expect_len, index},
    matmul::PackedArgs,
    mma::{Chunk, Pair, ring, zero_sums},
};
use cubecl::prelude::*;
pub use plan::Plan;

/// Rows of x at most.
pub const MAX_ROWS: usize = 16;
/// Columns that a plane takes at a time: two vectors of 32 codes for each of the four lanes of a row.
const SPAN: usize = 256;
const NAME: &str = "gemv";

/// Whether the kernel takes `rows` rows and `cols` summed columns.
pub fn fits(rows: usize, cols: usize) -> bool {
    rows <= MAX_ROWS && cols > 0 && cols.is_multiple_of(SPAN)
}

/// `y = x · wᵀ` for each of several weights, times every `scales[0]` besides its own tensor scale.
pub struct Gemv<R: Runtime> {
    /// `rows` x columns of the weights, of type `dtype`; one token's bf16 values below 2^64.
    pub x: ArrayArg<R>,
    /// Rows of x.
    pub rows: usize,
    /// At least one, of as many columns each.
    pub weights: Vec<PackedArgs<R>>,
    /// f32 `[1]`.
    pub scales: Vec<ArrayArg<R>>,
    /// A result for each weight, of type `dtype`.
    pub ys: Vec<ArrayArg<R>>,
    /// f16 or bf16.
    pub dtype: StorageType,
}

impl<R: Runtime> Gemv<R> {
    /// Columns of x, if the kernel takes them.
    fn columns(&self) -> Result<usize, KernelError> {
        let k = self.weights.first().map_or(0, |w| w.cols);
        expect_len(NAME, "rows or columns that do not fit", usize::from(!fits(self.rows, k)), 0)?;
        Ok(k)
    }
}

/// Launches it, shared out as the device is done with it first.
///
/// # Errors
/// If a buffer does not fit its shape, [`fits`] is false, or weights differ in their columns.
pub fn gemv<R: Runtime>(client: &ComputeClient<R>, product: Gemv<R>) -> Result<(), KernelError> {
    let (k, n) = (product.columns()?, product.weights.iter().map(|w| w.rows).sum());
    let plan = Plan::new(client, product.rows, n, k, product.dtype);
    gemv_in(client, product, plan)
}

/// As [`gemv()`], shared out by `plan`.
///
/// # Errors
/// As [`gemv()`], and if the plan is of another product.
pub fn gemv_in<R: Runtime>(client: &ComputeClient<R>, product: Gemv<R>, plan: Plan) -> Result<(), KernelError> {
    let k = product.columns()?;
    let Gemv { x, rows, weights, scales, ys, dtype } = product;
    expect_len(NAME, "plan of another product", usize::from(!plan.is_for(rows, k, dtype)), 0)?;
    index(NAME, "columns", k)?;
    expect_len(NAME, "x", x.size(), rows * k)?;
    expect_len(NAME, "results", ys.len(), weights.len())?;
    if rows == 0 || weights.iter().all(|w| w.rows == 0) {
        return Ok(());
    }
    let (mut cubes, mut lengths) = (0, Vec::new());
    let (mut codes, mut blocks, mut globals) = (SequenceArg::new(), SequenceArg::new(), SequenceArg::new());
    let (mut factors, mut out) = (SequenceArg::new(), SequenceArg::new());
    for (w, y) in weights.into_iter().zip(ys) {
        w.check(NAME)?;
        expect_len(NAME, "columns", w.cols, k)?;
        expect_len(NAME, "y", y.size(), rows * w.rows)?;
        cubes += w.rows.div_ceil(plan.lines() as usize);
        lengths.push(index(NAME, "rows of a weight", w.rows)?);
        codes.push(w.codes);
        blocks.push(w.scales);
        globals.push(w.global);
        out.push(y);
    }
    scales.into_iter().for_each(|scale| factors.push(scale));
    // SAFETY: buffer lengths and the plan were checked; rows past the last repeat it and are not stored.
    unsafe {
        gemv_kernel::launch_unchecked(
            client,
            CubeCount::Static(index(NAME, "tiles", cubes)?, 1, 1),
            CubeDim::new_1d(plan.units()),
            x,
            codes,
            blocks,
            globals,
            factors,
            out,
            rows as u32,
            lengths,
            plan,
            dtype,
        );
    }
    Ok(())
}

#[cube(launch_unchecked)]
#[allow(clippy::needless_range_loop)] // the unrolled index also chooses among buffers
fn gemv_kernel<F: Float>(
    x: &Array<Chunk<F>>,
    codes: &Sequence<Array<Vector<u32, Const<4>>>>,
    scales: &Sequence<Array<u32>>,
    globals: &Sequence<Array<f32>>,
    factors: &Sequence<Array<f32>>,
    y: &mut Sequence<Array<F>>,
    rows: u32,
    #[comptime] lengths: Vec<u32>,
    #[comptime] plan: Plan,
    #[define(F)] _dtype: StorageType,
) {
    // Made here, or each weight's code would have its own.
    let mut x_shared = SharedMemory::<Chunk<F>>::new(comptime!(plan.staged_chunks()));
    let mut shared = SharedMemory::<f32>::new(comptime!(plan.shared_sums()));
    let mut first = comptime!(0u32);
    #[unroll]
    for p in 0..codes.len() {
        let n = comptime!(lengths[p]);
        let end = comptime!(first + n.div_ceil(plan.lines()));
        if comptime!(codes.len() == 1) || (CUBE_POS_X >= first && CUBE_POS_X < end) {
            // Read now, multiplied when the sums are there.
            let mut tensor_scales = Sequence::<f32>::new();
            tensor_scales.push(globals.index(p)[0]);
            #[unroll]
            for s in 0..factors.len() {
                tensor_scales.push(factors.index(s)[0]);
            }
            let cube = CUBE_POS_X - first;
            let (codes, scales, y) = (codes.index(p), scales.index(p), y.index_mut(p));
            tiles::<F>(x, codes, scales, y, &mut x_shared, &mut shared, &tensor_scales, cube, n, rows, plan);
        }
        comptime!(first = end);
    }
}

/// What a weight's cube number `cube` makes of its `n` rows.
#[cube]
fn tiles<F: Float>(
    x: &Array<Chunk<F>>,
    codes: &Array<Vector<u32, Const<4>>>,
    scales: &Array<u32>,
    y: &mut Array<F>,
    x_shared: &mut SharedMemory<Chunk<F>>,
    shared: &mut SharedMemory<f32>,
    tensor_scales: &Sequence<f32>,
    cube: u32,
    #[comptime] n: u32,
    rows: u32,
    #[comptime] plan: Plan,
) {
    let Plan { shares, together, depth, .. } = comptime!(plan);
    let halves = plan.halves();
    let plane = UNIT_POS / 32u32;
    // The plane's tile, and of its spans `share`, `share + shares`, …
    let tile = cube * together + plane / shares;
    let share = plane % shares;
    let rest = comptime!(plan.spans() % shares);
    let mut steps = comptime!(plan.spans() / shares).runtime();
    if comptime!(rest > 0) && share < rest {
        steps += 1u32;
    }
    let mut codes_ahead = Array::<Vector<u32, Const<4>>>::new(comptime!(depth * halves * 2));
    let mut scales_ahead = Array::<u32>::new(comptime!(depth * halves));
    #[unroll]
    for slot in 0..depth {
        let step = comptime!(slot as u32).runtime();
        if step < steps {
            let span = share + step * shares;
            span::load(codes, scales, &mut codes_ahead, &mut scales_ahead, slot, tile, span, n, plan);
        }
    }
    span::stage::<F>(x, x_shared, rows, plan);
    let filled = ring(comptime!(if plan.windows() { depth } else { 0 }));
    if comptime!(plan.windows()) {
        #[unroll]
        for slot in 0..comptime!(depth - 1) {
            span::send::<F>(x, x_shared, &filled, slot, comptime!(slot as u32).runtime(), rows, plan);
        }
    }
    // Planes that read windows walk together, also those that have no span in the last one.
    let turns = if comptime!(plan.windows()) { plan.steps().runtime() } else { steps };
    let mut sums = zero_sums(plan.groups());
    let mut step = 0u32;
    let mut phase = 0u32;
    while step < turns {
        #[unroll]
        for slot in 0..depth {
            let now = step + comptime!(slot as u32);
            if now < turns {
                if comptime!(plan.windows()) {
                    filled.index(slot).wait_parity(phase);
                    // Nobody reads the window before this one any more: it is filled anew.
                    sync_cube();
                    let ahead = now + comptime!(depth as u32 - 1);
                    if ahead < turns {
                        let freed = comptime!((slot + depth - 1) % depth);
                        span::send::<F>(x, x_shared, &filled, freed, ahead, rows, plan);
                    }
                }
                if comptime!(!plan.windows() || rest == 0) || now < steps {
                    let span = share + now * shares;
                    span::multiply::<F>(
                        x_shared,
                        &codes_ahead,
                        &scales_ahead,
                        &mut sums,
                        slot,
                        span,
                        share,
                        rows,
                        plan,
                    );
                    let ahead = now + comptime!(depth as u32);
                    if ahead < steps {
                        let span = share + ahead * shares;
                        span::load(codes, scales, &mut codes_ahead, &mut scales_ahead, slot, tile, span, n, plan);
                    }
                }
            }
        }
        step += comptime!(depth as u32);
        phase ^= 1u32;
    }
    if comptime!(shares > 1) {
        add_up::<F>(y, &sums, shared, tensor_scales, cube, rows, n, plan);
    } else {
        store::<F>(y, &sums, tensor_scales, tile, rows, n, plan);
    }
}

/// Writes a tile that a plane made alone.
#[cube]
fn store<F: Float>(
    y: &mut Array<F>,
    sums: &Sequence<Array<Pair<f32>>>,
    tensor_scales: &Sequence<f32>,
    tile: u32,
    rows: u32,
    #[comptime] n: u32,
    #[comptime] plan: Plan,
) {
    let factor = factor_of(tensor_scales, plan);
    #[unroll]
    for group in 0..plan.groups() {
        #[unroll]
        for half in 0..plan.halves() {
            #[unroll]
            for c in 0..plan.columns() {
                let (sum, token, line) = span::sum_of(sums, group, half, c, plan);
                let column = tile * plan.height() + line;
                if token < rows && column < n {
                    y[(token * n + column) as usize] = F::cast_from(sum * factor);
                }
            }
        }
    }
}

/// Adds up what planes have of the tiles they share, and writes it.
#[cube]
fn add_up<F: Float>(
    y: &mut Array<F>,
    sums: &Sequence<Array<Pair<f32>>>,
    shared: &mut SharedMemory<f32>,
    tensor_scales: &Sequence<f32>,
    cube: u32,
    rows: u32,
    #[comptime] n: u32,
    #[comptime] plan: Plan,
) {
    // Planes' sums: [plane][token][rows of a tile].
    let height = plan.height();
    let size = plan.sums_of_plane();
    let plane = UNIT_POS / 32u32;
    #[unroll]
    for group in 0..plan.groups() {
        #[unroll]
        for half in 0..plan.halves() {
            #[unroll]
            for c in 0..plan.columns() {
                let (sum, token, line) = span::sum_of(sums, group, half, c, plan);
                if token < comptime!(size / height) {
                    shared[(plane * size + token * height + line) as usize] = sum;
                }
            }
        }
    }
    sync_cube();
    let factor = factor_of(tensor_scales, plan);
    let lines = plan.lines();
    let mut slot = UNIT_POS;
    while slot < rows * lines {
        let (token, line) = (slot / lines, slot % lines);
        let from = line / height * comptime!(plan.shares * size) + token * height + line % height;
        let mut sum = 0.0f32;
        #[unroll]
        for share in 0..plan.shares {
            sum += shared[(from + comptime!(share * size)) as usize];
        }
        let column = cube * lines + line;
        if column < n {
            y[(token * n + column) as usize] = F::cast_from(sum * factor);
        }
        slot += plan.units();
    }
}

/// All tensor scales, and the units of codes and values.
#[cube]
fn factor_of(tensor_scales: &Sequence<f32>, #[comptime] plan: Plan) -> f32 {
    let mut factor = f32::new(comptime!(plan.factor()));
    #[unroll]
    for s in 0..tensor_scales.len() {
        factor *= *tensor_scales.index(s);
    }
    factor
}
