//! The gradient of a parameter, on its way from the product that makes it to the optimizer.

use burn::tensor::{backend::Backend, ops::FloatTensor};

/// The gradient of a parameter. The kernel that made it may have summed its squares, part by part.
#[derive(Debug, Clone)]
pub struct Gradient<B: Backend> {
    /// The gradient, f32 or bf16, of any shape.
    pub values: FloatTensor<B>,
    /// Sums of the squares of `values`, f32 `[N]`; each value counts in one of them.
    pub squares: Option<FloatTensor<B>>,
}

impl<B: Backend> Gradient<B> {
    /// A gradient whose squares nobody has summed.
    pub fn unmeasured(values: FloatTensor<B>) -> Self {
        Self { values, squares: None }
    }
}
