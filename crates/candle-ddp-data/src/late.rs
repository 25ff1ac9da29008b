//! Warnings of samples that do not come, which the other ranks would otherwise blame on a missing collective.
use super::LoaderOptions;
use candle_ddp_base::panic::{lock, wait_timeout};
use candle_ddp_base::warnings::warn_aloud;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Says when a rank warns that it waits: the first time after a quarter of the time-out, but at most a minute, and then each
/// time after twice as long.
pub(super) struct Patience {
    rank: usize,
    first: Duration,
    next: Duration,
}

impl Patience {
    pub(super) fn new(rank: usize, options: &LoaderOptions) -> Self {
        const LONG: Duration = Duration::from_secs(60);
        let first = options.longest_wait().map_or(LONG, |timeout| LONG.min(timeout / 4).max(Duration::from_millis(1)));
        Self { rank, first, next: first }
    }

    /// How long it lasts for somebody who has waited so long.
    pub(super) fn left(&self, waited: Duration) -> Duration {
        self.next.saturating_sub(waited)
    }

    /// Warns if it is at its end. The text follows "rank 1's DataLoader has waited 60 s for …".
    pub(super) fn warn(&mut self, waited: Duration, text: impl FnOnce() -> String) {
        if waited >= self.next {
            self.next = waited.saturating_mul(2);
            warn_aloud(format_args!(
                "rank {}'s DataLoader has waited {} s for {}. The other ranks wait for it in their next collective",
                self.rank,
                waited.as_secs(),
                text()
            ));
        }
    }
}

/// A thread that warns while the sample that the program's own thread reads does not come. It ends when this is dropped.
pub(super) struct Watch(Arc<Watched>);

#[derive(Default)]
struct Watched {
    reading: Mutex<Reading>,
    ended: Condvar,
}

#[derive(Default)]
struct Reading {
    sample: Option<(usize, Instant)>,
    ended: bool,
}

impl Watch {
    pub(super) fn start(mut patience: Patience) -> Self {
        let watched = Arc::<Watched>::default();
        let watch = Self(watched.clone());
        let body = move || {
            let (mut reading, mut last) = (lock(&watched.reading), None);
            while !reading.ended {
                if reading.sample != last {
                    (last, patience.next) = (reading.sample, patience.first);
                }
                let waited = last.map_or(Duration::ZERO, |(_, since)| since.elapsed());
                if let Some((index, _)) = last {
                    patience.warn(waited, || {
                        format!(
                            "sample {index}, which Dataset::get reads on the program's own thread, so that no time-out ends it: with \
                             workers (LoaderOptions.num_workers) one does"
                        )
                    });
                }
                reading = wait_timeout(&watched.ended, reading, patience.left(waited));
            }
        };
        // Without it, only warnings are lost.
        drop(std::thread::Builder::new().name("data-watch".to_string()).spawn(body));
        watch
    }

    fn reading(&self) -> MutexGuard<'_, Reading> {
        lock(&self.0.reading)
    }

    /// Reads a sample.
    pub(super) fn during<T>(&self, index: usize, read: impl FnOnce() -> T) -> T {
        self.reading().sample = Some((index, Instant::now()));
        let sample = read();
        self.reading().sample = None;
        sample
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.reading().ended = true;
        self.0.ended.notify_all();
    }
}
