//! Launching kernels on candle's own stream of a GPU, after all work that candle has enqueued.
use super::compile::{failure, image};
use super::launches::{Arguments, THREADS};
use super::source::{DTYPES, Kernel, Source};
use super::table::Table;
use super::uploaded::uploaded;
use crate::{Error, Result};
use candle_core::{CudaDevice, DType, Device};
use cudarc::driver::{CudaContext, CudaFunction, CudaModule, CudaSlice, DevicePtr, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;
use parking_lot::RwLock;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::{Arc, LazyLock};

/// A GPU. Only [`read`](Self::read) waits for it.
pub(super) struct Gpu<'a>(pub(super) &'a CudaDevice);

/// The kernels that are loaded on each GPU, and stay loaded.
#[derive(Default)]
struct Loaded {
    modules: HashMap<(usize, Source, DType), Arc<CudaModule>>,
    functions: HashMap<(usize, Kernel, DType), CudaFunction>,
}
static LOADED: LazyLock<RwLock<Loaded>> = LazyLock::new(RwLock::default);

impl Gpu<'_> {
    /// Returns a kernel, which is compiled and loaded on first use.
    pub(super) fn function(&self, kernel: Kernel, dtype: DType) -> Result<CudaFunction> {
        let stream = self.0.cuda_stream();
        let (context, source) = (stream.context(), kernel.source());
        let gpu = context.ordinal();
        if let Some(function) = LOADED.read().functions.get(&(gpu, kernel, dtype)) {
            return Ok(function.clone());
        }
        let name = kernel.name(dtype).ok_or_else(|| Error::UnsupportedDType {
            operation: source.name().to_string(),
            dtype,
            supported: "f32, f64, f16, bf16",
        })?;
        let mut loaded = LOADED.write();
        let module = match loaded.modules.get(&(gpu, source, dtype)) {
            Some(module) => module.clone(),
            None => {
                let module = load(context, source, dtype)?;
                loaded.modules.insert((gpu, source, dtype), module.clone());
                module
            }
        };
        let function = module.load_function(&name);
        let function = function.map_err(|error| failure(source, &format!("finding {name}"), error))?;
        loaded.functions.insert((gpu, kernel, dtype), function.clone());
        Ok(function)
    }
}

/// Loads all kernels for tensors of these dtypes, if `device` is a GPU. Loading a kernel may wait for everything on the GPU, so for
/// a collective that waits for another rank, which may itself wait for a later call of this one.
pub fn preload(device: &Device, dtypes: &[DType]) -> Result<()> {
    let Device::Cuda(device) = device else { return Ok(()) };
    let known = dtypes.iter().filter(|dtype| DTYPES.iter().any(|(known, _)| known == *dtype));
    known.flat_map(|dtype| Kernel::ALL.iter().map(|kernel| (*kernel, *dtype))).try_for_each(|(kernel, dtype)| {
        Gpu(device).function(kernel, dtype)?;
        Ok(())
    })
}

fn load(context: &Arc<CudaContext>, source: Source, dtype: DType) -> Result<Arc<CudaModule>> {
    let capability = context.compute_capability();
    let (major, minor) = capability.map_err(|error| failure(source, "querying the compute capability", error))?;
    let image = image(source, dtype, 10 * major + minor)?;
    context.load_module(Ptx::from_binary(image.to_vec())).map_err(|error| {
        let reason = format!(
            "{error}. If the driver is older than the CUDA toolkit (CUDA_ERROR_UNSUPPORTED_PTX_VERSION, \
             CUDA_ERROR_INVALID_IMAGE), update it or build with an older toolkit"
        );
        failure(source, "loading the kernels", reason)
    })
}

/// A table that kernels can read.
pub(super) type Words = Rc<CudaSlice<u64>>;
/// Numbers that kernels write.
pub(super) type Numbers = CudaSlice<f64>;

impl Gpu<'_> {
    /// Returns the words in the GPU's memory.
    pub(super) fn upload(&self, words: &[u64]) -> Result<Words> {
        uploaded(self.0, words)
    }

    /// Memory for `count` numbers, whose values are undefined.
    pub(super) fn numbers(&self, count: usize) -> Result<Numbers> {
        // SAFETY: kernels write the numbers before they read them.
        Ok(unsafe { self.0.alloc(count) }?)
    }

    /// Copies `values` to the beginning of `numbers`.
    pub(super) fn write(&self, numbers: &mut Numbers, values: &[f64]) -> Result<()> {
        Ok(self.0.memcpy_htod(values, numbers)?)
    }

    /// Returns the first `count` numbers after all launched work has completed.
    pub(super) fn read(&self, numbers: &Numbers, count: usize) -> Result<Vec<f64>> {
        Ok(self.0.clone_dtoh(&numbers.slice(..count))?)
    }

    /// Returns the address of `numbers` for kernels. It is valid as long as `numbers` lives.
    pub(super) fn address(&self, numbers: &Numbers) -> u64 {
        numbers.device_ptr(&self.0.cuda_stream()).0
    }

    /// Launches a kernel with a table that was uploaded, and the address of numbers, or 0.
    pub(super) fn launch(
        &self,
        (kernel, dtype): (Kernel, DType),
        blocks: u32,
        (words, table): (&Words, &Table),
        numbers: u64,
    ) -> Result<()> {
        let (function, stream) = (self.function(kernel, dtype)?, self.0.cuda_stream());
        let mut arguments = stream.launch_builder(&function);
        arguments.arg(&**words).arg(&table.parts).arg(&table.sets).arg(&numbers);
        let config = LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (THREADS, 1, 1), shared_mem_bytes: 0 };
        // SAFETY: these are the arguments of all kernels in the `.cu` files (`KERNELS` in part.cu): table, number of
        // parts, their numbers, and sums, a verdict, or null. A kernel accesses only the tensors in the table's entries, up to their number of
        // elements (in norm.cu, rows of them). The entries were made in this module from contiguous tensors of `dtype`
        // on this device, whose borrows end after this call; memory that is freed later is freed after the kernel, on
        // the same stream. The programs have allocated the sums.
        unsafe { arguments.launch(config) }
            .map_err(|error| failure(kernel.source(), &format!("launching {kernel:?}"), error))?;
        Ok(())
    }

    /// Launches a kernel whose arguments are passed by value.
    pub(super) fn launch_by_value(
        &self,
        (kernel, dtype): (Kernel, DType),
        blocks: u32,
        arguments: &Arguments,
    ) -> Result<()> {
        let (function, stream) = (self.function(kernel, dtype)?, self.0.cuda_stream());
        let mut builder = stream.launch_builder(&function);
        builder.arg(arguments);
        let config = LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (THREADS, 1, 1), shared_mem_bytes: 0 };
        // SAFETY: the kernels of layers take these arguments (`LAYER` in layer.cu). The addresses are of tensors on this
        // device that live until here; memory that is freed later is freed after the kernel, on the same stream. Which
        // elements a kernel accesses follows from the numbers, which the layers make of the shapes of these tensors.
        unsafe { builder.launch(config) }
            .map_err(|error| failure(kernel.source(), &format!("launching {kernel:?}"), error))?;
        Ok(())
    }
}
