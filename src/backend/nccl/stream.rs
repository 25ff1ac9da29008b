//! The stream that collectives run on, and the fences between it and candle's.
use super::calls::Target;
use crate::kernels;
use crate::panic::lock;
use candle_core::{CudaDevice, Device};
use candle_ddp_engine::device_group::{DeviceGroup, Fence, Order, Preparing};
use cudarc::driver::sys::{self, CUevent_flags, CUresult};
use cudarc::driver::{CudaContext, CudaEvent, CudaSlice, CudaStream, DevicePtr, DriverError, result};
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

/// Events that nothing refers to.
type Unused = Arc<Mutex<Vec<Arc<CudaEvent>>>>;

/// An event that is recorded again for another purpose once it is dropped, since the driver takes microseconds to create one and to
/// destroy it. A stream that waits for an event waits for the last record before that.
pub(super) struct Event {
    event: Arc<CudaEvent>,
    unused: Unused,
}

impl Deref for Event {
    type Target = CudaEvent;

    fn deref(&self) -> &CudaEvent {
        &self.event
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        lock(&self.unused).push(Arc::clone(&self.event));
    }
}

/// A stream for NCCL, separate from candle's, on the same device.
///
/// candle's stream usually is each thread's own default stream, so statements about it concern the calling thread.
#[derive(Clone)]
pub(super) struct Streams {
    /// The device's primary context, like candle's, but through a separate object. If candle's object saw a second
    /// stream, it would track every tensor with events, which does not order tensors across streams anyway.
    context: Arc<CudaContext>,
    candle: Arc<CudaStream>,
    pub(super) nccl: Arc<CudaStream>,
    /// Whether candle's stream is the same for all threads.
    is_shared: bool,
    high_priority: bool,
    /// For events without times.
    unused: Unused,
}

impl Streams {
    pub(super) fn new(device: &CudaDevice, high_priority: bool) -> Result<Self, DriverError> {
        let candle = device.cuda_stream();
        let context = CudaContext::new(candle.context().ordinal())?;
        // SAFETY: this engine orders its streams itself. Without it, the first stream would wait for everything on the GPU, such as
        // calls of another group.
        unsafe { context.disable_event_tracking() };
        let nccl = new_stream(&context, high_priority)?;
        let is_shared = kernels::has_own_stream(&Device::Cuda(device.clone())).unwrap_or(false);
        Ok(Self { context, candle, nccl, is_shared, high_priority, unused: Unused::default() })
    }

    /// The same device with another stream for NCCL.
    pub(super) fn another(&self) -> Result<Self, DriverError> {
        Ok(Self { nccl: new_stream(&self.context, self.high_priority)?, ..self.clone() })
    }

    /// The number of the device.
    pub(super) fn device(&self) -> usize {
        self.context.ordinal()
    }

    /// Binds the device to the calling thread, as NCCL requires.
    pub(super) fn bind(&self) -> Result<(), DriverError> {
        self.context.bind_to_thread()
    }

    /// The device's PCI bus id, as `nvidia-smi` shows it.
    pub(super) fn pci_bus_id(&self) -> Result<String, DriverError> {
        use cudarc::driver::sys::CUdevice_attribute as Attribute;
        let domain = self.context.attribute(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)?;
        let bus = self.context.attribute(Attribute::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)?;
        let device = self.context.attribute(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)?;
        Ok(format!("{domain:04x}:{bus:02x}:{device:02x}"))
    }

    pub(super) fn multiprocessors(&self) -> Result<u32, DriverError> {
        let count = self.context.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        Ok(count.unsigned_abs())
    }

    /// The kind of GPU, and the number by which the driver tells it, or an instance of it, from all others.
    pub(super) fn name_and_uuid(&self) -> Result<(String, String), DriverError> {
        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        // SAFETY: the device exists, and the number is written before the call returns. The older function does not tell instances.
        unsafe { sys::cuDeviceGetUuid_v2(&raw mut uuid, self.context.cu_device()) }.result()?;
        let uuid = uuid.bytes.map(|byte| format!("{:02x}", u8::from_ne_bytes(byte.to_ne_bytes())));
        Ok((self.context.name()?, uuid.concat()))
    }

