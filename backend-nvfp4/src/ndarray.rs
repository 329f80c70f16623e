//! The operations on the CPU: the scalar reference on host slices for NVFP4, Burn's own tensors for the rest. Floats are
//! f32 throughout, because this backend has no 16-bit floats.

use crate::{
    asked::Asked,
    attention::{AttentionSpec, Documents, Rotary},
    burn_ops,
    error::Nvfp4Error,
    gradient::Gradient,
    kernels::{AttentionSaved, HeadLoss, HeadWeightGradient, Nvfp4Kernels},
    ops::{Activations, LinearLayer, Nvfp4Backend},
    optim::{AdamwState, Judged, Moment, StateKind},
    packed::{Nvfp4Primitive, Operand, Packed},
    recipe::{GivenScale, LinearSpec, Precision},
    reference,
    services::{DeviceMemory, DeviceServices, MemoryUse},
    straight_through,
};
use burn::{
    backend::ndarray::{NdArray, NdArrayTensor, SharedArray},
    tensor::{
        DType, Element, Shape, TensorData, TensorMetadata,
        ops::{FloatTensor, FloatTensorOps, IntTensor, IntTensorOps},
    },
};
use kernels_cubecl::{
    adamw::{AdamwStep, Master},
    bench,
    e4m3::BYTES_PER_WORD,
    hadamard::SIGNS,
    operands::Product,
    quantize::{QuantizeSpec, View},
    rng::Stream,
};
use ndarray::{Array2, Ix2, linalg::general_mat_mul};

impl Nvfp4Backend for NdArray {
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
        let h = match added {
            Some(added) => Self::float_add(x, added),
            None => x,
        };
        (h.clone(), Activations::quantized(burn_ops::rms_norm::<Self>(h, w, eps), spec))
    }

    fn norm_rope(x: FloatTensor<Self>, w: FloatTensor<Self>, rotary: &Rotary<Self>, eps: f64) -> FloatTensor<Self> {
        burn_ops::norm_rope::<Self>(x, w, rotary, eps)
    }

    fn swiglu(gate: FloatTensor<Self>, up: FloatTensor<Self>, spec: LinearSpec) -> Activations<Self> {
        Activations::quantized(burn_ops::swiglu::<Self>(gate, up), spec)
    }

    fn causal_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        docs: &Documents<Self>,
        spec: AttentionSpec,
    ) -> FloatTensor<Self> {
        burn_ops::attention::<Self>(q, k, v, docs, spec)
    }

    fn head_loss(
        h: FloatTensor<Self>,
        w: FloatTensor<Self>,
        targets: IntTensor<Self>,
        precision: Precision,
    ) -> FloatTensor<Self> {
        burn_ops::head_loss::<Self>(h, w, targets, precision, false).loss
    }

    fn token_rows(w: FloatTensor<Self>, ids: IntTensor<Self>, dtype: DType) -> FloatTensor<Self> {
        burn_ops::token_rows::<Self>(w, ids, dtype)
    }
}

impl Nvfp4Kernels for NdArray {
    fn words_of(x: FloatTensor<Self>) -> Asked {
        Asked::new(move || Ok(floats(x).into_iter().map(f32::to_bits).collect()))
    }

    fn nvfp4_quantize(x: FloatTensor<Self>, spec: QuantizeSpec) -> Nvfp4Primitive<Self> {
        let (rows, cols) = (x.shape()[0], x.shape()[1]);
        device_packed(reference::quantize(&floats(x), View::row_major(rows, cols), spec), rows)
    }

    fn nvfp4_quantize_together(xs: Vec<FloatTensor<Self>>, spec: QuantizeSpec) -> Vec<Nvfp4Primitive<Self>> {
        let xs: Vec<_> = xs.into_iter().map(|x| ([x.shape()[0], x.shape()[1]], floats(x))).collect();
        let amax = xs.iter().fold(0.0f32, |amax, (_, values)| amax.max(reference::tensor_amax(values)));
        let quantized = |([rows, cols], values): ([usize; 2], Vec<f32>)| {
            device_packed(reference::quantize_sharing(&values, View::row_major(rows, cols), spec, amax), rows)
        };
        xs.into_iter().map(quantized).collect()
    }

    fn nvfp4_quantize_across(x: FloatTensor<Self>, spec: QuantizeSpec, rotated: bool) -> Nvfp4Primitive<Self> {
        let across = Self::float_transpose(x);
        let (rows, cols) = (across.shape()[0], across.shape()[1]);
        let rotate = |x| from_floats(reference::hadamard(&floats(x), SIGNS), [rows, cols]);
        Self::nvfp4_quantize(if rotated { rotate(across) } else { across }, spec)
    }

