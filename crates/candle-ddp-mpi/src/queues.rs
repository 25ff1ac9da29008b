//! The calls of a group that are not over. Collectives run one after the other, and so do the messages to each rank and from
//! each rank.
use crate::call::Call;
use crate::comm::Comm;
use crate::library::MpiError;
use candle_ddp::Failure;
use candle_ddp::backend::Collective;
use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// How a call ended, and when it ran.
pub(crate) type Outcome = OnceLock<(Result<(), Failure>, (Instant, Instant))>;

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
    /// The rank that has left after the fewest of these calls, and how many it had made.
    left: Option<(usize, u64)>,
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
    /// The number of ranks that have left.
    pub(crate) left: usize,
}

impl Queues {
    pub(crate) fn new(world_size: usize) -> Self {
        let queues = (0..=2 * world_size).map(|_| Queue::default()).collect();
        Self { world_size, queues, busy: Vec::new(), left: 0 }
    }

    pub(crate) fn are_empty(&self) -> bool {
        self.busy.is_empty()
    }

    pub(crate) fn put(&mut self, call: Call) -> Arc<Outcome> {
        let index = match call.collective {
            Collective::Send { peer, .. } => self.shared_with(peer)[1],
            Collective::Recv { peer, .. } => self.shared_with(peer)[2],
            _ => 0,
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

    /// The queues of the collectives, the messages to `peer`, and those from it.
    fn shared_with(&self, peer: usize) -> [usize; 3] {
        [0, 1 + peer, 1 + self.world_size + peer]
    }

    /// The counts for a notice to `peer` that this rank leaves.
    pub(crate) fn counts(&self, peer: usize) -> [u64; 3] {
        self.shared_with(peer).map(|index| self.queues[index].last)
    }

    /// Notes that `peer` has left after so many collectives, messages to this rank, and messages from it.
    pub(crate) fn note_left(&mut self, peer: usize, [collectives, sent, received]: [u64; 3]) {
        self.left += 1;
        // The other rank receives the messages that this rank sends.
        for (index, count) in self.shared_with(peer).into_iter().zip([collectives, received, sent]) {
            let left = &mut self.queues[index].left;
            *left = left.filter(|(_, fewest)| *fewest <= count).or(Some((peer, count)));
        }
    }

    /// The failure of the first call that can never be over, or that has taken longer than `timeout` on rank `rank`.
    pub(crate) fn overdue(&self, rank: usize, timeout: Duration, now: Instant) -> Option<Failure> {
        self.busy.iter().find_map(|&index| {
            let queue = &self.queues[index];
            let (job, sequence) = (queue.jobs.front()?, queue.sequence());
            if let Some((peer, left_after)) = queue.left.filter(|(_, left_after)| *left_after < sequence) {
                return Some(Failure::PeerLeft { peer, left_after, call: job.call.describe(), sequence });
            }
            job.begun.filter(|begun| now.saturating_duration_since(*begun) >= timeout)?;
            let (call, waiting_for) = (job.call.describe(), Vec::new());
            let reason = "MPI does not tell for which rank it waits: look for the first error in the output of all ranks, or \
                          for what they do instead";
            Some(Failure::TimedOut { rank, call, sequence, timeout, waiting_for, reason: reason.to_string() })
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

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device, Tensor};

    #[test]
    fn a_call_fails_that_a_rank_has_left_before() {
        let tensor = Tensor::zeros(2, DType::F32, &Device::Cpu).unwrap();
        for (counts, expected) in [
            ([1, 1, 1], None),
            ([0, 1, 1], Some("barrier()")),
            ([1, 0, 1], Some("recv(f32[2])")),
            ([1, 1, 0], Some("send(f32[2])")),
        ] {
            let mut queues = Queues::new(3);
            let (send, recv) = (tensor.clone(), tensor.clone());
            let (send, recv) = (Collective::Send { tensor: send, peer: 2 }, Collective::Recv { tensor: recv, peer: 2 });
            for collective in [Collective::Barrier, send, recv] {
                queues.put(Call::new(0, 3, collective, 1).unwrap());
            }
            queues.note_left(1, [5; 3]);
            queues.note_left(2, counts);
            let failure = queues.overdue(0, Duration::MAX, Instant::now());
            let failure_of = |call: &str| Failure::PeerLeft { peer: 2, left_after: 0, call: call.into(), sequence: 1 };
            assert_eq!(failure, expected.map(failure_of), "{counts:?}");
        }
    }
}
