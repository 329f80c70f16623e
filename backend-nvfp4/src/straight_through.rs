//! The forward and the backward of linear layers `y = x · Wᵀ` under a recipe, for layers that read the same activations:
//! q, k and v, or gate and up. Such layers share one quantized copy of the activations, and one launch can make all of
//! their products.
//!
//! The straight-through estimator (Bengio et al., arXiv 1308.3432) stands in for the gradient of quantization: where
//! the forward read `Q(w)`, the gradient with respect to `Q(w)` is handed to `w` unchanged.

use crate::{
    gradient::Gradient,
    kernels::Nvfp4Kernels,
    ops::{Activations, LayerWeight, LinearLayer},
    packed::Operand,
    recipe::{ActivationScale, LinearSpec, Recipe},
};
use burn::tensor::{DType, FloatDType, Shape, TensorMetadata, backend::Backend, ops::FloatTensor};
use kernels_cubecl::operands::Product;

/// What the backward of linear layers reads: the operands that the forward multiplied.
#[derive(Debug, Clone)]
pub(crate) struct SavedLinears<B: Backend> {
    /// Activations before quantization where the backward packs them in its own way ([`Recipe::packs_gradients`]).
    x: Operand<B>,
    /// The weight of each layer.
    w: Vec<Operand<B>>,
    recipe: Recipe,
}

/// Returns the output of each layer, and what the backward needs. All layers have the same recipe.
pub(crate) fn forward<B: Nvfp4Kernels>(
    x: Activations<B>,
    layers: Vec<LinearLayer<B>>,
) -> (Vec<FloatTensor<B>>, SavedLinears<B>) {
    let spec = layers[0].spec;
    let (dtype, recipe) = (spec.precision.dtype(), spec.recipe);
    debug_assert_eq!(x.values.dtype(), dtype, "the model casts activations where they enter");
    let w = weights(layers, spec);
    let read = match spec.activation_scale {
        _ if !recipe.packs_activations() => Operand::Dense(x.values.clone()),
        // A packed matrix has one tensor scale. Rows that have one each stay dense.
        ActivationScale::EachRow => Operand::Dense(B::nvfp4_rounded_rows(x.values.clone())),
        ActivationScale::Given(scale) => Operand::Dense(B::nvfp4_rounded_by(x.values.clone(), scale)),
        ActivationScale::AllRows => {
            Operand::Packed(x.packed.unwrap_or_else(|| B::nvfp4_quantize(x.values.clone(), spec.activations())))
        }
    };
    let ys = if spec.newest_tokens {
        B::token_products(read.clone(), w.clone(), spec.precision)
    } else {
        B::products(Product::Nt, vec![read.clone()], w.clone(), spec.precision, dtype)
    };
    let x = if recipe.packs_gradients().is_some() { Operand::Dense(x.values) } else { read };
    (ys, SavedLinears { x, w, recipe })
}

/// The weight of each layer as the products read it.
fn weights<B: Nvfp4Kernels>(layers: Vec<LinearLayer<B>>, spec: LinearSpec) -> Vec<Operand<B>> {
    let packs = spec.recipe.packs_weights();
    let mut together = vec![];
    if packs && spec.shares_scale {
        let dense = |layer: &LinearLayer<B>| match &layer.weight {
            LayerWeight::Dense(w) | LayerWeight::Held { values: w, .. } => Some(w.clone()),
            LayerWeight::Packed { .. } => None,
        };
        together = B::nvfp4_quantize_together(layers.iter().filter_map(dense).collect(), spec.weights());
    }
    let mut together = together.into_iter();
    let weight = |layer: LinearLayer<B>| match layer.weight {
        LayerWeight::Held { codes, .. } if spec.codes_of_one() == Some(codes.spec) => Operand::Packed(codes.packed),
        LayerWeight::Dense(w) | LayerWeight::Held { values: w, .. } if !packs => {
            Operand::Dense(cast::<B>(w, spec.precision.dtype()))
        }
        LayerWeight::Dense(w) | LayerWeight::Held { values: w, .. } => {
            Operand::Packed(together.next().unwrap_or_else(|| B::nvfp4_quantize(w, spec.weights())))
        }
        LayerWeight::Packed { packed, .. } => Operand::Packed(packed),
    };
    layers.into_iter().map(weight).collect()
}

