//! Reads TOML, which people write, within a limit of memory: a value of two bytes takes a hundred bytes there.

use model_qwen3::limits;
use serde::de::DeserializeOwned;

/// Reading may take this much memory, and so many bytes for each byte of the text. The settings of a run take a few kilobytes.
const MEMORY: usize = 64 << 20;
const MEMORY_PER_BYTE: usize = 2;

/// Reads a value of type `T` from TOML.
///
/// # Errors
/// If the text is not TOML, has no such value, or takes too much memory.
pub(crate) fn parse<T: DeserializeOwned + Send + 'static>(text: &str) -> Result<T, String> {
    let (memory, text) = (MEMORY + MEMORY_PER_BYTE * text.len(), text.to_owned());
    let parsed = limits::memory_within("TOML", memory, move || toml::from_str(&text).map_err(|e| e.to_string()));
    parsed.map_err(|limit| limit.to_string())?
}
