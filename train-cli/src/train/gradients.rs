//! What happens to gradients after the backward: they are summed over micro-batches, measured for the global norm, or
//! given to the optimizer.

use crate::train::chunked_adamw::{ChunkedAdamw, Rate};
use backend_nvfp4::{
    Gradient, Judged, MasterWeight, Nvfp4Kernels, Nvfp4Linear, PackedMaster, QuantizeSpec, TrainingBackend,
};
use burn::{
    module::{AutodiffModule, ModuleVisitor, Param, ParamId},
    optim::GradientsParams,
    tensor::{DType, Shape, Tensor, TensorMetadata, TensorPrimitive, ops::FloatTensor},
};
use model_qwen3::{ModelError, weights::Replace, weights::to_host};
use std::collections::HashMap;

/// What happens to the gradients of a pass.
#[derive(Debug, Clone, Copy)]
pub enum Fate {
    /// Gradients are added to the sums.
    Gather,
    /// The squares of gradients are added up for the norm, and the gradients are dropped.
    Measure,
    /// Gradients are added to the sums, and each sum goes to the optimizer at once.
    Apply {
        /// Learning rate and clipping factor.
        rate: Rate,
        /// Whether the norm is known already; if not, the squares are added up on the way.
        norm_is_known: bool,
    },
}

/// As many sums of squares find room in one tensor, from which the host reads them at once. Qwen3-32B has 707 parameters.
const ROOM: usize = 1024;

/// The sums of a step's gradients over its micro-batches, and the squares for the norm.
#[derive(Debug)]
pub struct Gathered<B: Nvfp4Kernels> {
    sums: HashMap<ParamId, Gradient<B>>,
    /// The sums of squares of gradients, f32, with room for more than `count`.
    squares: Option<FloatTensor<B>>,
    /// How many gradients were measured since the norm was asked for.
    count: usize,
    /// The device's verdict on the gradients that were measured ([`Judged`]).
    verdict: Option<FloatTensor<B>>,
    dtype: DType,
}

impl<B: Nvfp4Kernels> Gathered<B> {
    /// No gradients yet. Sums of matrices are stored as `dtype`.
    pub fn new(dtype: DType) -> Self {
        Self { sums: HashMap::new(), squares: None, count: 0, verdict: None, dtype }
    }

    /// The global norm of the gradients that were measured since the last call; `None` if there were none.
    ///
    /// # Errors
    /// If the device fails.
    pub fn norm(&mut self) -> Result<Option<f32>, ModelError> {
        let Some(squares) = self.squares.take() else { return Ok(None) };
        let mut squares = to_host(Tensor::<B, 1>::from_primitive(TensorPrimitive::Float(squares)))?;
        squares.truncate(std::mem::take(&mut self.count));
        // The rounding of a sum depends on its order, and that of the gathered gradients is not the same in every process.
        squares.sort_by(f32::total_cmp);
        Ok(Some(squares.iter().map(|&s| f64::from(s)).sum::<f64>().sqrt() as f32))
    }

    /// Measures every sum.
    pub fn measure(&mut self) {
        let sums: Vec<_> = self.sums.values().cloned().collect();
        sums.into_iter().for_each(|sum| self.add_squares(sum));
    }

    fn add_squares(&mut self, gradient: Gradient<B>) {
        let grad = &gradient.values;
        let verdict = self.verdict(grad);
        // The optimizer has given its handle back, so that the device writes over the old verdict.
        self.verdict = None;
        let place = (self.room_for_squares(grad), self.count);
        let (squares, verdict) = B::square_sum(gradient, place, verdict);
        self.count += 1;
        self.squares = Some(squares);
        self.verdict = Some(verdict);
    }

    /// Takes out the sums of squares, which have room for one more.
    fn room_for_squares(&mut self, grad: &FloatTensor<B>) -> FloatTensor<B> {
        let room = || B::float_zeros(Shape::new([ROOM]), &B::float_device(grad), DType::F32.into());
        match self.squares.take() {
            None => room(),
            Some(squares) if self.count.is_multiple_of(ROOM) => B::float_cat(vec![squares, room()], 0),
            Some(squares) => squares,
        }
    }

    /// The verdict so far, on the device of a gradient.
    fn verdict(&mut self, grad: &FloatTensor<B>) -> FloatTensor<B> {
        let fine = || B::float_zeros(Shape::new([1]), &B::float_device(grad), DType::F32.into());
        self.verdict.get_or_insert_with(fine).clone()
    }

    /// Handles the gradient of a parameter as `fate` says. Returns the gradient to apply now, if any.
    pub fn settle(&mut self, id: ParamId, grad: Option<Gradient<B>>, fate: Fate) -> Option<(Judged<B>, Rate)> {
        let (gradient, first) = match (self.sums.remove(&id), grad) {
            (None, None) => return None,
            (Some(sum), None) => (sum, false),
            (None, Some(grad)) => (grad, true),
            (Some(sum), Some(grad)) => (Gradient::unmeasured(B::accumulated(sum.values, grad.values)), false),
        };
        match fate {
            Fate::Gather => {
                let narrow = first && gradient.values.shape().rank() > 1 && gradient.values.dtype() != self.dtype;
                let sum = if narrow {
                    Gradient::unmeasured(B::float_cast(gradient.values, self.dtype.into()))
                } else {
                    gradient
                };
                self.sums.insert(id, sum);
                None
            }
            Fate::Measure => {
                self.add_squares(gradient);
                None
            }
            Fate::Apply { rate, norm_is_known } => {
                let values = gradient.values.clone();
                if !norm_is_known {
                    self.add_squares(gradient);
                }
                let verdict = self.verdict(&values);
                Some((Judged { gradient: values, verdict }, rate))
            }
        }
    }
}

