//! Virtual ranks: a run has the same bits on any number of ranks.
use crate::common::{assert_close, floats, ranks, values};
use candle_core::{DType, Device, ModuleT, Result as CandleResult, Tensor, Var};
use candle_ddp::amp::MixedPrecision;
use candle_ddp::checkpoint::StateDict;
use candle_ddp::data::{DataLoader, Dataset, LoaderOptions};
use candle_ddp::nn::{
    BatchNorm, Conv2d, Conv2dConfig, Dropout, Linear, VarBuilder, batch_norm, conv2d, linear, loss, sync_batch_norm,
};
use candle_ddp::optim::{AdamW, Ema, Optimizer, ParamsAdamW, ParamsSgd, ZeroRedundancyOptimizer};
use candle_ddp::seed::Generator;
use candle_ddp::{
    DdpOptions, DistributedDataParallel, Error, JoinOptions, ProcessGroup, Result, Role, Unused, comm_hook,
};
use candle_nn::VarMap;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

const VIRTUAL: usize = 8;

/// Images with noise that each sample draws, and labels.
struct Noisy;

impl Dataset for Noisy {
    type Sample = (Tensor, u32);

    fn len(&self) -> usize {
        // No multiple of a global batch.
        90
    }

    fn get(&self, index: usize, random: &mut Generator) -> Result<(Tensor, u32)> {
        let noise = random.randn(0., 0.1, (1, 6, 6), DType::F32, &Device::Cpu)?;
        let image = Tensor::from_vec(values(36, index as u64), (1, 6, 6), &Device::Cpu)?;
        Ok(((image + noise)?, (index % 4) as u32))
    }
}

/// A convolution, batch normalisation, dropout, and a part that some micro-batches do not use.
struct Net {
    conv: Conv2d,
    norm: BatchNorm,
    dropout: Dropout,
    head: Linear,
    rare: Linear,
}

impl Net {
    fn new(vb: VarBuilder, generator: &Arc<Mutex<Generator>>) -> CandleResult<Self> {
        Ok(Self {
            conv: conv2d(1, 5, 3, Conv2dConfig::default(), vb.pp("conv"))?,
            norm: batch_norm(5, 1e-5, vb.pp("norm"))?,
            dropout: Dropout::with_generator(0.3, Arc::clone(generator)),
            head: linear(80, 4, vb.pp("head"))?,
            rare: linear(4, 4, vb.pp("rare"))?,
        })
    }

    fn forward(&self, x: &Tensor, is_rare: bool) -> CandleResult<Tensor> {
        let x = self.norm.forward_t(&x.apply(&self.conv)?, true)?.relu()?.flatten_from(1)?;
        let x = self.dropout.forward(&x, true)?.apply(&self.head)?;
        if is_rare { x.apply(&self.rare) } else { Ok(x) }
    }
}

/// The bits of a run.
type Bits = BTreeMap<String, Vec<u32>>;

fn bits(tensor: &Tensor) -> Vec<u32> {
    floats(tensor).into_iter().map(f32::to_bits).collect()
}

fn options(mixed_precision: Option<MixedPrecision>) -> DdpOptions {
    let (bucket_cap_mb, first_bucket_mb) = (0.001, 0.0005);
    let (virtual_ranks, init_seed) = (Some(VIRTUAL), Some(3));
    let unused = Unused::Allow;
    DdpOptions {
        bucket_cap_mb,
        first_bucket_mb,
        virtual_ranks,
        init_seed,
        mixed_precision,
        unused,
        ..Default::default()
    }
}

