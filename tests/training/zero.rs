//! ZeRO-2 with ranks as threads, compared with the same optimizer on one rank.
use crate::common::{assert_close, assert_error, buckets, filled, floats, of_zero, ranks, sharding, tensor, with_role};
use candle_core::backprop::GradStore;
use candle_core::{DType, Module, Tensor, Var};
use candle_ddp::amp::{GradScaler, GradScalerOptions};
use candle_ddp::checkpoint::StateDict;
use candle_ddp::optim::{
    AdamW, FusedOptimizer, Optimizer, ParameterGroup, ParamsAdamW, ParamsLamb, ParamsSgd, UpdateRule,
    ZeroRedundancyOptimizer, clip_grad_norm,
};
use candle_ddp::{
    Buckets, DdpOptions, DistributedDataParallel, Error, Failure, Precision, ProcessGroup, Result, Role, Sharding,
    Unused,
};
use candle_nn::{Linear, VarBuilder, VarMap, linear};

/// Two layers, and a third that only some passes use. No number of ranks divides the sizes.
struct Net {
    first: Linear,
    second: Linear,
    third: Linear,
}

impl Net {
    fn new(vb: VarBuilder) -> candle_core::Result<Self> {
        Ok(Self {
            first: linear(5, 7, vb.pp("first"))?,
            second: linear(7, 3, vb.pp("second"))?,
            third: linear(3, 3, vb.pp("third"))?,
        })
    }
}

impl Module for Net {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.second.forward(&self.first.forward(x)?.tanh()?)
    }
}

type Ddp = DistributedDataParallel<Net>;

/// Buckets of a few parameters each.
fn small(zero: bool) -> DdpOptions {
    let (sharding, buckets) = (sharding(zero), buckets(1e-4, 5e-5));
    DdpOptions { sharding, unused: Unused::Allow, buckets, ..Default::default() }
}

fn wrap(pg: &ProcessGroup, options: DdpOptions) -> Result<Ddp> {
    Ok(filled(pg, |vb| Net::new(vb), options, 7)?.0)
}

/// This rank's part of the twelve samples of a step.
fn batch(pg: &ProcessGroup, step: u64) -> Tensor {
    let part = 12 / pg.world_size();
    tensor(&[12, 5], 100 + step).narrow(0, part * pg.rank(), part).unwrap()
}

/// The backward pass of a step; in odd steps rank 0 alone also uses the third layer.
fn backward(ddp: &Ddp, step: u64, scale: f64) -> Result<GradStore> {
    ddp.backward(&loss(ddp, step, scale)?)
}

fn loss(ddp: &Ddp, step: u64, scale: f64) -> Result<Tensor> {
    let pg = ddp.process_group();
    ddp.call(|net| {
        let output = net.forward(&batch(pg, step))?;
        let loss = output.sqr()?.mean_all()?;
        // This makes up for the averaging, since only rank 0 contributes.
        if step % 2 == 1 && pg.rank() == 0 {
            let extra = net.third.forward(&tensor(&[2, 3], step))?.sqr()?.mean_all()?;
            return (loss + (extra * pg.world_size() as f64)?)?.affine(scale, 0.);
        }
        loss.affine(scale, 0.)
    })
}

fn values(ddp: &Ddp) -> Vec<(String, Vec<f32>)> {
    ddp.named_parameters().into_iter().map(|(name, var)| (name, floats(&var))).collect()
}

#[track_caller]
fn assert_same(actual: &[(String, Vec<f32>)], expected: &[(String, Vec<f32>)], tolerance: f32) {
    for ((name, actual), (_, expected)) in actual.iter().zip(expected) {
        assert_close(actual, expected, tolerance, name);
    }
}

