//! Products of two packed matrices on tensor cores that read NVFP4 themselves (sm_120 and sm_121: RTX 50, DGX Spark):
//! ```text
//! y[i, j] = g_a g_w sum_r (a[i, r] scale_a[i, r / 16]) (w[j, r] scale_w[j, r / 16])
//! for i { for j { for r { y[i][j] += a[i][r] * w[j][r] } } }       // the plain loop, over code times scale
//! ```
//! One `mma.sync` m16n8k64 (kind mxf4nvf4, four E4M3 scales a row) takes 64 codes of 16 rows and of 8 columns. A
//! register of an operand is one word of eight codes as [`crate::layout`] stores them, and the four scales of its 64
//! columns are one word too, so fragments are loaded from the matrices as they are and nothing is dequantized. The
//! functions below say which word a lane loads; their source are the figures of the PTX ISA ("Matrix fragments for
//! mma.m16n8k64").
//!
//! A cube of four planes makes 64x128 of y, a plane 32x64, whose sums stay in registers. It uses no shared memory and
//! no pipeline. Every tile loads 9/16 of a byte for each value of either operand: bound by the caches.
//!
//! The kernel was compiled for such cards and its fragments are simulated in the tests below, but it has not run on
//! such a card. Each process therefore compares it with the portable kernel before it uses it.

use crate::{
    error::{KernelError, index, require},
    matmul::matmul_packed_packed,
    mma::{Pair, UNITS, zero_sums},
    operands::{PackedArgs, PackedBuffers},
};
use cubecl::{
    cmma::MmaDefinition,
    ir::{ElemType, FloatKind, features::ScaledMmaConfig},
    prelude::*,
    server::Handle,
};
use cubecl_common::{e2m1x2, e4m3};
use std::sync::OnceLock;

/// Values that one instruction sums over: the columns of operands are a multiple of it.
const STEP: usize = 64;
/// Rows and columns of y that a cube makes.
const TILE: [u32; 2] = [64, 128];
/// Instructions of a plane in a step, down and across its part of the tile.
const DOWN: usize = 2;
const ACROSS: usize = 8;

/// Eight codes, two in a byte.
type Codes = Vector<e2m1x2, Const<4>>;
/// The four scales of 64 columns.
type Scales = Vector<e4m3, Const<4>>;

/// Whether the device has such tensor cores.
pub fn supported<R: Runtime>(client: &ComputeClient<R>) -> bool {
    let codes = StorageType::Packed(ElemType::Float(FloatKind::E2M1), 2);
    client.features().matmul.scaled_mma.contains(&ScaledMmaConfig {
        a_type: codes,
        b_type: codes,
        cd_type: ElemType::Float(FloatKind::F32).into(),
        scales_type: ElemType::Float(FloatKind::E4M3).into(),
        m: 16,
        n: 8,
        k: STEP as u32,
        scales_factor: 4,
    })
}

/// Whether the device has such tensor cores, and they gave the same results as the portable kernel. A process
/// compares once.
pub fn trusted<R: Runtime>(client: &ComputeClient<R>) -> bool {
    static AGREES: OnceLock<bool> = OnceLock::new();
    supported(client) && *AGREES.get_or_init(|| agrees(client).unwrap_or(false))
}