    fn nvfp4_quantize_master(x: FloatTensor<Self>) -> Nvfp4Primitive<Self> {
        let (rows, cols) = (x.shape()[0], x.shape()[1]);
        device_packed(reference::quantize_master(&floats(x), rows, cols), rows)
    }

    fn nvfp4_rounded_rows(x: FloatTensor<Self>) -> FloatTensor<Self> {
        let (rows, cols) = (x.shape()[0], x.shape()[1]);
        from_floats(reference::rounded_rows(&floats(x), cols), [rows, cols])
    }

    fn nvfp4_rounded_by(x: FloatTensor<Self>, scale: GivenScale) -> FloatTensor<Self> {
        let (rows, cols) = (x.shape()[0], x.shape()[1]);
        from_floats(reference::rounded_by(&floats(x), cols, scale.reciprocal()), [rows, cols])
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

    fn dense_matmul(
        lhs: FloatTensor<Self>,
        rhs: FloatTensor<Self>,
        _precision: Precision,
        _out: DType,
    ) -> FloatTensor<Self> {
        let matrices = lhs.shape().rank() == 2 && lhs.dtype() == DType::F32;
        if matrices { product_of(lhs, rhs) } else { Self::float_matmul(lhs, rhs) }
    }

    fn products(
        product: Product,
        a: Vec<Operand<Self>>,
        b: Vec<Operand<Self>>,
        precision: Precision,
        out: DType,
    ) -> Vec<FloatTensor<Self>> {
        burn_ops::products(product, &a, &b, precision, out)
    }

    fn product_sum(
        product: Product,
        a: Vec<Operand<Self>>,
        b: Vec<Operand<Self>>,
        precision: Precision,
        out: DType,
    ) -> FloatTensor<Self> {
        let products = burn_ops::products::<Self>(product, &a, &b, precision, out);
        products.into_iter().reduce(Self::float_add).expect("a sum has a product")
    }

    fn rms_norm_backward(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        dy: FloatTensor<Self>,
        so_far: Option<FloatTensor<Self>>,
        eps: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (dx, dw) = burn_ops::rms_norm_backward::<Self>(x, w, dy, eps);
        let dx = match so_far {
            Some(so_far) => Self::float_add(dx, so_far),
            None => dx,
        };
        (dx, dw)
    }

    fn norm_rope_backward(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        rotary: &Rotary<Self>,
        dy: FloatTensor<Self>,
        eps: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        burn_ops::norm_rope_backward::<Self>(x, w, rotary, dy, eps)
    }

    fn swiglu_backward(
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
        dy: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        burn_ops::swiglu_backward::<Self>(gate, up, dy)
    }

    fn attention_saving(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        docs: &Documents<Self>,
        spec: AttentionSpec,
    ) -> (FloatTensor<Self>, Option<FloatTensor<Self>>) {
        (burn_ops::attention::<Self>(q, k, v, docs, spec), None)
    }

    fn attention_backward(
        saved: AttentionSaved<Self>,
        dy: FloatTensor<Self>,
        docs: &Documents<Self>,
        spec: AttentionSpec,
    ) -> [FloatTensor<Self>; 3] {
        burn_ops::attention_backward::<Self>(saved, dy, docs, spec)
    }

    fn e4m3_encode(x: FloatTensor<Self>) -> IntTensor<Self> {
        let (rows, cols) = (x.shape()[0], x.shape()[1]);
        let bytes: Vec<u8> = floats(x).into_iter().map(reference::e4m3_encode).collect();
        let words = bytes.as_chunks().0.iter().map(|four| u32::from_le_bytes(*four)).collect();
        ints(words, [rows, cols / BYTES_PER_WORD])
    }

    fn e4m3_decode(x: IntTensor<Self>, dtype: DType) -> FloatTensor<Self> {
        assert_eq!(dtype, DType::F32, "the CPU backend computes in f32");
        let (rows, cols) = (x.shape()[0], x.shape()[1]);
        let values = words(x).into_iter().flat_map(u32::to_le_bytes).map(reference::e4m3_decode).collect();
        from_floats(values, [rows, cols * BYTES_PER_WORD])
    }

    fn prompt_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        docs: &Documents<Self>,
        spec: AttentionSpec,
    ) -> FloatTensor<Self> {
        burn_ops::prompt_attention::<Self>(q, k, v, docs, spec)
    }

