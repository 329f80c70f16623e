//! The kernels of [`crate::attention`] on Hopper's own matrix instructions, after FlashAttention-3 (Shah and others,
//! arXiv 2407.08608): one warpgroup of a cube copies, two multiply, and a product runs under the softmax of another block.
//! ```text
//! for t { for s in start[t]..=t + past { online softmax; y[t] += p * v[s] } }    // the plain loop of the forward
//! ```
//!
//! | file | what it holds |
//! |---|---|
//! | `mod.rs` | for which device and calls, and the launches |
//! | `form.rs` | what is compiled into a kernel |
//! | `text.rs`, `tiles.cuh` | the text, and what the three kernels share |
//! | `forward.cuh`, `keys.cuh`, `queries.cuh` | the kernels: forward, the gradients of keys and values, that of queries |

use super::{Number, PIECE, is_hopper, tensor_map};
use crate::{
    attention::AttentionShape,
    cuda_text::{WrittenKernel, binding},
    error::{KernelError, index, require},
};
use cubecl::{
    prelude::*,
    server::{KernelArguments, MetadataBindingInfo},
};
pub(crate) use form::Kernel;
use form::{HopperAttentionForm, ROWS};

mod form;
mod text;

/// Whether there are kernels for numbers of this type on this device.
pub(crate) fn takes<R: Runtime>(client: &ComputeClient<R>, dtype: StorageType) -> bool {
    number(client, dtype).is_some()
}

/// The numbers of a kernel for this type, if this device has one.
fn number<R: Runtime>(client: &ComputeClient<R>, dtype: StorageType) -> Option<Number> {
    Number::of(dtype).filter(|number| *number != Number::F32 && is_hopper(client))
}

/// Launches a kernel, whose buffers [`crate::attention`] has checked: `matrices` in the order of [`Kernel::maps`], the others in
/// that of [`Kernel::buffers`].
pub(crate) fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    kernel: Kernel,
    matrices: Vec<ArrayArg<R>>,
    buffers: Vec<ArrayArg<R>>,
    dtype: StorageType,
    shape: AttentionShape,
) -> Result<(), KernelError> {
    const NAME: &str = "attention on Hopper";
    let AttentionShape { queries, keys, past, heads, kv_heads, head_dim } = shape;
    for (what, len) in [("S", keys), ("H E", heads * head_dim)] {
        require(NAME, i32::try_from(len).is_ok(), || {
            format!("{what} = {len} is more than a signed number of 32 bits holds")
        })?;
    }
    let number = number(client, dtype).ok_or_else(|| KernelError::Shape {
        kernel: NAME,
        reason: format!("this device has no instructions of Hopper for numbers of type {dtype}"),
    })?;
    let form = HopperAttentionForm { kernel, heads: shape.compiled_heads(), number };
    let map_of = |(name, buffer): (&&str, ArrayArg<R>)| {
        let (rows, heads) = if ["k", "v", "dk", "dv"].contains(name) { (keys, kv_heads) } else { (queries, heads) };
        tensor_map(binding(buffer), dtype, [rows, heads * head_dim], [form.box_rows(name), PIECE])
    };
    let maps = kernel.maps().iter().zip(matrices).map(map_of).collect();
    let info = vec![queries as u64, past as u64];
    let words = info.len();
    let arguments = KernelArguments::new()
        .with_tensor_maps(maps)
        .with_buffers(buffers.into_iter().map(binding).collect())
        .with_info(MetadataBindingInfo::new(info, words));
    let (owners, rows) = if kernel == Kernel::Keys { (kv_heads, keys) } else { (heads, queries) };
    let cubes = CubeCount::Static(index(NAME, "heads", owners)?, index(NAME, "tiles", rows.div_ceil(ROWS))?, 1);
    // SAFETY: buffer lengths were checked against the shape; the copy engine stays inside the matrices of its maps, whose
    // dimensions are the shape; rows of other buffers are read and written only below the number of queries; every loop is
    // bounded by the shape, and by starts and ends, which lie inside it.
    unsafe { client.launch_unchecked(Box::new(WrittenKernel(form)), cubes, arguments) };
    Ok(())
}
