//! `inspect`: what is in a file, and with `--verify` whether all of it can be used.

use crate::{CliError, args::InspectArgs, durable, model_files::ModelFiles, report};
use backend_nvfp4::{Scaling, reference};
use model_qwen3::{
    ModelError,
    checkpoint::{Checkpoint, Stored, Tensors, row_count, row_width},
};
use serde_json::{Value, json};

/// Runs the command.
///
/// # Errors
/// If the file is broken.
pub fn run(args: &InspectArgs) -> Result<(), CliError> {
    let manifest = args.path.join(durable::MANIFEST);
    if args.verify && manifest.exists() {
        durable::verify(&args.path)?;
    }
    let checkpoint = ModelFiles::new(&args.path).checkpoint()?;
    if !args.json {
        let head = ["key", "id", "dtype", "shape", "offset", "bytes"];
        report::result(format!(
            "{:<60} {:>3} {:<9} {:>14} {:>13} {:>12}",
            head[0], head[1], head[2], head[3], head[4], head[5]
        ));
    }
    for row in containers(&checkpoint) {
        if args.json {
            report::result(row.to_string());
        } else {
            report::result(format!(
                "{:<60} {:>3} {:<9} {:>14} {:>13} {:>12}",
                text(&row["key"]),
                row["type_id"].as_u64().map_or("-".into(), |i| i.to_string()),
                text(&row["dtype"]),
                row["shape"].as_array().map_or(String::new(), |d| d
                    .iter()
                    .map(ToString::to_string)
                    .collect::<Vec<_>>()
                    .join("x")),
                row["offset"].to_string(),
                row["bytes"].to_string()
            ));
        }
    }
    let (mut values, mut packed) = (0usize, 0usize);
    for name in checkpoint.names() {
        let Some(stored) = checkpoint.stored(&name) else { continue };
        let count: usize = stored.shape().iter().product();
        values += count;
        if let Stored::Packed { rows, cols, scaling } = stored {
            packed += count;
            let q = checkpoint.read_packed(&name)?;
            let statistics = scales(&name, &q, rows, cols, scaling);
            if args.verify {
                check(&checkpoint, &name, &q)?;
            }
            if args.json {
                report::result(statistics.to_string());
            } else {
                report::result(format!(
                    "{name}: {rows}x{cols} NVFP4, scales {:.4e}..{:.4e}, zero blocks {}, tensor scale {}",
                    statistics["scale_min"].as_f64().unwrap_or(0.0),
                    statistics["scale_max"].as_f64().unwrap_or(0.0),
                    statistics["zero_blocks"],
                    statistics["tensor_scale"]
                ));
            }
        } else if args.verify {
            // Some rows at a time; values that are not finite are refused by the reader.
            let shape = stored.shape();
            let step = ((1 << 21) / row_width(&shape).max(1)).max(1);
            for start in (0..row_count(&shape)).step_by(step) {
                checkpoint.read_rows(&name, start..(start + step).min(row_count(&shape)))?;
            }
        }
    }
    let summary = json!({
        "tensors": checkpoint.names().len(), "values": values, "nvfp4_values": packed, "verified": args.verify,
    });
    if args.json {
        report::result(summary.to_string());
    } else {
        let verified = if args.verify { " · verified" } else { "" };
        report::result(format!(
            "{} tensors · {values} values, {packed} of them NVFP4{verified}",
            checkpoint.names().len()
        ));
    }
    Ok(())
}

/// One row for each entry of the container.
fn containers(checkpoint: &Checkpoint) -> Vec<Value> {
    if let Some(dat) = checkpoint.dat() {
        let row = |e: &model_qwen3::dat::DatEntry| json!({"key": e.key, "type_id": e.element.id(), "dtype": e.element.name(), "shape": e.dims, "offset": e.offset, "bytes": e.bytes});
        return dat.entries().iter().map(row).collect();
    }
    let row = |e: &model_qwen3::safetensors::SafeEntry| json!({"key": e.name, "type_id": null, "dtype": format!("{:?}", e.dtype), "shape": e.shape, "offset": e.offset, "bytes": e.bytes});
    checkpoint.shards().iter().flat_map(|f| f.entries().iter().map(row)).collect()
}

fn scales(name: &str, q: &reference::Packed, rows: usize, cols: usize, scaling: Scaling) -> Value {
    let values = q.scales.iter().map(|&b| reference::e4m3_decode(b) * q.global);
    let (mut low, mut high) = (f32::MAX, 0.0f32);
    values.clone().filter(|v| v.is_finite()).for_each(|v| (low, high) = (low.min(v), high.max(v)));
    json!({
        "tensor": name, "rows": rows, "cols": cols, "scale_min": low, "scale_max": high,
        "zero_blocks": q.scales.iter().filter(|&&b| b == 0).count(),
        "tensor_scale": (scaling == Scaling::Two).then_some(q.global),
    })
}

fn check(checkpoint: &Checkpoint, name: &str, q: &reference::Packed) -> Result<(), CliError> {
    let bad = |reason: String| {
        let path = checkpoint.path().to_owned();
        CliError::Model(ModelError::Weights { path, reason: format!("{name:?}: {reason}") })
    };
    if let Some(at) = q.scales.iter().position(|&b| b >= 0x7F) {
        return Err(bad(format!(
            "scale byte {:#04x} at block {at}: block scales are finite and not negative",
            q.scales[at]
        )));
    }
    if !(q.global.is_finite() && q.global >= 0.0) {
        return Err(bad(format!("tensor scale {}: it is finite and not negative", q.global)));
    }
    Ok(())
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}
