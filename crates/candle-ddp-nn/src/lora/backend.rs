//! The `VarBuilder` that a model with adapters is built with.
use super::adapter::{Adapter, Kind};
use super::config::LoraConfig;
use super::keep::kept;
use super::names;
use candle_core::{DType, Device, Result, Shape, Tensor};
use candle_ddp_tensor::Error;
use candle_ddp_tensor::error::describe;
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

/// The layers and stand-ins that the model has requested so far.
#[derive(Default)]
pub(super) struct Requested {
    /// The names of layers.
    pub(super) modules: BTreeSet<String>,
    /// The stand-ins, so that a name requested twice has one adapter.
    pub(super) stand_ins: HashMap<String, Tensor>,
}

/// Gives a model stand-ins for the weights of adapted layers, trained tensors from `vb`, and the others from `base`.
pub(super) struct Adapting<'a> {
    pub(super) config: LoraConfig,
    pub(super) base: VarBuilder<'a>,
    pub(super) vb: VarBuilder<'a>,
    pub(super) requested: Arc<Mutex<Requested>>,
}

impl Adapting<'_> {
    /// The tensor `name`, which `frozen` or `trained` reads. `init` is None where the model does not give the initial values.
    fn tensor(
        &self,
        name: &str,
        init: Option<Init>,
        device: &Device,
        read: impl Fn(VarBuilder<'_>) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let (module, last) = names::split(name);
        let mut requested = self.requested.lock().unwrap_or_else(PoisonError::into_inner);
        requested.modules.insert(module.to_string());
        if self.config.is_trained(name) {
            if self.base.contains_tensor(name) && !self.vb.contains_tensor(name) {
                let reason = format!(
                    "{name} would be trained, but only the pretrained weights have its value: put this value into the VarMap of what is \
                     trained first"
                );
                return Err(Error::invalid("modules_to_save or bias", reason).into());
            }
            return read(self.vb.clone().set_device(device.clone()));
        }
        let frozen = || read(self.base.clone().set_device(device.clone()));
        // Layers change these themselves.
        if ["running_mean", "running_var"].contains(&last) {
            return frozen();
        }
        let frozen = || kept(name, frozen()?.detach());
        if last != "weight" || !self.config.is_targeted(module) {
            return frozen();
        }
        if let Some(known) = requested.stand_ins.get(name) {
            return Ok(known.clone());
        }
        let stand_in = self.adapter(module, frozen()?, init)?.stand_in()?;
        requested.stand_ins.insert(name.to_string(), stand_in.clone());
        Ok(stand_in)
    }

    fn adapter(&self, module: &str, base: Tensor, init: Option<Init>) -> Result<Adapter> {
        let is = describe(base.dtype(), base.shape());
        let dtype = match base.dtype() {
            DType::F16 | DType::BF16 | DType::F32 => DType::F32,
            DType::F64 => DType::F64,
            _ => {
                let reason = format!(
                    "the weight of {module} is {is}: a weight with an adapter must be f32, f64, f16 or bf16, and not quantised"
                );
                return Err(Error::invalid("target_modules", reason).into());
            }
        };
        let r = self.config.r;
        // An embedding asks for normal values, and no other layer does.
        let kind = match (base.rank(), init) {
            (2, Some(Init::Randn { mean: 0., stdev: 1. })) => Kind::Embedding,
            (2, _) => Kind::Linear,
            (3 | 4, _) => Kind::Convolution,
            _ => {
                let reason = format!(
                    "the weight of {module} is {is}: a layer with an adapter must be linear, an embedding or a convolution, whose weight \
                     has 2, 3 or 4 dimensions. Change the pattern that it fits, or list it in exclude_modules"
                );
                return Err(Error::invalid("target_modules", reason).into());
            }
        };
        let (out, inputs) = (base.dims()[0], &base.dims()[1..]);
        let bound = 1. / (inputs.iter().product::<usize>() as f64).sqrt();
        // Kaiming's uniform distribution with a = √5.
        let random = Init::Uniform { lo: -bound, up: bound };
        let get = |shape: Vec<usize>, name, init| {
            let vb = self.vb.clone().set_device(base.device().clone());
            vb.get_with_hints_dtype(shape, &names::join(module, name), init, dtype)
        };
        let [a, b] = match kind {
            Kind::Embedding => {
                let [a, b] = names::OF_EMBEDDING;
                [
                    get(vec![r, out], a, Init::Const(0.))?,
                    get(vec![inputs[0], r], b, Init::Randn { mean: 0., stdev: 1. })?,
                ]
            }
            Kind::Linear | Kind::Convolution => {
                let [a, b] = names::MATRICES;
                let ones = vec![1; inputs.len() - 1];
                [get([&[r], inputs].concat(), a, random)?, get([vec![out, r], ones].concat(), b, Init::Const(0.))?]
            }
        };
        Ok(Adapter::new(module, kind, base, [a, b], (self.config.scaling(), self.config.lora_dropout)))
    }
}

impl SimpleBackend for Adapting<'_> {
    fn get(&self, shape: Shape, name: &str, init: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        let read = |vb: VarBuilder<'_>| vb.get_with_hints_dtype(shape.clone(), name, init, dtype);
        self.tensor(name, Some(init), device, read)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        self.tensor(name, None, device, |vb| vb.get_unchecked_dtype(name, dtype))
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.base.contains_tensor(name) || self.vb.contains_tensor(name)
    }
}
