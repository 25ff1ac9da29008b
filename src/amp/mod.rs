//! Mixed precision: computing in f16 or bf16 with parameters kept in f32. There are two ways, which
//! [`DdpOptions::precision`](crate::DdpOptions::precision) chooses: a model of 16 bits ([`Precision::Half`]), or functions that cast
//! their arguments ([`Precision::Autocast`], `torch.autocast`). [`GradScaler`] has a whole loop with accumulation and clipping.
//!
//! Under [`Precision::Half`] the variables in the `VarMap` are f32: these masters are what optimizers change and checkpoints hold. The
//! model holds copies of them in `param_dtype`, which every forward pass updates, and `backward` returns gradients in the masters'
//! dtype.
//!
//! bf16 has the range of f32 and needs no scaling. f16 has a smaller range, in which small gradients vanish. So
//! [`GradScaler`] multiplies the loss by a large number for the backward pass, and divides the gradients by it again.
//!
//! ```
//! use candle_core::{DType, Tensor};
//! use candle_ddp::amp::{GradScaler, GradScalerOptions};
//! use candle_ddp::optim::{AdamW, ParamsAdamW};
//! use candle_ddp::{Buckets, DdpOptions, DistributedDataParallel, Precision};
//! use candle_nn::{VarMap, linear};
//!
//! # fn main() -> candle_ddp::Result<()> {
//! candle_ddp::spawn(2, |pg| {
//!     let options = DdpOptions {
//!         // The model computes in f16, and running statistics stay in f32.
//!         precision: Precision::Half { param_dtype: DType::F16, buffer_dtype: None },
//!         // Gradients are averaged in f32.
//!         buckets: Buckets { reduce_dtype: Some(DType::F32), ..Default::default() },
//!         ..Default::default()
//!     };
//!     let ddp = DistributedDataParallel::with_options(&pg, &VarMap::new(), |vb| linear(4, 1, vb), options)?;
//!     let mut optimizer = AdamW::new(&ddp, ParamsAdamW::default())?;
//!     let mut scaler = GradScaler::new(&pg, &ddp, GradScalerOptions::default())?;
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
//! # Autocast
//! With `precision: Precision::Autocast(Autocast::Lists(DType::BF16))` the model and its parameters are f32, and each function of [`nn`](crate::nn)
//! casts its arguments by the list that it is on. The lists are PyTorch 2.15's for CUDA:
//!
//! | list | functions |
//! |---|---|
//! | 16 bits | [`Linear`](crate::nn::Linear), convolutions, [`scaled_dot_product_attention`](crate::nn::scaled_dot_product_attention), [`linear_cross_entropy`](crate::nn::linear_cross_entropy) (its loss is f32), [`StackedLSTM`](crate::nn::StackedLSTM), [`StackedGRU`](crate::nn::StackedGRU) |
//! | f32 | [`softmax`](crate::nn::softmax), [`log_softmax`](crate::nn::log_softmax), [`LayerNorm`](crate::nn::LayerNorm), [`RmsNorm`](crate::nn::RmsNorm), [`GroupNorm`](crate::nn::GroupNorm), [`cross_entropy`](crate::nn::cross_entropy), the functions of [`loss`](crate::nn::loss) |
//! | the wider dtype | [`add`](crate::nn::add), [`rope`](crate::nn::rope), the sum of [`forward_add_relu_t`](crate::nn::BatchNorm::forward_add_relu_t) |
//! | none: the dtype of the input | [`BatchNorm`](crate::nn::BatchNorm) and [`InstanceNorm`](crate::nn::InstanceNorm) (their parameters stay f32), activations, pools, dropout, `interpolate`, `embedding` |
//!
//! **candle's own operations do not cast**, and refuse arguments of two dtypes. So the sum of a residual connection is
//! [`nn::add`](crate::nn::add), and a matrix product of candle's gets arguments that are cast by hand. A model that has such
//! operations everywhere trains unchanged with `Autocast::Products(DType::BF16)`: there,
//! only products compute in 16 bits, and nothing else sees them. All 60 model files of candle-transformers that train on candle-ddp-nn
//! do so in this mode.
//!
//! [`autocast`] is the same for code outside of [`DistributedDataParallel`](crate::DistributedDataParallel), and [`autocast_off`] is an
//! exception inside. The loss can be calculated outside: losses of 16 bits are f32 anyway. With f16, use a [`GradScaler`].
//!
//! ```
//! # use candle_core::{DType, Tensor};
//! # use candle_nn::VarMap;
//! # fn main() -> candle_ddp::Result<()> {
//! use candle_ddp::amp::{Autocast, autocast_off};
//! use candle_ddp::{DdpOptions, DistributedDataParallel, Precision, nn::linear};
//! # candle_ddp::spawn(2, |pg| {
//! let precision = Precision::Autocast(Autocast::Lists(DType::BF16));
//! let options = DdpOptions { precision, ..Default::default() };
//! let ddp = DistributedDataParallel::with_options(&pg, &VarMap::new(), |vb| linear(4, 2, vb), options)?;
//! let x = Tensor::ones((3, 4), DType::F32, pg.device())?;
//! assert_eq!(ddp.forward(&x)?.dtype(), DType::BF16);
//! let exact = ddp.call(|net| autocast_off(|| candle_core::Module::forward(net, &x)))?;
//! assert_eq!(exact.dtype(), DType::F32);
//! # Ok(())
//! # })?;
//! # Ok(())
//! # }
//! ```
//!
//! Which one? [`Precision::Half`] needs no cast of weights in each pass, and its residual connections have 16 bits, so it needs less
//! memory. Autocast keeps residual connections and norms in f32, as PyTorch and Apex's default do.
//!
//! # What runs in which dtype under `Precision::Half`
//!
//! | | computes in | returns |
//! |---|---|---|
//! | `linear`, convolutions, attention, LSTM and GRU of [`nn`](crate::nn) | products of `param_dtype`, sums in f32 | `param_dtype` |
//! | norms, softmax, activations, pools, dropout, rope, `interpolate`, [`add`](crate::nn::add) | f32 | the dtype of the input |
//! | `cross_entropy`, `ctc_loss` and the functions of [`loss`](crate::nn::loss) | f32 | f32, as under PyTorch's autocast |
//! | `embedding` | copies rows | `param_dtype` |
//! | candle's own operations | the dtype of their arguments | the same |
//! | averages of gradients | `reduce_dtype` | the masters' dtype |
//! | optimizers, clipping, averages of weights | the masters' dtype | the same |
//!
//! The losses of an MLP, a ResNet, a GPT and a BERT stay within a tenth of the difference between two seeds of those under
//! `torch.autocast`, over 200 steps, with [`Precision::Half`] and f32 logits as with [`Autocast`].
//!
//! # On CPUs
//! bf16 saves time where the processor has AVX512-BF16 (AMD from Zen 4 on) or AMX (Intel from Sapphire Rapids on), with the layers of
//! [`nn`](crate::nn) (also [`add`](crate::nn::add), the sum of a residual connection). `benches/results/step_bf16.md` has whole steps.
//! On other processors, f16 and bf16 take about as long as f32.
//!
//! candle's own operations convert each number back and forth: in bf16, a sum of two tensors or `exp` takes more than a hundred times as
//! long as in f32, and `conv2d` is an error (candle 0.11.1).
//!
//! With [`reduce_dtype`](crate::Buckets::reduce_dtype) alone the model computes in f32, and half as many bytes travel between hosts.
//!
//! # From Apex
//! An `opt_level` of `amp.initialize` is a [`Precision`]; from O1 on, f16 needs a [`GradScaler`].
//!
//! | | |
//! |---|---|
//! | O0: everything in f32 | `Precision::default()` |
//! | O1: functions cast their arguments | `Precision::Autocast(Autocast::Lists(DType::F16))` |
//! | O2: a model of 16 bits, with f32 masters and buffers | `Precision::Half { param_dtype: DType::F16, buffer_dtype: None }` |
//! | O3: everything in 16 bits | `Precision::Pure(DType::F16)` |
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

#[cfg(doc)]
use crate::Precision;
#[doc(no_inline)]
pub use crate::nn::{Autocast, autocast, autocast_off};
pub use grad_scaler::{GradScaler, GradScalerOptions};
