//! The draw of a token from any number of candidates. A cube draws a row, and a unit has neighboring ids. The cube does not sort: it
//! looks for the last id that is kept, four bits of its logit at a time. Reads the logits once for the largest, eight times for each
//! of top-k and top-p, and once for the draw: bound by instructions.

use super::{Drawing, WORDS, drawing, exponential, random_words, weight};
use crate::{
    likeliest::{LOWEST, is_nan},
    reduce::{cube_max, cube_maxima, cube_sum},
};
use cubecl::prelude::*;

/// Units of a cube.
const UNITS: usize = 256;
/// Bits of a logit that are found at a time.
const BITS: u32 = 4;
/// How often bits are found.
const ROUNDS: u32 = u32::BITS / BITS;
/// Values that these bits have.
const BINS: usize = 1 << BITS;
/// Parts in which the weights of a bin are added.
const PARTS: usize = UNITS / BINS;

/// Draws a token of each row that `drawings` (its words) names.
pub(super) fn draw<R: Runtime>(
    client: &ComputeClient<R>,
    x: ArrayArg<R>,
    drawings: &[u32],
    out: ArrayArg<R>,
    [rows, cols]: [usize; 2],
) {
    let numbers = client.create_from_slice(u32::as_bytes(drawings));
    let cubes = CubeCount::Static((drawings.len() / WORDS) as u32, 1, 1);
    // A unit has whole groups of four ids, which share random words.
    let each = cols.div_ceil(UNITS).next_multiple_of(4) as u32;
    // SAFETY: the caller has checked the lengths of `x` and `out`; a cube reads columns of its row, and writes its own words.
    unsafe {
        let numbers = ArrayArg::from_raw_parts(numbers, drawings.len());
        all_kernel::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(UNITS as u32),
            x,
            numbers,
            out,
            rows as u32,
            cols as u32,
            each,
            LOWEST,
        );
    }
}

/// The ids of a unit.
#[derive(CubeType)]
struct Own {
    /// Where the row begins.
    row: usize,
    begin: u32,
    end: u32,
}

/// What the units of a cube share.
#[derive(CubeType)]
struct Shared {
    /// The weight that each unit has put into each bin.
    bins: SharedMemory<f32>,
    /// Their sums, in parts.
    parts: SharedMemory<f32>,
    /// A count of each unit.
    counts: SharedMemory<u32>,
}

/// The last id that is kept. The logits are ordered by [`key_of`] them, and equal ones by their ids.
#[derive(CubeType)]
struct Border {
    key: u32,
    /// How many ids with this key are kept.
    ties: u32,
    /// How many ids with this key the units before this one have.
    before: u32,
}

#[cube(launch_unchecked)]
fn all_kernel(
    x: &Array<f32>,
    numbers: &Array<u32>,
    out: &mut Array<u32>,
    rows: u32,
    cols: u32,
    each: u32,
    lowest: f32,
) {
    let drawing = drawing(numbers);
    let begin = UNIT_POS * each;
    let own = Own { row: (drawing.row as usize) * (cols as usize), begin, end: min(begin + each, cols) };
    let (top, nan) = largest(x, &own, lowest);
    let mut shared = Shared {
        bins: SharedMemory::<f32>::new(comptime!(BINS * UNITS)),
        parts: SharedMemory::<f32>::new(comptime!(UNITS)),
        counts: SharedMemory::<u32>::new(comptime!(UNITS)),
    };

    // All ids are kept at first.
    let mut key = 0u32;
    let mut ties = cols;
    let mut before = 0u32;
    if drawing.kept > 0u32 && drawing.kept < cols {
        let all = Border { key, ties, before };
        let of_top_k = border_at(x, &own, &drawing, top, &all, f32::cast_from(drawing.kept), &mut shared, false);
        key = of_top_k.key;
        ties = of_top_k.ties;
        before = of_top_k.before;
    }
    if drawing.top_p < 1.0f32 {
        let of_top_k = Border { key, ties, before };
        let share = drawing.top_p * mass(x, &own, &drawing, top, &of_top_k);
        let of_top_p = border_at(x, &own, &drawing, top, &of_top_k, share, &mut shared, true);
        key = of_top_p.key;
        ties = of_top_p.ties;
        before = of_top_p.before;
    }

    let id = winner(x, &own, &drawing, top, &Border { key, ties, before }, cols, lowest);
    if UNIT_POS == 0u32 {
        out[drawing.row as usize] = id;
        out[(rows + drawing.row) as usize] = u32::cast_from(nan);
    }
}

