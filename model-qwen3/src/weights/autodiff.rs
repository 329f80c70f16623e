//! Moves a loaded model to the backend that records gradients, and says which parameters are trained.

use super::Replace;
use crate::model::Qwen3;
use backend_nvfp4::{MasterKind, MasterWeight, Nvfp4Linear, PackedMaster};
use burn::{
    module::{AutodiffModule, Param},
    tensor::{Tensor, backend::AutodiffBackend},
};

/// A loaded model on the backend that records gradients. Every parameter is trained; NVFP4 codes are trained only if
/// masters are NVFP4.
pub fn trained<AB: AutodiffBackend>(model: Qwen3<AB::InnerBackend>, master: MasterKind) -> Qwen3<AB> {
    Track { codes: master == MasterKind::Nvfp4 }.model(Qwen3::from_inner(model))
}

struct Track {
    /// Whether NVFP4 codes are trained.
    codes: bool,
}

impl<AB: AutodiffBackend> Replace<AB> for Track {
    fn vector(&mut self, p: Param<Tensor<AB, 1>>) -> Param<Tensor<AB, 1>> {
        p.set_require_grad(true)
    }

    fn matrix(&mut self, p: Param<Tensor<AB, 2>>) -> Param<Tensor<AB, 2>> {
        p.set_require_grad(true)
    }

    fn linear(&mut self, linear: Nvfp4Linear<AB>) -> Nvfp4Linear<AB> {
        match linear {
            Nvfp4Linear::Master(MasterWeight { weight, codes }) => {
                Nvfp4Linear::Master(MasterWeight { weight: weight.set_require_grad(true), codes })
            }
            Nvfp4Linear::Dense(p) => Nvfp4Linear::Dense(p.set_require_grad(true)),
            Nvfp4Linear::PackedMaster(PackedMaster { gradient, weight }) => {
                Nvfp4Linear::PackedMaster(PackedMaster { gradient: gradient.set_require_grad(self.codes), weight })
            }
            packed @ Nvfp4Linear::Packed(_) => packed,
        }
    }
}
