//! Requests to stop: all ranks learn of them with the same backward pass.
use crate::common::{counted, ranks, tensor};
use candle_core::Tensor;
use candle_ddp::checkpoint::{Checkpointer, CheckpointerOptions};
use candle_ddp::comm_hook::{AllReduce, Noop};
use candle_ddp::optim::{ParamsSgd, ZeroRedundancyOptimizer};
use candle_ddp::{
    Buckets, DdpOptions, DistributedDataParallel, JoinOptions, ProcessGroup, Result, Sharding, backward_with,
};
use candle_nn::{Linear, VarMap, linear};

type Ddp = DistributedDataParallel<Linear>;

fn ddp(pg: &ProcessGroup, reduce_dtype: Option<candle_core::DType>, sharding: Sharding) -> Result<Ddp> {
    // A bucket for each parameter.
    let options = DdpOptions {
        sharding,
        buckets: Buckets { bucket_cap_mb: 0., first_bucket_mb: 0., reduce_dtype, ..Default::default() },
        ..Default::default()
    };
    DistributedDataParallel::with_options(pg, &VarMap::new(), |vb| linear(3, 2, vb), options)
}

fn loss(ddp: &Ddp, pg: &ProcessGroup) -> Result<Tensor> {
    Ok(ddp.forward(&tensor(&[4, 3], pg.rank() as u64))?.sqr()?.sum_all()?)
}

/// Rank 2 asks after the second of four passes; the ranks know after the third.
#[track_caller]
fn assert_agreed(sharding: Sharding, prepare: impl Fn(&Ddp) -> Result<Box<dyn std::any::Any>> + Sync, weighted: bool) {
    let seen = ranks(3, |pg| {
        let ddp = ddp(&pg, None, sharding)?;
        let _kept = prepare(&ddp)?;
        let mut seen = vec![pg.stop_requested()?];
        for pass in 0..4 {
            if pass == 2 && pg.rank() == 2 {
                pg.request_stop();
            }
            // Between the passes, nothing is known.
            seen.push(pg.stop_requested()?);
            match weighted {
                true => backward_with(&loss(&ddp, &pg)?, &[&ddp], counted(4.))?,
                false => ddp.backward(&loss(&ddp, &pg)?)?,
            };
            seen.push(pg.stop_requested()?);
        }
        Ok(seen)
    });
    let expected = [false, false, false, false, false, false, true, true, true];
    assert_eq!(seen, [expected; 3]);
}

#[test]
fn a_request_travels_with_the_next_backward_pass() {
    for weighted in [false, true] {
        assert_agreed(Sharding::Off, |_| Ok(Box::new(())), weighted);
        assert_agreed(Sharding::Off, |ddp| Ok(Box::new(ddp.register_comm_hook(AllReduce::default())?)), weighted);
        let zero = |ddp: &Ddp| ZeroRedundancyOptimizer::new(ddp, ParamsSgd::default());
        assert_agreed(Sharding::Optimizer { ranks: None }, |ddp| Ok(Box::new(zero(ddp)?)), weighted);
    }
}

#[test]
fn it_travels_in_16_bits_and_with_unused_parameters_and_changes_no_gradient() {
    for dtype in [candle_core::DType::BF16, candle_core::DType::F16] {
        ranks(3, |pg| {
            let ddp = ddp(&pg, Some(dtype), Sharding::Off)?;
            let gradients = || -> Result<Vec<f32>> {
                let grads = ddp.backward(&loss(&ddp, &pg)?)?;
                Ok(ddp.parameters().iter().flat_map(|var| crate::common::floats(grads.get(var).unwrap())).collect())
            };
            let (first, before) = (gradients()?, gradients()?);
            assert_eq!(first, before);
            pg.request_stop();
            assert_eq!(gradients()?, before);
            assert!(pg.stop_requested()?);
            Ok(())
        });
    }
    ranks(2, |pg| {
        let ddp = ddp(&pg, None, Sharding::Off)?;
        ddp.backward(&loss(&ddp, &pg)?)?;
        if pg.rank() == 0 {
            pg.request_stop();
        }
        // Rank 0 does not use the bias.
        let bias = |layer: &Linear| layer.bias().unwrap().sum_all();
        let product = |layer: &Linear| tensor(&[4, 3], 1).matmul(&layer.weight().t()?)?.sum_all();
        let loss = ddp.call(|layer| if pg.rank() == 0 { product(layer) } else { product(layer)? + bias(layer)? })?;
        let grads = ddp.backward(&loss)?;
        assert!(pg.stop_requested()?);
        assert!(ddp.parameters().iter().all(|var| grads.get(var).is_some()), "the flags of parameters are as ever");
        Ok(())
    });
}

