//! What can be wrong with packed data that comes from outside, or with a read from a device.

/// Packed data that is not a matrix, or a device that failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Nvfp4Error {
    /// Codes or scales do not fit the declared shape.
    #[error("{part}: {found} values for a {rows}x{cols} NVFP4 matrix, {expected} needed")]
    Length {
        /// `codes` or `scales`.
        part: &'static str,
        /// Rows.
        rows: usize,
        /// Columns.
        cols: usize,
        /// Values needed.
        expected: usize,
        /// Values given.
        found: usize,
    },
    /// The number of columns is not a multiple of 16.
    #[error("{cols} columns: NVFP4 blocks need a multiple of 16")]
    Columns {
        /// Columns.
        cols: usize,
    },
    /// A scale is NaN or negative.
    #[error("scale byte {byte:#04x} at row {row}, block {block}: block scales are finite and not negative")]
    Scale {
        /// The byte.
        byte: u8,
        /// Row.
        row: usize,
        /// Block within the row.
        block: usize,
    },
    /// The tensor scale is not a finite, non-negative number.
    #[error("tensor scale {value}: it is finite and not negative")]
    Global {
        /// The value, printed.
        value: String,
    },
    /// The device reported an error, now or in an operation queued before.
    #[error("device: {0}")]
    Device(String),
}
