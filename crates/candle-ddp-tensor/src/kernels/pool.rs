//! The driver's pool of memory.
use crate::Result;
use candle_core::Device;
use candle_ddp_env::PROCESS;
use cudarc::driver::result;
use cudarc::driver::sys::CUmemPool_attribute;

/// Set to 0, lets the driver return freed memory to the system.
const KEEP_MEMORY: &str = "CANDLE_DDP_KEEP_GPU_MEMORY";

/// Lets the driver keep memory that was freed on `device`, if that is a GPU, for the next tensors. By default it returns it to the
/// system whenever a stream or an event is waited for, and obtaining it again takes many milliseconds for each gigabyte. Other processes
/// cannot use it meanwhile. If the driver refuses, programs are only slower.
///
/// # Errors
/// Returns an error if the environment says neither yes nor no.
pub fn keep_memory(device: &Device) -> Result<()> {
    let Device::Cuda(device) = device else { return Ok(()) };
    if PROCESS.switch(KEEP_MEMORY)? == Some(false) {
        return Ok(());
    }
    let stream = device.cuda_stream();
    if !stream.context().has_async_alloc() {
        return Ok(());
    }
    let mut bytes = u64::MAX;
    // SAFETY: the device exists, its pool lives as long as the process, and the attribute is such a number.
    let set = unsafe {
        result::device::get_mem_pool(stream.context().cu_device()).and_then(|pool| {
            let threshold = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
            result::mem_pool::set_attribute(pool, threshold, (&raw mut bytes).cast())
        })
    };
    if let Err(error) = set {
        log::debug!("the driver's pool of memory keeps its settings: {error}");
    }
    Ok(())
}

/// The most memory that tensors on `device` have had at a time; `None` if it is no GPU, or has no pool.
pub fn peak_memory(device: &Device) -> Result<Option<u64>> {
    let Device::Cuda(device) = device else { return Ok(None) };
    let stream = device.cuda_stream();
    if !stream.context().has_async_alloc() {
        return Ok(None);
    }
    let mut bytes = 0u64;
    // SAFETY: the device exists, its pool lives as long as the process, and the attribute is such a number.
    unsafe {
        result::device::get_mem_pool(stream.context().cu_device()).and_then(|pool| {
            let high = CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH;
            result::mem_pool::get_attribute(pool, high, (&raw mut bytes).cast())
        })
    }
    .map_err(|error| candle_core::Error::Cuda(Box::new(error)))?;
    Ok(Some(bytes))
}
