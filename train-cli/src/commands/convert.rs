//! `convert`: writes a model in another container or number format, one tensor at a time.

use crate::{
    CliError,
    args::{ContainerArg, ConvertArgs, WeightArg},
    durable,
    model_files::ModelFiles,
    outputs::check_output,
    report,
};
use backend_nvfp4::BlockShape;
use model_qwen3::{
    ModelError,
    bytes::FloatType,
    repack::{Repacked, StoreAs},
    tensors::Tensors,
    write::{write_dat, write_safetensors},
};

/// Runs the command.
///
/// # Errors
/// If the input is broken, the output is an input, or writing fails.
pub fn run(args: &ConvertArgs) -> Result<(), CliError> {
    let files = ModelFiles::new(&args.input);
    let source = files.open_weights()?;
    let mut inputs = files.weight_files();
    inputs.push(source.path().to_owned());
    check_output(&args.output, &inputs)?;
    let format = match args.dtype {
        WeightArg::Nvfp4 => {
            StoreAs::Nvfp4 { scaling: args.scales, head: true, block: BlockShape::Row, dense_from: usize::MAX }
        }
        WeightArg::F16 => StoreAs::Float(FloatType::F16),
        WeightArg::Bf16 => StoreAs::Float(FloatType::Bf16),
        WeightArg::F32 => StoreAs::Float(FloatType::F32),
    };
    let tensors = Repacked::new(&source, format);
    let sha256 = durable::write_file(&args.output, |out| {
        let failed = |e| ModelError::Io { path: args.output.clone(), source: e };
        match args.to {
            ContainerArg::Dat => write_dat(&tensors, None, out, failed).map(|_| ())?,
            ContainerArg::Safetensors => write_safetensors(&tensors, out, failed).map(|_| ())?,
        }
        Ok(())
    })?;
    let bytes = std::fs::metadata(&args.output).map_err(CliError::io(&args.output))?.len();
    let count = report::count(tensors.names().len(), "tensor");
    report::result(format!("{} · {count} · {bytes} bytes · sha256 {sha256}", args.output.display()));
    Ok(())
}
