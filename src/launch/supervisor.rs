//! Watching over the workers: the first failure ends them all, signals are passed on, nothing is left behind.
use super::output::{Remains, Source};
use super::worker::{Ended, Exit, Worker};
use super::{signal, terminal};
use crate::{Error, Result};
use rustix::io::Errno;
use rustix::process::{Signal, WaitOptions, wait, waitpid};
use signal_hook::consts::{SIGCHLD, SIGCONT, SIGINT, SIGTSTP, SIGWINCH};
use signal_hook::iterator::Signals;
use std::io::PipeWriter;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant, SystemTime};

/// How long the other workers have to end by themselves when one has failed: those that failed because of it say so, and
/// the one that did so by itself may need a moment to write its error.
const SETTLE: Duration = Duration::from_secs(1);

/// How long killed processes may take to disappear: one that hangs in the kernel may take for ever.
const LAST_WAIT: Duration = Duration::from_secs(10);

/// Workers that take longer than this to end are named, so that the user knows what ddprun waits for.
const PATIENCE: Duration = Duration::from_secs(1);

/// What the supervisor waits for.
#[derive(Debug)]
pub(super) enum Event {
    /// This process was sent a signal.
    Signal(i32),
    /// All output was passed on.
    Output(Remains),
}

/// Events, and the way to send more.
#[derive(Debug)]
pub(super) struct Events {
    sender: Sender<Event>,
    receiver: Receiver<Event>,
}

impl Events {
    /// Turns signals into events from now on: those that end a run, and those that are needed to watch it.
    pub(super) fn listen(ending: &[i32]) -> Result<Self> {
        let (sender, receiver) = channel();
        // What this process was told to ignore, as by nohup, stays ignored.
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

    /// Passes output on in a thread of its own, until all has ended or `closing` does.
    pub(super) fn forward(&self, sources: Vec<Source>, closing: OwnedFd, console: super::Console) -> Result<()> {
        let sender = self.sender.clone();
        spawn_thread("output", move || {
            let remains = super::output::forward(sources, closing, console);
            // The supervisor may have given up on it.
            let _ = sender.send(Event::Output(remains));
        })
    }

    /// The next event; `None` when there is none before `deadline`.
    fn next(&self, deadline: Option<Instant>) -> Option<Event> {
        let Some(deadline) = deadline else { return self.receiver.recv().ok() };
        self.receiver.recv_timeout(deadline.saturating_duration_since(Instant::now())).ok()
    }
}

fn spawn_thread(name: &str, work: impl FnOnce() + Send + 'static) -> Result<()> {
    let thread = std::thread::Builder::new().name(format!("ddprun-{name}")).spawn(work);
    thread.map(drop).map_err(|error| Error::io("starting a thread", error))
}

/// How far a run is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// All is well.
    Running,
    /// A worker has failed; the others are told to end at this time.
    Settling(Instant),
    /// The workers were told to end, and are killed at the deadline (`None`: never).
    Ending(Option<Instant>),
    /// They were killed, and are given up at the deadline.
    Killed(Instant),
}

/// What became of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Every worker ended well.
    Success,
    /// A worker failed: the index of the first that ended so.
    Failure(usize),
    /// This process was sent a signal.
    Signalled(i32),
}

/// The workers of a run. When it is dropped, none of them is left.
#[derive(Debug)]
pub(super) struct Supervisor {
    /// The workers, by local rank.
    pub(super) workers: Vec<Worker>,
    /// Pseudo-terminals, which follow the size of ours.
    terminals: Vec<OwnedFd>,
    started: Instant,
    grace: Duration,
    phase: Phase,
    /// When to say who is being waited for.
    announce: Option<Instant>,
    outcome: Outcome,
}

impl Supervisor {
    /// Watches over nobody yet. Workers that were told to end get `grace` before they are killed.
    pub(super) fn new(grace: Duration) -> Self {
        Self {
            workers: Vec::new(),
            terminals: Vec::new(),
            started: Instant::now(),
            grace,
            phase: Phase::Running,
            announce: None,
            outcome: Outcome::Success,
        }
    }

