//! How deeply the schema of a Parquet file nests its groups. The Parquet library makes a schema, and takes it apart, by functions
//! that call themselves once for each level: 100,000 levels, which take a megabyte of a file, would overflow the stack. So the
//! levels are counted before the library reads them:
//! ```text
//! file     = … metadata, its length (4 bytes, little-endian), "PAR1"
//! metadata = FileMetaData in Thrift's compact protocol: field 2 is a list of SchemaElement, each group in front of its children
//! element  : field 5 is the number of its children
//! ```

use std::{
    fs::File,
    io::{Read, Seek, SeekFrom},
};
use thrift::protocol::{TCompactInputProtocol, TInputProtocol, TType};

/// Levels of groups in a schema. Rows of messages have five.
const MOST_LEVELS: usize = 64;
const SCHEMA: Option<i16> = Some(2);
const CHILDREN: Option<i16> = Some(5);
/// Bytes of the metadata's length, and of the mark behind it.
const END: u64 = 8;

/// Refuses a schema of too many levels. What else is wrong with the file is for the library to say.
///
/// # Errors
/// If the schema has too many levels, or the metadata break off.
pub(super) fn check_levels(file: &File, size: u64) -> Result<(), String> {
    let Some(metadata) = metadata(file, size) else { return Ok(()) };
    let levels = levels(&metadata).map_err(|e| e.to_string())?;
    if levels > MOST_LEVELS {
        return Err(format!("its schema nests groups {levels} levels deep; at most {MOST_LEVELS} are read"));
    }
    Ok(())
}

/// The metadata of a file, if it ends as a Parquet file does.
fn metadata(mut file: &File, size: u64) -> Option<Vec<u8>> {
    let mut end = [0; END as usize];
    file.seek(SeekFrom::Start(size.checked_sub(END)?)).ok()?;
    file.read_exact(&mut end).ok()?;
    let [a, b, c, d, mark @ ..] = end;
    let length = u64::from(u32::from_le_bytes([a, b, c, d]));
    let start = size.checked_sub(END + length).filter(|_| mark == *b"PAR1")?;
    file.seek(SeekFrom::Start(start)).ok()?;
    let mut bytes = Vec::new();
    file.take(length).read_to_end(&mut bytes).ok()?;
    Some(bytes)
}

/// The most levels of groups, the root's counted, of the schemas in the metadata: a file that has two may be read by either.
fn levels(metadata: &[u8]) -> thrift::Result<usize> {
    let mut input = TCompactInputProtocol::new(metadata);
    let mut most = 0;
    input.read_struct_begin()?;
    loop {
        let field = input.read_field_begin()?;
        match (field.field_type, field.id) {
            (TType::Stop, _) => return Ok(most),
            (TType::List, SCHEMA) => most = most.max(levels_of_schema(&mut input)?),
            (kind, _) => input.skip(kind)?,
        }
        input.read_field_end()?;
        // What follows may be long, and is not about levels.
        if most > MOST_LEVELS {
            return Ok(most);
        }
    }
}

fn levels_of_schema(input: &mut impl TInputProtocol) -> thrift::Result<usize> {
    // The children that each open group still lacks.
    let (mut open, mut most) = (Vec::<i32>::new(), 0);
    for _ in 0..input.read_list_begin()?.size {
        let children = children_of_element(input)?;
        while open.last().is_some_and(|left| *left <= 0) {
            open.pop();
        }
        if let Some(left) = open.last_mut() {
            *left -= 1;
        }
        if children > 0 {
            open.push(children);
            most = most.max(open.len());
        }
    }
    input.read_list_end()?;
    Ok(most)
}

/// The number of children of the next element.
fn children_of_element(input: &mut impl TInputProtocol) -> thrift::Result<i32> {
    let mut children = 0;
    input.read_struct_begin()?;
    loop {
        let field = input.read_field_begin()?;
        match (field.field_type, field.id) {
            (TType::Stop, _) => break,
            (TType::I32, CHILDREN) => children = input.read_i32()?,
            (kind, _) => input.skip(kind)?,
        }
        input.read_field_end()?;
    }
    input.read_struct_end()?;
    Ok(children)
}

#[cfg(test)]
mod tests {
    use super::levels;

    /// A schema whose groups have these numbers of children, as the metadata hold it.
    fn metadata(children: &[u8]) -> Vec<u8> {
        let element = |count: &u8| match count {
            0 => b"\x15\x0c\x25\x00\x18\x01t\x00".to_vec(),
            count => [b"\x48\x01g\x15", &[2 * count][..], b"\x00"].concat(),
        };
        let elements: Vec<u8> = children.iter().flat_map(element).collect();
        [b"\x15\x02\x19", &[16 * children.len() as u8 + 12][..], &elements, b"\x16\x02\x00"].concat()
    }

    #[test]
    fn levels_are_those_of_groups_in_groups() {
        for (children, expected) in [
            // A root with one column, and with two of which one is a group; a chain; groups beside each other.
            (&[1, 0][..], 1),
            (&[2, 0, 1, 0], 2),
            (&[1, 1, 1, 1, 0], 4),
            (&[3, 1, 0, 1, 0, 1, 1, 0], 3),
        ] {
            assert_eq!(levels(&metadata(children)).unwrap(), expected, "{children:?}");
        }
        let whole = metadata(&[2, 0, 1, 0]);
        assert!((0..whole.len()).all(|end| levels(&whole[..end]).is_err()), "metadata that break off");
    }
}
