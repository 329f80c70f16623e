//! The operations on CubeCL devices (CUDA, Vulkan, …): each prepares buffers and shapes and launches a kernel.

mod activations;
mod adamw;
mod attention;
mod decode;
mod drawing;
mod head;
mod joint_products;
mod launch;
mod packed_cube;
mod products;
mod token_products;

use self::{
    activations::{
        Normed, activations, coded, column_sums, gated, normed, products_read_values, quantized, quantized_both,
        quantized_together, unscaled,
    },
    joint_products::{Made, Results},
    launch::{arg, dims, empty, launched, writable},
};
use crate::{
    asked::Asked,
    attention::{AttentionSpec, Documents, Rotary},
    burn_ops,
    decode::{DecodeBlock, DecodeTokens},
    draw::{Draw, Penalty},
    error::Nvfp4Error,
    gradient::Gradient,
    held_codes::HeldPrimitive,
    kernels::{AttentionSaved, HeadLoss, HeadWeightGradient, Nvfp4Kernels},
    ops::{Activations, LinearLayer, Nvfp4Backend},
    optim::{AdamwState, Judged, StateKind},
    packed::{Nvfp4Primitive, Operand},
    recipe::{GivenScale, LinearSpec, Precision},
    reference::MASTER_ROOM,
    services::{DeviceMemory, DeviceServices, MemoryUse},
    straight_through,
};
use burn::tensor::{
    DType, Shape,
    backend::DeviceOps,
    ops::{FloatTensor, FloatTensorOps, IntTensor},
};
use burn_cubecl::{
    BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement, kernel::into_contiguous,
    ops::numeric::empty_device_contiguous_dtype, tensor::CubeTensor,
};
use cubecl::server::ComputeServer;
use kernels_cubecl::{
    adamw::{AdamwStep, Master},
    bench, e4m3, gradient, normal,
    operands::Product,
    quantize::{self, BlockShape, QuantizeSpec, Rounding, Scaling, View},
    rms_norm,
    rng::Stream,
    segment_sum, swiglu,
};

impl<R, Floats, Ints, Bools> Nvfp4Backend for CubeBackend<R, Floats, Ints, Bools>
where
    R: CubeRuntime,
    R::Server: ComputeServer,
    R::Device: DeviceOps,
    Floats: FloatElement,
    Ints: IntElement,
    Bools: BoolElement,
{
    fn nvfp4_linears(x: Activations<Self>, layers: Vec<LinearLayer<Self>>) -> Vec<FloatTensor<Self>> {
        straight_through::forward::<Self>(x, layers).0
    }

    fn rms_norm(
        x: FloatTensor<Self>,
        added: Option<FloatTensor<Self>>,
        w: FloatTensor<Self>,
        eps: f64,
        spec: LinearSpec,
    ) -> (FloatTensor<Self>, Activations<Self>) {
        let Normed { x, y, maxima } = normed(x, added, w, eps, spec.quantizes_early());
        (x, activations(y, maxima, spec))
    }

    fn norm_rope(x: FloatTensor<Self>, w: FloatTensor<Self>, rotary: &Rotary<Self>, eps: f64) -> FloatTensor<Self> {
        activations::norm_rope(x, w, rotary, eps)
    }

    fn swiglu(gate: FloatTensor<Self>, up: FloatTensor<Self>, spec: LinearSpec) -> Activations<Self> {
        let (y, maxima) = gated(gate, up, spec.quantizes_early());
        activations(y, maxima, spec)
    }

    fn causal_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        docs: &Documents<Self>,
        spec: AttentionSpec,
    ) -> FloatTensor<Self> {
        attention::attention_saving(q, k, v, docs, spec).0
    }

    fn head_loss(
        h: FloatTensor<Self>,
        w: FloatTensor<Self>,
        targets: IntTensor<Self>,
        precision: Precision,
    ) -> FloatTensor<Self> {
        head::head_loss::<Self, R>(h, w, targets, precision, false).loss
    }

    fn token_rows(w: FloatTensor<Self>, ids: IntTensor<Self>, dtype: DType) -> FloatTensor<Self> {
        burn_ops::token_rows::<Self>(w, ids, dtype)
    }
}

