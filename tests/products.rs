//! Products with packed operands are those of f64, on each backend, in each tile and by each plan of the kernels.

use crate::support::{Cpu, Cube, Feature, Random, host, lacks, matrix, on_gpu, relative};
use backend_nvfp4::{
    BlockShape, DeviceServices, Nvfp4Kernels, Nvfp4Tensor, Operand, Precision, Product, QuantizeSpec, Rounding, Scaling,
};
use burn::tensor::{DType, Tensor, TensorData, TensorPrimitive, ops::FloatTensor};
use burn_cubecl::{CubeRuntime, tensor::CubeTensor};
use cubecl::ir::{ElemType, FloatKind, StorageType};
use kernels_cubecl::{
    KernelError,
    cuda_text::hopper,
    gemm::{self, Gemm, GemmShape},
    gemv::{self, Gemv},
    mma,
    operands::PackedArgs,
};

/// How far a sum of a few hundred terms in f32 may be from f64.
const BOUND: f64 = 2e-6;

#[test]
fn packed_products_are_those_of_f64_on_the_cpu() {
    random_shapes::<Cpu>(Default::default());
}

#[test]
fn packed_products_are_those_of_f64_on_the_gpu() {
    on_gpu!(on_cube);
}

fn on_cube<R: CubeRuntime>() {
    random_shapes::<Cube<R>>(R::Device::default());
}

fn random_shapes<B: Nvfp4Kernels>(device: B::Device) {
    let mut random = Random::new(11);
    for case in 0..216 {
        let m = 1 + random.below(if case % 3 == 0 { 5 } else { 150 });
        let n = 1 + random.below(150);
        let k = 16 * (1 + random.below(12));
        let scaling = if case % 2 == 0 { Scaling::Two } else { Scaling::Single };
        let spec = QuantizeSpec { scaling, block: BlockShape::Row, rounding: Rounding::Nearest };
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

        let forward = matmul_nt(&x, &wd, m, n, k);
        assert!(relative(&product(&x, m, k, &wq, Product::Nt), forward) < BOUND, "{label} forward");
        let both = matmul_nt(&xd, &wd, m, n, k);
        let y = B::nvfp4_matmul_packed(&xq.primitive(), &wq.primitive(), Product::Nt, DType::F32, DType::F32);
        let y = host(Tensor::<B, 2>::from_primitive(TensorPrimitive::Float(y)));
        assert!(relative(&y, both) < BOUND, "{label} packed x packed");
        let dx = matmul_nt(&dy, &transpose(&wd, n, k), m, k, n);
        assert!(relative(&product(&dy, m, n, &wq, Product::Nn), dx) < BOUND, "{label} dgrad");
        let dw = matmul_nt(&transpose(&dy, m, n), &transpose(&xd, m, k), n, k, m);
        assert!(relative(&product(&dy, m, n, &xq, Product::Tn), dw) < BOUND, "{label} wgrad");
    }
}

#[test]
fn the_decode_kernel_multiplies_few_rows() {
    on_gpu!(few_rows);
}

/// The decode kernel with the plan that it chooses, for one to sixteen tokens and numbers of rows that leave a rest.
fn few_rows<R: CubeRuntime>() {
    let device = R::Device::default();
    let client = R::client(&device);
    let mut random = Random::new(29);
    for (dtype, kind, bound) in [(DType::BF16, FloatKind::BF16, 4e-3), (DType::F16, FloatKind::F16, 5e-4)] {
        let storage = StorageType::Scalar(ElemType::Float(kind));
        if !mma::supported(&client, storage) {
            return lacks(Feature::TensorCores);
        }
        for (n, k) in [(40, 256), (40, 1536), (2557, 768), (300, 9728), (8450, 2560)] {
            let spec = QuantizeSpec { scaling: Scaling::Two, block: BlockShape::Row, rounding: Rounding::Nearest };
            let w = random.normals(n * k, 0.1);
            let w = Nvfp4Tensor::quantize(matrix::<Cube<R>>(&w, n, k, &device), spec);
            let values = host(w.dequantize(DType::F32));
            for m in [1, 2, 8, 9, 16] {
                let x = matrix::<Cube<R>>(&random.normals(m * k, 1.0), m, k, &device).cast(dtype);
                let rounded = host(x.clone());
                let x = x.into_primitive().tensor();
                let precision = if dtype == DType::F16 { Precision::F16 } else { Precision::Bf16 };
                let weights = vec![Operand::Packed(w.primitive())];
                let y = <Cube<R> as Nvfp4Kernels>::token_products(Operand::Dense(x), weights, precision).remove(0);
                let ours = host(Tensor::<Cube<R>, 2>::from_primitive(TensorPrimitive::Float(y)));
                let error = relative(&ours, matmul_nt(&rounded, &values, m, n, k));
                assert!(gemv::fits(m, k) && error < bound, "{m}x{n}x{k} {dtype:?}: {error:e}");
            }
        }
    }
}

