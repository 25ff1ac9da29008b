//! How ranks find each other: launcher environments, init methods, and key-value stores.
#![allow(clippy::unwrap_used)] // a failed test may panic
mod client;
mod file_store;
mod meeting;
#[path = "../../../../tests/common/port.rs"]
mod port;
#[path = "../../../../tests/common/process.rs"]
mod process;
mod secret;
mod server;
#[path = "../../../../tests/common/skip.rs"]
mod skip;
mod starting;
mod store;
