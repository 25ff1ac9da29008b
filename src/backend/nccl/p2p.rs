//! Messages between two ranks in one direction.
//!
//! NCCL runs the calls on a communicator one after the other. On one communicator, two ranks that both send first and
//! then receive would wait for each other, and a message behind a collective would wait for all ranks; neither may
//! happen. So each pair of ranks has a communicator of two ranks and a stream for each direction in which it sends
//! messages. A thread creates them with the first message, since both ranks must take part.
use super::comm::{Comm, Limit, UniqueId, WaitError};
use super::comm_stream::{CommStream, Job};
use super::comm_streams::CommStreams;
use super::group::Group;
use super::identity::await_id;
use super::status::NcclFailure;
use super::stream::Streams;
use super::work::NcclWork;
use crate::backend::Completion;
use crate::rendezvous::{self, Store, discard};
use crate::{Error, Result};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

/// The messages from one rank to another, on either of the two.
pub(super) struct P2p {
    jobs: Sender<Job>,
    thread: JoinHandle<()>,
    pub(super) streams: Streams,
}

/// What the thread of a pair needs.
pub(super) struct Worker {
    pub(super) group: Arc<Group>,
    pub(super) comm_streams: Arc<CommStreams>,
    pub(super) store: Arc<dyn Store>,
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) streams: Streams,
}

impl P2p {
    pub(super) fn start(worker: Worker) -> Result<Self> {
        let (jobs, queue) = channel();
        let streams = worker.streams.clone();
        let name = format!("nccl-{}-to-{}", worker.from, worker.to);
        let body = move || {
            let group = Arc::clone(&worker.group);
            if catch_unwind(AssertUnwindSafe(|| worker.run(&queue))).is_err() {
                group.fail(crate::error::Failure::PeerFailed {
                    peer: group.rank,
                    reason: "its thread for messages panicked".to_string(),
                });
            }
        };
        let thread = std::thread::Builder::new()
            .name(name)
            .spawn(body)
            .map_err(|error| Error::io("starting a thread for messages", error))?;
        Ok(Self { jobs, thread, streams })
    }

    /// Queues a message. If the thread has ended, the group knows why.
    pub(super) fn push(&self, job: Job) {
        let _ = self.jobs.send(job);
    }

    /// Makes the thread end once all messages are started, or the group has failed and its communicators are aborted.
    pub(super) fn end(self) -> JoinHandle<()> {
        self.thread
    }
}

impl Worker {
    fn run(self, queue: &Receiver<Job>) {
        let mut comm_stream: Option<Arc<CommStream>> = None;
        // Works that no thread waits for are kept here until the GPU has passed them.
        let mut abandoned: Vec<NcclWork> = Vec::new();
        for job in queue {
            let opened = match &comm_stream {
                Some(comm_stream) => Ok(Arc::clone(comm_stream)),
                None => self.connect(),
            };
            let started = opened.and_then(|opened| {
                comm_stream = Some(Arc::clone(&opened));
                opened.launch(&self.group, &job, None)
            });
            if let Err(error) = started {
                // The whole group fails, so that waits for the rest of the queue end too.
                error.end_group(&self.group);
                comm_stream.iter().for_each(|comm_stream| comm_stream.await_end());
                break;
            }
            abandoned.retain(|work| !work.is_completed());
            abandoned.extend(job.set_launched(&self.group));
        }
    }

    /// Connects to the peer.
    fn connect(&self) -> std::result::Result<Arc<CommStream>, WaitError> {
        let sends = self.group.rank == self.from;
        let key = format!("message/{}-{}", self.from, self.to);
        let cannot = |error: rendezvous::Error| {
            WaitError::Nccl(NcclFailure::other("meeting the peer of a message", &error.to_string()))
        };
        self.streams.bind().map_err(super::cuda_failure)?;
        let id = if sends {
            let id = UniqueId::new()?;
            self.store.set(&key, &id.to_bytes()).map_err(cannot)?;
            id
        } else {
            let id = await_id(&*self.store, &key, &self.group, "meeting the peer of a message")?;
            discard(&*self.store, &key);
            id
        };
        let mut check = || self.group.failure().map_or(Ok(()), Err);
        let comm = Comm::connect(&id, usize::from(!sends), 2, Limit::Few, &mut check)?;
        let comm_stream = Arc::new(CommStream::new(comm, self.streams.clone()));
        self.comm_streams.add(self.from, self.to, Arc::clone(&comm_stream))?;
        Ok(comm_stream)
    }
}
