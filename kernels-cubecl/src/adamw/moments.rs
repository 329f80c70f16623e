//! Quantized moments: 256 values, a block, share an f32 `absmax`, and the code of a value is an index in a table.
//! ```text
//! value = table[code] * absmax                              // decode
//! absmax = max |value| of the block      code = index of the entry nearest to value / absmax      // encode
//! ```
//! The first moment is stored itself, the second as its root.

use super::{
    Buffers, Chunk, Updated, check_chunk,
    table::{Coding, Table, code_of_moment, loaded_table},
};
use crate::{
    error::{KernelError, expect_len, expect_multiple},
    reduce::cube_maxima,
};
use cubecl::prelude::*;

/// Values that share one absmax in quantized moments.
pub const STATE_BLOCK: usize = 256;

/// The buffers of a quantized moment.
pub struct StateArgs<R: Runtime> {
    /// u8: one byte a value with 8 bits, one byte for two values (the first in the low nibble) with 4 bits.
    pub codes: Updated<R>,
    /// f32, one for 256 values.
    pub absmax: Updated<R>,
    /// f32, 256 or 16 values, ascending.
    pub table: ArrayArg<R>,
}

/// The buffers of a quantized moment that a step updates. `Codes` is a vector of bytes.
#[derive(CubeType, CubeLaunch)]
pub(super) struct MomentBuffers<Codes: CubePrimitive> {
    codes: Buffers<Codes>,
    absmax: Buffers<f32>,
}

/// The tables of both moments.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Tables {
    m: Array<f32>,
    v: Array<f32>,
}

impl<R: Runtime> StateArgs<R> {
    /// Both moments as a kernel takes them.
    pub(super) fn launch<Codes: CubePrimitive>(
        [m, v]: [Self; 2],
    ) -> (MomentBuffersLaunch<Codes, R>, MomentBuffersLaunch<Codes, R>, TablesLaunch<R>) {
        (
            MomentBuffersLaunch::new(m.codes.launch(), m.absmax.launch()),
            MomentBuffersLaunch::new(v.codes.launch(), v.absmax.launch()),
            TablesLaunch::new(m.table, v.table),
        )
    }
}

/// Refuses a gradient or moments that do not fit `len` weights, and a chunk that does not fit the blocks.
pub(super) fn check<R: Runtime>(
    name: &'static str,
    grad: &ArrayArg<R>,
    moments: [&StateArgs<R>; 2],
    coding: Coding,
    len: usize,
    chunk: Chunk,
) -> Result<(), KernelError> {
    expect_len(name, "grad", grad.size(), len)?;
    for state in moments {
        state.codes.check(name, "state codes", len * coding.bits() / 8)?;
        state.absmax.check(name, "state absmax", len.div_ceil(STATE_BLOCK))?;
        expect_len(name, "state table", state.table.size(), 1 << coding.bits())?;
    }
    check_chunk(name, chunk, len)?;
    if coding == Coding::Nibbles {
        expect_multiple(name, "length", len, 4)?;
        expect_multiple(name, "end of the chunk", chunk.end, 4)?;
    }
    expect_multiple(name, "start of the chunk", chunk.start, STATE_BLOCK)
}

/// The blocks of 256 values that a launch updates, and the number of them that a cube takes one after another.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Blocks {
    pub(super) start: u32,
    pub(super) end: u32,
    pub(super) per_cube: u32,
}

/// The number of blocks that a cube takes one after another, with the tables it loaded once: 4 to 32, so that a
/// large tensor has about 8,192 cubes.
pub(super) fn blocks_per_cube(chunk: Chunk) -> usize {
    ((chunk.end - chunk.start).div_ceil(STATE_BLOCK) / 8192).clamp(4, 32)
}

/// Cubes for a chunk, whose units take `width` values of a block each.
pub(super) fn block_launch(chunk: Chunk, width: usize) -> (CubeCount, CubeDim) {
    let blocks = (chunk.end - chunk.start).div_ceil(STATE_BLOCK);
    let cubes = blocks.div_ceil(blocks_per_cube(chunk)).max(1) as u32;
    let x = cubes.min(65_535);
    let units = (STATE_BLOCK / width) as u32;
    (CubeCount::Static(x, cubes.div_ceil(x), 1), CubeDim::new_1d(units))
}

