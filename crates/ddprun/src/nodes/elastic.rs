//! Runs of `candle_ddp::elastic::run` over several nodes: when some processes end, the others keep running.
use super::message::{Admission, Entry, Exited, Replacement, Slot};
use super::run::{Action, Run, State};
use crate::judge::{self, End, Verdict};
use crate::members::Members;
use candle_ddp_rendezvous::Member;

impl Run {
    /// The smallest world size that the ranks accept, if they run elastically.
    pub(super) fn elastic(&self) -> Option<usize> {
        self.processes.as_ref()?.announced().ok().flatten()
    }

    /// Decides what follows when the process of a rank has ended.
    pub(super) fn judge(&mut self, slot: Slot, exited: &Exited) {
        let Exited { rank, ref how, code } = *exited;
        let what = format!("rank {rank} on {} {how}", self.name(slot));
        let failed = code != 0;
        if failed {
            self.note_failure(&what);
        }
        let min_world_size = self.elastic();
        let elastic = self.processes.as_mut().zip(min_world_size);
        let judged = judge::on_exit(elastic, End { rank, how, what: &what, failed }, &mut self.restarts);
        // If the process of the store ends, this one ends with it, so its calls do not fail.
        let (verdict, reason) =
            judged.unwrap_or((if failed { Verdict::Fail } else { Verdict::Continue }, String::new()));
        let entry = match verdict {
            Verdict::Continue | Verdict::EndRanks => return,
            Verdict::Fail => return self.fail(what, code, Some(slot)),
            Verdict::RestartAll => return self.restart(reason),
            Verdict::Replace => {
                self.restart_count += 1;
                let incarnation = self.processes.as_ref().map_or(0, |processes| processes.incarnation(rank));
                Entry::Replace(Replacement { slot, rank, incarnation, restart_count: self.restart_count, reason })
            }
            Verdict::ScaleDown => Entry::ScaleDown { slot, rank: Some(rank), reason },
        };
        self.actions.push(Action::Write(entry));
    }

    /// Lets the others continue without a node that was lost; returns whether they do.
    pub(super) fn scale_down(&mut self, slot: Slot, reason: &str) -> bool {
        let Some(min_world_size) = self.elastic() else { return false };
        let Some(node_rank) = self.members.iter().position(|member| *member == slot) else { return false };
        let (workers, min_nodes) = (self.terms.workers, self.terms.min_nodes);
        let State::Running { members, .. } = &mut self.state else { return false };
        // If the number of nodes is fixed, only the program's smallest world size counts.
        let enough_nodes = self.is_static || members.len() > min_nodes;
        let Some(processes) = &mut self.processes else { return false };
        if !processes.update().unwrap_or(false) {
            return false;
        }
        let next = processes.without(|rank| rank / workers == node_rank);
        let left = next.len();
        if left == 0 || left < min_world_size || !enough_nodes {
            let least = min_world_size.max(if self.is_static { 0 } else { min_nodes * workers });
            let reason = format!("{reason}. The {left} remaining rank(s) are fewer than the run needs ({least})");
            let _ = processes.fail(node_rank * workers, reason);
            return false;
        }
        if !processes.change(next).unwrap_or(false) {
            return false;
        }
        members.retain(|member| *member != slot);
        let reason = format!("{reason}. The other {left} rank(s) continue without it");
        self.actions.push(Action::Write(Entry::ScaleDown { slot, rank: None, reason }));
        self.finish_if_all_have();
        true
    }

    /// Admits a node while the others continue; returns whether it did.
    pub(super) fn admit(&mut self, slot: Slot) -> bool {
        if self.elastic().is_none() {
            return false;
        }
        let Some(node) = self.nodes.get(&slot) else { return false };
        let (host, own_rank) = (node.host.clone(), node.node_rank.filter(|_| self.is_static));
        let is_free = |seat: usize| self.members.get(seat).is_none_or(|member| !self.nodes.contains_key(member));
        let Some(node_rank) = own_rank.or_else(|| (0..self.terms.max_nodes).find(|seat| is_free(*seat))) else {
            return false;
        };
        let workers = self.terms.workers;
        let ranks = node_rank * workers..(node_rank + 1) * workers;
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
        match self.members.get_mut(node_rank) {
            Some(member) => *member = slot,
            None => self.members.push(slot),
        }
        if let State::Running { members, .. } = &mut self.state {
            members.push(slot);
        }
        self.restart_count += 1;
        let reason = format!("a node has joined (host {host}): the others continue with it, {world_size} ranks in all");
        self.actions.push(Action::Write(Entry::Admit(Admission {
            slot,
            node_rank,
            nodes: self.members.len(),
            attempt: self.rounds - 1,
            restart_count: self.restart_count,
            incarnations,
            reason,
        })));
        true
    }
}
