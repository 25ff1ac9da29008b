//! Losses that are sums: `Backward::count` gives the mean over all samples of all ranks and micro-batches.
use crate::common::{Mlp, assert_close, assert_error, counted, floats, pure, ranks, reduced_in, tensor};
use candle_core::{DType, Device, Module, Tensor, Var};
use candle_ddp::comm_hook::{AllReduce, Bf16Compress, Noop};
use candle_ddp::optim::{Optimizer, ParamsSgd, Sgd};
use candle_ddp::{
    Buckets, DdpOptions, DistributedDataParallel, Error, Failure, JoinOptions, ProcessGroup, Result, backward_with,
};
use candle_nn::{VarBuilder, VarMap};

const STEPS: usize = 3;
const LR: f64 = 0.5;
const NAMES: [&str; 4] = ["a.bias", "a.weight", "b.bias", "b.weight"];

/// The number of samples in each micro-batch of a rank in a step. Rank 1 has none in the second step.
fn counts(rank: usize, step: usize) -> [usize; 2] {
    match (rank, step) {
        (0, _) => [13, 2 + step],
        (1, 1) => [0, 0],
        (1, _) => [0, 1],
        _ => [3, 4],
    }
}

fn net(vb: VarBuilder) -> candle_core::Result<Mlp> {
    Mlp::new([3, 4, 2], ["a", "b"], vb)
}

type Ddp = DistributedDataParallel<Mlp>;

fn batch(rank: usize, step: usize, micro_batch: usize) -> Result<(Tensor, Tensor)> {
    // candle has no operations on tensors without elements, so a rank without samples has one that it does not count.
    let rows = counts(rank, step)[micro_batch].max(1);
    let seed = (100 * rank + 10 * step + micro_batch) as u64;
    Ok((tensor(&[rows, 3], seed).to_dtype(DType::F64)?, tensor(&[rows, 2], 7 + seed).to_dtype(DType::F64)?))
}

fn loss_sum(model: impl Fn(&Tensor) -> Result<Tensor>, rank: usize, step: usize, micro_batch: usize) -> Result<Tensor> {
    let (x, y) = batch(rank, step, micro_batch)?;
    let sum = (model(&x)?.to_dtype(DType::F64)? - y)?.sqr()?.sum_all()?;
    Ok(if counts(rank, step)[micro_batch] == 0 { (sum * 0.)? } else { sum })
}

fn set_weights(varmap: &VarMap) {
    for (seed, name) in NAMES.iter().enumerate() {
        let var = crate::common::var(varmap, name);
        var.set(&tensor(var.dims(), seed as u64).to_dtype(var.dtype()).unwrap()).unwrap();
    }
}

fn weights(varmap: &VarMap) -> Vec<f32> {
    NAMES.iter().flat_map(|name| floats(&crate::common::var(varmap, name))).collect()
}

fn wrap(pg: &ProcessGroup, options: DdpOptions) -> Result<(VarMap, Ddp)> {
    let varmap = VarMap::new();
    // A bucket for each parameter.
    let options =
        DdpOptions { buckets: Buckets { bucket_cap_mb: 0., first_bucket_mb: 0., ..options.buckets }, ..options };
    let ddp = DistributedDataParallel::with_options(pg, &varmap, net, options)?;
    set_weights(&varmap);
    Ok((varmap, ddp))
}

fn in_f64() -> DdpOptions {
    pure(DType::F64)
}

fn params() -> ParamsSgd {
    ParamsSgd { lr: LR, ..Default::default() }
}

