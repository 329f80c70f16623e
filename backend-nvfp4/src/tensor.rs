//! A packed NVFP4 matrix on a device, with its invariants checked at the door.

use crate::{Nvfp4Backend, Nvfp4Error, quantize::QuantizeSpec, reference::Packed};
use burn::{
    module::Module,
    tensor::{
        DType, Int, Shape, Tensor, TensorData, TensorMetadata, TensorPrimitive, Transaction, backend::Backend,
        ops::IntTensor,
    },
};
use kernels_cubecl::layout::{scales_per_row, words_per_row};

/// The buffers of a packed `rows` x `cols` matrix, as backend operations pass them.
#[derive(Debug, Clone)]
pub struct Nvfp4Primitive<B: Backend> {
    /// U32 `[rows, cols / 8]`.
    pub codes: IntTensor<B>,
    /// U8 `[rows, cols / 16]`.
    pub scales: IntTensor<B>,
    /// U32 `[1]`: the bits of the f32 tensor scale. An Int tensor, so that autodiff passes it through.
    pub global: IntTensor<B>,
}

impl<B: Backend> Nvfp4Primitive<B> {
    /// Rows and columns.
    pub fn dims(&self) -> [usize; 2] {
        let shape = self.scales.shape();
        [shape[0], shape[1] * kernels_cubecl::layout::BLOCK]
    }
}

/// A packed NVFP4 matrix `[R, C]`: 4-bit codes, an E4M3 scale for 16 columns, an f32 tensor scale.
#[derive(Module, Debug)]
pub struct Nvfp4Tensor<B: Backend> {
    codes: Tensor<B, 2, Int>,
    scales: Tensor<B, 2, Int>,
    global: Tensor<B, 1, Int>,
}

impl<B: Nvfp4Backend> Nvfp4Tensor<B> {
    /// Checks a packed matrix from outside and uploads it.
    ///
    /// # Errors
    /// If lengths do not fit `rows` x `cols`, `cols` is not a multiple of 16, or a scale is NaN or
    /// negative.
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

    /// Quantises a float matrix on its device.
    pub fn quantize(x: Tensor<B, 2>, spec: QuantizeSpec) -> Self {
        Self::from_primitive(B::nvfp4_quantize(x.into_primitive().tensor(), spec))
    }

    /// Rows and columns.
    pub fn dims(&self) -> [usize; 2] {
        let [rows, blocks] = self.scales.dims();
        [rows, blocks * kernels_cubecl::layout::BLOCK]
    }

    /// The values `[R, C]` as `dtype`.
    pub fn dequantize(&self, dtype: DType) -> Tensor<B, 2> {
        float(B::nvfp4_dequantize(&self.primitive(), dtype))
    }

    /// Reads the packed matrix back to the host.
    ///
    /// # Errors
    /// If the device failed before or during the read.
    pub fn to_packed(&self) -> Result<Packed, Nvfp4Error> {
        let bytes = read_words::<B>(self.scales.clone().into_primitive())?;
        let global = read_words::<B>(self.global.clone().into_primitive())?;
        Ok(Packed {
            codes: read_words::<B>(self.codes.clone().into_primitive())?,
            scales: bytes.into_iter().map(|b| b as u8).collect(),
            global: f32::from_bits(global[0]),
        })
    }

    /// The codes of every `step`-th row, eight a word, on the host.
    ///
    /// # Errors
    /// If the device failed.
    pub fn codes_of_rows(&self, step: usize) -> Result<Vec<u32>, Nvfp4Error> {
        let rows: Vec<i32> = (0..self.codes.dims()[0]).step_by(step).map(|r| r as i32).collect();
        let count = rows.len();
        let rows = Tensor::<B, 1, Int>::from_data(TensorData::new(rows, [count]), &self.codes.device());
        read_words::<B>(self.codes.clone().select(0, rows).into_primitive())
    }

    /// The buffers, for backend operations. Shares them, copies nothing.
    pub fn primitive(&self) -> Nvfp4Primitive<B> {
        Nvfp4Primitive {
            codes: self.codes.clone().into_primitive(),
            scales: self.scales.clone().into_primitive(),
            global: self.global.clone().into_primitive(),
        }
    }

    /// The buffers themselves: an update in place needs their only handle.
    pub fn into_primitive(self) -> Nvfp4Primitive<B> {
        Nvfp4Primitive {
            codes: self.codes.into_primitive(),
            scales: self.scales.into_primitive(),
            global: self.global.into_primitive(),
        }
    }

    /// A packed matrix of buffers that an operation made.
    pub fn from_primitive(p: Nvfp4Primitive<B>) -> Self {
        Self {
            codes: Tensor::from_primitive(p.codes),
            scales: Tensor::from_primitive(p.scales),
            global: Tensor::from_primitive(p.global),
        }
    }
}

/// A float tensor from its primitive.
pub(crate) fn float<B: Backend, const D: usize>(p: B::FloatTensorPrimitive) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(p))
}

/// An Int tensor's device data, as a host vector of `u32`.
///
/// # Errors
/// If the device failed before or during the read.
pub fn read_words<B: Backend>(x: IntTensor<B>) -> Result<Vec<u32>, Nvfp4Error> {
    let x = Tensor::<B, 1, Int>::from_primitive(B::int_reshape(x.clone(), Shape::new([x.shape().num_elements()])));
    let data = Transaction::<B>::default()
        .register(x)
        .try_execute()
        .map_err(|e| Nvfp4Error::Device(format!("{e:?}")))?
        .remove(0);
    Ok(data.iter::<u32>().collect())
}

fn check(packed: &Packed, rows: usize, cols: usize) -> Result<(), Nvfp4Error> {
    if !cols.is_multiple_of(kernels_cubecl::layout::BLOCK) {
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
    // 0x7F is NaN; from 0x80 on the sign bit is set.
    if let Some(at) = packed.scales.iter().position(|&b| b >= 0x7F) {
        let blocks = scales_per_row(cols);
        return Err(Nvfp4Error::Scale { byte: packed.scales[at], row: at / blocks, block: at % blocks });
    }
    if !(packed.global.is_finite() && packed.global >= 0.0) {
        return Err(Nvfp4Error::Global { value: packed.global.to_string() });
    }
    Ok(())
}
