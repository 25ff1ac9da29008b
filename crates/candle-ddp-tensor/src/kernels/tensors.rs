//! Kernels on candle's tensors. Tensors on the same GPU with the same dtype share launches.
use super::address::{input, output};
use super::gpu::Gpu;
use super::incoming::Incoming;
use super::operands::{Assignment, Extent, Operands, Rule, Scalars};
use super::program;
use super::source::{DTYPES, Kernel};
use super::table::{Entry, Sets};
use crate::{Error, Result};
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, CudaStorage, DType, Device, Storage, Tensor};
use cudarc::driver::CudaSlice;

/// Returns whether there are kernels for tensors of `dtype` on `device`.
pub fn take(device: &Device, dtype: DType) -> bool {
    device.is_cuda() && DTYPES.iter().any(|(known, _)| *known == dtype)
}

/// Returns whether an allocation of no bytes succeeds: it does in a memory pool, which most GPUs have.
pub fn allocates_nothing(device: &CudaDevice) -> bool {
    device.cuda_stream().context().has_async_alloc()
}

/// Returns whether a GPU has its own stream, instead of using the default streams of its threads.
pub fn has_own_stream(device: &Device) -> Result<bool> {
    /// The value of `CU_STREAM_PER_THREAD`; lower values are the other two default streams.
    const PER_THREAD: usize = 2;
    Ok(device.as_cuda_device()?.cuda_stream().cu_stream() as usize > PER_THREAD)
}

/// Tensors that are launched together: their indices, and their entries in the table.
struct Batch<'a> {
    device: &'a CudaDevice,
    dtype: DType,
    indices: Vec<usize>,
    entries: Vec<Entry>,
    /// The different sets of numbers of the entries.
    sets: Vec<Scalars>,
}

impl<'a> Batch<'a> {
    /// Groups `tensors`, given with their entries, into batches.
    fn all(tensors: impl Iterator<Item = (&'a Tensor, Result<Entry>)>) -> Result<Vec<Self>> {
        let mut batches: Vec<Self> = Vec::new();
        for (index, (tensor, entry)) in tensors.enumerate() {
            let (device, dtype, entry) = (tensor.device().as_cuda_device()?, tensor.dtype(), entry?);
            let takes = |batch: &mut Self| {
                let is_alike = batch.device.id() == device.id() && batch.dtype == dtype;
                is_alike && Sets::number_of(&mut batch.sets, &entry.scalars).is_some()
            };
            let place = batches.iter_mut().position(takes).unwrap_or(batches.len());
            if place == batches.len() {
                let sets = vec![entry.scalars];
                batches.push(Self { device, dtype, indices: Vec::new(), entries: Vec::new(), sets });
            }
            let batch = &mut batches[place];
            batch.indices.push(index);
            batch.entries.push(entry);
        }
        Ok(batches)
    }

    fn of_operands(rule: Rule, operands: impl Iterator<Item = &'a Operands<'a>>) -> Result<Vec<Self>> {
        Self::all(operands.map(|operands| (operands.parameter, entry(rule, operands))))
    }

    fn gpu(&self) -> Gpu<'a> {
        Gpu(self.device)
    }
}

/// Returns the entry of one part, whose tensors must match each other.
fn entry(rule: Rule, Operands { parameter, gradient, states, scalars }: &Operands) -> Result<Entry> {
    let elements = parameter.elem_count();
    let state_dtype = crate::accumulator(parameter.dtype());
    let fits = |tensor: &Tensor, dtype| {
        tensor.elem_count() == elements && tensor.dtype() == dtype && tensor.device().same_device(parameter.device())
    };
    let states_fit = states.len() <= 2 && states.iter().all(|state| fits(state, state_dtype));
    if !states_fit || !fits(gradient, gradient.dtype()) || !rule.takes(parameter.dtype(), gradient.dtype()) {
        let reason = "parameter, gradient and states must have the same device, dtype and number of elements";
        return Err(Error::invalid("parameters", reason));
    }
    let mut addresses = [0; 2];
    for (address, state) in addresses.iter_mut().zip(*states) {
        *address = output(state)?;
    }
    let (parameter, gradient) = (output(parameter)?, input(gradient)?);
    Ok(Entry { elements, parameter, gradient, states: addresses, scalars: *scalars })
}

