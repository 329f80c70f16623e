//! The operations on the CPU: the scalar reference, run on host slices. Floats are f32 throughout;
//! this backend has no 16-bit floats.

use crate::{
    AdamwState, AdamwStep, MasterWeight, Moment, Nvfp4Backend, Nvfp4Primitive, Precision, Product, StateKind, Stream,
    optim::{
        decode_moment, encode_moment, reference_adamw, reference_repack, reference_round, reference_round_states,
        reference_unpacked, reference_unrounded,
    },
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
use ndarray::{Array2, Ix2, linalg::general_mat_mul};

impl Nvfp4Backend for NdArray {
    fn nvfp4_quantize(x: FloatTensor<Self>, spec: QuantizeSpec) -> Nvfp4Primitive<Self> {
        let (rows, cols) = (x.shape()[0], x.shape()[1]);
        let q = reference::quantize(&floats(x), View::row_major(rows, cols), spec);
        device_packed(q, rows)
    }

    fn nvfp4_quantize_master(x: FloatTensor<Self>) -> Nvfp4Primitive<Self> {
        let (rows, cols) = (x.shape()[0], x.shape()[1]);
        device_packed(reference::quantize_master(&floats(x), rows, cols), rows)
    }

    fn normal(dims: [usize; 2], std: f32, stream: Stream, _dtype: DType, _device: &Self::Device) -> FloatTensor<Self> {
        from_floats(reference::normals(dims[0] * dims[1], std, stream), dims)
    }

    fn nvfp4_dequantize(w: &Nvfp4Primitive<Self>, dtype: DType) -> FloatTensor<Self> {
        assert_eq!(dtype, DType::F32, "the CPU backend computes in f32");
        let [rows, cols] = w.dims();
        from_floats(reference::dequantize(&host_packed(w), rows, cols), [rows, cols])
    }

    fn nvfp4_matmul(
        a: FloatTensor<Self>,
        w: &Nvfp4Primitive<Self>,
        product: Product,
        _out: DType,
    ) -> FloatTensor<Self> {
        let w = Self::nvfp4_dequantize(w, DType::F32);
        match product {
            Product::Nt => product_of(a, Self::float_transpose(w)),
            Product::Nn => product_of(a, w),
            Product::Tn => product_of(Self::float_transpose(a), w),
        }
    }

    fn nvfp4_matmul_packed(
        a: &Nvfp4Primitive<Self>,
        w: &Nvfp4Primitive<Self>,
        product: Product,
        _operand: DType,
        out: DType,
    ) -> FloatTensor<Self> {
        Self::nvfp4_matmul(Self::nvfp4_dequantize(a, DType::F32), w, product, out)
    }

    fn hadamard(x: FloatTensor<Self>) -> FloatTensor<Self> {
        let (rows, cols) = (x.shape()[0], x.shape()[1]);
        from_floats(reference::hadamard(&floats(x), kernels_cubecl::hadamard::SIGNS), [rows, cols])
    }

    fn dense_matmul(
        lhs: FloatTensor<Self>,
        rhs: FloatTensor<Self>,
        _precision: Precision,
        _out: DType,
    ) -> FloatTensor<Self> {
        let matrices = lhs.shape().rank() == 2 && lhs.dtype() == DType::F32;
        if matrices { product_of(lhs, rhs) } else { Self::float_matmul(lhs, rhs) }
    }

    // The whole tensor at once: no launch to keep small.
    fn adamw(
        w: MasterWeight<Self>,
        grad: FloatTensor<Self>,
        state: AdamwState<Self>,
        step: AdamwStep,
        _chunk: usize,
    ) -> (MasterWeight<Self>, AdamwState<Self>) {
        let grad = floats(grad);
        let len = grad.len();
        let [mut m, mut v] = [(state.m, false), (state.v, true)].map(|(moment, root)| match moment {
            Moment::Float(x) => (array(x), None),
            Moment::Quantized { codes, absmax, table } => {
                let table = floats(table);
                let values = decode_moment(&bytes(codes), &floats(absmax), &table, len, root);
                (array(from_floats(values, [len])), Some(table))
            }
        });
        let moments = (slice(&mut m.0), slice(&mut v.0));
        let w = match w {
            MasterWeight::Dense { w, master, residual } => {
                let mut w = array(w);
                let values = slice(&mut w);
                let mut residual = residual.map(bytes);
                if let Some(residual) = &residual {
                    values.iter_mut().zip(residual).for_each(|(w, r)| *w = reference_unrounded(*w, *r));
                }
                reference_adamw(values, &grad, moments.0, moments.1, step);
                for (i, w) in values.iter_mut().enumerate() {
                    let (value, rest) = reference_round(*w, i, master, step.stream);
                    *w = value;
                    if let Some(residual) = &mut residual {
                        residual[i] = rest;
                    }
                }
                MasterWeight::Dense { w: w.into(), master, residual: residual.map(|r| ints(r, [len])) }
            }
            MasterWeight::Packed(w) => {
                let [rows, cols] = w.dims();
                let mut packed = host_packed(&w);
                let mut values = reference_unpacked(&packed, rows, cols);
                reference_adamw(&mut values, &grad, moments.0, moments.1, step);
                reference_repack(&mut packed, cols, &values, step.stream);
                MasterWeight::Packed(device_packed(packed, rows))
            }
        };
        if state.kind == StateKind::Bf16 {
            reference_round_states(moments.0, moments.1, step.stream);
        }
        let [m, v] = [(m, false), (v, true)].map(|((values, table), root)| match table {
            None => Moment::Float(values.into()),
            Some(table) => {
                let (codes, absmax) = encode_moment(&floats(values.into()), &table, root);
                let (count, blocks, entries) = (codes.len(), absmax.len(), table.len());
                Moment::Quantized {
                    codes: ints(codes, [count]),
                    absmax: from_floats(absmax, [blocks]),
                    table: from_floats(table, [entries]),
                }
            }
        });
        (w, AdamwState { kind: state.kind, m, v })
    }
}

/// The product of two matrices as they are stored. Burn's copies a transposed one first: a model's head, for every token.
fn product_of(lhs: NdArrayTensor, rhs: NdArrayTensor) -> FloatTensor<NdArray> {
    let matrix = |x: NdArrayTensor| {
        let NdArrayTensor::F32(storage) = x else { panic!("the CPU backend computes in f32") };
        storage.into_shared().into_dimensionality::<Ix2>().expect("two dimensions")
    };
    let (lhs, rhs) = (matrix(lhs), matrix(rhs));
    let mut out = Array2::<f32>::zeros((lhs.nrows(), rhs.ncols()));
    general_mat_mul(1.0, &lhs, &rhs, 0.0, &mut out);
    NdArrayTensor::F32(out.into_dyn().into_shared().into())
}

fn host_packed(w: &Nvfp4Primitive<NdArray>) -> Packed {
    Packed {
        codes: words(w.codes.clone()),
        scales: bytes(w.scales.clone()),
        global: f32::from_bits(words(w.global.clone())[0]),
    }
}

fn device_packed(q: Packed, rows: usize) -> Nvfp4Primitive<NdArray> {
    let (blocks, words) = (q.scales.len() / rows.max(1), q.codes.len() / rows.max(1));
    Nvfp4Primitive {
        codes: ints(q.codes, [rows, words]),
        scales: ints(q.scales, [rows, blocks]),
        global: ints(vec![q.global.to_bits()], [1]),
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
