use super::hosting::{host_shared, run_of};
use super::init_store::{InitStore, LimitedStore};
use super::init_watcher::InitWatcher;
use super::join::{Join, host};
use super::options::RendezvousOptions;
use super::plan::{Place, Plan};
use super::tcp_store::Listening;
use super::{FileStore, PrefixStore, Store, TcpStore};
use crate::Result;
use crate::deadline::deadline_after;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

/// Separates this crate's keys from those of other users of the same store.
const PREFIX: &str = "candle_ddp";

/// The result of a rendezvous.
#[derive(Clone)]
#[non_exhaustive]
pub struct Rendezvous {
    /// A store for this run only. On rank 0 it keeps the server alive, unless the launcher hosts it: rank 0 must hold
    /// it until no other rank needs it.
    pub store: Arc<dyn Store>,
    /// The rank of this process.
    pub rank: usize,
    /// The number of ranks.
    pub world_size: usize,
    /// The rank of this process among those on its host.
    pub local_rank: usize,
    /// The number of ranks on this host.
    pub local_world_size: usize,
    /// The address at which peers can reach this process, derived from its connection to the store; `None` with a
    /// [`FileStore`].
    pub address: Option<IpAddr>,
}

impl std::fmt::Debug for Rendezvous {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rendezvous")
            .field("rank", &self.rank)
            .field("world_size", &self.world_size)
            .field("local_rank", &self.local_rank)
            .field("local_world_size", &self.local_world_size)
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

/// Waits for the other ranks: PyTorch's `init_process_group` up to the point where the store exists and all ranks have
/// arrived.
///
/// Options take precedence over the init method's query, and that over the environment. Rank 0 hosts the
/// [`TcpStoreServer`](super::TcpStoreServer) unless the launcher does (TORCHELASTIC_USE_AGENT_STORE). The server
/// listens only on the master address, if that belongs to this host. Run ids of the launchers keep jobs apart that use
/// one port by mistake: the ranks of the second job get an error. The function may be called repeatedly, by all ranks
/// in the same order; each call, and each restart by the launcher, has its own keys.
///
/// # Errors
///
/// An error that would make the other ranks wait (a duplicate rank, a different world size) is returned on all ranks.
/// After the time-out, the error names the missing ranks.
pub fn rendezvous(options: &RendezvousOptions) -> Result<Rendezvous> {
    let (met, watcher) = meet(options)?;
    watcher.conclude(Ok(met))
}

/// Like [`rendezvous`], but also returns the watcher for the rest of initialisation, which bounds the store's calls
/// until then.
pub(crate) fn meet(options: &RendezvousOptions) -> Result<(Rendezvous, InitWatcher)> {
    let deadline = deadline_after(options.timeout);
    let plan = Plan::new(options)?;
    let Plan { rank, world_size, .. } = plan;
    let (mut addresses, mut hosts) = (None, false);
    let (name, base): (String, Arc<dyn LimitedStore>) = match &plan.place {
        Place::File(path) => (path.display().to_string(), Arc::new(FileStore::open(path, options.timeout)?)),
        Place::Tcp { host, port, launcher_hosts } => {
            hosts = rank == 0 && !launcher_hosts;
            let store = if hosts {
                let listening = Listening::at(host, *port, plan.is_one_host(), options.timeout);
                if let Some(warning) = &listening.warning {
                    log::warn!("{warning}");
                }
                let server = host_shared(&listening, plan.run_id.as_deref())?;
                // The host's name may not resolve to this host from inside.
                TcpStore::connect(&server.own_host(), server.port(), options.timeout)?.named(host).hosting(server)
            } else {
                TcpStore::connect(host, *port, options.timeout)?
            };
            addresses = Some((store.local_addr(), store.server_addr().ip()));
            (store.name(), Arc::new(store))
        }
    };
    let base = Arc::new(InitStore::new(base, deadline));
    let run = match run_of(&*base, &name, rank, plan.run_id.as_deref())? {
        Some(run_id) => format!("{PREFIX}/run {run_id}"),
        None => PREFIX.to_string(),
    };
    let prefix = format!("{run}/{}/{}", plan.restart_count, count_call(&name, rank));
    let mut watcher = InitWatcher::new(Arc::clone(&base), &prefix, rank, hosts);
    let started = watcher.start(world_size);
    let join = || -> Result<Rendezvous> {
        started?;
        let join = Join {
            store: &PrefixStore::new(format!("{prefix}/join"), base.clone()),
            name,
            rank,
            world_size,
            host: host(),
            addresses,
            deadline,
            timeout: options.timeout,
        };
        join.run()?;
        let (local_rank, local_world_size) = match plan.local {
            Some(local) => local,
            None => join.local_place()?,
        };
        let address = join.address()?;
        let store = Arc::new(PrefixStore::new(prefix, base));
        Ok(Rendezvous { store, rank, world_size, local_rank, local_world_size, address })
    };
    match join() {
        Ok(met) => Ok((met, watcher)),
        Err(error) => watcher.conclude(Err(error)),
    }
}

/// Counts how often this process has joined this store as this rank. The count is part of the keys, because the store
/// may still hold those of earlier calls. Threads of one process may be several ranks.
fn count_call(store: &str, rank: usize) -> u64 {
    static CALLS: Mutex<BTreeMap<(String, usize), u64>> = Mutex::new(BTreeMap::new());
    let mut calls = CALLS.lock().unwrap_or_else(PoisonError::into_inner);
    let count = calls.entry((store.to_string(), rank)).or_default();
    *count += 1;
    *count - 1
}
