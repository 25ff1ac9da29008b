//! Modules and kernels.
use crate::count::count;
use crate::driver::{
    Answer, INVALID_CONTEXT, INVALID_HANDLE, INVALID_IMAGE, INVALID_VALUE, NOT_FOUND, context_device, driver_lock,
    fatal,
};
use crate::memory::check_argument;
use crate::object::{create, destroyers, give};
use crate::ptx::{Kernel, entries};
use crate::stream::{find, push, synchronize_device};
use std::collections::{HashMap, HashSet};
use std::ffi::{CStr, c_char, c_uint, c_void};
use std::sync::{Mutex, OnceLock, PoisonError};

/// The maximum number of threads in a block.
const THREADS: u64 = 1024;

struct Module {
    ptx: String,
    names: HashSet<String>,
    /// The functions that were requested, by name. They live as long as the process, because a stream may reach them
    /// after the module was unloaded.
    functions: Mutex<HashMap<String, &'static Function>>,
}

struct Function {
    name: String,
    kernel: Kernel,
}

impl Module {
    fn function(&self, name: &str) -> &'static Function {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = functions.get(name) {
            return function;
        }
        await_gpu();
        match Kernel::load(&self.ptx, name) {
            Ok(kernel) => {
                let function: &'static Function = Box::leak(Box::new(Function { name: name.to_string(), kernel }));
                functions.insert(name.to_string(), function);
                function
            }
            Err(reason) => fatal(&format!("the kernel {name}: {reason}")),
        }
    }
}

/// Waits for everything on the GPU, if `EMULATED_GPU_LOADS_WAIT` is set, as loading code may.
pub(crate) fn await_gpu() {
    static WANTED: OnceLock<bool> = OnceLock::new();
    if let Some(device) = context_device()
        && *WANTED.get_or_init(|| std::env::var_os("EMULATED_GPU_LOADS_WAIT").is_some())
    {
        let _lock = driver_lock();
        synchronize_device(device);
    }
}

destroyers!(cuModuleUnload: Module);

/// The image must be PTX text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadData(handle: *mut *mut c_void, image: *const c_void) -> Answer {
    if context_device().is_none() {
        return INVALID_CONTEXT;
    }
    // SAFETY: guaranteed by the caller.
    let Ok(ptx) = unsafe { CStr::from_ptr(image.cast()) }.to_str() else { return INVALID_IMAGE };
    let names: HashSet<String> = entries(ptx).into_iter().map(str::to_string).collect();
    if names.is_empty() {
        return INVALID_IMAGE;
    }
    await_gpu();
    // SAFETY: guaranteed by the caller.
    unsafe { create(handle, Module { ptx: ptx.to_string(), names, functions: Mutex::default() }) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetFunction(
    function: *mut *mut c_void,
    module: *mut c_void,
    name: *const c_char,
) -> Answer {
    // SAFETY: guaranteed by the caller.
    let (module, name) = unsafe { (&*module.cast::<Module>(), CStr::from_ptr(name)) };
    let Ok(name) = name.to_str() else { return NOT_FOUND };
    if !module.names.contains(name) {
        return NOT_FOUND;
    }
    // SAFETY: guaranteed by the caller.
    unsafe { give(function, std::ptr::from_ref(module.function(name)).cast_mut().cast()) }
}

#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)] // CUDA's
pub unsafe extern "C" fn cuLaunchKernel(
    function: *mut c_void,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared: c_uint,
    stream: *mut c_void,
    parameters: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> Answer {
    let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
    let threads: u64 = block.iter().map(|size| u64::from(*size)).product();
    if grid.contains(&0) || threads == 0 || threads > THREADS || grid_y > 65535 || grid_z > 65535 || block_z > 64 {
        return INVALID_VALUE;
    }
    // SAFETY: the handle came from `cuModuleGetFunction`, and the function lives as long as the process.
    let Function { name, kernel } = unsafe { &*function.cast::<Function>() };
    // SAFETY: the caller guarantees one pointer per parameter, each to as many bytes as the parameter has.
    let parameters: Vec<Vec<u8>> = unsafe {
        let read = |(index, size): (usize, &usize)| {
            std::slice::from_raw_parts((*parameters.add(index)).cast::<u8>(), *size).to_vec()
        };
        kernel.parameter_sizes().iter().enumerate().map(read).collect()
    };
    if find(stream).is_none_or(|stream| Some(stream.device) != context_device()) {
        return INVALID_HANDLE;
    }
    count(name, 1);
    push(stream, move || {
        for parameter in &parameters {
            if let Ok(bytes) = <[u8; 8]>::try_from(&parameter[..]) {
                check_argument(u64::from_ne_bytes(bytes), name);
            }
        }
        // SAFETY: the program guarantees to CUDA that the parameters are valid.
        unsafe { kernel.run(grid, block, shared, &parameters) }
    })
}
