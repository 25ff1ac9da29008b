//! Numbers of kernels that the host reads while later work runs: it waits for their copy, and not for all work that was launched.
use super::address::stream_of;
use crate::{Error, Result};
use candle_core::CudaDevice;
use cudarc::driver::{CudaEvent, CudaStream, DriverError, PinnedHostSlice, result};
use std::cell::RefCell;
use std::collections::HashMap;

/// The numbers that are read.
const LENGTH: usize = 2;

/// Pinned memory, and the event at the end of the last copy to it.
#[derive(Debug)]
struct Place {
    memory: PinnedHostSlice<f64>,
    copied: CudaEvent,
}

impl Drop for Place {
    fn drop(&mut self) {
        // An error says that the GPU has failed, and copies nothing any more.
        let _ = self.copied.synchronize();
    }
}

thread_local! {
    /// The places that nobody uses, by context and stream: one more copy to them comes after the last.
    static FREE: RefCell<HashMap<(usize, usize), Vec<Place>>> = RefCell::default();
}

/// Two numbers on their way to the host.
#[derive(Debug)]
pub struct Incoming {
    stream: (usize, usize),
    /// Always there, until it is dropped.
    place: Option<Place>,
}

fn failure(operation: &str, error: DriverError) -> Error {
    Error::Candle(candle_core::Error::Cuda(Box::new(error)).context(format!("{operation} for numbers from a GPU")))
}

impl Incoming {
    /// Copies the numbers at this address after all launched work. Does not wait.
    pub(super) fn new(device: &CudaDevice, numbers: u64) -> Result<Self> {
        let (key, stream) = (stream_of(device), device.cuda_stream());
        let free = FREE.with_borrow_mut(|free| free.entry(key).or_default().pop());
        let mut place = free.map_or_else(|| Place::new(&stream), Ok)?;
        let memory = place.memory.as_mut_slice().map_err(|error| failure("finding pinned memory", error))?;
        // SAFETY: both have as many numbers. Those of the GPU are freed on the same stream, and the place waits for the copy before its
        // memory is read or freed.
        unsafe { result::memcpy_dtoh_async(memory, numbers, stream.cu_stream()) }
            .map_err(|error| failure("copying", error))?;
        if let Err(error) = place.copied.record(&stream) {
            // Without the event nothing would wait for the copy.
            let _ = stream.synchronize();
            return Err(failure("recording an event", error));
        }
        Ok(Self { stream: key, place: Some(place) })
    }

    /// Waits for the numbers.
    pub fn receive(self) -> Result<[f64; LENGTH]> {
        let Some(place) = &self.place else { return Ok([f64::NAN; LENGTH]) };
        place.copied.synchronize().map_err(|error| failure("waiting", error))?;
        let memory = place.memory.as_slice().map_err(|error| failure("reading pinned memory", error))?;
        Ok([memory[0], memory[1]])
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        let Some(place) = self.place.take() else { return };
        // At the end of the thread, the places may be gone already.
        let _ = FREE.try_with(|free| free.borrow_mut().entry(self.stream).or_default().push(place));
    }
}

impl Place {
    fn new(stream: &CudaStream) -> Result<Self> {
        let context = stream.context();
        // SAFETY: any bits are numbers, and they are written before they are read.
        let memory = unsafe { context.alloc_pinned_with_flags::<f64>(LENGTH, 0) };
        let memory = memory.map_err(|error| failure("allocating pinned memory", error))?;
        let copied = context.new_event(None).map_err(|error| failure("making an event", error))?;
        Ok(Self { memory, copied })
    }
}
