//! The kernels that run on every device.

use super::zeros::{STREAM, Zeros};
use kernels_cubecl::{
    KernelError,
    column_sums::column_sums,
    cross_entropy::cross_entropy,
    dequantize::dequantize,
    draw::{Draw, draw},
    e4m3,
    matmul::{matmul_dense_packed, matmul_packed_packed},
    normal,
    operands::Product,
    penalty::{Penalty, penalize},
    quantize::{self, AMAX_LEN, BlockShape, QuantizeOutput, QuantizeSpec, Rounding, Scaling, View},
    rms_norm,
    rope::{self, RopeShape},
    segment_sum::segment_sum,
    swiglu,
};

/// Columns of the matrices here.
pub(super) const COLS: usize = 256;

pub(super) fn quantizers(zeros: &Zeros, rows: usize) -> Result<(), KernelError> {
    let Zeros { client, dtype, .. } = *zeros;
    let square = rows.next_multiple_of(16);
    for (block, rounding, view) in [
        (BlockShape::Row, Rounding::Nearest, View::row_major(square, COLS)),
        (BlockShape::Row, Rounding::Nearest, View::transposed(square, COLS)),
        (BlockShape::Row, Rounding::Stochastic(STREAM), View::transposed(square, COLS)),
        (BlockShape::Square, Rounding::Stochastic(STREAM), View::row_major(square, COLS)),
    ] {
        for scaling in [Scaling::Single, Scaling::Two] {
            let spec = QuantizeSpec { scaling, block, rounding };
            let n = square * COLS;
            let rotated = block == BlockShape::Row && scaling == Scaling::Two;
            let (x, amax) = (zeros.values(n), zeros.floats(AMAX_LEN));
            if rotated {
                for plain in [None, Some(zeros.floats(AMAX_LEN))] {
                    quantize::amax_rotated(client, zeros.values(n), dtype, view, zeros.floats(AMAX_LEN), plain)?;
                }
            }
            let packed = QuantizeOutput::Packed(zeros.packed(view.rows, view.cols));
            quantize::quantize(client, x, dtype, amax, packed, view, spec, rotated)?;
            if spec.block == BlockShape::Row {
                let (x, amax, global) = (zeros.values(n), zeros.floats(AMAX_LEN), zeros.floats(1));
                let values = QuantizeOutput::Values { values: zeros.values(n), global };
                quantize::quantize(client, x, dtype, amax, values, view, spec, rotated)?;
            }
        }
    }
    let n = rows * COLS;
    normal::normal(client, zeros.values(n), dtype, 0.02, STREAM)?;
    quantize::amax(client, zeros.values(n), dtype, 1.0, zeros.floats(AMAX_LEN))?;
    for full in [None, Some(1.0)] {
        quantize::rounded_rows(client, zeros.values(n), zeros.values(n), dtype, [rows, COLS], full)?;
    }
    e4m3::encode(client, zeros.values(n), zeros.floats(n / e4m3::BYTES_PER_WORD), dtype)?;
    e4m3::decode(client, zeros.floats(n / e4m3::BYTES_PER_WORD), zeros.values(n), dtype)?;
    for scaled in [false, true] {
        dequantize(client, zeros.packed(rows, COLS), scaled, zeros.values(n), dtype)?;
    }
    Ok(())
}

pub(super) fn products(zeros: &Zeros, rows: usize) -> Result<(), KernelError> {
    let Zeros { client, dtype, .. } = *zeros;
    for product in [Product::Nt, Product::Nn, Product::Tn] {
        let (a_rows, a_cols, out) = match product {
            Product::Nt => (rows, COLS, rows * 64),
            Product::Nn => (rows, 64, rows * COLS),
            Product::Tn => (64, rows, rows * COLS),
        };
        let (a, w, out) = (zeros.values(a_rows * a_cols), zeros.packed(64, COLS), zeros.values(out));
        matmul_dense_packed(client, a, a_rows, w, out, dtype, product)?;
    }
    matmul_packed_packed(client, zeros.packed(rows, COLS), zeros.packed(64, COLS), zeros.values(rows * 64), dtype)
}

pub(super) fn small_operations(zeros: &Zeros, rows: usize) -> Result<(), KernelError> {
    let Zeros { client, dtype, .. } = *zeros;
    let (n, shape) = (rows * COLS, [rows, COLS]);
    let ids: Vec<u32> = (0..rows as u32).map(|n| n / 3).collect();
    segment_sum(client, zeros.floats(n), &ids, (zeros.values(n), dtype), COLS)?;
    for kept in [1, 20, 64, 0, 100] {
        let draws = vec![Draw { kept, top_p: 0.9, ..Draw::GREEDY }; rows];
        draw(client, || zeros.floats(n), &draws, || zeros.floats(2 * rows), COLS)?;
    }
    penalize(client, zeros.floats(n), zeros.floats(rows), &vec![Penalty::NONE; rows], zeros.floats(n), COLS)?;
    for fused in [false, true] {
        let more = rms_norm::Fused {
            residual: fused.then(|| [zeros.values(n), zeros.values(n)]),
            maxima: fused.then(|| zeros.floats(rms_norm::maxima_len(rows))),
        };
        rms_norm::rms_norm(client, zeros.values(n), zeros.floats(COLS), zeros.values(n), more, dtype, shape, 1e-6)?;
        let so_far = fused.then(|| zeros.values(n));
        let partial = zeros.floats(rms_norm::partial_rows(client, dtype, shape) * COLS);
        let (x, w, dy) = (zeros.values(n), zeros.floats(COLS), zeros.values(n));
        rms_norm::rms_norm_backward(client, x, w, dy, so_far, partial, dtype, shape, 1e-6)?;
        column_sums(client, zeros.floats(n), zeros.floats(COLS), shape)?;
        let maxima = fused.then(|| zeros.floats(swiglu::maxima_len(client, dtype, n)));
        swiglu::swiglu(client, zeros.values(n), zeros.values(n), zeros.values(n), maxima, dtype)?;
    }
    // Few tokens, and so many that units take several heads.
    for (head_dim, rows, heads) in [(16usize, rows, 3), (64, rows.max(64), 8), (128, rows, 3)] {
        let shape = RopeShape { rows, heads, head_dim, eps: 1e-6 };
        let n = rows * heads * head_dim;
        let args = || rope::RopeArgs {
            w: zeros.floats(head_dim),
            cos: zeros.floats(head_dim / 2),
            sin: zeros.floats(head_dim / 2),
            positions: zeros.floats(rows),
        };
        rope::norm_rope(client, zeros.values(n), args(), zeros.values(n), dtype, shape)?;
        let partial = zeros.floats(shape.partial_rows() * head_dim);
        rope::norm_rope_backward(client, zeros.values(n), args(), zeros.values(n), partial, dtype, shape)?;
    }
    swiglu::swiglu_backward(client, zeros.values(n), zeros.values(n), zeros.values(n), dtype)?;
    for gradient in [false, true] {
        let (logits, targets, loss) = (zeros.values(n), zeros.floats(rows), zeros.floats(rows));
        cross_entropy(client, logits, targets, loss, dtype, shape, gradient)?;
    }
    Ok(())
}
