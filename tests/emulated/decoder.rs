//! A transformer block in one launch, against the same steps one by one in f64. Numbers are rounded to 16 and 4 bits at the same
//! places, and sums that differ in their last bits may round to neighbors there: results agree within a share of their size.

use super::gpu::{BF16, Data, F32, Gpu, PackedData};
use crate::support::Random;
use backend_nvfp4::reference;
use half::bf16;
use kernels_cubecl::{
    cuda_text::decoder::{
        ActivationRounding, Caches, DecoderBlock, DecoderShape, PAGE, Scratch, Weight, decoder_block,
    },
    device::processors,
};
use std::ops::Range;

/// Everything about a launch that its text depends on, and the pasts of its tokens.
#[derive(Debug, Clone)]
pub(super) struct Case {
    shape: DecoderShape,
    pasts: Vec<usize>,
    packed: bool,
    rounded: ActivationRounding,
    cubes: usize,
    /// The size of keys in the caches. Of large ones, a few have nearly all the weight.
    keys: f64,
    /// How caches keep their numbers.
    kept: Kept,
}

/// How caches keep their numbers.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kept {
    Bf16,
    Bytes,
}

impl Kept {
    /// The number that a cache keeps of this one.
    fn number(self, x: f64) -> f64 {
        match self {
            Self::Bf16 => round(x),
            Self::Bytes => f64::from(reference::e4m3_decode(reference::e4m3_encode(x as f32))),
        }
    }
}

const SHAPE: DecoderShape =
    DecoderShape { hidden: 256, intermediate: 512, heads: 4, kv_heads: 2, head_dim: 64, eps: 1e-6 };

/// One token whose keys are in two shares.
pub(super) fn one(packed: bool, rounded: ActivationRounding) -> Case {
    Case { shape: SHAPE, pasts: vec![70], packed, rounded, cubes: 3, keys: 1.0, kept: Kept::Bf16 }
}

/// One token with so many keys that a warp takes several times 16 of them.
pub(super) fn long() -> Case {
    let shape = DecoderShape { heads: 4, kv_heads: 1, ..SHAPE };
    Case {
        shape,
        pasts: vec![5000],
        packed: false,
        rounded: ActivationRounding::Not,
        cubes: 3,
        keys: 5.0,
        kept: Kept::Bf16,
    }
}

/// Two tokens with packed weights, whose caches hold E4M3 bytes. The keys of the first are in two shares.
pub(super) fn bytes() -> Case {
    Case { kept: Kept::Bytes, pasts: vec![70, 3], ..one(true, ActivationRounding::Not) }
}

/// 1, 2, 4, 8 and 16 places for tokens, short and long pasts, every way to round activations, packed and dense weights, and
/// activations that do not fit into shared memory at once.
pub(super) fn every(gpu: &Gpu) {
    for rounded in [ActivationRounding::Not, ActivationRounding::EachRow, ActivationRounding::By { full: 700.0 }] {
        expect(gpu, &one(true, rounded));
    }
    expect(gpu, &one(false, ActivationRounding::Not));
    expect(gpu, &long());
    expect(gpu, &bytes());
    expect(gpu, &Case { kept: Kept::Bytes, ..long() });
    let wide = DecoderShape { heads: 6, kv_heads: 1, head_dim: 128, ..SHAPE };
    for kept in [Kept::Bf16, Kept::Bytes] {
        let wide = Case { shape: wide, pasts: vec![0, 131], cubes: 5, kept, ..one(true, ActivationRounding::Not) };
        expect(gpu, &wide);
    }
    let small = DecoderShape { heads: 4, kv_heads: 4, ..SHAPE };
    expect(gpu, &Case { shape: small, pasts: vec![3, 0, 40], cubes: 2, ..one(true, ActivationRounding::Not) });
    let many = DecoderShape { heads: 16, kv_heads: 1, ..SHAPE };
    expect(gpu, &Case { shape: many, pasts: vec![83], ..one(true, ActivationRounding::Not) });
    expect(gpu, &Case { shape: small, pasts: vec![3, 0, 40], cubes: 2, ..one(true, ActivationRounding::EachRow) });
    for (packed, rounded) in [(false, ActivationRounding::Not), (true, ActivationRounding::By { full: 700.0 })] {
        expect(gpu, &Case { pasts: vec![9, 0, 66, 1, 64], ..one(packed, rounded) });
    }
    // The shared memory of a smaller GPU has no room for the columns of nine tokens.
    if gpu.arch != 121 {
        let long = DecoderShape { intermediate: 4352, ..SHAPE };
        let pasts = (0..9).map(|n| n * 9).collect();
        expect(gpu, &Case { shape: long, pasts, cubes: 4, ..one(true, ActivationRounding::EachRow) });
    }
}

