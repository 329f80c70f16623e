//! Times the products of a few tokens with packed weights, as decoding needs them.

use super::{
    BF16, Row,
    timing::{Bench, Data},
};
use crate::{
    KernelError,
    gemv::{Gemv, gemv},
    operands::PackedArgs,
};
use cubecl::prelude::*;

impl<'a, R: Runtime> Bench<'a, R> {
    pub(super) fn decode(&self, show: &mut dyn FnMut(Row)) -> Result<(), KernelError> {
        let client = self.client;
        for (layer, each, inputs) in [
            ("lm_head", &[151_936usize][..], 2560usize),
            ("gate+up", &[9728, 9728], 2560),
            ("q+k+v", &[4096, 1024, 1024], 2560),
            ("o", &[2560], 4096),
            ("down", &[2560], 9728),
        ] {
            let (name, outputs) = (format!("decode {layer}"), each.iter().sum::<usize>());
            let bytes = outputs * inputs / 16 * 9;
            let sets = (200_000_000 / bytes).clamp(1, 16);
            let weights: Vec<Vec<_>> = (0..sets as u32)
                .map(|i| {
                    let pair =
                        |n: &usize| (self.bytes(n * inputs / 2, 2 * i + 1), self.bytes(n * inputs / 16, 2 * i + 2));
                    each.iter().map(pair).collect()
                })
                .collect();
            let one = self.bytes(4, 3);
            for tokens in [1usize, 2, 4, 8, 16] {
                let (x, ys) = (
                    self.values(tokens * inputs),
                    each.iter().map(|n| self.bytes(tokens * n * 2, 4)).collect::<Vec<_>>(),
                );
                self.row(
                    show,
                    &name,
                    format!("{tokens} tokens, {outputs}x{inputs}"),
                    (Some(bytes as f64), None),
                    |i| {
                        let weight = |(rows, (codes, scales)): (&usize, &(Data<'a>, Data<'a>))| PackedArgs {
                            codes: self.arg(codes, rows * inputs / 8),
                            scales: self.arg(scales, rows * inputs / 16),
                            global: self.arg(&one, 1),
                            rows: *rows,
                            cols: inputs,
                        };
                        let weights = each.iter().zip(&weights[i % sets]).map(weight).collect();
                        let ys = each.iter().zip(&ys).map(|(n, y)| self.arg(y, tokens * n)).collect();
                        let x = self.arg(&x, tokens * inputs);
                        let product = Gemv { x, rows: tokens, weights, ys, dtype: BF16 };
                        let plan = product.plan(client)?;
                        gemv(client, product, plan)
                    },
                )?;
            }
        }
        Ok(())
    }
}
