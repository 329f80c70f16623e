//! The rows of an Arrow file, as the JSON objects that a `.jsonl` file of the same table would hold.
//!
//! Arrow has two kinds of files. A stream is a sequence of messages, as the library `datasets` of Hugging Face saves them. The
//! file format is a stream between the word `ARROW1` and a footer, which is not needed to read the rows in order (Arrow's
//! columnar format, "IPC Streaming Format" and "IPC File Format").

use super::{format::Object, table};
use crate::{CliError, data_files};
use arrow_array::{
    Array, RecordBatch,
    cast::AsArray,
    types::{
        Float16Type, Float32Type, Float64Type, Int8Type, Int16Type, Int32Type, Int64Type, UInt8Type, UInt16Type,
        UInt32Type, UInt64Type,
    },
};
use arrow_buffer::Buffer;
use arrow_ipc::{
    Buffer as IpcBuffer, RecordBatch as RecordBatchMessage, reader::StreamDecoder, root_as_message_with_opts,
};
use arrow_schema::{DataType, Field};
use flatbuffers::{InvalidFlatbuffer, VerifierOptions};
use serde_json::{Map, Value, json};
use std::{collections::BTreeSet, path::Path};

/// The rows of a file with their numbers, counted from 1. They are decoded one batch after another; after an error there are
/// none.
///
/// # Errors
/// If the file cannot be read, or describes more than it holds.
pub(super) fn objects(path: &Path) -> Result<impl Iterator<Item = Object>, CliError> {
    let bytes = data_files::read_whole(path)?;
    let rest = stream_of(bytes);
    let checked =
        table::guarded("Arrow", || check_descriptions(&rest, MOST_INFLATED.max(table::MOST_COMPRESSED * rest.len())));
    checked.map_err(|reason| CliError::data(path, None, reason))?;
    let mut batches = Batches { rest, decoder: StreamDecoder::new() };
    let (mut batch, mut at) = (None::<RecordBatch>, 0);
    Ok(table::rows("Arrow", move || {
        loop {
            match batch.as_ref().filter(|batch| at < batch.num_rows()) {
                Some(batch) => {
                    at += 1;
                    return object(batch, at - 1).map(Some);
                }
                None => match batches.next()? {
                    None => return Ok(None),
                    next => (batch, at) = (next, 0),
                },
            }
        }
    }))
}

/// The messages of a file of either kind.
fn stream_of(bytes: Vec<u8>) -> Buffer {
    const MAGIC: &[u8] = b"ARROW1";
    let size = bytes.len();
    let all = Buffer::from_vec(bytes);
    if size < 18 || !all.starts_with(MAGIC) || !all.ends_with(MAGIC) {
        return all;
    }
    let length: [u8; 4] = all[size - 10..size - 6].try_into().expect("four bytes");
    // The magic word fills 8 bytes at the beginning.
    let footer = (u32::from_le_bytes(length) as usize).min(size - 18);
    all.slice_with_length(8, size - 18 - footer)
}

/// Refuses messages that describe more than they hold. The parts of a message may share bytes, so that a description of one
/// megabyte can stand for gigabytes, and the library copies each part. The compressed columns of a message may be decompressed to
/// `most` bytes. What is not a message is left to the library.
///
/// # Errors
/// If a message of the stream does.
fn check_descriptions(stream: &[u8], most: usize) -> Result<(), String> {
    // A message is its size, its description, and a body. In front of the size is a mark, which older files have not.
    let word = |at: usize| Some(u32::from_le_bytes(stream.get(at..at.checked_add(4)?)?.try_into().ok()?));
    let mut at = 0;
    while let Some(first) = word(at) {
        at += if first == u32::MAX { 4 } else { 0 };
        let Some(size) = word(at).map(|size| size as usize).filter(|size| *size > 0) else { break };
        at += 4;
        let Some(description) = at.checked_add(size).and_then(|end| stream.get(at..end)) else { break };
        let limits = VerifierOptions {
            max_tables: MOST_PARTS,
            max_apparent_size: size.saturating_mul(SHARED),
            ..VerifierOptions::default()
        };
        let (body, batch) = match root_as_message_with_opts(&limits, description) {
            Ok(message) => {
                let dictionary = message.header_as_dictionary_batch().and_then(|dictionary| dictionary.data());
                (message.bodyLength(), message.header_as_record_batch().or(dictionary))
            }
            Err(InvalidFlatbuffer::TooManyTables | InvalidFlatbuffer::ApparentSizeTooLarge) => {
                return Err(format!(
                    "the description of its columns has more than {MOST_PARTS} parts, or parts that share their bytes"
                ));
            }
            Err(_) => break,
        };
        let Some(next) = usize::try_from(body).ok().and_then(|body| (at + size).checked_add(body)) else { break };
        let inflated = batch.zip(stream.get(at + size..)).map_or(0, |(batch, body)| inflated(batch, body));
        if inflated > most as u64 {
            return Err(format!("its columns decompress to {inflated} bytes at a time; at most {most} are taken"));
        }
        at = next;
    }
    Ok(())
}

/// Bytes to which the compressed columns of a batch decompress: each begins with the number of its own.
fn inflated(batch: RecordBatchMessage<'_>, body: &[u8]) -> u64 {
    if batch.compression().is_none() {
        return 0;
    }
    let of = |buffer: &IpcBuffer| {
        let at = usize::try_from(buffer.offset()).ok()?;
        let size: [u8; 8] = body.get(at..at.checked_add(8)?)?.try_into().ok()?;
        // -1 says that the bytes behind it are not compressed.
        u64::try_from(i64::from_le_bytes(size)).ok().filter(|_| buffer.length() > 0)
    };
    batch.buffers().into_iter().flatten().filter_map(of).fold(0, u64::saturating_add)
}

