//! Adapters on pretrained weights that are no variables: those of blocks are spread over the ranks, too.
use super::graphs::{Between, compete};
use super::*;
use crate::common::going_on;
use candle_ddp::Role;
use candle_ddp::checkpoint::{self, Pretrained, load_adapter, save_adapter, save_tensors};
use candle_ddp::nn::LoraConfig;
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

const SHAPES: [(&str, &[usize]); 6] = [
    ("norm.weight", &[WIDTH]),
    ("norm.bias", &[WIDTH]),
    ("first.weight", &[2 * WIDTH, WIDTH]),
    ("first.bias", &[2 * WIDTH]),
    ("second.weight", &[WIDTH, 2 * WIDTH]),
    ("stem.weight", &[WIDTH, 3]),
];

/// Writes the pretrained weights, which depend on the seed.
fn write(folder: &Path, seed: usize) {
    let mut tensors = HashMap::new();
    let mut add = |name: String, shape: &[usize]| {
        let (first, count) = (tensors.len() * 31 + seed, shape.iter().product());
        let values: Vec<_> = (0..count).map(|index: usize| ((first + index * 7) as f32 * 0.3).sin()).collect();
        tensors.insert(name, Tensor::from_vec(values, shape, &Device::Cpu).unwrap());
    };
    for (name, shape) in SHAPES {
        match name == "stem.weight" {
            true => add(name.to_string(), shape),
            false => (0..3).for_each(|layer| add(format!("layers.{layer}.{name}"), shape)),
        }
    }
    add("stem.bias".to_string(), &[WIDTH]);
    add("head.weight".to_string(), &[1, WIDTH]);
    add("head.bias".to_string(), &[1]);
    save_tensors(&tensors, folder.join("model.safetensors")).unwrap();
}

fn lora(targets: &[&str]) -> LoraConfig {
    let target_modules = targets.iter().map(|target| target.to_string()).collect();
    LoraConfig { r: 2, lora_alpha: 4., target_modules, ..Default::default() }
}

fn adapted(
    pg: &ProcessGroup,
    varmap: &VarMap,
    (folder, config, dtype): (&Path, &LoraConfig, DType),
    options: DdpOptions,
) -> candle_ddp::Result<(Ddp, Optim)> {
    let base = Pretrained::open(folder)?.var_builder(dtype, pg.device());
    let build = |vb| config.build(base, vb, Net::new);
    let sharding =
        if options.sharding == Sharding::Off { Sharding::Optimizer { ranks: None } } else { options.sharding };
    let options = DdpOptions { init_seed: Some(7), sharding, ..options };
    let ddp = DistributedDataParallel::with_options(pg, varmap, build, options)?;
    let optimizer = ZeroRedundancyOptimizer::new(&ddp, ParamsAdamW { lr: 0.05, ..Default::default() })?;
    Ok((ddp, optimizer))
}

/// Also where blocks without an adapter lie between the loss and the only adapters.
#[test]
fn adapters_train_alike_on_whole_and_on_spread_weights() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), 0);
    let run = |targets: &[&str], step: &Step| {
        let config = lora(targets);
        let make: &Make = &|pg, varmap, options| adapted(pg, varmap, (folder.path(), &config, DType::F32), options);
        same_bits_of(make, &DdpOptions::default(), step);
    };
    for targets in [&["stem", "first", "second", "head"][..], &["layers.0.first"], &["stem", "layers.1.second"]] {
        run(targets, &plain_step);
    }
    kinds().into_iter().for_each(|step| run(&["first", "head"], step));
}

#[test]
fn gradients_flow_through_a_frozen_model_whose_weights_are_spread() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), 0);
    let config = lora(&["first"]);
    let make: &Make = &|pg, varmap, options| adapted(pg, varmap, (folder.path(), &config, DType::F32), options);
    ranks(2, |pg| {
        for between in [Between::Nothing, Between::Evaluations, Between::Training] {
            let plain = compete(&pg, make, Sharding::Optimizer { ranks: None }, false, between)?;
            for reshard_after_forward in [true, false] {
                let sharding = Sharding::Blocks { reshard_after_forward, ranks: None };
                assert_eq!(compete(&pg, make, sharding, false, between)?, plain, "{sharding:?}");
            }
        }
        Ok(())
    });
}