/// Updates whole parameters with a constant number of launches per dtype. Adam and SGD change nothing after a bad `verdict`
/// ([`rescale_judged`]), which must be on the same GPU.
pub fn update_whole(rule: Rule, operands: &[Operands], verdict: Option<&Tensor>) -> Result<()> {
    let verdict = verdict.map_or(Ok(0), input)?;
    for (dtype, _) in DTYPES {
        let these = operands.iter().filter(|operands| operands.gradient.dtype() == dtype);
        Batch::of_operands(rule, these)?.iter().try_for_each(|batch| {
            program::update_whole(&batch.gpu(), rule, (batch.dtype, dtype), &batch.entries, verdict)
        })?;
    }
    Ok(())
}

/// Computes the sums that [`update`] needs, if any. Waits for the GPU once per dtype.
pub fn prepare(rule: Rule, operands: &[Operands]) -> Result<Vec<[f64; 2]>> {
    let mut sums = vec![[0.; 2]; operands.len()];
    let batches = Batch::of_operands(rule, operands.iter())?;
    let launched = batches.iter().map(|batch| program::prepare(&batch.gpu(), rule, batch.dtype, &batch.entries));
    let launched = launched.collect::<Result<Vec<_>>>()?;
    for (batch, numbers) in batches.iter().zip(&launched) {
        let found = program::read_sums(&batch.gpu(), numbers.as_ref(), batch.entries.len())?;
        for (index, found) in batch.indices.iter().zip(found) {
            sums[*index] = found;
        }
    }
    Ok(sums)
}

/// Updates parts of parameters; `sums` has the sums over all parts of the parameter, for each part.
pub fn update(rule: Rule, operands: &[Operands], sums: &[[f64; 2]]) -> Result<()> {
    Batch::of_operands(rule, operands.iter())?.iter().try_for_each(|batch| {
        let sums: Vec<[f64; 2]> = batch.indices.iter().map(|index| sums[*index]).collect();
        program::update(&batch.gpu(), rule, batch.dtype, &batch.entries, &sums)
    })
}

/// Copies between contiguous tensors, with one launch per pair of dtypes.
pub fn assign(assignments: &[Assignment]) -> Result<()> {
    for (dtype, _) in DTYPES {
        let Some(kernel) = Kernel::copy_from(dtype) else { continue };
        let these = assignments.iter().filter(|assignment| assignment.source.dtype() == dtype);
        Batch::all(these.map(|this| (this.destination, assigned(this))))?
            .iter()
            .try_for_each(|batch| program::change(&batch.gpu(), kernel, batch.dtype, &batch.entries))?;
    }
    Ok(())
}

fn assigned(Assignment { destination, source, factor, accumulate }: &Assignment) -> Result<Entry> {
    let elements = destination.elem_count();
    if source.elem_count() != elements || !source.device().same_device(destination.device()) {
        return Err(Error::invalid("source", "it differs from the destination in device or number of elements"));
    }
    let scalars = super::scalars([*factor, f64::from(*accumulate)]);
    let (parameter, gradient) = (output(destination)?, input(source)?);
    Ok(Entry { elements, parameter, gradient, scalars, ..Default::default() })
}

/// Returns the magnitude of contiguous tensors. Waits for the GPU once per dtype.
pub fn measure(tensors: &[&Tensor]) -> Result<Extent> {
    measured(tensors, read, |batch| program::measure(&batch.gpu(), batch.dtype, &batch.entries))
}

/// Multiplies contiguous tensors in place by `max_norm` / (norm + 10⁻⁶), if that is less than 1 or NaN, and returns the norm before, an f64
/// on the GPU. Does not wait. Does nothing, and returns `None`, for tensors on several GPUs, of several dtypes, or without elements.
pub fn clip(tensors: &[&Tensor], max_norm: f64, by_largest: bool) -> Result<Option<Tensor>> {
    let entry = |tensor: &Tensor| {
        let entry = changed(tensor, 0.)?;
        let scalars = super::scalars([max_norm, f64::from(by_largest)]);
        Ok(Entry { gradient: entry.parameter, scalars, ..entry })
    };
    let batches = Batch::all(tensors.iter().map(|tensor| (*tensor, entry(tensor))))?;
    let [batch] = batches.as_slice() else { return Ok(None) };
    let Some(numbers) = program::clip(&batch.gpu(), batch.dtype, &batch.entries)? else { return Ok(None) };
    // In its own memory: a program may keep the norms of all steps.
    Ok(Some(tensor_of(numbers, batch.device).narrow(0, 2, 1)?.force_contiguous()?.reshape(())?))
}

