//! Steps of more than one pass, one model or one micro-batch.
use super::{Bad, Ddp, loss, model, skip, state, stop};
use crate::common::{added_to, assert_error, floats, of_micro_batch, ranks, sharding, tensor};
use candle_core::backprop::GradStore;
use candle_ddp::amp::{GradScaler, GradScalerOptions};
use candle_ddp::nn::linear;
use candle_ddp::optim::{AdamW, Optimizer, ParamsAdamW, ParamsSgd, Sgd, ZeroRedundancyOptimizer};
use candle_ddp::{
    Backward, DdpOptions, DistributedDataParallel, Error, JoinOptions, ProcessGroup, Result, SpawnOptions,
    backward_with, spawn_with,
};
use candle_nn::VarMap;

fn sgd(ddp: &Ddp) -> Result<Sgd> {
    Sgd::new(ddp, ParamsSgd { lr: 0.1, ..Default::default() })
}

fn on_last(pg: &ProcessGroup, bad: Bad) -> Bad {
    if pg.rank() + 1 == pg.world_size() { bad } else { Bad::Nothing }
}

fn nan(pg: &ProcessGroup) -> Bad {
    on_last(pg, Bad::First(f64::NAN))
}

#[test]
fn one_pass_of_several_leaves_out_the_step() {
    ranks(2, |pg| {
        for zero in [false, true] {
            let ddp = model(&pg, DdpOptions { sharding: sharding(zero), ..skip(2) })?;
            let mut optimizer: Box<dyn Optimizer> = match zero {
                true => Box::new(ZeroRedundancyOptimizer::new(&ddp, ParamsAdamW::default())?),
                false => Box::new(sgd(&ddp)?),
            };
            // Never more than two in a row, although each is the first pass of some steps and the second of others.
            let plan = [[true, false], [false, true], [false, false], [true, true], [false, true], [false, false]];
            for (index, passes) in plan.into_iter().enumerate() {
                let before: Vec<_> = ddp.parameters().iter().map(|var| floats(var)).collect();
                let mut grads = GradStore::default();
                for bad in passes {
                    let bad = if bad { nan(&pg) } else { Bad::Nothing };
                    let loss = loss(&ddp, index as u64, bad)?;
                    backward_with(&loss, &[&ddp], added_to(&mut grads))?;
                }
                match zero && index == 0 {
                    // The gradients are not where the optimizer keeps those of other steps.
                    true => optimizer.step(&GradStore::default())?,
                    false => optimizer.step(&grads)?,
                }
                let after: Vec<_> = ddp.parameters().iter().map(|var| floats(var)).collect();
                assert_eq!(before == after, passes.contains(&true), "step {index}, zero {zero}");
            }
            assert_eq!(ddp.skipped_steps(), 4);
        }
        Ok(())
    });
}

/// A generator's loss is finite in every step, and its discriminator's in none.
#[test]
fn steps_of_several_passes_are_counted_in_a_row() {
    ranks(2, |pg| {
        let ddp = model(&pg, skip(2))?;
        for step in 0..3 {
            let mut grads = ddp.backward(&loss(&ddp, step, Bad::Nothing)?)?;
            let options = added_to(&mut grads);
            let second = backward_with(&loss(&ddp, step, nan(&pg))?, &[&ddp], options);
            assert_eq!(second.is_err(), step == 2);
        }
        Ok(())
    });
}

#[test]
fn one_micro_batch_under_no_sync_leaves_out_the_step() {
    let run = |bad: bool| {
        ranks(3, |pg| {
            let ddp = model(&pg, skip(1))?;
            let mut optimizer = sgd(&ddp)?;
            for step in (0..3u64).filter(|step| bad || *step != 1) {
                for micro_batch in 0..3 {
                    let _guard = ddp.sync_if(micro_batch == 2);
                    let is_bad = bad && (step, micro_batch) == (1, 0);
                    let grads = ddp.backward(&loss(
                        &ddp,
                        3 * step + micro_batch,
                        if is_bad { nan(&pg) } else { Bad::Nothing },
                    )?)?;
                    if micro_batch == 2 {
                        optimizer.step(&grads)?;
                    }
                }
            }
            Ok(state(&ddp))
        })
    };
    assert!(run(true) == run(false));
}

#[test]
fn a_scaler_decides_by_itself() {
    ranks(2, |pg| {
        for options in [skip(1), stop()] {
            let ddp = model(&pg, options)?;
            let mut optimizer = sgd(&ddp)?;
            let mut scaler = GradScaler::new(&pg, &ddp, GradScalerOptions { init_scale: 8., ..Default::default() })?;
            for (step, bad) in [Bad::Nothing, nan(&pg), nan(&pg), nan(&pg), Bad::Nothing].into_iter().enumerate() {
                let mut grads = ddp.backward(&scaler.scale(&loss(&ddp, step as u64, bad)?)?)?;
                assert_eq!(scaler.step_if_finite(&mut grads, |grads| optimizer.step(grads))?, step == 0 || step == 4);
                scaler.update()?;
            }
            assert_eq!((scaler.current_scale(), ddp.skipped_steps()), (1., 0));
        }
        Ok(())
    });
}

