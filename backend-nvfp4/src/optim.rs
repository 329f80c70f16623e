//! The forms in which AdamW keeps a tensor: its master weight and its two moments.

use crate::held_codes::HeldPrimitive;
use burn::tensor::{
    DType, Int, Shape, Tensor, TensorData,
    backend::Backend,
    ops::{FloatTensor, IntTensor},
};
use kernels_cubecl::adamw::{Coding, Master, STATE_BLOCK};

/// How AdamW stores its two moments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StateKind {
    /// f32: 8 bytes a parameter.
    F32,
    /// bf16, rounded stochastically: 4 bytes a parameter.
    Bf16,
    /// 8-bit block-wise with dynamic tables: 2.03 bytes a parameter.
    Int8,
    /// 4-bit block-wise: 1.03 bytes a parameter.
    Int4,
}

impl StateKind {
    /// The name on the command line and in files.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
            Self::Int4 => "int4",
        }
    }

    /// Number of bytes that both moments of a parameter take.
    pub fn bytes(self) -> f64 {
        match self {
            Self::F32 => 8.0,
            Self::Bf16 => 4.0,
            Self::Int8 => 2.0 + 8.0 / STATE_BLOCK as f64,
            Self::Int4 => 1.0 + 8.0 / STATE_BLOCK as f64,
        }
    }

    /// The coding of a quantized kind.
    pub fn coding(self) -> Option<Coding> {
        match self {
            Self::F32 | Self::Bf16 => None,
            Self::Int8 => Some(Coding::Bytes),
            Self::Int4 => Some(Coding::Nibbles),
        }
    }
}

/// How the master weights of linear layers and of the embedding are stored. Norms are always f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MasterKind {
    /// All dense.
    Dense(Master),
    /// Linear layers in NVFP4 with stochastic rounding: 0.56 bytes a parameter. The embedding stays bf16.
    Nvfp4,
}

impl MasterKind {
    /// f32: 4 bytes a parameter.
    pub const F32: Self = Self::Dense(Master::Exact);
    /// bf16 and 8 more bits that only the optimizer reads: 3 bytes.
    pub const BF16_RESIDUAL: Self = Self::Dense(Master::Residual);
    /// bf16 with stochastic rounding: 2 bytes.
    pub const BF16: Self = Self::Dense(Master::Stochastic);
    /// bf16 rounded to nearest: 2 bytes. It loses small steps and exists for comparison.
    pub const BF16_NEAREST: Self = Self::Dense(Master::Nearest);

    /// The name on the command line and in files.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::BF16_RESIDUAL => "bf16-residual",
            Self::BF16 => "bf16",
            Self::BF16_NEAREST => "bf16-nearest",
            Self::Nvfp4 => "nvfp4",
        }
    }

    /// The form of the weights that stay dense.
    pub fn dense(self) -> Master {
        match self {
            Self::Dense(master) => master,
            Self::Nvfp4 => Master::Stochastic,
        }
    }
}

/// A gradient, and the verdict on the gradients of its step.
#[derive(Debug, Clone)]
pub struct Judged<B: Backend> {
    /// The gradient, f32 or bf16, of any shape.
    pub gradient: FloatTensor<B>,
    /// f32 `[1]`: 0 as long as every gradient of the step was finite. [`square_sum`](crate::Nvfp4Kernels::square_sum) counts
    /// those that are not.
    pub verdict: FloatTensor<B>,
}

/// What the optimizer keeps of one tensor besides the weight that the model reads.
#[derive(Debug, Clone)]
pub struct AdamwState<B: Backend> {
    /// How the moments are stored.
    pub kind: StateKind,
    /// The first moment.
    pub m: Moment<B>,
    /// The second moment.
    pub v: Moment<B>,
    /// The lower bits of a master weight of the form [`Master::Residual`], U8 `[len]`.
    pub residual: Option<IntTensor<B>>,
    /// The codes of a master weight, which a step replaces by those of the new weight. Only a step that is to leave codes has them.
    pub codes: Option<HeldPrimitive<B>>,
}

