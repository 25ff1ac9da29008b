//! A run on several nodes, as a state machine. The rules for elastic runs are in `elastic`.
//!
//! It has no clock: call `on_time` with the time after every event.
use super::message::{Entry, Exited, Message, Node, Report, Round, Slot};
use super::reports::Reports;
use super::terms::{Pace, Terms};
use crate::judge::Restarts;
use crate::members::Members;
use crate::status::LastFailure;
use crate::worker::Exit;
use candle_ddp_rendezvous::Store;
use candle_ddp_rendezvous::error::some;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long nodes may be missing before the user is told.
const NOTICE: Duration = Duration::from_secs(10);

/// An action of the coordinator in the store.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Action {
    Write(Entry),
    /// Starts a round with these nodes, by their rank.
    Start(Round, Vec<Slot>),
    /// Answers a node that wants to join. Without a reason, it takes part from the next entry on.
    Welcome(Slot, Option<String>),
    /// Removes the keys that workers of an earlier round have left in the store.
    Clear,
    /// The failure that caused the others.
    Root(Option<Report>),
}

#[derive(Debug)]
pub(super) enum State {
    /// No worker runs; nodes join. The times are those of the first look at the clock.
    Meeting { since: Option<Instant>, enough_since: Option<Instant> },
    /// These nodes run workers.
    Running { members: Vec<Slot>, finished: BTreeSet<Slot>, suspicion: Option<Suspicion> },
    /// Workers are ended on these nodes, before all are restarted.
    Stopping { awaited: BTreeSet<Slot> },
    /// A signal ends the run. Workers have their time to save and exit, and ranks of an elastic run need decisions until then.
    Signalled,
    /// The run is over; these nodes have not said goodbye yet.
    Ending { reports: Option<Reports> },
}

/// A failure that the death of another node may have caused. It is not acted on until these nodes have given a sign of
/// life.
#[derive(Debug)]
pub(super) struct Suspicion {
    exited: Exited,
    slot: Slot,
    /// The other nodes that have given no sign of life since, and how many signs of each are still needed. The first
    /// sign may be older than the failure, since signs are only read from time to time.
    silent: BTreeMap<Slot, u32>,
}

/// A run.
pub(super) struct Run {
    pub(super) terms: Terms,
    pace: Pace,
    /// The number of nodes is fixed, and each knows its rank.
    pub(super) is_static: bool,
    pub(super) store: Arc<dyn Store>,
    /// The nodes that are alive.
    pub(super) nodes: BTreeMap<Slot, Node>,
    /// Nodes that were refused, and may not have read why.
    refused: BTreeSet<Slot>,
    /// Whether the node that hosts the store has joined; others may come first.
    has_host: bool,
    /// The hosts of all nodes that have joined.
    pub(super) hosts: BTreeMap<Slot, String>,
    /// The members of the last round, by their ranks; some may be gone.
    pub(super) members: Vec<Slot>,
    pub(super) state: State,
    /// The number of rounds, and how often any worker was restarted, for any reason.
    pub(super) rounds: u64,
    pub(super) restart_count: u32,
    pub(super) restarts: Restarts,
    /// The processes of the last round, in case they run elastically.
    pub(super) processes: Option<Members>,
    pub(super) last_failure: Option<LastFailure>,
    pub(super) actions: Vec<Action>,
    /// Whether the user knows that nodes are missing.
    is_awaited: bool,
}

impl Run {
    pub(super) fn new(terms: Terms, pace: Pace, is_static: bool, store: Arc<dyn Store>) -> Self {
        let restarts = Restarts::new(terms.max_restarts);
        Self {
            terms,
            pace,
            is_static,
            store,
            nodes: BTreeMap::new(),
            refused: BTreeSet::new(),
            has_host: false,
            hosts: BTreeMap::new(),
            members: Vec::new(),
            state: State::Meeting { since: None, enough_since: None },
            rounds: 0,
            restart_count: 0,
            restarts,
            processes: None,
            last_failure: None,
            is_awaited: false,
            actions: Vec::new(),
        }
    }

