//! The status that the coordinator publishes about its run, for `ddprun status`.
use super::message::Slot;
use super::run::{Run, State};
use crate::view::status::{NodeStatus, Phase, RunStatus};

impl Run {
    /// The status of the run.
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
