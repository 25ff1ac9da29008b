//! Runs of `candle_ddp::elastic::run` over several nodes: when some processes end, the others keep running.
use super::message::{Admission, Entry, Exited, Node, Replacement, Slot};
use super::run::{Action, Check, Run, State};
use crate::supervise::consequence::{self, Consequence};
use crate::supervise::members::Members;
use crate::verdict::Verdict;
use candle_ddp_rendezvous::Member;

impl Run {
    /// The smallest world size that the ranks accept, if they run elastically.
    pub(super) fn elastic(&self) -> Option<usize> {
        self.processes.as_ref()?.announced().ok().flatten()
    }

    /// Decides what follows when the process of a rank has ended.
    pub(super) fn judge(&mut self, slot: Slot, exited: Exited) {
        let Exited { rank, exit } = exited;
        let (failed, verdict) = (exit.code() != 0, self.verdict_on(slot, exited));
        if self.check == Check::Running && failed {
            // Nothing is restarted: the machines are what they are.
            let text = format!("{}, in the check before the run (--check)", verdict.text);
            return self.fail(Verdict { text, ..verdict }, Some(slot));
        }
        let min_world_size = self.elastic();
        let elastic = self.processes.as_mut().zip(min_world_size);
        let judged = consequence::on_exit(elastic, exited, &verdict.text, &mut self.restarts);
        // If the process of the store ends, this one ends with it, so its calls do not fail.
        let (next, reason) =
            judged.unwrap_or((if failed { Consequence::Fail } else { Consequence::Continue }, String::new()));
        if self.restarts.stopped_by.is_some() {
            // No node needs to know: their workers end anyway.
            if next == Consequence::ScaleDown && !self.restarts.have_asked_for(exit) {
                log::warn!("{reason}");
            }
            return;
        }
        let entry = match next {
            Consequence::Continue | Consequence::EndRanks => return,
            Consequence::Fail => return self.fail(verdict, Some(slot)),
            Consequence::RestartAll => return self.restart(reason, Some(verdict), Some(slot)),
            Consequence::Replace => {
                self.restart_count += 1;
                let incarnation = self.processes.as_ref().map_or(0, |processes| processes.incarnation(rank));
                Entry::Replace(Replacement { slot, rank, incarnation, restart_count: self.restart_count, reason })
            }
            Consequence::ScaleDown => Entry::ScaleDown { slot, rank: Some(rank), reason },
        };
        self.survive(verdict);
        self.actions.push(Action::Write(entry));
    }

    /// Lets the others continue without a node that was lost, or that leaves because of `signal`; returns whether they do.
    pub(super) fn scale_down(&mut self, slot: Slot, reason: &str, signal: Option<i32>) -> bool {
        let State::Running { members, .. } = &mut self.state else { return false };
        // If the number of nodes is fixed, only the program's smallest world size counts.
        let least = if self.is_static { 0 } else { self.terms.min_nodes };
        let are_enough = members.len() > least;
        members.retain(|member| *member != slot);
        let least = (!are_enough).then_some(least);
        let Some(reason) = self.give_up_ranks(slot, reason, least, signal) else { return false };
        self.actions.push(Action::Write(Entry::ScaleDown { slot, rank: None, reason }));
        self.finish_if_all_have();
        true
    }

    /// While a signal ends the run: the ranks of the other nodes continue without the ranks of a node that is gone, or has ended
    /// without them.
    pub(super) fn continue_without(&mut self, slot: Slot, reason: &str) {
        let (Some(ranks), Some(processes)) = (self.ranks_of(slot), &mut self.processes) else { return };
        // Ranks whose ends this node has reported are gone already.
        let has_some = processes.update().unwrap_or(false) && processes.any(|rank| ranks.contains(&rank));
        if has_some && let Some(reason) = self.give_up_ranks(slot, reason, None, None) {
            log::warn!("{reason}");
        }
    }