/// Two groups: weights with `options`, biases with `biases`.
fn groups<R: Clone>(parameters: Vec<(String, Var)>, options: &R, biases: &R) -> Vec<ParameterGroup<R>> {
    let (b, w): (Vec<_>, Vec<_>) = parameters.into_iter().partition(|(name, _)| name.ends_with("bias"));
    vec![
        ParameterGroup { parameters: w, options: options.clone() },
        ParameterGroup { parameters: b, options: biases.clone() },
    ]
}

/// The parameters after `steps` steps of a plain optimizer in a world of one.
fn plain<R: UpdateRule + Sync>(options: &R, biases: &R, steps: u64, max_norm: f64) -> Vec<(String, Vec<f32>)> {
    let mut all = ranks(1, |pg| {
        let ddp = wrap(&pg, small(false))?;
        let mut optimizer = FusedOptimizer::from_groups(groups(ddp.named_parameters(), options, biases))?;
        for step in 0..steps {
            let mut grads = backward(&ddp, step, 1.)?;
            clip_grad_norm(&mut grads, &ddp, max_norm)?;
            optimizer.step(&grads)?;
        }
        Ok(values(&ddp))
    });
    all.remove(0)
}

/// A parameter that is averaged, and one of each rank's own.
fn averaged_and_own(pg: &ProcessGroup, sharding: Sharding) -> Result<DistributedDataParallel<[Tensor; 2]>> {
    let build = |vb: VarBuilder| -> candle_core::Result<[Tensor; 2]> {
        let ones = candle_nn::Init::Const(1.);
        Ok([vb.get_with_hints(3, "averaged", ones)?, vb.get_with_hints(3, "own", ones)?])
    };
    let role = |name: &str| if name == "own" { Role::Ignored } else { Role::Parameter };
    let options = DdpOptions { sharding, ..with_role(role) };
    DistributedDataParallel::with_options(pg, &VarMap::new(), build, options)
}

fn train_like_plain<R: UpdateRule + Sync>(options: R, biases: R) {
    let expected = plain(&options, &biases, 6, 0.02);
    for world_size in [1, 3, 4] {
        let found = ranks(world_size, |pg| {
            let ddp = wrap(&pg, small(true))?;
            let mut optimizer =
                ZeroRedundancyOptimizer::from_groups(groups(ddp.named_parameters(), &options, &biases))?;
            for step in 0..6 {
                let mut grads = backward(&ddp, step, 1.)?;
                let norm = optimizer.clip_grad_norm(&mut grads, 0.02)?.to_scalar::<f64>()?;
                assert!(norm > 0.02, "the test clips: {norm}");
                optimizer.step(&grads)?;
            }
            Ok(values(&ddp))
        });
        for rank in found {
            assert_same(&rank, &expected, 1e-5);
        }
    }
}

#[test]
fn every_optimizer_trains_as_without_sharding() {
    train_like_plain(adamw(), ParamsAdamW { weight_decay: 0., ..adamw() });
    let sgd = ParamsSgd { lr: 0.05, momentum: 0.9, nesterov: true, ..Default::default() };
    // Without momentum there is no state.
    train_like_plain(sgd, ParamsSgd { lr: 0.05, ..Default::default() });
    // LAMB's trust ratios are those of whole parameters, which lie on several ranks.
    let lamb = ParamsLamb { lr: 0.02, max_grad_norm: Some(0.01), ..Default::default() };
    train_like_plain(lamb.clone(), ParamsLamb { weight_decay: 0., ..lamb });
}

fn adamw() -> ParamsAdamW {
    ParamsAdamW { lr: 0.01, weight_decay: 0.1, ..Default::default() }
}

#[test]
fn parameters_that_no_rank_used_stay_as_they_are() {
    ranks(2, |pg| {
        let ddp = wrap(&pg, small(true))?;
        let before = values(&ddp);
        let mut optimizer = ZeroRedundancyOptimizer::new(&ddp, adamw())?;
        optimizer.step(&backward(&ddp, 0, 1.)?)?;
        for ((name, after), (_, before)) in values(&ddp).iter().zip(&before) {
            assert_eq!(after == before, name.starts_with("third"), "{name}");
        }
        // Only parameters that were updated count the step.
        let state = optimizer.state_dict()?;
        let steps = |name: &str| state[&format!("state.{name}.step")].to_vec1::<i64>().unwrap()[0];
        assert_eq!((steps("first.weight"), steps("third.weight")), (1, 0));
        Ok(())
    });
}