#[test]
fn a_token_has_the_same_bits_beside_any_number_of_others() {
    on_gpu!(any_number_of_tokens);
}

/// Rows of 33 tokens are those of fewer, bit for bit: for a large head, whose sums one plane makes, and for weights whose columns
/// are shared among planes.
fn any_number_of_tokens<R: CubeRuntime>() {
    let device = R::Device::default();
    if !mma::supported(&R::client(&device), BF16) {
        return lacks(Feature::TensorCores);
    }
    let mut random = Random::new(43);
    for (n, k) in [(40_960, 512), (2560, 4096), (2557, 768), (300, 9728), (40, 256)] {
        let spec = QuantizeSpec { scaling: Scaling::Two, block: BlockShape::Row, rounding: Rounding::Nearest };
        let w = Nvfp4Tensor::quantize(matrix::<Cube<R>>(&random.normals(n * k, 0.1), n, k, &device), spec);
        let x = matrix::<Cube<R>>(&random.normals(33 * k, 1.0), 33, k, &device).cast(DType::BF16);
        let product = |rows: std::ops::Range<usize>| {
            let x = Operand::Dense(x.clone().slice(rows).into_primitive().tensor());
            let weights = vec![Operand::Packed(w.primitive())];
            let y = <Cube<R> as Nvfp4Kernels>::token_products(x, weights, Precision::Bf16).remove(0);
            host(Tensor::<Cube<R>, 2>::from_primitive(TensorPrimitive::Float(y)))
        };
        let all = product(0..33);
        for rows in [0..1, 7..8, 16..17, 32..33, 0..2, 3..8, 0..16, 16..33] {
            let (first, end) = (rows.start * n, rows.end * n);
            assert!(product(rows.clone()) == all[first..end], "tokens {rows:?} of 33 times {n}x{k}");
        }
    }
}

#[test]
fn the_decode_kernel_multiplies_by_every_plan() {
    on_gpu!(plans);
}