/// The weights of one process that sees the samples of all `world_size` ranks, or with `of_means` those after steps along
/// the mean of the ranks' means.
fn single(world_size: usize, of_means: bool) -> Vec<f32> {
    let varmap = VarMap::new();
    let net = net(VarBuilder::from_varmap(&varmap, DType::F64, &Device::Cpu)).unwrap();
    set_weights(&varmap);
    let vars: Vec<Var> = NAMES.iter().map(|name| crate::common::var(&varmap, name)).collect();
    let mut optimizer = Sgd::new(vars, params()).unwrap();
    for step in 0..STEPS {
        let (mut sum, mut total) = (Tensor::zeros((), DType::F64, &Device::Cpu).unwrap(), 0);
        for rank in 0..world_size {
            let of_rank: usize = counts(rank, step).iter().sum();
            for micro_batch in 0..2 {
                let loss = loss_sum(|x| Ok(net.forward(x)?), rank, step, micro_batch).unwrap();
                let divisor = if of_means { of_rank.max(1) * world_size } else { 1 };
                sum = (sum + (loss / divisor as f64).unwrap()).unwrap();
            }
            total += of_rank;
        }
        let loss = if of_means { sum } else { (sum / total as f64).unwrap() };
        Optimizer::step(&mut optimizer, &loss.backward().unwrap()).unwrap();
    }
    weights(&varmap)
}

/// Both micro-batches of a step, the first under `no_sync`.
fn backward(pg: &ProcessGroup, ddp: &Ddp, step: usize) -> Result<candle_core::backprop::GradStore> {
    let mut grads = Default::default();
    for (micro_batch, count) in counts(pg.rank(), step).into_iter().enumerate() {
        let _guard = ddp.sync_if(micro_batch == 1);
        let dtype = ddp.parameters()[0].dtype();
        let loss = loss_sum(|x| ddp.forward(&x.to_dtype(dtype)?), pg.rank(), step, micro_batch)?;
        grads = backward_with(&loss, &[ddp], counted(count as f64))?;
    }
    Ok(grads)
}

/// Trains on 3 ranks with `register`ed hooks.
fn train(options: DdpOptions, register: impl Fn(&Ddp) -> Result<()> + Sync) -> Vec<Vec<f32>> {
    ranks(3, |pg| {
        let (varmap, ddp) = wrap(&pg, options.clone())?;
        register(&ddp)?;
        let mut optimizer = Sgd::new(&ddp, params())?;
        for step in 0..STEPS {
            Optimizer::step(&mut optimizer, &backward(&pg, &ddp, step)?)?;
        }
        Ok(weights(&varmap))
    })
}

#[track_caller]
fn assert_all(results: &[Vec<f32>], expected: &[f32], tolerance: f32, what: &str) {
    for result in results {
        assert_eq!(result, &results[0], "{what}: the ranks differ");
        assert_close(result, expected, tolerance, what);
    }
}

#[test]
fn every_sample_counts_once_and_the_mean_of_means_is_something_else() {
    let expected = single(3, false);
    assert_all(&train(in_f64(), |_| Ok(())), &expected, 1e-6, "f64");
    assert_all(&train(DdpOptions::default(), |_| Ok(())), &expected, 1e-6, "f32");
    let wrong = single(3, true);
    let difference = expected.iter().zip(&wrong).fold(0f32, |most, (one, other)| most.max((one - other).abs()));
    assert!(difference > 1e-2, "the mean of means must differ for this test to show anything: {difference}");
}

#[test]
fn hooks_that_compute_means_work() {
    let expected = single(3, false);
    let hook = |ddp: &Ddp| ddp.register_comm_hook(AllReduce::default());
    assert_all(&train(in_f64(), hook), &expected, 1e-6, "AllReduce");
    let hook = |ddp: &Ddp| ddp.register_comm_hook(Bf16Compress::default());
    assert_all(&train(in_f64(), hook), &expected, 2e-2, "Bf16Compress");
}

/// The count must not be rounded to the dtype of the bucket.
#[test]
fn counts_are_exact_in_16_bit_buckets() {
    for dtype in [DType::BF16, DType::F16] {
        let results = ranks(2, |pg| {
            let (_, ddp) = wrap(&pg, reduced_in(Some(dtype)))?;
            // The gradient of b.bias is the same power of two on both ranks, so that only the count could be inexact.
            let loss = (ddp.forward(&tensor(&[1, 3], 1))?.sum_all()? * 1024.)?;
            let grads = backward_with(&loss, &[&ddp], counted([4097., 131.][pg.rank()]))?;
            let bias = ddp.named_parameters().into_iter().find(|(name, _)| name == "b.bias").unwrap().1;
            Ok(floats(grads.get(&bias).unwrap()))
        });
        assert_all(&results, &[2. * 1024. / 4228.; 2], 1e-6, dtype.as_str());
    }
}

