//! Launching the kernels of layers (`layer.cu`): one operation each, with the arguments by value; and memory for their results.
use super::address::read_address;
use super::gpu::Gpu;
use super::launches::{Address, Arguments, Grid, Launch, THREADS};
use crate::{Error, Result};
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, CudaStorage, DType, Layout, Shape, Storage, Tensor};

/// Returns the address of a contiguous tensor.
pub fn address(tensor: &Tensor) -> Result<Address<'_>> {
    Ok(Address::new(super::address::input(tensor)?))
}

/// Returns the address of a contiguous tensor that a kernel changes.
pub fn written_address(tensor: &Tensor) -> Result<Address<'_>> {
    Ok(Address::new(super::address::output(tensor)?))
}

/// Returns the address of a contiguous tensor, or none.
pub fn address_or_none(tensor: Option<&Tensor>) -> Result<Address<'_>> {
    tensor.map_or(Ok(Address::NONE), address)
}

/// Returns the address of the elements of `storage` that `layout`, which is contiguous, selects.
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

    /// A copy of the elements of `storage` that `layout` selects.
    pub fn copy_of(storage: &CudaStorage, layout: &Layout) -> Result<Self> {
        let mut copy = Self::new(storage.device(), storage.dtype(), layout.shape())?;
        storage.copy_strided_src(&mut copy.storage, 0, layout)?;
        Ok(copy)
    }

    /// Memory for nothing, which not every GPU [can allocate](super::allocates_nothing).
    pub fn nothing(device: &CudaDevice) -> Result<Self> {
        let shape = Shape::from(0);
        // SAFETY: there are no elements that could be read.
        let storage = unsafe { device.alloc_uninit(&shape, DType::F32) }?;
        Ok(Self { storage, shape })
    }

    /// Memory filled with zeros.
    pub fn zeros(device: &CudaDevice, dtype: DType, shape: impl Into<Shape>) -> Result<Self> {
        let shape = shape.into();
        let storage = device.zeros_impl(&Shape::from(shape.elem_count().max(1)), dtype)?;
        Ok(Self { storage, shape })
    }

    pub fn dtype(&self) -> DType {
        self.storage.dtype()
    }

    pub(super) fn elements(&self) -> usize {
        self.shape.elem_count()
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
    let arguments = Arguments::new(tensors.iter().map(|address| address.0), numbers, reals)?;
    Gpu(device).launch_by_value((kernel, dtype), blocks, &arguments)
}