impl<R, Floats, Ints, Bools> Nvfp4Kernels for CubeBackend<R, Floats, Ints, Bools>
where
    R: CubeRuntime,
    R::Server: ComputeServer,
    R::Device: DeviceOps,
    Floats: FloatElement,
    Ints: IntElement,
    Bools: BoolElement,
{
    fn nvfp4_quantize(x: FloatTensor<Self>, spec: QuantizeSpec) -> Nvfp4Primitive<Self> {
        let x = into_contiguous(x);
        let [rows, cols] = dims(&x);
        quantized(&x, View::row_major(rows, cols), spec, false)
    }

    fn nvfp4_quantize_together(xs: Vec<FloatTensor<Self>>, spec: QuantizeSpec) -> Vec<Nvfp4Primitive<Self>> {
        quantized_together(xs, spec)
    }

    fn nvfp4_quantize_across(x: FloatTensor<Self>, spec: QuantizeSpec, rotated: bool) -> Nvfp4Primitive<Self> {
        let x = into_contiguous(x);
        let [rows, cols] = dims(&x);
        quantized(&x, View::transposed(rows, cols), spec, rotated)
    }

    fn nvfp4_operand_across(x: FloatTensor<Self>, spec: QuantizeSpec, rotated: bool) -> Operand<Self> {
        let x = into_contiguous(x);
        let [rows, cols] = dims(&x);
        if products_read_values(&x) {
            return unscaled(&x, View::transposed(rows, cols), spec, rotated);
        }
        Operand::Packed(Self::nvfp4_quantize_across(x, spec, rotated))
    }

    fn nvfp4_operands(
        x: FloatTensor<Self>,
        along: QuantizeSpec,
        across: QuantizeSpec,
        rotated: bool,
    ) -> (Nvfp4Primitive<Self>, Operand<Self>) {
        quantized_both(&into_contiguous(x), [along, across], rotated)
    }

    fn nvfp4_quantize_master(x: FloatTensor<Self>) -> Nvfp4Primitive<Self> {
        let x = into_contiguous(x);
        let [rows, cols] = dims(&x);
        let spec = QuantizeSpec { scaling: Scaling::Two, block: BlockShape::Row, rounding: Rounding::Nearest };
        let amax = empty(&x, [quantize::AMAX_LEN], DType::F32);
        launched(quantize::amax(&x.client, arg(&x), x.dtype.into(), MASTER_ROOM, arg(&amax)));
        coded(&x, amax, View::row_major(rows, cols), spec, false)
    }

    fn nvfp4_rounded_rows(x: FloatTensor<Self>) -> FloatTensor<Self> {
        let x = into_contiguous(x);
        let y = empty(&x, dims(&x), x.dtype);
        launched(quantize::rounded_rows(&x.client, arg(&x), arg(&y), x.dtype.into(), dims(&x), None));
        y
    }

    fn nvfp4_rounded_by(x: FloatTensor<Self>, scale: GivenScale) -> FloatTensor<Self> {
        let x = into_contiguous(x);
        let y = empty(&x, dims(&x), x.dtype);
        let full = Some(scale.reciprocal());
        launched(quantize::rounded_rows(&x.client, arg(&x), arg(&y), x.dtype.into(), dims(&x), full));
        y
    }

    fn nvfp4_dequantize(w: &Nvfp4Primitive<Self>, dtype: DType) -> FloatTensor<Self> {
        w.values(dtype, true)
    }

    fn nvfp4_matmul(a: FloatTensor<Self>, w: &Nvfp4Primitive<Self>, product: Product, out: DType) -> FloatTensor<Self> {
        products::packed(a, w, product, out)
    }

    fn nvfp4_matmul_packed(
        a: &Nvfp4Primitive<Self>,
        w: &Nvfp4Primitive<Self>,
        product: Product,
        operand: DType,
        out: DType,
    ) -> FloatTensor<Self> {
        products::packed_both(a, w, product, operand, out)
    }

    fn dense_matmul(
        lhs: FloatTensor<Self>,
        rhs: FloatTensor<Self>,
        precision: Precision,
        out: DType,
    ) -> FloatTensor<Self> {
        products::dense(lhs, rhs, precision == Precision::F32, out)
    }

    fn products(
        product: Product,
        a: Vec<Operand<Self>>,
        b: Vec<Operand<Self>>,
        precision: Precision,
        out: DType,
    ) -> Vec<FloatTensor<Self>> {
        joint_products::joint(product, &a, &b, precision.dtype(), out, Results::Each)
            .map(|made| made.values)
            .unwrap_or_else(|| burn_ops::products(product, &a, &b, precision, out))
    }

    fn weight_gradients(
        product: Product,
        dys: Vec<Operand<Self>>,
        x: Operand<Self>,
        precision: Precision,
    ) -> Vec<Gradient<Self>> {
        let x = vec![x];
        let made = joint_products::joint(product, &dys, &x, precision.dtype(), DType::F32, Results::WithSquares);
        let Some(Made { values, squares }) = made else {
            let values = burn_ops::products(product, &dys, &x, precision, DType::F32);
            return values.into_iter().map(Gradient::unmeasured).collect();
        };
        let measured = |(values, squares)| Gradient { values, squares: Some(squares) };
        values.into_iter().zip(squares).map(measured).collect()
    }

    fn token_products(x: Operand<Self>, w: Vec<Operand<Self>>, precision: Precision) -> Vec<FloatTensor<Self>> {
        token_products::token_products::<Self, R>(&x, &w)
            .unwrap_or_else(|| Self::products(Product::Nt, vec![x], w, precision, precision.dtype()))
    }

    fn product_sum(
        product: Product,
        a: Vec<Operand<Self>>,
        b: Vec<Operand<Self>>,
        precision: Precision,
        out: DType,
    ) -> FloatTensor<Self> {
        joint_products::joint(product, &a, &b, precision.dtype(), out, Results::Sum)
            .map(|made| made.values)
            .unwrap_or_else(|| burn_ops::products(product, &a, &b, precision, out))
            .into_iter()
            .reduce(Self::float_add)
            .expect("a sum has a product")
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

    fn norm_rope_backward(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        rotary: &Rotary<Self>,
        dy: FloatTensor<Self>,
        eps: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        activations::norm_rope_backward(x, w, rotary, dy, eps)
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
        attention::attention_saving(q, k, v, docs, spec)
    }

    fn attention_backward(
        saved: AttentionSaved<Self>,
        dy: FloatTensor<Self>,
        docs: &Documents<Self>,
        spec: AttentionSpec,
    ) -> [FloatTensor<Self>; 3] {
        attention::attention_backward(saved, dy, docs, spec)
    }

    fn e4m3_encode(x: FloatTensor<Self>) -> IntTensor<Self> {
        let x = into_contiguous(x);
        let [rows, cols] = dims(&x);
        let words = empty(&x, [rows, cols / e4m3::BYTES_PER_WORD], DType::U32);
        launched(e4m3::encode(&x.client, arg(&x), arg(&words), x.dtype.into()));
        words
    }

    fn e4m3_decode(words: IntTensor<Self>, dtype: DType) -> FloatTensor<Self> {
        let words = into_contiguous(words);
        let [rows, cols] = dims(&words);
        let shape = [rows, cols * e4m3::BYTES_PER_WORD];
        // Each chunk of a prompt decodes a longer cache, and the device's pool keeps a buffer of every length. Rounded up to powers
        // of two, there are few lengths, whose buffers the pool uses again.
        let room = empty(&words, [rows.next_power_of_two(), shape[1]], dtype);
        let y = CubeTensor::new_contiguous(room.client, room.device, Shape::new(shape), room.handle, dtype);
        launched(e4m3::decode(&words.client, arg(&words), arg(&y), dtype.into()));
        y
    }

    fn prompt_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        docs: &Documents<Self>,
        spec: AttentionSpec,
    ) -> FloatTensor<Self> {
        attention::prompt_attention(q, k, v, docs, spec)
    }

    fn cached_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        docs: &Documents<Self>,
        spec: AttentionSpec,
    ) -> FloatTensor<Self> {
        attention::cached_attention(q, k, v, docs, spec)
    }

    fn decode_blocks(
        x: FloatTensor<Self>,
        blocks: &mut [DecodeBlock<Self>],
        tokens: &DecodeTokens<Self>,
    ) -> Option<FloatTensor<Self>> {
        decode::decode_blocks(x, blocks, tokens)
    }

    fn draw(logits: FloatTensor<Self>, draws: &[Draw]) -> Option<(IntTensor<Self>, Asked)> {
        Some(drawing::draw(logits, draws))
    }

    fn words_of(x: FloatTensor<Self>) -> Asked {
        drawing::words_of(x)
    }

    fn penalize(
        logits: FloatTensor<Self>,
        newest: IntTensor<Self>,
        penalties: &[Penalty<'_>],
    ) -> Option<FloatTensor<Self>> {
        Some(drawing::penalized(logits, newest, penalties))
    }

    fn head_loss_saving(
        h: FloatTensor<Self>,
        w: FloatTensor<Self>,
        targets: IntTensor<Self>,
        precision: Precision,
        gradients: bool,
    ) -> HeadLoss<Self> {
        head::head_loss(h, w, targets, precision, gradients)
    }

    fn head_weight_gradient(
        rest: HeadWeightGradient<Self>,
        factor: FloatTensor<Self>,
        precision: Precision,
    ) -> FloatTensor<Self> {
        let HeadWeightGradient { sum, dlogits, h } = rest;
        products::accumulated(sum, dlogits, h, factor, precision == Precision::F32)
    }

    fn adamw(
        w: FloatTensor<Self>,
        form: Master,
        grad: Judged<Self>,
        state: AdamwState<Self>,
        step: AdamwStep,
        chunk: usize,
    ) -> (FloatTensor<Self>, AdamwState<Self>) {
        adamw::dense(w, form, grad, state, step, chunk)
    }

    fn nvfp4_held(w: FloatTensor<Self>, kind: StateKind, spec: QuantizeSpec) -> Option<HeldPrimitive<Self>> {
        adamw::held(w, kind, spec)
    }

    fn adamw_packed(
        w: Nvfp4Primitive<Self>,
        grad: Judged<Self>,
        state: AdamwState<Self>,
        step: AdamwStep,
        chunk: usize,
    ) -> (Nvfp4Primitive<Self>, AdamwState<Self>) {
        adamw::packed(w, grad, state, step, chunk)
    }

    fn square_sum(
        Gradient { values, squares }: Gradient<Self>,
        (sums, place): (FloatTensor<Self>, usize),
        verdict: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (sums, verdict) = (writable(sums), writable(verdict));
        let (client, to, judge) = (&sums.client, (arg(&sums), place), arg(&verdict));
        launched(match squares {
            Some(squares) => gradient::judged_sum(client, arg(&squares), to, judge),
            None => {
                let x = into_contiguous(values);
                gradient::square_sum(client, arg(&x), x.dtype.into(), to, judge)
            }
        });
        (sums, verdict)
    }

    fn segment_sum(gradient: FloatTensor<Self>, ids: &[u32], dy: FloatTensor<Self>) -> FloatTensor<Self> {
        let (gradient, dy) = (writable(gradient), into_contiguous(dy));
        let cols = dims(&dy)[1];
        launched(segment_sum::segment_sum(&dy.client, arg(&gradient), ids, (arg(&dy), dy.dtype.into()), cols));
        gradient
    }

    fn accumulated(sum: FloatTensor<Self>, x: FloatTensor<Self>) -> FloatTensor<Self> {
        let (sum, x) = (writable(sum), into_contiguous(x));
        launched(gradient::accumulate(&x.client, (arg(&sum), sum.dtype.into()), (arg(&x), x.dtype.into())));
        sum
    }

    fn normal(dims: [usize; 2], std: f32, stream: Stream, dtype: DType, device: &Self::Device) -> FloatTensor<Self> {
        let x = Self::unfilled(dims, dtype, device);
        launched(normal::normal(&x.client, arg(&x), dtype.into(), std, stream));
        x
    }

    fn unfilled(dims: [usize; 2], dtype: DType, device: &Self::Device) -> FloatTensor<Self> {
        empty_device_contiguous_dtype(R::client(device), device.clone(), Shape::new(dims), dtype)
    }
}