fn tensor_of(numbers: CudaSlice<f64>, device: &CudaDevice) -> Tensor {
    let length = numbers.len();
    let storage = CudaStorage::wrap_cuda_slice(numbers, device.clone());
    Tensor::from_storage(Storage::Cuda(storage), length, BackpropOp::none(), false)
}

/// Multiplies contiguous tensors in place.
pub fn rescale(tensors: &[&Tensor], factor: f64) -> Result<()> {
    change(tensors, Kernel::Rescale, factor)
}

/// Multiplies contiguous tensors in place and returns their magnitude after that. Waits like [`measure`].
pub fn rescale_measured(tensors: &[&Tensor], factor: f64) -> Result<Extent> {
    let launch = |batch: &Batch| program::rescale_measured(&batch.gpu(), batch.dtype, &batch.entries);
    measured(tensors, |tensor| changed(tensor, factor), launch)
}

/// Multiplies contiguous tensors in place, and returns a verdict on them: a pair in f64 on the GPU, whose second number is finite if all
/// elements are. Does nothing, and returns `None`, for tensors on several GPUs or of several dtypes. Does not wait.
pub fn rescale_judged(tensors: &[&Tensor], factor: f64) -> Result<Option<Tensor>> {
    let launch = |batch: &Batch| program::rescale_measured(&batch.gpu(), batch.dtype, &batch.entries);
    judged(tensors, |tensor| changed(tensor, factor), launch)
}

/// The verdict of [`rescale_judged`], on tensors that stay as they are.
pub fn judge(tensors: &[&Tensor]) -> Result<Option<Tensor>> {
    judged(tensors, read, |batch| program::measure(&batch.gpu(), batch.dtype, &batch.entries))
}

fn judged(
    tensors: &[&Tensor],
    entry: impl Fn(&Tensor) -> Result<Entry>,
    launch: impl Fn(&Batch) -> Result<Option<CudaSlice<f64>>>,
) -> Result<Option<Tensor>> {
    let batches = Batch::all(tensors.iter().map(|tensor| (*tensor, entry(tensor))))?;
    let [batch] = batches.as_slice() else { return Ok(None) };
    let Some(numbers) = launch(batch)? else { return Ok(None) };
    Ok(Some(tensor_of(numbers, batch.device).narrow(0, 0, 2)?))
}

/// Begins to copy a pair in f64 to the host, after all launched work. Does not wait.
pub fn send(pair: &Tensor) -> Result<Incoming> {
    Incoming::new(pair.device().as_cuda_device()?, input(pair)?)
}

/// Clamps the elements of contiguous tensors to the range from `-limit` to `limit`, in place.
pub fn clamp(tensors: &[&Tensor], limit: f64) -> Result<()> {
    change(tensors, Kernel::Clamp, limit)
}

fn measured(
    tensors: &[&Tensor],
    entry: impl Fn(&Tensor) -> Result<Entry>,
    launch: impl Fn(&Batch) -> Result<Option<CudaSlice<f64>>>,
) -> Result<Extent> {
    let batches = Batch::all(tensors.iter().map(|tensor| (*tensor, entry(tensor))))?;
    // Launch everything before waiting for the first result.
    let launched = batches.iter().map(launch).collect::<Result<Vec<_>>>()?;
    batches.iter().zip(&launched).try_fold(Extent::default(), |extent, (batch, numbers)| {
        Ok(extent.and(program::read_extent(&batch.gpu(), numbers.as_ref())?))
    })
}

fn change(tensors: &[&Tensor], kernel: Kernel, scalar: f64) -> Result<()> {
    Batch::all(tensors.iter().map(|tensor| (*tensor, changed(tensor, scalar))))?
        .iter()
        .try_for_each(|batch| program::change(&batch.gpu(), kernel, batch.dtype, &batch.entries))
}

/// Returns the entry of a tensor that is only read.
fn read(tensor: &Tensor) -> Result<Entry> {
    Ok(Entry { elements: tensor.elem_count(), gradient: input(tensor)?, ..Default::default() })
}

/// Returns the entry of a tensor that is changed in place.
fn changed(tensor: &Tensor, scalar: f64) -> Result<Entry> {
    let scalars = super::scalars([scalar]);
    Ok(Entry { elements: tensor.elem_count(), parameter: output(tensor)?, scalars, ..Default::default() })
}
