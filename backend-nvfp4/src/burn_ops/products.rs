//! Products of linear layers one by one, which every backend can make.

use crate::{kernels::Nvfp4Kernels, packed::Operand, recipe::Precision};
use burn::tensor::{DType, ops::FloatTensor};
use kernels_cubecl::operands::Product;

/// Multiplies each pair of operands. A list of one operand is paired with every operand of the other list.
pub(crate) fn products<B: Nvfp4Kernels>(
    product: Product,
    a: &[Operand<B>],
    b: &[Operand<B>],
    precision: Precision,
    out: DType,
) -> Vec<FloatTensor<B>> {
    let of = |list: &[Operand<B>], i: usize| list[i.min(list.len() - 1)].clone();
    (0..a.len().max(b.len())).map(|i| one(product, of(a, i), of(b, i), precision, out)).collect()
}

fn one<B: Nvfp4Kernels>(
    product: Product,
    a: Operand<B>,
    b: Operand<B>,
    precision: Precision,
    out: DType,
) -> FloatTensor<B> {
    let dtype = precision.dtype();
    match (a, b) {
        (Operand::Dense(a), Operand::Dense(b)) => {
            let (a, b) = match product {
                Product::Nt => (a, B::float_transpose(b)),
                Product::Nn => (a, b),
                Product::Tn => (B::float_transpose(a), b),
            };
            B::dense_matmul(a, b, precision, out)
        }
        (Operand::Dense(a), Operand::Packed(b)) => B::nvfp4_matmul(a, &b, product, out),
        (Operand::Packed(a), Operand::Packed(b)) if product != Product::Tn => {
            B::nvfp4_matmul_packed(&a, &b, product, dtype, out)
        }
        (Operand::Packed(a), b) => one(product, Operand::Dense(B::nvfp4_dequantize(&a, dtype)), b, precision, out),
        (Operand::Unscaled(_), _) | (_, Operand::Unscaled(_)) => {
            unreachable!("a backend that makes such operands multiplies them")
        }
    }
}
