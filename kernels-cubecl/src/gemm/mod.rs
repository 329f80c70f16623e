//! Dense matrix products on tensor cores, with f16 or bf16 operands and f32 sums:
//! ```text
//! Nt  y[i, j] = sum_r a[i, r] * b[j, r]
//! Nn  y[i, j] = sum_r a[i, r] * b[r, j]
//! Tn  y[i, j] = sum_r a[r, i] * b[r, j]
//! for i { for j { for r { y[i][j] += a[i][r] * b[j][r] } } }      // the plain loop, Nt
//! ```
//! A packed operand is dequantized into a 16-bit buffer first ([`crate::dequantize`]): `code * block scale` is exact
//! there, and the tensor scale is applied to the finished f32 sum. That costs one pass over the weight (2 to 4 % of the
//! product at 4,096 rows) and leaves one kernel for every product.
//!
//! One launch can make several products of one operand with several others (layers that read the same activations),
//! whose tiles then fill the device together. It can also make the sum of several products, as one long sum over operands
//! in different buffers.
//!
//! | file | what it holds |
//! |---|---|
//! | `mod.rs` | the launch |
//! | `args.rs` | arguments, and whether they fit together |
//! | `shape.rs`, `form.rs` | the shape of a product; what is compiled into a launch |
//! | `tiles.rs` | the choice of a tile's width, and of joint launches |
//! | `kernel.rs` | the kernel: which cube makes which tile, and where the result goes |
//! | `stages.rs` | the sum of one tile: copies into shared memory, and `mma.sync` |
//!
//! [`crate::cuda_text::hopper`] makes the same products on Hopper's own matrix instructions.
//!
//! Moves `i*r + j*r + i*j` values and computes `2*i*j*r` operations: bound by the tensor cores from about 300 rows on.

use crate::{
    cuda_text::hopper::gemm as hopper,
    device::{processors, sequence},
    error::{KernelError, expect_len, index, require},
    mma::UNITS,
    operands::Product,
};
use cubecl::prelude::*;

pub(crate) mod args;
mod form;
mod kernel;
pub(crate) mod shape;
mod stages;
mod tiles;

pub use args::Gemm;
use form::GemmForm;
use kernel::gemm_kernel;
pub use shape::GemmShape;
use shape::NAME;
use tiles::{columns, tiles};
pub use tiles::{gains_together, mma_squares, tile_columns};

/// Launches the products on the best matrix instructions that the device has, with the width of tiles that lets it finish
/// soonest.
///
/// # Errors
/// If a buffer does not fit its shape, [`GemmShape::fits`] is false, or the products cannot share a launch.
pub fn gemm<R: Runtime>(client: &ComputeClient<R>, products: Gemm<R>) -> Result<(), KernelError> {
    products.check()?;
    if hopper::takes(client, &products) {
        return hopper::launch(client, products);
    }
    let cols = chosen_columns(client, &products);
    gemm_in(client, products, cols)
}

/// How many sums of squares each f32 result gets from the kernel that [`gemm()`] chooses for these products.
pub fn squares_of<R: Runtime>(client: &ComputeClient<R>, products: &Gemm<R>) -> Vec<usize> {
    if hopper::takes(client, products) {
        return hopper::squares_of(client, products);
    }
    let cols = chosen_columns(client, products);
    products.tiled().iter().map(|shape| mma_squares(shape, cols)).collect()
}

fn chosen_columns<R: Runtime>(client: &ComputeClient<R>, products: &Gemm<R>) -> usize {
    columns(products.tiled(), processors(client), &tile_columns(client))
}

/// Launches the products on `mma.sync`, in tiles of `cols` columns, one of [`tile_columns`].
///
/// # Errors
/// The same as [`gemm()`].
pub fn gemm_in<R: Runtime>(client: &ComputeClient<R>, products: Gemm<R>, cols: usize) -> Result<(), KernelError> {
    products.check()?;
    let offered = tile_columns(client);
    require(NAME, offered.contains(&cols), || {
        format!("tiles of {cols} columns; this device can have tiles of {offered:?} columns")
    })?;
    for (sums, shape) in products.squares.iter().zip(&products.shapes) {
        expect_len(NAME, "squares", sums.size(), mma_squares(shape, cols))?;
    }
    let count: usize = products.tiled().iter().map(|shape| tiles(shape, cols)).sum();
    if count == 0 {
        return Ok(());
    }
    let GemmShape { i, j, r } = products.shapes[0];
    let form = GemmForm {
        cols: cols as u32,
        a_across: products.product == Product::Tn,
        b_across: products.product != Product::Nt,
        measured: !products.squares.is_empty(),
    };
    // SAFETY: buffer lengths were checked against the shapes; copies and stores are guarded at the edges.
    unsafe {
        gemm_kernel::launch_unchecked(
            client,
            CubeCount::Static(index(NAME, "tiles", count)?, 1, 1),
            CubeDim::new_1d(UNITS),
            sequence(products.a),
            sequence(products.b),
            sequence(products.scales),
            sequence(products.out),
            sequence(products.squares),
            index(NAME, "i", i)?,
            index(NAME, "j", j)?,
            index(NAME, "r", r)?,
            form,
            products.accumulate,
            products.types.0,
            products.types.1,
        );
    }
    Ok(())
}
