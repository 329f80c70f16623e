//! How many threads the reference uses for large matrices.

/// The number of cores.
pub(super) fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}
