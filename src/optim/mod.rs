//! Fused optimizers (AdamW, Adam, SGD and LAMB), Muon, optimizers from your own [`UpdateRule`], gradient clipping,
//! learning-rate schedules, and averages of weights. All have PyTorch's semantics (LAMB: Apex's).
//!
//! ```
//! use candle_core::{DType, Device, Module, Tensor};
//! use candle_ddp::checkpoint::StateDict;
//! use candle_ddp::optim::{AdamW, Optimizer, ParameterGroup, Parameters, ParamsAdamW};
//! use candle_nn::{VarBuilder, VarMap, linear};
//!
//! # fn main() -> candle_ddp::Result<()> {
//! let varmap = VarMap::new();
//! let model = linear(4, 1, VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu).pp("head"))?;
//!
//! // Biases without weight decay. Under DDP: `Parameters::from(&ddp)`.
//! let parameters = Parameters::from(&varmap).into_iter();
//! let (biases, weights) = parameters.partition::<Vec<_>, _>(|(name, _)| name.ends_with("bias"));
//! let options = ParamsAdamW { lr: 0.01, ..Default::default() };
//! let mut optimizer = AdamW::from_groups(vec![
//!     ParameterGroup { parameters: weights, options: options.clone() },
//!     ParameterGroup { parameters: biases, options: ParamsAdamW { weight_decay: 0., ..options } },
//! ])?;
//!
//! let loss = model.forward(&Tensor::ones((8, 4), DType::F32, &Device::Cpu)?)?.sqr()?.mean_all()?;
//! let mut grads = loss.backward()?; // under DDP: ddp.backward(&loss)
//! optimizer.clip_grad_norm(&mut grads, 1.0)?;
//! optimizer.step(&grads)?;
//!
//! let file = std::env::temp_dir().join(format!("optimizer-{}.safetensors", std::process::id()));
//! optimizer.save(&file)?;
//! optimizer.load(&file)?;
//! # std::fs::remove_file(&file).unwrap();
//! # Ok(())
//! # }
//! ```
mod adam;
mod averager;
mod backward_and_step;
mod clip;
mod ema;
mod fused;
mod kernel;
mod lamb;
mod muon;
mod optimizer;
mod other_length;
mod parameters;
mod plateau;
mod rule;
mod schedule;
mod setting;
mod sgd;
mod shards;
mod sums;
pub(crate) mod unsaved;
mod update;
mod update_bn;

#[doc(inline)]
pub use crate::variables::Parameters;
pub use adam::ParamsAdam;
pub use averager::PeriodicModelAverager;
pub use candle_nn::ParamsAdamW;
pub use clip::{ClipOptions, NormType, clip_grad_norm, clip_grad_norm_with, clip_grad_value};
pub use ema::Ema;
pub use fused::FusedOptimizer;
pub use lamb::ParamsLamb;
pub use muon::{AdjustLr, MuonGroup, ParamsMuon};
pub use optimizer::Optimizer;
pub use other_length::OnOtherLength;
pub use parameters::ParameterGroup;
pub use plateau::{ParamsReduceLrOnPlateau, PlateauMode, ReduceLrOnPlateau, Threshold};
pub use rule::UpdateRule;
pub use schedule::{
    Anneal, CosineAnnealingLr, LrScheduler, MultiStepLr, OneCycleLr, ParamsCosineAnnealingLr, ParamsMultiStepLr,
    ParamsOneCycleLr, ParamsStepLr, ParamsWarmupCosine, Schedule, Scheduler, StepLr, WarmupCosine,
};
pub use sgd::ParamsSgd;
pub use update_bn::update_bn;

/// Adam with decoupled weight decay: PyTorch's `torch.optim.AdamW` (`amsgrad` off), in one pass. It replaces candle_nn's, whose
/// `ParamsAdamW` has its options:
///
/// | field | PyTorch's name | default |
/// |---|---|---|
/// | `lr`, the learning rate | `lr` | 0.001 |
/// | `beta1`, `beta2`, the decay of the averages of gradients and of their squares | `betas` | 0.9, 0.999 |
/// | `eps`, added to the root of the averaged squares | `eps` | 1e-8 |
/// | `weight_decay`: each step multiplies parameters by 1 − `lr` · `weight_decay` | `weight_decay` | 0.01 |
///
/// ```
/// use candle_ddp::nn::linear;
/// use candle_ddp::prelude::*;
///
/// fn main() -> Result<()> {
///     let ParamsAdamW { lr, beta1, beta2, eps, weight_decay } = ParamsAdamW::default();
///     assert_eq!((lr, beta1, beta2, eps, weight_decay), (0.001, 0.9, 0.999, 1e-8, 0.01));
///     candle_ddp::spawn(2, |pg| {
///         let ddp = DistributedDataParallel::new(&pg, &VarMap::new(), |vb| linear(4, 1, vb))?;
///         let mut optimizer = AdamW::new(&ddp, ParamsAdamW { lr: 3e-4, weight_decay: 0.1, ..Default::default() })?;
///         let x = Tensor::randn(0f32, 1., (8, 4), pg.device())?;
///         let mut grads = ddp.backward(&ddp.forward(&x)?.sqr()?.mean_all()?)?;
///         optimizer.clip_grad_norm(&mut grads, 1.)?;
///         optimizer.step(&grads)
///     })?;
///     Ok(())
/// }
/// ```
///
/// Groups of parameters with other options, such as norms without weight decay: [`from_groups`](FusedOptimizer::from_groups).
pub type AdamW = FusedOptimizer<ParamsAdamW>;
/// Adam: PyTorch's `torch.optim.Adam` (`amsgrad` off), in one pass.
pub type Adam = FusedOptimizer<ParamsAdam>;
/// Stochastic gradient descent: PyTorch's `torch.optim.SGD`, in one pass.
pub type Sgd = FusedOptimizer<ParamsSgd>;
/// LAMB, for very large batches: Apex's `FusedLAMB`.
pub type Lamb = FusedOptimizer<ParamsLamb>;
/// Muon for matrices, with AdamW for all other parameters: PyTorch's `torch.optim.Muon` and `AdamW` as one optimizer. See
/// [`with_adamw`](FusedOptimizer::with_adamw).
pub type Muon = FusedOptimizer<MuonGroup>;
/// The optimizer of a model whose optimizer state is spread over the ranks, PyTorch's `ZeroRedundancyOptimizer`: any optimizer of a model
/// that is made with [`Sharding::Optimizer`](crate::Sharding::Optimizer), such as [`AdamW`]. The name is here for those who look for it.
pub type ZeroRedundancyOptimizer<R> = FusedOptimizer<R>;
