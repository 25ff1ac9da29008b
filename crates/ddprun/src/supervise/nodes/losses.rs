//! How a run continues, or ends, when a node leaves or is lost.
use super::message::{Entry, Slot};
use super::run::{Action, Check, Run, State};
use crate::verdict::Verdict;

impl Run {
    /// A node leaves voluntarily.
    pub(super) fn on_leave(&mut self, slot: Slot, reason: &str, signal: Option<i32>) {
        if matches!(self.state, State::Signalled) {
            // It is ending already.
            return;
        }
        let reason = format!("{} leaves: {reason}", self.name(slot));
        let Some(node) = self.nodes.remove(&slot) else { return };
        let has_finished = matches!(&self.state, State::Running { finished, .. } if finished.contains(&slot));
        // The run itself begins after the check.
        let has_finished = has_finished && self.check != Check::Running;
        match &self.state {
            State::Running { .. } if has_finished && node.hosts => {
                self.actions.push(Action::Write(Entry::Unattended { reason }));
                self.state = State::Ending { reports: None };
            }
            State::Running { .. } if has_finished => {}
            State::Meeting { .. } if self.is_static => self.fail(self.loss(slot, reason, signal), None),
            State::Running { .. } | State::Stopping { .. } | State::Meeting { .. } if node.hosts => {
                self.fail(self.loss(slot, format!("{reason}. It hosts the store"), signal), None);
            }
            _ => self.lose(slot, reason, signal),
        }
        if matches!(self.state, State::Signalled) {
            // Until its goodbye, it reports the ends of its workers.
            self.nodes.insert(slot, node);
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
    pub(super) fn on_gone(&mut self, slot: Slot) {
        let reason = format!(
            "{} is gone: its ddprun ended without a word, or its connection to the store was cut",
            self.name(slot)
        );
        self.lose(slot, reason, None);
    }

    /// Continues without a node, or ends the run. `signal` is the signal that ended the node, if any.
    fn lose(&mut self, slot: Slot, reason: String, signal: Option<i32>) {
        self.nodes.remove(&slot);
        let loss = self.loss(slot, reason.clone(), signal);
        let is_running = matches!(&self.state, State::Running { members, .. } if members.contains(&slot));
        if is_running && (self.fill_in(slot, &reason) || self.scale_down(slot, &reason, signal)) {
            self.survive(loss);
        } else if is_running {
            self.replace_lost(loss);
        } else if matches!(self.state, State::Stopping { .. }) && self.is_static && self.members.contains(&slot) {
            self.fail(loss, None);
        }
        let saves = signal.is_some() && matches!(self.state, State::Signalled);
        if !saves {
            self.forget(slot, &reason);
        }
    }

    fn replace_lost(&mut self, loss: Verdict) {
        let reason = loss.text.clone();
        let left = self.nodes.len().min(self.terms.max_nodes);
        let least = self.terms.min_nodes;
        if self.is_static {
            self.fail(loss, None);
        } else if left >= least {
            self.restart(format!("{reason}. Restarting all workers, on {left} node(s)"), Some(loss), None);
        } else if self.restarts.are_left() {
            self.restarts.used += 1;
            let reason = format!("{reason}. All workers will be restarted once {least} node(s) are there");
            self.restart(reason, Some(loss), None);
        } else {
            let few = format!("The {left} remaining node(s) are fewer than --nnodes requires ({least})");
            self.fail(Verdict { text: format!("{reason}. {few}"), ..loss }, None);
        }
    }

    /// No longer waits for a node, which is gone for `reason`.
    pub(super) fn forget(&mut self, slot: Slot, reason: &str) {
        match &mut self.state {
            State::Stopping { reports } => {
                reports.forget(slot);
                self.meet_when_stopped();
            }
            State::Ending { reports: Some(reports) } => {
                reports.forget(slot);
            }
            State::Signalled => self.continue_without(slot, reason),
            _ => {}
        }
    }
}