/// Cubes that wait for each other must all run: more than the device has processors are refused.
pub(super) fn in_too_many_cubes(gpu: &Gpu) {
    let case = Case { cubes: processors(&gpu.client) + 1, ..one(true, ActivationRounding::Not) };
    let refused = Inputs::new(gpu, &case).launch(gpu, &case, 0..1).unwrap_err();
    assert!(refused.contains("101 cubes wait for each other, and only 100 are certain"), "{refused}");
}

/// The bits of a token are the same in a launch for nine, whose activations do not fit into shared memory at once, and alone, where
/// they do. The weights make sums become large, and end with what takes the large part away again: then the order of the terms
/// shows in the results.
pub(super) fn beside_others_as_alone(gpu: &Gpu) {
    let shape = DecoderShape { intermediate: 4352, ..SHAPE };
    let pasts = (0..9).map(|n| n * 9).collect();
    let case = Case { shape, pasts, cubes: 4, ..one(false, ActivationRounding::Not) };
    let mut inputs = Inputs::new(gpu, &case);
    let mut change = |matrix: usize, change: &dyn Fn(&mut [f64])| {
        let Matrix::Dense(data) = &inputs.matrices[matrix] else { panic!("the case has dense weights") };
        let mut values = data.values.clone();
        change(&mut values);
        inputs.matrices[matrix] = Matrix::Dense(Box::new(gpu.put(&values, BF16)));
    };
    // The last 256 of the columns that `down` reads are those of the first ones.
    let (hidden, cols) = (shape.hidden, shape.intermediate);
    for gate_or_up in [4, 5] {
        change(gate_or_up, &|w: &mut [f64]| w.copy_within(..256 * hidden, (cols - 256) * hidden));
    }
    let large = |row: &mut [f64]| {
        let (first, last) = row.split_at_mut(cols - 256);
        for (added, taken) in first.iter_mut().zip(last) {
            *added *= 65_536.0;
            *taken = -*added;
        }
    };
    change(6, &|w: &mut [f64]| w.chunks_exact_mut(cols).for_each(large));
    let bits = |tokens: Range<usize>| {
        let y = inputs.launch(gpu, &case, tokens).unwrap_or_else(|e| panic!("{e}"));
        y.into_iter().map(f64::to_bits).collect::<Vec<_>>()
    };
    let all = bits(0..9);
    for token in [0, 8] {
        let own = &all[token * hidden..(token + 1) * hidden];
        assert!(bits(token..token + 1) == own, "token {token} has other bits beside eight others");
    }
}

fn expect(gpu: &Gpu, case: &Case) {
    run(gpu, case).unwrap_or_else(|e| panic!("{case:?}: {e}"));
}

/// Launches the case, and compares the result, and what is written to the caches.
pub(super) fn run(gpu: &Gpu, case: &Case) -> Result<(), String> {
    let DecoderShape { hidden, head_dim, .. } = case.shape;
    let inputs = Inputs::new(gpu, case);
    let result = inputs.launch(gpu, case, 0..case.pasts.len())?;
    let Inputs { x, norms, matrices, lines, cosines, sines, rows, caches } = &inputs;
    let (model, mut new) = (Model { case, norms, matrices }, Vec::new());
    for (token, past) in case.pasts.iter().enumerate() {
        let line = lines[token] as usize * head_dim / 2;
        let angle = |table: &Data| table.values[line..line + head_dim / 2].to_vec();
        let past_of = |cache: &Data| -> Vec<f64> {
            (0..*past).flat_map(|n| &cache.values[rows.of_token(token, n)]).copied().collect()
        };
        let exact = model.token(
            &x.values[token * hidden..(token + 1) * hidden],
            [angle(cosines), angle(sines)],
            caches.each_ref().map(past_of).each_ref().map(Vec::as_slice),
        );
        near(&format!("token {token}"), &result[token * hidden..(token + 1) * hidden], &exact.y)?;
        new.push([exact.key, exact.value]);
    }
    rows.compare(gpu, case, caches, &new)
}

