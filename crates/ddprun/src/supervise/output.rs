//! Forwarding the workers' output. A single thread reads all streams, so that lines stay whole.
use super::lines::Lines;
use crate::console::{Console, Target, message};
use crate::tail::Tail;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::fs::File;
use std::io::{PipeReader, PipeWriter, Write};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, channel};

/// The maximum number of bytes per read.
const CHUNK: usize = 1 << 16;
/// The maximum number of bytes read from a stream after its worker has ended; more than a pipe holds.
const REST: usize = 1 << 20;

/// The local rank, stream and last lines of every source, available when all output was read.
pub(crate) type Remains = Vec<(usize, Target, Tail)>;

/// One output stream of a worker, and its destinations.
#[derive(Debug)]
pub(crate) struct Source {
    /// The launcher's end of the pipe or pseudo-terminal; `None` once the stream has ended.
    pub(crate) fd: Option<OwnedFd>,
    /// The worker's local rank.
    pub(crate) local_rank: usize,
    /// The number of restarts before the worker was started.
    pub(crate) restart_count: u32,
    /// Which of the two streams this is.
    pub(crate) target: Target,
    /// The line buffer, if the stream is shown.
    pub(crate) shown: Option<Lines>,
    /// The log file, if there is one.
    pub(crate) file: Option<(PathBuf, File)>,
    /// The last lines.
    pub(crate) tail: Tail,
}

impl Source {
    /// Reads available bytes and returns their number; 0 at the end of the stream.
    fn read(&mut self, index: usize, buffer: &mut [u8], console: &Console) -> usize {
        let Some(fd) = &self.fd else { return 0 };
        let count = match rustix::io::read(fd, &mut *buffer) {
            Ok(count) => count,
            Err(Errno::INTR | Errno::AGAIN) => return 1,
            // A pseudo-terminal reports its end as EIO.
            Err(_) => 0,
        };
        match buffer.get(..count).unwrap_or_default() {
            [] => self.end(index, console),
            bytes => self.pass_on(index, bytes, console),
        }
        if self.fd.is_some() { count } else { 0 }
    }

    fn pass_on(&mut self, index: usize, bytes: &[u8], console: &Console) {
        self.tail.push(bytes);
        if let Some((path, file)) = &mut self.file
            && let Err(error) = file.write_all(bytes)
        {
            // A full disk must not end the training.
            message(format_args!("cannot write {}: {error}. The file is incomplete from here on", path.display()));
            self.file = None;
        }
        if let Some(lines) = &mut self.shown {
            let ready = lines.push(bytes);
            if console.show(index, self.target, ready).is_err() {
                // Without a log file, closing the stream makes the worker's own write fail, as if it had written to the
                // console itself.
                self.shown = None;
                if self.file.is_none() {
                    self.fd = None;
                }
            }
        }
    }

    fn end(&mut self, index: usize, console: &Console) {
        self.fd = None;
        self.tail.end();
        if let Some(mut lines) = self.shown.take() {
            let rest = lines.finish();
            // The stream has ended, so an error no longer matters.
            let _ = console.show(index, self.target, rest);
        }
    }
}

/// Hands new streams to the thread that reads all of them. Dropping it declares that no more will come.
#[derive(Debug)]
pub(crate) struct Intake {
    sender: Sender<Source>,
    wake: PipeWriter,
}

/// The thread's end of an [`Intake`].
pub(crate) struct Incoming {
    receiver: Receiver<Source>,
    woken: PipeReader,
}

/// Creates both ends.
pub(crate) fn intake() -> std::io::Result<(Intake, Incoming)> {
    let (woken, wake) = std::io::pipe()?;
    let (sender, receiver) = channel();
    Ok((Intake { sender, wake }, Incoming { receiver, woken }))
}

impl Intake {
    /// Makes the thread read `source` as well.
    pub(crate) fn add(&self, source: Source) {
        // The thread ends only after this end was dropped.
        if self.sender.send(source).is_ok() {
            let _ = (&self.wake).write(&[1]);
        }
    }
}

/// Adds a stream. The stream of a worker that replaced another one may take the place of its predecessor's.
fn insert(sources: &mut Vec<Source>, source: Source) {
    let same = |other: &Source| (other.local_rank, other.target) == (source.local_rank, source.target);
    match sources.iter_mut().find(|other| other.fd.is_none() && same(other)) {
        Some(ended) => *ended = source,
        None => sources.push(source),
    }
}

/// Forwards all output until the [`Intake`] was dropped, and then what remains in the pipes.
pub(crate) fn forward(incoming: Incoming, console: &Console) -> Remains {
    let Incoming { receiver, woken } = incoming;
    let mut buffer = vec![0; CHUNK];
    let mut sources: Vec<Source> = Vec::new();
    let mut budget = Vec::new();
    let mut closed = false;
    loop {
        receiver.try_iter().for_each(|source| insert(&mut sources, source));
        budget.resize(sources.len(), if closed { REST } else { usize::MAX });
        let open = sources.iter().filter_map(|source| source.fd.as_ref());
        let mut fds: Vec<PollFd<'_>> = open.map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        if fds.is_empty() && closed {
            break;
        }
        if !closed {
            fds.push(PollFd::new(&woken, PollFlags::IN));
        }
        let at_once = Timespec::default();
        match poll(&mut fds, closed.then_some(&at_once)) {
            Ok(0) => break,
            Err(Errno::INTR) => continue,
            Err(error) => {
                message(format_args!("cannot read the workers' output: {error}"));
                break;
            }
            Ok(_) => {}
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        drop(fds);
        let open = sources.iter_mut().zip(&mut budget).enumerate().filter(|(_, (source, _))| source.fd.is_some());
        for ((index, (source, left)), _) in open.zip(&ready).filter(|(_, ready)| **ready) {
            *left = left.saturating_sub(source.read(index, &mut buffer, console));
            if *left == 0 {
                source.end(index, console);
            }
        }
        if !closed && ready.last() == Some(&true) {
            closed = match rustix::io::read(&woken, &mut buffer) {
                Ok(count) => count == 0,
                Err(error) => error != Errno::INTR,
            };
            if closed {
                budget.fill(REST);
            }
        }
    }
    for (index, source) in sources.iter_mut().enumerate() {
        source.end(index, console);
    }
    // For a rank whose workers were replaced, the latest one's last lines count.
    sources.sort_by_key(|source| std::cmp::Reverse(source.restart_count));
    let mut remains = Remains::new();
    for Source { local_rank, target, tail, .. } in sources {
        if !remains.iter().any(|(rank, other, _)| (*rank, *other) == (local_rank, target)) {
            remains.push((local_rank, target, tail));
        }
    }
    remains
}
