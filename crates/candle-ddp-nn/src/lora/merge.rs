//! Adapters as part of the weights.
use super::config::LoraConfig;
use super::names;
use crate::{autocast_off, linear::Linear, no_grad};
use candle_core::{Module, Result, Tensor};
use candle_ddp_tensor::Error;
use candle_ddp_tensor::error::describe;
use std::collections::HashMap;

impl LoraConfig {
    /// Adds the adapters among `tensors` to the weights among them, and returns the model without adapters: peft's `merge_and_unload`.
    /// Names are the `VarMap`s'. The sums are calculated in the adapters' dtype, and have the weights' dtype.
    /// Gradients end here.
    ///
    /// # Errors
    /// [`InvalidArgument`](Error::Base), carried by candle's error, for half an adapter, an adapter without a weight, no adapter at all, and
    /// shapes that do not fit each other or [`r`](Self::r).
    pub fn merge(&self, mut tensors: HashMap<String, Tensor>) -> Result<HashMap<String, Tensor>> {
        self.check()?;
        let adapted = |within: &str| {
            let mut modules: Vec<String> =
                tensors.keys().filter_map(|name| names::module(name, within)).map(str::to_string).collect();
            modules.sort();
            modules
        };
        let kinds = [names::MATRICES, names::OF_EMBEDDING];
        let found = kinds.map(|[a, b]| (adapted(a), adapted(b)));
        if found.iter().all(|(a, b)| a.is_empty() && b.is_empty()) {
            return Err(Error::invalid("tensors", "none of them belongs to an adapter: nothing can be merged").into());
        }
        for ([a, b], (of_a, of_b)) in kinds.into_iter().zip(found) {
            let is_embedding = [a, b] == names::OF_EMBEDDING;
            for module in of_a.iter().chain(of_b.iter().filter(|module| !of_a.contains(module))) {
                let mut take = |within: &str| {
                    let name = names::join(module, within);
                    tensors.remove(&name).ok_or_else(|| {
                        candle_core::Error::from(Error::invalid(
                            "tensors",
                            format!("they have an adapter of {module}, but not {name}"),
                        ))
                    })
                };
                let (weight, a, b) = (take("weight")?, take(a)?, take(b)?);
                let merged = no_grad(|| autocast_off(|| self.merged(module, &weight, [&a, &b], is_embedding)))?;
                tensors.insert(names::join(module, "weight"), merged);
            }
        }
        Ok(tensors)
    }

    /// The weight and what an adapter adds to it.
    fn merged(&self, module: &str, weight: &Tensor, [a, b]: [&Tensor; 2], is_embedding: bool) -> Result<Tensor> {
        let (weight, a, b) = (weight.detach(), a.detach(), b.detach());
        let outs = if is_embedding {
            [a.dims().last().copied(), b.dims().first().copied()]
        } else {
            [b.dims().first().copied(), None]
        };
        let ranks = [a.dims().first().copied(), b.dims().get(1).copied()];
        let elements = a.elem_count().checked_div(self.r).unwrap_or(0) * (b.elem_count() / self.r);
        let fits = weight.rank() >= 2
            && a.dtype() == b.dtype()
            && a.dtype().is_float()
            && weight.dtype().is_float()
            && ranks == [Some(self.r); 2]
            && outs[0] == weight.dims().first().copied()
            && (outs[1].is_none() || outs[1] == weight.dims().get(1).copied())
            && elements == weight.elem_count();
        if !fits {
            let [weight, a, b] = [&weight, &a, &b].map(|tensor| describe(tensor.dtype(), tensor.shape()));
            let reason = format!(
                "the weight of {module} is {weight}, and its adapter is {a} and {b}: they must fit each other and the rank {}",
                self.r
            );
            return Err(Error::invalid("tensors", reason).into());
        }
        let (a, b) = (a.reshape((self.r, ()))?, b.reshape(((), self.r))?);
        // x · Wᵀ for both: of B (out, r) and Aᵀ, or of Aᵀ (vectors, r) and B (size, r).
        let delta = match is_embedding {
            true => Linear::new(b, None).forward(&a.t()?.contiguous()?)?,
            false => Linear::new(a.t()?.contiguous()?, None).forward(&b)?,
        };
        let delta = (delta.reshape(weight.shape())? * self.scaling())?;
        (weight.to_dtype(delta.dtype())? + delta)?.to_dtype(weight.dtype())
    }
}
