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

/// Keeps our keys apart from those of other users of the same store.
const PREFIX: &str = "candle_ddp";

/// What a rank knows when all have found each other.
#[derive(Clone)]
#[non_exhaustive]
pub struct Rendezvous {
    /// A store that belongs to this run alone. On rank 0 it keeps the server alive, unless the launcher hosts it: rank
    /// 0 must hold it until the others need it no more.
    pub store: Arc<dyn Store>,
    /// This process's place among all.
    pub rank: usize,
    /// The number of ranks.
    pub world_size: usize,
    /// This process's place among those of its host.
    pub local_rank: usize,
    /// The number of ranks on this host.
    pub local_world_size: usize,
    /// Where peers can reach this process, judged by its connection to the store; `None` with a [`FileStore`].
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

/// Meets the other ranks: PyTorch's `init_process_group` up to the point where the store is there and all have come.
///
/// Options win over the init method's query, and that over the environment. Rank 0 hosts the
/// [`TcpStoreServer`](super::TcpStoreServer) unless the launcher does (TORCHELASTIC_USE_AGENT_STORE); it listens on the
/// master address only, where that is an address of this host. Jobs that use one port by mistake do not disturb each
/// other where their launchers gave them run ids: the ranks of the second end with an error. May be called again later, by all ranks in the same order: each
/// call has keys of its own, as has each restart by the launcher. An error of one rank that the others would wait for
/// (a rank given twice, another world size) is an error on all; who has not come in time is named.
pub fn rendezvous(options: &RendezvousOptions) -> Result<Rendezvous> {
    let (met, watcher) = meet(options)?;
    watcher.conclude(Ok(met))
}

/// [`rendezvous`], with the watcher over what else belongs to initialisation. It bounds the calls of the store until then.
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
                // Not by the host's name, which need not lead to this host from inside of it.
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

/// How often this process has met others as this rank in this store: a part of the keys, since the store may remember
/// the last time. Threads of one process may be several ranks.
fn count_call(store: &str, rank: usize) -> u64 {
    static CALLS: Mutex<BTreeMap<(String, usize), u64>> = Mutex::new(BTreeMap::new());
    let mut calls = CALLS.lock().unwrap_or_else(PoisonError::into_inner);
    let count = calls.entry((store.to_string(), rank)).or_default();
    *count += 1;
    *count - 1
}
