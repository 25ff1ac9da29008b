//! New running statistics for averaged weights: those of one process that has all batches.
use crate::common::{assert_error, pure, ranks, waves};
use candle_core::{DType, ModuleT, Result, Tensor};
use candle_ddp::nn::{BatchNorm, Linear, batch_norm, linear, sync_batch_norm};
use candle_ddp::optim::{Ema, Optimizer, ParamsSgd, ZeroRedundancyOptimizer, update_bn};
use candle_ddp::{Block, DdpOptions, DistributedDataParallel, Error, Precision, ProcessGroup, Sharding, block};
use candle_nn::{VarBuilder, VarMap};

const WIDTH: usize = 3;

/// The first normalisation is used twice.
struct Net {
    norm: BatchNorm,
    middle: Block<Linear>,
    last: BatchNorm,
}

impl ModuleT for Net {
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        let x = self.norm.forward_t(&self.norm.forward_t(x, train)?.sin()?, train)?;
        self.last.forward_t(&self.middle.forward(&x)?, train)
    }
}

type Ddp = DistributedDataParallel<Net>;

fn wrap(pg: &ProcessGroup, sharding: Sharding, synchronised: bool) -> candle_ddp::Result<Ddp> {
    let build = |vb: VarBuilder<'static>| -> Result<Net> {
        let last = vb.pp("last");
        Ok(Net {
            norm: batch_norm(WIDTH, 1e-5, vb.pp("norm"))?,
            middle: block(vb.pp("middle"), |vb| linear(WIDTH, 2, vb))?,
            last: if synchronised { sync_batch_norm(pg, 2, 1e-5, last)? } else { batch_norm(2, 1e-5, last)? },
        })
    };
    let precision = Precision::Pure(DType::F64);
    let options = DdpOptions { init_seed: Some(3), precision, sharding, ..Default::default() };
    DistributedDataParallel::with_options(pg, &VarMap::new(), build, options)
}

fn batch(number: usize) -> Tensor {
    (waves(&[5, WIDTH], number * 11) * (1 + number % 4) as f64).unwrap()
}

/// The batches of a rank: every so many.
fn batches(pg: &ProcessGroup, all: usize) -> Vec<usize> {
    (pg.rank()..all).step_by(pg.world_size()).collect()
}

fn forward(net: &Net, number: usize) -> Result<Tensor> {
    net.forward_t(&batch(number), true)
}

fn statistics(ddp: &Ddp) -> Vec<f64> {
    ddp.named_buffers().iter().flat_map(|(_, var)| var.to_vec1::<f64>().unwrap()).collect()
}

/// Trains a little, so that there is something to forget, and averages.
fn averaged(pg: &ProcessGroup, sharding: Sharding, synchronised: bool) -> candle_ddp::Result<Ddp> {
    let ddp = wrap(pg, sharding, synchronised)?;
    let mut optimizer = ZeroRedundancyOptimizer::new(&ddp, ParamsSgd { lr: 0.1, ..Default::default() })?;
    let mut ema = Ema::new(&ddp, None)?;
    for step in 0..3 {
        // The same on all ranks, and so on any number of them.
        optimizer.step(&ddp.backward(&ddp.forward_t(&batch(90 + step), true)?.powf(3.)?.mean_all()?)?)?;
        ema.update()?;
    }
    ema.copy_to_parameters()?;
    Ok(ddp)
}

/// The means and unbiased variances of all batches, each layer's input at a time.
fn expected(all: usize) -> Vec<f64> {
    let mut found = ranks(1, |pg| {
        let ddp = averaged(&pg, Sharding::Optimizer { ranks: None }, false)?;
        let of = |x: &Tensor| -> Result<[Vec<f64>; 2]> { Ok([x.mean(0)?.to_vec1()?, x.var(0)?.to_vec1()?]) };
        let normal = |norm: &BatchNorm, x: &Tensor| -> Result<Tensor> {
            let centred = x.broadcast_sub(&x.mean_keepdim(0)?)?;
            let variance = centred.sqr()?.mean_keepdim(0)?;
            let (weight, bias) = norm.weight_and_bias().unwrap();
            centred.broadcast_div(&(variance + 1e-5)?.sqrt()?)?.broadcast_mul(weight)?.broadcast_add(bias)
        };
        let (mut first, mut last) = (Vec::new(), Vec::new());
        for number in 0..all {
            ddp.call(|net| {
                let x = batch(number);
                first.push(of(&x)?);
                let x = normal(&net.norm, &x)?.sin()?;
                first.push(of(&x)?);
                let x = net.middle.forward(&normal(&net.norm, &x)?)?;
                last.push(of(&x)?);
                Result::Ok(())
            })?;
        }
        let mean = |of: &[[Vec<f64>; 2]]| -> Vec<f64> {
            let values = |kind: usize| {
                (0..of[0][kind].len())
                    .map(move |channel| of.iter().map(|values| values[kind][channel]).sum::<f64>() / of.len() as f64)
            };
            values(0).chain(values(1)).collect()
        };
        Ok([mean(&first), mean(&last)].concat())
    });
    found.remove(0)
}

#[track_caller]
fn assert_same(found: &[f64], expected: &[f64], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let difference = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0., f64::max);
    assert!(difference < 1e-12, "{what}: they differ by {difference}: {found:?}, {expected:?}");
}

