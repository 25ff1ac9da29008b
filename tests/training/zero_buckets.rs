//! Under ZeRO, buckets have memory only while they are in use.
use crate::common::{assert_close, assert_error, filled, floats, ranks, sharding, tensor, tiny};
use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use candle_ddp::comm_hook::AllReduce;
use candle_ddp::optim::{Optimizer, ParamsAdamW, ParamsSgd, Sgd, ZeroRedundancyOptimizer};
use candle_ddp::{DdpOptions, DistributedDataParallel, ProcessGroup, ReduceOp, Result, Unused};
use candle_nn::{Init, VarBuilder};

const FACTORS: usize = 6;

/// A vector, and factors that are used one after the other.
struct Net {
    first: Tensor,
    factors: Vec<Tensor>,
}

type Ddp = DistributedDataParallel<Net>;

fn build(vb: VarBuilder) -> candle_core::Result<Net> {
    let get = |name: String| vb.get_with_hints(5, &name, Init::Const(1.));
    let factors = (0..FACTORS).map(|index| get(format!("factor{index}")));
    Ok(Net { first: get("a".to_string())?, factors: factors.collect::<candle_core::Result<_>>()? })
}

/// Each parameter in its own bucket.
fn wrap(pg: &ProcessGroup, zero: bool) -> Result<Ddp> {
    let options = DdpOptions { sharding: sharding(zero), unused: Unused::Allow, ..tiny() };
    Ok(filled(pg, build, options, 5)?.0)
}

/// A loss that depends on the first `used` factors, through a sum over the ranks if `sums`.
fn loss(ddp: &Ddp, pass: u64, used: usize, sums: bool) -> Result<Tensor> {
    let pg = ddp.process_group();
    let x = tensor(&[5], 10 * pass + pg.rank() as u64);
    ddp.call(|net| -> Result<Tensor> {
        let first = (&net.first * &x)?;
        let first = if sums { pg.with_grad()?.all_reduce(&first, ReduceOp::Sum)? } else { first };
        let y = net.factors[..used].iter().try_fold(first, |y, factor| (y + 2.)?.mul(factor))?;
        Ok(y.sqr()?.mean_all()?)
    })
}

fn backward(ddp: &Ddp, pass: u64, used: usize) -> Result<GradStore> {
    ddp.backward(&loss(ddp, pass, used, false)?)
}

fn gradients(ddp: &Ddp, grads: &GradStore) -> Vec<Option<Vec<f32>>> {
    ddp.parameters().iter().map(|var: &Var| grads.get(var).map(floats)).collect()
}

fn values(ddp: &Ddp) -> Vec<Vec<f32>> {
    ddp.parameters().iter().map(|var| floats(var)).collect()
}

#[test]
fn a_rank_that_lacks_gradients_does_not_stop_another_before_a_collective_of_the_graph() {
    // Rank 1 sends the bucket of the last factor after its backward pass, in which it waits for rank 0's sum.
    let found = ranks(2, |pg| {
        let ddp = wrap(&pg, true)?;
        let mut optimizer = ZeroRedundancyOptimizer::new(&ddp, ParamsAdamW::default())?;
        for pass in 0..3 {
            let loss = loss(&ddp, pass, FACTORS - pg.rank(), true)?;
            optimizer.step(&ddp.backward(&loss)?)?;
        }
        Ok(values(&ddp))
    });
    assert_eq!(found[0], found[1]);
}

#[test]
fn steps_have_the_bits_of_plain_steps_and_with_accumulation_their_values() {
    let train = |world_size, zero: bool, accumulates: bool| {
        ranks(world_size, |pg| {
            let ddp = wrap(&pg, zero)?;
            let sgd = ParamsSgd { lr: 0.1, momentum: 0.9, ..Default::default() };
            let mut optimizer = Sgd::new(&ddp, sgd)?;
            for pass in 0..9 {
                let is_last = !accumulates || pass % 3 != 1;
                let _guard = ddp.sync_if(is_last);
                // The last rank uses fewer factors in some passes.
                let missing = usize::from(pass % 2 == 0 && pg.rank() + 1 == pg.world_size());
                let grads = backward(&ddp, pass, FACTORS - missing)?;
                if is_last {
                    optimizer.step(&grads)?;
                }
            }
            Ok(values(&ddp).concat())
        })
    };
    for world_size in 1..=4 {
        assert_eq!(train(world_size, true, false), train(world_size, false, false), "{world_size} ranks");
        // The sums over passes and ranks have another order.
        let expected = train(world_size, false, true);
        for found in train(world_size, true, true) {
            assert_close(&found, &expected[0], 1e-5, &format!("{world_size} ranks"));
        }
    }
}

#[test]
fn what_backward_returns_does_not_depend_on_optimizers() {
    let refused = |result: Result<()>, part: &str| assert_error(result, &["sharding: ", part]);
    ranks(2, |pg| {
        // Nobody would use the gradients.
        refused(backward(&wrap(&pg, true)?, 0, FACTORS).map(drop), "make its optimizer");
        Ok(())
    });
    ranks(3, |pg| {
        let ddp = wrap(&pg, true)?;
        let params = ParamsSgd { lr: 0.1, ..Default::default() };
        for pass in 0..3 {
            let mut optimizer = ZeroRedundancyOptimizer::new(&ddp, params.clone())?;
            let before = values(&ddp);
            let grads = backward(&ddp, pass, FACTORS)?;
            assert!(gradients(&ddp, &grads).iter().all(Option::is_none));
            optimizer.step(&grads)?;
            assert_ne!(values(&ddp), before);
        }
        let plain = wrap(&pg, false)?;
        let _optimizer = ZeroRedundancyOptimizer::new(&plain, params.clone())?;
        assert!(gradients(&plain, &backward(&plain, 0, FACTORS)?).iter().all(Option::is_some));
        assert_error(ddp.register_comm_hook(AllReduce::default()), &["the model is sharded"]);
        Ok(())
    });
}

#[test]
fn what_has_accumulated_can_be_dropped() {
    ranks(2, |pg| {
        let (ddp, other) = (wrap(&pg, true)?, wrap(&pg, false)?);
        let sgd = ParamsSgd { lr: 0.1, ..Default::default() };
        let mut optimizer = ZeroRedundancyOptimizer::new(&ddp, sgd.clone())?;
        let expected = gradients(&other, &backward(&other, 1, FACTORS)?);
        for model in [&ddp, &other] {
            let _guard = model.no_sync();
            backward(model, 0, FACTORS)?;
            model.zero_grad();
        }
        optimizer.step(&backward(&ddp, 1, FACTORS)?)?;
        let grads = backward(&other, 1, FACTORS)?;
        assert_eq!(gradients(&other, &grads), expected);
        Sgd::new(&other, sgd)?.step(&grads)?;
        assert_eq!(values(&ddp), values(&other));
        Ok(())
    });
}
