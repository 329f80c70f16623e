//! Training inside Burn's Learner: the model's step, our learning strategy, its metrics and lines.
//!
//! What a step is stands in [`crate::train::step`]. Nothing is updated by a step whose loss is not finite, nor by one whose
//! gradient is not, where the norm is known before it is applied.

use crate::{
    CliError,
    data::order::{MicroBatch, Order},
    memory::pool::Pool,
    memory::vram::VramReport,
    report,
    settings::LossKind,
    train::damp::{self, DampedFinish},
    train::schedule::Schedule,
    train::step::{Stepped, Stepper},
};
use backend_nvfp4::{Nvfp4Backend, Recipe};
use burn::{
    data::dataloader::{DataLoader, Progress},
    module::{AutodiffModule, Module},
    optim::{GradientsParams, LearningRate, MultiGradientsParams, Optimizer, lr_scheduler::LrScheduler},
    tensor::{
        Tensor, TensorData,
        backend::{AutodiffBackend, Backend},
    },
    train::{
        EventProcessorTraining, InferenceStep, ItemLazy, Learner, LearnerEvent, LearnerSummary,
        LearningComponentsMarker, SupervisedLearningStrategy, SupervisedTraining, SupervisedTrainingEventProcessor,
        TrainLoader, TrainOutput, TrainStep, TrainingComponents, TrainingItem, TrainingStrategy, ValidLoader,
        logger::InMemoryMetricLogger,
        metric::{
            Adaptor, Metric, MetricAttributes, MetricDefinition, MetricId, MetricMetadata, MetricName, Numeric,
            NumericAttributes, NumericEntry, SerializedEntry,
        },
        renderer::{
            EvaluationName, EvaluationProgress, MetricState, MetricsRenderer, MetricsRendererEvaluation,
            MetricsRendererTraining, ProgressType, TrainingProgress,
        },
    },
};
use model_qwen3::{
    loss::{IGNORE, hidden_l1_sum, shifted_targets},
    model::{Context, Qwen3, ids_tensor},
    weights::to_host,
};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Instant,
};

/// A model, the loss it is trained with, and the blocks that are not trained.
#[derive(Module, Debug)]
pub struct Trainee<B: Backend> {
    /// The model.
    pub model: Qwen3<B>,
    #[module(skip)]
    loss: LossKind,
    #[module(skip)]
    frozen: usize,
}

/// The figures of a step or an evaluation. Plain numbers: metrics run on another thread.
#[derive(Debug, Clone, Default)]
pub struct StepReport {
    /// Optimizer step, from 1.
    pub step: usize,
    /// Mean loss a supervised token.
    pub loss: f32,
    /// Global gradient norm before clipping.
    pub grad_norm: f32,
    /// Learning rate.
    pub lr: f64,
    /// Tokens a second, padding not counted.
    pub tokens_per_second: f64,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// Seconds left.
    pub eta: f64,
    /// Blocks frozen on their codes.
    pub frozen_blocks: usize,
    /// Of an evaluation: the loss with quantised weights and nothing else quantised.
    pub quantised_loss: Option<f32>,
    /// Of an evaluation: the loss of the masters.
    pub master_loss: Option<f32>,
    /// What the device reported instead of a loss.
    failure: Option<String>,
}

impl ItemLazy for StepReport {
    type ItemSync = Self;

    fn sync(self) -> Self {
        self
    }
}

impl<B: Nvfp4Backend> Trainee<B> {
    /// Pairs a model with its loss; the first `frozen` blocks, and with them the embedding, are not trained.
    pub fn new(model: Qwen3<B>, loss: LossKind, frozen: usize) -> Self {
        Self { model, loss, frozen }
    }

    /// The first block that is trained; with it, or with 0 the embedding, the backward ends.
    pub fn first_trained(&self) -> usize {
        self.frozen
    }

