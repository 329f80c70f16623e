//! Every kernel at the shapes of Qwen3-4B, timed on whatever device is there.
//!
//! A launch costs some ten microseconds of host time, more than a short kernel runs. So one unit that counts keeps the
//! device busy while the launches are queued behind it; what they add to its time is theirs alone, at the clock that they
//! leave the device (behind a long product, which heats it, short kernels read 5 to 10 % slower). Medians; random data;
//! weights of the decode rows rotate through more than the L2 cache holds. The copy rate is measured first: bytes read
//! plus bytes written.

use crate::{
    KernelError,
    adamw::{self, Coding, Master},
    attention,
    attention::AttentionShape,
    block_scaled,
    column_sums::column_sums,
    cross_entropy::cross_entropy,
    decode_attention::{self, decode_attention},
    dequantize::dequantize,
    device,
    gemv::{Gemv, gemv},
    gradient,
    matmul::PackedArgs,
    mma,
    once::STEP,
    quantize::{self, Block, QuantizeSpec, Rounding, Scaling, View},
    rms_norm,
    rng::Stream,
    rope::{self, RopeShape},
    swiglu,
};
use cubecl::{
    ir::{ElemType, FloatKind},
    prelude::*,
    server::Handle,
};
use std::{cell::OnceCell, time::Instant};

mod products;

const BF16: StorageType = StorageType::Scalar(ElemType::Float(FloatKind::BF16));
const F32: StorageType = StorageType::Scalar(ElemType::Float(FloatKind::F32));
/// Launches in one measurement, of long kernels and of short ones, and measurements.
const LAUNCHES: usize = 24;
const SHORT_LAUNCHES: usize = 192;
const SAMPLES: usize = 7;
/// Seconds below which a kernel is short.
const SHORT: f64 = 100e-6;

/// One measurement.
#[derive(Debug, Clone)]
pub struct Row {
    /// Kernel and variant.
    pub name: String,
    /// Its sizes.
    pub shape: String,
    /// Seconds a call, median.
    pub seconds: f64,
    /// Bytes it must move, for what is bound by memory.
    pub bytes: Option<f64>,
    /// Operations, for what is bound by arithmetic.
    pub operations: Option<f64>,
}

/// The tiers of products with packed operands that a device has: the first that takes a shape makes it.
pub fn tiers<R: Runtime>(client: &ComputeClient<R>) -> Vec<&'static str> {
    let tensor_cores = mma::supported(client, BF16);
    let all = [
        (tensor_cores, "decode, up to 16 rows (gemv)"),
        (tensor_cores && block_scaled::trusted(client), "packed x packed on NVFP4 tensor cores (block_scaled)"),
        (tensor_cores, "dequantise, 16-bit tensor cores (gemm)"),
        (true, "portable (matmul)"),
    ];
    all.into_iter().filter_map(|(there, name)| there.then_some(name)).collect()
}

/// Times the kernels whose name contains `filter`, handing each row to `show` as it is there. The first is the copy.
///
/// # Errors
/// If the device has no bf16 tensor cores or fails.
pub fn run<R: Runtime>(client: &ComputeClient<R>, filter: &str, show: &mut dyn FnMut(Row)) -> Result<(), KernelError> {
    if !mma::supported(client, BF16) {
        return Err(KernelError::Device { reason: "these rows need a device with bf16 tensor cores".into() });
    }
    let bench = Bench::new(client, filter);
    bench.copy(show)?;
    bench.quantisers(show)?;
    bench.small_operations(show)?;
    bench.optimizer(show)?;
    bench.products(show)?;
    bench.attention(show)?;
    bench.decode(show)
}

/// Bytes that are made when a row first asks for them: a filter leaves most rows, and gigabytes, out.
struct Data<'a> {
    handle: OnceCell<Handle>,
    make: Box<dyn Fn() -> Handle + 'a>,
}

impl<'a> Data<'a> {
    fn new<R: Runtime>(client: &'a ComputeClient<R>, bytes: impl Fn() -> Vec<u8> + 'a) -> Self {
        Self { handle: OnceCell::new(), make: Box::new(move || upload(client, &bytes())) }
    }
}

