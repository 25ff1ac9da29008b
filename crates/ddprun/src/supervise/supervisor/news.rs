//! The supervisor's reactions to events on other nodes.
use super::{Outcome, Phase, SETTLE, Supervisor, UNNEEDED};
use crate::console::message;
use crate::error::Result;
use crate::supervise::agent::Agent;
use crate::supervise::nodes::{Entry, Exited, Message, News, Replacement};
use crate::supervise::worker::Exit;
use crate::verdict::How;
use rustix::process::Signal;
use std::time::{Duration, Instant};

/// How long the workers have to exit by themselves after a failure on another node: their groups fail at once.
const SETTLE_ELSEWHERE: Duration = Duration::from_millis(500);

impl Supervisor {
    /// Reacts to an event on another node.
    pub(super) fn on_news(&mut self, news: News, agent: &mut Agent) {
        if self.is_decided {
            return Self::decline(&news, agent);
        }
        match news {
            News::Joined { slot, is_spare } => {
                agent.slot = Some(slot);
                if is_spare {
                    self.wait_as_spare();
                }
            }
            News::Entry(Entry::Start(round)) => match agent.enter(round) {
                Ok(true) => {
                    self.is_spare = false;
                    let started = self.restart(agent);
                    self.check_started(started, agent);
                }
                Ok(false) => self.wait_as_spare(),
                Err(reason) => self.fail_elsewhere(How::Lost, 1, reason, agent),
            },
            // A spare has nothing to end.
            News::Entry(Entry::Restart { reason }) if !agent.is_member => message(reason),
            News::Entry(Entry::Restart { reason }) => {
                message(reason);
                self.outcome = Outcome::Elsewhere;
                match self.phase {
                    Phase::Waiting(_) => {
                        self.phase = Phase::Waiting(None);
                        agent.tell(Message::Ended(None));
                    }
                    Phase::Running | Phase::Settling(_) => {
                        self.restarting = true;
                        self.end(Signal::TERM);
                    }
                    Phase::Ending(_) | Phase::Killed(_) => self.restarting = true,
                }
            }
            News::Entry(Entry::Failure(verdict)) => agent.survive(*verdict),
            News::Entry(Entry::Replace(replacement)) => self.replace(&replacement, agent),
            News::Entry(Entry::ScaleDown { slot, rank, reason }) => {
                message(reason);
                if let Some(worker) = self.workers.iter_mut().find(|worker| Some(worker.rank) == rank)
                    && agent.is_own(slot)
                {
                    worker.given_up = true;
                    self.resume();
                }
            }
            News::Entry(Entry::Admit(admission)) => {
                message(&admission.reason);
                if agent.is_own(admission.slot) {
                    self.is_spare = false;
                    self.workers.clear();
                    let started = agent.start_admitted(&admission, &mut self.workers);
                    self.resume();
                    self.check_started(started, agent);
                }
            }
            News::Entry(Entry::Refuse { slot, reason }) if !agent.is_own(slot) => message(reason),
            News::Entry(Entry::Refuse { reason, .. }) | News::Lost(reason) => {
                self.fail_elsewhere(How::Lost, 1, reason, agent);
            }
            News::Entry(Entry::Done) => {
                if !agent.is_member {
                    message(format_args!("the run has ended well: {UNNEEDED}"));
                }
                (self.is_decided, self.phase) = (true, Phase::Settling(Instant::now()));
            }
            News::Entry(Entry::Failed { reason, signal: Some(signal), .. }) => {
                self.signalled_elsewhere(signal, &reason, agent);
            }
            News::Entry(Entry::Failed { reason, code, signal: None }) => {
                self.fail_elsewhere(How::Unknown, code, reason, agent);
            }
            News::Entry(Entry::Unattended { reason }) => {
                message(format_args!(
                    "{reason}. It hosted the store: failures on other nodes go unnoticed from here on"
                ));
                self.is_decided = true;
                if matches!(self.phase, Phase::Waiting(_)) {
                    self.phase = Phase::Settling(Instant::now());
                }
            }
        }
    }

    fn wait_as_spare(&mut self) {
        self.is_spare = true;
        message("all nodes that the run needs are there: this one waits until one is lost");
    }

    /// Tells the other nodes if the run waits for a process that this one, which ends, will not start.
    fn decline(news: &News, agent: &Agent) {
        if let News::Entry(Entry::Replace(Replacement { slot, rank, .. })) = news
            && agent.is_own(*slot)
        {
            agent.tell(Message::Exited(Exited { rank: *rank, exit: Exit::NotReplaced }));
        }
    }

    /// Starts a process in the place of one that has ended, if that ran on this node.
    fn replace(&mut self, replacement: &Replacement, agent: &mut Agent) {
        message(&replacement.reason);
        let found = self.workers.iter_mut().find(|worker| worker.rank == replacement.rank);
        let Some(worker) = found.filter(|_| agent.is_own(replacement.slot)) else { return };
        let started = agent.start_again(replacement).map(|new| *worker = new);
        self.resume();
        self.check_started(started, agent);
    }

    /// Lets the running workers continue.
    pub(super) fn resume(&mut self) {
        (self.phase, self.outcome, self.announce) = (Phase::Running, Outcome::Success, None);
    }

    fn check_started(&mut self, started: Result<()>, agent: &mut Agent) {
        if let Err(error) = started {
            let reason = format!("workers cannot be started: {error}");
            agent.tell(Message::Leave { reason: format!("its {reason}"), signal: None });
            self.fail_elsewhere(How::NotStarted, error.exit_code(), format!("the {reason}"), agent);
        }
    }

    /// Ends the workers as if this node had received the signal that ended the run.
    fn signalled_elsewhere(&mut self, signal: i32, reason: &str, agent: &mut Agent) {
        message(reason);
        if self.is_spare {
            message(UNNEEDED);
        }
        agent.stop(signal, reason);
        (self.outcome, self.is_decided, self.restarting) = (Outcome::Signalled(signal), true, false);
        match self.phase {
            Phase::Waiting(_) => self.phase = Phase::Settling(Instant::now()),
            Phase::Running | Phase::Settling(_) => self.forward_end(signal),
            Phase::Ending(_) | Phase::Killed(_) => {}
        }
    }

    /// Ends the workers because the run has failed on some node.
    fn fail_elsewhere(&mut self, how: How, code: u8, reason: String, agent: &mut Agent) {
        agent.ends(how, code, reason);
        self.is_decided = true;
        self.restarting = false;
        let now = Instant::now();
        let settle = if matches!(self.outcome, Outcome::Failure(_)) { SETTLE } else { SETTLE_ELSEWHERE };
        if self.outcome == Outcome::Success {
            self.outcome = Outcome::Elsewhere;
        }
        match self.phase {
            Phase::Waiting(_) => self.phase = Phase::Settling(now),
            Phase::Running => self.phase = Phase::Settling(now + settle),
            Phase::Settling(_) | Phase::Ending(_) | Phase::Killed(_) => {}
        }
    }
}
