//! A few rows times a packed weight, as decoding a token needs it:
//! ```text
//! y[i, j] = g * sum_r x[i, r] * code[j, r] * scale[j, r / 16]          // i: at most 16 tokens
//! for i { for j { for r { y[i][j] += x[i][r] * w[j][r] } } }                       // the plain loop
//! ```
//! `x` and `y` are f16 or bf16. The rows of x are *tokens*, its values *activations*.
//!
//! The weight is the left operand of `mma.sync` m16n8k16, the tokens are the right one (`span.rs`). A tile is 16 rows of
//! the weight. The columns of a tile are divided into *spans* of 256 and shared out among planes, until there are enough
//! planes to keep the device busy (`gemv_plan.rs`); the sums of these planes
//! meet in shared memory. A plane loads one or two spans ahead while it multiplies another. The activations lie in
//! shared memory, either all of them, or windows of them that `cp.async` loads one step ahead.
//!
//! One launch can serve several weights of layers that read the same activations. The rows and columns of the weights
//! are compiled in: a model has five shapes, and then nothing is loaded or divided before the first codes are
//! requested. Reads 4.5 bits a weight: bound by memory, next by decoding (three instructions a code).

mod gemv_plan;
mod span;

use crate::{
    device::sequence,
    error::{KernelError, expect_len, index, require},
    mma::{Octet, Pair, ring, zero_sums},
    operands::PackedArgs,
};
use cubecl::prelude::*;
pub use gemv_plan::{GemvPlan, MAX_ROWS};
use gemv_plan::{HEIGHT, SPAN};
use span::{COLUMNS, HALVES, WeightBuffers, nothing_ahead};

const NAME: &str = "gemv";

/// Whether the kernel takes `rows` tokens and weights of `cols` columns.
pub fn fits(rows: usize, cols: usize) -> bool {
    rows <= MAX_ROWS && cols > 0 && cols.is_multiple_of(SPAN)
}

/// `y = x · wᵀ` for each of several weights, times its tensor scale.
pub struct Gemv<R: Runtime> {
    /// The tokens, of type `dtype`, with as many columns as the weights.
    pub x: ArrayArg<R>,
    /// Number of tokens.
    pub rows: usize,
    /// At least one weight; all have the same number of columns.
    pub weights: Vec<PackedArgs<R>>,
    /// A result for each weight, of type `dtype`.
    pub ys: Vec<ArrayArg<R>>,
    /// f16 or bf16.
    pub dtype: StorageType,
}

impl<R: Runtime> Gemv<R> {
    /// The columns of the weights, if the kernel takes them.
    fn columns(&self) -> Result<usize, KernelError> {
        let cols = self.weights.first().map_or(0, |w| w.cols);
        require(NAME, fits(self.rows, cols), || {
            format!("{} tokens, {cols} columns; it takes at most {MAX_ROWS} tokens and multiples of {SPAN}", self.rows)
        })?;
        Ok(cols)
    }

    /// The plan for the product ([`GemvPlan::new`]).
    ///
    /// # Errors
    /// If [`fits`] is false.
    pub fn plan(&self, client: &ComputeClient<R>) -> Result<GemvPlan, KernelError> {
        let weight_rows = self.weights.iter().map(|w| w.rows).sum();
        Ok(GemvPlan::new(client, self.rows, weight_rows, self.columns()?, self.dtype))
    }
}

/// Launches the products, divided among planes by `plan`, for example that of [`Gemv::plan`].
///
/// # Errors
/// If a buffer does not fit its shape, [`fits`] is false, weights differ in their columns, or the plan was made for another
/// product.
pub fn gemv<R: Runtime>(client: &ComputeClient<R>, product: Gemv<R>, plan: GemvPlan) -> Result<(), KernelError> {
    let cols = product.columns()?;
    let Gemv { x, rows, weights, ys, dtype } = product;
    require(NAME, plan.is_for(rows, cols, dtype), || {
        format!("the plan was made for another product than {rows} tokens of {dtype:?} and {cols} columns")
    })?;
    index(NAME, "columns", cols)?;
    expect_len(NAME, "x", x.size(), rows * cols)?;
    require(NAME, ys.len() == weights.len(), || format!("{} results for {} weights", ys.len(), weights.len()))?;
    if rows == 0 || weights.iter().all(|w| w.rows == 0) {
        return Ok(());
    }
    let (mut cubes, mut weight_rows) = (0, Vec::new());
    for (w, y) in weights.iter().zip(&ys) {
        w.check(NAME)?;
        require(NAME, w.cols == cols, || format!("a weight has {} columns, the first has {cols}", w.cols))?;
        expect_len(NAME, "y", y.size(), rows * w.rows)?;
        cubes += w.rows.div_ceil(plan.lines() as usize);
        weight_rows.push(index(NAME, "rows of a weight", w.rows)?);
    }
    // SAFETY: buffer lengths and the plan were checked; rows past the last repeat it and are not stored.
    unsafe {
        gemv_kernel::launch_unchecked(
            client,
            CubeCount::Static(index(NAME, "tiles", cubes)?, 1, 1),
            CubeDim::new_1d(plan.units()),
            x,
            sequence(weights.into_iter().map(|w| w.launch())),
            sequence(ys),
            rows as u32,
            weight_rows,
            plan,
            dtype,
        );
    }
    Ok(())
}