/// Trains for two epochs, and returns all that a run leaves.
fn train(pg: &ProcessGroup, mixed_precision: Option<MixedPrecision>) -> Result<Bits> {
    let generator = Arc::new(Mutex::new(Generator::new(0)));
    let varmap = VarMap::new();
    let build = |vb| Net::new(vb, &generator);
    let ddp = DistributedDataParallel::with_options(pg, &varmap, build, options(mixed_precision))?;
    let mut optimizer = AdamW::new(&ddp, ParamsAdamW { lr: 0.01, ..Default::default() })?;
    let mut ema = Ema::new(ddp.named_weights(), 0.9)?;
    let loader_options = LoaderOptions { batch_size: 3, virtual_ranks: Some(VIRTUAL), ..Default::default() };
    let loader = DataLoader::new(Noisy, pg, loader_options)?;
    let (mut all_losses, mut own_losses, mut kept) = (Vec::new(), Vec::new(), None);
    for epoch in 0..2 {
        loader.set_epoch(epoch);
        for micro_batch in loader.micro_batches()? {
            let micro_batch = micro_batch?;
            micro_batch.seed(&generator);
            let (x, y) = &micro_batch.batch;
            let x = ddp.cast_forward_inputs(x)?;
            let is_rare = micro_batch.number % 3 == 2;
            let logits = ddp.call(|net| net.forward(&x, is_rare))?.to_dtype(DType::F32)?;
            let loss = loss::cross_entropy(&logits, y)?;
            own_losses.push(f64::from(loss.to_scalar::<f32>()?));
            let Some(mut grads) = ddp.backward_micro_batch(&loss, micro_batch.number)? else { continue };
            all_losses.extend(ddp.gather_micro_batches(&own_losses)?);
            own_losses.clear();
            optimizer.clip_grad_norm(&mut grads, 0.5)?;
            optimizer.step(&grads)?;
            ema.update()?;
            // Gradients that the program holds keep their values.
            kept = Some(grads);
        }
    }
    drop(kept);
    let mut all: Bits = varmap.data().lock().unwrap().iter().map(|(name, var)| (name.clone(), bits(var))).collect();
    let losses: Vec<u32> = all_losses.iter().map(|loss| (*loss as f32).to_bits()).collect();
    assert_eq!(losses.len(), 2 * 4 * VIRTUAL);
    all.insert("losses".to_string(), losses);
    for (part, state) in
        [("optimizer", optimizer.state_dict()?), ("ema", ema.state_dict()?), ("loader", loader.state_dict()?)]
    {
        all.extend(state.iter().map(|(name, tensor)| (format!("{part}: {name}"), bits(tensor))));
    }
    Ok(all)
}

fn assert_same(mixed_precision: Option<MixedPrecision>, worlds: &[usize]) {
    let one = ranks(1, |pg| train(&pg, mixed_precision)).unwrap().remove(0);
    assert!(one.len() > 20 && one.values().flatten().all(|bits| f32::from_bits(*bits).is_finite()));
    for &world_size in worlds {
        for (rank, other) in ranks(world_size, |pg| train(&pg, mixed_precision)).unwrap().into_iter().enumerate() {
            for (name, expected) in &one {
                assert!(other[name] == *expected, "{name} differs on rank {rank} of {world_size}");
            }
        }
    }
}

#[test]
fn a_run_has_the_same_bits_on_any_number_of_ranks() {
    assert_same(None, &[2, 3, 4, 5, 6, 7, 8]);
}

#[test]
fn so_it_has_with_gradients_in_other_dtypes() {
    for (param_dtype, reduce_dtype) in [(None, DType::BF16), (None, DType::F16), (Some(DType::BF16), DType::F32)] {
        let mixed = MixedPrecision { param_dtype, reduce_dtype: Some(reduce_dtype), ..Default::default() };
        assert_same(Some(mixed), &[2, 3, 8]);
    }
}

/// The gradients are the mean over all micro-batches, as one process computes it.
#[test]
fn gradients_are_the_mean_over_all_micro_batches() {
    let input = |number: usize| Tensor::from_vec(values(12, number as u64), (3, 4), &Device::Cpu).unwrap();
    let all: Vec<Tensor> = (0..16).map(input).collect();
    let whole = Tensor::cat(&all, 0).unwrap();
    let weight = Tensor::from_vec(values(8, 77), (2, 4), &Device::Cpu).unwrap();
    let var = Var::from_tensor(&weight).unwrap();
    let mean = whole.matmul(&var.t().unwrap()).unwrap().sqr().unwrap().sum(1).unwrap().mean_all().unwrap();
    let expected = floats(mean.backward().unwrap().get(&var).unwrap());
    for world_size in [1, 3, 5, 12, 16] {
        let found = ranks(world_size, |pg| {
            let vars = vec![("weight".to_string(), Var::from_tensor(&weight)?)];
            let options = DdpOptions { virtual_ranks: Some(16), ..Default::default() };
            let ddp = DistributedDataParallel::from_vars(&pg, vars[0].1.clone(), vars, options)?;
            let mut result = None;
            for number in ddp.micro_batches().unwrap() {
                let loss = ddp.call(|w| all[number].matmul(&w.t()?)?.sqr()?.sum(1)?.mean_all())?;
                result = ddp.backward_micro_batch(&loss, number)?;
            }
            Ok(floats(result.unwrap().get(&ddp.parameters()[0]).unwrap()))
        });
        for found in found.unwrap() {
            assert_close(&found, &expected, 1e-6, &format!("{world_size} ranks"));
        }
    }
}

