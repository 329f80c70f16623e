//! The draw of a token from any number of candidates. A cube draws a row. It does not sort: it looks for the last id that is
//! kept, four bits at a time, first of its logit and then, if others have the same one, of the id. Reads the logits once for the
//! largest, eight times for top-k, nine times for top-p, eight times more for each border that several ids share, and once for
//! the draw: bound by instructions.

use super::row::{Drawing, WORDS, drawing, exponential, random_words, weight};
use crate::{
    device::vector_size,
    likeliest::{LOWEST, is_nan},
    reduce::{cube_max, cube_maxima, cube_sum},
};
use cubecl::prelude::*;

/// Units of a cube: a pass waits for memory, so more units are faster where the device has room for their bins.
const UNITS: [usize; 2] = [1024, 256];
/// Bits that are found at a time.
const BITS: u32 = 4;
/// How often bits of a word are found.
const ROUNDS: u32 = u32::BITS / BITS;
/// Values that these bits have.
const BINS: usize = 1 << BITS;
/// All bits of a word. CubeCL's `!` is not the complement of a word.
const ONES: u32 = u32::MAX;

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
    // Four ids share random words.
    let vector = vector_size(client, f32::as_type_native_unchecked().storage_type(), cols).min(4);
    let units = units_of(client);
    // SAFETY: the caller has checked the lengths of `x` and `out`; a cube reads columns of its row, and writes its own words.
    unsafe {
        let numbers = ArrayArg::from_raw_parts(numbers, drawings.len());
        all_kernel::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(units as u32),
            vector,
            x,
            numbers,
            out,
            rows as u32,
            (cols / vector) as u32,
            LOWEST,
            units,
        );
    }
}

/// How many units draw a row on this device.
fn units_of<R: Runtime>(client: &ComputeClient<R>) -> usize {
    let hardware = &client.properties().hardware;
    let fits = |units: usize| {
        // A quarter of the memory is left for what reductions exchange.
        let bytes = BINS * units * size_of::<f32>();
        units <= hardware.max_units_per_cube as usize && bytes + bytes / 4 <= hardware.max_shared_memory_size
    };
    UNITS.into_iter().find(|units| fits(*units)).unwrap_or(UNITS[UNITS.len() - 1])
}

/// The row of a cube. Its units take turns with its vectors of logits.
#[derive(CubeType)]
struct Row {
    /// Where it begins, in vectors.
    first: usize,
    /// Number of vectors.
    wide: u32,
    /// The largest logit.
    top: f32,
    temperature: f32,
}

/// The last id that is kept. Ids are ordered by the keys of their logits ([`key_of()`]), and those with one key by themselves.
#[derive(CubeType)]
struct Border {
    key: u32,
    id: u32,
}

/// What the units of a cube share.
#[derive(CubeType)]
struct Shared {
    /// The weight that each unit has put into each bin.
    bins: SharedMemory<f32>,
    /// Their sums, in as many parts as there are units.
    parts: SharedMemory<f32>,
    /// The sum of each bin.
    sums: SharedMemory<f32>,
}

/// What is known of a border that is looked for.
#[derive(CubeType)]
struct Found {
    /// The key, or its upper bits.
    key: u32,
    /// The upper bits of the complement of its id.
    id: u32,
    /// The weight of all ids in front of those with these bits.
    above: f32,
    /// The weight that the ids reach up to the border.
    share: f32,
}

#[cube(launch_unchecked)]
fn all_kernel<N: Size>(
    x: &Array<Vector<f32, N>>,
    numbers: &Array<u32>,
    out: &mut Array<u32>,
    rows: u32,
    wide: u32,
    lowest: f32,
    #[comptime] units: usize,
) {
    let drawing = drawing(numbers);
    let first = (drawing.row as usize) * (wide as usize);
    let (top, nan) = largest(x, first, wide, lowest);
    let row = Row { first, wide, top, temperature: drawing.temperature };
    let mut shared = Shared {
        bins: SharedMemory::<f32>::new(comptime!(BINS * units)),
        parts: SharedMemory::<f32>::new(units),
        sums: SharedMemory::<f32>::new(BINS),
    };

    // All ids are kept at first.
    let mut key = 0u32;
    let mut id = ONES.runtime();
    if drawing.kept > 0u32 {
        let of_top_k = border_at(x, &row, &Border { key, id }, f32::cast_from(drawing.kept), &mut shared, false);
        key = of_top_k.key;
        id = of_top_k.id;
    }
    if drawing.top_p < 1.0f32 {
        let share = drawing.top_p * mass(x, &row, &Border { key, id });
        let of_top_p = border_at(x, &row, &Border { key, id }, share, &mut shared, true);
        key = of_top_p.key;
        id = of_top_p.id;
    }

    let token = winner(x, &row, &Border { key, id }, &drawing, lowest);
    if UNIT_POS == 0u32 {
        out[drawing.row as usize] = token;
        out[(rows + drawing.row) as usize] = u32::cast_from(nan);
    }
}

