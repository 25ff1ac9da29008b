//! Supervising the workers: the first failure ends them all, signals are forwarded, and no process is left behind.
mod news;

use super::agent::Agent;
use super::consequence::Consequence;
use super::descendants::{Descendants, Process};
use super::events::{Event, Events};
use super::nodes::Message;
use super::output::Remains;
use super::terminal;
use super::worker::{Ended, Exit, Worker};
use crate::console::{Console, message};
use crate::error::Result;
use crate::signal;
use crate::verdict::How;
use rustix::io::Errno;
use rustix::process::{Signal, WaitOptions, kill_process, wait};
use signal_hook::consts::{SIGCHLD, SIGCONT, SIGTSTP, SIGWINCH};
use std::time::{Duration, Instant, SystemTime};

/// How long the other workers have to exit by themselves after a failure. Those that fail because of it report it, and
/// the rank that caused it may need a moment to write its error. Also how long leftover processes have after a success.
const SETTLE: Duration = Duration::from_secs(1);

/// How long killed processes may take to disappear. A process that hangs in the kernel may never disappear.
const LAST_WAIT: Duration = Duration::from_secs(10);

/// Processes that take longer than this to exit are named, so that the user knows what ddprun waits for.
const ANNOUNCE_AFTER: Duration = Duration::from_secs(1);

/// A signal that follows the first one within this time is the same request: `timeout` signals both the process and its
/// group.
const SAME_REQUEST: Duration = Duration::from_millis(500);

/// The last message of a spare that was not needed.
const UNNEEDED: &str = "this spare was not needed";
/// The effect of another signal.
const AGAIN: &str = "a second signal kills them at once";

/// The phase of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// No worker runs, and other nodes decide what follows. At this time, this node stops waiting.
    Waiting(Option<Instant>),
    /// No worker has failed, or the other nodes decide what follows.
    Running,
    /// A worker has failed; the others are asked to exit at this time.
    Settling(Instant),
    /// The workers were asked to exit and are killed at the deadline (`None`: never).
    Ending(Option<Instant>),
    /// The workers were killed; at the deadline the supervisor stops waiting for them.
    Killed(Instant),
}

/// The outcome of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Every worker succeeded.
    Success,
    /// A worker failed: the index of the first that did.
    Failure(usize),
    /// Another node decides: it has failed, or all workers restart.
    Elsewhere,
    /// This process, or that of another node, received a signal that ends the run.
    Signalled(i32),
}

/// The workers of a run. Dropping it kills them and every process they started.
#[derive(Debug)]
pub(crate) struct Supervisor {
    /// The workers, by local rank.
    pub(crate) workers: Vec<Worker>,
    descendants: Descendants,
    started: Instant,
    grace: Duration,
    phase: Phase,
    /// When this process first received a signal that ends the run.
    signalled: Option<Instant>,
    /// When to name the processes that ddprun is waiting for.
    announce: Option<Instant>,
    outcome: Outcome,
    /// Whether to restart all workers once they have ended.
    restarting: bool,
    /// The other nodes have nothing more to decide.
    is_decided: bool,
    /// This node has no part in the run until another one is lost.
    is_spare: bool,
}

impl Supervisor {
    /// Creates a supervisor without workers. Workers that were asked to exit are killed after `grace`.
    pub(crate) fn new(grace: Duration) -> Self {
        Self {
            workers: Vec::new(),
            descendants: Descendants::adopt(),
            started: Instant::now(),
            grace,
            phase: Phase::Running,
            signalled: None,
            announce: None,
            outcome: Outcome::Success,
            restarting: false,
            is_decided: false,
            is_spare: false,
        }
    }

