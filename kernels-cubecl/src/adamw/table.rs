//! The tables that codes of moments index, and the search for the nearest entry.
//!
//! A search of magnitudes from [`FLOOR`] to 1 takes one look in a second table. The upper bits of a magnitude name its bin, and
//! bins are so small that the border between two entries lies in a bin once at most. What the table holds for the bin is the code
//! at its lower end, above as many bits as the magnitude has left, and in these bits a number: added to those of the magnitude,
//! it carries into the code if they lie above the border.

use cubecl::prelude::*;

/// The code of a value in a quantized moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Coding {
    /// A byte: an index in a table of 256 values.
    Bytes,
    /// Four bits: an index in a table of 16 values.
    Nibbles,
}

/// The magnitude below which the nearest entry of every table is its smallest.
const FLOOR: f32 = 1.192_092_9e-7;

impl Coding {
    /// Bits of a code.
    pub fn bits(self) -> usize {
        if self == Self::Bytes { 8 } else { 4 }
    }

    /// The values of the codes of a moment, ascending: of the first one, which is `signed`, or of the second one's root.
    ///
    /// The dynamic tables (Dettmers et al., arXiv 2110.02861, §2.1) hold 0, 1, and decades below 1. A decade holds evenly
    /// spaced means, twice as many as the decade below it; a signed table holds both signs. The 4-bit table for the root of
    /// v is linear and has no zero (Li et al., arXiv 2309.01507, §4.1).
    pub fn values(self, signed: bool) -> Vec<f32> {
        if self == Self::Nibbles && !signed {
            return (1..=16).map(|i| i as f32 / 16.0).collect();
        }
        let decades = self.bits() as i32 - 1;
        let mut values = vec![0.0f64, 1.0];
        for decade in 0..decades {
            let count = 1usize << (decade + i32::from(!signed));
            for i in 0..count {
                let edge = |i: usize| 0.1 + 0.9 * i as f64 / count as f64;
                let mean = (edge(i) + edge(i + 1)) / 2.0 * 10f64.powi(decade + 1 - decades);
                values.push(mean);
                if signed {
                    values.push(-mean);
                }
            }
        }
        values.sort_by(f64::total_cmp);
        assert_eq!(values.len(), 1 << self.bits());
        values.into_iter().map(|v| v as f32).collect()
    }

    /// The second table: a word for each bin of magnitudes.
    pub fn search(self, signed: bool) -> Vec<u32> {
        let (shift, values) = (self.shift(signed), self.values(signed));
        let mask = (1u32 << shift) - 1;
        let magnitudes = if signed { &values[zero_code(self) as usize..] } else { &values };
        let borders: Vec<f32> = magnitudes.windows(2).map(|pair| (pair[0] + pair[1]) * 0.5).collect();
        // A root that is searched is above zero, and does not become zero.
        let least = usize::from(!signed && self == Self::Bytes);
        let word = |bin: u32| {
            let low = f32::from_bits(bin << shift);
            let code = borders.partition_point(|border| *border < low).max(least);
            let inside = |border: &&f32| border.to_bits() >> shift == bin;
            let border = borders.get(code).filter(inside).map_or(mask, |border| border.to_bits() & mask);
            (code as u32) << shift | (mask - border)
        };
        let first = FLOOR.to_bits() >> shift;
        (first..first + self.bins(signed) as u32).map(word).collect()
    }

    /// The length of [`Self::search`].
    pub(crate) fn bins(self, signed: bool) -> usize {
        let shift = self.shift(signed);
        ((1.0f32.to_bits() >> shift) - (FLOOR.to_bits() >> shift)) as usize + 1
    }

    /// The bits of a magnitude below those that name its bin.
    fn shift(self, signed: bool) -> u32 {
        match (self, signed) {
            (Self::Bytes, false) => 16,
            (Self::Bytes, true) => 17,
            (Self::Nibbles, _) => 20,
        }
    }
}

/// The code of zero in a signed table.
fn zero_code(coding: Coding) -> u32 {
    (1 << (coding.bits() - 1)) - 1
}

/// Both tables of a moment on the device.
#[derive(CubeType, CubeLaunch)]
pub(super) struct TableBuffers {
    values: Array<f32>,
    search: Array<u32>,
}

