//! Quantised moments: their buffers, their tables in shared memory, codes to values and back.

use super::{Chunk, check_chunk};
use crate::{
    error::{KernelError, expect_len},
    reduce::cube_maxima,
};
use cubecl::prelude::*;

/// Values that share one absmax in quantised states.
pub const STATE_BLOCK: usize = 256;

/// A quantised moment.
pub struct StateArgs<R: Runtime> {
    /// u8: one a value with 8 bits, one a pair (low nibble first) with 4. Of m itself, of the root of v.
    pub codes: ArrayArg<R>,
    /// f32, one for 256 values.
    pub absmax: ArrayArg<R>,
    /// f32, 256 or 16, ascending.
    pub table: ArrayArg<R>,
}

/// Whether gradient and moments fit `len` weights, and the chunk their blocks.
pub(super) fn check<R: Runtime>(
    name: &'static str,
    grad: &ArrayArg<R>,
    moments: [&StateArgs<R>; 2],
    bits: u32,
    len: usize,
    chunk: Chunk,
) -> Result<(), KernelError> {
    expect_len(name, "grad", grad.size(), len)?;
    for state in moments {
        expect_len(name, "state codes", state.codes.size(), len * bits as usize / 8)?;
        expect_len(name, "state absmax", state.absmax.size(), len.div_ceil(STATE_BLOCK))?;
        expect_len(name, "state table", state.table.size(), 1 << bits)?;
    }
    check_chunk(chunk, len)?;
    let end = if bits == 4 { chunk.end % 4 } else { 0 };
    expect_len(name, "chunk end modulo 4, with 4 bits", end, 0)?;
    expect_len(name, "chunk start modulo 256", chunk.start % STATE_BLOCK, 0)
}

/// Cubes whose units take `width` values of a block each, and the blocks that a cube updates one after another with the
/// tables it loaded: as many as leave some thousand cubes.
pub(super) fn block_launch(chunk: Chunk, width: usize) -> (CubeCount, CubeDim, u32) {
    let blocks = (chunk.end - chunk.start).div_ceil(STATE_BLOCK);
    let per_cube = (blocks / 8192).clamp(4, 32);
    let cubes = blocks.div_ceil(per_cube).max(1) as u32;
    let x = cubes.min(65_535);
    let units = (STATE_BLOCK / width) as u32;
    (CubeCount::Static(x, cubes.div_ceil(x), 1), CubeDim::new_1d(units), per_cube as u32)
}

/// A table of codes in shared memory, and what finds the place of a value in it.
#[derive(CubeType)]
pub(super) struct Table {
    values: SharedMemory<f32>,
    /// The middle between an entry and the next: a value above it is nearer to the next.
    middles: SharedMemory<f32>,
    /// 8-bit: where the decade above begins, and per decade places a unit and the place of 0.
    above: SharedMemory<f32>,
    slopes: SharedMemory<f32>,
    origins: SharedMemory<f32>,
}

/// The table of m, signed, or of v's root in shared memory. Ends on a barrier.
#[cube]
pub(super) fn loaded_table(table: &Array<f32>, #[comptime] signed: bool, #[comptime] bits: u32) -> Table {
    let last = comptime!((1u32 << bits) - 1);
    let mut values = SharedMemory::<f32>::new(comptime!(1usize << bits));
    let mut middles = SharedMemory::<f32>::new(comptime!(1usize << bits));
    let mut at = UNIT_POS;
    while at <= last {
        let value = table[at as usize];
        values[at as usize] = value;
        middles[at as usize] = (value + table[min(at + 1u32, last) as usize]) * 0.5f32;
        at += CUBE_DIM;
    }
    let mut above = SharedMemory::<f32>::new(8usize);
    let mut slopes = SharedMemory::<f32>::new(8usize);
    let mut origins = SharedMemory::<f32>::new(8usize);
    if comptime!(bits == 8) && UNIT_POS < 8u32 {
        // Decade `d`, from 10^(d - 7) on, holds `fold * 2^d` means of equal intervals; 0 and the smaller decades are
        // before it. From `slope * x + origin` a half is taken, entries being the middles of their intervals, and
        // of v the 1 by which its places begin earlier.
        let fold = comptime!(if signed { 1.0f32 } else { 2.0 });
        let mut slope = comptime!(fold / 0.9 * 1.0e6).runtime();
        let mut origin = comptime!(fold - fold / 9.0).runtime();
        let mut next = 1.0e-6f32.runtime();
        #[unroll]
        for decade in 1..7u32 {
            let reached = UNIT_POS >= decade;
            let count = comptime!((1u32 << decade) as f32);
            slope = select(reached, comptime!(fold / 0.9 * count * 10.0f32.powi(6 - decade as i32)).runtime(), slope);
            origin = select(reached, comptime!((fold - fold / 9.0) * count).runtime(), origin);
            next = select(reached, comptime!(10.0f32.powi(decade as i32 - 6)).runtime(), next);
        }
        above[UNIT_POS as usize] = select(UNIT_POS >= 6u32, 2.0f32, next);
        slopes[UNIT_POS as usize] = slope;
        origins[UNIT_POS as usize] = origin - comptime!(fold - 0.5).runtime();
    }
    sync_cube();
    Table { values, middles, above, slopes, origins }
}

