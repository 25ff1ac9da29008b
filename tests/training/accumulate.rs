//! Gradients of several losses, accumulated before one step.
use crate::common::{assert_close, floats, ranks, tensor};
use crate::programs::{Ddp, gradients, wrap};
use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor};
use candle_ddp::amp::MixedPrecision;
use candle_ddp::comm_hook::AllReduce;
use candle_ddp::optim::{AdamW, ParamsAdamW, ParamsSgd, ZeroRedundancyOptimizer};
use candle_ddp::{Backward, DdpOptions, DistributedDataParallel, Error, ProcessGroup, Result, Unused, backward_with};
use candle_nn::{Optimizer, VarBuilder, VarMap};

fn ddp(pg: &ProcessGroup) -> Result<Ddp> {
    wrap(pg, [4, 5, 2], 3, &DdpOptions { bucket_cap_mb: 0.0, first_bucket_mb: 0.0, ..Default::default() })
}

/// The loss of one of a rank's batches.
fn loss(ddp: &Ddp, pg: &ProcessGroup, batch: usize) -> Result<Tensor> {
    Ok(ddp.forward(&tensor(&[3, 4], (10 * batch + pg.rank()) as u64))?.sqr()?.mean_all()?)
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
            grads = backward_with(&loss(&ddp, &pg, 1)?, &[&ddp], Backward { into: Some(grads), ..Default::default() })?;
            let two = gradients(&grads, &ddp.parameters());
            grads = backward_with(&loss(&ddp, &pg, 2)?, &[&ddp], Backward { into: Some(grads), ..Default::default() })?;
            grads = backward_with(&loss(&ddp, &pg, 3)?, &[&ddp], Backward { into: Some(grads), ..Default::default() })?;
            let four = gradients(&grads, &ddp.parameters());
            // Accumulates into an empty store while another store is alive.
            let mut others = GradStore::default();
            for batch in 0..2 {
                others = backward_with(
                    &loss(&ddp, &pg, batch)?,
                    &[&ddp],
                    Backward { into: Some(others), ..Default::default() },
                )?;
            }
            assert_eq!(gradients(&others, &ddp.parameters()), two);
            assert_eq!(gradients(&grads, &ddp.parameters()), four);
            Ok((expected, [two, four]))
        })
        .unwrap();
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
            grads =
                backward_with(&loss(&ddp, &pg, batch)?, &[&ddp], Backward { into: Some(grads), ..Default::default() })?;
            assert!(
                batch == 3 || gradients(&grads, &ddp.parameters()) == first,
                "unsynchronised gradients must stay in the buckets"
            );
        }
        Ok((expected, gradients(&grads, &ddp.parameters())))
    })
    .unwrap();
    assert_eq!(found[0].1, found[1].1);
    assert_close(&found[0].1, &found[0].0, 1e-5, "sum");
}

#[test]
fn sums_of_no_sync_cannot_be_handed_on() {
    ranks(1, |pg| {
        let ddp = ddp(&pg)?;
        let local = {
            let _guard = ddp.no_sync();
            ddp.backward(&loss(&ddp, &pg, 0)?)?
        };
        let options = Backward { into: Some(local), ..Default::default() };
        let error = backward_with(&loss(&ddp, &pg, 1)?, &[&ddp], options).unwrap_err();
        assert!(matches!(&error, Error::InvalidArgument { argument: "into", .. }), "{error}");
        let sum = gradients(&ddp.backward(&loss(&ddp, &pg, 1)?)?, &ddp.parameters());
        assert_close(&sum, &of_the_sum(&ddp, &pg, &[0, 1])?, 1e-5, "sum");
        Ok(())
    })
    .unwrap();
}

#[test]
fn after_a_failed_pass_the_next_one_adds_to_another_store() {
    ranks(1, |pg| {
        let ddp = ddp(&pg)?;
        let (_, penalty) = &ddp.named_parameters()[0];
        let into = |grads| Backward { into: Some(grads), ..Default::default() };
        let wrong = (loss(&ddp, &pg, 1)? + penalty.sum_all()?)?;
        let grads = ddp.backward(&loss(&ddp, &pg, 0)?)?;
        backward_with(&wrong, &[&ddp], into(grads)).unwrap_err();
        let grads = ddp.backward(&loss(&ddp, &pg, 0)?)?;
        let grads = backward_with(&loss(&ddp, &pg, 1)?, &[&ddp], into(grads))?;
        assert_close(&gradients(&grads, &ddp.parameters()), &of_the_sum(&ddp, &pg, &[0, 1])?, 1e-5, "sum");
        Ok(())
    })
    .unwrap();
}

