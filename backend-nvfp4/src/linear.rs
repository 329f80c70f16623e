//! Linear layers without bias as modules, and the call of one layer or of several that read the same activations.

use crate::{
    held_codes::HeldCodes,
    ops::{Activations, LayerWeight, LinearLayer, Nvfp4Backend},
    packed::Nvfp4Tensor,
    primitive::{primitive, tensor},
    recipe::{ActivationScale, GivenScale, LinearSpec},
};
use burn::{
    module::{Module, Param},
    tensor::{Tensor, backend::Backend},
};

/// A linear layer without bias, weight `[N, K]`.
#[derive(Module, Debug)]
pub enum Nvfp4Linear<B: Backend> {
    /// A master weight in f32 or bf16. Training moves it, and products read it quantized as the recipe says.
    Master(MasterWeight<B>),
    /// A weight that no recipe quantizes.
    Dense(Param<Tensor<B, 2>>),
    /// NVFP4 codes that stay as they are.
    Packed(PackedWeight<B>),
    /// NVFP4 codes that training moves.
    PackedMaster(PackedMaster<B>),
}

/// A master weight in f32 or bf16.
#[derive(Module, Debug)]
pub struct MasterWeight<B: Backend> {
    /// The values.
    pub weight: Param<Tensor<B, 2>>,
    /// Their codes, where the optimizer has left them. Otherwise each forward quantizes the values.
    pub codes: Option<HeldCodes<B>>,
}

/// An NVFP4 weight that stays as it is.
#[derive(Module, Debug)]
pub struct PackedWeight<B: Backend> {
    /// The codes.
    pub weight: Nvfp4Tensor<B>,
    /// The tensor scale of the layer's activations, wherever the recipe quantizes them, if the file of the weight has one.
    #[module(skip)]
    pub input: Option<GivenScale>,
}

/// An NVFP4 master weight.
#[derive(Module, Debug)]
pub struct PackedMaster<B: Backend> {
    /// The parameter that takes the gradient `[N, K]`, because autodiff knows no gradient of codes. It is one value,
    /// expanded, and is never read.
    pub gradient: Param<Tensor<B, 2>>,
    /// The codes.
    pub weight: Nvfp4Tensor<B>,
}

/// Computes the outputs `[M, N]` of activations `[M, K]`, each layer with its own specification.
pub fn linears<B: Nvfp4Backend, const COUNT: usize>(
    layers: [&Nvfp4Linear<B>; COUNT],
    x: Activations<B>,
    specs: [LinearSpec; COUNT],
) -> [Tensor<B, 2>; COUNT] {
    let layers: Vec<_> = layers.into_iter().zip(specs).map(|(layer, spec)| layer.operation(spec)).collect();
    let reads = |layer: &LinearLayer<B>| (layer.spec.recipe, layer.spec.activation_scale);
    let first = reads(&layers[0]);
    let ys = if layers.iter().all(|layer| reads(layer) == first) {
        B::nvfp4_linears(x, layers)
    } else {
        layers.into_iter().flat_map(|layer| B::nvfp4_linears(x.clone(), vec![layer])).collect()
    };
    let ys: Vec<_> = ys.into_iter().map(tensor).collect();
    ys.try_into().expect("one output a layer")
}

impl<B: Nvfp4Backend> Nvfp4Linear<B> {
    /// Computes `[M, N]` from `x` `[M, K]`, whose dtype is that of the specification.
    pub fn forward(&self, x: Tensor<B, 2>, spec: LinearSpec) -> Tensor<B, 2> {
        let [y] = linears([self], x.into(), [spec]);
        y
    }

    /// The layer as an operation takes it. No recipe quantizes a [`Self::Dense`] weight.
    pub fn operation(&self, spec: LinearSpec) -> LinearLayer<B> {
        let dense = |w: &Param<Tensor<B, 2>>| LayerWeight::Dense(primitive(w.val()));
        match self {
            Self::Master(MasterWeight { weight, codes: None }) => LinearLayer { weight: dense(weight), spec },
            Self::Master(MasterWeight { weight, codes: Some(codes) }) => {
                let values = primitive(weight.val());
                LinearLayer { weight: LayerWeight::Held { values, codes: codes.primitive() }, spec }
            }
            Self::Dense(w) => LinearLayer { weight: dense(w), spec: spec.unquantized() },
            Self::Packed(PackedWeight { weight, input }) => {
                let activation_scale = input.map_or(spec.activation_scale, ActivationScale::Given);
                let weight = LayerWeight::Packed { packed: weight.primitive(), gradient: None };
                LinearLayer { weight, spec: LinearSpec { activation_scale, ..spec } }
            }
            Self::PackedMaster(PackedMaster { gradient, weight }) => {
                let gradient = Some(primitive(gradient.val()));
                LinearLayer { weight: LayerWeight::Packed { packed: weight.primitive(), gradient }, spec }
            }
        }
    }
}

impl<B: Backend> Nvfp4Linear<B> {
    /// Output and input features, N and K.
    pub fn dims(&self) -> [usize; 2] {
        match self {
            Self::Master(MasterWeight { weight: w, .. }) | Self::Dense(w) => w.dims(),
            Self::Packed(PackedWeight { weight, .. }) | Self::PackedMaster(PackedMaster { weight, .. }) => {
                weight.dims()
            }
        }
    }

    /// The codes, if the weight is packed.
    pub fn codes(&self) -> Option<&Nvfp4Tensor<B>> {
        match self {
            Self::Master(_) | Self::Dense(_) => None,
            Self::Packed(PackedWeight { weight, .. }) | Self::PackedMaster(PackedMaster { weight, .. }) => Some(weight),
        }
    }
}

impl<B: Backend> From<Param<Tensor<B, 2>>> for MasterWeight<B> {
    fn from(weight: Param<Tensor<B, 2>>) -> Self {
        Self { weight, codes: None }
    }
}

impl<B: Backend> From<Nvfp4Tensor<B>> for PackedWeight<B> {
    fn from(weight: Nvfp4Tensor<B>) -> Self {
        Self { weight, input: None }
    }
}

impl<B: Backend> PackedMaster<B> {
    /// Makes a master of these codes. `gradient` has the id of the parameter and one value `[1, 1]`.
    pub fn new(weight: Nvfp4Tensor<B>, gradient: Param<Tensor<B, 2>>) -> Self {
        let dims = weight.dims();
        let (id, value, mapper) = gradient.consume();
        let gradient = Param::from_mapped_value(id, value.expand(dims).detach().require_grad(), mapper);
        Self { gradient, weight }
    }
}
