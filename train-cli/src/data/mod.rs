//! Training data: files are read, rendered and tokenized ([`read`]), kept on disk ([`token_cache`]),
//! split and packed ([`rows`]), and handed out as micro-batches in a repeatable order ([`order`]).

pub mod order;
pub mod read;
pub mod rows;
pub mod token_cache;
