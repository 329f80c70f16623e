//! Which kernel makes a single product on a CubeCL device, and which copies of operands it needs. `joint_products.rs` makes several
//! at once, `token_products.rs` those of sequences' newest tokens. The number of rows does not decide which kernel is taken: so
//! the result for a row does not depend on how many there are.
//!
//! | operands | kernel |
//! |---|---|
//! | 16-bit matrices, on tensor cores | [`gemm()`]; on Hopper, by its own matrix instructions |
//! | two packed matrices, on tensor cores that read NVFP4 | [`block_scaled()`] |
//! | a packed operand and a 16-bit one, or two packed, on other tensor cores | dequantize (exact), then [`gemm()`] |
//! | what the quantizer made for one product, on other tensor cores | [`gemm()`] of these values (`joint_products.rs`) |
//! | f32 matrices | cubek, one unit a tile |
//! | batched products, f32 matrices in TF32 | cubek's own choice |
//! | a packed operand where activations are f32 or TF32, or on any other device | the portable kernel |

use super::{
    launch::{arg, dims, empty, launched, writable},
    packed_cube::PackedCube,
};
use burn::tensor::{DType, Shape, TensorMetadata};
use burn_cubecl::{
    CubeRuntime,
    kernel::{
        cast, into_contiguous,
        matmul::{MatmulStrategy, matmul},
    },
    ops::{numeric, reshape},
    tensor::CubeTensor,
};
use cubek::{
    matmul::{
        definition::{MatmulElems, MatmulGlobalElems},
        launch::Strategy,
    },
    std::InputBinding,
};
use kernels_cubecl::{
    block_scaled::{self, block_scaled},
    gemm::{Gemm, GemmShape, gemm},
    matmul::{matmul_dense_packed, matmul_packed_packed},
    mma,
    operands::Product,
};

/// Multiplies dense batches of matrices and stores the result as `out`. If `f32_only`, no tensor cores take part. The
/// batch dimensions of both operands are equal.
pub(super) fn dense<R: CubeRuntime>(
    lhs: CubeTensor<R>,
    rhs: CubeTensor<R>,
    f32_only: bool,
    out: DType,
) -> CubeTensor<R> {
    assert_eq!(lhs.dtype, rhs.dtype, "CubeCL reads a second dtype as garbage");
    if f32_only {
        return without_tensor_cores(lhs, rhs, out);
    }
    if lhs.shape().rank() == 2 && mma::supported(&lhs.client, lhs.dtype.into()) && lhs.dtype != DType::F32 {
        let (a, a_across) = stored(lhs);
        let (b, b_along) = stored(rhs);
        let (a, b, product) = match (a_across, b_along) {
            (false, true) => (a, b, Product::Nt),
            (false, false) => (a, b, Product::Nn),
            (true, false) => (a, b, Product::Tn),
            (true, true) => (into_contiguous(turned(a)), b, Product::Nt),
        };
        return tensor_cores(a, b, &[], product, out);
    }
    matmul(lhs, rhs, None, MatmulStrategy::default(), out).expect("matmul set-up")
}

/// Computes `(sum + aᵀ · b) * factor` in f32 from row-major `a` and `b`. The factor is an f32 `[1]`.
pub(super) fn accumulated<R: CubeRuntime>(
    sum: Option<CubeTensor<R>>,
    a: CubeTensor<R>,
    b: CubeTensor<R>,
    factor: CubeTensor<R>,
    f32_only: bool,
) -> CubeTensor<R> {
    let ([r, i], [_, j]) = (dims(&a), dims(&b));
    let shape = GemmShape { i, j, r };
    if a.dtype != DType::F32 && mma::supported(&a.client, a.dtype.into()) && shape.fits(Product::Tn) {
        let accumulate = sum.is_some();
        let y = sum.map_or_else(|| empty(&a, [i, j], DType::F32), writable);
        let (types, scales) = ((a.dtype.into(), DType::F32.into()), vec![arg(&factor)]);
        let args = Gemm::one(arg(&a), arg(&b), scales, arg(&y), types, shape, Product::Tn);
        launched(gemm(&a.client, Gemm { accumulate, ..args }));
        return y;
    }
    let added = dense(turned(a), b, f32_only, DType::F32);
    let sum = match sum {
        Some(sum) => numeric::add(sum, added),
        None => added,
    };
    numeric::mul(sum, reshape(factor, Shape::new([1, 1])))
}

/// A product of a dense and a packed matrix, as `out`: the dense one's dtype or f32.
pub(super) fn packed<R: CubeRuntime>(
    a: CubeTensor<R>,
    w: &PackedCube<R>,
    product: Product,
    out: DType,
) -> CubeTensor<R> {
    let a = into_contiguous(a);
    if on_tensor_cores(&a, w.dims(), product) {
        let dense = w.values(a.dtype, false);
        return tensor_cores(a, dense, &[&w.global], product, out);
    }
    let a = if a.dtype == out { a } else { cast(a, out) };
    let y = empty(&a, out_dims(&a, w.dims(), product), a.dtype);
    let (rows, dtype) = (dims(&a)[0], a.dtype.into());
    launched(matmul_dense_packed(&a.client, arg(&a), rows, w.args(), arg(&y), dtype, product));
    y
}