#[test]
fn passes_that_send_nothing_carry_nothing() {
    ranks(2, |pg| {
        let ddp = ddp(&pg, None, Sharding::Off)?;
        pg.request_stop();
        {
            let _guard = ddp.no_sync();
            ddp.backward(&loss(&ddp, &pg)?)?;
        }
        assert!(!pg.stop_requested()?);
        ddp.backward(&loss(&ddp, &pg)?)?;
        assert!(pg.stop_requested()?);
        Ok(())
    });
    ranks(2, |pg| {
        let ddp = ddp(&pg, None, Sharding::Off)?;
        ddp.register_comm_hook(Noop)?;
        pg.request_stop();
        ddp.backward(&loss(&ddp, &pg)?)?;
        assert!(!pg.stop_requested()?);
        assert!(pg.agree_on_stop()?);
        Ok(())
    });
}

#[test]
fn ranks_can_ask_each_other_where_no_backward_pass_comes() {
    ranks(3, |pg| {
        assert!(!pg.agree_on_stop()?);
        if pg.rank() == 1 {
            pg.request_stop();
        }
        assert!(!pg.stop_requested()?);
        assert!(pg.agree_on_stop()?);
        assert!(pg.stop_requested()? && pg.agree_on_stop()?, "it stays true");
        // Another group knows nothing of it.
        let pair = pg.new_group(&[0, 2])?;
        assert!(!pair.map_or(Ok(false), |pair| pair.agree_on_stop())?);
        Ok(())
    });
    assert!(
        ranks(1, |pg| {
            pg.request_stop();
            pg.agree_on_stop()
        })[0]
    );
}

/// A rank without inputs still has a say.
#[test]
fn ranks_in_a_join_stop_together() {
    let steps = ranks(3, |pg| {
        let ddp = ddp(&pg, None, Sharding::Off)?;
        let joined = ddp.join(JoinOptions::default(), || {
            let mut steps = 0;
            while steps < [2, 100, 100][pg.rank()] && !pg.stop_requested()? {
                ddp.backward(&loss(&ddp, &pg)?)?;
                steps += 1;
            }
            pg.request_stop();
            Ok(steps)
        })?;
        Ok(joined.value)
    });
    assert_eq!(steps, [2, 3, 3]);
}

#[test]
fn a_save_is_due_before_a_stop() {
    let folder = tempfile::tempdir().unwrap();
    ranks(2, |pg| {
        let ddp = ddp(&pg, None, Sharding::Off)?;
        let options = CheckpointerOptions { every: 1000, ..Default::default() };
        let mut checkpointer = Checkpointer::new(&pg, folder.path(), options)?;
        let mut number = 7.;
        for step in 1..=10 {
            ddp.backward(&loss(&ddp, &pg)?)?;
            assert_eq!(checkpointer.save_if_due(step, ("number", &mut number))?.is_some(), step == 4);
            if pg.stop_requested()? {
                break;
            }
            if step == 3 && pg.rank() == 1 {
                pg.request_stop();
            }
        }
        checkpointer.finish()?;
        assert_eq!(checkpointer.steps()?, [4]);
        Ok(())
    });
}
