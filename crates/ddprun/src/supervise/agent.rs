//! The consequences of a worker's end: the workers that are restarted, and those that continue.
use super::consequence::{self, Consequence, Restarts};
use super::judgement::Judge;
use super::members::Members;
use super::nodes::{Admission, Exited, Link, Message, Replacement, Round, Slot};
use super::store;
use super::worker::{Exit, Starter, Worker};
use crate::command::Topology;
use crate::console::message;
use crate::error::Result;
use crate::verdict::{How, Outcome, Verdict};
use crate::view::status::{Phase, RUN_STATUS, RunStatus, Source};
use candle_ddp_base::host::host_name;
use candle_ddp_rendezvous::json::encode;
use candle_ddp_rendezvous::{Store, TcpStoreServer};
use std::sync::Arc;
use std::time::Duration;

/// Starts workers, and decides what follows when one ends.
pub(crate) struct Agent<'a> {
    pub(crate) starter: Starter<'a>,
    /// The store, if this machine hosts it.
    server: Option<TcpStoreServer>,
    /// What the threads that watch the run read, if this machine hosts the store.
    source: Option<Arc<Source>>,
    /// The connection to the agents of the other nodes, if there are any.
    link: Option<Link>,
    /// This node's number among them, and whether it takes part in the round that is under way, or was last.
    pub(crate) slot: Option<Slot>,
    pub(crate) is_member: bool,
    /// Why the run ends, as far as it is known before the workers have ended.
    pub(crate) failure: Option<Verdict>,
    /// The coordinator cannot be reached any more.
    pub(crate) is_lost: bool,
    /// The members of an elastic run on this machine alone, once the agent had a reason to look.
    members: Option<Members>,
    restarts: Restarts,
    restart_count: u32,
    /// How often all workers were restarted.
    attempt: u64,
    /// The phase for `ddprun status`, in a run without other nodes.
    phase: Phase,
    pub(crate) judge: Judge<'a>,
}

impl<'a> Agent<'a> {
    /// `server` is the store, if this machine hosts it, which `source` reads; `link` connects it to other nodes.
    pub(crate) fn new(
        starter: Starter<'a>,
        server: Option<TcpStoreServer>,
        source: Option<Arc<Source>>,
        link: Option<Link>,
    ) -> Self {
        let restarts = Restarts::new(starter.config.options.max_restarts);
        let judge = Judge::new(starter.folder, &starter.config.run_id, link.is_some());
        Self {
            starter,
            server,
            source,
            link,
            slot: None,
            is_member: false,
            failure: None,
            is_lost: false,
            restarts,
            restart_count: 0,
            attempt: 0,
            phase: Phase::Running,
            judge,
            members: None,
        }
    }

    /// Whether there are other nodes.
    pub(crate) fn is_linked(&self) -> bool {
        self.link.is_some()
    }

    /// Sends the coordinator of all nodes a message, if there is a coordinator.
    pub(crate) fn tell(&self, message: Message) {
        if let Some(link) = &self.link {
            link.tell(message);
        }
    }

    /// How long this node waits for others after its workers have finished.
    pub(crate) fn exit_barrier_timeout(&self) -> Duration {
        let rendezvous = self.starter.config.rendezvous.as_ref();
        rendezvous.map_or(Duration::ZERO, |rendezvous| rendezvous.pace.exit_barrier_timeout)
    }

    /// Takes part in a round; returns whether this node belongs to it. `Err` says why the other nodes dropped it.
    pub(crate) fn enter(&mut self, round: Round) -> std::result::Result<bool, String> {
        let was_member = std::mem::replace(&mut self.is_member, round.node_rank.is_some());
        let Some(node_rank) = round.node_rank else {
            let lost = "the other nodes continued without this one, because it gave no sign of life in time, or its \
                        connection to the store was cut";
            return if was_member { Err(lost.to_string()) } else { Ok(false) };
        };
        self.starter.topology = Topology { layout: round.layout, node_rank };
        (self.restart_count, self.attempt) = (round.restart_count, round.attempt);
        self.starter.is_joint_check = round.is_check;
        Ok(true)
    }

    /// From now on, no process is started, since a signal ends the run, for this `reason`.
    pub(crate) fn stop(&mut self, signal: i32, reason: &str) {
        self.restarts.stopped_by = Some(signal);
        self.phase = Phase::Ending;
        let stopped = Verdict::now(How::Stopped, Exit::Signal(signal).code(), reason);
        self.failure.get_or_insert(Verdict { signal: Some(signal), ..stopped });
    }

