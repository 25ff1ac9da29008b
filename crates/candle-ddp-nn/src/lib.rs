#![doc = include_str!("../README.md")]

pub mod activation;
mod add;
pub mod attention;
mod autocast;
mod avg_pool;
pub mod batch_norm;
mod channels;
mod checkpoint;
pub mod conv;
mod cross_entropy;
mod ctc_loss;
mod dropout;
pub mod embedding;
mod gemm;
pub mod group_norm;
mod groups;
mod instance_norm;
mod interpolate;
pub mod kv_cache;
pub mod layer_norm;
pub mod linear;
mod linear_cross_entropy;
mod lora;
pub mod loss;
mod matmul;
mod max_pool;
mod memory_format;
mod normalise;
pub mod ops;
mod pool;
mod resample;
pub mod rnn;
mod rope;
pub mod rotary_emb;
mod row_norm;
mod rows;
mod softmax;
mod view;

// Everything that is not listed below is candle's.
#[doc(no_inline)]
pub use candle_nn::*;

pub use activation::{Activation, gelu, gelu_erf, relu, silu, tanh};
pub use add::add;
pub use attention::{AttentionOptions, scaled_dot_product_attention, scaled_dot_product_attention_qkvpacked};
pub use autocast::{Autocast, autocast, autocast_mode, autocast_off, set_autocast};
pub use avg_pool::{AvgPool2dOptions, adaptive_avg_pool2d, avg_pool2d};
pub use batch_norm::{BatchNorm, BatchNormGroup, batch_norm};
pub use candle_ddp_tensor::MemoryFormat;
pub use candle_ddp_tensor::function::{enable_grad, is_grad_enabled, no_grad, set_grad_enabled};
pub use checkpoint::checkpoint;
pub use conv::{
    Conv1d, Conv2d, ConvTranspose1d, ConvTranspose2d, conv_transpose1d, conv_transpose1d_no_bias, conv_transpose2d,
    conv_transpose2d_no_bias, conv1d, conv1d_no_bias, conv2d, conv2d_no_bias,
};
pub use cross_entropy::{CrossEntropyOptions, Reduction, cross_entropy, cross_entropy_with};
pub use ctc_loss::{CtcLossOptions, ctc_loss};
pub use dropout::{Dropout, dropout};
pub use embedding::{Embedding, embedding};
pub use group_norm::{GroupNorm, group_norm};
pub use instance_norm::{InstanceNorm, InstanceNormConfig, instance_norm};
pub use interpolate::{InterpolateMode, interpolate};
pub use layer_norm::{LayerNorm, RmsNorm, layer_norm, layer_norm_no_bias, rms_norm};
pub use linear::{Linear, linear, linear_b, linear_no_bias};
pub use linear_cross_entropy::{LinearCrossEntropyOptions, linear_cross_entropy, linear_cross_entropy_with};
pub use lora::{LoraBias, LoraConfig};
pub use matmul::matmul;
pub use max_pool::{MaxPool2dOptions, max_pool2d};
pub use memory_format::to_memory_format;
pub use rnn::{GRU, LSTM, RNNOptions, StackedGRU, StackedLSTM, gru, lstm};
pub use rope::{rope, rope_i, rope_thd};
pub use softmax::{log_softmax, softmax, softmax_last_dim};
pub use view::{cat, flatten, narrow, permute, reshape, transpose};

#[doc(hidden)]
pub use self::{
    autocast::to_dtype,
    batch_norm::with_cumulative_statistics,
    checkpoint::{Results, Run, checkpoint_holding},
    cross_entropy::take_nothing_counted,
    lora::keeping_frozen,
    matmul::matmul_sums,
};