    fn cached_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        docs: &Documents<Self>,
        spec: AttentionSpec,
    ) -> FloatTensor<Self> {
        Self::prompt_attention(q, k, v, docs, spec)
    }

    fn head_loss_saving(
        h: FloatTensor<Self>,
        w: FloatTensor<Self>,
        targets: IntTensor<Self>,
        precision: Precision,
        gradients: bool,
    ) -> HeadLoss<Self> {
        burn_ops::head_loss::<Self>(h, w, targets, precision, gradients)
    }

    fn head_weight_gradient(
        rest: HeadWeightGradient<Self>,
        factor: FloatTensor<Self>,
        precision: Precision,
    ) -> FloatTensor<Self> {
        burn_ops::head_weight_gradient::<Self>(rest, factor, precision)
    }

    // Chunks only keep launches small, so both steps take the whole tensor at once.
    fn adamw(
        w: FloatTensor<Self>,
        form: Master,
        grad: Judged<Self>,
        state: AdamwState<Self>,
        step: AdamwStep,
        _chunk: usize,
    ) -> (FloatTensor<Self>, AdamwState<Self>) {
        if floats(grad.verdict)[0] != 0.0 {
            return (w, state);
        }
        let mut w = array(w);
        let values = slice(&mut w);
        let mut state = HostState::new(state, values.len());
        if let Some(residual) = &state.residual {
            values.iter_mut().zip(residual).for_each(|(w, r)| *w = reference::unrounded(*w, *r));
        }
        state.step(values, &floats(grad.gradient), step);
        for (i, w) in values.iter_mut().enumerate() {
            let (value, rest) = reference::round(*w, i, form, step.stream);
            *w = value;
            if let Some(residual) = &mut state.residual {
                residual[i] = rest;
            }
        }
        (w.into(), state.packed())
    }

    fn adamw_packed(
        w: Nvfp4Primitive<Self>,
        grad: Judged<Self>,
        state: AdamwState<Self>,
        step: AdamwStep,
        _chunk: usize,
    ) -> (Nvfp4Primitive<Self>, AdamwState<Self>) {
        if floats(grad.verdict)[0] != 0.0 {
            return (w, state);
        }
        let [rows, cols] = w.dims();
        let mut packed = host_packed(&w);
        let mut values = reference::unpacked(&packed, rows, cols);
        let mut state = HostState::new(state, values.len());
        state.step(&mut values, &floats(grad.gradient), step);
        reference::repack(&mut packed, cols, &values, step.stream);
        (device_packed(packed, rows), state.packed())
    }

    fn square_sum(
        x: Gradient<Self>,
        (sums, place): (FloatTensor<Self>, usize),
        verdict: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let sum = match x.squares {
            Some(squares) => floats(squares).iter().sum(),
            None => floats(burn_ops::square_sum::<Self>(x.values))[0],
        };
        let mut sums = array(sums);
        slice(&mut sums)[place] = sum;
        let verdict = if sum.is_finite() { verdict } else { Self::float_add_scalar(verdict, 1.0.into()) };
        (NdArrayTensor::F32(sums.into()), verdict)
    }

    fn segment_sum(gradient: FloatTensor<Self>, ids: &[u32], dy: FloatTensor<Self>) -> FloatTensor<Self> {
        let cols = dy.shape()[1];
        let (mut gradient, dy) = (array(gradient), array(dy));
        reference::segment_sum(slice(&mut gradient), ids, dy.as_slice().expect("`array` made it contiguous"), cols);
        NdArrayTensor::F32(gradient.into())
    }

    fn accumulated(sum: FloatTensor<Self>, x: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::float_add(sum, x)
    }

    fn normal(dims: [usize; 2], std: f32, stream: Stream, _dtype: DType, _device: &Self::Device) -> FloatTensor<Self> {
        from_floats(reference::normals(dims[0] * dims[1], std, stream), dims)
    }

    fn unfilled(dims: [usize; 2], dtype: DType, device: &Self::Device) -> FloatTensor<Self> {
        Self::float_zeros(Shape::new(dims), device, dtype.into())
    }
}

impl DeviceMemory for NdArray {
    fn memory_in_use(_: &Self::Device) -> Option<MemoryUse> {
        None
    }
}

impl DeviceServices for NdArray {
    fn tiers(_: &Self::Device) -> Vec<&'static str> {
        vec!["scalar reference"]
    }

    fn bench_kernels(_: &Self::Device, _: &str, _: &mut dyn FnMut(bench::Row)) -> Result<(), Nvfp4Error> {
        Err(Nvfp4Error::Device("the CPU backend has no kernels to time".into()))
    }
}

