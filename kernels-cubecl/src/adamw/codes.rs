//! The NVFP4 codes of a weight, which a step of AdamW can leave for the next forward:
//! ```text
//! for each block of values { step; scale by the held largest magnitude of the weight; codes }      // the plain loop
//! ```
//! The held magnitude is that of the weight before the step. If the new weight has the same one, to the bit, these codes are
//! those of [`crate::quantize`]. Otherwise the weight has to be quantized again ([`crate::quantize::renew()`]). How rarely the
//! largest bf16 number of a weight moves depends on the learning rate: an update is about as large as the rate, and bf16
//! numbers around 0.1 are 0.0005 apart.
//!
//! Saves reading the weight twice. A unit has eight values, so that two units share a block of 16. The 16 rows of a 16x16 block
//! have a plane each, and exchange their largest magnitudes through shared memory.

use super::{
    Chunk,
    moments::{CubeDivision, Division},
};
use crate::{
    codec::e2m1_word,
    error::{KernelError, expect_len, require},
    layout::{scale_index, word_index},
    operands::PackedArgs,
    quantize::{AMAX_LEN, BlockShape, for_codes, infinity_if_nan, two_level_scale},
    reduce::cube_max,
};
use cubecl::prelude::*;

/// The codes that a step leaves of the weight that it writes.
pub struct CodesArgs<R: Runtime> {
    /// The codes and block scales of the weight, which the step writes. The tensor scale stays as it is.
    pub packed: PackedArgs<R>,
    /// f32, 3: what [`crate::quantize::amax()`] found in the weight before the step.
    pub held: ArrayArg<R>,
    /// f32: where the step leaves partial maxima of the new weight, [`maxima_len()`] of them.
    pub maxima: ArrayArg<R>,
    /// Which values share a scale.
    pub block: BlockShape,
}

/// The number of partial maxima that a step over a whole `rows` x `cols` matrix leaves with its codes. `None` if the device, or the
/// matrix, does not suit the kernel: 16x16 blocks need whole blocks of 256 moments in a row, and planes of 32 units.
pub fn maxima_len<R: Runtime>(client: &ComputeClient<R>, rows: usize, cols: usize, block: BlockShape) -> Option<usize> {
    let division = Division::of_codes(client, rows, cols, block)?;
    Some(division.planes(whole(rows * cols)))
}

/// The chunk that is the whole tensor.
fn whole(len: usize) -> Chunk {
    Chunk { start: 0, end: len }
}

impl<R: Runtime> CodesArgs<R> {
    /// How a launch that leaves codes divides the matrix.
    ///
    /// # Errors
    /// If a buffer does not fit, if the chunk is not the whole matrix, or if the matrix does not suit the kernel.
    pub(super) fn division(
        &self,
        client: &ComputeClient<R>,
        kernel: &'static str,
        len: usize,
        chunk: Chunk,
    ) -> Result<Division, KernelError> {
        let PackedArgs { rows, cols, .. } = self.packed;
        self.packed.check(kernel)?;
        expect_len(kernel, "held", self.held.size(), AMAX_LEN)?;
        require(kernel, rows * cols == len && chunk == whole(len), || {
            format!("codes of {rows}x{cols} values for the chunk from {} to {} of {len}", chunk.start, chunk.end)
        })?;
        let division = Division::of_codes(client, rows, cols, self.block);
        let division = division.ok_or(KernelError::Shape {
            kernel,
            reason: format!("no codes in blocks of {:?} are left for {rows}x{cols} values", self.block),
        })?;
        expect_len(kernel, "maxima", self.maxima.size(), division.planes(chunk))?;
        Ok(division)
    }

    /// The buffers as the kernel takes them.
    pub(super) fn launch(self) -> CodesBuffersLaunch<R> {
        CodesBuffersLaunch::new(self.packed.codes, self.packed.scales, self.held, self.maxima)
    }
}

/// [`CodesArgs`] on the device.
#[derive(CubeType, CubeLaunch)]
pub(super) struct CodesBuffers {
    codes: Array<u32>,
    scales: Array<u8>,
    held: Array<f32>,
    maxima: Array<f32>,
}