/// In bf16, whose adapters are f32. The run has what is trained alone.
#[test]
fn a_run_with_spread_weights_continues_on_other_ranks_and_its_adapter_is_whole() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    std::fs::create_dir(path("base")).unwrap();
    write(&path("base"), 0);
    let config = LoraConfig { task_type: Some("SEQ_CLS".to_string()), ..lora(&["first", "head"]) };
    let outputs = |ddp: &Ddp, pg: &ProcessGroup| {
        let x = batch(pg, 99)?.narrow(0, 0, 1)?.ones_like()?.to_dtype(DType::BF16)?;
        let y = no_grad(|| ddp.forward(&x))?;
        Ok::<_, Error>(y.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?)
    };
    let blocks = |ranks| Sharding::Blocks { reshard_after_forward: true, ranks };
    let mut saved = None;
    for (ranks, sharding) in [(3, blocks(None)), (2, blocks(None)), (1, Sharding::Off), (4, blocks(Some(2)))] {
        let last = saved.as_ref();
        let found = crate::common::ranks(ranks, |pg| {
            let options = DdpOptions { sharding, ..Default::default() };
            let build = |varmap: &VarMap| adapted(&pg, varmap, (&path("base"), &config, DType::BF16), options.clone());
            let mut varmap = VarMap::new();
            let (ddp, mut optimizer) = build(&varmap)?;
            assert!(varmap.data().lock().unwrap().keys().all(|name| name.contains(".lora_")));
            let mut checkpointer = going_on(&pg, path("run"))?;
            let step = checkpointer.load_latest((("model", &mut varmap), ("optimizer", &mut optimizer)))?;
            if let Some((number, expected)) = last {
                assert_eq!((step, &outputs(&ddp, &pg)?), (Some(*number), expected), "{ranks} ranks");
                let fresh = VarMap::new();
                let (other, _optimizer) = build(&fresh)?;
                load_adapter(&config, &fresh, path("adapter"))?;
                assert_eq!(&outputs(&other, &pg)?, expected, "the adapter on {ranks} ranks");
            }
            for number in 0..2 {
                let loss = ddp.forward(&batch(&pg, number)?.to_dtype(DType::BF16)?)?.to_dtype(DType::F32)?;
                optimizer.step(&ddp.backward(&loss.sqr()?.mean_all()?)?)?;
            }
            let number = step.map_or(1, |step| step + 1);
            pg.barrier()?;
            checkpointer.save(number, (("model", &mut varmap), ("optimizer", &mut optimizer)))?.wait()?;
            save_adapter(&pg, &config, &varmap, path("adapter"))?;
            let written = checkpoint::read(path("adapter").join("adapter_model.safetensors"))?;
            assert_eq!(written["base_model.model.layers.0.first.lora_A.weight"].dims(), [2, WIDTH], "{ranks} ranks");
            Ok((number, outputs(&ddp, &pg)?))
        });
        assert!(found.iter().all(|one| *one == found[0]) && last.is_none_or(|last| *last != found[0]));
        saved = found.into_iter().next();
    }
}

#[test]
fn all_ranks_have_rank_0s_weights_or_an_error() {
    let folders = [0, 5].map(|seed| {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), seed);
        folder
    });
    let config = lora(&["first", "second"]);
    let found = ranks(3, |pg| {
        // The weights outside of blocks are each rank's own.
        let folder = folders[pg.rank().min(1)].path();
        let (ddp, _optimizer) = adapted(&pg, &VarMap::new(), (folder, &config, DType::F32), sharded())?;
        let x = Tensor::ones((1, WIDTH), DType::F32, pg.device())?;
        let y = no_grad(|| ddp.call(|net| net.layers.iter().try_fold(x, |x, layer| layer.forward(&x))))?;
        Ok(y.flatten_all()?.to_vec1::<f32>()?)
    });
    assert!(found.iter().all(|values| *values == found[0]));
    ranks(2, |pg| {
        let dtype = [DType::F32, DType::BF16][pg.rank()];
        let error = adapted(&pg, &VarMap::new(), (folders[0].path(), &config, dtype), sharded()).unwrap_err();
        assert!(matches!(error, Error::Mismatch { .. }) && error.to_string().contains("layers.0"), "{error}");
        Ok(())
    });
}

/// The pretrained weights may be variables of the model, of any role.
#[test]
fn variables_are_not_taken_over() {
    let config = lora(&["first"]);
    ranks(2, |pg| {
        let varmap = VarMap::new();
        let in_role = config.clone();
        let role = move |name: &str| match (in_role.is_trained(name), name.ends_with("norm.bias")) {
            (true, _) => Role::Parameter,
            (_, true) => Role::Ignored,
            _ => Role::Frozen,
        };
        let build = |vb: VarBuilder<'static>| config.build(vb.clone(), vb, Net::new);
        let options = DdpOptions { role: Arc::new(role), init_seed: Some(7), ..sharded() };
        let ddp = DistributedDataParallel::with_options(&pg, &varmap, build, options)?;
        let x = Tensor::ones((1, WIDTH), DType::F32, pg.device())?;
        let normed = || {
            no_grad(|| ddp.call(|net| net.layers[0].call(&[&x], |layer, x| layer.norm.forward(&x[0]))))?
                .flatten_all()?
                .to_vec1::<f32>()
        };
        // Each rank's own, which it may change.
        assert_eq!(normed()?, [0.; WIDTH]);
        let bias = varmap.data().lock().unwrap()["layers.0.norm.bias"].clone();
        bias.set(&(bias.ones_like()? * (1. + pg.rank() as f64))?)?;
        assert_eq!(normed()?, [1. + pg.rank() as f32; WIDTH]);
        Ok(())
    });
}
