//! The driver's pool of memory.
use candle_core::Device;
use cudarc::driver::result;
use cudarc::driver::sys::CUmemPool_attribute;

/// Set to 0, lets the driver return freed memory to the system.
const KEEP_MEMORY: &str = "CANDLE_DDP_KEEP_GPU_MEMORY";

/// Lets the driver keep memory that was freed on `device`, if that is a GPU, for the next tensors. By default it returns it to the
/// system whenever a stream or an event is waited for, and obtaining it again takes many milliseconds for each gigabyte. Other processes
/// cannot use it meanwhile. If the driver refuses, programs are only slower.
pub fn keep_memory(device: &Device) {
    let Device::Cuda(device) = device else { return };
    if std::env::var_os(KEEP_MEMORY).is_some_and(|value| value.is_empty() || value == "0") {
        return;
    }
    let stream = device.cuda_stream();
    if !stream.context().has_async_alloc() {
        return;
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
}