/// Compares both kernels on random codes and scales, with partial tiles in rows and columns.
fn agrees<R: Runtime>(client: &ComputeClient<R>) -> Result<bool, KernelError> {
    let mut state = 1u32;
    let mut random = |len: usize, below: u32| -> Vec<u8> {
        let mut next = || {
            state = state.wrapping_mul(0x915F_77F5).wrapping_add(1);
            (state >> 16) % below
        };
        (0..len).map(|_| next() as u8).collect()
    };
    let (rows, cols, depth) = (75usize, 138usize, 3 * STEP);
    let mut packed = |rows: usize| {
        let codes = client.create_from_slice(&random(rows * depth / 2, 256));
        // Scales around 1, so that no block hides the others.
        let scales: Vec<u8> = random(rows * depth / 16, 24).iter().map(|b| b + 0x30).collect();
        (rows, codes, client.create_from_slice(&scales), client.create_from_slice(&1.0f32.to_le_bytes()))
    };
    let (a, w) = (packed(rows), packed(cols));
    // SAFETY: the buffers were made with these lengths.
    let arg = |handle: &Handle, len: usize| unsafe { ArrayArg::from_raw_parts(handle.clone(), len) };
    let args = |(rows, codes, scales, global): &(usize, Handle, Handle, Handle)| PackedArgs {
        codes: arg(codes, rows * depth / 8),
        scales: arg(scales, rows * depth / 16),
        global: arg(global, 1),
        rows: *rows,
        cols: depth,
    };
    let [ours, portable] = [0; 2].map(|_| client.empty(rows * cols * 4));
    let f32 = ElemType::Float(FloatKind::F32).into();
    block_scaled(client, args(&a), args(&w), arg(&ours, rows * cols), f32)?;
    matmul_packed_packed(client, args(&a), args(&w), arg(&portable, rows * cols), f32)?;
    let read = |handle: Handle| -> Result<Vec<f32>, KernelError> {
        let bytes = client.read_one(handle).map_err(|e| KernelError::Device { reason: format!("{e:?}") })?;
        Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    };
    let (ours, portable) = (read(ours)?, read(portable)?);
    let top = portable.iter().fold(0.0f32, |a, x| a.max(x.abs()));
    Ok(top > 0.0 && ours.iter().zip(&portable).all(|(a, b)| (a - b).abs() <= 1e-4 * top))
}

/// Whether the kernel takes a product with `j` columns and sums of `r` values.
pub fn fits(j: usize, r: usize) -> bool {
    j.is_multiple_of(2) && r.is_multiple_of(STEP)
}

/// `out = a · wᵀ`, of type `result` (f32, f16 or bf16).
///
/// # Errors
/// If a buffer does not fit its shape or [`fits()`] is false.
pub fn block_scaled<R: Runtime>(
    client: &ComputeClient<R>,
    a: PackedArgs<R>,
    w: PackedArgs<R>,
    out: ArrayArg<R>,
    result: StorageType,
) -> Result<(), KernelError> {
    const NAME: &str = "block-scaled product";
    a.check_product(NAME, &w, &out)?;
    let [rows, cols] = [a.rows, w.rows];
    require(NAME, fits(cols, a.cols), || {
        format!("j = {cols}, r = {}; j must be even and r a multiple of {STEP}", a.cols)
    })?;
    if rows == 0 || cols == 0 {
        return Ok(());
    }
    let (lines, columns) = (index(NAME, "i", rows)?, index(NAME, "j", cols)?);
    let steps = index(NAME, "steps", a.cols / STEP)?;
    // SAFETY: buffer lengths were checked; rows past the last are read as the last and not written.
    unsafe {
        block_scaled_kernel::launch_unchecked(
            client,
            CubeCount::Static(columns.div_ceil(TILE[1]), lines.div_ceil(TILE[0]), 1),
            CubeDim::new_1d(UNITS),
            a.launch(),
            w.launch(),
            out,
            lines,
            columns,
            steps,
            result,
        );
    }
    Ok(())
}

/// The row of the left operand whose codes are in register `register` (0 to 3) of `lane`.
#[cube]
fn left_row(lane: u32, #[comptime] register: u32) -> u32 {
    lane / 4u32 + comptime!(register % 2 * 8)
}

/// The word of a step that register `register` of `lane` holds, for the left operand.
#[cube]
fn left_word(lane: u32, #[comptime] register: u32) -> u32 {
    lane % 4u32 + comptime!(register / 2 * 4)
}

/// The row of the left operand whose scales `lane` provides: with selector 0, lanes 0 and 1 of four provide them.
#[cube]
fn left_scales_row(lane: u32) -> u32 {
    lane / 4u32 + lane % 2u32 * 8u32
}

/// The row of the right operand, which is a column of the product, whose codes and scales `lane` holds.
#[cube]
fn right_row(lane: u32) -> u32 {
    lane / 4u32
}

/// The word of a step that register `register` (0 or 1) of `lane` holds, for the right operand.
#[cube]
fn right_word(lane: u32, #[comptime] register: u32) -> u32 {
    lane % 4u32 + comptime!(register * 4)
}

/// The row of the sums in register `register` (0 or 1) of `lane`; each holds two neighboring columns.
#[cube]
fn sum_row(lane: u32, #[comptime] register: u32) -> u32 {
    lane / 4u32 + comptime!(register * 8)
}

