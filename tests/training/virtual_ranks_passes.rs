//! Passes of virtual ranks that are more than one model's mean: losses that are sums with counts, losses of several models, and
//! gradients that stay on the ranks that need them.
use crate::common::virtual_ranks::{VIRTUAL, ranks};
use crate::common::{assert_close, bits, buckets, floats, of_micro_batch, values};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Module, Tensor, Var};
use candle_ddp::checkpoint::StateDict;
use candle_ddp::optim::{AdamW, Optimizer, ParamsAdamW};
use candle_ddp::{
    Backward, DdpOptions, DistributedDataParallel, Error, Precision, ProcessGroup, Result, Sharding, backward_with,
};
use candle_nn::{Linear, VarBuilder, VarMap, linear};

type Model = DistributedDataParallel<Linear>;

fn model(pg: &ProcessGroup, inputs: usize, outputs: usize) -> Result<Model> {
    let options = DdpOptions { precision: Precision::Pure(DType::F64), init_seed: Some(7), ..Default::default() };
    DistributedDataParallel::with_options(pg, &VarMap::new(), |vb| linear(inputs, outputs, vb), options)
}

/// The samples of a micro-batch: some have more than others, and one has none.
fn samples(number: usize) -> Result<Tensor> {
    let rows = [3, 1, 0, 5, 2, 2, 7, 1][number];
    let all = Tensor::from_vec(values(7 * 4, number as u64), (7, 4), &Device::Cpu)?;
    Ok(all.narrow(0, 0, rows)?.to_dtype(DType::F64)?)
}

/// A weight of each sample of a micro-batch. The order in which they are added shows in their sum's last bit.
fn weight(number: usize) -> f64 {
    0.1 + 0.3 * number as f64
}

fn loss_sum(model: &Model, number: usize) -> Result<(Tensor, f64)> {
    let x = samples(number)?;
    let count = x.dim(0)? as f64 * weight(number);
    let loss =
        if count == 0. { Tensor::zeros((), DType::F64, &Device::Cpu)? } else { model.forward(&x)?.sqr()?.sum_all()? };
    Ok(((loss * weight(number))?, count))
}

fn weighted(number: usize, count: f64) -> Backward<'static> {
    Backward { count: Some(count), ..of_micro_batch(number) }
}

#[test]
fn weighted_passes_have_the_same_bits_on_any_number_of_ranks() {
    let run = |world_size: usize| {
        let mut found = ranks(world_size, |pg| {
            let ddp = model(&pg, 4, 2)?;
            let mut results = Vec::new();
            for _ in 0..2 {
                for number in ddp.micro_batches().unwrap() {
                    let (loss, count) = loss_sum(&ddp, number)?;
                    let grads = backward_with(&loss, &[&ddp], weighted(number, count))?;
                    let vars = ddp.parameters();
                    let gradients = vars.iter().filter_map(|var| grads.get(var));
                    results.extend(gradients.map(|gradient| gradient.to_dtype(DType::F64)));
                }
            }
            let exact = results.into_iter().map(|gradient| gradient?.flatten_all()?.to_vec1::<f64>());
            Ok(exact.collect::<candle_core::Result<Vec<_>>>()?.concat())
        });
        assert!(found.iter().all(|of_rank| of_rank == &found[0]), "{world_size} ranks");
        found.remove(0)
    };
    let one = run(1);
    for world_size in 2..=VIRTUAL {
        assert!(run(world_size) == one, "{world_size} ranks: {:?}, 1 rank: {one:?}", run(world_size));
    }
    // One process over everything.
    let mut whole = ranks(1, |pg| {
        let ddp = model(&pg, 4, 2)?;
        let vars: Vec<Var> = ddp.parameters().to_vec();
        let plain = Linear::new(vars[0].as_tensor().clone(), Some(vars[1].as_tensor().clone()));
        let (mut sum, mut total) = (Tensor::zeros((), DType::F64, &Device::Cpu)?, 0.);
        for number in (0..VIRTUAL).filter(|number| *number != 2) {
            let x = samples(number)?;
            sum = (sum + (plain.forward(&x)?.sqr()?.sum_all()? * weight(number))?)?;
            total += x.dim(0)? as f64 * weight(number);
        }
        let grads = (sum / total)?.backward()?;
        Ok(vars.iter().map(|var| floats(grads.get(var).unwrap())).collect::<Vec<_>>().concat())
    });
    let whole = whole.remove(0);
    let one: Vec<f32> = one.into_iter().map(|value| value as f32).collect();
    assert_close(&one, &[&whole[..], &whole].concat(), 1e-6, "the mean over all samples");
}

