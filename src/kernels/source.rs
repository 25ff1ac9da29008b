//! The CUDA sources and their kernels.
use candle_core::DType;

/// The dtypes that kernels support, with their suffixes in kernel names.
pub(super) const DTYPES: [(DType, &str); 4] =
    [(DType::F32, "f32"), (DType::F64, "f64"), (DType::F16, "f16"), (DType::BF16, "bf16")];

/// A compilation unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Source {
    Adam,
    Sgd,
    Lamb,
    Copy,
    Gradient,
    Norm,
}

/// A file with the files that it needs before it. `#line` keeps line numbers in the compiler's messages correct.
macro_rules! source {
    ($($file:literal),*) => {
        concat!($("#line 1 \"", $file, "\"\n", include_str!($file)),*)
    };
}

impl Source {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Adam => "adam.cu",
            Self::Sgd => "sgd.cu",
            Self::Lamb => "lamb.cu",
            Self::Copy => "copy.cu",
            Self::Gradient => "gradient.cu",
            Self::Norm => "norm.cu",
        }
    }

    pub(super) fn text(self) -> &'static str {
        match self {
            Self::Adam => source!("element.cu", "part.cu", "adam.cu"),
            Self::Sgd => source!("element.cu", "part.cu", "sgd.cu"),
            Self::Lamb => source!("element.cu", "part.cu", "reduce.cu", "lamb.cu"),
            Self::Copy => source!("element.cu", "part.cu", "copy.cu"),
            Self::Gradient => source!("element.cu", "part.cu", "reduce.cu", "gradient.cu"),
            Self::Norm => source!("element.cu", "part.cu", "reduce.cu", "norm.cu"),
        }
    }
}

/// A kernel, for all dtypes that it supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kernel {
    Adam,
    Sgd,
    LambMoments,
    LambSums,
    LambUpdate,
    CopyFromF32,
    CopyFromF64,
    CopyFromF16,
    CopyFromBf16,
    Measure,
    Total,
    Rescale,
    Clamp,
    NormForward,
    NormBackward,
    NormColumns,
    NormTotals,
}

impl Kernel {
    #[cfg(test)]
    pub(super) const ALL: [Self; 17] = [
        Self::Adam,
        Self::Sgd,
        Self::LambMoments,
        Self::LambSums,
        Self::LambUpdate,
        Self::CopyFromF32,
        Self::CopyFromF64,
        Self::CopyFromF16,
        Self::CopyFromBf16,
        Self::Measure,
        Self::Total,
        Self::Rescale,
        Self::Clamp,
        Self::NormForward,
        Self::NormBackward,
        Self::NormColumns,
        Self::NormTotals,
    ];

    pub(super) fn source(self) -> Source {
        match self {
            Self::Adam => Source::Adam,
            Self::Sgd => Source::Sgd,
            Self::LambMoments | Self::LambSums | Self::LambUpdate => Source::Lamb,
            Self::CopyFromF32 | Self::CopyFromF64 | Self::CopyFromF16 | Self::CopyFromBf16 => Source::Copy,
            Self::Measure | Self::Total | Self::Rescale | Self::Clamp => Source::Gradient,
            Self::NormForward | Self::NormBackward | Self::NormColumns | Self::NormTotals => Source::Norm,
        }
    }

    /// Returns the kernel that copies from tensors of `dtype`.
    pub(super) fn copy_from(dtype: DType) -> Option<Self> {
        match dtype {
            DType::F32 => Some(Self::CopyFromF32),
            DType::F64 => Some(Self::CopyFromF64),
            DType::F16 => Some(Self::CopyFromF16),
            DType::BF16 => Some(Self::CopyFromBf16),
            _ => None,
        }
    }

    /// Returns the kernel's name in the source, or `None` if it does not support `dtype`.
    pub(super) fn name(self, dtype: DType) -> Option<String> {
        let base = match self {
            Self::Adam => "adam",
            Self::Sgd => "sgd",
            Self::LambMoments => "lamb_moments",
            // These kernels work on sums.
            Self::LambSums => return Some("lamb_sums".to_string()),
            Self::Total => return Some("total".to_string()),
            Self::LambUpdate => "lamb_update",
            Self::CopyFromF32 => "copy_from_f32",
            Self::CopyFromF64 => "copy_from_f64",
            Self::CopyFromF16 => "copy_from_f16",
            Self::CopyFromBf16 => "copy_from_bf16",
            Self::Measure => "measure",
            Self::Rescale => "rescale",
            Self::Clamp => "clamp",
            Self::NormForward => "norm_forward",
            Self::NormBackward => "norm_backward",
            Self::NormColumns => "norm_columns",
            Self::NormTotals => "norm_totals",
        };
        let (_, suffix) = DTYPES.into_iter().find(|(known, _)| *known == dtype)?;
        Some(format!("{base}_{suffix}"))
    }
}
