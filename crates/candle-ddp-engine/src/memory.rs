//! The bytes of tensors, locked only while they move.
//!
//! All views of a tensor share one lock. A call of the engine that held the lock while it waits for a peer would hold up
//! other calls on other slices of the memory, for which the peer may be waiting. So the algorithms work on [`Region`]s,
//! which are locked only while bytes move.
use crate::transport_error::TransportError;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Memory behind a lock, such as the storage of a tensor with its views: all that the engine knows of tensors.
///
/// An implementation may return less than the whole memory if it has become unreachable; the call then fails.
pub trait Memory: Sync {
    /// A number that identifies the lock while the memory lives. Threads that need two locks take them in this order.
    fn address(&self) -> usize;

    /// Waits for the lock for reading, at most for `patience` (`None`: not at all), and calls `work` with all bytes of the
    /// memory. Returns whether it got the lock. Must succeed if this thread already holds the lock for reading, even if
    /// another one waits for it.
    fn read(&self, patience: Option<Duration>, work: &mut dyn FnMut(&[u8])) -> bool;

    /// The same for writing.
    fn write(&self, patience: Option<Duration>, work: &mut dyn FnMut(&mut [u8])) -> bool;
}

/// State shared by the threads of one rank that wait for locks.
#[derive(Default)]
pub(crate) struct LockWaits {
    /// The group has ended, and no thread waits any more.
    ended: AtomicBool,
    /// The number of threads that have been waiting longer than candle's own operations should take.
    waiting: AtomicUsize,
}

impl LockWaits {
    /// Ends every wait, now and later.
    pub(crate) fn end(&self) {
        self.ended.store(true, Ordering::Release);
    }

    /// Whether a call of this rank is held up by a lock.
    pub(crate) fn any(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }
}

/// How long a call waits for a lock.
#[derive(Clone, Copy)]
pub(crate) struct Locking<'a> {
    pub(crate) waits: &'a LockWaits,
    pub(crate) deadline: Instant,
}

impl Locking<'_> {
    /// Calls `attempt` with the time that it may wait, until it succeeds.
    fn acquire(self, mut attempt: impl FnMut(Option<Duration>) -> bool) -> Result<(), TransportError> {
        /// The end of the group is noticed within this time. A waiting writer blocks new readers, so it also steps back
        /// this often.
        const SLICE: Duration = Duration::from_millis(100);
        const STEP_BACK: Duration = Duration::from_millis(1);
        if attempt(None) {
            return Ok(());
        }
        let mut counted = None;
        loop {
            let left = self.deadline.saturating_duration_since(Instant::now());
            if attempt(Some(left.min(SLICE))) {
                return Ok(());
            }
            if left.is_zero() {
                // The group ends with this call. Peers that ask before it has ended still learn what the call waited for.
                std::mem::forget(counted);
                return Err(TransportError::Locked);
            }
            if self.waits.ended.load(Ordering::Acquire) {
                return Err(TransportError::Locked);
            }
            counted.get_or_insert_with(|| Counted::new(&self.waits.waiting));
            std::thread::sleep(STEP_BACK);
        }
    }
}

/// Counts a waiting thread until it is dropped.
struct Counted<'a>(&'a AtomicUsize);

impl<'a> Counted<'a> {
    fn new(counter: &'a AtomicUsize) -> Self {
        counter.fetch_add(1, Ordering::Relaxed);
        Self(counter)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Some bytes of a [`Memory`], and how long to wait for its lock.
#[derive(Clone, Copy)]
pub(crate) struct Region<'a> {
    memory: &'a dyn Memory,
    start: usize,
    length: usize,
    locking: Locking<'a>,
}

impl<'a> Region<'a> {
    pub(crate) fn new(memory: &'a dyn Memory, range: Range<usize>, locking: Locking<'a>) -> Self {
        Self { memory, start: range.start, length: range.len(), locking }
    }

    pub(crate) fn len(self) -> usize {
        self.length
    }

    pub(crate) fn part(self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.length, "{range:?} of a region of {} bytes", self.length);
        Self { start: self.start + range.start, length: range.len(), ..self }
    }

    /// Calls `work`, which must not wait for anything, with the bytes for reading.
    pub(crate) fn read<R>(self, work: impl FnOnce(&[u8]) -> R) -> Result<R, TransportError> {
        if self.length == 0 {
            return Ok(work(&[]));
        }
        self.read_all(|bytes| Ok(work(self.of(bytes)?)))
    }

    /// Calls `work`, which must not wait for anything, with the bytes for writing.
    pub(crate) fn write<R>(self, work: impl FnOnce(&mut [u8]) -> R) -> Result<R, TransportError> {
        if self.length == 0 {
            return Ok(work(&mut []));
        }
        self.write_all(|bytes| Ok(work(bytes.get_mut(self.range()).ok_or_else(beyond)?)))
    }

