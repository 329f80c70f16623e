//! How settings are put together: defaults, then a config file, then the flags that were typed. Each is a
//! [`Layer`], a table of some settings by name; a later layer wins.

use crate::{
    CliError,
    replaced::STEP_MODE,
    settings::{
        fields::{FREE, Settings},
        record::{flag, not_recordable},
    },
    toml_text,
};
use clap::{ArgMatches, Command, FromArgMatches, error::ErrorKind, parser::ValueSource};
use serde_json::{Map, Value};
use std::{path::Path, sync::LazyLock};

/// Largest config file that is read. It names every training file, and a folder may hold a hundred thousand.
const LARGEST: u64 = 64 << 20;

/// Some of the settings, by name.
#[derive(Debug, Clone, Default)]
pub struct Layer(Map<String, Value>);

impl Layer {
    /// The settings of a TOML file.
    ///
    /// # Errors
    /// If the file cannot be read, or a key is unknown or has a value of the wrong kind.
    pub fn of_file(path: &Path) -> Result<Self, CliError> {
        if path.extension().is_some_and(|extension| extension == "json") {
            let text = "--config names a TOML file with the settings of a run; a model's config.json is found beside the model, \
                        and --init-config starts from one with random weights";
            return Err(CliError::Usage(format!("{}: {text}", path.display())));
        }
        let text = model_qwen3::file::read_text(path, LARGEST, "--config names the file")?;
        Self::of_toml(&text).map_err(|reason| CliError::Usage(format!("{}: {reason}", path.display())))
    }

    /// The settings of a TOML text; an error names the key.
    pub(crate) fn of_toml(text: &str) -> Result<Self, String> {
        let mut table: Map<String, Value> = toml_text::parse(text)?;
        // The key's spelling in the files of older versions.
        if let Some(share) = table.remove("quantise_from") {
            table.entry("quantize_from").or_insert(share);
        }
        // A setting of older versions, of which one value is how every step is made today.
        if table.get("step_mode").and_then(Value::as_str) == Some("streaming") {
            table.remove("step_mode");
        }
        for (key, value) in &table {
            if key == "step_mode" {
                return Err(format!("step_mode = {value}: {STEP_MODE}"));
            }
            if OF_A_COMMAND.contains(&key.as_str()) {
                return Err(format!("{key} is no setting of a run; give {} on the command line", flag(key)));
            }
            if !DEFAULTS.iter().any(|(name, _)| name == key) {
                let hint = "settings are named as the long flags of `train-cli fit --help`, with `_` for `-`";
                return Err(format!("unknown setting `{key}`; {hint}"));
            }
            if !is_finite(value) {
                return Err(format!("{key}: the number must be finite"));
            }
            let alone = Value::Object(Map::from_iter([(key.clone(), value.clone())]));
            serde_json::from_value::<Settings>(alone).map_err(|e| format!("{key} = {value}: {}", in_words(&e)))?;
        }
        Ok(Self(table))
    }

    /// The settings that were typed as flags.
    ///
    /// # Errors
    /// If a number is not finite or a path is not UTF-8.
    pub fn of_flags(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let refused = |text: String| clap::Error::raw(ErrorKind::ValueValidation, text + "\n");
        let all = Settings::from_arg_matches(matches)?.try_table().map_err(|e| {
            let broken = |key: &str| matches.get_raw(key)?.find(|value| value.to_str().is_none());
            let named = DEFAULTS.iter().find_map(|(key, _)| Some(not_recordable(&flag(key), broken(key)?.as_ref())));
            refused(named.unwrap_or_else(|| e.to_string()))
        })?;
        let typed = |key: &str| matches.value_source(key) == Some(ValueSource::CommandLine);
        let table: Map<String, Value> = all.into_iter().filter(|(key, _)| typed(key)).collect();
        match table.iter().find(|(_, value)| !is_finite(value)) {
            Some((key, _)) => {
                let typed = matches.get_raw(key).into_iter().flatten().map(|text| text.to_string_lossy());
                let typed = typed.collect::<Vec<_>>().join(",");
                Err(refused(format!("{} {typed}: the number must be finite", flag(key))))
            }
            None => Ok(Self(table)),
        }
    }

    /// One setting by name.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(key)
    }

    /// Adds a setting, or replaces its value.
    pub fn set(&mut self, key: &str, value: impl Into<Value>) {
        self.0.insert(key.to_owned(), value.into());
    }

    /// This layer with `upper` over it.
    #[must_use]
    pub fn under(mut self, upper: Self) -> Self {
        // The two ways to name a model replace each other.
        if upper.0.contains_key("model") || upper.0.contains_key("init_config") {
            self.0.remove("model");
            self.0.remove("init_config");
        }
        self.0.extend(upper.0);
        self
    }

    /// Takes a setting out of this layer.
    pub fn remove(&mut self, key: &str) {
        self.0.remove(key);
    }

    /// This layer, with the settings that a resumed run may change as `last` has them.
    #[must_use]
    pub fn with_free_of(mut self, last: Self) -> Self {
        let is_free = |key: &str| FREE.contains(&key);
        self.0.retain(|key, _| !is_free(key));
        self.0.extend(last.0.into_iter().filter(|(key, _)| is_free(key)));
        self
    }

    /// All settings: those of this layer, and defaults for the others.
    ///
    /// # Errors
    /// If a value is of the wrong kind.
    pub fn over_defaults(self) -> Result<Settings, CliError> {
        serde_json::from_value(Value::Object(self.0)).map_err(|e| CliError::Usage(format!("settings: {e}")))
    }
}

