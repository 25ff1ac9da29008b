//! Mixed precision: computing in f16 or bf16 with parameters kept in f32.
//!
//! [`MixedPrecision`], a field of [`DdpOptions`](crate::DdpOptions), sets the dtypes in which the model computes,
//! gradients are averaged, and buffers are kept. The variables in the `VarMap` have the dtype given to
//! [`DistributedDataParallel::new`](crate::DistributedDataParallel::new), usually f32: these masters are what
//! optimizers change and checkpoints hold. The model holds copies of them in `param_dtype`, which every forward pass
//! updates, and `backward` returns gradients in the masters' dtype.
//!
//! bf16 has the range of f32 and needs no scaling. f16 has a smaller range, in which small gradients vanish. So
//! [`GradScaler`] multiplies the loss by a large number for the backward pass, and divides the gradients by it again.
//!
//! ```
//! use candle_core::{DType, Tensor};
//! use candle_ddp::amp::{GradScaler, GradScalerOptions, MixedPrecision};
//! use candle_ddp::optim::{AdamW, ParamsAdamW};
//! use candle_ddp::{DdpOptions, DistributedDataParallel};
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
//!     let ddp = DistributedDataParallel::with_options(&pg, &VarMap::new(), |vb| linear(4, 1, vb), options)?;
//!     let mut optimizer = AdamW::new(&ddp, ParamsAdamW::default())?;
//!     let mut scaler = GradScaler::new(&pg, ddp.named_parameters(), GradScalerOptions::default())?;
//!
//!     let x = Tensor::ones((8, 4), DType::F32, pg.device())?;
//!     for _ in 0..3 {
//!         let loss = ddp.forward(&x)?.to_dtype(DType::F32)?.sqr()?.mean_all()?;
//!         let mut grads = ddp.backward(&scaler.scale(&loss)?)?;
//!         scaler.step(&mut optimizer, &mut grads)?;  // skipped on all ranks if a gradient is infinite or NaN
//!         scaler.update()?;
//!     }
//!     Ok(())
//! })?;
//! # Ok(())
//! # }
//! ```
//!
//! # On CPUs
//! Lower precision saves time on GPUs. On CPUs candle converts each number back and forth, and most of the model
//! becomes slower (one thread of a Xeon with AVX-512, candle 0.11.1, compared with f32):
//!
//! | | f16 | bf16 |
//! |---|---|---|
//! | matrix product, 256×1024×1024 | the same | 1 to 1.6 times |
//! | linear layer of that size with ReLU, forward and backward | 1.2 to 1.5 times | 1.4 to 2.8 times |
//! | sum of two tensors | 35 times | 150 times and more |
//! | `exp`, as in a softmax | 1.8 times | 160 times |
//! | `conv2d`, forward | the same | an error: candle has no bf16 product for it |
//! | `conv2d`, forward and backward | 4 times | an error |
//!
//! Communication does become faster: with `reduce_dtype` alone (`param_dtype` None) the model computes in f32, and half
//! as many bytes travel between hosts.
//!
//! # From Apex
//! The optimization levels of `apex.amp.initialize` and their counterparts. "`dtype`" is the argument of
//! [`DistributedDataParallel::new`](crate::DistributedDataParallel::new).
//!
//! | level | Apex | here |
//! |---|---|---|
//! | O0 | everything in f32 | `dtype` F32, no `mixed_precision` |
//! | O1 | f32 parameters; each function casts its inputs to the dtype on a list | no counterpart: candle has no automatic casts. The nearest is O2, with layers that request f32 if they need it (below) |
//! | O2 | f16 model, batch norms in f32, f32 masters, dynamic loss scale | `dtype` F32, `param_dtype` F16 (or BF16), `buffer_dtype` None, batch norms built for f32 (below); [`GradScaler`] (not for BF16) |
//! | O3 | everything in f16 | `dtype` F16, no `mixed_precision` |
//!
//! `keep_batchnorm_fp32`: [`BatchNorm`](crate::nn::BatchNorm) takes f16 and bf16 inputs, and computes, with its
//! statistics, in f32. Its weight and bias are replicas in `param_dtype` like all others, unless it is built with
//! `vb.to_dtype(DType::F32)`: then they are f32, whatever the dtype of its inputs. **candle's own `BatchNorm` needs
//! input, parameters and buffers in one dtype in evaluation, and f32 buffers in training**, so under mixed precision it
//! must work in f32 or be replaced (in a world of one too). Any other layer that should stay in f32 is built in the
//! same way (its variable is then its own master) and must get f32 inputs. `loss_scale="dynamic"` is [`GradScaler`]. A
//! constant loss scale has a `growth_factor` and a `backoff_factor` of 1; steps with an overflow are still skipped,
//! unlike in Apex.
mod grad_scaler;
mod unscale;

pub use crate::ddp::MixedPrecision;
pub use grad_scaler::{GradScaler, GradScalerOptions};
