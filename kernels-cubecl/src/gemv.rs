//! Few rows times a packed weight, as decoding needs it: `y[m, n] = sum_k x[m, k] * code[n, k] * scale[n, k / 16]`
//! times the tensor scales, for at most 16 rows of f16 or bf16.
//! ```text
//! for m { for n { for k { y[m][n] += x[m][k] * w[n][k] } } }                       // the plain loop
//! ```
//! The weight is the left operand of mma.sync m16n8k16 and up to eight tokens are its right one, one fragment. The order of `k` within a product is free as long as both sides agree: a lane takes
//! 32 codes of a row in one load and decodes them where they lie, as pairs four apart ([`crate::codec`]), and the
//! tokens' values are paired alike. `code * scale` is exact in either format, times a power of two that the finished
//! sum gives back. A tile is 16 rows of the weight, or eight where there are few rows. Its columns are shared out among
//! planes, which add up in shared memory at the end, until there are enough planes to keep the device busy; then a cube
//! takes several tiles. The next codes are on their way while some are multiplied. One token's values lie in shared
//! memory, paired already. One launch can serve several weights, those of layers that read the same activations. Moves 4.5
//! bits a weight: bound by memory, next by decoding (some four instructions a code).

use crate::{
    codec::{e2m1_pairs, e4m3_pair, pair_unit, scale_unit},
    error::{KernelError, expect_len, index},
    matmul::PackedArgs,
    mma::{Chunk, Pair, multiply, zero_sums},
};
use cubecl::{
    ir::{ElemType, FloatKind},
    prelude::*,
};

/// Rows of x at most.
pub const MAX_ROWS: usize = 16;
/// Columns that a plane takes at a time: two vectors of 32 codes for each of the four lanes of a row.
const SPAN: usize = 256;
/// Bytes that the sums of one token take at most: 16 planes, 8 tokens of a fragment, 16 rows.
const SUMS: usize = 16 * 8 * 16 * 4;
/// Planes that are worth keeping busy: 20 a multiprocessor of an H200. With more some cubes find no place and start late.
const PLANES: usize = 2640;
/// Tiles of 16 rows from which on tiles are not halved.
const TALL: usize = 384;

/// Whether the kernel takes `rows` rows and `cols` summed columns.
pub fn fits(rows: usize, cols: usize) -> bool {
    rows <= MAX_ROWS && cols > 0 && cols.is_multiple_of(SPAN)
}

/// `y = x · wᵀ` for each of the weights, times every `scales[0]` besides its own tensor scale: `x`, `y` of type `dtype`
/// (f16 or bf16).
///
/// # Errors
/// If a buffer does not fit its shape, [`fits`] is false, or weights differ in their columns.
pub fn gemv<R: Runtime>(
    client: &ComputeClient<R>,
    x: ArrayArg<R>,
    rows: usize,
    weights: Vec<PackedArgs<R>>,
    scales: Vec<ArrayArg<R>>,
    ys: Vec<ArrayArg<R>>,
    dtype: StorageType,
) -> Result<(), KernelError> {
    const NAME: &str = "gemv";
    let k = weights[0].cols;
    expect_len(NAME, "rows or columns that do not fit", usize::from(!fits(rows, k)), 0)?;
    expect_len(NAME, "x", x.size(), rows * k)?;
    expect_len(NAME, "results", ys.len(), weights.len())?;
    if rows == 0 || weights.iter().all(|w| w.rows == 0) {
        return Ok(());
    }
    let plan = Plan::new(client, rows, weights.iter().map(|w| w.rows).sum(), k);
    let mut cubes = 0;
    let (mut codes, mut blocks, mut globals) = (SequenceArg::new(), SequenceArg::new(), SequenceArg::new());
    let (mut factors, mut out) = (SequenceArg::new(), SequenceArg::new());
    for (w, y) in weights.into_iter().zip(ys) {
        w.check(NAME)?;
        expect_len(NAME, "columns", w.cols, k)?;
        expect_len(NAME, "y", y.size(), rows * w.rows)?;
        cubes += w.rows.div_ceil(plan.lines() as usize);
        codes.push(w.codes);
        blocks.push(w.scales);
        globals.push(w.global);
        out.push(y);
    }
    scales.into_iter().for_each(|scale| factors.push(scale));
    let bf16 = dtype == StorageType::Scalar(ElemType::Float(FloatKind::BF16));
    // SAFETY: buffer lengths were checked; rows past the last repeat it and are not stored.
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
            index(NAME, "k", k)?,
            plan,
            rows.div_ceil(8),
            bf16,
            dtype,
        );
    }
    Ok(())
}

