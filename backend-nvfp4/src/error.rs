//! The errors of packed data that comes from outside, and of reads from a device.

/// Packed data is not a valid matrix, or a device failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Nvfp4Error {
    /// The number of codes or scales does not fit the declared shape.
    #[error("{part}: a {rows}x{cols} NVFP4 matrix needs {expected} values, found {found}")]
    Length {
        /// `codes` or `scales`.
        part: &'static str,
        /// Number of rows.
        rows: usize,
        /// Number of columns.
        cols: usize,
        /// The number of values that the shape needs.
        expected: usize,
        /// The number of values that were given.
        found: usize,
    },
    /// The number of columns is not a multiple of 16.
    #[error("{cols} columns: NVFP4 needs a multiple of 16, because 16 columns share a scale")]
    Columns {
        /// Number of columns.
        cols: usize,
    },
    /// A block scale is NaN or negative.
    #[error("scale byte {byte:#04x} at row {row}, block {block} is NaN or negative; the data is damaged")]
    Scale {
        /// The scale byte.
        byte: u8,
        /// Row of the block.
        row: usize,
        /// Place of the block in its row.
        block: usize,
    },
    /// The tensor scale is not finite or is negative.
    #[error("tensor scale {value} is not finite or is negative; the data is damaged")]
    Global {
        /// The value, printed.
        value: String,
    },
    /// The device reported an error, now or for an operation that was queued before.
    #[error("device: {0}")]
    Device(String),
}