/// CubeCL counts uploaded bytes in 32 bits until a kernel is launched, so one is.
fn upload<R: Runtime>(client: &ComputeClient<R>, bytes: &[u8]) -> Handle {
    let handle = client.create_from_slice(bytes);
    // SAFETY: both buffers hold four words.
    let four = || unsafe { ArrayArg::from_raw_parts(client.empty(16), 4) };
    copy(client, four(), four());
    handle
}

struct Bench<'a, R: Runtime> {
    client: &'a ComputeClient<R>,
    filter: &'a str,
    /// The result of what keeps the device busy while launches are queued.
    counted: Data<'a>,
}

/// Dependent products and sums that take a unit some four milliseconds.
const COUNT: u32 = 1_600_000;

impl<'a, R: Runtime> Bench<'a, R> {
    fn new(client: &'a ComputeClient<R>, filter: &'a str) -> Self {
        Self { client, filter, counted: Data::new(client, || vec![0; 4]) }
    }

    /// bf16 values in [-1, 1).
    fn values(&self, len: usize) -> Data<'a> {
        Data::new(self.client, move || filled(uniform(), len * 2))
    }

    /// Random bytes below 0x7F: valid codes and valid scales.
    fn bytes(&self, len: usize, seed: u32) -> Data<'a> {
        Data::new(self.client, move || filled(codes(seed), len))
    }

    /// These words.
    fn words(&self, words: Vec<u32>) -> Data<'a> {
        Data::new(self.client, move || words.iter().flat_map(|word| word.to_le_bytes()).collect())
    }

    fn arg(&self, data: &Data<'a>, len: usize) -> ArrayArg<R> {
        let handle = data.handle.get_or_init(|| (data.make)()).clone();
        // SAFETY: every length given here is the one its data is made with.
        unsafe { ArrayArg::from_raw_parts(handle, len) }
    }

    fn sync(&self) -> Result<(), KernelError> {
        let done = cubecl::future::block_on(self.client.sync());
        done.map_err(|e| KernelError::Device { reason: format!("{e:?}") })
    }

    fn busy(&self) {
        let (count, dim) = (CubeCount::Static(1, 1, 1), CubeDim::new_1d(1));
        // SAFETY: the buffer holds the one value that is written.
        unsafe { count_kernel::launch_unchecked(self.client, count, dim, self.arg(&self.counted, 1), COUNT) };
    }

    fn time(&self, mut call: impl FnMut(usize) -> Result<(), KernelError>) -> Result<f64, KernelError> {
        // Everything is made and compiled before the first measurement.
        self.busy();
        (0..LAUNCHES).try_for_each(&mut call)?;
        let mut median = |calls: usize| -> Result<f64, KernelError> {
            let mut all = Vec::new();
            for _ in 0..SAMPLES {
                self.sync()?;
                let start = Instant::now();
                self.busy();
                (0..calls).try_for_each(&mut call)?;
                self.sync()?;
                all.push(start.elapsed().as_secs_f64());
            }
            all.sort_by(f64::total_cmp);
            Ok(all[SAMPLES / 2])
        };
        let mut each = |launches: usize| Ok((median(launches)? - median(0)?) / launches as f64);
        match each(LAUNCHES)? {
            seconds if seconds < SHORT => each(SHORT_LAUNCHES),
            seconds => Ok(seconds),
        }
    }

    /// A row, if the filter leaves it in.
    fn row(
        &self,
        show: &mut dyn FnMut(Row),
        name: &str,
        shape: String,
        work: (Option<f64>, Option<f64>),
        call: impl FnMut(usize) -> Result<(), KernelError>,
    ) -> Result<(), KernelError> {
        if name.contains(self.filter) { self.measured(show, name, shape, work, call) } else { Ok(()) }
    }

    fn measured(
        &self,
        show: &mut dyn FnMut(Row),
        name: &str,
        shape: String,
        (bytes, operations): (Option<f64>, Option<f64>),
        call: impl FnMut(usize) -> Result<(), KernelError>,
    ) -> Result<(), KernelError> {
        let seconds = self.time(call)?;
        show(Row { name: name.to_owned(), shape, seconds, bytes, operations });
        Ok(())
    }

    fn copy(&self, show: &mut dyn FnMut(Row)) -> Result<(), KernelError> {
        let len = 1usize << 29;
        let (from, to) = (self.bytes(len, 1), self.bytes(len, 2));
        self.measured(show, "copy", "512 MiB".into(), (Some(2.0 * len as f64), None), |_| {
            copy(self.client, self.arg(&from, len / 4), self.arg(&to, len / 4));
            Ok(())
        })
    }

    fn quantisers(&self, show: &mut dyn FnMut(Row)) -> Result<(), KernelError> {
        let client = self.client;
        let moved = |bytes: f64| (Some(bytes), None);
        let (rows, cols) = (8192usize, 9728usize);
        let n = rows * cols;
        let x = self.values(n);
        let [codes, scales, global, amax] = [n / 2, n / 16, 4, 12].map(|len| self.bytes(len, 3));
        let y = self.bytes(n * 2, 4);
        let stochastic = Rounding::Stochastic(Stream { seed: 1, step: 2, stream: 3 });
        let shape = format!("{rows}x{cols}");
        let dense = View::row_major(rows, cols);
        let across = View::transposed(rows, cols);
        for (name, block, rounding, view, rotated) in [
            ("quantize 1x16", Block::Row, Rounding::Nearest, dense, false),
            ("quantize 16x16", Block::Square, Rounding::Nearest, dense, false),
            ("quantize 1x16 transposed", Block::Row, Rounding::Nearest, across, false),
            ("quantize 1x16 transposed, Hadamard", Block::Row, Rounding::Nearest, across, true),
            ("quantize 1x16 transposed, Hadamard, stochastic", Block::Row, stochastic, across, true),
            ("quantize 1x16 stochastic", Block::Row, stochastic, dense, false),
        ] {
            let spec = QuantizeSpec { scaling: Scaling::Two, block, rounding };
            if name.contains(self.filter) {
                // Of these very values: by another maximum blocks saturate and take a quantiser's careful way.
                let (x, amax) = (self.arg(&x, n), self.arg(&amax, 3));
                if rotated {
                    quantize::amax_rotated(client, x, BF16, view, amax)?;
                } else {
                    quantize::amax(client, x, BF16, 1.0, amax)?;
                }
            }
            self.row(show, name, shape.clone(), moved(n as f64 * 2.5625), |_| {
                let out = (self.arg(&codes, n / 8), self.arg(&scales, n / 16), self.arg(&global, 1));
                let (x, amax) = (self.arg(&x, n), self.arg(&amax, 3));
                quantize::quantize(client, x, BF16, amax, out.0, out.1, out.2, view, spec, rotated)
            })?;
        }
        self.row(show, "amax transposed, Hadamard", shape.clone(), moved(n as f64 * 2.0), |_| {
            quantize::amax_rotated(client, self.arg(&x, n), BF16, across, self.arg(&amax, 3))
        })?;
        self.row(show, "amax", shape.clone(), moved(n as f64 * 2.0), |_| {
            quantize::amax(client, self.arg(&x, n), BF16, 1.0, self.arg(&amax, 3))
        })?;
        self.row(show, "dequantize", shape.clone(), moved(n as f64 * 2.5625), |_| {
            let packed = (self.arg(&codes, n / 8), self.arg(&scales, n / 16));
            dequantize(client, packed.0, packed.1, None, self.arg(&y, n), BF16, rows, cols)
        })?;
        Ok(())
    }

    fn small_operations(&self, show: &mut dyn FnMut(Row)) -> Result<(), KernelError> {
        let client = self.client;
        let moved = |bytes: f64| (Some(bytes), None);
        let (rows, cols) = (8192usize, 9728usize);
        let n = rows * cols;
        let (x, made, shape) = (self.values(n), self.bytes(n * 2, 4), format!("{rows}x{cols}"));
        let (gate, up) = (self.values(n), self.values(n));
        self.row(show, "swiglu", shape.clone(), moved(n as f64 * 6.0), |_| {
            swiglu::swiglu(client, self.arg(&x, n), self.arg(&up, n), self.arg(&made, n), None, BF16)
        })?;
        let codes = [n / 2, n / 16, 4, 12].map(|len| self.bytes(len, 3));
        let maxima = self.bytes(4 * swiglu::maxima_len(client, BF16, n), 5);
        self.row(show, "swiglu, quantize", shape.clone(), moved(n as f64 * 8.5625), |_| {
            let len = swiglu::maxima_len(client, BF16, n);
            let (y, top) = (self.arg(&made, n), self.arg(&maxima, len));
            swiglu::swiglu(client, self.arg(&x, n), self.arg(&up, n), y, Some(top), BF16)?;
            self.coded(&made, &maxima, len, &codes, [rows, cols])
        })?;
        self.row(show, "swiglu backward", shape, moved(n as f64 * 10.0), |_| {
            swiglu::swiglu_backward(client, self.arg(&gate, n), self.arg(&up, n), self.arg(&x, n), BF16)
        })?;
        let (rows, cols) = (16_384usize, 2560usize);
        let n = rows * cols;
        let w = self.words(vec![1.0f32.to_bits(); cols]);
        let parts = rms_norm::partial_rows(client, BF16, [rows, cols]) * cols;
        let partial = self.bytes(parts * 4, 8);
        let shape = format!("{rows}x{cols}");
        self.row(show, "rms_norm", shape.clone(), moved(n as f64 * 4.0), |_| {
            let (x, w, y) = (self.arg(&x, n), self.arg(&w, cols), self.arg(&made, n));
            rms_norm::rms_norm(client, x, w, y, rms_norm::Fused::none(), BF16, [rows, cols], 1e-6)
        })?;
        let len = rms_norm::maxima_len(rows);
        for (name, added, quantised, bytes) in [
            ("rms_norm, quantize", false, true, 6.5625),
            ("residual, rms_norm", true, false, 8.0),
            ("residual, rms_norm, quantize", true, true, 10.5625),
        ] {
            self.row(show, name, shape.clone(), moved(n as f64 * bytes), |_| {
                let (x, w, y) = (self.arg(&x, n), self.arg(&w, cols), self.arg(&made, n));
                let fused = rms_norm::Fused {
                    residual: added.then(|| [self.arg(&up, n), self.arg(&gate, n)]),
                    maxima: quantised.then(|| self.arg(&maxima, len)),
                };
                rms_norm::rms_norm(client, x, w, y, fused, BF16, [rows, cols], 1e-6)?;
                if quantised { self.coded(&made, &maxima, len, &codes, [rows, cols]) } else { Ok(()) }
            })?;
        }
        for (name, so_far, bytes) in [("rms_norm backward", false, 6.0), ("residual, rms_norm backward", true, 8.0)] {
            self.row(show, name, shape.clone(), moved(n as f64 * bytes), |_| {
                let (x, w, dy) = (self.arg(&x, n), self.arg(&w, cols), self.arg(&up, n));
                let (so_far, partial) = (so_far.then(|| self.arg(&gate, n)), self.arg(&partial, parts));
                rms_norm::rms_norm_backward(client, x, w, dy, so_far, partial, BF16, [rows, cols], 1e-6)
            })?;
        }
        let sums = self.bytes(cols * 4, 10);
        self.row(show, "column sums", format!("{}x{cols}", parts / cols), moved(parts as f64 * 4.0), |_| {
            column_sums(client, self.arg(&partial, parts), self.arg(&sums, cols), [parts / cols, cols])
        })?;
        let shape = RopeShape { rows: 8192, heads: 32, head_dim: 128, eps: 1e-6 };
        let n = shape.rows * 4096;
        let table = self.bytes(shape.rows * 64 * 4, 9);
        let positions = self.words((0..shape.rows as u32).collect());
        let parts = shape.partial_rows() * 128;
        let args = || rope::RopeArgs {
            w: self.arg(&w, 128),
            cos: self.arg(&table, shape.rows * 64),
            sin: self.arg(&table, shape.rows * 64),
            positions: self.arg(&positions, shape.rows),
        };
        self.row(show, "norm_rope", "8192x32x128".into(), moved(n as f64 * 4.0), |_| {
            rope::norm_rope(client, self.arg(&x, n), args(), self.arg(&made, n), BF16, shape)
        })?;
        self.row(show, "norm_rope backward", "8192x32x128".into(), moved(n as f64 * 6.0), |_| {
            let (dy, partial) = (self.arg(&up, n), self.arg(&partial, parts));
            rope::norm_rope_backward(client, self.arg(&x, n), args(), dy, partial, BF16, shape)
        })?;
        let (rows, cols) = (1024usize, 151_936usize);
        let (n, targets, loss) = (rows * cols, self.words(vec![0; rows]), self.bytes(rows * 4, 11));
        let logits = self.values(n);
        self.row(show, "cross_entropy", format!("{rows}x{cols}"), moved(n as f64 * 4.0), |_| {
            let (targets, loss) = (self.arg(&targets, rows), self.arg(&loss, rows));
            cross_entropy(client, self.arg(&logits, n), targets, loss, BF16, [rows, cols], true)
        })
    }

    /// Quantises what a kernel made and left `len` maxima of.
    fn coded(
        &self,
        made: &Data<'a>,
        maxima: &Data<'a>,
        len: usize,
        [codes, scales, global, amax]: &[Data<'a>; 4],
        [rows, cols]: [usize; 2],
    ) -> Result<(), KernelError> {
        let n = rows * cols;
        quantize::amax_of_maxima(self.client, self.arg(maxima, len), 1.0, self.arg(amax, 3))?;
        let spec = QuantizeSpec { scaling: Scaling::Two, block: Block::Row, rounding: Rounding::Nearest };
        let out = (self.arg(codes, n / 8), self.arg(scales, n / 16), self.arg(global, 1));
        let (x, view) = (self.arg(made, n), View::row_major(rows, cols));
        quantize::quantize(self.client, x, BF16, self.arg(amax, 3), out.0, out.1, out.2, view, spec, false)
    }

    /// The optimizer's forms that are used most, over four of the largest matrices of a block.
    fn optimizer(&self, show: &mut dyn FnMut(Row)) -> Result<(), KernelError> {
        let client = self.client;
        let moved = |bytes: f64| (Some(bytes), None);
        let n = 9728 * 2560 * 4;
        let [w, g, m, v, absmax, table] = [1, 2, 3, 4, 5, 6].map(|seed| self.bytes(n * 4, seed));
        let scales = self.bytes(n / 16, 7);
        let shape = format!("{n}");
        let chunk = adamw::Chunk { start: 0, end: n };
        let grad = || (self.arg(&g, n), F32);
        let dense = |master: Master| adamw::DenseArgs {
            w: self.arg(&w, n),
            dtype: if master == Master::Exact { F32 } else { BF16 },
            residual: self.arg(&m, n),
            master,
        };
        self.row(show, "adamw f32, f32 states", shape.clone(), moved(n as f64 * 28.0), |_| {
            let moments = [self.arg(&m, n), self.arg(&v, n)];
            adamw::adamw_float(client, dense(Master::Exact), grad(), moments, (F32, false), STEP, chunk)
        })?;
        let state = |codes: &Data<'a>, coding: Coding| adamw::StateArgs {
            codes: self.arg(codes, n * coding.bits() / 8),
            scales: self.arg(&scales, n / 16),
            absmax: self.arg(&absmax, n / 256),
            table: self.arg(&table, 1 << coding.bits()),
        };
        for (name, master, coding, bytes) in [
            ("adamw f32, 8-bit states", Master::Exact, Coding::Bytes, 16.0),
            ("adamw bf16 stochastic, 8-bit states", Master::Stochastic, Coding::Bytes, 12.0),
            ("adamw bf16 + residual, 8-bit states", Master::Residual, Coding::Bytes, 14.0),
            ("adamw bf16 stochastic, 4-bit states", Master::Stochastic, Coding::Nibbles, 10.0),
            ("adamw bf16 stochastic, NVFP4 states", Master::Stochastic, Coding::Nvfp4, 10.25),
        ] {
            self.row(show, name, shape.clone(), moved(n as f64 * bytes), |_| {
                adamw::adamw_quantised(
                    client,
                    dense(master),
                    grad(),
                    [state(&m, coding), state(&v, coding)],
                    coding,
                    STEP,
                    chunk,
                )
            })?;
        }
        for (name, coding, bytes) in [
            ("adamw nvfp4, 8-bit states", Coding::Bytes, 9.125),
            ("adamw nvfp4, 4-bit states", Coding::Nibbles, 7.125),
            ("adamw nvfp4, NVFP4 states", Coding::Nvfp4, 7.375),
        ] {
            self.row(show, name, shape.clone(), moved(n as f64 * bytes), |_| {
                let (codes, scales, global) = (self.arg(&w, n / 8), self.arg(&absmax, n / 16), self.arg(&table, 1));
                let w = PackedArgs { codes, scales, global, rows: n / 2560, cols: 2560 };
                adamw::adamw_packed(client, w, grad(), [state(&m, coding), state(&v, coding)], coding, STEP, chunk)
            })?;
        }
        self.row(show, "square_sum", shape.clone(), moved(n as f64 * 4.0), |_| {
            gradient::square_sum(client, self.arg(&g, n), F32, self.arg(&table, 1))
        })?;
        self.row(show, "accumulate bf16 += f32", shape, moved(n as f64 * 8.0), |_| {
            gradient::accumulate(client, (self.arg(&w, n), BF16), (self.arg(&g, n), F32))
        })
    }

    fn attention(&self, show: &mut dyn FnMut(Row)) -> Result<(), KernelError> {
        let client = self.client;
        for t in [2048usize, 4096, 8192] {
            let shape = AttentionShape { queries: t, keys: t, past: 0, heads: 32, kv_heads: 8, head_dim: 128 };
            let (nq, nk, nl) = (t * 4096, t * 1024, t * 32);
            let [q, dy] = [nq, nq].map(|n| self.values(n));
            let [k, v] = [nk, nk].map(|n| self.values(n));
            let [y, dq] = [nq, nq].map(|n| self.bytes(n * 2, 1));
            let [dk, dv] = [nk, nk].map(|n| self.bytes(n * 2, 1));
            let [lse, delta] = [nl, nl].map(|n| self.bytes(n * 4, 1));
            let starts = self.words(vec![0; t]);
            let ends = self.words(vec![t as u32; t]);
            let forward = 2.0 * (t * t) as f64 * 4096.0;
            let label = format!("{t} tokens, 32/8 heads of 128");
            self.row(show, "attention forward", label.clone(), (None, Some(forward)), |_| {
                let qkv = [self.arg(&q, nq), self.arg(&k, nk), self.arg(&v, nk)];
                let (starts, out) = (self.arg(&starts, t), (self.arg(&y, nq), self.arg(&lse, nl)));
                attention::forward(client, qkv, starts, out.0, out.1, BF16, shape)
            })?;
            self.row(show, "attention backward", label, (None, Some(2.5 * forward)), |_| {
                let saved = || attention::Saved {
                    q: self.arg(&q, nq),
                    k: self.arg(&k, nk),
                    v: self.arg(&v, nk),
                    lse: self.arg(&lse, nl),
                };
                let read = || (self.arg(&dy, nq), self.arg(&delta, nl), self.arg(&starts, t));
                attention::delta(client, self.arg(&dy, nq), self.arg(&y, nq), self.arg(&delta, nl), BF16, shape)?;
                let (grad, delta, starts) = read();
                let out = [self.arg(&dk, nk), self.arg(&dv, nk)];
                let ends = self.arg(&ends, t);
                attention::backward_kv(client, saved(), grad, delta, starts, ends, out, BF16, shape)?;
                let (grad, delta, starts) = read();
                attention::backward_q(client, saved(), grad, delta, starts, self.arg(&dq, nq), BF16, shape)
            })?;
        }
        Ok(())
    }

    fn decode(&self, show: &mut dyn FnMut(Row)) -> Result<(), KernelError> {
        let client = self.client;
        for (layer, each, k) in [
            ("lm_head", &[151_936usize][..], 2560usize),
            ("gate+up", &[9728, 9728], 2560),
            ("q+k+v", &[4096, 1024, 1024], 2560),
            ("o", &[2560], 4096),
            ("down", &[2560], 9728),
        ] {
            let (name, n) = (format!("decode {layer}"), each.iter().sum::<usize>());
            let bytes = n * k / 16 * 9;
            let sets = (200_000_000 / bytes).clamp(1, 16);
            let weights: Vec<Vec<_>> = (0..sets as u32)
                .map(|i| {
                    each.iter().map(|n| (self.bytes(n * k / 2, 2 * i + 1), self.bytes(n * k / 16, 2 * i + 2))).collect()
                })
                .collect();
            let one = self.bytes(4, 3);
            for m in [1usize, 2, 4, 8, 16] {
                let (x, ys) = (self.values(m * k), each.iter().map(|n| self.bytes(m * n * 2, 4)).collect::<Vec<_>>());
                self.row(show, &name, format!("M {m}, {n}x{k}"), (Some(bytes as f64), None), |i| {
                    let weight = |(rows, (codes, scales)): (&usize, &(Data<'a>, Data<'a>))| PackedArgs {
                        codes: self.arg(codes, rows * k / 8),
                        scales: self.arg(scales, rows * k / 16),
                        global: self.arg(&one, 1),
                        rows: *rows,
                        cols: k,
                    };
                    let weights = each.iter().zip(&weights[i % sets]).map(weight).collect();
                    let ys = each.iter().zip(&ys).map(|(n, y)| self.arg(y, m * n)).collect();
                    let x = self.arg(&x, m * k);
                    gemv(client, Gemv { x, rows: m, weights, scales: vec![], ys, dtype: BF16 })
                })?;
            }
        }
        let keys = 32_768usize;
        let shape = AttentionShape { queries: 1, keys, past: keys - 1, heads: 32, kv_heads: 8, head_dim: 128 };
        let (q, k, v) = (self.values(4096), self.values(keys * 1024), self.values(keys * 1024));
        let (starts, y) = (self.words(vec![0]), self.bytes(8192, 1));
        let (_, len) = decode_attention::scratch(shape);
        let scratch = self.bytes(len * 4, 2);
        let moved = (Some(keys as f64 * 4096.0), None);
        self.row(show, "decode attention", "1 query, 32768 keys, 32/8 heads of 128".into(), moved, |_| {
            let qkv = [self.arg(&q, 4096), self.arg(&k, keys * 1024), self.arg(&v, keys * 1024)];
            let parts = [self.arg(&scratch, len), self.arg(&scratch, len)];
            decode_attention(client, qkv, self.arg(&starts, 1), parts, self.arg(&y, 4096), BF16, shape)
        })
    }
}

