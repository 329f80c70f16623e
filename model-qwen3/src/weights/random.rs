//! A model with random weights, to train from nothing.

use super::{
    forge::Forge,
    structure::{Source, build},
};
use crate::{ModelError, config::Qwen3Config, model::Qwen3, names::HEAD};
use backend_nvfp4::{LinearSpec, MasterKind, Nvfp4Kernels, Nvfp4Linear, Stream};
use burn::{
    module::Param,
    tensor::{DType, Tensor, TensorPrimitive, backend::Backend},
};

/// Makes a model with random weights: norms are 1, other values are normal with the spread of config.json. The same seed
/// gives the same model on every backend, up to the last bits of logarithms and cosines.
///
/// # Errors
/// If the device fails.
pub fn random<B: Nvfp4Kernels>(
    config: &Qwen3Config,
    spec: LinearSpec,
    master: MasterKind,
    seed: u64,
    device: &B::Device,
) -> Result<Qwen3<B>, ModelError> {
    let std = config.initializer_range as f32;
    let mut source = Random { seed, std, forge: Forge { master: Some(master), spec, device, next_id: 0 } };
    build(config, spec, !config.tie_word_embeddings, &mut source)
}

struct Random<'a, B: Backend> {
    seed: u64,
    std: f32,
    forge: Forge<'a, B>,
}

impl<B: Nvfp4Kernels> Random<'_, B> {
    fn normal(&self, shape: [usize; 2], dtype: DType) -> Tensor<B, 2> {
        let stream = Stream { seed: self.seed, step: 0, stream: self.forge.next_id as u32 };
        let values = B::normal(shape, self.std, stream, dtype, self.forge.device);
        Tensor::from_primitive(TensorPrimitive::Float(values))
    }
}

impl<B: Nvfp4Kernels> Source<B> for Random<'_, B> {
    fn vector(&mut self, _: &str, len: usize) -> Result<Param<Tensor<B, 1>>, ModelError> {
        Ok(self.forge.vector(vec![1.0; len]))
    }

    fn matrix(&mut self, _: &str, shape: [usize; 2]) -> Result<Param<Tensor<B, 2>>, ModelError> {
        let values = self.normal(shape, self.forge.dense().dtype);
        self.forge.matrix(values)
    }

    fn linear(&mut self, name: &str, shape: [usize; 2]) -> Result<Nvfp4Linear<B>, ModelError> {
        if name == HEAD {
            return Ok(Nvfp4Linear::Dense(self.matrix(name, shape)?));
        }
        // NVFP4 masters are quantized from f32, without a rounding before.
        let packed = self.forge.master == Some(MasterKind::Nvfp4);
        let values = self.normal(shape, if packed { DType::F32 } else { self.forge.dense().dtype });
        self.forge.linear(values)
    }
}
