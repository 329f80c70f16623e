//! AdamW on a flat tensor: its packed states and the scalar reference.

use burn::tensor::{
    DType, Int, Shape, Tensor, TensorData,
    backend::Backend,
    ops::{FloatTensor, IntTensor},
};
use kernels_cubecl::adamw::{AdamwStep, STATE_BLOCK};

/// How the two moments are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StateKind {
    /// f32: 8 bytes a parameter.
    F32,
    /// 8-bit block-wise with dynamic tables: 2.03 bytes a parameter.
    Int8,
}

/// The two moments of one tensor.
#[derive(Debug, Clone)]
pub enum AdamwState<B: Backend> {
    /// Both f32, shaped like the weight.
    F32 {
        /// First moment.
        m: FloatTensor<B>,
        /// Second moment.
        v: FloatTensor<B>,
    },
    /// Both 8-bit.
    Int8 {
        /// First moment.
        m: Moment8<B>,
        /// Second moment.
        v: Moment8<B>,
    },
}

/// An 8-bit moment: a byte a value, an f32 absmax for 256 values, and the table that bytes index.
#[derive(Debug, Clone)]
pub struct Moment8<B: Backend> {
    /// U8 `[len]`: of m itself, of the root of v.
    pub codes: IntTensor<B>,
    /// f32 `[ceil(len / 256)]`.
    pub absmax: FloatTensor<B>,
    /// f32 `[256]`, ascending.
    pub table: FloatTensor<B>,
}

impl<B: Backend> AdamwState<B> {
    /// Zero moments for a tensor of `shape`.
    pub fn zeros(kind: StateKind, shape: Shape, device: &B::Device) -> Self {
        let len = shape.num_elements();
        match kind {
            StateKind::F32 => {
                let zeros = || B::float_zeros(shape.clone(), device, DType::F32.into());
                Self::F32 { m: zeros(), v: zeros() }
            }
            StateKind::Int8 => {
                let bytes = |table: &[f32]| {
                    let zero = table.iter().position(|&t| t == 0.0).expect("tables hold 0") as u8;
                    (vec![zero; len], vec![0.0; len.div_ceil(STATE_BLOCK)])
                };
                let (m, v) = (signed_table(), unsigned_table());
                let (m_bytes, v_bytes) = (bytes(&m), bytes(&v));
                Self::Int8 {
                    m: Moment8::upload(m_bytes.0, m_bytes.1, &m, device),
                    v: Moment8::upload(v_bytes.0, v_bytes.1, &v, device),
                }
            }
        }
    }

    /// Restores 8-bit moments from their bytes and block maxima.
    pub fn from_bytes(m: (Vec<u8>, Vec<f32>), v: (Vec<u8>, Vec<f32>), device: &B::Device) -> Self {
        Self::Int8 {
            m: Moment8::upload(m.0, m.1, &signed_table(), device),
            v: Moment8::upload(v.0, v.1, &unsigned_table(), device),
        }
    }
}

impl<B: Backend> Moment8<B> {
    fn upload(codes: Vec<u8>, absmax: Vec<f32>, table: &[f32; 256], device: &B::Device) -> Self {
        let floats = |values: Vec<f32>| {
            let data = TensorData::new(values.clone(), Shape::new([values.len()]));
            Tensor::<B, 1>::from_data(data, (device, DType::F32)).into_primitive().tensor()
        };
        let len = codes.len();
        let codes = TensorData::new(codes, Shape::new([len]));
        Self {
            codes: Tensor::<B, 1, Int>::from_data(codes, (device, DType::U8)).into_primitive(),
            absmax: floats(absmax),
            table: floats(table.to_vec()),
        }
    }
}

/// The signed dynamic table (Dettmers et al., arXiv 2110.02861, §2.1): seven decades below 1, of
/// which decade `i` holds `2^i` evenly spaced means, both signs, 0 and 1. Ascending.
pub(crate) fn signed_table() -> [f32; 256] {
    table(true)
}

/// The unsigned dynamic table: the sign bit becomes a fraction bit.
pub(crate) fn unsigned_table() -> [f32; 256] {
    table(false)
}

