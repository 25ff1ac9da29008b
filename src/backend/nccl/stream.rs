//! The stream that collectives run on, and the fences between it and candle's.
use super::calls::Target;
use super::group::Fence;
use candle_core::CudaDevice;
use cudarc::driver::{CudaContext, CudaEvent, CudaSlice, CudaStream, DevicePtr, DriverError};
use std::sync::{Arc, OnceLock};

/// A stream of NCCL's beside candle's, on the same device.
///
/// candle's stream usually is the calling thread's own default stream: what is said of it here is then said of the
/// thread that calls.
#[derive(Clone)]
pub(super) struct Streams {
    /// On the device's primary context, as candle's own, but another object: candle's must not learn that there is a
    /// second stream, or it would track every tensor with events, which does not order them across streams anyway.
    context: Arc<CudaContext>,
    candle: Arc<CudaStream>,
    nccl: Arc<CudaStream>,
}

impl Streams {
    pub(super) fn new(device: &CudaDevice) -> Result<Self, DriverError> {
        let candle = device.cuda_stream();
        let context = CudaContext::new(candle.context().ordinal())?;
        let nccl = context.new_stream()?;
        Ok(Self { context, candle, nccl })
    }

    /// The same with another stream for NCCL.
    pub(super) fn another(&self) -> Result<Self, DriverError> {
        Ok(Self { nccl: self.context.new_stream()?, ..self.clone() })
    }

    /// Makes the device the calling thread's: NCCL relies on it.
    pub(super) fn bind(&self) -> Result<(), DriverError> {
        self.context.bind_to_thread()
    }

    /// Where the device sits, as `nvidia-smi` shows it.
    pub(super) fn pci_bus_id(&self) -> Result<String, DriverError> {
        use cudarc::driver::sys::CUdevice_attribute as Attribute;
        let domain = self.context.attribute(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)?;
        let bus = self.context.attribute(Attribute::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)?;
        let device = self.context.attribute(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)?;
        Ok(format!("{domain:04x}:{bus:02x}:{device:02x}"))
    }

    /// One element of zero, used on NCCL's stream alone.
    pub(super) fn token(&self) -> Result<CudaSlice<f32>, DriverError> {
        self.nccl.alloc_zeros(1)
    }

    pub(super) fn address(&self, token: &CudaSlice<f32>) -> u64 {
        token.device_ptr(&self.nccl).0
    }

    pub(super) fn candle(&self) -> &CudaStream {
        &self.candle
    }

    pub(super) fn target(&self) -> Target {
        Target(self.nccl.cu_stream().cast())
    }

    /// The first fence: a mark behind everything that candle was told to do up to now, by this thread.
    pub(super) fn mark(&self) -> Result<CudaEvent, DriverError> {
        let ready = self.context.new_event(None)?;
        ready.record(&self.candle)?;
        Ok(ready)
    }

    /// What comes next on NCCL's stream waits for `ready`.
    pub(super) fn after(&self, ready: &CudaEvent) -> Result<(), DriverError> {
        self.nccl.wait(ready)
    }

    /// The second fence: a mark behind everything on NCCL's stream.
    pub(super) fn done(&self) -> Result<CudaEvent, DriverError> {
        let done = self.context.new_event(None)?;
        done.record(&self.nccl)?;
        Ok(done)
    }

    /// What this thread tells candle to do next waits for `done`; the host does not.
    pub(super) fn hand_over(&self, done: &CudaEvent) -> Result<(), DriverError> {
        self.candle.wait(done)
    }
}

/// The second fence of a call; empty while the call is not on the stream yet.
pub(super) type Done = OnceLock<CudaEvent>;

impl Fence for Done {
    fn is_over(&self) -> Result<bool, String> {
        self.get().map_or(Ok(false), |event| event.try_is_complete().map_err(super::cuda_error))
    }
}