/// One moment of one tensor.
#[derive(Debug, Clone)]
pub enum Moment<B: Backend> {
    /// A float tensor `[len]` in f32, or in bf16 (f32 if the device has no bf16).
    Float(FloatTensor<B>),
    /// A code a value, an f32 absmax for 256 values, and the table that codes index.
    Quantized {
        /// U8 `[len]`, or `[len / 2]` with the code of the even value in the low nibble. The codes stand for m itself,
        /// or for the root of v.
        codes: IntTensor<B>,
        /// f32 `[ceil(len / 256)]`.
        absmax: FloatTensor<B>,
        /// f32 `[256]` or `[16]`: [`Coding::values`].
        table: FloatTensor<B>,
        /// U32, by which kernels find the nearest value: [`Coding::search`].
        search: IntTensor<B>,
    },
}

impl<B: Backend> AdamwState<B> {
    /// Makes zero moments for `len` values without a residual. `float` is the dtype of [`StateKind::Bf16`] on this device.
    pub fn zeros(kind: StateKind, len: usize, float: DType, device: &B::Device) -> Self {
        let full = |len: usize, byte: usize| {
            Tensor::<B, 1, Int>::full([len], byte as i64, (device, DType::U8)).into_primitive()
        };
        let absmax = || B::float_zeros(Shape::new([len.div_ceil(STATE_BLOCK)]), device, DType::F32.into());
        let moment = |signed: bool| match kind.coding() {
            None => {
                let dtype = if kind == StateKind::F32 { DType::F32 } else { float };
                Moment::Float(B::float_zeros(Shape::new([len]), device, dtype.into()))
            }
            Some(coding) => {
                let table = coding.values(signed);
                let zero = table.iter().position(|&t| t == 0.0).unwrap_or(0);
                let byte = if coding == Coding::Bytes { zero } else { zero | zero << 4 };
                let codes = full(len * coding.bits() / 8, byte);
                let search = words::<B>(coding.search(signed), device);
                Moment::Quantized { codes, absmax: absmax(), table: floats::<B>(table, device), search }
            }
        };
        Self { kind, m: moment(true), v: moment(false), residual: None, codes: None }
    }

    /// The same moments with a residual for `len` values that says that the weight is exactly its bf16 value.
    #[must_use]
    pub fn with_residual(self, len: usize, device: &B::Device) -> Self {
        let middle = Tensor::<B, 1, Int>::full([len], 128, (device, DType::U8)).into_primitive();
        Self { residual: Some(middle), ..self }
    }
}

impl<B: Backend> Moment<B> {
    /// Restores the first or the second moment from its codes and block maxima.
    pub fn from_bytes(kind: StateKind, first: bool, codes: Vec<u8>, absmax: Vec<f32>, device: &B::Device) -> Self {
        let coding = kind.coding().expect("float moments have no codes");
        let len = codes.len();
        let data = TensorData::new(codes, Shape::new([len]));
        let codes = Tensor::<B, 1, Int>::from_data(data, (device, DType::U8)).into_primitive();
        // CubeCL counts uploaded bytes in 32 bits until the next launch, so that a large state needs launches.
        drop(Tensor::<B, 1>::zeros([1], device));
        let table = floats::<B>(coding.values(first), device);
        let search = words::<B>(coding.search(first), device);
        Self::Quantized { codes, absmax: floats::<B>(absmax, device), table, search }
    }
}

fn floats<B: Backend>(values: Vec<f32>, device: &B::Device) -> FloatTensor<B> {
    let data = TensorData::new(values.clone(), Shape::new([values.len()]));
    Tensor::<B, 1>::from_data(data, (device, DType::F32)).into_primitive().tensor()
}

fn words<B: Backend>(values: Vec<u32>, device: &B::Device) -> IntTensor<B> {
    let len = values.len();
    Tensor::<B, 1, Int>::from_data(TensorData::new(values, [len]), (device, DType::U32)).into_primitive()
}
