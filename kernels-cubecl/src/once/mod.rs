//! Launches every kernel once, on zeros of a small shape, and compiles the recorded texts. Only tests are here, and no result
//! is checked.

use crate::{KernelError, mma};
use cubecl::prelude::*;

mod compiled;
mod optimizer;
mod portable;
mod tensor_cores;
mod zeros;

use zeros::{F32, Zeros};

/// Launches every kernel that the device can run for values of type `dtype`, with `rows` tokens: the portable kernels
/// always, the others if the device has tensor cores for `dtype`.
///
/// # Errors
/// If a launch is refused, which is a bug.
fn once<R: Runtime>(client: &ComputeClient<R>, dtype: StorageType, rows: usize) -> Result<(), KernelError> {
    let zeros = Zeros { client, dtype };
    portable::quantizers(&zeros, rows)?;
    portable::products(&zeros, rows)?;
    portable::small_operations(&zeros, rows)?;
    optimizer::optimizer(&zeros, rows * portable::COLS)?;
    if dtype == F32 || !mma::supported(client, dtype) {
        return Ok(());
    }
    tensor_cores::gemms(&zeros, rows)?;
    tensor_cores::block_scaled_products(&zeros, rows)?;
    tensor_cores::gemvs(&zeros, rows)?;
    tensor_cores::attention(&zeros, rows)?;
    tensor_cores::decoder_blocks(&zeros)
}
