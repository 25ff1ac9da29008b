//! Launching calls on a thread.
//!
//! A call of a nonblocking communicator takes tens of microseconds, since NCCL starts a thread for it, and the first ones wait for
//! other ranks, which NCCL connects then. The program does not wait for either. NCCL before 2.27.3 also needs the thread that made a
//! call until the communicator's end, since it keeps the call's state in that thread's memory.
use super::comm::WaitError;
use super::comm_stream::{CommStream, Job};
use super::threads::{join_until, spawn};
use super::work::{Behind, NcclWork};
use crate::Result;
use crate::backend::Completion;
use crate::panic::lock;
use candle_ddp_engine::device_group::DeviceGroup;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Instant;

pub(super) struct Launcher {
    jobs: Sender<Job>,
    thread: JoinHandle<()>,
    /// Works that were launched and that nobody waits for. The thread of the next call drops them once the GPU has passed them.
    abandoned: Arc<Mutex<Vec<NcclWork>>>,
}

impl Launcher {
    /// Starts the thread. `open` gives the communicator, before the first call.
    pub(super) fn start(
        group: &Arc<DeviceGroup>,
        name: &str,
        open: impl FnOnce() -> std::result::Result<Arc<CommStream>, WaitError> + Send + 'static,
    ) -> Result<Self> {
        let (jobs, queue) = channel::<Job>();
        let abandoned = Arc::<Mutex<Vec<NcclWork>>>::default();
        let (own_group, own_abandoned) = (Arc::clone(group), Arc::clone(&abandoned));
        let body = move || {
            let mut queue = queue.into_iter().peekable();
            if queue.peek().is_none() {
                return;
            }
            // The whole group fails after an error, so that waits for the rest of the queue end too.
            let comm_stream = match open() {
                Ok(comm_stream) => comm_stream,
                Err(error) => return drop(error.end_group(&own_group)),
            };
            for job in queue {
                let behind = job.behind.as_ref().map_or(Ok(()), Behind::await_launch);
                if behind.is_err() {
                    // A part of the same model has failed, which ends this group too.
                    return comm_stream.await_end();
                }
                if let Err(error) = comm_stream.launch(&own_group, &job) {
                    error.end_group(&own_group);
                    return comm_stream.await_end();
                }
                lock(&own_abandoned).extend(job.set_launched(&own_group));
            }
        };
        Ok(Self { jobs, thread: spawn(group, name, body)?, abandoned })
    }

    /// Queues a call. If the thread has ended, the group knows why.
    pub(super) fn push(&self, job: Job) {
        lock(&self.abandoned).retain(|work| !work.is_completed());
        let _ = self.jobs.send(job);
    }

    /// Ends the thread once all calls are launched, or the group has failed and its communicators are aborted. Leaves it behind if it has
    /// not ended at `deadline`.
    pub(super) fn end(self, deadline: Instant) {
        drop(self.jobs);
        join_until(self.thread, deadline);
        // The rest of the abandoned works end on this thread, not on that one.
    }
}
