//! The operations in Burn's own tensors: what the CPU runs, what a device runs where its kernels do not fit, and what
//! kernels are compared with. Each gradient is written out by hand, as in the kernels.

mod attention;
mod head;
mod norms;
mod products;

pub(crate) use attention::{attention, attention_backward, prompt_attention};
pub(crate) use head::{head_loss, head_weight_gradient};
pub(crate) use norms::{
    norm_rope, norm_rope_backward, rms_norm, rms_norm_backward, square_sum, swiglu, swiglu_backward, token_rows,
};
pub(crate) use products::products;
