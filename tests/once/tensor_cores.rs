//! The kernels that need tensor cores.

use super::zeros::{Buffer, F32, Zeros};
use cubecl::ir::{ElemType, FloatKind, StorageType};
use kernels_cubecl::{
    KernelError,
    any_cuda::AnyCudaRuntime,
    attention::{self, AttentionShape, Instructions},
    block_scaled::{self, block_scaled},
    cuda_text::decoder::{self, ActivationRounding, Caches, DecoderBlock, DecoderShape, PAGE, Scratch, Weight},
    cuda_text::hopper,
    decode_attention,
    device::processors,
    e4m3::BYTES_PER_WORD,
    gemm::{self, Gemm, GemmShape},
    gemv::{Gemv, gemv},
    operands::Product,
};

const BF16: StorageType = StorageType::Scalar(ElemType::Float(FloatKind::BF16));

/// Every kind of product, in tiles of every width, on `mma.sync` and on Hopper's own instructions. Results in f32 that begin at
/// zero are made without and with the sums of their squares.
pub(super) fn gemms(zeros: &Zeros, rows: usize) -> Result<(), KernelError> {
    for cols in gemm::tile_columns(zeros.client) {
        each_gemm(zeros, rows, |products| gemm::gemm_in(zeros.client, products, cols))?;
        each_gemm(zeros, rows, |products| {
            let places = |shape: &GemmShape| zeros.floats(gemm::mma_squares(shape, cols));
            let measured = measured(products, places);
            measured.map_or(Ok(()), |products| gemm::gemm_in(zeros.client, products, cols))
        })?;
    }
    if !hopper::is_hopper(zeros.client) {
        return Ok(());
    }
    let widths = hopper::hopper_columns(Product::Nt);
    widths.iter().try_for_each(|cols| {
        each_gemm(zeros, rows, |products| {
            if !hopper::hopper_columns(products.product).contains(cols) {
                return Ok(());
            }
            hopper::hopper_gemm_in(zeros.client, products, *cols)
        })?;
        each_gemm(zeros, rows, |products| {
            if !hopper::hopper_columns(products.product).contains(cols) {
                return Ok(());
            }
            let places = |shape: &GemmShape| zeros.floats(hopper::hopper_squares(shape, *cols));
            let measured = measured(products, places);
            measured.map_or(Ok(()), |products| hopper::hopper_gemm_in(zeros.client, products, *cols))
        })
    })
}

/// The products with room for the sums of squares, if their results can be measured.
fn measured(products: Gemm<AnyCudaRuntime>, places: impl Fn(&GemmShape) -> Buffer) -> Option<Gemm<AnyCudaRuntime>> {
    let squares = products.shapes.iter().map(places).collect();
    (products.types.1 == F32 && !products.accumulate).then_some(Gemm { squares, ..products })
}

/// Launches every kind of product by `launch`.
fn each_gemm(
    zeros: &Zeros,
    rows: usize,
    launch: impl Fn(Gemm<AnyCudaRuntime>) -> Result<(), KernelError>,
) -> Result<(), KernelError> {
    let Zeros { dtype, .. } = *zeros;
    for (product, accumulate, result) in
        [(Product::Nt, false, dtype), (Product::Nn, false, dtype), (Product::Tn, false, F32), (Product::Tn, true, F32)]
    {
        let (i, j, r) = if product == Product::Tn { (136, 168, rows) } else { (rows, 168, 72) };
        let shape = GemmShape { i, j, r };
        let (a, b, out) = (zeros.values(i * r), zeros.values(j * r), zeros.sized(i * j, result.size()));
        let one = Gemm::one(a, b, vec![zeros.floats(1)], out, (dtype, result), shape, product);
        launch(Gemm { accumulate, ..one })?;
    }
    joint_gemms(zeros, rows.next_multiple_of(8), launch)
}

/// Three products with one left operand, three with one right operand both ways, and a sum of three.
fn joint_gemms(
    zeros: &Zeros,
    tokens: usize,
    launch: impl Fn(Gemm<AnyCudaRuntime>) -> Result<(), KernelError>,
) -> Result<(), KernelError> {
    let (outputs, inputs) = ([168, 40, 72], 136);
    for (product, shared_left, summed) in [
        (Product::Nt, true, false),
        (Product::Nt, false, false),
        (Product::Tn, false, false),
        (Product::Nn, false, true),
    ] {
        let shape = |&n: &usize| match (shared_left, summed) {
            (true, _) => GemmShape { i: tokens, j: n, r: inputs },
            (_, true) => GemmShape { i: tokens, j: inputs, r: n },
            _ => GemmShape { i: n, j: inputs, r: tokens },
        };
        let shapes: Vec<_> = outputs.iter().map(shape).collect();
        let each = |count: usize, ty: StorageType, len: &dyn Fn(&GemmShape) -> usize| -> Vec<_> {
            shapes[..count].iter().map(|shape| zeros.sized(len(shape), ty.size())).collect()
        };
        let result = if shared_left || summed { zeros.dtype } else { F32 };
        let products = Gemm {
            a: each(if shared_left { 1 } else { 3 }, zeros.dtype, &|s| s.i * s.r),
            b: each(if shared_left || summed { 3 } else { 1 }, zeros.dtype, &|s| s.j * s.r),
            scales: (0..6).map(|_| zeros.floats(1)).collect(),
            out: each(if summed { 1 } else { 3 }, result, &|s| s.i * s.j),
            types: (zeros.dtype, result),
            shapes: shapes.clone(),
            product,
            accumulate: false,
            squares: vec![],
        };
        launch(products)?;
    }
    Ok(())
}

