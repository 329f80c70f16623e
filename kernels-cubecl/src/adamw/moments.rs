//! Quantised moments: their buffers, codes to values and back.

use super::{
    Chunk, check_chunk,
    table::{Table, loaded_table, nearest, nearest_of_16},
};
use crate::{
    codec::{e2m1_decode, e2m1_encode, e2m1_magnitude, e2m1_nearest, e4m3_magnitude, e4m3_scale},
    error::{KernelError, expect_blocks, expect_len},
    layout::BLOCK,
    reduce::cube_maxima,
};
use cubecl::prelude::*;

/// Values that share one absmax in quantised states.
pub const STATE_BLOCK: usize = 256;

/// The unit of NVFP4 scales for a group whose largest magnitude is 1: it becomes 6 times 448.
pub const NVFP4_UNIT: f32 = 1.0 / 2688.0;

/// A group of NVFP4 moments without a larger magnitude is stored as zeros: the inverse of its scales would overflow. The
/// root of an f32 is zero or larger.
pub const NVFP4_LEAST: f32 = 1e-30;

/// How a quantised moment is coded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Coding {
    /// A byte a value, the place in a table of 256.
    Bytes,
    /// Four bits, the place in a table of 16.
    Nibbles,
    /// Four bits, E2M1, in units of an E4M3 scale for 16 values, of which an f32 for 256 makes the largest 448.
    Nvfp4,
}

impl Coding {
    /// Bits of a code.
    pub fn bits(self) -> usize {
        if self == Self::Bytes { 8 } else { 4 }
    }
}

/// A quantised moment.
pub struct StateArgs<R: Runtime> {
    /// u8: one a value with 8 bits, one a pair (low nibble first) with 4. Of m itself, of the root of v.
    pub codes: ArrayArg<R>,
    /// u8, one E4M3 scale for 16 values, of [`Coding::Nvfp4`]; any u8 buffer for the others, which leave it alone.
    pub scales: ArrayArg<R>,
    /// f32, one for 256 values.
    pub absmax: ArrayArg<R>,
    /// f32, 256 or 16, ascending; any f32 buffer for [`Coding::Nvfp4`], which does not read it.
    pub table: ArrayArg<R>,
}

/// Whether gradient and moments fit `len` weights, and the chunk their blocks.
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
        expect_len(name, "state codes", state.codes.size(), len * coding.bits() / 8)?;
        expect_len(name, "state absmax", state.absmax.size(), len.div_ceil(STATE_BLOCK))?;
        match coding {
            Coding::Nvfp4 => expect_len(name, "state scales", state.scales.size(), len / BLOCK)?,
            _ => expect_len(name, "state table", state.table.size(), 1 << coding.bits())?,
        }
    }
    check_chunk(chunk, len)?;
    match coding {
        Coding::Bytes => {}
        Coding::Nibbles => {
            expect_len(name, "length modulo 4, with 4 bits", len % 4, 0)?;
            expect_len(name, "chunk end modulo 4, with 4 bits", chunk.end % 4, 0)?;
        }
        Coding::Nvfp4 => {
            expect_blocks(name, "length", len)?;
            expect_blocks(name, "chunk end", chunk.end)?;
        }
    }
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

/// Codes that a unit of `width` values reads at once: all of its four-bit ones, as many bytes as `vector`.
pub(super) fn codes_at_once(coding: Coding, vector: usize, width: usize) -> usize {
    if coding == Coding::Bytes { vector } else { width / 2 }
}

/// What turns codes of a moment into values and back.
#[derive(CubeType)]
pub(super) struct Codec {
    /// Of the codings that have one.
    table: ComptimeOption<Table>,
    /// m has a sign; v's root has none, and stays above zero where it is.
    #[cube(comptime)]
    signed: bool,
    #[cube(comptime)]
    coding: Coding,
}

/// The codec of m, signed, or of v's root. Ends on a barrier if there is a table to load.
#[cube]
pub(super) fn codec(table: &Array<f32>, #[comptime] signed: bool, #[comptime] coding: Coding) -> Codec {
    let table = if comptime!(coding == Coding::Nvfp4) {
        ComptimeOption::new_None()
    } else {
        ComptimeOption::new_Some(loaded_table(table, signed, comptime!(coding.bits() as u32)))
    };
    Codec { table, signed, coding }
}

/// Codes of the `width` values of a moment from `first` on, and what they are multiplied by.
#[cube]
pub(super) fn read<C: Size>(
    codes: &Array<Vector<u8, C>>,
    scales: &Array<u8>,
    absmax: &Array<f32>,
    codec: &Codec,
    first: u32,
    #[comptime] width: usize,
) -> (Array<Vector<u8, C>>, f32) {
    let bits = comptime!(codec.coding.bits());
    let size = C::value();
    let parts = comptime!(width * bits / 8 / size);
    let mut out = Array::<Vector<u8, C>>::new(parts);
    #[unroll]
    for part in 0..parts {
        out[part] = codes[(first / comptime!((width / parts) as u32)) as usize + part];
    }
    let top = absmax[(first / 256u32) as usize];
    let scale = if comptime!(codec.coding == Coding::Nvfp4) {
        e4m3_magnitude(u32::cast_from(scales[(first / 16u32) as usize])) * (top * NVFP4_UNIT)
    } else {
        top
    };
    (out, scale)
}

