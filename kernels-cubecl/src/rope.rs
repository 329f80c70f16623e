//! Queries and keys of Qwen3: RMS-normalized over the head, then rotated by the position (Su et al., arXiv
//! 2104.09864, in the half-split form). With the normalized halves `a` and `b` of a head ([`crate::rms_norm`]), and
//! the angle of column `c` at position `p`:
//! ```text
//! ya[c] = a[c] * cos(p, c) - b[c] * sin(p, c)      yb[c] = b[c] * cos(p, c) + a[c] * sin(p, c)
//! for row { for head { normalize; for c in 0..E/2 { rotate the pair (c, c + E/2) } } }   // the plain loop
//! ```
//! The backward rotates the gradient back by the same angle and then goes through the norm. Rows are tokens;
//! `positions` gives each token's line of the tables. A head is taken by `E/16` neighboring units, each with 8 values
//! of either half, so that a pair never leaves a unit. Reads x and writes y (backward: reads x and dy, and writes dx
//! in the place of dy): bound by memory.

use crate::{
    device::{bit_casts, fast_math_if, vector_size},
    error::{KernelError, expect_len, index, require},
    reduce::lanes,
};
use cubecl::prelude::*;

/// Units of a cube.
const UNITS: u32 = 256;
/// The most cubes of a backward launch: each stores a row of partial sums.
const CUBES: usize = 528;
/// With at least as many tokens, the device stays busy even if units take several heads.
const FEW: usize = 64;

/// The shape of one call.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RopeShape {
    /// Number of tokens.
    pub rows: usize,
    /// Number of heads of a token.
    pub heads: usize,
    /// E, the values of a head: 16, 32, 64 or 128.
    pub head_dim: usize,
    /// The epsilon of the norm.
    pub eps: f32,
}

impl RopeShape {
    /// Whether the kernels take this head size.
    pub fn fits(self) -> bool {
        matches!(self.head_dim, 16 | 32 | 64 | 128)
    }

    /// Number of rows of the `partial` of a backward call.
    pub fn partial_rows(self) -> usize {
        self.cubes().min(CUBES)
    }

    /// Number of heads that the same units take one after another, reading angles and weights once. With few tokens
    /// every head has units of its own.
    fn turns(self) -> usize {
        let most = if self.rows < FEW { 1 } else { 8 };
        [8, 4, 2].into_iter().find(|n| *n <= most && self.heads.is_multiple_of(*n)).unwrap_or(1)
    }

    fn items(self) -> usize {
        self.rows * self.heads / self.turns()
    }

    fn cubes(self) -> usize {
        self.items().div_ceil(UNITS as usize / (self.head_dim / 16)).max(1)
    }

    fn check(self, name: &'static str, buffers: &[(&'static str, usize)]) -> Result<(), KernelError> {
        require(name, self.fits(), || format!("E = {}; it must be 16, 32, 64 or 128", self.head_dim))?;
        for (what, size) in buffers {
            expect_len(name, what, *size, self.rows * self.heads * self.head_dim)?;
        }
        Ok(())
    }
}

/// What forward and backward read besides x.
pub struct RopeArgs<R: Runtime> {
    /// Weight of the norm, f32, E.
    pub w: ArrayArg<R>,
    /// Cosines, f32, lines of E/2.
    pub cos: ArrayArg<R>,
    /// Sines, f32, lines of E/2.
    pub sin: ArrayArg<R>,
    /// Line of each token in the tables, u32.
    pub positions: ArrayArg<R>,
}

