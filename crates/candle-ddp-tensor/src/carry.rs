//! Facts that travel with a variable. candle's `Var` has no place for them, but its storage may be longer than its elements: a fact lies
//! behind them, where no operation reads or writes. Copies do not have it.
use crate::borrow::slice;
use crate::dispatch;
use crate::kernels::storage_address;
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, Device, Layout, Result, Shape, Storage, Tensor, Var, bail};

/// Precedes a fact. No other program leaves this behind the elements of a variable.
const MARK: [u8; 16] = *b"\x01candle-ddp fact";

/// A variable of this shape with the elements of `values`, of a floating-point dtype, that carries `fact`.
pub fn carrying(values: &Tensor, shape: &Shape, fact: &[u64]) -> Result<Var> {
    if values.elem_count() != shape.elem_count() || !values.dtype().is_float() {
        bail!("a variable of shape {shape:?} cannot be made of {values:?}")
    }
    let count = u8::try_from(fact.len()).map_err(candle_core::Error::wrap)?;
    let bytes = MARK.into_iter().chain([count]).chain(fact.iter().flat_map(|number| number.to_le_bytes()));
    // Every floating-point dtype has the numbers up to 255.
    let behind = Tensor::from_iter(bytes.map(f32::from), &Device::Cpu)?;
    let behind = behind.to_dtype(values.dtype())?.to_device(values.device())?;
    let all = match values.elem_count() {
        0 => behind,
        _ => Tensor::cat(&[&values.flatten_all()?, &behind], 0)?,
    };
    let (storage, layout) = all.storage_and_layout();
    Var::from_tensor(&Tensor::from_storage(storage.try_clone(layout)?, shape, BackpropOp::none(), true))
}

/// The fact that `var` carries.
pub fn carried(var: &Var) -> Option<Vec<u64>> {
    let head = behind(var, 0, MARK.len() + 1)?;
    let count = usize::from(*head.strip_prefix(&MARK)?.first()?);
    let bytes = behind(var, head.len(), count * size_of::<u64>())?;
    Some(bytes.as_chunks().0.iter().map(|number| u64::from_le_bytes(*number)).collect())
}

/// `count` numbers, from the `start`-th on, behind the elements of `var`. None if there are not so many: if a GPU fails, so does what the
/// caller does with the variable next.
fn behind(var: &Var, start: usize, count: usize) -> Option<Vec<u8>> {
    fn read<S: BackendStorage<Device: BackendDevice<Storage = S>>>(storage: &S, layout: &Layout) -> Result<CpuStorage> {
        let mut read = storage.device().zeros_impl(layout.shape(), storage.dtype())?;
        storage.copy_strided_src(&mut read, 0, layout)?;
        read.to_cpu_storage()
    }
    let (storage, layout) = var.storage_and_layout();
    let layout = Layout::contiguous_with_offset(count, layout.start_offset() + var.elem_count() + start);
    let read = match &*storage {
        Storage::Cpu(storage) => {
            let is_there = dispatch!(storage.dtype(), E => slice::<E>(storage, &layout).is_ok(), else => false);
            is_there.then(|| read(storage, &layout))
        }
        Storage::Cuda(storage) => storage_address(storage, &layout).is_ok().then(|| read(storage, &layout)),
        Storage::Metal(_) => None,
    };
    let read = Tensor::from_storage(Storage::Cpu(read?.ok()?), count, BackpropOp::none(), false);
    let numbers: Vec<f32> = read.to_dtype(candle_core::DType::F32).and_then(|read| read.to_vec1()).ok()?;
    Some(numbers.into_iter().map(|number| number as u8).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::DType;

    #[test]
    fn a_variable_carries_a_fact_that_no_operation_sees() {
        let fact = [0, 255, 256, u64::MAX];
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            for (values, shape) in
                [(vec![1f32, 2., 3., 4., 5., 6.], vec![1, 6]), (vec![], vec![1, 0]), (vec![7.], vec![])]
            {
                let tensor = Tensor::new(values.clone(), &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
                let var = carrying(&tensor, &shape.clone().into(), &fact).unwrap();
                assert_eq!(carried(&var).as_deref(), Some(&fact[..]), "{dtype:?} {shape:?}");
                let read = |tensor: &Tensor| {
                    let tensor = tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap();
                    tensor.to_vec1::<f32>().unwrap()
                };
                assert_eq!((read(&var), var.dims()), (values.clone(), &shape[..]));
                assert!(var.is_variable() && var.is_contiguous());
                // A change of the elements.
                var.set(&(tensor.copy().unwrap() * 2.).unwrap().reshape(&shape[..]).unwrap()).unwrap();
                assert_eq!(read(&var), values.iter().map(|value| 2. * value).collect::<Vec<_>>());
                assert_eq!(carried(&var.clone()).as_deref(), Some(&fact[..]));
                assert_eq!(carried(&Var::from_tensor(&var.copy().unwrap()).unwrap()), None, "a copy");
                assert_eq!(carried(&Var::from_tensor(&tensor).unwrap()), None);
            }
        }
        assert!(carrying(&Tensor::zeros(2, DType::F32, &Device::Cpu).unwrap(), &Shape::from(3), &[]).is_err());
        assert!(carrying(&Tensor::zeros(2, DType::I64, &Device::Cpu).unwrap(), &Shape::from(2), &[]).is_err());
        let var = Var::zeros(3, DType::I64, &Device::Cpu).unwrap();
        assert_eq!(carried(&var), None);
    }
}
