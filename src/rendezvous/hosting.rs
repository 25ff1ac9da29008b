//! The store that a launcher or rank 0 hosts for one job.
use super::tcp_store::Listening;
use super::{Store, TcpStoreServer, TcpStoreServerOptions};
use crate::{Error, Result};
use std::io::ErrorKind;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

/// The key with which a hosted store says whose it is: the run id, or nothing where that is unknown.
const RUN_ID: &str = "candle_ddp/run_id";

/// The run id of torchrun and ddprun for runs of several nodes where the user gives none: it tells no runs apart.
const NO_NAME: &str = "none";

fn named(run_id: Option<&str>) -> Option<&str> {
    run_id.filter(|run_id| *run_id != NO_NAME)
}

/// Hosts the store of the run `run_id`.
pub(crate) fn host(listening: &Listening, run_id: Option<&str>) -> Result<TcpStoreServer> {
    let pairs = [(RUN_ID, named(run_id).unwrap_or_default())];
    TcpStoreServer::serve(&listening.addresses, TcpStoreServerOptions::default(), &pairs)
}

/// The servers that this process hosts: groups that meet at the same port, one after the other or at once, share one.
static SERVERS: Mutex<Vec<Weak<TcpStoreServer>>> = Mutex::new(Vec::new());

/// How long a port may still be in the hands of an earlier attempt's process, or of a child that is just being started.
const RELEASE: Duration = Duration::from_secs(1);

/// As [`host`], or the one that this process hosts there already.
pub(super) fn host_shared(listening: &Listening, run_id: Option<&str>) -> Result<Arc<TcpStoreServer>> {
    let mut servers = SERVERS.lock().unwrap_or_else(PoisonError::into_inner);
    servers.retain(|server| server.strong_count() > 0);
    let there = |server: &Arc<TcpStoreServer>| server.listens_on(&listening.addresses);
    if let Some(server) = servers.iter().filter_map(Weak::upgrade).find(there) {
        return Ok(server);
    }
    let deadline = Instant::now() + RELEASE;
    let server = loop {
        match host(listening, run_id) {
            Err(Error::Io { error, .. }) if error.kind() == ErrorKind::AddrInUse && Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(20));
            }
            result => break Arc::new(result?),
        }
    };
    servers.push(Arc::downgrade(&server));
    Ok(server)
}

/// The run whose ranks meet in this store, for their keys; `None` where nobody knows.
///
/// A store that says whose it is decides for all of its ranks, so that one whose environment lacks the run id, or has
/// one that rank 0 lacks, still finds the others.
///
/// # Errors
/// The store is that of another run: two jobs use one port.
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
                "the store is that of the run {hosted:?}, and this rank belongs to the run {own:?}. If these are two \
                 jobs, give each a port of its own (MASTER_PORT, --master-port); if they are one, give all nodes the \
                 same run id (--run-id)"
            ),
        }),
        _ => Ok(Some(hosted)),
    }
}
