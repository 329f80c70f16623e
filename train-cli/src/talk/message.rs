//! Messages that somebody sends, checked. A chat template renders a value of the wrong type as nothing, or as text that nobody
//! wrote, and the answer would be one to another conversation. So every key of a message must be known and have its type.

use crate::data::tool_calls::{self, is_text_or_null};
use serde_json::{Map, Value};

/// Most messages of a conversation.
const MOST: usize = 1000;

/// The messages of a conversation as chat templates read them: content in parts is joined, the role `developer` is `system`,
/// and keys without a value are left out.
///
/// # Errors
/// What is wrong with which message. The first one is message 1.
pub fn checked_messages(messages: Vec<Value>) -> Result<Vec<Value>, String> {
    if messages.is_empty() || messages.len() > MOST {
        return Err(format!("{} messages; from 1 to {MOST} are taken", messages.len()));
    }
    let numbered = messages.into_iter().enumerate();
    numbered.map(|(i, message)| checked(message).map_err(|e| format!("message {}: {e}", i + 1))).collect()
}

fn checked(message: Value) -> Result<Value, String> {
    let Value::Object(mut message) = message else { return Err("a message is an object".into()) };
    let role = match message.remove("role").as_ref().and_then(Value::as_str) {
        Some("developer") => "system".to_owned(),
        Some(role @ ("system" | "user" | "assistant" | "tool")) => role.to_owned(),
        Some(role) => {
            return Err(format!("the role {role:?} is none of system, developer, user, assistant and tool"));
        }
        None => return Err("it has no role".into()),
    };
    let content = match message.remove("content") {
        Some(Value::String(text)) => text,
        Some(Value::Array(parts)) => joined(&parts)?,
        None | Some(Value::Null) if role == "assistant" && message.contains_key("tool_calls") => String::new(),
        _ => return Err("its content must be a text, or a list of texts".into()),
    };
    let mut found = Map::new();
    found.insert("role".into(), role.into());
    found.insert("content".into(), content.into());
    for key in ["reasoning_content", "name", "tool_calls"] {
        let Some(value) = message.remove(key).filter(|value| !value.is_null()) else { continue };
        if key == "tool_calls" {
            tool_calls::check(&value)?;
        } else if !value.is_string() {
            return Err(format!("its {key} must be a text"));
        }
        found.insert(key.into(), value);
    }
    // Templates do not read the id of a call.
    if message.remove("tool_call_id").is_some_and(|id| !is_text_or_null(&id)) {
        return Err("its tool_call_id must be a text".into());
    }
    // Clients send answers back with all keys that they know, most of them empty.
    let empty = |value: &Value| value.is_null() || value.as_array().is_some_and(Vec::is_empty);
    if let Some((key, _)) = message.iter().find(|(_, value)| !empty(value)) {
        return Err(format!("the key {key:?} of a message is not known here"));
    }
    Ok(Value::Object(found))
}

/// The text of content that comes in parts.
fn joined(parts: &[Value]) -> Result<String, String> {
    let text = |part: &Value| match (part["type"].as_str(), part["text"].as_str()) {
        (Some("text"), Some(text)) => Ok(text.to_owned()),
        (kind, _) => Err(format!("content of the type {:?}; this model reads text", kind.unwrap_or("none"))),
    };
    parts.iter().map(text).collect()
}

#[cfg(test)]
mod tests {
    use super::checked_messages;
    use serde_json::{Value, json};

    #[test]
    fn messages_become_what_templates_read() {
        let call = json!({"id": "call_0", "type": "function", "function": {"name": "add", "arguments": "{\"a\": 1}"}});
        let sent = vec![
            json!({"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}),
            json!({"role": "user", "content": "c", "name": "Kim"}),
            json!({"role": "assistant", "content": null, "tool_calls": [call], "refusal": null, "annotations": []}),
            json!({"role": "tool", "content": "2", "tool_call_id": "call_0"}),
            json!({"role": "assistant", "content": "d", "reasoning_content": "e", "tool_calls": null}),
        ];
        let expected = vec![
            json!({"role": "system", "content": "ab"}),
            json!({"role": "user", "content": "c", "name": "Kim"}),
            json!({"role": "assistant", "content": "", "tool_calls": [call]}),
            json!({"role": "tool", "content": "2"}),
            json!({"role": "assistant", "content": "d", "reasoning_content": "e"}),
        ];
        assert_eq!(checked_messages(sent).unwrap(), expected);
    }

    #[test]
    fn a_wrong_message_is_named() {
        let good = json!({"role": "user", "content": "a"});
        let with = |key: &str, value: Value| {
            let mut message = json!({"role": "assistant", "content": "a"});
            message[key] = value;
            message
        };
        for (bad, reason) in [
            (json!(1), "an object"),
            (json!({"content": "a"}), "no role"),
            (with("role", json!("robot")), "\"robot\""),
            (with("role", json!(1)), "no role"),
            (with("content", json!(1)), "content"),
            (with("content", json!([{"type": "image_url"}])), "image_url"),
            (with("name", json!(5)), "name must be a text"),
            (with("reasoning_content", json!(5)), "reasoning_content must be a text"),
            (with("tool_calls", json!({})), "must be a list"),
            (with("tool_calls", json!([1])), "\"name\""),
            (with("tool_calls", json!([{"function": {}}])), "\"name\""),
            (with("tool_calls", json!([{"function": {"name": 1}}])), "\"name\""),
            (with("tool_calls", json!([{"function": {"name": "a", "arguments": 1}}])), "arguments"),
            (with("tool_calls", json!([{"function": {"name": "a"}, "id": 5}])), "id of each"),
            (with("tool_calls", json!([{"function": {"name": "a"}, "type": "zzz"}])), "type of each"),
            (with("tool_call_id", json!(7)), "tool_call_id must be a text"),
            (with("mood", json!("good")), "\"mood\""),
        ] {
            let error = checked_messages(vec![good.clone(), bad.clone()]).unwrap_err();
            assert!(error.starts_with("message 2: ") && error.contains(reason), "{bad}: {error}");
        }
        for count in [0, 1001] {
            assert!(checked_messages(vec![good.clone(); count]).unwrap_err().starts_with(&format!("{count} messages")));
        }
    }
}