    /// Waits until all workers and their descendants have ended, and then until their output was read. `agent` decides
    /// what follows when a worker ends.
    pub(crate) fn watch(&mut self, events: &Events, agent: &mut Agent) -> (Outcome, Remains) {
        let mut remains = None;
        if agent.is_linked() {
            self.phase = Phase::Waiting(None);
        }
        loop {
            let childless = self.reap(agent);
            if childless || self.workers.iter().all(|worker| worker.ended.is_some()) {
                if childless || self.descendants.list().is_empty() {
                    match self.all_ended(agent) {
                        Next::Over => break,
                        Next::Again => continue,
                        Next::Wait => {}
                    }
                } else {
                    match (self.phase, self.outcome) {
                        (Phase::Running, _) => self.phase = Phase::Settling(Instant::now() + SETTLE),
                        (Phase::Settling(_), Outcome::Failure(_) | Outcome::Elsewhere) => self.end(Signal::TERM),
                        _ => {}
                    }
                }
            }
            let deadline = match self.phase {
                Phase::Running => None,
                Phase::Waiting(deadline) => deadline,
                Phase::Settling(deadline) => Some(deadline),
                Phase::Ending(deadline) => deadline.into_iter().chain(self.announce).min(),
                Phase::Killed(deadline) => {
                    // Kills processes that were started before their parent was killed.
                    self.signal_all(Signal::KILL);
                    Some(deadline)
                }
            };
            match events.next(deadline) {
                Some(Event::Signal(signal)) => self.on_signal(signal, agent),
                Some(Event::Output(all)) => remains = Some(all),
                Some(Event::News(news)) => self.on_news(news, agent),
                None if matches!(self.phase, Phase::Waiting(_)) => {
                    let reason = "it has waited long enough for the others to finish";
                    message(format_args!("{reason} (--rdzv-conf exit_barrier_timeout)"));
                    agent.tell(Message::Leave { reason: reason.to_string(), signal: None });
                    break;
                }
                None if matches!(self.phase, Phase::Settling(_)) => self.end(Signal::TERM),
                None if matches!(self.phase, Phase::Killed(_)) => {
                    message(format_args!("could not kill {}", self.names()));
                    break;
                }
                None if self.announce.take_if(|announce| *announce <= Instant::now()).is_some() => {
                    let (names, grace) = (self.names(), self.grace.as_secs_f64());
                    message(format_args!("waiting for {names} to exit; SIGKILL after {grace} s"));
                }
                None => {
                    let grace = self.grace.as_secs_f64();
                    self.kill(format_args!("still running after {grace} s (--shutdown-timeout)"));
                }
            }
        }
        Console::get().stop_waiting();
        agent.starter.intake = None;
        let deadline = Instant::now() + LAST_WAIT;
        let remains = remains.or_else(|| {
            // Only a log file on a hanging file system can keep the thread from finishing.
            let remains = events.last_output(deadline);
            if remains.is_none() {
                let seconds = LAST_WAIT.as_secs();
                message(format_args!("the workers' last output could not be written within {seconds} s, and is lost"));
            }
            remains
        });
        (self.outcome, remains.unwrap_or_default())
    }

    fn on_signal(&mut self, number: i32, agent: &mut Agent) {
        match (number, self.phase) {
            (SIGCHLD, _) => {}
            (SIGWINCH, _) => terminal::resize(agent.starter.terminals.iter().map(|(_, terminal)| terminal)),
            (SIGCONT, _) => self.signal_all(Signal::CONT),
            (SIGTSTP, _) => {
                self.signal_all(Signal::STOP);
                // Stops this process. SIGCONT resumes it, and it then resumes the workers.
                let _ = signal_hook::low_level::emulate_default_handler(SIGTSTP);
            }
            (_, _) if !agent.starter.config.options.signals_to_handle.contains(&number) => self.pass_on(number),
            (_, Phase::Killed(_)) => {}
            (_, Phase::Waiting(_)) => {
                self.leave(number, agent);
                self.phase = Phase::Settling(Instant::now());
            }
            (_, Phase::Ending(_)) => match self.signalled {
                Some(first) if first.elapsed() < SAME_REQUEST => {}
                Some(_) => self.kill(format_args!("still running at a second signal")),
                None => {
                    if std::mem::take(&mut self.restarting) {
                        self.leave(number, agent);
                    }
                    self.signalled = Some(Instant::now());
                    message(format_args!("{}: the workers were already asked to exit; {AGAIN}", signal::name(number)));
                }
            },
            (_, Phase::Running | Phase::Settling(_)) => {
                if self.phase == Phase::Running {
                    self.leave(number, agent);
                }
                self.signalled = Some(Instant::now());
                self.forward_end(number);
            }
        }
    }

    /// Ends the run because of a signal.
    fn leave(&mut self, number: i32, agent: &mut Agent) {
        self.outcome = Outcome::Signalled(number);
        self.is_decided = true;
        let reason = format!("ddprun received {}", signal::name(number));
        agent.stop(number, &reason);
        if self.is_spare {
            message(format_args!("{}: {UNNEEDED}", signal::name(number)));
        }
        agent.tell(Message::Leave { reason, signal: Some(number) });
    }

