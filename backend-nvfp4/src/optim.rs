//! AdamW on one tensor: the forms of its master weight and of its moments, and the scalar reference.

use crate::{
    Nvfp4Primitive,
    reference::{
        Packed, code, draw_of, e2m1_decode, e2m1_encode_stochastic, e4m3_decode, e4m3_encode, philox, set_code,
    },
};
use burn::tensor::{
    DType, Int, Shape, Tensor, TensorData,
    backend::Backend,
    ops::{FloatTensor, IntTensor},
};
use kernels_cubecl::{
    adamw::{AdamwStep, Coding, Master, STATE_BLOCK},
    layout::{BLOCK, scales_per_row},
    rng::Stream,
};

/// How the two moments are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StateKind {
    /// f32: 8 bytes a parameter.
    F32,
    /// bf16, rounded stochastically: 4 bytes a parameter.
    Bf16,
    /// 8-bit block-wise with dynamic tables: 2.03 bytes a parameter.
    Int8,
    /// 4-bit block-wise: 1.03 bytes a parameter.
    Int4,
}

impl StateKind {
    /// Name on the command line and in files.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
            Self::Int4 => "int4",
        }
    }

    /// Bytes of both moments of a value.
    pub fn bytes(self) -> f64 {
        match self {
            Self::F32 => 8.0,
            Self::Bf16 => 4.0,
            Self::Int8 => 2.0 + 8.0 / STATE_BLOCK as f64,
            Self::Int4 => 1.0 + 8.0 / STATE_BLOCK as f64,
        }
    }

    /// How codes stand for values, of the quantized kinds.
    pub fn coding(self) -> Option<Coding> {
        match self {
            Self::F32 | Self::Bf16 => None,
            Self::Int8 => Some(Coding::Bytes),
            Self::Int4 => Some(Coding::Nibbles),
        }
    }
}

/// How the master weights of linear layers and embedding are stored. Norms are f32 always.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MasterKind {
    /// f32: 4 bytes a parameter.
    F32,
    /// bf16 and 8 more bits, which only the optimizer reads: 3 bytes.
    Bf16Residual,
    /// bf16 with stochastic rounding: 2 bytes.
    Bf16,
    /// bf16 rounded to nearest, for comparison: small steps are lost.
    Bf16Nearest,
    /// NVFP4 with stochastic rounding: 0.56 bytes; the embedding stays bf16.
    Nvfp4,
}

impl MasterKind {
    /// Name on the command line and in files.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16Residual => "bf16-residual",
            Self::Bf16 => "bf16",
            Self::Bf16Nearest => "bf16-nearest",
            Self::Nvfp4 => "nvfp4",
        }
    }

    /// The form of what is dense.
    pub fn dense(self) -> Master {
        match self {
            Self::F32 => Master::Exact,
            Self::Bf16Residual => Master::Residual,
            Self::Bf16 | Self::Nvfp4 => Master::Stochastic,
            Self::Bf16Nearest => Master::Nearest,
        }
    }
}

/// A master weight as the optimizer updates it.
#[derive(Debug, Clone)]
pub enum MasterWeight<B: Backend> {
    /// Float of any shape.
    Dense {
        /// The values that the model reads: f32, or bf16 for the forms that are (f32 where the device has no bf16).
        w: FloatTensor<B>,
        /// The form.
        master: Master,
        /// U8 `[len]`, of [`Master::Residual`].
        residual: Option<IntTensor<B>>,
    },
    /// NVFP4 codes.
    Packed(Nvfp4Primitive<B>),
}

/// The two moments of one tensor.
#[derive(Debug, Clone)]
pub struct AdamwState<B: Backend> {
    /// How they are stored.
    pub kind: StateKind,
    /// First moment.
    pub m: Moment<B>,
    /// Second moment.
    pub v: Moment<B>,
}

/// A moment.
#[derive(Debug, Clone)]
pub enum Moment<B: Backend> {
    /// Float `[len]`: f32, or bf16 (f32 where the device has none).
    Float(FloatTensor<B>),
    /// A code a value, an f32 absmax for 256 values, and the table that codes index.
    Quantized {
        /// U8 `[len]`, or `[len / 2]` with the even value's code in the low nibble. Of m itself, of the root of v.
        codes: IntTensor<B>,
        /// f32 `[ceil(len / 256)]`.
        absmax: FloatTensor<B>,
        /// f32 `[256]` or `[16]`, ascending.
        table: FloatTensor<B>,
    },
}

