//! `inspect`: lists what a model's file holds. With `--verify` it also reads every byte and checks that it can be used.

use crate::{
    CliError, args::InspectArgs, durable, model_files::ModelFiles, report, run::located::located, table::Table,
    wrapping,
};
use backend_nvfp4::{Packed, Scaling, reference};
use model_qwen3::{
    container::Container,
    dat::DatEntry,
    safetensors::SafeEntry,
    tensors::{Stored, Tensors, row_ranges},
};
use serde_json::{Value, json};

/// Runs the command.
///
/// # Errors
/// If the file is broken.
pub fn run(args: &InspectArgs) -> Result<(), CliError> {
    let files = located("PATH", &args.path)?;
    if args.verify {
        check_manifest(&files)?;
    }
    let container = Container::open(&files.weights)?;
    list(&container, args.json);
    let (mut values, mut packed) = (0, 0);
    for name in container.names() {
        let Some(stored) = container.stored(&name) else { continue };
        let count = stored.shape().iter().product::<usize>();
        values += count;
        match stored {
            Stored::Packed { rows, cols, scaling } => {
                packed += count;
                let q = container.read_packed(&name)?;
                show_scales(&scales(&name, &q, [rows, cols], scaling), args.json);
            }
            Stored::Dense { shape, .. } if args.verify => {
                // Reading refuses values that are not finite. Of a packed tensor, `read_packed` has refused damaged scales.
                row_ranges(&shape, 1 << 21).try_for_each(|rows| container.read_rows(&name, rows).map(|_| ()))?;
            }
            Stored::Dense { .. } => {}
        }
    }
    let tensors = container.names().len();
    report::result(if args.json {
        let summary = json!({"tensors": tensors, "values": values, "nvfp4_values": packed, "verified": args.verify});
        summary.to_string()
    } else {
        let verified = if args.verify { " · verified" } else { "" };
        let tensors = report::count(tensors, "tensor");
        format!("{tensors} · {values} values, {packed} of them NVFP4{verified}")
    });
    Ok(())
}

/// Compares a folder with its manifest, or a file with that of its folder, if there is one.
fn check_manifest(files: &ModelFiles) -> Result<(), CliError> {
    if files.weights.join(durable::MANIFEST).exists() {
        return durable::verify(&files.weights);
    }
    if files.weights.is_dir() || !durable::is_listed_folder(&files.folder) {
        return Ok(());
    }
    let own = files.weights.file_name().unwrap_or_default().to_string_lossy();
    durable::verify_listed(&files.folder, |name| name == own)
}

/// Prints one row for each entry of the container.
fn list(container: &Container, json: bool) {
    let rows = rows(container);
    if json {
        return rows.iter().for_each(|row| report::result(row.to_string()));
    }
    let cells = rows.iter().map(|row| {
        let text = |key: &str| row[key].as_str().map_or_else(|| row[key].to_string(), str::to_owned);
        let id = row["type_id"].as_u64().map_or("-".into(), |id| id.to_string());
        let shape: Vec<String> = row["shape"].as_array().into_iter().flatten().map(Value::to_string).collect();
        vec![text("key"), id, text("dtype"), shape.join("x"), text("offset"), text("bytes")]
    });
    let table = Table::new(&["key", "id", "dtype", "shape", "offset", "bytes"], cells).with_numbers(&[1, 3, 4, 5]);
    report::result(table.text(report::width()));
}

fn rows(container: &Container) -> Vec<Value> {
    let of_dat = |e: &DatEntry| {
        json!({
            "key": e.key, "type_id": e.element.id(), "dtype": e.element.name(), "shape": e.dims, "offset": e.offset,
            "bytes": e.bytes,
        })
    };
    let of_safe = |e: &SafeEntry| {
        json!({
            "key": e.name, "type_id": null, "dtype": format!("{:?}", e.dtype), "shape": e.shape, "offset": e.offset,
            "bytes": e.bytes,
        })
    };
    match container.dat() {
        Some(dat) => dat.entries().iter().map(of_dat).collect(),
        None => container.shards().iter().flat_map(|f| f.entries().iter().map(of_safe)).collect(),
    }
}

/// Statistics of an NVFP4 tensor's scales.
fn scales(name: &str, q: &Packed, [rows, cols]: [usize; 2], scaling: Scaling) -> Value {
    let values = q.scales.iter().map(|&b| reference::e4m3_decode(b) * q.global);
    let (mut low, mut high) = (f32::MAX, 0.0f32);
    values.filter(|v| v.is_finite()).for_each(|v| (low, high) = (low.min(v), high.max(v)));
    json!({
        "tensor": name, "rows": rows, "cols": cols, "scale_min": low, "scale_max": high,
        "zero_blocks": q.scales.iter().filter(|&&b| b == 0).count(),
        "tensor_scale": (scaling == Scaling::Two).then_some(q.global),
    })
}

fn show_scales(row: &Value, json: bool) {
    if json {
        return report::result(row.to_string());
    }
    let number = |key: &str| row[key].as_f64().unwrap_or(0.0);
    let text = format!(
        "{}: {}x{} NVFP4, scales {:.4e} to {:.4e}, zero blocks {}, tensor scale {}",
        row["tensor"].as_str().unwrap_or_default(),
        row["rows"],
        row["cols"],
        number("scale_min"),
        number("scale_max"),
        row["zero_blocks"],
        row["tensor_scale"]
    );
    report::result(wrapping::lines(&text, report::width()));
}
