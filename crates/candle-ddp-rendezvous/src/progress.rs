//! How a rank under `ddprun` reports its progress: it writes a document into the store of the run, which `ddprun
//! status` reads.
use super::json::encode;
use super::{Secret, Store, TcpStore, TcpStoreOptions};
use crate::Result;
use candle_ddp_base::host::host_name;
use candle_ddp_base::metrics;
use serde::{Deserialize, Serialize};
use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock};
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

/// When the first of them was complete.
static FIRST: OnceLock<Instant> = OnceLock::new();

/// For how many nanoseconds since then the program has waited for other ranks.
static WAITED: AtomicU64 = AtomicU64::new(0);

/// Whether an engine of this process counts that.
static KNOWS_WAITS: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// Whether this thread makes training steps. Others, such as one that writes checkpoints, hold nobody up when they wait.
    static STEPS_HERE: Cell<bool> = const { Cell::new(false) };
}

/// Counts a training step of this process: a backward pass that has averaged gradients.
pub fn count_step() {
    FIRST.get_or_init(Instant::now);
    STEPS_HERE.set(true);
    STEPS.fetch_add(1, Ordering::Relaxed);
}

/// Says that an engine of this process [counts waits](count_wait).
pub fn know_waits() {
    KNOWS_WAITS.store(true, Ordering::Relaxed);
}

/// Counts a time in which this thread has stood still because other ranks had not come to a collective.
pub fn count_wait(waited: Duration) {
    if STEPS_HERE.get() {
        WAITED.fetch_add(u64::try_from(waited.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }
}

/// What a rank reports about itself.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
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
    /// The seconds since its first step was complete.
    pub trained: f64,
    /// For how many of them its program has stood still because other ranks had not come to a collective; `None` if its engine
    /// does not know.
    pub waited: Option<f64>,
    /// The share of the time for which it has done so in the last seconds.
    pub waiting: Option<f64>,
    /// The newest values of [`put_metric`](candle_ddp_base::metrics::put_metric), as text, since JSON has no infinite numbers.
    pub metrics: BTreeMap<String, String>,
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
        speed.add(steps, waited(), Instant::now(), SystemTime::now());
        let status = speed.status(generation);
        let now = Some((steps, generation, status.metrics.clone()));
        if told != now {
            match tell(&mut store, place, &status) {
                Ok(()) => told = now,
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

/// For how long the program has waited for other ranks.
fn waited() -> Duration {
    Duration::from_nanos(WAITED.load(Ordering::Relaxed))
}

fn tell(store: &mut Option<TcpStore>, place: &Place, status: &RankStatus) -> Result<()> {
    let store = match store {
        Some(store) => store,
        none => none.insert(place.connect()?),
    };
    store.set(&rank_status_key(place.rank), &encode(status))
}

/// How many steps were complete at some time, and how long the program had waited by then.
struct Seen {
    steps: u64,
    waited: Duration,
    at: Instant,
}

/// The numbers of steps at different times.
#[derive(Default)]
struct Speed {
    seen: VecDeque<Seen>,
    last: Option<SystemTime>,
}

impl Speed {
    fn add(&mut self, steps: u64, waited: Duration, at: Instant, time: SystemTime) {
        if steps == self.seen.back().map_or(0, |seen| seen.steps) {
            return;
        }
        if self.seen.len() > WINDOW {
            self.seen.pop_front();
        }
        self.seen.push_back(Seen { steps, waited, at });
        self.last = Some(time);
    }

    /// How many steps a second there were in the last seconds, and the share of these in which the program waited.
    fn rates(&self) -> Option<(f64, f64)> {
        let (from, to) = (self.seen.front()?, self.seen.back()?);
        let seconds = to.at.duration_since(from.at).as_secs_f64();
        let waited = to.waited.saturating_sub(from.waited).as_secs_f64();
        (seconds > 0.0).then(|| ((to.steps - from.steps) as f64 / seconds, waited / seconds))
    }

    fn status(&self, generation: Option<u64>) -> RankStatus {
        let (rates, last, knows_waits) = (self.rates(), self.seen.back(), KNOWS_WAITS.load(Ordering::Relaxed));
        RankStatus {
            host: host_name(),
            pid: std::process::id(),
            generation,
            steps: self.seen.back().map_or(0, |seen| seen.steps),
            steps_per_second: rates.map(|(steps, _)| steps),
            last_step: self.last.map(milliseconds),
            trained: last.zip(FIRST.get()).map_or(0., |(last, first)| last.at.duration_since(*first).as_secs_f64()),
            waited: knows_waits.then(|| last.map_or(0., |last| last.waited.as_secs_f64())),
            waiting: rates.filter(|_| knows_waits).map(|(_, waiting)| waiting),
            metrics: metrics::all().into_iter().map(|(name, value)| (name, value.to_string())).collect(),
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
            speed.add(steps, Duration::from_millis(100 * steps), start + Duration::from_secs(second), time);
            (speed.status(None).steps, speed.rates().map(|(steps, _)| steps))
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
        // 0.1 s for each of 5 steps a second.
        assert_eq!(speed.rates(), Some((5.0, 0.5)));
    }
}