/// Parts of the description of a table: a column has its name, its type, and pairs of keys and values.
const MOST_PARTS: usize = 1 << 14;
/// Bytes that the compressed columns of a message may be decompressed to, in a file however small.
const MOST_INFLATED: usize = 32 << 20;
/// How many times the parts of a description may share a byte, on average. Small ones share the layouts of their fields.
const SHARED: usize = 8;

/// The batches of rows of a stream.
struct Batches {
    rest: Buffer,
    decoder: StreamDecoder,
}

/// What ends a stream. One that is cut between two batches lacks it.
const END: [u8; 8] = [0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0];

impl Batches {
    fn next(&mut self) -> Result<Option<RecordBatch>, String> {
        // If the table has no rows, one call reads both the schema and the mark.
        let whole = self.rest.as_slice().ends_with(&END);
        let Some(batch) = self.decoder.decode(&mut self.rest).map_err(|error| error.to_string())? else {
            self.decoder.finish().map_err(|e| e.to_string())?;
            return if whole { Ok(None) } else { Err("it is cut: the mark at its end is missing".into()) };
        };
        let schema = batch.schema();
        table::check_columns(schema.fields().iter().map(|field| columns(field)).sum())?;
        let mut names = BTreeSet::new();
        match schema.fields().iter().find(|field| !names.insert(field.name())) {
            Some(field) => Err(format!("two columns are named {:?}", field.name())),
            None => Ok(Some(batch)),
        }
    }
}

/// The columns of a field, those inside it included.
fn columns(field: &Field) -> usize {
    1 + match field.data_type() {
        DataType::List(item) | DataType::LargeList(item) | DataType::FixedSizeList(item, _) => columns(item),
        DataType::Struct(fields) => fields.iter().map(|field| columns(field)).sum(),
        _ => 0,
    }
}

fn object(batch: &RecordBatch, row: usize) -> Result<Map<String, Value>, String> {
    let mut taken = Taken { values: 0, text: 0 };
    let schema = batch.schema();
    let columns = schema.fields().iter().zip(batch.columns());
    columns.map(|(field, column)| Ok((field.name().clone(), value(column, row, &mut taken)?))).collect()
}

/// What a row has so far.
struct Taken {
    values: usize,
    text: usize,
}

impl Taken {
    fn take(&mut self, values: usize, text: usize) -> Result<(), String> {
        (self.values, self.text) = (self.values.saturating_add(values), self.text.saturating_add(text));
        table::check_row(self.values, self.text)
    }
}

/// One value of a column. A value of a type that JSON has not, such as a date, is left out: it is null.
fn value(column: &dyn Array, i: usize, taken: &mut Taken) -> Result<Value, String> {
    taken.take(1, 0)?;
    if column.is_null(i) {
        return Ok(Value::Null);
    }
    macro_rules! number {
        ($kind:ty) => {
            json!(column.as_primitive::<$kind>().value(i))
        };
    }
    let mut text = |text: &str| {
        taken.take(0, text.len())?;
        Ok::<_, String>(json!(text))
    };
    Ok(match column.data_type() {
        DataType::Boolean => json!(column.as_boolean().value(i)),
        DataType::Int8 => number!(Int8Type),
        DataType::Int16 => number!(Int16Type),
        DataType::Int32 => number!(Int32Type),
        DataType::Int64 => number!(Int64Type),
        DataType::UInt8 => number!(UInt8Type),
        DataType::UInt16 => number!(UInt16Type),
        DataType::UInt32 => number!(UInt32Type),
        DataType::UInt64 => number!(UInt64Type),
        DataType::Float16 => json!(column.as_primitive::<Float16Type>().value(i).to_f32()),
        DataType::Float32 => number!(Float32Type),
        DataType::Float64 => number!(Float64Type),
        DataType::Utf8 => text(column.as_string::<i32>().value(i))?,
        DataType::LargeUtf8 => text(column.as_string::<i64>().value(i))?,
        DataType::Utf8View => text(column.as_string_view().value(i))?,
        DataType::List(_) => list(&column.as_list::<i32>().value(i), taken)?,
        DataType::LargeList(_) => list(&column.as_list::<i64>().value(i), taken)?,
        DataType::FixedSizeList(..) => list(&column.as_fixed_size_list().value(i), taken)?,
        DataType::Struct(fields) => {
            let inner = fields.iter().zip(column.as_struct().columns());
            let inner = inner.map(|(field, column)| Ok((field.name().clone(), value(column, i, taken)?)));
            // All rows of a table have the members of all.
            inner.filter(|member| !matches!(member, Ok((_, Value::Null)))).collect::<Result<_, String>>()?
        }
        DataType::Dictionary(..) => {
            let dictionary = column.as_any_dictionary();
            let key = value(dictionary.keys(), i, taken)?.as_u64().ok_or("a key of a dictionary is below 0")?;
            value(dictionary.values(), key as usize, taken)?
        }
        _ => Value::Null,
    })
}

fn list(items: &dyn Array, taken: &mut Taken) -> Result<Value, String> {
    // Before anything is collected.
    taken.take(items.len(), 0)?;
    (0..items.len()).map(|i| value(items, i, taken)).collect::<Result<Vec<_>, _>>().map(Value::Array)
}
