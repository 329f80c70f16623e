//! JSON in which no object has a key twice. serde_json keeps the second of two values, and what the first said is lost.

use serde::{
    Deserialize, Deserializer,
    de::{Error, MapAccess, SeqAccess, Visitor},
};
use serde_json::{Map, Number, Value};
use std::{collections::HashSet, fmt};

/// Reads a JSON text.
///
/// # Errors
/// If it is no JSON, or an object in it has a key twice.
pub fn parse(text: &str) -> serde_json::Result<Value> {
    serde_json::from_str(text).map(|Unique(value)| value)
}

/// Checks a JSON text as [`parse`] does, and keeps nothing of it.
///
/// # Errors
/// As [`parse`].
pub fn check(text: &str) -> serde_json::Result<()> {
    serde_json::from_str(text).map(|Checked| ())
}

/// A value in which no object has a key twice.
#[derive(Debug)]
pub struct Unique(pub Value);

impl<'de> Deserialize<'de> for Unique {
    fn deserialize<Source: Deserializer<'de>>(deserializer: Source) -> Result<Self, Source::Error> {
        deserializer.deserialize_any(AnyValue).map(Unique)
    }
}

struct AnyValue;

impl<'de> Visitor<'de> for AnyValue {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<Failure>(self) -> Result<Value, Failure> {
        Ok(Value::Null)
    }

    fn visit_bool<Failure>(self, v: bool) -> Result<Value, Failure> {
        Ok(v.into())
    }

    fn visit_i64<Failure>(self, v: i64) -> Result<Value, Failure> {
        Ok(v.into())
    }

    fn visit_u64<Failure>(self, v: u64) -> Result<Value, Failure> {
        Ok(v.into())
    }

    fn visit_f64<Failure>(self, v: f64) -> Result<Value, Failure> {
        Ok(Number::from_f64(v).map_or(Value::Null, Value::Number))
    }

    fn visit_str<Failure>(self, v: &str) -> Result<Value, Failure> {
        Ok(v.into())
    }

    fn visit_string<Failure>(self, v: String) -> Result<Value, Failure> {
        Ok(v.into())
    }

    fn visit_seq<Items: SeqAccess<'de>>(self, mut seq: Items) -> Result<Value, Items::Error> {
        let mut values = Vec::new();
        while let Some(Unique(value)) = seq.next_element()? {
            values.push(value);
        }
        Ok(Value::Array(values))
    }

    fn visit_map<Items: MapAccess<'de>>(self, mut map: Items) -> Result<Value, Items::Error> {
        let mut object = Map::new();
        while let Some(key) = map.next_key::<String>()? {
            if object.contains_key(&key) {
                return Err(twice(&key));
            }
            let Unique(value) = map.next_value()?;
            object.insert(key, value);
        }
        Ok(Value::Object(object))
    }
}

/// A value that was read and forgotten.
struct Checked;

impl<'de> Deserialize<'de> for Checked {
    fn deserialize<Source: Deserializer<'de>>(deserializer: Source) -> Result<Self, Source::Error> {
        deserializer.deserialize_any(Forgotten)
    }
}

struct Forgotten;

impl<'de> Visitor<'de> for Forgotten {
    type Value = Checked;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        AnyValue.expecting(f)
    }

    fn visit_unit<Failure>(self) -> Result<Checked, Failure> {
        Ok(Checked)
    }

    fn visit_bool<Failure>(self, _: bool) -> Result<Checked, Failure> {
        Ok(Checked)
    }

    fn visit_i64<Failure>(self, _: i64) -> Result<Checked, Failure> {
        Ok(Checked)
    }

    fn visit_u64<Failure>(self, _: u64) -> Result<Checked, Failure> {
        Ok(Checked)
    }

    fn visit_f64<Failure>(self, _: f64) -> Result<Checked, Failure> {
        Ok(Checked)
    }

    fn visit_str<Failure>(self, _: &str) -> Result<Checked, Failure> {
        Ok(Checked)
    }

    fn visit_seq<Items: SeqAccess<'de>>(self, mut seq: Items) -> Result<Checked, Items::Error> {
        while seq.next_element::<Checked>()?.is_some() {}
        Ok(Checked)
    }

    fn visit_map<Items: MapAccess<'de>>(self, mut map: Items) -> Result<Checked, Items::Error> {
        let mut keys = HashSet::new();
        while let Some(key) = map.next_key::<String>()? {
            map.next_value::<Checked>()?;
            if let Some(key) = keys.replace(key) {
                return Err(twice(&key));
            }
        }
        Ok(Checked)
    }
}

fn twice<Failure: Error>(key: &str) -> Failure {
    Failure::custom(format_args!("the key {key:?} stands twice in an object"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_that_of_serde_json_and_a_key_stands_once() {
        let text = r#"{"a": [1, -2, 3.5, 18446744073709551615, "x\u00e9", null, true, {"b": {}}], "c": {"a": 1}}"#;
        assert_eq!(parse(text).unwrap(), serde_json::from_str::<Value>(text).unwrap());
        let twice = parse("{\"a\": 1,\n \"b\": [{\"c\": 1, \"c\": 2}]}").unwrap_err().to_string();
        assert!(twice.contains("\"c\" stands twice") && twice.contains("line 2"), "{twice}");
        assert!(parse("{} x").is_err() && parse("[1,").is_err());
        check(text).unwrap();
        let twice = check("{\"a\": 1,\n \"b\": [{\"c\": 1, \"c\": 2}]}").unwrap_err().to_string();
        assert!(twice.contains("\"c\" stands twice") && twice.contains("line 2"), "{twice}");
        assert!(check("{} x").is_err() && check("[1,").is_err());
    }
}
