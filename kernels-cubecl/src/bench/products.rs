//! Times the products of a Qwen3-4B block and of its head, alone and as the model launches them.

use super::{
    BF16, F32, Row,
    timing::{Bench, Data},
};
use crate::{
    KernelError,
    block_scaled::{self, block_scaled},
    cross_entropy::cross_entropy,
    cuda_text::hopper,
    dequantize::dequantize,
    gemm::{self, Gemm, GemmShape, gemm},
    operands::Product,
};
use cubecl::prelude::*;

/// The linear layers of a block: the outputs of each layer in a launch, and their inputs.
const LINEARS: [(&str, &[usize], usize); 7] = [
    ("q", &[4096], 2560),
    ("k, v", &[1024], 2560),
    ("q + k + v", &[4096, 1024, 1024], 2560),
    ("o", &[2560], 4096),
    ("gate, up", &[9728], 2560),
    ("gate + up", &[9728, 9728], 2560),
    ("down", &[2560], 9728),
];

/// Layers of one launch that read the same `tokens` rows, and their buffers.
struct Layers<'a> {
    label: String,
    tokens: usize,
    outputs: &'static [usize],
    inputs: usize,
    x: Data<'a>,
    dx: Data<'a>,
    one: Data<'a>,
    codes: Vec<Data<'a>>,
    scales: Vec<Data<'a>>,
    w: Vec<Data<'a>>,
    dw: Vec<Data<'a>>,
    y: Vec<Data<'a>>,
    dy: Vec<Data<'a>>,
}

impl<'a, R: Runtime> Bench<'a, R> {
    pub(super) fn products(&self, show: &mut dyn FnMut(Row)) -> Result<(), KernelError> {
        for tokens in [2048usize, 4096, 8192] {
            for (name, outputs, inputs) in LINEARS {
                let layers = self.layers(name, tokens, outputs, inputs);
                self.forward(show, &layers)?;
                self.native(show, &layers)?;
                self.backward(show, &layers)?;
            }
        }
        [1024, 2048].iter().try_for_each(|tokens| self.head(show, *tokens))
    }

