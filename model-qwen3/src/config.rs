//! config.json of a dense Qwen3. Every field is checked here, so that no other code has to.

use crate::{ModelError, file::read_text, json};
use serde::Deserialize;
use std::path::{Path, PathBuf};

/// The shape of a Qwen3 model.
#[derive(Debug, Clone, PartialEq)]
pub struct Qwen3Config {
    /// Vocabulary size V.
    pub vocab_size: usize,
    /// Hidden size D.
    pub hidden_size: usize,
    /// MLP size F.
    pub intermediate_size: usize,
    /// Number of blocks.
    pub num_hidden_layers: usize,
    /// Number of query heads H.
    pub num_attention_heads: usize,
    /// Number of key and value heads G. H is a multiple of G.
    pub num_key_value_heads: usize,
    /// Head size E, which is even.
    pub head_dim: usize,
    /// The number that RMSNorm adds to the mean square.
    pub rms_norm_eps: f64,
    /// Base of the rotary angles (theta).
    pub rope_theta: f64,
    /// Longest sequence, in tokens.
    pub max_position_embeddings: usize,
    /// Whether the head is the embedding.
    pub tie_word_embeddings: bool,
    /// Ids that end a generation, if config.json names any.
    pub eos_token_ids: Vec<u32>,
    /// Standard deviation of random initial weights.
    pub initializer_range: f64,
}

/// A field with one id or several.
#[derive(Deserialize)]
#[serde(untagged)]
pub(crate) enum OneOrMany {
    One(u32),
    Many(Vec<u32>),
}

impl OneOrMany {
    pub(crate) fn into_vec(self) -> Vec<u32> {
        match self {
            Self::One(id) => vec![id],
            Self::Many(ids) => ids,
        }
    }
}

#[derive(Deserialize)]
struct RawConfig {
    model_type: String,
    vocab_size: f64,
    hidden_size: f64,
    intermediate_size: f64,
    num_hidden_layers: f64,
    num_attention_heads: f64,
    num_key_value_heads: Option<f64>,
    head_dim: Option<f64>,
    rms_norm_eps: Option<f64>,
    rope_theta: Option<f64>,
    rope_scaling: Option<serde_json::Value>,
    rope_parameters: Option<RopeParameters>,
    partial_rotary_factor: Option<f64>,
    max_position_embeddings: Option<f64>,
    tie_word_embeddings: Option<bool>,
    hidden_act: Option<String>,
    attention_bias: Option<bool>,
    use_sliding_window: Option<bool>,
    eos_token_id: Option<OneOrMany>,
    initializer_range: Option<f64>,
    quantization_config: Option<serde_json::Value>,
}

/// Rotary angles as newer files describe them.
#[derive(Default, Deserialize)]
struct RopeParameters {
    rope_theta: Option<f64>,
    rope_type: Option<String>,
    /// The same, in older files.
    #[serde(rename = "type")]
    older_type: Option<String>,
    partial_rotary_factor: Option<f64>,
    #[serde(flatten)]
    rest: std::collections::BTreeMap<String, serde_json::Value>,
}

/// Largest config.json that is read. That of Qwen3 has less than 1 KB; lists of quantized layers make it longer. Two bytes of it
/// may take two hundred in memory.
pub const LARGEST: u64 = 384 << 10;
/// Most tokens of a vocabulary or a context. Qwen3 has 151,936 and 262,144.
const MOST_TOKENS: f64 = 16_777_216.0;
/// Largest hidden size and MLP size. Qwen3-32B has 5,120 and 25,600; no product of three sizes overflows.
const WIDEST: f64 = 1_048_576.0;
/// Most layers. Qwen3-32B has 64; what is kept for each is small.
const MOST_LAYERS: f64 = 1024.0;
/// Most heads, and largest head size. Qwen3-32B has 64 heads of 128.
const MOST_HEADS: f64 = 4096.0;

impl Qwen3Config {
    /// Reads a config.json.
    ///
    /// # Errors
    /// If the file is missing, is not JSON, or does not describe a dense Qwen3.
    pub fn from_file(path: &Path) -> Result<Self, ModelError> {
        let hint =
            "put config.json beside the weights, or name its folder with --tokenizer if the command has that flag";
        let text = read_text(path, LARGEST, hint)?;
        Self::from_json(&text, path)
    }

