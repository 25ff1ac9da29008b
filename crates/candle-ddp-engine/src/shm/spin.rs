//! How a thread waits before it sleeps.
use std::num::NonZero;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// How long to wait before sleeping: first spinning, which is fastest if the peer runs on another processor, then
/// yielding the processor, which is fastest if it does not.
///
/// Measured with 2 and 4 ranks on 2 cores that were busy with other programs, too: without the second, an `all_reduce` of
/// 8 bytes took 2.5 ms with a spin of 1 ms and 90 us with one of 50 us, and with it 12 to 17 us with a spin of 2 to 5 us;
/// 0.8 us in all cases while both ranks had a core each. With both at zero, small messages took 1.5 times as long.
/// No option sets them: to measure again, change them here, and run
/// `ddprun --standalone --nproc-per-node 2 --example allreduce -- --sizes 8,1K` with each build in turn, and with 4 ranks.
///
/// Next to 8 busy loops, which never wait, 8 bytes took 25 ms with yields, since a yield lasts for the turns of all loops, and 0.01
/// to 0.2 ms when ranks slept at once: see [`Yields`].
const SPIN: Duration = Duration::from_micros(1);
const YIELD: Duration = Duration::from_micros(50);
/// With very many ranks for each processor, yields last this long for each of them: until all had their turn. A rank that sleeps
/// is woken once for each peer that comes late.
const TURN: Duration = Duration::from_micros(25);

/// How long to yield if `ranks` ranks share the processors.
fn yields(ranks: usize) -> Duration {
    static PROCESSORS: OnceLock<usize> = OnceLock::new();
    let processors = PROCESSORS.get_or_init(|| std::thread::available_parallelism().map_or(1, NonZero::get));
    YIELD.max(TURN * (ranks / processors).min(1000) as u32)
}

/// Decides whether waits yield. Where other programs keep the processors busy, a yield lasts for a turn of each of them, while a
/// sleeper that is woken comes before them.
struct Yields {
    /// The number of more waits that do not yield.
    skipped: AtomicU32,
    /// How many do not after the next yield that was too long.
    next: AtomicU32,
}

static YIELDS: Yields = Yields::new();

impl Yields {
    /// A yield to another rank is shorter; a yield for another program's turn is longer.
    const TOO_LONG: Duration = Duration::from_millis(1);
    /// The number of waits that do not yield after one that was too long: twice as many each time that the next is no better.
    const FEWEST: u32 = 64;
    const MOST: u32 = 1 << 14;

    const fn new() -> Self {
        Self { skipped: AtomicU32::new(0), next: AtomicU32::new(Self::FEWEST) }
    }

    /// Whether the wait that begins may yield.
    fn begin(&self) -> bool {
        let one_less = |left: u32| left.checked_sub(1);
        self.skipped.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).is_err()
    }

    /// Call after a yield that took so long. Returns whether the wait may yield again.
    fn took(&self, duration: Duration) -> bool {
        if duration < Self::TOO_LONG {
            return true;
        }
        let skipped = self.next.load(Ordering::Relaxed);
        self.skipped.store(skipped, Ordering::Relaxed);
        self.next.store((2 * skipped).min(Self::MOST), Ordering::Relaxed);
        false
    }

    /// Call after a wait that yields have ended.
    fn succeeded(&self) {
        self.next.store(Self::FEWEST, Ordering::Relaxed);
    }
}

/// How a short wait ended.
pub(super) enum Spun {
    /// The wait ended within [`SPIN`].
    AtOnce,
    /// It came later: about then.
    At(Instant),
    /// It has not come yet.
    NotYet,
}

/// Waits a little for `ready`. `check` ends the wait by an error. `ranks` ranks share the processors.
pub(super) fn spin<E>(ranks: usize, ready: impl Fn() -> bool, check: impl Fn() -> Result<(), E>) -> Result<Spun, E> {
    /// The number of checks between two readings of the clock.
    const LOOKS: usize = 32;
    let start = Instant::now();
    let mut waited = Duration::ZERO;
    while waited < SPIN {
        for _ in 0..LOOKS {
            if ready() {
                return Ok(Spun::AtOnce);
            }
            std::hint::spin_loop();
        }
        check()?;
        waited = start.elapsed();
    }
    let longest = SPIN + yields(ranks);
    let mut yields = waited < longest && YIELDS.begin();
    while yields {
        std::thread::yield_now();
        let now = start.elapsed();
        yields = YIELDS.took(now - waited) && now < longest;
        waited = now;
        if ready() {
            if yields {
                YIELDS.succeeded();
            }
            return Ok(Spun::At(start + waited));
        }
        check()?;
    }
    Ok(Spun::NotYet)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_a_yield_that_was_too_long_waits_do_not_yield_for_a_while() {
        let yields = Yields::new();
        let waits_until_the_next = || (0..).find(|_| yields.begin());
        assert_eq!(waits_until_the_next(), Some(0));
        assert!(yields.took(Yields::TOO_LONG / 2));
        assert_eq!(waits_until_the_next(), Some(0));
        for skipped in [64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 16384] {
            assert!(!yields.took(Yields::TOO_LONG));
            assert_eq!(waits_until_the_next(), Some(skipped));
        }
        yields.succeeded();
        assert!(!yields.took(Yields::TOO_LONG));
        assert_eq!(waits_until_the_next(), Some(64));
    }
}