/// The first of the two columns of the sums in a register of `lane`.
#[cube]
fn sum_col(lane: u32) -> u32 {
    lane % 4u32 * 2u32
}

// Scales are mutable variables because the instruction takes references to them.
#[allow(unused_mut)]
#[cube(launch_unchecked)]
fn block_scaled_kernel<F: Float>(
    a: &PackedBuffers<Codes, Scales>,
    w: &PackedBuffers<Codes, Scales>,
    y: &mut Array<Pair<F>>,
    rows: u32,
    cols: u32,
    steps: u32,
    #[define(F)] _dtype: StorageType,
) {
    let plane = UNIT_POS / 32u32;
    let lane = UNIT_POS % 32u32;
    let row = CUBE_POS_Y * comptime!(TILE[0]) + plane / 2u32 * comptime!(DOWN as u32 * 16);
    let col = CUBE_POS_X * comptime!(TILE[1]) + plane % 2u32 * comptime!(ACROSS as u32 * 8);
    let (last_row, last_col) = (rows - 1u32, cols - 1u32);
    let def = MmaDefinition::<e2m1x2, e2m1x2, f32>::new_scaled::<e4m3>(16usize, 8usize, STEP, 4usize);
    let mut sums = zero_sums(comptime!(DOWN * ACROSS));
    for step in 0..steps {
        let mut left = Sequence::<Array<Codes>>::new();
        let mut left_scales = Array::<Scales>::new(DOWN);
        #[unroll]
        for down in 0..DOWN {
            let first = row + comptime!(down as u32 * 16);
            let mut codes = Array::<Codes>::new(4usize);
            #[unroll]
            for register in 0..4u32 {
                let at = min(first + left_row(lane, register), last_row) * steps + step;
                codes[register as usize] = a.codes[(at * 8u32 + left_word(lane, register)) as usize];
            }
            left.push(codes);
            let at = min(first + left_scales_row(lane), last_row) * steps + step;
            left_scales[down] = a.scales[at as usize];
        }
        #[unroll]
        for across in 0..ACROSS {
            let at = min(col + comptime!(across as u32 * 8) + right_row(lane), last_col) * steps + step;
            let mut right = Array::<Codes>::new(2usize);
            #[unroll]
            for register in 0..2u32 {
                right[register as usize] = w.codes[(at * 8u32 + right_word(lane, register)) as usize];
            }
            let mut right_scales = w.scales[at as usize];
            #[unroll]
            for down in 0..DOWN {
                let sum = sums.index_mut(comptime!(down * ACROSS + across));
                let mut own_scales = left_scales[down];
                let new = def.execute_scaled(left.index(down), &right, sum, own_scales, right_scales);
                sum[0] = new[0];
                sum[1] = new[1];
            }
        }
    }

    let global = Pair::new(a.global[0] * w.global[0]);
    #[unroll]
    for down in 0..DOWN {
        #[unroll]
        for across in 0..ACROSS {
            let sum = sums.index(comptime!(down * ACROSS + across));
            #[unroll]
            for register in 0..2u32 {
                let r = row + comptime!(down as u32 * 16) + sum_row(lane, register);
                let c = col + comptime!(across as u32 * 8) + sum_col(lane);
                if r < rows && c < cols {
                    y[((r * cols + c) / 2u32) as usize] = Pair::cast_from(sum[register as usize] * global);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LANES: usize = 32;

    /// Simulates one instruction on the registers of a warp, by the PTX ISA
    /// (mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64, its figures of fragments, and of scale
    /// selection with all selectors 0).
    fn instruction(
        a: &[[u32; 4]; LANES],
        b: &[[u32; 2]; LANES],
        a_scales: &[u32; LANES],
        b_scales: &[u32; LANES],
    ) -> [[f64; 4]; LANES] {
        let value = |word: u32, i: usize| {
            let code = word >> (4 * i) & 15;
            let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][(code & 7) as usize];
            if code & 8 == 0 { magnitude } else { -magnitude }
        };
        let mut left = [[0.0f64; 64]; 16];
        let mut right = [[0.0f64; 8]; 64];
        for lane in 0..LANES {
            let (group, thread) = (lane >> 2, lane % 4);
            for i in 0..32 {
                let row = if i < 8 || (16..24).contains(&i) { group } else { group + 8 };
                let col = thread * 8 + (i & 7) + if i >= 16 { 32 } else { 0 };
                left[row][col] = value(a[lane][i / 8], i % 8);
            }
            for i in 0..16 {
                let row = thread * 8 + (i & 7) + if i >= 8 { 32 } else { 0 };
                right[row][group] = value(b[lane][i / 8], i % 8);
            }
        }
        // Lanes 0 and 1 of each four hold the scales of rows `group` and `group + 8`; lane 0 holds those of column
        // `group`.
        let scale = |word: u32, col: usize| e4m3((word >> (8 * (col / 16))) as u8);
        for (row, values) in left.iter_mut().enumerate() {
            let lane = row % 8 * 4 + row / 8;
            values.iter_mut().enumerate().for_each(|(col, x)| *x *= scale(a_scales[lane], col));
        }
        for (row, values) in right.iter_mut().enumerate() {
            values.iter_mut().enumerate().for_each(|(col, x)| *x *= scale(b_scales[col * 4], row));
        }
        let mut out = [[0.0; 4]; LANES];
        for (lane, sums) in out.iter_mut().enumerate() {
            for (i, sum) in sums.iter_mut().enumerate() {
                let row = if i < 2 { lane >> 2 } else { (lane >> 2) + 8 };
                let col = lane % 4 * 2 + (i & 1);
                *sum = (0..64).map(|k| left[row][k] * right[k][col]).sum();
            }
        }
        out
    }

    fn e4m3(byte: u8) -> f64 {
        let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f64::from(byte & 7) / 8.0);
        if exponent == 0 { mantissa * 2f64.powi(-6) } else { (1.0 + mantissa) * 2f64.powi(exponent - 7) }
    }

    /// A simulated warp that loads and stores by the functions of the kernel multiplies matrices as they lie in
    /// memory.
    #[test]
    fn fragments_are_words_of_the_matrices() {
        let mut state = 0x9E37_79B9u32;
        let mut random = || {
            state = state.wrapping_mul(0x915F_77F5).wrapping_add(1);
            state ^ state >> 15
        };
        for _ in 0..50 {
            let codes: [Vec<u32>; 2] = [16, 8].map(|rows| (0..rows * 8).map(|_| random()).collect());
            // All scale bytes except NaN.
            let scales: [Vec<u8>; 2] = [16, 8].map(|rows| (0..rows * 4).map(|_| (random() % 0x7F) as u8).collect());
            let word = |scales: &[u8], row: u32| {
                u32::from_le_bytes(scales[row as usize * 4..][..4].try_into().expect("four bytes"))
            };
            let (mut a, mut b) = ([[0; 4]; LANES], [[0; 2]; LANES]);
            let (mut a_scales, mut b_scales) = ([0; LANES], [0; LANES]);
            for lane in 0..LANES as u32 {
                let at = |row: u32, word: u32| (row * 8 + word) as usize;
                let l = lane as usize;
                for r in 0..4 {
                    a[l][r as usize] = codes[0][at(left_row(lane, r), left_word(lane, r))];
                }
                for r in 0..2 {
                    b[l][r as usize] = codes[1][at(right_row(lane), right_word(lane, r))];
                }
                a_scales[l] = word(&scales[0], left_scales_row(lane));
                b_scales[l] = word(&scales[1], right_row(lane));
            }
            let sums = instruction(&a, &b, &a_scales, &b_scales);
            let mut y = [[f64::NAN; 8]; 16];
            for lane in 0..LANES as u32 {
                for i in 0..4u32 {
                    let col = sum_col(lane) + i % 2;
                    y[sum_row(lane, i / 2) as usize][col as usize] = sums[lane as usize][i as usize];
                }
            }
            for (row, line) in y.iter().enumerate() {
                for (col, got) in line.iter().enumerate() {
                    let of = |side: usize, row: usize, k: usize| {
                        let code = codes[side][row * 8 + k / 8] >> (4 * (k % 8)) & 15;
                        let value = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][(code & 7) as usize];
                        let scale = e4m3(scales[side][row * 4 + k / 16]);
                        if code & 8 == 0 { value * scale } else { -value * scale }
                    };
                    let exact: f64 = (0..64).map(|k| of(0, row, k) * of(1, col, k)).sum();
                    assert!((got - exact).abs() <= 1e-9 * exact.abs().max(1.0), "y[{row}][{col}]: {got}, not {exact}");
                }
            }
        }
    }
}