/// The largest logit of a row, and 1 if one is NaN.
#[cube]
fn largest<N: Size>(x: &Array<Vector<f32, N>>, first: usize, wide: u32, lowest: f32) -> (f32, f32) {
    let mut top = lowest;
    let mut nan = 0.0f32;
    let mut at = UNIT_POS;
    while at < wide {
        let logits = x[first + at as usize];
        #[unroll]
        for lane in 0..N::value() {
            let logit = logits[lane];
            if is_nan(logit) {
                nan = 1.0f32;
            } else {
                top = max(top, logit);
            }
        }
        at += CUBE_DIM;
    }
    cube_maxima(top, nan)
}

/// The id of a logit in a vector.
#[cube]
fn id_of<N: Size>(vector: u32, #[comptime] lane: usize) -> u32 {
    let n = N::value();
    vector * comptime!(n as u32) + comptime!(lane as u32)
}

/// Whether an id is kept.
#[cube]
fn is_kept(key: u32, id: u32, border: &Border) -> bool {
    key > border.key || (key == border.key && id <= border.id)
}

/// The sum of the weights that are kept.
#[cube]
fn mass<N: Size>(x: &Array<Vector<f32, N>>, row: &Row, border: &Border) -> f32 {
    let mut sum = 0.0f32;
    let mut at = UNIT_POS;
    while at < row.wide {
        let logits = x[row.first + at as usize];
        #[unroll]
        for lane in 0..N::value() {
            if is_kept(key_of(logits[lane]), id_of::<N>(at, lane), border) {
                sum += weight(logits[lane], row.top, row.temperature);
            }
        }
        at += CUBE_DIM;
    }
    cube_sum(sum)
}

/// Keeps the first ids of those that are kept, until their number, or what they weigh (`by_mass`), reaches `share`.
#[cube]
fn border_at<N: Size>(
    x: &Array<Vector<f32, N>>,
    row: &Row,
    inside: &Border,
    share: f32,
    shared: &mut Shared,
    #[comptime] by_mass: bool,
) -> Border {
    let mut key = 0u32;
    let mut above = 0.0f32;
    let mut here = 0.0f32;
    // A loop, because each copy of its barriers would cost time to compile.
    for round in 0..ROUNDS {
        let shift = (ROUNDS - 1u32 - round) * BITS;
        let (bin, higher, sum) =
            next_bits(x, row, inside, &Found { key, id: 0u32, above, share }, shared, shift, false, by_mass);
        key |= bin << shift;
        above = higher;
        here = sum;
    }
    let mut id = select(key == inside.key, inside.id, ONES.runtime());
    // Of several ids with this logit, the first ones are kept.
    if here > 1.5f32 * weight_of(logit_of(key), row, by_mass) {
        let mut complement = 0u32;
        for round in 0..ROUNDS {
            let shift = (ROUNDS - 1u32 - round) * BITS;
            let found = Found { key, id: complement, above, share };
            let (bin, higher, _) = next_bits(x, row, inside, &found, shared, shift, true, by_mass);
            complement |= bin << shift;
            above = higher;
        }
        id = complement ^ ONES;
    }
    Border { key, id }
}

/// The next bits, from `shift` on, of a border's key or of the complement of its id (`of_id`): those of the last bin that is
/// kept. Also the weight of all ids in front of that bin, and the weight in it.
#[cube]
fn next_bits<N: Size>(
    x: &Array<Vector<f32, N>>,
    row: &Row,
    inside: &Border,
    found: &Found,
    shared: &mut Shared,
    shift: u32,
    #[comptime] of_id: bool,
    #[comptime] by_mass: bool,
) -> (u32, f32, f32) {
    #[unroll]
    for bin in 0..BINS {
        shared.bins[bin * (CUBE_DIM as usize) + UNIT_POS as usize] = 0.0f32;
    }
    let mut at = UNIT_POS;
    while at < row.wide {
        let logits = x[row.first + at as usize];
        #[unroll]
        for lane in 0..N::value() {
            let key = key_of(logits[lane]);
            let id = id_of::<N>(at, lane);
            let mut word = key;
            let mut bits = found.key;
            let mut is_here = is_kept(key, id, inside);
            if comptime!(of_id) {
                word = id ^ ONES;
                bits = found.id;
                is_here = is_here && key == found.key;
            }
            // Two shifts, because a word cannot be shifted by all of its bits at once.
            if is_here && (word >> shift) >> BITS == (bits >> shift) >> BITS {
                let bin = ((word >> shift) & comptime!(BINS as u32 - 1)) as usize;
                shared.bins[bin * (CUBE_DIM as usize) + UNIT_POS as usize] += weight_of(logits[lane], row, by_mass);
            }
        }
        at += CUBE_DIM;
    }
    add_bins(shared);
    last_bin(&shared.sums, found)
}

