//! The bytes of candle tensors, locked only while they move.
//!
//! candle keeps a tensor's storage behind a lock that all its views share. A call of the engine that held the lock
//! while it waits for a peer would hold up other calls on other slices of the storage, for which the peer may be
//! waiting. So the algorithms work on [`Region`]s, which are locked only while bytes move.
use super::transport_error::TransportError;
use crate::backend::bytes::{all_bytes, all_bytes_mut};
use crate::backend::check::byte_range;
use candle_core::{Storage, StorageMutRef, StorageRef, Tensor};
use parking_lot::RwLock;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// State shared by the threads of one rank that wait for locks.
#[derive(Default)]
pub(super) struct LockWaits {
    /// The group has ended, and no thread waits any more.
    ended: AtomicBool,
    /// The number of threads that have been waiting longer than candle's own operations should take.
    waiting: AtomicUsize,
}

impl LockWaits {
    /// Ends every wait, now and later.
    pub(super) fn end(&self) {
        self.ended.store(true, Ordering::Release);
    }

    /// Whether a call of this rank is held up by a lock.
    pub(super) fn any(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }
}

/// How long a call waits for a lock.
#[derive(Clone, Copy)]
pub(super) struct Locking<'a> {
    pub(super) waits: &'a LockWaits,
    pub(super) deadline: Instant,
}

impl Locking<'_> {
    /// Calls `attempt` with the time that it may take, until it returns a guard.
    fn acquire<G>(self, attempt: impl Fn(Duration) -> Option<G>) -> Result<G, TransportError> {
        /// The end of the group is noticed within this time. A waiting writer blocks new readers, so it also steps back
        /// this often.
        const SLICE: Duration = Duration::from_millis(100);
        const STEP_BACK: Duration = Duration::from_millis(1);
        let mut counted = None;
        loop {
            let left = self.deadline.saturating_duration_since(Instant::now());
            if let Some(guard) = attempt(left.min(SLICE)) {
                return Ok(guard);
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

/// Some bytes of a tensor.
#[derive(Clone, Copy)]
pub(super) struct Region<'a> {
    lock: &'a RwLock<Storage>,
    /// The offset of the first byte in the storage.
    start: usize,
    length: usize,
    locking: Locking<'a>,
}

impl<'a> Region<'a> {
    /// All of `tensor`, which has been [checked](super::check): contiguous, on the CPU, of a supported dtype.
    pub(super) fn of(tensor: &'a Tensor, locking: Locking<'a>) -> Self {
        let Range { start, end } = byte_range(tensor);
        // candle itself locks only for reading, and without a time limit.
        let lock = StorageRef::rwlock(&tensor.storage_and_layout().0);
        Self { lock, start, length: end - start, locking }
    }

    pub(super) fn len(self) -> usize {
        self.length
    }

    pub(super) fn part(self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.length, "{range:?} of a region of {} bytes", self.length);
        Self { start: self.start + range.start, length: range.len(), ..self }
    }

    /// Calls `work`, which must not wait for anything, with the bytes for reading.
    pub(super) fn read<R>(self, work: impl FnOnce(&[u8]) -> R) -> Result<R, TransportError> {
        if self.length == 0 {
            return Ok(work(&[]));
        }
        Ok(work(self.bytes(&*self.lock()?)?))
    }

    /// Calls `work`, which must not wait for anything, with the bytes for writing.
    pub(super) fn write<R>(self, work: impl FnOnce(&mut [u8]) -> R) -> Result<R, TransportError> {
        if self.length == 0 {
            return Ok(work(&mut []));
        }
        let mut guard = self.lock_mut()?;
        let bytes = bytes_mut(&mut guard)?.get_mut(self.range()).ok_or_else(beyond)?;
        Ok(work(bytes))
    }

    /// Calls `work`, which must not wait for anything, with the bytes for writing and those of `input` for reading.
    pub(super) fn write_from<R>(
        self,
        input: Self,
        work: impl FnOnce(&mut [u8], &[u8]) -> R,
    ) -> Result<R, TransportError> {
        if self.length == 0 || input.length == 0 {
            return self.write(|output| input.read(|input| work(output, input)))?;
        }
        let (mut output_guard, input_guard);
        if self.shares_lock(input) {
            output_guard = self.lock_mut()?;
            let (output, input) = two(bytes_mut(&mut output_guard)?, self.range(), input.range()).ok_or_else(beyond)?;
            return Ok(work(output, input));
        }
        // Locks in candle's order, so that two threads never wait for each other.
        if std::ptr::from_ref(self.lock).addr() < std::ptr::from_ref(input.lock).addr() {
            output_guard = self.lock_mut()?;
            input_guard = input.lock()?;
        } else {
            input_guard = input.lock()?;
            output_guard = self.lock_mut()?;
        }
        let output = bytes_mut(&mut output_guard)?.get_mut(self.range()).ok_or_else(beyond)?;
        Ok(work(output, input.bytes(&input_guard)?))
    }

    /// Copies the bytes of `input`, which has the same length.
    pub(super) fn copy_from(self, input: Self) -> Result<(), TransportError> {
        if self.shares_lock(input) && self.range() == input.range() {
            return Ok(());
        }
        self.write_from(input, |output, input| output.copy_from_slice(input))
    }

    pub(super) fn shares_lock(self, other: Self) -> bool {
        std::ptr::eq(self.lock, other.lock)
    }

    /// The range of this region within the [bytes] of its storage.
    pub(super) fn range(self) -> Range<usize> {
        self.start..self.start + self.length
    }

    /// Locks the storage for reading.
    pub(super) fn lock(self) -> Result<StorageRef<'a>, TransportError> {
        // The thread may already hold the lock for reading; a waiting writer must not come in between.
        match self.lock.try_read_recursive() {
            Some(guard) => Ok(guard),
            None => self.locking.acquire(|time| self.lock.try_read_recursive_for(time)),
        }
    }

    /// Locks the storage for writing.
    pub(super) fn lock_mut(self) -> Result<StorageMutRef<'a>, TransportError> {
        match self.lock.try_write() {
            Some(guard) => Ok(guard),
            None => self.locking.acquire(|time| self.lock.try_write_for(time)),
        }
    }

    /// The bytes of this region in its locked storage.
    pub(super) fn bytes(self, storage: &Storage) -> Result<&[u8], TransportError> {
        bytes(storage)?.get(self.range()).ok_or_else(beyond)
    }
}

