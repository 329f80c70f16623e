//! The scalar casts to and from E2M1 and E4M3 equal those of ml_dtypes for every code, every bf16 value and every tie,
//! and the casts of kernels equal the scalar ones, bit for bit.

use crate::support::{Cube, Random, floats, golden_bytes, host, on_gpu, supports, words};
use backend_nvfp4::{Nvfp4Kernels, reference};
use burn::tensor::{DType, Int, Tensor, TensorData, TensorPrimitive};
use burn_cubecl::{CubeRuntime, tensor::CubeTensor};
use half::{bf16, f16};
use kernels_cubecl::{
    dequantize::dequantize,
    operands::PackedArgs,
    quantize::{BlockShape, QuantizeOutput, QuantizeSpec, Rounding, Scaling, View, quantize},
};
use safetensors::SafeTensors;

/// The f32 bits of every bf16 value, of the golden ties, and of random patterns.
fn encoder_inputs() -> Vec<u32> {
    let bytes = golden_bytes("nvfp4/codec.safetensors");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut random = Random::new(1);
    (0..65_536u32)
        .map(|b| b << 16)
        .chain(["e2m1_from_f32.input", "e4m3_from_f32.input"].iter().flat_map(|k| floats(&file, k)).map(f32::to_bits))
        .chain((0..100_000).map(|_| random.bits()))
        .collect()
}

#[test]
fn scalar_casts_equal_ml_dtypes() {
    let bytes = golden_bytes("nvfp4/codec.safetensors");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let u8s = |key: &str| file.tensor(key).unwrap().data().to_vec();
    let (e2m1, e4m3) = (u8s("e2m1_from_bf16"), u8s("e4m3_from_bf16"));
    for bits in 0..65_536u32 {
        let x = f32::from_bits(bits << 16);
        assert_eq!(reference::e2m1_encode(x), e2m1[bits as usize], "e2m1 of bf16 {bits:#06x} = {x}");
        assert_eq!(reference::e4m3_encode(x), if x.is_nan() { 0x7F } else { e4m3[bits as usize] }, "e4m3 of {x}");
    }
    for (name, encode) in
        [("e2m1_from_f32", reference::e2m1_encode as fn(f32) -> u8), ("e4m3_from_f32", reference::e4m3_encode)]
    {
        let expected = u8s(&format!("{name}.expected"));
        for (x, code) in floats(&file, &format!("{name}.input")).iter().zip(expected) {
            assert_eq!(encode(*x), code, "{name} of {x:e}");
        }
    }
    for (byte, value) in floats(&file, "e4m3_to_f32").iter().enumerate() {
        let ours = reference::e4m3_decode(byte as u8);
        assert!(ours.is_nan() && value.is_nan() || ours.to_bits() == value.to_bits(), "{byte:#x}");
    }
    for (code, value) in floats(&file, "e2m1_to_f32").iter().enumerate() {
        assert_eq!(reference::e2m1_decode(code as u8).to_bits(), value.to_bits());
    }
}

#[test]
fn kernel_casts_equal_the_scalar_ones() {
    on_gpu!(check);
}

fn check<R: CubeRuntime>() {
    let inputs = encoder_inputs();
    // A block that holds a 6 has the scale 448 here, and 448 times the second factor is 1: values are encoded as they are.
    let block = |inputs: &[u32]| -> Vec<f32> {
        inputs.iter().map(|bits| f32::from_bits(*bits)).chain(std::iter::repeat(6.0)).take(16).collect()
    };
    let (codes, _) = quantized::<R>(inputs.chunks(15).flat_map(block).collect(), [448.0, 1.0 / 448.0]);
    for (at, bits) in inputs.iter().enumerate() {
        let (code, x) = (reference::code(&codes, at / 15, at % 15, 16), f32::from_bits(*bits));
        assert_eq!(code, reference::e2m1_encode(x), "e2m1 of the bits {bits:#010x} = {x:e}");
    }
    // The scale of a block is its largest value here.
    let encoded = |x: &f32| x.is_sign_positive() && *x <= 448.0;
    let scales: Vec<f32> = inputs.into_iter().map(f32::from_bits).filter(encoded).collect();
    assert!(scales.len() > 20_000);
    let block = |x: &f32| -> Vec<f32> { std::iter::once(*x).chain(std::iter::repeat_n(0.0, 15)).collect() };
    let (_, bytes) = quantized::<R>(scales.iter().flat_map(block).collect(), [1.0; 2]);
    for (x, byte) in scales.iter().zip(bytes) {
        assert_eq!(byte, reference::e4m3_encode(*x), "e4m3 of the bits {:#010x} = {x:e}", x.to_bits());
    }
    // Code 2 and scale 0x38 are 1, so that every code and every scale is there alone, too.
    for (at, y) in dequantized::<R>().into_iter().enumerate() {
        let (scale, code) = ((at / 16) as u8, (at % 16) as u8);
        let expected = reference::e2m1_decode(code) * reference::e4m3_decode(scale);
        let same = y.to_bits() == expected.to_bits() || y.is_nan() && expected.is_nan();
        assert!(same, "code {code} with scale {scale:#04x} is {y:e}, expected {expected:e}");
    }
}