    /// Lets the other ranks continue without the ranks of a node, and returns why, unless they are too few, or their nodes are
    /// fewer than `least`. Then they get an error, unless a `signal` ends the node: they save and exit together with its ranks.
    fn give_up_ranks(&mut self, slot: Slot, reason: &str, least: Option<usize>, signal: Option<i32>) -> Option<String> {
        let min_world_size = self.elastic()?;
        let ranks = self.ranks_of(slot)?;
        let processes = self.processes.as_mut()?;
        if !processes.update().unwrap_or(false) {
            return None;
        }
        let next = processes.without(|rank| ranks.contains(&rank));
        let left = next.len();
        if left == 0 || left < min_world_size || least.is_some() {
            let least = min_world_size.max(self.layout.least(least.unwrap_or(0)));
            let reason = format!("{reason}. The {left} remaining rank(s) are fewer than the run needs ({least})");
            if signal.is_none() {
                let _ = processes.fail(ranks.start, reason);
            }
            return None;
        }
        let is_changed = processes.change(next).unwrap_or(false);
        is_changed.then(|| format!("{reason}. The other {left} rank(s) continue without it"))
    }

    /// Gives the place of a node that was lost to a spare with as many workers, one of those that wait because the run has as
    /// many nodes as it may have; returns whether it did.
    pub(super) fn fill_in(&mut self, lost: Slot, reason: &str) -> bool {
        let State::Running { members, .. } = &self.state else { return false };
        // If each node has been given its rank, none is spare.
        let fits = |(slot, node): &(&Slot, &Node)| {
            !members.contains(slot) && self.ranks_of(lost).is_some_and(|ranks| ranks.len() == node.workers)
        };
        let spare = self.nodes.iter().find(fits).map(|(slot, _)| *slot).filter(|_| !self.is_static);
        let (Some(spare), true) = (spare, self.elastic().is_some()) else { return false };
        if let State::Running { members, .. } = &mut self.state {
            members.retain(|member| *member != lost);
        }
        self.admit(spare, &format!("{reason}. A spare takes its place"))
    }

    /// Admits a node, because of `why`, while the others continue; returns whether it did.
    pub(super) fn admit(&mut self, slot: Slot, why: &str) -> bool {
        if self.elastic().is_none() {
            return false;
        }
        let Some(node) = self.nodes.get(&slot) else { return false };
        let (host, own_rank, workers) = (node.host.clone(), node.node_rank.filter(|_| self.is_static), node.workers);
        // The ranks of a node that is gone are free, for a node with as many workers; those of a new one follow the others.
        let is_free = |seat: &usize| match self.members.get(*seat) {
            Some(member) => !self.nodes.contains_key(member) && self.layout.ranks(*seat).len() == workers,
            None => true,
        };
        let mut seats = own_rank.map_or(0..self.terms.max_nodes, |rank| rank..rank + 1);
        let Some(node_rank) = seats.find(is_free) else { return false };
        let mut layout = self.layout.clone();
        if node_rank >= self.members.len() {
            layout.push(workers);
        }
        let ranks = layout.ranks(node_rank);
        let Some(processes) = &mut self.processes else { return false };
        if !processes.update().unwrap_or(false) {
            return false;
        }
        let next: Vec<Member> = processes.with_new(ranks.clone());
        let world_size = next.len();
        if !processes.change(next).unwrap_or(false) {
            return false;
        }
        let incarnations = ranks.map(|rank| Members::incarnation(processes, rank)).collect();
        self.layout = layout;
        match self.members.get_mut(node_rank) {
            Some(member) => *member = slot,
            None => self.members.push(slot),
        }
        if let State::Running { members, .. } = &mut self.state {
            members.push(slot);
        }
        self.restart_count += 1;
        let reason = format!("{why} (host {host}): the others continue with it, {world_size} ranks in all");
        self.actions.push(Action::Write(Entry::Admit(Admission {
            slot,
            node_rank,
            layout: self.layout.clone(),
            attempt: self.rounds - 1,
            restart_count: self.restart_count,
            incarnations,
            reason,
        })));
        true
    }
}
