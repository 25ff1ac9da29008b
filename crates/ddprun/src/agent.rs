//! What becomes of a run whose worker has ended: who is started again, and with whom the others go on.
use super::config::Topology;
use super::console::message;
use super::environment::Incarnation;
use super::error::Result;
use super::judge::{self, End, Restarts};
use super::members::Members;
use super::nodes::{Admission, Exited, Link, Message, Replacement, Report, Round, Slot};
use super::status::{LastFailure, Phase, RUN_STATUS, RunStatus};
use super::store;
use super::worker::{Exit, Starter, Worker};
use candle_ddp_rendezvous::json::encode;
use candle_ddp_rendezvous::{Store, TcpStore, TcpStoreOptions, TcpStoreServer};
use std::sync::Arc;
use std::time::Duration;

/// How long a call of the launcher's own store may take.
const TIMEOUT: Duration = Duration::from_secs(2);

/// What follows the end of a worker.
pub(super) enum Verdict {
    /// It has done its work, or the others go on without it.
    GoOn,
    /// This worker takes its place.
    Replaced(Worker),
    /// All workers are ended, and then started again.
    RestartAll,
    /// The coordinator of all nodes has been told, and decides.
    Told,
    /// The run has failed.
    Fail,
}

/// Starts workers, and decides what follows when one ends.
pub(super) struct Agent<'a> {
    pub(super) starter: Starter<'a>,
    /// The store, if this machine hosts it.
    server: Option<TcpStoreServer>,
    /// The connection to it of an agent without other nodes, once there was a reason to connect.
    own_store: Option<Arc<dyn Store>>,
    /// The connection to the agents of the other nodes, if there are any.
    link: Option<Link>,
    /// This node's number among them, and the members of the last round.
    slot: Option<Slot>,
    slots: Vec<Slot>,
    /// Why all nodes have failed, with the exit code.
    failure: Option<(String, u8)>,
    /// The coordinator cannot be reached any more.
    is_lost: bool,
    /// The members of an elastic run on this machine alone, once there was a reason to look.
    members: Option<Members>,
    run_id: String,
    restarts: Restarts,
    restart_count: u32,
    /// How often all workers were started again.
    attempt: u64,
    /// For `ddprun --status`, without other nodes.
    phase: Phase,
    last_failure: Option<LastFailure>,
}

impl<'a> Agent<'a> {
    /// `server` is the store that this machine hosts, if it does; `link` connects it to other nodes.
    pub(super) fn new(starter: Starter<'a>, server: Option<TcpStoreServer>, link: Option<Link>) -> Self {
        let run_id = starter.config.run_id.clone();
        let restarts = Restarts { most: starter.config.max_restarts, used: 0 };
        Self {
            starter,
            server,
            own_store: None,
            link,
            slot: None,
            slots: Vec::new(),
            failure: None,
            is_lost: false,
            run_id,
            restarts,
            restart_count: 0,
            attempt: 0,
            phase: Phase::Running,
            last_failure: None,
            members: None,
        }
    }

    /// Says that no more workers will be started.
    pub(super) fn close(&mut self) {
        self.starter.intake = None;
    }

    /// Whether there are other nodes.
    pub(super) fn is_linked(&self) -> bool {
        self.link.is_some()
    }

    /// Tells the coordinator of all nodes something, if there is one.
    pub(super) fn tell(&self, message: Message) {
        if let Some(link) = &self.link {
            link.tell(message);
        }
    }

    /// How long this node waits for others after its workers have finished.
    pub(super) fn exit_barrier_timeout(&self) -> Duration {
        self.starter
            .config
            .rendezvous
            .as_ref()
            .map_or(Duration::ZERO, |rendezvous| rendezvous.pace.exit_barrier_timeout)
    }

    /// This node has got a number.
    pub(super) fn joined(&mut self, slot: Slot) {
        self.slot = Some(slot);
    }

    /// Takes this node's part in a round; returns whether it has one. `Err` says why it has lost it.
    pub(super) fn enter(&mut self, round: Round) -> std::result::Result<bool, String> {
        let node_rank = round.slots.iter().position(|slot| Some(*slot) == self.slot);
        let was_member = self.slot.is_some_and(|slot| self.slots.contains(&slot));
        let nodes = round.slots.len();
        self.slots = round.slots;
        let Some(node_rank) = node_rank else {
            let lost = "the other nodes have gone on without this one, which gave no sign of life in time, or whose \
                        connection to the store was cut";
            return if was_member { Err(lost.to_string()) } else { Ok(false) };
        };
        let local_world_size = self.starter.topology.local_world_size;
        self.starter.topology = Topology { nodes, node_rank, local_world_size };
        (self.restart_count, self.attempt) = (round.restart_count, round.attempt);
        Ok(true)
    }

