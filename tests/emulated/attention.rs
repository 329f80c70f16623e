//! Attention, its gradient and attention over a cache, against f64.

use super::gpu::{BF16, Data, Exact, F16, F32, Gpu};
use crate::support::Random;
use cubecl::ir::StorageType;
use kernels_cubecl::{
    attention::{self, AttentionShape},
    decode_attention,
};

/// Inputs of one call. Documents begin at `starts`, one for each query.
struct Inputs {
    shape: AttentionShape,
    ty: StorageType,
    q: Data,
    k: Data,
    v: Data,
    starts: Vec<u32>,
}

impl Inputs {
    fn new(gpu: &Gpu, shape: AttentionShape, ty: StorageType, starts: Vec<u32>) -> Self {
        let mut random = Random::new(shape.keys as u64 + shape.head_dim as u64);
        let (nq, nk) = (shape.queries * shape.heads * shape.head_dim, shape.keys * shape.kv_heads * shape.head_dim);
        let mut normal = |len| gpu.normal(&mut random, len, ty);
        let (q, k, v) = (normal(nq), normal(nk), normal(nk));
        Self { shape, ty, q, k, v, starts }
    }

    /// Row of head `head` of token `token` in a buffer of `heads` heads.
    fn row<'a>(&self, values: &'a [f64], heads: usize, token: usize, head: usize) -> &'a [f64] {
        &values[(token * heads + head) * self.shape.head_dim..][..self.shape.head_dim]
    }

    fn kv_head(&self, head: usize) -> usize {
        head / (self.shape.heads / self.shape.kv_heads)
    }

    fn scale(&self) -> f64 {
        1.0 / (self.shape.head_dim as f64).sqrt()
    }

    /// Keys that a query sees.
    fn seen(&self, query: usize) -> std::ops::Range<usize> {
        self.starts[query] as usize..query + self.shape.past + 1
    }

    /// Probabilities of the keys that a query sees, and the logarithm of their sum before they are divided by it.
    fn probabilities(&self, query: usize, head: usize) -> (Vec<f64>, f64) {
        let own = self.row(&self.q.values, self.shape.heads, query, head);
        let score = |key| {
            let key = self.row(&self.k.values, self.shape.kv_heads, key, self.kv_head(head));
            own.iter().zip(key).map(|(a, b)| a * b).sum::<f64>() * self.scale()
        };
        let scores: Vec<f64> = self.seen(query).map(score).collect();
        let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().map(|s| (s - top).exp()).sum();
        (scores.iter().map(|s| (s - top).exp() / sum).collect(), top + sum.ln())
    }

    /// Every query's probabilities: `[T, H]` lists.
    fn all_probabilities(&self) -> Vec<(Vec<f64>, f64)> {
        let heads = self.shape.heads;
        (0..self.shape.queries * heads).map(|at| self.probabilities(at / heads, at % heads)).collect()
    }

    /// Value `at` of the output. Probabilities are rounded to the type of the values.
    fn output(&self, probabilities: &[(Vec<f64>, f64)], at: usize) -> Exact {
        let AttentionShape { heads, kv_heads, head_dim, .. } = self.shape;
        let (row, column) = (at / head_dim, at % head_dim);
        let values = |key| self.row(&self.v.values, kv_heads, key, self.kv_head(row % heads))[column];
        let terms = self.seen(row / heads).zip(&probabilities[row].0).map(|(key, p)| p * values(key));
        self.rounded(Exact::sum(terms.clone(), 1.0), terms.map(f64::abs).sum())
    }

    /// As `exact`, of terms of the given size that were rounded to the type of the operands before. The last term is for
    /// differences that are 0 in f64, such as dP - delta of a query that sees one key: in f32 some 1e-6 is left of them.
    fn rounded(&self, exact: Exact, size: f64) -> Exact {
        Exact { allowed: exact.allowed + 2.0 * size * super::gpu::rounding(self.ty) + 1e-5, ..exact }
    }
}

