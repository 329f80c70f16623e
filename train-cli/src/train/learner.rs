//! Burn's Learner around the training loop: everything that Burn's traits ask for. The Learner starts the run, hands on the
//! micro-batches, processes the metrics and shows the progress lines; our strategy hands the model to
//! [`crate::train::training_loop`], which makes the steps.

use crate::{
    CliError,
    data::order::{MicroBatch, MicroBatches, Order},
    progress::{self, Line},
    report,
    train::evaluation::Evaluation,
    train::objective::Trainee,
    train::training_loop::{self, Event, Run, StepReport},
};
use backend_nvfp4::{Nvfp4Kernels, TrainingBackend};
use burn::{
    data::dataloader::{DataLoader, DataLoaderIterator, Progress},
    module::AutodiffModule,
    optim::{GradientsParams, LearningRate, MultiGradientsParams, Optimizer, lr_scheduler::LrScheduler},
    tensor::backend::{AutodiffBackend, Backend},
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
use model_qwen3::model::Qwen3;
use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

/// Trains through Burn's Learner and returns the model.
///
/// # Errors
/// If training diverges, the device fails, device memory exceeds the limit, or a file cannot be written.
pub fn run<AB: TrainingBackend>(
    trainee: Trainee<AB>,
    run: Run<AB::InnerBackend>,
) -> Result<Qwen3<AB::InnerBackend>, CliError> {
    let train: Arc<dyn DataLoader<AB, MicroBatch>> = Arc::new(run.train.clone());
    let valid: Arc<dyn DataLoader<AB::InnerBackend, MicroBatch>> = Arc::new(run.eval.clone());
    let shown = Line::steps(run.train.start, run.train.steps);
    progress::doing("the first step");
    // Only a device with a pool knows the peak of a step.
    let has_peak = AB::memory_in_use(&trainee.model().device()).is_some();
    let memory = if has_peak { "peak MiB" } else { "held MiB" };
    let lines = Lines {
        every: run.logging_steps,
        memory,
        names: HashMap::new(),
        shown: HashMap::new(),
        has_header: false,
        line: shown,
    };
    let failure = Arc::new(Mutex::new(None));
    let strategy = LoopStrategy { run: Mutex::new(Some(run)), failure: failure.clone() };
    let training = figures(memory).into_iter().fold(SupervisedTraining::new("", train, valid), |training, figure| {
        training.metric_train_numeric(figure.clone()).metric_valid_numeric(figure)
    });
    let result = training
        .with_metric_logger(InMemoryMetricLogger::default())
        .with_application_logger(None)
        .renderer(lines)
        .with_training_strategy(TrainingStrategy::Custom(Arc::new(strategy)))
        .launch(Learner::new(trainee, Idle, 0.0f64));
    let failed = failure.lock().expect("no holder panics").take();
    failed.map_or_else(|| Ok(result.model.into_model()), Err)
}

/// The learning strategy: runs the training loop.
struct LoopStrategy<B: Nvfp4Kernels> {
    run: Mutex<Option<Run<B>>>,
    failure: Arc<Mutex<Option<CliError>>>,
}

type Components<AB, LR, Inner> = LearningComponentsMarker<AB, LR, Trainee<AB>, Inner>;

impl<AB, LR, Inner> SupervisedLearningStrategy<Components<AB, LR, Inner>> for LoopStrategy<AB::InnerBackend>
where
    AB: TrainingBackend,
    LR: LrScheduler + 'static,
    Inner: Optimizer<Trainee<AB>, AB> + 'static,
{
    fn fit(
        &self,
        components: TrainingComponents<Components<AB, LR, Inner>>,
        learner: Learner<Components<AB, LR, Inner>>,
        train: TrainLoader<Components<AB, LR, Inner>>,
        _valid: ValidLoader<Components<AB, LR, Inner>>,
        _starting_epoch: usize,
    ) -> (Trainee<AB>, SupervisedTrainingEventProcessor<Components<AB, LR, Inner>>) {
        let mut events = components.event_processor;
        let mut trainee = learner.model();
        // The Learner has a second handle on every parameter, and with it no update would be in place.
        drop(learner);
        let run = self.run.lock().expect("no holder panics").take().expect("the Learner calls fit once");
        let total = run.train.steps;
        // The loop evaluates on `run.eval`, of which `valid` is a copy.
        let mut tell = |event| match event {
            Event::Step(report) => events.process_train(item(report.step, total, report.lr, report)),
            Event::Evaluation(evaluation) => events.process_valid(item(evaluation.step, total, 0.0, evaluation)),
        };
        match training_loop::train(&mut trainee, run, &mut *train.iter(), &mut tell) {
            Ok(()) => events.process_train(LearnerEvent::EndEpoch(1)),
            Err(error) => *self.failure.lock().expect("no holder panics") = Some(error),
        }
        (trainee, events)
    }
}

fn item<T>(step: usize, total: usize, lr: f64, figures: T) -> LearnerEvent<T> {
    let progress = Progress::new(step, total);
    LearnerEvent::ProcessedItem(TrainingItem::new(figures, progress.clone(), progress, Some(step), Some(lr)))
}

impl<B: Backend> DataLoader<B, MicroBatch> for Order {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<MicroBatch> + 'a> {
        Box::new(self.micro_batches())
    }

    fn num_items(&self) -> usize {
        self.steps
    }

    fn to_device(&self, _device: &B::Device) -> Arc<dyn DataLoader<B, MicroBatch>> {
        Arc::new(self.clone())
    }

    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<B, MicroBatch>> {
        Arc::new(Self { start, steps: end, ..self.clone() })
    }
}

