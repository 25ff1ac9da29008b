//! Handles of CUDA's libraries, which every thread keeps for each stream.
use super::address::stream_of;
use crate::{Error, Result};
use candle_core::CudaDevice;
use cudarc::driver::CudaStream;
use std::cell::RefCell;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::thread::LocalKey;

/// A thread's handles by their streams, whose addresses stay taken as long as the handles hold the streams.
pub(super) type Handles<H> = RefCell<HashMap<(usize, usize), H>>;

/// Calls `f` with this thread's handle of `library` for the device's stream, whose context is bound.
pub(super) fn with_handle<H: 'static, T>(
    library: &'static str,
    handles: &'static LocalKey<Handles<H>>,
    new: impl FnOnce(Arc<CudaStream>) -> Result<H>,
    device: &CudaDevice,
    f: impl FnOnce(&mut H) -> Result<T>,
) -> Result<T> {
    let stream = device.cuda_stream();
    stream.context().bind_to_thread().map_err(|error| Error::Kernel {
        file: library,
        operation: "binding the context".into(),
        reason: error.to_string(),
    })?;
    handles.with_borrow_mut(|handles| {
        f(match handles.entry(stream_of(device)) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => entry.insert(new(stream)?),
        })
    })
}
