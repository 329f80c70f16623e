//! The shape of a product, and which shapes the kernel takes.

use crate::{
    error::{KernelError, expect_multiple},
    operands::Product,
};

/// The name of the kernel in messages.
pub(crate) const NAME: &str = "gemm";

/// The shape of a product `y[i, j]`.
#[derive(Debug, Clone, Copy)]
pub struct GemmShape {
    /// Rows of y.
    pub i: usize,
    /// Columns of y.
    pub j: usize,
    /// Length of the sums.
    pub r: usize,
}

impl GemmShape {
    /// The shape of a product of matrices with these rows and columns.
    pub fn of(product: Product, [a_rows, a_cols]: [usize; 2], [b_rows, b_cols]: [usize; 2]) -> Self {
        match product {
            Product::Nt => Self { i: a_rows, j: b_rows, r: a_cols },
            Product::Nn => Self { i: a_rows, j: b_cols, r: a_cols },
            Product::Tn => Self { i: a_cols, j: b_cols, r: a_rows },
        }
    }

    /// Whether the rows of operands and result consist of whole octets, which the kernel copies at once.
    pub fn fits(self, product: Product) -> bool {
        self.check(product).is_ok()
    }

    pub(super) fn check(self, product: Product) -> Result<(), KernelError> {
        // The columns of `a`. The columns of `b` are j or, for Nt, r as well.
        let (name, cols) = if product == Product::Tn { ("i", self.i) } else { ("r", self.r) };
        expect_multiple(NAME, name, cols, 8)?;
        expect_multiple(NAME, "j", self.j, 8)
    }
}