/// Both tables in shared memory.
#[derive(CubeType)]
pub(super) struct Table {
    pub(super) values: SharedMemory<f32>,
    search: SharedMemory<u32>,
    /// The first moment is signed. The second moment's root is not, and stays above zero where it is.
    #[cube(comptime)]
    signed: bool,
    #[cube(comptime)]
    pub(super) coding: Coding,
}

/// Loads the tables of the first moment (`signed`) or of the second moment's root. A barrier has to follow.
#[cube]
pub(super) fn loaded_table(buffers: &TableBuffers, #[comptime] signed: bool, #[comptime] coding: Coding) -> Table {
    let (entries, bins) = comptime!((1usize << coding.bits(), coding.bins(signed)));
    let mut values = SharedMemory::<f32>::new(entries);
    let mut search = SharedMemory::<u32>::new(bins);
    let mut at = UNIT_POS as usize;
    while at < entries {
        values[at] = buffers.values[at];
        at += CUBE_DIM as usize;
    }
    let mut at = UNIT_POS as usize;
    while at < bins {
        search[at] = buffers.search[at];
        at += CUBE_DIM as usize;
    }
    Table { values, search, signed, coding }
}

/// The code of a moment's value, where `inverse` is 1 / absmax: the index of the nearest entry, that of the smaller magnitude at a
/// tie (the scalar reference takes the lower index). A root above zero does not become zero.
#[cube]
pub(super) fn code_of_moment(value: f32, inverse: f32, table: &Table) -> u32 {
    let shift = comptime!(table.coding.shift(table.signed));
    let bits = u32::reinterpret(clamp((value * inverse).abs(), FLOOR, 1.0f32));
    let word = table.search[((bits >> shift) - comptime!(FLOOR.to_bits() >> shift)) as usize];
    let code = (word + (bits & comptime!((1u32 << shift) - 1))) >> shift;
    if comptime!(table.signed) {
        // One is the only entry whose negative is none.
        let zero = comptime!(zero_code(table.coding));
        select(value < 0.0f32, zero - min(code, zero), zero + code)
    } else {
        select(value > 0.0f32, code, 0u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLES: [(Coding, bool); 4] =
        [(Coding::Bytes, true), (Coding::Bytes, false), (Coding::Nibbles, true), (Coding::Nibbles, false)];

    #[test]
    fn tables_are_ascending_and_reach_one() {
        for (coding, signed) in TABLES {
            let values = coding.values(signed);
            assert!(values.windows(2).all(|w| w[0] < w[1]));
            assert_eq!(values.last(), Some(&1.0));
            assert_eq!(values.contains(&0.0), signed || coding == Coding::Bytes);
            assert!(!signed || values[zero_code(coding) as usize] == 0.0);
        }
    }

    #[test]
    fn the_search_finds_the_nearest_entry_on_both_sides_of_each_border() {
        for (coding, signed) in TABLES {
            let (values, words, shift) = (coding.values(signed), coding.search(signed), coding.shift(signed));
            let magnitudes = if signed { &values[zero_code(coding) as usize..] } else { &values };
            let found = |x: f32| {
                let bits = x.clamp(FLOOR, 1.0).to_bits();
                let word = words[((bits >> shift) - (FLOOR.to_bits() >> shift)) as usize];
                (word + (bits & ((1 << shift) - 1))) >> shift
            };
            let near =
                |border: f32| [-2i32, -1, 0, 1, 2].map(|d| f32::from_bits(border.to_bits().wrapping_add_signed(d)));
            let borders = magnitudes.windows(2).flat_map(|pair| near((pair[0] + pair[1]) / 2.0));
            let spread = (0..100_000).map(|i| 10f32.powf(-8.0 * i as f32 / 100_000.0));
            for x in borders.chain(spread).chain(magnitudes.iter().copied()).filter(|x| *x > 0.0 && *x <= 1.0) {
                let borders_below = magnitudes.windows(2).filter(|pair| x > (pair[0] + pair[1]) / 2.0).count();
                let least = usize::from(coding == Coding::Bytes && !signed);
                assert_eq!(found(x) as usize, borders_below.max(least), "{coding:?}, signed {signed}: {x}");
            }
        }
    }
}