/// The decode kernel with plans that it would not choose: tiles shared evenly and unevenly, one to
/// four spans in flight, and the tokens' values in shared memory as a whole and in windows.
fn plans<R: CubeRuntime>() {
    let device = R::Device::default();
    let client = R::client(&device);
    let storage = StorageType::Scalar(ElemType::Float(FloatKind::BF16));
    if !mma::supported(&client, storage) {
        return lacks(Feature::TensorCores);
    }
    let mut random = Random::new(31);
    let spec = QuantizeSpec { scaling: Scaling::Two, block: BlockShape::Row, rounding: Rounding::Nearest };
    let arg = |x: &CubeTensor<R>| x.clone().into_array_arg();
    let mut tried = 0;
    for (n, k, m) in [(333, 4864, 1), (333, 4864, 3), (150, 2560, 12), (333, 9728, 7), (333, 4864, 12)] {
        let w = Nvfp4Tensor::quantize(matrix::<Cube<R>>(&random.normals(n * k, 0.1), n, k, &device), spec);
        let values = host(w.dequantize(DType::F32));
        let parts = w.primitive();
        let x = matrix::<Cube<R>>(&random.normals(m * k, 1.0), m, k, &device).cast(DType::BF16);
        let expected = matmul_nt(&host(x.clone()), &values, m, n, k);
        for choice in [[1, 4, 2], [2, 2, 3], [3, 1, 1], [5, 2, 2], [8, 1, 4], [13, 1, 3], [19, 1, 1]] {
            let Some(plan) = gemv::GemvPlan::of(&client, m, k, storage, choice) else { continue };
            tried += 1;
            // The result has one dimension, because the rows of a matrix may be padded.
            let ys = [0; 2].map(|_| Tensor::<Cube<R>, 1>::zeros([m * n], (&device, DType::BF16)));
            let x = x.clone().reshape([m * k]).into_primitive().tensor();
            let w = || PackedArgs {
                codes: arg(&parts.codes),
                scales: arg(&parts.scales),
                global: arg(&parts.global),
                rows: n,
                cols: k,
            };
            // Two layers that read the same activations share a launch: here both have the same weight.
            let outs = ys.iter().map(|y| arg(&y.clone().into_primitive().tensor())).collect();
            let (x, weights) = (arg(&x), vec![w(), w()]);
            let product = Gemv { x, rows: m, weights, ys: outs, dtype: storage };
            gemv::gemv(&client, product, plan).unwrap();
            for y in ys {
                let error = relative(&host(y), expected.iter().copied());
                assert!(error < 4e-3, "{m} rows by {choice:?}: {error:e}");
            }
        }
    }
    // A device with little shared memory refuses the plans of the largest windows.
    assert!(tried >= 25, "only {tried} plans were tried");
}

fn transpose(x: &[f32], rows: usize, cols: usize) -> Vec<f32> {
    (0..rows * cols).map(|i| x[i % rows * cols + i / rows]).collect()
}

#[test]
fn the_ways_to_make_products_are_named() {
    on_gpu!(ways);
}

/// The last way is the one that every device has.
fn ways<R: CubeRuntime>() {
    assert_eq!(Cube::<R>::tiers(&Default::default()).last(), Some(&"portable (matmul)"));
}

#[test]
fn operands_of_one_product_give_the_products_of_their_codes_on_the_gpu() {
    on_gpu!(operands_of_one_product);
}

/// What the quantizer makes for one product, in whatever form, is multiplied as the codes are, bit for bit: alone, and several at
/// once, few and many tiles.
fn operands_of_one_product<R: CubeRuntime>() {
    let (mut random, device) = (Random::new(53), R::Device::default());
    let (dtype, precision) = match mma::supported(&R::client(&device), BF16) {
        true => (DType::BF16, Precision::Bf16),
        false => (DType::F32, Precision::F32),
    };
    let spec = QuantizeSpec { scaling: Scaling::Two, block: BlockShape::Row, rounding: Rounding::Nearest };
    for (tokens, k, widths) in [(64, 96, [80, 112, 16]), (256, 512, [1024, 256, 256])] {
        let mut put = |cols: usize| {
            let x = matrix::<Cube<R>>(&random.normals(tokens * cols, 1.0), tokens, cols, &device);
            x.cast(dtype).into_primitive().tensor()
        };
        let (x, dys) = (put(k), widths.map(&mut put));
        let operand = |x: &FloatTensor<Cube<R>>, for_one_product: bool| match for_one_product {
            true => Cube::<R>::nvfp4_operand_across(x.clone(), spec, true),
            false => Operand::Packed(Cube::<R>::nvfp4_quantize_across(x.clone(), spec, true)),
        };
        for count in [1, 2, 3] {
            let [made, of_codes] = [true, false].map(|form| -> Vec<Vec<u32>> {
                let (dys, x) = (dys[..count].iter().map(|dy| operand(dy, form)).collect(), vec![operand(&x, form)]);
                let ys = Cube::<R>::products(Product::Nt, dys, x, precision, DType::F32).into_iter();
                let ys = ys.map(|y| host(Tensor::<Cube<R>, 2>::from_primitive(TensorPrimitive::Float(y))));
                ys.map(|y| y.into_iter().map(f32::to_bits).collect()).collect()
            });
            assert!(made == of_codes, "{count} products of {tokens} tokens");
        }
    }
}

