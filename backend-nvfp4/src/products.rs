//! Which kernel makes a product on a CubeCL device, and the copies that takes.
//!
//! | operands | kernel |
//! |---|---|
//! | 16-bit matrices, on tensor cores | [`gemm()`] |
//! | at most 16 rows of 16 bits times a packed weight, on tensor cores | [`gemv()`] |
//! | two packed matrices, on tensor cores that read NVFP4 | [`block_scaled()`] |
//! | a packed operand beside a 16-bit one, on tensor cores | dequantise to 16 bits (exact), then [`gemm()`] |
//! | f32 without tensor cores | cubek, one unit a tile |
//! | batched products, f32 in TF32 | cubek's own choice |
//! | a packed operand elsewhere | the portable kernel |
//!
//! Products of one launch: those of layers that read the same activations, in the first two rows and the fourth.

use crate::cube::{arg, dims, empty, launched};
use burn::tensor::{DType, Shape, TensorMetadata};
use burn_cubecl::{
    CubeRuntime,
    kernel::{
        cast, into_contiguous,
        matmul::{MatmulStrategy, matmul},
    },
    ops::numeric::empty_device_contiguous_dtype,
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
    dequantize::dequantize,
    gemm::{self, Gemm, gemm},
    gemv::{self, Gemv, gemv},
    matmul::{PackedArgs, Product, matmul_dense_packed, matmul_packed_packed},
    mma,
};

/// A packed matrix's buffers.
#[derive(Debug, Clone)]
pub(crate) struct Packed<R: CubeRuntime> {
    pub(crate) codes: CubeTensor<R>,
    pub(crate) scales: CubeTensor<R>,
    pub(crate) global: CubeTensor<R>,
    pub(crate) dims: [usize; 2],
}

impl<R: CubeRuntime> Packed<R> {
    pub(crate) fn args(&self) -> PackedArgs<R> {
        let [rows, cols] = self.dims;
        PackedArgs { codes: arg(&self.codes), scales: arg(&self.scales), global: arg(&self.global), rows, cols }
    }

    /// `code * scale` as `dtype`, which holds it exactly; with the tensor scale if `scaled`.
    pub(crate) fn values(&self, dtype: DType, scaled: bool) -> CubeTensor<R> {
        let [rows, cols] = self.dims;
        let y = empty(&self.codes, [rows, cols], dtype);
        let global = scaled.then(|| arg(&self.global));
        let client = &self.codes.client;
        launched(dequantize(client, arg(&self.codes), arg(&self.scales), global, arg(&y), dtype.into(), rows, cols));
        y
    }
}

/// An operand, dense or packed.
pub(crate) enum Side<'a, R: CubeRuntime> {
    Dense(&'a CubeTensor<R>),
    Packed(Box<Packed<R>>),
}

impl<R: CubeRuntime> Side<'_, R> {
    fn dims(&self) -> [usize; 2] {
        match self {
            Self::Dense(x) => dims(x),
            Self::Packed(w) => w.dims,
        }
    }

    fn packed(&self) -> Option<&Packed<R>> {
        match self {
            Self::Dense(_) => None,
            Self::Packed(w) => Some(w),
        }
    }

    fn global(&self) -> Option<&CubeTensor<R>> {
        self.packed().map(|w| &w.global)
    }

    /// As a dense matrix, its tensor scale left out.
    fn values(&self, dtype: DType) -> CubeTensor<R> {
        match self {
            Self::Dense(x) => into_contiguous((*x).clone()),
            Self::Packed(w) => w.values(dtype, false),
        }
    }
}