/// `y = rotate(rms_norm(x) * w)`, both `[rows, heads, E]` of type `dtype`.
///
/// # Errors
/// If a buffer does not fit the shape.
pub fn norm_rope<R: Runtime>(
    client: &ComputeClient<R>,
    x: ArrayArg<R>,
    args: RopeArgs<R>,
    y: ArrayArg<R>,
    dtype: StorageType,
    shape: RopeShape,
) -> Result<(), KernelError> {
    const NAME: &str = "norm_rope";
    shape.check(NAME, &[("x", x.size()), ("y", y.size())])?;
    expect_len(NAME, "positions", args.positions.size(), shape.rows)?;
    if shape.rows == 0 {
        return Ok(());
    }
    let cubes = shape.cubes().min(65_535) as u32;
    // SAFETY: buffer lengths were checked; heads past the last write nothing.
    unsafe {
        norm_rope_kernel::launch_unchecked(
            client,
            CubeCount::Static(cubes, 1, 1),
            CubeDim::new_1d(UNITS),
            vector(client, dtype),
            x,
            args.w,
            args.cos,
            args.sin,
            args.positions,
            y,
            index(NAME, "heads of all rows", shape.items())?,
            (shape.heads / shape.turns()) as u32,
            shape.eps,
            shape.turns(),
            shape.head_dim as u32,
            bit_casts(client),
            dtype,
        );
    }
    Ok(())
}

/// Replaces `dy` by `dx`. `partial` (f32, [`RopeShape::partial_rows`] x E) receives sums whose column sums are `dw`.
///
/// # Errors
/// If a buffer does not fit the shape.
pub fn norm_rope_backward<R: Runtime>(
    client: &ComputeClient<R>,
    x: ArrayArg<R>,
    args: RopeArgs<R>,
    dy: ArrayArg<R>,
    partial: ArrayArg<R>,
    dtype: StorageType,
    shape: RopeShape,
) -> Result<(), KernelError> {
    const NAME: &str = "norm_rope backward";
    shape.check(NAME, &[("x", x.size()), ("dy", dy.size())])?;
    let cubes = shape.partial_rows();
    expect_len(NAME, "positions", args.positions.size(), shape.rows)?;
    expect_len(NAME, "partial", partial.size(), cubes * shape.head_dim)?;
    // SAFETY: buffer lengths were checked; heads past the last write nothing, and a unit writes only what it alone
    // read.
    unsafe {
        norm_rope_backward_kernel::launch_unchecked(
            client,
            CubeCount::Static(cubes as u32, 1, 1),
            CubeDim::new_1d(UNITS),
            vector(client, dtype),
            x,
            args.w,
            args.cos,
            args.sin,
            args.positions,
            dy,
            partial,
            index(NAME, "heads of all rows", shape.items())?,
            (shape.heads / shape.turns()) as u32,
            shape.eps,
            shape.turns(),
            shape.head_dim as u32,
            bit_casts(client),
            dtype,
        );
    }
    Ok(())
}

fn vector<R: Runtime>(client: &ComputeClient<R>, dtype: StorageType) -> usize {
    vector_size(client, dtype, 8)
}

