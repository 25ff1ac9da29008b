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
//! # What runs in which dtype
//!
//! | | computes in | returns |
//! |---|---|---|
//! | `linear`, convolutions, attention of [`nn`](crate::nn) | products of `param_dtype`, sums in f32 | `param_dtype` |
//! | norms, softmax, activations, pools, dropout, rope, `interpolate`, [`add`](crate::nn::add) | f32 | the dtype of the input |
//! | `cross_entropy` and the functions of [`loss`](crate::nn::loss) | f32 | f32, as under PyTorch's autocast |
//! | `embedding` | copies rows | `param_dtype` |
//! | candle's own operations | the dtype of their arguments | the same |
//! | averages of gradients | `reduce_dtype` | the masters' dtype |
//! | optimizers, clipping, averages of weights | the masters' dtype | the same |
//!
//! With bf16 and f32 logits, the losses of an MLP, a ResNet and a GPT stay within a tenth of the difference between two seeds of those
//! under `torch.autocast`, over 200 steps.
//!
//! # On CPUs
//! bf16 saves time where the processor has AVX512-BF16 (AMD from Zen 4 on, Intel from Cooper Lake on), with the layers of
//! [`nn`](crate::nn), of which [`add`](crate::nn::add) is the sum of a residual connection. `benches/results/step_bf16.md` has whole steps.
//! On other processors, f16 and bf16 take about as long as f32.
//!
//! candle's own operations convert each number back and forth (one thread of a Xeon with AVX-512, candle 0.11.1, compared with f32):
//!
//! | | f16 | bf16 |
//! |---|---|---|
//! | sum of two tensors | 35 times | 150 times and more |
//! | `exp`, as in a softmax | 1.8 times | 160 times |
//! | `conv2d`, forward | the same | an error: candle has no bf16 product for it |
//! | `conv2d`, forward and backward | 4 times | an error |
//!
//! With `reduce_dtype` alone (`param_dtype` None) the model computes in f32, and half as many bytes travel between hosts.
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