    /// The loss of a batch: summed over supervised tokens, divided by the batch's divisor, `[1]`.
    pub fn batch_loss(&self, batch: &MicroBatch) -> Tensor<B, 1> {
        let (mut h, ctx) = self.begin(batch);
        for (i, block) in self.model.layers.iter().enumerate() {
            h = block.forward(h, &self.model.of_block(&ctx, i), None);
        }
        self.loss_of(h, batch)
    }

    /// What the first block gets: embedded tokens `[M, D]`, where they stand and what they see.
    pub fn begin(&self, batch: &MicroBatch) -> (Tensor<B, 2>, Context<B>) {
        let (model, device) = (&self.model, self.model.device());
        let ids =
            ids_tensor(&batch.padded(), model.config(), &device).expect("ids were checked against the vocabulary");
        (model.embed(ids), self.context(batch))
    }

    /// Where the tokens of a batch stand and what they see.
    pub fn context(&self, batch: &MicroBatch) -> Context<B> {
        let (positions, starts) = batch.places();
        self.model.context_of(0, batch.ids.len(), positions, starts)
    }

    /// The loss of the last block's output `[M, D]`.
    pub fn loss_of(&self, h: Tensor<B, 2>, batch: &MicroBatch) -> Tensor<B, 1> {
        let (model, device) = (&self.model, self.model.device());
        let (b, t) = (batch.ids.len(), batch.tokens_a_row());
        let targets = shifted_targets(&batch.ids, &batch.supervised, t);
        let hidden = model.final_norm(h);
        let sum = match self.loss {
            LossKind::CrossEntropy => {
                // Logits are V wide: only supervised positions get any.
                let kept: Vec<i32> = (0..b * t).filter(|&i| targets[i] != IGNORE).map(|i| i as i32).collect();
                let targets: Vec<i64> = targets.into_iter().filter(|&x| x != IGNORE).collect();
                if kept.is_empty() {
                    return Tensor::zeros([1], &device);
                }
                let rows = kept.len();
                let hidden = if rows == b * t {
                    hidden
                } else {
                    hidden.select(0, Tensor::from_data(TensorData::new(kept, [rows]), &device))
                };
                model.loss_sum(hidden, &targets)
            }
            LossKind::HiddenL1 => {
                let next: Vec<Vec<u32>> =
                    targets.chunks(t).map(|row| row.iter().map(|&x| x.max(0) as u32).collect()).collect();
                let next = ids_tensor(&next, model.config(), &device).expect("targets are ids");
                let next = model.embed(next).detach();
                let kept = targets.iter().map(|&x| if x == IGNORE { 0.0 } else { 1.0 }).collect();
                hidden_l1_sum(hidden, next, kept)
            }
        };
        sum / batch.divisor as f64
    }
}

fn read_loss<B: Backend>(loss: Tensor<B, 1>) -> StepReport {
    match to_host(loss) {
        Ok(values) => StepReport { loss: values[0], ..Default::default() },
        Err(e) => StepReport { failure: Some(e.to_string()), ..Default::default() },
    }
}

impl<B: AutodiffBackend + Nvfp4Backend> TrainStep for Trainee<B> {
    type Input = MicroBatch;
    type Output = StepReport;

    fn step(&self, batch: MicroBatch) -> TrainOutput<StepReport> {
        let loss = self.batch_loss(&batch);
        let report = read_loss(loss.clone().inner());
        TrainOutput::new(self, loss.backward(), report)
    }
}

impl<B: Nvfp4Backend> InferenceStep for Trainee<B> {
    type Input = MicroBatch;
    type Output = StepReport;

    fn step(&self, batch: MicroBatch) -> StepReport {
        read_loss(self.batch_loss(&batch))
    }
}

/// What happens between steps: logs, evaluation, checkpoints. `fit` fills it in.
pub trait Between<B: Nvfp4Backend>: Send {
    /// After a step that was applied.
    ///
    /// # Errors
    /// If something that must be written could not be.
    fn after_step(&mut self, report: &StepReport) -> Result<(), CliError>;

