//! How a run continues, or ends, when a node leaves or is lost.
use super::message::{Entry, Slot};
use super::run::{Action, Check, Run, State};

impl Run {
    /// A node leaves voluntarily.
    pub(super) fn on_leave(&mut self, slot: Slot, reason: &str, signal: Option<i32>) {
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
        // The run itself begins after the check.
        let has_finished = has_finished && self.check != Check::Running;
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
    pub(super) fn forget(&mut self, slot: Slot, reason: &str) {
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
}
