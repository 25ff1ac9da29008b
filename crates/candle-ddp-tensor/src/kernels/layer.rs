//! Launching the kernels of layers (`layer.cu`): one operation each, with the arguments by value.
use super::address::read_address;
use super::compile::failure;
use super::gpu::Gpu;
use super::launches::{Address, Grid, Launch};
use super::table::THREADS;
use crate::{Error, Result};
use candle_core::backend::BackendDevice;
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, CudaStorage, DType, Layout, Shape, Storage, Tensor};
use cudarc::driver::{DeviceRepr, LaunchConfig, PushKernelArg};

/// Returns the address of a contiguous tensor.
pub fn address(tensor: &Tensor) -> Result<Address<'_>> {
    Ok(Address::new(super::address::input(tensor)?))
}

/// Returns the address of a contiguous tensor, or none.
pub fn address_or_none(tensor: Option<&Tensor>) -> Result<Address<'_>> {
    tensor.map_or(Ok(Address::NONE), address)
}

/// Returns the address of what `layout`, which is contiguous, shows of `storage`.
pub fn storage_address<'a>(storage: &'a CudaStorage, layout: &Layout) -> Result<Address<'a>> {
    Ok(Address::new(read_address(storage, layout)?))
}

/// Memory for the result of kernels, whose content is undefined until they have written it.
#[derive(Debug)]
pub struct Output {
    storage: CudaStorage,
    shape: Shape,
}

impl Output {
    pub fn new(device: &CudaDevice, dtype: DType, shape: impl Into<Shape>) -> Result<Self> {
        let shape = shape.into();
        // An allocation of nothing fails on some GPUs.
        let elements = Shape::from(shape.elem_count().max(1));
        // SAFETY: whoever makes an output launches kernels that write all of it before it is read, or drops it.
        let storage = unsafe { device.alloc_uninit(&elements, dtype) }?;
        Ok(Self { storage, shape })
    }

    /// Memory filled with zeros.
    pub fn zeros(device: &CudaDevice, dtype: DType, shape: impl Into<Shape>) -> Result<Self> {
        let shape = shape.into();
        let storage = device.zeros_impl(&Shape::from(shape.elem_count().max(1)), dtype)?;
        Ok(Self { storage, shape })
    }

    pub fn address(&self) -> Result<Address<'_>> {
        storage_address(&self.storage, &Layout::contiguous(&self.shape))
    }

    pub fn into_parts(self) -> (CudaStorage, Shape) {
        (self.storage, self.shape)
    }

    pub fn into_result(self) -> (Storage, Shape) {
        (Storage::Cuda(self.storage), self.shape)
    }

    pub fn into_tensor(self) -> Tensor {
        let (storage, shape) = self.into_result();
        Tensor::from_storage(storage, shape, BackpropOp::none(), false)
    }
}

/// `layer.cu`'s `Arguments`.
#[repr(C)]
struct Arguments {
    tensors: [u64; 8],
    numbers: [u64; 20],
    reals: [f64; 4],
}

// SAFETY: numbers without padding, laid out as the kernels expect them.
unsafe impl DeviceRepr for Arguments {}

/// Fills the beginning of an array.
fn padded<T: Copy + Default, const N: usize>(values: impl ExactSizeIterator<Item = T>) -> Result<[T; N]> {
    if values.len() > N {
        return Err(Error::invalid("arguments of a kernel", format!("there are {}, more than {N}", values.len())));
    }
    let mut array = [T::default(); N];
    array.iter_mut().zip(values).for_each(|(to, value)| *to = value);
    Ok(array)
}

/// Enqueues a kernel after all work that candle has enqueued on `device`. Does not wait.
pub fn launch(device: &CudaDevice, launch: Launch) -> Result<()> {
    let Launch { kernel, dtype, grid, tensors, numbers, reals } = launch;
    let blocks = match grid {
        Grid::Threads(threads) => threads.div_ceil(THREADS as usize),
        Grid::Blocks(blocks) => blocks,
    };
    if blocks == 0 {
        return Ok(());
    }
    let Ok(blocks) = i32::try_from(blocks).map(i32::unsigned_abs) else {
        let reason = format!("{blocks} blocks exceed the limit of one launch of {kernel:?}");
        return Err(Error::invalid("the tensors of a layer", reason));
    };
    let arguments = Arguments {
        tensors: padded(tensors.iter().map(|address| address.0))?,
        numbers: padded(numbers.iter().map(|number| *number as u64))?,
        reals: padded(reals.iter().copied())?,
    };
    let (function, stream) = (Gpu(device).function(kernel, dtype)?, device.cuda_stream());
    let mut builder = stream.launch_builder(&function);
    builder.arg(&arguments);
    let config = LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (THREADS, 1, 1), shared_mem_bytes: 0 };
    // SAFETY: the kernels of layers take these arguments (`LAYER` in layer.cu). The addresses are of tensors on this
    // device that live until here; memory that is freed later is freed after the kernel, on the same stream. Which
    // elements a kernel accesses follows from the numbers, which the layers make of the shapes of these tensors.
    unsafe { builder.launch(config) }
        .map_err(|error| failure(kernel.source(), &format!("launching {kernel:?}"), error))?;
    Ok(())
}
