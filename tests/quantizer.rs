//! The quantiser: reference = TransformerEngine and torchao on golden vectors; every backend =
//! reference in every byte; stochastic rounding without bias.

use crate::support::{Cpu, Cube, Random, floats, golden_bytes, host, matrix, on_gpu};
use backend_nvfp4::{
    Block, LinearSpec, Nvfp4Backend, Nvfp4Kernels, Nvfp4Tensor, Precision, QuantizeSpec, Recipe, Rounding, Scaling,
    Stream, View,
    reference::{self, Packed},
};
use burn::tensor::{DType, Tensor, TensorData, TensorPrimitive, backend::Backend};
use burn_cubecl::{CubeRuntime, kernel::into_contiguous};
use half::bf16;
use safetensors::SafeTensors;
use std::collections::BTreeSet;

const NEAREST: Rounding = Rounding::Nearest;

fn golden_cases(file: &SafeTensors<'_>) -> Vec<(String, usize, usize, Vec<f32>)> {
    let names: BTreeSet<String> =
        file.names().iter().filter_map(|n| n.strip_suffix(".input")).map(str::to_owned).collect();
    names
        .into_iter()
        .filter(|n| !n.ends_with(".rht"))
        .map(|name| {
            let shape = file.tensor(&format!("{name}.input")).unwrap().shape().to_vec();
            let values = floats(file, &format!("{name}.input"));
            (name, shape[0], shape[1], values)
        })
        .collect()
}

fn code_bytes(q: &Packed) -> Vec<u8> {
    q.codes.iter().flat_map(|w| w.to_le_bytes()).collect()
}

#[test]
fn reference_equals_the_public_oracles() {
    let bytes = golden_bytes("nvfp4/quantize.safetensors");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut compared = [0; 4];
    for (name, rows, cols, x) in golden_cases(&file) {
        let mut same = |variant: &str, x: &[f32], scaling, block, slot: usize| {
            let Ok(codes) = file.tensor(&format!("{name}.{variant}.codes")) else { return };
            let scales = file.tensor(&format!("{name}.{variant}.scales")).unwrap();
            let spec = QuantizeSpec { scaling, block, rounding: NEAREST };
            let q = reference::quantize(x, View::row_major(rows, cols), spec);
            assert_eq!(q.scales, scales.data(), "{name}.{variant} scales");
            assert_eq!(code_bytes(&q), codes.data(), "{name}.{variant} codes");
            if scaling == Scaling::Two {
                let amax = floats(&file, &format!("{name}.{variant}.amax"))[0];
                assert_eq!(q.global, amax / 2688.0, "{name}.{variant} tensor scale");
            }
            compared[slot] += 1;
        };
        same("te", &x, Scaling::Two, Block::Row, 0);
        same("te2d", &x, Scaling::Two, Block::Square, 1);
        same("torchao1", &x, Scaling::Single, Block::Row, 2);
        if file.tensor(&format!("{name}.rht.input")).is_ok() {
            let rotated = reference::hadamard(&x, kernels_cubecl::hadamard::SIGNS);
            let expected = floats(&file, &format!("{name}.rht.input"));
            let largest = expected.iter().fold(0.0f32, |a, v| a.max(v.abs()));
            for (a, b) in rotated.iter().zip(&expected) {
                assert!((a - b).abs() <= 1e-6 * largest, "{name}: rotated {a}, expected {b}");
            }
            let rotated: Vec<f32> = rotated.iter().map(|v| bf16::from_f32(*v).to_f32()).collect();
            same("te_rht", &rotated, Scaling::Two, Block::Row, 3);
        }
    }
    assert!(compared.iter().all(|&n| n >= 15), "cases compared: {compared:?}");
}

#[test]
fn cpu_backend_equals_reference() {
    backend_equals_reference::<Cpu>(Default::default());
}

#[test]
fn gpu_backend_equals_reference() {
    on_gpu!(gpu_equals_reference);
}

fn gpu_equals_reference<R: CubeRuntime>() {
    backend_equals_reference::<Cube<R>>(R::Device::default());
    hadamard_equals_reference::<R>();
    across_equals_reference::<R>();
    across_in_16_bits::<R>();
}

