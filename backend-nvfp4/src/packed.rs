//! A packed NVFP4 matrix: one type for host data, for the buffers of a device, and for what operations pass on.
//!
//! A matrix `[rows, cols]` has a 4-bit E2M1 code for each value, an E4M3 scale for 16 columns of a row, and an f32 tensor
//! scale g. A value is `code * scale * g`. [`kernels_cubecl::layout`] says where codes and scales lie.

use crate::error::Nvfp4Error;
use burn::{
    module::Module,
    tensor::{
        DType, Int, Shape, Tensor, TensorData, TensorMetadata, Transaction,
        backend::Backend,
        ops::{FloatTensor, IntTensor},
    },
};
use kernels_cubecl::layout::{BLOCK, scales_per_row, words_per_row};

/// Bytes of a value of a packed matrix: its code, and its share of a block scale.
pub const PACKED_BYTES: f64 = 0.5 + 1.0 / BLOCK as f64;

/// A packed matrix over any kind of buffer. Without parameters it is host data.
#[derive(Debug, Clone, PartialEq)]
pub struct Packed<Codes = Vec<u32>, Scales = Vec<u8>, Global = f32> {
    /// `[rows, cols / 8]` words of 32 bits, eight codes each.
    pub codes: Codes,
    /// `[rows, cols / 16]` E4M3 bytes.
    pub scales: Scales,
    /// The tensor scale g, which is 1 in single-level tensors. A device holds the bits of the f32 in a U32 tensor `[1]`,
    /// because Int tensors pass through autodiff unchanged.
    pub global: Global,
}

impl Packed {
    /// Refuses scales that nothing writes on purpose. The rows are those of a matrix with `cols` columns, from `first_row` on.
    ///
    /// # Errors
    /// If a block scale is NaN or negative, or the tensor scale is not finite or is negative.
    pub fn check_scales(&self, first_row: usize, cols: usize) -> Result<(), Nvfp4Error> {
        // 0x7F is NaN, and from 0x80 on the sign bit is set. A processor finds the largest of many bytes at once. The place of the
        // first wrong byte is looked for only if there is one.
        let is_wrong = |byte: u8| byte >= 0x7F;
        if is_wrong(self.scales.iter().copied().fold(0, u8::max))
            && let Some(at) = self.scales.iter().position(|&b| is_wrong(b))
        {
            let blocks = scales_per_row(cols);
            return Err(Nvfp4Error::Scale { byte: self.scales[at], row: first_row + at / blocks, block: at % blocks });
        }
        if !(self.global.is_finite() && self.global >= 0.0) {
            return Err(Nvfp4Error::Global { value: self.global.to_string() });
        }
        Ok(())
    }
}

/// A packed matrix on a device, as backend operations pass it: Int tensors of U32 codes, U8 scales and the U32 bits of
/// the tensor scale.
pub type Nvfp4Primitive<B> = Packed<IntTensor<B>, IntTensor<B>, IntTensor<B>>;

impl<Buffer: TensorMetadata> Packed<Buffer, Buffer, Buffer> {
    /// Rows and columns.
    pub fn dims(&self) -> [usize; 2] {
        let shape = self.scales.shape();
        [shape[0], shape[1] * BLOCK]
    }
}

/// A matrix that a product reads: a weight, activations or their gradient.
#[derive(Debug, Clone)]
pub enum Operand<B: Backend> {
    /// Float values.
    Dense(FloatTensor<B>),
    /// NVFP4 codes.
    Packed(Nvfp4Primitive<B>),
    /// The values of NVFP4 codes that one product alone reads.
    Unscaled(Unscaled<B>),
}

/// The values of an NVFP4 matrix without its tensor scale: each `code * scale`, which 16 bits hold exactly.
#[derive(Debug, Clone)]
pub struct Unscaled<B: Backend> {
    /// `[rows, cols]`.
    pub values: FloatTensor<B>,
    /// The tensor scale, as in [`Packed::global`].
    pub global: IntTensor<B>,
}

/// A packed matrix as part of a module. Its data was checked when it came to the device, or an operation made it there.
#[derive(Module, Debug)]
pub struct Nvfp4Tensor<B: Backend> {
    codes: Tensor<B, 2, Int>,
    scales: Tensor<B, 2, Int>,
    global: Tensor<B, 1, Int>,
}

impl<B: Backend> Nvfp4Tensor<B> {
    /// Checks a packed matrix that comes from outside and uploads it.
    ///
    /// # Errors
    /// If a length does not fit `rows` x `cols`, `cols` is not a multiple of 16, or a scale is NaN or negative.
    pub fn new(packed: Packed, rows: usize, cols: usize, device: &B::Device) -> Result<Self, Nvfp4Error> {
        check(&packed, rows, cols)?;
        // Uploaded flat: CUDA pads the rows of a matrix, and kernels read codes without strides.
        let codes = TensorData::new(packed.codes, Shape::new([rows * words_per_row(cols)]));
        let scales = TensorData::new(packed.scales, Shape::new([rows * scales_per_row(cols)]));
        let global = TensorData::new(vec![packed.global.to_bits()], Shape::new([1]));
        let flat = |data, dtype| Tensor::<B, 1, Int>::from_data(data, (device, dtype));
        Ok(Self {
            codes: flat(codes, DType::U32).reshape([rows, words_per_row(cols)]),
            scales: flat(scales, DType::U8).reshape([rows, scales_per_row(cols)]),
            global: flat(global, DType::U32),
        })
    }