    /// Takes note that the run has failed on all nodes.
    pub(super) fn set_failure(&mut self, reason: String, code: u8) {
        self.failure.get_or_insert((reason, code));
    }

    /// Takes note that this node has lost the others.
    pub(super) fn set_lost(&mut self, reason: String) {
        self.is_lost = true;
        self.set_failure(reason, 1);
    }

    pub(super) fn is_lost(&self) -> bool {
        self.is_lost
    }

    /// Why all nodes have failed, with the exit code.
    pub(super) fn failure(&self) -> Option<&(String, u8)> {
        self.failure.as_ref()
    }

    /// Reports what has failed on this node, and returns what has failed first on any.
    pub(super) fn root(&self, own: Option<Report>) -> Option<Report> {
        self.link.as_ref()?.root(own)
    }

    /// Needs the other nodes no more.
    pub(super) fn leave(&mut self) {
        if let Some(link) = self.link.take() {
            link.leave();
        }
    }

    /// The store of a run on this machine alone.
    fn own_store(&mut self) -> Result<Option<Arc<dyn Store>>> {
        // Until a worker proves that it knows the secret, the store may serve PyTorch's programs, which this agent would
        // drive out.
        let is_ours = |server: &&TcpStoreServer| self.link.is_none() && server.is_joined();
        let Some(server) = self.server.as_ref().filter(is_ours) else { return Ok(None) };
        let store = match &mut self.own_store {
            Some(store) => store,
            none => {
                let options = TcpStoreOptions { timeout: TIMEOUT, secret: self.starter.config.secret.get().cloned() };
                none.insert(Arc::new(TcpStore::connect_with(&server.own_host(), server.port(), options)?))
            }
        };
        Ok(Some(Arc::clone(store)))
    }

    /// The smallest world size that an elastic run on this machine alone accepts.
    fn elastic(&mut self) -> Result<Option<usize>> {
        let Some(store) = self.own_store()? else { return Ok(None) };
        let (attempt, world_size) = (self.attempt, self.starter.topology.world_size());
        Ok(self.members.get_or_insert_with(|| Members::new(store, attempt, world_size)).announced()?)
    }

    fn start(&mut self, local_rank: usize, incarnation: u64) -> Result<Worker> {
        let agent = format!("{}/{}/{incarnation}/{}", self.run_id, self.attempt, self.min_world_size());
        self.starter.start(local_rank, &Incarnation { restart_count: self.restart_count, agent })
    }

    /// The smallest world size of an elastic run whose program does not say it.
    fn min_world_size(&self) -> usize {
        let topology = self.starter.topology;
        match &self.starter.config.rendezvous {
            Some(rendezvous) if !rendezvous.is_static => rendezvous.terms.min_nodes * topology.local_world_size,
            _ => topology.world_size(),
        }
    }

    /// Starts the process with a rank of this node that follows the one that has ended.
    pub(super) fn start_again(&mut self, replacement: &Replacement) -> Result<Worker> {
        self.restart_count = replacement.restart_count;
        let topology = self.starter.topology;
        let local_rank = replacement.rank.saturating_sub(topology.rank(0));
        self.start(local_rank, replacement.incarnation)
    }

    /// Starts the workers of this node, which a run has admitted while it goes on.
    pub(super) fn start_admitted(&mut self, admission: &Admission, mut started: impl FnMut(Worker)) -> Result<()> {
        let Admission { attempt, restart_count, node_rank, nodes, ref incarnations, .. } = *admission;
        let local_world_size = self.starter.topology.local_world_size;
        self.starter.topology = Topology { nodes, node_rank, local_world_size };
        (self.attempt, self.restart_count) = (attempt, restart_count);
        self.slots.extend(self.slot);
        (0..local_world_size).try_for_each(|local_rank| {
            let incarnation = incarnations.get(local_rank).copied().unwrap_or(0);
            self.start(local_rank, incarnation).map(&mut started)
        })
    }

