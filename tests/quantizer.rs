//! The quantizer gives the bytes of TransformerEngine and torchao on golden vectors, and on every backend the bytes of
//! the specification in `support/spec.rs`; stochastic rounding has no bias.

use crate::support::{
    Cpu, Cube, Random, floats, golden_bytes, host, matrix, on_gpu, packed,
    spec::{self, nearest, stochastic},
    supports,
};
use backend_nvfp4::{
    BlockShape, GivenScale, LinearSpec, Nvfp4Backend, Nvfp4Kernels, Nvfp4Tensor, Packed, Precision, QuantizeSpec,
    Recipe, Rounding, Scaling, Stream, View, reference,
};
use burn::tensor::{DType, Tensor, TensorData, TensorPrimitive};
use burn_cubecl::{CubeRuntime, kernel::into_contiguous};
use half::bf16;
use kernels_cubecl::quantize::{self, QuantizeOutput};
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
fn the_reference_gives_the_bytes_of_transformer_engine_and_torchao() {
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
        same("te", &x, Scaling::Two, BlockShape::Row, 0);
        same("te2d", &x, Scaling::Two, BlockShape::Square, 1);
        same("torchao1", &x, Scaling::Single, BlockShape::Row, 2);
        if file.tensor(&format!("{name}.rht.input")).is_ok() {
            let rotated = reference::hadamard(&x, kernels_cubecl::hadamard::SIGNS);
            let expected = floats(&file, &format!("{name}.rht.input"));
            let largest = expected.iter().fold(0.0f32, |a, v| a.max(v.abs()));
            for (a, b) in rotated.iter().zip(&expected) {
                assert!((a - b).abs() <= 1e-6 * largest, "{name}: rotated {a}, expected {b}");
            }
            let rotated: Vec<f32> = rotated.iter().map(|v| bf16::from_f32(*v).to_f32()).collect();
            same("te_rht", &rotated, Scaling::Two, BlockShape::Row, 3);
        }
    }
    assert!(compared.iter().all(|&n| n >= 15), "cases compared: {compared:?}");
}

#[test]
fn the_cpu_quantizes_as_specified() {
    quantizes_as_specified::<Cpu>(Default::default());
    rows_rounded_as_specified::<Cpu>(Default::default());
    across_as_specified::<Cpu>(Default::default());
    together_as_specified::<Cpu>(Default::default());
    what_is_not_finite_is_seen_in_every_value::<Cpu>(Default::default());
}

#[test]
fn the_gpu_quantizes_as_specified() {
    fn on_cube<R: CubeRuntime>() {
        quantizes_as_specified::<Cube<R>>(R::Device::default());
        rows_rounded_as_specified::<Cube<R>>(R::Device::default());
        across_as_specified::<Cube<R>>(R::Device::default());
        together_as_specified::<Cube<R>>(R::Device::default());
        what_is_not_finite_is_seen_in_every_value::<Cube<R>>(R::Device::default());
        across_in_16_bits::<R>();
        values_are_those_of_the_codes::<R>();
    }
    on_gpu!(on_cube);
}

const STREAM: Stream = Stream { seed: 0x1234_5678_9ABC_DEF0, step: 7, stream: 3 };

/// The bytes that the specification gives.
fn specified(x: &[f32], rows: usize, cols: usize, q: QuantizeSpec) -> Packed {
    let (two_level, square) = (q.scaling == Scaling::Two, q.block == BlockShape::Square);
    packed(&match q.rounding {
        Rounding::Nearest => spec::quantize(x, rows, cols, two_level, square, nearest),
        Rounding::Stochastic(stream) => spec::quantize(x, rows, cols, two_level, square, stochastic(stream)),
    })
}

