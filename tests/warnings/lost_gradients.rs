//! DDP says once, on rank 0, that the first gradients were dropped unused.
use crate::common::{added_to, tensor};
use crate::logger::of_two_ranks;
use candle_ddp::amp::GradScaler;
use candle_ddp::optim::{ParamsSgd, Sgd};
use candle_ddp::{DistributedDataParallel, Result, backward_with};
use candle_nn::{Linear, Optimizer, SGD, VarMap, linear};

fn warnings(work: impl Fn(&DistributedDataParallel<Linear>) -> Result<()> + Sync) -> Vec<String> {
    of_two_ranks(|pg| {
        let build = |vb| linear(4, 2, vb);
        work(&DistributedDataParallel::new(&pg, &VarMap::new(), build)?)
    })
}

#[test]
fn first_gradients_that_nobody_used_are_told_of_once() {
    let loss = |ddp: &DistributedDataParallel<Linear>| {
        Ok::<_, candle_ddp::Error>(ddp.forward(&tensor(&[3, 4], 1))?.mean_all()?)
    };

    // DCGAN's two calls, with a forward pass before each or both before.
    let lost = warnings(|ddp| {
        ddp.backward(&loss(ddp)?)?;
        SGD::new(ddp.parameters(), 0.1)?.step(&ddp.backward(&loss(ddp)?)?)?;
        ddp.backward(&loss(ddp)?)?;
        ddp.backward(&loss(ddp)?)?;
        Ok(())
    });
    assert!(lost.len() == 1 && lost[0].contains("Backward { into") && lost[0].contains("weight"), "{lost:?}");
    assert!(lost[0].contains("an optimizer without this parameter"), "{lost:?}");
    let lost = warnings(|ddp| {
        let losses = [loss(ddp)?, loss(ddp)?];
        losses.iter().try_for_each(|loss| ddp.backward(loss).map(drop))
    });
    assert_eq!(lost.len(), 1, "{lost:?}");

    // The first ones that are not left out.
    let lost = warnings(|ddp| {
        let mut scaler = GradScaler::new(ddp.process_group(), ddp, Default::default())?;
        for step in 0..3 {
            let loss = (loss(ddp)? * if step < 1 { f64::INFINITY } else { 1. })?;
            let mut grads = ddp.backward(&scaler.scale(&loss)?)?;
            scaler.unscale(&mut grads)?;
            scaler.update()?;
        }
        Ok(())
    });
    assert_eq!(lost.len(), 1, "{lost:?}");

    let used = [
        // A step, and forward passes before and after.
        warnings(|ddp| {
            let mut optimizer = SGD::new(ddp.parameters(), 0.1)?;
            for _ in 0..3 {
                optimizer.step(&ddp.backward(&loss(ddp)?)?)?;
                loss(ddp)?;
            }
            Ok(())
        }),
        // No forward pass between the step and the next backward.
        warnings(|ddp| {
            let losses = [loss(ddp)?, loss(ddp)?];
            let mut optimizer = SGD::new(ddp.parameters(), 0.1)?;
            losses.iter().try_for_each(|loss| Ok(optimizer.step(&ddp.backward(loss)?)?))
        }),
        warnings(|ddp| {
            let mut grads = ddp.backward(&loss(ddp)?)?;
            let options = added_to(&mut grads);
            backward_with(&loss(ddp)?, &[ddp], options).map(drop)
        }),
        // Under no_sync they add up.
        warnings(|ddp| {
            let guard = ddp.no_sync();
            ddp.backward(&loss(ddp)?)?;
            drop(guard);
            ddp.backward(&loss(ddp)?).map(drop)
        }),
        // A scaler leaves out the first steps, as in every run with a scale that is too large at first.
        warnings(|ddp| {
            let mut scaler = GradScaler::new(ddp.process_group(), ddp, Default::default())?;
            let mut optimizer = Sgd::new(ddp, ParamsSgd { lr: 0.1, ..Default::default() })?;
            for step in 0..4 {
                let loss = (loss(ddp)? * if step < 2 { f64::INFINITY } else { 1. })?;
                let mut grads = ddp.backward(&scaler.scale(&loss)?)?;
                scaler.step(&mut optimizer, &mut grads)?;
                scaler.update()?;
            }
            Ok(())
        }),
    ];
    assert!(used.iter().all(Vec::is_empty), "{used:?}");
}
