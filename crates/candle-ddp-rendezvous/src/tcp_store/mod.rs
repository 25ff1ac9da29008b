//! Client and server of PyTorch's c10d `TCPStore`: a candle-ddp rank and a PyTorch rank can use the same store.
//!
//! On the server, `protocol` parses bytes into requests, `member` decides who may make them, `state` executes them, and
//! `output` holds replies; both share bytes through `shared`. `service` moves bytes between these and the sockets,
//! `listen` chooses addresses, and `server` runs it all. On the client, `link` is one connection, and `client` is the
//! store on top of it. Both find addresses by `address`.
mod address;
mod client;
#[cfg(any(test, fuzzing))]
mod fuzz;
mod link;
mod listen;
mod member;
mod options;
mod output;
mod protocol;
mod queue;
mod server;
mod service;
mod shared;
mod state;
#[cfg(test)]
mod tests;
mod will;

pub use address::loopback;
pub use client::TcpStore;
#[cfg(any(test, fuzzing))]
pub use fuzz::store_protocol as fuzz_store_protocol;
pub use listen::Listening;
pub use options::{TcpStoreOptions, TcpStoreServerOptions};
pub use server::TcpStoreServer;
pub use will::RUN_ID;
