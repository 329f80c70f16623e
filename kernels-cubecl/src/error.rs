//! Why a launch is refused. A launch checks its arguments on the host, before it queues anything; whatever the device
//! itself reports surfaces at the next synchronization.

/// The arguments of a launch do not fit together, or the device failed during a measurement.
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
    /// A shape or a choice breaks a rule of the kernel.
    #[error("{kernel}: {reason}")]
    Shape {
        /// The kernel that was asked for.
        kernel: &'static str,
        /// The value and the rule that it breaks.
        reason: String,
    },
    /// A measurement found no suitable device, or the device failed.
    #[error("device: {reason}")]
    Device {
        /// The device's own message.
        reason: String,
    },
}

/// Refuses a buffer whose length is not the one that its shape needs.
pub(crate) fn expect_len(
    kernel: &'static str,
    buffer: &'static str,
    found: usize,
    expected: usize,
) -> Result<(), KernelError> {
    if found == expected { Ok(()) } else { Err(KernelError::Length { kernel, buffer, expected, found }) }
}

/// Refuses the launch with `reason`, which states the value and the rule, unless `holds`.
pub(crate) fn require(kernel: &'static str, holds: bool, reason: impl FnOnce() -> String) -> Result<(), KernelError> {
    if holds { Ok(()) } else { Err(KernelError::Shape { kernel, reason: reason() }) }
}

/// Refuses a length that is not a multiple of `of`.
pub(crate) fn expect_multiple(
    kernel: &'static str,
    what: &'static str,
    found: usize,
    of: usize,
) -> Result<(), KernelError> {
    require(kernel, found.is_multiple_of(of), || format!("{what} = {found} is not a multiple of {of}"))
}

/// Refuses a length that does not consist of whole blocks of 16.
pub(crate) fn expect_blocks(kernel: &'static str, what: &'static str, found: usize) -> Result<(), KernelError> {
    expect_multiple(kernel, what, found, crate::layout::BLOCK)
}

/// A length as the 32-bit number that kernels count with.
pub(crate) fn index(kernel: &'static str, what: &'static str, found: usize) -> Result<u32, KernelError> {
    u32::try_from(found).map_err(|_| KernelError::Shape {
        kernel,
        reason: format!("{what} = {found} is more than 4294967295, the largest number that a kernel counts to"),
    })
}
