//! Every kernel is launched once, on zeros of a small shape, on devices that record the launches, and the recorded texts are
//! compiled. No result is checked.

use kernels_cubecl::{KernelError, mma};

mod compiled;
mod optimizer;
mod portable;
mod tensor_cores;
mod zeros;

use zeros::{F32, Zeros};

/// Launches every kernel that the device can run for the type of `zeros`, with `rows` tokens: the portable kernels always, the
/// others if the device has tensor cores for that type.
///
/// # Errors
/// If a launch is refused, which is a bug.
fn once(zeros: &Zeros, rows: usize) -> Result<(), KernelError> {
    portable::quantizers(zeros, rows)?;
    portable::products(zeros, rows)?;
    portable::small_operations(zeros, rows)?;
    optimizer::optimizer(zeros, rows * portable::COLS)?;
    if zeros.dtype == F32 || !mma::supported(zeros.client, zeros.dtype) {
        return Ok(());
    }
    tensor_cores::gemms(zeros, rows)?;
    tensor_cores::block_scaled_products(zeros, rows)?;
    tensor_cores::gemvs(zeros, rows)?;
    tensor_cores::attention(zeros, rows)?;
    tensor_cores::decoder_blocks(zeros)
}
