//! Watching over the workers: the first failure ends them all, signals are passed on, nothing is left behind.
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

/// How long the other workers have to end by themselves when one has failed: those that failed because of it say so, and
/// the one that did so by itself may need a moment to write its error. Also, how long what the workers have left behind
/// has when all of them ended well.
const SETTLE: Duration = Duration::from_secs(1);

/// How long killed processes may take to disappear: one that hangs in the kernel may take for ever.
const LAST_WAIT: Duration = Duration::from_secs(10);

/// Processes that take longer than this to end are named, so that the user knows what ddprun waits for.
const PATIENCE: Duration = Duration::from_secs(1);

/// Signals that follow the first one faster are the same request: `timeout` sends its own to the process and to its
/// group.
const AGAIN: Duration = Duration::from_millis(500);

/// What the supervisor waits for.
#[derive(Debug)]
pub(super) enum Event {
    /// This process was sent a signal.
    Signal(i32),
    /// All output was read.
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
    pub(super) fn forward(&self, sources: Vec<Source>, closing: OwnedFd) -> Result<()> {
        let sender = self.sender.clone();
        spawn_thread("output", move || {
            let remains = super::output::forward(sources, closing, Console::get());
            // The supervisor may have given up on it.
            let _ = sender.send(Event::Output(remains));
        })
    }

    /// The next event; `None` when there is none before `deadline`.
    fn next(&self, deadline: Option<Instant>) -> Option<Event> {
        let Some(deadline) = deadline else { return self.receiver.recv().ok() };
        self.receiver.recv_timeout(deadline.saturating_duration_since(Instant::now())).ok()
    }

    /// Whether this process was sent a signal that ends a run since this was last asked.
    pub(super) fn interrupted(&self) -> bool {
        self.receiver.try_iter().any(|event| matches!(event, Event::Signal(signal) if !WATCHING.contains(&signal)))
    }
}

/// Signals that do not end a run, but are needed to watch it.
const WATCHING: [i32; 4] = [SIGCHLD, SIGCONT, SIGTSTP, SIGWINCH];

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

/// The workers of a run. When it is dropped, neither they nor anything that they have started is left.
#[derive(Debug)]
pub(super) struct Supervisor {
    /// The workers, by local rank.
    pub(super) workers: Vec<Worker>,
    descendants: Descendants,
    /// Pseudo-terminals, which follow the size of ours.
    terminals: Vec<OwnedFd>,
    started: Instant,
    grace: Duration,
    phase: Phase,
    /// When this process was first sent a signal that ends the run.
    signalled: Option<Instant>,
    /// When to say who is being waited for.
    announce: Option<Instant>,
    outcome: Outcome,
}

impl Supervisor {
    /// Watches over nobody yet. Workers that were told to end get `grace` before they are killed.
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

    /// Waits until all workers and all that they started have ended, then until their output was read. `closing` is
    /// dropped in between: it tells the output's thread that nothing more will come.
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
                    // What was started before its parent was killed.
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
            // A log file on a file system that hangs is the only thing that can keep the thread from ending.
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
                // Stops this process; SIGCONT brings it and the workers back.
                let _ = signal_hook::low_level::emulate_default_handler(SIGTSTP);
            }
            (_, Phase::Killed(_)) => {}
            (_, Phase::Ending(_)) => match self.signalled {
                Some(first) if first.elapsed() < AGAIN => {}
                Some(_) => self.kill(),
                None => {
                    self.signalled = Some(Instant::now());
                    message(format_args!("{}: the workers were already told to end; {again}", signal::name(number)));
                }
            },
            (_, Phase::Running | Phase::Settling(_)) => {
                if self.phase == Phase::Running {
                    self.outcome = Outcome::Signalled(number);
                }
                self.signalled = Some(Instant::now());
                self.end(signal::typed(number).unwrap_or(Signal::TERM));
                message(format_args!(
                    "{} passed on to the workers, which have {} s to end; {again}",
                    signal::name(number),
                    self.grace.as_secs_f64()
                ));
            }
        }
    }

    /// Tells all processes to end.
    fn end(&mut self, signal: Signal) {
        let now = Instant::now();
        self.announce = Some(now + PATIENCE);
        if self.outcome == Outcome::Success {
            // Only this outcome leaves processes that nobody expects to be ended.
            self.announce = None;
            let (names, grace) = (self.names(), self.grace.as_secs_f64());
            message(format_args!(
                "the workers have ended and left {names}: told to end now, with SIGKILL after {grace} s"
            ));
        }
        self.signal_all(signal);
        // One that is stopped does not hear anything else.
        self.signal_all(Signal::CONT);
        self.phase = Phase::Ending(now.checked_add(self.grace));
    }

    /// Says who is being waited for.
    fn announce(&mut self) {
        self.announce = None;
        let grace = self.grace.as_secs_f64();
        message(format_args!("waiting for {} to end: SIGKILL after {grace} s", self.names()));
    }

    /// The processes that are there: workers by their rank.
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
        // The numbers of those that have ended may have been given to others.
        let workers = self.workers.iter().filter(|worker| worker.ended.is_none());
        self.descendants.signal(signal, workers.map(|worker| worker.pid));
    }

    /// Takes note of every process that has ended: workers, and orphans of theirs. Returns whether no process is left.
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
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        // Those that could not be killed were given up.
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
