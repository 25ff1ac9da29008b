use super::generation::Told;
use super::hosting::{check_room, host_shared, run_of};
use super::init_store::{InitStore, LimitedStore};
use super::init_watcher::InitWatcher;
use super::join::{Join, host};
use super::options::RendezvousOptions;
use super::plan::{Plan, StoreLocation};
use super::progress::{Place, Reporter};
use super::tcp_store::Listening;
use super::{FileStore, HashStore, PrefixStore, Secret, Store, TcpStore, TcpStoreOptions};
use crate::{Error, Result};
use candle_ddp_base::deadline::deadline_after;
use candle_ddp_base::debug_fields;
use candle_ddp_base::panic::lock;
use candle_ddp_base::warnings::warn_aloud;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, Once};
use std::time::{Duration, Instant};

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
    /// The secret that the ranks prove to each other when they connect.
    #[doc(hidden)]
    pub secret: Option<Secret>,
}

debug_fields!(Rendezvous: rank, world_size, local_rank, local_world_size, address);

/// Waits for the other ranks: PyTorch's `init_process_group` up to the point where the store exists and all ranks have
/// arrived.
///
/// With a secret, nobody else can use the store, unless torchrun hosts it, which knows no secrets. A rank with a secret
/// refuses a store that does not prove that it knows it, and vice versa.
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
pub fn rendezvous(options: RendezvousOptions) -> Result<Rendezvous> {
    let (met, watcher) = meet(&options)?;
    watcher.conclude(Ok(met), Error::failure)
}

/// Like [`rendezvous`], but also returns the watcher for the rest of initialisation, which bounds the store's calls
/// until then.
pub fn meet(options: &RendezvousOptions) -> Result<(Rendezvous, InitWatcher)> {
    let deadline = deadline_after(options.timeout);
    let run = RunStore::open(options, deadline)?;
    run.meet(Meeting {
        prefix: run.prefix(run.count_call()),
        rank: run.plan.rank,
        world_size: run.plan.world_size,
        is_whole: true,
        deadline,
        generation: None,
        superseded: None,
    })
}

/// The store of a run, before its ranks have met in it.
pub struct RunStore {
    plan: Plan,
    name: String,
    store: Arc<dyn LimitedStore>,
    /// The addresses of this rank's end and of the store's end of their connection.
    addresses: Option<(IpAddr, IpAddr)>,
    /// Whether this process hosts the store.
    hosts: bool,
    prefix: String,
    timeout: Duration,
    secret: Option<Secret>,
    /// Reports this rank's progress to `ddprun`, if that started it.
    reporter: Option<Arc<Reporter>>,
}

debug_fields!(RunStore: name, hosts, prefix);

/// A meeting of ranks in the store of their run.
#[derive(Debug)]
pub struct Meeting {
    /// The prefix of their keys, which no other meeting uses.
    pub prefix: String,
    /// This process's rank among them.
    pub rank: usize,
    /// Their number.
    pub world_size: usize,
    /// Whether all ranks of the run take part, with the same numbers as in the run.
    pub is_whole: bool,
    /// When the meeting fails.
    pub deadline: Instant,
    /// Their generation, in an elastic run.
    pub generation: Option<u64>,
    /// A key that ends the meeting, once another one takes its place.
    pub superseded: Option<String>,
}

impl RunStore {
    /// Connects to the store, or hosts it.
    pub fn open(options: &RendezvousOptions, deadline: Instant) -> Result<Self> {
        let plan = Plan::new(options)?;
        let rank = plan.rank;
        let (mut addresses, mut hosts) = (None, false);
        let secret = match &options.secret {
            Some(secret) => Some(secret.clone()),
            None => Secret::from_env()?,
        };
        if plan.is_plain && secret.is_some() && rank == 0 {
            warn_aloud(format_args!(
                "a launcher other than ddprun hosts the store, without a secret: anyone who reaches it can use it. The \
                 connections between ranks do require the secret"
            ));
        }
        let (name, store): (String, Arc<dyn LimitedStore>) = match &plan.store {
            StoreLocation::Memory => {
                say_alone();
                ("in this process".to_string(), Arc::new(HashStore::new(options.timeout)))
            }
            StoreLocation::File(path) => {
                (path.display().to_string(), Arc::new(FileStore::open(path, options.timeout)?))
            }
            StoreLocation::Tcp { host, port, launcher_hosts } => {
                hosts = rank == 0 && !launcher_hosts;
                let secret = secret.clone().filter(|_| !plan.is_plain);
                let store = if hosts {
                    let listening = Listening::at(host, *port, plan.is_one_host(), options.timeout)?;
                    if let Some(warning) = &listening.warning {
                        warn_aloud(format_args!("{warning}"));
                    }
                    let server = host_shared(&listening, plan.run_id.as_deref(), secret.as_ref())?;
                    let options = TcpStoreOptions { timeout: options.timeout, secret };
                    // The host's name may not resolve to this host from inside.
                    TcpStore::connect_with(&server.own_host(), server.port(), options)?.named(host).hosting(server)
                } else {
                    let options = TcpStoreOptions { timeout: options.timeout, secret };
                    TcpStore::connect_for(host, *port, options, &format!(". {}", plan.origin))?
                };
                addresses = Some((store.local_addr(), store.server_addr().ip()));
                (store.name(), Arc::new(store))
            }
        };
        let limited = InitStore::new(Arc::clone(&store), deadline);
        let prefix = match run_of(&limited, &name, rank, plan.run_id.as_deref())? {
            Some(run_id) => format!("{PREFIX}/run {run_id}"),
            None => PREFIX.to_string(),
        };
        let reporter = reporter(&plan, secret.as_ref());
        Ok(Self { plan, name, store, addresses, hosts, prefix, timeout: options.timeout, secret, reporter })
    }

