//! The events that the supervisor waits for: signals, and the end of the output.
use super::nodes::News;
use super::output::{self, Intake, Remains};
use crate::console::Console;
use crate::error::{Error, Result};
use crate::signal;
use candle_ddp_base::thread;
use signal_hook::consts::{SIGCHLD, SIGCONT, SIGTSTP, SIGWINCH};
use signal_hook::iterator::Signals;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

/// An event that the supervisor handles.
#[derive(Debug)]
pub(crate) enum Event {
    /// This process received a signal.
    Signal(i32),
    /// All output was read.
    Output(Remains),
    /// Something that concerns all nodes.
    News(News),
}

/// The receiving end of events, and a sender for more.
#[derive(Debug)]
pub(crate) struct Events {
    sender: Sender<Event>,
    receiver: Receiver<Event>,
    /// The signals that end a run.
    ending: Vec<i32>,
}

impl Events {
    /// Starts to turn signals into events: those that end a run, those to forward to the workers, and those that
    /// supervision needs.
    pub(crate) fn listen(ending: &[i32]) -> Result<Self> {
        let (sender, receiver) = channel();
        // Signals that this process was started to ignore, as by nohup, stay ignored.
        let others = signal::FOR_WORKERS.into_iter().filter(|signal| !ending.contains(signal)).chain([SIGTSTP]);
        let wanted = ending.iter().copied().chain(others).filter(|&signal| !signal::is_ignored(signal));
        let mut signals = Signals::new(wanted.chain([SIGCHLD, SIGCONT, SIGWINCH]))
            .map_err(|error| Error::io("handling signals", error))?;
        let signal_sender = sender.clone();
        thread::spawn("ddprun-signals", move || {
            for signal in signals.forever() {
                if signal_sender.send(Event::Signal(signal)).is_err() {
                    break;
                }
            }
        })?;
        Ok(Self { sender, receiver, ending: ending.to_vec() })
    }

    /// Forwards output in a thread, of the streams that the intake gets, until it is dropped.
    pub(crate) fn forward(&self) -> Result<Intake> {
        let (intake, incoming) = output::intake().map_err(|error| Error::io("creating a pipe", error))?;
        let sender = self.sender.clone();
        let forward = move || {
            let remains = output::forward(incoming, Console::get());
            // The supervisor may have stopped waiting for it.
            let _ = sender.send(Event::Output(remains));
        };
        thread::spawn("ddprun-output", forward)?;
        Ok(intake)
    }

    /// Returns the function that turns news of other nodes into events.
    pub(crate) fn newsroom(&self) -> impl Fn(News) + Clone + Send + 'static {
        let sender = self.sender.clone();
        move |news| {
            // The supervisor may have ended.
            let _ = sender.send(Event::News(news));
        }
    }

    /// Returns the next event, or `None` if there is none before `deadline`.
    pub(crate) fn next(&self, deadline: Option<Instant>) -> Option<Event> {
        let Some(deadline) = deadline else { return self.receiver.recv().ok() };
        self.receiver.recv_timeout(deadline.saturating_duration_since(Instant::now())).ok()
    }

    /// Returns what remains of the output once all of it was read, or `None` if that is not before `deadline`.
    pub(crate) fn last_output(&self, deadline: Instant) -> Option<Remains> {
        loop {
            if let Event::Output(remains) = self.next(Some(deadline))? {
                return Some(remains);
            }
        }
    }

    /// Returns whether this process received a signal that ends a run since the last call.
    pub(crate) fn interrupted(&self) -> bool {
        self.receiver.try_iter().any(|event| matches!(event, Event::Signal(signal) if self.ending.contains(&signal)))
    }
}