#[test]
fn each_state_is_on_one_rank_only() {
    for world_size in [1, 2, 3] {
        let bytes = ranks(world_size, |pg| {
            let ddp = wrap(&pg, small(true))?;
            Ok(ZeroRedundancyOptimizer::new(&ddp, adamw())?.state_bytes())
        });
        let all = 2 * 4 * (5 * 7 + 7 + 7 * 3 + 3 + 3 * 3 + 3);
        assert_eq!(bytes.iter().sum::<usize>(), all);
        // The largest bucket has fewer than 45 elements.
        assert!(bytes.iter().all(|bytes| *bytes <= all / world_size + 2 * 4 * 45), "{bytes:?}");
    }
}

#[test]
fn mixed_precision_has_full_masters_on_all_ranks() {
    let precision = Precision::Half { param_dtype: DType::BF16, buffer_dtype: None };
    for reduce_dtype in [None, Some(DType::F32)] {
        let run = |zero: bool| {
            ranks(2, |pg| {
                let buckets = Buckets { reduce_dtype, ..small(zero).buckets };
                let ddp = wrap(&pg, DdpOptions { precision, buckets, ..small(zero) })?;
                let loss =
                    || -> Result<Tensor> { Ok(ddp.forward(&batch(&pg, 0))?.to_dtype(DType::F32)?.sqr()?.mean_all()?) };
                let mut optimizer = AdamW::new(&ddp, adamw())?;
                for _ in 0..3 {
                    optimizer.step(&ddp.backward(&loss()?)?)?;
                }
                Ok(values(&ddp))
            })
        };
        let (with, without) = (run(true), run(false));
        assert_eq!(with[0], with[1]);
        assert_same(&with[0], &without[0], 1e-6);
    }
}

#[test]
fn an_overflow_on_one_rank_skips_the_step_on_all() {
    let expected = plain(&adamw(), &adamw(), 3, f64::INFINITY);
    let found = ranks(2, |pg| {
        let ddp = wrap(&pg, small(true))?;
        let mut optimizer = ZeroRedundancyOptimizer::new(&ddp, adamw())?;
        let options = GradScalerOptions { init_scale: 1024., ..Default::default() };
        let mut scaler = GradScaler::new(&pg, &ddp, options)?;
        for (step, overflow) in [(0, false), (1, false), (2, true), (2, false)] {
            let broken = if overflow && pg.rank() == 1 { f64::INFINITY } else { 1. };
            let mut grads = ddp.backward(&scaler.scale(&loss(&ddp, step, broken)?)?)?;
            // The scaler lets the optimizer divide its gradients unless that has been done.
            if step != 1 {
                optimizer.unscale(&mut scaler, &mut grads)?;
                optimizer.clip_grad_norm(&mut grads, 1e6)?;
            }
            let before = scaler.current_scale();
            scaler.step(&mut optimizer, &mut grads)?;
            scaler.update()?;
            assert_eq!(scaler.current_scale() >= before, !overflow);
        }
        assert_eq!(scaler.current_scale(), 512.);
        // Without `unscale`, the step would use scaled gradients.
        let mut grads = ddp.backward(&scaler.scale(&loss(&ddp, 3, 1.)?)?)?;
        assert_error(scaler.step_if_finite(&mut grads, |grads| optimizer.step(grads)), &["unscale"]);
        Ok(values(&ddp))
    });
    for rank in found {
        assert_same(&rank, &expected, 1e-5);
    }
}