fn shape(queries: usize, past: usize, [heads, kv_heads, head_dim]: [usize; 3]) -> AttentionShape {
    AttentionShape { queries, keys: queries + past, past, heads, kv_heads, head_dim }
}

/// Documents of the given lengths: where each token's begins, and one past where it ends.
fn documents(lengths: &[usize]) -> (Vec<u32>, Vec<u32>) {
    let (mut starts, mut ends) = (Vec::new(), Vec::new());
    for length in lengths {
        let start = starts.len();
        starts.extend(std::iter::repeat_n(start as u32, *length));
        ends.extend(std::iter::repeat_n((start + length) as u32, *length));
    }
    (starts, ends)
}

/// Head sizes and types.
const FORMS: [(usize, StorageType); 4] = [(64, BF16), (128, BF16), (64, F16), (128, F16)];

fn expect(gpu: &Gpu, done: Result<(), String>) {
    done.unwrap_or_else(|e| panic!("sm_{} {e}", gpu.arch));
}

/// The length of the longest document. In f16 it has a single block, to save time.
fn longest(ty: StorageType, of_many_blocks: usize) -> usize {
    if ty == F16 { 56 } else { of_many_blocks }
}

/// Documents that end within blocks, one of them longer than four blocks in bf16; queries behind a cached prefix.
pub(super) fn forward(gpu: &Gpu) {
    for (head_dim, ty) in FORMS {
        let lengths = [70, 1, longest(ty, 232), 7];
        let tokens = lengths.iter().sum();
        expect(gpu, forward_of(gpu, shape(tokens, 0, [4, 2, head_dim]), ty, documents(&lengths).0));
        expect(gpu, forward_of(gpu, shape(37, 75, [4, 2, head_dim]), ty, vec![0; 37]));
    }
}

/// One document of five blocks, for one head.
pub(super) fn forward_of_one_head(gpu: &Gpu) -> Result<(), String> {
    forward_of(gpu, shape(310, 0, [1, 1, 64]), BF16, vec![0; 310])
}

/// Two documents of more blocks than the ring of the Hopper kernel has stages, for one head. Some queries of the second see no key
/// of their cube's first block.
pub(super) fn forward_of_many_blocks(gpu: &Gpu) -> Result<(), String> {
    forward_of(gpu, shape(650, 0, [1, 1, 64]), BF16, documents(&[200, 450]).0)
}

fn forward_of(gpu: &Gpu, shape: AttentionShape, ty: StorageType, starts: Vec<u32>) -> Result<(), String> {
    let inputs = Inputs::new(gpu, shape, ty, starts);
    let AttentionShape { queries, heads, head_dim, .. } = inputs.shape;
    let exact = inputs.all_probabilities();
    for by in &gpu.instructions {
        let (y, lse) = (gpu.room(queries * heads * head_dim, inputs.ty), gpu.room(queries * heads, F32));
        let qkv = [inputs.q.arg(), inputs.k.arg(), inputs.v.arg()];
        let starts = gpu.indices(&inputs.starts);
        attention::forward(&gpu.client, *by, qkv, starts, y.arg(), lse.arg(), inputs.ty, inputs.shape).unwrap();
        let label = format!("attention by {by:?} {:?} {:?}", inputs.shape, inputs.ty);
        gpu.compare(&label, &y, |at| inputs.output(&exact, at))?;
        gpu.compare(&format!("{label} lse"), &lse, |at| Exact {
            value: exact[at % queries * heads + at / queries].1,
            allowed: 1e-5,
        })?;
    }
    Ok(())
}

/// Gradients over documents that end within blocks, one of them longer than three blocks in bf16.
pub(super) fn backward(gpu: &Gpu) {
    for (head_dim, ty) in FORMS {
        let lengths = [70, 1, longest(ty, 190), 7];
        let tokens = lengths.iter().sum();
        expect(gpu, backward_of(gpu, shape(tokens, 0, [4, 2, head_dim]), ty, documents(&lengths)));
    }
}

