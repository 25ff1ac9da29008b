//! How the nodes of a run come together: who may join, and when the workers start.
use super::message::{Entry, Node, Round, Slot};
use super::run::{Action, Check, Run, State};
use crate::supervise::members::Members;
use crate::verdict::{How, Verdict};
use candle_ddp_base::text::some;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long nodes may be missing before the user is told.
const NOTICE: Duration = Duration::from_secs(10);

impl Run {
    pub(super) fn on_join(&mut self, slot: Slot, node: Node) {
        (self.has_host, self.asked) = (self.has_host || node.hosts, self.asked.saturating_add(1));
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
                let why = self.why.as_ref().map(|why| format!(": {}", why.text)).unwrap_or_default();
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
                Some(difference) => is_needed && !difference.is_of_another_run(),
                // Nor without its store.
                None => lacks.is_some() && (node.hosts || (is_needed && self.is_static)),
            };
            match is_fatal && !self.has_ended() {
                true => {
                    self.is_called_off = self.rounds == 0;
                    self.fail(Verdict { host: Some(host), ..Verdict::now(How::NotStarted, 1, reason) }, None);
                }
                false => self.warnings.warn(format_args!("the ddprun on host {host} is refused: {reason}")),
            }
            return;
        }
        self.nodes.insert(slot, node);
        self.hosts.insert(slot, host.clone());
        if let State::Running { members, .. } = &self.state
            && members.len() < self.terms.max_nodes
            && !self.admit(slot, "a node has joined")
        {
            let nodes = self.nodes.len().min(self.terms.max_nodes);
            let reason = format!("a node has joined (host {host}): restarting all workers, on {nodes} nodes");
            self.restart(reason, None, None);
        }
    }

    /// Starts the workers when enough nodes are there, or ends the run when they have not come in time.
    pub(super) fn meet(&mut self, now: Instant) {
        let (least, most) = (self.terms.min_nodes, self.terms.max_nodes);
        let State::Meeting { since, enough_since } = &mut self.state else { return };
        let since = *since.get_or_insert(now);
        let there = self.nodes.len();
        if there < least {
            *enough_since = None;
            if now.duration_since(since) >= self.pace.join_timeout {
                let seconds = self.pace.join_timeout.as_secs_f64();
                let text = format!("{there} of {least} nodes joined within {seconds} s{}", self.absent());
                self.fail(Verdict::now(How::NotStarted, 1, text), None);
            } else if now.duration_since(since) >= NOTICE && !std::mem::replace(&mut self.is_awaited, true) {
                log::warn!("{there} of {least} nodes have joined: waiting for the others");
            }
            return;
        }
        // Only the first round waits for more nodes than it needs. Later ones can join when they are ready.
        let enough_since = *enough_since.get_or_insert(now);
        if there >= most
            || self.rounds > 0
            || self.check != Check::Pending
            || now.duration_since(enough_since) >= self.pace.last_call_timeout
        {
            self.start();
        }
    }

    /// Advice about the nodes that have not joined. It names them if they are known by rank.
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

    /// Why a node is not fit, by itself or compared with those that are there, if its user wants it to be checked.
    fn lacks(&self, node: &Node) -> Option<String> {
        if let Some(reason) = &node.unfit {
            return Some(format!("the machine of host {} is not fit for the run: {reason}", node.host));
        }
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
                self.fail(self.verdict_of(*slot, How::NotStarted, 1, reason.clone()), None);
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
        self.begin_round(slots.clone());
        let is_checked = |slot: &Slot| self.nodes.get(slot).is_some_and(|node| node.fitness.is_some());
        let is_check = self.check != Check::Over && slots.len() > 1 && slots.iter().all(is_checked);
        self.check = if is_check { Check::Running } else { Check::Over };
        let (attempt, restart_count, layout) = (self.rounds, self.restart_count, self.layout.clone());
        let round = Round { attempt, restart_count, layout, is_check, node_rank: None };
        if !is_check {
            self.processes = Some(Members::new(Arc::clone(&self.store), self.rounds, self.layout.world_size()));
            self.rounds += 1;
        }
        self.actions.push(Action::Start(round, slots.clone()));
        self.state = State::Running { members: slots, finished: BTreeSet::new(), suspicion: None };
    }
}
