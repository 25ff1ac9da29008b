//! Memory in which the kernels of one operation leave results for the next ones. It is kept for later operations on the same
//! stream, which come after those that use it now: an allocation for each would take longer than many kernels.
use super::address::stream_of;
use super::launches::Address;
use super::layer::Output;
use crate::Result;
use candle_core::{CudaDevice, DType};
use std::cell::RefCell;
use std::collections::HashMap;

/// How many pieces of memory a thread keeps for each stream. Few operations need more at a time.
const KEPT: usize = 4;
/// Larger pieces are freed after use.
const LARGEST: usize = 64 << 20;
/// Smaller pieces are not worth having.
const LEAST: usize = 4 << 10;

thread_local! {
    /// The memory of this thread that is not in use, by context and stream. Their streams' handles stay taken as long as it is here.
    static FREE: RefCell<HashMap<(usize, usize), Vec<Output>>> = RefCell::default();
}

/// Memory for the kernels of one operation, whose content is undefined until they have written it.
#[derive(Debug)]
pub struct Temporary {
    stream: (usize, usize),
    /// Always there, until it is dropped.
    memory: Option<Output>,
}

impl Temporary {
    /// Memory for at least `count` elements of `dtype`.
    pub fn new(device: &CudaDevice, dtype: DType, count: usize) -> Result<Self> {
        let bytes = count * dtype.size_in_bytes();
        let stream = stream_of(device);
        let memory = match FREE.with_borrow_mut(|free| take(free.entry(stream).or_default(), bytes)) {
            Some(memory) => memory,
            // Rounded up, so that it serves others too.
            None if bytes <= LARGEST => Output::new(device, DType::U8, bytes.next_power_of_two().max(LEAST))?,
            None => Output::new(device, DType::U8, bytes)?,
        };
        Ok(Self { stream, memory: Some(memory) })
    }

    pub fn address(&self) -> Result<Address<'_>> {
        self.memory.as_ref().map_or(Ok(Address::NONE), Output::address)
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let Some(memory) = self.memory.take().filter(|memory| memory.elements() <= LARGEST) else { return };
        // At the end of the thread, what it kept may be gone already.
        let _ = FREE.try_with(|free| {
            let mut free = free.borrow_mut();
            let free = free.entry(self.stream).or_default();
            free.push(memory);
            if free.len() > KEPT {
                free.sort_by_key(Output::elements);
                free.remove(0);
            }
        });
    }
}

/// Takes the smallest piece of at least `bytes`.
fn take(free: &mut Vec<Output>, bytes: usize) -> Option<Output> {
    let fitting = (0..free.len()).filter(|index| free[*index].elements() >= bytes);
    let smallest = fitting.min_by_key(|index| free[*index].elements())?;
    Some(free.swap_remove(smallest))
}
