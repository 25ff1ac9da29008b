//! Copies of tensors from pinned host memory to a GPU, on a separate stream.
use crate::{Error, Result};
use candle_core::cuda_backend::CudaStorage;
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, DType, Shape, Storage, Tensor};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DevicePtrMut, DriverError, PinnedHostSlice, result};
use half::{bf16, f16};
use parking_lot::Mutex;
use std::sync::Arc;

/// A stream for copies, in addition to candle's, and pinned memory, which is reused.
///
/// Any thread may [`stage`](Self::stage) tensors. The other methods are for the thread that computes, since each thread usually
/// has its own stream in candle.
#[derive(Debug)]
pub struct Uploader {
    device: CudaDevice,
    /// The device's primary context, like candle's, but as another object: if candle's saw a second stream, it would track
    /// every tensor with events.
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    /// Memory that holds no tensor any more, the oldest first. It may still be copied from.
    free: Mutex<Vec<Buffer>>,
}

#[derive(Debug)]
struct Buffer {
    memory: PinnedHostSlice<u8>,
    /// The event at the end of the last copy from it.
    copied: Option<Arc<CudaEvent>>,
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(copied) = &self.copied {
            // An error says that the GPU has failed, and copies nothing any more.
            let _ = copied.synchronize();
        }
    }
}

/// A tensor in pinned memory.
#[derive(Debug)]
pub struct Pinned {
    buffer: Buffer,
    dtype: DType,
    shape: Shape,
}

/// A tensor that is being copied to the GPU.
#[derive(Debug)]
pub struct Upload {
    tensor: Tensor,
    done: Arc<CudaEvent>,
    candle: Arc<CudaStream>,
}

/// `$body` with the type of `$dtype`, for the dtypes for which candle has CUDA kernels.
macro_rules! typed {
    ($dtype:expr, $T:ident => $body:expr, else => $otherwise:expr) => {
        typed!(@ $dtype, $T, $body, $otherwise, F32 f32, F64 f64, F16 f16, BF16 bf16, U8 u8, U32 u32, I64 i64)
    };
    (@ $dtype:expr, $T:ident, $body:expr, $otherwise:expr, $($name:ident $type:ty),+) => {
        match $dtype {
            $(DType::$name => {
                type $T = $type;
                $body
            })+
            _ => $otherwise,
        }
    };
}

fn failure(operation: &str, error: DriverError) -> Error {
    Error::Candle(candle_core::Error::Cuda(Box::new(error)).context(format!("{operation} for a copy to a GPU")))
}

impl Uploader {
    pub fn new(device: &CudaDevice) -> Result<Self> {
        let context = CudaContext::new(device.cuda_stream().context().ordinal());
        let context = context.map_err(|error| failure("opening the device", error))?;
        // SAFETY: events order this stream with candle's, below. With tracking, the first stream would wait for everything on the GPU,
        // such as a collective in flight.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().map_err(|error| failure("making a stream", error))?;
        Ok(Self { device: device.clone(), context, stream, free: Mutex::default() })
    }

    pub fn device(&self) -> &CudaDevice {
        &self.device
    }

    /// Copies a tensor on the CPU into pinned memory. Returns nothing if it is not on the CPU, or of a dtype that candle does
    /// not compute with on GPUs.
    pub fn stage(&self, tensor: &Tensor) -> Result<Option<Pinned>> {
        let tensor = tensor.contiguous()?;
        let (storage, layout) = tensor.storage_and_layout();
        let (Storage::Cpu(storage), Some((start, end))) = (&*storage, layout.contiguous_offsets()) else {
            return Ok(None);
        };
        let bytes: &[u8] = typed!(tensor.dtype(), T => bytemuck::cast_slice(&storage.as_slice::<T>()?[start..end]),
            else => return Ok(None));
        let mut buffer = self.buffer(bytes.len())?;
        let memory = buffer.memory.as_mut_slice().map_err(|error| failure("writing pinned memory", error))?;
        memory[..bytes.len()].copy_from_slice(bytes);
        Ok(Some(Pinned { buffer, dtype: tensor.dtype(), shape: tensor.shape().clone() }))
    }

    /// Pinned memory of at least `len` bytes, from which nothing is copied any more.
    fn buffer(&self, len: usize) -> Result<Buffer> {
        let mut free = self.free.lock();
        let is_idle =
            |buffer: &Buffer| buffer.copied.as_ref().is_none_or(|copied| copied.try_is_complete().unwrap_or(false));
        // Not much larger, or the labels would take the memory of the images.
        let fits = |buffer: &Buffer| (len..=len.saturating_mul(2)).contains(&buffer.memory.len());
        if let Some(index) = free.iter().position(|buffer| fits(buffer) && is_idle(buffer)) {
            return Ok(free.remove(index));
        }
        drop(free);
        // SAFETY: any bytes are valid, and they are written before they are read.
        let memory = unsafe { self.context.alloc_pinned::<u8>(len.max(1)) };
        let memory = memory.map_err(|error| failure(&format!("allocating {len} bytes of pinned memory"), error))?;
        Ok(Buffer { memory, copied: None })
    }

    /// Begins to copy after all work enqueued on candle's stream so far, since the memory may have been in use there.
    pub fn begin(&self, Pinned { mut buffer, dtype, shape }: Pinned) -> Result<Upload> {
        let candle = self.device.cuda_stream();
        let (count, len) = (shape.elem_count(), shape.elem_count() * dtype.size_in_bytes());
        let (tensor, address) = typed!(dtype, T => {
            // SAFETY: the copy writes all elements, and candle's stream reads none before: `Upload` makes it wait.
            let mut slice = unsafe { self.device.alloc::<T>(count) }?;
            let address = slice.device_ptr_mut(&candle).0;
            let storage = CudaStorage::wrap_cuda_slice(slice, self.device.clone());
            (Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false), address)
        }, else => return Err(Error::invalid("dtype", format!("candle has no CUDA kernels for {dtype:?}"))));
        let event = || self.context.new_event(None).map_err(|error| failure("making an event", error));
        let (ready, done) = (event()?, Arc::new(event()?));
        let ordered = ready.record(&candle).and_then(|()| self.stream.wait(&ready));
        ordered.map_err(|error| failure("waiting for candle's stream", error))?;
        if len > 0 {
            let memory = buffer.memory.as_slice().map_err(|error| failure("reading pinned memory", error))?;
            // SAFETY: the tensor has `len` bytes at this address, and is freed on candle's stream, which `Upload` makes wait for
            // the copy. The buffer waits for `done` before it is written or freed.
            unsafe { result::memcpy_htod_async(address, &memory[..len], self.stream.cu_stream()) }
                .map_err(|error| failure(&format!("copying {len} bytes"), error))?;
        }
        if let Err(error) = done.record(&self.stream) {
            // Without the event nothing would wait for the copy.
            let _ = self.stream.synchronize();
            return Err(failure("recording an event", error));
        }
        buffer.copied = Some(done.clone());
        self.free.lock().push(buffer);
        Ok(Upload { tensor, done, candle })
    }
}

impl Upload {
    /// The tensor. Work that this thread enqueues next comes after the copy; the host does not wait.
    pub fn finish(self) -> Result<Tensor> {
        self.candle.wait(&self.done).map_err(|error| failure("waiting", error))?;
        Ok(self.tensor.clone())
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        // The tensor may be freed next, on candle's stream.
        let _ = self.candle.wait(&self.done);
    }
}
