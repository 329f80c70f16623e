//! The streaming pass: forward and backward of a micro-batch, block by block. The forward keeps the input of each
//! block and no graph. The backward goes from the last block to the first, reruns each block from its input, and gives
//! the block's gradients away before the next block has any. So one block's activations and gradients live at a time.
//!
//! Where there is memory, the forward keeps the graphs of the last blocks too, which then need not run again. The numbers
//! are the same.
//!
//! Shape letters are those of [`crate`].

#![allow(non_snake_case)] // Shapes are part of names, as in the model.

use crate::{
    CliError, data::order::MicroBatch, train::gradients::ModuleGradients, train::objective::Trainee, train::pass::Pass,
    watchdog,
};
use backend_nvfp4::{Nvfp4Kernels, TrainingBackend, segment_sum};
use burn::{
    module::AutodiffModule,
    tensor::{DType, Tensor},
};
use model_qwen3::{
    model::{Block, Context},
    weights::Replace,
};

impl<B: Nvfp4Kernels> Pass<'_, B> {
    /// Forward and backward block by block. Returns the loss.
    ///
    /// # Errors
    /// If the loss is not finite or the device fails.
    pub fn streaming<AB>(&mut self, net: &mut Trainee<AB>, batch: &MicroBatch) -> Result<f32, CliError>
    where
        AB: TrainingBackend<InnerBackend = B>,
    {
        let forward = Forward::of(net, batch, self.kept);
        self.backward(net, batch, forward)
    }

    /// The loss and the backward of a micro-batch whose blocks have run forward. Returns the loss.
    ///
    /// # Errors
    /// If the loss is not finite or the device fails.
    pub fn backward<AB>(
        &mut self,
        net: &mut Trainee<AB>,
        batch: &MicroBatch,
        forward: Forward<AB>,
    ) -> Result<f32, CliError>
    where
        AB: TrainingBackend<InnerBackend = B>,
    {
        let Forward { context, traces, h_MD } = forward;
        let HeadPass { loss, dy_MD, tied_VD } = match self.head(net, batch, h_MD) {
            Ok(head) => head,
            Err(error) => {
                // A device that has failed computes no backward.
                if matches!(error, CliError::Diverged { .. }) {
                    release(net, traces);
                }
                return Err(error);
            }
        };
        let dx_MD = self.blocks(net, &context, traces, dy_MD)?;
        self.embedding(net, batch, dx_MD, tied_VD);
        self.note(net, "backward_done")?;
        Ok(loss)
    }

    /// The loss and the backward of final norm and head.
    fn head<AB>(
        &mut self,
        net: &mut Trainee<AB>,
        batch: &MicroBatch,
        h_MD: Tensor<B, 2>,
    ) -> Result<HeadPass<B>, CliError>
    where
        AB: TrainingBackend<InnerBackend = B>,
    {
        let h_MD = Tensor::<AB, 2>::from_inner(h_MD).require_grad();
        let loss_graph = net.head_loss(h_MD.clone(), batch);
        let loss = match self.finite_loss(loss_graph.clone().inner()) {
            Err(error @ CliError::Diverged { .. }) => {
                // Burn frees what a graph holds in its backward only.
                drop(loss_graph.backward());
                return Err(error);
            }
            loss => loss?,
        };
        let mut grads = loss_graph.backward();
        let dy_MD = h_MD.grad_remove(&mut grads).expect("the loss depends on the last block's output");
        let mut grads = ModuleGradients::of(&*net, grads);
        let tied_VD = grads.values.remove(net.model().embed_tokens.id);
        let mut walk = self.walk(grads);
        net.update(|mut model| {
            model.norm = walk.vector(model.norm);
            model.lm_head = model.lm_head.map(|head| walk.linear(head));
            model
        });
        self.note(net, "head_done")?;
        Ok(HeadPass { loss, dy_MD, tied_VD })
    }

    /// The backward of the trained blocks, last to first. Returns the gradient of the first one's input.
    fn blocks<AB>(
        &mut self,
        net: &mut Trainee<AB>,
        context: &Context<AB>,
        traces: Vec<Trace<AB>>,
        mut dy_MD: Tensor<B, 2>,
    ) -> Result<Tensor<B, 2>, CliError>
    where
        AB: TrainingBackend<InnerBackend = B>,
    {
        for (nth, trace) in traces.into_iter().enumerate().rev() {
            let i = net.first_trained() + nth;
            let block = &net.model().layers[i];
            // A block that runs again quantizes its weights anew, so that its codes need no memory meanwhile.
            let (graph, codes) = match trace {
                Trace::Input(x_MD) => (Graph::of(block, x_MD, &net.model().of_block(context, i)), None),
                Trace::Graph(graph) => (graph, net.model().codes_of_block(i)),
            };
            let (grads, dx_MD) = graph.backward(block, dy_MD);
            dy_MD = dx_MD;
            self.note(net, &format!("block_{i}_gradients"))?;
            net.update_block(i, |block| self.walk(grads).leaving(codes).block(block));
            self.note(net, &format!("block_{i}_done"))?;
        }
        Ok(dy_MD)
    }

    /// The backward of the embedding, unless it is frozen; `tied_VD` is its gradient as the head.
    fn embedding<AB>(
        &mut self,
        net: &mut Trainee<AB>,
        batch: &MicroBatch,
        dx_MD: Tensor<B, 2>,
        tied_VD: Option<Tensor<B, 2>>,
    ) where
        AB: TrainingBackend<InnerBackend = B>,
    {
        let embedding = &net.model().embed_tokens;
        if !embedding.val().is_require_grad() {
            return;
        }
        let mut grads = ModuleGradients::default();
        grads.values.register(embedding.id, embedding_gradient(batch, dx_MD, tied_VD, embedding.dims()));
        net.update(|mut model| {
            model.embed_tokens = self.walk(grads).matrix(model.embed_tokens);
            model
        });
    }
}

