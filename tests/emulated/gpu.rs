//! A GPU, emulated or real: its buffers hold numbers, and its results are compared with f64.

use crate::support::{Random, emulator};
use backend_nvfp4::reference;
use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::{
    Runtime,
    client::ComputeClient,
    ir::{ElemType, FloatKind, StorageType},
    prelude::ArrayArg,
};
use half::{bf16, f16};
use kernels_cubecl::{
    any_cuda::{AnyCudaDevice, AnyCudaRuntime},
    attention::Instructions,
    block_scaled,
    cuda_source::{Executor, Launch, OnLaunch, SourceDevice},
    cuda_text::hopper,
    operands::PackedArgs,
};
use ndarray::{Array2, ArrayView2};
use rayon::prelude::*;

pub(super) const F32: StorageType = StorageType::Scalar(ElemType::Float(FloatKind::F32));
pub(super) const F16: StorageType = StorageType::Scalar(ElemType::Float(FloatKind::F16));
pub(super) const BF16: StorageType = StorageType::Scalar(ElemType::Float(FloatKind::BF16));
const E4M3: StorageType = StorageType::Scalar(ElemType::Float(FloatKind::E4M3));

/// The compute capabilities that kernels are made for: A100; H100 and H200; DGX Spark.
pub(super) const ARCHITECTURES: [u32; 3] = [80, 90, 121];

pub(super) struct Gpu {
    pub(super) client: ComputeClient<AnyCudaRuntime>,
    device: AnyCudaDevice,
    /// The compute capability: of a real GPU, that of [`ARCHITECTURES`] which has the same instructions.
    pub(super) arch: u32,
    /// The kinds of instructions by which attention is tried.
    pub(super) instructions: Vec<Instructions>,
    computes: bool,
}

impl Gpu {
    /// One that runs launches in the emulator.
    pub(super) fn emulated(arch: u32) -> Self {
        Self::running(arch, emulator::executor())
    }

    /// One that runs launches by `executor`.
    pub(super) fn running(arch: u32, executor: Executor) -> Self {
        Self::new(arch, OnLaunch::Run(executor), true)
    }

    /// One that records launches. Results are not compared.
    pub(super) fn recording(arch: u32) -> Self {
        Self::new(arch, OnLaunch::Record, false)
    }

    fn new(arch: u32, on_launch: OnLaunch, computes: bool) -> Self {
        let device = AnyCudaDevice::Source(SourceDevice::new(arch, on_launch));
        let client = AnyCudaRuntime::client(&device);
        let instructions = vec![Instructions::of(&client, BF16)];
        Self { client, device, arch, instructions, computes }
    }

    /// The first real one.
    pub(super) fn real() -> Self {
        let device = AnyCudaDevice::Gpu(0);
        let client = AnyCudaRuntime::client(&device);
        let (arch, instructions) = match (block_scaled::supported(&client), hopper::is_hopper(&client)) {
            (true, _) => (121, vec![Instructions::MmaSync]),
            (_, true) => (90, vec![Instructions::MmaSync, Instructions::Wgmma]),
            _ => (80, vec![Instructions::MmaSync]),
        };
        Self { client, device, arch, instructions, computes: true }
    }

    /// The launches that were recorded, which are then forgotten.
    pub(super) fn take_launches(&self) -> Vec<Launch> {
        match &self.device {
            AnyCudaDevice::Source(device) => device.take_launches(),
            AnyCudaDevice::Gpu(_) => vec![],
        }
    }

    /// A buffer of these bytes, which are numbers of type `dtype`.
    fn buffer(&self, bytes: &[u8], dtype: DType) -> Buffer {
        let (device, shape) = (self.device.clone(), Shape::new([bytes.len() / dtype.size()]));
        CubeTensor::new_contiguous(self.client.clone(), device, shape, self.client.create_from_slice(bytes), dtype)
    }

