//! The rendezvous store, which the launcher of machine 0 hosts and which outlives the workers.
use super::config::Config;
use super::console::message;
use super::error::{Error, Result};
use crate::rendezvous::{Listening, TcpStoreServer, host_store};
use std::net::{IpAddr, ToSocketAddrs};
use std::time::Duration;

/// Warns if the store's host name does not resolve on this machine. This is not an error, because the name may appear
/// later. The lookup runs in a thread, because a name server that does not answer takes long.
pub(super) fn check_address(config: &Config) -> Result<()> {
    let host = config.master_addr.clone();
    if config.topology.node_rank == 0 || host.parse::<IpAddr>().is_ok() {
        return Ok(());
    }
    let look_up = move || {
        if let Err(error) = (host.as_str(), 0).to_socket_addrs() {
            message(format_args!(
                "--master-addr: cannot resolve the name {host} on this machine: {error}. The workers will retry until \
                 their time-out"
            ));
        }
    };
    let thread = std::thread::Builder::new().name("ddprun-resolver".into()).spawn(look_up);
    thread.map(drop).map_err(|error| Error::io("starting a thread", error))
}

/// Shows the store's warnings to the user, such as foreign connections or a limit that keeps ranks out.
struct Warnings;

impl log::Log for Warnings {
    fn enabled(&self, metadata: &log::Metadata) -> bool {
        metadata.level() <= log::Level::Warn
    }

    fn log(&self, record: &log::Record) {
        if self.enabled(record.metadata()) {
            message(record.args());
        }
    }

    fn flush(&self) {}
}

/// Starts the store if this machine hosts it, and returns it with its port. The store serves, and holds its port, until
/// it is dropped.
///
/// It listens only on the master address, because anyone who can reach the store can write to it.
pub(super) fn host(config: &Config) -> Result<(Option<TcpStoreServer>, u16)> {
    if config.topology.node_rank != 0 {
        let missing =
            || Error::usage("--master-port", "is required on every machine except the one that hosts the store");
        return Ok((None, config.master_port.ok_or_else(missing)?));
    }
    // A program that calls the launcher may already have a logger.
    if log::set_logger(&Warnings).is_ok() {
        log::set_max_level(log::LevelFilter::Warn);
    }
    let port = config.master_port.unwrap_or(0);
    let listening = Listening::at(&config.master_addr, port, config.topology.nodes == 1, Duration::MAX);
    let server = host_store(&listening, Some(&config.run_id))?;
    let port = server.port();
    if let Some(warning) = &listening.warning {
        message(format_args!("--master-addr: {warning}"));
    }
    Ok((Some(server), port))
}