    /// Returns memory that the driver keeps for tensors, and that none uses, to the GPU: NCCL's does not come from there.
    pub(super) fn trim_pool(&self) {
        self.keep_in_pool(|_| 0);
    }

    /// Returns as much of that as makes `reserve` bytes free, if less is.
    pub(super) fn make_room(&self, reserve: u64) {
        match self.context.mem_get_info() {
            Ok((free, _)) if (free as u64) < reserve => {
                self.keep_in_pool(|held| held.saturating_sub(reserve - free as u64) as usize);
            }
            Ok(_) => {}
            Err(error) => log::debug!("the driver does not say how much memory is free: {}", super::cuda_error(error)),
        }
    }

    /// Returns unused memory beyond so many bytes, which depend on how many the pool holds.
    fn keep_in_pool(&self, kept: impl FnOnce(u64) -> usize) {
        let mut held = 0u64;
        // SAFETY: the device exists, its pool lives as long as the process, and the attribute is such a number.
        let trimmed = unsafe {
            result::device::get_mem_pool(self.context.cu_device()).and_then(|pool| {
                let reserved = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT;
                result::mem_pool::get_attribute(pool, reserved, (&raw mut held).cast())?;
                result::mem_pool::trim_to(pool, kept(held))
            })
        };
        if let Err(error) = trimmed {
            log::debug!("the driver's pool of memory is not trimmed: {}", super::cuda_error(error));
        }
    }

    /// One element of zero, used on NCCL's stream only.
    pub(super) fn token(&self) -> Result<CudaSlice<f32>, DriverError> {
        self.nccl.alloc_zeros(1)
    }

    pub(super) fn address<T>(&self, memory: &CudaSlice<T>) -> u64 {
        memory.device_ptr(&self.nccl).0
    }

    pub(super) fn target(&self) -> Target {
        Target(self.nccl.cu_stream().cast())
    }

    /// The first fence: an event after everything that this thread has given to candle so far.
    pub(super) fn mark(&self) -> Result<Event, DriverError> {
        self.mark_on(&self.candle, false)
    }

    fn mark_on(&self, stream: &CudaStream, timed: bool) -> Result<Event, DriverError> {
        let unused = if timed { Unused::default() } else { Arc::clone(&self.unused) };
        let kept = lock(&unused).pop();
        let event = match kept {
            Some(event) => event,
            None => Arc::new(self.context.new_event(timed.then_some(CUevent_flags::CU_EVENT_DEFAULT))?),
        };
        event.record(stream)?;
        Ok(Event { event, unused })
    }

    /// Makes later work on NCCL's stream wait for `ready`.
    pub(super) fn after(&self, ready: &CudaEvent) -> Result<(), DriverError> {
        self.nccl.wait(ready)
    }

    /// Records the start of the call of `done`, if its time is measured.
    pub(super) fn begin(&self, done: &Done) -> Result<(), DriverError> {
        if done.clock.is_some() {
            let _ = done.begun.set(self.mark_nccl(true)?);
        }
        Ok(())
    }

    /// The second fence: an event after everything on NCCL's stream.
    pub(super) fn end(&self, done: &Done) -> Result<(), DriverError> {
        let _ = done.mark.set(self.mark_nccl(done.clock.is_some())?);
        Ok(())
    }

    fn mark_nccl(&self, timed: bool) -> Result<Event, DriverError> {
        self.mark_on(&self.nccl, timed)
    }

    /// Relates the GPU's clock to the host's. First waits for NCCL's stream.
    pub(super) fn clock(&self) -> Result<Clock, DriverError> {
        const TRIES: usize = 10;
        self.nccl.synchronize()?;
        let mut best: Option<(Duration, Clock)> = None;
        for _ in 0..TRIES {
            let before = Instant::now();
            let origin = self.mark_nccl(true)?;
            origin.synchronize()?;
            // The host may have been delayed, so the quickest try is the most accurate.
            let took = before.elapsed();
            if best.as_ref().is_none_or(|(least, _)| took < *least) {
                best = Some((took, Clock { origin, at: before + took / 2 }));
            }
        }
        best.map(|(_, clock)| clock).ok_or(DriverError(CUresult::CUDA_ERROR_UNKNOWN))
    }