#[test]
fn tiles_of_every_width_give_the_same_bits() {
    on_gpu!(one_order);
}

/// Sums take their terms in one order in tiles of every width, by `mma.sync` and by Hopper's own instructions: the number of rows,
/// which decides on the width, changes no bit of a row.
fn one_order<R: CubeRuntime>() {
    let device = R::Device::default();
    let client = R::client(&device);
    if !mma::supported(&client, BF16) {
        return lacks(Feature::TensorCores);
    }
    let mut random = Random::new(41);
    let shape = GemmShape { i: 72, j: 400, r: 2560 };
    let mut put = |len: usize| -> Tensor<Cube<R>, 1> {
        let values: Vec<half::bf16> = random.normals(len, 1.0).into_iter().map(half::bf16::from_f32).collect();
        Tensor::from_data(TensorData::new(values, [len]), (&device, DType::BF16))
    };
    let (a, b) = (put(shape.i * shape.r), put(shape.j * shape.r));
    let arg = |x: &Tensor<Cube<R>, 1>| x.clone().into_primitive().tensor().into_array_arg();
    let product = |launch: &dyn Fn(Gemm<R>) -> Result<(), KernelError>| -> Vec<u32> {
        let y = Tensor::<Cube<R>, 1>::zeros([shape.i * shape.j], (&device, DType::F32));
        launch(Gemm::one(arg(&a), arg(&b), vec![], arg(&y), (BF16, F32), shape, Product::Nt)).unwrap();
        host(y).into_iter().map(f32::to_bits).collect()
    };
    let widths = gemm::tile_columns(&client);
    let first = product(&|products| gemm::gemm_in(&client, products, widths[0]));
    for cols in &widths[1..] {
        let other = product(&|products| gemm::gemm_in(&client, products, *cols));
        assert!(other == first, "tiles of {cols} columns give other bits than those of {}", widths[0]);
    }
    if hopper::is_hopper(&client) {
        for &cols in hopper::hopper_columns(Product::Nt) {
            let other = product(&|products| hopper::hopper_gemm_in(&client, products, cols));
            assert!(other == first, "Hopper's tiles of {cols} columns give other bits than mma.sync");
        }
    }
}

const BF16: StorageType = StorageType::Scalar(ElemType::Float(FloatKind::BF16));
const F32: StorageType = StorageType::Scalar(ElemType::Float(FloatKind::F32));

#[test]
fn products_that_share_a_launch_are_right_on_the_cpu() {
    several::<Cpu>(Default::default());
}

#[test]
fn products_that_share_a_launch_are_right_on_the_gpu() {
    on_gpu!(several_on_cube);
}

fn several_on_cube<R: CubeRuntime>() {
    several::<Cube<R>>(R::Device::default());
}