    /// Parses the text of a config.json. `path` is for error messages.
    ///
    /// # Errors
    /// If it is not JSON, or does not describe a dense Qwen3.
    pub fn from_json(text: &str, path: &Path) -> Result<Self, ModelError> {
        let raw: RawConfig = json::read(text).map_err(|e| ModelError::parse(path, e))?;
        let check = Checker(path.to_owned());
        check.only("model_type", &raw.model_type, "qwen3", "only dense Qwen3 models are supported")?;
        if let Some(act) = &raw.hidden_act {
            check.only("hidden_act", act, "silu", "Qwen3 uses silu")?;
        }
        check.off("attention_bias", raw.attention_bias)?;
        check.off("use_sliding_window", raw.use_sliding_window)?;
        let transforms = raw.quantization_config.as_ref().map(|quantization| &quantization["transform_config"]);
        if let Some(transforms) = transforms.filter(|t| t.as_object().is_some_and(|t| !t.is_empty())) {
            return Err(check.bad(
                "transform_config",
                transforms,
                "the weights are those of a model with rotated activations, which is not supported; use the model without rotations",
            ));
        }
        let theta = rope_theta(&raw, &check)?;
        let heads = check.size("num_attention_heads", raw.num_attention_heads, MOST_HEADS)?;
        let hidden = check.size("hidden_size", raw.hidden_size, WIDEST)?;
        let config = Self {
            vocab_size: check.size("vocab_size", raw.vocab_size, MOST_TOKENS)?,
            hidden_size: hidden,
            intermediate_size: check.size("intermediate_size", raw.intermediate_size, WIDEST)?,
            num_hidden_layers: check.size("num_hidden_layers", raw.num_hidden_layers, MOST_LAYERS)?,
            num_attention_heads: heads,
            num_key_value_heads: raw
                .num_key_value_heads
                .map_or(Ok(heads), |k| check.size("num_key_value_heads", k, MOST_HEADS))?,
            // The default of Hugging Face, which does not depend on the hidden size.
            head_dim: raw.head_dim.map_or(Ok(128), |e| check.size("head_dim", e, MOST_HEADS))?,
            rms_norm_eps: check.positive("rms_norm_eps", raw.rms_norm_eps.unwrap_or(1e-6))?,
            rope_theta: check.positive("rope_theta", theta)?,
            max_position_embeddings: raw
                .max_position_embeddings
                .map_or(Ok(32_768), |m| check.size("max_position_embeddings", m, MOST_TOKENS))?,
            tie_word_embeddings: raw.tie_word_embeddings.unwrap_or(false),
            eos_token_ids: raw.eos_token_id.map_or_else(Vec::new, OneOrMany::into_vec),
            initializer_range: check.positive("initializer_range", raw.initializer_range.unwrap_or(0.02))?,
        };
        if heads % config.num_key_value_heads != 0 {
            let reason = format!("the {heads} query heads must be a multiple of it");
            return Err(check.bad("num_key_value_heads", config.num_key_value_heads, reason));
        }
        if !config.head_dim.is_multiple_of(2) {
            return Err(check.bad("head_dim", config.head_dim, "rotary angles need an even head size"));
        }
        for (field, size) in [
            ("hidden_size", config.hidden_size),
            ("intermediate_size", config.intermediate_size),
            ("num_attention_heads * head_dim", heads * config.head_dim),
        ] {
            if !size.is_multiple_of(16) {
                return Err(check.bad(field, size, "NVFP4 blocks need a multiple of 16; use another model"));
            }
        }
        Ok(config)
    }

    /// The first field that differs from that of another model and decides which weights fit, or what is computed with them.
    /// Returns its name, its value, and that of the other model.
    pub fn differs_from(&self, other: &Self) -> Option<(&'static str, String, String)> {
        let fields = |config: &Self| {
            [
                ("vocab_size", config.vocab_size.to_string()),
                ("hidden_size", config.hidden_size.to_string()),
                ("intermediate_size", config.intermediate_size.to_string()),
                ("num_hidden_layers", config.num_hidden_layers.to_string()),
                ("num_attention_heads", config.num_attention_heads.to_string()),
                ("num_key_value_heads", config.num_key_value_heads.to_string()),
                ("head_dim", config.head_dim.to_string()),
                ("tie_word_embeddings", config.tie_word_embeddings.to_string()),
                // GGUF files have these two in f32.
                ("rms_norm_eps", (config.rms_norm_eps as f32).to_string()),
                ("rope_theta", (config.rope_theta as f32).to_string()),
            ]
        };
        let mut pairs = fields(self).into_iter().zip(fields(other));
        pairs.find(|(ours, theirs)| ours != theirs).map(|((field, ours), (_, theirs))| (field, ours, theirs))
    }

    /// Number of parameters. A tied head counts once.
    pub fn num_params(&self) -> usize {
        let (d, e) = (self.hidden_size, self.head_dim);
        let (q, kv) = (self.num_attention_heads * e, self.num_key_value_heads * e);
        let block = 2 * d * q + 2 * d * kv + 3 * d * self.intermediate_size + 2 * d + 2 * e;
        let embeddings = if self.tie_word_embeddings { 1 } else { 2 };
        self.num_hidden_layers * block + embeddings * self.vocab_size * d + d
    }
}

