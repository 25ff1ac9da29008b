//! Ranks that are threads, and compare their loaders.
use candle_core::Device;
use candle_ddp_data::LoaderGroup;
use candle_ddp_state::{Error, Result};
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// So long that only a rank that never compares its loader exceeds it.
const PATIENCE: Duration = Duration::from_secs(300);

type Description = std::result::Result<String, String>;

/// The descriptions that each rank has told the others.
struct Meeting {
    told: Mutex<Vec<Vec<Description>>>,
    more: Condvar,
}

/// One of several ranks.
pub(crate) struct Rank {
    rank: usize,
    world_size: usize,
    meeting: Arc<Meeting>,
}

impl LoaderGroup for Rank {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn device(&self) -> &Device {
        &Device::Cpu
    }

    fn virtual_ranks(&self) -> Option<usize> {
        None
    }

    fn micro_batches(&self) -> Option<Range<usize>> {
        None
    }

    fn timeout(&self) -> Duration {
        PATIENCE
    }

    fn compare_loaders(&self, description: std::result::Result<String, &Error>) -> Result<Option<(usize, String)>> {
        let mut told = self.meeting.told.lock().unwrap();
        let call = told[self.rank].len();
        told[self.rank].push(description.map_err(|error| error.to_string()));
        self.meeting.more.notify_all();
        let waits = |told: &mut Vec<Vec<Description>>| told.iter().any(|rank| rank.len() <= call);
        let (told, wait) = self.meeting.more.wait_timeout_while(told, PATIENCE, waits).unwrap();
        assert!(!wait.timed_out(), "a rank makes no loader");
        let descriptions: Vec<&Description> = told.iter().map(|rank| &rank[call]).collect();
        for (rank, description) in descriptions.iter().enumerate() {
            if let Err(reason) = description {
                return Err(Error::RankFailed { rank, reason: reason.clone() });
            }
        }
        let other = descriptions.iter().position(|description| *description != descriptions[0]);
        Ok(other
            .map(|rank| (rank, format!("{:?} on rank {rank}, {:?} on rank 0", descriptions[rank], descriptions[0]))))
    }
}

fn new(world_size: usize) -> Vec<Rank> {
    let meeting = Arc::new(Meeting { told: Mutex::new(vec![Vec::new(); world_size]), more: Condvar::new() });
    (0..world_size).map(|rank| Rank { rank, world_size, meeting: Arc::clone(&meeting) }).collect()
}

/// The only rank.
pub(crate) fn alone() -> Rank {
    new(1).remove(0)
}

/// Runs `work` on each rank, and returns the results of all. All ranks must make as many loaders.
pub(crate) fn spawn<T: Send>(world_size: usize, work: impl Fn(&Rank) -> Result<T> + Sync) -> Result<Vec<T>> {
    let (ranks, work) = (new(world_size), &work);
    std::thread::scope(|scope| {
        let threads: Vec<_> = ranks.iter().map(|rank| scope.spawn(move || work(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}
