//! The rendezvous store, which the launcher of machine 0 hosts and which outlives the workers.
use super::events::Events;
use super::nodes::{Address, Coordinator, Link, Node};
use crate::check::Fitness;
use crate::command::{Config, Rendezvous};
use crate::console::message;
use crate::error::{Error, Result, refuse};
use crate::verdict::Verdicts;
use crate::view::status::{RUN_STATUS, RunStatus};
use candle_ddp_base::host::host_name;
use candle_ddp_base::thread;
use candle_ddp_rendezvous::json::encode;
use candle_ddp_rendezvous::{Listening, TcpStoreServer, check_room, host_store};
use std::io::ErrorKind;
use std::net::{IpAddr, ToSocketAddrs};
use std::time::{Duration, Instant};

/// How long a machine that is not fit looks for the store, to tell the others.
const UNFIT: Duration = Duration::from_secs(30);
/// How long the name of this machine may take to resolve.
const NAME: Duration = Duration::from_secs(10);

/// Warns if the store's host name does not resolve on this machine. This is not an error, because the name may appear
/// later. The lookup runs in a thread, because a name server that does not answer takes long.
pub(crate) fn check_address(config: &Config) -> Result<()> {
    let host = config.master_addr.clone();
    if config.topology.node_rank == 0 || host.parse::<IpAddr>().is_ok() {
        return Ok(());
    }
    let look_up = move || {
        if let Err(error) = (host.as_str(), 0).to_socket_addrs() {
            message(format_args!(
                "--master-addr: cannot resolve the name {host:?} on this machine: {error}. The workers will retry until \
                 their time-out"
            ));
        }
    };
    Ok(thread::spawn("ddprun-resolver", look_up).map(drop)?)
}

/// Starts the store if this machine hosts it, and returns it with its port. The store serves, and holds its port, until
/// it is dropped.
///
/// It listens only on the master address. With a secret, only clients that know it can use the store; without one,
/// anyone who reaches it can. It holds `status` about the run from its beginning.
pub(crate) fn host(config: &Config, status: &RunStatus) -> Result<(Option<TcpStoreServer>, u16)> {
    let port = config.master_port.unwrap_or(0);
    let is_told = config.rendezvous.as_ref().and_then(|rendezvous| rendezvous.pace.is_host);
    let is_static = config.rendezvous.as_ref().is_none_or(|rendezvous| rendezvous.is_static);
    if is_static && !is_told.unwrap_or(config.topology.node_rank == 0) {
        let missing =
            || Error::usage("--master-port", "is required on every machine except the one that hosts the store");
        return Ok((None, config.master_port.ok_or_else(missing)?));
    }
    let listening = listening(config, port, is_static)?;
    // If the address may not belong to this machine, there is a warning.
    if !is_static && !is_told.unwrap_or(listening.warning.is_none()) {
        return Ok((None, port));
    }
    let [least, most] = match &config.rendezvous {
        Some(Rendezvous { terms, .. }) => {
            let workers = config.topology.local_world_size();
            [terms.min_nodes, terms.max_nodes].map(|nodes| nodes.saturating_mul(workers))
        }
        None => [config.topology.world_size(); 2],
    };
    check_room(least)?;
    let secret = &config.secret;
    let status = String::from_utf8_lossy(&encode(status)).into_owned();
    let pairs = [(RUN_STATUS, status.as_str())];
    let server = match host_store(&listening, Some(&config.run_id), secret.get(), secret.has_guests(), most, &pairs) {
        // Another ddprun of the run on this machine has started it.
        Err(candle_ddp_rendezvous::Error::Base(candle_ddp_base::Error::Io { error, .. }))
            if error.kind() == ErrorKind::AddrInUse && !is_static && is_told.is_none() =>
        {
            return Ok((None, port));
        }
        server => server?,
    };
    let port = server.port();
    if let Some(warning) = &listening.warning {
        message(format_args!("--master-addr: {warning}"));
    }
    Ok((Some(server), port))
}

/// The addresses on which the store listens. If the host's name does not resolve on this machine, the workers here cannot find
/// the store either. On several machines the name may take a moment to resolve, such as the name of a Kubernetes service.
fn listening(config: &Config, port: u16, is_static: bool) -> Result<Listening> {
    let patience = if config.rendezvous.is_some() { NAME } else { Duration::ZERO };
    let (started, mut is_told) = (Instant::now(), false);
    loop {
        let listening = Listening::at(&config.master_addr, port, config.rendezvous.is_none(), Duration::MAX)?;
        let Some(reason) = listening.unresolved.as_ref().filter(|_| is_static) else { return Ok(listening) };
        if started.elapsed() >= patience {
            return refuse("--master-addr", format!("{reason}. It must be a name or an address of this machine"));
        }
        if !std::mem::replace(&mut is_told, true) {
            message(format_args!("--master-addr: {reason}. Trying again for {} s", patience.as_secs()));
        }
        std::thread::sleep(Duration::from_millis(500));
    }
}

/// Connects this agent to those of the other nodes, if there are any.
pub(crate) fn link(
    config: &Config,
    server: Option<&TcpStoreServer>,
    (port, fitness): (u16, Result<Option<Fitness>, String>),
    events: &Events,
) -> Result<Option<Link>> {
    let Some(rendezvous) = &config.rendezvous else { return Ok(None) };
    let secret = config.secret.get().cloned();
    // The agents keep the verdicts themselves.
    let verdicts = Verdicts::new(None, &config.run_id);
    let start = |server| Coordinator::start(server, secret.clone(), rendezvous.clone(), verdicts, None);
    let coordinator = server.map(start).transpose()?;
    let Rendezvous { terms, mut pace, is_static } = rendezvous.clone();
    let node_rank = is_static.then_some(config.topology.node_rank);
    let is_unfit = fitness.is_err();
    let (fitness, unfit) = fitness.map_or_else(|reason| (None, Some(reason)), |fitness| (fitness, None));
    let (host, workers) = (host_name(), config.topology.local_world_size());
    let node = Node { host, node_rank, hosts: server.is_some(), terms, workers, fitness, unfit };
    if is_unfit {
        // If nobody hosts the store by then, there may be no others.
        pace.join_timeout = pace.join_timeout.min(UNFIT);
    }
    // The host's name may not resolve to this host from inside.
    let host = server.map_or_else(|| config.master_addr.clone(), TcpStoreServer::own_host);
    Link::join(Address { host, port, secret }, node, &pace, coordinator, events.newsroom()).map(Some)
}
