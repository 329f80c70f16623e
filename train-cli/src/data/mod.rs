//! Training data: [`format`](mod@format) turns files into rows, those of Parquet and Arrow tables too, [`conversation`] makes
//! [`sample`]s of conversations, and [`read`] does both for all files of a run; [`token_cache`] keeps the samples on disk;
//! [`rows`] splits, repeats and packs them; [`order`] hands them out as micro-batches in a repeatable order. [`make`] makes rows
//! from a recipe, and [`haystack`] texts to copy from. [`tool_calls`] checks what a message calls.

mod arrow;
pub mod conversation;
pub mod format;
pub mod haystack;
pub mod make;
pub mod order;
mod parquet;
mod parquet_schema;
pub mod read;
pub mod rows;
pub mod sample;
mod table;
pub mod token_cache;
pub mod tool_calls;