/// Products that may share a launch: one left operand with several right ones, several left ones with one right one, and
/// sums of pairs. Operands are dense and packed, and one of them may be all zeros.
fn several<B: Nvfp4Kernels>(device: B::Device) {
    let (precision, bound) =
        if B::supports_dtype(&device, DType::BF16) { (Precision::Bf16, 2e-5) } else { (Precision::F32, 2e-6) };
    let mut random = Random::new(43);
    for case in 0..64 {
        let product = [Product::Nt, Product::Nn, Product::Tn, Product::Nt][case % 4];
        // Nt: x with each weight; Nn: the sum of dy · w; Tn and the second Nt: each dyᵀ with x.
        let (summed, shared_left) = (product == Product::Nn, case % 4 == 0);
        let count = 1 + case / 4 % 3;
        let [a_packed, b_packed] = [(false, true), (true, true), (false, false)][case / 8 % 3].into();
        let a_packed = a_packed && product != Product::Tn;
        let few = shared_left && case % 8 == 0;
        let mut size = |most: usize| 16 * (1 + random.below(most));
        let common = [size(20), if few { 512 } else { size(20) }];
        let own: Vec<usize> = (0..count).map(|_| size(24)).collect();
        let m = if few { 1 + case % 16 } else { common[0] };
        // Rows and columns of both operands of product `p`.
        let dims = |p: usize| match (summed, shared_left, product) {
            (true, ..) => ([m, own[p]], [own[p], common[1]]),
            (_, true, _) => ([m, common[1]], [own[p], common[1]]),
            (_, _, Product::Tn) => ([m, own[p]], [m, common[1]]),
            _ => ([own[p], common[1]], [m, common[1]]),
        };
        let mut operand = |[rows, cols]: [usize; 2], packed: bool, zero: bool| {
            let values = if zero { vec![0.0; rows * cols] } else { random.normals(rows * cols, 0.3) };
            let x = matrix::<B>(&values, rows, cols, &device);
            if packed {
                let spec = QuantizeSpec { scaling: Scaling::Two, block: BlockShape::Row, rounding: Rounding::Nearest };
                let x = Nvfp4Tensor::quantize(x, spec);
                (host(x.dequantize(DType::F32)), Operand::Packed(x.primitive()))
            } else {
                let x = x.cast(precision.dtype());
                (host(x.clone().cast(DType::F32)), Operand::Dense(x.into_primitive().tensor()))
            }
        };
        let zero = |p: usize| case % 5 == 0 && p == case % count;
        let (mut a, mut b) = (Vec::new(), Vec::new());
        for p in 0..count {
            let (left, right) = dims(p);
            if p == 0 || !shared_left {
                a.push(operand(left, a_packed, !shared_left && zero(p)));
            }
            if p == 0 || shared_left || summed {
                b.push(operand(right, b_packed, shared_left && zero(p)));
            }
        }
        let list = |of: &[(Vec<f32>, Operand<B>)]| of.iter().map(|(_, x)| x.clone()).collect();
        // The decode kernel writes the type of its operands.
        let out = if few { precision.dtype() } else { DType::F32 };
        let ys = if summed {
            vec![B::product_sum(product, list(&a), list(&b), precision, out)]
        } else {
            B::products(product, list(&a), list(&b), precision, out)
        };
        let mut expected: Vec<Vec<f64>> = Vec::new();
        for p in 0..count {
            let ([a_rows, a_cols], [b_rows, b_cols]) = dims(p);
            let (left, right) = (&a[p.min(a.len() - 1)].0, &b[p.min(b.len() - 1)].0);
            let left = if product == Product::Tn { transpose(left, a_rows, a_cols) } else { left.clone() };
            let right = if product == Product::Nt { right.clone() } else { transpose(right, b_rows, b_cols) };
            let GemmShape { i, j, r } = GemmShape::of(product, [a_rows, a_cols], [b_rows, b_cols]);
            let y = matmul_nt(&left, &right, i, j, r);
            match expected.last_mut().filter(|_| summed) {
                Some(sum) => sum.iter_mut().zip(y).for_each(|(s, y)| *s += y),
                None => expected.push(y),
            }
        }
        assert_eq!(ys.len(), expected.len());
        let bound = if out == DType::BF16 { 4e-3 } else { bound };
        for (p, (y, expected)) in ys.into_iter().zip(expected).enumerate() {
            let y = host(Tensor::<B, 2>::from_primitive(TensorPrimitive::Float(y)).cast(DType::F32));
            let size = expected.iter().map(|x| x * x).sum::<f64>();
            let error = if size == 0.0 {
                f64::from(y.iter().fold(0.0f32, |a, x| a.max(x.abs())))
            } else {
                relative(&y, expected)
            };
            assert!(error < bound, "case {case}: {product:?} {p} of {count}, few {few}: {error:e}");
        }
    }
}

/// Computes `y[i, j] = sum_r a[i, r] b[j, r]` in f64.
fn matmul_nt(a: &[f32], b: &[f32], i: usize, j: usize, r: usize) -> Vec<f64> {
    let mut y = vec![0.0; i * j];
    for p in 0..i {
        for q in 0..j {
            y[p * j + q] = (0..r).map(|k| f64::from(a[p * r + k]) * f64::from(b[q * r + k])).sum();
        }
    }
    y
}
