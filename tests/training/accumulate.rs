//! Gradients of several losses, accumulated before one step.
use crate::common::programs::{Ddp, wrap};
use crate::common::{
    added_to, assert_close, assert_error, floats, gradients, ranks, reduced_in, sharding, tensor, tiny,
};
use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor};
use candle_ddp::comm_hook::AllReduce;
use candle_ddp::optim::{ParamsSgd, ZeroRedundancyOptimizer};
use candle_ddp::{Backward, DdpOptions, DistributedDataParallel, Error, ProcessGroup, Result, Unused, backward_with};
use candle_nn::{VarBuilder, VarMap};

fn ddp(pg: &ProcessGroup) -> Result<Ddp> {
    ddp_with(pg, false)
}

fn ddp_with(pg: &ProcessGroup, zero: bool) -> Result<Ddp> {
    wrap(pg, [4, 5, 2], 3, &DdpOptions { sharding: sharding(zero), ..tiny() })
}

/// The loss of one of a rank's batches.
fn loss(ddp: &Ddp, pg: &ProcessGroup, batch: usize) -> Result<Tensor> {
    Ok(ddp.forward(&tensor(&[3, 4], (10 * batch + pg.rank()) as u64))?.sqr()?.mean_all()?)
}

/// Adds the gradients of `loss` to `grads`.
fn add(loss: &Tensor, ddp: &Ddp, grads: &mut GradStore) -> Result<GradStore> {
    backward_with(loss, &[ddp], added_to(grads))
}

/// The averaged gradients of the sum of the losses of `batches`.
fn of_the_sum(ddp: &Ddp, pg: &ProcessGroup, batches: &[usize]) -> Result<Vec<f32>> {
    let losses = batches.iter().map(|batch| loss(ddp, pg, *batch)).collect::<Result<Vec<_>>>()?;
    let sum = losses.into_iter().try_fold(Tensor::zeros((), DType::F32, pg.device())?, |sum, loss| sum + loss)?;
    Ok(gradients(&ddp.backward(&sum)?, &ddp.parameters()))
}

#[test]
fn gradients_of_several_losses_add_up() {
    for hook in [false, true] {
        let found = ranks(2, |pg| {
            let ddp = ddp(&pg)?;
            if hook {
                ddp.register_comm_hook(AllReduce::default())?;
            }
            let expected = [of_the_sum(&ddp, &pg, &[0, 1])?, of_the_sum(&ddp, &pg, &[0, 1, 2, 3])?];
            let mut grads = ddp.backward(&loss(&ddp, &pg, 0)?)?;
            add(&loss(&ddp, &pg, 1)?, &ddp, &mut grads)?;
            let two = gradients(&grads, &ddp.parameters());
            add(&loss(&ddp, &pg, 2)?, &ddp, &mut grads)?;
            add(&loss(&ddp, &pg, 3)?, &ddp, &mut grads)?;
            let four = gradients(&grads, &ddp.parameters());
            // Accumulates into an empty store while another store is alive.
            let mut others = GradStore::default();
            for batch in 0..2 {
                add(&loss(&ddp, &pg, batch)?, &ddp, &mut others)?;
            }
            assert_eq!(gradients(&others, &ddp.parameters()), two);
            assert_eq!(gradients(&grads, &ddp.parameters()), four);
            Ok((expected, [two, four]))
        });
        assert_eq!(found[0].1, found[1].1, "ranks must agree bit for bit");
        for (expected, found) in found[0].0.iter().zip(&found[0].1) {
            assert_close(found, expected, 1e-5, "sum");
        }
    }
}

/// Micro-batches as PyTorch users write them: all but the last without synchronisation.
#[test]
fn sums_of_no_sync_are_added_once() {
    let found = ranks(2, |pg| {
        let ddp = ddp(&pg)?;
        let expected = of_the_sum(&ddp, &pg, &[0, 1, 2, 3])?;
        let mut grads = ddp.backward(&loss(&ddp, &pg, 0)?)?;
        let first = gradients(&grads, &ddp.parameters());
        for batch in 1..4 {
            let _guard = (batch < 3).then(|| ddp.no_sync());
            add(&loss(&ddp, &pg, batch)?, &ddp, &mut grads)?;
            assert!(
                batch == 3 || gradients(&grads, &ddp.parameters()) == first,
                "unsynchronised gradients must stay in the buckets"
            );
        }
        Ok((expected, gradients(&grads, &ddp.parameters())))
    });
    assert_eq!(found[0].1, found[1].1);
    assert_close(&found[0].1, &found[0].0, 1e-5, "sum");
}

