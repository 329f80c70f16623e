//! Times attention over whole sequences, and of one token over a long cache.

use super::{BF16, Row, timing::Bench};
use crate::{
    KernelError,
    attention::{self, AttentionShape, Instructions},
    decode_attention::decode_attention,
};
use cubecl::prelude::*;

impl<R: Runtime> Bench<'_, R> {
    pub(super) fn attention(&self, show: &mut dyn FnMut(Row)) -> Result<(), KernelError> {
        let client = self.client;
        let by = Instructions::of(client, BF16);
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
                attention::forward(client, by, qkv, starts, out.0, out.1, BF16, shape)
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
                attention::backward_kv(client, by, saved(), grad, delta, starts, ends, out, BF16, shape)?;
                let (grad, delta, starts) = read();
                attention::backward_q(client, by, saved(), grad, delta, starts, self.arg(&dq, nq), BF16, shape)
            })?;
        }
        Ok(())
    }

    pub(super) fn decode_attention(&self, show: &mut dyn FnMut(Row)) -> Result<(), KernelError> {
        let client = self.client;
        let keys = 32_768usize;
        let shape = AttentionShape { queries: 1, keys, past: keys - 1, heads: 32, kv_heads: 8, head_dim: 128 };
        let (q, k, v) = (self.values(4096), self.values(keys * 1024), self.values(keys * 1024));
        let (starts, y) = (self.words(vec![0]), self.bytes(8192, 1));
        let moved = (Some(keys as f64 * 4096.0), None);
        self.row(show, "decode attention", "1 query, 32768 keys, 32/8 heads of 128".into(), moved, |_| {
            let qkv = [self.arg(&q, 4096), self.arg(&k, keys * 1024), self.arg(&v, keys * 1024)];
            decode_attention(client, qkv, self.arg(&starts, 1), self.arg(&y, 4096), BF16, shape)
        })
    }
}
