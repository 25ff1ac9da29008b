use crate::tensor::DTYPES;
use crate::{Error, Result};
use candle_core::DType;
use std::fmt;

/// The dtypes that DistributedDataParallel works with: PyTorch's `_MixedPrecision`. Every field defaults to None.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MixedPrecision {
    /// The dtype in which the model computes: its `VarBuilder` has this dtype, and `forward` and `forward_t` convert
    /// their input to it (with `call`, the caller does, by
    /// [`cast_forward_inputs`](crate::DistributedDataParallel::cast_forward_inputs)). Outputs are not converted. None: the variables' dtype.
    ///
    /// A layer that requests another dtype from the `VarBuilder` gets it. Ignored variables are not converted: they are
    /// created in the dtype that the model requests.
    pub param_dtype: Option<DType>,
    /// The dtype in which gradients are summed over the ranks and accumulated under `no_sync`. None: the dtype in which
    /// they arrive, `param_dtype`. If it is not the variables' dtype, the averaged gradients are converted in one pass.
    pub reduce_dtype: Option<DType>,
    /// The dtype in which floating-point buffers, such as running means, are created. None: the variables' dtype,
    /// usually f32, since a running mean in f16 or bf16 stops following small changes.
    pub buffer_dtype: Option<DType>,
    /// Whether the averaged gradients keep the dtype in which they were summed, instead of that of their variables: the field of FSDP's
    /// `MixedPrecision`. The optimizers of [`optim`](crate::optim) take them, with the same results, and on GPUs AdamW and Adam read
    /// them as they are: this saves the memory of a converted copy, and the time to write and read it. Clipping rounds them to this
    /// dtype, and other code must expect it; candle's own optimizers refuse them. Not for f16 with a
    /// [`GradScaler`](crate::amp::GradScaler).
    pub keep_low_precision_grads: bool,
}

impl MixedPrecision {
    pub(super) fn check(&self) -> Result<()> {
        let fields = [
            ("param_dtype", self.param_dtype),
            ("reduce_dtype", self.reduce_dtype),
            ("buffer_dtype", self.buffer_dtype),
        ];
        for (field, dtype) in fields {
            if let Some(dtype) = dtype
                && !DTYPES.contains(&dtype)
            {
                let reason = format!("{field} must be f32, f64, f16 or bf16, not {}", dtype.as_str());
                return Err(Error::invalid("mixed_precision", reason));
            }
        }
        Ok(())
    }
}

impl fmt::Display for MixedPrecision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |dtype: Option<DType>| dtype.map_or("none", |dtype| dtype.as_str());
        let (param, reduce, buffer) = (name(self.param_dtype), name(self.reduce_dtype), name(self.buffer_dtype));
        write!(f, "param_dtype {param}, reduce_dtype {reduce}, buffer_dtype {buffer}")?;
        if self.keep_low_precision_grads { write!(f, ", keep_low_precision_grads") } else { Ok(()) }
    }
}
