//! Convolutions and attention by cuDNN: its algorithm or plan for each shape is chosen once, by its heuristics, and kept.
mod algorithm;
mod attention;
mod backend;
mod descriptor;
mod ffi;
mod graph;
mod workspace;

use super::handles::{self, Handles};
use super::launches::{Address, AttendShape, AttendTensors, ConvShape, Convolve};
use super::temporary::Temporary;
use crate::{Error, Result};
use algorithm::{Algorithm, Scalars, choose, run};
use attention::Pass;
use candle_core::cuda_backend::gemm_reduced_precision_f32;
use candle_core::{CudaDevice, DType};
use cudarc::cudnn::result::get_version;
use cudarc::cudnn::sys::{cudnnHandle_t, cudnnMathType_t};
use cudarc::driver::CudaStream;
use cudarc::driver::sys::CUdevice_attribute;
use descriptor::{Descriptors, failure};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::{Arc, Once};

/// The number of shapes for which a thread keeps algorithms, and the number for which it keeps plans.
const PLANS: usize = 4096;
/// The alignment of memory that is allocated by itself, in bytes.
const ALIGNMENT: usize = 256;
/// The oldest version whose status codes and functions are the ones expected here: 9.0.
const OLDEST: usize = 90_000;

/// The key by which an algorithm is kept.
type Key = (Convolve, DType, cudnnMathType_t, ConvShape);

/// An algorithm, and the size of its workspace in bytes.
#[derive(Debug)]
struct Plan {
    descriptors: Descriptors,
    algorithm: Algorithm,
    workspace: usize,
}

/// A plan of attention, and the part that it computes.
type InParts = (Rc<graph::Plan>, AttendShape);

/// cuDNN's handle for a stream, which one thread at a time may use.
struct Handle {
    raw: cudnnHandle_t,
    stream: Arc<CudaStream>,
    version: usize,
    /// The largest workspace of an algorithm, in bytes.
    limit: usize,
    /// None where cuDNN has no algorithm.
    plans: HashMap<Key, Option<Rc<Plan>>>,
    /// The plans of attention, each for equal parts of it; none where cuDNN has no plan.
    attention: HashMap<(Pass, DType, AttendShape), Option<InParts>>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        // Nobody is left to handle an error.
        let _ = self.stream.context().bind_to_thread();
        // Plans were made for the handle.
        self.attention.clear();
        // SAFETY: the handle was created, and is destroyed only here.
        let _ = unsafe { ffi::cudnnDestroy(self.raw) };
    }
}

impl Handle {
    fn new(stream: Arc<CudaStream>) -> Result<Self> {
        let version = get_version();
        if version < OLDEST {
            let what = format!("cuDNN {}.{}", version / 1000, version % 1000 / 100);
            let hint = "install cuDNN 9, or build without the feature `cudnn`";
            return Err(candle_ddp_base::Error::unavailable(what, hint).into());
        }
        let limit = workspace::limit(stream.context())?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: there is room for the handle.
        unsafe { ffi::cudnnCreate(&raw mut raw) }.result().map_err(|error| failure("creating a handle", error))?;
        let handle = Self { raw, stream, version, limit, plans: HashMap::new(), attention: HashMap::new() };
        // SAFETY: the handle was just created, and the stream lives at least as long.
        unsafe { ffi::cudnnSetStream(raw, handle.stream.cu_stream().cast()) }
            .result()
            .map_err(|error| failure("setting the stream", error))?;
        Ok(handle)
    }

