//! `convert`: one container or number format to another, one tensor at a time.

use crate::{
    CliError,
    args::{ContainerArg, ConvertArgs, WeightArg},
    durable,
    model_files::ModelFiles,
    outputs::check_output,
    report,
};
use backend_nvfp4::Block;
use model_qwen3::{
    ModelError,
    checkpoint::{FloatType, Tensors},
    convert::{Converted, Target, write_dat, write_safetensors},
};

/// Runs the command.
///
/// # Errors
/// If the input is broken, the output is an input, or writing fails.
pub fn run(args: &ConvertArgs) -> Result<(), CliError> {
    let source = ModelFiles::new(&args.input).checkpoint()?;
    let mut inputs = vec![args.input.clone(), source.path().to_owned()];
    if args.input.is_dir() {
        let entries = std::fs::read_dir(&args.input).map_err(CliError::io(&args.input))?;
        inputs.extend(entries.filter_map(|e| e.ok().map(|e| e.path())));
    }
    check_output(&args.output, &inputs)?;
    let target = match args.dtype {
        WeightArg::Nvfp4 => {
            Target::Nvfp4 { scaling: args.scales, head: true, block: Block::Row, dense_from: usize::MAX }
        }
        WeightArg::F16 => Target::Float(FloatType::F16),
        WeightArg::Bf16 => Target::Float(FloatType::Bf16),
        WeightArg::F32 => Target::Float(FloatType::F32),
    };
    let view = Converted::new(&source, target);
    let sha256 = durable::write_file(&args.output, |out| {
        let failed = |e| ModelError::Io { path: args.output.clone(), source: e };
        match args.to {
            ContainerArg::Dat => write_dat(&view, None, out, failed).map(|_| ())?,
            ContainerArg::Safetensors => write_safetensors(&view, out, failed).map(|_| ())?,
        }
        Ok(())
    })?;
    let bytes = std::fs::metadata(&args.output).map_err(CliError::io(&args.output))?.len();
    report::result(format!(
        "{} · {} tensors · {bytes} bytes · sha256 {sha256}",
        args.output.display(),
        view.names().len()
    ));
    Ok(())
}
