//! Supervising the workers: the first failure ends them all, signals are forwarded, and no process is left behind.
use super::console::{Console, message};
use super::descendants::{Descendants, Process};
use super::error::{Error, Result};
use super::output::{Remains, Source};
use super::worker::{Ended, Exit, Worker};
use super::{signal, terminal};
use rustix::io::Errno;
use rustix::process::{Signal, WaitOptions, wait};
use signal_hook::consts::{SIGCHLD, SIGCONT, SIGTSTP, SIGWINCH};
use signal_hook::iterator::Signals;
use std::io::PipeWriter;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, Sender, channel};
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

/// An event that the supervisor handles.
#[derive(Debug)]
pub(super) enum Event {
    /// This process received a signal.
    Signal(i32),
    /// All output was read.
    Output(Remains),
}

/// The receiving end of events, and a sender for more.
#[derive(Debug)]
pub(super) struct Events {
    sender: Sender<Event>,
    receiver: Receiver<Event>,
}

impl Events {
    /// Starts to turn signals into events: those that end a run, and those that supervision needs.
    pub(super) fn listen(ending: &[i32]) -> Result<Self> {
        let (sender, receiver) = channel();
        // Signals that this process was started to ignore, as by nohup, stay ignored.
        let wanted = ending.iter().copied().chain([SIGTSTP]).filter(|&signal| !signal::is_ignored(signal));
        let mut signals = Signals::new(wanted.chain([SIGCHLD, SIGCONT, SIGWINCH]))
            .map_err(|error| Error::io("handling signals", error))?;
        let signal_sender = sender.clone();
        spawn_thread("signals", move || {
            for signal in signals.forever() {
                if signal_sender.send(Event::Signal(signal)).is_err() {
                    break;
                }
            }
        })?;
        Ok(Self { sender, receiver })
    }

    /// Forwards output in a thread until all streams or `closing` have ended.
    pub(super) fn forward(&self, sources: Vec<Source>, closing: OwnedFd) -> Result<()> {
        let sender = self.sender.clone();
        spawn_thread("output", move || {
            let remains = super::output::forward(sources, closing, Console::get());
            // The supervisor may have stopped waiting for it.
            let _ = sender.send(Event::Output(remains));
        })
    }

    /// Returns the next event, or `None` if there is none before `deadline`.
    fn next(&self, deadline: Option<Instant>) -> Option<Event> {
        let Some(deadline) = deadline else { return self.receiver.recv().ok() };
        self.receiver.recv_timeout(deadline.saturating_duration_since(Instant::now())).ok()
    }

    /// Returns whether this process received a signal that ends a run since the last call.
    pub(super) fn interrupted(&self) -> bool {
        self.receiver.try_iter().any(|event| matches!(event, Event::Signal(signal) if !WATCHING.contains(&signal)))
    }
}

/// Signals that do not end a run but are needed to supervise it.
const WATCHING: [i32; 4] = [SIGCHLD, SIGCONT, SIGTSTP, SIGWINCH];

fn spawn_thread(name: &str, work: impl FnOnce() + Send + 'static) -> Result<()> {
    let thread = std::thread::Builder::new().name(format!("ddprun-{name}")).spawn(work);
    thread.map(drop).map_err(|error| Error::io("starting a thread", error))
}

/// The phase of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// No worker has failed.
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
pub(super) enum Outcome {
    /// Every worker succeeded.
    Success,
    /// A worker failed: the index of the first that did.
    Failure(usize),
    /// This process received a signal.
    Signalled(i32),
}

/// The workers of a run. Dropping it kills them and every process they started.
#[derive(Debug)]
pub(super) struct Supervisor {
    /// The workers, by local rank.
    pub(super) workers: Vec<Worker>,
    descendants: Descendants,
    /// The pseudo-terminals, which are resized with the launcher's terminal.
    terminals: Vec<OwnedFd>,
    started: Instant,
    grace: Duration,
    phase: Phase,
    /// When this process first received a signal that ends the run.
    signalled: Option<Instant>,
    /// When to name the processes that are being waited for.
    announce: Option<Instant>,
    outcome: Outcome,
}

impl Supervisor {
    /// Creates a supervisor without workers. Workers that were asked to exit are killed after `grace`.
    pub(super) fn new(grace: Duration) -> Self {
        Self {
            workers: Vec::new(),
            descendants: Descendants::adopt(),
            terminals: Vec::new(),
            started: Instant::now(),
            grace,
            phase: Phase::Running,
            signalled: None,
            announce: None,
            outcome: Outcome::Success,
        }
    }