/// What the blocks leave for the backward once they have run forward.
pub struct Forward<AB: TrainingBackend> {
    /// Its tables are made on the host while the device waits, so the forward and the backward share one context.
    context: Context<AB>,
    /// One for each trained block.
    traces: Vec<Trace<AB>>,
    /// The last block's output.
    h_MD: Tensor<AB::InnerBackend, 2>,
}

/// What the backward of the head gives.
struct HeadPass<B: Nvfp4Kernels> {
    loss: f32,
    /// The gradient of the last block's output.
    dy_MD: Tensor<B, 2>,
    /// The gradient of the embedding, where it is the head too.
    tied_VD: Option<Tensor<B, 2>>,
}

/// What the forward of a block leaves for its backward.
enum Trace<AB: TrainingBackend> {
    /// The block's input, from which the block is run again.
    Input(Tensor<AB::InnerBackend, 2>),
    /// The graph of the block.
    Graph(Graph<AB>),
}

/// The graph of one block, from its input to its output.
struct Graph<AB: TrainingBackend> {
    x_MD: Tensor<AB, 2>,
    y_MD: Tensor<AB, 2>,
}

impl<AB: TrainingBackend> Graph<AB> {
    /// Runs a block.
    fn of(block: &Block<AB>, x_MD: Tensor<AB::InnerBackend, 2>, context: &Context<AB>) -> Self {
        let x_MD = Tensor::<AB, 2>::from_inner(x_MD).require_grad();
        Self { y_MD: block.forward(x_MD.clone(), context), x_MD }
    }

    /// Differentiates the block. Returns the gradients of its parameters and of its input.
    fn backward(
        self,
        block: &Block<AB>,
        dy_MD: Tensor<AB::InnerBackend, 2>,
    ) -> (ModuleGradients<AB::InnerBackend>, Tensor<AB::InnerBackend, 2>) {
        let mut grads = AB::backward_from(self.y_MD, dy_MD);
        let dx_MD = self.x_MD.grad_remove(&mut grads).expect("a block's output depends on its input");
        (ModuleGradients::of(block, grads), dx_MD)
    }
}

impl<AB: TrainingBackend> Forward<AB> {
    /// Runs the blocks. The last `kept` ones leave their graphs. A GPU may still be computing when this returns.
    pub fn of(net: &Trainee<AB>, batch: &MicroBatch, kept: usize) -> Self {
        let context = net.context(batch);
        let blocks = net.model().layers.len();
        let first_kept = blocks.saturating_sub(kept).max(net.first_trained());
        // This second handle on every parameter must end with the forward, or no update would be in place.
        let plain = net.valid();
        let plain_context = context.inner();
        let mut h_MD = plain.embedded(batch);
        let mut traces = Vec::new();
        for (i, block) in plain.model().layers.iter().enumerate().take(first_kept) {
            watchdog::moved();
            if i >= net.first_trained() {
                traces.push(Trace::Input(h_MD.clone()));
            }
            h_MD = block.forward(h_MD, &plain.model().of_block(&plain_context, i));
        }
        for i in first_kept..blocks {
            watchdog::moved();
            let graph = Graph::of(&net.model().layers[i], h_MD, &net.model().of_block(&context, i));
            h_MD = graph.y_MD.clone().inner();
            traces.push(Trace::Graph(graph));
        }
        Self { context, traces, h_MD }
    }
}

/// Frees the graphs of a pass that ends before its backward, which is the only thing that frees them.
fn release<AB: TrainingBackend>(net: &Trainee<AB>, traces: Vec<Trace<AB>>) {
    let blocks = &net.model().layers[net.first_trained()..];
    for (trace, block) in traces.into_iter().zip(blocks) {
        if let Trace::Graph(graph) = trace {
            let none = graph.y_MD.clone().inner().zeros_like();
            drop(graph.backward(block, none));
        }
    }
}

/// The gradient of the embedding, f32 `[V, D]`: each token's row of `dy_MD` is added to the row of its id, on top of
/// the gradient that the embedding has as the head. Tokens of one id are summed first, in order, as a whole graph sums
/// them, so that both agree bit for bit.
fn embedding_gradient<B: Nvfp4Kernels>(
    batch: &MicroBatch,
    dy_MD: Tensor<B, 2>,
    tied_VD: Option<Tensor<B, 2>>,
    [vocabulary, features]: [usize; 2],
) -> Tensor<B, 2> {
    let ids: Vec<u32> = batch.padded().into_iter().flatten().collect();
    let none = || Tensor::zeros([vocabulary, features], (&dy_MD.device(), DType::F32));
    segment_sum(tied_VD.unwrap_or_else(none), &ids, dy_MD)
}