#[test]
fn weighted_passes_count_something_and_do_not_mix() {
    ranks(3, |pg| {
        let ddp = model(&pg, 4, 2)?;
        let own = ddp.micro_batches().unwrap();
        for number in own.clone() {
            let (loss, _) = loss_sum(&ddp, number)?;
            match backward_with(&(loss * 0.)?, &[&ddp], weighted(number, 0.)) {
                Err(error) => {
                    assert!(number + 1 == own.end && matches!(error, Error::NothingCounted { total: 0. }), "{error}");
                }
                Ok(grads) => assert!(grads.get(&ddp.parameters()[0]).is_none() && number + 1 < own.end),
            }
        }
        // Nothing is left of that step.
        for number in own {
            let (loss, count) = loss_sum(&ddp, number)?;
            backward_with(&loss, &[&ddp], weighted(number, count))?;
        }
        Ok(())
    });
    let mut mixed = ranks(1, |pg| {
        let ddp = model(&pg, 4, 2)?;
        let (loss, count) = loss_sum(&ddp, 0)?;
        backward_with(&loss, &[&ddp], weighted(0, count))?;
        Ok(backward_with(&loss_sum(&ddp, 1)?.0, &[&ddp], of_micro_batch(1)).unwrap_err().to_string())
    });
    let mixed = mixed.remove(0);
    assert!(mixed.contains("cannot add to gradients"), "{mixed}");
}

#[test]
fn several_models_have_the_same_bits_on_any_number_of_ranks() {
    let run = |world_size: usize, is_weighted: bool| {
        let mut found = ranks(world_size, |pg| {
            let (first, second) = (model(&pg, 4, 3)?, model(&pg, 3, 2)?);
            let mut results = Vec::new();
            for _ in 0..2 {
                for number in first.micro_batches().unwrap() {
                    let x = Tensor::from_vec(values(12, number as u64), (3, 4), &Device::Cpu)?.to_dtype(DType::F64)?;
                    let loss = second.forward(&first.forward(&x)?.tanh()?)?.sqr()?.sum_all()?;
                    let models = [&*first, &*second];
                    let count = is_weighted.then(|| weight(number));
                    let grads = backward_with(&loss, &models, Backward { count, ..of_micro_batch(number) })?;
                    let vars = [first.parameters(), second.parameters()].concat();
                    results.extend(vars.iter().filter_map(|var| grads.get(var)).flat_map(bits));
                }
            }
            Ok(results)
        });
        assert!(found.iter().all(|of_rank| of_rank == &found[0]), "{world_size} ranks");
        found.remove(0)
    };
    let mut all = Vec::new();
    for weighted in [false, true] {
        let one = run(1, weighted);
        for world_size in [2, 5] {
            assert!(run(world_size, weighted) == one, "{world_size} ranks, weighted: {weighted}");
        }
        all.push(one);
    }
    assert_ne!(all[0], all[1]);
}

