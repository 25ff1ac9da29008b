//! Connections between ranks of different hosts.
pub(crate) mod accept;
pub(crate) mod connect;
pub(crate) mod connector;
pub(crate) mod control;
pub(crate) mod door;
pub(crate) mod frame;
pub(crate) mod handshake;
pub(crate) mod keepalive;
pub(crate) mod keys;
pub(crate) mod meeting;
pub(crate) mod monitor;
pub(crate) mod piece;
pub(crate) mod reach;
pub(crate) mod session;
pub(crate) mod transport;