/// The state of a tensor as f32 values, with the tables of quantized moments.
struct HostState {
    kind: StateKind,
    m: (SharedArray<f32>, Option<HostTable>),
    v: (SharedArray<f32>, Option<HostTable>),
    residual: Option<Vec<u8>>,
}

/// A table, and the search in it, which only kernels need.
type HostTable = (Vec<f32>, IntTensor<NdArray>);

impl HostState {
    fn new(state: AdamwState<NdArray>, len: usize) -> Self {
        let moment = |moment: Moment<NdArray>, root: bool| match moment {
            Moment::Float(x) => (array(x), None),
            Moment::Quantized { codes, absmax, table, search } => {
                let table = floats(table);
                let values = reference::decode_moment(&bytes(codes), &floats(absmax), &table, len, root);
                (array(from_floats(values, [len])), Some((table, search)))
            }
        };
        let (m, v) = (moment(state.m, false), moment(state.v, true));
        Self { kind: state.kind, m, v, residual: state.residual.map(bytes) }
    }

    fn step(&mut self, w: &mut [f32], grad: &[f32], step: AdamwStep) {
        let (m, v) = (slice(&mut self.m.0), slice(&mut self.v.0));
        reference::adamw(w, grad, m, v, step);
        if self.kind == StateKind::Bf16 {
            reference::round_states(m, v, step.stream);
        }
    }

    fn packed(self) -> AdamwState<NdArray> {
        let moment = |(values, table): (SharedArray<f32>, Option<HostTable>), root: bool| match table {
            None => Moment::Float(values.into()),
            Some((table, search)) => {
                let (codes, absmax) = reference::encode_moment(&floats(values.into()), &table, root);
                let (count, blocks, entries) = (codes.len(), absmax.len(), table.len());
                Moment::Quantized {
                    codes: ints(codes, [count]),
                    absmax: from_floats(absmax, [blocks]),
                    table: from_floats(table, [entries]),
                    search,
                }
            }
        };
        let residual = self.residual.map(|residual| {
            let len = residual.len();
            ints(residual, [len])
        });
        AdamwState { kind: self.kind, m: moment(self.m, false), v: moment(self.v, true), residual, codes: None }
    }
}

/// Multiplies two matrices as they are stored. Burn's own product copies a transposed matrix first, which would copy the
/// head of a model for every token.
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
    Packed {
        codes: ints(q.codes, [rows, words]),
        scales: ints(q.scales, [rows, blocks]),
        global: ints(vec![q.global.to_bits()], [1]),
    }
}

/// The f32 array of a tensor in row-major order. It is not copied if it is contiguous and nothing else holds it.
fn array(x: NdArrayTensor) -> SharedArray<f32> {
    let NdArrayTensor::F32(storage) = x else { panic!("the CPU backend computes in f32") };
    let array = storage.into_shared();
    if array.is_standard_layout() { array } else { array.as_standard_layout().into_owned().into_shared() }
}

fn slice(x: &mut SharedArray<f32>) -> &mut [f32] {
    x.as_slice_mut().expect("`array` made it contiguous")
}

fn floats(x: NdArrayTensor) -> Vec<f32> {
    values(&array(x))
}

fn words(x: NdArrayTensor) -> Vec<u32> {
    let NdArrayTensor::U32(storage) = x else { panic!("codes are U32") };
    values(&storage.into_shared())
}

fn bytes(x: NdArrayTensor) -> Vec<u8> {
    let NdArrayTensor::U8(storage) = x else { panic!("scales are U8") };
    values(&storage.into_shared())
}

/// The values of an array in row-major order. A slice is copied at once, and an iterator gives value by value.
fn values<Value: Copy>(array: &SharedArray<Value>) -> Vec<Value> {
    array.as_slice().map_or_else(|| array.iter().copied().collect(), <[Value]>::to_vec)
}

fn from_floats<const RANK: usize>(values: Vec<f32>, shape: [usize; RANK]) -> FloatTensor<NdArray> {
    <NdArray>::float_from_data(TensorData::new(values, Shape::new(shape)), &device())
}

fn ints<Value: Element, const RANK: usize>(values: Vec<Value>, shape: [usize; RANK]) -> IntTensor<NdArray> {
    <NdArray>::int_from_data(TensorData::new(values, Shape::new(shape)), &device())
}

fn device() -> <NdArray as burn::tensor::backend::BackendTypes>::Device {
    Default::default()
}
