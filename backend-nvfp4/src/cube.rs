//! The operations on CubeCL devices (CUDA, Vulkan, …): each is buffers, shapes and one launch.

mod activations;

use self::activations::{Normed, activations, coded, gated, normed, quantized};
use crate::{
    Activations, AdamwState, AttentionSaved, AttentionSpec, Documents, HeadLoss, LinearSpec, Master, MasterWeight,
    MemoryUse, Moment, Nvfp4Backend, Nvfp4Error, Nvfp4Primitive, Operand, Precision, Product, Rotary, StateKind,
    Stream, bench, blocks, head,
    products::{self, Packed, Side},
    quantize::{Block, QuantizeSpec, Rounding, Scaling, View},
    reference,
};
use burn::tensor::{
    DType, Shape, Slice, TensorMetadata,
    backend::DeviceOps,
    ops::{FloatTensor, FloatTensorOps, IntTensor, IntTensorOps},
};
use burn_cubecl::{
    BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement,
    kernel::{cast, into_contiguous},
    ops::numeric::empty_device_contiguous_dtype,
    tensor::CubeTensor,
};
use cubecl::server::ComputeServer;
use kernels_cubecl::{
    KernelError, adamw,
    adamw::{AdamwStep, Chunk, Coding, DenseArgs, StateArgs},
    attention,
    attention::AttentionShape,
    column_sums,
    cross_entropy::cross_entropy,
    decode_attention, gradient, hadamard, mma, normal, quantize, rms_norm, rope,
    rope::{RopeArgs, RopeShape},
    swiglu,
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
        quantized::<Self, R>(&x, View::row_major(rows, cols), spec, false)
    }

    fn nvfp4_quantize_across(x: FloatTensor<Self>, spec: QuantizeSpec, rotated: bool) -> Nvfp4Primitive<Self> {
        let x = into_contiguous(x);
        let [rows, cols] = dims(&x);
        quantized::<Self, R>(&x, View::transposed(rows, cols), spec, rotated)
    }

    fn nvfp4_quantize_master(x: FloatTensor<Self>) -> Nvfp4Primitive<Self> {
        let x = into_contiguous(x);
        let [rows, cols] = dims(&x);
        let spec = QuantizeSpec { scaling: Scaling::Two, block: Block::Row, rounding: Rounding::Nearest };
        let amax = empty(&x, [quantize::AMAX_LEN], DType::F32);
        launched(quantize::amax(&x.client, arg(&x), x.dtype.into(), reference::MASTER_ROOM, arg(&amax)));
        coded::<Self, R>(&x, amax, View::row_major(rows, cols), spec, false)
    }

    fn normal(dims: [usize; 2], std: f32, stream: Stream, dtype: DType, device: &Self::Device) -> FloatTensor<Self> {
        let x = Self::unfilled(dims, dtype, device);
        launched(normal::normal(&x.client, arg(&x), dtype.into(), std, stream));
        x
    }

    fn unfilled(dims: [usize; 2], dtype: DType, device: &Self::Device) -> FloatTensor<Self> {
        empty_device_contiguous_dtype(R::client(device), device.clone(), Shape::new(dims), dtype)
    }

    fn nvfp4_dequantize(w: &Nvfp4Primitive<Self>, dtype: DType) -> FloatTensor<Self> {
        packed(w).values(dtype, true)
    }

    fn nvfp4_matmul(a: FloatTensor<Self>, w: &Nvfp4Primitive<Self>, product: Product, out: DType) -> FloatTensor<Self> {
        products::packed(a, &packed(w), product, out)
    }

    fn nvfp4_matmul_packed(
        a: &Nvfp4Primitive<Self>,
        w: &Nvfp4Primitive<Self>,
        product: Product,
        operand: DType,
        out: DType,
    ) -> FloatTensor<Self> {
        products::packed_both(&packed(a), &packed(w), product, operand, out)
    }

    fn hadamard(x: FloatTensor<Self>) -> FloatTensor<Self> {
        let x = into_contiguous(x);
        let y = empty(&x, dims(&x), x.dtype);
        launched(hadamard::hadamard(&x.client, arg(&x), arg(&y), x.dtype.into(), hadamard::SIGNS));
        y
    }

    fn dense_matmul(
        lhs: FloatTensor<Self>,
        rhs: FloatTensor<Self>,
        precision: Precision,
        out: DType,
    ) -> FloatTensor<Self> {
        products::dense(lhs, rhs, precision == Precision::F32, out)
    }

    fn joint_products(
        product: Product,
        a: &[Operand<Self>],
        b: &[Operand<Self>],
        precision: Precision,
        out: DType,
        summed: bool,
    ) -> Option<Vec<FloatTensor<Self>>> {
        products::joint(product, &sides(a), &sides(b), precision.dtype(), out, summed)
    }

    fn rms_norm(x: FloatTensor<Self>, w: FloatTensor<Self>, eps: f64) -> FloatTensor<Self> {
        normed(x, None, w, eps, false).y
    }

    fn rms_norm_activations(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        eps: f64,
        spec: LinearSpec,
    ) -> Activations<Self> {
        let Normed { y, maxima, .. } = normed(x, None, w, eps, spec.recipe.packs_activations());
        activations(y, maxima, spec)
    }

    fn add_rms_norm(
        x: FloatTensor<Self>,
        added: FloatTensor<Self>,
        w: FloatTensor<Self>,
        eps: f64,
        spec: LinearSpec,
    ) -> (FloatTensor<Self>, Activations<Self>) {
        let Normed { x, y, maxima } = normed(x, Some(added), w, eps, spec.recipe.packs_activations());
        (x, activations(y, maxima, spec))
    }

    fn rms_norm_backward(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        dy: FloatTensor<Self>,
        so_far: Option<FloatTensor<Self>>,
        eps: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (x, w, dx) = (into_contiguous(x), into_contiguous(w), writable(dy));
        let so_far = so_far.map(into_contiguous);
        let [rows, cols] = dims(&x);
        let partial = empty(&x, [rms_norm::partial_rows(&x.client, x.dtype.into(), [rows, cols]), cols], DType::F32);
        launched(rms_norm::rms_norm_backward(
            &x.client,
            arg(&x),
            arg(&w),
            arg(&dx),
            so_far.as_ref().map(arg),
            arg(&partial),
            x.dtype.into(),
            [rows, cols],
            eps as f32,
        ));
        (dx, column_sums(&partial))
    }

    fn norm_rope(x: FloatTensor<Self>, w: FloatTensor<Self>, rotary: &Rotary<Self>, eps: f64) -> FloatTensor<Self> {
        let shape = rope_shape(&x, &w, eps);
        if !shape.fits() {
            return blocks::norm_rope::<Self>(x, w, rotary, eps);
        }
        let (x, w) = (into_contiguous(x), into_contiguous(w));
        let y = empty(&x, dims(&x), x.dtype);
        launched(rope::norm_rope(&x.client, arg(&x), rope_args(&w, rotary), arg(&y), x.dtype.into(), shape));
        y
    }

    fn norm_rope_backward(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        rotary: &Rotary<Self>,
        dy: FloatTensor<Self>,
        eps: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let shape = rope_shape(&x, &w, eps);
        if !shape.fits() {
            return blocks::norm_rope_backward::<Self>(x, w, rotary, dy, eps);
        }
        let (x, w, dx) = (into_contiguous(x), into_contiguous(w), writable(dy));
        let partial = empty(&x, [shape.partial_rows(), shape.head_dim], DType::F32);
        launched(rope::norm_rope_backward(
            &x.client,
            arg(&x),
            rope_args(&w, rotary),
            arg(&dx),
            arg(&partial),
            x.dtype.into(),
            shape,
        ));
        (dx, column_sums(&partial))
    }

    fn swiglu(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self> {
        gated(gate, up, false).0
    }

    fn swiglu_activations(gate: FloatTensor<Self>, up: FloatTensor<Self>, spec: LinearSpec) -> Activations<Self> {
        let (y, maxima) = gated(gate, up, spec.recipe.packs_activations());
        activations(y, maxima, spec)
    }

    fn swiglu_backward(
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
        dy: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (gate, up, dy) = (writable(gate), writable(up), into_contiguous(dy));
        launched(swiglu::swiglu_backward(&gate.client, arg(&gate), arg(&up), arg(&dy), gate.dtype.into()));
        (gate, up)
    }

    fn attention_saving(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        docs: &Documents<Self>,
        spec: AttentionSpec,
    ) -> (FloatTensor<Self>, Option<FloatTensor<Self>>) {
        let Some(shape) = flash_shape(&q, docs, spec) else {
            return (blocks::attention::<Self>(q, k, v, docs, spec), None);
        };
        let [q, k, v] = [q, k, v].map(into_contiguous);
        let y = empty(&q, dims(&q), q.dtype);
        if docs.past > 0 && decode_attention::fits(shape) {
            let qkv = [arg(&q), arg(&k), arg(&v)];
            let (starts, dtype) = (arg(&docs.starts), q.dtype.into());
            launched(decode_attention::decode_attention(&q.client, qkv, starts, arg(&y), dtype, shape));
            return (y, None);
        }
        let lse = empty(&q, [spec.heads, docs.tokens()], DType::F32);
        let qkv = [arg(&q), arg(&k), arg(&v)];
        let dtype = q.dtype.into();
        launched(attention::forward(&q.client, qkv, arg(&docs.starts), arg(&y), arg(&lse), dtype, shape));
        (y, Some(lse))
    }

    fn attention_backward(
        saved: AttentionSaved<Self>,
        dy: FloatTensor<Self>,
        docs: &Documents<Self>,
        spec: AttentionSpec,
    ) -> [FloatTensor<Self>; 3] {
        let (Some(lse), Some(shape)) = (saved.lse.clone(), flash_shape(&saved.q, docs, spec)) else {
            return blocks::attention_backward::<Self>(saved, dy, docs, spec);
        };
        let [q, k, v, dy] = [saved.q, saved.k, saved.v, dy].map(into_contiguous);
        let [dq, dk, dv] = [&q, &k, &v].map(|x| empty(x, dims(x), x.dtype));
        let delta = empty(&q, [spec.heads, docs.tokens()], DType::F32);
        let (client, dtype) = (&q.client, q.dtype.into());
        let read = || attention::Saved { q: arg(&q), k: arg(&k), v: arg(&v), lse: arg(&lse) };
        launched(attention::delta(client, arg(&dy), arg(&saved.y), arg(&delta), dtype, shape));
        launched(attention::backward_kv(
            client,
            read(),
            arg(&dy),
            arg(&delta),
            arg(&docs.starts),
            arg(&docs.ends),
            [arg(&dk), arg(&dv)],
            dtype,
            shape,
        ));
        launched(attention::backward_q(
            client,
            read(),
            arg(&dy),
            arg(&delta),
            arg(&docs.starts),
            arg(&dq),
            dtype,
            shape,
        ));
        [dq, dk, dv]
    }

    fn head_loss_saving(
        h: FloatTensor<Self>,
        w: FloatTensor<Self>,
        targets: IntTensor<Self>,
        precision: Precision,
        gradients: bool,
    ) -> HeadLoss<Self> {
        let (h, targets) = (into_contiguous(h), into_contiguous(targets));
        let ([m, _], [v, _], dtype) = (dims(&h), dims(&w), h.dtype);
        let w = if w.dtype == dtype { w } else { cast(w, dtype) };
        let f32_only = precision == Precision::F32;
        let rows = head::chunk_rows(v, dtype.size());
        let (mut loss, mut dh, mut dw) = (None, Vec::new(), None);
        for start in (0..m).step_by(rows) {
            let end = (start + rows).min(m);
            let chunk = |x: CubeTensor<R>| into_contiguous(Self::float_slice(x, &[Slice::from(start..end)]));
            let (h, targets) =
                (chunk(h.clone()), into_contiguous(Self::int_slice(targets.clone(), &[Slice::from(start..end)])));
            let logits = into_contiguous(products::dense(h.clone(), Self::float_transpose(w.clone()), f32_only, dtype));
            let losses = empty(&h, [end - start], DType::F32);
            let client = &h.client;
            let shape = [end - start, v];
            launched(cross_entropy(client, arg(&logits), arg(&targets), arg(&losses), dtype.into(), shape, gradients));
            let sum = Self::float_sum(losses);
            loss = Some(loss.map_or(sum.clone(), |so_far| Self::float_add(so_far, sum)));
            if gradients {
                dh.push(products::dense(logits.clone(), w.clone(), f32_only, dtype));
                dw = Some(products::accumulated(dw, logits, h, f32_only));
            }
        }
        let none = || empty_device_contiguous_dtype(h.client.clone(), h.device.clone(), Shape::new([1]), DType::F32);
        let loss = loss.unwrap_or_else(|| Self::float_mul_scalar(none(), 0.0f32.into()));
        let gradients = dw.map(|dw| (if dh.len() == 1 { dh.remove(0) } else { Self::float_cat(dh, 0) }, dw));
        HeadLoss { loss, gradients }
    }

    fn adamw(
        w: MasterWeight<Self>,
        grad: FloatTensor<Self>,
        state: AdamwState<Self>,
        step: AdamwStep,
        chunk: usize,
    ) -> (MasterWeight<Self>, AdamwState<Self>) {
        let grad = into_contiguous(grad);
        let len = grad.meta.num_elements();
        let client = grad.client.clone();
        let gradient = || (arg(&grad), grad.dtype.into());
        let moments = [state.m, state.v].map(|moment| match moment {
            Moment::Float(x) => Moment::<Self>::Float(writable(x)),
            Moment::Quantized { codes, absmax, table } => {
                Moment::Quantized { codes: writable(codes), absmax: writable(absmax), table }
            }
        });
        let w = match w {
            MasterWeight::Dense { w, master, residual } => {
                MasterWeight::Dense { w: writable(w), master, residual: residual.map(writable) }
            }
            MasterWeight::Packed(w) => MasterWeight::Packed(Nvfp4Primitive {
                codes: writable(w.codes),
                scales: writable(w.scales),
                global: w.global,
            }),
        };
        for start in (0..len).step_by(chunk) {
            let chunk = Chunk { start, end: (start + chunk).min(len) };
            let [m, v] = &moments;
            launched(match (&w, [m, v]) {
                (MasterWeight::Dense { w, master, residual }, [Moment::Float(m), Moment::Float(v)]) => {
                    let w = dense_args(w, *master, residual.as_ref());
                    let states = (m.dtype.into(), state.kind == StateKind::Bf16);
                    adamw::adamw_float(&client, w, gradient(), [arg(m), arg(v)], states, step, chunk)
                }
                (MasterWeight::Dense { w, master, residual }, moments) => {
                    let (coding, args) = quantized_moments(state.kind, moments);
                    let w = dense_args(w, *master, residual.as_ref());
                    adamw::adamw_quantized(&client, w, gradient(), args, coding, step, chunk)
                }
                (MasterWeight::Packed(w), moments) => {
                    let (coding, args) = quantized_moments(state.kind, moments);
                    adamw::adamw_packed(&client, packed(w).args(), gradient(), args, coding, step, chunk)
                }
            });
        }
        let [m, v] = moments;
        (w, AdamwState { kind: state.kind, m, v })
    }

    fn square_sum(x: FloatTensor<Self>) -> FloatTensor<Self> {
        let x = into_contiguous(x);
        let out = empty(&x, [1], DType::F32);
        launched(gradient::square_sum(&x.client, arg(&x), x.dtype.into(), arg(&out)));
        out
    }

    fn accumulated(sum: FloatTensor<Self>, x: FloatTensor<Self>) -> FloatTensor<Self> {
        let (sum, x) = (writable(sum), into_contiguous(x));
        launched(gradient::accumulate(&x.client, (arg(&sum), sum.dtype.into()), (arg(&x), x.dtype.into())));
        sum
    }

    fn tiers(device: &Self::Device) -> Vec<&'static str> {
        bench::tiers(&R::client(device))
    }

    fn bench_kernels(device: &Self::Device, filter: &str, show: &mut dyn FnMut(bench::Row)) -> Result<(), Nvfp4Error> {
        bench::run(&R::client(device), filter, show).map_err(|e| Nvfp4Error::Device(e.to_string()))
    }

    fn memory_in_use(device: &Self::Device) -> Option<MemoryUse> {
        let usage = R::client(device).memory_usage().ok()?;
        Some(MemoryUse { in_use: usage.bytes_in_use, reserved: usage.bytes_reserved })
    }
}

