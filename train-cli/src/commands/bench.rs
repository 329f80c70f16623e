//! `bench`: which measurement is asked for; and `bench kernels`, which measures the times of kernels, and which share of the
//! device's own limit it reaches.

use crate::{
    CliError,
    args::{BenchArgs, BenchWhat},
    commands::bench_model,
    device::{self, Job},
    report,
    settings::CacheDtype,
};
use backend_nvfp4::{DeviceServices, Nvfp4Kernels, Precision, bench::Row};
use serde_json::json;

/// Runs the command.
///
/// # Errors
/// If a flag belongs to another measurement, or the device is missing, is the CPU, has no bf16 tensor cores, or fails.
pub fn run(args: BenchArgs) -> Result<(), CliError> {
    refuse_flags_of_others(&args)?;
    match args.what {
        BenchWhat::Kernels => {
            device::check_gpu(args.device)?;
            device::run(args.device, None, Kernels(args))
        }
        BenchWhat::Decode | BenchWhat::Prefill => bench_model::run(args),
    }
}

/// Refuses flags that would change nothing.
fn refuse_flags_of_others(args: &BenchArgs) -> Result<(), CliError> {
    let (kernels, decode) = (args.what == BenchWhat::Kernels, args.what == BenchWhat::Decode);
    let flags = [
        ("--filter", !args.filter.is_empty(), kernels, "bench kernels"),
        ("--matrix-ceiling", args.matrix_ceiling.is_some(), kernels, "bench kernels"),
        ("--config", args.config.is_some(), !kernels, "bench decode and bench prefill"),
        ("--context", args.context.is_some(), !kernels, "bench decode and bench prefill"),
        ("--w4a4", args.w4a4.is_some(), !kernels, "bench decode and bench prefill"),
        ("--head", args.head.is_some(), !kernels, "bench decode and bench prefill"),
        ("--kv-cache-dtype", args.kv_cache_dtype != CacheDtype::Auto, !kernels, "bench decode and bench prefill"),
        ("--batch-size", !args.batch_sizes.is_empty(), decode, "bench decode"),
    ];
    match flags.into_iter().find(|(_, given, taken, _)| *given && !taken) {
        Some((flag, _, _, of)) => Err(CliError::Usage(format!("{flag} is a flag of {of}; leave it out"))),
        None => Ok(()),
    }
}

struct Kernels(BenchArgs);

impl Job for Kernels {
    type Output = ();

    fn run<B: Nvfp4Kernels + DeviceServices>(self, device: B::Device, _: Precision) -> Result<(), CliError> {
        let Self(args) = self;
        report::label("tiers", B::tiers(&device).join(" · "));
        if !args.json {
            let head = ["kernel", "shape", "time", "rate", "share"];
            report::result(format!("{:<33} {:<38} {:>10} {:>13} {:>6}", head[0], head[1], head[2], head[3], head[4]));
        }
        // The first row is a copy. Its rate is the limit of kernels that are bound by memory.
        let mut copy_rate = None;
        let mut show = |row: Row| {
            let (rate, unit, ceiling) = match (row.bytes, row.operations) {
                (Some(bytes), _) => {
                    let rate = bytes / row.seconds / 1e9;
                    (rate, "GB/s", Some(*copy_rate.get_or_insert(rate)))
                }
                (None, operations) => (operations.unwrap_or(0.0) / row.seconds / 1e12, "TFLOP/s", args.matrix_ceiling),
            };
            let share = ceiling.map(|c| rate / c);
            let text = if args.json {
                let microseconds = row.seconds * 1e6;
                json!({
                    "kernel": row.name, "shape": row.shape, "microseconds": microseconds, "rate": rate, "unit": unit,
                    "share_of_ceiling": share,
                })
                .to_string()
            } else {
                let share = share.map_or("-".into(), |s| format!("{:.0} %", s * 100.0));
                let (time, rate) = (format!("{:.1} us", row.seconds * 1e6), format!("{rate:.0} {unit}"));
                format!("{:<33} {:<38} {time:>10} {rate:>13} {share:>6}", row.name, row.shape)
            };
            report::result(text);
        };
        let device_name = args.device.to_string();
        B::bench_kernels(&device, &args.filter, &mut show)
            .map_err(|e| CliError::Device { device: device_name, reason: e.to_string() })
    }
}