impl<R, Floats, Ints, Bools> DeviceMemory for CubeBackend<R, Floats, Ints, Bools>
where
    R: CubeRuntime,
    R::Server: ComputeServer,
    R::Device: DeviceOps,
    Floats: FloatElement,
    Ints: IntElement,
    Bools: BoolElement,
{
    fn memory_in_use(device: &Self::Device) -> Option<MemoryUse> {
        let usage = R::client(device).memory_usage().ok()?;
        Some(MemoryUse { in_use: usage.bytes_in_use, reserved: usage.bytes_reserved })
    }
}

impl<R, Floats, Ints, Bools> DeviceServices for CubeBackend<R, Floats, Ints, Bools>
where
    R: CubeRuntime,
    R::Server: ComputeServer,
    R::Device: DeviceOps,
    Floats: FloatElement,
    Ints: IntElement,
    Bools: BoolElement,
{
    fn tiers(device: &Self::Device) -> Vec<&'static str> {
        bench::tiers(&R::client(device))
    }

    fn bench_kernels(device: &Self::Device, filter: &str, show: &mut dyn FnMut(bench::Row)) -> Result<(), Nvfp4Error> {
        bench::run(&R::client(device), filter, show).map_err(|e| Nvfp4Error::Device(e.to_string()))
    }
}
