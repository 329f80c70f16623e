//! Quantized moments: 256 values, a block, share an f32 `absmax`, and the code of a value is an index in a table.
//! ```text
//! value = table[code] * absmax                              // decode
//! absmax = max |value| of the block      code = index of the entry nearest to value / absmax      // encode
//! ```
//! The first moment is stored itself, the second as its root.

use super::{
    Buffers, Chunk, Updated, check_chunk,
    table::{Coding, Table, TableBuffers, TableBuffersLaunch, code_of_moment, loaded_table},
};
use crate::{
    device::{spread, vector_size},
    error::{KernelError, expect_len, expect_multiple, index},
    layout::BLOCK,
    quantize::BlockShape,
    reduce::cube_maxima,
};
use cubecl::{
    ir::{ElemType, UIntKind},
    prelude::*,
};

const BYTE: StorageType = StorageType::Scalar(ElemType::UInt(UIntKind::U8));

/// Values that share one absmax in quantized moments.
pub const STATE_BLOCK: usize = 256;

/// The buffers of a quantized moment.
pub struct StateArgs<R: Runtime> {
    /// u8: one byte a value with 8 bits, one byte for two values (the first in the low nibble) with 4 bits.
    pub codes: Updated<R>,
    /// f32, one for 256 values.
    pub absmax: Updated<R>,
    /// f32: [`Coding::values`].
    pub table: ArrayArg<R>,
    /// u32: [`Coding::search`].
    pub search: ArrayArg<R>,
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
    m: TableBuffers,
    v: TableBuffers,
}

impl<R: Runtime> StateArgs<R> {
    /// Both moments as a kernel takes them.
    pub(super) fn launch<Codes: CubePrimitive>(
        [m, v]: [Self; 2],
    ) -> (MomentBuffersLaunch<Codes, R>, MomentBuffersLaunch<Codes, R>, TablesLaunch<R>) {
        (
            MomentBuffersLaunch::new(m.codes.launch(), m.absmax.launch()),
            MomentBuffersLaunch::new(v.codes.launch(), v.absmax.launch()),
            TablesLaunch::new(TableBuffersLaunch::new(m.table, m.search), TableBuffersLaunch::new(v.table, v.search)),
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
    for (state, signed) in moments.into_iter().zip([true, false]) {
        state.codes.check(name, "state codes", len * coding.bits() / 8)?;
        state.absmax.check(name, "state absmax", len.div_ceil(STATE_BLOCK))?;
        expect_len(name, "state table", state.table.size(), 1 << coding.bits())?;
        expect_len(name, "search of the state table", state.search.size(), coding.bins(signed))?;
    }
    check_chunk(name, chunk, len)?;
    if coding == Coding::Nibbles {
        expect_multiple(name, "length", len, 4)?;
        expect_multiple(name, "end of the chunk", chunk.end, 4)?;
    }
    expect_multiple(name, "start of the chunk", chunk.start, STATE_BLOCK)
}

/// The blocks of 256 values that a launch updates, and how often a cube takes some of them.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Blocks {
    pub(super) start: u32,
    pub(super) end: u32,
    pub(super) turns: u32,
    /// Blocks in a row of the matrix, if a cube takes those of 16 rows; else 1.
    pub(super) across: u32,
}

/// How a launch divides its blocks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Division {
    pub(super) cubes: CubeDivision,
    /// How often a cube takes blocks, with the tables that it has loaded once.
    turns: usize,
    /// As [`Blocks::across`].
    across: usize,
}

/// How a cube divides its blocks: this is compiled into a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct CubeDivision {
    /// Values that a unit takes.
    pub(super) width: usize,
    /// Blocks that a cube takes at a time. Where a plane has as many units as a block, each plane of a cube takes one by itself;
    /// elsewhere the cube has one.
    pub(super) at_once: usize,
    /// Whether the blocks of a cube lie below each other, in 16 rows of a matrix. Otherwise they are neighbors in memory.
    pub(super) tiles: bool,
}

impl CubeDivision {
    /// Units that share a block of moments.
    pub(super) const fn units(self) -> u32 {
        (STATE_BLOCK / self.width) as u32
    }
}

impl Division {
    /// Divides a chunk among units that take `width` values of a block each. A large tensor has 32,768 planes, or 8,192 cubes.
    pub(super) fn new<R: Runtime>(client: &ComputeClient<R>, chunk: Chunk, width: usize) -> Self {
        let planes = planes_take_blocks(client, width);
        let (at_once, launched) = if planes { (8, 32_768) } else { (1, 8192) };
        let turns = (blocks_of(chunk) / launched).max(4);
        Self { cubes: CubeDivision { width, at_once, tiles: false }, turns, across: 1 }
    }