#[cube(launch_unchecked)]
#[allow(clippy::needless_range_loop, reason = "the unrolled index also chooses among buffers")]
fn gemv_kernel<F: Float>(
    x: &Array<Octet<F>>,
    weights: &Sequence<WeightBuffers>,
    y: &mut Sequence<Array<F>>,
    rows: u32,
    #[comptime] weight_rows: Vec<u32>,
    #[comptime] plan: GemvPlan,
    #[define(F)] _dtype: StorageType,
) {
    // Reserved here once, not in the code of each weight.
    let mut memory = CubeMemory::<F> {
        x: SharedMemory::<Octet<F>>::new(comptime!(plan.staged_octets())),
        sums: SharedMemory::<f32>::new(comptime!(plan.shared_sums())),
    };
    let mut first = comptime!(0u32);
    #[unroll]
    for p in 0..weights.len() {
        let own_rows = comptime!(weight_rows[p]);
        let end = comptime!(first + own_rows.div_ceil(plan.lines()));
        if comptime!(weights.len() == 1) || (CUBE_POS_X >= first && CUBE_POS_X < end) {
            // Loaded now, multiplied when the sums are complete.
            let tensor_scale = weights.index(p).global[0];
            let own = comptime!(Own { plan, weight_rows: own_rows });
            let cube = CUBE_POS_X - first;
            product_of_cube::<F>(x, weights.index(p), y.index_mut(p), &mut memory, tensor_scale, cube, rows, own);
        }
        comptime!(first = end);
    }
}

/// The shared memory of a cube.
#[derive(CubeType)]
struct CubeMemory<F: Float> {
    /// Activations.
    x: SharedMemory<Octet<F>>,
    /// Sums of planes that share a tile: `[plane][token][row of the tile]`.
    sums: SharedMemory<f32>,
}

/// The plan, and the rows of the weight that a cube works on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Own {
    plan: GemvPlan,
    weight_rows: u32,
}

