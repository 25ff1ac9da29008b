//! Passing the workers' output on: one thread reads every stream, so that nothing can tear.
use super::console::{Console, Target, message};
use super::lines::Lines;
use super::tail::Tail;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

/// What is read of a stream at once.
const CHUNK: usize = 1 << 16;
/// What is still read of a stream after its worker has ended: more than a pipe can hold.
const REST: usize = 1 << 20;

/// What is remembered of the output when all of it was read: local rank, stream and last lines of every source.
pub(super) type Remains = Vec<(usize, Target, Tail)>;

/// One stream of one worker, and where it goes.
#[derive(Debug)]
pub(super) struct Source {
    /// Our end of the pipe or pseudo-terminal; `None` once it has ended.
    pub(super) fd: Option<OwnedFd>,
    /// The worker's local rank.
    pub(super) local_rank: usize,
    /// Which stream it is.
    pub(super) target: Target,
    /// How it is shown, if it is.
    pub(super) shown: Option<Lines>,
    /// Its log file, if it has one.
    pub(super) file: Option<(PathBuf, File)>,
    /// Its last lines.
    pub(super) tail: Tail,
}

impl Source {
    /// Takes what is there to read. Returns the number of bytes; 0 when the stream has ended.
    fn read(&mut self, index: usize, buffer: &mut [u8], console: &Console) -> usize {
        let Some(fd) = &self.fd else { return 0 };
        let count = match rustix::io::read(fd, &mut *buffer) {
            Ok(count) => count,
            Err(Errno::INTR | Errno::AGAIN) => return 1,
            // A pseudo-terminal ends with EIO.
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
            // A full disk does not end the training.
            message(format_args!("cannot write {}: {error}. It is incomplete from here on", path.display()));
            self.file = None;
        }
        if let Some(lines) = &mut self.shown {
            let ready = lines.push(bytes);
            if console.show(index, self.target, ready).is_err() {
                // Without a log file the worker is told by its own write failing, as if it had written there itself.
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
            // The stream has ended: nobody is left to be told.
            let _ = console.show(index, self.target, rest);
        }
    }
}

/// Passes all output on until every source has ended, or until `closing` does, and then what is left in the pipes.
pub(super) fn forward(mut sources: Vec<Source>, closing: OwnedFd, console: &Console) -> Remains {
    let mut buffer = vec![0; CHUNK];
    let mut budget = vec![usize::MAX; sources.len()];
    let mut closed = false;
    loop {
        let open: Vec<usize> = (0..).zip(&sources).filter(|(_, source)| source.fd.is_some()).map(|(i, _)| i).collect();
        let mut fds: Vec<PollFd<'_>> =
            sources.iter().filter_map(|source| source.fd.as_ref()).map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        if open.is_empty() {
            break;
        }
        if !closed {
            fds.push(PollFd::new(&closing, PollFlags::IN));
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
        for (&index, _) in open.iter().zip(&ready).filter(|(_, ready)| **ready) {
            let (Some(source), Some(left)) = (sources.get_mut(index), budget.get_mut(index)) else { continue };
            *left = left.saturating_sub(source.read(index, &mut buffer, console));
            if *left == 0 {
                source.end(index, console);
            }
        }
        if !closed && ready.get(open.len()) == Some(&true) {
            closed = true;
            budget.fill(REST);
        }
    }
    for (index, source) in sources.iter_mut().enumerate() {
        source.end(index, console);
    }
    sources.into_iter().map(|source| (source.local_rank, source.target, source.tail)).collect()
}
