//! The store at which the ranks meet. It lives in the launcher of machine 0 and outlives the workers.
use super::config::Config;
use crate::rendezvous::TcpStoreServer;
use crate::{Error, Result};
use std::net::{IpAddr, SocketAddr};

/// Starts the store where it is this machine's task; it serves, and holds its port, until it is dropped. Returns it
/// and its port.
///
/// An address that only this machine can reach is the only one that is served: nobody else has business there.
pub(super) fn host(config: &Config) -> Result<(Option<TcpStoreServer>, u16)> {
    if config.topology.node_rank != 0 {
        let missing = || Error::invalid("--master-port", "is needed on every machine but the one that hosts the store");
        return Ok((None, config.master_port.ok_or_else(missing)?));
    }
    let port = config.master_port.unwrap_or(0);
    let server = match config.master_addr.parse::<IpAddr>() {
        Ok(address) if address.is_loopback() => TcpStoreServer::bind_address(SocketAddr::new(address, port)),
        _ => TcpStoreServer::bind(port),
    }?;
    let port = server.port();
    Ok((Some(server), port))
}
