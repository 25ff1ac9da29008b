//! A run on several nodes, as a state machine. The rules for elastic runs are in `elastic`, those for nodes that come
//! and go in `meeting` and `losses`.
//!
//! It has no clock: call `on_time` with the time after every event.
use super::message::{Entry, Exited, Message, Node, Round, Slot};
use super::reports::Reports;
use crate::command::{Layout, Pace, Rendezvous, Terms};
use crate::supervise::consequence::Restarts;
use crate::supervise::members::Members;
use crate::supervise::worker::Exit;
use crate::verdict::{How, Verdict};
use crate::view::status::{NodeStatus, Phase, RunStatus};
use candle_ddp_base::warnings::Warnings;
use candle_ddp_rendezvous::Store;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long nodes that come late are told that the run was called off.
const LATE: Duration = Duration::from_secs(30);

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
    /// The verdict on the run, which has failed.
    Conclude(Box<Verdict>),
}

#[derive(Debug)]
pub(super) enum State {
    /// No worker runs; nodes join. The times are those of the first look at the clock.
    Meeting { since: Option<Instant>, enough_since: Option<Instant> },
    /// These nodes run workers.
    Running { members: Vec<Slot>, finished: BTreeSet<Slot>, suspicion: Option<Suspicion> },
    /// Workers are ended on the nodes that have not reported, before all are restarted.
    Stopping { reports: Reports },
    /// A signal ends the run. Workers have their time to save and exit, and ranks of an elastic run need decisions until then.
    Signalled,
    /// The run is over; these nodes have not said goodbye yet.
    Ending { reports: Option<Reports> },
}

/// The check of the connections between the nodes, before the first round: once all of them have checked themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Check {
    Pending,
    Running,
    /// It has found nothing, or is not wanted.
    Over,
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
    pub(super) pace: Pace,
    /// The number of nodes is fixed, and each knows its rank.
    pub(super) is_static: bool,
    pub(super) store: Arc<dyn Store>,
    /// The nodes that are alive.
    pub(super) nodes: BTreeMap<Slot, Node>,
    /// Nodes that were refused, and may not have read why.
    pub(super) refused: BTreeSet<Slot>,
    /// Whether the node that hosts the store has joined; others may come first.
    pub(super) has_host: bool,
    /// The hosts of all nodes that have joined.
    pub(super) hosts: BTreeMap<Slot, String>,
    /// The members of the last round, by their ranks; some may be gone.
    pub(super) members: Vec<Slot>,
    /// Their workers.
    pub(super) layout: Layout,
    pub(super) state: State,
    /// The number of rounds, and how often any worker was restarted, for any reason.
    pub(super) rounds: u64,
    pub(super) restart_count: u32,
    pub(super) restarts: Restarts,
    pub(super) check: Check,
    /// The processes of the last round, in case they run elastically.
    pub(super) processes: Option<Members>,
    pub(super) last_failure: Option<Verdict>,
    /// Why the run ends, if it does not end well.
    pub(super) why: Option<Verdict>,
    /// The exit codes of the round's ranks whose processes have ended.
    codes: BTreeMap<usize, u8>,
    pub(super) actions: Vec<Action>,
    /// Whether the user knows that nodes are missing.
    pub(super) is_awaited: bool,
    /// How many nodes have asked to join.
    pub(super) asked: usize,
    /// The run has ended before it began, because of one node. The others, which may come yet, learn of it then, for a while.
    pub(super) is_called_off: bool,
    late_until: Option<Instant>,
    pub(super) warnings: Warnings,
}

