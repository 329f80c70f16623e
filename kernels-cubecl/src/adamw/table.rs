//! The tables that codes of moments index, in shared memory, and the search for the nearest entry.

use cubecl::prelude::*;

/// The code of a value in a quantized moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Coding {
    /// A byte: an index in a table of 256 values.
    Bytes,
    /// Four bits: an index in a table of 16 values.
    Nibbles,
}

impl Coding {
    /// Bits of a code.
    pub fn bits(self) -> usize {
        if self == Self::Bytes { 8 } else { 4 }
    }
}

/// A table in shared memory, with what the search for the nearest entry needs.
#[derive(CubeType)]
pub(super) struct Table {
    pub(super) values: SharedMemory<f32>,
    /// The middle between an entry and the next: a value above it is nearer to the next.
    middles: SharedMemory<f32>,
    /// For 8 bits and every decade: the value at which the next decade begins, the entries per unit, and the index of
    /// 0.
    above: SharedMemory<f32>,
    slopes: SharedMemory<f32>,
    origins: SharedMemory<f32>,
    /// The first moment is signed. The second moment's root is not, and stays above zero where it is.
    #[cube(comptime)]
    pub(super) signed: bool,
    #[cube(comptime)]
    pub(super) coding: Coding,
}

/// Loads the table of the first moment (`signed`) or of the second moment's root. Ends with a barrier.
#[cube]
pub(super) fn loaded_table(table: &Array<f32>, #[comptime] signed: bool, #[comptime] coding: Coding) -> Table {
    let bits = comptime!(coding.bits() as u32);
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
        // Decade `d` begins at 10^(d - 7) and has `fold * 2^d` entries, each the middle of one of as many equal
        // intervals; 0 and the smaller decades precede it. `slope * x + origin` is the index of x. Half an interval
        // is subtracted because entries are middles; the second moment's indices begin 1 earlier.
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
    Table { values, middles, above, slopes, origins, signed, coding }
}

/// The code of a moment's value, where `inverse` is 1 / absmax: the index of the nearest entry, the lower one at a tie.
/// A root above zero does not become zero.
#[cube]
pub(super) fn code_of_moment(value: f32, inverse: f32, table: &Table) -> u32 {
    let x = value * inverse;
    if comptime!(table.coding == Coding::Nibbles) {
        nearest_of_16(table, x)
    } else if comptime!(table.signed) {
        let magnitude = nearest(table, x.abs(), 127u32);
        select(value < 0.0f32, 127u32 - min(magnitude, 127u32), 127u32 + magnitude)
    } else {
        let code = nearest(table, x, 0u32);
        select(value > 0.0f32, max(code, 1u32), code)
    }
}

/// The index of the entry nearest to `x` among 16 ascending ones, the lower one at a tie: a binary search.
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

/// The index, counted from `zero`, of the entry nearest to `x` in [0, 1], the lower one at a tie. The exponent of x
/// is that of its decade or of the one below. Entries of a decade are the middles of equal intervals, so the entry
/// below x is computed, and only the middle to the next one is compared.
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
