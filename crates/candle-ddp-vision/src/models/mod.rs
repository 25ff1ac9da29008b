//! Models whose variables have torchvision's names, so that its files load into them.
//!
//! [`resnet18`], [`resnet34`] and [`resnet50`] compute torchvision's logits, and begin with its initial values. They take their
//! options by value:
//!
//! ```
//! use candle_core::{DType, Device, ModuleT, Tensor};
//! use candle_ddp_nn::{VarBuilder, VarMap};
//! use candle_ddp_vision::models::{ResNetOptions, resnet18};
//!
//! let varmap = VarMap::new();
//! let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
//! let options = ResNetOptions { num_classes: Some(10), width: 8, ..Default::default() };
//! let model = resnet18(options, vb)?;
//! let logits = model.forward_t(&Tensor::zeros((2, 3, 32, 32), DType::F32, &Device::Cpu)?, false)?;
//! assert_eq!(logits.dims(), [2, 10]);
//! assert!(varmap.data().lock().unwrap().contains_key("layer2.0.downsample.0.weight"));
//! # Ok::<(), candle_core::Error>(())
//! ```
mod resnet;

pub use resnet::{NormLayer, ResNet, ResNetOptions, ResNetStem, resnet18, resnet34, resnet50};