/// Every number becomes the byte that the reference makes of it, and every byte the number.
#[test]
fn kernels_keep_numbers_as_the_bytes_of_the_scalar_casts() {
    fn check<R: CubeRuntime>() {
        let device = R::Device::default();
        let mut inputs: Vec<f32> = encoder_inputs().into_iter().map(f32::from_bits).collect();
        inputs.resize(inputs.len().next_multiple_of(4), 1.0);
        let numbers = Tensor::<Cube<R>, 2>::from_data(TensorData::new(inputs.clone(), [inputs.len() / 4, 4]), &device);
        let bytes = Cube::<R>::e4m3_encode(numbers.into_primitive().tensor());
        let found: Vec<u32> = Tensor::<Cube<R>, 2, Int>::from_primitive(bytes).into_data().iter().collect();
        for (x, byte) in inputs.iter().zip(found.into_iter().flat_map(u32::to_le_bytes)) {
            assert_eq!(byte, reference::e4m3_encode(*x), "the bits {:#010x} = {x:e}", x.to_bits());
        }
        let all: Vec<u32> =
            (0..=255u8).collect::<Vec<_>>().as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
        let words = words::<Cube<R>>(all, &device).reshape([16, 4]).into_primitive();
        let decoded =
            Tensor::<Cube<R>, 2>::from_primitive(TensorPrimitive::Float(Cube::<R>::e4m3_decode(words, DType::F32)));
        for (byte, y) in host(decoded).into_iter().enumerate() {
            let expected = reference::e4m3_decode(byte as u8);
            let same = y.to_bits() == expected.to_bits() || y.is_nan() && expected.is_nan();
            assert!(same, "byte {byte:#04x} is {y:e}, expected {expected:e}");
        }
    }
    on_gpu!(check);
}

/// Codes and scales of rows of 16 values. A kernel finds two factors from the largest value of a tensor: the first makes a
/// scale of the largest value of a block, and values are divided by the second and by the scale. Here they are given.
fn quantized<R: CubeRuntime>(values: Vec<f32>, [scale_factor, inverse]: [f32; 2]) -> (Vec<u32>, Vec<u8>) {
    let device = R::Device::default();
    let rows = values.len() / 16;
    let (x, amax) = (put::<R>(values).into_primitive(), put::<R>(vec![0.0, scale_factor, inverse]).into_primitive());
    // Other numbers than the kernel writes.
    let codes = words::<Cube<R>>(vec![0xDEAD_BEEF; rows * 2], &device).into_primitive();
    let scales = bytes::<R>(vec![0xEE; rows]);
    let out = QuantizeOutput::Packed(packed_args(&codes, &scales, rows));
    let spec = QuantizeSpec { scaling: Scaling::Two, block: BlockShape::Row, rounding: Rounding::Nearest };
    let (x, amax, view) = (x.tensor(), amax.tensor().into_array_arg(), View::row_major(rows, 16));
    let client = x.client.clone();
    quantize(&client, x.into_array_arg(), DType::F32.into(), amax, out, view, spec, false).unwrap();
    let read = |x: CubeTensor<R>| Tensor::<Cube<R>, 1, Int>::from_primitive(x).into_data();
    (read(codes).iter().collect(), read(scales).iter().collect())
}

/// Every code with every scale: 16 codes for each of 256 scales.
fn dequantized<R: CubeRuntime>() -> Vec<f32> {
    let codes = words::<Cube<R>>([0x7654_3210, 0xFEDC_BA98].repeat(256), &R::Device::default()).into_primitive();
    let scales = bytes::<R>((0..=255).collect());
    // No product is 1e9.
    let y = put::<R>(vec![1e9; 256 * 16]);
    let out = y.clone().into_primitive().tensor().into_array_arg();
    let client = codes.client.clone();
    dequantize(&client, packed_args(&codes, &scales, 256), false, out, DType::F32.into()).unwrap();
    host(y)
}

fn put<R: CubeRuntime>(values: Vec<f32>) -> Tensor<Cube<R>, 1> {
    let len = values.len();
    Tensor::from_data(TensorData::new(values, [len]), (&R::Device::default(), DType::F32))
}

fn bytes<R: CubeRuntime>(values: Vec<u8>) -> CubeTensor<R> {
    let len = values.len();
    let data = TensorData::new(values, [len]);
    Tensor::<Cube<R>, 1, Int>::from_data(data, (&R::Device::default(), DType::U8)).into_primitive()
}

/// The arguments for a matrix of 16 columns.
fn packed_args<R: CubeRuntime>(codes: &CubeTensor<R>, scales: &CubeTensor<R>, rows: usize) -> PackedArgs<R> {
    let arg = |x: &CubeTensor<R>| x.clone().into_array_arg();
    let global = words::<Cube<R>>(vec![0], &R::Device::default()).into_primitive();
    PackedArgs { codes: arg(codes), scales: arg(scales), global: arg(&global), rows, cols: 16 }
}

/// Weights that a file holds in f16 become bf16 on the device.
#[test]
fn a_device_makes_bf16_of_f16_as_the_host_does() {
    fn check<R: CubeRuntime>() {
        let device = R::Device::default();
        if ![DType::F16, DType::BF16].into_iter().all(|dtype| supports::<Cube<R>>(&device, dtype)) {
            return;
        }
        let all: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).filter(|x| x.is_finite()).collect();
        let bytes = all.iter().flat_map(|x| x.to_le_bytes()).collect();
        let data = TensorData::from_bytes_vec(bytes, [all.len()], DType::F16);
        let cast = Tensor::<Cube<R>, 1>::from_data(data, (&device, DType::F16)).cast(DType::BF16);
        let found: Vec<bf16> = cast.into_data().into_vec().unwrap();
        for (x, found) in all.into_iter().zip(found) {
            assert_eq!(found.to_bits(), bf16::from_f32(x.to_f32()).to_bits(), "{x} is {found}");
        }
    }
    on_gpu!(check);
}
