//! Times the optimizer and the sums of gradients, over as many values as four of the largest matrices of a block.

use super::{
    BF16, F32, Row,
    timing::{Bench, Data},
};
use crate::{
    KernelError,
    adamw::{self, AdamwStep, Coding, Master},
    gradient,
    operands::PackedArgs,
    quantize::{self, BlockShape},
    rng::Stream,
};
use cubecl::prelude::*;

/// An arbitrary step of the optimizer.
const SOME_STEP: AdamwStep = AdamwStep {
    lr: 1e-4,
    beta1: 0.9,
    beta2: 0.95,
    eps: 1e-8,
    weight_decay: 0.1,
    bias1: 0.1,
    bias2: 0.05,
    clip_factor: 1.0,
    stream: Stream { seed: 1, step: 2, stream: 3 },
};

impl<'a, R: Runtime> Bench<'a, R> {
    pub(super) fn optimizer(&self, show: &mut dyn FnMut(Row)) -> Result<(), KernelError> {
        let client = self.client;
        let moved = |bytes: f64| (Some(bytes), None);
        let n = 9728 * 2560 * 4;
        let [w, g, m, v, absmax, table] = [1, 2, 3, 4, 5, 6].map(|seed| self.bytes(n * 4, seed));
        let shape = format!("{n}");
        let chunk = adamw::Chunk { start: 0, end: n };
        // The verdict is a value of its own, which is 0.
        let [verdict, other] = [self.words(vec![0]), self.words(vec![0])];
        let grad = || adamw::JudgedArgs { values: self.arg(&g, n), dtype: F32, verdict: self.arg(&verdict, 1) };
        // In place: a step into other buffers moves as many bytes.
        let updated =
            |data: &Data<'a>, len: usize| adamw::Updated { old: self.arg(data, len), new: self.arg(data, len) };
        let dense = |master: Master| adamw::DenseArgs {
            w: updated(&w, n),
            dtype: if master == Master::Exact { F32 } else { BF16 },
            residual: (master == Master::Residual).then(|| updated(&m, n)),
            master,
        };
        self.row(show, "adamw f32, f32 states", shape.clone(), moved(n as f64 * 28.0), |_| {
            let moments = [updated(&m, n), updated(&v, n)];
            adamw::adamw_float(client, dense(Master::Exact), grad(), moments, (F32, false), SOME_STEP, chunk)
        })?;
        let tables = |coding: Coding| {
            [true, false].map(|signed| {
                let values = coding.values(signed).into_iter().map(f32::to_bits).collect();
                (self.words(values), self.words(coding.search(signed)))
            })
        };
        let state = |codes: &Data<'a>, (values, search): &(Data<'a>, Data<'a>), coding: Coding, signed: bool| {
            adamw::StateArgs {
                codes: updated(codes, n * coding.bits() / 8),
                absmax: updated(&absmax, n / 256),
                table: self.arg(values, 1 << coding.bits()),
                search: self.arg(search, coding.bins(signed)),
            }
        };
        let states = |[of_m, of_v]: &[(Data<'a>, Data<'a>); 2], coding: Coding| {
            [state(&m, of_m, coding, true), state(&v, of_v, coding, false)]
        };
        for (name, master, coding, bytes) in [
            ("adamw f32, 8-bit states", Master::Exact, Coding::Bytes, 16.0),
            ("adamw bf16 stochastic, 8-bit states", Master::Stochastic, Coding::Bytes, 12.0),
            ("adamw bf16 + residual, 8-bit states", Master::Residual, Coding::Bytes, 14.0),
            ("adamw bf16 stochastic, 4-bit states", Master::Stochastic, Coding::Nibbles, 10.0),
        ] {
            let tables = tables(coding);
            self.row(show, name, shape.clone(), moved(n as f64 * bytes), |_| {
                let moments = states(&tables, coding);
                adamw::adamw_quantized(client, dense(master), grad(), moments, coding, None, SOME_STEP, chunk)
            })?;
        }
        let of_8_bits = tables(Coding::Bytes);
        self.with_codes(show, n, &grad, &|| states(&of_8_bits, Coding::Bytes))?;
        for (name, coding, bytes) in
            [("adamw nvfp4, 8-bit states", Coding::Bytes, 9.125), ("adamw nvfp4, 4-bit states", Coding::Nibbles, 7.125)]
        {
            let tables = tables(coding);
            self.row(show, name, shape.clone(), moved(n as f64 * bytes), |_| {
                let (codes, scales, global) = (updated(&w, n / 8), updated(&absmax, n / 16), self.arg(&table, 1));
                let w = PackedArgs { codes, scales, global, rows: n / 2560, cols: 2560 };
                adamw::adamw_packed(client, w, grad(), states(&tables, coding), coding, SOME_STEP, chunk)
            })?;
        }
        self.row(show, "square_sum", shape.clone(), moved(n as f64 * 4.0), |_| {
            gradient::square_sum(client, self.arg(&g, n), F32, (self.arg(&table, 1), 0), self.arg(&other, 1))
        })?;
        self.row(show, "accumulate bf16 += f32", shape, moved(n as f64 * 8.0), |_| {
            gradient::accumulate(client, (self.arg(&w, n), BF16), (self.arg(&g, n), F32))
        })
    }

    /// The step that leaves codes, and what follows it: the largest magnitude of the weight, which is still the one of before.
    fn with_codes(
        &self,
        show: &mut dyn FnMut(Row),
        n: usize,
        grad: &dyn Fn() -> adamw::JudgedArgs<R>,
        states: &dyn Fn() -> [adamw::StateArgs<R>; 2],
    ) -> Result<(), KernelError> {
        let (client, rows, cols) = (self.client, n / 2560, 2560);
        let [codes, scales, one, held, amax] = [n / 2, n / 16, 4, 12, 12].map(|len| self.bytes(len, 7));
        let w = self.values(n);
        for (name, block) in [("1x16", BlockShape::Row), ("16x16", BlockShape::Square)] {
            let name = format!("adamw bf16, 8-bit, codes {name}");
            let Some(len) = adamw::maxima_len(client, rows, cols, block) else { continue };
            let maxima = self.bytes(len * 4, 8);
            let packed = || self.packed([&codes, &scales, &one], rows, cols);
            if name.contains(self.filter) {
                quantize::amax(client, self.arg(&w, n), BF16, 1.0, self.arg(&held, 3))?;
            }
            let chunk = adamw::Chunk { start: 0, end: n };
            self.row(show, &name, format!("{n}"), (Some(n as f64 * 12.5625), None), |_| {
                let updated = adamw::Updated { old: self.arg(&w, n), new: self.arg(&w, n) };
                let dense = adamw::DenseArgs { w: updated, dtype: BF16, residual: None, master: Master::Stochastic };
                let (held, maxima) = (self.arg(&held, 3), self.arg(&maxima, len));
                let codes = Some(adamw::CodesArgs { packed: packed(), held, maxima, block });
                adamw::adamw_quantized(client, dense, grad(), states(), Coding::Bytes, codes, SOME_STEP, chunk)
            })?;
            self.row(show, &format!("{name}: amax"), format!("{n}"), (None, None), |_| {
                quantize::amax_of_maxima(client, self.arg(&maxima, len), 1.0, self.arg(&amax, 3))
            })?;
            self.row(show, &format!("{name}: the same"), format!("{n}"), (None, None), |_| {
                let (same, held) = (self.arg(&held, 3), self.arg(&held, 3));
                quantize::renew(client, self.arg(&w, n), BF16, same, held, packed(), block)
            })?;
        }
        Ok(())
    }
}