/// The gradients of a module's parameters after a backward.
#[derive(Default)]
pub struct ModuleGradients<B: Nvfp4Kernels> {
    /// The values. A parameter may have no gradient.
    pub values: GradientsParams,
    /// The sums of squares that products have left with them ([`Gradient::squares`]).
    squares: HashMap<ParamId, FloatTensor<B>>,
}

impl<B: Nvfp4Kernels> ModuleGradients<B> {
    /// Takes the gradients of a module's parameters out of those of a graph.
    pub fn of<AB>(module: &impl AutodiffModule<AB>, mut grads: AB::Gradients) -> Self
    where
        AB: TrainingBackend<InnerBackend = B>,
    {
        struct Squares<'a, AB: TrainingBackend> {
            grads: &'a mut AB::Gradients,
            taken: HashMap<ParamId, FloatTensor<AB::InnerBackend>>,
        }
        impl<AB: TrainingBackend> ModuleVisitor<AB> for Squares<'_, AB> {
            fn visit_float<const RANK: usize>(&mut self, param: &Param<Tensor<AB, RANK>>) {
                if let Some(squares) = AB::take_squares(self.grads, param.val()) {
                    self.taken.insert(param.id, squares);
                }
            }
        }
        let mut squares = Squares::<AB> { grads: &mut grads, taken: HashMap::new() };
        module.visit(&mut squares);
        let squares = squares.taken;
        Self { values: GradientsParams::from_grads(grads, module), squares }
    }

    fn take<const RANK: usize>(&mut self, id: ParamId) -> Option<Gradient<B>> {
        let values = self.values.remove::<B, RANK>(id)?.into_primitive().tensor();
        Some(Gradient { values, squares: self.squares.remove(&id) })
    }
}

/// Walks over tensors of a model, and handles the gradient of each.
pub struct Walk<'a, AB: TrainingBackend> {
    /// The gradients of a pass; tensors without one only have their sum.
    pub grads: ModuleGradients<AB::InnerBackend>,
    /// What happens to the gradients.
    pub fate: Fate,
    /// The sums.
    pub gathered: &'a mut Gathered<AB::InnerBackend>,
    /// The optimizer.
    pub optimizer: &'a mut ChunkedAdamw<AB::InnerBackend>,
    /// How the optimizer quantizes the master weights of linear layers that it updates, if it is to leave their codes.
    pub codes: Option<QuantizeSpec>,
}

impl<AB: TrainingBackend> Walk<'_, AB> {
    /// The same walk with an optimizer that leaves such codes.
    pub fn leaving(self, codes: Option<QuantizeSpec>) -> Self {
        Self { codes, ..self }
    }

    fn settle<const RANK: usize>(&mut self, id: ParamId) -> Option<(Judged<AB::InnerBackend>, Rate)> {
        let grad = self.grads.take::<RANK>(id);
        self.gathered.settle(id, grad, self.fate)
    }

    fn param<const RANK: usize>(&mut self, param: Param<Tensor<AB, RANK>>) -> Param<Tensor<AB, RANK>> {
        let Some((grad, rate)) = self.settle::<RANK>(param.id) else { return param };
        let (id, weight, mapper) = param.consume();
        let weight = self.optimizer.step(id, weight.inner(), grad, rate);
        Param::from_mapped_value(id, Tensor::from_inner(weight).require_grad(), mapper)
    }

    fn master(&mut self, MasterWeight { weight, codes }: MasterWeight<AB>) -> MasterWeight<AB> {
        let Some((grad, rate)) = self.settle::<2>(weight.id) else { return MasterWeight { weight, codes } };
        let (id, weight, mapper) = weight.consume();
        // As weights are, codes are updated in place only if the optimizer has their only handle.
        let held = codes.as_ref().map(AutodiffModule::valid);
        drop(codes);
        let (weight, codes) = self.optimizer.step_master(id, weight.inner(), held, self.codes, grad, rate);
        let weight = Param::from_mapped_value(id, Tensor::from_inner(weight).require_grad(), mapper);
        MasterWeight { weight, codes: codes.map(AutodiffModule::from_inner) }
    }
}

impl<AB: TrainingBackend> Replace<AB> for Walk<'_, AB> {
    fn vector(&mut self, p: Param<Tensor<AB, 1>>) -> Param<Tensor<AB, 1>> {
        self.param(p)
    }

    fn matrix(&mut self, p: Param<Tensor<AB, 2>>) -> Param<Tensor<AB, 2>> {
        self.param(p)
    }

    fn linear(&mut self, linear: Nvfp4Linear<AB>) -> Nvfp4Linear<AB> {
        match linear {
            Nvfp4Linear::Master(master) => Nvfp4Linear::Master(self.master(master)),
            Nvfp4Linear::Dense(p) => Nvfp4Linear::Dense(self.param(p)),
            packed @ Nvfp4Linear::Packed(_) => packed,
            Nvfp4Linear::PackedMaster(PackedMaster { gradient, mut weight }) => {
                if let Some((grad, rate)) = self.settle::<2>(gradient.id) {
                    let inner = weight.valid();
                    // The update is in place only if the optimizer has the only handle on the codes.
                    drop(weight);
                    weight = AutodiffModule::from_inner(self.optimizer.step_packed(gradient.id, inner, grad, rate));
                }
                Nvfp4Linear::PackedMaster(PackedMaster { gradient, weight })
            }
        }
    }
}
