//! The scalar casts to and from E2M1 and E4M3 equal those of ml_dtypes for every code, every bf16 value and every tie,
//! and the casts of kernels equal the scalar ones, bit for bit.

use crate::support::{Cube, Random, floats, golden_bytes, on_gpu, supports, words};
use backend_nvfp4::reference;
use burn::tensor::{DType, Tensor, TensorData};
use burn_cubecl::CubeRuntime;
use half::{bf16, f16};
use kernels_cubecl::codec::{Conversion, convert};
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
    let run = |input: Vec<u32>, conversion| -> Vec<u32> {
        let device = R::Device::default();
        let x = words::<Cube<R>>(input, &device).into_primitive();
        let y = words::<Cube<R>>(vec![0xDEAD_BEEF; x.meta.num_elements()], &device).into_primitive();
        let client = x.client.clone();
        convert(&client, x.into_array_arg(), y.clone().into_array_arg(), conversion).unwrap();
        burn::tensor::Tensor::<Cube<R>, 1, burn::tensor::Int>::from_primitive(y).into_data().iter().collect()
    };
    let same = |got: Vec<u32>, of: &[u32], expected: &dyn Fn(u32) -> u32| {
        for (x, y) in of.iter().zip(got) {
            assert_eq!(y, expected(*x), "input bits {x:#010x} = {:e}", f32::from_bits(*x));
        }
    };
    let f = f32::from_bits;
    same(run(inputs.clone(), Conversion::EncodeE2m1), &inputs, &|x| reference::e2m1_encode(f(x)).into());
    let scales: Vec<u32> = inputs.into_iter().filter(|&x| (0.0..=448.0).contains(&f(x)) && x >> 31 == 0).collect();
    assert!(scales.len() > 20_000);
    same(run(scales.clone(), Conversion::EncodeE4m3), &scales, &|x| reference::e4m3_encode(f(x)).into());
    let codes: Vec<u32> = (0..16).collect();
    same(run(codes.clone(), Conversion::DecodeE2m1), &codes, &|x| reference::e2m1_decode(x as u8).to_bits());
    let bytes: Vec<u32> = (0..256).collect();
    same(run(bytes.clone(), Conversion::DecodeE4m3), &bytes, &|x| {
        let value = reference::e4m3_decode(x as u8);
        if value.is_nan() { 0x7FC0_0000 | (x & 0x80) << 24 } else { value.to_bits() }
    });
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