#[cube]
fn weight_of(logit: f32, row: &Row, #[comptime] by_mass: bool) -> f32 {
    let mut own = 1.0f32;
    if by_mass {
        own = weight(logit, row.top, row.temperature);
    }
    own
}

/// Adds what the units have put into each bin: first its parts, each by a unit, and then these.
#[cube]
fn add_bins(shared: &mut Shared) {
    let parts = (CUBE_DIM as usize) / BINS;
    let unit = UNIT_POS as usize;
    sync_cube();
    // Neighboring units read neighboring words.
    let bin = unit * BINS / (CUBE_DIM as usize);
    let mut at = bin * (CUBE_DIM as usize) + unit - bin * parts;
    let mut sum = 0.0f32;
    #[unroll]
    for _ in 0..BINS {
        sum += shared.bins[at];
        at += parts;
    }
    shared.parts[unit] = sum;
    sync_cube();
    if UNIT_POS < BINS as u32 {
        let mut sum = 0.0f32;
        for part in 0..parts {
            sum += shared.parts[unit * parts + part];
        }
        shared.sums[unit] = sum;
    }
    sync_cube();
}

/// The bin of the last id that is kept, the weight of all ids in front of it, and the weight in it. Each unit finds the same.
#[cube]
fn last_bin(sums: &SharedMemory<f32>, found: &Found) -> (u32, f32, f32) {
    let mut higher = found.above;
    let mut bin = 0u32;
    let mut above = found.above;
    let mut here = 0.0f32;
    #[unroll]
    for n in 0..BINS {
        let now = comptime!(BINS - 1 - n);
        let sum = sums[now];
        // The first bin that holds something is kept in any case.
        if sum > 0.0f32 && (higher < found.share || here == 0.0f32) {
            bin = comptime!(now as u32).runtime();
            above = higher;
            here = sum;
        }
        higher += sum;
    }
    (bin, above, here)
}

/// The id that is kept and has the largest ratio of its weight and its exponential random number.
#[cube]
fn winner<N: Size>(x: &Array<Vector<f32, N>>, row: &Row, border: &Border, drawing: &Drawing, lowest: f32) -> u32 {
    let ids = id_of::<N>(row.wide, 0usize);
    let mut best = 0.0f32;
    let mut best_id = ids;
    let mut random = Array::<u32>::new(4usize);
    let mut at = UNIT_POS;
    while at < row.wide {
        let logits = x[row.first + at as usize];
        let mut weights = Vector::<f32, N>::new(0.0f32);
        let mut sum = 0.0f32;
        #[unroll]
        for lane in 0..N::value() {
            let own = weight(logits[lane], row.top, row.temperature);
            let id = id_of::<N>(at, lane);
            if is_kept(key_of(logits[lane]), id, border) && own >= drawing.min_p {
                weights[lane] = own;
                sum += own;
            }
        }
        if sum > 0.0f32 {
            random_words(id_of::<N>(at, 0usize) / 4u32, drawing, &mut random);
            #[unroll]
            for lane in 0..N::value() {
                let own_id = id_of::<N>(at, lane);
                let ratio = weights[lane] / exponential(random[(own_id % 4u32) as usize]);
                if ratio > best {
                    best = ratio;
                    best_id = own_id;
                }
            }
        }
        at += CUBE_DIM;
    }
    let most = cube_max(best);
    // The smallest id with the largest ratio; ids are exact as f32.
    let own_id = select(best == most && best_id < ids, 0.0f32 - f32::cast_from(best_id), lowest);
    // Of a row of nothing but NaN, no id is the winner.
    u32::cast_from(min(0.0f32 - cube_max(own_id), f32::cast_from(ids - 1u32)))
}

/// A number that is larger for a larger logit. NaN has the smallest.
#[cube]
fn key_of(logit: f32) -> u32 {
    let bits = u32::reinterpret(logit);
    let key = select(bits >> 31u32 == 1u32, bits ^ ONES, bits | 0x8000_0000u32);
    select(is_nan(logit), 0u32, key)
}

/// The logit with this key.
#[cube]
fn logit_of(key: u32) -> f32 {
    f32::reinterpret(select(key >> 31u32 == 1u32, key & 0x7FFF_FFFFu32, key ^ ONES))
}