/// Codes have no NaN and no infinity. One among many numbers makes the tensor scale infinite, so that a loss shows it.
fn what_is_not_finite_is_seen_in_every_value<B: Nvfp4Kernels>(device: B::Device) {
    let (rows, cols) = (144, 208);
    let mut random = Random::new(53);
    for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for (scaling, block) in [
            (Scaling::Two, BlockShape::Row),
            (Scaling::Two, BlockShape::Square),
            (Scaling::Single, BlockShape::Row),
            (Scaling::Single, BlockShape::Square),
        ] {
            let mut values = random.normals(rows * cols, 1.0);
            values[random.below(rows * cols)] = wrong;
            let x = || matrix::<B>(&values, rows, cols, &device);
            let spec = QuantizeSpec { scaling, block, rounding: NEAREST };
            let across = |spec, rotated| B::nvfp4_quantize_across(x().into_primitive().tensor(), spec, rotated);
            let sound = matrix::<B>(&random.normals(16 * cols, 1.0), 16, cols, &device);
            let both = vec![sound.into_primitive().tensor(), x().into_primitive().tensor()];
            let mut made = B::nvfp4_quantize_together(both, spec);
            made.extend([B::nvfp4_quantize(x().into_primitive().tensor(), spec), across(spec, false)]);
            if (scaling, block) == (Scaling::Two, BlockShape::Row) {
                made.push(across(spec, true));
                let (along, _) = B::nvfp4_operands(x().into_primitive().tensor(), spec, spec, true);
                made.extend([along, B::nvfp4_quantize_master(x().into_primitive().tensor())]);
            }
            for (form, made) in made.into_iter().enumerate() {
                let decoded = host(Nvfp4Tensor::<B>::from_primitive(made).dequantize(DType::F32));
                let finite = decoded.iter().filter(|value| value.is_finite()).count();
                assert_eq!(finite, 0, "{wrong}, {spec:?}, form {form}");
            }
        }
    }
}

fn quantizes_as_specified<B: Nvfp4Kernels>(device: B::Device) {
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
    let specs = [Scaling::Single, Scaling::Two].into_iter().flat_map(|scaling| {
        [BlockShape::Row, BlockShape::Square].into_iter().flat_map(move |block| {
            [NEAREST, Rounding::Stochastic(STREAM)].map(|rounding| QuantizeSpec { scaling, block, rounding })
        })
    });
    for (spec, (name, rows, cols, x)) in specs.flat_map(|spec| cases.iter().map(move |case| (spec, case))) {
        let (rows, cols) = (*rows, *cols);
        if spec.block == BlockShape::Square && rows % 16 != 0 {
            continue;
        }
        let expected = specified(x, rows, cols, spec);
        let ours = Nvfp4Tensor::quantize(matrix::<B>(x, rows, cols, &device), spec);
        let packed = ours.to_packed().unwrap();
        assert_eq!(packed.global.to_bits(), expected.global.to_bits(), "{name} {spec:?}");
        assert_eq!(packed.scales, expected.scales, "{name} {spec:?}");
        assert_eq!(packed.codes, expected.codes, "{name} {spec:?}");
        // A code's value is the code times its block's scale times the tensor scale, each product rounded to f32.
        for (i, value) in host(ours.dequantize(DType::F32)).into_iter().enumerate() {
            let code = expected.codes[i / 8] >> (i % 8 * 4) & 15;
            let magnitude = spec::E2M1[code as usize & 7] * spec::E4m3::value(expected.scales[i / 16]) as f32;
            let expected = if code & 8 == 0 { magnitude } else { -magnitude } * expected.global;
            assert_eq!(value.to_bits(), expected.to_bits(), "{name} {spec:?}: {value:e}, expected {expected:e}");
        }
    }
}

/// Matrices that share a tensor scale get the bytes of the matrix in which they stand one below the other.
fn together_as_specified<B: Nvfp4Kernels>(device: B::Device) {
    let mut random = Random::new(17);
    let (rows, cols) = ([1200, 16, 640], 48);
    for spreads in [[0.02, 3.0, 0.4], [1.0, 1e-3, 0.0], [0.0, 0.0, 0.0]] {
        let parts = [0, 1, 2].map(|i| random.normals(rows[i] * cols, spreads[i]));
        for (scaling, block) in
            [(Scaling::Two, BlockShape::Row), (Scaling::Two, BlockShape::Square), (Scaling::Single, BlockShape::Row)]
        {
            let spec = QuantizeSpec { scaling, block, rounding: NEAREST };
            let expected = specified(&parts.concat(), rows.iter().sum(), cols, spec);
            let matrices = parts.iter().zip(rows).map(|(part, rows)| matrix::<B>(part, rows, cols, &device)).collect();
            let ours = Nvfp4Tensor::quantize_together(matrices, spec);
            let ours: Vec<Packed> = ours.iter().map(|tensor| tensor.to_packed().unwrap()).collect();
            let globals: Vec<u32> = ours.iter().map(|part| part.global.to_bits()).collect();
            assert_eq!(globals, [expected.global.to_bits(); 3], "{spreads:?} {spec:?}");
            let scales: Vec<u8> = ours.iter().flat_map(|part| part.scales.clone()).collect();
            assert_eq!(scales, expected.scales, "{spreads:?} {spec:?}");
            let codes: Vec<u32> = ours.iter().flat_map(|part| part.codes.clone()).collect();
            assert_eq!(codes, expected.codes, "{spreads:?} {spec:?}");
        }
    }
}

