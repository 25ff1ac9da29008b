//! The CUDA sources and their kernels.
use candle_core::DType;

/// The dtypes that kernels support, with their suffixes in kernel names.
pub(super) const DTYPES: [(DType, &str); 4] =
    [(DType::F32, "f32"), (DType::F64, "f64"), (DType::F16, "f16"), (DType::BF16, "bf16")];

/// A file with the files that it needs before it. `#line` keeps line numbers in the compiler's messages correct.
macro_rules! source {
    ($($file:literal),*) => {
        concat!($("#line 1 \"", $file, "\"\n", include_str!($file)),*)
    };
}

/// The compilation units: their names, and the files that each is made of, the last of which has its kernels.
macro_rules! sources {
    ($($Source:ident: [$($file:literal),*] $name:literal,)*) => {
        /// A compilation unit.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub(super) enum Source {
            $($Source,)*
        }

        impl Source {
            #[cfg(test)]
            #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
            pub(super) const ALL: &[Self] = &[$(Self::$Source,)*];

            pub(super) fn name(self) -> &'static str {
                match self {
                    $(Self::$Source => $name,)*
                }
            }

            pub(super) fn text(self) -> &'static str {
                match self {
                    $(Self::$Source => source!($($file,)* $name),)*
                }
            }
        }
    };
}

macro_rules! kernels {
    ($($Source:ident: $($Kernel:ident $name:literal),*;)*) => {
        /// A kernel, for all dtypes that it supports.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Kernel {
            $($($Kernel,)*)*
        }

        impl Kernel {
            pub(super) const ALL: &[Self] = &[$($(Self::$Kernel,)*)*];

            pub(super) fn source(self) -> Source {
                match self {
                    $($(Self::$Kernel)|* => Source::$Source,)*
                }
            }

            /// The kernel's name in the source, without the dtype.
            fn base(self) -> &'static str {
                match self {
                    $($(Self::$Kernel => $name,)*)*
                }
            }
        }
    };
}

sources! {
    Adam: ["element.cu", "few.cu", "part.cu", "moments.cu"] "adam.cu",
    Sgd: ["element.cu", "few.cu", "part.cu"] "sgd.cu",
    Lamb: ["element.cu", "few.cu", "part.cu", "moments.cu", "reduce.cu"] "lamb.cu",
    Copy: ["element.cu", "few.cu", "part.cu"] "copy.cu",
    Gradient: ["element.cu", "few.cu", "part.cu", "reduce.cu"] "gradient.cu",
    Norm: ["element.cu", "few.cu", "part.cu", "reduce.cu", "layer.cu", "rows.cu", "norm.cu"] "norm_rows.cu",
    Conv: ["element.cu", "few.cu", "part.cu", "reduce.cu", "layer.cu"] "conv.cu",
    Pool: ["element.cu", "few.cu", "part.cu", "layer.cu"] "pool.cu",
    Channels: ["element.cu", "few.cu", "part.cu", "reduce.cu", "layer.cu", "batch.cu", "channels.cu"] "groups.cu",
    Pixels: ["element.cu", "few.cu", "part.cu", "layer.cu", "batch.cu"] "pixels.cu",
    Softmax: ["element.cu", "few.cu", "part.cu", "reduce.cu", "layer.cu", "rows.cu"] "softmax.cu",
    Elementwise: ["element.cu", "few.cu", "part.cu", "layer.cu"] "elementwise.cu",
    Lookup: ["element.cu", "few.cu", "part.cu", "reduce.cu", "layer.cu"] "lookup.cu",
    Linear: ["element.cu", "few.cu", "part.cu", "reduce.cu", "layer.cu", "rows.cu"] "linear.cu",
    Attention: ["element.cu", "few.cu", "part.cu", "reduce.cu", "layer.cu"] "attention.cu",
    Rnn: ["element.cu", "few.cu", "part.cu", "layer.cu"] "rnn.cu",
}