    /// Whether to evaluate after this step.
    fn evaluates(&self, step: usize) -> bool;

    /// After an evaluation.
    ///
    /// # Errors
    /// As above.
    fn after_evaluation(&mut self, model: &Qwen3<B>, report: &StepReport) -> Result<(), CliError>;

    /// After evaluation, if any: a checkpoint, if one is due or `forced`.
    ///
    /// # Errors
    /// As above.
    fn maybe_save(&mut self, model: &Qwen3<B>, stepper: &Stepper<B>, step: usize, forced: bool)
    -> Result<(), CliError>;
}

/// What a run needs besides the model.
pub struct Run<B: Nvfp4Backend> {
    /// Training samples in order.
    pub train: Order,
    /// Evaluation samples; may be empty.
    pub eval: Order,
    /// What steps are made of, with the optimizer and its states after a resume.
    pub stepper: Stepper<B>,
    /// The learning rate.
    pub schedule: Schedule,
    /// The recipe.
    pub recipe: Recipe,
    /// The step, counted from 0, from which on it quantises; before it nothing is quantised.
    pub quantise_from: usize,
    /// When blocks freeze on their codes.
    pub damped: DampedFinish,
    /// Bytes that may be held on the device after a step.
    pub memory_limit: Option<u64>,
    /// Steps between lines.
    pub logging_steps: usize,
    /// Memory report.
    pub vram: VramReport,
    /// Logs, evaluation, checkpoints.
    pub between: Box<dyn Between<B>>,
}

/// Trains through Burn's Learner and returns the model.
///
/// # Errors
/// If training diverged, the device failed, or something could not be written.
pub fn run<AB>(trainee: Trainee<AB>, run: Run<AB::InnerBackend>) -> Result<Qwen3<AB::InnerBackend>, CliError>
where
    AB: AutodiffBackend + Nvfp4Backend,
    AB::InnerBackend: Nvfp4Backend,
{
    let train: Arc<dyn DataLoader<AB, MicroBatch>> = Arc::new(run.train.clone());
    let valid: Arc<dyn DataLoader<AB::InnerBackend, MicroBatch>> = Arc::new(run.eval.clone());
    let idle = Idle;
    let lines = Lines { every: run.logging_steps, ..Lines::default() };
    let failure = Arc::new(Mutex::new(None));
    let strategy = Steps { run: Mutex::new(Some(run)), failure: failure.clone() };
    let training = figures().into_iter().fold(SupervisedTraining::new("", train, valid), |t, figure| {
        t.metric_train_numeric(figure.clone()).metric_valid_numeric(figure)
    });
    let result = training
        .with_metric_logger(InMemoryMetricLogger::default())
        .with_application_logger(None)
        .renderer(lines)
        .with_training_strategy(TrainingStrategy::Custom(Arc::new(strategy)))
        // The Learner's own optimizer and scheduler are never stepped; the strategy has ours.
        .launch(Learner::new(trainee, idle, 0.0f64));
    let failed = failure.lock().expect("no holder panics").take();
    failed.map_or(Ok(result.model.model), Err)
}

struct Steps<B: Nvfp4Backend> {
    run: Mutex<Option<Run<B>>>,
    failure: Arc<Mutex<Option<CliError>>>,
}

type Components<AB, LR, O> = LearningComponentsMarker<AB, LR, Trainee<AB>, O>;