#[test]
fn models_of_one_pass_are_left_out_together() {
    let wrap = |pg: &ProcessGroup, options| {
        DistributedDataParallel::with_options(pg, &VarMap::new(), |vb| linear(3, 3, vb), options)
    };
    ranks(2, |pg| {
        let (a, b) = (wrap(&pg, skip(1))?, wrap(&pg, skip(1))?);
        let x = tensor(&[2, 3], 1);
        // Only the first model's gradients see the NaN.
        let hidden = a.forward(&x)?;
        let loss = (b.forward(&hidden.detach())?.sqr()?.mean_all()? + (hidden.sum_all()? * f64::NAN)?)?;
        let grads = backward_with(&loss, &[&a, &b], Backward::default())?;
        assert!(b.parameters().iter().all(|var| grads.get(var).is_none()));
        assert_eq!((a.skipped_steps(), b.skipped_steps()), (1, 1));
        // Nobody could tell all ranks of both.
        let others = [wrap(&pg, skip(2))?, wrap(&pg.new_group(&[0, 1])?.expect("all"), skip(1))?];
        for other in others {
            let loss = other.forward(&a.forward(&x)?)?.mean_all()?;
            let error = backward_with(&loss, &[&a, &other], Backward::default()).map(drop).unwrap_err();
            assert!(matches!(&error, Error::InvalidArgument { argument: "models", .. }), "{error}");
            assert!(error.to_string().contains("on_non_finite"), "{error}");
        }
        Ok(())
    });
}

#[test]
fn ranks_without_inputs_leave_nothing_open() {
    for zero in [false, true] {
        let run = ranks(2, |pg| {
            let ddp = model(&pg, DdpOptions { sharding: sharding(zero), ..skip(1) })?;
            let steps = if pg.rank() == 0 { 2 } else { 5 };
            let bad = |step| if step == 4 { Bad::First(f64::NAN) } else { Bad::Nothing };
            let body = |optimizer: &mut dyn Optimizer| -> Result<()> {
                for step in 0..steps {
                    let grads = ddp.backward(&loss(&ddp, step, bad(step))?)?;
                    optimizer.step(&grads)?;
                }
                Ok(())
            };
            let mut sharded = zero.then(|| ZeroRedundancyOptimizer::new(&ddp, ParamsAdamW::default())).transpose()?;
            if let Some(optimizer) = &mut sharded {
                optimizer.join(&ddp, JoinOptions::default(), |optimizer| body(optimizer))?;
            } else {
                let mut optimizer = sgd(&ddp)?;
                ddp.join(JoinOptions::default(), || body(&mut optimizer))?;
            }
            let joined = (state(&ddp), ddp.skipped_steps());
            // All count alike from here on.
            drop(ddp.backward(&loss(&ddp, 8, nan(&pg))?)?);
            assert!(ddp.backward(&loss(&ddp, 9, nan(&pg))?).is_err());
            Ok(joined)
        });
        assert!(run[0].0 == run[1].0 && run[0].0.iter().all(|value| value.is_finite()), "{run:?}");
        assert_eq!((run[0].1, run[1].1), (0, 1));
    }
}

#[test]
fn an_error_in_a_join_ends_it_on_all_ranks() {
    ranks(2, |pg| {
        let ddp = model(&pg, stop())?;
        let steps = if pg.rank() == 0 { 1 } else { 3 };
        let joined = ddp.join(JoinOptions::default(), || {
            for step in 0..steps {
                ddp.backward(&loss(&ddp, step, if step == 2 { Bad::Last(f64::NAN) } else { Bad::Nothing })?)?;
            }
            Ok(())
        });
        assert_error(joined.map(drop), &["the gradient of b.weight on rank 1 contains a NaN"]);
        Ok(())
    });
}

/// A micro-batch belongs to another rank when there are more ranks.
#[test]
fn virtual_ranks_leave_out_the_same_step() {
    let run = |world_size: usize, zero: bool| {
        let options = SpawnOptions { world_size, virtual_ranks: Some(4), ..Default::default() };
        let run = spawn_with(options, |pg| {
            let ddp = model(&pg, DdpOptions { sharding: sharding(zero), ..skip(1) })?;
            let mut optimizer = AdamW::new(&ddp, ParamsAdamW::default())?;
            for step in 0..4 {
                let mut last = None;
                for number in ddp.micro_batches().expect("some") {
                    let bad = if (step, number) == (2, 2) { f64::NAN } else { 1. };
                    let x = tensor(&[5, 3], 10 * step + number as u64);
                    let loss = ddp.call(|net| -> Result<_> {
                        let hidden =
                            candle_nn::ModuleT::forward_t(&net.norm, &candle_core::Module::forward(&net.a, &x)?, true)?;
                        Ok((candle_core::Module::forward(&net.b, &hidden)?.sqr()?.mean_all()? * bad)?)
                    })?;
                    last = Some(backward_with(&loss, &[&ddp], of_micro_batch(number))?);
                }
                let mut grads = last.unwrap();
                if step == 2 {
                    assert!(optimizer.clip_grad_norm(&mut grads, 1.)?.to_scalar::<f64>()?.is_nan());
                }
                optimizer.step(&grads)?;
            }
            assert_eq!(ddp.skipped_steps(), 1);
            Ok(state(&ddp))
        });
        run.unwrap().remove(0)
    };
    let one = run(1, false);
    assert!(one.iter().all(|value| value.is_finite()));
    assert!([(2, false), (3, false), (2, true)].into_iter().all(|(world_size, zero)| run(world_size, zero) == one));
}
