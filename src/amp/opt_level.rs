use super::{Autocast, MixedPrecision};
use crate::{DdpOptions, Error, Result};
use candle_core::DType;
use std::str::FromStr;

/// The optimization levels of Apex: `opt_level` of `apex.amp.initialize`.
///
/// ```
/// use candle_core::DType;
/// use candle_ddp::amp::{Autocast, OptLevel};
/// let level: OptLevel = "O1".parse()?;
/// assert_eq!(level.options(DType::BF16).autocast, Some(Autocast::Lists(DType::BF16)));
/// # Ok::<_, candle_ddp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OptLevel {
    /// Everything is f32.
    O0,
    /// Parameters are f32, and each function casts its arguments by PyTorch's lists: [`Autocast::Lists`]. Apex's default.
    O1,
    /// The model is of 16 bits, with f32 masters and buffers: [`MixedPrecision`].
    O2,
    /// Everything has 16 bits.
    O3,
}

impl OptLevel {
    /// The options of [`DistributedDataParallel`](crate::DistributedDataParallel) for this level, in which `dtype` is
    /// [`F16`](DType::F16), as in Apex, or [`BF16`](DType::BF16). All others have their defaults.
    ///
    /// From O1 on, f16 needs a [`GradScaler`](super::GradScaler).
    pub fn options(self, dtype: DType) -> DdpOptions {
        let options = DdpOptions::default();
        match self {
            Self::O0 => options,
            Self::O1 => DdpOptions { autocast: Some(Autocast::Lists(dtype)), ..options },
            Self::O2 => {
                let mixed_precision = MixedPrecision { param_dtype: Some(dtype), ..Default::default() };
                DdpOptions { mixed_precision: Some(mixed_precision), ..options }
            }
            Self::O3 => DdpOptions { dtype, ..options },
        }
    }
}

/// `O0` to `O3`.
impl FromStr for OptLevel {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "O0" => Ok(Self::O0),
            "O1" => Ok(Self::O1),
            "O2" => Ok(Self::O2),
            "O3" => Ok(Self::O3),
            _ => Err(Error::invalid("opt_level", format!("it must be O0, O1, O2 or O3 (the letter O), not {name:?}"))),
        }
    }
}
