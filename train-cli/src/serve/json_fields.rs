//! The fields of a JSON object, taken one by one. A field of the wrong type or out of range is refused with its name. A field
//! that no code takes is refused, too: it would have no effect, and its sender would not notice. A field that is null is not
//! there.

use super::refusal::Refusal;
use model_qwen3::json;
use serde_json::{Map, Value};
use std::ops::RangeInclusive;

/// The fields that were not taken yet.
#[derive(Debug)]
pub(super) struct Fields(Map<String, Value>);

impl Fields {
    /// The fields of the object that `body` is.
    ///
    /// # Errors
    /// If it is none.
    pub(super) fn of(body: &[u8]) -> Result<Self, Refusal> {
        let text = std::str::from_utf8(body).map_err(|_| Refusal::bad("the body is not UTF-8"))?;
        match json::parse(text) {
            Ok(Value::Object(map)) => Ok(Self(map)),
            Ok(_) => Err(Refusal::bad("the body must be a JSON object")),
            Err(e) => Err(Refusal::bad(format!("the body is not JSON: {e}"))),
        }
    }

    /// Takes a field.
    pub(super) fn take(&mut self, name: &str) -> Option<Value> {
        self.0.remove(name).filter(|value| !value.is_null())
    }

    /// Takes a number.
    ///
    /// # Errors
    /// If it is no number, or out of range.
    pub(super) fn number(&mut self, name: &str, range: RangeInclusive<f32>) -> Result<Option<f32>, Refusal> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match value.as_f64().map(|number| number as f32).filter(|number| range.contains(number)) {
            Some(number) => Ok(Some(number)),
            None => Err(Refusal::field(
                name,
                format_args!("{value} is not a number from {} to {}", range.start(), range.end()),
            )),
        }
    }

    /// Takes an integer.
    ///
    /// # Errors
    /// If it is none, or out of range.
    pub(super) fn whole(&mut self, name: &str, range: RangeInclusive<u64>) -> Result<Option<u64>, Refusal> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match value.as_u64().filter(|number| range.contains(number)) {
            Some(number) => Ok(Some(number)),
            None => {
                let (least, most) = (range.start(), range.end());
                Err(Refusal::field(name, format_args!("{value} is not an integer from {least} to {most}")))
            }
        }
    }

    /// Takes a truth value.
    ///
    /// # Errors
    /// If it is none.
    pub(super) fn flag(&mut self, name: &str) -> Result<Option<bool>, Refusal> {
        let Some(value) = self.take(name) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| Refusal::field(name, format_args!("{value} is neither true nor false")))
    }

    /// Takes a text.
    ///
    /// # Errors
    /// If it is none.
    pub(super) fn text(&mut self, name: &str) -> Result<Option<String>, Refusal> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(Refusal::field(name, "a string is needed")),
        }
    }

    /// Takes fields that change no answer, whatever their value.
    pub(super) fn ignore(&mut self, names: &[&str]) {
        names.iter().for_each(|name| drop(self.0.remove(*name)));
    }

    /// Takes a field that may only have values that change nothing.
    ///
    /// # Errors
    /// If it has another one.
    pub(super) fn only(&mut self, name: &str, allowed: &[Value]) -> Result<(), Refusal> {
        match self.take(name) {
            Some(value) if !allowed.contains(&value) => {
                Err(Refusal::field(name, format_args!("{value} is not supported; leave the field out")))
            }
            _ => Ok(()),
        }
    }

    /// Checks that every field was taken.
    ///
    /// # Errors
    /// If one was not.
    pub(super) fn end(self) -> Result<(), Refusal> {
        match self.0.iter().find(|(_, value)| !value.is_null()) {
            None => Ok(()),
            Some((name, _)) => Err(Refusal::field(name, "this server does not know the field")),
        }
    }
}
