//! The NVFP4 codes of a master weight that the optimizer leaves for the next forward, so that it need not quantize the weight. They
//! are those that [`Nvfp4Kernels::nvfp4_quantize`](crate::Nvfp4Kernels::nvfp4_quantize) makes of the weight, to the bit.

use crate::packed::{Nvfp4Primitive, Nvfp4Tensor};
use burn::{
    module::Module,
    tensor::{Int, Tensor, backend::Backend, ops::IntTensor},
};
use kernels_cubecl::quantize::QuantizeSpec;

/// The codes of a master weight, as operations pass them.
#[derive(Debug, Clone)]
pub struct HeldPrimitive<B: Backend> {
    /// The codes.
    pub packed: Nvfp4Primitive<B>,
    /// The bits of the f32 numbers that [`amax`](kernels_cubecl::quantize::amax()) finds in the weight, in a U32 tensor `[3]`,
    /// because Int tensors pass through autodiff unchanged.
    pub amax: IntTensor<B>,
    /// How they were made.
    pub spec: QuantizeSpec,
}

/// The codes of a master weight as part of a module.
#[derive(Module, Debug)]
pub struct HeldCodes<B: Backend> {
    packed: Nvfp4Tensor<B>,
    amax: Tensor<B, 1, Int>,
    #[module(skip)]
    spec: QuantizeSpec,
}

impl<B: Backend> HeldCodes<B> {
    /// The buffers for a backend operation, shared and not copied.
    pub fn primitive(&self) -> HeldPrimitive<B> {
        self.clone().into_primitive()
    }

    /// The buffers for a backend operation that updates them in place, for which it needs their only handle.
    pub fn into_primitive(self) -> HeldPrimitive<B> {
        HeldPrimitive { packed: self.packed.into_primitive(), amax: self.amax.into_primitive(), spec: self.spec }
    }

    /// Wraps buffers that an operation made.
    pub fn from_primitive(HeldPrimitive { packed, amax, spec }: HeldPrimitive<B>) -> Self {
        Self { packed: Nvfp4Tensor::from_primitive(packed), amax: Tensor::from_primitive(amax), spec }
    }
}