fn backend_equals_reference<B: Nvfp4Kernels>(device: B::Device) {
    let bytes = golden_bytes("nvfp4/quantize.safetensors");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut cases = golden_cases(&file);
    let mut random = Random::new(7);
    for i in 0..60 {
        let (rows, cols) = (1 + random.below(70), 16 * (1 + random.below(9)));
        let std = 10f32.powi(random.below(9) as i32 - 6);
        cases.push((format!("random {i}"), rows, cols, random.normals(rows * cols, std)));
    }
    cases.push(("several cubes each way".into(), 48, 544, random.normals(48 * 544, 1.0)));
    let all_bf16: Vec<f32> = (0..65_536u32).map(|b| f32::from_bits(b << 16)).filter(|x| x.is_finite()).collect();
    cases.push(("all bf16".into(), all_bf16.len() / 16, 16, all_bf16));
    let stochastic = Rounding::Stochastic(Stream { seed: 0x1234_5678_9ABC_DEF0, step: 7, stream: 3 });
    for (name, rows, cols, x) in cases {
        for scaling in [Scaling::Single, Scaling::Two] {
            for block in [Block::Row, Block::Square] {
                if block == Block::Square && rows % 16 != 0 {
                    continue;
                }
                for rounding in [NEAREST, stochastic] {
                    let spec = QuantizeSpec { scaling, block, rounding };
                    let expected = reference::quantize(&x, View::row_major(rows, cols), spec);
                    let ours = Nvfp4Tensor::quantize(matrix::<B>(&x, rows, cols, &device), spec);
                    let packed = ours.to_packed().unwrap();
                    assert_eq!(packed.global.to_bits(), expected.global.to_bits(), "{name} {spec:?}");
                    assert_eq!(packed.scales, expected.scales, "{name} {spec:?}");
                    assert_eq!(packed.codes, expected.codes, "{name} {spec:?}");
                    let values = host(ours.dequantize(DType::F32));
                    for (a, b) in values.iter().zip(reference::dequantize(&expected, rows, cols)) {
                        assert_eq!(a.to_bits(), b.to_bits(), "{name} {spec:?}: dequantised {a:e}, expected {b:e}");
                    }
                }
            }
        }
    }
}

fn hadamard_equals_reference<R: CubeRuntime>() {
    let x = Random::new(3).normals(64 * 48, 1.0);
    let device = R::Device::default();
    let input = into_contiguous(matrix::<Cube<R>>(&x, 64, 48, &device).into_primitive().tensor());
    let output = poisoned::<R>(x.len());
    let signs = kernels_cubecl::hadamard::SIGNS;
    let client = input.client.clone();
    kernels_cubecl::hadamard::hadamard(
        &client,
        input.into_array_arg(),
        output.clone().into_primitive().tensor().into_array_arg(),
        DType::F32.into(),
        signs,
    )
    .unwrap();
    assert_eq!(host(output), reference::hadamard(&x, signs));
}

/// A flat output that shows what a kernel did not write. (CUDA pads the rows of matrices.)
fn poisoned<R: CubeRuntime>(len: usize) -> Tensor<Cube<R>, 1> {
    Tensor::from_data(TensorData::new(vec![f32::NAN; len], [len]), (&R::Device::default(), DType::F32))
}

/// The transpose, read where it lies; rotated or not; every rounding.
fn across_equals_reference<R: CubeRuntime>() {
    let mut random = Random::new(5);
    let stochastic = Rounding::Stochastic(Stream { seed: 9, step: 4, stream: 2 });
    for (rows, cols) in [(48, 40), (16, 1), (160, 33), (64, 256), (144, 200)] {
        let x = random.normals(rows * cols, 0.1);
        for (rotated, rounding) in [(false, NEAREST), (true, NEAREST), (true, stochastic), (false, stochastic)] {
            let spec = QuantizeSpec { scaling: Scaling::Two, block: Block::Row, rounding };
            let across: Vec<f32> =
                (0..cols).flat_map(|c| (0..rows).map(move |r| (r, c))).map(|(r, c)| x[r * cols + c]).collect();
            let across = if rotated { reference::hadamard(&across, kernels_cubecl::hadamard::SIGNS) } else { across };
            let expected = reference::quantize(&across, View::row_major(cols, rows), spec);
            assert_eq!(quantized_across::<Cpu>(&x, rows, cols, spec, rotated), expected);
            let ours = quantized_across::<Cube<R>>(&x, rows, cols, spec, rotated);
            assert_eq!(ours, expected, "{rows}x{cols}, rotated {rotated}, {rounding:?}");
        }
    }
}