/// The buffers of a case.
struct Inputs {
    x: Data,
    norms: [Data; 4],
    /// q, k, v, o, gate, up and down.
    matrices: Vec<Matrix>,
    /// The line of each token in the tables of angles.
    lines: Vec<u32>,
    cosines: Data,
    sines: Data,
    rows: Rows,
    /// Keys and values.
    caches: [Data; 2],
}

impl Inputs {
    fn new(gpu: &Gpu, case: &Case) -> Self {
        let DecoderShape { hidden, intermediate, heads, kv_heads, head_dim, .. } = case.shape;
        let (tokens, queries, keys) = (case.pasts.len(), heads * head_dim, kv_heads * head_dim);
        let mut random = Random::new(11);
        let x = gpu.normal(&mut random, tokens * hidden, BF16);
        let norms = [hidden, head_dim, head_dim, hidden].map(|len| {
            let values: Vec<f64> = (0..len).map(|_| 1.0 + 0.2 * f64::from(random.normal())).collect();
            gpu.put(&values, F32)
        });
        let matrices = [(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)]
            .into_iter()
            .chain([(intermediate, hidden), (intermediate, hidden), (hidden, intermediate)])
            .map(|(rows, cols)| Matrix::new(gpu, &mut random, rows, cols, case.packed))
            .collect::<Vec<_>>();
        let lines: Vec<u32> = (0..tokens as u32).rev().collect();
        let angles: Vec<f64> = (0..tokens * head_dim / 2).map(|_| f64::from(random.normal())).collect();
        let table = |f: fn(f64) -> f64| gpu.put(&angles.iter().map(|a| f(*a)).collect::<Vec<_>>(), F32);
        let (cosines, sines) = (table(f64::cos), table(f64::sin));
        let rows = Rows::of(case);
        let caches = [case.keys, 1.0].map(|size| rows.cache(gpu, case, || f64::from(random.normal()) * size));
        Self { x, norms, matrices, lines, cosines, sines, rows, caches }
    }

    /// Launches the block for some of the tokens, and returns their results.
    fn launch(&self, gpu: &Gpu, case: &Case, tokens: Range<usize>) -> Result<Vec<f64>, String> {
        let (hidden, count) = (case.shape.hidden, tokens.len());
        let x = gpu.put(&self.x.values[tokens.start * hidden..tokens.end * hidden], BF16);
        let y = gpu.room(count * hidden, BF16);
        let weight = |m: &Matrix| match m {
            Matrix::Packed(w) => Weight::Packed(w.args()),
            Matrix::Dense(w) => Weight::Dense(w.arg()),
        };
        let pages = &self.rows.table()[tokens.start * self.rows.each..tokens.end * self.rows.each];
        let block = DecoderBlock {
            shape: case.shape,
            x: x.arg(),
            y: y.arg(),
            norms: self.norms.each_ref().map(Data::arg),
            rotary: [self.cosines.arg(), self.sines.arg(), gpu.indices(&self.lines[tokens.clone()])],
            weights: std::array::from_fn(|n| weight(&self.matrices[n])),
            rounded: [case.rounded; 4],
            caches: Caches {
                keys: self.caches[0].arg(),
                values: self.caches[1].arg(),
                bytes: case.kept == Kept::Bytes,
                pages: gpu.indices(pages),
                pasts: case.pasts[tokens].to_vec(),
            },
        };
        let scratch = Scratch::new(&gpu.client, case.shape, count);
        decoder_block(&gpu.client, block, &scratch, case.cubes).map_err(|e| e.to_string())?;
        gpu.read(&y)
    }
}

/// Where the keys and values of each token lie. The sequences have pages in turn, the last pages first, and two pages belong to
/// none.
struct Rows {
    tokens: usize,
    /// Pages of each sequence.
    each: usize,
    width: usize,
}

