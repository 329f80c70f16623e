//! The short test of a device: its quantizer and the products of each of its tiers (`products.rs`), attention (`attention.rs`),
//! and a model's new tokens (`answers.rs`). Which kernel computes something follows from the number format and from the operands,
//! so that each tier is tested by itself.

use super::{
    answers, attention,
    checked::Checked,
    products::{self, Rows},
};
use crate::{
    CliError,
    device::{self, Job},
    settings::DeviceChoice,
};
use backend_nvfp4::{DeviceServices, Nvfp4Kernels, Precision};
use burn::tensor::DType;
use std::time::Instant;

/// Runs the tests on a device: those in f32 everywhere, and on a card with tensor cores those in bf16.
pub(super) fn tested(device: DeviceChoice) -> Vec<Checked> {
    let formats: &[Precision] = match device {
        DeviceChoice::Cuda(_) => &[Precision::F32, Precision::Bf16],
        _ => &[Precision::F32],
    };
    let one = |format: &Precision| match device::run(device, Some(*format), Test) {
        Ok(tests) => tests.into_iter().map(|test| test.check(device)).collect(),
        Err(error) => vec![Checked::missing(device.to_string(), error.to_string(), REPORT)],
    };
    formats.iter().flat_map(one).collect()
}

const REPORT: &str = "do not train on this device; report this, with the output of train-cli doctor --json";

/// The result of one test.
struct Tested {
    what: &'static str,
    /// What the results are compared with.
    with: &'static str,
    wrong: Option<String>,
    seconds: f64,
}

impl Tested {
    /// Runs a test against the reference. It says what is wrong.
    fn of(what: &'static str, test: impl FnOnce() -> Result<Option<String>, CliError>) -> Result<Self, CliError> {
        Self::against("the reference", what, test)
    }

    /// Runs a test. It says what is wrong.
    fn against(
        with: &'static str,
        what: &'static str,
        test: impl FnOnce() -> Result<Option<String>, CliError>,
    ) -> Result<Self, CliError> {
        let begun = Instant::now();
        let wrong = test()?;
        Ok(Self { what, with, wrong, seconds: begun.elapsed().as_secs_f64() })
    }

    fn check(self, device: DeviceChoice) -> Checked {
        let (name, time) = (format!("{device} {}", self.what), format!("{:.2} s", self.seconds));
        match self.wrong {
            None => Checked::good(name, format!("agrees with {} · {time}", self.with)),
            Some(wrong) => Checked::missing(name, format!("{wrong} · {time}"), REPORT),
        }
    }
}

/// The tests of one number format.
struct Test;

impl Job for Test {
    type Output = Vec<Tested>;

    fn run<B: Nvfp4Kernels + DeviceServices>(
        self,
        device: B::Device,
        precision: Precision,
    ) -> Result<Vec<Tested>, CliError> {
        let product = |m, rows, out| products::product::<B>(&device, precision, m, rows, out);
        if precision == Precision::F32 {
            return Ok(vec![
                Tested::of("quantizer", || products::quantizer::<B>(&device))?,
                Tested::of("portable product", || product(32, Rows::Any, DType::F32))?,
                Tested::of("portable gradients", || products::gradients::<B>(&device, precision, 32))?,
                Tested::of("portable attention", || attention::of_documents::<B>(&device, precision))?,
            ]);
        }
        if !B::tiers(&device).iter().any(|tier| tier.contains("tensor cores")) {
            return Ok(vec![]);
        }
        Ok(vec![
            Tested::of("tensor cores", || product(32, Rows::Any, DType::F32))?,
            Tested::of("gradients", || products::gradients::<B>(&device, precision, 32))?,
            Tested::of("few rows (decode)", || product(8, Rows::NewestTokens, precision.dtype()))?,
            Tested::of("both in NVFP4", || product(32, Rows::Packed, DType::F32))?,
            Tested::of("attention", || attention::of_documents::<B>(&device, precision))?,
            Tested::of("attention over a cache", || attention::of_the_newest_token::<B>(&device, precision))?,
            Tested::against("a prompt", "token by token", || answers::token_by_token::<B>(&device, precision))?,
        ])
    }
}
