//! The test of attention against its formula in f64:
//! ```text
//! p = softmax(q kᵀ / sqrt(E)) over the keys that a query sees      y = p v
//! dv = pᵀ dy      ds = p (dy vᵀ - rowsum(p dy vᵀ)) / sqrt(E)      dq = ds k      dk = dsᵀ q
//! ```

use super::products::matrix;
use crate::CliError;
use backend_nvfp4::{AttentionSaved, AttentionSpec, Documents, Nvfp4Kernels, Precision};
use burn::tensor::{Tensor, TensorPrimitive, ops::FloatTensor};
use model_qwen3::weights::to_host;
use std::ops::Range;

/// Number of query heads, of key and value heads, and the size of a head.
const SIZES: [usize; 3] = [2, 1, 128];

/// Tests the forward and the gradients of two documents. They end within blocks of the kernels, which have up to 128 tokens, and
/// one begins in one block and ends in another.
///
/// # Errors
/// If the device fails.
pub(super) fn of_documents<B: Nvfp4Kernels>(
    device: &B::Device,
    precision: Precision,
) -> Result<Option<String>, CliError> {
    let starts: Vec<u32> = [vec![0; 140], vec![140; 60]].concat();
    let tokens = starts.len();
    let documents = Documents::<B>::new(1, 0, starts.clone(), device);
    let spec = spec(precision);
    let dtype = precision.dtype();
    let made = |heads: usize, seed: f32| matrix::<B>([tokens, heads * SIZES[2]], seed, dtype, device);
    let (q, k, v, dy) = (made(SIZES[0], 1.0), made(SIZES[1], 2.0), made(SIZES[1], 3.0), made(SIZES[0], 4.0));
    let seen = |query: usize| starts[query] as usize..query + 1;
    let exact = Exact::of(&Inputs { q: &host(&q)?, k: &host(&k)?, v: &host(&v)?, dy: &host(&dy)? }, seen);
    let [q, k, v, dy] = [q, k, v, dy].map(primitive);
    let (y, lse) = B::attention_saving(q.clone(), k.clone(), v.clone(), &documents, spec);
    let saved = AttentionSaved { q, k, v, y: y.clone(), lse };
    let [dq, dk, dv] = B::attention_backward(saved, dy, &documents, spec);
    for (name, made, sums) in [("y", y, exact.y), ("dq", dq, exact.dq), ("dk", dk, exact.dk), ("dv", dv, exact.dv)] {
        if let Some(wrong) = differing(name, &values_of::<B>(made)?, &sums, precision) {
            return Ok(Some(wrong));
        }
    }
    Ok(None)
}

/// Tests the newest token of a sequence over its cache, which is so long that each part of it has several blocks of 64 keys.
///
/// # Errors
/// If the device fails.
pub(super) fn of_the_newest_token<B: Nvfp4Kernels>(
    device: &B::Device,
    precision: Precision,
) -> Result<Option<String>, CliError> {
    let keys = 20_000;
    let documents = Documents::<B>::new(1, keys - 1, vec![0], device);
    let dtype = precision.dtype();
    let made = |rows: usize, heads: usize, seed: f32| matrix::<B>([rows, heads * SIZES[2]], seed, dtype, device);
    let (q, k, v) = (made(1, SIZES[0], 1.0), made(keys, SIZES[1], 2.0), made(keys, SIZES[1], 3.0));
    let queries = host(&q)?;
    let exact = Exact::of(&Inputs { q: &queries, k: &host(&k)?, v: &host(&v)?, dy: &queries }, |_| 0..keys);
    let [q, k, v] = [q, k, v].map(primitive);
    let y = values_of::<B>(B::cached_attention(q, k, v, &documents, spec(precision)))?;
    Ok(differing("y", &y, &exact.y, precision))
}

fn spec(precision: Precision) -> AttentionSpec {
    let [heads, kv_heads, head_dim] = SIZES;
    AttentionSpec { heads, kv_heads, head_dim, precision }
}

fn primitive<B: Nvfp4Kernels>(x: Tensor<B, 2>) -> FloatTensor<B> {
    x.into_primitive().tensor()
}

/// The values that a tensor has on the device.
fn host<B: Nvfp4Kernels>(x: &Tensor<B, 2>) -> Result<Vec<f64>, CliError> {
    Ok(to_host(x.clone())?.into_iter().map(f64::from).collect())
}

fn values_of<B: Nvfp4Kernels>(x: FloatTensor<B>) -> Result<Vec<f64>, CliError> {
    host(&Tensor::<B, 2>::from_primitive(TensorPrimitive::Float(x)))
}