/// A hook that sends nothing leaves each rank with the mean over its own samples.
#[test]
fn a_local_hook_divides_by_the_own_count() {
    let found = ranks(2, |pg| {
        let (_, ddp) = wrap(&pg, in_f64())?;
        ddp.register_comm_hook(Noop)?;
        let grads = backward(&pg, &ddp, 0)?;
        let single = |micro_batch| -> Result<Tensor> { loss_sum(|x| ddp.forward(x), pg.rank(), 0, micro_batch) };
        let total: usize = counts(pg.rank(), 0).iter().sum();
        let mean = ((single(0)? + single(1)?)? / total as f64)?;
        let expected = backward_with(&mean, &[&ddp], counted(1.))?;
        let all = |grads: &candle_core::backprop::GradStore| -> Vec<f32> {
            ddp.parameters().iter().flat_map(|var| floats(grads.get(var).unwrap())).collect()
        };
        Ok((all(&grads), all(&expected)))
    });
    for (found, expected) in found {
        assert_close(&found, &expected, 1e-6, "Noop");
    }
}

/// Rank 0 has one step, with a micro-batch that was not synchronised when its inputs ended.
#[test]
fn ranks_without_inputs_count_nothing_but_what_they_have_accumulated() {
    let steps = [1, 3, 2];
    for divide_by_initial_world_size in [true, false] {
        let results = ranks(3, |pg| {
            let (varmap, ddp) = wrap(&pg, in_f64())?;
            let mut optimizer = Sgd::new(&ddp, params())?;
            let options = JoinOptions { divide_by_initial_world_size, ..Default::default() };
            ddp.join(options, || {
                for step in 0..steps[pg.rank()] {
                    let loss = loss_sum(|x| ddp.forward(x), pg.rank(), step, 1)?;
                    let count = counts(pg.rank(), step)[1] as f64;
                    Optimizer::step(&mut optimizer, &backward_with(&loss, &[&ddp], counted(count))?)?;
                }
                if pg.rank() == 0 {
                    let _guard = ddp.no_sync();
                    let loss = loss_sum(|x| ddp.forward(x), 0, 1, 0)?;
                    backward_with(&loss, &[&ddp], counted(counts(0, 1)[0] as f64))?;
                }
                Ok(())
            })?;
            Ok(weights(&varmap))
        });
        let varmap = VarMap::new();
        let net = net(VarBuilder::from_varmap(&varmap, DType::F64, &Device::Cpu)).unwrap();
        set_weights(&varmap);
        let mut optimizer = Sgd::new(varmap.all_vars(), params()).unwrap();
        // Rank 1 has no samples in step 1, in which rank 0's leftover counts; rank 2 ends before step 2.
        for parts in [&[(0, 0, 1), (1, 0, 1), (2, 0, 1)][..], &[(0, 1, 0), (1, 1, 1), (2, 1, 1)], &[(1, 2, 1)]] {
            let mut sum = Tensor::zeros((), DType::F64, &Device::Cpu).unwrap();
            for (rank, step, micro_batch) in parts {
                sum = (sum + loss_sum(|x| Ok(net.forward(x)?), *rank, *step, *micro_batch).unwrap()).unwrap();
            }
            let total: usize = parts.iter().map(|(rank, step, micro_batch)| counts(*rank, *step)[*micro_batch]).sum();
            Optimizer::step(&mut optimizer, &(sum / total as f64).unwrap().backward().unwrap()).unwrap();
        }
        assert_all(&results, &weights(&varmap), 1e-6, "join");
    }
}