    /// The rank of this process.
    pub fn rank(&self) -> usize {
        self.plan.rank
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        self.plan.world_size
    }

    /// The store itself, without a prefix.
    pub fn store(&self) -> Arc<dyn Store> {
        self.store.clone()
    }

    /// Whether this process hosts the store.
    pub fn hosts(&self) -> bool {
        self.hosts
    }

    /// Whether a launcher hosts the store, and thus restarts all ranks when one is lost.
    pub fn launcher_hosts(&self) -> bool {
        matches!(self.plan.store, StoreLocation::Tcp { launcher_hosts: true, .. })
    }

    /// How often the launcher has restarted all ranks, or this one.
    pub fn restart_count(&self) -> u64 {
        self.plan.restart_count
    }

    /// What `ddprun` told this process; `None` if another launcher started this rank.
    pub fn agent(&self, told: Option<String>) -> Option<Told> {
        let told = told.filter(|_| self.launcher_hosts())?;
        let mut parts = told.rsplitn(4, '/');
        let min_world_size = parts.next()?.parse().ok()?;
        let incarnation = parts.next()?.parse().ok()?;
        let attempt = parts.next()?.parse().ok()?;
        (self.plan.run_id.as_deref() == parts.next()).then_some(Told { attempt, incarnation, min_world_size })
    }

    /// The prefix of the keys of call number `call` in this start of the run.
    pub fn prefix(&self, call: u64) -> String {
        format!("{}/{}/{call}", self.prefix, self.plan.restart_count)
    }

    /// Counts how often this process has joined this store as this rank, from 0.
    pub fn count_call(&self) -> u64 {
        count_call(&self.name, self.plan.rank)
    }

    /// Waits for the other ranks of a meeting. Also returns the watcher for the rest of initialisation.
    pub fn meet(&self, meeting: Meeting) -> Result<(Rendezvous, InitWatcher)> {
        let Meeting { prefix, rank, world_size, is_whole, deadline, generation, superseded } = meeting;
        if let (Some(reporter), Some(generation)) = (&self.reporter, generation) {
            reporter.set_generation(generation);
        }
        // Later, ranks that do not come were killed, or are being replaced.
        let is_first = is_whole && generation.unwrap_or(0) == 0;
        let base = Arc::new(InitStore::new(Arc::clone(&self.store), deadline).reporting(self.reporter.clone()));
        let mut watcher = InitWatcher::new(Arc::clone(&base), &prefix, rank, self.hosts);
        let started = watcher.start(world_size, superseded);
        let join = || -> Result<Rendezvous> {
            started?;
            if self.hosts {
                check_room(world_size)?;
            }
            let join = Join {
                store: &PrefixStore::new(format!("{prefix}/join"), base.clone()),
                name: self.name.clone(),
                rank,
                world_size,
                host: host(),
                addresses: self.addresses,
                deadline,
                timeout: self.timeout,
                origin: Some(&self.plan.origin).filter(|_| is_first && !self.launcher_hosts()),
            };
            join.run()?;
            let (local_rank, local_world_size) = match self.plan.local.filter(|_| is_whole) {
                Some(local) => local,
                None => join.local_place()?,
            };
            let address = join.address()?;
            let store = Arc::new(PrefixStore::new(prefix, base));
            let secret = self.secret.clone();
            Ok(Rendezvous { store, rank, world_size, local_rank, local_world_size, address, secret })
        };
        match join() {
            Ok(met) => Ok((met, watcher)),
            Err(error) => watcher.conclude(Err(error), Error::failure),
        }
    }
}

/// Warns that there is no launcher. A program that should have one would otherwise train alone without a word.
fn say_alone() {
    const TEXT: &str = "this process was started without a launcher, so it is the only rank (world size 1): for more, \
                        start it with `ddprun --nproc-per-node N PROGRAM`, torchrun, srun or mpirun";
    static SAID: Once = Once::new();
    SAID.call_once(|| warn_aloud(format_args!("{TEXT}")));
}

/// Starts to report the progress of this rank, if `ddprun` started it.
fn reporter(plan: &Plan, secret: Option<&Secret>) -> Option<Arc<Reporter>> {
    let StoreLocation::Tcp { host, port, launcher_hosts: true } = &plan.store else { return None };
    let place = Place { rank: plan.rank, host: host.clone(), port: *port, secret: secret.cloned() };
    (!plan.is_plain).then(|| Reporter::start(place)).flatten().map(Arc::new)
}

/// Counts how often this process has joined this store as this rank. The count is part of the keys, because the store
/// may still hold those of earlier calls. Threads of one process may be several ranks.
fn count_call(store: &str, rank: usize) -> u64 {
    static CALLS: Mutex<BTreeMap<(String, usize), u64>> = Mutex::new(BTreeMap::new());
    let mut calls = lock(&CALLS);
    let count = calls.entry((store.to_string(), rank)).or_default();
    *count += 1;
    *count - 1
}