/// Returns `dx`, the sum over layers of `dy · W`, and for each layer `dW = dyᵀ · x` in f32, computed with the operands
/// that the forward used ([`Recipe::packs_gradients`] says when x is quantized again). `wanted` says which of these
/// gradients are needed, dx first. A layer without `dy` contributes nothing. The weights come first, because after them
/// the activations can be freed before `dx` takes their place.
pub(crate) fn backward<B: Nvfp4Kernels>(
    dys: Vec<Option<FloatTensor<B>>>,
    SavedLinears { x, w, recipe }: SavedLinears<B>,
    specs: &[LinearSpec],
    wanted: &[bool],
) -> (Option<FloatTensor<B>>, Vec<Option<Gradient<B>>>) {
    let (mut of_dw, mut of_dx) = (Vec::new(), Vec::new());
    for (i, dy) in dys.into_iter().enumerate() {
        let operands = dy.map(|dy| gradient_operands::<B>(dy, recipe, &specs[i], wanted[1 + i], wanted[0]));
        let (dw, dx) = operands.unwrap_or_default();
        of_dw.push(dw);
        of_dx.push(dx);
    }
    let dws = weight_gradients::<B>(of_dw, x, recipe, specs);
    (input_gradient::<B>(of_dx, w, specs), dws)
}

/// Returns the operand that `dy` becomes in the product for `dW`, and the one for `dx`, where they are wanted. A recipe that
/// packs gradients packs them along the dimension that a product sums over: the tokens for `dW`, the output features for
/// `dx`.
fn gradient_operands<B: Nvfp4Kernels>(
    dy: FloatTensor<B>,
    recipe: Recipe,
    spec: &LinearSpec,
    of_dw: bool,
    of_dx: bool,
) -> (Option<Operand<B>>, Option<Operand<B>>) {
    let Some(parts) = recipe.packs_gradients() else {
        return (of_dw.then(|| Operand::Dense(dy.clone())), of_dx.then_some(Operand::Dense(dy)));
    };
    let (along, across) = (spec.gradients(parts, false), spec.gradients(parts, true));
    let [rows, _] = dy.shape().dims();
    if of_dw && of_dx && rows.is_multiple_of(16) {
        let (along, across) = B::nvfp4_operands(dy, along, across, parts.hadamard);
        return (Some(across), Some(Operand::Packed(along)));
    }
    let dw = of_dw.then(|| B::nvfp4_operand_across(in_blocks_of_16::<B>(dy.clone()), across, parts.hadamard));
    (dw, of_dx.then(|| Operand::Packed(B::nvfp4_quantize(dy, along))))
}

/// `dW = dyᵀ · x` of each layer that has an operand.
fn weight_gradients<B: Nvfp4Kernels>(
    dys: Vec<Option<Operand<B>>>,
    x: Operand<B>,
    recipe: Recipe,
    specs: &[LinearSpec],
) -> Vec<Option<Gradient<B>>> {
    let mut dws: Vec<Option<Gradient<B>>> = dys.iter().map(|_| None).collect();
    let (trained, dys): (Vec<_>, Vec<_>) = dys.into_iter().enumerate().filter_map(|(i, dy)| Some((i, dy?))).unzip();
    if trained.is_empty() {
        return dws;
    }
    let (product, x) = match (recipe.packs_gradients(), x) {
        // Blocks of both operands run along the tokens. Their rotations cancel.
        (Some(parts), Operand::Dense(x)) => {
            let spec = specs[0].activations();
            (Product::Nt, B::nvfp4_operand_across(in_blocks_of_16::<B>(x), spec, parts.hadamard))
        }
        (_, x) => (Product::Tn, x),
    };
    let computed = B::weight_gradients(product, dys, x, specs[0].precision);
    trained.into_iter().zip(computed).for_each(|(i, dw)| dws[i] = Some(dw));
    dws
}

/// `dx`, the sum of `dy · W` over the layers that have an operand.
fn input_gradient<B: Nvfp4Kernels>(
    dys: Vec<Option<Operand<B>>>,
    w: Vec<Operand<B>>,
    specs: &[LinearSpec],
) -> Option<FloatTensor<B>> {
    let (left, right): (Vec<_>, Vec<_>) = dys.into_iter().zip(w).filter_map(|(dy, w)| Some((dy?, w))).unzip();
    let precision = specs[0].precision;
    (!left.is_empty()).then(|| B::product_sum(Product::Nn, left, right, precision, precision.dtype()))
}

/// `x` with rows of zeros up to a multiple of 16.
fn in_blocks_of_16<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let [rows, cols] = x.shape().dims();
    let missing = rows.next_multiple_of(16) - rows;
    if missing == 0 {
        return x;
    }
    let zeros = B::float_zeros(Shape::new([missing, cols]), &B::float_device(&x), x.dtype().into());
    B::float_cat(vec![x, zeros], 0)
}

/// `x` as `dtype`.
pub(crate) fn cast<B: Backend>(x: FloatTensor<B>, dtype: DType) -> FloatTensor<B> {
    let to: FloatDType = dtype.into();
    if x.dtype() == dtype { x } else { B::float_cast(x, to) }
}