impl Rows {
    fn of(case: &Case) -> Self {
        let each = case.pasts.iter().max().map_or(0, |past| past / PAGE + 1);
        Self { tokens: case.pasts.len(), each, width: case.shape.kv_heads * case.shape.head_dim }
    }

    fn page(&self, token: usize, n: usize) -> usize {
        (self.each - 1 - n) * self.tokens + token + 1
    }

    /// The pages of each sequence.
    fn table(&self) -> Vec<u32> {
        (0..self.tokens).flat_map(|token| (0..self.each).map(move |n| self.page(token, n) as u32)).collect()
    }

    /// The numbers of a sequence's token `n`.
    fn of_token(&self, token: usize, n: usize) -> Range<usize> {
        let first = (self.page(token, n / PAGE) * PAGE + n % PAGE) * self.width;
        first..first + self.width
    }

    /// A cache with numbers for the past of each sequence. What is behind it must not be read.
    fn cache(&self, gpu: &Gpu, case: &Case, mut draw: impl FnMut() -> f64) -> Data {
        let mut values = vec![f64::NAN; (self.each * self.tokens + 2) * PAGE * self.width];
        for (token, past) in case.pasts.iter().enumerate() {
            for at in (0..*past).flat_map(|n| self.of_token(token, n)) {
                values[at] = case.kept.number(draw());
            }
        }
        match case.kept {
            Kept::Bf16 => gpu.put(&values, BF16),
            Kept::Bytes => gpu.put_bytes(&values),
        }
    }

    /// Compares the new key and value of each sequence. No other number of the caches has changed.
    fn compare(&self, gpu: &Gpu, case: &Case, caches: &[Data; 2], new: &[[Vec<f64>; 2]]) -> Result<(), String> {
        for (n, (name, data)) in ["key", "value"].into_iter().zip(caches).enumerate() {
            let stored = gpu.read(data)?;
            let mut others = data.values.clone();
            for (token, past) in case.pasts.iter().enumerate() {
                let own = self.of_token(token, *past);
                // The nearest byte of a number may be another one where the number differs in its last bit.
                let allowed = if case.kept == Kept::Bytes { 0.2 } else { 0.02 };
                within(&format!("new {name} of token {token}"), &stored[own.clone()], &new[token][n], allowed)?;
                others.splice(own.clone(), stored[own].iter().copied());
            }
            for (at, (now, before)) in stored.iter().zip(&others).enumerate() {
                if now.to_bits() != before.to_bits() {
                    return Err(format!("{name} {at} was {before} and is {now}"));
                }
            }
        }
        Ok(())
    }
}

/// An error unless each value is near its exact one, measured by the size of all.
fn near(what: &str, got: &[f64], exact: &[f64]) -> Result<(), String> {
    within(what, got, exact, 0.02)
}

/// An error unless no value is farther from its exact one than this share of the size of all.
fn within(what: &str, got: &[f64], exact: &[f64], allowed: f64) -> Result<(), String> {
    let rms = (exact.iter().map(|x| x * x).sum::<f64>() / exact.len() as f64).sqrt();
    let worst = got
        .iter()
        .zip(exact)
        .map(|(a, b)| (a - b).abs() / rms)
        .fold(0.0, |worst: f64, x| if x.is_nan() { f64::INFINITY } else { worst.max(x) });
    if worst > allowed { Err(format!("{what}: value is wrong by {worst} of the usual size")) } else { Ok(()) }
}

enum Matrix {
    Packed(Box<PackedData>),
    Dense(Box<Data>),
}

impl Matrix {
    /// A matrix whose products with normal numbers have about the size of a normal number.
    fn new(gpu: &Gpu, random: &mut Random, rows: usize, cols: usize, packed: bool) -> Self {
        let size = (cols as f64).sqrt().recip();
        if packed {
            return Self::Packed(Box::new(gpu.packed_by(random, rows, cols, size / 4.0)));
        }
        let values: Vec<f64> = (0..rows * cols).map(|_| f64::from(random.normal()) * size).collect();
        Self::Dense(Box::new(gpu.put(&values, BF16)))
    }

    /// The product with activations, rounded.
    fn times(&self, x: &[f64]) -> Vec<f64> {
        let (values, scale) = match self {
            Self::Packed(w) => (&w.values, w.global.values[0]),
            Self::Dense(w) => (&w.values, 1.0),
        };
        let row = |row: &[f64]| round(row.iter().zip(x).map(|(a, b)| a * b).sum::<f64>() * scale);
        values.chunks_exact(x.len()).map(row).collect()
    }
}

