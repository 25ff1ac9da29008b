//! Layers that candle lacks, or cannot train: drop-in replacements with the same names in the `VarMap`.
//!
//! - [`SyncBatchNorm`]: batch normalisation over the batches of all ranks.
//! - [`LayerNorm`], [`RmsNorm`]: candle's own give no gradients where their input is contiguous; these do, and are fused.
//!
//! `candle_nn::ops::softmax_last_dim` and `candle_nn::rotary_emb::rope` have no backward pass either, and no replacement
//! here: `candle_nn::ops::softmax` and `rope_slow` have one.
mod activation;
mod attach;
mod attention;
mod avg_pool;
mod channels;
mod cross_entropy;
mod dropout;
mod embedding;
mod interpolate;
mod layer_norm;
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
pub use cross_entropy::{CrossEntropyOptions, Reduction, cross_entropy, cross_entropy_with_options};
pub use dropout::{Dropout, dropout};
pub use embedding::{Embedding, embedding};
pub use interpolate::{InterpolateMode, interpolate};
pub use layer_norm::{LayerNorm, layer_norm, layer_norm_no_bias};
pub use max_pool::{MaxPool2dOptions, max_pool2d};
pub use rms_norm::{RmsNorm, rms_norm};
pub use rope::{rope, rope_i, rope_thd};
pub use softmax::{log_softmax, softmax, softmax_last_dim};
pub use sync_batch_norm::{SyncBatchNorm, sync_batch_norm};
