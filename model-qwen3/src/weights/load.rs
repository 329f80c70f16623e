//! Loads a model from the tensors of a file.

use super::{
    forge::{DenseForm, Forge},
    structure::{Source, build, matrices},
};
use crate::{
    ModelError,
    config::Qwen3Config,
    model::Qwen3,
    names::HEAD,
    tensors::{Stored, Tensors},
};
use backend_nvfp4::{
    LinearSpec, MasterKind, Nvfp4Error, Nvfp4Kernels, Nvfp4Linear, Nvfp4Tensor, Packed, PackedWeight, layout, reference,
};
use burn::{
    module::Param,
    tensor::{DType, Tensor, backend::Backend},
};
use std::{
    collections::HashSet,
    sync::mpsc::{Receiver, SyncSender, sync_channel},
};

/// What the model is loaded for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Training. Every tensor becomes a master of this form. NVFP4 tensors are dequantized once, unless masters are NVFP4.
    Train(MasterKind),
    /// Inference. NVFP4 tensors stay packed.
    Infer,
}

/// Loads a model. No gradient is tracked before [`trained()`](super::trained()) says so. A head among the tensors is a tensor of
/// its own; [`Container::without_copied_head`](crate::container::Container::without_copied_head) leaves out one that is not.
///
/// # Errors
/// If a tensor is missing, has another shape than config.json says, is unknown to the model, or is invalid.
pub fn load<B: Nvfp4Kernels>(
    tensors: &dyn Tensors,
    config: &Qwen3Config,
    spec: LinearSpec,
    purpose: Purpose,
    device: &B::Device,
) -> Result<Qwen3<B>, ModelError> {
    let has_head = tensors.stored(HEAD).is_some();
    if !has_head && !config.tie_word_embeddings {
        let reason = format!("there is no tensor {HEAD:?}, and config.json does not tie the head to the embedding");
        return Err(ModelError::weights(tensors.path(), reason));
    }
    let master = match purpose {
        Purpose::Train(master) => Some(master),
        Purpose::Infer => None,
    };
    let forge = Forge { master, spec, device, next_id: 0 };
    let (model, used) = std::thread::scope(|scope| {
        let (sender, ahead) = sync_channel(1);
        if !tensors.is_outline() {
            let trains = master.is_some();
            scope.spawn(move || read_ahead(tensors, config.num_hidden_layers, trains, &sender));
        }
        let mut loader = Loader { tensors, forge, used: HashSet::new(), ahead: Some(ahead) };
        // The receiver is dropped with the loader, also after an error, which ends the thread.
        build(config, spec, has_head, &mut loader).map(|model| (model, loader.used))
    })?;
    let mut unknown = tensors.names();
    unknown.retain(|n| !used.contains(n));
    if !unknown.is_empty() {
        let shown = unknown[..unknown.len().min(10)].join(", ");
        let reason = match unknown.len() {
            1 => format!("the file has a tensor that this model does not have: {shown}"),
            n => format!("the file has {n} tensors that this model does not have: {shown}"),
        };
        return Err(ModelError::weights(tensors.path(), reason));
    }
    Ok(model)
}

/// An NVFP4 tensor that was read, and its name.
type Read = (String, Result<Packed, ModelError>);

/// Reads the NVFP4 tensors of a model before [`build`] asks for them, so that the thread that uploads them need not wait for the
/// disk. At most two are in memory before they are asked for. Ends when `sender` has no receiver.
fn read_ahead(tensors: &dyn Tensors, blocks: usize, trains: bool, sender: &SyncSender<Read>) {
    let is_packed = |name: &String| matches!(tensors.stored(name), Some(Stored::Packed { .. }));
    // Training decodes these on the host.
    let is_decoded = |name: &String| trains && tensors.divides(name);
    for name in matrices(blocks).filter(|name| is_packed(name) && !is_decoded(name)) {
        let packed = tensors.read_packed(&name);
        if sender.send((name, packed)).is_err() {
            return;
        }
    }
}

struct Loader<'a, B: Backend> {
    tensors: &'a dyn Tensors,
    forge: Forge<'a, B>,
    /// Names of the tensors that the model took.
    used: HashSet<String>,
    /// The tensors that [`read_ahead`] has read.
    ahead: Option<Receiver<Read>>,
}

