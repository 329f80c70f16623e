//! Few rows times a packed weight, as decoding needs it: `y[m, n] = sum_k x[m, k] * code[n, k] * scale[n, k / 16]`
//! times the tensor scales, for at most 16 rows of f16 or bf16.
//! ```text
//! for m { for n { for k { y[m][n] += x[m][k] * w[n][k] } } }                       // the plain loop
//! ```
//! The weight is the left operand of mma.sync m16n8k16 and up to eight tokens are its right one, so that eight
//! tokens cost what one does. The order of `k` within a product is free as long as both sides agree: a lane takes
//! 32 codes of a row in one load and decodes them where they lie, as pairs four apart ([`crate::codec`]), and the
//! tokens' values are paired alike. `code * scale` is exact in either format, times a power of two that the finished
//! sum gives back. A cube takes 16 rows of the weight and shares its columns out among its planes, which add up in
//! shared memory at the end. Moves 4.5 bits a weight: bound by memory, next by decoding (about a tenth of an
//! instruction a code).

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
/// Columns that a plane takes at a time: 32 codes for each of the four lanes of a row.
const SPAN: usize = 128;
/// Planes that are worth keeping busy.
const PLANES: usize = 4224;

/// Whether the kernel takes `rows` rows and `cols` summed columns.
pub fn fits(rows: usize, cols: usize) -> bool {
    rows <= MAX_ROWS && cols.is_multiple_of(SPAN)
}

/// `y = x · wᵀ` times every `scales[0]` besides `w`'s own tensor scale: `x`, `y` of type `dtype` (f16 or bf16).
///
/// # Errors
/// If a buffer does not fit its shape or [`fits`] is false.
pub fn gemv<R: Runtime>(
    client: &ComputeClient<R>,
    x: ArrayArg<R>,
    rows: usize,
    w: PackedArgs<R>,
    mut scales: SequenceArg<R, Array<f32>>,
    y: ArrayArg<R>,
    dtype: StorageType,
) -> Result<(), KernelError> {
    const NAME: &str = "gemv";
    w.check(NAME)?;
    let (n, k) = (w.rows, w.cols);
    expect_len(NAME, "rows or columns that do not fit", usize::from(!fits(rows, k)), 0)?;
    expect_len(NAME, "x", x.size(), rows * k)?;
    expect_len(NAME, "y", y.size(), rows * n)?;
    if rows == 0 || n == 0 {
        return Ok(());
    }
    scales.push(w.global);
    let tiles = n.div_ceil(16);
    let planes = (PLANES.div_ceil(tiles)).next_power_of_two().min(16).min((k / SPAN).next_power_of_two());
    let bf16 = dtype == StorageType::Scalar(ElemType::Float(FloatKind::BF16));
    // SAFETY: buffer lengths were checked; rows past the last repeat it and are not stored.
    unsafe {
        gemv_kernel::launch_unchecked(
            client,
            CubeCount::Static(index(NAME, "tiles", tiles)?, 1, 1),
            CubeDim::new_1d(planes as u32 * 32),
            x,
            w.codes,
            w.scales,
            scales,
            y,
            rows as u32,
            index(NAME, "n", n)?,
            index(NAME, "k", k)?,
            planes as u32,
            rows.div_ceil(8),
            bf16,
            dtype,
        );
    }
    Ok(())
}