/// Rows of one matrix that differ in scale by many powers of ten, rows longer than a cube has units, all magnitudes of
/// bf16, and maxima at and beside the borders between two tensor scales.
fn rows_rounded_as_specified<B: Nvfp4Kernels>(device: B::Device) {
    let mut random = Random::new(61);
    let mut cases = Vec::new();
    for (rows, cols) in [(1, 16), (7, 48), (40, 4112), (3, 16_384)] {
        let mut row = || {
            let spread = 10f32.powi(random.below(12) as i32 - 8);
            random.normals(cols, spread)
        };
        cases.push((rows, cols, (0..rows).flat_map(|_| row()).collect::<Vec<f32>>()));
    }
    let all_bf16: Vec<f32> = (0..65_536u32).map(|b| f32::from_bits(b << 16)).filter(|x| x.abs() < 1e37).collect();
    cases.push((all_bf16.len() / 16, 16, all_bf16[..all_bf16.len() / 16 * 16].to_vec()));
    let border = |k: i32, ulps: i32| f32::from_bits(((2688.0 * 2f32.powi(k)).to_bits() as i32 + ulps) as u32);
    let maxima = (-9..9).flat_map(|k| [-1, 0, 1].map(|ulps| border(k, ulps)));
    let borders: Vec<f32> =
        maxima.flat_map(|m| (0..16).map(move |i| if i == 3 { -m } else { m / (i + 1) as f32 })).collect();
    cases.push((borders.len() / 16, 16, borders));
    for (rows, cols, x) in cases {
        let expected = spec::rounded_rows(&x, cols);
        let ours = B::nvfp4_rounded_rows(matrix::<B>(&x, rows, cols, &device).into_primitive().tensor());
        let ours = host(Tensor::<B, 2>::from_primitive(TensorPrimitive::Float(ours)));
        for (i, (a, b)) in ours.iter().zip(&expected).enumerate() {
            assert_eq!(
                a.to_bits(),
                (*b as f32).to_bits(),
                "{rows}x{cols}, value {i}, {:e}: {a:e}, expected {b:e}",
                x[i]
            );
        }
        // A given scale, which the values of some cases exceed.
        for full in [0.7f32, 256.0, 3000.0] {
            let expected = spec::rounded_by(&x, full);
            let scale = GivenScale::of_reciprocal(full).unwrap();
            let ours = B::nvfp4_rounded_by(matrix::<B>(&x, rows, cols, &device).into_primitive().tensor(), scale);
            let ours = host(Tensor::<B, 2>::from_primitive(TensorPrimitive::Float(ours)));
            for (i, (a, b)) in ours.iter().zip(&expected).enumerate() {
                assert_eq!(*a, *b as f32, "{rows}x{cols}, {full}, value {i}, {:e}", x[i]);
            }
        }
    }
}

/// Multiples of 1/64 below 4, which the Hadamard transform sums without rounding, also in 16 bits.
fn short_values(random: &mut Random, len: usize) -> Vec<f32> {
    random.normals(len, 1.0).iter().map(|v| (v.clamp(-3.9, 3.9) * 64.0).round() / 64.0).collect()
}

/// The transpose of a matrix is quantized without being written: rotated or not, with every rounding.
fn across_as_specified<B: Nvfp4Kernels>(device: B::Device) {
    let mut random = Random::new(5);
    for (rows, cols) in [(48, 40), (16, 1), (160, 33), (64, 256), (144, 200)] {
        let x = short_values(&mut random, rows * cols);
        for (rotated, rounding) in across_cases() {
            let spec = QuantizeSpec { scaling: Scaling::Two, block: BlockShape::Row, rounding };
            let expected = specified_across(&x, rows, cols, spec, rotated);
            let ours = quantized_across::<B>(matrix(&x, rows, cols, &device), spec, rotated);
            assert_eq!(ours, expected, "{rows}x{cols}, rotated {rotated}, {rounding:?}");
        }
    }
}

