//! Products with packed operands against f64, over more than 200 random shapes on each backend.

use crate::support::{Cpu, Cube, Random, host, matrix, on_gpu, relative, skipped_for};
use backend_nvfp4::{Block, Nvfp4Backend, Nvfp4Tensor, Product, QuantizeSpec, Rounding, Scaling, reference};
use burn::tensor::{DType, Tensor, TensorData, TensorPrimitive};
use burn_cubecl::CubeRuntime;
use cubecl::{
    ir::{ElemType, FloatKind, StorageType},
    prelude::SequenceArg,
};
use kernels_cubecl::{gemm, gemv, mma};

/// Sums of up to a few hundred terms in f32, against f64.
const BOUND: f64 = 2e-6;

#[test]
fn products_on_the_cpu() {
    random_shapes::<Cpu>(Default::default());
}

#[test]
fn products_on_the_gpu() {
    on_gpu!(on_cube);
}

fn on_cube<R: CubeRuntime>() {
    random_shapes::<Cube<R>>(R::Device::default());
}

fn random_shapes<B: Nvfp4Backend>(device: B::Device) {
    let mut random = Random::new(11);
    for case in 0..216 {
        let m = 1 + random.below(if case % 3 == 0 { 5 } else { 150 });
        let n = 1 + random.below(150);
        let k = 16 * (1 + random.below(12));
        let scaling = if case % 2 == 0 { Scaling::Two } else { Scaling::Single };
        let spec = QuantizeSpec { scaling, block: Block::Row, rounding: Rounding::Nearest };
        let std = 10f32.powi(random.below(5) as i32 - 3);
        let (x, w) = (random.normals(m * k, 1.0), random.normals(n * k, std));
        let dy = random.normals(m * n, 0.1);
        let packed = |v: &[f32], rows, cols| Nvfp4Tensor::quantize(matrix::<B>(v, rows, cols, &device), spec);
        let (xq, wq) = (packed(&x, m, k), packed(&w, n, k));
        let (xd, wd) = (host(xq.dequantize(DType::F32)), host(wq.dequantize(DType::F32)));
        let label = format!("case {case}: m {m} n {n} k {k} {scaling:?}");
        let product = |a: &[f32], rows, cols, q: &Nvfp4Tensor<B>, product| {
            let a = matrix::<B>(a, rows, cols, &device).into_primitive().tensor();
            let y = B::nvfp4_matmul(a, &q.primitive(), product, DType::F32);
            host(Tensor::<B, 2>::from_primitive(TensorPrimitive::Float(y)))
        };

        let forward = reference::matmul_nt(&x, &wd, m, n, k);
        assert!(relative(&product(&x, m, k, &wq, Product::Nt), forward) < BOUND, "{label} forward");
        let both = reference::matmul_nt(&xd, &wd, m, n, k);
        let y = B::nvfp4_matmul_packed(&xq.primitive(), &wq.primitive(), Product::Nt, DType::F32, DType::F32);
        let y = host(Tensor::<B, 2>::from_primitive(TensorPrimitive::Float(y)));
        assert!(relative(&y, both) < BOUND, "{label} packed x packed");
        let dx = reference::matmul_nt(&dy, &transpose(&wd, n, k), m, k, n);
        assert!(relative(&product(&dy, m, n, &wq, Product::Nn), dx) < BOUND, "{label} dgrad");
        let dw = reference::matmul_nt(&transpose(&dy, m, n), &transpose(&xd, m, k), n, k, m);
        assert!(relative(&product(&dy, m, n, &xq, Product::Tn), dw) < BOUND, "{label} wgrad");
    }
}

#[test]
fn few_rows_times_codes() {
    on_gpu!(few_rows);
}