type Model = DistributedDataParallel<Linear>;

fn model(pg: &ProcessGroup, virtual_ranks: usize) -> Result<Model> {
    let options = DdpOptions { virtual_ranks: Some(virtual_ranks), ..Default::default() };
    DistributedDataParallel::with_options(pg, &VarMap::new(), |vb| linear(4, 1, vb), options)
}

fn step(ddp: &Model, numbers: impl IntoIterator<Item = usize>) -> Result<bool> {
    let mut has_gradients = false;
    for number in numbers {
        let loss = ddp.forward(&Tensor::ones((2, 4), DType::F32, &Device::Cpu)?)?.sqr()?.mean_all()?;
        has_gradients = ddp.backward_micro_batch(&loss, number)?.is_some();
    }
    Ok(has_gradients)
}

fn invalid<T>(result: Result<T>, argument: &str, part: &str) {
    match result.err() {
        Some(Error::InvalidArgument { argument: found, reason }) => {
            assert_eq!(found, argument, "{reason}");
            assert!(reason.contains(part), "{reason}");
        }
        other => panic!("not an invalid {argument}: {other:?}"),
    }
}

#[test]
fn a_wrong_number_is_an_error_on_every_rank() {
    // Rank 1 computes 2 and 3 of 8; one it has left out, and one that it repeats.
    for wrong in [vec![3], vec![2, 2], vec![2, 4], vec![0]] {
        let results = ranks(4, |pg| {
            let ddp = model(&pg, 8)?;
            assert!(step(&ddp, ddp.micro_batches().unwrap())?);
            let own = if pg.rank() == 1 { wrong.clone() } else { ddp.micro_batches().unwrap().collect() };
            Ok(step(&ddp, own))
        });
        for (rank, result) in results.unwrap().into_iter().enumerate() {
            match rank {
                1 => invalid(result, "number", "comes next on rank 1"),
                _ => {
                    let error = result.unwrap_err().to_string();
                    assert!(error.contains("rank 1") && error.contains("comes next"), "rank {rank}: {error}");
                }
            }
        }
    }
}

#[test]
fn a_step_that_was_left_begins_again_after_zero_grad() {
    ranks(2, |pg| {
        let ddp = model(&pg, 8)?;
        let own = ddp.micro_batches().unwrap();
        assert!(!step(&ddp, own.start..own.start + 3)?);
        ddp.zero_grad();
        assert!(step(&ddp, own)?);
        Ok(())
    })
    .unwrap();
    // In a world of one, a failed pass leaves nothing behind.
    ranks(1, |pg| {
        let ddp = model(&pg, 4)?;
        invalid(step(&ddp, [0, 1, 3]), "number", "micro-batch 2 comes next on rank 0, not 3");
        assert!(step(&ddp, 2..4)?);
        assert!(step(&ddp, 0..4)?);
        Ok(())
    })
    .unwrap();
}

#[test]
fn numbers_of_virtual_ranks_that_cannot_be_are_errors_on_every_rank() {
    for (virtual_ranks, part) in
        [(0, "power of two"), (3, "power of two"), (6, "power of two"), (2, "number of ranks, 3")]
    {
        let results = ranks(3, |pg| {
            let loader = LoaderOptions { virtual_ranks: Some(virtual_ranks), ..Default::default() };
            let loader = DataLoader::new(Noisy, &pg, loader).err().unwrap().to_string();
            assert!(loader.contains(part), "{loader}");
            Ok(model(&pg, virtual_ranks).err().unwrap().to_string())
        });
        for error in results.unwrap() {
            assert!(error.contains(part), "{error}");
        }
    }
    for error in ranks(2, |pg| Ok(model(&pg, 8 << pg.rank()).err().unwrap())).unwrap() {
        let Error::Mismatch { what: "model", rank: 1, difference } = error else { panic!("{error}") };
        assert_eq!(difference, "virtual ranks: 16 on rank 1, virtual ranks: 8 on rank 0");
    }
    let unequal = |pg: ProcessGroup| {
        let options = LoaderOptions { virtual_ranks: Some(8 << pg.rank()), ..Default::default() };
        Ok(DataLoader::new(Noisy, &pg, options).err().unwrap())
    };
    for error in ranks(2, unequal).unwrap() {
        assert!(matches!(error, Error::Mismatch { what: "data loader", rank: 1, .. }), "{error}");
    }
}