/// A dense master weight for the kernel.
fn dense_args<R: CubeRuntime>(w: &CubeTensor<R>, master: Master, residual: Option<&CubeTensor<R>>) -> DenseArgs<R> {
    DenseArgs { w: arg(w), dtype: w.dtype.into(), residual: residual.map(arg), master }
}

/// The coding and buffers of quantized moments.
fn quantized_moments<R, F, I, BT>(
    kind: StateKind,
    moments: [&Moment<CubeBackend<R, F, I, BT>>; 2],
) -> (Coding, [StateArgs<R>; 2])
where
    R: CubeRuntime,
    R::Server: ComputeServer,
    R::Device: DeviceOps,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    let args = moments.map(|moment| match moment {
        Moment::Float(_) => panic!("an NVFP4 master has quantized moments"),
        Moment::Quantized { codes, absmax, table } => {
            StateArgs { codes: arg(codes), absmax: arg(absmax), table: arg(table) }
        }
    });
    (kind.coding().expect("a kind with codes"), args)
}

/// The sums of a matrix's columns.
fn column_sums<R: CubeRuntime>(x: &CubeTensor<R>) -> CubeTensor<R> {
    let shape = dims(x);
    let sums = empty(x, [shape[1]], DType::F32);
    launched(column_sums::column_sums(&x.client, arg(x), arg(&sums), shape));
    sums
}

