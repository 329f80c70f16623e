//! Training data: [`read`] turns files into [`sample`]s, with [`chat`] for conversations; [`token_cache`] keeps them on
//! disk; [`rows`] splits, repeats and packs them; [`order`] hands them out as micro-batches in a repeatable order.

pub mod chat;
pub mod order;
pub mod read;
pub mod rows;
pub mod sample;
pub mod token_cache;