    /// Records why the run ends on this node, unless that is known already.
    pub(crate) fn ends(&mut self, how: How, code: u8, reason: String) {
        self.is_lost |= how == How::Lost;
        // Otherwise the coordinator has ended the run, because of any node.
        let is_own = how != How::Unknown;
        let (node, host) = (is_own.then_some(self.starter.topology.node_rank), is_own.then(host_name));
        self.failure.get_or_insert_with(|| Verdict { node, host, ..Verdict::now(how, code, reason) });
    }

    /// Reports the verdict on this node's workers, and returns the one on which all nodes agree.
    pub(crate) fn agree(&self, own: Option<Verdict>) -> Option<Verdict> {
        self.link.as_ref()?.agree(own)
    }

    /// Judges the failure of all workers, which have ended and will be restarted. Worker `first` was the first to fail.
    pub(crate) fn judge_attempt(&mut self, workers: &[Worker], first: Option<usize>) {
        let findings = self.judge.examine(workers, None, &self.starter.topology);
        let verdict = findings.verdict(first).map(|(_, verdict)| verdict);
        if self.is_linked() {
            return self.tell(Message::Ended(verdict));
        }
        let Some(verdict) = verdict else { return };
        let is_known = first.and_then(|first| workers.get(first)).is_some_and(|first| verdict.rank == Some(first.rank));
        if !is_known {
            message(&verdict.text);
        }
        self.survive(verdict);
    }

    /// Records a failure after which the run continues.
    pub(crate) fn survive(&mut self, verdict: Verdict) {
        self.judge.verdicts.add(verdict, Outcome::Continues, self.restart_count);
    }

    /// Records that the run has ended well.
    pub(crate) fn succeed(&mut self) {
        self.judge.verdicts.succeed(self.restart_count);
    }

    /// Records the failure that has ended the run.
    pub(crate) fn fail(&mut self, verdict: Verdict) {
        self.judge.verdicts.add(verdict, Outcome::Failed, self.restart_count);
        self.phase = Phase::Ending;
        if !self.is_linked() {
            self.tell_status();
        }
    }

    /// Leaves the other nodes, which this one no longer needs. They may need its store for `patience`, or until `interrupted`.
    pub(crate) fn leave(&mut self, patience: Duration, interrupted: impl FnMut() -> bool) {
        if let Some(link) = self.link.take() {
            link.leave(patience, interrupted);
        }
    }

    /// The store of a run on this machine alone, once its workers use it.
    fn own_store(&self) -> Result<Option<Arc<dyn Store>>> {
        let source = self.source.as_ref().filter(|_| self.link.is_none());
        Ok(source.map(|source| source.store()).transpose()?.flatten())
    }

    /// The smallest world size that an elastic run on this machine alone accepts.
    fn elastic(&mut self) -> Result<Option<usize>> {
        let Some(store) = self.own_store()? else { return Ok(None) };
        let (attempt, world_size) = (self.attempt, self.starter.topology.world_size());
        Ok(self.members.get_or_insert_with(|| Members::new(store, attempt, world_size)).announced()?)
    }

    fn start(&mut self, local_rank: usize, incarnation: u64) -> Result<Worker> {
        let agent = format!("{}/{}/{incarnation}/{}", self.starter.config.run_id, self.attempt, self.min_world_size());
        self.starter.start(local_rank, self.restart_count, &agent)
    }

    /// The smallest world size of an elastic run, unless its program sets one.
    fn min_world_size(&self) -> usize {
        let topology = &self.starter.topology;
        match &self.starter.config.rendezvous {
            Some(rendezvous) if !rendezvous.is_static => topology.layout.least(rendezvous.terms.min_nodes),
            _ => topology.world_size(),
        }
    }

    /// Starts the next process with a rank of this node, after the previous one has ended.
    pub(crate) fn start_again(&mut self, replacement: &Replacement) -> Result<Worker> {
        self.restart_count = replacement.restart_count;
        self.start(replacement.rank.saturating_sub(self.starter.topology.rank(0)), replacement.incarnation)
    }

    /// Starts the workers of this node, which a run in progress has admitted, and adds each to `workers`.
    pub(crate) fn start_admitted(&mut self, admission: &Admission, workers: &mut Vec<Worker>) -> Result<()> {
        let Admission { attempt, restart_count, node_rank, ref layout, ref incarnations, .. } = *admission;
        self.starter.topology = Topology { layout: layout.clone(), node_rank };
        (self.attempt, self.restart_count) = (attempt, restart_count);
        (self.is_member, self.starter.is_joint_check) = (true, false);
        self.start_all(incarnations, workers)
    }

    /// Whether `slot` is the number of this node.
    pub(crate) fn is_own(&self, slot: Slot) -> bool {
        self.slot == Some(slot)
    }