/// How tiles are shared out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Plan {
    /// Planes that share a tile's columns.
    shares: u32,
    /// Tiles of a cube.
    together: u32,
    /// Whether a tile has 16 rows, or eight.
    tall: bool,
    /// Columns, where one token's values fit into shared memory beside the sums; else 0.
    single: usize,
}

impl Plan {
    /// For `rows` rows times weights of `n` rows together, `k` columns.
    fn new<R: Runtime>(client: &ComputeClient<R>, rows: usize, n: usize, k: usize) -> Self {
        let tall = n.div_ceil(16) >= TALL;
        let tiles = n.div_ceil(if tall { 16 } else { 8 });
        // Spans of a tile's columns, and of those a plane's, as even as they get.
        let spans = k / SPAN;
        let own = (spans * tiles).div_ceil(PLANES).min(spans);
        let shares = spans.div_ceil(own).min(16);
        let room = client.properties().hardware.max_shared_memory_size;
        let single = if rows == 1 && k / 64 * 9 * 16 + SUMS <= room { k } else { 0 };
        Self { shares: shares as u32, together: (4 / shares).max(1) as u32, tall, single }
    }

    /// Rows of a tile.
    fn height(self) -> u32 {
        if self.tall { 16 } else { 8 }
    }

    /// Rows of the weight that a cube takes.
    fn lines(self) -> u32 {
        self.together * self.height()
    }

    fn units(self) -> u32 {
        self.shares * self.together * 32
    }
}

#[cube(launch_unchecked)]
fn gemv_kernel<F: Float>(
    x: &Array<Chunk<F>>,
    codes: &Sequence<Array<Vector<u32, Const<4>>>>,
    scales: &Sequence<Array<Vector<u8, Const<4>>>>,
    globals: &Sequence<Array<f32>>,
    factors: &Sequence<Array<f32>>,
    y: &mut Sequence<Array<F>>,
    rows: u32,
    k: u32,
    #[comptime] plan: Plan,
    #[comptime] groups: usize,
    #[comptime] bf16: bool,
    #[define(F)] _dtype: StorageType,
) {
    let mut factor = f32::new(comptime!(1.0 / pair_unit(bf16) / scale_unit(bf16)));
    #[unroll]
    for s in 0..factors.len() {
        factor *= factors.index(s)[0];
    }
    let mut x_shared = SharedMemory::<Chunk<F>>::new(comptime!((plan.single / 64 * 9).max(1)));
    // Planes' sums: [plane][token][rows of a tile].
    let size = comptime!(groups as u32 * 8 * plan.height());
    let mut shared = SharedMemory::<f32>::new(comptime!((plan.shares * plan.together * size) as usize));
    let mut first = 0u32;
    #[unroll]
    for p in 0..codes.len() {
        let n = (codes.index(p).len() * 32usize / (k as usize)) as u32;
        let end = first + n.div_ceil(plan.lines());
        if comptime!(codes.len() == 1) || (CUBE_POS_X >= first && CUBE_POS_X < end) {
            let w = Weight { cube: CUBE_POS_X - first, n, k, factor: factor * globals.index(p)[0] };
            let y = y.index_mut(p);
            tiles::<F>(x, codes.index(p), scales.index(p), y, &mut x_shared, &mut shared, w, rows, plan, groups, bf16);
        }
        first = end;
    }
}

/// The weight that a cube works on: which of its cubes this is, its rows and columns, its tensor scales.
#[derive(CubeType, Clone, Copy)]
struct Weight {
    cube: u32,
    n: u32,
    k: u32,
    factor: f32,
}

