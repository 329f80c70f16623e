//! Times quantizing and dequantizing.

use super::{
    BF16, Row,
    timing::{Bench, Data},
};
use crate::{
    KernelError,
    dequantize::dequantize,
    quantize::{self, BlockShape, QuantizeOutput, QuantizeSpec, Rounding, Scaling, View},
    rng::Stream,
};
use cubecl::prelude::*;

impl<'a, R: Runtime> Bench<'a, R> {
    pub(super) fn quantizers(&self, show: &mut dyn FnMut(Row)) -> Result<(), KernelError> {
        let client = self.client;
        let moved = |bytes: f64| (Some(bytes), None);
        let (rows, cols) = (8192usize, 9728usize);
        let n = rows * cols;
        let x = self.values(n);
        let [codes, scales, global, amax, plain] = [n / 2, n / 16, 4, 12, 12].map(|len| self.bytes(len, 3));
        let y = self.bytes(n * 2, 4);
        let stochastic = Rounding::Stochastic(Stream { seed: 1, step: 2, stream: 3 });
        let shape = format!("{rows}x{cols}");
        let dense = View::row_major(rows, cols);
        let across = View::transposed(rows, cols);
        for (name, block, rounding, view, rotated) in [
            ("quantize 1x16", BlockShape::Row, Rounding::Nearest, dense, false),
            ("quantize 16x16", BlockShape::Square, Rounding::Nearest, dense, false),
            ("quantize 1x16 transposed", BlockShape::Row, Rounding::Nearest, across, false),
            ("quantize 1x16 transposed, Hadamard", BlockShape::Row, Rounding::Nearest, across, true),
            ("quantize 1x16 transposed, Hadamard, stochastic", BlockShape::Row, stochastic, across, true),
            ("quantize 1x16 stochastic", BlockShape::Row, stochastic, dense, false),
        ] {
            let spec = QuantizeSpec { scaling: Scaling::Two, block, rounding };
            if name.contains(self.filter) {
                // The maximum of these very values: with another one blocks would saturate and take a slower path.
                let (x, amax) = (self.arg(&x, n), self.arg(&amax, 3));
                if rotated {
                    quantize::amax_rotated(client, x, BF16, view, amax, None)?;
                } else {
                    quantize::amax(client, x, BF16, 1.0, amax)?;
                }
            }
            self.row(show, name, shape.clone(), moved(n as f64 * 2.5625), |_| {
                let out = QuantizeOutput::Packed(self.packed([&codes, &scales, &global], view.rows, view.cols));
                quantize::quantize(client, self.arg(&x, n), BF16, self.arg(&amax, 3), out, view, spec, rotated)
            })?;
            self.row(show, &format!("{name}, to values"), shape.clone(), moved(n as f64 * 4.0), |_| {
                let out = QuantizeOutput::Values { values: self.arg(&y, n), global: self.arg(&global, 1) };
                quantize::quantize(client, self.arg(&x, n), BF16, self.arg(&amax, 3), out, view, spec, rotated)
            })?;
        }
        self.row(show, "amax transposed, Hadamard", shape.clone(), moved(n as f64 * 2.0), |_| {
            quantize::amax_rotated(client, self.arg(&x, n), BF16, across, self.arg(&amax, 3), None)
        })?;
        self.row(show, "amax, and transposed, Hadamard", shape.clone(), moved(n as f64 * 2.0), |_| {
            let plain = Some(self.arg(&plain, 3));
            quantize::amax_rotated(client, self.arg(&x, n), BF16, across, self.arg(&amax, 3), plain)
        })?;
        self.row(show, "amax", shape.clone(), moved(n as f64 * 2.0), |_| {
            quantize::amax(client, self.arg(&x, n), BF16, 1.0, self.arg(&amax, 3))
        })?;
        self.row(show, "round each row by itself", shape.clone(), moved(n as f64 * 4.0), |_| {
            quantize::rounded_rows(client, self.arg(&x, n), self.arg(&y, n), BF16, [rows, cols], None)
        })?;
        self.row(show, "dequantize", shape.clone(), moved(n as f64 * 2.5625), |_| {
            dequantize(client, self.packed([&codes, &scales, &global], rows, cols), false, self.arg(&y, n), BF16)
        })?;
        Ok(())
    }

    /// Quantizes a result whose kernel left `len` maxima.
    pub(super) fn coded(
        &self,
        made: &Data<'a>,
        maxima: &Data<'a>,
        len: usize,
        [codes, scales, global, amax]: &[Data<'a>; 4],
        [rows, cols]: [usize; 2],
    ) -> Result<(), KernelError> {
        let n = rows * cols;
        quantize::amax_of_maxima(self.client, self.arg(maxima, len), 1.0, self.arg(amax, 3))?;
        let spec = QuantizeSpec { scaling: Scaling::Two, block: BlockShape::Row, rounding: Rounding::Nearest };
        let out = QuantizeOutput::Packed(self.packed([codes, scales, global], rows, cols));
        let (x, view) = (self.arg(made, n), View::row_major(rows, cols));
        quantize::quantize(self.client, x, BF16, self.arg(amax, 3), out, view, spec, false)
    }
}
