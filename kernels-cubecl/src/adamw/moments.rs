//! Quantised moments: their buffers, their tables in shared memory, codes to values and back.

use super::{Chunk, check_chunk};
use crate::{
    error::{KernelError, expect_len},
    reduce::cube_maxima,
};
use cubecl::prelude::*;

/// Values that share one absmax in quantised states.
pub const STATE_BLOCK: usize = 256;
/// Blocks that a cube updates one after another with the tables it loaded.
pub(super) const BLOCKS_PER_CUBE: u32 = 8;

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
    expect_len(name, "chunk start modulo 256", chunk.start % STATE_BLOCK, 0)
}

/// Cubes whose units take `width` values of a block each.
pub(super) fn block_launch(chunk: Chunk, width: usize) -> (CubeCount, CubeDim) {
    let cubes = (chunk.end - chunk.start).div_ceil(STATE_BLOCK * BLOCKS_PER_CUBE as usize).max(1) as u32;
    let x = cubes.min(65_535);
    (CubeCount::Static(x, cubes.div_ceil(x), 1), CubeDim::new_1d((STATE_BLOCK / width) as u32))
}

/// Both tables in shared memory.
#[cube]
pub(super) fn tables(
    m_table: &Array<f32>,
    v_table: &Array<f32>,
    #[comptime] bits: u32,
) -> (SharedMemory<f32>, SharedMemory<f32>) {
    let mut m_values = SharedMemory::<f32>::new(comptime!(1usize << bits));
    let mut v_values = SharedMemory::<f32>::new(comptime!(1usize << bits));
    let mut at = UNIT_POS;
    while at < comptime!(1u32 << bits) {
        m_values[at as usize] = m_table[at as usize];
        v_values[at as usize] = v_table[at as usize];
        at += CUBE_DIM;
    }
    sync_cube();
    (m_values, v_values)
}

/// Value `i` of what a unit read: of m itself, of v the root.
#[cube]
pub(super) fn decoded<C: Size>(
    codes: Vector<u8, C>,
    scale: f32,
    table: &SharedMemory<f32>,
    #[comptime] i: usize,
    #[comptime] bits: u32,
) -> f32 {
    let code = if comptime!(bits == 8) {
        u32::cast_from(codes[i])
    } else {
        (u32::cast_from(codes[comptime!(i / 2)]) >> comptime!((i % 2 * 4) as u32)) & 15u32
    };
    table[code as usize] * scale
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

/// The codes of a unit's values from `first` on: nearest table entries, the lower at a tie.
#[cube]
pub(super) fn encoded<C: Size>(
    values: &Array<f32>,
    absmax: f32,
    table: &SharedMemory<f32>,
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
                let magnitude = nearest(table, value.abs() * unit, 127u32, 1.0f32);
                out[i] = u8::cast_from(select(value < 0.0f32, 127u32 - min(magnitude, 127u32), 127u32 + magnitude));
            } else {
                let code = nearest(table, value * unit, 0u32, 2.0f32);
                out[i] = u8::cast_from(select(value > 0.0f32, max(code, 1u32), code));
            }
        }
    }
    out
}

/// Which of 16 ascending entries is nearest to `x`, the lower one at a tie.
#[cube]
fn nearest_of_16(table: &SharedMemory<f32>, x: f32) -> u32 {
    let mut code = 0u32;
    #[unroll]
    for i in 0..15usize {
        let passed = table[comptime!(i + 1)] - x < x - table[i];
        code += select(passed, 1u32, 0u32);
    }
    code
}

/// Which entry from `zero` on is nearest to `x` in [0, 1], the lower one at a tie. Decade `d` of the table holds
/// `c * 2^d` means of equal intervals (`c` is `fold`), so a place is computed; only its neighbours are looked at.
#[cube]
fn nearest(table: &SharedMemory<f32>, x: f32, #[comptime] zero: u32, #[comptime] fold: f32) -> u32 {
    let scale = comptime!(fold / 0.9);
    // Per decade, places from its lower edge 0.1 on, and the place of that edge.
    let mut per_unit = comptime!(scale * 1.0e6f32).runtime();
    let mut edge = comptime!(fold - 0.1 * scale).runtime();
    #[unroll]
    for decade in 1..7u32 {
        let reached = x >= comptime!(10.0f32.powi(decade as i32 - 7)).runtime();
        let count = comptime!((1u32 << decade) as f32);
        per_unit = select(reached, comptime!(scale * count * 10.0f32.powi(6 - decade as i32)).runtime(), per_unit);
        edge = select(reached, comptime!((fold - 0.1 * scale) * count).runtime(), edge);
    }
    let last = comptime!(255 - zero);
    let top = comptime!(last as f32 - 1.0);
    let place = u32::cast_from(clamp(x * per_unit + edge - comptime!(fold - 1.0).runtime(), 1.0f32, top));
    let below = x - table[(place + zero - 1u32) as usize];
    let own = (x - table[(place + zero) as usize]).abs();
    let above = table[(place + zero + 1u32) as usize] - x;
    select(below <= own, place - 1u32, select(above < own, place + 1u32, place))
}
