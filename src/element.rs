//! Floating-point elements of CPU tensors, for kernels that are written once for all of them.
use crate::float16;
use candle_core::{CpuStorage, Layout, Storage, Tensor, WithDType};
use half::{bf16, f16};

/// What a kernel calculates in.
pub(crate) trait Accumulator: WithDType {
    fn square_root(self) -> Self;
}

impl Accumulator for f32 {
    fn square_root(self) -> Self {
        self.sqrt()
    }
}

impl Accumulator for f64 {
    fn square_root(self) -> Self {
        self.sqrt()
    }
}

/// What a tensor holds. f16 and bf16 are calculated with in f32.
pub(crate) trait Element: WithDType {
    type Acc: Accumulator;

    fn widen(self) -> Self::Acc;
    fn narrow(value: Self::Acc) -> Self;
    fn values_mut(storage: &mut CpuStorage) -> Option<&mut [Self]>;
}

macro_rules! values_mut {
    ($variant:ident) => {
        fn values_mut(storage: &mut CpuStorage) -> Option<&mut [Self]> {
            match storage {
                CpuStorage::$variant(values) => Some(values),
                _ => None,
            }
        }
    };
}

macro_rules! native {
    ($($float:ty: $variant:ident),*) => {$(
        impl Element for $float {
            type Acc = $float;
            values_mut!($variant);
            #[inline(always)]
            fn widen(self) -> $float {
                self
            }
            #[inline(always)]
            fn narrow(value: $float) -> $float {
                value
            }
        }
    )*};
}
native!(f32: F32, f64: F64);

macro_rules! through_f32 {
    ($($float:ty: $variant:ident, $widen:path, $narrow:path);*) => {$(
        impl Element for $float {
            type Acc = f32;
            values_mut!($variant);
            #[inline(always)]
            fn widen(self) -> f32 {
                $widen(self)
            }
            #[inline(always)]
            fn narrow(value: f32) -> $float {
                $narrow(value)
            }
        }
    )*};
}
through_f32!(
    f16: F16, float16::f16_to_f32, float16::f32_to_f16;
    bf16: BF16, float16::bf16_to_f32, float16::f32_to_bf16
);

/// Evaluates an expression of type `candle_core::Result` with the element type that belongs to a dtype.
macro_rules! dispatch {
    ($dtype:expr, $operation:expr, $element:ident => $body:expr) => {
        match $dtype {
            candle_core::DType::F32 => {
                type $element = f32;
                $body
            }
            candle_core::DType::F64 => {
                type $element = f64;
                $body
            }
            candle_core::DType::F16 => {
                type $element = half::f16;
                $body
            }
            candle_core::DType::BF16 => {
                type $element = half::bf16;
                $body
            }
            dtype => Err(candle_core::Error::from($crate::Error::UnsupportedDType {
                operation: $operation.to_string(),
                dtype,
                supported: "f32, f64, f16, bf16",
            })),
        }
    };
}
pub(crate) use dispatch;

/// The elements that `layout` shows of `storage`.
pub(crate) fn slice<'a, T: WithDType>(storage: &'a CpuStorage, layout: &Layout) -> candle_core::Result<&'a [T]> {
    let values = storage.as_slice::<T>()?;
    match layout.contiguous_offsets().and_then(|(start, end)| values.get(start..end)) {
        Some(values) => Ok(values),
        None => candle_core::bail!("a contiguous tensor is needed, got {layout:?}"),
    }
}

/// The elements that `layout` shows of `storage`, to be changed.
pub(crate) fn slice_mut<'a, T: Element>(
    storage: &'a mut CpuStorage,
    layout: &Layout,
) -> candle_core::Result<&'a mut [T]> {
    let dtype = candle_core::backend::BackendStorage::dtype(storage);
    let range = layout.contiguous_offsets();
    match (T::values_mut(storage), range) {
        (Some(values), Some((start, end))) if end <= values.len() => Ok(&mut values[start..end]),
        _ => candle_core::bail!("a contiguous tensor of {:?} is needed, got {dtype:?}, {layout:?}", T::DTYPE),
    }
}

/// Gives `work` the elements of a contiguous tensor on the CPU.
pub(crate) fn with_slice<T: WithDType, R>(
    tensor: &Tensor,
    work: impl FnOnce(&[T]) -> candle_core::Result<R>,
) -> candle_core::Result<R> {
    let (storage, layout) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(storage) => work(slice(storage, layout)?),
        _ => candle_core::bail!("a tensor on the CPU is needed"),
    }
}