impl<B: Backend> AdamwState<B> {
    /// Zero moments for `len` values; `float` is the type of [`StateKind::Bf16`] on this device.
    pub fn zeros(kind: StateKind, len: usize, float: DType, device: &B::Device) -> Self {
        let full = |len: usize, byte: usize| {
            Tensor::<B, 1, Int>::full([len], byte as i64, (device, DType::U8)).into_primitive()
        };
        let absmax = || B::float_zeros(Shape::new([len.div_ceil(STATE_BLOCK)]), device, DType::F32.into());
        let moment = |signed: bool| match kind.coding() {
            None => {
                let dtype = if kind == StateKind::F32 { DType::F32 } else { float };
                Moment::Float(B::float_zeros(Shape::new([len]), device, dtype.into()))
            }
            Some(coding) => {
                let table = table(signed, coding.bits());
                let zero = table.iter().position(|&t| t == 0.0).unwrap_or(0);
                let byte = if coding == Coding::Bytes { zero } else { zero | zero << 4 };
                let codes = full(len * coding.bits() / 8, byte);
                Moment::Quantized { codes, absmax: absmax(), table: floats::<B>(table, device) }
            }
        };
        Self { kind, m: moment(true), v: moment(false) }
    }
}

impl<B: Backend> Moment<B> {
    /// Restores a quantized moment (the first or the second) from its codes and block maxima.
    pub fn from_bytes(kind: StateKind, first: bool, codes: Vec<u8>, absmax: Vec<f32>, device: &B::Device) -> Self {
        let bytes = |bytes: Vec<u8>| {
            let len = bytes.len();
            let data = TensorData::new(bytes, Shape::new([len]));
            let bytes = Tensor::<B, 1, Int>::from_data(data, (device, DType::U8)).into_primitive();
            // CubeCL counts uploaded bytes in 32 bits until a kernel is launched.
            drop(Tensor::<B, 1>::zeros([1], device));
            bytes
        };
        let (codes, absmax) = (bytes(codes), floats::<B>(absmax, device));
        let coding = kind.coding().expect("float moments have no codes");
        let table = table(first, coding.bits());
        Self::Quantized { codes, absmax, table: floats::<B>(table, device) }
    }
}

fn floats<B: Backend>(values: Vec<f32>, device: &B::Device) -> FloatTensor<B> {
    let data = TensorData::new(values.clone(), Shape::new([values.len()]));
    Tensor::<B, 1>::from_data(data, (device, DType::F32)).into_primitive().tensor()
}

/// The table of a moment's codes, ascending. Dynamic (Dettmers et al., arXiv 2110.02861, §2.1): decades below 1, of
/// which decade `i` holds evenly spaced means, twice as many as the one below; signed with both signs and 0; with 1.
/// The 4-bit table of v's root is linear without zero (Li et al., arXiv 2309.01507, §4.1).
pub(crate) fn table(signed: bool, bits: usize) -> Vec<f32> {
    if bits == 4 && !signed {
        return (1..=16).map(|i| i as f32 / 16.0).collect();
    }
    let decades = bits as i32 - 1;
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
    assert_eq!(values.len(), 1 << bits);
    values.into_iter().map(|v| v as f32).collect()
}

/// One AdamW step on host slices with f32 weights and states: the specification of the kernel. All slices are equally
/// long.
pub fn reference_adamw(w: &mut [f32], grad: &[f32], m: &mut [f32], v: &mut [f32], s: AdamwStep) {
    let (rate, root_scale, decay) = (s.lr / s.bias1, 1.0 / s.bias2.sqrt(), 1.0 - s.lr * s.weight_decay);
    for i in 0..w.len() {
        let g = grad[i] * s.grad_scale;
        m[i] = s.beta1 * m[i] + (1.0 - s.beta1) * g;
        v[i] = s.beta2 * v[i] + (1.0 - s.beta2) * g * g;
        let step = rate * m[i] / (v[i].sqrt() * root_scale + s.eps);
        let decayed = w[i] * decay;
        // A step of zero keeps the bits, also those of -0.
        w[i] = if step == 0.0 { decayed } else { decayed - step };
    }
}

