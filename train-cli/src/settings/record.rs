//! The settings of a run as a record: a table by name, the text of a config file, and which settings differ between two records.

use crate::{
    CliError,
    settings::fields::{FREE, INPUTS, Settings},
};
use serde_json::{Map, Value};
use std::path::Path;

/// A setting that two records disagree about: its flag, and its value in each, if it has one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// The flag, for example `--learning-rate`.
    pub flag: String,
    /// The value before.
    pub before: Option<String>,
    /// The value now.
    pub now: Option<String>,
}

impl Settings {
    /// All settings by name, in the order of `--help`; null and empty lists are settings that are not given.
    pub(crate) fn table(&self) -> Map<String, Value> {
        self.try_table().expect("settings that came through a layer hold no path that is not UTF-8")
    }

    pub(super) fn try_table(&self) -> Result<Map<String, Value>, serde_json::Error> {
        serde_json::from_value(serde_json::to_value(self)?)
    }

    /// These settings with paths that mean the same from every working directory.
    #[must_use]
    pub fn absolute(&self) -> Self {
        let mut all = self.clone();
        // Only an empty path or an unknown working directory has no absolute form.
        all.paths().for_each(|(_, path)| *path = std::path::absolute(&*path).unwrap_or_else(|_| path.clone()));
        all
    }

    /// The settings as a config file.
    ///
    /// # Errors
    /// If TOML cannot hold a value.
    pub fn toml(&self) -> Result<String, CliError> {
        let given = |value: &Value| !value.is_null() && value.as_array().is_none_or(|list| !list.is_empty());
        let table: Map<String, Value> = self.table().into_iter().filter(|(_, value)| given(value)).collect();
        toml::to_string(&table).map_err(|e| CliError::Usage(format!("settings cannot be written as TOML: {e}")))
    }

    /// The first setting that changes what a run computes and differs from `before`.
    pub fn changed_since(&self, before: &Self) -> Option<Change> {
        let (before, now) = (before.table(), self.table());
        let shown = |table: &Map<String, Value>, key| {
            table.get(key).filter(|value: &&Value| !value.is_null()).map(ToString::to_string)
        };
        let key =
            now.keys().find(|key| !FREE.contains(&key.as_str()) && !is_same(key, now.get(*key), before.get(*key)))?;
        Some(Change { flag: flag(key), before: shown(&before, key), now: shown(&now, key) })
    }
}

/// Whether a setting is the same. An input may have another path than before.
fn is_same(key: &str, now: Option<&Value>, before: Option<&Value>) -> bool {
    let formats = |value: Option<&Value>| value.map(|value| formats(key, value));
    now == before || INPUTS.contains(&key) && formats(now) == formats(before)
}

/// Of a path or of several, what their contents do not say: the name of a file of rows tells its format.
fn formats(key: &str, value: &Value) -> Value {
    match value {
        Value::String(path) if key.ends_with("data") => {
            Path::new(path).extension().unwrap_or_default().to_string_lossy().to_lowercase().into()
        }
        Value::String(_) => "".into(),
        Value::Array(paths) => paths.iter().map(|path| formats(key, path)).collect(),
        other => other.clone(),
    }
}

/// Why a path that is not UTF-8 is refused, which `flag` names.
pub fn not_recordable(flag: &str, path: &Path) -> String {
    format!("{flag} {}: the path is not UTF-8, so that config.toml cannot record it; rename it", path.display())
}

/// The flag of a setting.
pub fn flag(key: &str) -> String {
    format!("--{}", key.replace('_', "-"))
}
