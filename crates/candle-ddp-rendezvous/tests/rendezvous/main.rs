//! How ranks find each other: launcher environments, init methods, and key-value stores.
#![allow(clippy::unwrap_used)] // a failed test may panic
mod client;
mod file_store;
mod meeting;
mod secret;
mod server;
mod starting;
mod store;