/// `x`, value `index` of its tensor, as a master stores it: a value (bf16 but for [`Master::Exact`]) and the residual.
pub fn reference_round(x: f32, index: usize, master: Master, stream: Stream) -> (f32, u8) {
    let bits = x.to_bits();
    if master == Master::Exact || !x.is_finite() {
        return (x, 0);
    }
    let bits = bits
        + match master {
            Master::Stochastic => philox((index / 8) as u32, stream)[index % 8 / 2] >> (index % 2 * 16) & 0xFFFF,
            Master::Nearest => 0x7FFF + (bits >> 16 & 1),
            _ => 0x8080,
        };
    (f32::from_bits(bits & 0xFFFF_0000), (bits >> 8) as u8)
}

/// The f32 that a bf16 value and its residual stand for.
pub(crate) fn reference_unrounded(value: f32, residual: u8) -> f32 {
    f32::from_bits((value.to_bits() + (u32::from(residual) << 8)).wrapping_sub(0x8000))
}

/// Moments as bf16, rounded stochastically with draws of their own.
pub(crate) fn reference_round_states(m: &mut [f32], v: &mut [f32], stream: Stream) {
    let other = Stream { stream: stream.stream ^ 0x8000_0000, ..stream };
    for i in 0..m.len() {
        let draw = philox((i / 4) as u32, other)[i % 4];
        let kept = |x: f32, draw: u32| f32::from_bits((x.to_bits() + draw) & 0xFFFF_0000);
        (m[i], v[i]) = (kept(m[i], draw >> 16), kept(v[i], draw & 0xFFFF));
    }
}

/// Writes the values of an NVFP4 master after a step: each block keeps its scale while its amax lies in the upper half
/// of the scale's reach, else takes the smallest that holds it; codes are rounded stochastically.
pub fn reference_repack(packed: &mut Packed, cols: usize, values: &[f32], stream: Stream) {
    for (b, block) in values.chunks(BLOCK).enumerate() {
        let amax = block.iter().fold(0.0f32, |a, x| a.max(x.abs()));
        let reach = |byte: u8| e4m3_decode(byte) * packed.global * 6.0;
        let old = packed.scales[b];
        let mut scale = old;
        if amax != 0.0 && !(amax <= reach(old) && amax * 2.0 > reach(old)) {
            let near = e4m3_encode((amax / (packed.global * 6.0)).min(448.0));
            scale = if reach(near) < amax { near + 1 } else { near }.min(0x7E);
        }
        packed.scales[b] = scale;
        let unit = e4m3_decode(scale) * packed.global;
        let inverse = if unit > 0.0 { 1.0 / unit } else { 0.0 };
        for (i, &x) in block.iter().enumerate() {
            let at = b * BLOCK + i;
            let word = philox((at / 8) as u32, stream)[at % 8 / 2];
            let new = e2m1_encode_stochastic(x * inverse, draw_of(word, at % 2, 2));
            set_code(&mut packed.codes, at / cols, at % cols, cols, new);
        }
    }
}

/// The values of a packed matrix for the optimizer: `code * (scale * g)`.
pub(crate) fn reference_unpacked(packed: &Packed, rows: usize, cols: usize) -> Vec<f32> {
    let unit = |r: usize, c: usize| e4m3_decode(packed.scales[r * scales_per_row(cols) + c / BLOCK]) * packed.global;
    (0..rows * cols)
        .map(|at| (at / cols, at % cols))
        .map(|(r, c)| e2m1_decode(code(&packed.codes, r, c, cols)) * unit(r, c))
        .collect()
}

/// The values of a quantized moment; of v its root squared.
pub(crate) fn decode_moment(codes: &[u8], absmax: &[f32], table: &[f32], len: usize, root: bool) -> Vec<f32> {
    let four = table.len() == 16;
    (0..len)
        .map(|i| {
            let code = if four { codes[i / 2] >> (i % 2 * 4) & 15 } else { codes[i] };
            let value = table[usize::from(code)] * absmax[i / STATE_BLOCK];
            if root { value * value } else { value }
        })
        .collect()
}

