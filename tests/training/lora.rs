//! LoRA under DDP, as docs/fine_tuning.md advises.
use crate::common::{assert_close, floats, ranks, tensor, var, with_role};
use candle_core::{DType, Device, Module, Tensor};
use candle_ddp::nn::{self, Linear, LoraConfig, linear};
use candle_ddp::optim::{AdamW, Optimizer, ParamsAdamW};
use candle_ddp::{DdpOptions, DistributedDataParallel, ProcessGroup, Result, Role};
use candle_nn::{VarBuilder, VarMap};
use std::collections::HashMap;

struct Net(Linear, Linear);

impl Net {
    fn new(vb: VarBuilder) -> candle_core::Result<Self> {
        Ok(Self(linear(4, 6, vb.pp("body"))?, linear(6, 3, vb.pp("head"))?))
    }
}

impl Module for Net {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.1.forward(&nn::relu(&self.0.forward(x)?)?)
    }
}

fn config() -> LoraConfig {
    LoraConfig { r: 2, lora_alpha: 4.0, target_modules: vec!["*".to_string()], ..Default::default() }
}

fn weights() -> HashMap<String, Tensor> {
    let weight = |name: &str, shape: &[usize], seed| (name.to_string(), tensor(shape, seed));
    [
        weight("body.weight", &[6, 4], 1),
        weight("body.bias", &[6], 2),
        weight("head.weight", &[3, 6], 3),
        weight("head.bias", &[3], 4),
    ]
    .into()
}

fn base() -> VarBuilder<'static> {
    VarBuilder::from_tensors(weights(), DType::F32, &Device::Cpu)
}

/// Trains three steps on this rank's part of the batches, and returns the adapters' values.
fn train(pg: &ProcessGroup, varmap: &VarMap, ddp: &DistributedDataParallel<Net>) -> Result<Vec<(String, Vec<f32>)>> {
    let mut optimizer = AdamW::new(ddp, ParamsAdamW { lr: 0.1, ..Default::default() })?;
    for step in 0..3 {
        let samples = 4 / pg.world_size();
        let x = tensor(&[4, 4], 10 + step).narrow(0, pg.rank() * samples, samples)?;
        // The backward pass computes the layers and their adapters again.
        let y = ddp.call(|Net(body, head)| {
            let (body, head) = (body.clone(), head.clone());
            nn::checkpoint(&[&x], move |x| head.forward(&nn::relu(&body.forward(&x[0])?)?))
        })?;
        optimizer.step(&ddp.backward(&y.sqr()?.mean_all()?)?)?;
    }
    let names = ddp.named_parameters().into_iter().map(|(name, _)| name);
    Ok(names.map(|name| (name.clone(), floats(&var(varmap, &name)))).collect())
}

#[test]
fn adapters_alone_are_trained_and_merge_into_the_weights() {
    ranks(2, |pg| {
        let options = DdpOptions { init_seed: Some(7), ..Default::default() };
        let (varmap, config) = (VarMap::new(), config());
        let ddp =
            DistributedDataParallel::with_options(&pg, &varmap, |vb| config.build(base(), vb, Net::new), options)?;
        assert_eq!(varmap.all_vars().len(), 4);
        let trained = train(&pg, &varmap, &ddp)?;
        assert!(
            trained.iter().all(|(name, values)| name.contains(".lora_") && values.iter().any(|value| *value != 0.0))
        );
        // Merged weights compute what the adapters do.
        let mut tensors = weights();
        tensors.extend(varmap.data().lock().unwrap().iter().map(|(name, var)| (name.clone(), var.as_tensor().clone())));
        let merged = config.merge(tensors)?;
        assert_eq!(merged.len(), 4);
        let (merged, x) = (VarBuilder::from_tensors(merged, DType::F32, pg.device()), tensor(&[5, 4], 99));
        assert_close(&floats(&ddp.forward(&x)?), &floats(&Net::new(merged)?.forward(&x)?), 1e-5, "merged");
        Ok(())
    });
}

#[test]
fn pretrained_weights_may_be_frozen_variables_of_the_same_varmap() {
    let trained = ranks(2, |pg| {
        let (varmap, config) = (VarMap::new(), config());
        let in_base = config.clone();
        let role = move |name: &str| if in_base.is_trained(name) { Role::Parameter } else { Role::Frozen };
        let options = with_role(role);
        let build = |vb: VarBuilder<'static>| config.build(vb.clone(), vb, Net::new);
        let ddp = DistributedDataParallel::with_options(&pg, &varmap, build, options)?;
        let before = floats(&var(&varmap, "head.weight"));
        let trained = train(&pg, &varmap, &ddp)?;
        assert_eq!(floats(&var(&varmap, "head.weight")), before);
        assert_eq!((trained.len(), varmap.all_vars().len()), (4, 8));
        Ok((before, trained))
    });
    assert_eq!(trained[0], trained[1]);
}