fn ddp_of_another(pg: &ProcessGroup) -> Result<DistributedDataParallel<Tensor>> {
    DistributedDataParallel::with_options(pg, &VarMap::new(), |vb| vb.get(3, "another"), of_zero())
}

#[test]
fn misuse_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    ranks(2, |pg| {
        // Ranks that disagree.
        let ddp = wrap(&pg, small(true))?;
        let options = ParamsAdamW { lr: 0.1 * (1 + pg.rank()) as f64, ..adamw() };
        assert_error(ZeroRedundancyOptimizer::new(&ddp, options), &["different options", "0.2"]);
        // Invalid options on one rank.
        let options = ParamsAdamW { beta1: 0.9 + pg.rank() as f64, ..adamw() };
        match ZeroRedundancyOptimizer::new(&ddp, options) {
            Err(Error::RankFailed { rank: 1, reason }) if pg.rank() == 0 => {
                assert!(reason.contains("beta1"), "{reason}")
            }
            Err(Error::InvalidArgument { argument: "beta1", .. }) if pg.rank() == 1 => {}
            other => panic!("rank {}: {other:?}", pg.rank()),
        }
        // Parameters of two sharded models.
        let other = ddp_of_another(&pg)?;
        let group = |ddp: Vec<(String, Var)>| ParameterGroup { parameters: ddp, options: adamw() };
        let groups = vec![group(other.named_parameters()), group(ddp.named_parameters())];
        assert_error(ZeroRedundancyOptimizer::from_groups(groups), &["of another sharded model"]);
        drop(other);
        // DDP allows one such optimizer at a time.
        let optimizer = ZeroRedundancyOptimizer::new(&ddp, adamw())?;
        assert_error(ZeroRedundancyOptimizer::new(&ddp, adamw()), &["another"]);
        assert_error(optimizer.save_distributed(&pg, &folder.path().join("absent").join("file")), &["absent"]);
        drop(optimizer);
        // Every averaged parameter is in a group.
        let parameters = ddp.named_parameters().into_iter().filter(|(name, _)| name != "second.bias").collect();
        let error = ZeroRedundancyOptimizer::from_groups(vec![group(parameters)]).unwrap_err();
        assert!(matches!(&error, Error::Parameter { parameter, .. } if parameter == "second.bias"), "{error}");
        let mut optimizer = ZeroRedundancyOptimizer::new(&ddp, adamw())?;
        let mut grads = backward(&ddp, 0, 1.)?;
        assert_error(clip_grad_norm(&mut grads, &ddp, 1.), &["none of the parameters has a gradient in it"]);
        ddp.zero_grad();
        assert_error(optimizer.step(&grads), &["no new gradients"]);
        Ok(())
    });
    // In a world of one, an error does not end the group.
    ranks(1, |pg| {
        let ddp = wrap(&pg, small(true))?;
        let mut optimizer = ZeroRedundancyOptimizer::new(&ddp, adamw())?;
        let mut grads = backward(&ddp, 0, 1.)?;
        optimizer.step(&grads)?;
        assert_error(optimizer.step(&grads), &["no new gradients"]);
        assert_error(optimizer.clip_grad_norm(&mut grads, 1.), &["no new gradients"]);
        // The optimizer remains usable.
        optimizer.step(&backward(&ddp, 0, 1.)?)?;
        Ok(())
    });
}