    /// Waits until all workers and their descendants have ended, and then until their output was read. Drops `closing`
    /// in between, which tells the output thread that no more output will come.
    pub(super) fn watch(
        &mut self,
        events: &Events,
        terminals: Vec<OwnedFd>,
        closing: PipeWriter,
    ) -> (Outcome, Remains) {
        self.terminals = terminals;
        let mut remains = None;
        loop {
            let childless = self.reap();
            if childless || self.workers.iter().all(|worker| worker.ended.is_some()) {
                if childless || self.descendants.list().is_empty() {
                    break;
                }
                match (self.phase, self.outcome) {
                    (Phase::Running, _) => self.phase = Phase::Settling(Instant::now() + SETTLE),
                    (Phase::Settling(_), Outcome::Failure(_)) => self.end(Signal::TERM),
                    _ => {}
                }
            }
            let deadline = match self.phase {
                Phase::Running => None,
                Phase::Settling(deadline) => Some(deadline),
                Phase::Ending(deadline) => deadline.into_iter().chain(self.announce).min(),
                Phase::Killed(deadline) => {
                    // Kills processes that were started before their parent was killed.
                    self.signal_all(Signal::KILL);
                    Some(deadline)
                }
            };
            match events.next(deadline) {
                Some(Event::Signal(signal)) => self.on_signal(signal),
                Some(Event::Output(all)) => remains = Some(all),
                None if matches!(self.phase, Phase::Settling(_)) => self.end(Signal::TERM),
                None if matches!(self.phase, Phase::Killed(_)) => {
                    message(format_args!("could not kill {}", self.names()));
                    break;
                }
                None if self.announce.is_some_and(|announce| announce <= Instant::now()) => self.announce(),
                None => self.kill(),
            }
        }
        Console::get().stop_waiting();
        drop(closing);
        let deadline = Instant::now() + LAST_WAIT;
        let remains = remains.or_else(|| {
            // Only a log file on a file system that hangs can keep the thread from finishing.
            while let Some(event) = events.next(Some(deadline)) {
                if let Event::Output(remains) = event {
                    return Some(remains);
                }
            }
            None
        });
        (self.outcome, remains.unwrap_or_default())
    }

    fn on_signal(&mut self, number: i32) {
        let again = "a second signal kills them at once";
        match (number, self.phase) {
            (SIGCHLD, _) => {}
            (SIGWINCH, _) => terminal::resize(&self.terminals),
            (SIGCONT, _) => self.signal_all(Signal::CONT),
            (SIGTSTP, _) => {
                self.signal_all(Signal::STOP);
                // Stops this process. SIGCONT resumes it, and it then resumes the workers.
                let _ = signal_hook::low_level::emulate_default_handler(SIGTSTP);
            }
            (_, Phase::Killed(_)) => {}
            (_, Phase::Ending(_)) => match self.signalled {
                Some(first) if first.elapsed() < SAME_REQUEST => {}
                Some(_) => self.kill(),
                None => {
                    self.signalled = Some(Instant::now());
                    message(format_args!("{}: the workers were already asked to exit; {again}", signal::name(number)));
                }
            },
            (_, Phase::Running | Phase::Settling(_)) => {
                if self.phase == Phase::Running {
                    self.outcome = Outcome::Signalled(number);
                }
                self.signalled = Some(Instant::now());
                self.end(signal::typed(number).unwrap_or(Signal::TERM));
                message(format_args!(
                    "{} forwarded to the workers, which have {} s to exit; {again}",
                    signal::name(number),
                    self.grace.as_secs_f64()
                ));
            }
        }
    }

    /// Asks all processes to exit.
    fn end(&mut self, signal: Signal) {
        let now = Instant::now();
        self.announce = Some(now + ANNOUNCE_AFTER);
        if self.outcome == Outcome::Success {
            // Only after a success does this surprise the user, so the processes are named at once and not again.
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

    /// Names the processes that are being waited for.
    fn announce(&mut self) {
        self.announce = None;
        let grace = self.grace.as_secs_f64();
        message(format_args!("waiting for {} to exit; SIGKILL after {grace} s", self.names()));
    }

    /// Returns the names of the remaining processes; workers by their rank.
    fn names(&self) -> String {
        const MOST: usize = 8;
        let name = |process: &Process| match self.workers.iter().find(|worker| worker.pid == process.pid) {
            Some(worker) => format!("rank {} (pid {})", worker.rank, worker.pid),
            None => process.to_string(),
        };
        let list = self.descendants.list();
        let mut names: Vec<String> = list.iter().take(MOST).map(name).collect();
        if list.len() > MOST {
            names.push(format!("{} more processes", list.len() - MOST));
        }
        names.join(", ")
    }

    fn kill(&mut self) {
        self.signal_all(Signal::KILL);
        self.phase = Phase::Killed(Instant::now() + LAST_WAIT);
    }

    fn signal_all(&self, signal: Signal) {
        // The pids of workers that have ended may have been reused.
        let workers = self.workers.iter().filter(|worker| worker.ended.is_none());
        self.descendants.signal(signal, workers.map(|worker| worker.pid));
    }

    /// Records every process that has ended: workers, and orphaned descendants. Returns whether no process is left.
    fn reap(&mut self) -> bool {
        loop {
            let (pid, status) = match wait(WaitOptions::NOHANG) {
                Ok(Some(ended)) => ended,
                Err(Errno::INTR) => continue,
                Ok(None) => return false,
                Err(_) => return true,
            };
            self.descendants.forget(pid);
            let found = self.workers.iter_mut().enumerate().find(|(_, worker)| worker.pid == pid);
            let Some((index, worker)) = found.filter(|(_, worker)| worker.ended.is_none()) else { continue };
            let how = Exit::new(status);
            let asked_to_exit = match self.phase {
                Phase::Running | Phase::Settling(_) => false,
                // In this phase, this process has not sent SIGKILL.
                Phase::Ending(_) => how != Exit::Signal(Signal::KILL.as_raw()),
                Phase::Killed(_) => true,
            };
            worker.ended = Some(Ended { how, after: self.started.elapsed(), at: SystemTime::now(), asked_to_exit });
            if how != Exit::Code(0) && self.phase == Phase::Running {
                self.outcome = Outcome::Failure(index);
                self.phase = Phase::Settling(Instant::now() + SETTLE);
            }
        }
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        // Processes that could not be killed are abandoned.
        let deadline = Instant::now() + LAST_WAIT;
        while !matches!(self.phase, Phase::Killed(_)) && !self.reap() && Instant::now() < deadline {
            if self.descendants.list().is_empty() {
                break;
            }
            self.signal_all(Signal::KILL);
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
