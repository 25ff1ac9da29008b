//! PyTorch's c10d `TCPStore`, client and server: a candle-ddp rank and a PyTorch rank can meet in the same store.
//!
//! `protocol` turns bytes into requests, `state` answers them, `server` moves the bytes between sockets and those two;
//! `link` is one connection of a client, `client` the store on top of it.
mod client;
mod link;
mod protocol;
mod server;
mod state;
#[cfg(test)]
mod tests;

pub use client::TcpStore;
pub use server::TcpStoreServer;