struct Model<'a> {
    case: &'a Case,
    norms: &'a [Data; 4],
    matrices: &'a [Matrix],
}

/// What a token leaves.
struct Exact {
    y: Vec<f64>,
    key: Vec<f64>,
    value: Vec<f64>,
}

impl Model<'_> {
    fn token(&self, x: &[f64], [cosines, sines]: [Vec<f64>; 2], [keys, values]: [&[f64]; 2]) -> Exact {
        let DecoderShape { heads, kv_heads, head_dim, .. } = self.case.shape;
        let n = self.activations(&self.normed(x, 0));
        let [q, k, value] = [0, 1, 2].map(|m: usize| self.matrices[m].times(&n));
        let rotated = |x: &[f64], norm: usize| -> Vec<f64> {
            let head = |head: &[f64]| {
                let n = self.normed(head, norm);
                let half = head_dim / 2;
                let (a, b) = n.split_at(half);
                let first = (0..half).map(|c| round(a[c] * cosines[c] - b[c] * sines[c]));
                first.chain((0..half).map(|c| round(b[c] * cosines[c] + a[c] * sines[c]))).collect::<Vec<_>>()
            };
            x.chunks_exact(head_dim).flat_map(head).collect()
        };
        let kept = |x: Vec<f64>| x.into_iter().map(|x| self.case.kept.number(x)).collect::<Vec<_>>();
        let (q, key, value) = (rotated(&q, 1), kept(rotated(&k, 2)), kept(value));
        let (keys, values) = ([keys, &key[..]].concat(), [values, &value[..]].concat());
        let width = kv_heads * head_dim;
        let head = |h: usize| {
            let own = h / (heads / kv_heads) * head_dim;
            let q = &q[h * head_dim..(h + 1) * head_dim];
            let dot = |k: &[f64]| k[own..own + head_dim].iter().zip(q).map(|(a, b)| a * b).sum::<f64>();
            let scores: Vec<f64> = keys.chunks_exact(width).map(|k| dot(k) / (head_dim as f64).sqrt()).collect();
            let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - most).exp()).collect();
            let total: f64 = weights.iter().sum();
            let mixed = |e: usize| {
                let terms = weights.iter().zip(values.chunks_exact(width)).map(|(w, v)| w * v[own + e]);
                round(terms.sum::<f64>() / total)
            };
            (0..head_dim).map(mixed).collect::<Vec<_>>()
        };
        let mixed: Vec<f64> = (0..heads).flat_map(head).collect();
        let o = self.matrices[3].times(&self.activations(&mixed));
        let h: Vec<f64> = x.iter().zip(&o).map(|(x, o)| round(x + o)).collect();
        let n = self.activations(&self.normed(&h, 3));
        let [gate, up] = [4, 5].map(|m: usize| self.matrices[m].times(&n));
        let gated: Vec<f64> = gate.iter().zip(&up).map(|(g, u)| round(g / (1.0 + (-g).exp()) * u)).collect();
        let down = self.matrices[6].times(&self.activations(&gated));
        Exact { y: h.iter().zip(&down).map(|(h, d)| round(h + d)).collect(), key, value }
    }

    fn normed(&self, x: &[f64], norm: usize) -> Vec<f64> {
        let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        let scale = 1.0 / (mean + f64::from(self.case.shape.eps)).sqrt();
        x.iter().zip(&self.norms[norm].values).map(|(x, w)| round(round(x * scale) * round(*w))).collect()
    }

    fn activations(&self, x: &[f64]) -> Vec<f64> {
        let values: Vec<f32> = x.iter().map(|x| *x as f32).collect();
        let values = match self.case.rounded {
            ActivationRounding::Not => values,
            ActivationRounding::EachRow => reference::rounded_rows(&values, values.len()),
            ActivationRounding::By { full } => reference::rounded_by(&values, values.len(), full),
        };
        values.into_iter().map(|x| round(f64::from(x))).collect()
    }
}

fn round(x: f64) -> f64 {
    bf16::from_f32(x as f32).to_f64()
}