#[test]
fn models_of_one_pass_have_the_same_micro_batches() {
    let check = |result: Result<GradStore>| match result {
        Err(Error::InvalidArgument { argument: "models", reason }) => {
            assert!(reason.contains("the same process group, and no share_by_speed"), "{reason}");
        }
        other => panic!("{other:?}"),
    };
    ranks(1, |pg| {
        let first = model(&pg, 4, 3)?;
        let another = pg.new_group(&[0])?.unwrap();
        let second = model(&another, 3, 2)?;
        let x = Tensor::zeros((1, 4), DType::F64, &Device::Cpu)?;
        let loss = second.forward(&first.forward(&x)?)?.sum_all()?;
        check(backward_with(&loss, &[&first, &second], of_micro_batch(0)));
        Ok(())
    });
    // In one group, the second model has other shares.
    ranks(2, |pg| {
        let first = model(&pg, 4, 3)?;
        pg.share_by_speed(1. + pg.rank() as f64)?;
        let second = model(&pg, 3, 2)?;
        let x = Tensor::zeros((1, 4), DType::F64, &Device::Cpu)?;
        let loss = second.forward(&first.forward(&x)?)?.sum_all()?;
        let number = first.micro_batches().unwrap().start;
        check(backward_with(&loss, &[&first, &second], of_micro_batch(number)));
        Ok(())
    });
}

/// Three steps of an optimizer that is sharded, or whole on each rank: the bits of parameters and of the optimizer's state.
fn sharded(pg: &ProcessGroup, sharding: Sharding, is_weighted: bool) -> Result<Vec<u32>> {
    // Buckets of some parameters, none of which the ranks divide evenly.
    let buckets = buckets(0.0002, 0.0001);
    let options = DdpOptions { init_seed: Some(7), sharding, buckets, ..Default::default() };
    let build = |vb: VarBuilder| -> candle_core::Result<_> {
        Ok((linear(4, 13, vb.pp("a"))?, linear(13, 7, vb.pp("b"))?, linear(7, 1, vb.pp("c"))?))
    };
    let ddp = DistributedDataParallel::with_options(pg, &VarMap::new(), build, options)?;
    let step = |optimizer: &mut AdamW| -> Result<()> {
        let mut last = GradStore::default();
        for number in ddp.micro_batches().unwrap() {
            let x = Tensor::from_vec(values(12, number as u64), (3, 4), &Device::Cpu)?;
            let loss = ddp.call(|(a, b, c)| x.apply(a)?.tanh()?.apply(b)?.tanh()?.apply(c)?.sqr()?.sum_all())?;
            let count = is_weighted.then(|| weight(number));
            last = backward_with(&loss, &[&ddp], Backward { count, ..of_micro_batch(number) })?;
        }
        optimizer.step(&last)
    };
    let params = ParamsAdamW { lr: 0.01, ..Default::default() };
    let mut optimizer = AdamW::new(&ddp, params)?;
    (0..3).try_for_each(|_| step(&mut optimizer))?;
    let mut state: Vec<_> = optimizer.state_dict()?.into_iter().collect();
    state.sort_by(|(name, _), (other, _)| name.cmp(other));
    let mut all: Vec<u32> = state.iter().flat_map(|(_, tensor)| bits(tensor)).collect();
    all.extend(ddp.parameters().iter().flat_map(|var| bits(var)));
    Ok(all)
}

#[test]
fn a_sharded_optimizer_has_the_same_bits_on_any_number_of_ranks() {
    for weighted in [false, true] {
        let one = ranks(1, |pg| sharded(&pg, Sharding::Off, weighted)).remove(0);
        assert!(one.len() >= 3 * 150);
        let hybrid = [(2, Some(1)), (4, Some(2)), (6, Some(3))];
        for (world_size, with_state) in [1, 3, 8].map(|all| (all, None)).into_iter().chain(hybrid) {
            let sharding = Sharding::Optimizer { ranks: with_state };
            let found = ranks(world_size, |pg| sharded(&pg, sharding, weighted));
            assert!(found.iter().all(|other| *other == one), "{world_size} ranks, {sharding:?}, weighted: {weighted}");
        }
    }
}