/// Computes and stores the tiles of a weight that belong to its cube number `cube`, for all `rows` tokens.
#[cube]
fn product_of_cube<F: Float>(
    x: &Array<Octet<F>>,
    weight: &WeightBuffers,
    y: &mut Array<F>,
    memory: &mut CubeMemory<F>,
    tensor_scale: f32,
    cube: u32,
    rows: u32,
    #[comptime] own: Own,
) {
    let Own { plan, weight_rows } = comptime!(own);
    let GemvPlan { shares, together, depth, .. } = comptime!(plan);
    let plane = UNIT_POS / 32u32;
    // This plane takes the spans `share`, `share + shares`, … of its tile.
    let tile = cube * together + plane / shares;
    let share = plane % shares;
    let rest = comptime!(plan.spans() % shares);
    let mut steps = comptime!(plan.spans() / shares).runtime();
    if comptime!(rest > 0) && share < rest {
        steps += 1u32;
    }
    let mut ahead = nothing_ahead(plan);
    #[unroll]
    for slot in 0..depth {
        let step = comptime!(slot as u32).runtime();
        if step < steps {
            span::load(weight, &mut ahead, slot, tile, share + step * shares, weight_rows, plan);
        }
    }
    span::stage::<F>(x, &mut memory.x, rows, plan);
    let filled = ring(comptime!(if plan.windows { depth } else { 0 }));
    if comptime!(plan.windows) {
        #[unroll]
        for slot in 0..comptime!(depth - 1) {
            span::send::<F>(x, &mut memory.x, &filled, slot, comptime!(slot as u32).runtime(), rows, plan);
        }
    }
    // Planes that read windows take the same number of steps, also those without a span in the last window.
    let turns = if comptime!(plan.windows) { plan.steps().runtime() } else { steps };
    let mut sums = zero_sums(plan.groups());
    let mut step = 0u32;
    let mut phase = 0u32;
    while step < turns {
        #[unroll]
        for slot in 0..depth {
            let now = step + comptime!(slot as u32);
            if now < turns {
                if comptime!(plan.windows) {
                    filled.index(slot).wait_parity(phase);
                    // From here on no unit reads the window before this one, which is filled again.
                    sync_cube();
                    let next = now + comptime!(depth as u32 - 1);
                    if next < turns {
                        let freed = comptime!((slot + depth - 1) % depth);
                        span::send::<F>(x, &mut memory.x, &filled, freed, next, rows, plan);
                    }
                }
                if comptime!(!plan.windows || rest == 0) || now < steps {
                    let span = share + now * shares;
                    span::multiply::<F>(&memory.x, &ahead, &mut sums, slot, span, share, rows, plan);
                    let next = now + comptime!(depth as u32);
                    if next < steps {
                        span::load(weight, &mut ahead, slot, tile, share + next * shares, weight_rows, plan);
                    }
                }
            }
        }
        step += comptime!(depth as u32);
        phase ^= 1u32;
    }
    if comptime!(shares > 1) {
        add_up::<F>(y, &sums, &mut memory.sums, tensor_scale, cube, rows, own);
    } else {
        store::<F>(y, &sums, tensor_scale, tile, rows, own);
    }
}

/// Stores a tile that one plane computed alone.
#[cube]
fn store<F: Float>(
    y: &mut Array<F>,
    sums: &Sequence<Array<Pair<f32>>>,
    tensor_scale: f32,
    tile: u32,
    rows: u32,
    #[comptime] own: Own,
) {
    let Own { plan, weight_rows } = comptime!(own);
    let factor = factor_of(tensor_scale, plan);
    #[unroll]
    for group in 0..plan.groups() {
        #[unroll]
        for half in 0..HALVES {
            #[unroll]
            for c in 0..COLUMNS {
                let (sum, token, line) = span::sum_of(sums, group, half, c);
                let column = tile * HEIGHT + line;
                if token < rows && column < weight_rows {
                    y[(token * weight_rows + column) as usize] = F::cast_from(sum * factor);
                }
            }
        }
    }
}

/// Adds the sums of the planes that share tiles, and stores them.
#[cube]
fn add_up<F: Float>(
    y: &mut Array<F>,
    sums: &Sequence<Array<Pair<f32>>>,
    shared: &mut SharedMemory<f32>,
    tensor_scale: f32,
    cube: u32,
    rows: u32,
    #[comptime] own: Own,
) {
    let Own { plan, weight_rows } = comptime!(own);
    let size = plan.sums_of_plane();
    let plane = UNIT_POS / 32u32;
    #[unroll]
    for group in 0..plan.groups() {
        #[unroll]
        for half in 0..HALVES {
            #[unroll]
            for c in 0..COLUMNS {
                let (sum, token, line) = span::sum_of(sums, group, half, c);
                shared[(plane * size + token * HEIGHT + line) as usize] = sum;
            }
        }
    }
    sync_cube();
    let factor = factor_of(tensor_scale, plan);
    let lines = plan.lines();
    let mut slot = UNIT_POS;
    while slot < rows * lines {
        let (token, line) = (slot / lines, slot % lines);
        let from = line / HEIGHT * comptime!(plan.shares * size) + token * HEIGHT + line % HEIGHT;
        let mut sum = 0.0f32;
        #[unroll]
        for share in 0..plan.shares {
            sum += shared[(from + comptime!(share * size)) as usize];
        }
        let column = cube * lines + line;
        if column < weight_rows {
            y[(token * weight_rows + column) as usize] = F::cast_from(sum * factor);
        }
        slot += plan.units();
    }
}

/// The tensor scale, times the factor that undoes the units of codes and scales.
#[cube]
fn factor_of(tensor_scale: f32, #[comptime] plan: GemvPlan) -> f32 {
    tensor_scale * f32::new(comptime!(plan.factor()))
}