/// Several products on values of type `dtype` in one launch, as `out`, or their sum: a list of one operand goes with every
/// one of the other list. `None` if they have to be made one by one.
pub(crate) fn joint<R: CubeRuntime>(
    product: Product,
    a: &[Side<'_, R>],
    b: &[Side<'_, R>],
    dtype: DType,
    out: DType,
    summed: bool,
) -> Option<Vec<CubeTensor<R>>> {
    let count = a.len().max(b.len());
    let of = |list: &[Side<'_, R>], i: usize| i.min(list.len() - 1);
    let shape = |i: usize| gemm::GemmShape::of(product, a[of(a, i)].dims(), b[of(b, i)].dims());
    let shapes: Vec<_> = (0..count).map(shape).collect();
    let like = match &b[0] {
        Side::Dense(x) => (*x).clone(),
        Side::Packed(w) => w.codes.clone(),
    };
    let client = &like.client;
    let alike = |list: &[Side<'_, R>]| list.iter().all(|side| side.global().is_some() == list[0].global().is_some());
    if count == 1 || dtype == DType::F32 || !mma::supported(client, dtype.into()) || !(alike(a) && alike(b)) {
        return None;
    }
    let globals = |i: usize| [a[of(a, i)].global(), b[of(b, i)].global()].into_iter().flatten();
    if let ([x], Some(w)) = (a, b.iter().map(Side::packed).collect::<Option<Vec<_>>>())
        && product == Product::Nt
        && out == dtype
        && gemv::fits(shapes[0].i, shapes[0].r)
    {
        let x_values = x.values(dtype);
        let ys: Vec<_> = shapes.iter().map(|s| empty(&like, [s.i, s.j], out)).collect();
        let weights = w.into_iter().map(Packed::args).collect();
        let (scales, results) = (x.global().map(arg).into_iter().collect(), ys.iter().map(arg).collect());
        let (x, rows) = (arg(&x_values), shapes[0].i);
        launched(gemv(client, Gemv { x, rows, weights, scales, ys: results, dtype: dtype.into() }));
        return Some(ys);
    }
    let native = product == Product::Nt && a[0].global().is_some() && block_scaled::trusted(client);
    let whole = shapes.iter().all(|shape| shape.fits(product) && shape.i * shape.j * shape.r > 0);
    if native || !whole || !gemm::gains_together(client, &shapes, summed) {
        return None;
    }
    let results = if summed { &shapes[..1] } else { &shapes };
    let ys: Vec<_> = results.iter().map(|s| empty(&like, [s.i, s.j], out)).collect();
    let values = |list: &[Side<'_, R>]| list.iter().map(|side| side.values(dtype)).collect::<Vec<_>>();
    let args = |list: &[CubeTensor<R>]| list.iter().map(arg).collect();
    launched(gemm(
        client,
        Gemm {
            a: args(&values(a)),
            b: args(&values(b)),
            scales: (0..count).flat_map(globals).map(arg).collect(),
            out: args(&ys),
            types: (dtype.into(), out.into()),
            shapes,
            product,
            accumulate: false,
        },
    ));
    Some(ys)
}

/// A dense product in `precision`'s number format, as `out`; equal batch dimensions.
pub(crate) fn dense<R: CubeRuntime>(
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

/// `sum + aᵀ · b` in f32, `a` and `b` row-major.
pub(crate) fn accumulated<R: CubeRuntime>(
    sum: Option<CubeTensor<R>>,
    a: CubeTensor<R>,
    b: CubeTensor<R>,
    f32_only: bool,
) -> CubeTensor<R> {
    let ([r, i], [_, j]) = (dims(&a), dims(&b));
    let shape = gemm::GemmShape { i, j, r };
    let Some(sum) = sum else { return dense(turned(a), b, f32_only, DType::F32) };
    if a.dtype != DType::F32 && mma::supported(&a.client, a.dtype.into()) && shape.fits(Product::Tn) {
        let types = (a.dtype.into(), DType::F32.into());
        let product = Gemm::one(arg(&a), arg(&b), vec![], arg(&sum), types, shape, Product::Tn);
        launched(gemm(&a.client, Gemm { accumulate: true, ..product }));
        return sum;
    }
    burn_cubecl::ops::numeric::add(sum, dense(turned(a), b, f32_only, DType::F32))
}

/// A product of a dense and a packed matrix, as `out`: the dense one's dtype or f32.
pub(crate) fn packed<R: CubeRuntime>(a: CubeTensor<R>, w: &Packed<R>, product: Product, out: DType) -> CubeTensor<R> {
    let a = into_contiguous(a);
    if on_tensor_cores(&a, w.dims, product) {
        if product == Product::Nt && out == a.dtype && gemv::fits(dims(&a)[0], w.dims[1]) {
            return few_rows(a, w, &[]);
        }
        let dense = w.values(a.dtype, false);
        return tensor_cores(a, dense, &[&w.global], product, out);
    }
    let a = if a.dtype == out { a } else { cast(a, out) };
    let y = empty(&a, out_dims(&a, w.dims, product), a.dtype);
    let (rows, dtype) = (dims(&a)[0], a.dtype.into());
    launched(matmul_dense_packed(&a.client, arg(&a), rows, w.args(), arg(&y), dtype, product));
    y
}

/// A product of two packed matrices (`Nt` or `Nn`) on values of type `operand`, as `out`.
pub(crate) fn packed_both<R: CubeRuntime>(
    a: &Packed<R>,
    w: &Packed<R>,
    product: Product,
    operand: DType,
    out: DType,
) -> CubeTensor<R> {
    let few = product == Product::Nt && out == operand && gemv::fits(a.dims[0], w.dims[1]);
    let [j, r] = if product == Product::Nt { w.dims } else { [w.dims[1], w.dims[0]] };
    let whole = gemm::GemmShape { i: a.dims[0], j, r }.fits(product);
    if operand != DType::F32 && mma::supported(&w.codes.client, operand.into()) && (few || whole) {
        if few {
            return few_rows(a.values(operand, false), w, &[&a.global]);
        }
        let client = &w.codes.client;
        if product == Product::Nt && block_scaled::fits(j, r) && block_scaled::trusted(client) {
            let y = empty(&w.codes, [a.dims[0], j], out);
            launched(block_scaled(client, a.args(), w.args(), arg(&y), out.into()));
            return y;
        }
        let lhs = a.values(operand, false);
        return tensor_cores(lhs, w.values(operand, false), &[&a.global, &w.global], product, out);
    }
    if product != Product::Nt {
        return packed(a.values(out, true), w, product, out);
    }
    let y = empty(&w.codes, [a.dims[0], w.dims[0]], out);
    launched(matmul_packed_packed(&w.codes.client, a.args(), w.args(), arg(&y), out.into()));
    y
}

/// Whether the tensor-core kernels take the product: 16-bit values, whole chunks of eight of them.
fn on_tensor_cores<R: CubeRuntime>(a: &CubeTensor<R>, b_dims: [usize; 2], product: Product) -> bool {
    a.dtype != DType::F32 && mma::supported(&a.client, a.dtype.into()) && gemm_shape(a, b_dims, product).fits(product)
}

fn gemm_shape<R: CubeRuntime>(a: &CubeTensor<R>, b_dims: [usize; 2], product: Product) -> gemm::GemmShape {
    gemm::GemmShape::of(product, dims(a), b_dims)
}

/// `x · wᵀ` for a few rows: reads the codes themselves.
fn few_rows<R: CubeRuntime>(x: CubeTensor<R>, w: &Packed<R>, scales: &[&CubeTensor<R>]) -> CubeTensor<R> {
    let rows = dims(&x)[0];
    let y = empty(&x, [rows, w.dims[0]], x.dtype);
    let scales = scales.iter().map(|scale| arg(scale)).collect();
    let (weights, ys, dtype) = (vec![w.args()], vec![arg(&y)], x.dtype.into());
    launched(gemv(&x.client, Gemv { x: arg(&x), rows, weights, scales, ys, dtype }));
    y
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
    let gemm::GemmShape { i, j, .. } = gemm_shape(a, b_dims, product);
    [i, j]
}

/// The matrix whose buffer is contiguous, and whether that is the transpose of `x`.
fn stored<R: CubeRuntime>(x: CubeTensor<R>) -> (CubeTensor<R>, bool) {
    if !x.is_contiguous() {
        let turned = turned(x.clone());
        if turned.is_contiguous() {
            return (turned, true);
        }
    }
    (into_contiguous(x), false)
}

/// The transpose, without a copy.
fn turned<R: CubeRuntime>(mut x: CubeTensor<R>) -> CubeTensor<R> {
    x.meta.swap(0, 1);
    x
}

/// The automatic strategy takes tensor cores (TF32) for f32 where there are any.
fn without_tensor_cores<R: CubeRuntime>(lhs: CubeTensor<R>, rhs: CubeTensor<R>, out: DType) -> CubeTensor<R> {
    let mut shape: Shape = lhs.shape();
    let last = shape.rank() - 1;
    shape[last] = rhs.shape()[last];
    let y = empty_device_contiguous_dtype(lhs.client.clone(), lhs.device.clone(), shape, DType::F32);
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