#[test]
fn statistics_are_those_of_all_batches_on_any_number_of_ranks() {
    let expected = expected(7);
    for world_size in 1..=3 {
        let found = ranks(world_size, |pg| {
            let ddp = averaged(&pg, Sharding::Optimizer { ranks: None }, false)?;
            update_bn(&ddp, batches(&pg, 7).into_iter().map(Ok), forward)?;
            let of_seven = statistics(&ddp);
            // Again, with fewer: some ranks have none.
            update_bn(&ddp, batches(&pg, 1).into_iter().map(Ok), forward)?;
            Ok((of_seven, statistics(&ddp)))
        });
        assert!(found.windows(2).all(|pair| pair[0] == pair[1]), "the ranks differ");
        assert_same(&found[0].0, &expected, &format!("{world_size} ranks"));
        assert_same(&found[0].1, &self::expected(1), &format!("one batch, {world_size} ranks"));
    }
}

#[test]
fn statistics_of_a_sharded_model_and_of_synchronised_batches() {
    let expected = expected(6);
    for sharding in [true, false].map(|reshard_after_forward| Sharding::Blocks { reshard_after_forward, ranks: None }) {
        let found = ranks(2, |pg| {
            let ddp = averaged(&pg, sharding, false)?;
            update_bn(&ddp, batches(&pg, 6).into_iter().map(Ok), forward)?;
            Ok(statistics(&ddp))
        });
        found.iter().for_each(|found| assert_same(found, &expected, &format!("{sharding:?}")));
    }
    let found = ranks(2, |pg| {
        let ddp = averaged(&pg, Sharding::Optimizer { ranks: None }, true)?;
        update_bn(&ddp, batches(&pg, 6).into_iter().map(Ok), forward)?;
        let synchronised = statistics(&ddp);
        // The layer alone, with the batches of both ranks side by side.
        let alone = |number: usize| -> Result<[Tensor; 2]> {
            let inputs = [2 * number, 2 * number + 1].map(|number| {
                ddp.call(|net| {
                    let x = net.norm.forward_t(&net.norm.forward_t(&batch(number), true)?.sin()?, true)?;
                    net.middle.forward(&x)
                })
            });
            let [a, b] = inputs.map(candle_ddp::Result::unwrap);
            let both = Tensor::cat(&[a, b], 0)?;
            Ok([both.mean(0)?, both.var(0)?])
        };
        let all = (0..3).map(alone).collect::<Result<Vec<_>>>()?;
        let mean = |kind: usize| Tensor::stack(&all.iter().map(|of| &of[kind]).collect::<Vec<_>>(), 0)?.mean(0);
        Ok((synchronised, Tensor::cat(&[mean(0)?, mean(1)?], 0)?.to_vec1::<f64>()?))
    });
    assert_eq!(found[0].0, found[1].0);
    assert_same(&found[0].0[2 * WIDTH..], &found[0].1, "synchronised");
}

#[test]
fn failures_are_errors_on_all_ranks_and_leave_the_statistics() {
    ranks(2, |pg| {
        let ddp = averaged(&pg, Sharding::Optimizer { ranks: None }, false)?;
        let before = statistics(&ddp);
        let evaluating = |net: &Net, number: usize| net.forward_t(&batch(number), false);
        let error = update_bn(&ddp, batches(&pg, 4).into_iter().map(Ok), evaluating).unwrap_err();
        assert!(matches!(&error, Error::InvalidArgument { argument: "forward", .. }), "{error}");
        assert!(error.to_string().contains("forward_t with true"), "{error}");
        assert_eq!(statistics(&ddp), before);
        let torn = batches(&pg, 4).into_iter().map(|number| match number {
            3 => Err(Error::Candle(candle_core::Error::msg("a torn file"))),
            number => Ok(number),
        });
        let error = update_bn(&ddp, torn, forward).unwrap_err();
        assert!(error.to_string().contains("a torn file"), "{error}");
        assert!(pg.rank() == 1 || matches!(error, Error::RankFailed { rank: 1, .. }), "{error}");
        assert_eq!(statistics(&ddp), before);
        // Layers of candle_nn, and none at all.
        let build = |vb: VarBuilder<'static>| candle_nn::batch_norm(WIDTH, 1e-5, vb);
        let options = pure(DType::F64);
        let candles = DistributedDataParallel::with_options(&pg, &VarMap::new(), build, options.clone())?;
        let run = |norm: &candle_nn::BatchNorm, number: usize| norm.forward_t(&batch(number), true);
        let refused = update_bn(&candles, batches(&pg, 1).into_iter().map(Ok), run);
        assert_error(refused, &["must be a BatchNorm of candle_ddp::nn"]);
        let build = |vb: VarBuilder<'static>| linear(WIDTH, 2, vb);
        let none = DistributedDataParallel::with_options(&pg, &VarMap::new(), build, options)?;
        let run = |linear: &Linear, number: usize| linear.forward_t(&batch(number), true);
        let error = update_bn(&none, batches(&pg, 4).into_iter().map(Ok), run).unwrap_err();
        assert!(matches!(&error, Error::InvalidArgument { argument: "forward", .. }), "{error}");
        // Training continues with the layer's own momentum.
        let alone = ddp.call(|net| {
            net.norm.forward_t(&batch(1), true)?;
            net.norm.running_mean().to_vec1::<f64>()
        })?;
        let mean = batch(1).mean(0)?.to_vec1::<f64>()?;
        let expected: Vec<f64> = before.iter().zip(mean).map(|(old, mean)| old * 0.9 + mean * 0.1).collect();
        assert_same(&alone, &expected, "momentum");
        Ok(())
    });
}