/// The largest logit, and 1 if one is NaN.
#[cube]
fn largest(x: &Array<f32>, own: &Own, lowest: f32) -> (f32, f32) {
    let mut top = lowest;
    let mut nan = 0.0f32;
    for id in own.begin..own.end {
        let logit = x[own.row + id as usize];
        if is_nan(logit) {
            nan = 1.0f32;
        } else {
            top = max(top, logit);
        }
    }
    cube_maxima(top, nan)
}

/// Whether an id with this key is kept, of which this unit had `seen` with the same key before.
#[cube]
fn is_kept(key: u32, seen: u32, border: &Border) -> bool {
    key > border.key || (key == border.key && border.before + seen < border.ties)
}

/// The sum of the weights that are kept.
#[cube]
fn mass(x: &Array<f32>, own: &Own, drawing: &Drawing, top: f32, border: &Border) -> f32 {
    let mut sum = 0.0f32;
    let mut seen = 0u32;
    for id in own.begin..own.end {
        let logit = x[own.row + id as usize];
        let key = key_of(logit);
        if is_kept(key, seen, border) {
            sum += weight(logit, top, drawing.temperature);
        }
        seen += u32::cast_from(key == border.key);
    }
    cube_sum(sum)
}

/// Keeps the first ids of those that are kept, until their weights reach `share`: their number, or what they weigh (`by_mass`).
#[cube]
fn border_at(
    x: &Array<f32>,
    own: &Own,
    drawing: &Drawing,
    top: f32,
    border: &Border,
    share: f32,
    shared: &mut Shared,
    #[comptime] by_mass: bool,
) -> Border {
    // The bits of the key that are found, and the weight of all larger keys.
    let mut found = 0u32;
    let mut above = 0.0f32;
    #[unroll]
    for round in 0..ROUNDS {
        let shift = comptime!(u32::BITS - BITS * (round + 1));
        #[unroll]
        for bin in 0..BINS {
            shared.bins[comptime!(bin * UNITS) + UNIT_POS as usize] = 0.0f32;
        }
        let mut seen = 0u32;
        for id in own.begin..own.end {
            let logit = x[own.row + id as usize];
            let key = key_of(logit);
            if is_found(key, found, comptime!(shift + BITS)) && is_kept(key, seen, border) {
                let bin = ((key >> shift) & comptime!(BINS as u32 - 1)) as usize;
                let own_bin = bin * comptime!(UNITS) + UNIT_POS as usize;
                shared.bins[own_bin] += weight_of(logit, top, drawing, by_mass);
            }
            seen += u32::cast_from(key == border.key);
        }
        sync_cube();
        add_parts(shared);
        sync_cube();
        let (bin, higher) = last_bin(&shared.parts, above, share);
        found |= bin << shift;
        above = higher;
    }
    let least = weight_of(logit_of(found), top, drawing, by_mass);
    // The first of them is kept in any case. A cast saturates on some devices only.
    let ties = u32::cast_from(clamp((share - above) / least, 1.0f32, 16_777_216.0f32).ceil());
    let before = ids_before(x, own, found, &mut shared.counts);
    let most = select(found == border.key, border.ties, u32::MAX);
    Border { key: found, ties: min(ties, most), before }
}

/// Whether the bits of a key from `shift` on are those that are found.
#[cube]
fn is_found(key: u32, found: u32, #[comptime] shift: u32) -> bool {
    let mut same = true;
    if comptime!(shift < u32::BITS) {
        same = key >> shift == found >> shift;
    }
    same
}

#[cube]
fn weight_of(logit: f32, top: f32, drawing: &Drawing, #[comptime] by_mass: bool) -> f32 {
    let mut own = 1.0f32;
    if by_mass {
        own = weight(logit, top, drawing.temperature);
    }
    own
}

