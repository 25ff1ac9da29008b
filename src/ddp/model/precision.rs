use crate::tensor::DTYPES;
use crate::{Error, Result};
use candle_core::DType;
use candle_ddp_nn::{Autocast, autocast};

/// The dtypes of a model's variables and of its computation: [`DdpOptions::precision`](crate::DdpOptions::precision). The page
/// of [`amp`](crate::amp) compares them. The default is `Pure(DType::F32)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Precision {
    /// Variables have this dtype, and the model computes with them as they are.
    Pure(DType),
    /// Variables are f32, and the functions of [`nn`](crate::nn) cast their arguments in forward passes and in
    /// [`call`](crate::DistributedDataParallel::call): `torch.autocast`. Under the other variants, the state of the calling thread holds.
    Autocast(Autocast),
    /// Variables are f32, and the model computes with copies of them in 16 bits: FSDP's `MixedPrecision`. A layer that requests
    /// another dtype from the `VarBuilder` gets it.
    Half {
        /// [`F16`](DType::F16) or [`BF16`](DType::BF16): the model's `VarBuilder` has this dtype, and `forward` and `forward_t` convert their
        /// input to it (with `call`, the caller does, by
        /// [`cast_forward_inputs`](crate::DistributedDataParallel::cast_forward_inputs)). Outputs are not converted. Ignored variables are
        /// created in the dtype that the model requests.
        param_dtype: DType,
        /// The dtype in which floating-point buffers, such as running means, are created. None: f32, since a running mean in 16
        /// bits stops following small changes.
        buffer_dtype: Option<DType>,
    },
}

impl Default for Precision {
    fn default() -> Self {
        Self::Pure(DType::F32)
    }
}

impl Precision {
    /// The dtype of the variables.
    pub(in crate::ddp) fn variables(self) -> DType {
        match self {
            Self::Pure(dtype) => dtype,
            Self::Autocast(_) | Self::Half { .. } => DType::F32,
        }
    }

    /// The dtype of the copies with which the model computes, if it does.
    pub(in crate::ddp) fn param_dtype(self) -> Option<DType> {
        match self {
            Self::Half { param_dtype, .. } => Some(param_dtype),
            Self::Pure(_) | Self::Autocast(_) => None,
        }
    }

    /// The dtype of the `VarBuilder` with which the model is built.
    pub(in crate::ddp) fn held_as(self) -> DType {
        self.param_dtype().unwrap_or(self.variables())
    }

    pub(in crate::ddp) fn buffer_dtype(self) -> Option<DType> {
        match self {
            Self::Half { buffer_dtype, .. } => buffer_dtype,
            Self::Pure(_) | Self::Autocast(_) => None,
        }
    }

    /// Runs a forward pass.
    pub(in crate::ddp) fn run<T>(self, f: impl FnOnce() -> T) -> T {
        match self {
            Self::Autocast(mode) => autocast(mode, f),
            Self::Pure(_) | Self::Half { .. } => f(),
        }
    }

    pub(in crate::ddp) fn check(self) -> Result<()> {
        match self {
            Self::Pure(dtype) => check_dtype("precision", dtype),
            Self::Autocast(autocast) => Ok(autocast.check()?),
            Self::Half { param_dtype: DType::F16 | DType::BF16, buffer_dtype } => {
                buffer_dtype.map_or(Ok(()), |dtype| check_dtype("buffer_dtype", dtype))
            }
            Self::Half { param_dtype, .. } => {
                Err(Error::invalid("param_dtype", format!("it must be f16 or bf16, not {}", param_dtype.as_str())))
            }
        }
    }
}

pub(in crate::ddp) fn check_dtype(argument: &'static str, dtype: DType) -> Result<()> {
    if DTYPES.contains(&dtype) {
        return Ok(());
    }
    Err(Error::invalid(argument, format!("it must be f32, f64, f16 or bf16, not {}", dtype.as_str())))
}
