//! How a rank under `ddprun` reports its progress: it writes a document into the store of the run, which `ddprun
//! status` reads.
use super::json::encode;
use super::{Secret, Store, TcpStore, TcpStoreOptions};
use crate::Result;
use crate::host::host_name;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The minimum time between two documents.
const INTERVAL: Duration = Duration::from_secs(1);
/// How long a call of the store may take. No other work waits for it.
const TIMEOUT: Duration = Duration::from_secs(2);
/// The number of documents over which the speed is measured.
const WINDOW: usize = 10;
/// The generation of a rank that does not run elastically.
const NO_GENERATION: u64 = u64::MAX;

/// The training steps of this process.
static STEPS: AtomicU64 = AtomicU64::new(0);

/// Counts a training step of this process: a backward pass that has averaged gradients.
pub fn count_step() {
    STEPS.fetch_add(1, Ordering::Relaxed);
}

/// What a rank reports about itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RankStatus {
    /// Its host.
    pub host: String,
    /// Its process id.
    pub pid: u32,
    /// The generation that it has joined, if it runs elastically.
    pub generation: Option<u64>,
    /// The number of training steps of this process.
    pub steps: u64,
    /// `None` before it has made enough steps to measure.
    pub steps_per_second: Option<f64>,
    /// When a new step was last seen to be complete, in milliseconds since 1970.
    pub last_step: Option<u64>,
}

/// The key of the report of rank `rank`.
pub fn rank_status_key(rank: usize) -> String {
    format!("candle_ddp/status/rank/{rank}")
}

/// A time in milliseconds since 1970.
pub fn milliseconds(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// A rank of a run, and where its store is.
pub(super) struct Place {
    /// Its rank in the first generation.
    pub(super) rank: usize,
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) secret: Option<Secret>,
}

impl Place {
    fn connect(&self) -> Result<TcpStore> {
        TcpStore::connect_with(&self.host, self.port, TcpStoreOptions { timeout: TIMEOUT, secret: self.secret.clone() })
    }
}

/// The thread that reports the progress of this process, over its own connection. It ends when this is dropped.
pub(super) struct Reporter {
    generation: Arc<AtomicU64>,
    /// Closing it stops the thread.
    _stop: Sender<()>,
}

impl Reporter {
    /// Returns `None` if there is no thread. Then only the progress of this rank is unknown.
    pub(super) fn start(place: Place) -> Option<Self> {
        let (stop, stopped) = channel();
        let generation = Arc::new(AtomicU64::new(NO_GENERATION));
        let known = Arc::clone(&generation);
        let work = move || report(&place, &known, &stopped);
        let thread = std::thread::Builder::new().name("candle-ddp-progress".to_string()).spawn(work);
        match thread {
            Ok(_) => Some(Self { generation, _stop: stop }),
            Err(error) => {
                log::debug!("no thread for the progress of this rank: {error}");
                None
            }
        }
    }

    /// Records that this rank has joined a generation.
    pub(super) fn set_generation(&self, generation: u64) {
        self.generation.store(generation, Ordering::Relaxed);
    }
}

fn report(place: &Place, generation: &AtomicU64, stopped: &Receiver<()>) {
    let (mut store, mut speed, mut told) = (None, Speed::default(), None);
    loop {
        let steps = STEPS.load(Ordering::Relaxed);
        let generation = Some(generation.load(Ordering::Relaxed)).filter(|generation| *generation != NO_GENERATION);
        speed.add(steps, Instant::now(), SystemTime::now());
        if told != Some((steps, generation)) {
            match tell(&mut store, place, &speed.status(generation)) {
                Ok(()) => told = Some((steps, generation)),
                Err(error) => {
                    log::debug!("the progress of rank {} stays unknown: {error}", place.rank);
                    store = None;
                }
            }
        }
        if stopped.recv_timeout(INTERVAL) != Err(RecvTimeoutError::Timeout) {
            return;
        }
    }
}

fn tell(store: &mut Option<TcpStore>, place: &Place, status: &RankStatus) -> Result<()> {
    let store = match store {
        Some(store) => store,
        none => none.insert(place.connect()?),
    };
    store.set(&rank_status_key(place.rank), &encode(status))
}

/// The numbers of steps at different times.
#[derive(Default)]
struct Speed {
    seen: VecDeque<(u64, Instant)>,
    last: Option<SystemTime>,
}

impl Speed {
    fn add(&mut self, steps: u64, now: Instant, time: SystemTime) {
        if steps == self.seen.back().map_or(0, |(steps, _)| *steps) {
            return;
        }
        if self.seen.len() > WINDOW {
            self.seen.pop_front();
        }
        self.seen.push_back((steps, now));
        self.last = Some(time);
    }

    fn per_second(&self) -> Option<f64> {
        let ((before, from), (after, to)) = (self.seen.front()?, self.seen.back()?);
        let seconds = to.duration_since(*from).as_secs_f64();
        (seconds > 0.0).then(|| (after - before) as f64 / seconds)
    }

    fn status(&self, generation: Option<u64>) -> RankStatus {
        RankStatus {
            host: host_name(),
            pid: std::process::id(),
            generation,
            steps: self.seen.back().map_or(0, |(steps, _)| *steps),
            steps_per_second: self.per_second(),
            last_step: self.last.map(milliseconds),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_speed_is_that_of_the_last_seconds() {
        let (start, time) = (Instant::now(), UNIX_EPOCH + Duration::from_secs(7));
        let mut speed = Speed::default();
        let mut add = |steps, second| {
            speed.add(steps, start + Duration::from_secs(second), time);
            (speed.status(None).steps, speed.per_second())
        };
        // How long the first step takes does not matter.
        assert_eq!(add(0, 0), (0, None));
        assert_eq!(add(4, 60), (4, None));
        assert_eq!(add(4, 61), (4, None));
        assert_eq!(add(10, 62), (10, Some(3.0)));
        for second in 63..80 {
            add(10 + 5 * (second - 62), second);
        }
        assert_eq!(add(100, 80), (100, Some(5.0)));
        assert_eq!(speed.status(Some(3)).last_step, Some(7000));
    }
}