impl<B: Nvfp4Kernels> Loader<'_, B> {
    /// Takes a tensor that must have this shape.
    fn expect(&mut self, name: &str, shape: &[usize]) -> Result<Stored, ModelError> {
        let found = self.tensors.stored(name).ok_or_else(|| {
            ModelError::weights(self.tensors.path(), format!("there is no tensor {name:?} of shape {shape:?}"))
        })?;
        if found.shape() != shape {
            let reason = format!("{name:?} has shape {:?}, config.json asks for {shape:?}", found.shape());
            return Err(ModelError::weights(self.tensors.path(), reason));
        }
        self.used.insert(name.to_owned());
        Ok(found)
    }

    /// Uploads a matrix of the file as floats.
    fn dense(&self, name: &str, shape: [usize; 2], form: DenseForm) -> Result<Tensor<B, 2>, ModelError> {
        self.forge.upload(self.tensors, name, shape, form)
    }

    /// Uploads an NVFP4 matrix of the file and checks its scales.
    fn packed(&mut self, name: &str, [rows, cols]: [usize; 2]) -> Result<Nvfp4Tensor<B>, ModelError> {
        if self.tensors.is_outline() {
            return Ok(Nvfp4Tensor::zeros(rows, cols, self.forge.device));
        }
        let packed = match self.ahead.as_ref().and_then(|ahead| ahead.recv().ok()) {
            Some((next, packed)) if next == name => packed?,
            _ => {
                // The thread reads in another order. Without a receiver it ends.
                self.ahead = None;
                self.tensors.read_packed(name)?
            }
        };
        let tensor = Nvfp4Tensor::new(packed, rows, cols, self.forge.device).map_err(ModelError::nvfp4(name))?;
        // CubeCL counts uploaded bytes in 32 bits until a kernel is launched. This one lets codes exceed 4 GiB.
        drop(Tensor::<B, 1>::zeros([1], self.forge.device));
        Ok(tensor)
    }
}

impl<B: Nvfp4Kernels> Source<B> for Loader<'_, B> {
    fn vector(&mut self, name: &str, len: usize) -> Result<Param<Tensor<B, 1>>, ModelError> {
        self.expect(name, &[len])?;
        let values = self.tensors.read_dense(name)?;
        Ok(self.forge.vector(values))
    }

    fn matrix(&mut self, name: &str, shape: [usize; 2]) -> Result<Param<Tensor<B, 2>>, ModelError> {
        if let Stored::Packed { .. } = self.expect(name, &shape)?
            && !self.tensors.divides(name)
        {
            let values = self.packed(name, shape)?.dequantize(DType::F32);
            return self.forge.matrix(values);
        }
        let values = self.dense(name, shape, self.forge.dense())?;
        Ok(self.forge.param(values))
    }

    fn linear(&mut self, name: &str, shape: [usize; 2]) -> Result<Nvfp4Linear<B>, ModelError> {
        let stored = self.expect(name, &shape)?;
        let [rows, cols] = shape;
        match (self.forge.master, stored) {
            (None, Stored::Packed { .. }) => {
                self.forge.next_id += 1;
                let weight = self.packed(name, shape)?;
                Ok(Nvfp4Linear::Packed(PackedWeight { weight, input: self.tensors.input_scale(name)? }))
            }
            // Without training, a weight is what its file holds. A head that its file keeps dense is never quantized.
            (None, Stored::Dense { .. }) => Ok(Nvfp4Linear::Dense(self.matrix(name, shape)?)),
            (Some(_), _) if name == HEAD && !self.tensors.trains_quantized(name) => {
                Ok(Nvfp4Linear::Dense(self.matrix(name, shape)?))
            }
            (Some(_), Stored::Packed { .. }) if self.tensors.keeps_codes(name) => {
                let packed = self.packed(name, shape)?;
                Ok(self.forge.packed_master(packed))
            }
            (Some(MasterKind::Nvfp4), Stored::Packed { .. }) => {
                // `packed` checks the scales before anything is computed with them.
                let packed = self.packed(name, shape)?.to_packed().map_err(ModelError::nvfp4(name))?;
                let roomy = reference::with_room(packed, rows, cols);
                let weight = Nvfp4Tensor::new(roomy, rows, cols, self.forge.device).map_err(ModelError::nvfp4(name))?;
                Ok(self.forge.packed_master(weight))
            }
            (Some(_), Stored::Packed { .. }) if self.tensors.divides(name) => {
                let values = self.dense(name, shape, DenseForm { dtype: DType::F32, through_bf16: false })?;
                self.forge.linear(values)
            }
            (Some(_), Stored::Packed { .. }) => {
                let values = self.packed(name, shape)?.dequantize(DType::F32);
                self.forge.linear(values)
            }
            (Some(MasterKind::Nvfp4), Stored::Dense { .. }) => {
                if !cols.is_multiple_of(layout::BLOCK) {
                    return Err(ModelError::nvfp4(name)(Nvfp4Error::Columns { cols }));
                }
                let values = self.dense(name, shape, DenseForm { dtype: DType::F32, through_bf16: false })?;
                self.forge.linear(values)
            }
            (Some(_), Stored::Dense { .. }) => {
                let values = self.dense(name, shape, self.forge.dense())?;
                Ok(Nvfp4Linear::Master(self.forge.param(values).into()))
            }
        }
    }
}