/// Stores the codes of a unit's eight new weights, which begin at `first`; a unit that is not `live` takes part in the exchange
/// only. All units of a cube that exchange through shared memory agree on calling this, and count the same turns. Returns the
/// largest magnitude of the eight.
#[cube]
pub(super) fn leave_codes<Weight: Float, Weights: Size>(
    to: &mut CodesBuffers,
    written: &Array<Vector<Weight, Weights>>,
    first: u32,
    turn: u32,
    live: bool,
    #[comptime] cubes: CubeDivision,
) -> f32 {
    let mut sum = 0.0f32;
    let mut top = 0.0f32;
    let size = Weights::value();
    let mut weights = Array::<f32>::new(8usize);
    #[unroll]
    for i in 0..8usize {
        let vector = written[comptime!(i / size)];
        weights[i] = f32::cast_from(vector[comptime!(i % size)]);
        sum += weights[i];
        top = max(top, weights[i].abs());
    }
    let amax = amax_of_block(top, turn, cubes);
    let (byte, encode) = two_level_scale(amax, to.held[1], to.held[2]);
    let scaled = for_codes(&weights, sum, amax, encode, 8usize);
    if live {
        // The matrix is contiguous, so its words and scales are those of one long row.
        let none = Array::<u32>::new(1usize);
        to.codes[word_index(0u32, first, 8u32)] = e2m1_word(&scaled, 0usize, &none, 1usize, false);
        if UNIT_POS & 1u32 == 0u32 {
            to.scales[scale_index(0u32, first, 16u32)] = u8::cast_from(byte);
        }
    }
    infinity_if_nan(top, sum)
}

/// The largest magnitude of the block in which a unit's values lie, of which `top` is that of its own. What is exchanged through
/// shared memory has two sets of places, which take turns, so that a unit that reads late still finds its own.
#[cube]
fn amax_of_block(top: f32, turn: u32, #[comptime] cubes: CubeDivision) -> f32 {
    if comptime!(cubes.at_once == 1) {
        let mut tops = SharedMemory::<f32>::new(comptime!(2 * cubes.units() as usize));
        let own = turn % 2u32 * comptime!(cubes.units()) + UNIT_POS;
        tops[own as usize] = top;
        sync_cube();
        max(top, tops[(own ^ 1u32) as usize])
    } else {
        let mut amax = max(top, plane_shuffle_xor(top, 1u32));
        if comptime!(cubes.tiles) {
            // Two units share a column of blocks, and each row of a block is that of a plane.
            let mut tops = SharedMemory::<f32>::new(comptime!(cubes.units() as usize * cubes.at_once));
            let columns = comptime!(cubes.units() / 2);
            let (row, column) = (UNIT_POS / comptime!(cubes.units()), UNIT_POS % comptime!(cubes.units()) / 2u32);
            let set = turn % 2u32 * comptime!(columns * cubes.at_once as u32);
            if UNIT_POS & 1u32 == 0u32 {
                tops[(set + row * columns + column) as usize] = amax;
            }
            sync_cube();
            #[unroll]
            for line in 0..comptime!(cubes.at_once as u32) {
                amax = max(amax, tops[(set + line * columns + column) as usize]);
            }
        }
        amax
    }
}

/// Stores the largest magnitude of all weights that a plane has written, or a cube where a block has one. `largest` is a unit's
/// own.
#[cube]
pub(super) fn leave_maximum(to: &mut CodesBuffers, largest: f32, allowed: bool, #[comptime] cubes: CubeDivision) {
    // A step that writes nothing leaves the weight and its largest magnitude as they are.
    let own = select(allowed, largest, to.held[0]);
    let top = if comptime!(cubes.at_once > 1) { plane_max(own) } else { cube_max(own) };
    let cube = CUBE_POS_Y * CUBE_COUNT_X + CUBE_POS_X;
    let at = cube * comptime!(cubes.at_once as u32) + UNIT_POS / comptime!(cubes.units());
    let unit = UNIT_POS % comptime!(cubes.units());
    if unit == 0u32 && (at as usize) < to.maxima.len() {
        to.maxima[at as usize] = top;
    }
}