#[cube(launch_unchecked)]
fn gemv_kernel<F: Float>(
    x: &Array<Chunk<F>>,
    codes: &Array<Vector<u32, Const<4>>>,
    scales: &Array<Vector<u8, Const<2>>>,
    globals: &Sequence<Array<f32>>,
    y: &mut Array<F>,
    rows: u32,
    n: u32,
    k: u32,
    #[comptime] planes: u32,
    #[comptime] groups: usize,
    #[comptime] bf16: bool,
    #[define(F)] _dtype: StorageType,
) {
    let plane = UNIT_POS / 32u32;
    let lane_row = UNIT_POS_PLANE / 4u32;
    let lane_part = UNIT_POS_PLANE % 4u32;
    // Vectors of 32 codes in a row; this lane's in two rows.
    let width = k / 32u32;
    let low = min(CUBE_POS_X * 16u32 + lane_row, n - 1u32) * width + lane_part;
    let high = min(CUBE_POS_X * 16u32 + lane_row + 8u32, n - 1u32) * width + lane_part;
    let mut sums = zero_sums(groups);

    // Two spans are loaded before the first is used.
    let spans = k / 128u32;
    let mut span = plane;
    while span < spans {
        let mut loaded = Sequence::<Span>::new();
        #[unroll]
        for turn in 0..2u32 {
            let at = min(span + comptime!(turn * planes), spans - 1u32) * 4u32;
            loaded.push(Span {
                low: codes[(low + at) as usize],
                high: codes[(high + at) as usize],
                low_scales: scales[(low + at) as usize],
                high_scales: scales[(high + at) as usize],
            });
        }
        #[unroll]
        for turn in 0..2usize {
            let now = span + comptime!(turn as u32 * planes);
            if now < spans {
                multiply_span::<F>(
                    x,
                    loaded.index(turn),
                    &mut sums,
                    now * 4u32 + lane_part,
                    lane_row,
                    rows,
                    width,
                    groups,
                    bf16,
                );
            }
        }
        span += comptime!(2 * planes);
    }

    // Add the planes up: [plane][token][16 rows].
    let mut shared = SharedMemory::<f32>::new(comptime!(planes as usize * groups * 128));
    #[unroll]
    for group in 0..groups {
        #[unroll]
        for half in 0..2usize {
            #[unroll]
            for c in 0..2usize {
                let token = comptime!(group as u32 * 8 + c as u32) + lane_part * 2u32;
                let row = lane_row + comptime!(half as u32 * 8);
                shared[(plane * comptime!(groups as u32 * 128) + token * 16u32 + row) as usize] =
                    sums.index(group)[half][c];
            }
        }
    }
    sync_cube();
    let mut factor = f32::new(comptime!(1.0 / pair_unit(bf16) / scale_unit(bf16)));
    #[unroll]
    for s in 0..globals.len() {
        factor *= globals.index(s)[0];
    }
    let mut slot = UNIT_POS;
    while slot < rows * 16u32 {
        let mut sum = 0.0f32;
        #[unroll]
        for p in 0..planes {
            sum += shared[(comptime!(p * groups as u32 * 128) + slot) as usize];
        }
        let column = CUBE_POS_X * 16u32 + slot % 16u32;
        if column < n {
            y[((slot / 16u32) * n + column) as usize] = F::cast_from(sum * factor);
        }
        slot += comptime!(planes * 32);
    }
}

/// A lane's share of 128 columns: 32 codes and two scales of two rows.
#[derive(CubeType)]
struct Span {
    low: Vector<u32, Const<4>>,
    high: Vector<u32, Const<4>>,
    low_scales: Vector<u8, Const<2>>,
    high_scales: Vector<u8, Const<2>>,
}

/// Adds 16 rows times 128 columns times all tokens. `at` counts vectors of 32 values within a row of x.
#[cube]
fn multiply_span<F: Float>(
    x: &Array<Chunk<F>>,
    span: &Span,
    sums: &mut Sequence<Array<Pair<f32>>>,
    at: u32,
    lane_row: u32,
    rows: u32,
    width: u32,
    #[comptime] groups: usize,
    #[comptime] bf16: bool,
) {
    #[unroll]
    for j in 0..4usize {
        let low_scale = e4m3_pair::<F>(u32::cast_from(span.low_scales[comptime!(j / 2)]), bf16);
        let high_scale = e4m3_pair::<F>(u32::cast_from(span.high_scales[comptime!(j / 2)]), bf16);
        let low_pairs = e2m1_pairs::<F>(span.low[j], bf16);
        let high_pairs = e2m1_pairs::<F>(span.high[j], bf16);
        let mut left = Sequence::<Array<Pair<F>>>::new();
        #[unroll]
        for step in 0..2usize {
            let mut a = Array::<Pair<F>>::new(4usize);
            a[0] = low_pairs[comptime!(step * 2)] * low_scale;
            a[1] = high_pairs[comptime!(step * 2)] * high_scale;
            a[2] = low_pairs[comptime!(step * 2 + 1)] * low_scale;
            a[3] = high_pairs[comptime!(step * 2 + 1)] * high_scale;
            left.push(a);
        }
        #[unroll]
        for group in 0..groups {
            // Tokens past the last repeat it: their sums are not stored.
            let row = min(lane_row + comptime!(group as u32 * 8), rows - 1u32);
            let values = x[((row * width + at) * 4u32) as usize + j];
            let mut right = Array::<Pair<F>>::new(4usize);
            #[unroll]
            for i in 0..4usize {
                let mut pair = Pair::<F>::empty();
                pair[0] = values[i];
                pair[1] = values[comptime!(i + 4)];
                right[i] = pair;
            }
            #[unroll]
            for step in 0..2usize {
                multiply::<F>(left.index(step), &right, step, sums.index_mut(group));
            }
        }
    }
}
