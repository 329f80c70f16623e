//! What a launch can refuse. Everything else is the device's to report at the next synchronisation.

/// A launch whose arguments do not fit together.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KernelError {
    /// A buffer is shorter or longer than its shape says.
    #[error("{kernel}: buffer `{buffer}` holds {found} elements, its shape needs {expected}")]
    Length {
        /// The kernel that was asked for.
        kernel: &'static str,
        /// The argument's name.
        buffer: &'static str,
        /// Elements that the shape needs.
        expected: usize,
        /// Elements that the buffer holds.
        found: usize,
    },
    /// A dimension along which blocks of 16 run is not a multiple of 16.
    #[error("{kernel}: {dimension} is {found}, NVFP4 blocks need a multiple of 16")]
    Block {
        /// The kernel that was asked for.
        kernel: &'static str,
        /// The dimension's name.
        dimension: &'static str,
        /// Its length.
        found: usize,
    },
    /// A dimension does not fit the 32-bit indices of the kernels.
    #[error("{kernel}: {dimension} is {found}, more than the 2^32-1 a kernel can index")]
    TooLarge {
        /// The kernel that was asked for.
        kernel: &'static str,
        /// The dimension's name.
        dimension: &'static str,
        /// Its length.
        found: usize,
    },
    /// A measurement found no device for it, or the device failed.
    #[error("device: {reason}")]
    Device {
        /// What it said.
        reason: String,
    },
}

pub(crate) fn expect_len(
    kernel: &'static str,
    buffer: &'static str,
    found: usize,
    expected: usize,
) -> Result<(), KernelError> {
    if found == expected { Ok(()) } else { Err(KernelError::Length { kernel, buffer, expected, found }) }
}

pub(crate) fn expect_blocks(kernel: &'static str, dimension: &'static str, found: usize) -> Result<(), KernelError> {
    if found.is_multiple_of(crate::layout::BLOCK) {
        Ok(())
    } else {
        Err(KernelError::Block { kernel, dimension, found })
    }
}

pub(crate) fn index(kernel: &'static str, dimension: &'static str, found: usize) -> Result<u32, KernelError> {
    u32::try_from(found).map_err(|_| KernelError::TooLarge { kernel, dimension, found })
}
