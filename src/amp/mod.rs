//! Mixed precision: calculating in f16 or bf16 with parameters that are kept in f32.
//!
//! [`MixedPrecision`], given in [`DdpOptions`](crate::DdpOptions), says in which dtype the model computes, in which one
//! gradients are averaged, and in which one buffers are kept. The variables in the `VarMap` have the dtype that is given
//! to [`DistributedDataParallel::new`](crate::DistributedDataParallel::new), usually f32: they are the masters that
//! optimizers change and that checkpoints hold. The model holds copies of them in `param_dtype`, brought up to date by
//! every forward pass, and gradients come out of `backward` in the masters' dtype.
//!
//! bf16 has the range of f32 and needs nothing else. f16 has a smaller range, in which small gradients vanish: so the loss is
//! multiplied by a large number for the backward pass, which [`GradScaler`] chooses and divides out again.
//!
//! ```
//! use candle_core::{DType, Tensor};
//! use candle_ddp::optim::{AdamW, ParamsAdamW};
//! use candle_ddp::{DdpOptions, DistributedDataParallel, GradScaler, GradScalerOptions, MixedPrecision};
//! use candle_nn::{VarMap, linear};
//!
//! # fn main() -> candle_ddp::Result<()> {
//! candle_ddp::spawn(2, |pg| {
//!     let mixed_precision = Some(MixedPrecision {
//!         param_dtype: Some(DType::F16),          // the model computes in f16
//!         reduce_dtype: Some(DType::F32),         // gradients are averaged in f32
//!         buffer_dtype: None,                     // running statistics stay in f32
//!     });
//!     let options = DdpOptions { mixed_precision, ..Default::default() };
//!     let ddp = DistributedDataParallel::new(&pg, &VarMap::new(), DType::F32, |vb| linear(4, 1, vb), options)?;
//!     let mut optimizer = AdamW::from_named(ddp.named_parameters(), ParamsAdamW::default())?;
//!     let mut scaler = GradScaler::new(&pg, ddp.named_parameters(), GradScalerOptions::default())?;
//!
//!     let x = Tensor::ones((8, 4), DType::F32, pg.device())?;
//!     for _ in 0..3 {
//!         let loss = ddp.forward(&x)?.to_dtype(DType::F32)?.sqr()?.mean_all()?;
//!         let mut grads = ddp.backward(&scaler.scale(&loss)?)?;
//!         scaler.step(&mut optimizer, &mut grads)?;  // left out, on all ranks, where a gradient is infinite or NaN
//!         scaler.update()?;
//!     }
//!     Ok(())
//! })?;
//! # Ok(())
//! # }
//! ```
//!
//! # On CPUs
//! Lower precision saves time on GPUs. On CPUs candle converts each number there and back, and most of the model becomes slower
//! (one thread of a Xeon with AVX-512, candle 0.11.1, against f32):
//!
//! | | f16 | bf16 |
//! |---|---|---|
//! | matrix product, 256×1024×1024 | the same | 1 to 1.6 times the time |
//! | linear layer of that size with ReLU, forward and backward | 1.2 to 1.5 times | 1.4 to 2.8 times |
//! | sum of two tensors | 35 times | 150 times and more |
//! | `exp`, as in a softmax | 1.8 times | 160 times |
//! | `conv2d`, forward | the same | an error: candle has no bf16 product there |
//! | `conv2d`, forward and backward | 4 times | an error |
//!
//! Sending is another matter: with `reduce_dtype` alone (`param_dtype` None) the model computes in f32, and half of the bytes
//! travel between hosts.
//!
//! # From Apex
//! What the optimization levels of `apex.amp.initialize` are here. "`dtype`" is the argument of
//! [`DistributedDataParallel::new`](crate::DistributedDataParallel::new).
//!
//! | level | Apex | here |
//! |---|---|---|
//! | O0 | everything in f32 | `dtype` F32, no `mixed_precision` |
//! | O1 | f32 parameters; each function casts its inputs to the dtype on a list | no counterpart: candle has no automatic casts. The nearest is O2, with layers that need f32 asking for it (below) |
//! | O2 | f16 model, batch norms in f32, f32 masters, dynamic loss scale | `dtype` F32, `param_dtype` F16 (or BF16), `buffer_dtype` None, batch norms built for f32 (below); [`GradScaler`] (not for BF16) |
//! | O3 | everything in f16 | `dtype` F16, no `mixed_precision` |
//!
//! `keep_batchnorm_fp32`: [`SyncBatchNorm`](crate::nn::SyncBatchNorm) takes f16 and bf16 inputs with f32 statistics, and
//! calculates in f32; but its weight and bias are replicas in `param_dtype`, as all others, unless it is built with
//! `vb.to_dtype(DType::F32)`: they are then f32, whatever its inputs are. **candle's own `BatchNorm` needs its input,
//! parameters and buffers in one dtype in evaluation, and f32 buffers in training**, so that under mixed precision it has
//! to work in f32, or be replaced (also in a world of one). Another layer that should stay in f32 is built in the same way
//! (its variable is then its own master) and given f32 inputs. `loss_scale="dynamic"` is [`GradScaler`]; a constant one
//! has a `growth_factor` and a `backoff_factor` of 1, and still leaves out steps with an overflow, where Apex's does not.
mod grad_scaler;
mod state;
mod unscale;

pub use crate::ddp::MixedPrecision;
pub use grad_scaler::{GradScaler, GradScalerOptions};
pub use state::GradScalerState;