/// The decode kernel: both tile heights, columns shared by several planes or not, one token (from shared memory) to
/// sixteen, rows left over.
fn few_rows<R: CubeRuntime>() {
    let device = R::Device::default();
    let client = R::client(&device);
    let mut random = Random::new(29);
    for (dtype, kind, bound) in [(DType::BF16, FloatKind::BF16, 4e-3), (DType::F16, FloatKind::F16, 5e-4)] {
        let storage = StorageType::Scalar(ElemType::Float(kind));
        if !mma::supported(&client, storage) {
            return skipped_for("no tensor cores");
        }
        for (n, k) in [(40, 256), (40, 1536), (2557, 768), (300, 9728), (8450, 2560)] {
            let spec = QuantizeSpec { scaling: Scaling::Two, block: Block::Row, rounding: Rounding::Nearest };
            let w = random.normals(n * k, 0.1);
            let w = Nvfp4Tensor::quantize(matrix::<Cube<R>>(&w, n, k, &device), spec);
            let values = host(w.dequantize(DType::F32));
            for m in [1, 2, 8, 9, 16] {
                let x = matrix::<Cube<R>>(&random.normals(m * k, 1.0), m, k, &device).cast(dtype);
                let rounded = host(x.clone());
                let x = x.into_primitive().tensor();
                let y = <Cube<R> as Nvfp4Backend>::nvfp4_matmul(x, &w.primitive(), Product::Nt, dtype);
                let ours = host(Tensor::<Cube<R>, 2>::from_primitive(TensorPrimitive::Float(y)));
                let error = relative(&ours, reference::matmul_nt(&rounded, &values, m, n, k));
                assert!(gemv::fits(m, k) && error < bound, "{m}x{n}x{k} {dtype:?}: {error:e}");
            }
        }
    }
}

fn transpose(x: &[f32], rows: usize, cols: usize) -> Vec<f32> {
    (0..rows * cols).map(|i| x[i % rows * cols + i / rows]).collect()
}

#[test]
fn tiles_of_every_width() {
    on_gpu!(tiles);
}

/// The tensor-core product in each of its tiles, on ragged shapes, from zero and added to what is there. Devices without
/// tensor cores have no such product.
fn tiles<R: CubeRuntime>() {
    let device = R::Device::default();
    let client = R::client(&device);
    let [bf16, f32] = [FloatKind::BF16, FloatKind::F32].map(|kind| StorageType::Scalar(ElemType::Float(kind)));
    if !mma::supported(&client, bf16) {
        return skipped_for("no tensor cores");
    }
    let widths = gemm::tile_columns(&client);
    let mut random = Random::new(23);
    for case in 0..36 {
        let product = [Product::Nt, Product::Nn, Product::Tn][case % 3];
        let cols = widths[case / 3 % widths.len()];
        let accumulate = case % 2 == 1;
        let shape =
            gemm::Shape { i: 8 * (1 + random.below(40)), j: 8 * (1 + random.below(50)), r: 8 * (1 + random.below(40)) };
        let gemm::Shape { i, j, r } = shape;
        let mut values = |len: usize| -> Vec<half::bf16> {
            random.normals(len, 1.0).into_iter().map(half::bf16::from_f32).collect()
        };
        let (a, b, start) = (values(i * r), values(j * r), values(i * j));
        let floats = |v: &[half::bf16]| v.iter().map(|x| x.to_f32()).collect::<Vec<f32>>();
        let rows_of = |v: &[half::bf16], across: bool, outer: usize| {
            if across { transpose(&floats(v), r, outer) } else { floats(v) }
        };
        let (rows, columns) = (rows_of(&a, product == Product::Tn, i), rows_of(&b, product != Product::Nt, j));
        let expected = reference::matmul_nt(&rows, &columns, i, j, r).into_iter().zip(&start);
        let expected = expected.map(|(y, start)| if accumulate { y + f64::from(start.to_f32()) } else { y });
        let put = |v: &[half::bf16], dtype: DType| -> Tensor<Cube<R>, 1> {
            Tensor::from_data(TensorData::new(v.to_vec(), [v.len()]), (&device, dtype))
        };
        let arg = |x: Tensor<Cube<R>, 1>| x.into_primitive().tensor().into_array_arg();
        let (a, b, y) = (arg(put(&a, DType::BF16)), arg(put(&b, DType::BF16)), put(&start, DType::F32));
        let (scales, out) = (SequenceArg::new(), arg(y.clone()));
        gemm::gemm_in(&client, a, b, scales, out, (bf16, f32), shape, product, accumulate, cols).unwrap();
        let error = relative(&host(y), expected);
        assert!(error < BOUND, "{product:?} {shape:?} in columns of {cols}, accumulate {accumulate}: {error:e}");
    }
}