/// Adds what the units have put into each bin, in parts.
#[cube]
fn add_parts(shared: &mut Shared) {
    let first = (UNIT_POS as usize) * comptime!(UNITS / PARTS);
    let mut sum = 0.0f32;
    for n in 0..comptime!(UNITS / PARTS) {
        sum += shared.bins[first + n];
    }
    shared.parts[UNIT_POS as usize] = sum;
}

/// The bin of the last id that is kept, and the weight of all ids in higher bins. Each unit finds the same.
#[cube]
fn last_bin(parts: &SharedMemory<f32>, above: f32, share: f32) -> (u32, f32) {
    let mut higher = above;
    let mut bin = 0u32;
    let mut at = above;
    for n in 0..comptime!(BINS as u32) {
        let now = comptime!(BINS as u32 - 1) - n;
        let mut sum = 0.0f32;
        for part in 0..comptime!(PARTS) {
            sum += parts[(now as usize) * comptime!(PARTS) + part];
        }
        // The first bin that holds something is kept in any case.
        if sum > 0.0f32 && (higher < share || higher == above) {
            bin = now;
            at = higher;
        }
        higher += sum;
    }
    (bin, at)
}

/// How many ids with this key the units before this one have.
#[cube]
fn ids_before(x: &Array<f32>, own: &Own, key: u32, counts: &mut SharedMemory<u32>) -> u32 {
    let mut count = 0u32;
    for id in own.begin..own.end {
        count += u32::cast_from(key_of(x[own.row + id as usize]) == key);
    }
    counts[UNIT_POS as usize] = count;
    sync_cube();
    let mut before = 0u32;
    for unit in 0..UNIT_POS {
        before += counts[unit as usize];
    }
    // The next call writes the counts anew.
    sync_cube();
    before
}

/// The id that is kept and has the largest ratio of its weight and its exponential random number.
#[cube]
fn winner(x: &Array<f32>, own: &Own, drawing: &Drawing, top: f32, border: &Border, cols: u32, lowest: f32) -> u32 {
    let mut best = 0.0f32;
    let mut best_id = cols;
    let mut seen = 0u32;
    let mut random = Array::<u32>::new(4usize);
    let mut weights = Array::<f32>::new(4usize);
    for four in own.begin / 4u32..own.end.div_ceil(4u32) {
        let mut sum = 0.0f32;
        #[unroll]
        for lane in 0..4usize {
            weights[lane] = 0.0f32;
            let id = four * 4u32 + comptime!(lane as u32);
            if id < own.end {
                let logit = x[own.row + id as usize];
                let key = key_of(logit);
                let own_weight = weight(logit, top, drawing.temperature);
                if is_kept(key, seen, border) && own_weight >= drawing.min_p {
                    weights[lane] = own_weight;
                    sum += own_weight;
                }
                seen += u32::cast_from(key == border.key);
            }
        }
        if sum > 0.0f32 {
            random_words(four, drawing, &mut random);
            #[unroll]
            for lane in 0..4usize {
                let ratio = weights[lane] / exponential(random[lane]);
                if ratio > best {
                    best = ratio;
                    best_id = four * 4u32 + comptime!(lane as u32);
                }
            }
        }
    }
    let most = cube_max(best);
    // The smallest id with the largest ratio; ids are exact as f32.
    let own_id = select(best == most && best_id < cols, 0.0f32 - f32::cast_from(best_id), lowest);
    // Of a row of nothing but NaN, no id is the winner.
    u32::cast_from(min(0.0f32 - cube_max(own_id), f32::cast_from(cols - 1u32)))
}

/// A number that is larger for a larger logit. NaN has the smallest.
#[cube]
fn key_of(logit: f32) -> u32 {
    let bits = u32::reinterpret(logit);
    // CubeCL's `!` is not the complement of a word.
    let key = select(bits >> 31u32 == 1u32, bits ^ 0xFFFF_FFFFu32, bits | 0x8000_0000u32);
    select(is_nan(logit), 0u32, key)
}

/// The logit with this key.
#[cube]
fn logit_of(key: u32) -> f32 {
    f32::reinterpret(select(key >> 31u32 == 1u32, key & 0x7FFF_FFFFu32, key ^ 0xFFFF_FFFFu32))
}
