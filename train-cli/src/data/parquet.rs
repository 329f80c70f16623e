//! The rows of a Parquet file, as the JSON objects that a `.jsonl` file of the same table would hold.

use super::{
    format::{self, Object},
    parquet_schema, table,
};
use crate::CliError;
use model_qwen3::{ModelError, file, limits};
use parquet::{
    file::reader::{FileReader, SerializedFileReader},
    record::{Field, Row},
};
use serde_json::{Map, Value};
use std::path::Path;

/// The rows of a file with their numbers, counted from 1. They are read one after another; after an error there are none.
///
/// # Errors
/// If the file is missing or its metadata are broken.
pub(super) fn objects(path: &Path) -> Result<impl Iterator<Item = Object>, CliError> {
    let bad = |reason: String| CliError::data(path, None, reason);
    let (file, size) = file::open(path, "check the path")?;
    let open = move || {
        parquet_schema::check_levels(&file, size)?;
        SerializedFileReader::new(file).map_err(|e| e.to_string())
    };
    let size_of_file = usize::try_from(size).unwrap_or(usize::MAX / (4 * table::MOST_COMPRESSED));
    let memory = MEMORY + 2 * size_of_file;
    let refused = |limit| ModelError::limited(KIND, limit, |limit| bad(unreadable(limit)));
    let opened = limits::within(KIND, memory, open).map_err(refused)?;
    let reader = opened.map_err(|e| bad(unreadable(e)))?;
    table::check_columns(reader.metadata().file_metadata().schema_descr().num_columns()).map_err(bad)?;
    // The library reads a row whole, however large, so that this is what can be known before: what the rows have on average.
    let mut largest = 0;
    for group in reader.metadata().row_groups() {
        let rows = usize::try_from(group.num_rows()).map_or(1, |rows| rows.max(1));
        let (values, bytes) = group.columns().iter().fold((0usize, 0usize), |(values, bytes), column| {
            let of = |count: i64| usize::try_from(count).unwrap_or(usize::MAX);
            (values.saturating_add(of(column.num_values())), bytes.saturating_add(of(column.uncompressed_size())))
        });
        table::check_row(values / rows, bytes / rows).map_err(bad)?;
        largest = largest.max(bytes);
    }
    let make = move || {
        let rows = reader.into_iter().with_batch_size(ROWS_AT_A_TIME);
        rows.map(|row| object(&row.map_err(|e| e.to_string())?))
    };
    // Pages stay in memory while one of their rows is read, and those of two row groups at a change of the group.
    let pages = 2 * largest.min(table::MOST_COMPRESSED * size_of_file);
    let mut rows = limits::each_within(KIND, memory + pages, make).map_err(refused)?;
    Ok(table::rows(KIND, move || match rows.next() {
        None => Ok(None),
        Some(row) => row.map_err(|limit| limit.to_string())?.map(Some),
    }))
}

fn object(row: &Row) -> Result<Map<String, Value>, String> {
    let holds_bytes = |(name, field): &(&String, &Field)| matches!(field, Field::Bytes(_)) && format::is_needed(name);
    if let Some((name, _)) = row.get_column_iter().find(holds_bytes) {
        return Err(format!("column {name:?} holds bytes; write it as text (in pyarrow: cast it to string)"));
    }
    Ok(fields(row))
}

fn fields(row: &Row) -> Map<String, Value> {
    row.get_column_iter().map(|(name, field)| (name.clone(), value(field))).collect()
}

/// A value of a row. The library would write bytes as base64, which nobody wants to train on: they are left out, as they are from
/// an Arrow table.
fn value(field: &Field) -> Value {
    let key = |key: &Field| match value(key) {
        Value::String(text) => text,
        other => other.to_string(),
    };
    match field {
        Field::Bytes(_) => Value::Null,
        // All rows of a table have the members of all.
        Field::Group(row) => Value::Object(fields(row).into_iter().filter(|(_, value)| !value.is_null()).collect()),
        Field::ListInternal(list) => list.elements().iter().map(value).collect(),
        Field::MapInternal(map) => map.entries().iter().map(|(name, field)| (key(name), value(field))).collect(),
        other => other.to_json_value(),
    }
}

fn unreadable(reason: impl std::fmt::Display) -> String {
    table::unreadable(KIND, reason)
}

const KIND: &str = "Parquet";
/// Bytes that opening a file may take, and reading a row of it, besides twice the size of the file and the pages of the row.
const MEMORY: usize = 64 << 20;
/// Rows whose values the library decodes together.
const ROWS_AT_A_TIME: usize = 16;
