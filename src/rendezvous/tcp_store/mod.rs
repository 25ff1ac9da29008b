//! PyTorch's c10d `TCPStore`, client and server: a candle-ddp rank and a PyTorch rank can meet in the same store.
//!
//! `protocol` turns bytes into requests and `state` answers them, with bytes that it and every `output` have in common
//! (`shared`). `service` moves the bytes between sockets and those; `listen` says where, and `server` runs it.
//! `link` is one connection of a client, `client` the store on top of it.
mod client;
mod link;
mod listen;
mod options;
mod output;
mod protocol;
mod server;
mod service;
mod shared;
mod state;
#[cfg(test)]
mod tests;

pub use client::TcpStore;
pub(crate) use listen::Listening;
pub use options::TcpStoreServerOptions;
pub use server::TcpStoreServer;