fn beyond() -> TransportError {
    TransportError::System("a tensor's layout reaches beyond its storage".into())
}

/// Cuts consecutive parts out of the bytes of a storage.
pub(super) struct Cut<'a> {
    rest: &'a mut [u8],
    /// The offset of `rest` in the storage.
    position: usize,
}

impl<'a> Cut<'a> {
    pub(super) fn new(bytes: &'a mut [u8]) -> Self {
        Self { rest: bytes, position: 0 }
    }

    /// The bytes in `range`, which must follow the parts taken before.
    pub(super) fn take(&mut self, range: Range<usize>) -> Option<&'a mut [u8]> {
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

/// All of a storage's bytes.
fn bytes(storage: &Storage) -> Result<&[u8], TransportError> {
    all_bytes(storage).ok_or_else(foreign)
}

/// All of a storage's bytes, for writing.
pub(super) fn bytes_mut(storage: &mut Storage) -> Result<&mut [u8], TransportError> {
    all_bytes_mut(storage).ok_or_else(foreign)
}

fn foreign() -> TransportError {
    TransportError::System("a tensor is not on the CPU, or its dtype is not supported".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};

    fn soon(waits: &LockWaits) -> Locking<'_> {
        Locking { waits, deadline: Instant::now() + Duration::from_secs(120) }
    }

    #[test]
    fn a_view_gives_its_own_part_of_the_storage() {
        let waits = LockWaits::default();
        let tensor = Tensor::arange(0_i64, 6, &Device::Cpu).unwrap().reshape((3, 2)).unwrap();
        let row = tensor.narrow(0, 1, 1).unwrap();
        let region = Region::of(&row, soon(&waits));
        region.write(|bytes| bytemuck::cast_slice_mut::<u8, i64>(bytes)[0] = 20).unwrap();
        region.read(|bytes| assert_eq!(bytemuck::cast_slice::<u8, i64>(bytes), [20, 3])).unwrap();
        region.part(8..16).read(|bytes| assert_eq!(bytemuck::cast_slice::<u8, i64>(bytes), [3])).unwrap();
        assert_eq!(tensor.to_vec2::<i64>().unwrap(), [[0, 1], [20, 3], [4, 5]]);
    }

    #[test]
    fn empty_tensors_have_no_bytes() {
        let waits = LockWaits::default();
        for shape in [vec![0], vec![2, 0], vec![0, 3]] {
            let tensor = Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
            let region = Region::of(&tensor, soon(&waits));
            assert_eq!(region.write(|bytes| bytes.len()).unwrap(), 0);
            assert_eq!(region.read(|bytes| bytes.len()).unwrap(), 0);
            assert_eq!(region.write_from(region, |output, input| output.len() + input.len()).unwrap(), 0);
        }
    }

    #[test]
    fn parts_of_one_storage_and_of_two_are_copied() {
        let waits = LockWaits::default();
        let [a, b] = [0_u8, 10].map(|from| Tensor::arange(from, from + 4, &Device::Cpu).unwrap());
        let [a_region, b_region] = [&a, &b].map(|tensor| Region::of(tensor, soon(&waits)));
        a_region.part(0..1).copy_from(a_region.part(2..3)).unwrap();
        a_region.part(3..4).copy_from(a_region.part(1..2)).unwrap();
        a_region.copy_from(a_region).unwrap();
        assert_eq!(a.to_vec1::<u8>().unwrap(), [2, 1, 2, 1]);
        a_region.part(1..3).copy_from(b_region.part(0..2)).unwrap();
        b_region.part(2..4).copy_from(a_region.part(0..2)).unwrap();
        assert_eq!((a.to_vec1().unwrap(), b.to_vec1().unwrap()), (vec![2_u8, 10, 11, 1], vec![10_u8, 11, 2, 10]));
    }

    /// Another read lock succeeds while the same thread holds one; a write lock does not.
    #[test]
    fn a_lock_that_is_held_is_waited_for_until_the_deadline() {
        let waits = LockWaits::default();
        let tensor = Tensor::zeros(3, DType::F32, &Device::Cpu).unwrap();
        let locking = Locking { deadline: Instant::now() + Duration::from_millis(150), ..soon(&waits) };
        let region = Region::of(&tensor, locking);
        let guard = tensor.storage_and_layout();
        region.read(|_| ()).unwrap();
        assert!(!waits.any());
        assert!(matches!(region.write(|_| ()), Err(TransportError::Locked)));
        assert!(waits.any(), "until the group ends, peers can ask what the call waited for");
        let region = Region::of(&tensor, soon(&waits));
        waits.end();
        assert!(matches!(region.write(|_| ()), Err(TransportError::Locked)));
        drop(guard);
        region.write(|_| ()).unwrap();
    }
}