kernels! {
    Adam: Adam "adam", AdamFromF16 "adam_from_f16", AdamFromBf16 "adam_from_bf16";
    Sgd: Sgd "sgd";
    Lamb: LambMoments "lamb_moments", LambSums "lamb_sums", LambUpdate "lamb_update";
    Copy: CopyFromF32 "copy_from_f32", CopyFromF64 "copy_from_f64", CopyFromF16 "copy_from_f16",
        CopyFromBf16 "copy_from_bf16";
    Gradient: Measure "measure", Total "total", Rescale "rescale", Clip "clip", Clamp "clamp";
    Norm: NormForward "norm_forward", NormBackward "norm_backward", NormColumns "norm_columns",
        NormTotals "norm_totals", NormRows "norm_rows", AddNormRows "add_norm_rows", NormGradients "norm_gradients",
        AddNormGradients "add_norm_gradients";
    Conv: Im2col "im2col", Col2im "col2im", ImagesToColumns "images_to_columns", ColumnsToImages "columns_to_images",
        AddBias "add_bias", DepthwiseForward "depthwise_forward", DepthwiseBackwardData "depthwise_backward_data",
        DepthwiseBackwardFilter "depthwise_backward_filter";
    Pool: MaxPool "max_pool", MaxPoolBackward "max_pool_backward", MaxPoolHalve "max_pool_halve",
        MaxPoolHalveBackward "max_pool_halve_backward", Resample "resample",
        MaxPoolPixels "max_pool_pixels", MaxPoolPixelsBackward "max_pool_pixels_backward",
        ResamplePixels "resample_pixels";
    Channels: Moments "moments", Statistics "statistics", BatchStatistics "batch_statistics", ChannelSums "channel_sums",
        GradientSums "gradient_sums", SumsTotals "sums_totals", GradientTotals "gradient_totals", Normalise "normalise",
        AddReluGradient "add_relu_gradient", InputGradient "input_gradient",
        GroupStatistics "group_statistics", GroupGradients "group_gradients", GroupTotals "group_totals";
    Pixels: PixelMoments "pixel_moments", PixelSums "pixel_sums", PixelGradientSums "pixel_gradient_sums",
        PixelNormalise "pixel_normalise", PixelAddReluGradient "pixel_add_relu_gradient",
        PixelInputGradient "pixel_input_gradient";
    Softmax: SoftmaxRows "softmax_rows", SoftmaxColumns "softmax_columns", SoftmaxRowsBackward "softmax_rows_backward",
        SoftmaxColumnsBackward "softmax_columns_backward", LossesOfRows "losses_of_rows",
        LossesAndSlopesOfRows "losses_and_slopes_of_rows", LossesOfColumns "losses_of_columns",
        LossTotal "loss_total", LossScale "loss_scale",
        LossFactor "loss_factor", ScaleSums "scale_sums", LossRowsBackward "loss_rows_backward",
        LossColumnsBackward "loss_columns_backward";
    Elementwise: Activation "activation", ActivationBackward "activation_backward", Add "add", Dropout "dropout", Rope "rope",
        Transpose "transpose";
    Lookup: Lookup "lookup", LookupCount "lookup_count", LookupMove "lookup_move", LookupSums "lookup_sums",
        LookupTotals "lookup_totals";
    Linear: RepeatRow "repeat_row", SumColumns "sum_columns", MoveColumns "move_columns";
    Attention: AttentionWeights "attention_weights", AttentionGradients "attention_gradients",
        SplitHeads "split_heads", MergeHeads "merge_heads";
    Rnn: LstmStep "lstm_step", LstmGradient "lstm_gradient", GruStep "gru_step", GruGradient "gru_gradient";
}

impl Kernel {
    /// Adam's, for parameters and gradients of these dtypes.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub(super) fn adam_from(dtype: DType, gradients: DType) -> Self {
        match gradients {
            DType::F16 if dtype != gradients => Self::AdamFromF16,
            DType::BF16 if dtype != gradients => Self::AdamFromBf16,
            _ => Self::Adam,
        }
    }

    /// Returns the kernel that copies from tensors of `dtype`.
    pub fn copy_from(dtype: DType) -> Option<Self> {
        match dtype {
            DType::F32 => Some(Self::CopyFromF32),
            DType::F64 => Some(Self::CopyFromF64),
            DType::F16 => Some(Self::CopyFromF16),
            DType::BF16 => Some(Self::CopyFromBf16),
            _ => None,
        }
    }

    /// Returns the kernel's name in the source, or `None` if it does not support `dtype`.
    pub fn name(self, dtype: DType) -> Option<String> {
        // These kernels work on sums.
        if let Self::LambSums | Self::Total = self {
            return Some(self.base().to_string());
        }
        let (_, suffix) = DTYPES.into_iter().find(|(known, _)| *known == dtype)?;
        Some(format!("{}_{suffix}", self.base()))
    }
}
