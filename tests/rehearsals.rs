//! Promises in a program of their own: CubeCL runs a thread for each device that a rehearsal records, until the program ends. These
//! threads look for work all the time, and would take half of the processor from the other promises.

// A test fails by panicking.
#![allow(clippy::unwrap_used, clippy::print_stderr)]
// The other promises use the rest.
#![allow(dead_code, unused_imports, unused_macros)]

mod support;

mod rehearsal;