    fn layers(&self, name: &str, tokens: usize, outputs: &'static [usize], inputs: usize) -> Layers<'a> {
        let each = |data: &dyn Fn(usize) -> Data<'a>| outputs.iter().map(|&n| data(n)).collect::<Vec<_>>();
        Layers {
            label: format!("{name} {tokens}x{}x{inputs}", outputs.iter().sum::<usize>()),
            tokens,
            outputs,
            inputs,
            x: self.values(tokens * inputs),
            dx: self.bytes(tokens * inputs * 2, 5),
            one: self.bytes(4, 3),
            codes: each(&|n| self.bytes(n * inputs / 2, 1)),
            scales: each(&|n| self.bytes(n * inputs / 16, 2)),
            w: each(&|n| self.bytes(n * inputs * 2, 4)),
            dw: each(&|n| self.bytes(n * inputs * 4, 6)),
            y: each(&|n| self.bytes(tokens * n * 2, 5)),
            dy: each(&|n| self.values(tokens * n)),
        }
    }

    fn forward(&self, show: &mut dyn FnMut(Row), layers: &Layers<'a>) -> Result<(), KernelError> {
        let forward = || Gemm {
            a: vec![self.arg(&layers.x, layers.tokens * layers.inputs)],
            b: self.args(layers, &layers.w, layers.inputs),
            scales: self.tensor_scales(layers),
            out: self.args(layers, &layers.y, layers.tokens),
            types: (BF16, BF16),
            shapes: layers.shapes(|n| GemmShape { i: layers.tokens, j: n, r: layers.inputs }),
            product: Product::Nt,
            accumulate: false,
            squares: vec![],
        };
        self.row(show, "gemm forward, packed weight", layers.label.clone(), layers.work(), |_| {
            self.dense(layers)?;
            gemm(self.client, forward())
        })?;
        for cols in gemm::tile_columns(self.client).into_iter().filter(|_| layers.tokens == 2048) {
            let name = format!("gemm nt in tiles of 128x{cols}");
            self.row(show, &name, layers.label.clone(), layers.work(), |_| {
                gemm::gemm_in(self.client, forward(), cols)
            })?;
        }
        let on_hopper = hopper::is_hopper(self.client) && layers.tokens == 2048;
        for cols in hopper::hopper_columns(Product::Nt).iter().filter(|_| on_hopper) {
            let name = format!("gemm nt on wgmma in tiles of 128x{cols}");
            self.row(show, &name, layers.label.clone(), layers.work(), |_| {
                hopper::hopper_gemm_in(self.client, forward(), *cols)
            })?;
        }
        Ok(())
    }

    /// The forward product on tensor cores that read NVFP4.
    fn native(&self, show: &mut dyn FnMut(Row), layers: &Layers<'a>) -> Result<(), KernelError> {
        let (&[outputs], inputs) = (layers.outputs, layers.inputs) else { return Ok(()) };
        if !block_scaled::supported(self.client) {
            return Ok(());
        }
        let packed = |rows| self.packed([&layers.codes[0], &layers.scales[0], &layers.one], rows, inputs);
        // The left operand is the first rows of the weight, so it has at most as many.
        let rows = layers.tokens.min(outputs);
        let work = (None, Some(2.0 * (rows * outputs * inputs) as f64));
        let label = format!("{}, {rows} rows", layers.label);
        self.row(show, "block_scaled, packed x packed", label, work, |_| {
            let y = self.arg(&layers.y[0], rows * outputs);
            block_scaled(self.client, packed(rows), packed(outputs), y, BF16)
        })
    }

    fn backward(&self, show: &mut dyn FnMut(Row), layers: &Layers<'a>) -> Result<(), KernelError> {
        let (tokens, inputs) = (layers.tokens, layers.inputs);
        self.row(show, "gemm dgrad, packed weight", layers.label.clone(), layers.work(), |_| {
            self.dense(layers)?;
            let dgrad = Gemm {
                a: self.args(layers, &layers.dy, tokens),
                b: self.args(layers, &layers.w, inputs),
                scales: self.tensor_scales(layers),
                out: vec![self.arg(&layers.dx, tokens * inputs)],
                types: (BF16, BF16),
                shapes: layers.shapes(|n| GemmShape { i: tokens, j: inputs, r: n }),
                product: Product::Nn,
                accumulate: false,
                squares: vec![],
            };
            gemm(self.client, dgrad)
        })?;
        let shapes = layers.shapes(|n| GemmShape { i: n, j: inputs, r: tokens });
        let wgrad = |squares| Gemm {
            a: self.args(layers, &layers.dy, tokens),
            b: vec![self.arg(&layers.x, tokens * inputs)],
            scales: vec![],
            out: self.args(layers, &layers.dw, inputs),
            types: (BF16, F32),
            shapes: shapes.clone(),
            product: Product::Tn,
            accumulate: false,
            squares,
        };
        self.row(show, "gemm wgrad, f32 result", layers.label.clone(), layers.work(), |_| {
            gemm(self.client, wgrad(vec![]))
        })?;
        let widths = gemm::tile_columns(self.client);
        for cols in widths.into_iter().filter(|_| tokens == 2048) {
            let counts: Vec<usize> = shapes.iter().map(|shape| gemm::mma_squares(shape, cols)).collect();
            let sums: Vec<Data> = counts.iter().map(|n| self.bytes(n * 4, 7)).collect();
            let name = format!("gemm tn in tiles of 128x{cols}");
            self.row(show, &name, layers.label.clone(), layers.work(), |_| {
                gemm::gemm_in(self.client, wgrad(vec![]), cols)
            })?;
            let name = format!("gemm tn in tiles of 128x{cols}, with squares");
            self.row(show, &name, layers.label.clone(), layers.work(), |_| {
                let places = sums.iter().zip(&counts).map(|(sums, n)| self.arg(sums, *n)).collect();
                gemm::gemm_in(self.client, wgrad(places), cols)
            })?;
        }
        Ok(())
    }

    /// Dequantizes the weights.
    fn dense(&self, layers: &Layers<'a>) -> Result<(), KernelError> {
        layers.outputs.iter().enumerate().try_for_each(|(p, &rows)| {
            let n = rows * layers.inputs;
            let w = self.packed([&layers.codes[p], &layers.scales[p], &layers.one], rows, layers.inputs);
            dequantize(self.client, w, false, self.arg(&layers.w[p], n), BF16)
        })
    }

    /// A buffer for each layer, with `wide` values for each of its outputs.
    fn args(&self, layers: &Layers<'a>, data: &[Data<'a>], wide: usize) -> Vec<ArrayArg<R>> {
        data.iter().zip(layers.outputs).map(|(data, n)| self.arg(data, n * wide)).collect()
    }