#[cube(launch_unchecked, fast_math = fast_math_if(_approximate))]
#[allow(clippy::too_many_arguments, reason = "a kernel takes its buffers one by one")]
fn norm_rope_kernel<F: Float, N: Size>(
    x: &Array<Vector<F, N>>,
    w: &Array<Vector<f32, N>>,
    cos: &Array<Vector<f32, N>>,
    sin: &Array<Vector<f32, N>>,
    positions: &Array<u32>,
    y: &mut Array<Vector<F, N>>,
    len: u32,
    heads: u32,
    eps: f32,
    #[comptime] turns: usize,
    #[comptime] dim: u32,
    #[comptime] _approximate: bool,
    #[define(F)] _dtype: StorageType,
) {
    let n = N::value();
    let units = comptime!(dim / 16);
    let parts = comptime!(8 / n);
    let half = comptime!(dim as usize / 2 / n);
    let mut item = CUBE_POS_X * comptime!(UNITS / units) + UNIT_POS / units;
    let own = ((UNIT_POS % units) as usize) * parts;
    // Every unit of a plane takes part in the same shuffles, also those without a head.
    while item - UNIT_POS / units < len {
        let live = item < len;
        let place = min(item, len - 1u32);
        let line = (positions[(place / heads) as usize] as usize) * half + own;
        let first = (place as usize) * comptime!(turns * dim as usize / n) + own;
        let (c, s) = (vectors(cos, line, parts), vectors(sin, line, parts));
        let (wa, wb) = (vectors(w, own, parts), vectors(w, own + half, parts));
        #[unroll]
        for turn in 0..turns {
            let first = first + comptime!(turn * dim as usize / n);
            let mut a = Array::<Vector<f32, N>>::new(parts);
            let mut b = Array::<Vector<f32, N>>::new(parts);
            let mut squares = Vector::<f32, N>::new(0.0f32);
            #[unroll]
            for p in 0..parts {
                a[p] = Vector::cast_from(x[first + p]);
                b[p] = Vector::cast_from(x[first + half + p]);
                squares += a[p] * a[p] + b[p] * b[p];
            }
            let scale = 1.0f32 / (sum_head(lanes(squares), units) / comptime!(dim as f32) + eps).sqrt();
            if live {
                #[unroll]
                for p in 0..parts {
                    let left = weighted::<F, N>(a[p], scale, wa[p]);
                    let right = weighted::<F, N>(b[p], scale, wb[p]);
                    y[first + p] = Vector::cast_from(left * c[p] - right * s[p]);
                    y[first + half + p] = Vector::cast_from(right * c[p] + left * s[p]);
                }
            }
        }
        item += CUBE_COUNT_X * comptime!(UNITS / units);
    }
}

#[cube(launch_unchecked, fast_math = fast_math_if(_approximate))]
#[allow(clippy::too_many_arguments, reason = "a kernel takes its buffers one by one")]
fn norm_rope_backward_kernel<F: Float, N: Size>(
    x: &Array<Vector<F, N>>,
    w: &Array<Vector<f32, N>>,
    cos: &Array<Vector<f32, N>>,
    sin: &Array<Vector<f32, N>>,
    positions: &Array<u32>,
    dy: &mut Array<Vector<F, N>>,
    partial: &mut Array<f32>,
    len: u32,
    heads: u32,
    eps: f32,
    #[comptime] turns: usize,
    #[comptime] dim: u32,
    #[comptime] _approximate: bool,
    #[define(F)] _dtype: StorageType,
) {
    let n = N::value();
    let units = comptime!(dim / 16);
    let parts = comptime!(8 / n);
    let half = comptime!(dim as usize / 2 / n);
    let own = ((UNIT_POS % units) as usize) * parts;
    let mut dw_a = Array::<Vector<f32, N>>::new(parts);
    let mut dw_b = Array::<Vector<f32, N>>::new(parts);
    #[unroll]
    for p in 0..parts {
        dw_a[p] = Vector::new(0.0f32);
        dw_b[p] = Vector::new(0.0f32);
    }
    let mut item = CUBE_POS_X * comptime!(UNITS / units) + UNIT_POS / units;
    while item - UNIT_POS / units < len {
        let live = item < len;
        let place = min(item, len - 1u32);
        let line = (positions[(place / heads) as usize] as usize) * half + own;
        let first = (place as usize) * comptime!(turns * dim as usize / n) + own;
        let (c, s) = (vectors(cos, line, parts), vectors(sin, line, parts));
        let (wa, wb) = (vectors(w, own, parts), vectors(w, own + half, parts));
        #[unroll]
        for turn in 0..turns {
            let first = first + comptime!(turn * dim as usize / n);
            let mut a = Array::<Vector<f32, N>>::new(parts);
            let mut b = Array::<Vector<f32, N>>::new(parts);
            let mut ga = Array::<Vector<f32, N>>::new(parts);
            let mut gb = Array::<Vector<f32, N>>::new(parts);
            let mut squares = Vector::<f32, N>::new(0.0f32);
            let mut dots = Vector::<f32, N>::new(0.0f32);
            #[unroll]
            for p in 0..parts {
                a[p] = Vector::cast_from(x[first + p]);
                b[p] = Vector::cast_from(x[first + half + p]);
                squares += a[p] * a[p] + b[p] * b[p];
                let da = Vector::<f32, N>::cast_from(dy[first + p]);
                let db = Vector::<f32, N>::cast_from(dy[first + half + p]);
                ga[p] = da * c[p] + db * s[p];
                gb[p] = db * c[p] - da * s[p];
                dots += ga[p] * wa[p] * a[p] + gb[p] * wb[p] * b[p];
            }
            let scale = 1.0f32 / (sum_head(lanes(squares), units) / comptime!(dim as f32) + eps).sqrt();
            let along = sum_head(lanes(dots), units) / comptime!(dim as f32) * scale * scale;
            if live {
                #[unroll]
                for p in 0..parts {
                    let left = ga[p] * wa[p] - a[p] * Vector::new(along);
                    let right = gb[p] * wb[p] - b[p] * Vector::new(along);
                    dy[first + p] = Vector::cast_from(left * Vector::new(scale));
                    dy[first + half + p] = Vector::cast_from(right * Vector::new(scale));
                    dw_a[p] += ga[p] * a[p] * Vector::new(scale);
                    dw_b[p] += gb[p] * b[p] * Vector::new(scale);
                }
            }
        }
        item += CUBE_COUNT_X * comptime!(UNITS / units);
    }

    store_column_sums(&dw_a, &dw_b, partial, own, dim);
}

