use crate::tensor::DTYPES;
use crate::{Error, Result};
use candle_core::DType;
use std::fmt;

/// Which dtypes DistributedDataParallel works with: PyTorch's `_MixedPrecision`. Every field's default is None.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MixedPrecision {
    /// The dtype in which the model computes: the `VarBuilder` that it is built with has this dtype, and `forward` and
    /// `forward_t` convert their input to it (`call` leaves that to its caller). Outputs stay as they are. None: the
    /// variables'.
    ///
    /// A layer that asks the `VarBuilder` for another dtype gets what it asks for. Ignored variables are not converted:
    /// they are made in the dtype that the model asks for.
    pub param_dtype: Option<DType>,
    /// The dtype in which gradients are summed up over the ranks, and added up under `no_sync`. None: that in which they
    /// come, `param_dtype`. Where it is not the variables' own, the averaged gradients are converted in one pass over them.
    pub reduce_dtype: Option<DType>,
    /// The dtype in which floating-point buffers, such as running means, are made. None: the variables', usually f32,
    /// since a running mean in f16 or bf16 stops following small changes.
    pub buffer_dtype: Option<DType>,
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
                let reason = format!("{field} is {}, where f32, f64, f16 or bf16 is expected", dtype.as_str());
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
        write!(f, "param_dtype {param}, reduce_dtype {reduce}, buffer_dtype {buffer}")
    }
}
