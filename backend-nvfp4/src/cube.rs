//! The operations on CubeCL devices (CUDA, Vulkan, …): each is buffers, shapes and one launch.

use crate::{
    AdamwState, MemoryUse, Nvfp4Backend, Nvfp4Primitive, Precision, Product,
    quantize::{QuantizeSpec, Scaling, View},
};
use burn::tensor::{DType, Shape, TensorMetadata, backend::DeviceOps, ops::FloatTensor};
use burn_cubecl::{
    BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement,
    kernel::{
        cast, into_contiguous,
        matmul::{MatmulStrategy, matmul},
    },
    ops::numeric::empty_device_contiguous_dtype,
    tensor::CubeTensor,
};
use cubecl::server::ComputeServer;
use cubek::{
    matmul::{
        definition::{MatmulElems, MatmulGlobalElems},
        launch::Strategy,
    },
    std::InputBinding,
};
use kernels_cubecl::{
    KernelError, adamw,
    adamw::{AdamwStep, Chunk, StateArgs},
    dequantize::dequantize,
    layout::{scales_per_row, words_per_row},
    matmul::{PackedArgs, matmul_dense_packed, matmul_packed_packed},
    quantize,
};

impl<R, F, I, BT> Nvfp4Backend for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    R::Server: ComputeServer,
    R::Device: DeviceOps,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    fn nvfp4_quantize(x: FloatTensor<Self>, spec: QuantizeSpec) -> Nvfp4Primitive<Self> {
        let x = into_contiguous(x);
        let [rows, cols] = dims(&x);
        let amax = empty(&x, [1], DType::F32);
        if spec.scaling == Scaling::Two {
            launched(quantize::amax(&x.client, arg(&x), x.dtype.into(), arg(&amax)));
        }
        let codes = empty(&x, [rows, words_per_row(cols)], DType::U32);
        let scales = empty(&x, [rows, scales_per_row(cols)], DType::U8);
        let global = empty(&x, [1], DType::U32);
        launched(quantize::quantize(
            &x.client,
            arg(&x),
            x.dtype.into(),
            arg(&amax),
            arg(&codes),
            arg(&scales),
            arg(&global),
            View::row_major(rows, cols),
            spec,
        ));
        Nvfp4Primitive { codes, scales, global }
    }

    fn nvfp4_dequantize(w: &Nvfp4Primitive<Self>, dtype: DType) -> FloatTensor<Self> {
        let [rows, cols] = w.dims();
        let y = empty(&w.codes, [rows, cols], dtype);
        launched(dequantize(
            &w.codes.client,
            arg(&w.codes),
            arg(&w.scales),
            arg(&w.global),
            arg(&y),
            dtype.into(),
            rows,
            cols,
            false,
        ));
        y
    }

    fn nvfp4_matmul(a: FloatTensor<Self>, w: &Nvfp4Primitive<Self>, product: Product) -> FloatTensor<Self> {
        let a = into_contiguous(a);
        let ([a_rows, a_cols], [w_rows, w_cols]) = (dims(&a), w.dims());
        let out = match product {
            Product::Nt => [a_rows, w_rows],
            Product::Nn => [a_rows, w_cols],
            Product::Tn => [a_cols, w_cols],
        };
        let y = empty(&a, out, a.dtype);
        let dtype = a.dtype.into();
        launched(matmul_dense_packed(&a.client, arg(&a), a_rows, packed(w), arg(&y), dtype, product));
        y
    }

    fn nvfp4_matmul_packed(a: &Nvfp4Primitive<Self>, w: &Nvfp4Primitive<Self>, dtype: DType) -> FloatTensor<Self> {
        let y = empty(&w.codes, [a.dims()[0], w.dims()[0]], dtype);
        launched(matmul_packed_packed(&w.codes.client, packed(a), packed(w), arg(&y), dtype.into()));
        y
    }

    fn dense_matmul(
        lhs: FloatTensor<Self>,
        rhs: FloatTensor<Self>,
        precision: Precision,
        out: DType,
    ) -> FloatTensor<Self> {
        assert_eq!(lhs.dtype, rhs.dtype, "CubeCL reads a second dtype as garbage");
        if precision != Precision::F32 {
            return matmul(lhs, rhs, None, MatmulStrategy::default(), out).expect("matmul set-up");
        }
        // The automatic strategy takes tensor cores (TF32) for f32 where there are any.
        let mut shape = lhs.shape();
        let last = shape.rank() - 1;
        shape[last] = rhs.shape()[last];
        let y = empty_device_contiguous_dtype(lhs.client.clone(), lhs.device.clone(), shape, DType::F32);
        let client = lhs.client.clone();
        let float = DType::F32.into();
        let mut elems = MatmulElems::from_globals(&MatmulGlobalElems { lhs: float, rhs: float, out: float });
        cubek::matmul::launch::launch_ref(
            &Strategy::SimpleUnit(Default::default()),
            &client,
            InputBinding::new(lhs.binding(), float),
            InputBinding::new(rhs.binding(), float),
            y.clone().binding(),
            &mut elems,
        )
        .expect("matmul set-up");
        if out == DType::F32 { y } else { cast(y, out) }
    }

    fn adamw(
        w: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        state: AdamwState<Self>,
        step: AdamwStep,
        chunk: usize,
    ) -> (FloatTensor<Self>, AdamwState<Self>) {
        let w = writable(w);
        let grad = into_contiguous(grad);
        let client = w.client.clone();
        let len = w.meta.num_elements();
        let chunks = (0..len).step_by(chunk).map(|start| Chunk { start, end: (start + chunk).min(len) });
        let state = match state {
            AdamwState::F32 { m, v } => {
                let (m, v) = (writable(m), writable(v));
                for chunk in chunks {
                    launched(adamw::adamw_f32(&client, arg(&w), arg(&grad), arg(&m), arg(&v), step, chunk));
                }
                AdamwState::F32 { m, v }
            }
            AdamwState::Int8 { mut m, mut v } => {
                for moment in [&mut m, &mut v] {
                    moment.codes = writable(moment.codes.clone());
                    moment.absmax = writable(moment.absmax.clone());
                }
                let args = |s: &crate::optim::Moment8<Self>| StateArgs {
                    codes: arg(&s.codes),
                    absmax: arg(&s.absmax),
                    table: arg(&s.table),
                };
                for chunk in chunks {
                    launched(adamw::adamw_8bit(&client, arg(&w), arg(&grad), args(&m), args(&v), step, chunk));
                }
                AdamwState::Int8 { m, v }
            }
        };
        (w, state)
    }

    fn memory_in_use(device: &Self::Device) -> Option<MemoryUse> {
        let usage = R::client(device).memory_usage().ok()?;
        Some(MemoryUse { in_use: usage.bytes_in_use, reserved: usage.bytes_reserved })
    }
}