/// Gradients of one document of five blocks, for one head.
pub(super) fn backward_of_one_head(gpu: &Gpu) -> Result<(), String> {
    backward_of(gpu, shape(268, 0, [1, 1, 64]), BF16, documents(&[268]))
}

/// Gradients of two documents of more blocks than the rings of the Hopper kernels have stages, for one head.
pub(super) fn backward_of_many_blocks(gpu: &Gpu) -> Result<(), String> {
    backward_of(gpu, shape(650, 0, [1, 1, 64]), BF16, documents(&[70, 580]))
}

fn backward_of(
    gpu: &Gpu,
    shape: AttentionShape,
    ty: StorageType,
    (starts, ends): (Vec<u32>, Vec<u32>),
) -> Result<(), String> {
    let inputs = &Inputs::new(gpu, shape, ty, starts);
    let AttentionShape { queries, heads, kv_heads, head_dim, .. } = inputs.shape;
    let (nq, nk, nl) = (queries * heads * head_dim, queries * kv_heads * head_dim, queries * heads);
    let exact = inputs.all_probabilities();
    let outputs: Vec<f64> = (0..nq).map(|at| inputs.output(&exact, at).value).collect();
    let (y, dy) = (gpu.put(&outputs, inputs.ty), gpu.normal(&mut Random::new(3), nq, inputs.ty));
    let lse = gpu.put(&(0..nl).map(|at| exact[at % queries * heads + at / queries].1).collect::<Vec<_>>(), F32);
    let delta = gpu.room(nl, F32);
    let client = &gpu.client;
    attention::delta(client, dy.arg(), y.arg(), delta.arg(), ty, shape).unwrap();

    let label = format!("{shape:?} {ty:?}");
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let deltas: Vec<f64> = (0..nl)
        .map(|at| {
            let (query, head) = (at / heads, at % heads);
            dot(inputs.row(&dy.values, heads, query, head), inputs.row(&y.values, heads, query, head))
        })
        .collect();
    gpu.compare(&format!("delta of {label}"), &delta, |at| Exact {
        value: deltas[at % queries * heads + at / queries],
        allowed: 1e-4,
    })?;
    // Gradients of the scores, `[T, H]` lists over the keys that a query sees.
    let scores: Vec<Vec<f64>> = (0..nl)
        .map(|at| {
            let (query, head) = (at / heads, at % heads);
            let row = inputs.row(&dy.values, heads, query, head);
            let seen = inputs.seen(query).zip(&exact[at].0);
            seen.map(|(key, p)| {
                p * (dot(row, inputs.row(&inputs.v.values, kv_heads, key, inputs.kv_head(head))) - deltas[at])
            })
            .collect()
        })
        .collect();
    let rounded = |terms: Vec<f64>, factor: f64| {
        let size = terms.iter().map(|t| t.abs()).sum::<f64>() * factor;
        inputs.rounded(Exact::sum(terms.into_iter(), factor), size)
    };
    let of_query = |at: usize| {
        let (row, column) = (at / head_dim, at % head_dim);
        let (query, head) = (row / heads, inputs.kv_head(row % heads));
        let keys = inputs.seen(query).zip(&scores[row]);
        let terms = keys.map(|(key, ds)| ds * inputs.row(&inputs.k.values, kv_heads, key, head)[column]).collect();
        rounded(terms, inputs.scale())
    };
    // What queries of the key's group give to value `at` of dk or dv.
    let given = |at: usize, factors: &dyn Fn(usize, usize) -> f64, rows: &Data| -> Vec<f64> {
        let (row, column) = (at / head_dim, at % head_dim);
        let (key, group) = (row / kv_heads, heads / kv_heads);
        let queries = (key..queries).filter(|query| inputs.seen(*query).contains(&key));
        let pairs =
            queries.flat_map(|query| (row % kv_heads * group..(row % kv_heads + 1) * group).map(move |h| (query, h)));
        pairs
            .map(|(query, head)| {
                let seen = key - inputs.starts[query] as usize;
                factors(query * heads + head, seen) * inputs.row(&rows.values, heads, query, head)[column]
            })
            .collect()
    };
    for by in gpu.instructions.iter().copied() {
        let [dq, dk, dv] = [nq, nk, nk].map(|len| gpu.room(len, inputs.ty));
        let saved = || attention::Saved { q: inputs.q.arg(), k: inputs.k.arg(), v: inputs.v.arg(), lse: lse.arg() };
        let (starts, ends) = (|| gpu.indices(&inputs.starts), gpu.indices(&ends));
        let out = [dk.arg(), dv.arg()];
        attention::backward_kv(client, by, saved(), dy.arg(), delta.arg(), starts(), ends, out, ty, shape).unwrap();
        attention::backward_q(client, by, saved(), dy.arg(), delta.arg(), starts(), dq.arg(), ty, shape).unwrap();
        gpu.compare(&format!("dq by {by:?} of {label}"), &dq, of_query)?;
        gpu.compare(&format!("dv by {by:?} of {label}"), &dv, |at| {
            rounded(given(at, &|row, key| exact[row].0[key], &dy), 1.0)
        })?;
        gpu.compare(&format!("dk by {by:?} of {label}"), &dk, |at| {
            rounded(given(at, &|row, key| scores[row][key], &inputs.q), inputs.scale())
        })?;
    }
    Ok(())
}