/// What is wrong with a value, without the names of Rust's types.
fn in_words(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let Some((found, expected)) = text.split_once(", expected ") else { return text };
    let expected = match expected {
        "usize" | "u64" | "u32" | "u16" => "a whole number of at least 0",
        "f64" | "f32" => "a number",
        "a boolean" => "true or false",
        "a string" | "path string" => "a text",
        "a sequence" => "a list",
        other => other,
    };
    format!("{found}, expected {expected}")
}

/// Whether all numbers of a value are finite. JSON has no other numbers: they become null.
fn is_finite(value: &Value) -> bool {
    match value {
        Value::Array(values) => values.iter().all(is_finite),
        value => !value.is_null(),
    }
}

impl From<&Settings> for Layer {
    fn from(settings: &Settings) -> Self {
        Self(settings.table())
    }
}

/// Every setting with its default as a person would type it; empty if it has none.
static DEFAULTS: LazyLock<Vec<(String, String)>> = LazyLock::new(|| {
    let text = |value: Value| match value {
        Value::String(text) => text,
        Value::Null | Value::Array(_) => String::new(),
        other => other.to_string(),
    };
    Settings::default().table().into_iter().map(|(key, value)| (key, text(value))).collect()
});

/// Flags of `fit` that belong to a command and not to a run.
const OF_A_COMMAND: [&str; 5] = ["overwrite", "dry_run", "resume_from_checkpoint", "demo", "config"];

/// Adds the flags of all settings to a command, with the defaults of [`Settings`] in the help. A negative number is a value, which
/// the range of the setting refuses, and no unknown flag.
pub(crate) fn with_flags(command: Command) -> Command {
    <Settings as clap::Args>::augment_args(command).mut_args(|arg| {
        let takes_values = arg.get_action().takes_values();
        let arg = arg.allow_negative_numbers(takes_values);
        match DEFAULTS.iter().find(|(key, _)| key == arg.get_id().as_str()) {
            Some((_, default)) if default.is_empty() => arg.required(false),
            Some((_, default)) => arg.required(false).default_value(default.as_str()),
            None => arg,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_later_layer_wins_and_the_rest_is_default() {
        let file = Layer::of_toml("learning_rate = 1\nmodel = \"a\"\nval_split = 0.5").unwrap();
        let flags = Layer::of_toml("init_config = \"b\"\nlearning_rate = 0.25").unwrap();
        let all = file.under(flags).over_defaults().unwrap();
        assert_eq!((all.optimizer.learning_rate, all.data.val_split), (0.25, 0.5));
        assert_eq!((all.model.model, all.model.init_config), (None, Some("b".into())));
        assert_eq!(all.optimizer.batch_size, Settings::default().optimizer.batch_size);
    }

    #[test]
    fn a_flag_of_a_command_is_no_setting() {
        for key in OF_A_COMMAND {
            let said = Layer::of_toml(&format!("{key} = true")).unwrap_err();
            assert!(said.ends_with(&format!("give {} on the command line", flag(key))), "{said}");
        }
    }

    #[test]
    fn a_setting_that_older_runs_have_recorded_is_read() {
        let layer = Layer::of_toml("step_mode = \"streaming\"\nseed = 5").unwrap();
        assert_eq!(layer.0.keys().collect::<Vec<_>>(), ["seed"]);
    }

    #[test]
    fn an_unknown_key_and_a_value_of_the_wrong_kind_are_named() {
        for (text, said) in [
            ("step_mode = \"whole\"", "there is one way to make a step"),
            ("learning_rat = 1.0", "unknown setting `learning_rat`"),
            ("batch_size = \"two\"", "batch_size = \"two\": invalid type: string \"two\", expected a whole number"),
            ("batch_size = -1", "expected a whole number of at least 0"),
            ("batch_size = 1.5", "expected a whole number"),
            ("learning_rate = \"x\"", "expected a number"),
            ("packing = 1", "expected true or false"),
            ("data = \"a.tsv\"", "expected a list"),
            ("model = 3", "expected a text"),
            ("recipe = \"w5\"", "expected one of: bf16, w4"),
            ("learning_rate = nan", "learning_rate: the number must be finite"),
            ("optimizer_state_mode = \"nvfp4\"", "f32, int8, bf16, int4"),
        ] {
            let error = Layer::of_toml(text).unwrap_err();
            assert!(error.contains(said), "{error}");
        }
    }

    #[test]
    fn settings_come_back_from_their_own_toml() {
        let mut settings = Settings::default();
        settings.data.data = vec!["a.tsv".into(), "b.tsv".into()];
        settings.optimizer.max_steps = Some(7);
        let again = Layer::of_toml(&settings.toml().unwrap()).unwrap().over_defaults().unwrap();
        assert_eq!(again, settings);
    }
}