    /// A packed matrix of zeros, which is made on the device.
    pub fn zeros(rows: usize, cols: usize, device: &B::Device) -> Self {
        let flat = |len: usize, dtype| Tensor::<B, 1, Int>::zeros([len], (device, dtype));
        let (words, scales) = (words_per_row(cols), scales_per_row(cols));
        Self {
            codes: flat(rows * words, DType::U32).reshape([rows, words]),
            scales: flat(rows * scales, DType::U8).reshape([rows, scales]),
            global: flat(1, DType::U32),
        }
    }

    /// Rows and columns.
    pub fn dims(&self) -> [usize; 2] {
        let [rows, blocks] = self.scales.dims();
        [rows, blocks * BLOCK]
    }

    /// Reads the packed matrix back to the host.
    ///
    /// # Errors
    /// If the device failed before or during the read.
    pub fn to_packed(&self) -> Result<Packed, Nvfp4Error> {
        let global = read_words::<B>(self.global.clone().into_primitive())?;
        Ok(Packed {
            codes: read_words::<B>(self.codes.clone().into_primitive())?,
            scales: read_bytes::<B>(self.scales.clone().into_primitive())?.bytes.to_vec(),
            global: f32::from_bits(global[0]),
        })
    }

    /// Reads the codes of every `step`-th row to the host, eight codes a word.
    ///
    /// # Errors
    /// If the device failed.
    pub fn codes_of_rows(&self, step: usize) -> Result<Vec<u32>, Nvfp4Error> {
        let rows: Vec<i32> = (0..self.codes.dims()[0]).step_by(step).map(|r| r as i32).collect();
        let count = rows.len();
        let rows = Tensor::<B, 1, Int>::from_data(TensorData::new(rows, [count]), &self.codes.device());
        read_words::<B>(self.codes.clone().select(0, rows).into_primitive())
    }

    /// The buffers for a backend operation, shared and not copied.
    pub fn primitive(&self) -> Nvfp4Primitive<B> {
        self.clone().into_primitive()
    }

    /// The buffers for a backend operation that updates them in place, for which it needs their only handle.
    pub fn into_primitive(self) -> Nvfp4Primitive<B> {
        Packed {
            codes: self.codes.into_primitive(),
            scales: self.scales.into_primitive(),
            global: self.global.into_primitive(),
        }
    }

    /// Wraps buffers that an operation made.
    pub fn from_primitive(packed: Nvfp4Primitive<B>) -> Self {
        Self {
            codes: Tensor::from_primitive(packed.codes),
            scales: Tensor::from_primitive(packed.scales),
            global: Tensor::from_primitive(packed.global),
        }
    }
}

/// Reads the data of an Int tensor to the host as `u32`.
///
/// # Errors
/// If the device failed before or during the read.
pub(crate) fn read_words<B: Backend>(x: IntTensor<B>) -> Result<Vec<u32>, Nvfp4Error> {
    let data = read::<B>(x)?;
    // `iter` goes value by value through a boxed iterator.
    match data.dtype {
        DType::U32 => data.into_vec().map_err(failed),
        _ => Ok(data.iter::<u32>().collect()),
    }
}

/// Reads an integer tensor of bytes to the host.
///
/// # Errors
/// If the device failed.
fn read_bytes<B: Backend>(x: IntTensor<B>) -> Result<TensorData, Nvfp4Error> {
    let data = read::<B>(x)?;
    if data.dtype == DType::U8 {
        return Ok(data);
    }
    let bytes: Vec<u8> = data.iter().collect();
    let len = bytes.len();
    Ok(TensorData::new(bytes, [len]))
}

fn read<B: Backend>(x: IntTensor<B>) -> Result<TensorData, Nvfp4Error> {
    let x = Tensor::<B, 1, Int>::from_primitive(B::int_reshape(x.clone(), Shape::new([x.shape().num_elements()])));
    Ok(Transaction::<B>::default().register(x).try_execute().map_err(failed)?.remove(0))
}

fn failed(e: impl std::fmt::Debug) -> Nvfp4Error {
    Nvfp4Error::Device(format!("{e:?}"))
}

fn check(packed: &Packed, rows: usize, cols: usize) -> Result<(), Nvfp4Error> {
    if !cols.is_multiple_of(BLOCK) {
        return Err(Nvfp4Error::Columns { cols });
    }
    let lengths = [
        ("codes", packed.codes.len(), rows * words_per_row(cols)),
        ("scales", packed.scales.len(), rows * scales_per_row(cols)),
    ];
    for (part, found, expected) in lengths {
        if found != expected {
            return Err(Nvfp4Error::Length { part, rows, cols, expected, found });
        }
    }
    packed.check_scales(0, cols)
}
