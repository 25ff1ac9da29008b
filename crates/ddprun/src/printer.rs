//! A thread that writes to stdout or stderr, so that nothing else blocks if the output is not read.
use candle_ddp_base::panic::lock;
use candle_ddp_base::thread;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// One of the two standard streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Target {
    Stdout,
    Stderr,
}

/// The stream has no reader any more, as after `ddprun … | head`.
#[derive(Debug)]
pub(crate) struct NoReader;

/// The number of unwritten bytes from which output blocks.
const LIMIT: usize = 1 << 18;
/// The maximum number of bytes per write; small, so that slow reading still shows as progress.
const CHUNK: usize = 1 << 16;

/// A piece of output.
#[derive(Debug)]
pub(crate) enum Piece {
    /// Output of a worker, with its source and stream.
    Output { source: usize, target: Target, bytes: Vec<u8> },
    /// A message of ddprun.
    Message(String),
}

impl Piece {
    fn len(&self) -> usize {
        match self {
            Self::Output { bytes, .. } => bytes.len(),
            Self::Message(text) => text.len(),
        }
    }
}

#[derive(Debug, Default)]
struct Queue {
    pieces: VecDeque<Piece>,
    /// The number of unwritten bytes.
    left: usize,
    /// Whether output never blocks, however much is unwritten.
    unlimited: bool,
    /// Whether the reader has gone for good.
    closed: bool,
}

/// The queue of output for one terminal, file or pipe.
#[derive(Debug, Default)]
pub(crate) struct Printer {
    queue: Mutex<Queue>,
    changed: Condvar,
}

impl Printer {
    /// Starts the thread that writes to `target`, and to the other stream if both go to the same place. Calls
    /// `complain` once with the reason if output of the workers cannot be written.
    pub(crate) fn start(target: Target, terminal: bool, complain: fn(&str)) -> Arc<Self> {
        let printer = Arc::new(Self::default());
        let writer = Writer { printer: Arc::clone(&printer), terminal, open: None, complain: Some(complain) };
        let name = if target == Target::Stdout { "ddprun-stdout" } else { "ddprun-stderr" };
        if let Err(error) = thread::spawn(name, move || writer.run()) {
            // No more threads can be started, so no worker will run; write this message directly.
            let text = format!("ddprun: {error}\n");
            let _ = write_all(io::stderr().as_fd(), text.as_bytes(), |_| ());
            lock(&printer.queue).closed = true;
        }
        printer
    }

    /// Queues `piece`. Output blocks while the queue is full; messages never do.
    pub(crate) fn push(&self, piece: Piece) -> Result<(), NoReader> {
        let mut queue = lock(&self.queue);
        if matches!(piece, Piece::Output { .. }) {
            let is_full = |queue: &mut Queue| queue.left >= LIMIT && !queue.unlimited && !queue.closed;
            queue = self.changed.wait_while(queue, is_full).unwrap_or_else(PoisonError::into_inner);
        }
        if queue.closed {
            return Err(NoReader);
        }
        queue.left += piece.len();
        queue.pieces.push_back(piece);
        self.changed.notify_all();
        Ok(())
    }

    /// Stops output from blocking.
    pub(crate) fn stop_waiting(&self) {
        lock(&self.queue).unlimited = true;
        self.changed.notify_all();
    }

    /// Waits until everything is written, for at most `patience`, and returns the number of unwritten bytes.
    pub(crate) fn wait(&self, patience: Duration) -> usize {
        let waited = self.changed.wait_timeout_while(lock(&self.queue), patience, |queue| queue.left > 0);
        waited.unwrap_or_else(PoisonError::into_inner).0.left
    }
}

/// An unfinished line: its source, and whether it is a progress bar, which will be redrawn.
#[derive(Debug, Clone, Copy)]
struct Open {
    source: usize,
    in_place: bool,
}

