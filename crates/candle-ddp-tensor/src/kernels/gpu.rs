//! Launching kernels on candle's own stream of a GPU, after all work that candle has enqueued.
use super::compile::{failure, ptx};
use super::program::Machine;
use super::source::Kernel;
use super::table::THREADS;
use crate::{Error, Result};
use candle_core::{CudaDevice, DType};
use cudarc::driver::{CudaFunction, CudaSlice, DevicePtr, LaunchConfig, PushKernelArg};

/// A GPU. Only [`read`](Machine::read) waits for it.
pub(super) struct Gpu<'a>(pub(super) &'a CudaDevice);

impl Gpu<'_> {
    /// Compiles a kernel on first use. candle keeps loaded modules for each of its devices.
    pub(super) fn function(&self, kernel: Kernel, dtype: DType) -> Result<CudaFunction> {
        let source = kernel.source();
        let name = kernel.name(dtype).ok_or_else(|| Error::UnsupportedDType {
            operation: source.name().to_string(),
            dtype,
            supported: "f32, f64, f16, bf16",
        })?;
        let capability = self.0.cuda_stream().context().compute_capability();
        let (major, minor) = capability.map_err(|error| failure(source, "querying the compute capability", error))?;
        let ptx = ptx(source, 10 * major + minor)?;
        let module = format!("candle-ddp/{}", source.name());
        let loaded = self.0.get_or_load_custom_func(&name, &module, &ptx);
        loaded.map(|function| function.into_cuda_function()).map_err(|error| {
            let reason = format!(
                "{error}. If the driver is older than the CUDA toolkit (CUDA_ERROR_UNSUPPORTED_PTX_VERSION), update it or \
                 build with an older toolkit"
            );
            failure(source, &format!("loading {name}"), reason)
        })
    }
}

impl Machine for Gpu<'_> {
    type Words = CudaSlice<u64>;
    type Numbers = CudaSlice<f64>;

    fn upload(&self, words: &[u64]) -> Result<CudaSlice<u64>> {
        // The driver has its own copy of the words when this returns.
        Ok(self.0.clone_htod(words)?)
    }

    fn zeros(&self, count: usize) -> Result<CudaSlice<f64>> {
        Ok(self.0.alloc_zeros(count)?)
    }

    fn write(&self, numbers: &mut CudaSlice<f64>, values: &[f64]) -> Result<()> {
        Ok(self.0.memcpy_htod(values, numbers)?)
    }

    fn read(&self, numbers: &CudaSlice<f64>, count: usize) -> Result<Vec<f64>> {
        Ok(self.0.clone_dtoh(&numbers.slice(..count))?)
    }

    fn address(&self, numbers: &CudaSlice<f64>) -> u64 {
        numbers.device_ptr(&self.0.cuda_stream()).0
    }

    fn launch(
        &self,
        (kernel, dtype): (Kernel, DType),
        blocks: u32,
        table: &CudaSlice<u64>,
        parts: u32,
        numbers: Option<&mut CudaSlice<f64>>,
    ) -> Result<()> {
        let (function, stream) = (self.function(kernel, dtype)?, self.0.cuda_stream());
        let mut arguments = stream.launch_builder(&function);
        arguments.arg(table).arg(&parts);
        match numbers {
            Some(numbers) => arguments.arg(numbers),
            None => arguments.arg(&0u64),
        };
        let config = LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (THREADS, 1, 1), shared_mem_bytes: 0 };
        // SAFETY: these are the arguments of all kernels in the `.cu` files (`KERNELS` in part.cu): table, number of
        // parts, and sums or null. A kernel accesses only the tensors in the table's entries, up to their number of
        // elements (in norm.cu, rows of them). The entries were made in this module from contiguous tensors of `dtype`
        // on this device, whose borrows end after this call; memory that is freed later is freed after the kernel, on
        // the same stream. The programs have allocated the sums.
        unsafe { arguments.launch(config) }
            .map_err(|error| failure(kernel.source(), &format!("launching {kernel:?}"), error))?;
        Ok(())
    }
}