/// What is wrong with a result, if one of its values is further from its sum than the number format explains.
fn differing(name: &str, made: &[f64], sums: &[Sum], precision: Precision) -> Option<String> {
    if made.len() != sums.len() {
        return Some(format!("its attention is wrong: {name} has {} values instead of {}", made.len(), sums.len()));
    }
    // The result, probabilities and their gradients are rounded to 8 bits.
    let rounding = if precision == Precision::F32 { 1e-5 } else { 2.0 / 256.0 };
    let is_wrong = |(made, sum): &(&f64, &Sum)| {
        let off = (**made - sum.value).abs();
        off.is_nan() || off > rounding * sum.size + 1e-5
    };
    let (made, sum) = made.iter().zip(sums).find(is_wrong)?;
    Some(format!("its attention is wrong: a value of {name} is {made} instead of {}", sum.value))
}

/// A sum, and the sum of the magnitudes of its terms.
#[derive(Clone, Copy, Default)]
struct Sum {
    value: f64,
    size: f64,
}

impl Sum {
    fn add(&mut self, term: f64, size: f64) {
        self.value += term;
        self.size += size;
    }
}

/// The operands in f64, row-major: `q` and `dy` `[M, H*E]`, `k` and `v` `[S, G*E]`.
struct Inputs<'a> {
    q: &'a [f64],
    k: &'a [f64],
    v: &'a [f64],
    dy: &'a [f64],
}

/// The results by the formula.
struct Exact {
    y: Vec<Sum>,
    dq: Vec<Sum>,
    dk: Vec<Sum>,
    dv: Vec<Sum>,
}

impl Exact {
    /// The results for queries that see these keys.
    fn of(inputs: &Inputs, seen: impl Fn(usize) -> Range<usize>) -> Self {
        let [heads, kv_heads, e] = SIZES;
        let sums = |like: &[f64]| vec![Sum::default(); like.len()];
        let mut exact = Self { y: sums(inputs.q), dq: sums(inputs.q), dk: sums(inputs.k), dv: sums(inputs.v) };
        let factor = 1.0 / (e as f64).sqrt();
        for row in 0..inputs.q.len() / e {
            let (query, kv_head) = (row / heads, row % heads / (heads / kv_heads));
            let own = row * e..(row + 1) * e;
            let of = |key: usize| (key * kv_heads + kv_head) * e..(key * kv_heads + kv_head + 1) * e;
            let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
            let weight = |key: usize| (dot(&inputs.q[own.clone()], &inputs.k[of(key)]) * factor).exp();
            let total: f64 = seen(query).map(weight).sum();
            let parts: Vec<_> = seen(query)
                .map(|key| (of(key), weight(key) / total, dot(&inputs.dy[own.clone()], &inputs.v[of(key)])))
                .collect();
            for (key, p, _) in &parts {
                for (at, of_key) in own.clone().zip(key.clone()) {
                    exact.y[at].add(p * inputs.v[of_key], (p * inputs.v[of_key]).abs());
                }
            }
            let mean: f64 = parts.iter().map(|(_, p, dp)| p * dp).sum();
            // A kernel computes the mean from the rounded y.
            let of_y = own.clone().map(|at| (inputs.dy[at] * exact.y[at].value).abs()).sum::<f64>();
            let mean_size: f64 = parts.iter().map(|(_, p, dp)| p * dp.abs()).sum::<f64>() + of_y;
            for (key, p, dp) in parts {
                let (ds, ds_size) = (p * (dp - mean) * factor, p * (dp.abs() + mean_size) * factor);
                for (at, of_key) in own.clone().zip(key) {
                    let [q, k, dy] = [inputs.q[at], inputs.k[of_key], inputs.dy[at]];
                    exact.dq[at].add(ds * k, ds_size * k.abs());
                    exact.dk[of_key].add(ds * q, ds_size * q.abs());
                    exact.dv[of_key].add(p * dy, (p * dy).abs());
                }
            }
        }
        exact
    }
}

#[cfg(test)]
mod tests {
    use super::{super::products::values, *};

    #[test]
    fn a_wrong_value_is_found() {
        let inputs: Vec<Vec<f64>> =
            [2, 1, 1, 2].map(|heads| values(3 * heads * SIZES[2], 1.0).into_iter().map(f64::from).collect()).into();
        let inputs = Inputs { q: &inputs[0], k: &inputs[1], v: &inputs[2], dy: &inputs[3] };
        let sums = Exact::of(&inputs, |query| 0..query + 1).dk;
        let right: Vec<f64> = sums.iter().map(|sum| sum.value).collect();
        for precision in [Precision::F32, Precision::Bf16] {
            let wrong = |made: &[f64]| differing("dk", made, &sums, precision);
            assert_eq!(wrong(&right), None);
            assert!(wrong(&right[1..]).is_some());
            for changed in [f64::NAN, right[5] + 0.1 * sums[5].size + 0.001] {
                let mut made = right.clone();
                made[5] = changed;
                assert!(wrong(&made).is_some_and(|text| text.contains("a value of dk is ")), "{changed}");
            }
        }
    }
}
