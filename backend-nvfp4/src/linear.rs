//! Linear layers `y = x · Wᵀ` under a recipe, alone or several that read the same activations: q, k and v, gate and up.
//! Those share what is made of the activations, and one launch can make their products. Forward and backward are here,
//! the graph is in `autodiff`.

use crate::{
    LinearSpec, Nvfp4Backend, Nvfp4Primitive, Nvfp4Tensor, Precision, Product, Recipe, operand::Operand, tensor::float,
};
use burn::{
    module::{Module, Param},
    tensor::{DType, Shape, Tensor, TensorMetadata, backend::Backend, ops::FloatTensor},
};

/// A linear layer without bias, weight `[N, K]`.
#[derive(Module, Debug)]
pub enum Nvfp4Linear<B: Backend> {
    /// A master weight, f32 or bf16: training moves it, each forward quantises it as the recipe says.
    Master(Param<Tensor<B, 2>>),
    /// A weight that no recipe quantises.
    Dense(Param<Tensor<B, 2>>),
    /// Packed NVFP4 codes, for inference.
    Packed(Nvfp4Tensor<B>),
    /// Packed NVFP4 codes that training moves.
    PackedMaster(PackedMaster<B>),
}

/// An NVFP4 master weight.
#[derive(Module, Debug)]
pub struct PackedMaster<B: Backend> {
    /// Takes the gradient `[N, K]`: autodiff knows no gradient of codes. One value, expanded; never read.
    pub gradient: Param<Tensor<B, 2>>,
    /// The codes.
    pub weight: Nvfp4Tensor<B>,
}

/// The weight of a linear layer, `[N, K]`.
#[derive(Debug, Clone)]
pub enum LinearWeight<B: Backend> {
    /// A master, f32 or bf16.
    Float(FloatTensor<B>),
    /// Codes, and what takes their gradient.
    Packed {
        /// The codes.
        codes: Nvfp4Primitive<B>,
        /// See [`PackedMaster::gradient`]; `None` if they are not trained.
        gradient: Option<FloatTensor<B>>,
    },
}

/// What linear layers read: activations `[M, K]`, with their codes where the recipe multiplies those.
#[derive(Debug, Clone)]
pub struct Activations<B: Backend> {
    /// In the spec's dtype.
    pub values: FloatTensor<B>,
    /// The same, quantised along K.
    pub codes: Option<Nvfp4Primitive<B>>,
}

impl<B: Nvfp4Backend> Activations<B> {
    /// Quantises `values` if layers of this specification read codes.
    pub fn new(values: FloatTensor<B>, spec: LinearSpec) -> Self {
        let codes = spec.recipe.packs_activations().then(|| B::nvfp4_quantize(values.clone(), spec.activations()));
        Self { values, codes }
    }
}

/// The layers' outputs `[M, N]` of activations `[M, K]`, each layer with its own specification.
pub fn linears<B: Nvfp4Backend, const N: usize>(
    layers: [&Nvfp4Linear<B>; N],
    x: Activations<B>,
    specs: [LinearSpec; N],
) -> [Tensor<B, 2>; N] {
    let layers: Vec<_> = layers.into_iter().zip(specs).map(|(layer, spec)| layer.weight(spec)).collect();
    let recipe = layers[0].1.recipe;
    let ys = if layers.iter().all(|(_, spec)| spec.recipe == recipe) {
        B::nvfp4_linears(x, layers)
    } else {
        layers.into_iter().flat_map(|layer| B::nvfp4_linears(x.clone(), vec![layer])).collect()
    };
    let ys: Vec<_> = ys.into_iter().map(float).collect();
    ys.try_into().expect("one output a layer")
}

impl<B: Nvfp4Backend> Nvfp4Linear<B> {
    /// `x` `[M, K]` in the spec's dtype to `[M, N]`.
    pub fn forward(&self, x: Tensor<B, 2>, spec: LinearSpec) -> Tensor<B, 2> {
        let (_, own) = self.weight(spec);
        let x = Activations::new(x.into_primitive().tensor(), own);
        let [y] = linears([self], x, [spec]);
        y
    }

    /// The weight, and the specification as it is for this layer.
    fn weight(&self, spec: LinearSpec) -> (LinearWeight<B>, LinearSpec) {
        let primitive = |p: &Param<Tensor<B, 2>>| p.val().into_primitive().tensor();
        match self {
            Self::Master(weight) => (LinearWeight::Float(primitive(weight)), spec),
            Self::Dense(weight) => {
                (LinearWeight::Float(primitive(weight)), LinearSpec { recipe: Recipe::Bf16, ..spec })
            }
            Self::Packed(weight) => (LinearWeight::Packed { codes: weight.primitive(), gradient: None }, spec),
            Self::PackedMaster(weight) => {
                let (codes, gradient) = (weight.weight.primitive(), Some(primitive(&weight.gradient)));
                (LinearWeight::Packed { codes, gradient }, spec)
            }
        }
    }

    /// Output and input features, N and K.
    pub fn dims(&self) -> [usize; 2] {
        match self {
            Self::Master(weight) | Self::Dense(weight) => weight.dims(),
            Self::Packed(weight) => weight.dims(),
            Self::PackedMaster(weight) => weight.weight.dims(),
        }
    }
}

impl<B: Nvfp4Backend> PackedMaster<B> {
    /// A master of these codes; `gradient` is a parameter's id and one value `[1, 1]`.
    pub fn new(weight: Nvfp4Tensor<B>, gradient: Param<Tensor<B, 2>>) -> Self {
        let dims = weight.dims();
        let (id, value, mapper) = gradient.consume();
        let gradient = Param::from_mapped_value(id, value.expand(dims).detach().require_grad(), mapper);
        Self { gradient, weight }
    }
}