/// Multiplies two packed matrices (`Nt` or `Nn`) on values of type `operand` and stores the result as `out`.
pub(super) fn packed_both<R: CubeRuntime>(
    a: &PackedCube<R>,
    w: &PackedCube<R>,
    product: Product,
    operand: DType,
    out: DType,
) -> CubeTensor<R> {
    let [j, r] = if product == Product::Nt { w.dims() } else { [w.dims()[1], w.dims()[0]] };
    let whole = GemmShape { i: a.dims()[0], j, r }.fits(product);
    if operand != DType::F32 && mma::supported(&w.codes.client, operand.into()) && whole {
        let client = &w.codes.client;
        if product == Product::Nt && block_scaled::fits(j, r) && block_scaled::trusted(client) {
            let y = empty(&w.codes, [a.dims()[0], j], out);
            launched(block_scaled(client, a.args(), w.args(), arg(&y), out.into()));
            return y;
        }
        let lhs = a.values(operand, false);
        return tensor_cores(lhs, w.values(operand, false), &[&a.global, &w.global], product, out);
    }
    if product != Product::Nt {
        return packed(a.values(out, true), w, product, out);
    }
    let y = empty(&w.codes, [a.dims()[0], w.dims()[0]], out);
    launched(matmul_packed_packed(&w.codes.client, a.args(), w.args(), arg(&y), out.into()));
    y
}

/// Whether the tensor-core kernels take the product: they need 16-bit values in whole chunks of eight.
fn on_tensor_cores<R: CubeRuntime>(a: &CubeTensor<R>, b_dims: [usize; 2], product: Product) -> bool {
    a.dtype != DType::F32 && mma::supported(&a.client, a.dtype.into()) && gemm_shape(a, b_dims, product).fits(product)
}

fn gemm_shape<R: CubeRuntime>(a: &CubeTensor<R>, b_dims: [usize; 2], product: Product) -> GemmShape {
    GemmShape::of(product, dims(a), b_dims)
}

fn tensor_cores<R: CubeRuntime>(
    a: CubeTensor<R>,
    b: CubeTensor<R>,
    scales: &[&CubeTensor<R>],
    product: Product,
    out: DType,
) -> CubeTensor<R> {
    let shape = gemm_shape(&a, dims(&b), product);
    if !shape.fits(product) {
        let (lhs, rhs) = match product {
            Product::Nt => (a, turned(b)),
            Product::Nn => (a, b),
            Product::Tn => (turned(a), b),
        };
        assert!(scales.is_empty(), "a product with a packed operand was checked before");
        return matmul(lhs, rhs, None, MatmulStrategy::default(), out).expect("matmul set-up");
    }
    let y = empty(&a, [shape.i, shape.j], out);
    let scales = scales.iter().map(|scale| arg(scale)).collect();
    let types = (a.dtype.into(), out.into());
    launched(gemm(&a.client, Gemm::one(arg(&a), arg(&b), scales, arg(&y), types, shape, product)));
    y
}

fn out_dims<R: CubeRuntime>(a: &CubeTensor<R>, b_dims: [usize; 2], product: Product) -> [usize; 2] {
    let GemmShape { i, j, .. } = gemm_shape(a, b_dims, product);
    [i, j]
}

/// Returns a matrix whose buffer is contiguous, and whether it is the transpose of `x`.
fn stored<R: CubeRuntime>(x: CubeTensor<R>) -> (CubeTensor<R>, bool) {
    if !x.is_contiguous() {
        let turned = turned(x.clone());
        if turned.is_contiguous() {
            return (turned, true);
        }
    }
    (into_contiguous(x), false)
}

/// Transposes without a copy.
fn turned<R: CubeRuntime>(mut x: CubeTensor<R>) -> CubeTensor<R> {
    x.meta.swap(0, 1);
    x
}

/// Multiplies f32 on plain units. The automatic strategy would use tensor cores (TF32) where there are any.
fn without_tensor_cores<R: CubeRuntime>(lhs: CubeTensor<R>, rhs: CubeTensor<R>, out: DType) -> CubeTensor<R> {
    let mut shape: Shape = lhs.shape();
    let last = shape.rank() - 1;
    shape[last] = rhs.shape()[last];
    let y = numeric::empty_device_contiguous_dtype(lhs.client.clone(), lhs.device.clone(), shape, DType::F32);
    let client = lhs.client.clone();
    let float = DType::F32.into();
    let mut elems = MatmulElems::from_globals(&MatmulGlobalElems { lhs: float, rhs: float, out: float });
    cubek::matmul::launch::launch_ref(
        &Strategy::SimpleUnit(Default::default()),
        &client,
        InputBinding::new(lhs.binding(), float),
        InputBinding::new(rhs.binding(), float),
        y.clone().binding(),
        &mut elems,
    )
    .expect("matmul set-up");
    if out == DType::F32 { y } else { cast(y, out) }
}
