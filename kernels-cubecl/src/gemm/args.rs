//! The arguments of a launch, and whether they fit together.

use super::shape::{GemmShape, NAME};
use crate::{
    error::{KernelError, expect_len, require},
    operands::Product,
};
use cubecl::prelude::*;

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
    /// Whether the product is added to the values in `out`. Such a launch has one product. Its scales multiply the sum of both.
    pub accumulate: bool,
    /// Where the sums of squares of each f32 result go, f32, or nothing: [`super::squares_of()`] says how many there are.
    pub squares: Vec<ArrayArg<R>>,
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
        Self { a, b, scales, out, types, shapes, product, accumulate: false, squares: vec![] }
    }

    /// Whether several products become one sum.
    pub(crate) fn summed(&self) -> bool {
        self.shapes.len() > 1 && self.out.len() == 1
    }

    /// The shapes of the results: of one product if all become one sum.
    pub(crate) fn tiled(&self) -> &[GemmShape] {
        if self.summed() { &self.shapes[..1] } else { &self.shapes }
    }

    /// Refuses arguments that do not fit together.
    pub(crate) fn check(&self) -> Result<(), KernelError> {
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
        require(NAME, !self.accumulate || parts == 1, || {
            format!("{parts} products of one launch cannot be added to `out`; one can")
        })?;
        let (results, measured) = (self.out.len(), self.squares.len());
        require(NAME, measured == 0 || measured == results, || {
            format!("places for the sums of squares of {measured} results of {results}")
        })?;
        let result = self.types.1;
        require(NAME, measured == 0 || result.size() == 4, || {
            format!("results of type {result}; the squares of f32 results are summed")
        })
    }
}
