//! Tables that codes of moments index: in shared memory, with what finds the place of a value.

use cubecl::prelude::*;

/// A table of codes in shared memory, and what finds the place of a value in it.
#[derive(CubeType)]
pub(super) struct Table {
    pub(super) values: SharedMemory<f32>,
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

/// Which of 16 ascending entries is nearest to `x`, the lower one at a tie: a binary search.
#[cube]
pub(super) fn nearest_of_16(table: &Table, x: f32) -> u32 {
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
pub(super) fn nearest(table: &Table, x: f32, #[comptime] zero: u32) -> u32 {
    // floor(log10(2^n)) + 7 for the exponent n, from 2^-23 on.
    let exponent = u32::reinterpret(max(x, 1.1920929e-7f32)) >> 23u32;
    let decade = (exponent * 1233u32 - 127_919u32) >> 12u32;
    let decade = (decade + select(x >= table.above[decade as usize], 1u32, 0u32)) as usize;
    let place = x * table.slopes[decade] + table.origins[decade];
    let place = u32::cast_from(clamp(place, 0.0f32, comptime!((254 - zero) as f32))) + zero;
    place - zero + select(x > table.middles[place as usize], 1u32, 0u32)
}
