//! Functions that need whole parameters, and the pieces of a sharded model.
use super::{loss, made, sharded};
use crate::common::ranks;
use candle_core::{Module, Tensor};
use candle_ddp::checkpoint::{self, load_adapter, save_adapter};
use candle_ddp::nn::{Linear, LoraConfig, linear};
use candle_ddp::optim::{Optimizer, ParamsAdamW, ZeroRedundancyOptimizer, clip_grad_norm};
use candle_ddp::{Block, DdpOptions, DistributedDataParallel, Error, Role, block};
use candle_nn::{VarBuilder, VarMap};
use std::sync::Arc;

fn folder(name: &str) -> std::path::PathBuf {
    std::env::temp_dir().join(format!("candle-ddp-whole-{name}-{}", std::process::id()))
}

/// The gradients that the store has are those of ignored parameters.
#[test]
fn gradients_of_pieces_are_clipped_by_their_optimizer() {
    ranks(2, |pg| {
        let (role, varmap) =
            (|name: &str| if name == "head.bias" { Role::Ignored } else { Role::Parameter }, VarMap::new());
        let (ddp, mut optimizer) = made(&pg, &varmap, DdpOptions { role: Arc::new(role), ..sharded() })?;
        let mut grads = ddp.backward(&loss(&ddp, &pg, 1)?)?;
        let error = clip_grad_norm(&mut grads, &ddp, 1e-3).unwrap_err();
        assert!(matches!(&error, Error::InvalidArgument { argument: "grads", .. }), "{error}");
        assert!(error.to_string().contains("stem.weight"), "{error}");
        optimizer.clip_grad_norm(&mut grads, 1e-3)?;
        optimizer.step(&grads)
    });
}

#[test]
fn an_adapter_of_a_sharded_model_is_saved() {
    type Adapted = (Linear, Block<Linear>);
    let config = LoraConfig { target_modules: vec!["a".into()], ..Default::default() };
    ranks(2, |pg| {
        let model = |varmap: &VarMap, options: DdpOptions| {
            let lora = config.clone();
            let role = move |name: &str| if lora.is_trained(name) { Role::Parameter } else { Role::Frozen };
            let build = |vb: VarBuilder<'static>| -> candle_core::Result<Adapted> {
                Ok((linear(8, 8, vb.pp("layers.stem"))?, block(vb.pp("layers.0"), |vb| linear(8, 8, vb.pp("a")))?))
            };
            let options = DdpOptions { init_seed: Some(4), role: Arc::new(role), ..options };
            DistributedDataParallel::with_options(&pg, varmap, |vb| config.build(vb.clone(), vb, build), options)
        };
        let varmap = VarMap::new();
        let ddp = model(&varmap, sharded())?;
        let mut optimizer = ZeroRedundancyOptimizer::new(&ddp, ParamsAdamW { lr: 0.1, ..Default::default() })?;
        let x = Tensor::arange(0f32, 16., pg.device())?.reshape((2, 8))?.sin()?;
        let forward = |ddp: &DistributedDataParallel<Adapted>| ddp.call(|(stem, a)| a.forward(&stem.forward(&x)?));
        for _ in 0..2 {
            optimizer.step(&ddp.backward(&forward(&ddp)?.sqr()?.mean_all()?)?)?;
        }
        let expected = forward(&ddp)?.flatten_all()?.to_vec1::<f32>()?;
        let adapter = folder("adapter");
        save_adapter(&pg, &config, &varmap, &adapter)?;
        let plain = VarMap::new();
        let other = model(&plain, DdpOptions::default())?;
        load_adapter(&config, &plain, &adapter)?;
        assert_eq!(forward(&other)?.flatten_all()?.to_vec1::<f32>()?, expected);
        pg.barrier()?;
        let written = checkpoint::read(adapter.join("adapter_model.safetensors"))?;
        assert_eq!(written["base_model.model.layers.0.a.lora_A.weight"].dims(), [8, 8]);
        // And the other way, into pieces.
        let read = VarMap::new();
        let other = model(&read, sharded())?;
        load_adapter(&config, &read, &adapter)?;
        assert_eq!(forward(&other)?.flatten_all()?.to_vec1::<f32>()?, expected);
        pg.barrier()?;
        if pg.rank() == 0 {
            std::fs::remove_dir_all(&adapter).unwrap();
        }
        Ok(())
    });
}