    /// Makes this thread's later work in candle wait for a call that is on the stream. The host does not wait.
    pub(super) fn hand_over(&self, done: &Done) -> Result<(), DriverError> {
        let Some(mark) = done.mark() else { return Ok(()) };
        self.candle.wait(mark)?;
        if self.is_shared && done.awaited.load(Ordering::Relaxed) == 0 {
            done.awaited.store(DeviceGroup::number(), Ordering::SeqCst);
        }
        Ok(())
    }
}

fn new_stream(context: &Arc<CudaContext>, high_priority: bool) -> Result<Arc<CudaStream>, DriverError> {
    if !high_priority {
        return context.new_stream();
    }
    context.bind_to_thread()?;
    let (_, highest) = result::stream::get_priority_range()?;
    context.new_stream_with_priority(highest)
}

/// An event on the GPU, and when the host saw the GPU pass it.
pub(super) struct Clock {
    origin: Event,
    at: Instant,
}

impl Clock {
    /// Whether it has become inaccurate: the GPU's times are milliseconds in f32, whose error reaches a microsecond
    /// after ten seconds.
    pub(super) fn is_old(&self) -> bool {
        self.at.elapsed() >= Duration::from_secs(10)
    }

    /// When the GPU passed `mark`, which must have happened already.
    fn time(&self, mark: &CudaEvent) -> Option<Instant> {
        let milliseconds = self.origin.elapsed_ms(mark).ok()?;
        Some(self.at + Duration::try_from_secs_f32(milliseconds / 1e3).ok()?)
    }
}

/// The second fence of a call.
pub(super) struct Done {
    /// Empty until the call is on the stream.
    mark: OnceLock<Event>,
    /// The event at the start of the call; set if there is a clock.
    begun: OnceLock<Event>,
    clock: Option<Arc<Clock>>,
    /// Whether only its `Work` still holds the call.
    started: AtomicBool,
    /// See [`Order`]; 0 if there is no number.
    behind: AtomicU64,
    awaited: AtomicU64,
}

impl Done {
    pub(super) fn new(clock: Option<Arc<Clock>>) -> Self {
        let (started, [behind, awaited]) = (AtomicBool::new(false), [(); 2].map(|()| AtomicU64::new(0)));
        Self { mark: OnceLock::new(), begun: OnceLock::new(), clock, started, behind, awaited }
    }

    /// Notes that the first fence of the call is recorded after this.
    pub(super) fn set_prepared(&self, preparing: &Preparing) {
        self.behind.store(preparing.behind, Ordering::SeqCst);
    }

    pub(super) fn mark(&self) -> Option<&CudaEvent> {
        self.mark.get().map(Deref::deref)
    }

    /// Call when the thread that started the call no longer holds its tensors, or when its `Work` was dropped and
    /// nothing will wait for it.
    pub(super) fn set_started(&self) {
        self.started.store(true, Ordering::Release);
    }

    /// The event, once the call was started.
    pub(super) fn started(&self) -> Option<&CudaEvent> {
        if self.started.load(Ordering::Acquire) { self.mark() } else { None }
    }

    /// When the call began and ended on the GPU, if it is complete and its time was measured.
    pub(super) fn span(&self) -> Option<(Instant, Instant)> {
        let (clock, begun, mark) = (self.clock.as_ref()?, self.begun.get()?, self.mark()?);
        self.is_over().ok()?.then_some(())?;
        Some((clock.time(begun)?, clock.time(mark)?))
    }
}

impl Fence for Done {
    fn is_over(&self) -> Result<bool, String> {
        self.mark().map_or(Ok(false), |mark| mark.try_is_complete().map_err(super::cuda_error))
    }

    fn order(&self) -> Order {
        let awaited = Some(self.awaited.load(Ordering::SeqCst)).filter(|number| *number > 0);
        Order { behind: self.behind.load(Ordering::SeqCst), awaited }
    }
}