    /// The nodes that are alive.
    pub(super) fn nodes(&self) -> impl Iterator<Item = Slot> + '_ {
        self.nodes.keys().copied()
    }

    pub(super) fn take_actions(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions)
    }

    /// Whether no agent needs the coordinator any more.
    pub(super) fn is_over(&self) -> bool {
        self.has_ended() && self.has_host && self.nodes.is_empty() && self.refused.is_empty()
    }

    fn has_ended(&self) -> bool {
        matches!(self.state, State::Signalled | State::Ending { .. })
    }

    fn has_range(&self) -> bool {
        self.terms.min_nodes < self.terms.max_nodes
    }

    /// A node in messages.
    pub(super) fn name(&self, slot: Slot) -> String {
        let host = self.nodes.get(&slot).map_or("unknown", |node| node.host.as_str());
        match self.members.iter().position(|member| *member == slot) {
            Some(node_rank) => format!("node {node_rank} (host {host})"),
            None => format!("the node on host {host}"),
        }
    }

    pub(super) fn on_message(&mut self, slot: Slot, message: Message) {
        if !matches!(message, Message::Join(_)) && !self.nodes.contains_key(&slot) {
            // It was considered dead, and the others have continued without it, or it has left, or was refused.
            self.refused.remove(&slot);
            return;
        }
        match message {
            Message::Join(node) => self.on_join(slot, node),
            Message::Exited(exited) => self.on_exited(slot, exited),
            Message::Finished => self.on_finished(slot),
            Message::Ended => self.on_ended(slot),
            Message::Leave { reason, signal } => self.on_leave(slot, &reason, signal),
            Message::Report(report) => self.on_report(slot, report),
            Message::Bye => {
                let reason = format!("{} has ended", self.name(slot));
                self.nodes.remove(&slot);
                self.forget(slot, &reason);
            }
            Message::Gone => self.on_gone(slot),
        }
    }

    fn on_join(&mut self, slot: Slot, node: Node) {
        self.has_host |= node.hosts;
        let twice = |rank: usize| {
            let other = self.nodes.values().find(|other| other.node_rank == Some(rank))?;
            let host = &other.host;
            Some(format!("--node-rank {rank} is taken by the ddprun on host {host}: give each node its own rank"))
        };
        let difference = self.terms.difference(&node.terms);
        let lacks = self.lacks(&node);
        let refusal = match &difference {
            Some(difference) => Some(difference.text("here")),
            None if self.has_ended() => {
                let why = self.last_failure.as_ref().map(|failure| format!(": {}", failure.text)).unwrap_or_default();
                Some(format!("the run has ended{why}"))
            }
            None => node.node_rank.filter(|_| self.is_static).and_then(twice).or_else(|| lacks.clone()),
        };
        let host = node.host.clone();
        self.actions.push(Action::Welcome(slot, refusal.clone()));
        if let Some(reason) = refusal {
            self.refused.insert(slot);
            let place = format!("on host {host}");
            let reason = difference.as_ref().map_or(reason, |difference| difference.text(&place));
            // Without this node, a fixed number of them never comes together.
            let is_needed = matches!(self.state, State::Meeting { .. }) && self.rounds == 0 && !self.has_range();
            let is_fatal = match difference {
                Some(difference) => !difference.is_of_another_run(),
                None => self.is_static && lacks.is_some(),
            };
            match is_needed && is_fatal {
                true => self.fail(reason, 1, None),
                false => log::warn!("the ddprun on host {host} is refused: {reason}"),
            }
            return;
        }
        self.nodes.insert(slot, node);
        self.hosts.insert(slot, host.clone());
        if let State::Running { members, .. } = &self.state
            && members.len() < self.terms.max_nodes
            && !self.admit(slot, "a node has joined")
        {
            self.restart(format!("a node has joined (host {host}): restarting all workers, on {} nodes", {
                self.nodes.len().min(self.terms.max_nodes)
            }));
        }
    }

    fn on_exited(&mut self, slot: Slot, exited: Exited) {
        match &self.state {
            State::Running { members, .. } if members.contains(&slot) => {}
            State::Signalled => {}
            _ => return,
        }
        if self.elastic().is_some() {
            return self.judge(slot, &exited);
        }
        if exited.code != 0 {
            self.on_failed(slot, exited);
        }
    }

    fn on_failed(&mut self, slot: Slot, exited: Exited) {
        let has_range = self.has_range();
        let State::Running { members, suspicion, .. } = &mut self.state else { return };
        if suspicion.is_some() {
            return;
        }
        let silent = members.iter().filter(|member| has_range && **member != slot).map(|member| (*member, 2)).collect();
        *suspicion = Some(Suspicion { exited, slot, silent });
        self.settle_suspicion();
    }

    /// Acts on a failure, once no node is suspected of having caused it by its death.
    fn settle_suspicion(&mut self) {
        let State::Running { suspicion, .. } = &mut self.state else { return };
        let nodes = &self.nodes;
        let is_settled = |suspicion: &mut Suspicion| {
            // A node that has left is not dead.
            suspicion.silent.retain(|slot, needed| *needed > 0 && nodes.contains_key(slot));
            suspicion.silent.is_empty()
        };
        let Some(Suspicion { exited, slot, .. }) = suspicion.take_if(is_settled) else { return };
        if self.is_static && !self.members.iter().all(|member| self.nodes.contains_key(member)) {
            // None can take the place of one that has finished and left.
            let what = format!("rank {} on {} {}", exited.rank, self.name(slot), exited.how);
            return self.fail(what, exited.code, Some(slot));
        }
        self.judge(slot, &exited);
    }

    fn on_finished(&mut self, slot: Slot) {
        if let State::Running { finished, .. } = &mut self.state {
            finished.insert(slot);
        }
        self.finish_if_all_have();
    }

    pub(super) fn finish_if_all_have(&mut self) {
        let State::Running { members, finished, .. } = &self.state else { return };
        if finished.len() >= members.len() && members.iter().all(|member| finished.contains(member)) {
            self.actions.push(Action::Write(Entry::Done));
            self.state = State::Ending { reports: None };
        }
    }

    fn on_ended(&mut self, slot: Slot) {
        if let State::Stopping { awaited } = &mut self.state {
            awaited.remove(&slot);
            self.meet_when_stopped();
        }
    }

    fn meet_when_stopped(&mut self) {
        if matches!(&self.state, State::Stopping { awaited } if awaited.is_empty()) {
            self.actions.push(Action::Clear);
            self.state = State::Meeting { since: None, enough_since: None };
        }
    }

    /// A node leaves voluntarily.
    fn on_leave(&mut self, slot: Slot, reason: &str, signal: Option<i32>) {
        if matches!(self.state, State::Signalled) {
            // It is ending already.
            return;
        }
        let node = self.nodes.get(&slot).cloned();
        self.let_go(slot, reason, signal);
        if matches!(self.state, State::Signalled) {
            // Until its goodbye, it reports the ends of its workers.
            self.nodes.extend(node.map(|node| (slot, node)));
        }
    }

    fn let_go(&mut self, slot: Slot, reason: &str, signal: Option<i32>) {
        let reason = format!("{} leaves: {reason}", self.name(slot));
        let hosts = self.nodes.get(&slot).is_some_and(|node| node.hosts);
        let has_finished = matches!(&self.state, State::Running { finished, .. } if finished.contains(&slot));
        match &self.state {
            State::Running { .. } if has_finished && hosts => {
                self.nodes.remove(&slot);
                self.actions.push(Action::Write(Entry::Unattended { reason }));
                self.state = State::Ending { reports: None };
            }
            State::Running { .. } if has_finished => {
                self.nodes.remove(&slot);
            }
            State::Meeting { .. } if self.is_static => {
                self.nodes.remove(&slot);
                self.end(reason, signal);
            }
            State::Running { .. } | State::Stopping { .. } | State::Meeting { .. } if hosts => {
                self.nodes.remove(&slot);
                self.end(format!("{reason}. It hosts the store"), signal);
            }
            _ => self.lose(slot, reason, signal),
        }
    }

    pub(super) fn on_beat(&mut self, slot: Slot) {
        if let State::Running { suspicion: Some(suspicion), .. } = &mut self.state {
            if let Some(needed) = suspicion.silent.get_mut(&slot) {
                *needed = needed.saturating_sub(1);
            }
            self.settle_suspicion();
        }
    }

    /// A node has given no sign of life for too long.
    pub(super) fn on_silence(&mut self, slot: Slot) {
        let seconds = self.pace.patience().as_secs_f64();
        let reason = format!(
            "{} has given no sign of life for {seconds} s: its machine, its network or its ddprun has failed",
            self.name(slot)
        );
        self.lose(slot, reason, None);
    }

    /// The connection of a node has closed, although the node has not left. If its ddprun lives, it has thereby lost
    /// the store, and ends its workers.
    fn on_gone(&mut self, slot: Slot) {
        let reason = format!(
            "{} is gone: its ddprun ended without a word, or its connection to the store was cut",
            self.name(slot)
        );
        self.lose(slot, reason, None);
    }

    /// Continues without a node, or ends the run. `signal` is the signal that ended the node, if any.
    fn lose(&mut self, slot: Slot, reason: String, signal: Option<i32>) {
        self.nodes.remove(&slot);
        let is_running = matches!(&self.state, State::Running { members, .. } if members.contains(&slot));
        if is_running {
            self.note_failure(&reason);
        }
        if is_running && !self.fill_in(slot, &reason) && !self.scale_down(slot, &reason, signal) {
            self.replace_lost(reason.clone(), signal);
        } else if matches!(self.state, State::Stopping { .. }) && self.is_static && self.members.contains(&slot) {
            self.end(reason.clone(), signal);
        }
        let saves = signal.is_some() && matches!(self.state, State::Signalled);
        if !saves {
            self.forget(slot, &reason);
        }
    }

    fn replace_lost(&mut self, reason: String, signal: Option<i32>) {
        let left = self.nodes.len().min(self.terms.max_nodes);
        let least = self.terms.min_nodes;
        if self.is_static {
            self.end(reason, signal);
        } else if left >= least {
            self.restart(format!("{reason}. Restarting all workers, on {left} node(s)"));
        } else if self.restarts.are_left() {
            self.restarts.used += 1;
            self.restart(format!("{reason}. All workers will be restarted once {least} node(s) are there"));
        } else {
            let few = format!("The {left} remaining node(s) are fewer than --nnodes requires ({least})");
            self.end(format!("{reason}. {few}"), signal);
        }
    }

    /// No longer waits for a node, which is gone for `reason`.
    fn forget(&mut self, slot: Slot, reason: &str) {
        match &mut self.state {
            State::Stopping { awaited } => {
                awaited.remove(&slot);
                self.meet_when_stopped();
            }
            State::Ending { reports: Some(reports) } => {
                reports.forget(slot);
            }
            State::Signalled => self.continue_without(slot, reason),
            _ => {}
        }
    }

    fn on_report(&mut self, slot: Slot, report: Option<Report>) {
        if let State::Ending { reports: Some(reports) } = &mut self.state {
            reports.add(slot, report);
        }
    }

    /// Publishes which failure caused the others, when all reports are in or time is up.
    fn publish(&mut self, now: Instant) {
        if let State::Ending { reports } = &mut self.state
            && let Some(reports) = reports.take_if(|reports| reports.are_due(now))
        {
            self.actions.push(Action::Root(reports.root()));
        }
    }

    /// Acts on the time, and on the events since the last call.
    pub(super) fn on_time(&mut self, now: Instant) {
        self.settle_suspicion();
        self.meet(now);
        self.publish(now);
    }

    /// Starts the workers when enough nodes are there, or ends the run when they have not come in time.
    fn meet(&mut self, now: Instant) {
        let (least, most) = (self.terms.min_nodes, self.terms.max_nodes);
        let State::Meeting { since, enough_since } = &mut self.state else { return };
        let since = *since.get_or_insert(now);
        let there = self.nodes.len();
        if there < least {
            *enough_since = None;
            if now.duration_since(since) >= self.pace.join_timeout {
                let seconds = self.pace.join_timeout.as_secs_f64();
                self.fail(format!("{there} of {least} nodes joined within {seconds} s{}", self.absent()), 1, None);
            } else if now.duration_since(since) >= NOTICE && !std::mem::replace(&mut self.is_awaited, true) {
                log::warn!("{there} of {least} nodes have joined: waiting for the others");
            }
            return;
        }
        // Only the first round waits for more nodes than it needs. Later ones can join when they are ready.
        let enough_since = *enough_since.get_or_insert(now);
        if there >= most || self.rounds > 0 || now.duration_since(enough_since) >= self.pace.last_call_timeout {
            self.start();
        }
    }

    /// What to do about the nodes that have not joined; names them if they are known by rank.
    fn absent(&self) -> String {
        if !self.is_static {
            return ": start ddprun with the same options on the others, look at its output there, or give them more time \
                    (--rdzv-conf join_timeout=SECONDS)"
                .to_string();
        }
        let is_there = |rank: usize| self.nodes.values().any(|node| node.node_rank == Some(rank));
        let absent = (0..self.terms.max_nodes).filter(|rank| !is_there(*rank));
        let absent: Vec<String> = absent.map(|rank| rank.to_string()).collect();
        format!(": look at the output of ddprun with --node-rank {}", some(&absent))
    }

    /// Why a node is not fit, compared with those that are there, if its user wants it to be compared.
    fn lacks(&self, node: &Node) -> Option<String> {
        let others = self.nodes.values().filter(|other| *other != node).filter_map(|other| other.fitness);
        let all: Vec<_> = node.fitness.into_iter().chain(others).collect();
        let reason = node.fitness?.lacks(&all)?;
        Some(format!("the machine of host {} is not fit for the run: {reason}", node.host))
    }

    /// Refuses nodes that are slower than others, which may have joined later; returns whether there are any.
    fn refuse_unfit(&mut self) -> bool {
        let lacks = |(slot, node): (&Slot, &Node)| Some((*slot, node.hosts, self.lacks(node)?));
        let unfit: Vec<_> = self.nodes.iter().filter_map(lacks).collect();
        for (slot, hosts, reason) in &unfit {
            if self.is_static || *hosts {
                // Without this node there is no run.
                self.fail(reason.clone(), 1, None);
                break;
            }
            self.nodes.remove(slot);
            self.refused.insert(*slot);
            self.actions.push(Action::Write(Entry::Refuse { slot: *slot, reason: reason.clone() }));
        }
        !unfit.is_empty()
    }

    fn start(&mut self) {
        if self.refuse_unfit() {
            return;
        }
        let mut slots: Vec<Slot> = self.nodes.keys().copied().collect();
        if self.is_static {
            slots.sort_by_key(|slot| self.nodes.get(slot).and_then(|node| node.node_rank));
        }
        slots.truncate(self.terms.max_nodes);
        self.members = slots.clone();
        let round =
            Round { attempt: self.rounds, restart_count: self.restart_count, nodes: slots.len(), node_rank: None };
        let world_size = slots.len() * self.terms.workers;
        self.processes = Some(Members::new(Arc::clone(&self.store), self.rounds, world_size));
        self.rounds += 1;
        self.actions.push(Action::Start(round, slots.clone()));
        self.state = State::Running { members: slots, finished: BTreeSet::new(), suspicion: None };
    }

    /// Ends all workers, and restarts them afterwards.
    pub(super) fn restart(&mut self, reason: String) {
        let awaited = self.members.iter().copied().filter(|slot| self.nodes.contains_key(slot)).collect();
        self.restart_count += 1;
        self.actions.push(Action::Write(Entry::Restart { reason }));
        self.state = State::Stopping { awaited };
        self.meet_when_stopped();
    }

    /// Ends the run. `first` is the node on which a worker has failed.
    pub(super) fn fail(&mut self, reason: String, code: u8, first: Option<Slot>) {
        self.end_with(reason, code, first, None);
    }

    /// Ends the run because of a node, which may have received `signal`.
    fn end(&mut self, reason: String, signal: Option<i32>) {
        self.end_with(reason, signal.map_or(1, |signal| Exit::Signal(signal).code()), None, signal);
    }

    fn end_with(&mut self, reason: String, code: u8, first: Option<Slot>, signal: Option<i32>) {
        self.note_failure(&reason);
        self.actions.push(Action::Write(Entry::Failed { reason, code, signal }));
        let awaited = self.members.iter().copied().filter(|slot| self.nodes.contains_key(slot)).collect();
        self.restarts.stopped_by = signal;
        self.state = match signal {
            Some(_) => State::Signalled,
            None => State::Ending { reports: Some(Reports::of(awaited, first)) },
        };
    }
}
