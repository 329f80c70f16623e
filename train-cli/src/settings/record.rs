//! The settings of a run as a record: a table by name, the text of a config file, and which settings differ between two records.

use crate::{
    CliError,
    settings::fields::{FREE, INPUTS, Settings},
};
use serde_json::{Map, Value};
use std::{ffi::OsStr, path::Path};

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

/// Whether a setting is the same. A file or a folder may have another path than before, because its content is compared. But the
/// name of a file of rows may tell its format.
fn is_same(key: &str, now: Option<&Value>, before: Option<&Value>) -> bool {
    let kind = |path: &Value| {
        let extension = Path::new(path.as_str().unwrap_or_default()).extension();
        extension.filter(|_| key.ends_with("data")).map(OsStr::to_ascii_lowercase)
    };
    match (now, before) {
        (Some(Value::String(_)), Some(Value::String(_))) if INPUTS.contains(&key) => now.map(kind) == before.map(kind),
        (Some(Value::Array(now)), Some(Value::Array(before))) if INPUTS.contains(&key) => {
            now.iter().map(kind).eq(before.iter().map(kind))
        }
        _ => now == before,
    }
}

/// The flag of a setting.
pub fn flag(key: &str) -> String {
    format!("--{}", key.replace('_', "-"))
}
