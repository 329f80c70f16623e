//! Calls of tools in a message, and the tools of a conversation, checked. A chat template renders a value of the wrong type as
//! calls that nobody made.

use model_qwen3::json;
use serde_json::Value;

/// Checks the calls of tools in a message. OpenAI's clients send the arguments as text, Hugging Face's data holds an object. A call
/// without the key "function" is one itself.
///
/// # Errors
/// What is wrong.
pub fn check(calls: &Value) -> Result<(), String> {
    let Value::Array(calls) = calls else { return Err("its tool_calls must be a list".into()) };
    for call in calls {
        let function = call.get("function").unwrap_or(call);
        if !function["name"].is_string() {
            return Err("each of its tool_calls needs a \"function\" with a text as \"name\"".into());
        }
        if !matches!(function["arguments"], Value::Null | Value::String(_) | Value::Object(_)) {
            return Err("the arguments of its tool_calls must be a text or an object".into());
        }
        if !is_text_or_null(&call["id"]) {
            return Err("the id of each of its tool_calls must be a text".into());
        }
        if !call["type"].is_null() && call["type"] != "function" {
            return Err("the type of each of its tool_calls must be \"function\"".into());
        }
    }
    Ok(())
}

/// A list that a row holds as such or as its JSON text. None if it holds none.
///
/// # Errors
/// If it is no list.
pub fn list(value: Value, key: &str) -> Result<Option<Value>, String> {
    let value = match value {
        Value::String(text) if text.trim().is_empty() => Value::Null,
        Value::String(text) => json::parse(&text).map_err(|e| format!("{key:?} is not JSON: {e}"))?,
        other => other,
    };
    match value {
        Value::Null => Ok(None),
        Value::Array(_) => Ok(Some(value)),
        _ => Err(format!("{key:?} must be a list")),
    }
}

/// Whether a value is a text, or is not there.
pub fn is_text_or_null(value: &Value) -> bool {
    value.is_null() || value.is_string()
}
