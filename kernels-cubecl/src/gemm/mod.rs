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
//! | `mod.rs` | arguments, checks, launch |
//! | `shape.rs`, `form.rs` | the shape of a product; what is compiled into a launch |
//! | `tiles.rs` | the choice of a tile's width, and of joint launches |
//! | `kernel.rs` | the kernel: which cube makes which tile, and where the result goes |
//! | `stages.rs` | the sum of one tile: copies into shared memory, and `mma.sync` |
//!
//! Moves `i*r + j*r + i*j` values and computes `2*i*j*r` operations: bound by the tensor cores from about 300 rows on.

use crate::{
    device::{processors, sequence},
    error::{KernelError, expect_len, index, require},
    matmul::Product,
    mma::UNITS,
};
use cubecl::prelude::*;

mod form;
mod kernel;
mod shape;
mod stages;
mod tiles;

use form::Form;
use kernel::gemm_kernel;
pub use shape::GemmShape;
use shape::NAME;
use tiles::{TILE, columns};
pub use tiles::{gains_together, tile_columns};

/// One product, or several of one launch: `out = product(a, b)` times the tensor scales.
pub struct Gemm<R: Runtime> {
    /// Left operands of type `types.0` (f16 or bf16), row-major: one for each product, or one for all.
    pub a: Vec<ArrayArg<R>>,
    /// Right operands, likewise.
    pub b: Vec<ArrayArg<R>>,
    /// Tensor scales, f32 `[1]` each. Every product has the same number of them; the scales of the first product come
    /// first.
    pub scales: Vec<ArrayArg<R>>,
    /// Results of type `types.1`: one for each product, or one for the sum of all.
    pub out: Vec<ArrayArg<R>>,
    /// Types of operands and results.
    pub types: (StorageType, StorageType),
    /// The shape of each product. Products that share an operand have the same `r`; products that become one sum have
    /// the same `i` and `j`.
    pub shapes: Vec<GemmShape>,
    /// How the operands are stored.
    pub product: Product,
    /// Whether the product is added to the values in `out`. Such a launch has one product and no scales.
    pub accumulate: bool,
}

impl<R: Runtime> Gemm<R> {
    /// One product.
    pub fn one(
        a: ArrayArg<R>,
        b: ArrayArg<R>,
        scales: Vec<ArrayArg<R>>,
        out: ArrayArg<R>,
        types: (StorageType, StorageType),
        shape: GemmShape,
        product: Product,
    ) -> Self {
        let (a, b, out, shapes) = (vec![a], vec![b], vec![out], vec![shape]);
        Self { a, b, scales, out, types, shapes, product, accumulate: false }
    }

    /// Whether several products become one sum.
    fn summed(&self) -> bool {
        self.shapes.len() > 1 && self.out.len() == 1
    }

    fn check(&self) -> Result<(), KernelError> {
        self.check_counts()?;
        let (parts, first) = (self.shapes.len(), self.shapes[0]);
        for (p, shape @ GemmShape { i, j, r }) in self.shapes.iter().copied().enumerate() {
            expect_len(NAME, "a", self.a[p.min(self.a.len() - 1)].size(), i * r)?;
            expect_len(NAME, "b", self.b[p.min(self.b.len() - 1)].size(), j * r)?;
            expect_len(NAME, "out", self.out[p.min(self.out.len() - 1)].size(), i * j)?;
            shape.check(self.product)?;
            require(NAME, parts == 1 || i * j * r > 0, || {
                format!("product {p} of {parts} is empty: i = {i}, j = {j}, r = {r}")
            })?;
            if self.summed() {
                require(NAME, i == first.i && j == first.j, || {
                    format!("product {p} of a sum is {i} x {j}, the first is {} x {}", first.i, first.j)
                })?;
            } else {
                require(NAME, r == first.r, || {
                    format!("r = {r} for product {p} of one launch, r = {} for the first", first.r)
                })?;
            }
        }
        Ok(())
    }

    /// Refuses a number of buffers that does not fit the number of products.
    fn check_counts(&self) -> Result<(), KernelError> {
        let parts = self.shapes.len();
        require(NAME, parts > 0, || "a launch needs at least one product".into())?;
        let several = |name: &str, count: usize, may_be_shared: bool| {
            require(NAME, count == parts || may_be_shared && count == 1, || {
                format!("{count} {name} for {parts} products")
            })
        };
        several("left operands", self.a.len(), self.b.len() == parts && !self.summed())?;
        several("right operands", self.b.len(), self.a.len() == parts && !self.summed())?;
        several("results", self.out.len(), self.a.len() == parts && self.b.len() == parts)?;
        let scales = self.scales.len();
        require(NAME, scales.is_multiple_of(parts), || {
            format!("{scales} tensor scales cannot be divided among {parts} products")
        })?;
        require(NAME, !self.accumulate || parts == 1 && scales == 0, || {
            format!("{parts} products and {scales} tensor scales; adding to `out` takes one product without scales")
        })
    }
}

/// Launches the products, with the width of tiles that lets the device finish soonest.
///
/// # Errors
/// If a buffer does not fit its shape, [`GemmShape::fits`] is false, or the products cannot share a launch.
pub fn gemm<R: Runtime>(client: &ComputeClient<R>, products: Gemm<R>) -> Result<(), KernelError> {
    let shapes = if products.summed() { &products.shapes[..1] } else { &products.shapes };
    let cols = columns(shapes, processors(client), &tile_columns(client));
    gemm_in(client, products, cols)
}

/// The same as [`gemm()`] with tiles of `cols` columns, one of [`tile_columns`].
///
/// # Errors
/// The same as [`gemm()`].
pub fn gemm_in<R: Runtime>(client: &ComputeClient<R>, products: Gemm<R>, cols: usize) -> Result<(), KernelError> {
    products.check()?;
    let offered = tile_columns(client);
    require(NAME, offered.contains(&cols), || {
        format!("tiles of {cols} columns; this device can have tiles of {offered:?} columns")
    })?;
    let tiles = |shape: &GemmShape| shape.i.div_ceil(TILE as usize) * shape.j.div_ceil(cols);
    let count = if products.summed() { tiles(&products.shapes[0]) } else { products.shapes.iter().map(tiles).sum() };
    if count == 0 {
        return Ok(());
    }
    let GemmShape { i, j, r } = products.shapes[0];
    let (a_across, b_across) = (products.product == Product::Tn, products.product != Product::Nt);
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
            index(NAME, "i", i)?,
            index(NAME, "j", j)?,
            index(NAME, "r", r)?,
            Form { cols: cols as u32, a_across, b_across },
            products.accumulate,
            products.types.0,
            products.types.1,
        );
    }
    Ok(())
}