    /// The same for a whole matrix whose codes, in blocks of this shape, are left. `None` if that is not possible.
    pub(super) fn of_codes<R: Runtime>(
        client: &ComputeClient<R>,
        rows: usize,
        cols: usize,
        block: BlockShape,
    ) -> Option<Self> {
        const WIDTH: usize = 8;
        let fits = rows > 0 && cols > 0 && cols.is_multiple_of(BLOCK);
        let division = Self::new(client, Chunk { start: 0, end: rows * cols }, WIDTH);
        match block {
            BlockShape::Row => fits.then_some(division),
            BlockShape::Square => {
                let suits = rows.is_multiple_of(BLOCK) && cols.is_multiple_of(STATE_BLOCK);
                let cubes = CubeDivision { width: WIDTH, at_once: BLOCK, tiles: true };
                let across = cols / STATE_BLOCK;
                (fits && suits && planes_take_blocks(client, WIDTH)).then_some(Self { cubes, across, ..division })
            }
        }
    }

    /// Cubes and units.
    pub(super) fn launch(self, chunk: Chunk) -> (CubeCount, CubeDim) {
        let units = self.cubes.units() as usize * self.cubes.at_once;
        (spread(self.count(chunk)), CubeDim::new_1d(units as u32))
    }

    /// Planes that take blocks, or cubes where a block has one.
    pub(super) fn planes(self, chunk: Chunk) -> usize {
        self.count(chunk) * self.cubes.at_once
    }

    /// Cubes that take blocks.
    fn count(self, chunk: Chunk) -> usize {
        blocks_of(chunk).div_ceil(self.turns * self.cubes.at_once)
    }

    /// The blocks of `chunk` as the kernel `name` takes them.
    pub(super) fn blocks<R: Runtime>(self, name: &'static str, chunk: Chunk) -> Result<BlocksLaunch<R>, KernelError> {
        Ok(BlocksLaunch::new(
            index(name, "chunk start", chunk.start)?,
            index(name, "chunk end", chunk.end)?,
            self.turns as u32,
            self.across as u32,
        ))
    }
}

/// Whether a plane has as many units as a block needs, if each takes `width` values.
fn planes_take_blocks<R: Runtime>(client: &ComputeClient<R>, width: usize) -> bool {
    let hardware = &client.properties().hardware;
    [hardware.plane_size_min, hardware.plane_size_max] == [(STATE_BLOCK / width) as u32; 2]
}

fn blocks_of(chunk: Chunk) -> usize {
    (chunk.end - chunk.start).div_ceil(STATE_BLOCK)
}

/// The bytes of the codes of `width` values that a unit reads at once.
pub(super) fn codes_at_once<R: Runtime>(client: &ComputeClient<R>, coding: Coding, width: usize) -> usize {
    vector_size(client, BYTE, width * coding.bits() / 8)
}

/// The block that a unit takes in a turn of its cube, counted from the chunk's start, and the unit's number in the block.
#[cube]
pub(super) fn block_of_turn(turn: u32, range: &Blocks, #[comptime] cubes: CubeDivision) -> (u32, u32) {
    let units = comptime!(cubes.units());
    let turn = (CUBE_POS_Y * CUBE_COUNT_X + CUBE_POS_X) * range.turns + turn;
    let own = UNIT_POS / units;
    let block = if comptime!(cubes.tiles) {
        (turn / range.across * comptime!(cubes.at_once as u32) + own) * range.across + turn % range.across
    } else {
        turn * comptime!(cubes.at_once as u32) + own
    };
    (block, UNIT_POS % units)
}

/// The tables of the first moment, which is signed, and of the second moment's root. Ends with a barrier.
#[cube]
pub(super) fn loaded_tables(tables: &Tables, #[comptime] coding: Coding) -> (Table, Table) {
    let m = loaded_table(&tables.m, true, coding);
    let v = loaded_table(&tables.v, false, coding);
    sync_cube();
    (m, v)
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

/// The `absmax` of the new first moment and of the new root, of which every unit has `cubes.width` values.
#[cube]
pub(super) fn block_absmax(m: &Array<f32>, root: &Array<f32>, #[comptime] cubes: CubeDivision) -> (f32, f32) {
    let mut m_own = 0.0f32;
    let mut v_own = 0.0f32;
    #[unroll]
    for i in 0..cubes.width {
        m_own = max(m_own, m[i].abs());
        v_own = max(v_own, root[i]);
    }
    if comptime!(cubes.at_once > 1) { (plane_max(m_own), plane_max(v_own)) } else { cube_maxima(m_own, v_own) }
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
    if first & comptime!(STATE_BLOCK as u32 - 1) == 0u32 {
        moment.absmax.new[(first / comptime!(STATE_BLOCK as u32)) as usize] = absmax;
    }
}