/// Value `i` of what a unit read: of m itself, of v the root.
#[cube]
pub(super) fn decoded<C: Size>(
    codes: Vector<u8, C>,
    scale: f32,
    table: &Table,
    #[comptime] i: usize,
    #[comptime] bits: u32,
) -> f32 {
    let code = if comptime!(bits == 8) {
        u32::cast_from(codes[i])
    } else {
        (u32::cast_from(codes[comptime!(i / 2)]) >> comptime!((i % 2 * 4) as u32)) & 15u32
    };
    table.values[code as usize] * scale
}

/// The largest magnitudes of a block's moments, of which a unit has `n`.
#[cube]
pub(super) fn block_maxima(m: &Array<f32>, root: &Array<f32>, #[comptime] n: usize) -> (f32, f32) {
    let mut m_top = 0.0f32;
    let mut v_top = 0.0f32;
    #[unroll]
    for i in 0..n {
        m_top = max(m_top, m[i].abs());
        v_top = max(v_top, root[i]);
    }
    cube_maxima(m_top, v_top)
}

/// Stores what a unit has of a block's new moment, its vectors from `at` on; the first unit stores the maximum too.
#[cube]
pub(super) fn store<C: Size>(
    codes: &mut Array<Vector<u8, C>>,
    absmax: &mut Array<f32>,
    values: &Array<f32>,
    top: f32,
    table: &Table,
    at: usize,
    block: usize,
    #[comptime] parts: usize,
    #[comptime] n: usize,
    #[comptime] signed: bool,
    #[comptime] bits: u32,
) {
    #[unroll]
    for part in 0..parts {
        codes[at + part] = encoded(values, top, table, comptime!(part * n), signed, bits);
    }
    if UNIT_POS == 0u32 {
        absmax[block] = top;
    }
}

/// The codes of a unit's values from `first` on: nearest table entries, the lower at a tie.
#[cube]
fn encoded<C: Size>(
    values: &Array<f32>,
    absmax: f32,
    table: &Table,
    #[comptime] first: usize,
    #[comptime] signed: bool,
    #[comptime] bits: u32,
) -> Vector<u8, C> {
    let unit = 1.0f32 / select(absmax > 0.0f32, absmax, 1.0f32);
    let mut out = Vector::<u8, C>::empty();
    #[unroll]
    for i in 0..C::value() {
        if comptime!(bits == 4) {
            let low = nearest_of_16(table, values[comptime!(first + i * 2)] * unit);
            let high = nearest_of_16(table, values[comptime!(first + i * 2 + 1)] * unit);
            out[i] = u8::cast_from(low | (high << 4u32));
        } else {
            let value = values[comptime!(first + i)];
            if comptime!(signed) {
                let magnitude = nearest(table, value.abs() * unit, 127u32);
                out[i] = u8::cast_from(select(value < 0.0f32, 127u32 - min(magnitude, 127u32), 127u32 + magnitude));
            } else {
                let code = nearest(table, value * unit, 0u32);
                out[i] = u8::cast_from(select(value > 0.0f32, max(code, 1u32), code));
            }
        }
    }
    out
}

/// Which of 16 ascending entries is nearest to `x`, the lower one at a tie: a binary search.
#[cube]
fn nearest_of_16(table: &Table, x: f32) -> u32 {
    let mut code = 0u32;
    #[unroll]
    for level in 0..4u32 {
        let half = comptime!(8u32 >> level);
        code += select(x > table.middles[(code + comptime!(half - 1)) as usize], half, 0u32);
    }
    code
}

/// Which entry from `zero` on is nearest to `x` in [0, 1], the lower one at a tie. The exponent of x names its decade or
/// the one below; places of a decade are equal intervals, so the entry below x is computed, and only the middle to
/// the next one is looked at.
#[cube]
fn nearest(table: &Table, x: f32, #[comptime] zero: u32) -> u32 {
    // floor(log10(2^n)) + 7 for the exponent n, from 2^-23 on.
    let exponent = u32::reinterpret(max(x, 1.1920929e-7f32)) >> 23u32;
    let decade = (exponent * 1233u32 - 127_919u32) >> 12u32;
    let decade = (decade + select(x >= table.above[decade as usize], 1u32, 0u32)) as usize;
    let place = x * table.slopes[decade] + table.origins[decade];
    let place = u32::cast_from(clamp(place, 0.0f32, comptime!((254 - zero) as f32))) + zero;
    place - zero + select(x > table.middles[place as usize], 1u32, 0u32)
}