fn table(signed: bool) -> [f32; 256] {
    let mut values = vec![0.0f64, 1.0];
    for decade in 0..7 {
        let count = 1usize << (decade + usize::from(!signed));
        for i in 0..count {
            let edge = |i: usize| 0.1 + 0.9 * i as f64 / count as f64;
            let mean = (edge(i) + edge(i + 1)) / 2.0 * 10f64.powi(decade as i32 - 6);
            values.push(mean);
            if signed {
                values.push(-mean);
            }
        }
    }
    values.sort_by(f64::total_cmp);
    let mut out = [0.0; 256];
    assert_eq!(values.len(), 256);
    out.iter_mut().zip(values).for_each(|(o, v)| *o = v as f32);
    out
}

/// One AdamW step on host slices with f32 states: the specification of the kernel. Returns nothing;
/// all slices are equally long.
pub fn reference_adamw(w: &mut [f32], grad: &[f32], m: &mut [f32], v: &mut [f32], s: AdamwStep) {
    for i in 0..w.len() {
        let g = grad[i] * s.grad_scale;
        m[i] = s.beta1 * m[i] + (1.0 - s.beta1) * g;
        v[i] = s.beta2 * v[i] + (1.0 - s.beta2) * g * g;
        let step = s.lr * ((m[i] / s.bias1) / ((v[i] / s.bias2).sqrt() + s.eps));
        let decayed = w[i] * (1.0 - s.lr * s.weight_decay);
        // A step of zero keeps the bits, also those of -0.
        w[i] = if step == 0.0 { decayed } else { decayed - step };
    }
}

/// The 8-bit form of [`reference_adamw`]: decode a block of 256, step, encode. The second state is the
/// root of v, and a root above zero stays above zero.
pub(crate) fn reference_adamw_8bit(
    w: &mut [f32],
    grad: &[f32],
    m: (&mut [u8], &mut [f32], &[f32]),
    v: (&mut [u8], &mut [f32], &[f32]),
    s: AdamwStep,
) {
    let decode = |codes: &[u8], absmax: f32, table: &[f32]| -> Vec<f32> {
        codes.iter().map(|&c| table[usize::from(c)] * absmax).collect()
    };
    for block in 0..w.len().div_ceil(STATE_BLOCK) {
        let span = block * STATE_BLOCK..((block + 1) * STATE_BLOCK).min(w.len());
        let mut m32 = decode(&m.0[span.clone()], m.1[block], m.2);
        let mut v32 = decode(&v.0[span.clone()], v.1[block], v.2);
        v32.iter_mut().for_each(|r| *r *= *r);
        reference_adamw(&mut w[span.clone()], &grad[span.clone()], &mut m32, &mut v32, s);
        m.1[block] = encode(&m32, &mut m.0[span.clone()], m.2);
        v32.iter_mut().for_each(|v| *v = v.sqrt());
        v.1[block] = encode(&v32, &mut v.0[span.clone()], v.2);
        for (code, root) in v.0[span].iter_mut().zip(&v32) {
            *code = (*code).max(u8::from(*root > 0.0));
        }
    }
}

/// Writes the nearest table entries (the lower at a tie) and returns the absmax.
fn encode(values: &[f32], codes: &mut [u8], table: &[f32]) -> f32 {
    let absmax = values.iter().fold(0.0f32, |a, x| a.max(x.abs()));
    let unit = if absmax > 0.0 { absmax } else { 1.0 };
    for (code, &value) in codes.iter_mut().zip(values) {
        let x = value / unit;
        let high = table.partition_point(|&t| t <= x).clamp(1, 255);
        let low = high - 1;
        *code = if table[high] - x < x - table[low] { high } else { low } as u8;
    }
    absmax
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_have_256_ascending_entries_with_zero_and_one() {
        for table in [signed_table(), unsigned_table()] {
            assert!(table.windows(2).all(|w| w[0] < w[1]));
            assert!(table.contains(&0.0) && table.contains(&1.0));
        }
    }

    #[test]
    fn tiny_second_moments_survive_8_bits() {
        // A linear table would flush everything below 1/512 of the block's largest value.
        let values: Vec<f32> = (0..256).map(|i| 10f32.powf(-6.0 * i as f32 / 255.0)).collect();
        let table = unsigned_table();
        let mut codes = vec![0; 256];
        let absmax = encode(&values, &mut codes, &table);
        for (code, value) in codes.iter().zip(&values) {
            let back = table[usize::from(*code)] * absmax;
            assert!(back > 0.0 && (back / value - 1.0).abs() < 0.9, "{value} came back as {back}");
        }
    }
}
