//! Builds models with adapters.
use super::backend::{Adapting, Requested};
use super::config::LoraConfig;
use super::names;
use candle_core::Result;
use candle_ddp_tensor::Error;
use candle_nn::VarBuilder;
use std::sync::{Arc, Mutex, PoisonError};

impl LoraConfig {
    /// Builds a model with adapters: peft's `get_peft_model`. `build` makes the model from a `VarBuilder`, as without adapters.
    ///
    /// Frozen tensors come from `base`, such as a file of pretrained weights. What [is trained](Self::is_trained) comes from `vb`, such as
    /// the `VarBuilder` of candle-ddp's `DistributedDataParallel`: there it has its values, or is initialised. Both may be the same
    /// `VarBuilder`. A trained tensor that only `base` has is an error, since `vb` would initialise it anew. In a sharded block of candle-ddp,
    /// each rank keeps its part of the frozen tensors.
    ///
    /// Adapters are f32 if the frozen weight has 16 bits, and multiply in its dtype; otherwise they have its dtype. A begins with random
    /// numbers and B with zeros, and the other way round for an embedding, so the model begins as the pretrained one.
    ///
    /// The model gets a stand-in for the weight of an adapted layer, which the layers of this crate recognise. Layers and functions that
    /// do not know adapters would compute with NaN, and their backward pass is [`InvalidArgument`](Error::Base). Among them are candle-nn's own
    /// layers, groups in convolutions, and transposed convolutions.
    /// Two layers with one weight, such as an embedding and the head that is tied to it, have one adapter.
    ///
    /// # Errors
    /// [`InvalidArgument`](Error::Base), carried by candle's error, for options that are out of range, a pattern that no layer of the model
    /// fits, and a layer in `target_modules` that can have no adapter: an LSTM or GRU, and one whose weight has no 2, 3 or 4 dimensions or
    /// is quantised; the errors of `build`.
    pub fn build<'a, M, E: From<candle_core::Error>>(
        &self,
        base: VarBuilder<'a>,
        vb: VarBuilder<'a>,
        build: impl FnOnce(VarBuilder<'a>) -> std::result::Result<M, E>,
    ) -> std::result::Result<M, E> {
        self.check()?;
        let requested = Arc::<Mutex<Requested>>::default();
        let (dtype, device) = (base.dtype(), base.device().clone());
        let adapting = Adapting { config: self.clone(), base, vb, requested: Arc::clone(&requested) };
        let model = build(VarBuilder::from_backend(Box::new(adapting), dtype, device))?;
        self.check_patterns(&requested.lock().unwrap_or_else(PoisonError::into_inner))?;
        Ok(model)
    }

    /// Refuses patterns that nothing fits, which are usually misspelt, and layers that have got no adapter.
    fn check_patterns(&self, requested: &Requested) -> Result<()> {
        let all = || requested.modules.iter().map(String::as_str);
        let lists = [
            ("target_modules", &self.target_modules, names::fits as fn(&str, &str) -> bool),
            ("exclude_modules", &self.exclude_modules, names::fits),
            ("modules_to_save", &self.modules_to_save, names::contains),
        ];
        for (option, patterns, fits) in lists {
            if let Some(pattern) = patterns.iter().find(|pattern| !all().any(|module| fits(pattern, module))) {
                let known = all().take(8).collect::<Vec<_>>().join(", ");
                let reason = format!("no layer of the model fits the pattern {pattern:?}: its layers are {known}, …");
                return Err(Error::invalid(option, reason).into());
            }
        }
        if !all().any(|module| self.is_targeted(module)) {
            let reason = "it excludes every layer that target_modules has: at least one must remain";
            return Err(Error::invalid("exclude_modules", reason).into());
        }
        let has_none = |module: &&str| {
            let weight = names::join(module, "weight");
            self.is_targeted(module) && !self.is_whole(module) && !requested.stand_ins.contains_key(&weight)
        };
        if let Some(module) = all().find(has_none) {
            let reason = format!(
                "{module} has no tensor \"weight\": a layer with an adapter must be linear, an embedding or a convolution. Change the pattern \
                 that it fits, or list it in exclude_modules"
            );
            return Err(Error::invalid("target_modules", reason).into());
        }
        Ok(())
    }
}
