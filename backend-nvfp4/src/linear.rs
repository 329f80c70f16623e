//! Linear layers without bias as modules, and the call of one layer or of several that read the same activations.

use crate::{
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
    /// A master weight in f32 or bf16. Training moves it, and each forward quantizes it as the recipe says.
    Master(Param<Tensor<B, 2>>),
    /// A weight that no recipe quantizes.
    Dense(Param<Tensor<B, 2>>),
    /// NVFP4 codes for inference.
    Packed(Nvfp4Tensor<B>),
    /// The same, from a file that also says how the layer's activations are scaled.
    Calibrated(Calibrated<B>),
    /// NVFP4 codes that training moves.
    PackedMaster(PackedMaster<B>),
}

/// An NVFP4 weight for inference with the tensor scale that its file gives the activations of the layer.
#[derive(Module, Debug)]
pub struct Calibrated<B: Backend> {
    /// The codes.
    pub weight: Nvfp4Tensor<B>,
    /// The tensor scale of the activations, wherever the recipe quantizes them.
    #[module(skip)]
    pub input: GivenScale,
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
        let frozen = |w: &Nvfp4Tensor<B>| LayerWeight::Packed { codes: w.primitive(), gradient: None };
        match self {
            Self::Master(w) => LinearLayer { weight: dense(w), spec },
            Self::Dense(w) => LinearLayer { weight: dense(w), spec: spec.unquantized() },
            Self::Packed(w) => LinearLayer { weight: frozen(w), spec },
            Self::Calibrated(Calibrated { weight, input }) => {
                let spec = LinearSpec { activation_scale: ActivationScale::Given(*input), ..spec };
                LinearLayer { weight: frozen(weight), spec }
            }
            Self::PackedMaster(PackedMaster { gradient, weight }) => {
                let gradient = Some(primitive(gradient.val()));
                LinearLayer { weight: LayerWeight::Packed { codes: weight.primitive(), gradient }, spec }
            }
        }
    }
}

impl<B: Backend> Nvfp4Linear<B> {
    /// Output and input features, N and K.
    pub fn dims(&self) -> [usize; 2] {
        match self {
            Self::Master(weight) | Self::Dense(weight) => weight.dims(),
            Self::Packed(weight) => weight.dims(),
            Self::Calibrated(calibrated) => calibrated.weight.dims(),
            Self::PackedMaster(weight) => weight.weight.dims(),
        }
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
