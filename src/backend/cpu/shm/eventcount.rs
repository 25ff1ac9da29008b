//! How a thread waits for a peer: first spinning, then asleep until the peer rings its eventcount.
use super::layout::{Layout, Sleeper};
use super::segment::Segment;
use crate::backend::cpu::transport_error::TransportError;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use std::time::{Duration, Instant};

/// The eventcount of one thread of one rank, in that rank's segment.
///
/// The sleeper notes for whom it waits before it looks a last time and sleeps. A peer makes its change before it looks
/// whether the sleeper waits for it. Both have a sequentially consistent fence in between, so that at least one of them sees
/// the other. A sequence number that changes with every ring lets a ring between the last look and the sleep end the sleep,
/// too.
pub(super) struct Eventcount {
    segment: Arc<Segment>,
    rings: usize,
    awaited: usize,
}

/// Nobody sleeps.
const NOBODY: u32 = 0;

impl Eventcount {
    pub(super) fn new(segment: &Arc<Segment>, layout: &Layout, sleeper: Sleeper) -> Self {
        let offset = layout.eventcount(sleeper);
        Self { segment: segment.clone(), rings: offset, awaited: offset + 4 }
    }

    fn rings(&self) -> &AtomicU32 {
        self.segment.word(self.rings)
    }

    fn awaited(&self) -> &AtomicU32 {
        self.segment.word(self.awaited)
    }

    /// To be called after rank `rank` has made a change: wakes the sleeper if it waits for that rank.
    pub(super) fn ring_if_awaited(&self, rank: usize) {
        fence(Ordering::SeqCst);
        if self.awaited().load(Ordering::Relaxed) == rank as u32 + 1 {
            self.ring();
        }
    }

    pub(super) fn ring(&self) {
        self.rings().fetch_add(1, Ordering::Release);
        wake(self.rings());
    }
}

/// How long to wait awake: first without letting go of the processor, which is fastest when the peer runs on another
/// one, then letting others run, which is fastest when it does not.
///
/// Measured with 2 and 4 ranks on 2 cores that were busy with other programs, too: without the second, an `all_reduce` of
/// 8 bytes took 2.5 ms with a spin of 1 ms and 90 us with one of 50 us, and with it 12 to 17 us with a spin of 2 to 5 us;
/// 0.8 us in all cases while both ranks had a core each. With both at zero, small messages took 1.5 times as long.
/// No option sets them: to measure again, change them here, and run
/// `ddprun --standalone --nproc-per-node 2 --example allreduce -- --sizes 8,1K` with each build in turn, and with 4 ranks.
const SPIN: Duration = Duration::from_micros(1);
const YIELD: Duration = Duration::from_micros(50);

/// What a thread needs to wait.
pub(super) struct Waiter<'a> {
    pub(super) eventcount: &'a Eventcount,
    /// The group has failed.
    pub(super) closed: &'a AtomicBool,
    pub(super) deadline: Instant,
}

impl Waiter<'_> {
    /// Returns once `ready` is true, which is up to rank `peer`.
    pub(super) fn wait(&self, peer: usize, ready: impl Fn() -> bool) -> Result<(), TransportError> {
        /// Looks between two looks at the clock.
        const LOOKS: usize = 32;
        if ready() {
            return Ok(());
        }
        let start = Instant::now();
        let mut waited = Duration::ZERO;
        while waited < SPIN {
            for _ in 0..LOOKS {
                if ready() {
                    return Ok(());
                }
                std::hint::spin_loop();
            }
            self.check_closed(peer)?;
            waited = start.elapsed();
        }
        while waited < SPIN + YIELD {
            std::thread::yield_now();
            if ready() {
                return Ok(());
            }
            self.check_closed(peer)?;
            waited = start.elapsed();
        }
        let result = self.sleep(peer, ready);
        self.eventcount.awaited().store(NOBODY, Ordering::Relaxed);
        result
    }

    fn sleep(&self, peer: usize, ready: impl Fn() -> bool) -> Result<(), TransportError> {
        /// A peer that was killed between its change and the ring leaves only the change, which is found this often.
        const LONGEST: Duration = Duration::from_millis(100);
        loop {
            let rings = self.eventcount.rings().load(Ordering::Acquire);
            self.eventcount.awaited().store(peer as u32 + 1, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            if ready() {
                return Ok(());
            }
            self.check_closed(peer)?;
            let left = self.deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(TransportError::TimedOut { peers: vec![peer] });
            }
            sleep(self.eventcount.rings(), rings, left.min(LONGEST))?;
        }
    }

    fn check_closed(&self, peer: usize) -> Result<(), TransportError> {
        match self.closed.load(Ordering::Acquire) {
            false => Ok(()),
            true => Err(TransportError::Closed { peer, reason: "the group has ended".into() }),
        }
    }
}

/// Wakes the thread that sleeps on `word`, in any process.
fn wake(word: &AtomicU32) {
    // Nothing could be done about an error, and sleepers look again now and then.
    #[cfg(target_os = "linux")]
    let _ = rustix::thread::futex::wake(word, rustix::thread::futex::Flags::empty(), 1);
    #[cfg(not(target_os = "linux"))]
    let _ = word;
}

/// Sleeps for at most `longest`, under a second, while `word` is `value`.
#[cfg(target_os = "linux")]
fn sleep(word: &AtomicU32, value: u32, longest: Duration) -> Result<(), TransportError> {
    use rustix::io::Errno;
    use rustix::thread::futex;
    let timeout = futex::Timespec { tv_sec: 0, tv_nsec: i64::from(longest.subsec_nanos()) };
    match futex::wait(word, futex::Flags::empty(), value, Some(&timeout)) {
        Ok(()) | Err(Errno::AGAIN | Errno::INTR | Errno::TIMEDOUT) => Ok(()),
        Err(error) => Err(TransportError::System(format!("futex: {error}"))),
    }
}

/// Never called, since there are no segments on these systems.
#[cfg(not(target_os = "linux"))]
fn sleep(_: &AtomicU32, _: u32, longest: Duration) -> Result<(), TransportError> {
    std::thread::sleep(longest.min(Duration::from_millis(1)));
    Ok(())
}