impl DataLoaderIterator<MicroBatch> for MicroBatches<'_> {
    fn progress(&self) -> Progress {
        let (done, all) = self.handed_out();
        Progress::new(done, all)
    }
}

// The bounds of `SupervisedTraining` on a model name the types of its batches and figures through these two traits.
// Only Burn's own strategies call the methods.
impl<AB: TrainingBackend> TrainStep for Trainee<AB> {
    type Input = MicroBatch;
    type Output = StepReport;

    fn step(&self, _: MicroBatch) -> TrainOutput<StepReport> {
        unreachable!("the training loop makes the steps")
    }
}

impl<B: Backend> InferenceStep for Trainee<B> {
    type Input = MicroBatch;
    type Output = Evaluation;

    fn step(&self, _: MicroBatch) -> Evaluation {
        unreachable!("the training loop evaluates")
    }
}

impl ItemLazy for StepReport {
    type ItemSync = Self;

    fn sync(self) -> Self {
        self
    }
}

impl ItemLazy for Evaluation {
    type ItemSync = Self;

    fn sync(self) -> Self {
        self
    }
}

/// The optimizer that the Learner asks for. It does nothing: the training loop has its own.
#[derive(Clone)]
struct Idle;

impl<Net: AutodiffModule<AB>, AB: AutodiffBackend> Optimizer<Net, AB> for Idle {
    type Record = ();

    fn step(&mut self, _: LearningRate, module: Net, _: GradientsParams) -> Net {
        module
    }

    fn step_multi(&mut self, _: LearningRate, module: Net, _: MultiGradientsParams) -> Net {
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

/// The columns; `memory` is the title of that of memory.
fn figures(memory: &'static str) -> Vec<Figure> {
    let figure = |name, pick, show| Figure { name, pick, show, value: 0.0 };
    vec![
        figure("loss", |r| f64::from(r.loss), |v| format!("{v:.4}")),
        figure("grad", |r| f64::from(r.grad_norm), |v| format!("{v:.3}")),
        figure("lr", |r| r.lr, |v| format!("{v:.2e}")),
        figure("tok/s", |r| r.tokens_per_second, report::short),
        figure(memory, |r| r.peak_memory_mib.unwrap_or(r.memory_mib) as f64, |v| format!("{v:.0}")),
        figure("eta", |r| r.eta.unwrap_or(f64::NAN), time_left),
    ]
}

/// The time that is left, or a dash as long as it is not known.
fn time_left(seconds: f64) -> String {
    if seconds.is_nan() { "–".to_owned() } else { report::duration(seconds) }
}

impl Adaptor<StepReport> for StepReport {
    fn adapt(&self) -> StepReport {
        self.clone()
    }
}

/// The line of an evaluation shows its loss only.
impl Adaptor<StepReport> for Evaluation {
    fn adapt(&self) -> StepReport {
        StepReport { loss: self.loss, ..StepReport::default() }
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
struct Lines {
    /// Steps between lines.
    every: usize,
    /// The title of the column of memory.
    memory: &'static str,
    names: HashMap<MetricId, String>,
    /// The latest text of each metric.
    shown: HashMap<String, String>,
    has_header: bool,
    /// What a terminal shows below the lines.
    line: Line,
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
        let names = figures(self.memory).into_iter().map(|f| f.name);
        if !std::mem::replace(&mut self.has_header, true) {
            let titles: String = names.clone().map(|n| format!("{n:>10}")).collect();
            report::line(format!("{:>11}{titles}", "step"));
        }
        if step % self.every.max(1) == 0 || step == 1 || step == total {
            let values: String = names.map(|n| format!("{:>10}", self.shown.get(n).map_or("", |v| v))).collect();
            report::line(format!("{:>11}{values}", format!("{step}/{total}")));
        }
        self.line.set(step);
        progress::doing(&format!("{} left", self.shown.get("eta").map_or("–", |eta| eta)));
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