/// A kernel refuses only what this file got wrong: its callers' shapes are checked at the door.
fn launched(result: Result<(), KernelError>) {
    if let Err(error) = result {
        panic!("{error}");
    }
}

fn dims<R: CubeRuntime>(x: &CubeTensor<R>) -> [usize; 2] {
    let shape = x.shape();
    assert_eq!(shape.rank(), 2, "a matrix is expected, got {shape:?}");
    [shape[0], shape[1]]
}

/// A contiguous tensor beside `like`. The ordinary constructor pads rows on CUDA.
fn empty<R: CubeRuntime, const D: usize>(like: &CubeTensor<R>, shape: [usize; D], dtype: DType) -> CubeTensor<R> {
    empty_device_contiguous_dtype(like.client.clone(), like.device.clone(), Shape::new(shape), dtype)
}

fn arg<R: CubeRuntime>(x: &CubeTensor<R>) -> cubecl::prelude::ArrayArg<R> {
    assert!(x.is_contiguous(), "kernels read buffers without strides");
    x.clone().into_array_arg()
}

fn packed<R, F, I, BT>(w: &Nvfp4Primitive<CubeBackend<R, F, I, BT>>) -> PackedArgs<R>
where
    R: CubeRuntime,
    R::Server: ComputeServer,
    R::Device: DeviceOps,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    let [rows, cols] = w.dims();
    PackedArgs { codes: arg(&w.codes), scales: arg(&w.scales), global: arg(&w.global), rows, cols }
}

/// The tensor itself if nothing else holds its buffer, else a copy.
fn writable<R: CubeRuntime>(x: CubeTensor<R>) -> CubeTensor<R> {
    let x = into_contiguous(x);
    if x.can_mut() { x } else { x.copy() }
}