/// The loss of a rank without samples may be a constant.
#[test]
fn a_count_of_zero_needs_no_graph() {
    let results = ranks(2, |pg| {
        let (_, ddp) = wrap(&pg, in_f64())?;
        let grads = if pg.rank() == 0 {
            backward_with(&ddp.forward(&tensor(&[5, 3], 1).to_dtype(DType::F64)?)?.sum_all()?, &[&ddp], counted(5.))?
        } else {
            backward_with(&Tensor::zeros((), DType::F64, &Device::Cpu)?, &[&ddp], counted(0.))?
        };
        let bias = ddp.named_parameters().into_iter().find(|(name, _)| name == "b.bias").unwrap().1;
        Ok(floats(grads.get(&bias).unwrap()))
    });
    assert_all(&results, &[1.; 2], 1e-6, "a constant");
}

#[test]
fn nothing_to_count_is_an_error_on_all_ranks_and_training_goes_on() {
    ranks(3, |pg| {
        let (_, ddp) = wrap(&pg, in_f64())?;
        let loss = || loss_sum(|x| ddp.forward(x), pg.rank(), 0, 1);
        {
            let _guard = ddp.no_sync();
            backward_with(&(loss()? * 0.)?, &[&ddp], counted(0.))?;
        }
        let error = backward_with(&(loss()? * 0.)?, &[&ddp], counted(0.)).unwrap_err();
        assert!(matches!(error, Error::NothingCounted { total: 0. }), "{error}");
        assert!(error.to_string().contains("skip this step"), "{error}");
        ddp.backward(&loss()?)?;
        backward_with(&loss()?, &[&ddp], counted(2.))?;
        Ok(())
    });
}

#[test]
fn a_count_that_counts_nothing_ends_the_group_with_its_reason() {
    for count in [f64::NAN, -1., f64::INFINITY] {
        ranks(2, |pg| {
            let (_, ddp) = wrap(&pg, in_f64())?;
            let loss = loss_sum(|x| ddp.forward(x), pg.rank(), 0, 1)?;
            let error = backward_with(&loss, &[&ddp], counted(if pg.rank() == 1 { count } else { 1. })).unwrap_err();
            let text = error.to_string();
            assert!(text.contains(&format!("it must be a finite number of at least 0, but is {count}")), "{text}");
            match pg.rank() {
                1 => assert!(matches!(error, Error::InvalidArgument { argument: "count", .. }), "{error}"),
                _ => assert!(matches!(error, Error::Group(Failure::PeerFailed { peer: 1, .. })), "{error:?}"),
            }
            Ok(())
        });
    }
}

#[test]
fn weighted_and_other_passes_do_not_mix() {
    // Within a step.
    ranks(2, |pg| {
        let (_, ddp) = wrap(&pg, in_f64())?;
        let loss = || loss_sum(|x| ddp.forward(x), pg.rank(), 0, 1);
        for weighted in [true, false] {
            let guard = ddp.no_sync();
            let pass = |weighted| {
                if weighted { backward_with(&loss()?, &[&ddp], counted(1.)) } else { ddp.backward(&loss()?) }
            };
            pass(weighted)?;
            drop(guard);
            assert_error(pass(!weighted), &["have accumulated under no_sync"]);
            ddp.zero_grad();
            pass(!weighted)?;
        }
        Ok(())
    });
    // Between ranks: with buckets, and where the used flags travel alone.
    for hook in [false, true] {
        ranks(2, |pg| {
            let (_, ddp) = wrap(&pg, in_f64())?;
            if hook {
                ddp.register_comm_hook(AllReduce::default())?;
            }
            let loss = loss_sum(|x| ddp.forward(x), pg.rank(), 0, 1)?;
            let result = if pg.rank() == 0 { backward_with(&loss, &[&ddp], counted(1.)) } else { ddp.backward(&loss) };
            let error = result.unwrap_err();
            assert!(matches!(error, Error::Group(_)), "{error:?}");
            Ok(())
        });
    }
}
