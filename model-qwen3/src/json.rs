//! Reads JSON, and refuses an object that has a key twice, and a text with more values than memory should hold. (serde_json would
//! keep the second value of a key and drop the first without a word.)

use serde::{
    Deserializer,
    de::{DeserializeOwned, DeserializeSeed, Error, MapAccess, SeqAccess, Visitor},
};
use serde_json::{Map, Number, Value};
use std::{cell::Cell, collections::HashSet, fmt};

/// Most bytes of memory for the values of a text, besides as many as the text has. The header of a safetensors file is counted
/// with 2,200 bytes for a tensor; a Qwen3-32B in NVFP4 has some 2,000.
const MOST_MEMORY: usize = 32 << 20;

/// Bytes of an element of an array.
const ELEMENT: usize = size_of::<Value>();
/// Bytes of a key and its value in an object, with the key's hash and its place in the table.
const ENTRY: usize = size_of::<(String, Value)>() + 2 * size_of::<usize>();
/// An array or an object has room for so many at first.
const FIRST: usize = 4;
/// It doubles its room when it is full.
const NEXT: usize = 2;
/// Bytes that the allocator adds to those of a text.
const TEXT: usize = 32;

/// Reads a JSON text. Its values may take 32 MiB of memory and as many bytes as the text has: two bytes of a hostile text
/// would take a hundred.
///
/// # Errors
/// If it is no JSON, an object in it has a key twice, or it has too many values.
pub fn parse(text: &str) -> serde_json::Result<Value> {
    Budget::of(text.len()).parse(text)
}

/// The memory that the values of several texts may take together: 32 MiB, and as many bytes as the texts have.
#[derive(Debug)]
pub struct Budget {
    left: Cell<usize>,
}

impl Budget {
    /// The budget of texts that have so many bytes together.
    pub fn of(bytes: usize) -> Self {
        Self { left: Cell::new(MOST_MEMORY.saturating_add(bytes)) }
    }

    /// Reads one of the texts.
    ///
    /// # Errors
    /// As [`parse`].
    pub fn parse(&self, text: &str) -> serde_json::Result<Value> {
        let mut source = serde_json::Deserializer::from_str(text);
        let value = Tree { left: &self.left }.deserialize(&mut source)?;
        source.end().map(|()| value)
    }
}

/// Checks that a text is JSON in which no object has a key twice, and keeps nothing of it but the keys of open objects.
///
/// # Errors
/// If it is not.
pub fn check(text: &str) -> serde_json::Result<()> {
    let mut source = serde_json::Deserializer::from_str(text);
    Checked.deserialize(&mut source)?;
    source.end()
}

/// Reads a value of a type from a JSON text in which no object has a key twice. That holds for keys that the type ignores, too.
///
/// # Errors
/// If the text is no such JSON, or is no value of the type.
pub(crate) fn read<Wanted: DeserializeOwned>(text: &str) -> serde_json::Result<Wanted> {
    check(text)?;
    serde_json::from_str(text)
}

/// Takes `count` of what is left.
fn take<Failure: Error>(left: &Cell<usize>, count: usize) -> Result<(), Failure> {
    let rest = left.get().checked_sub(count);
    left.set(rest.ok_or_else(|| Failure::custom("there are more values than are read"))?);
    Ok(())
}

/// Reads a value for which so many bytes of memory are left.
#[derive(Clone, Copy)]
struct Tree<'a> {
    left: &'a Cell<usize>,
}

impl<'de> DeserializeSeed<'de> for Tree<'_> {
    type Value = Value;

    fn deserialize<Source: Deserializer<'de>>(self, deserializer: Source) -> Result<Value, Source::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Tree<'_> {
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

    fn visit_str<Failure: Error>(self, v: &str) -> Result<Value, Failure> {
        take(self.left, v.len() + TEXT)?;
        Ok(v.into())
    }

    fn visit_seq<Items: SeqAccess<'de>>(self, mut seq: Items) -> Result<Value, Items::Error> {
        let mut values = Vec::new();
        while let Some(value) = seq.next_element_seed(self)? {
            take(self.left, ELEMENT * if values.is_empty() { FIRST } else { NEXT })?;
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
            take(self.left, ENTRY * if object.is_empty() { FIRST } else { NEXT } + key.len() + TEXT)?;
            object.insert(key, map.next_value_seed(self)?);
        }
        Ok(Value::Object(object))
    }
}

/// Reads a value and forgets it.
#[derive(Clone, Copy)]
struct Checked;

impl<'de> DeserializeSeed<'de> for Checked {
    type Value = ();

    fn deserialize<Source: Deserializer<'de>>(self, deserializer: Source) -> Result<(), Source::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Checked {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<Failure>(self) -> Result<(), Failure> {
        Ok(())
    }

    fn visit_bool<Failure>(self, _: bool) -> Result<(), Failure> {
        Ok(())
    }

    fn visit_i64<Failure>(self, _: i64) -> Result<(), Failure> {
        Ok(())
    }

    fn visit_u64<Failure>(self, _: u64) -> Result<(), Failure> {
        Ok(())
    }

    fn visit_f64<Failure>(self, _: f64) -> Result<(), Failure> {
        Ok(())
    }

    fn visit_str<Failure>(self, _: &str) -> Result<(), Failure> {
        Ok(())
    }

    fn visit_seq<Items: SeqAccess<'de>>(self, mut seq: Items) -> Result<(), Items::Error> {
        while seq.next_element_seed(self)?.is_some() {}
        Ok(())
    }

    fn visit_map<Items: MapAccess<'de>>(self, mut map: Items) -> Result<(), Items::Error> {
        let mut keys = HashSet::new();
        while let Some(key) = map.next_key::<String>()? {
            map.next_value_seed(self)?;
            if let Some(key) = keys.replace(key) {
                return Err(twice(&key));
            }
        }
        Ok(())
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

    #[test]
    fn values_take_the_memory_of_their_budget_and_no_more() {
        // What honest files have: the header of a safetensors file with 15,000 tensors, and a thousand messages.
        let shape = r#""dtype":"BF16","shape":[5120,25600],"data_offsets":[1234567890,1234567890]"#;
        let tensors: Vec<String> =
            (0..15_000).map(|i| format!("\"model.layers.{i}.mlp.down_proj.weight\":{{{shape}}}")).collect();
        parse(&format!("{{{}}}", tensors.join(","))).unwrap();
        let message = r#"{"role": "user", "content": "hi"}"#;
        parse(&format!("[{}]", vec![message; 1000].join(","))).unwrap();
        // A list with one value, in a list: four bytes of text.
        let lists = |count: usize| format!("[{}[0]]", "[0],".repeat(count - 1));
        let most = MOST_MEMORY / (ELEMENT * (FIRST + NEXT) - 4);
        assert!(parse(&lists(most - 10)).is_ok() && parse(&lists(most + 10)).is_err());
        // Several texts share what is there.
        let (half, budget) = (lists(most / 2 - 10), Budget::of(0));
        assert!(budget.parse(&half).is_ok() && budget.parse("{}").is_ok() && budget.parse(&half).is_err());
    }
}