#[test]
fn sums_of_no_sync_cannot_be_handed_on() {
    ranks(1, |pg| {
        let ddp = ddp(&pg)?;
        let mut local = {
            let _guard = ddp.no_sync();
            ddp.backward(&loss(&ddp, &pg, 0)?)?
        };
        let options = added_to(&mut local);
        let error = backward_with(&loss(&ddp, &pg, 1)?, &[&ddp], options).unwrap_err();
        assert!(matches!(&error, Error::InvalidArgument { argument: "into", .. }), "{error}");
        let sum = gradients(&ddp.backward(&loss(&ddp, &pg, 1)?)?, &ddp.parameters());
        assert_close(&sum, &of_the_sum(&ddp, &pg, &[0, 1])?, 1e-5, "sum");
        Ok(())
    });
}

/// The call returns a store of the same tensors, so it does not matter which of both the program uses.
#[test]
fn the_sums_are_in_both_stores() {
    ranks(2, |pg| {
        let ddp = ddp(&pg)?;
        let mut grads = GradStore::default();
        for batch in 0..3 {
            let same = add(&loss(&ddp, &pg, batch)?, &ddp, &mut grads)?;
            let sum = of_the_sum(&ddp, &pg, &[0, 1, 2][..=batch])?;
            assert_close(&gradients(&grads, &ddp.parameters()), &sum, 1e-5, "sum");
            assert_eq!(gradients(&same, &ddp.parameters()), gradients(&grads, &ddp.parameters()));
        }
        // The store keeps no gradients of inputs, which candle computes too, but the mark by which optimizers know the model.
        assert_eq!(grads.get_ids().count(), ddp.parameters().len() + 1);
        Ok(())
    });
}

#[test]
fn after_an_error_the_earlier_gradients_are_as_before() {
    // On all ranks, before and after the collectives.
    ranks(2, |pg| {
        let ddp = ddp(&pg)?;
        let expected = of_the_sum(&ddp, &pg, &[0, 1])?;
        let mut grads = ddp.backward(&loss(&ddp, &pg, 0)?)?;
        let first = gradients(&grads, &ddp.parameters());
        let nothing = (loss(&ddp, &pg, 7)? * 0.)?;
        let options = Backward { count: Some(0.), into: Some(&mut grads), ..Default::default() };
        let error = backward_with(&nothing, &[&ddp], options).unwrap_err();
        assert!(matches!(error, Error::NothingCounted { .. }), "{error}");
        assert_eq!(gradients(&grads, &ddp.parameters()), first);
        add(&loss(&ddp, &pg, 1)?, &ddp, &mut grads)?;
        assert_close(&gradients(&grads, &ddp.parameters()), &expected, 1e-5, "sum");
        Ok(())
    });
    // A single rank may try again.
    ranks(1, |pg| {
        let ddp = ddp(&pg)?;
        let (_, penalty) = &ddp.named_parameters()[0];
        let expected = of_the_sum(&ddp, &pg, &[0, 1])?;
        let mut grads = ddp.backward(&loss(&ddp, &pg, 0)?)?;
        let first = gradients(&grads, &ddp.parameters());
        for wrong in [(loss(&ddp, &pg, 1)? + penalty.sum_all()?)?, tensor(&[2], 1)] {
            add(&wrong, &ddp, &mut grads).unwrap_err();
            assert_eq!(gradients(&grads, &ddp.parameters()), first);
        }
        add(&loss(&ddp, &pg, 1)?, &ddp, &mut grads)?;
        assert_close(&gradients(&grads, &ddp.parameters()), &expected, 1e-5, "sum");
        // Another store after a failed pass.
        add(&(loss(&ddp, &pg, 1)? + penalty.sum_all()?)?, &ddp, &mut grads).unwrap_err();
        let mut grads = ddp.backward(&loss(&ddp, &pg, 0)?)?;
        add(&loss(&ddp, &pg, 1)?, &ddp, &mut grads)?;
        assert_close(&gradients(&grads, &ddp.parameters()), &expected, 1e-5, "sum");
        // Their shapes do not fit, which shows once the pass has ended.
        let mut other = GradStore::default();
        let last = ddp.parameters().pop().unwrap();
        other.insert(&last, tensor(&[7], 1));
        add(&loss(&ddp, &pg, 1)?, &ddp, &mut other).unwrap_err();
        assert_eq!(other.get_ids().count(), 1);
        Ok(())
    });
}

