//! The products of a Qwen3-4B block and of its head, alone and as the model launches them.

use super::{BF16, Bench, Data, F32, Row};
use crate::{
    KernelError,
    block_scaled::{self, block_scaled},
    cross_entropy::cross_entropy,
    dequantize::dequantize,
    gemm::{self, Gemm, gemm},
    matmul::{PackedArgs, Product},
};
use cubecl::prelude::*;

/// The linear layers: output features of each layer in a launch, input features.
const LINEARS: [(&str, &[usize], usize); 7] = [
    ("q", &[4096], 2560),
    ("k, v", &[1024], 2560),
    ("q + k + v", &[4096, 1024, 1024], 2560),
    ("o", &[2560], 4096),
    ("gate, up", &[9728], 2560),
    ("gate + up", &[9728, 9728], 2560),
    ("down", &[2560], 9728),
];

impl<'a, R: Runtime> Bench<'a, R> {
    pub(super) fn products(&self, show: &mut dyn FnMut(Row)) -> Result<(), KernelError> {
        for m in [2048usize, 4096, 8192] {
            for (layer, each, k) in LINEARS {
                self.linear(show, layer, m, each, k)?;
            }
        }
        self.head(show)
    }

    /// Forward, dgrad and wgrad of layers that read the same `m` rows.
    fn linear(
        &self,
        show: &mut dyn FnMut(Row),
        layer: &str,
        m: usize,
        each: &[usize],
        k: usize,
    ) -> Result<(), KernelError> {
        let client = self.client;
        let n: usize = each.iter().sum();
        let (x, one, dx) = (self.values(m * k), self.bytes(4, 3), self.bytes(m * k * 2, 5));
        let of = |bytes: &dyn Fn(usize) -> Data<'a>| each.iter().map(|&n| bytes(n)).collect::<Vec<_>>();
        let (codes, scales) = (of(&|n| self.bytes(n * k / 2, 1)), of(&|n| self.bytes(n * k / 16, 2)));
        let (w, dw) = (of(&|n| self.bytes(n * k * 2, 4)), of(&|n| self.bytes(n * k * 4, 6)));
        let (y, dy) = (of(&|n| self.bytes(m * n * 2, 5)), of(&|n| self.values(m * n)));
        let args = |data: &[Data<'a>], wide: usize| -> Vec<ArrayArg<R>> {
            data.iter().zip(each).map(|(data, n)| self.arg(data, n * wide)).collect()
        };
        let shapes = |of: &dyn Fn(usize) -> gemm::Shape| each.iter().map(|&n| of(n)).collect::<Vec<_>>();
        let dense = || {
            (0..each.len()).try_for_each(|p| {
                let packed = (self.arg(&codes[p], each[p] * k / 8), self.arg(&scales[p], each[p] * k / 16));
                dequantize(client, packed.0, packed.1, None, self.arg(&w[p], each[p] * k), BF16, each[p], k)
            })
        };
        let tensor_scales = || each.iter().map(|_| self.arg(&one, 1)).collect::<Vec<_>>();
        let forward = || Gemm {
            a: vec![self.arg(&x, m * k)],
            b: args(&w, k),
            scales: tensor_scales(),
            out: args(&y, m),
            types: (BF16, BF16),
            shapes: shapes(&|n| gemm::Shape { i: m, j: n, r: k }),
            product: Product::Nt,
            accumulate: false,
        };
        let work = (None, Some(2.0 * (m * n * k) as f64));
        let shape = format!("{layer} {m}x{n}x{k}");
        self.row(show, "gemm forward, packed weight", shape.clone(), work, |_| {
            dense()?;
            gemm(client, forward())
        })?;
        for cols in gemm::tile_columns(client).into_iter().filter(|_| m == 2048) {
            self.row(show, &format!("gemm nt in tiles of 128x{cols}"), shape.clone(), work, |_| {
                gemm::gemm_in(client, forward(), cols)
            })?;
        }
        if block_scaled::supported(client) && each.len() == 1 {
            let packed = |rows: usize| PackedArgs {
                codes: self.arg(&codes[0], rows * k / 8),
                scales: self.arg(&scales[0], rows * k / 16),
                global: self.arg(&one, 1),
                rows,
                cols: k,
            };
            // The left operand's codes are the first rows of the same buffer, or it would be too short.
            let rows = m.min(n);
            let work = (None, Some(2.0 * (rows * n * k) as f64));
            self.row(show, "block_scaled, packed x packed", format!("{layer} {rows}x{n}x{k}"), work, |_| {
                block_scaled(client, packed(rows), packed(n), self.arg(&y[0], rows * n), BF16)
            })?;
        }
        self.row(show, "gemm dgrad, packed weight", shape.clone(), work, |_| {
            dense()?;
            let dgrad = Gemm {
                a: args(&dy, m),
                b: args(&w, k),
                scales: tensor_scales(),
                out: vec![self.arg(&dx, m * k)],
                types: (BF16, BF16),
                shapes: shapes(&|n| gemm::Shape { i: m, j: k, r: n }),
                product: Product::Nn,
                accumulate: false,
            };
            gemm(client, dgrad)
        })?;
        self.row(show, "gemm wgrad, f32 result", shape, work, |_| {
            let wgrad = Gemm {
                a: args(&dy, m),
                b: vec![self.arg(&x, m * k)],
                scales: vec![],
                out: args(&dw, k),
                types: (BF16, F32),
                shapes: shapes(&|n| gemm::Shape { i: n, j: k, r: m }),
                product: Product::Tn,
                accumulate: false,
            };
            gemm(client, wgrad)
        })
    }

    /// A chunk of tokens through head, cross-entropy and back.
    fn head(&self, show: &mut dyn FnMut(Row)) -> Result<(), KernelError> {
        let client = self.client;
        let (m, v, d) = (1024usize, 151_936usize, 2560usize);
        let (h, w, logits) = (self.values(m * d), self.values(v * d), self.bytes(m * v * 2, 1));
        let (dh, dw) = (self.bytes(m * d * 2, 2), self.bytes(v * d * 4, 3));
        let (targets, loss) = (self.words(vec![0; m]), self.bytes(m * 4, 5));
        let work = (None, Some(6.0 * (m * v * d) as f64));
        for whole in [true, false] {
            let name = if whole { "head + cross-entropy, chunk" } else { "head, its three products alone" };
            self.row(show, name, format!("{m}x{v}x{d}"), work, |_| {
                let (a, b, y) = (self.arg(&h, m * d), self.arg(&w, v * d), self.arg(&logits, m * v));
                let shape = gemm::Shape { i: m, j: v, r: d };
                gemm(client, Gemm::one(a, b, vec![], y, (BF16, BF16), shape, Product::Nt))?;
                if whole {
                    let (targets, loss) = (self.arg(&targets, m), self.arg(&loss, m));
                    cross_entropy(client, self.arg(&logits, m * v), targets, loss, BF16, [m, v], true)?;
                }
                let (a, b, y) = (self.arg(&logits, m * v), self.arg(&w, v * d), self.arg(&dh, m * d));
                let shape = gemm::Shape { i: m, j: d, r: v };
                gemm(client, Gemm::one(a, b, vec![], y, (BF16, BF16), shape, Product::Nn))?;
                let (a, b, y) = (self.arg(&logits, m * v), self.arg(&h, m * d), self.arg(&dw, v * d));
                let shape = gemm::Shape { i: v, j: d, r: m };
                let dw = Gemm::one(a, b, vec![], y, (BF16, F32), shape, Product::Tn);
                gemm(client, Gemm { accumulate: true, ..dw })
            })?;
        }
        Ok(())
    }
}