/// Loads `parts` neighboring vectors.
#[cube]
fn vectors<N: Size>(from: &Array<Vector<f32, N>>, first: usize, #[comptime] parts: usize) -> Array<Vector<f32, N>> {
    let mut out = Array::<Vector<f32, N>>::new(parts);
    #[unroll]
    for p in 0..parts {
        out[p] = from[first + p];
    }
    out
}

/// Adds the `dw` of all heads of a cube, which share its columns, and stores the sums as a row of `partial`.
#[cube]
fn store_column_sums<N: Size>(
    dw_a: &Array<Vector<f32, N>>,
    dw_b: &Array<Vector<f32, N>>,
    partial: &mut Array<f32>,
    own: usize,
    #[comptime] dim: u32,
) {
    let n = N::value();
    let units = comptime!(dim / 16);
    let parts = comptime!(8 / n);
    let mut shared = SharedMemory::<f32>::new(256usize);
    #[unroll]
    for p in 0..parts {
        #[unroll]
        for i in 0..n {
            #[unroll]
            for side in 0..2usize {
                let value = if comptime!(side == 0) { dw_a[p][i] } else { dw_b[p][i] };
                sync_cube();
                shared[UNIT_POS as usize] = value;
                sync_cube();
                if UNIT_POS < units {
                    let mut sum = 0.0f32;
                    for head in 0..comptime!(UNITS / units) {
                        sum += shared[(head * units + UNIT_POS) as usize];
                    }
                    let column = (own + p) * n + i + comptime!(side * dim as usize / 2);
                    partial[(CUBE_POS_X as usize) * comptime!(dim as usize) + column] = sum;
                }
            }
        }
    }
}

/// `round(x * scale) * round(w)`, rounded.
#[cube]
fn weighted<F: Float, N: Size>(x: Vector<f32, N>, scale: f32, w: Vector<f32, N>) -> Vector<f32, N> {
    let normal = Vector::<F, N>::cast_from(x * Vector::new(scale));
    Vector::cast_from(normal * Vector::<F, N>::cast_from(w))
}

/// The sum of `x` over the `units` neighboring units of a head: at most 8, which are always in one plane.
#[cube]
fn sum_head(x: f32, #[comptime] units: u32) -> f32 {
    let mut sum = x;
    if comptime!(units > 1) {
        sum += plane_shuffle_xor(sum, 1u32);
    }
    if comptime!(units > 2) {
        sum += plane_shuffle_xor(sum, 2u32);
    }
    if comptime!(units > 4) {
        sum += plane_shuffle_xor(sum, 4u32);
    }
    sum
}
