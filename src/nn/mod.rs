//! Layers that candle lacks, or cannot train: drop-in replacements with the same names in the `VarMap`.
//!
//! - [`SyncBatchNorm`]: batch normalisation over the batches of all ranks.
//! - [`LayerNorm`], [`RmsNorm`]: candle's own give no gradients where their input is contiguous; these do, and are fused.
//!
//! `candle_nn::ops::softmax_last_dim` and `candle_nn::rotary_emb::rope` have no backward pass either, and no replacement
//! here: `candle_nn::ops::softmax` and `rope_slow` have one.
mod batch_norm;
mod channels;
mod conv;
mod gemm;
mod layer_norm;
mod linear;
mod rms_norm;
mod row_norm;
mod sync_batch_norm;

pub use batch_norm::{BatchNorm, batch_norm};
pub use conv::{
    Conv1d, Conv2d, ConvTranspose1d, ConvTranspose2d, conv_transpose1d, conv_transpose1d_no_bias, conv_transpose2d,
    conv_transpose2d_no_bias, conv1d, conv1d_no_bias, conv2d, conv2d_no_bias,
};
pub use layer_norm::{LayerNorm, layer_norm, layer_norm_no_bias};
pub use linear::{Linear, linear, linear_b, linear_no_bias};
pub use rms_norm::{RmsNorm, rms_norm};
pub use sync_batch_norm::{SyncBatchNorm, sync_batch_norm};
