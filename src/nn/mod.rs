//! Layers and functions with correct gradients, fast on CPUs: drop-in replacements for candle_nn's, with the same
//! constructors, configs and names in the `VarMap`. Each is one operation with a backward pass of its own.
//!
//! - Layers: [`Linear`], [`Conv1d`], [`Conv2d`], [`ConvTranspose1d`], [`ConvTranspose2d`], [`BatchNorm`], [`LayerNorm`],
//!   [`RmsNorm`], [`Embedding`], [`Dropout`].
//! - [`SyncBatchNorm`]: batch normalisation over the batches of all ranks.
//! - Functions: activations, pooling, [`interpolate`], [`softmax`], [`cross_entropy`], [`rope`],
//!   [`scaled_dot_product_attention`], [`scaled_dot_product_attention_qkvpacked`].
//! - [`checkpoint()`]: activation checkpointing.
//!
//! On CUDA, all have kernels of their own beside the matrix products of cuBLAS, and with the feature `cudnn` convolutions are
//! cuDNN's (`docs/performance.md`). `docs/migrating.md` lists the candle operations whose gradients are wrong or missing.
mod activation;
mod attach;
mod attention;
mod avg_pool;
mod batch_norm;
mod channels;
mod checkpoint;
mod conv;
mod cross_entropy;
mod dropout;
mod embedding;
mod gemm;
mod interpolate;
mod layer_norm;
mod linear;
mod max_pool;
mod normalise;
mod pool;
mod resample;
mod rms_norm;
mod rope;
mod row_norm;
mod rows;
mod softmax;
mod sync_batch_norm;

pub use activation::{gelu, gelu_erf, relu, silu};
pub use attention::{AttentionOptions, scaled_dot_product_attention, scaled_dot_product_attention_qkvpacked};
pub use avg_pool::{AvgPool2dOptions, adaptive_avg_pool2d, avg_pool2d};
pub use batch_norm::{BatchNorm, batch_norm};
pub use checkpoint::checkpoint;
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
