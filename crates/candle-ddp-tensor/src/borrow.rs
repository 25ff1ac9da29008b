//! Borrows the elements of contiguous CPU tensors in place.
//!
//! candle lends the storage of one tensor mutably, through an in-place operation, so several such operations are nested
//! for several tensors.
use crate::error::check_storage;
use crate::{Element, vectorise};
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, InplaceOp1, InplaceOp2, Layout, Result, Shape, Storage, Tensor, WithDType};
use std::any::Any;
use std::cell::RefCell;

/// The elements of `storage` that `layout` selects.
pub fn slice<'a, T: WithDType>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [T]> {
    check_storage(storage)?;
    let values = storage.as_slice::<T>()?;
    match layout.contiguous_offsets().and_then(|(start, end)| values.get(start..end)) {
        Some(values) => Ok(values),
        None => candle_core::bail!("the tensor must be contiguous: {layout:?}"),
    }
}

/// The elements of `storage` that `layout` selects, mutably.
pub fn slice_mut<'a, T: Element>(storage: &'a mut CpuStorage, layout: &Layout) -> Result<&'a mut [T]> {
    check_storage(storage)?;
    let dtype = candle_core::backend::BackendStorage::dtype(storage);
    match (T::values_mut(storage), layout.contiguous_offsets()) {
        (Some(values), Some((start, end))) if end <= values.len() => Ok(&mut values[start..end]),
        _ => candle_core::bail!("the tensor must be contiguous and of dtype {:?}, not {dtype:?}, {layout:?}", T::DTYPE),
    }
}

/// Passes the elements of `tensor` to `work`.
pub fn with_slice<T: WithDType, R>(tensor: &Tensor, work: impl FnOnce(&[T]) -> Result<R>) -> Result<R> {
    let (storage, layout) = tensor.storage_and_layout();
    work(slice(on_cpu(&storage)?, layout)?)
}

fn on_cpu(storage: &Storage) -> Result<&CpuStorage> {
    match storage {
        Storage::Cpu(storage) => Ok(storage),
        _ => candle_core::bail!("the tensor must be on the CPU, not on {:?}", storage.device().location()),
    }
}

/// Rounds to the nearest values of dtype `T`; a no-op if that is the type used for arithmetic.
pub fn narrow_vec<T: Element>(values: Vec<T::Real>) -> Vec<T> {
    // Only `Any` can tell whether the two types are the same.
    match (Box::new(values) as Box<dyn Any>).downcast::<Vec<T>>() {
        Ok(values) => *values,
        Err(values) => {
            let values = values.downcast::<Vec<T::Real>>().unwrap_or_default();
            vectorise!(|| values.iter().map(|value| T::narrow(*value)).collect())
        }
    }
}

/// Creates a tensor on the CPU from these elements; `shape` must have as many.
pub fn slice_tensor<T: WithDType>(values: Vec<T>, shape: &Shape) -> Tensor {
    let storage = Storage::Cpu(T::to_cpu_storage_owned(values));
    Tensor::from_storage(storage, shape.clone(), BackpropOp::none(), false)
}

/// Like `slice_tensor`, from values of the type used for arithmetic.
pub fn tensor<T: Element>(values: Vec<T::Real>, shape: &Shape) -> Tensor {
    slice_tensor(narrow_vec::<T>(values), shape)
}

/// Passes the elements of `tensor` to `work`, mutably.
pub fn with_slice_mut<E: Element>(tensor: &Tensor, work: impl Fn(&mut [E])) -> Result<()> {
    with_slices_mut::<E>(std::slice::from_ref(tensor), &mut |slices| {
        slices.iter_mut().for_each(|slice| work(slice));
    })
}

/// Passes the elements of two tensors to `work`, the first mutably; they may differ in dtype.
pub fn zip<D: Element, S: Element>(destination: &Tensor, source: &Tensor, work: impl Fn(&mut [D], &[S])) -> Result<()> {
    destination.inplace_op2(source, &Zip(work, std::marker::PhantomData))
}

struct Zip<D, S, F>(F, std::marker::PhantomData<(D, S)>);

impl<D: Element, S: Element, F: Fn(&mut [D], &[S])> InplaceOp2 for Zip<D, S, F> {
    fn name(&self) -> &'static str {
        "zip"
    }

    fn cpu_fwd(&self, dst: &mut CpuStorage, dst_l: &Layout, src: &CpuStorage, src_l: &Layout) -> Result<()> {
        (self.0)(slice_mut(dst, dst_l)?, slice(src, src_l)?);
        Ok(())
    }
}

type Work<'f, E> = &'f mut dyn FnMut(&mut [&mut [E]]);
type Opened<'o, 'f, E> = (Vec<&'o mut [E]>, Work<'f, E>);

/// Passes the elements of all `tensors` to `work`, mutably. Their storages must differ.
pub fn with_slices_mut<E: Element>(tensors: &[Tensor], work: Work<E>) -> Result<()> {
    open(tensors, Vec::with_capacity(tensors.len()), work)
}

fn open<E: Element>(tensors: &[Tensor], mut opened: Vec<&mut [E]>, work: Work<E>) -> Result<()> {
    match tensors.split_first() {
        None => {
            work(&mut opened);
            Ok(())
        }
        Some((first, rest)) => first.inplace_op1(&Open { rest, state: RefCell::new(Some((opened, work))) }),
    }
}

/// Adds the storage of one more tensor to those already open.
struct Open<'a, 'o, 'f, E> {
    rest: &'a [Tensor],
    state: RefCell<Option<Opened<'o, 'f, E>>>,
}

impl<E: Element> InplaceOp1 for Open<'_, '_, '_, E> {
    fn name(&self) -> &'static str {
        "open"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        // candle calls this once; a second call would have nothing to do.
        let Some((mut opened, work)) = self.state.take() else { return Ok(()) };
        opened.push(slice_mut(storage, layout)?);
        open(self.rest, opened, work)
    }
}