/// One cube's rows of a weight.
#[cube]
fn tiles<F: Float>(
    x: &Array<Chunk<F>>,
    codes: &Array<Vector<u32, Const<4>>>,
    scales: &Array<Vector<u8, Const<4>>>,
    y: &mut Array<F>,
    x_shared: &mut SharedMemory<Chunk<F>>,
    shared: &mut SharedMemory<f32>,
    w: Weight,
    rows: u32,
    #[comptime] plan: Plan,
    #[comptime] groups: usize,
    #[comptime] bf16: bool,
) {
    let Plan { shares, together, single, .. } = comptime!(plan);
    let (n, k) = (w.n, w.k);
    let plane = UNIT_POS / 32u32;
    let lane_row = UNIT_POS_PLANE / 4u32;
    let lane_part = UNIT_POS_PLANE % 4u32;
    let height = plan.height();
    let halves = comptime!(if plan.tall { 2usize } else { 1 });
    // Vectors of 32 codes in a row; where this lane's one or two rows begin.
    let width = k / 32u32;
    let row0 = (w.cube * together + plane / shares) * height + lane_row;
    let mut firsts = Array::<u32>::new(halves);
    #[unroll]
    for half in 0..halves {
        firsts[half] = min(row0 + comptime!(half as u32 * 8), n - 1u32) * width;
    }
    // The lane's two of the eight vectors of a span: side by side with x in shared memory, else four apart.
    let own = if comptime!(single > 0) { lane_part * 2u32 } else { lane_part };
    let apart = comptime!(if single > 0 { 1u32 } else { 4 });
    let mut sums = zero_sums(groups);

    let spans = k / 256u32;
    let mut span = plane % shares;
    let mut codes_ahead = Array::<Vector<u32, Const<4>>>::new(comptime!(halves * 2));
    let mut scales_ahead = Array::<Vector<u8, Const<4>>>::new(comptime!(halves * 2));
    let mut codes_now = Array::<Vector<u32, Const<4>>>::new(comptime!(halves * 2));
    let mut scales_now = Array::<Vector<u8, Const<4>>>::new(comptime!(halves * 2));
    #[unroll]
    for turn in 0..2usize {
        #[unroll]
        for half in 0..halves {
            let at = (firsts[half] + min(span, spans - 1u32) * 8u32 + own) as usize;
            codes_ahead[comptime!(turn * halves + half)] = codes[at + comptime!(turn * apart as usize)];
            scales_ahead[comptime!(turn * halves + half)] = scales[at / 2usize + comptime!(turn * apart as usize / 2)];
        }
    }
    if comptime!(single > 0) {
        stage::<F>(x, x_shared, single, plan.units());
    }
    while span < spans {
        let next = span + shares;
        #[unroll]
        for turn in 0..2usize {
            #[unroll]
            for half in 0..halves {
                let i = comptime!(turn * halves + half);
                codes_now[i] = codes_ahead[i];
                scales_now[i] = scales_ahead[i];
                if next < spans {
                    let at = (firsts[half] + next * 8u32 + own) as usize;
                    codes_ahead[i] = codes[at + comptime!(turn * apart as usize)];
                    scales_ahead[i] = scales[at / 2usize + comptime!(turn * apart as usize / 2)];
                }
            }
        }
        #[unroll]
        for turn in 0..2usize {
            let vector = span * 8u32 + own + comptime!(turn as u32 * apart);
            let place = Tokens { vector, lane_row, lane_part, rows, width };
            let first = comptime!(turn * halves);
            let single = comptime!(single > 0);
            let odd = comptime!(single && turn == 1);
            multiply_span::<F>(
                x,
                x_shared,
                &codes_now,
                &scales_now,
                &mut sums,
                place,
                first,
                halves,
                groups,
                single,
                odd,
                bf16,
            );
        }
        span = next;
    }

    // Add the shares up.
    let size = comptime!(groups as u32 * 8 * plan.height());
    #[unroll]
    for group in 0..groups {
        #[unroll]
        for half in 0..halves {
            #[unroll]
            for c in 0..2usize {
                let token = comptime!(group as u32 * 8 + c as u32) + lane_part * 2u32;
                let row = lane_row + comptime!(half as u32 * 8);
                shared[(plane * size + token * height + row) as usize] = sums.index(group)[half][c];
            }
        }
    }
    sync_cube();
    let lines = plan.lines();
    let mut slot = UNIT_POS;
    while slot < rows * lines {
        let (token, line) = (slot / lines, slot % lines);
        let from = line / height * comptime!(shares * size) + token * height + line % height;
        let mut sum = 0.0f32;
        #[unroll]
        for share in 0..shares {
            sum += shared[(from + comptime!(share * size)) as usize];
        }
        let column = w.cube * lines + line;
        if column < n {
            y[(token * n + column) as usize] = F::cast_from(sum * w.factor);
        }
        slot += plan.units();
    }
}