/// An ignored parameter has its own optimizer, and both optimizers share a scaler.
#[test]
fn a_scaler_divides_the_gradients_of_ignored_parameters_too() {
    for broken in [false, true] {
        let found = ranks(2, |pg| {
            let ddp = averaged_and_own(&pg, sharding(true))?;
            let named = ddp.named_parameters();
            let sgd = ParamsSgd { lr: 0.1, ..Default::default() };
            let mut zero = ZeroRedundancyOptimizer::new(vec![named[0].clone()], sgd.clone())?;
            let mut own = FusedOptimizer::new(vec![named[1].clone()], sgd)?;
            let mut scaler = GradScaler::new(&pg, named.clone(), GradScalerOptions::default())?;
            let loss = ddp.call(|[averaged, own]| averaged.sum_all()? + own.sum_all()?)?;
            let mut grads = ddp.backward(&scaler.scale(&loss)?)?;
            if broken && pg.rank() == 1 {
                grads.insert(&named[1].1, Tensor::full(f32::NAN, 3, pg.device())?);
            }
            zero.unscale(&mut scaler, &mut grads)?;
            scaler.step_if_finite(&mut grads, |grads| {
                zero.step(grads)?;
                own.step(grads)
            })?;
            Ok(named.iter().map(|(_, var)| floats(var)).collect::<Vec<_>>())
        });
        let expected = if broken { 1. } else { 0.9 };
        assert_eq!(found, vec![vec![vec![expected; 3]; 2]; 2]);
    }
}

/// Each rank updates them by itself, and they are scaled like the averaged ones.
#[test]
fn ignored_parameters_may_be_in_the_same_optimizer() {
    let run = |zero: bool| {
        ranks(2, |pg| {
            let ddp = averaged_and_own(&pg, sharding(zero))?;
            let sgd = ParamsSgd { lr: 0.1, momentum: 0.9, ..Default::default() };
            let mut optimizer = FusedOptimizer::new(&ddp, sgd)?;
            for _ in 0..3 {
                let factor = 1. + pg.rank() as f64;
                let loss =
                    ddp.call(|[averaged, own]| averaged.sqr()?.sum_all()? + (own.sqr()?.sum_all()? * factor)?)?;
                let mut grads = ddp.backward(&loss)?;
                assert!(optimizer.clip_grad_norm(&mut grads, 0.5)?.to_scalar::<f64>()? > 0.5);
                optimizer.step(&grads)?;
            }
            Ok(ddp.named_parameters().iter().map(|(_, var)| floats(var)).collect::<Vec<_>>())
        })
    };
    let (sharded, plain) = (run(true), run(false));
    assert_ne!(plain[0][1], plain[1][1]);
    for (sharded, plain) in sharded.iter().flatten().zip(plain.iter().flatten()) {
        assert_close(sharded, plain, 1e-6, "parameter");
    }
}

#[test]
fn an_incomplete_set_of_shards_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join(format!("shard-00000-of-{}.safetensors", u64::MAX)), "").unwrap();
    ranks(1, |pg| {
        let ddp = wrap(&pg, small(true))?;
        let mut optimizer = ZeroRedundancyOptimizer::new(&ddp, adamw())?;
        assert_error(optimizer.load_distributed(&pg, folder.path()), &["lacks", "shard-00001-of-18446744073709551615"]);
        Ok(())
    });
}

/// Rank 1 fails instead of saving. (Tests next to `write_together` cover failures during the write.)
#[test]
fn a_failed_rank_leaves_the_previous_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("whole");
    let files = || {
        let paths = folder.path().read_dir().unwrap().map(|entry| entry.unwrap().path());
        paths.map(|path| (std::fs::read(&path).unwrap(), path)).collect::<Vec<_>>()
    };
    let before = ranks(2, |pg| {
        let ddp = wrap(&pg, small(true))?;
        let mut optimizer = ZeroRedundancyOptimizer::new(&ddp, adamw())?;
        optimizer.step(&backward(&ddp, 0, 1.)?)?;
        optimizer.save_distributed(&pg, &path)?;
        let before = files();
        pg.barrier()?;
        optimizer.step(&backward(&ddp, 1, 1.)?)?;
        if pg.rank() == 0 {
            let saved = optimizer.save_distributed(&pg, &path);
            assert!(matches!(saved, Err(Error::Group(Failure::PeerFailed { peer: 1, .. }))));
            return Ok(before);
        }
        pg.abort("it has failed");
        Ok(before)
    });
    assert!(before[0].len() == 1 && before[0] == files());
}
