//! What the readers of tables share, which call libraries over files that somebody else made.

use super::{
    format::{Object, Wrong},
    sample::Origin,
};
use serde_json::{Map, Value};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Columns of a table, those inside lists and structs included. Each has a buffer of its own.
const MOST_COLUMNS: usize = 256;

/// Values in a row, those inside lists included. A few bytes of a file can stand for many.
const MOST_VALUES: usize = 1 << 20;
/// Bytes of the texts of a row, of which a reader holds a few copies. A long novel has 4 MiB.
const MOST_TEXT: usize = 16 << 20;
/// What a file says of the size of its decompressed parts counts up to this many times the size of the file, because a few bytes
/// can say that they stand for gigabytes.
pub(super) const MOST_COMPRESSED: usize = 32;

/// Refuses a table of too many columns.
///
/// # Errors
/// If it has.
pub(super) fn check_columns(columns: usize) -> Result<(), String> {
    if columns > MOST_COLUMNS {
        return Err(format!("the table has {columns} columns; at most {MOST_COLUMNS} are read"));
    }
    Ok(())
}

/// Refuses a row of too many values, or of too long texts.
///
/// # Errors
/// If it has.
pub(super) fn check_row(values: usize, text: usize) -> Result<(), String> {
    if values > MOST_VALUES || text > MOST_TEXT {
        return Err(format!("a row has more than {MOST_VALUES} values, or texts of more than {} MiB", MOST_TEXT >> 20));
    }
    Ok(())
}

/// The rows that `next` reads by a library for files of a kind, with their numbers, counted from 1. After an error there are
/// none.
pub(super) fn rows(
    kind: &'static str,
    mut next: impl FnMut() -> Result<Option<Map<String, Value>>, String>,
) -> impl Iterator<Item = Object> {
    let (mut number, mut failed) = (0, false);
    std::iter::from_fn(move || {
        if failed {
            return None;
        }
        number += 1;
        let row = guarded(kind, &mut next).transpose()?;
        failed = row.is_err();
        Some((Origin::of_line(number), row.map_err(Wrong::from)))
    })
}

/// Runs a call of the library that reads files of a kind. A panic on a damaged file becomes an error.
///
/// # Errors
/// If the call fails or panics.
pub(super) fn guarded<T>(kind: &str, call: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(call))
        .unwrap_or_else(|_| Err(format!("the {kind} library panicked on this file; it is damaged")))
        .map_err(|e| unreadable(kind, e))
}

/// What is said of a file that the library does not read.
pub(super) fn unreadable(kind: &str, reason: impl std::fmt::Display) -> String {
    format!("not a readable {kind} file: {reason}")
}