/// A dense batched product, differentiable, in the given number format.
pub fn matmul<B: Nvfp4Backend, const D: usize>(
    lhs: Tensor<B, D>,
    rhs: Tensor<B, D>,
    precision: Precision,
) -> Tensor<B, D> {
    let (lhs, rhs) = (lhs.into_primitive().tensor(), rhs.into_primitive().tensor());
    float(B::dense_matmul(lhs, rhs, precision, precision.dtype()))
}

/// What the backward of linear layers reads: the operands that the forward multiplied.
#[derive(Debug, Clone)]
pub(crate) struct Saved<B: Backend> {
    /// Under [`Recipe::Nvfp4`] the activations as they were: its backward packs them its own way.
    x: Operand<B>,
    /// One a layer.
    w: Vec<Operand<B>>,
    recipe: Recipe,
}

/// Each layer's output, and what the backward needs. One recipe for all.
pub(crate) fn forward<B: Nvfp4Backend>(
    x: Activations<B>,
    weights: Vec<LinearWeight<B>>,
    spec: LinearSpec,
) -> (Vec<FloatTensor<B>>, Saved<B>) {
    let (dtype, recipe) = (spec.precision.dtype(), spec.recipe);
    debug_assert_eq!(x.values.dtype(), dtype, "activations are cast at the model's door");
    let weight = |w| match w {
        LinearWeight::Float(w) if recipe == Recipe::Bf16 => Operand::Dense(cast::<B>(w, dtype)),
        LinearWeight::Float(w) => Operand::Packed(B::nvfp4_quantize(w, spec.weights())),
        LinearWeight::Packed { codes, .. } => Operand::Packed(codes),
    };
    let w: Vec<_> = weights.into_iter().map(weight).collect();
    let read = if recipe.packs_activations() {
        let codes = x.codes.unwrap_or_else(|| B::nvfp4_quantize(x.values.clone(), spec.activations()));
        Operand::Packed(codes)
    } else {
        Operand::Dense(x.values.clone())
    };
    let ys = B::products(Product::Nt, vec![read.clone()], w.clone(), spec.precision, dtype);
    let x = if matches!(recipe, Recipe::Nvfp4(_)) { Operand::Dense(x.values) } else { read };
    (ys, Saved { x, w, recipe })
}

/// `dx`, the sum over layers of `dy · W`, and each layer's `dW = dyᵀ · x` in f32, with the operands that the forward used,
/// each if it is `wanted` (dx first). A layer without `dy` gives nothing. The weights' gradients come first: with them
/// the activations go, before `dx` takes their place.
pub(crate) fn backward<B: Nvfp4Backend>(
    dys: Vec<Option<FloatTensor<B>>>,
    Saved { x, w, recipe }: Saved<B>,
    specs: &[LinearSpec],
    wanted: &[bool],
) -> (Option<FloatTensor<B>>, Vec<Option<FloatTensor<B>>>) {
    let (precision, dtype) = (specs[0].precision, specs[0].precision.dtype());
    let mut dws: Vec<Option<FloatTensor<B>>> = dys.iter().map(|_| None).collect();
    let of_trained = |(i, dy): (usize, &Option<FloatTensor<B>>)| Some((i, dy.clone().filter(|_| wanted[i + 1])?));
    let (trained, of_trained): (Vec<_>, Vec<_>) = dys.iter().enumerate().filter_map(of_trained).unzip();
    if !trained.is_empty() {
        let (product, read, x) = match (recipe, x) {
            (Recipe::Nvfp4(parts), Operand::Dense(x)) => {
                // Blocks run along the tokens, which are summed over. The rotation cancels in the product.
                let across =
                    |x, spec| Operand::Packed(B::nvfp4_quantize_across(in_blocks_of_16::<B>(x), spec, parts.hadamard));
                let of_layer = |(dy, &i): (_, &usize)| across(dy, specs[i].gradients(parts, true));
                let read = of_trained.into_iter().zip(&trained).map(of_layer).collect();
                (Product::Nt, read, across(x, specs[0].activations()))
            }
            (_, x) => (Product::Tn, of_trained.into_iter().map(Operand::Dense).collect(), x),
        };
        let computed = B::products(product, read, vec![x], precision, DType::F32);
        trained.into_iter().zip(computed).for_each(|(i, dw)| dws[i] = Some(dw));
    }

    let mut pairs = (Vec::new(), Vec::new());
    for ((dy, w), spec) in dys.into_iter().zip(w).zip(specs).filter(|_| wanted[0]) {
        if let Some(dy) = dy {
            pairs.0.push(match recipe {
                Recipe::Nvfp4(parts) => Operand::Packed(B::nvfp4_quantize(dy, spec.gradients(parts, false))),
                _ => Operand::Dense(dy),
            });
            pairs.1.push(w);
        }
    }
    let dx = (!pairs.0.is_empty()).then(|| B::product_sum(Product::Nn, pairs.0, pairs.1, precision, dtype));
    (dx, dws)
}

/// `x` with rows of zeros up to a multiple of 16.
fn in_blocks_of_16<B: Nvfp4Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let [rows, cols] = x.shape().dims();
    let missing = rows.next_multiple_of(16) - rows;
    if missing == 0 {
        return x;
    }
    let zeros = B::float_zeros(Shape::new([missing, cols]), &B::float_device(&x), x.dtype().into());
    B::float_cat(vec![x, zeros], 0)
}

fn cast<B: Backend>(x: FloatTensor<B>, dtype: DType) -> FloatTensor<B> {
    let to: burn::tensor::FloatDType = dtype.into();
    if x.dtype() == dtype { x } else { B::float_cast(x, to) }
}