/// `count` calls of random shapes: every fifth one with a cached prefix and without gradients, about every hundredth one of up to
/// 1,500 tokens.
pub(super) fn random(gpu: &Gpu, count: usize) {
    let mut random = Random::new(67);
    for case in 0..count {
        let (head_dim, ty) = FORMS[case % 4];
        let [heads, kv_heads] = [[4, 2], [8, 1], [2, 2], [3, 1]][case % 4];
        let heads = [heads, kv_heads, head_dim];
        if case % 5 == 4 {
            let (past, queries) = (1 + random.below(200), 1 + random.below(100));
            let start = random.below(past) as u32;
            expect(gpu, forward_of(gpu, shape(queries, past, heads), ty, vec![start; queries]));
            continue;
        }
        let longest = if case % 101 == 18 { 500 } else { 60 };
        let lengths: Vec<usize> = (0..1 + random.below(3)).map(|_| 1 + random.below(longest)).collect();
        let (shape, documents) = (shape(lengths.iter().sum(), 0, heads), documents(&lengths));
        expect(gpu, forward_of(gpu, shape, ty, documents.0.clone()));
        expect(gpu, backward_of(gpu, shape, ty, documents));
    }
}

/// Several tokens over splits of one block, and one token over a split of four blocks.
pub(super) fn decode(gpu: &Gpu) {
    for (head_dim, ty) in FORMS {
        expect(gpu, decode_of(gpu, shape(3, 197, [8, 2, head_dim]), ty));
    }
    expect(gpu, decode_in_one_split(gpu));
}

/// As many heads as the device takes cubes, so that the keys are not split.
pub(super) fn decode_in_one_split(gpu: &Gpu) -> Result<(), String> {
    decode_of(gpu, shape(1, 229, [264, 264, 64]), BF16)
}

fn decode_of(gpu: &Gpu, shape: AttentionShape, ty: StorageType) -> Result<(), String> {
    let inputs = Inputs::new(gpu, shape, ty, vec![5; shape.queries]);
    let y = gpu.room(shape.queries * shape.heads * shape.head_dim, ty);
    let qkv = [inputs.q.arg(), inputs.k.arg(), inputs.v.arg()];
    let starts = gpu.indices(&inputs.starts);
    decode_attention::decode_attention(&gpu.client, qkv, starts, y.arg(), ty, shape).unwrap();
    let exact = inputs.all_probabilities();
    gpu.compare(&format!("decode attention {shape:?} {ty:?}"), &y, |at| inputs.output(&exact, at))
}
