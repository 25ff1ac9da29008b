//! Ranks as processes: under the real launcher, and killed.
#![allow(clippy::unwrap_used)] // a failed test may panic
mod allreduce;
#[path = "../common/mod.rs"]
mod common;
mod ddp;
mod digits;
#[path = "../common/programs.rs"]
mod programs;