/// Codes and block maxima of a moment, nearest table entries (the lower at a tie); of v its root, and a root above zero
/// stays above zero.
pub(crate) fn encode_moment(values: &[f32], table: &[f32], root: bool) -> (Vec<u8>, Vec<f32>) {
    let stored: Vec<f32> = if root { values.iter().map(|v| v.sqrt()).collect() } else { values.to_vec() };
    let mut codes = vec![0; stored.len()];
    let mut absmax = Vec::with_capacity(stored.len().div_ceil(STATE_BLOCK));
    for (block, codes) in stored.chunks(STATE_BLOCK).zip(codes.chunks_mut(STATE_BLOCK)) {
        absmax.push(encode(block, codes, table));
    }
    if root && table.len() == 256 {
        codes.iter_mut().zip(&stored).for_each(|(code, root)| *code = (*code).max(u8::from(*root > 0.0)));
    }
    if table.len() == 16 {
        codes = codes.chunks(2).map(|pair| pair[0] | pair[1] << 4).collect();
    }
    (codes, absmax)
}

/// Writes the nearest table entries (the lower at a tie) and returns the absmax.
fn encode(values: &[f32], codes: &mut [u8], table: &[f32]) -> f32 {
    let absmax = values.iter().fold(0.0f32, |a, x| a.max(x.abs()));
    let unit = if absmax > 0.0 { absmax } else { 1.0 };
    for (code, &value) in codes.iter_mut().zip(values) {
        let x = value / unit;
        let high = table.partition_point(|&t| t <= x).clamp(1, table.len() - 1);
        let low = high - 1;
        *code = if table[high] - x < x - table[low] { high } else { low } as u8;
    }
    absmax
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_ascending_and_reach_one() {
        for (signed, bits) in [(true, 8), (false, 8), (true, 4), (false, 4)] {
            let table = table(signed, bits);
            assert!(table.windows(2).all(|w| w[0] < w[1]));
            assert_eq!(table.last(), Some(&1.0));
            assert_eq!(table.contains(&0.0), signed || bits == 8);
        }
    }

    #[test]
    fn tiny_second_moments_survive() {
        // A linear table with zero would flush everything below 1/512 of the block's largest value, and m / eps explode.
        let values: Vec<f32> = (0..256).map(|i| 10f32.powf(-12.0 * i as f32 / 255.0)).collect();
        for bits in [8, 4] {
            let table = table(false, bits);
            let (codes, absmax) = encode_moment(&values, &table, true);
            for (back, value) in decode_moment(&codes, &absmax, &table, 256, true).iter().zip(&values) {
                assert!(*back > 0.0, "{value} came back as {back}");
                let exact = bits == 8 && ((back / value).sqrt() - 1.0).abs() < 0.9;
                assert!(exact || bits == 4 && *back >= value * 0.4, "{bits} bits: {value} came back as {back}");
            }
        }
    }

    #[test]
    fn a_residual_gives_24_bits_and_the_value_is_the_nearest_bf16() {
        let stream = Stream { seed: 0, step: 0, stream: 0 };
        for i in 0..20_000u32 {
            let x = f32::from_bits(i.wrapping_mul(0x9E37_79B9) & 0xBFFF_FFFF);
            let (value, residual) = reference_round(x, 0, Master::Residual, stream);
            let back = reference_unrounded(value, residual);
            assert!(back.to_bits().abs_diff(x.to_bits()) <= 128, "{x:e} came back as {back:e}");
            assert!(value.to_bits().abs_diff(x.to_bits()) <= 0x8080);
            assert_eq!(value.to_bits() & 0xFFFF, 0);
        }
        assert_eq!(reference_unrounded(-0.0, 128).to_bits(), (-0.0f32).to_bits());
    }

    #[test]
    fn stochastic_rounding_is_right_in_the_mean() {
        let x = 1.0 + 0.3 / 128.0;
        let draws = 100_000;
        let of = |i| reference_round(x, i, Master::Stochastic, Stream { seed: 3, step: 1, stream: 2 }).0;
        let mean = (0..draws).map(|i| f64::from(of(i))).sum::<f64>() / f64::from(draws as u32);
        assert!((mean - f64::from(x)).abs() < 4e-5, "{mean} for {x}");
        assert_eq!(
            reference_round(f32::NAN, 0, Master::Stochastic, Stream { seed: 0, step: 0, stream: 0 }).0.to_bits(),
            f32::NAN.to_bits()
        );
    }
}