/// Writes pieces so that no source continues the line of another.
struct Writer {
    printer: Arc<Printer>,
    terminal: bool,
    open: Option<Open>,
    /// Reports that the stream cannot be written; `None` after the first report.
    complain: Option<fn(&str)>,
}

impl Writer {
    fn run(mut self) {
        let printer = Arc::clone(&self.printer);
        loop {
            let queue = printer.changed.wait_while(lock(&printer.queue), |queue| queue.pieces.is_empty());
            let mut queue = queue.unwrap_or_else(PoisonError::into_inner);
            let Some(piece) = queue.pieces.pop_front() else { continue };
            drop(queue);
            // Bytes that could not be written are also subtracted from the count here.
            let mut left = piece.len();
            let result = self.write(&piece, &mut left);
            let mut queue = lock(&printer.queue);
            queue.left -= left;
            if let (Err(error), Piece::Output { target, .. }) = (result, piece) {
                if error.kind() == io::ErrorKind::BrokenPipe {
                    queue.closed = true;
                    queue.pieces.clear();
                    queue.left = 0;
                } else if let Some(complain) = self.complain.take() {
                    drop(queue);
                    let name = if target == Target::Stdout { "stdout" } else { "stderr" };
                    complain(&format!("cannot write the workers' output to {name}: {error}. Some output is missing"));
                }
            }
            printer.changed.notify_all();
        }
    }

    /// Writes one piece. `left` is the number of its bytes that are still in the queue's count.
    fn write(&mut self, piece: &Piece, left: &mut usize) -> io::Result<()> {
        let (start, bytes, target): (&[u8], &[u8], Target) = match piece {
            Piece::Message(text) => {
                let start: &[u8] = if self.open.take().is_some() { b"\n" } else { b"" };
                (start, text.as_bytes(), Target::Stderr)
            }
            Piece::Output { source, target, bytes } => (self.turn_to(*source, bytes), bytes, *target),
        };
        let (stdout, stderr) = (io::stdout(), io::stderr());
        let fd = if target == Target::Stdout { stdout.as_fd() } else { stderr.as_fd() };
        let printer = &self.printer;
        let mut extra = start.len();
        let written = |count: usize| {
            let before = extra.min(count);
            extra -= before;
            let count = count - before;
            *left -= count;
            lock(&printer.queue).left -= count;
            printer.changed.notify_all();
        };
        if start.is_empty() { write_all(fd, bytes, written) } else { write_all(fd, &[start, bytes].concat(), written) }
    }

    /// Returns what to write before `bytes` of `source` while another source's line is unfinished.
    fn turn_to(&mut self, source: usize, bytes: &[u8]) -> &'static [u8] {
        if bytes.is_empty() {
            return b"";
        }
        let start: &[u8] = match self.open {
            Some(open) if open.source == source => b"",
            Some(open) if open.in_place && self.terminal => b"\r\x1b[2K",
            Some(_) => b"\n",
            None => b"",
        };
        let before = self.open.is_some_and(|open| open.source == source && open.in_place);
        let last_line = bytes.rsplit(|&byte| byte == b'\n').next().unwrap_or_default();
        let returns = last_line.contains(&b'\r') || (before && last_line.len() == bytes.len());
        self.open = (!last_line.is_empty()).then_some(Open { source, in_place: returns });
        start
    }
}

/// Writes all of `bytes`, retrying after interruptions and on non-blocking files. Calls `written` with the length of
/// every part.
fn write_all(fd: BorrowedFd<'_>, mut bytes: &[u8], mut written: impl FnMut(usize)) -> io::Result<()> {
    while let Some(chunk) = bytes.get(..bytes.len().min(CHUNK)).filter(|chunk| !chunk.is_empty()) {
        match rustix::io::write(fd, chunk) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => {
                bytes = bytes.get(count..).unwrap_or_default();
                written(count);
            }
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                poll(&mut [PollFd::new(&fd, PollFlags::OUT)], None).or_else(|errno| match errno {
                    Errno::INTR => Ok(0),
                    errno => Err(errno),
                })?;
            }
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}