    /// Starts all workers, and adds each to `workers`. `incarnations` says how many processes each rank has had, if any.
    pub(crate) fn start_all(&mut self, incarnations: &[u64], workers: &mut Vec<Worker>) -> Result<()> {
        for local_rank in 0..self.starter.topology.local_world_size() {
            workers.push(self.start(local_rank, incarnations.get(local_rank).copied().unwrap_or(0))?);
        }
        Ok(())
    }

    /// Restarts all workers.
    pub(crate) fn restart_all(&mut self, workers: &mut Vec<Worker>) -> Result<()> {
        if self.link.is_some() {
            // The coordinator has numbered this start, and has cleared the store.
            return self.start_all(&[], workers);
        }
        self.attempt += 1;
        (self.members, self.phase) = (None, Phase::Running);
        if self.server.take().is_some() {
            // A new store, since PyTorch uses the same keys in each attempt and would connect to ranks that have ended.
            (self.server, self.starter.master_port) = store::host(self.starter.config, &self.status())?;
            if let (Some(source), Some(server)) = (&self.source, &self.server) {
                source.set_store(server, self.status());
            }
        }
        self.start_all(&[], workers)
    }

    /// Decides what follows the end of `worker`, while no other has failed, or while a signal ends the run. If a new process takes its
    /// place, that is `worker` afterwards. `None`: the coordinator of all nodes has the report, and decides.
    pub(crate) fn on_exit(&mut self, worker: &mut Worker) -> Option<Consequence> {
        let ended = worker.ended?;
        let failed = ended.how != Exit::Code(0);
        if let Some(link) = &self.link {
            link.tell(Message::Exited(Exited { rank: worker.rank, exit: ended.how }));
            return None;
        }
        let alone = || self.judge.examine(std::slice::from_ref(worker), None, &self.starter.topology).on_one();
        let alone = if failed { alone() } else { None };
        let consequence = self.react(worker, ended.how).unwrap_or_else(|error| {
            message(format_args!("rank {} {} and cannot be replaced: {error}", worker.rank, ended.how));
            if failed { Consequence::Fail } else { Consequence::Continue }
        });
        if failed {
            self.phase = match consequence {
                Consequence::RestartAll => Phase::Restarting,
                Consequence::Fail => Phase::Ending,
                _ if self.restarts.stopped_by.is_some() => Phase::Ending,
                _ => Phase::Running,
            };
            // Otherwise the failure is judged when all workers have ended.
            let goes_on = !matches!(consequence, Consequence::RestartAll | Consequence::Fail);
            if let Some(verdict) = alone.filter(|_| goes_on) {
                self.survive(verdict);
            }
            self.tell_status();
        }
        Some(consequence)
    }

    /// The status of a run on this machine alone.
    fn status(&self) -> RunStatus {
        let config = self.starter.config;
        RunStatus {
            phase: self.phase,
            attempt: self.attempt,
            restarts: self.restarts.used,
            last_failure: self.judge.verdicts.last().map(Verdict::in_short),
            ..RunStatus::of(config)
        }
    }

    fn tell_status(&mut self) {
        let status = self.status();
        if let Some(source) = &self.source {
            source.set_run(status.clone());
        }
        let status = encode(&status);
        let told =
            self.own_store().and_then(|store| Ok(store.map(|store| store.set(RUN_STATUS, &status)).transpose()?));
        if let Err(error) = told {
            log::debug!("the status of the run is not in its store: {error}");
        }
    }

    fn react(&mut self, worker: &mut Worker, exit: Exit) -> Result<Consequence> {
        let rank = worker.rank;
        // Without this connection, the workers cannot have connected either.
        let min_world_size = self.elastic().unwrap_or_else(|error| {
            log::debug!("cannot connect to this launcher's own store: {error}");
            None
        });
        let elastic = self.members.as_mut().zip(min_world_size);
        let (exited, what) = (Exited { rank, exit }, format!("rank {rank} {exit}"));
        let (consequence, reason) = consequence::on_exit(elastic, exited, &what, &mut self.restarts)?;
        match consequence {
            Consequence::Continue | Consequence::EndRanks | Consequence::Fail => {}
            Consequence::ScaleDown => {
                if !self.restarts.have_asked_for(exit) {
                    message(reason);
                }
                worker.given_up = true;
            }
            Consequence::RestartAll | Consequence::Replace => {
                message(reason);
                self.restart_count = self.restarts.used;
            }
        }
        if consequence == Consequence::Replace {
            let incarnation = self.members.as_ref().map_or(0, |members| members.incarnation(rank));
            *worker = self.start(worker.local_rank, incarnation).inspect_err(|error| {
                let reason = format!("its process {exit} and cannot be restarted: {error}");
                // The workers are ended in any case.
                let _ = self.members.as_ref().map(|members| members.fail(rank, reason));
            })?;
        }
        Ok(consequence)
    }
}