    /// The GPU's compute capability.
    fn capability(&self) -> Result<[i32; 2]> {
        let part = |part| {
            self.stream.context().attribute(part).map_err(|error| Error::Kernel {
                file: "cuDNN",
                operation: "asking for the compute capability".into(),
                reason: error.to_string(),
            })
        };
        Ok([
            part(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            part(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ])
    }

    fn plan(&mut self, key: Key) -> Result<Option<Rc<Plan>>> {
        if let Some(plan) = self.plans.get(&key) {
            return Ok(plan.clone());
        }
        let (convolve, dtype, math, shape) = key;
        if is_slower_than_pytorch(math, self.capability()?) {
            static SAID: Once = Once::new();
            SAID.call_once(|| {
                log::warn!(
                    "convolutions compute in f32, which takes several times as long as in TF32, PyTorch's default: \
                     candle_core::cuda::set_gemm_reduced_precision_f32(true) allows TF32 in convolutions and products"
                );
            });
        }
        let plan = match Descriptors::new(dtype, math, &shape)? {
            Some(descriptors) => choose(self.raw, convolve, &descriptors, self.limit, math)?
                .map(|(algorithm, workspace)| Rc::new(Plan { descriptors, algorithm, workspace })),
            None => None,
        };
        log::debug!("{convolve:?} of {shape:?} in {dtype:?} by cuDNN: {:?}", plan.as_ref().map(|plan| plan.algorithm));
        if self.plans.len() >= PLANS {
            self.plans.clear();
        }
        self.plans.insert(key, plan.clone());
        Ok(plan)
    }

    fn attention(&mut self, pass: Pass, dtype: DType, shape: &AttendShape) -> Result<Option<InParts>> {
        let key = (pass, dtype, *shape);
        if let Some(plan) = self.attention.get(&key) {
            return Ok(plan.clone());
        }
        let capability = self.capability()?;
        // The workspace grows with the heads of all samples together, of which this is the most that has room.
        let (mut plan, mut most) = (None, usize::MAX);
        for part in attention::parts(shape) {
            let heads = part.batch * part.heads;
            if heads > most || !attention::is_served(self.version, capability[0], pass, &part) {
                continue;
            }
            let gpu = (graph::Gpu::Handle(self.raw), self.version, capability);
            match attention::plan(gpu, self.limit, (dtype, pass, &part))? {
                Ok(found) => {
                    plan = Some((Rc::new(found), part));
                    break;
                }
                Err(Some(least)) => most = heads * self.limit / least,
                Err(None) => break,
            }
        }
        if plan.is_none() {
            attention::warn_of_old(self.version, capability[0], pass, shape);
        }
        let name = if pass.is_backward() { "backward" } else { "forward" };
        match &plan {
            Some((_, part)) => {
                log::debug!("attention's {name} pass of {shape:?} in {dtype:?} by cuDNN, in parts of {part:?}")
            }
            None => log::debug!("attention's {name} pass of {shape:?} in {dtype:?} by kernels without cuDNN"),
        }
        if self.attention.len() >= PLANS {
            self.attention.clear();
        }
        self.attention.insert(key, plan.clone());
        Ok(plan)
    }
}

thread_local! {
    static HANDLES: Handles<Handle> = Handles::default();
}

fn with_handle<T>(device: &CudaDevice, f: impl FnOnce(&mut Handle) -> Result<T>) -> Result<T> {
    handles::with_handle("cuDNN", &HANDLES, Handle::new, device, f)
}

/// Whether PyTorch would round to TF32, by default, where this does not.
fn is_slower_than_pytorch(math: cudnnMathType_t, [major, _]: [i32; 2]) -> bool {
    math == cudnnMathType_t::CUDNN_FMA_MATH && major >= 8
}

/// cuDNN's own default for f32 is TF32.
fn math(dtype: DType) -> cudnnMathType_t {
    match dtype {
        DType::F16 | DType::BF16 => cudnnMathType_t::CUDNN_TENSOR_OP_MATH,
        DType::F32 if !gemm_reduced_precision_f32() => cudnnMathType_t::CUDNN_FMA_MATH,
        _ => cudnnMathType_t::CUDNN_DEFAULT_MATH,
    }
}

/// See the function of the same name in the parent module.
pub(super) fn can_convolve(
    device: &CudaDevice,
    (convolve, dtype): (Convolve, DType),
    shape: &ConvShape,
) -> Result<bool> {
    with_handle(device, |handle| Ok(handle.plan((convolve, dtype, math(dtype), *shape))?.is_some()))
}

/// See the function of the same name in the parent module.
pub(super) fn convolve(
    device: &CudaDevice,
    (convolve, dtype): (Convolve, DType),
    shape: &ConvShape,
    [x, w, y]: [Address; 3],
    accumulate: bool,
) -> Result<bool> {
    with_handle(device, |handle| {
        let Some(plan) = handle.plan((convolve, dtype, math(dtype), *shape))? else { return Ok(false) };
        let workspace = Temporary::new(device, DType::U8, plan.workspace)?;
        let workspace = (workspace.address()?, plan.workspace);
        let scalars = Scalars { is_wide: dtype == DType::F64, accumulate };
        run(handle.raw, &plan.descriptors, plan.algorithm, workspace, [x, w, y], scalars)
    })
}

/// See the function of the same name in the parent module.
pub(super) fn attend(
    device: &CudaDevice,
    dtype: DType,
    shape: &AttendShape,
    scale: f64,
    tensors: &AttendTensors,
    is_fast: bool,
) -> Result<bool> {
    let pass = match tensors.backward {
        None => Pass::Forward,
        Some(_) if is_fast => Pass::Fast,
        Some(_) => Pass::Backward,
    };
    with_handle(device, |handle| {
        let Some((plan, part)) = handle.attention(pass, dtype, shape)? else { return Ok(false) };
        let bytes = |numbers: usize| (numbers * DType::F32.size_in_bytes()).next_multiple_of(ALIGNMENT);
        let [queries, gradients] = pass.kept(&part).map(bytes);
        let memory = Temporary::new(device, DType::U8, queries + gradients + plan.workspace)?;
        let start = memory.address()?;
        let memory = [0, queries, queries + gradients].map(|bytes| start.skip(bytes, DType::U8));
        for sample in (0..shape.batch).step_by(part.batch) {
            for key_head in (0..shape.key_heads).step_by(part.key_heads) {
                let tensors = tensors.part((shape, dtype), sample, key_head);
                attention::run(handle.raw, (&plan, pass), (&part, scale), &tensors, memory)?;
            }
        }
        Ok(true)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_f32_on_gpus_with_tf32_is_slower_than_pytorch() {
        let cases = [(DType::F32, [9, 0]), (DType::F32, [7, 5]), (DType::BF16, [9, 0]), (DType::F64, [9, 0])];
        let slower = cases.map(|(dtype, capability)| is_slower_than_pytorch(math(dtype), capability));
        assert_eq!(slower, [true, false, false, false]);
    }
}