    /// Waits until all workers and all that they started have ended, then for their output. `closing` is dropped in
    /// between: it tells the output's thread that nothing more will come.
    pub(super) fn watch(
        &mut self,
        events: &Events,
        terminals: Vec<OwnedFd>,
        closing: PipeWriter,
    ) -> (Outcome, Remains) {
        self.terminals = terminals;
        let mut remains = None;
        loop {
            self.reap();
            if matches!(self.phase, Phase::Running | Phase::Settling(_))
                && self.workers.iter().all(|worker| worker.ended.is_some())
            {
                // What they have left behind.
                self.end(Signal::TERM);
            }
            if !self.workers.iter().any(|worker| worker.group) {
                break;
            }
            let deadline = match self.phase {
                Phase::Running => None,
                Phase::Settling(deadline) => Some(deadline),
                Phase::Ending(deadline) => deadline.into_iter().chain(self.announce).min(),
                Phase::Killed(deadline) => Some(deadline),
            };
            match events.next(deadline) {
                Some(Event::Signal(signal)) => self.on_signal(signal),
                Some(Event::Output(all)) => remains = Some(all),
                None if matches!(self.phase, Phase::Settling(_)) => self.end(Signal::TERM),
                None if matches!(self.phase, Phase::Killed(_)) => {
                    super::message("some processes hang in the kernel and could not be killed");
                    break;
                }
                None if self.announce.is_some_and(|announce| announce <= Instant::now()) => self.announce(),
                None => self.kill(),
            }
        }
        drop(closing);
        let remains = remains.unwrap_or_else(|| {
            loop {
                match events.next(None) {
                    Some(Event::Output(remains)) => break remains,
                    // Whoever reads our output does not go on, and the user does not want to wait.
                    Some(Event::Signal(signal)) if ![SIGCHLD, SIGCONT, SIGTSTP, SIGWINCH].contains(&signal) => {
                        break Remains::default();
                    }
                    Some(Event::Signal(_)) => {}
                    None => break Remains::default(),
                }
            }
        });
        (self.outcome, remains)
    }

    fn on_signal(&mut self, number: i32) {
        match (number, self.phase) {
            (SIGCHLD, _) => {}
            (SIGWINCH, _) => terminal::resize(&self.terminals),
            (SIGCONT, _) => self.signal_all(Signal::CONT),
            (SIGTSTP, _) => {
                self.signal_all(Signal::STOP);
                // Stops this process; SIGCONT brings it and the workers back.
                let _ = signal_hook::low_level::emulate_default_handler(SIGTSTP);
            }
            (_, Phase::Killed(_)) => {}
            (SIGINT, Phase::Ending(_)) => self.kill(),
            (_, Phase::Ending(_)) => {
                if let Some(signal) = signal::typed(number) {
                    self.signal_all(signal);
                }
            }
            (_, Phase::Running | Phase::Settling(_)) => {
                if self.phase == Phase::Running {
                    self.outcome = Outcome::Signalled(number);
                }
                let again = if number == SIGINT { "; SIGINT again kills them at once" } else { "" };
                super::message(format_args!(
                    "{} passed on to the workers, which have {} s to end{again}",
                    signal::name(number),
                    self.grace.as_secs_f64()
                ));
                self.end(signal::typed(number).unwrap_or(Signal::TERM));
            }
        }
    }

    /// Tells all workers to end.
    fn end(&mut self, signal: Signal) {
        self.signal_all(signal);
        // One that is stopped does not hear anything else.
        self.signal_all(Signal::CONT);
        let now = Instant::now();
        self.phase = Phase::Ending(now.checked_add(self.grace));
        self.announce = Some(now + PATIENCE);
    }

    /// Says who is being waited for.
    fn announce(&mut self) {
        self.announce = None;
        let waiting = self.workers.iter().filter(|worker| worker.group);
        let names: Vec<String> =
            waiting.map(|worker| format!("{} (process group {})", worker.rank, worker.pid)).collect();
        let grace = self.grace.as_secs_f64();
        super::message(format_args!(
            "waiting for rank {} to end, and for what it started: SIGKILL after {grace} s",
            names.join(", ")
        ));
    }

    fn kill(&mut self) {
        self.signal_all(Signal::KILL);
        self.phase = Phase::Killed(Instant::now() + LAST_WAIT);
    }

    fn signal_all(&self, signal: Signal) {
        self.workers.iter().for_each(|worker| worker.signal(signal));
    }

    /// Takes note of every process that has ended: workers, and orphans of theirs.
    fn reap(&mut self) {
        loop {
            let (pid, status) = match wait(WaitOptions::NOHANG) {
                Ok(Some(ended)) => ended,
                Err(Errno::INTR) => continue,
                Ok(None) | Err(_) => break,
            };
            let found = self.workers.iter_mut().enumerate().find(|(_, worker)| worker.pid == pid);
            let Some((index, worker)) = found.filter(|(_, worker)| worker.ended.is_none()) else { continue };
            let how = Exit::new(status);
            let told = match self.phase {
                Phase::Running | Phase::Settling(_) => false,
                // Not by this process.
                Phase::Ending(_) => how != Exit::Signal(Signal::KILL.as_raw()),
                Phase::Killed(_) => true,
            };
            worker.ended = Some(Ended { how, after: self.started.elapsed(), at: SystemTime::now(), told });
            if how != Exit::Code(0) && self.phase == Phase::Running {
                self.outcome = Outcome::Failure(index);
                self.phase = Phase::Settling(Instant::now() + SETTLE);
            }
        }
        self.workers.iter_mut().for_each(Worker::look_at_group);
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        self.signal_all(Signal::KILL);
        for worker in self.workers.iter().filter(|worker| worker.ended.is_none() && worker.group) {
            if matches!(self.phase, Phase::Killed(_)) {
                break;
            }
            while matches!(waitpid(Some(worker.pid), WaitOptions::empty()), Err(Errno::INTR)) {}
        }
    }
}