fn across_cases() -> [(bool, Rounding); 4] {
    let stochastic = Rounding::Stochastic(STREAM);
    [(false, NEAREST), (true, NEAREST), (true, stochastic), (false, stochastic)]
}

fn specified_across(x: &[f32], rows: usize, cols: usize, spec: QuantizeSpec, rotated: bool) -> Packed {
    let across = spec::transposed(x, rows, cols);
    let across = if rotated { spec::rotated(&across).iter().map(|v| *v as f32).collect() } else { across };
    specified(&across, cols, rows, spec)
}

/// The same for 16-bit values, which kernels read in pairs; one of the values that are not rotated is NaN.
fn across_in_16_bits<R: CubeRuntime>() {
    let mut random = Random::new(41);
    let device = R::Device::default();
    for dtype in [DType::F16, DType::BF16] {
        if !supports::<Cube<R>>(&device, dtype) {
            continue;
        }
        for (rows, cols) in [(48, 40), (16, 3), (144, 208)] {
            for (rotated, rounding) in across_cases() {
                let mut x = short_values(&mut random, rows * cols);
                // Rotated, NaN would spread over its whole block, and Vulkan does not define the maximum of a block of NaN.
                if !rotated {
                    x[rows * cols / 2] = f32::NAN;
                }
                let spec = QuantizeSpec { scaling: Scaling::Two, block: BlockShape::Row, rounding };
                let expected = specified_across(&x, rows, cols, spec, rotated);
                let x = matrix::<Cube<R>>(&x, rows, cols, &device).cast(dtype);
                let ours = quantized_across::<Cube<R>>(x, spec, rotated);
                assert_eq!(ours, expected, "{rows}x{cols} {dtype:?}, rotated {rotated}, {rounding:?}");
            }
        }
    }
}

/// For a product that is made at once, the quantizer writes the values of the codes instead of the codes.
fn values_are_those_of_the_codes<R: CubeRuntime>() {
    let (mut random, device) = (Random::new(47), R::Device::default());
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        if !supports::<Cube<R>>(&device, dtype) {
            continue;
        }
        for (rows, cols) in [(48, 80), (16, 3), (144, 208)] {
            let x = matrix::<Cube<R>>(&short_values(&mut random, rows * cols), rows, cols, &device).cast(dtype);
            let x = into_contiguous(x.into_primitive().tensor());
            let (client, arg) =
                (&x.client, |x: &Tensor<Cube<R>, 1>| x.clone().into_primitive().tensor().into_array_arg());
            let zeros = |len: usize, dtype| Tensor::<Cube<R>, 1>::zeros([len], (&device, dtype));
            for (rotated, rounding) in across_cases() {
                for (view, rotated) in [(View::transposed(rows, cols), rotated), (View::row_major(rows, cols), false)] {
                    if !view.cols.is_multiple_of(16) {
                        continue;
                    }
                    let spec = QuantizeSpec { scaling: Scaling::Two, block: BlockShape::Row, rounding };
                    let (amax, values, global) =
                        (zeros(3, DType::F32), zeros(rows * cols, dtype), zeros(1, DType::F32));
                    let input = || x.clone().into_array_arg();
                    if rotated {
                        quantize::amax_rotated(client, input(), dtype.into(), view, arg(&amax), None).unwrap();
                    } else {
                        quantize::amax(client, input(), dtype.into(), 1.0, arg(&amax)).unwrap();
                    }
                    let out = QuantizeOutput::Values { values: arg(&values), global: arg(&global) };
                    quantize::quantize(client, input(), dtype.into(), arg(&amax), out, view, spec, rotated).unwrap();
                    let x = Tensor::<Cube<R>, 2>::from_primitive(TensorPrimitive::Float(x.clone()));
                    let packed = if view.col_stride == 1 {
                        Nvfp4Tensor::quantize(x, spec).to_packed().unwrap()
                    } else {
                        quantized_across::<Cube<R>>(x, spec, rotated)
                    };
                    let case = format!("{rows}x{cols} {dtype:?}, {view:?}, rotated {rotated}, {rounding:?}");
                    assert_eq!(host(global)[0], packed.global, "{case}");
                    let expected = reference::dequantize(&Packed { global: 1.0, ..packed }, view.rows, view.cols);
                    assert_eq!(host(values), expected, "{case}");
                }
            }
        }
    }
}