/// The same of 16-bit values, for whose pairs there are instructions, one of them not a number.
fn across_in_16_bits<R: CubeRuntime>() {
    let mut random = Random::new(41);
    let device = R::Device::default();
    let stochastic = Rounding::Stochastic(Stream { seed: 5, step: 1, stream: 6 });
    for dtype in [DType::F16, DType::BF16] {
        if !Cube::<R>::supports_dtype(&device, dtype) {
            continue;
        }
        for (rows, cols) in [(48, 40), (16, 3), (144, 208)] {
            for (rotated, rounding) in [(false, NEAREST), (true, NEAREST), (true, stochastic), (false, stochastic)] {
                let mut x = random.normals(rows * cols, 0.1);
                x[rows * cols / 2] = f32::NAN;
                let x = matrix::<Cube<R>>(&x, rows, cols, &device).cast(dtype);
                let values = host(x.clone().cast(DType::F32));
                let across: Vec<f32> =
                    (0..cols).flat_map(|c| (0..rows).map(move |r| (r, c))).map(|(r, c)| values[r * cols + c]).collect();
                let turned = reference::hadamard(&across, kernels_cubecl::hadamard::SIGNS);
                let spec = QuantizeSpec { scaling: Scaling::Two, block: Block::Row, rounding };
                let values = if rotated { &turned } else { &across };
                let expected = reference::quantize(values, View::row_major(cols, rows), spec);
                let made = Cube::<R>::nvfp4_quantize_across(x.clone().into_primitive().tensor(), spec, rotated);
                let ours = Nvfp4Tensor::<Cube<R>>::from_primitive(made).to_packed().unwrap();
                assert_eq!(ours, expected, "{rows}x{cols} {dtype:?}, rotated {rotated}, {rounding:?}");
            }
        }
    }
}

fn quantized_across<B: Nvfp4Kernels>(x: &[f32], rows: usize, cols: usize, spec: QuantizeSpec, rotated: bool) -> Packed {
    let x = matrix::<B>(x, rows, cols, &Default::default()).into_primitive().tensor();
    Nvfp4Tensor::<B>::from_primitive(B::nvfp4_quantize_across(x, spec, rotated)).to_packed().unwrap()
}

/// Masters as the host quantises them; codes of a sample of rows.
fn masters_equal_reference<B: Nvfp4Kernels>(device: B::Device) {
    let mut random = Random::new(8);
    for (rows, cols, std) in [(1, 16, 1.0), (33, 48, 0.02), (64, 256, 1e-4), (5, 32, 0.0), (48, 16, 3e3)] {
        let x = random.normals(rows * cols, std);
        let expected = reference::quantize_master(&x, rows, cols);
        let x = matrix::<B>(&x, rows, cols, &device).into_primitive().tensor();
        let ours = Nvfp4Tensor::<B>::from_primitive(B::nvfp4_quantize_master(x));
        assert_eq!(ours.to_packed().unwrap(), expected, "{rows}x{cols}, deviation {std}");
        for step in [1, 3, 100] {
            let rows: Vec<u32> = expected.codes.chunks(cols / 8).step_by(step).flatten().copied().collect();
            assert_eq!(ours.codes_of_rows(step).unwrap(), rows, "every {step}th row");
        }
    }
}

/// Random weights: the host's up to the last bits of logarithm and cosine, and normal.
fn normals_equal_reference<B: Nvfp4Kernels>(device: B::Device) {
    let stream = Stream { seed: 0xFEDC_BA98_7654_3210, step: 0, stream: 5 };
    // Computed apart, in Python.
    let known = [-0.4232195, -0.5775531, -0.998703, 0.0214675];
    for (a, b) in reference::normals(4, 0.5, stream).iter().zip(known) {
        assert!((a - b).abs() < 1e-6, "{a}, expected {b}");
    }
    for dims in [[1, 1], [3, 7], [257, 1026]] {
        let expected = reference::normals(dims[0] * dims[1], 0.5, stream);
        let ours = B::normal(dims, 0.5, stream, DType::F32, &device);
        let ours = host(Tensor::<B, 2>::from_primitive(TensorPrimitive::Float(ours)));
        for (i, (a, b)) in ours.iter().zip(&expected).enumerate() {
            assert!((a - b).abs() <= 1e-5 * (1.0 + b.abs()), "{dims:?}[{i}]: {a:e}, the host has {b:e}");
        }
    }
    let values = reference::normals(1 << 20, 2.0, stream);
    let moment = |p: i32| values.iter().map(|v| (f64::from(*v) / 2.0).powi(p)).sum::<f64>() / values.len() as f64;
    // Four deviations of each mean.
    for (p, expected, spread) in
        [(1, 0.0, 1.0), (2, 1.0, 2.0f64.sqrt()), (3, 0.0, 15.0f64.sqrt()), (4, 3.0, 96.0f64.sqrt())]
    {
        assert!((moment(p) - expected).abs() < 4.0 * spread / 1024.0, "moment {p}: {}", moment(p));
    }
}