    /// Asks the workers to exit because of a signal that this ddprun, or that of another node, has received.
    fn forward_end(&mut self, number: i32) {
        self.end(Signal::from_named_raw(number).unwrap_or(Signal::TERM));
        let (name, grace) = (signal::name(number), self.grace.as_secs_f64());
        message(format_args!("{name} forwarded to the workers, which have {grace} s to exit; {AGAIN}"));
    }

    /// Forwards a signal that does not end the run to the processes that handle it; it would kill all others.
    fn pass_on(&self, number: i32) {
        let name = signal::name(number);
        let mut list = self.descendants.list();
        list.retain(|process| signal::is_handled_by(process.pid, number));
        let Some(signal) = Signal::from_named_raw(number).filter(|_| !list.is_empty()) else {
            message(format_args!(
                "{name} is not forwarded: no process of the run has a handler for it, and it would kill them"
            ));
            return;
        };
        for process in &list {
            // It may have ended in the meantime.
            let _ = kill_process(process.pid, signal);
        }
        message(format_args!("{name} forwarded to {}", self.names_of(&list)));
    }

    /// The exit code of a run that a signal has ended; it depends on how the workers ended. A spare has none.
    pub(crate) fn code_after(&self, signal: i32) -> u8 {
        let is_well = |worker: &Worker| worker.given_up || worker.has_succeeded();
        match (self.is_spare || !self.workers.is_empty()) && self.workers.iter().all(is_well) {
            true => 0,
            false => Exit::Signal(signal).code(),
        }
    }

    /// Decides what follows when no worker remains, nor any process that they started.
    fn all_ended(&mut self, agent: &mut Agent) -> Next {
        if matches!(self.phase, Phase::Waiting(_)) {
            return Next::Wait;
        }
        if std::mem::take(&mut self.restarting) {
            let first = if let Outcome::Failure(first) = self.outcome { Some(first) } else { None };
            agent.judge_attempt(&self.workers, first);
            if agent.is_linked() {
                self.phase = Phase::Waiting(None);
                return Next::Wait;
            }
            return match self.restart(agent) {
                Ok(()) => Next::Again,
                Err(error) => {
                    let reason = format!("the workers cannot be restarted: {error}");
                    agent.ends(How::NotStarted, error.exit_code(), reason);
                    Next::Over
                }
            };
        }
        if !agent.is_linked() || self.is_decided {
            return Next::Over;
        }
        self.phase = Phase::Waiting(None);
        if self.outcome == Outcome::Success {
            agent.tell(Message::Finished);
            self.phase = Phase::Waiting(Instant::now().checked_add(agent.exit_barrier_timeout()));
        }
        Next::Wait
    }

    /// Asks all processes to exit.
    fn end(&mut self, signal: Signal) {
        let now = Instant::now();
        self.announce = Some(now + ANNOUNCE_AFTER);
        if self.outcome == Outcome::Success {
            // After a failure, ending processes is expected. After a success it is not, so they are named at once, and
            // not again.
            self.announce = None;
            let (names, grace) = (self.names(), self.grace.as_secs_f64());
            message(format_args!(
                "the workers have exited but left {names} behind: asking them to exit, SIGKILL after {grace} s"
            ));
        }
        self.signal_all(signal);
        // A stopped process handles no other signal until it continues.
        self.signal_all(Signal::CONT);
        self.phase = Phase::Ending(now.checked_add(self.grace));
    }

    /// Returns the names of the remaining processes; workers by their rank.
    fn names(&self) -> String {
        self.names_of(&self.descendants.list())
    }

    fn names_of(&self, list: &[Process]) -> String {
        const MOST: usize = 8;
        let name = |process: &Process| match self.workers.iter().find(|worker| worker.pid == process.pid) {
            Some(worker) => format!("rank {} (pid {})", worker.rank, worker.pid),
            None => process.to_string(),
        };
        let mut names: Vec<String> = list.iter().take(MOST).map(name).collect();
        if list.len() > MOST {
            names.push(format!("{} more processes", list.len() - MOST));
        }
        names.join(", ")
    }

    /// Kills what remains. `why` is for workers that a signal has ended.
    fn kill(&mut self, why: std::fmt::Arguments<'_>) {
        if let Outcome::Signalled(number) = self.outcome {
            message(format_args!(
                "{}: asked by {} to save and exit, and {why}. Killed by SIGKILL: what was not saved by then is lost",
                self.names(),
                signal::name(number)
            ));
        }
        self.signal_all(Signal::KILL);
        self.phase = Phase::Killed(Instant::now() + LAST_WAIT);
    }