impl<AB, LR, O> SupervisedLearningStrategy<Components<AB, LR, O>> for Steps<AB::InnerBackend>
where
    AB: AutodiffBackend + Nvfp4Backend,
    AB::InnerBackend: Nvfp4Backend,
    LR: LrScheduler + 'static,
    O: Optimizer<Trainee<AB>, AB> + 'static,
{
    fn fit(
        &self,
        components: TrainingComponents<Components<AB, LR, O>>,
        learner: Learner<Components<AB, LR, O>>,
        train: TrainLoader<Components<AB, LR, O>>,
        valid: ValidLoader<Components<AB, LR, O>>,
        _starting_epoch: usize,
    ) -> (Trainee<AB>, SupervisedTrainingEventProcessor<Components<AB, LR, O>>) {
        let mut events = components.event_processor;
        let mut net = Some(learner.model());
        // Else a second handle to every parameter lives on, and no update is in place.
        drop(learner);
        let run = self.run.lock().expect("no holder panics").take().expect("fit is called once");
        if let Err(error) = steps(&mut net, run, &*train, &*valid, &mut events) {
            *self.failure.lock().expect("no holder panics") = Some(error);
        }
        (net.take().expect("put back after each step"), events)
    }
}

/// The loop over steps.
fn steps<AB>(
    net: &mut Option<Trainee<AB>>,
    mut run: Run<AB::InnerBackend>,
    train: &dyn DataLoader<AB, MicroBatch>,
    valid: &dyn DataLoader<AB::InnerBackend, MicroBatch>,
    events: &mut impl EventProcessorTraining<LearnerEvent<StepReport>, LearnerEvent<StepReport>>,
) -> Result<(), CliError>
where
    AB: AutodiffBackend + Nvfp4Backend,
    AB::InnerBackend: Nvfp4Backend,
{
    let total = run.train.steps;
    let first = run.train.start;
    let started = Instant::now();
    let device = net.as_ref().expect("there").model.device();
    // What loading left behind.
    AB::memory_cleanup(&device);
    let mut pool = Pool::new(run.memory_limit);
    let (mut step, mut batches, mut step_started) = (first, Vec::new(), Instant::now());
    for batch in train.iter() {
        run.vram.note::<AB>(&device, step + 1, "batch_ready")?;
        let ends_step = batch.ends_step;
        batches.push(batch);
        if !ends_step {
            continue;
        }
        let batches = std::mem::take(&mut batches);
        let tokens: usize = batches.iter().flat_map(|b| &b.ids).map(Vec::len).sum();
        let lr = run.schedule.at(step);
        let recipe = if step < run.quantise_from { Recipe::Bf16 } else { run.recipe };
        if let Some(mut trainee) = net.take_if(|net| net.model.spec().recipe != recipe) {
            trainee.model = trainee.model.with_recipe(recipe);
            *net = Some(trainee);
        }
        let blocks = net.as_ref().expect("there").model.layers.len();
        let frozen_blocks = run.damped.frozen(step, blocks);
        // A resumed run finds those of earlier steps frozen.
        if frozen_blocks > step.checked_sub(1).map_or(0, |before| run.damped.frozen(before, blocks)) {
            let mut trainee = net.take().expect("there");
            trainee.model = damp::freeze(trainee.model, frozen_blocks, &mut run.stepper.optimizer);
            *net = Some(trainee);
        }
        step += 1;
        run.vram.note::<AB>(&device, step, "zero_grad_done")?;
        let (back, stepped) = run.stepper.step(net.take().expect("there"), &batches, step, lr, &mut run.vram);
        *net = Some(back);
        let Stepped { loss, grad_norm } = stepped?;
        run.vram.note::<AB>(&device, step, "optimizer_step_done")?;
        run.vram.write()?;
        let held = run.vram.held::<AB>(&device);
        let trimmed = pool.after_step::<AB>(&device, held);

        let elapsed = started.elapsed().as_secs_f64();
        let report = StepReport {
            step,
            loss,
            grad_norm,
            lr,
            tokens_per_second: tokens as f64 / step_started.elapsed().as_secs_f64(),
            memory_mib: held >> 20,
            eta: elapsed / (step - first) as f64 * (total - step) as f64,
            frozen_blocks,
            ..StepReport::default()
        };
        run.between.after_step(&report)?;
        events.process_train(LearnerEvent::ProcessedItem(item(report, total)));
        let model = net.as_ref().expect("there").valid();
        let evaluates = run.between.evaluates(step) && valid.num_items() > 0;
        if evaluates {
            let report = evaluation(&model, valid, step)?;
            run.between.after_evaluation(&model.model, &report)?;
            events.process_valid(LearnerEvent::ProcessedItem(item(report, total)));
        }
        // What other lengths left behind is gone now, and no reason to stop.
        let beyond = run.memory_limit.filter(|limit| held > *limit && !trimmed);
        run.between.maybe_save(&model.model, &run.stepper, step, beyond.is_some())?;
        if evaluates {
            // Evaluation, samples and a checkpoint leave buffers of other sizes behind.
            pool.give_back::<AB>(&device);
        }
        if let Some(limit) = beyond {
            let saved = Some(format!("stopped after step {step}, which is saved unless nothing is to be"));
            return Err(CliError::Memory { needed: held, limit, saved });
        }
        step_started = Instant::now();
    }
    events.process_train(LearnerEvent::EndEpoch(1));
    Ok(())
}

