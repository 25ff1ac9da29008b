//! Client and server of PyTorch's c10d `TCPStore`: a candle-ddp rank and a PyTorch rank can use the same store.
//!
//! On the server, `protocol` parses bytes into requests, `state` executes them, and `output` holds replies; both share
//! bytes through `shared`. `service` moves bytes between these and the sockets, `listen` chooses addresses, and
//! `server` runs it all. On the client, `link` is one connection, and `client` is the store on top of it.
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
