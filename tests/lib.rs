//! Test-only crate: see `promises.rs`.