/// The same where an optimizer keeps the gradients in shards, and not the store.
#[test]
fn after_an_error_the_earlier_gradients_are_in_their_shards() {
    let weights = |fails: bool, under_no_sync: bool, retries: bool| {
        let mut found = ranks(1, |pg| {
            let ddp = ddp_with(&pg, true)?;
            let (_, penalty) = &ddp.named_parameters()[0];
            let mut optimizer = ZeroRedundancyOptimizer::new(&ddp, ParamsSgd { lr: 0.1, ..Default::default() })?;
            let mut grads = ddp.backward(&loss(&ddp, &pg, 0)?)?;
            if fails {
                let _guard = under_no_sync.then(|| ddp.no_sync());
                let wrong = (loss(&ddp, &pg, 1)? + penalty.sum_all()?)?;
                add(&wrong, &ddp, &mut grads).unwrap_err();
            }
            if retries {
                add(&loss(&ddp, &pg, 1)?, &ddp, &mut grads)?;
            }
            candle_ddp::optim::Optimizer::step(&mut optimizer, &grads)?;
            // A step has used them.
            let error = add(&loss(&ddp, &pg, 2)?, &ddp, &mut grads).unwrap_err().to_string();
            assert!(error.starts_with("into: ") && error.contains("already used or dropped"), "{error}");
            Ok(ddp.parameters().iter().flat_map(|var| floats(var)).collect::<Vec<_>>())
        });
        found.remove(0)
    };
    for retries in [false, true] {
        let expected = weights(false, false, retries);
        for under_no_sync in [false, true] {
            assert_eq!(weights(true, under_no_sync, retries), expected, "no_sync: {under_no_sync}, retries: {retries}");
        }
    }
    assert_ne!(weights(false, false, false), weights(false, false, true));
    // Dropped gradients stay dropped.
    ranks(1, |pg| {
        let ddp = ddp_with(&pg, true)?;
        let mut optimizer = ZeroRedundancyOptimizer::new(&ddp, ParamsSgd::default())?;
        let mut grads = ddp.backward(&loss(&ddp, &pg, 0)?)?;
        let guard = ddp.no_sync();
        add(&loss(&ddp, &pg, 1)?, &ddp, &mut grads)?;
        drop(guard);
        ddp.zero_grad();
        assert_error(candle_ddp::optim::Optimizer::step(&mut optimizer, &grads), &["there are no new gradients"]);
        assert_error(add(&loss(&ddp, &pg, 2)?, &ddp, &mut grads), &["already used or dropped"]);
        Ok(())
    });
}

#[test]
fn gradients_stay_as_they_are_while_their_store_lives() {
    ranks(2, |pg| {
        for reduce_dtype in [None, Some(DType::F64)] {
            let ddp = wrap(&pg, [4, 5, 2], 3, &reduced_in(reduce_dtype))?;
            let first = ddp.backward(&loss(&ddp, &pg, 0)?)?;
            let before = gradients(&first, &ddp.parameters());
            let second = ddp.backward(&loss(&ddp, &pg, 1)?)?;
            let third = ddp.backward(&loss(&ddp, &pg, 2)?)?;
            assert_eq!(gradients(&first, &ddp.parameters()), before);
            assert_ne!(gradients(&second, &ddp.parameters()), gradients(&third, &ddp.parameters()));
        }
        Ok(())
    });
}

#[test]
fn the_gradient_of_a_shared_variable_stays_whichever_model_it_came_from() {
    ranks(2, |pg| {
        let varmap = VarMap::new();
        let options = || DdpOptions { unused: Unused::Allow, ..Default::default() };
        let build = |vb: VarBuilder| Ok::<_, candle_core::Error>((vb.get(3, "shared")?, vb.get(3, "own")?));
        let a = DistributedDataParallel::with_options(&pg, &varmap, build, options())?;
        let b = DistributedDataParallel::with_options(&pg, &varmap, |vb: VarBuilder| vb.get(3, "shared"), options())?;
        let of_b = |factor: f64| b.call(|shared| (shared * factor)?.sum_all());
        let mut grads = GradStore::default();
        let loss = (a.call(|(_, own)| own.sum_all())? + of_b(2.)?)?;
        grads = backward_with(&loss, &[&a, &b], added_to(&mut grads))?;
        let another = b.backward(&of_b(3.)?)?;
        assert_eq!(gradients(&another, &b.parameters()), [3.; 3]);
        assert_eq!(gradients(&grads, &b.parameters()), [2.; 3]);
        Ok(())
    });
}

/// Each pass is divided by its own count, then they are added. Shards cannot do that.
#[test]
fn a_pass_with_a_count_adds_to_earlier_gradients() {
    ranks(2, |pg| {
        let ddp = ddp(&pg)?;
        let pass = |ddp: &Ddp, batch: usize, into: Option<&mut GradStore>| {
            let count = 1. + (batch + pg.rank()) as f64;
            backward_with(&loss(ddp, &pg, batch)?, &[ddp], Backward { count: Some(count), into, ..Default::default() })
        };
        let alone = [0, 1].map(|batch| gradients(&pass(&ddp, batch, None).unwrap(), &ddp.parameters()));
        let expected: Vec<f32> = alone[0].iter().zip(&alone[1]).map(|(a, b)| a + b).collect();
        let both = pass(&ddp, 1, Some(&mut pass(&ddp, 0, None)?))?;
        assert_close(&gradients(&both, &ddp.parameters()), &expected, 1e-5, "sum");

        let ddp = ddp_with(&pg, true)?;
        let _optimizer = ZeroRedundancyOptimizer::new(&ddp, ParamsSgd::default())?;
        let error = pass(&ddp, 1, Some(&mut pass(&ddp, 0, None)?)).unwrap_err().to_string();
        assert!(error.starts_with("into: the optimizer of a sharded model keeps the gradients"), "{error}");
        Ok(())
    });
}