fn rope_shape<R: CubeRuntime>(x: &CubeTensor<R>, w: &CubeTensor<R>, eps: f64) -> RopeShape {
    let ([rows, cols], head_dim) = (dims(x), w.shape()[0]);
    RopeShape { rows, heads: cols / head_dim, head_dim, eps: eps as f32 }
}

fn rope_args<R, F, I, BT>(w: &CubeTensor<R>, rotary: &Rotary<CubeBackend<R, F, I, BT>>) -> RopeArgs<R>
where
    R: CubeRuntime,
    R::Server: ComputeServer,
    R::Device: DeviceOps,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    let table = |x: &CubeTensor<R>| arg(&into_contiguous(x.clone()));
    RopeArgs { w: arg(w), cos: table(&rotary.cos), sin: table(&rotary.sin), positions: arg(&rotary.positions) }
}

/// The call as the attention kernels take it, where they can.
fn flash_shape<R, F, I, BT>(
    q: &CubeTensor<R>,
    docs: &Documents<CubeBackend<R, F, I, BT>>,
    spec: AttentionSpec,
) -> Option<AttentionShape>
where
    R: CubeRuntime,
    R::Server: ComputeServer,
    R::Device: DeviceOps,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    let AttentionSpec { heads, kv_heads, head_dim, .. } = spec;
    let queries = docs.tokens();
    let shape = AttentionShape { queries, keys: queries + docs.past, past: docs.past, heads, kv_heads, head_dim };
    // Rows with a past interleave old and new keys.
    let flat = docs.rows == 1 || docs.past == 0;
    (flat && q.dtype != DType::F32 && shape.fits() && mma::supported(&q.client, q.dtype.into())).then_some(shape)
}