    /// Whether this is the number of this node.
    pub(super) fn is_own(&self, slot: Slot) -> bool {
        self.slot == Some(slot)
    }

    /// Starts all workers, which `started` gets one by one.
    pub(super) fn start_all(&mut self, mut started: impl FnMut(Worker)) -> Result<()> {
        let topology = self.starter.topology;
        (0..topology.local_world_size).try_for_each(|local_rank| self.start(local_rank, 0).map(&mut started))
    }

    /// Starts all workers again.
    pub(super) fn restart_all(&mut self, started: impl FnMut(Worker)) -> Result<()> {
        if self.link.is_some() {
            // The coordinator has numbered this start, and has cleared the store.
            return self.start_all(started);
        }
        self.attempt += 1;
        (self.members, self.own_store, self.phase) = (None, None, Phase::Running);
        if self.server.take().is_some() {
            // A new store, since PyTorch's keys are the same in each attempt: it would connect to ranks that have ended.
            (self.server, self.starter.master_port) = store::host(self.starter.config, &self.status())?;
        }
        self.start_all(started)
    }

    /// Decides what follows the end of `worker`, while no other has failed.
    pub(super) fn on_exit(&mut self, worker: &mut Worker) -> Verdict {
        let Some(ended) = worker.ended else { return Verdict::GoOn };
        let failed = ended.how != Exit::Code(0);
        if let Some(link) = &self.link {
            let (rank, how, code) = (worker.rank, ended.how.to_string(), ended.how.code());
            link.tell(Message::Exited(Exited { rank, how, code }));
            return if failed { Verdict::Told } else { Verdict::GoOn };
        }
        let verdict = self.judge(worker, ended.how, failed).unwrap_or_else(|error| {
            message(format_args!("rank {} {}, and cannot be replaced: {error}", worker.rank, ended.how));
            if failed { Verdict::Fail } else { Verdict::GoOn }
        });
        if failed {
            self.phase = match verdict {
                Verdict::RestartAll => Phase::Restarting,
                Verdict::Fail => Phase::Ending,
                _ => Phase::Running,
            };
            self.last_failure = Some(LastFailure::now(format!("rank {} {}", worker.rank, ended.how)));
            self.tell_status();
        }
        verdict
    }

    /// What there is to tell about a run on this machine alone.
    fn status(&self) -> RunStatus {
        let config = self.starter.config;
        RunStatus {
            phase: self.phase,
            attempt: self.attempt,
            restarts: self.restarts.used,
            last_failure: self.last_failure.clone(),
            ..RunStatus::of(config)
        }
    }

    fn tell_status(&mut self) {
        let status = encode(&self.status());
        let told =
            self.own_store().and_then(|store| Ok(store.map(|store| store.set(RUN_STATUS, &status)).transpose()?));
        if let Err(error) = told {
            log::debug!("the status of the run is not in its store: {error}");
        }
    }

    fn judge(&mut self, worker: &mut Worker, how: Exit, failed: bool) -> Result<Verdict> {
        let (rank, how) = (worker.rank, how.to_string());
        // Without a connection, the workers cannot have one either.
        let min_world_size = self.elastic().unwrap_or_else(|error| {
            log::debug!("no connection to the own store: {error}");
            None
        });
        let elastic = self.members.as_mut().zip(min_world_size);
        let end = End { rank, how: &how, what: &format!("rank {rank} {how}"), failed };
        let (verdict, reason) = judge::on_exit(elastic, end, &mut self.restarts)?;
        Ok(match verdict {
            judge::Verdict::GoOn | judge::Verdict::EndRanks => Verdict::GoOn,
            judge::Verdict::Fail => Verdict::Fail,
            judge::Verdict::RestartAll => {
                message(reason);
                self.restart_count = self.restarts.used;
                Verdict::RestartAll
            }
            judge::Verdict::GoOnWithout => {
                message(reason);
                worker.given_up = true;
                Verdict::GoOn
            }
            judge::Verdict::Replace => {
                message(reason);
                self.restart_count = self.restarts.used;
                let incarnation = self.members.as_ref().map_or(0, |members| members.incarnation(rank));
                self.start(worker.local_rank, incarnation).map(Verdict::Replaced).inspect_err(|error| {
                    let reason = format!("its process {how}, and cannot be started again: {error}");
                    // The workers are ended in any case.
                    let _ = self.members.as_ref().map(|members| members.fail(rank, reason));
                })?
            }
        })
    }
}
