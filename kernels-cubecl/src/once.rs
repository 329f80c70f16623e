//! Every kernel once, on zeros of a small shape: what compile checks and memory checkers run.

use crate::{
    KernelError,
    adamw::{self, Coding},
    attention,
    attention::AttentionShape,
    block_scaled,
    codec::{Conversion, convert},
    column_sums::column_sums,
    cross_entropy::cross_entropy,
    decode_attention,
    dequantize::dequantize,
    gemm::{self, Gemm},
    gemv::{Gemv, gemv},
    gradient, hadamard,
    matmul::{PackedArgs, Product, matmul_dense_packed, matmul_packed_packed},
    mma, normal,
    quantize::{self, AMAX_LEN, Block, QuantizeSpec, Rounding, Scaling, View},
    rms_norm,
    rng::Stream,
    rope::{self, RopeShape},
    swiglu,
};
use cubecl::{
    ir::{ElemType, FloatKind},
    prelude::*,
};

const F32: StorageType = StorageType::Scalar(ElemType::Float(FloatKind::F32));

/// Launches every kernel that the device can run for values of type `dtype`, with `rows` tokens: the portable ones
/// everywhere, the others where there are tensor cores for `dtype`.
///
/// # Errors
/// If a launch is refused, which is a bug.
pub fn once<R: Runtime>(client: &ComputeClient<R>, dtype: StorageType, rows: usize) -> Result<(), KernelError> {
    let value = dtype.size();
    let zeros = |len: usize, size: usize| -> ArrayArg<R> {
        let handle = client.create_from_slice(&vec![0u8; len * size]);
        // SAFETY: the buffer was made with this length.
        unsafe { ArrayArg::from_raw_parts(handle, len) }
    };
    let values = |len: usize| zeros(len, value);
    let floats = |len: usize| zeros(len, 4);
    let packed = |rows: usize, cols: usize| PackedArgs {
        codes: floats(rows * cols / 8),
        scales: zeros(rows * cols / 16, 1),
        global: floats(1),
        rows,
        cols,
    };

    // Portable kernels.
    let (square, cols) = (rows.next_multiple_of(16), 256usize);
    let stream = Stream { seed: 1, step: 2, stream: 3 };
    for (block, rounding, view) in [
        (Block::Row, Rounding::Nearest, View::row_major(square, cols)),
        (Block::Row, Rounding::Nearest, View::transposed(square, cols)),
        (Block::Row, Rounding::Stochastic(stream), View::transposed(square, cols)),
        (Block::Square, Rounding::Stochastic(stream), View::row_major(square, cols)),
    ] {
        for scaling in [Scaling::Single, Scaling::Two] {
            let spec = QuantizeSpec { scaling, block, rounding };
            let n = square * cols;
            let out = (floats(n / 8), zeros(n / 16, 1), floats(1));
            let rotated = block == Block::Row && scaling == Scaling::Two;
            if rotated {
                quantize::amax_rotated(client, values(n), dtype, view, floats(AMAX_LEN))?;
            }
            quantize::quantize(client, values(n), dtype, floats(AMAX_LEN), out.0, out.1, out.2, view, spec, rotated)?;
        }
    }
    let n = rows * cols;
    normal::normal(client, values(n), dtype, 0.02, stream)?;
    quantize::amax(client, values(n), dtype, 1.0, floats(AMAX_LEN))?;
    for global in [None, Some(floats(1))] {
        dequantize(client, floats(n / 8), zeros(n / 16, 1), global, values(n), dtype, rows, cols)?;
    }
    hadamard::hadamard(client, values(n), values(n), dtype, hadamard::SIGNS)?;
    for conversion in [Conversion::EncodeE2m1, Conversion::EncodeE4m3, Conversion::DecodeE2m1, Conversion::DecodeE4m3] {
        convert(client, floats(rows), floats(rows), conversion)?;
    }
    for product in [Product::Nt, Product::Nn, Product::Tn] {
        let (a_rows, a_cols, out) = match product {
            Product::Nt => (rows, cols, rows * 64),
            Product::Nn => (rows, 64, rows * cols),
            Product::Tn => (64, rows, rows * cols),
        };
        matmul_dense_packed(client, values(a_rows * a_cols), a_rows, packed(64, cols), values(out), dtype, product)?;
    }
    matmul_packed_packed(client, packed(rows, cols), packed(64, cols), values(rows * 64), dtype)?;
    for fused in [false, true] {
        let more = rms_norm::Fused {
            residual: fused.then(|| [values(n), values(n)]),
            maxima: fused.then(|| floats(rms_norm::maxima_len(rows))),
        };
        rms_norm::rms_norm(client, values(n), floats(cols), values(n), more, dtype, [rows, cols], 1e-6)?;
        let (so_far, partial) =
            (fused.then(|| values(n)), floats(rms_norm::partial_rows(client, dtype, [rows, cols]) * cols));
        let (x, w, dy) = (values(n), floats(cols), values(n));
        rms_norm::rms_norm_backward(client, x, w, dy, so_far, partial, dtype, [rows, cols], 1e-6)?;
        column_sums(client, floats(n), floats(cols), [rows, cols])?;
        let maxima = fused.then(|| floats(swiglu::maxima_len(client, dtype, n)));
        swiglu::swiglu(client, values(n), values(n), values(n), maxima, dtype)?;
    }
    // Few tokens, and as many that units take several heads.
    for (head_dim, rows, heads) in [(16usize, rows, 3), (64, rows.max(64), 8), (128, rows, 3)] {
        let shape = RopeShape { rows, heads, head_dim, eps: 1e-6 };
        let n = rows * heads * head_dim;
        let args = || rope::RopeArgs {
            w: floats(head_dim),
            cos: floats(head_dim / 2),
            sin: floats(head_dim / 2),
            positions: floats(rows),
        };
        rope::norm_rope(client, values(n), args(), values(n), dtype, shape)?;
        let partial = floats(shape.partial_rows() * head_dim);
        rope::norm_rope_backward(client, values(n), args(), values(n), partial, dtype, shape)?;
    }
    swiglu::swiglu_backward(client, values(n), values(n), values(n), dtype)?;
    for gradient in [false, true] {
        cross_entropy(client, values(n), floats(rows), floats(rows), dtype, [rows, cols], gradient)?;
    }
    optimizer(client, dtype, n)?;

    if dtype == F32 || !mma::supported(client, dtype) {
        return Ok(());
    }

    // Tensor-core kernels.
    for cols in gemm::tile_columns(client) {
        for (product, accumulate, result, size) in [
            (Product::Nt, false, dtype, value),
            (Product::Nn, false, dtype, value),
            (Product::Tn, false, F32, 4),
            (Product::Tn, true, F32, 4),
        ] {
            let (i, j, r) = if product == Product::Tn { (136, 168, rows) } else { (rows, 168, 72) };
            let shape = gemm::Shape { i, j, r };
            let scales = if accumulate { vec![] } else { vec![floats(1)] };
            let (a, b, out, types) = (values(i * r), values(j * r), zeros(i * j, size), (dtype, result));
            let one = Gemm::one(a, b, scales, out, types, shape, product);
            gemm::gemm_in(client, Gemm { accumulate, ..one }, cols)?;
        }
        // Three of one left operand, three of one right operand both ways, and a sum of three.
        let (m, n, k) = (rows.next_multiple_of(8), [168, 40, 72], 136);
        for (product, shared_left, summed) in [
            (Product::Nt, true, false),
            (Product::Nt, false, false),
            (Product::Tn, false, false),
            (Product::Nn, false, true),
        ] {
            let shapes: Vec<_> = n
                .iter()
                .map(|&n| match (shared_left, summed) {
                    (true, _) => gemm::Shape { i: m, j: n, r: k },
                    (_, true) => gemm::Shape { i: m, j: k, r: n },
                    _ => gemm::Shape { i: n, j: k, r: m },
                })
                .collect();
            let each =
                |count: usize, of: &dyn Fn(&gemm::Shape) -> ArrayArg<R>| shapes[..count].iter().map(of).collect();
            let products = Gemm {
                a: each(if shared_left { 1 } else { 3 }, &|s| values(s.i * s.r)),
                b: each(if shared_left || summed { 3 } else { 1 }, &|s| values(s.j * s.r)),
                scales: (0..6).map(|_| floats(1)).collect(),
                out: each(if summed { 1 } else { 3 }, &|s| values(s.i * s.j)),
                types: (dtype, dtype),
                shapes: shapes.clone(),
                product,
                accumulate: false,
            };
            gemm::gemm_in(client, products, cols)?;
        }
    }
    if block_scaled::supported(client) {
        for (result, size) in [(dtype, value), (F32, 4)] {
            block_scaled::block_scaled(client, packed(rows, cols), packed(40, cols), zeros(rows * 40, size), result)?;
        }
    }
    for (n, cols) in [(40usize, 256usize), (8450, 2560)] {
        for m in [1, rows.min(16)] {
            for n in [vec![n], vec![n, 24, 40]] {
                let weights = n.iter().map(|n| packed(*n, cols)).collect();
                let ys = n.iter().map(|n| values(m * n)).collect();
                let (x, scales) = (values(m * cols), vec![floats(1)]);
                gemv(client, Gemv { x, rows: m, weights, scales, ys, dtype })?;
            }
        }
    }
    for head_dim in [64usize, 128] {
        let shape = AttentionShape { queries: rows, keys: rows, past: 0, heads: 4, kv_heads: 2, head_dim };
        let (nq, nk, nl) = (rows * 4 * head_dim, rows * 2 * head_dim, rows * 4);
        let qkv = [values(nq), values(nk), values(nk)];
        attention::forward(client, qkv, floats(rows), values(nq), floats(nl), dtype, shape)?;
        attention::delta(client, values(nq), values(nq), floats(nl), dtype, shape)?;
        let saved = || attention::Saved { q: values(nq), k: values(nk), v: values(nk), lse: floats(nl) };
        let ends: Vec<u8> = (0..rows).flat_map(|_| (rows as u32).to_le_bytes()).collect();
        let handle = client.create_from_slice(&ends);
        // SAFETY: one u32 a row.
        let ends = unsafe { ArrayArg::from_raw_parts(handle, rows) };
        let out = [values(nk), values(nk)];
        let (dy, delta) = (values(nq), floats(nl));
        attention::backward_kv(client, saved(), dy, delta, floats(rows), ends, out, dtype, shape)?;
        let (dy, delta) = (values(nq), floats(nl));
        attention::backward_q(client, saved(), dy, delta, floats(rows), values(nq), dtype, shape)?;

        let past = rows * 3;
        let shape = AttentionShape { queries: 2, keys: past + 2, past, heads: 4, kv_heads: 2, head_dim };
        let (nq, nk) = (2 * 4 * head_dim, shape.keys * 2 * head_dim);
        let (_, len) = decode_attention::scratch(shape);
        let scratch = client.create_from_slice(&vec![0u8; len * 4]);
        // SAFETY: the scratch was made with this length.
        let part = || unsafe { ArrayArg::from_raw_parts(scratch.clone(), len) };
        let qkv = [values(nq), values(nk), values(nk)];
        decode_attention::decode_attention(client, qkv, floats(2), [part(), part()], values(nq), dtype, shape)?;
    }
    Ok(())
}