/// Bytes of codes that a unit of `width` values reads at once: all of its 4-bit codes, or as many 8-bit codes as
/// `vector`.
pub(super) fn codes_at_once(coding: Coding, vector: usize, width: usize) -> usize {
    if coding == Coding::Bytes { vector } else { width / 2 }
}

/// The tables of the first moment, which is signed, and of the second moment's root. Ends with a barrier.
#[cube]
pub(super) fn loaded_tables(tables: &Tables, #[comptime] coding: Coding) -> (Table, Table) {
    (loaded_table(&tables.m, true, coding), loaded_table(&tables.v, false, coding))
}

/// Loads the codes of the `width` values from `first` on, and the `absmax` of their block.
#[cube]
pub(super) fn read<Codes: Size>(
    moment: &MomentBuffers<Vector<u8, Codes>>,
    table: &Table,
    first: u32,
    #[comptime] width: usize,
) -> (Array<Vector<u8, Codes>>, f32) {
    let bits = comptime!(table.coding.bits());
    let size = Codes::value();
    let parts = comptime!(width * bits / 8 / size);
    let mut out = Array::<Vector<u8, Codes>>::new(parts);
    #[unroll]
    for part in 0..parts {
        out[part] = moment.codes.old[(first / comptime!((width / parts) as u32)) as usize + part];
    }
    (out, moment.absmax.old[(first / comptime!(STATE_BLOCK as u32)) as usize])
}

/// Decodes value `i` of the codes that a unit read: the first moment, or the root of the second.
#[cube]
pub(super) fn decoded<Codes: Size>(
    codes: &Array<Vector<u8, Codes>>,
    absmax: f32,
    table: &Table,
    #[comptime] i: usize,
) -> f32 {
    let size = Codes::value();
    let byte = comptime!(if table.coding == Coding::Bytes { i } else { i / 2 });
    let bytes = codes[comptime!(byte / size)];
    let byte = u32::cast_from(bytes[comptime!(byte % size)]);
    let code =
        if comptime!(table.coding == Coding::Bytes) { byte } else { (byte >> comptime!((i % 2 * 4) as u32)) & 15u32 };
    table.values[code as usize] * absmax
}

/// The `absmax` of the new first moment and of the new root, of which every unit has `width` values.
#[cube]
pub(super) fn block_absmax(m: &Array<f32>, root: &Array<f32>, #[comptime] width: usize) -> (f32, f32) {
    let mut m_own = 0.0f32;
    let mut v_own = 0.0f32;
    #[unroll]
    for i in 0..width {
        m_own = max(m_own, m[i].abs());
        v_own = max(v_own, root[i]);
    }
    cube_maxima(m_own, v_own)
}

/// Encodes and stores a unit's `width` values from `first` on. The first unit of a block stores its `absmax`.
#[cube]
pub(super) fn store<Codes: Size>(
    moment: &mut MomentBuffers<Vector<u8, Codes>>,
    values: &Array<f32>,
    absmax: f32,
    table: &Table,
    first: u32,
    #[comptime] width: usize,
) {
    let inverse = 1.0f32 / select(absmax > 0.0f32, absmax, 1.0f32);
    let bits = comptime!(table.coding.bits());
    let size = Codes::value();
    let parts = comptime!(width * bits / 8 / size);
    #[unroll]
    for part in 0..parts {
        let mut bytes = Vector::<u8, Codes>::empty();
        #[unroll]
        for i in 0..size {
            let at = comptime!((part * size + i) * 8 / bits);
            let mut byte = code_of_moment(values[at], inverse, table);
            if comptime!(bits == 4) {
                byte |= code_of_moment(values[at + 1], inverse, table) << 4u32;
            }
            bytes[i] = u8::cast_from(byte);
        }
        moment.codes.new[(first / comptime!((width / parts) as u32)) as usize + part] = bytes;
    }
    if UNIT_POS == 0u32 {
        moment.absmax.new[(first / comptime!(STATE_BLOCK as u32)) as usize] = absmax;
    }
}