/// The base of the rotary angles.
///
/// # Errors
/// If the angles are scaled, or two fields contradict each other.
fn rope_theta(raw: &RawConfig, check: &Checker) -> Result<f64, ModelError> {
    // Older files have `type`.
    let kind = |s: &serde_json::Value| s.get("rope_type").or_else(|| s.get("type")).cloned();
    let scaled = |s: &serde_json::Value| !s.is_null() && kind(s).is_none_or(|kind| kind != "default");
    if let Some(scaling) = raw.rope_scaling.as_ref().filter(|s| scaled(s)) {
        return Err(check.bad(
            "rope_scaling",
            scaling,
            "scaled rotary angles are not supported; use the model without rope_scaling",
        ));
    }
    let none = RopeParameters::default();
    let parameters = raw.rope_parameters.as_ref().unwrap_or(&none);
    for kind in [&parameters.rope_type, &parameters.older_type].into_iter().flatten() {
        check.only("rope_type", kind, "default", "scaled rotary angles are not supported")?;
    }
    if let Some((kind, value)) = parameters.rest.iter().find(|(_, value)| value.is_object()) {
        let reason = format!("{kind:?} has angles of its own; all layers of a dense Qwen3 have the same");
        return Err(check.bad("rope_parameters", value, reason));
    }
    for part in [raw.partial_rotary_factor, parameters.partial_rotary_factor].into_iter().flatten() {
        if part != 1.0 {
            return Err(check.bad("partial_rotary_factor", part, "Qwen3 rotates whole heads; it must be 1"));
        }
    }
    match (raw.rope_theta, parameters.rope_theta) {
        (Some(a), Some(b)) if a != b => {
            Err(check.bad("rope_theta", a, format!("rope_parameters says {b}; make both equal")))
        }
        (a, b) => Ok(a.or(b).unwrap_or(10_000.0)),
    }
}

struct Checker(PathBuf);

impl Checker {
    fn bad(&self, field: &'static str, value: impl ToString, reason: impl ToString) -> ModelError {
        let (value, reason) = (value.to_string(), reason.to_string());
        ModelError::Config { path: self.0.clone(), field, value, reason }
    }

    fn size(&self, field: &'static str, value: f64, largest: f64) -> Result<usize, ModelError> {
        if value.fract() == 0.0 && (1.0..=largest).contains(&value) {
            Ok(value as usize)
        } else {
            Err(self.bad(field, value, format!("it must be a whole number from 1 to {largest}")))
        }
    }

    fn positive(&self, field: &'static str, value: f64) -> Result<f64, ModelError> {
        if value.is_finite() && value > 0.0 {
            Ok(value)
        } else {
            Err(self.bad(field, value, "it must be a number above 0"))
        }
    }

    fn only(&self, field: &'static str, value: &str, wanted: &str, reason: &str) -> Result<(), ModelError> {
        if value == wanted { Ok(()) } else { Err(self.bad(field, format!("{value:?}"), reason)) }
    }