#[test]
fn gradients_stay_as_they_are_while_their_store_lives() {
    ranks(2, |pg| {
        for reduce_dtype in [None, Some(DType::F64)] {
            let mixed_precision = Some(MixedPrecision { reduce_dtype, ..Default::default() });
            let ddp = wrap(&pg, [4, 5, 2], 3, &DdpOptions { mixed_precision, ..Default::default() })?;
            let first = ddp.backward(&loss(&ddp, &pg, 0)?)?;
            let before = gradients(&first, &ddp.parameters());
            let second = ddp.backward(&loss(&ddp, &pg, 1)?)?;
            let third = ddp.backward(&loss(&ddp, &pg, 2)?)?;
            assert_eq!(gradients(&first, &ddp.parameters()), before);
            assert_ne!(gradients(&second, &ddp.parameters()), gradients(&third, &ddp.parameters()));
        }
        Ok(())
    })
    .unwrap();
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
        grads = backward_with(&loss, &[&a, &b], Backward { into: Some(grads), ..Default::default() })?;
        let another = b.backward(&of_b(3.)?)?;
        assert_eq!(gradients(&another, &b.parameters()), [3.; 3]);
        assert_eq!(gradients(&grads, &b.parameters()), [2.; 3]);
        Ok(())
    })
    .unwrap();
}

/// The store keeps no gradients of inputs, which candle computes too, however many passes there are.
#[test]
fn a_store_does_not_grow_with_the_number_of_losses() {
    ranks(1, |pg| {
        let ddp = ddp(&pg)?;
        let mut grads = GradStore::default();
        for batch in 0..5 {
            grads =
                backward_with(&loss(&ddp, &pg, batch)?, &[&ddp], Backward { into: Some(grads), ..Default::default() })?;
        }
        // Sums own their memory, so the store needs no mark that the gradients are views of buckets.
        assert_eq!(grads.get_ids().count(), ddp.parameters().len());
        Ok(())
    })
    .unwrap();
}

#[test]
fn gradients_of_an_optimizer_in_shards_add_up() {
    let weights = |sharded: bool| {
        ranks(2, |pg| {
            let ddp = ddp(&pg)?;
            let options = ParamsAdamW { lr: 0.05, ..Default::default() };
            let mut plain = AdamW::new(&ddp, options.clone())?;
            let mut shards = if sharded { Some(ZeroRedundancyOptimizer::new(&ddp, options)?) } else { None };
            for step in 0..4 {
                // A new store must not contain gradients of an earlier pass, even after sums were accumulated on it.
                let mut dropped = ddp.backward(&loss(&ddp, &pg, 9)?)?;
                if step == 3 {
                    let _guard = ddp.no_sync();
                    dropped = backward_with(
                        &loss(&ddp, &pg, 30)?,
                        &[&ddp],
                        Backward { into: Some(dropped), ..Default::default() },
                    )?;
                }
                drop(dropped);
                let mut grads = ddp.backward(&loss(&ddp, &pg, 2 * step)?)?;
                {
                    let _guard = (step == 2).then(|| ddp.no_sync());
                    grads = backward_with(
                        &loss(&ddp, &pg, 2 * step + 1)?,
                        &[&ddp],
                        Backward { into: Some(grads), ..Default::default() },
                    )?;
                }
                grads = backward_with(
                    &loss(&ddp, &pg, 2 * step + 20)?,
                    &[&ddp],
                    Backward { into: Some(grads), ..Default::default() },
                )?;
                match &mut shards {
                    Some(optimizer) => candle_ddp::optim::Optimizer::step(optimizer, &grads)?,
                    None => plain.step(&grads)?,
                }
            }
            Ok(ddp.parameters().iter().flat_map(|var| floats(var)).collect::<Vec<_>>())
        })
        .unwrap()
    };
    let (whole, sharded) = (weights(false), weights(true));
    assert_eq!(sharded[0], sharded[1]);
    assert_close(&sharded[0], &whole[0], 1e-5, "weights");
}

/// Each pass is divided by its own count, then they are added. Shards cannot do that.
#[test]
fn a_pass_with_a_count_adds_to_earlier_gradients() {
    ranks(2, |pg| {
        let ddp = ddp(&pg)?;
        let pass = |batch: usize, into| {
            let count = 1. + (batch + pg.rank()) as f64;
            backward_with(&loss(&ddp, &pg, batch)?, &[&ddp], Backward { count: Some(count), into })
        };
        let alone = [0, 1].map(|batch| gradients(&pass(batch, None).unwrap(), &ddp.parameters()));
        let expected: Vec<f32> = alone[0].iter().zip(&alone[1]).map(|(a, b)| a + b).collect();
        let both = pass(1, Some(pass(0, None)?))?;
        assert_close(&gradients(&both, &ddp.parameters()), &expected, 1e-5, "sum");

        let _optimizer = ZeroRedundancyOptimizer::new(&ddp, ParamsSgd::default())?;
        let error = pass(1, Some(pass(0, None)?)).unwrap_err().to_string();
        assert!(error.starts_with("into: a ZeroRedundancyOptimizer keeps the gradients"), "{error}");
        Ok(())
    })
    .unwrap();
}