#[test]
fn what_would_depend_on_the_ranks_is_refused() {
    ranks(2, |pg| {
        let ddp = model(&pg, 4)?;
        let loss =
            || ddp.forward(&Tensor::ones((2, 4), DType::F32, &Device::Cpu)?)?.sqr()?.mean_all().map_err(Error::from);
        invalid(ddp.backward(&loss()?), "models", "backward_micro_batch");
        invalid(ddp.backward_weighted(&loss()?, 1.), "models", "backward_micro_batch");
        invalid(ddp.backward_into(&loss()?, &mut Default::default()), "models", "backward_micro_batch");
        invalid(candle_ddp::backward(&loss()?, &[&ddp]), "models", "backward_micro_batch");
        invalid(ddp.join(JoinOptions::default(), || Ok(())), "join", "virtual ranks");
        invalid(ddp.register_comm_hook(comm_hook::AllReduce::default()), "comm_hook", "virtual_ranks");
        invalid(ZeroRedundancyOptimizer::<ParamsSgd>::new(&ddp, ParamsSgd::default()), "ddp", "virtual_ranks");
        invalid(
            ddp.gather_micro_batches(&vec![0.; 2 + pg.rank()]),
            "own",
            "rank 1 has 2 micro-batches in a step, and gave 3 values",
        );
        assert!(step(&ddp, ddp.micro_batches().unwrap())?);

        let sync = |vb| sync_batch_norm(&pg, 3, 1e-5, vb);
        let options = || DdpOptions { virtual_ranks: Some(4), ..Default::default() };
        let error = DistributedDataParallel::with_options(&pg, &VarMap::new(), sync, options()).err().unwrap();
        assert!(error.to_string().contains("SyncBatchNorm cannot be combined"), "{error}");
        let own = DdpOptions { broadcast_buffers: false, ..options() };
        let error = DistributedDataParallel::with_options(&pg, &VarMap::new(), |vb| batch_norm(3, 1e-5, vb), own)
            .err()
            .unwrap();
        assert!(error.to_string().contains("broadcast_buffers"), "{error}");
        let role = Arc::new(|name: &str| if name == "bias" { Role::Ignored } else { Role::Parameter });
        let own = DdpOptions { role, ..options() };
        let error =
            DistributedDataParallel::with_options(&pg, &VarMap::new(), |vb| linear(4, 1, vb), own).err().unwrap();
        assert!(error.to_string().contains("the variable bias has Role::Ignored"), "{error}");

        let plain = DistributedDataParallel::new(&pg, &VarMap::new(), |vb| linear(4, 1, vb))?;
        assert!(plain.micro_batches().is_none());
        invalid(plain.gather_micro_batches(&[]), "own", "no virtual ranks");
        let loader = DataLoader::new(Noisy, &pg, LoaderOptions::default())?;
        invalid(loader.micro_batches(), "virtual_ranks", "LoaderOptions.virtual_ranks");
        Ok(())
    })
    .unwrap();
    let under = |case: fn(&Model, &Tensor) -> Result<()>| {
        let result = ranks(1, |pg| {
            let ddp = model(&pg, 4)?;
            let loss = ddp.forward(&Tensor::ones((2, 4), DType::F32, &Device::Cpu)?)?.sqr()?.mean_all()?;
            Ok(case(&ddp, &loss))
        });
        result.unwrap().remove(0)
    };
    let no_sync = under(|ddp, loss| {
        let _guard = ddp.no_sync();
        ddp.backward_micro_batch(loss, 0).map(drop)
    });
    invalid(no_sync, "no_sync", "virtual ranks");
    let other_generator = under(|ddp, loss| {
        candle_ddp::nn::dropout(loss, 0.5, &mut Generator::for_rank(1, 0))?;
        ddp.backward_micro_batch(loss, 0).map(drop)
    });
    invalid(other_generator, "generator", "not that of micro-batch 0");
    let other_number = under(|ddp, loss| {
        candle_ddp::nn::dropout(loss, 0.5, &mut Generator::for_micro_batch(1, 0, 0, 2))?;
        ddp.backward_micro_batch(loss, 0).map(drop)
    });
    invalid(other_number, "generator", "not that of micro-batch 0");
}