    fn signal_all(&self, signal: Signal) {
        // The pids of workers that have ended may have been reused.
        let workers = self.workers.iter().filter(|worker| worker.ended.is_none());
        self.descendants.signal(signal, workers.map(|worker| worker.pid));
    }

    /// Records the end of one process: a worker, or an orphaned descendant.
    fn reap_one(&mut self) -> Reaped {
        let (pid, status) = match wait(WaitOptions::NOHANG) {
            Ok(Some(ended)) => ended,
            Err(Errno::INTR) => return Reaped::Other,
            Ok(None) => return Reaped::Nobody,
            Err(_) => return Reaped::Childless,
        };
        self.descendants.forget(pid);
        let found = self.workers.iter_mut().enumerate().find(|(_, worker)| worker.pid == pid);
        let Some((index, worker)) = found.filter(|(_, worker)| worker.ended.is_none()) else { return Reaped::Other };
        let how = Exit::new(status);
        let asked_to_exit = match self.phase {
            Phase::Waiting(_) | Phase::Running | Phase::Settling(_) => false,
            // In this phase, this process has not sent SIGKILL.
            Phase::Ending(_) => how != Exit::Signal(Signal::KILL.as_raw()),
            Phase::Killed(_) => true,
        };
        worker.ended = Some(Ended { how, after: self.started.elapsed(), at: SystemTime::now(), asked_to_exit });
        Reaped::Worker(index)
    }

    /// Records all processes that have ended. Returns whether no process remains.
    fn reap(&mut self, agent: &mut Agent) -> bool {
        loop {
            let index = match self.reap_one() {
                Reaped::Worker(index) => index,
                Reaped::Other => continue,
                Reaped::Nobody => return false,
                Reaped::Childless => return true,
            };
            let is_stopping = self.is_stopping();
            let is_judged = self.phase == Phase::Running || is_stopping;
            let Some(worker) = self.workers.get_mut(index).filter(|_| is_judged) else { continue };
            let has_failed = !worker.has_succeeded();
            match agent.on_exit(worker) {
                // The others end anyway: the ranks of an elastic run without this one, or with an error.
                _ if is_stopping => {}
                None if has_failed && self.outcome == Outcome::Success => self.outcome = Outcome::Failure(index),
                Some(Consequence::RestartAll) => {
                    (self.outcome, self.restarting) = (Outcome::Failure(index), true);
                    self.end(Signal::TERM);
                }
                Some(Consequence::Fail) => {
                    self.outcome = Outcome::Failure(index);
                    self.phase = Phase::Settling(Instant::now() + SETTLE);
                }
                _ => {}
            }
        }
    }

    /// Whether a signal has ended the run, and the workers have their time to save and exit.
    fn is_stopping(&self) -> bool {
        matches!((self.phase, self.outcome), (Phase::Ending(_), Outcome::Signalled(_)))
    }

    /// The time that workers of other nodes have left to exit after a signal.
    pub(crate) fn grace_left(&self) -> Duration {
        match self.phase {
            Phase::Ending(deadline) if self.is_stopping() => {
                deadline.map_or(Duration::MAX, |deadline| deadline.saturating_duration_since(Instant::now()))
            }
            _ => Duration::ZERO,
        }
    }

    /// Starts all workers, or starts them again.
    fn restart(&mut self, agent: &mut Agent) -> Result<()> {
        let mut workers = Vec::new();
        agent.restart_all(&mut workers)?;
        self.workers = workers;
        self.resume();
        Ok(())
    }
}

/// The next step when no process remains.
enum Next {
    Over,
    /// Workers were started.
    Again,
    Wait,
}

/// A process that has ended.
enum Reaped {
    /// A worker, by its index.
    Worker(usize),
    Other,
    /// No process has ended.
    Nobody,
    /// No process remains.
    Childless,
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        // Processes that could not be killed are abandoned.
        let deadline = Instant::now() + LAST_WAIT;
        while !matches!(self.phase, Phase::Killed(_)) && Instant::now() < deadline {
            match self.reap_one() {
                Reaped::Worker(_) | Reaped::Other => continue,
                Reaped::Childless => break,
                Reaped::Nobody => {}
            }
            if self.descendants.list().is_empty() {
                break;
            }
            self.signal_all(Signal::KILL);
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