    /// Calls `work`, which must not wait for anything, with its bytes for writing, and the bytes of `input` for reading.
    pub(crate) fn write_from<R>(
        self,
        input: Self,
        work: impl FnOnce(&mut [u8], &[u8]) -> R,
    ) -> Result<R, TransportError> {
        if self.length == 0 || input.length == 0 {
            return self.write(|output| input.read(|input| work(output, input)))?;
        }
        if self.shares_lock(input) {
            return self.write_all(|bytes| {
                let (output, input) = two(bytes, self.range(), input.range()).ok_or_else(beyond)?;
                Ok(work(output, input))
            });
        }
        // Locks in the order of their addresses, so that two threads never wait for each other.
        if self.memory.address() < input.memory.address() {
            self.write(|output| input.read(|input| work(output, input)))?
        } else {
            input.read(|input| self.write(|output| work(output, input)))?
        }
    }

    /// Copies the bytes of `input`, which has the same length.
    pub(crate) fn copy_from(self, input: Self) -> Result<(), TransportError> {
        if self.shares_lock(input) && self.range() == input.range() {
            return Ok(());
        }
        self.write_from(input, |output, input| output.copy_from_slice(input))
    }

    pub(crate) fn shares_lock(self, other: Self) -> bool {
        self.memory.address() == other.memory.address()
    }

    /// The range of this region in its memory.
    pub(crate) fn range(self) -> Range<usize> {
        self.start..self.start + self.length
    }

    /// Calls `work`, which must not wait for anything, with all bytes of the memory for reading.
    pub(crate) fn read_all<R>(
        self,
        work: impl FnOnce(&[u8]) -> Result<R, TransportError>,
    ) -> Result<R, TransportError> {
        let (mut work, mut result) = (Some(work), None);
        self.locking.acquire(|patience| {
            self.memory.read(patience, &mut |bytes| result = work.take().map(|work| work(bytes)))
        })?;
        result.unwrap_or_else(|| Err(beyond()))
    }

    /// Calls `work`, which must not wait for anything, with all bytes of the memory for writing.
    pub(crate) fn write_all<R>(
        self,
        work: impl FnOnce(&mut [u8]) -> Result<R, TransportError>,
    ) -> Result<R, TransportError> {
        let (mut work, mut result) = (Some(work), None);
        self.locking.acquire(|patience| {
            self.memory.write(patience, &mut |bytes| result = work.take().map(|work| work(bytes)))
        })?;
        result.unwrap_or_else(|| Err(beyond()))
    }

    /// The bytes of this region in all `bytes` of its memory.
    pub(crate) fn of(self, bytes: &[u8]) -> Result<&[u8], TransportError> {
        bytes.get(self.range()).ok_or_else(beyond)
    }
}

fn beyond() -> TransportError {
    TransportError::System("a tensor's layout reaches beyond its storage".into())
}

/// Cuts consecutive parts out of the bytes of a storage.
pub(crate) struct Cut<'a> {
    rest: &'a mut [u8],
    /// The offset of `rest` in the storage.
    position: usize,
}

impl<'a> Cut<'a> {
    pub(crate) fn new(bytes: &'a mut [u8]) -> Self {
        Self { rest: bytes, position: 0 }
    }

    /// The bytes in `range`, which must follow the parts taken before.
    pub(crate) fn take(&mut self, range: Range<usize>) -> Option<&'a mut [u8]> {
        let skipped = range.start.checked_sub(self.position)?;
        if skipped.checked_add(range.len())? > self.rest.len() {
            return None;
        }
        let (taken, rest) = std::mem::take(&mut self.rest).split_at_mut(skipped + range.len());
        (self.rest, self.position) = (rest, range.end);
        taken.get_mut(skipped..)
    }
}

/// The bytes of two ranges that do not overlap: the first for writing, the second for reading.
fn two(bytes: &mut [u8], output: Range<usize>, input: Range<usize>) -> Option<(&mut [u8], &[u8])> {
    if output.end <= input.start {
        let (low, high) = bytes.split_at_mut_checked(input.start)?;
        Some((low.get_mut(output)?, high.get(..input.len())?))
    } else {
        let (low, high) = bytes.split_at_mut_checked(output.start)?;
        Some((high.get_mut(..output.len())?, low.get(input)?))
    }
}

/// Memory for tests.
#[cfg(test)]
pub(crate) mod buffer {
    use super::*;
    use parking_lot::RwLock;

    #[derive(Default)]
    pub(crate) struct Buffer(pub(crate) RwLock<Vec<u8>>);

    impl Buffer {
        pub(crate) fn new(bytes: impl Into<Vec<u8>>) -> Self {
            Self(RwLock::new(bytes.into()))
        }

