//! The store at which the ranks meet. It lives in the launcher of machine 0 and outlives the workers.
use super::config::Config;
use crate::{Error, Result};
use std::net::TcpListener;

/// Holds the store's port, and serves it, until it is dropped.
pub(super) struct HostedStore {
    _server: TcpListener,
}

/// Starts the store where it is this machine's task. Returns it and its port.
pub(super) fn host(config: &Config) -> Result<(Option<HostedStore>, u16)> {
    if config.topology.node_rank != 0 {
        let port =
            config.master_port.ok_or_else(|| Error::invalid("--master-port", "is needed with several machines"))?;
        return Ok((None, port));
    }
    let wanted = config.master_port.unwrap_or(0);
    let hint = "choose another --master-port, or leave it out on one machine to get a free one";
    let context = || format!("cannot host the store at port {wanted} ({hint})");
    let server = TcpListener::bind(("0.0.0.0", wanted)).map_err(|error| Error::io(context(), error))?;
    let port = server.local_addr().map_err(|error| Error::io(context(), error))?.port();
    Ok((Some(HostedStore { _server: server }), port))
}
