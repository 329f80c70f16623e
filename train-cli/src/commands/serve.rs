//! `serve`: answers over HTTP, as OpenAI's interface does.

use super::flags;
use crate::{
    CliError,
    args::ServeArgs,
    device::{self, Job},
    model_files::ModelFiles,
    report,
    serve::{Address, Server},
    talk::{
        answer,
        first_answers::Expected,
        loaded::{Loaded, Opened},
    },
};
use backend_nvfp4::{DeviceServices, Nvfp4Kernels, PAGE, Precision};
use model_qwen3::file;
use std::path::Path;

/// Least bytes of a key.
const SHORTEST_KEY: usize = 32;

/// Runs the command.
///
/// # Errors
/// If the address or the key is refused, or the model cannot be loaded or run.
pub fn run(args: ServeArgs) -> Result<(), CliError> {
    if args.parallel == 0 {
        return Err(CliError::Usage("--parallel 0: at least one answer must be made at a time".into()));
    }
    if args.model_name.as_ref().is_some_and(|name| name.trim().is_empty()) {
        return Err(CliError::Usage("--model-name: the name is empty; give one, or leave out the flag".into()));
    }
    let key = args.api_key_file.as_deref().map(key_of).transpose()?;
    // An address that is taken is known before a model is loaded.
    let server = Server::listen(Address { host: args.host, port: args.port, key })?;
    device::run(args.model.device, args.model.compute_dtype, Serve { args, server })
}

struct Serve {
    args: ServeArgs,
    server: Server,
}

impl Job for Serve {
    type Output = ();

    fn remedy(&self) -> &'static str {
        "give a smaller --context, --parallel or --kv-cache-tokens, or --kv-cache-dtype fp8"
    }

    fn run<B: Nvfp4Kernels + DeviceServices>(self, device: B::Device, precision: Precision) -> Result<(), CliError> {
        let Self { args, server } = self;
        let opened = Opened::new(flags::wanted(&args.model, args.cache.kv_cache_dtype.format(precision)?))?;
        let context = flags::context(args.context, opened.config().max_position_embeddings)?;
        let tokens = cache_tokens(&args, context)?;
        let expected = Expected::unknown(args.parallel);
        let Loaded { model, text, .. } = opened.load::<B>(Some(expected), precision, &device)?;
        let name = match args.model_name {
            Some(name) => name,
            None => ModelFiles::new(&args.model.model).name(),
        };
        let address = server.address()?;
        let engine = server.start(text.clone(), name.clone(), model.config().vocab_size, context)?;
        let (answers, each) = (report::count(args.parallel, "answer"), report::count(context, "token"));
        report::label("serves", format!("{name} · {answers} at once, {each} each, {tokens} together"));
        answer::say_defaults(&text, None);
        let ready = || report::line(format!("listening at http://{address}"));
        engine.run(&model, &text, tokens, args.parallel, ready)
    }
}

/// The most tokens of a cache: no memory holds more, and sizes in bytes do not overflow.
const MOST_CACHED: usize = 1 << 30;

/// The tokens of all prompts and answers that the cache holds.
///
/// # Errors
/// If a context does not fit.
fn cache_tokens(args: &ServeArgs, context: usize) -> Result<usize, CliError> {
    let all = args.parallel.saturating_mul(context.next_multiple_of(PAGE));
    let tokens = args.kv_cache_tokens.unwrap_or(all);
    if tokens > MOST_CACHED {
        let flag = if args.kv_cache_tokens.is_some() { "--kv-cache-tokens" } else { "--parallel times --context is" };
        return Err(CliError::Usage(format!(
            "{flag} {tokens}: the cache holds at most {MOST_CACHED} tokens; give fewer"
        )));
    }
    if tokens < context {
        return Err(CliError::Usage(format!(
            "--kv-cache-tokens {tokens}: a prompt and its answer may have {context} tokens; give at least {context}, or a smaller \
             --context"
        )));
    }
    Ok(tokens)
}

/// Most bytes of a file with a key. A key has some dozens, and every request is compared with it.
const LONGEST_KEY: u64 = 4096;

/// The key in a file that nobody else may read.
fn key_of(path: &Path) -> Result<String, CliError> {
    let bad = |reason: String| CliError::Usage(format!("--api-key-file {}: {reason}", path.display()));
    let text = file::read_text(path, LONGEST_KEY, "check the path").map_err(CliError::of_flag("--api-key-file"))?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = std::fs::metadata(path).map_err(CliError::io(path))?.permissions().mode();
        if mode & 0o077 != 0 {
            return Err(bad(format!("others may read it (mode {:o}); chmod 600 it", mode & 0o777)));
        }
    }
    match file::without_mark(&text).trim() {
        key if key.len() < SHORTEST_KEY => {
            Err(bad(format!("the key has {} bytes; at least {SHORTEST_KEY} are needed", key.len())))
        }
        key if !key.bytes().all(|b| b.is_ascii_graphic()) => {
            Err(bad("the key must be one word of ASCII characters".into()))
        }
        key => Ok(key.to_owned()),
    }
}
