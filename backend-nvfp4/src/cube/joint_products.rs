//! Products of layers that read the same activations, in one launch. Of the table in `products.rs`, the first row and the third
//! can do this. Gradients of weights, and operands that were made for their products ([`Operand::Unscaled`]), are multiplied here
//! also one by one.

use super::{
    launch::{arg, dims, empty, launched},
    packed_cube::PackedCube,
};
use crate::packed::{Operand, Packed, Unscaled};
use burn::tensor::{DType, backend::Backend};
use burn_cubecl::{CubeRuntime, kernel::into_contiguous, tensor::CubeTensor};
use kernels_cubecl::{
    block_scaled,
    gemm::{self, Gemm, GemmShape, gemm},
    mma,
    operands::Product,
};
use std::ops::Range;

/// What is made of several products.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Results {
    /// A matrix for each product.
    Each,
    /// A matrix in f32 for each product, and the sums of squares of its parts.
    WithSquares,
    /// The sum of all products.
    Sum,
}

/// Products that were made together.
pub(super) struct Made<R: CubeRuntime> {
    /// The results.
    pub(super) values: Vec<CubeTensor<R>>,
    /// Sums of squares of the parts of each result, f32. None where nobody asked for them.
    pub(super) squares: Vec<CubeTensor<R>>,
}

/// Makes products on values of type `dtype`, in one launch where that is faster, and stores `results` as `out`. A list of one
/// operand is paired with every operand of the other list. Returns `None` for products that [`burn_ops::products`] has to make.
///
/// [`burn_ops::products`]: crate::burn_ops::products
pub(super) fn joint<B, R>(
    product: Product,
    a: &[Operand<B>],
    b: &[Operand<B>],
    dtype: DType,
    out: DType,
    results: Results,
) -> Option<Made<R>>
where
    R: CubeRuntime,
    B: Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
{
    let (count, summed) = (a.len().max(b.len()), results == Results::Sum);
    let of = |list: &[Operand<B>], i: usize| i.min(list.len() - 1);
    let shape = |i: usize| GemmShape::of(product, dims_of(&a[of(a, i)]), dims_of(&b[of(b, i)]));
    let shapes: Vec<_> = (0..count).map(shape).collect();
    let like = match &b[0] {
        Operand::Dense(x) | Operand::Unscaled(Unscaled { values: x, .. }) => x.clone(),
        Operand::Packed(w) => w.codes.clone(),
    };
    let client = &like.client;
    let alike = |list: &[Operand<B>]| list.iter().all(|x| global_of(x).is_some() == global_of(&list[0]).is_some());
    if dtype == DType::F32 || !mma::supported(client, dtype.into()) || !(alike(a) && alike(b)) {
        return None;
    }
    let globals = |i: usize| [global_of(&a[of(a, i)]), global_of(&b[of(b, i)])].into_iter().flatten().map(arg);
    let native = product == Product::Nt && packed_of(&a[0]).is_some() && block_scaled::trusted(client);
    let whole = shapes.iter().all(|shape| shape.fits(product) && shape.i * shape.j * shape.r > 0);
    let together = count > 1 && gemm::gains_together(client, &shapes, summed);
    let made_for_this = a.iter().chain(b).any(|x| matches!(x, Operand::Unscaled(_)));
    if native || !whole || !(together || made_for_this || results == Results::WithSquares) {
        return None;
    }
    let stored = if summed { &shapes[..1] } else { &shapes };
    let ys: Vec<_> = stored.iter().map(|s| empty(&like, [s.i, s.j], out)).collect();
    let dense = |list: &[Operand<B>]| list.iter().map(|x| values(x, dtype)).collect::<Vec<_>>();
    let (lefts, rights) = (dense(a), dense(b));
    let mut squares = Vec::new();
    let mut launch_some = |products: Range<usize>| {
        let of_these = |list: &[CubeTensor<R>]| match list {
            [one] => vec![arg(one)],
            many => many[products.clone()].iter().map(arg).collect(),
        };
        let mut args = Gemm {
            a: of_these(&lefts),
            b: of_these(&rights),
            scales: products.clone().flat_map(globals).collect(),
            out: of_these(&ys),
            types: (dtype.into(), out.into()),
            shapes: shapes[products.clone()].to_vec(),
            product,
            accumulate: false,
            squares: vec![],
        };
        if results == Results::WithSquares {
            let lens = gemm::squares_of(client, &args);
            let places: Vec<_> = lens.into_iter().map(|len| empty(&like, [len], DType::F32)).collect();
            args.squares = places.iter().map(arg).collect();
            squares.extend(places);
        }
        launched(gemm(client, args));
    };
    if together || summed {
        launch_some(0..count);
    } else {
        (0..count).for_each(|i| launch_some(i..i + 1));
    }
    Some(Made { values: ys, squares })
}

/// The tensor scale of an operand that has one.
fn global_of<B, R>(x: &Operand<B>) -> Option<&CubeTensor<R>>
where
    R: CubeRuntime,
    B: Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
{
    match x {
        Operand::Dense(_) => None,
        Operand::Packed(Packed { global, .. }) | Operand::Unscaled(Unscaled { global, .. }) => Some(global),
    }
}

/// The rows and columns of an operand.
pub(super) fn dims_of<B, R>(x: &Operand<B>) -> [usize; 2]
where
    R: CubeRuntime,
    B: Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
{
    match x {
        Operand::Dense(x) | Operand::Unscaled(Unscaled { values: x, .. }) => dims(x),
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
        Operand::Dense(_) | Operand::Unscaled(_) => None,
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
        Operand::Unscaled(x) => x.values.clone(),
    }
}