/// bf16 values in [-1, 1).
fn uniform() -> Vec<u8> {
    let mut state = 0x9E37_79B9u32;
    let value = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let value = (state >> 8) as f32 / 8_388_608.0 - 1.0;
        ((value.to_bits() >> 16) as u16).to_le_bytes()
    };
    (0..1 << 20).flat_map(value).collect()
}

/// Bytes below 0x7F.
fn codes(seed: u32) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    let byte = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8 % 0x7F
    };
    (0..1 << 20).map(byte).collect()
}

/// A pattern over and over, `len` bytes of it.
fn filled(pattern: Vec<u8>, len: usize) -> Vec<u8> {
    let mut bytes = pattern.repeat(len.div_ceil(pattern.len()));
    bytes.truncate(len);
    bytes
}

fn copy<R: Runtime>(client: &ComputeClient<R>, from: ArrayArg<R>, to: ArrayArg<R>) {
    let (count, dim) = device::flat_launch((from.size() / 4).div_ceil(4));
    // SAFETY: both buffers are equally long; units past the end stop.
    unsafe { copy_kernel::launch_unchecked(client, count, dim, from, to) };
}

/// One unit that is busy for long.
#[cube(launch_unchecked)]
fn count_kernel(out: &mut Array<f32>, times: u32) {
    let mut x = out[0];
    for _ in 0..times {
        x = x * 0.999f32 + 1.0f32;
    }
    out[0] = x;
}

/// Four vectors of 16 bytes a unit, all loaded before the first is stored.
#[cube(launch_unchecked)]
fn copy_kernel(from: &Array<Vector<u32, Const<4>>>, to: &mut Array<Vector<u32, Const<4>>>) {
    let first = ((CUBE_POS_Y * CUBE_COUNT_X + CUBE_POS_X) * 1024u32 + UNIT_POS) as usize;
    let mut values = Array::<Vector<u32, Const<4>>>::new(4usize);
    #[unroll]
    for i in 0..4usize {
        values[i] = from[min(first + comptime!(i * 256), from.len() - 1usize)];
    }
    #[unroll]
    for i in 0..4usize {
        if first + comptime!(i * 256) < to.len() {
            to[first + comptime!(i * 256)] = values[i];
        }
    }
}
