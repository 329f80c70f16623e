//! The operations on the CPU: the scalar reference, run on host slices. Floats are f32 throughout;
//! this backend has no 16-bit floats.

use crate::{
    AdamwState, Nvfp4Backend, Nvfp4Primitive, Precision, Product,
    optim::{Moment8, reference_adamw, reference_adamw_8bit},
    quantize::{QuantizeSpec, View},
    reference::{self, Packed},
};
use burn::{
    backend::ndarray::{NdArray, NdArrayTensor, SharedArray},
    tensor::{
        DType, Element, Shape, TensorData, TensorMetadata,
        ops::{FloatTensor, FloatTensorOps, IntTensor, IntTensorOps},
    },
};

impl Nvfp4Backend for NdArray {
    fn nvfp4_quantize(x: FloatTensor<Self>, spec: QuantizeSpec) -> Nvfp4Primitive<Self> {
        let (rows, cols) = (x.shape()[0], x.shape()[1]);
        let q = reference::quantize(&floats(x), View::row_major(rows, cols), spec);
        let blocks = q.scales.len() / rows.max(1);
        let words = q.codes.len() / rows.max(1);
        Nvfp4Primitive {
            codes: ints(q.codes, [rows, words]),
            scales: ints(q.scales, [rows, blocks]),
            global: ints(vec![q.global.to_bits()], [1]),
        }
    }

    fn nvfp4_dequantize(w: &Nvfp4Primitive<Self>, dtype: DType) -> FloatTensor<Self> {
        assert_eq!(dtype, DType::F32, "the CPU backend computes in f32");
        let [rows, cols] = w.dims();
        let packed = Packed {
            codes: words(w.codes.clone()),
            scales: bytes(w.scales.clone()),
            global: f32::from_bits(words(w.global.clone())[0]),
        };
        from_floats(reference::dequantize(&packed, rows, cols), [rows, cols])
    }

    fn nvfp4_matmul(
        a: FloatTensor<Self>,
        w: &Nvfp4Primitive<Self>,
        product: Product,
        _out: DType,
    ) -> FloatTensor<Self> {
        let w = Self::nvfp4_dequantize(w, DType::F32);
        match product {
            Product::Nt => Self::float_matmul(a, Self::float_transpose(w)),
            Product::Nn => Self::float_matmul(a, w),
            Product::Tn => Self::float_matmul(Self::float_transpose(a), w),
        }
    }

    fn nvfp4_matmul_packed(a: &Nvfp4Primitive<Self>, w: &Nvfp4Primitive<Self>, dtype: DType) -> FloatTensor<Self> {
        Self::nvfp4_matmul(Self::nvfp4_dequantize(a, dtype), w, Product::Nt, dtype)
    }

    fn dense_matmul(
        lhs: FloatTensor<Self>,
        rhs: FloatTensor<Self>,
        _precision: Precision,
        _out: DType,
    ) -> FloatTensor<Self> {
        Self::float_matmul(lhs, rhs)
    }

    fn adamw(
        w: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        state: AdamwState<Self>,
        step: crate::AdamwStep,
        chunk: usize,
    ) -> (FloatTensor<Self>, AdamwState<Self>) {
        let grad = floats(grad);
        let mut w = array(w);
        let out = slice(&mut w);
        let chunks = (0..out.len()).step_by(chunk).map(|start| start..(start + chunk).min(grad.len()));
        let state = match state {
            AdamwState::F32 { m, v } => {
                let (mut m, mut v) = (array(m), array(v));
                let (m32, v32) = (slice(&mut m), slice(&mut v));
                for span in chunks {
                    let (m32, v32) = (&mut m32[span.clone()], &mut v32[span.clone()]);
                    reference_adamw(&mut out[span.clone()], &grad[span], m32, v32, step);
                }
                AdamwState::F32 { m: m.into(), v: v.into() }
            }
            AdamwState::Int8 { m, v } => {
                let mut host = [m, v].map(|s| (bytes(s.codes), floats(s.absmax), floats(s.table)));
                let [m, v] = &mut host;
                for span in chunks {
                    let blocks = span.start / 256..span.end.div_ceil(256);
                    reference_adamw_8bit(
                        &mut out[span.clone()],
                        &grad[span.clone()],
                        (&mut m.0[span.clone()], &mut m.1[blocks.clone()], &m.2),
                        (&mut v.0[span], &mut v.1[blocks], &v.2),
                        step,
                    );
                }
                let [m, v] = host.map(|(codes, absmax, table)| {
                    let (len, blocks) = (codes.len(), absmax.len());
                    Moment8 {
                        codes: ints(codes, [len]),
                        absmax: from_floats(absmax, [blocks]),
                        table: from_floats(table, [256]),
                    }
                });
                AdamwState::Int8 { m, v }
            }
        };
        (w.into(), state)
    }
}

/// The f32 array of a tensor in row-major order, not copied if it is contiguous and unshared.
fn array(x: NdArrayTensor) -> SharedArray<f32> {
    let NdArrayTensor::F32(storage) = x else { panic!("the CPU backend computes in f32") };
    let array = storage.into_shared();
    if array.is_standard_layout() { array } else { array.as_standard_layout().into_owned().into_shared() }
}

fn slice(x: &mut SharedArray<f32>) -> &mut [f32] {
    x.as_slice_mut().expect("`array` made it contiguous")
}

fn floats(x: NdArrayTensor) -> Vec<f32> {
    array(x).iter().copied().collect()
}

fn words(x: NdArrayTensor) -> Vec<u32> {
    let NdArrayTensor::U32(storage) = x else { panic!("codes are U32") };
    storage.into_shared().iter().copied().collect()
}

fn bytes(x: NdArrayTensor) -> Vec<u8> {
    let NdArrayTensor::U8(storage) = x else { panic!("scales are U8") };
    storage.into_shared().iter().copied().collect()
}

fn from_floats<const D: usize>(values: Vec<f32>, shape: [usize; D]) -> FloatTensor<NdArray> {
    <NdArray>::float_from_data(TensorData::new(values, Shape::new(shape)), &device())
}

fn ints<E: Element, const D: usize>(values: Vec<E>, shape: [usize; D]) -> IntTensor<NdArray> {
    <NdArray>::int_from_data(TensorData::new(values, Shape::new(shape)), &device())
}

fn device() -> <NdArray as burn::tensor::backend::BackendTypes>::Device {
    Default::default()
}