/// A kernel refuses only what this file got wrong: its callers' shapes are checked at the door.
pub(crate) fn launched(result: Result<(), KernelError>) {
    if let Err(error) = result {
        panic!("{error}");
    }
}

pub(crate) fn dims<R: CubeRuntime>(x: &CubeTensor<R>) -> [usize; 2] {
    let shape = x.shape();
    assert_eq!(shape.rank(), 2, "a matrix is expected, got {shape:?}");
    [shape[0], shape[1]]
}

/// A contiguous tensor beside `like`. The ordinary constructor pads rows on CUDA.
pub(crate) fn empty<R: CubeRuntime, const D: usize>(
    like: &CubeTensor<R>,
    shape: [usize; D],
    dtype: DType,
) -> CubeTensor<R> {
    empty_device_contiguous_dtype(like.client.clone(), like.device.clone(), Shape::new(shape), dtype)
}

pub(crate) fn arg<R: CubeRuntime>(x: &CubeTensor<R>) -> cubecl::prelude::ArrayArg<R> {
    assert!(x.is_contiguous(), "kernels read buffers without strides");
    x.clone().into_array_arg()
}

fn packed<R, F, I, BT>(w: &Nvfp4Primitive<CubeBackend<R, F, I, BT>>) -> Packed<R>
where
    R: CubeRuntime,
    R::Server: ComputeServer,
    R::Device: DeviceOps,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    Packed { codes: w.codes.clone(), scales: w.scales.clone(), global: w.global.clone(), dims: w.dims() }
}

/// Operands as kernels take them.
fn sides<R, F, I, BT>(operands: &[Operand<CubeBackend<R, F, I, BT>>]) -> Vec<Side<'_, R>>
where
    R: CubeRuntime,
    R::Server: ComputeServer,
    R::Device: DeviceOps,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    let sides = operands.iter().map(|operand| match operand {
        Operand::Dense(x) => Side::Dense(x),
        Operand::Packed(w) => Side::Packed(Box::new(packed(w))),
    });
    sides.collect()
}

/// The tensor itself if nothing else holds its buffer, else a copy.
fn writable<R: CubeRuntime>(x: CubeTensor<R>) -> CubeTensor<R> {
    let x = into_contiguous(x);
    if x.can_mut() { x } else { x.copy() }
}
