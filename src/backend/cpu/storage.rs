//! The bytes of candle tensors, borrowed in place.
//!
//! The tensors have been [checked](super::check): contiguous, on the CPU, of a supported dtype. The storage is locked
//! while `work` runs, so that whoever touches the tensor in the meantime waits.
use candle_core::{CpuStorage, Error, InplaceOp1, InplaceOp2, Layout, Result, Storage, Tensor};
use std::cell::RefCell;

/// Gives `work` the bytes of `tensor` to change.
pub(super) fn with_mut<R>(tensor: &Tensor, work: impl FnOnce(&mut [u8]) -> R) -> Result<R> {
    if tensor.elem_count() == 0 {
        // candle takes the strides of some empty shapes for an overlap.
        return Ok(work(&mut []));
    }
    let op = Op::new(|bytes: &mut [u8], _: &[u8]| work(bytes));
    tensor.inplace_op1(&op)?;
    op.result()
}

/// Gives `work` the bytes of `output` to change, and those of `input`, which lies in another storage, to read.
pub(super) fn with_mut_and_ref<R>(
    output: &Tensor,
    input: &Tensor,
    work: impl FnOnce(&mut [u8], &[u8]) -> R,
) -> Result<R> {
    if output.elem_count() == 0 {
        return Ok(work(&mut [], &[]));
    }
    let op = Op::new(work);
    output.inplace_op2(input, &op)?;
    op.result()
}

/// Gives `work` the bytes of `tensor` to read; others may read them at the same time.
pub(super) fn with_ref<R>(tensor: &Tensor, work: impl FnOnce(&[u8]) -> R) -> Result<R> {
    let (storage, layout) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(storage) => Ok(work(bytes_of(storage, layout)?)),
        _ => Err(Error::Msg("the tensor is not on the CPU".into())),
    }
}

/// An in-place op that runs `work` once and keeps what it returns.
struct Op<F, R> {
    work: RefCell<Option<F>>,
    result: RefCell<Option<R>>,
}

impl<F: FnOnce(&mut [u8], &[u8]) -> R, R> Op<F, R> {
    const NAME: &'static str = "collective";

    fn new(work: F) -> Self {
        Self { work: RefCell::new(Some(work)), result: RefCell::new(None) }
    }

    fn run(&self, output: &mut [u8], input: &[u8]) -> Result<()> {
        let work = self.work.take().ok_or_else(never)?;
        *self.result.borrow_mut() = Some(work(output, input));
        Ok(())
    }

    fn result(self) -> Result<R> {
        self.result.into_inner().ok_or_else(never)
    }
}

impl<F: FnOnce(&mut [u8], &[u8]) -> R, R> InplaceOp1 for Op<F, R> {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        self.run(bytes_of_mut(storage, layout)?, &[])
    }
}

impl<F: FnOnce(&mut [u8], &[u8]) -> R, R> InplaceOp2 for Op<F, R> {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn cpu_fwd(&self, output: &mut CpuStorage, output_l: &Layout, input: &CpuStorage, input_l: &Layout) -> Result<()> {
        self.run(bytes_of_mut(output, output_l)?, bytes_of(input, input_l)?)
    }
}

fn never() -> Error {
    Error::Msg("candle ran an in-place op never, or twice".into())
}

/// The same code for shared and exclusive borrows of the storages that have a supported dtype.
macro_rules! bytes {
    ($storage:expr, $layout:expr, $get:ident, $cast:path) => {{
        let (start, end) =
            $layout.contiguous_offsets().ok_or_else(|| Error::Msg("the tensor is not contiguous".into()))?;
        let bytes = match $storage {
            CpuStorage::U8(values) => values.$get(start..end),
            CpuStorage::U32(values) => values.$get(start..end).map($cast),
            CpuStorage::I64(values) => values.$get(start..end).map($cast),
            CpuStorage::BF16(values) => values.$get(start..end).map($cast),
            CpuStorage::F16(values) => values.$get(start..end).map($cast),
            CpuStorage::F32(values) => values.$get(start..end).map($cast),
            CpuStorage::F64(values) => values.$get(start..end).map($cast),
            _ => return Err(Error::Msg("the dtype is not supported".into())),
        };
        bytes.ok_or_else(|| Error::Msg("the layout reaches beyond the storage".into()))
    }};
}

fn bytes_of<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [u8]> {
    bytes!(storage, layout, get, bytemuck::cast_slice)
}

fn bytes_of_mut<'a>(storage: &'a mut CpuStorage, layout: &Layout) -> Result<&'a mut [u8]> {
    bytes!(storage, layout, get_mut, bytemuck::cast_slice_mut)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};

    #[test]
    fn a_view_gives_its_own_part_of_the_storage() {
        let tensor = Tensor::arange(0_i64, 6, &Device::Cpu).unwrap().reshape((3, 2)).unwrap();
        let row = tensor.narrow(0, 1, 1).unwrap();
        with_mut(&row, |bytes| bytemuck::cast_slice_mut::<u8, i64>(bytes)[0] = 20).unwrap();
        with_ref(&row, |bytes| assert_eq!(bytemuck::cast_slice::<u8, i64>(bytes), [20, 3])).unwrap();
        assert_eq!(tensor.to_vec2::<i64>().unwrap(), [[0, 1], [20, 3], [4, 5]]);
    }

    #[test]
    fn empty_tensors_have_no_bytes() {
        for shape in [vec![0], vec![2, 0], vec![0, 3]] {
            let tensor = Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
            assert_eq!(with_mut(&tensor, |bytes| bytes.len()).unwrap(), 0);
            assert_eq!(with_ref(&tensor, |bytes| bytes.len()).unwrap(), 0);
            assert_eq!(with_mut_and_ref(&tensor, &tensor, |output, input| output.len() + input.len()).unwrap(), 0);
        }
    }
}