        pub(crate) fn bytes(&self) -> Vec<u8> {
            self.0.read().clone()
        }
    }

    impl Memory for Buffer {
        fn address(&self) -> usize {
            std::ptr::from_ref(self).addr()
        }

        fn read(&self, patience: Option<Duration>, work: &mut dyn FnMut(&[u8])) -> bool {
            let guard = self.0.try_read_recursive_for(patience.unwrap_or_default());
            guard.map(|bytes| work(&bytes)).is_some()
        }

        fn write(&self, patience: Option<Duration>, work: &mut dyn FnMut(&mut [u8])) -> bool {
            self.0.try_write_for(patience.unwrap_or_default()).map(|mut bytes| work(&mut bytes)).is_some()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::buffer::Buffer;
    use super::*;

    fn soon(waits: &LockWaits) -> Locking<'_> {
        Locking { waits, deadline: Instant::now() + Duration::from_secs(120) }
    }

    fn all<'a>(buffer: &'a Buffer, locking: Locking<'a>) -> Region<'a> {
        Region::new(buffer, 0..buffer.0.read_recursive().len(), locking)
    }

    #[test]
    fn a_part_gives_its_own_bytes() {
        let (waits, buffer) = (LockWaits::default(), Buffer::new([0, 1, 2, 3, 4, 5]));
        let region = Region::new(&buffer, 2..4, soon(&waits));
        region.write(|bytes| bytes[0] = 20).unwrap();
        region.read(|bytes| assert_eq!(bytes, [20, 3])).unwrap();
        region.part(1..2).read(|bytes| assert_eq!(bytes, [3])).unwrap();
        assert_eq!(buffer.bytes(), [0, 1, 20, 3, 4, 5]);
    }

    #[test]
    fn nothing_beyond_the_memory_is_reached() {
        let (waits, buffer, other) = (LockWaits::default(), Buffer::new([0; 4]), Buffer::new([0; 8]));
        let [region, fits] = [&buffer, &other].map(|buffer| Region::new(buffer, 2..6, soon(&waits)));
        let is_refused = |result: Result<(), _>| assert!(matches!(result, Err(TransportError::System(_))));
        is_refused(region.read(|_| ()));
        is_refused(region.write(|_| ()));
        is_refused(region.copy_from(fits));
        is_refused(fits.copy_from(region));
        is_refused(region.part(0..2).copy_from(region.part(2..4)));
    }

    #[test]
    fn empty_regions_have_no_bytes() {
        let (waits, buffer) = (LockWaits::default(), Buffer::default());
        let region = all(&buffer, soon(&waits));
        assert_eq!(region.write(|bytes| bytes.len()).unwrap(), 0);
        assert_eq!(region.read(|bytes| bytes.len()).unwrap(), 0);
        assert_eq!(region.write_from(region, |output, input| output.len() + input.len()).unwrap(), 0);
    }

    #[test]
    fn parts_of_one_memory_and_of_two_are_copied() {
        let waits = LockWaits::default();
        let [a, b] = [[0, 1, 2, 3], [10, 11, 12, 13]].map(Buffer::new);
        let [a_region, b_region] = [&a, &b].map(|buffer| all(buffer, soon(&waits)));
        a_region.part(0..1).copy_from(a_region.part(2..3)).unwrap();
        a_region.part(3..4).copy_from(a_region.part(1..2)).unwrap();
        a_region.copy_from(a_region).unwrap();
        assert_eq!(a.bytes(), [2, 1, 2, 1]);
        a_region.part(1..3).copy_from(b_region.part(0..2)).unwrap();
        b_region.part(2..4).copy_from(a_region.part(0..2)).unwrap();
        assert_eq!((a.bytes(), b.bytes()), (vec![2, 10, 11, 1], vec![10, 11, 2, 10]));
    }

    /// Another read lock succeeds while the same thread holds one; a write lock does not.
    #[test]
    fn a_lock_that_is_held_is_waited_for_until_the_deadline() {
        let (waits, buffer) = (LockWaits::default(), Buffer::new([0; 3]));
        let locking = Locking { deadline: Instant::now() + Duration::from_millis(150), ..soon(&waits) };
        let region = all(&buffer, locking);
        let guard = buffer.0.read();
        region.read(|_| ()).unwrap();
        assert!(!waits.any());
        assert!(matches!(region.write(|_| ()), Err(TransportError::Locked)));
        assert!(waits.any(), "until the group ends, peers can ask what the call waited for");
        let region = all(&buffer, soon(&waits));
        waits.end();
        assert!(matches!(region.write(|_| ()), Err(TransportError::Locked)));
        drop(guard);
        region.write(|_| ()).unwrap();
    }
}