fn quantized_across<B: Nvfp4Kernels>(x: Tensor<B, 2>, spec: QuantizeSpec, rotated: bool) -> Packed {
    let across = B::nvfp4_quantize_across(x.into_primitive().tensor(), spec, rotated);
    Nvfp4Tensor::<B>::from_primitive(across).to_packed().unwrap()
}

fn masters_as_specified<B: Nvfp4Kernels>(device: B::Device) {
    let mut random = Random::new(8);
    for (rows, cols, std) in [(1, 16, 1.0), (33, 48, 0.02), (64, 256, 1e-4), (5, 32, 0.0), (48, 16, 3e3)] {
        let x = random.normals(rows * cols, std);
        let expected = packed(&spec::quantize_master(&x));
        assert_eq!(reference::quantize_master(&x, rows, cols), expected, "{rows}x{cols}, deviation {std}");
        let x = matrix::<B>(&x, rows, cols, &device).into_primitive().tensor();
        let ours = Nvfp4Tensor::<B>::from_primitive(B::nvfp4_quantize_master(x));
        assert_eq!(ours.to_packed().unwrap(), expected, "{rows}x{cols}, deviation {std}");
        for step in [1, 3, 100] {
            let rows: Vec<u32> = expected.codes.chunks(cols / 8).step_by(step).flatten().copied().collect();
            assert_eq!(ours.codes_of_rows(step).unwrap(), rows, "every {step}th row");
        }
    }
}

/// Random weights on a device equal the host's up to the last bits of logarithm and cosine, and the host's have the first
/// four moments of a normal distribution.
fn normal_numbers<B: Nvfp4Kernels>(device: B::Device) {
    let stream = Stream { seed: 0xFEDC_BA98_7654_3210, step: 0, stream: 5 };
    // These values were computed in Python.
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
    // Each mean of a million values may be four of its standard deviations away.
    for (p, expected, spread) in
        [(1, 0.0, 1.0), (2, 1.0, 2.0f64.sqrt()), (3, 0.0, 15.0f64.sqrt()), (4, 3.0, 96.0f64.sqrt())]
    {
        assert!((moment(p) - expected).abs() < 4.0 * spread / 1024.0, "moment {p}: {}", moment(p));
    }
}

#[test]
fn random_and_master_weights_are_as_specified() {
    masters_as_specified::<Cpu>(Default::default());
    normal_numbers::<Cpu>(Default::default());
    fn on_cube<R: CubeRuntime>() {
        masters_as_specified::<Cube<R>>(Default::default());
        normal_numbers::<Cube<R>>(Default::default());
    }
    on_gpu!(on_cube);
}

#[test]
fn stochastic_rounding_has_no_bias() {
    // One value between two codes fills each block, beside a 6 that fixes the block's scale at 1.
    let draws = 1_000_000;
    let per_block = 15;
    let rows = draws / per_block + 1;
    for (target, low, high) in [(0.1f32, 0.0, 0.5), (1.3, 1.0, 1.5), (2.9, 2.0, 3.0), (5.5, 4.0, 6.0)] {
        let x: Vec<f32> = (0..rows * 16).map(|i| if i % 16 == 0 { 6.0 } else { target }).collect();
        let rounding = Rounding::Stochastic(Stream { seed: 99, step: 1, stream: 2 });
        let spec = QuantizeSpec { scaling: Scaling::Single, block: BlockShape::Row, rounding };
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
fn activations_carry_the_codes_of_their_values() {
    on_gpu!(activations);
}

/// A norm and a gate hand the quantizer the largest value that it would have found: also where a cube makes many rows or
/// many vectors, and where values are NaN.
fn activations<R: CubeRuntime>() {
    type B<R> = Cube<R>;
    let device = R::Device::default();
    let mut random = Random::new(37);
    let spec = LinearSpec::new(Recipe::W4a4, Scaling::Two, Precision::F32);
    for dtype in [DType::F32, DType::BF16] {
        if !supports::<B<R>>(&device, dtype) {
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
                let (got, expected) = (host(made.packed.unwrap()), host(expected));
                assert_eq!(got.global.to_bits(), expected.global.to_bits(), "{name} {rows}x{cols} {dtype:?}");
                assert!(got.codes == expected.codes && got.scales == expected.scales, "{name} {rows}x{cols} {dtype:?}");
            }
        }
    }
}