fn item(report: StepReport, total: usize) -> TrainingItem<StepReport> {
    let (step, lr) = (report.step, report.lr);
    TrainingItem::new(report, Progress::new(step, total), Progress::new(step, total), Some(step), Some(lr))
}

/// The loss as the run computes, and what the quantised and the unquantised weights give.
fn evaluation<B: Nvfp4Backend>(
    model: &Trainee<B>,
    valid: &dyn DataLoader<B, MicroBatch>,
    step: usize,
) -> Result<StepReport, CliError> {
    let mut report = evaluate(model, valid.iter(), step)?;
    let own = model.model.spec().recipe;
    let under = |recipe| -> Result<Option<f32>, CliError> {
        if own == recipe {
            return Ok(Some(report.loss));
        }
        let other = Trainee { model: model.model.clone().with_recipe(recipe), ..model.clone() };
        Ok(Some(evaluate(&other, valid.iter(), step)?.loss))
    };
    (report.quantised_loss, report.master_loss) = (under(Recipe::W4)?, under(Recipe::Bf16)?);
    Ok(report)
}

/// Mean loss over the evaluation samples.
fn evaluate<B: Nvfp4Backend>(
    model: &Trainee<B>,
    batches: impl Iterator<Item = MicroBatch>,
    step: usize,
) -> Result<StepReport, CliError> {
    let (mut sum, mut tokens) = (0.0f64, 0);
    let started = Instant::now();
    for batch in batches {
        tokens += batch.ids.iter().map(Vec::len).sum::<usize>();
        let out = InferenceStep::step(model, batch);
        if let Some(reason) = out.failure {
            return Err(CliError::Device { device: B::name(&model.model.device()), reason });
        }
        sum += f64::from(out.loss);
    }
    let tokens_per_second = tokens as f64 / started.elapsed().as_secs_f64();
    Ok(StepReport { step, loss: sum as f32, tokens_per_second, ..Default::default() })
}

/// The Learner wants an optimizer; the strategy steps with its own.
#[derive(Clone)]
struct Idle;

impl<M: AutodiffModule<AB>, AB: AutodiffBackend> Optimizer<M, AB> for Idle {
    type Record = ();

    fn step(&mut self, _: LearningRate, module: M, _: GradientsParams) -> M {
        module
    }

    fn step_multi(&mut self, _: LearningRate, module: M, _: MultiGradientsParams) -> M {
        module
    }

    fn to_record(&self) {}

    fn load_record(self, (): ()) -> Self {
        self
    }
}

/// One column of the progress lines, as a Burn metric.
#[derive(Clone)]
struct Figure {
    name: &'static str,
    pick: fn(&StepReport) -> f64,
    show: fn(f64) -> String,
    value: f64,
}