    /// A buffer of `values`, rounded to `ty`.
    pub(super) fn put(&self, values: &[f64], ty: StorageType) -> Data {
        let bytes = encoded(values, ty);
        let dtype = match ty {
            BF16 => DType::BF16,
            F16 => DType::F16,
            _ => DType::F32,
        };
        Data { buffer: self.buffer(&bytes, dtype), values: decoded(&bytes, ty), ty }
    }

    /// A buffer of E4M3 bytes, which stand for `values`.
    pub(super) fn put_bytes(&self, values: &[f64]) -> Data {
        let bytes: Vec<u8> = values.iter().map(|x| reference::e4m3_encode(*x as f32)).collect();
        Data { buffer: self.buffer(&bytes, DType::U32), values: decoded(&bytes, E4M3), ty: E4M3 }
    }

    /// A buffer of normal numbers.
    pub(super) fn normal(&self, random: &mut Random, len: usize, ty: StorageType) -> Data {
        let values: Vec<f64> = (0..len).map(|_| f64::from(random.normal())).collect();
        self.put(&values, ty)
    }

    /// A buffer of indices.
    pub(super) fn indices(&self, values: &[u32]) -> ArrayArg<AnyCudaRuntime> {
        let bytes: Vec<u8> = values.iter().flat_map(|n| n.to_le_bytes()).collect();
        self.buffer(&bytes, DType::U32).into_array_arg()
    }

    /// A buffer for a result, filled with NaN.
    pub(super) fn room(&self, len: usize, ty: StorageType) -> Data {
        self.put(&vec![f64::NAN; len], ty)
    }

    /// What is in the buffer now.
    pub(super) fn read(&self, data: &Data) -> Result<Vec<f64>, String> {
        let bytes = self.client.read_one(data.buffer.handle.clone()).map_err(|e| e.to_string())?;
        Ok(decoded(&bytes, data.ty))
    }

    /// An error unless each value of the buffer is as near to its exact one as `exact` allows.
    pub(super) fn compare(
        &self,
        label: &str,
        data: &Data,
        exact: impl Fn(usize) -> Exact + Sync,
    ) -> Result<(), String> {
        if !self.computes {
            return Ok(());
        }
        self.read(data)?.into_par_iter().enumerate().try_for_each(|(at, got)| {
            let Exact { value, allowed } = exact(at);
            let allowed = allowed + value.abs() * rounding(data.ty);
            let error = (got - value).abs();
            if error.is_nan() || error > allowed {
                return Err(format!("{label}: value {at} is {got}, not {value} within {allowed:e}"));
            }
            Ok(())
        })
    }

    /// A matrix of random codes, scales around 1, and the tensor scale 0.75.
    pub(super) fn packed(&self, random: &mut Random, rows: usize, cols: usize) -> PackedData {
        self.packed_by(random, rows, cols, 0.75)
    }

    /// The same with the tensor scale `global`.
    pub(super) fn packed_by(&self, random: &mut Random, rows: usize, cols: usize, global: f64) -> PackedData {
        let codes: Vec<u8> = (0..rows * cols / 2).map(|_| random.bits() as u8).collect();
        let scales: Vec<u8> = (0..rows * cols / 16).map(|_| 0x30 + random.below(24) as u8).collect();
        let global = self.put(&[global], F32);
        let value = |at: usize| {
            let code = codes[at / 2] >> (4 * (at % 2)) & 15;
            let size = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code & 7)];
            let scale = scales[at / 16];
            let scale = f64::from(8 + (scale & 7)) * 2f64.powi(i32::from(scale >> 3) - 10);
            if code & 8 == 0 { size * scale } else { -size * scale }
        };
        PackedData {
            values: (0..rows * cols).map(value).collect(),
            codes: self.buffer(&codes, DType::U32),
            scales: self.buffer(&scales, DType::U8),
            global,
            rows,
            cols,
        }
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        if let AnyCudaDevice::Source(device) = &self.device {
            device.give_back();
        }
    }
}

/// A buffer of a GPU.
type Buffer = CubeTensor<AnyCudaRuntime>;

