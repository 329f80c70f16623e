//! The tensors of a model by checkpoint name.
//!
//! [`load()`] reads a model from a container and [`random()`] draws one; both ask a source for each tensor in turn.
//! [`outline()`] makes an outline of a model, which launches the model's kernels.
//! [`trained`](fn@trained) moves the model to the backend that records gradients.
//! [`fields()`] lists a model's tensors, [`Live`] shows them to whoever writes a file, and [`Replace`] exchanges them.

mod autodiff;
mod forge;
mod host;
mod live;
mod load;
mod outline;
mod random;
mod structure;

pub use autodiff::trained;
pub use host::{PIECES, TRANSFER, to_host};
pub use live::Live;
pub use load::{Purpose, load};
pub use outline::outline;
pub use random::random;
pub use structure::{Field, Replace, fields, without_codes};