fn figures() -> Vec<Figure> {
    let figure = |name, pick, show| Figure { name, pick, show, value: 0.0 };
    vec![
        figure("loss", |r| f64::from(r.loss), |v| format!("{v:.4}")),
        figure("grad", |r| f64::from(r.grad_norm), |v| format!("{v:.3}")),
        figure("lr", |r| r.lr, |v| format!("{v:.2e}")),
        figure("tok/s", |r| r.tokens_per_second, report::short),
        figure("MiB", |r| r.memory_mib as f64, |v| format!("{v:.0}")),
        figure("eta", |r| r.eta, report::duration),
    ]
}

impl Adaptor<StepReport> for StepReport {
    fn adapt(&self) -> StepReport {
        self.clone()
    }
}

impl Metric for Figure {
    type Input = StepReport;

    fn name(&self) -> MetricName {
        Arc::new(self.name.to_owned())
    }

    fn attributes(&self) -> MetricAttributes {
        NumericAttributes { unit: None, higher_is_better: false }.into()
    }

    fn update(&mut self, report: &StepReport, _: &MetricMetadata) -> SerializedEntry {
        self.value = (self.pick)(report);
        SerializedEntry::new((self.show)(self.value), self.value.to_string())
    }

    fn clear(&mut self) {}
}

impl Numeric for Figure {
    fn value(&self) -> NumericEntry {
        NumericEntry::Value(self.value)
    }

    fn running_value(&self) -> NumericEntry {
        NumericEntry::Value(self.value)
    }
}

/// Burn's renderer as plain lines.
#[derive(Default)]
struct Lines {
    every: usize,
    names: HashMap<MetricId, String>,
    shown: HashMap<String, String>,
    header: bool,
}

impl Lines {
    fn take(&mut self, state: MetricState) {
        let (MetricState::Generic(entry) | MetricState::Numeric(entry, _)) = state;
        if let Some(name) = self.names.get(&entry.metric_id) {
            self.shown.insert(name.clone(), entry.serialized_entry.formatted);
        }
    }
}

impl MetricsRendererTraining for Lines {
    fn update_train(&mut self, state: MetricState) {
        self.take(state);
    }

    fn update_valid(&mut self, state: MetricState) {
        self.take(state);
    }

    fn render_train(&mut self, item: TrainingProgress, _: Vec<ProgressType>) {
        let (step, total) = (item.global_progress.items_processed, item.global_progress.items_total);
        let names = figures().into_iter().map(|f| f.name);
        if !std::mem::replace(&mut self.header, true) {
            let titles: String = names.clone().map(|n| format!("{n:>10}")).collect();
            report::line(format!("{:>11}{titles}", "step"));
        }
        if step % self.every.max(1) == 0 || step == 1 || step == total {
            let values: String = names.map(|n| format!("{:>10}", self.shown.get(n).map_or("", |v| v))).collect();
            report::line(format!("{:>11}{values}", format!("{step}/{total}")));
        }
    }

    fn render_valid(&mut self, item: TrainingProgress, _: Vec<ProgressType>) {
        let step = item.global_progress.items_processed;
        let loss = self.shown.get("loss").map_or("", |v| v);
        report::line(format!("{:>11}{loss:>10}  evaluation after step {step}", "eval"));
    }

    fn on_train_end(&mut self, _: Option<LearnerSummary>) -> Result<(), Box<dyn std::error::Error>> {
        Ok(())
    }
}

impl MetricsRendererEvaluation for Lines {
    fn update_test(&mut self, _: EvaluationName, state: MetricState) {
        self.take(state);
    }

    fn render_test(&mut self, _: EvaluationProgress, _: Vec<ProgressType>) {}
}

impl MetricsRenderer for Lines {
    fn manual_close(&mut self) {}

    fn register_metric(&mut self, definition: MetricDefinition) {
        self.names.insert(definition.metric_id, definition.name);
    }
}