/// Brings the one token's `k` values into shared memory, as pairs four apart. A chunk is left free after eight, so that
/// the four lanes of a row meet different banks.
#[cube]
fn stage<F: Float>(
    x: &Array<Chunk<F>>,
    out: &mut SharedMemory<Chunk<F>>,
    #[comptime] k: usize,
    #[comptime] units: u32,
) {
    let mut at = UNIT_POS;
    while at < comptime!(k as u32 / 8) {
        let values = x[at as usize];
        let mut paired = Chunk::<F>::empty();
        #[unroll]
        for i in 0..4usize {
            paired[comptime!(i * 2)] = values[i];
            paired[comptime!(i * 2 + 1)] = values[comptime!(i + 4)];
        }
        out[(at + at / 8u32) as usize] = paired;
        at += units;
    }
    sync_cube();
}

/// Which values of x a lane multiplies: 32 from vector `vector` of a row on.
#[derive(CubeType, Clone, Copy)]
struct Tokens {
    vector: u32,
    lane_row: u32,
    lane_part: u32,
    rows: u32,
    width: u32,
}

/// Adds a tile times 128 columns times all tokens: of each of its rows a lane has 32 codes and two scales, the first row's
/// at `first`; of four scales it has the second two if `odd`, or else by the parity of its vector.
#[cube]
fn multiply_span<F: Float>(
    x: &Array<Chunk<F>>,
    x_shared: &SharedMemory<Chunk<F>>,
    codes: &Array<Vector<u32, Const<4>>>,
    scales: &Array<Vector<u8, Const<4>>>,
    sums: &mut Sequence<Array<Pair<f32>>>,
    place: Tokens,
    #[comptime] first: usize,
    #[comptime] halves: usize,
    #[comptime] groups: usize,
    #[comptime] single: bool,
    #[comptime] odd: bool,
    #[comptime] bf16: bool,
) {
    #[unroll]
    for j in 0..4usize {
        let mut left = Sequence::<Array<Pair<F>>>::new();
        #[unroll]
        for _ in 0..2usize {
            let mut a = Array::<Pair<F>>::new(4usize);
            #[unroll]
            for i in 0..4usize {
                a[i] = Pair::<F>::new(F::new(0.0));
            }
            left.push(a);
        }
        #[unroll]
        for half in 0..halves {
            let four = scales[comptime!(first + half)];
            let byte = if comptime!(single) {
                u32::cast_from(four[comptime!(if odd { 2 + j / 2 } else { j / 2 })])
            } else {
                let (low, high) = (u32::cast_from(four[comptime!(j / 2)]), u32::cast_from(four[comptime!(2 + j / 2)]));
                select(place.lane_part % 2u32 == 1u32, high, low)
            };
            let scale = e4m3_pair::<F>(byte, bf16);
            let pairs = e2m1_pairs::<F>(codes[comptime!(first + half)][j], bf16);
            #[unroll]
            for i in 0..4usize {
                left.index_mut(comptime!(i / 2))[comptime!(i % 2 * 2 + half)] = pairs[i] * scale;
            }
        }
        #[unroll]
        for group in 0..groups {
            let mut right = Array::<Pair<F>>::new(4usize);
            if comptime!(single) {
                let at = place.vector * 4u32;
                let values = x_shared[((at + at / 8u32) as usize) + j];
                #[unroll]
                for i in 0..4usize {
                    let mut pair = Pair::<F>::empty();
                    pair[0] = values[comptime!(i * 2)];
                    pair[1] = values[comptime!(i * 2 + 1)];
                    right[i] = pair;
                }
            } else {
                // Tokens past the last repeat it: their sums are not stored.
                let row = min(place.lane_row + comptime!(group as u32 * 8), place.rows - 1u32);
                let values = x[((row * place.width + place.vector) as usize) * 4usize + j];
                #[unroll]
                for i in 0..4usize {
                    let mut pair = Pair::<F>::empty();
                    pair[0] = values[i];
                    pair[1] = values[comptime!(i + 4)];
                    right[i] = pair;
                }
            }
            #[unroll]
            for step in 0..2usize {
                multiply::<F>(left.index(step), &right, step, sums.index_mut(group));
            }
        }
    }
}