pub(super) fn block_scaled_products(zeros: &Zeros, rows: usize) -> Result<(), KernelError> {
    let Zeros { client, dtype, .. } = *zeros;
    if !block_scaled::supported(client) {
        return Ok(());
    }
    for result in [dtype, F32] {
        let (a, w, out) = (zeros.packed(rows, 256), zeros.packed(40, 256), zeros.sized(rows * 40, result.size()));
        block_scaled(client, a, w, out, result)?;
    }
    Ok(())
}

/// One token and several, few and many rows of a weight, one weight and three.
pub(super) fn gemvs(zeros: &Zeros, rows: usize) -> Result<(), KernelError> {
    let Zeros { client, dtype, .. } = *zeros;
    for (outputs, inputs) in [(40usize, 256usize), (8450, 2560)] {
        for tokens in [1, rows.min(16)] {
            for outputs in [vec![outputs], vec![outputs, 24, 40]] {
                let weights = outputs.iter().map(|n| zeros.packed(*n, inputs)).collect();
                let ys = outputs.iter().map(|n| zeros.values(tokens * n)).collect();
                let product = Gemv { x: zeros.values(tokens * inputs), rows: tokens, weights, ys, dtype };
                let plan = product.plan(client)?;
                gemv(client, product, plan)?;
            }
        }
    }
    Ok(())
}

pub(super) fn attention(zeros: &Zeros, rows: usize) -> Result<(), KernelError> {
    let Zeros { client, dtype, .. } = *zeros;
    let by = Instructions::of(client, dtype);
    for head_dim in [64usize, 128] {
        let shape = AttentionShape { queries: rows, keys: rows, past: 0, heads: 4, kv_heads: 2, head_dim };
        let (queries, keys, lse) = (rows * 4 * head_dim, rows * 2 * head_dim, rows * 4);
        let qkv = || [zeros.values(queries), zeros.values(keys), zeros.values(keys)];
        let starts = || zeros.floats(rows);
        attention::forward(client, by, qkv(), starts(), zeros.values(queries), zeros.floats(lse), dtype, shape)?;
        attention::delta(client, zeros.values(queries), zeros.values(queries), zeros.floats(lse), dtype, shape)?;
        let saved = || {
            let [q, k, v] = qkv();
            attention::Saved { q, k, v, lse: zeros.floats(lse) }
        };
        let ends: Vec<u8> = (0..rows).flat_map(|_| (rows as u32).to_le_bytes()).collect();
        let ends = zeros.filled(&ends, 4);
        let out = [zeros.values(keys), zeros.values(keys)];
        let (dy, delta) = (zeros.values(queries), zeros.floats(lse));
        attention::backward_kv(client, by, saved(), dy, delta, starts(), ends, out, dtype, shape)?;
        let (dy, delta) = (zeros.values(queries), zeros.floats(lse));
        attention::backward_q(client, by, saved(), dy, delta, starts(), zeros.values(queries), dtype, shape)?;

        // Two new tokens over a cache.
        let past = rows * 3;
        let shape = AttentionShape { queries: 2, keys: past + 2, past, heads: 4, kv_heads: 2, head_dim };
        let (queries, keys) = (2 * 4 * head_dim, shape.keys * 2 * head_dim);
        let qkv = [zeros.values(queries), zeros.values(keys), zeros.values(keys)];
        decode_attention::decode_attention(client, qkv, zeros.floats(2), zeros.values(queries), dtype, shape)?;
    }
    Ok(())
}

/// Packed weights with activations of each kind, and dense ones; a token, and three; the second time over a past of two shares.
pub(super) fn decoder_blocks(zeros: &Zeros) -> Result<(), KernelError> {
    const SHAPE: DecoderShape =
        DecoderShape { hidden: 256, intermediate: 512, heads: 4, kv_heads: 2, head_dim: 64, eps: 1e-6 };
    let Zeros { client, dtype, .. } = *zeros;
    if dtype != BF16 || !decoder::fits(client, SHAPE, 3) {
        return Ok(());
    }
    let DecoderShape { hidden, intermediate, heads, kv_heads, head_dim, .. } = SHAPE;
    let (queries, keys) = (heads * head_dim, kv_heads * head_dim);
    for (packed, rounded, tokens, past, bytes) in [
        (true, ActivationRounding::EachRow, 1, 5, false),
        (true, ActivationRounding::By { full: 1.0 }, 3, 70, true),
        (false, ActivationRounding::Not, 3, 70, false),
    ] {
        let weight = |rows, cols| {
            if packed { Weight::Packed(zeros.packed(rows, cols)) } else { Weight::Dense(zeros.values(rows * cols)) }
        };
        // Every sequence has the first page for all of its tokens: nothing that is compared depends on it.
        let pages = (past + 1_usize).div_ceil(PAGE);
        let cache = || if bytes { zeros.floats(PAGE * keys / BYTES_PER_WORD) } else { zeros.values(PAGE * keys) };
        let caches = Caches {
            keys: cache(),
            values: cache(),
            bytes,
            pages: zeros.floats(tokens * pages),
            pasts: vec![past; tokens],
        };
        let block = DecoderBlock {
            shape: SHAPE,
            x: zeros.values(tokens * hidden),
            y: zeros.values(tokens * hidden),
            norms: [hidden, head_dim, head_dim, hidden].map(|len| zeros.floats(len)),
            rotary: [tokens * head_dim / 2, tokens * head_dim / 2, tokens].map(|len| zeros.floats(len)),
            weights: [
                weight(queries, hidden),
                weight(keys, hidden),
                weight(keys, hidden),
                weight(hidden, queries),
                weight(intermediate, hidden),
                weight(intermediate, hidden),
                weight(hidden, intermediate),
            ],
            rounded: [rounded; 4],
            caches,
        };
        decoder::decoder_block(client, block, &Scratch::new(client, SHAPE, tokens), processors(client))?;
    }
    Ok(())
}