/// A buffer, and the numbers that it was made of.
pub(super) struct Data {
    buffer: Buffer,
    pub(super) values: Vec<f64>,
    ty: StorageType,
}

impl Data {
    pub(super) fn arg(&self) -> ArrayArg<AnyCudaRuntime> {
        self.buffer.clone().into_array_arg()
    }
}

/// A packed matrix. Its values are without the tensor scale.
pub(super) struct PackedData {
    pub(super) values: Vec<f64>,
    codes: Buffer,
    scales: Buffer,
    pub(super) global: Data,
    pub(super) rows: usize,
    cols: usize,
}

impl PackedData {
    pub(super) fn args(&self) -> PackedArgs<AnyCudaRuntime> {
        PackedArgs {
            codes: self.codes.clone().into_array_arg(),
            scales: self.scales.clone().into_array_arg(),
            global: self.global.arg(),
            rows: self.rows,
            cols: self.cols,
        }
    }
}

/// A result in f64, and by how much the kernel's sums may differ from it before the result is rounded.
pub(super) struct Exact {
    pub(super) value: f64,
    pub(super) allowed: f64,
}

impl Exact {
    /// A sum in f32, times `factor`.
    pub(super) fn sum(terms: impl Iterator<Item = f64>, factor: f64) -> Self {
        let (mut value, mut size) = (0.0, 0.0);
        for term in terms {
            value += term;
            size += term.abs();
        }
        Self::of(value, size, factor)
    }

    /// A sum whose terms have sizes that sum to `size`, times `factor`.
    fn of(value: f64, size: f64, factor: f64) -> Self {
        Self { value: value * factor, allowed: size * factor.abs() * 2e-6 }
    }
}

/// A product of matrices in f64.
pub(super) struct ExactProduct {
    values: Array2<f64>,
    /// The sums of the sizes of the terms.
    sizes: Array2<f64>,
    factor: f64,
}

impl ExactProduct {
    /// `left` `[rows, depth]` times `right` `[depth, cols]`, times `factor`.
    pub(super) fn new(left: ArrayView2<f64>, right: ArrayView2<f64>, factor: f64) -> Self {
        Self { values: left.dot(&right), sizes: left.mapv(f64::abs).dot(&right.mapv(f64::abs)), factor }
    }

    /// The value in that row and column.
    pub(super) fn at(&self, row: usize, col: usize) -> Exact {
        Exact::of(self.values[[row, col]], self.sizes[[row, col]], self.factor)
    }
}

/// A matrix `[rows, cols]` that lies row by row.
pub(super) fn matrix(values: &[f64], rows: usize, cols: usize) -> ArrayView2<'_, f64> {
    ArrayView2::from_shape((rows, cols), values).expect("rows * cols values")
}

/// Half of the relative distance of neighboring numbers, a little more.
pub(super) fn rounding(ty: StorageType) -> f64 {
    match ty {
        BF16 => 1.01 / 256.0,
        F16 => 1.01 / 2048.0,
        _ => 1e-7,
    }
}

fn encoded(values: &[f64], ty: StorageType) -> Vec<u8> {
    match ty {
        BF16 => values.iter().flat_map(|x| bf16::from_f64(*x).to_le_bytes()).collect(),
        F16 => values.iter().flat_map(|x| f16::from_f64(*x).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|x| (*x as f32).to_le_bytes()).collect(),
    }
}

fn decoded(bytes: &[u8], ty: StorageType) -> Vec<f64> {
    let short = |b: &[u8]| u16::from_le_bytes([b[0], b[1]]);
    match ty {
        BF16 => bytes.chunks_exact(2).map(|b| bf16::from_bits(short(b)).to_f64()).collect(),
        F16 => bytes.chunks_exact(2).map(|b| f16::from_bits(short(b)).to_f64()).collect(),
        E4M3 => bytes.iter().map(|byte| f64::from(reference::e4m3_decode(*byte))).collect(),
        _ => bytes.chunks_exact(4).map(|b| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]]))).collect(),
    }
}
