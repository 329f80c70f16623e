//! Products of layers that read the same activations, in one launch. Of the table in `products.rs`, the first row and the third
//! can do this.

use super::{
    launch::{arg, dims, empty, launched},
    packed_cube::PackedCube,
};
use crate::packed::Operand;
use burn::tensor::{DType, backend::Backend};
use burn_cubecl::{CubeRuntime, kernel::into_contiguous, tensor::CubeTensor};
use kernels_cubecl::{
    block_scaled,
    gemm::{self, Gemm, GemmShape, gemm},
    matmul::Product,
    mma,
};

/// Makes several products on values of type `dtype` in one launch and stores them, or their sum if `summed`, as `out`.
/// A list of one operand is paired with every operand of the other list. Returns `None` if the products have to be made
/// one by one.
pub(super) fn joint<B, R>(
    product: Product,
    a: &[Operand<B>],
    b: &[Operand<B>],
    dtype: DType,
    out: DType,
    summed: bool,
) -> Option<Vec<CubeTensor<R>>>
where
    R: CubeRuntime,
    B: Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
{
    let count = a.len().max(b.len());
    let of = |list: &[Operand<B>], i: usize| i.min(list.len() - 1);
    let shape = |i: usize| GemmShape::of(product, dims_of(&a[of(a, i)]), dims_of(&b[of(b, i)]));
    let shapes: Vec<_> = (0..count).map(shape).collect();
    let like = match &b[0] {
        Operand::Dense(x) => x.clone(),
        Operand::Packed(w) => w.codes.clone(),
    };
    let client = &like.client;
    let alike = |list: &[Operand<B>]| list.iter().all(|x| packed_of(x).is_some() == packed_of(&list[0]).is_some());
    if count == 1 || dtype == DType::F32 || !mma::supported(client, dtype.into()) || !(alike(a) && alike(b)) {
        return None;
    }
    let globals =
        |i: usize| [packed_of(&a[of(a, i)]), packed_of(&b[of(b, i)])].into_iter().flatten().map(|w| arg(&w.global));
    let native = product == Product::Nt && packed_of(&a[0]).is_some() && block_scaled::trusted(client);
    let whole = shapes.iter().all(|shape| shape.fits(product) && shape.i * shape.j * shape.r > 0);
    if native || !whole || !gemm::gains_together(client, &shapes, summed) {
        return None;
    }
    let results = if summed { &shapes[..1] } else { &shapes };
    let ys: Vec<_> = results.iter().map(|s| empty(&like, [s.i, s.j], out)).collect();
    let dense = |list: &[Operand<B>]| list.iter().map(|x| values(x, dtype)).collect::<Vec<_>>();
    let args = |list: &[CubeTensor<R>]| list.iter().map(arg).collect();
    launched(gemm(
        client,
        Gemm {
            a: args(&dense(a)),
            b: args(&dense(b)),
            scales: (0..count).flat_map(globals).collect(),
            out: args(&ys),
            types: (dtype.into(), out.into()),
            shapes,
            product,
            accumulate: false,
        },
    ));
    Some(ys)
}

fn dims_of<B, R>(x: &Operand<B>) -> [usize; 2]
where
    R: CubeRuntime,
    B: Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
{
    match x {
        Operand::Dense(x) => dims(x),
        Operand::Packed(w) => w.dims(),
    }
}

/// The packed matrix, if the operand is one.
pub(super) fn packed_of<B, R>(x: &Operand<B>) -> Option<&PackedCube<R>>
where
    R: CubeRuntime,
    B: Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
{
    match x {
        Operand::Dense(_) => None,
        Operand::Packed(w) => Some(w),
    }
}

/// The operand as a dense matrix, without its tensor scale.
fn values<B, R>(x: &Operand<B>, dtype: DType) -> CubeTensor<R>
where
    R: CubeRuntime,
    B: Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
{
    match x {
        Operand::Dense(x) => into_contiguous(x.clone()),
        Operand::Packed(w) => w.values(dtype, false),
    }
}