impl Run {
    pub(super) fn new(Rendezvous { terms, pace, is_static }: Rendezvous, store: Arc<dyn Store>) -> Self {
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
            layout: Layout::default(),
            state: State::Meeting { since: None, enough_since: None },
            rounds: 0,
            restart_count: 0,
            restarts,
            check: Check::Pending,
            processes: None,
            last_failure: None,
            why: None,
            codes: BTreeMap::new(),
            is_awaited: false,
            asked: 0,
            is_called_off: false,
            late_until: None,
            warnings: Warnings::new("the coordinator of the nodes"),
            actions: Vec::new(),
        }
    }

    /// Whether no agent needs the coordinator any more.
    pub(super) fn is_over(&self) -> bool {
        let is_left = self.has_ended() && self.has_host && self.nodes.is_empty() && self.refused.is_empty();
        is_left && !self.awaits_news()
    }

    /// Whether nodes may come that do not know yet that the run was called off.
    pub(super) fn awaits_news(&self) -> bool {
        self.is_called_off && self.asked < self.terms.max_nodes
    }

    /// Whether a node waits until another one is lost.
    pub(super) fn is_spare(&self, slot: Slot) -> bool {
        matches!(&self.state, State::Running { members, .. } if !members.contains(&slot))
    }

    /// Whether a signal has ended the run, and all workers have exited with 0: then so do the nodes.
    pub(super) fn has_saved(&self) -> bool {
        let mut ranks = 0..self.layout.world_size();
        matches!(self.state, State::Signalled)
            && !ranks.is_empty()
            && ranks.all(|rank| self.codes.get(&rank) == Some(&0))
    }

    /// Forgets the last round.
    pub(super) fn begin_round(&mut self, members: Vec<Slot>) {
        self.layout = Layout::default();
        let workers = members.iter().filter_map(|slot| self.nodes.get(slot)).map(|node| node.workers);
        workers.for_each(|workers| self.layout.push(workers));
        (self.members, self.codes) = (members, BTreeMap::new());
    }

    /// The ranks of a node, if it is a member.
    pub(super) fn ranks_of(&self, slot: Slot) -> Option<Range<usize>> {
        Some(self.layout.ranks(self.members.iter().position(|member| *member == slot)?))
    }

    pub(super) fn has_ended(&self) -> bool {
        matches!(self.state, State::Signalled | State::Ending { .. })
    }

    pub(super) fn has_range(&self) -> bool {
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
            Message::Ended(verdict) => self.on_ended(slot, verdict),
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

    fn on_exited(&mut self, slot: Slot, exited: Exited) {
        if exited.rank < self.layout.world_size() {
            self.codes.insert(exited.rank, exited.exit.code());
        }
        match &self.state {
            State::Running { members, .. } if members.contains(&slot) => {}
            State::Signalled => {}
            _ => return,
        }
        if self.elastic().is_some() {
            return self.judge(slot, exited);
        }
        let has_range = self.has_range();
        let State::Running { members, suspicion, .. } = &mut self.state else { return };
        if exited.exit.code() == 0 || suspicion.is_some() {
            return;
        }
        let silent = members.iter().filter(|member| has_range && **member != slot).map(|member| (*member, 2)).collect();
        *suspicion = Some(Suspicion { exited, slot, silent });
        self.settle_suspicion();
    }

    /// Acts on a failure, once no node is suspected of having caused it by its death.
    pub(super) fn settle_suspicion(&mut self) {
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
            return self.fail(self.verdict_on(slot, exited), Some(slot));
        }
        self.judge(slot, exited);
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
            if self.check == Check::Running {
                let count = members.len();
                let reason = format!("the connections between the {count} nodes are fit (--check): the run starts");
                self.restart(reason, None, None);
                self.check = Check::Over;
                return;
            }
            self.actions.push(Action::Write(Entry::Done));
            self.state = State::Ending { reports: None };
        }
    }

    fn on_ended(&mut self, slot: Slot, verdict: Option<Verdict>) {
        if let State::Stopping { reports } = &mut self.state {
            reports.add(slot, verdict);
            self.meet_when_stopped();
        }
    }

    pub(super) fn meet_when_stopped(&mut self) {
        if !matches!(&self.state, State::Stopping { reports } if reports.are_complete()) {
            return;
        }
        let stopped = std::mem::replace(&mut self.state, State::Meeting { since: None, enough_since: None });
        if let State::Stopping { reports } = stopped
            && let Some(verdict) = reports.verdict()
        {
            self.survive(verdict);
        }
        self.actions.push(Action::Clear);
    }

    pub(super) fn on_beat(&mut self, slot: Slot) {
        if let State::Running { suspicion: Some(suspicion), .. } = &mut self.state {
            if let Some(needed) = suspicion.silent.get_mut(&slot) {
                *needed = needed.saturating_sub(1);
            }
            self.settle_suspicion();
        }
    }

    fn on_report(&mut self, slot: Slot, verdict: Option<Verdict>) {
        if let State::Ending { reports: Some(reports) } = &mut self.state {
            reports.add(slot, verdict);
        }
    }

    /// Publishes the verdict, when all reports are in or time is up.
    fn publish(&mut self, now: Instant) {
        if let State::Ending { reports } = &mut self.state
            && let Some(reports) = reports.take_if(|reports| reports.are_due(now))
            && let Some(verdict) = reports.verdict()
        {
            self.last_failure = Some(verdict.in_short());
            self.actions.push(Action::Conclude(Box::new(verdict)));
        }
    }

    /// Acts on the time, and on the events since the last call.
    pub(super) fn on_time(&mut self, now: Instant) {
        self.settle_suspicion();
        self.meet(now);
        self.publish(now);
        if self.is_called_off {
            let until = *self.late_until.get_or_insert(now + LATE);
            self.is_called_off = now < until;
        }
    }

    /// Ends all workers, because of a failure or for another reason, and restarts them afterwards. `first` is the node on which a worker
    /// has failed.
    pub(super) fn restart(&mut self, reason: String, failure: Option<Verdict>, first: Option<Slot>) {
        let awaited = self.members.iter().copied().filter(|slot| self.nodes.contains_key(slot)).collect();
        if self.check != Check::Running {
            self.restart_count += 1;
        }
        self.actions.push(Action::Write(Entry::Restart { reason }));
        self.state = State::Stopping { reports: Reports::of(awaited, failure, first) };
        self.meet_when_stopped();
    }

    /// The verdict that the end of a process allows by itself.
    pub(super) fn verdict_on(&self, slot: Slot, exited: Exited) -> Verdict {
        let Exited { rank, exit } = exited;
        let how = if let Exit::Signal(_) = exit { How::Signal } else { How::Exit };
        let (code, signal) = exit.numbers();
        let text = format!("rank {rank} on {} {exit}", self.name(slot));
        Verdict { rank: Some(rank), exit: code, signal, ..self.verdict_of(slot, how, exit.code(), text) }
    }

    /// A failure on a node.
    pub(super) fn verdict_of(&self, slot: Slot, how: How, code: u8, text: String) -> Verdict {
        let node = self.members.iter().position(|member| *member == slot);
        Verdict { node, host: self.hosts.get(&slot).cloned(), ..Verdict::now(how, code, text) }
    }

    /// The loss of a node, or a signal that it has received.
    pub(super) fn loss(&self, slot: Slot, reason: String, signal: Option<i32>) -> Verdict {
        let (how, code) = signal.map_or((How::Lost, 1), |signal| (How::Stopped, Exit::Signal(signal).code()));
        Verdict { signal, ..self.verdict_of(slot, how, code, reason) }
    }

    /// Records a failure after which the run continues.
    pub(super) fn survive(&mut self, verdict: Verdict) {
        self.last_failure = Some(verdict.in_short());
        self.actions.push(Action::Write(Entry::Failure(Box::new(verdict))));
    }

    /// Ends the run. `first` is the node on which a worker has failed.
    pub(super) fn fail(&mut self, why: Verdict, first: Option<Slot>) {
        let signal = why.signal.filter(|_| why.how == How::Stopped);
        self.actions.push(Action::Write(Entry::Failed { reason: why.text.clone(), code: why.code, signal }));
        let awaited = self.members.iter().copied().filter(|slot| self.nodes.contains_key(slot)).collect();
        self.restarts.stopped_by = signal;
        self.state = match signal {
            Some(_) => {
                self.last_failure = Some(why.clone());
                State::Signalled
            }
            None => State::Ending { reports: Some(Reports::of(awaited, Some(why.clone()), first)) },
        };
        self.why = Some(why);
    }

    /// The status of the run, which the coordinator publishes for `ddprun status`.
    pub(super) fn status(&self) -> RunStatus {
        let (members, phase) = match &self.state {
            State::Meeting { .. } => (&[][..], Phase::Meeting),
            State::Running { .. } => (&self.members[..], Phase::Running),
            State::Stopping { .. } => (&self.members[..], Phase::Restarting),
            State::Signalled | State::Ending { .. } => (&self.members[..], Phase::Ending),
        };
        let node = |slot: &Slot, node_rank| NodeStatus {
            host: self.hosts.get(slot).cloned().unwrap_or_default(),
            node_rank,
            is_alive: self.nodes.contains_key(slot),
        };
        let there = members.iter().enumerate().map(|(node_rank, slot)| node(slot, Some(node_rank)));
        let waiting = self.nodes.keys().filter(|slot| !members.contains(slot)).map(|slot| node(slot, None));
        RunStatus {
            run_id: self.terms.run_id.clone(),
            phase,
            attempt: self.rounds.saturating_sub(1),
            restarts: self.restarts.used,
            max_restarts: self.restarts.most,
            layout: self.layout.clone(),
            nodes: there.chain(waiting).collect(),
            last_failure: self.last_failure.clone(),
        }
    }
}