#[test]
fn random_and_master_weights_equal_the_reference() {
    masters_equal_reference::<Cpu>(Default::default());
    normals_equal_reference::<Cpu>(Default::default());
    fn on_cube<R: CubeRuntime>() {
        masters_equal_reference::<Cube<R>>(Default::default());
        normals_equal_reference::<Cube<R>>(Default::default());
    }
    on_gpu!(on_cube);
}

#[test]
fn stochastic_rounding_has_no_bias() {
    // One value between two codes, beside a 6 that pins every block's scale to 1.
    let draws = 1_000_000;
    let per_block = 15;
    let rows = draws / per_block + 1;
    for (target, low, high) in [(0.1f32, 0.0, 0.5), (1.3, 1.0, 1.5), (2.9, 2.0, 3.0), (5.5, 4.0, 6.0)] {
        let x: Vec<f32> = (0..rows * 16).map(|i| if i % 16 == 0 { 6.0 } else { target }).collect();
        let rounding = Rounding::Stochastic(Stream { seed: 99, step: 1, stream: 2 });
        let spec = QuantizeSpec { scaling: Scaling::Single, block: Block::Row, rounding };
        let q = reference::quantize(&x, View::row_major(rows, 16), spec);
        let values = reference::dequantize(&q, rows, 16);
        let drawn: Vec<f64> =
            values.iter().enumerate().filter(|(i, _)| i % 16 != 0).map(|(_, v)| f64::from(*v)).collect();
        assert!(drawn.iter().all(|&v| v == low || v == high));
        let mean = drawn.iter().sum::<f64>() / drawn.len() as f64;
        let p = (f64::from(target) - low) / (high - low);
        let sigma = (high - low) * (p * (1.0 - p) / drawn.len() as f64).sqrt();
        assert!((mean - f64::from(target)).abs() < 4.0 * sigma, "{target}: mean {mean}, sigma {sigma}");
    }
}

#[test]
fn activations_have_the_codes_of_their_values() {
    on_gpu!(activations);
}

/// What a norm or a gate leaves for the quantiser is the maximum that the quantiser would have found: also where a cube
/// makes many rows or many vectors, and where values are not numbers.
fn activations<R: CubeRuntime>() {
    type B<R> = Cube<R>;
    let device = R::Device::default();
    let mut random = Random::new(37);
    let spec = LinearSpec::new(Recipe::W4a4, Scaling::Two, Precision::F32);
    for dtype in [DType::F32, DType::BF16] {
        if !B::<R>::supports_dtype(&device, dtype) {
            continue;
        }
        for (rows, cols) in [(1, 16), (5, 48), (300, 272), (70_000, 16), (300, 16_384)] {
            let mut matrices = [0; 2].map(|_| random.normals(rows * cols, 1.0));
            matrices[0][rows * cols / 2] = f32::NAN;
            let [a, b] = matrices.map(|v| matrix::<B<R>>(&v, rows, cols, &device).cast(dtype));
            let w = Tensor::<B<R>, 1>::from_data(TensorData::new(random.normals(cols, 1.0), [cols]), &device);
            let of = |x: &Tensor<B<R>, 2>| x.clone().into_primitive().tensor();
            let w = || w.clone().into_primitive().tensor();
            for (name, made) in [
                ("norm", B::<R>::rms_norm(of(&a), None, w(), 1e-6, spec).1),
                ("sum and norm", B::<R>::rms_norm(of(&b), Some(of(&a)), w(), 1e-6, spec).1),
                ("gate", B::<R>::swiglu(of(&a), of(&b), spec)),
            ] {
                let expected = B::<R>::nvfp4_quantize(made.values, spec.activations());
                let host = |p| Nvfp4Tensor::<B<R>>::from_primitive(p).to_packed().unwrap();
                let (got, expected) = (host(made.codes.unwrap()), host(expected));
                assert_eq!(got.global.to_bits(), expected.global.to_bits(), "{name} {rows}x{cols} {dtype:?}");
                assert!(got.codes == expected.codes && got.scales == expected.scales, "{name} {rows}x{cols} {dtype:?}");
            }
        }
    }
}
