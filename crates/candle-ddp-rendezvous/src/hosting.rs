//! The store that a launcher or rank 0 hosts for a job.
use super::tcp_store::{Listening, RUN_ID};
use super::{Secret, Store, TcpStoreServer, TcpStoreServerOptions};
use crate::{Error, Result};
use candle_ddp_base::descriptors::check_limit;
use candle_ddp_base::panic::lock;
use std::io::ErrorKind;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

/// The run id that torchrun and ddprun use for runs on several nodes by default. It does not distinguish runs.
const NO_NAME: &str = "none";

fn named(run_id: Option<&str>) -> Option<&str> {
    run_id.filter(|run_id| *run_id != NO_NAME)
}

/// The connections of a rank to the store.
const CONNECTIONS: usize = 3;

/// Hosts the store of the run `run_id`. With `guests`, it also serves clients that do not know `secret`, with separate
/// keys, until a client proves that it knows it. `ranks` of them may come at once. The job's keys begin with `pairs`.
pub fn host(
    listening: &Listening,
    run_id: Option<&str>,
    secret: Option<&Secret>,
    guests: bool,
    ranks: usize,
    pairs: &[(&str, &str)],
) -> Result<TcpStoreServer> {
    let pairs = [&[(RUN_ID, named(run_id).unwrap_or_default())][..], pairs].concat();
    let default = TcpStoreServerOptions::default();
    let most = CONNECTIONS.saturating_mul(ranks).min(default.max_clients / 4);
    let max_ungreeted = default.max_ungreeted.max(most);
    let options = TcpStoreServerOptions { secret: secret.cloned(), guests, max_ungreeted, ..default };
    TcpStoreServer::serve(&listening.addresses, options, &pairs)
}

/// Checks that this process may have as many connections open as the store of `ranks` ranks needs.
///
/// # Errors
/// Returns [`InvalidArgument`](candle_ddp_base::Error::InvalidArgument), with the number that is needed.
pub fn check_room(ranks: usize) -> Result<()> {
    // The connections of all ranks may take three quarters of the limit. Some are open already.
    let purpose = format!("the store of {ranks} rank(s), which this process hosts");
    check_limit(0, (CONNECTIONS + 1) * ranks, &purpose).map_err(|reason| Error::invalid("ulimit -n", reason))
}

/// The servers that this process hosts. Groups that use the same port, concurrently or in succession, share a server.
static SERVERS: Mutex<Vec<Weak<TcpStoreServer>>> = Mutex::new(Vec::new());

/// How long a port may still be held by an earlier attempt's process, or by a child that is just being started.
const RELEASE: Duration = Duration::from_secs(1);

/// Like [`host`], for any number of ranks, but returns the server that this process already hosts there, if any.
pub(super) fn host_shared(
    listening: &Listening,
    run_id: Option<&str>,
    secret: Option<&Secret>,
) -> Result<Arc<TcpStoreServer>> {
    let mut servers = lock(&SERVERS);
    servers.retain(|server| server.strong_count() > 0);
    let there = |server: &Arc<TcpStoreServer>| server.listens_on(&listening.addresses);
    if let Some(server) = servers.iter().filter_map(Weak::upgrade).find(there) {
        return Ok(server);
    }
    let deadline = Instant::now() + RELEASE;
    let server = loop {
        match host(listening, run_id, secret, false, 0, &[]) {
            Err(Error::Base(candle_ddp_base::Error::Io { error, .. }))
                if error.kind() == ErrorKind::AddrInUse && Instant::now() < deadline =>
            {
                std::thread::sleep(Duration::from_millis(20));
            }
            result => break Arc::new(result?),
        }
    };
    servers.push(Arc::downgrade(&server));
    Ok(server)
}

/// Returns the id of the run whose ranks use this store, for their keys; `None` if it is unknown.
///
/// The store's run id applies to all of its ranks. So a rank whose environment lacks the run id, or has one that rank 0
/// lacks, still finds the others.
///
/// # Errors
/// Returns [`Error::Store`] if the store belongs to another run, because two jobs use the same port.
pub(super) fn run_of(store: &dyn Store, name: &str, rank: usize, own: Option<&str>) -> Result<Option<String>> {
    let own = named(own);
    if !store.check(&[RUN_ID])? {
        return Ok(own.map(str::to_string));
    }
    let hosted = String::from_utf8_lossy(&store.get(RUN_ID)?).into_owned();
    if hosted.is_empty() {
        return Ok(None);
    }
    match own {
        Some(own) if own != hosted => Err(Error::Store {
            operation: format!("rendezvous of rank {rank}"),
            store: name.to_string(),
            reason: format!(
                "the store belongs to the run {hosted:?}, but this rank belongs to the run {own:?}. If these are two \
                 jobs, give each its own port (MASTER_PORT, --master-port); if they are one, give all nodes the same \
                 run id (--run-id)"
            ),
        }),
        _ => Ok(Some(hosted)),
    }
}