    fn off(&self, field: &'static str, value: Option<bool>) -> Result<(), ModelError> {
        if value == Some(true) {
            return Err(self.bad(field, true, "it must be false in a dense Qwen3"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"{"model_type":"qwen3","vocab_size":512,"hidden_size":64,"intermediate_size":192,
        "num_hidden_layers":3,"num_attention_heads":4,"num_key_value_heads":2,"head_dim":32,
        "rope_theta":1000000,"tie_word_embeddings":true,"eos_token_id":[1,2]}"#;

    fn parse(text: &str) -> Result<Qwen3Config, ModelError> {
        Qwen3Config::from_json(text, Path::new("config.json"))
    }

    #[test]
    fn both_spellings_of_theta_are_read_and_must_agree() {
        assert_eq!(parse(GOOD).unwrap().rope_theta, 1e6);
        let nested = GOOD.replace(
            "\"rope_theta\":1000000",
            "\"rope_parameters\":{\"rope_theta\":5000000.0,\"rope_type\":\"default\"}",
        );
        assert_eq!(parse(&nested).unwrap().rope_theta, 5e6);
        let both = GOOD.replace("\"rope_theta\":1000000", "\"rope_theta\":1,\"rope_parameters\":{\"rope_theta\":2}");
        assert!(parse(&both).unwrap_err().to_string().contains("rope_parameters says 2"));
    }

    #[test]
    fn impossible_values_are_refused_by_name() {
        for (from, to, field) in [
            ("\"hidden_size\":64", "\"hidden_size\":0", "hidden_size"),
            ("\"hidden_size\":64", "\"hidden_size\":-64", "hidden_size"),
            ("\"hidden_size\":64", "\"hidden_size\":1e18", "hidden_size"),
            ("\"hidden_size\":64", "\"hidden_size\":40", "hidden_size"),
            ("\"num_key_value_heads\":2", "\"num_key_value_heads\":3", "num_key_value_heads"),
            ("\"head_dim\":32", "\"head_dim\":33", "head_dim"),
            ("\"rope_theta\":1000000", "\"rope_theta\":0", "rope_theta"),
            ("qwen3\"", "llama\"", "model_type"),
            ("\"vocab_size\":512", "\"vocab_size\":512.5", "vocab_size"),
            ("\"vocab_size\":512", "\"vocab_size\":512,\"attention_bias\":true", "attention_bias"),
        ] {
            let error = parse(&GOOD.replace(from, to)).unwrap_err().to_string();
            assert!(error.contains(field), "{to}: {error}");
        }
        assert!(parse(&GOOD.replace("\"vocab_size\":512", "\"vocab_size\":512,\"vocab_size\":3")).is_err());
        assert!(parse("{").is_err());
    }

    /// The weights of a model whose activations another library rotates are of no use without the rotations.
    #[test]
    fn rotated_activations_are_refused() {
        let with = |value: &str| {
            let field = format!(r#""vocab_size":512,"quantization_config":{{"transform_config":{value}}}"#);
            parse(&GOOD.replace("\"vocab_size\":512", &field))
        };
        let error = with(r#"{"config_groups":{"u":{"type":"hadamard"}}}"#).unwrap_err().to_string();
        assert!(error.contains("transform_config") && error.contains("rotated"), "{error}");
        assert!(with("{}").is_ok() && with("null").is_ok());
        let neutral = GOOD.replace("\"vocab_size\":512", r#""vocab_size":512,"rope_scaling":{"type":"default"}"#);
        assert!(parse(&neutral).is_ok());
    }

    /// Every type of `ROPE_INIT_FUNCTIONS` in transformers but "default", in each spelling that its versions have written.
    #[test]
    fn scaled_rotary_angles_are_refused_by_name() {
        let with = |field: &str| parse(&GOOD.replace("\"vocab_size\":512", &format!("\"vocab_size\":512,{field}")));
        for kind in ["linear", "dynamic", "yarn", "longrope", "llama3", "proportional", "su", "mrope", "unheard-of"] {
            for field in [
                format!(r#""rope_scaling":{{"rope_type":"{kind}","type":"default","factor":4.0}}"#),
                format!(r#""rope_scaling":{{"rope_type":"{kind}","factor":4.0}}"#),
                format!(r#""rope_scaling":{{"type":"{kind}","factor":4.0}}"#),
            ] {
                let error = with(&field).unwrap_err().to_string();
                assert!(error.contains("rope_scaling") && error.contains(kind), "{field}: {error}");
            }
            for key in ["rope_type", "type"] {
                let field = format!(r#""rope_parameters":{{"{key}":"{kind}","factor":4.0,"rope_theta":1000000}}"#);
                let error = with(&field).unwrap_err().to_string();
                assert!(error.contains("rope_type") && error.contains(kind), "{field}: {error}");
            }
        }
        for (field, name) in [
            (r#""rope_scaling":"yarn""#, "rope_scaling"),
            (r#""rope_scaling":{"factor":2.0}"#, "rope_scaling"),
            (r#""rope_parameters":{"full_attention":{"rope_type":"yarn"}}"#, "full_attention"),
            (r#""partial_rotary_factor":0.5"#, "partial_rotary_factor"),
            (r#""rope_parameters":{"partial_rotary_factor":0.25}"#, "partial_rotary_factor"),
        ] {
            let error = with(field).unwrap_err().to_string();
            assert!(error.contains(name), "{field}: {error}");
        }
        for field in [
            r#""rope_scaling":null"#,
            r#""rope_scaling":{"rope_type":"default"}"#,
            r#""rope_parameters":{"rope_type":"default","type":"default"}"#,
            r#""rope_parameters":{"rope_type":"default","rope_theta":1000000,"partial_rotary_factor":1.0}"#,
            r#""partial_rotary_factor":1.0"#,
        ] {
            assert_eq!(with(field).unwrap(), parse(GOOD).unwrap(), "{field}");
        }
    }

    #[test]
    fn qwen3_4b_has_its_number_of_parameters() {
        let text = r#"{"model_type":"qwen3","vocab_size":151936,"hidden_size":2560,"intermediate_size":9728,
            "num_hidden_layers":36,"num_attention_heads":32,"num_key_value_heads":8,"head_dim":128,
            "tie_word_embeddings":true}"#;
        assert_eq!(parse(text).unwrap().num_params(), 4_022_468_096);
    }
}
