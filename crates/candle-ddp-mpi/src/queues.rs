//! The calls of a group that are not over. Collectives run one after the other, and so do the messages to each rank and from
//! each rank.
use crate::call::Call;
use crate::comm::Comm;
use crate::library::MpiError;
use candle_ddp::Failure;
use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// How a call ended, and when it ran.
pub(crate) type Outcome = OnceLock<(Result<(), Failure>, (Instant, Instant))>;

/// A queue of calls, as the trait orders them.
#[derive(Clone, Copy)]
pub(crate) enum Channel {
    Collectives,
    SendTo(usize),
    RecvFrom(usize),
}

struct Job {
    call: Call,
    outcome: Arc<Outcome>,
    /// When it came to the head of its queue.
    begun: Option<Instant>,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    /// The sequence number of the last call that was put in, from 1.
    last: u64,
}

impl Queue {
    /// The sequence number of the call at the head.
    fn sequence(&self) -> u64 {
        self.last + 1 - self.jobs.len() as u64
    }
}

pub(crate) struct Queues {
    world_size: usize,
    /// The collectives, the messages to each rank, and those from each rank.
    queues: Vec<Queue>,
    /// The queues that have calls.
    busy: Vec<usize>,
    /// By rank, how many collectives, messages to this rank and messages from this rank it had made when it left.
    left: Vec<Option<[u64; 3]>>,
}

impl Queues {
    pub(crate) fn new(world_size: usize) -> Self {
        let queues = (0..=2 * world_size).map(|_| Queue::default()).collect();
        Self { world_size, queues, busy: Vec::new(), left: vec![None; world_size] }
    }

    pub(crate) fn are_empty(&self) -> bool {
        self.busy.is_empty()
    }

    pub(crate) fn put(&mut self, channel: Channel, call: Call) -> Arc<Outcome> {
        let index = match channel {
            Channel::Collectives => 0,
            Channel::SendTo(peer) => 1 + peer,
            Channel::RecvFrom(peer) => 1 + self.world_size + peer,
        };
        let (queue, outcome) = (&mut self.queues[index], Arc::new(Outcome::new()));
        queue.last += 1;
        if queue.jobs.is_empty() {
            self.busy.push(index);
        }
        queue.jobs.push_back(Job { call, outcome: outcome.clone(), begun: None });
        outcome
    }

    /// Moves every call at the head of its queue on.
    pub(crate) fn advance(&mut self, comm: Comm) -> Result<(), (String, MpiError)> {
        let mut place = 0;
        while let Some(&index) = self.busy.get(place) {
            let queue = &mut self.queues[index];
            while let Some(job) = queue.jobs.front_mut() {
                let begun = *job.begun.get_or_insert_with(Instant::now);
                if !job.call.advance(comm).map_err(|error| (job.call.describe(), error))? {
                    break;
                }
                let Some(Job { call, outcome, .. }) = queue.jobs.pop_front() else { break };
                // The caller is told only after the engine has released its tensors.
                drop(call);
                let _ = outcome.set((Ok(()), (begun, Instant::now())));
            }
            match queue.jobs.is_empty() {
                true => drop(self.busy.swap_remove(place)),
                false => place += 1,
            }
        }
        Ok(())
    }

    /// The counts for a notice to `peer` that this rank leaves.
    pub(crate) fn counts(&self, peer: usize) -> [u64; 3] {
        [0, 1 + peer, 1 + self.world_size + peer].map(|index| self.queues[index].last)
    }

    pub(crate) fn note_left(&mut self, peer: usize, counts: [u64; 3]) {
        if let Some(left) = self.left.get_mut(peer) {
            *left = Some(counts);
        }
    }

    pub(crate) fn have_left(&self) -> usize {
        self.left.iter().flatten().count()
    }

    /// The failure of the first call that can never be over, or that has taken longer than `timeout` on rank `rank`.
    pub(crate) fn overdue(&self, rank: usize, timeout: Duration, now: Instant) -> Option<Failure> {
        self.busy.iter().find_map(|&index| {
            let queue = &self.queues[index];
            let (job, sequence) = (queue.jobs.front()?, queue.sequence());
            let lacks = |peer: usize, counted: usize| {
                let left_after = self.left[peer].map(|counts| counts[counted]).filter(|last| *last < sequence)?;
                Some(Failure::PeerLeft { peer, left_after, call: job.call.describe(), sequence })
            };
            let left = match index {
                0 => (0..self.world_size).find_map(|peer| lacks(peer, 0)),
                // What this rank sends, the other one receives.
                index if index <= self.world_size => lacks(index - 1, 2),
                index => lacks(index - 1 - self.world_size, 1),
            };
            let is_late = || job.begun.is_some_and(|begun| now.saturating_duration_since(begun) >= timeout);
            left.or_else(|| is_late().then(|| late(rank, job.call.describe(), sequence, timeout)))
        })
    }

    /// Ends all calls with `failure`.
    pub(crate) fn fail(&mut self, failure: &Failure) {
        for index in self.busy.drain(..) {
            for Job { call, outcome, begun } in self.queues[index].jobs.drain(..) {
                let now = Instant::now();
                let _ = outcome.set((Err(failure.clone()), (begun.unwrap_or(now), now)));
                if call.is_in_flight() {
                    // MPI may write to the tensors' memory at any time from now on, so it is never freed.
                    std::mem::forget(call);
                }
            }
        }
    }
}

fn late(rank: usize, call: String, sequence: u64, timeout: Duration) -> Failure {
    let reason =
        "MPI does not tell for which rank it waits: look for the first error in the output of all ranks, or for \
                  what they do instead"
            .to_string();
    Failure::TimedOut { rank, call, sequence, timeout, waiting_for: Vec::new(), reason }
}
