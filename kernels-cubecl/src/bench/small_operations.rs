//! Times the small operations of a transformer block, cross-entropy, draws of tokens, and the gradient of the embedding.

use super::{BF16, Row, timing::Bench};
use crate::{
    KernelError,
    column_sums::column_sums,
    cross_entropy::cross_entropy,
    draw::{Draw, draw},
    rms_norm,
    rope::{self, RopeShape},
    segment_sum::segment_sum,
    swiglu,
};
use cubecl::prelude::*;

/// What a kernel that is bound by memory does: it moves so many bytes.
fn moved(bytes: f64) -> (Option<f64>, Option<f64>) {
    (Some(bytes), None)
}

impl<R: Runtime> Bench<'_, R> {
    pub(super) fn small_operations(&self, show: &mut dyn FnMut(Row)) -> Result<(), KernelError> {
        self.gate(show)?;
        self.norms(show)?;
        self.rotation(show)?;
        self.loss(show)?;
        self.draws(show)?;
        self.embedding(show)
    }

    fn gate(&self, show: &mut dyn FnMut(Row)) -> Result<(), KernelError> {
        let client = self.client;
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
        })
    }

    fn norms(&self, show: &mut dyn FnMut(Row)) -> Result<(), KernelError> {
        let client = self.client;
        let (rows, cols) = (16_384usize, 2560usize);
        let n = rows * cols;
        let (x, made) = (self.values(n), self.bytes(n * 2, 4));
        let (gate, up) = (self.values(n), self.values(n));
        let codes = [n / 2, n / 16, 4, 12].map(|len| self.bytes(len, 3));
        let maxima = self.bytes(4 * rms_norm::maxima_len(rows), 5);
        let w = self.words(vec![1.0f32.to_bits(); cols]);
        let parts = rms_norm::partial_rows(client, BF16, [rows, cols]) * cols;
        let partial = self.bytes(parts * 4, 8);
        let shape = format!("{rows}x{cols}");
        self.row(show, "rms_norm", shape.clone(), moved(n as f64 * 4.0), |_| {
            let (x, w, y) = (self.arg(&x, n), self.arg(&w, cols), self.arg(&made, n));
            rms_norm::rms_norm(client, x, w, y, rms_norm::Fused::none(), BF16, [rows, cols], 1e-6)
        })?;
        let len = rms_norm::maxima_len(rows);
        for (name, added, quantized, bytes) in [
            ("rms_norm, quantize", false, true, 6.5625),
            ("residual, rms_norm", true, false, 8.0),
            ("residual, rms_norm, quantize", true, true, 10.5625),
        ] {
            self.row(show, name, shape.clone(), moved(n as f64 * bytes), |_| {
                let (x, w, y) = (self.arg(&x, n), self.arg(&w, cols), self.arg(&made, n));
                let fused = rms_norm::Fused {
                    residual: added.then(|| [self.arg(&up, n), self.arg(&gate, n)]),
                    maxima: quantized.then(|| self.arg(&maxima, len)),
                };
                rms_norm::rms_norm(client, x, w, y, fused, BF16, [rows, cols], 1e-6)?;
                if quantized { self.coded(&made, &maxima, len, &codes, [rows, cols]) } else { Ok(()) }
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
        })
    }

    fn rotation(&self, show: &mut dyn FnMut(Row)) -> Result<(), KernelError> {
        let client = self.client;
        let shape = RopeShape { rows: 8192, heads: 32, head_dim: 128, eps: 1e-6 };
        let n = shape.rows * 4096;
        let table = self.bytes(shape.rows * 64 * 4, 9);
        let (x, up, made) = (self.values(n), self.values(n), self.bytes(n * 2, 4));
        let w = self.words(vec![1.0f32.to_bits(); 128]);
        let positions = self.words((0..shape.rows as u32).collect());
        let parts = shape.partial_rows() * 128;
        let partial = self.bytes(parts * 4, 8);
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
        })
    }

    fn loss(&self, show: &mut dyn FnMut(Row)) -> Result<(), KernelError> {
        let client = self.client;
        let (rows, cols) = (1024usize, 151_936usize);
        let (n, targets, loss) = (rows * cols, self.words(vec![0; rows]), self.bytes(rows * 4, 11));
        let logits = self.values(n);
        self.row(show, "cross_entropy", format!("{rows}x{cols}"), moved(n as f64 * 4.0), |_| {
            let (targets, loss) = (self.arg(&targets, rows), self.arg(&loss, rows));
            cross_entropy(client, self.arg(&logits, n), targets, loss, BF16, [rows, cols], true)
        })
    }

    fn draws(&self, show: &mut dyn FnMut(Row)) -> Result<(), KernelError> {
        let (rows, cols) = (16usize, 151_936usize);
        let n = rows * cols;
        // Numbers from -8 to 8. Of random bytes, one would have all the weight.
        let logit = |at: u32| ((at.wrapping_mul(2_654_435_761) >> 8) as f32 / 1_048_576.0 - 8.0).to_bits();
        let (logits, out) = (self.words((0..n as u32).map(logit).collect()), self.bytes(2 * rows * 4, 14));
        for (name, kept, top_p) in [
            ("draw, greedy", 1, 1.0),
            ("draw, top-k 20", 20, 0.8),
            ("draw from all", 0, 1.0),
            ("draw from all, top-p", 0, 0.9),
        ] {
            let draws = vec![Draw { kept, top_p, ..Draw::GREEDY }; rows];
            self.row(show, name, format!("{rows}x{cols}"), moved(n as f64 * 4.0), |_| {
                draw(self.client, || self.arg(&logits, n), &draws, || self.arg(&out, 2 * rows), cols)
            })?;
        }
        Ok(())
    }

    fn embedding(&self, show: &mut dyn FnMut(Row)) -> Result<(), KernelError> {
        let (tokens, vocabulary, cols) = (4096usize, 151_936usize, 2560usize);
        let (n, all) = (tokens * cols, vocabulary * cols);
        let (dy, gradient) = (self.values(n), self.bytes(all * 4, 15));
        // Some ids are frequent, as in a text.
        let ids: Vec<u32> = (0..tokens as u32).map(|t| if t % 4 == 0 { t % 32 } else { t * 37 }).collect();
        // Each row of dy is read once, and the rows of the 3,080 different ids are read and written.
        let bytes = (n * 2 + 3080 * cols * 8) as f64;
        self.row(show, "segment_sum", format!("{tokens}x{cols}"), moved(bytes), |_| {
            segment_sum(self.client, self.arg(&gradient, all), &ids, (self.arg(&dy, n), BF16), cols)
        })
    }
}