    fn tensor_scales(&self, layers: &Layers<'a>) -> Vec<ArrayArg<R>> {
        layers.outputs.iter().map(|_| self.arg(&layers.one, 1)).collect()
    }

    /// A chunk of tokens through head, cross-entropy and back.
    fn head(&self, show: &mut dyn FnMut(Row), tokens: usize) -> Result<(), KernelError> {
        let client = self.client;
        let (words, width) = (151_936usize, 2560usize);
        let (h, w) = (self.values(tokens * width), self.values(words * width));
        let logits = self.bytes(tokens * words * 2, 1);
        let (dh, dw) = (self.bytes(tokens * width * 2, 2), self.bytes(words * width * 4, 3));
        let (targets, loss) = (self.words(vec![0; tokens]), self.bytes(tokens * 4, 5));
        let work = (None, Some(6.0 * (tokens * words * width) as f64));
        let logit_arg = || self.arg(&logits, tokens * words);
        let (h_arg, w_arg) = (|| self.arg(&h, tokens * width), || self.arg(&w, words * width));
        for whole in [true, false] {
            let name = if whole { "head + cross-entropy, chunk" } else { "head, its three products alone" };
            self.row(show, name, format!("{tokens}x{words}x{width}"), work, |_| {
                let shape = GemmShape { i: tokens, j: words, r: width };
                let types = (BF16, BF16);
                gemm(client, Gemm::one(h_arg(), w_arg(), vec![], logit_arg(), types, shape, Product::Nt))?;
                if whole {
                    let (targets, loss) = (self.arg(&targets, tokens), self.arg(&loss, tokens));
                    cross_entropy(client, logit_arg(), targets, loss, BF16, [tokens, words], true)?;
                }
                let shape = GemmShape { i: tokens, j: width, r: words };
                let dh = self.arg(&dh, tokens * width);
                gemm(client, Gemm::one(logit_arg(), w_arg(), vec![], dh, types, shape, Product::Nn))?;
                let shape = GemmShape { i: words, j: width, r: tokens };
                let dw = self.arg(&dw, words * width);
                let dw = Gemm::one(logit_arg(), h_arg(), vec![], dw, (BF16, F32), shape, Product::Tn);
                gemm(client, Gemm { accumulate: true, ..dw })
            })?;
        }
        Ok(())
    }
}

impl Layers<'_> {
    fn shapes(&self, of: impl Fn(usize) -> GemmShape) -> Vec<GemmShape> {
        self.outputs.iter().map(|&n| of(n)).collect()
    }

    /// Operations of one product of all layers.
    fn work(&self) -> (Option<f64>, Option<f64>) {
        let outputs: usize = self.outputs.iter().sum();
        (None, Some(2.0 * (self.tokens * outputs * self.inputs) as f64))
    }
}
