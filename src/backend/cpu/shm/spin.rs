//! How a thread waits before it sleeps.
use std::num::NonZero;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// How long to wait before sleeping: first spinning, which is fastest if the peer runs on another processor, then
/// yielding the processor, which is fastest if it does not.
///
/// Measured with 2 and 4 ranks on 2 cores that were busy with other programs, too: without the second, an `all_reduce` of
/// 8 bytes took 2.5 ms with a spin of 1 ms and 90 us with one of 50 us, and with it 12 to 17 us with a spin of 2 to 5 us;
/// 0.8 us in all cases while both ranks had a core each. With both at zero, small messages took 1.5 times as long.
/// No option sets them: to measure again, change them here, and run
/// `ddprun --standalone --nproc-per-node 2 --example allreduce -- --sizes 8,1K` with each build in turn, and with 4 ranks.
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

/// Waits a little for `ready`, and returns whether it became true. `check` ends the wait by an error. `ranks` ranks share the
/// processors.
pub(super) fn spin<E>(ranks: usize, ready: impl Fn() -> bool, check: impl Fn() -> Result<(), E>) -> Result<bool, E> {
    /// The number of checks between two readings of the clock.
    const LOOKS: usize = 32;
    let start = Instant::now();
    let mut waited = Duration::ZERO;
    while waited < SPIN {
        for _ in 0..LOOKS {
            if ready() {
                return Ok(true);
            }
            std::hint::spin_loop();
        }
        check()?;
        waited = start.elapsed();
    }
    let longest = SPIN + yields(ranks);
    while waited < longest {
        std::thread::yield_now();
        if ready() {
            return Ok(true);
        }
        check()?;
        waited = start.elapsed();
    }
    Ok(false)
}