/// The optimizer in all its forms, over `n` values: a multiple of 256, with a last block of 128.
fn optimizer<R: Runtime>(client: &ComputeClient<R>, dtype: StorageType, n: usize) -> Result<(), KernelError> {
    let zeros = |len: usize, size: usize| -> ArrayArg<R> {
        let handle = client.create_from_slice(&vec![0u8; len * size]);
        // SAFETY: the buffer was made with this length.
        unsafe { ArrayArg::from_raw_parts(handle, len) }
    };
    for (len, forms) in [(n + 128, &MASTERS[..]), (n - 3, &MASTERS[..1])] {
        let chunk = adamw::Chunk { start: 0, end: len };
        let state = |coding: Coding| adamw::StateArgs {
            codes: zeros(len * coding.bits() / 8, 1),
            scales: zeros(len / 16, 1),
            absmax: zeros(len.div_ceil(adamw::STATE_BLOCK), 4),
            table: zeros(1 << coding.bits(), 4),
        };
        let grad = |ty: StorageType| (zeros(len, ty.size()), ty);
        for &master in forms {
            let ty = if master == adamw::Master::Exact { F32 } else { dtype };
            let dense = || adamw::DenseArgs { w: zeros(len, ty.size()), dtype: ty, residual: zeros(len, 1), master };
            for states in [F32, dtype] {
                let moments = [zeros(len, states.size()), zeros(len, states.size())];
                adamw::adamw_float(client, dense(), grad(F32), moments, (states, states != F32), STEP, chunk)?;
            }
            for coding in if len % 16 == 0 { &CODINGS[..] } else { &CODINGS[..1] } {
                let moments = [state(*coding), state(*coding)];
                adamw::adamw_quantised(client, dense(), grad(dtype), moments, *coding, STEP, chunk)?;
            }
        }
        if len % 16 == 0 {
            for coding in CODINGS {
                let (codes, scales, global) = (zeros(len / 8, 4), zeros(len / 16, 1), zeros(1, 4));
                let w = PackedArgs { codes, scales, global, rows: 1, cols: len };
                adamw::adamw_packed(client, w, grad(F32), [state(coding), state(coding)], coding, STEP, chunk)?;
            }
        }
        gradient::square_sum(client, zeros(len, 4), F32, zeros(1, 4))?;
        gradient::accumulate(client, grad(dtype), grad(F32))?;
    }
    Ok(())
}

const MASTERS: [adamw::Master; 4] =
    [adamw::Master::Exact, adamw::Master::Residual, adamw::Master::Stochastic, adamw::Master::Nearest];

const CODINGS: [Coding; 3] = [Coding::Bytes, Coding::Nibbles, Coding::Nvfp4];

/// Some step of the optimizer.
pub(crate) const STEP: adamw::AdamwStep = adamw::AdamwStep {
    lr: 1e-4,
    beta1: 0.9,
    beta2: 0.95,
    eps: 1e-8,
    weight_decay: 0.1,
    bias1: 0.1,
    bias2: 0.05,
    grad_scale: 1.0,
    stream: Stream { seed: 1, step: 2, stream: 3 },
};
