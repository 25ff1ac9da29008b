//! Layers and functions that candle lacks, cannot train, or trains slowly: drop-in replacements with candle_nn's names,
//! also in the `VarMap`.
//!
//! - [`SyncBatchNorm`]: batch normalisation over the batches of all ranks.
//! - [`LayerNorm`], [`RmsNorm`]: candle's own give no gradients where their input is contiguous; these do, and are
//!   fused.
//! - [`max_pool2d`], [`avg_pool2d`], [`adaptive_avg_pool2d`], [`interpolate`]: candle's gradients are wrong or missing.
//! - [`softmax`], [`log_softmax`], [`softmax_last_dim`], [`cross_entropy`]: one operation each, over any dimension.
//! - [`relu`], [`gelu`], [`gelu_erf`], [`silu`]: one operation forward and one backward, with PyTorch's gradients.
//! - [`scaled_dot_product_attention`]: forward and backward without the matrix of all weights.
//! - [`Embedding`], [`rope`], [`rope_i`], [`rope_thd`]: with a backward pass that is fast, or that is there at all.
//! - [`Dropout`], [`dropout`]: masks that follow from a seed, and can be saved with a checkpoint.
//!
//! On the CPU each of these is a loop of this crate, which calculates in f32 for f16 and bf16. On CUDA norms are
//! kernels, and the others are composed of those operations of candle whose gradients are right.
mod activation;
mod attach;
mod attention;
mod avg_pool;
mod batch_norm;
mod channels;
mod conv;
mod cross_entropy;
mod dropout;
mod embedding;
mod gemm;
mod interpolate;
mod layer_norm;
mod linear;
mod max_pool;
mod pool;
mod resample;
mod rms_norm;
mod rope;
mod row_norm;
mod rows;
mod softmax;
mod sync_batch_norm;

pub use activation::{gelu, gelu_erf, relu, silu};
pub use attention::{AttentionOptions, scaled_dot_product_attention};
pub use avg_pool::{AvgPool2dOptions, adaptive_avg_pool2d, avg_pool2d};
pub use batch_norm::{BatchNorm, batch_norm};
pub use conv::{
    Conv1d, Conv2d, ConvTranspose1d, ConvTranspose2d, conv_transpose1d, conv_transpose1d_no_bias, conv_transpose2d,
    conv_transpose2d_no_bias, conv1d, conv1d_no_bias, conv2d, conv2d_no_bias,
};
pub use cross_entropy::{CrossEntropyOptions, Reduction, cross_entropy, cross_entropy_with_options};
pub use dropout::{Dropout, dropout};
pub use embedding::{Embedding, embedding};
pub use interpolate::{InterpolateMode, interpolate};
pub use layer_norm::{LayerNorm, layer_norm, layer_norm_no_bias};
pub use linear::{Linear, linear, linear_b, linear_no_bias};
pub use max_pool::{MaxPool2dOptions, max_pool2d};
pub use rms_norm::{RmsNorm, rms_norm};
pub use rope::{rope, rope_i, rope_thd};
pub use softmax::{log_softmax, softmax, softmax_last_dim};
pub use sync_batch_norm::{SyncBatchNorm, sync_batch_norm};