/// Value `i` of what a unit read: of m itself, of v the root.
#[cube]
pub(super) fn decoded<C: Size>(codes: &Array<Vector<u8, C>>, scale: f32, codec: &Codec, #[comptime] i: usize) -> f32 {
    let size = C::value();
    let byte = comptime!(if codec.coding == Coding::Bytes { i } else { i / 2 });
    let bytes = codes[comptime!(byte / size)];
    let byte = u32::cast_from(bytes[comptime!(byte % size)]);
    let value = if comptime!(codec.coding == Coding::Bytes) {
        entry(codec, byte)
    } else {
        let code = (byte >> comptime!((i % 2 * 4) as u32)) & 15u32;
        if comptime!(codec.coding == Coding::Nibbles) {
            entry(codec, code)
        } else if comptime!(codec.signed) {
            e2m1_decode(code)
        } else {
            e2m1_magnitude(code)
        }
    };
    value * scale
}

/// The entry of a code.
#[cube]
fn entry(codec: &Codec, code: u32) -> f32 {
    codec.table.as_ref().unwrap().values[code as usize]
}

/// The largest magnitudes of a moment's 256 values and of the 16 that a unit has a part of.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Tops {
    group: f32,
    block: f32,
}

/// The tops of the new moments, of which a unit has `width` values each. Every unit takes part; `turn` counts the calls.
#[cube]
pub(super) fn tops(
    m: &Array<f32>,
    root: &Array<f32>,
    turn: u32,
    #[comptime] width: usize,
    #[comptime] coding: Coding,
) -> (Tops, Tops) {
    let mut m_own = 0.0f32;
    let mut v_own = 0.0f32;
    #[unroll]
    for i in 0..width {
        m_own = max(m_own, m[i].abs());
        v_own = max(v_own, root[i]);
    }
    if comptime!(coding == Coding::Nvfp4) {
        // Two units share a block. Turns alternate, so that a late reader keeps its own.
        let mut shared = SharedMemory::<f32>::new(128usize);
        let told = turn % 2u32 * 64u32 + UNIT_POS;
        shared[told as usize] = m_own;
        shared[(told + 32u32) as usize] = v_own;
        let (m_group, v_group) = cube_maxima(m_own, v_own);
        let m_block = max(m_own, shared[(told ^ 1u32) as usize]);
        let v_block = max(v_own, shared[((told ^ 1u32) + 32u32) as usize]);
        (Tops { group: m_group, block: m_block }, Tops { group: v_group, block: v_block })
    } else {
        let (m_group, v_group) = cube_maxima(m_own, v_own);
        (Tops { group: m_group, block: m_own }, Tops { group: v_group, block: v_own })
    }
}

/// Stores a unit's `width` values of a new moment from `first` on. The first unit of a block of 16 stores its scale, the
/// first of all the group's maximum.
#[cube]
pub(super) fn store<C: Size>(
    codes: &mut Array<Vector<u8, C>>,
    scales: &mut Array<u8>,
    absmax: &mut Array<f32>,
    values: &Array<f32>,
    tops: Tops,
    codec: &Codec,
    first: u32,
    #[comptime] width: usize,
) {
    let inverse = if comptime!(codec.coding == Coding::Nvfp4) {
        let (byte, unit) = nvfp4_scale(tops, comptime!(codec.signed));
        if UNIT_POS & 1u32 == 0u32 {
            scales[(first / 16u32) as usize] = u8::cast_from(byte);
        }
        select(unit > 0.0f32, 1.0f32 / unit, 0.0f32)
    } else {
        1.0f32 / select(tops.group > 0.0f32, tops.group, 1.0f32)
    };
    let bits = comptime!(codec.coding.bits());
    let size = C::value();
    let parts = comptime!(width * bits / 8 / size);
    #[unroll]
    for part in 0..parts {
        let mut bytes = Vector::<u8, C>::empty();
        #[unroll]
        for i in 0..size {
            let at = comptime!((part * size + i) * 8 / bits);
            let mut byte = encoded(values[at] * inverse, values[at], codec);
            if comptime!(bits == 4) {
                byte |= encoded(values[at + 1] * inverse, values[at + 1], codec) << 4u32;
            }
            bytes[i] = u8::cast_from(byte);
        }
        codes[(first / comptime!((width / parts) as u32)) as usize + part] = bytes;
    }
    if UNIT_POS == 0u32 {
        absmax[(first / 256u32) as usize] = tops.group;
    }
}

/// The E4M3 scale of a block of 16 in a group, and the unit of its codes. v's is above zero where a root is.
#[cube]
fn nvfp4_scale(tops: Tops, #[comptime] signed: bool) -> (u32, f32) {
    let full = select(tops.group >= NVFP4_LEAST, 448.0f32 / tops.group, 0.0f32);
    let scaled = tops.block * full;
    let scaled = if comptime!(signed) {
        scaled
    } else {
        max(scaled, select(tops.block > 0.0f32, comptime!(2.0f32.powi(-9)).runtime(), 0.0f32))
    };
    let (byte, scale) = e4m3_scale(min(scaled, 448.0f32));
    (byte, scale * (tops.group * NVFP4_UNIT))
}

/// The code of a value, `x` of which is what is to be represented: to nearest, with a table the lower at a tie. A root above
/// zero does not become zero.
#[cube]
fn encoded(x: f32, value: f32, codec: &Codec) -> u32 {
    if comptime!(codec.coding == Coding::Nvfp4) {
        if comptime!(codec.signed) {
            e2m1_encode(x)
        } else {
            let least = select(value > 0.0f32, 0.5f32, 0.0f32);
            e2m1_nearest(clamp(x, least, 6.0f32))
        }
    } else {
        let table = codec.table.as_ref().unwrap();
        if comptime!(codec.coding == Coding::Nibbles) {
            nearest_of_16(table, x)
        } else if comptime!(codec.signed) {
            let magnitude = nearest(table, x.abs(), 127u32);
            select(value < 0.0f32, 127u32 - min(magnitude, 127u32), 127u32 + magnitude)
        } else {
            let code = nearest(table, x, 0u32);
            select(value > 0.0f32, max(code, 1u32), code)
        }
    }
}
