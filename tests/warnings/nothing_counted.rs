//! What is said of a loss without targets, and of a step that is left out.
use crate::common::tensor;
use crate::logger::{LOG, of_two_ranks};
use candle_core::{Device, Tensor};
use candle_ddp::nn::{cross_entropy, linear, linear_cross_entropy};
use candle_ddp::optim::{Optimizer, ParamsSgd, Sgd};
use candle_ddp::{DdpOptions, DistributedDataParallel, OnNonFinite};
use candle_nn::VarMap;

#[test]
fn a_loss_without_targets_is_told_of_once() {
    let warnings = of_two_ranks(|pg| {
        let ddp = DistributedDataParallel::new(&pg, &VarMap::new(), |vb| linear(3, 4, vb))?;
        let mut optimizer = Sgd::new(&ddp, ParamsSgd::default())?;
        for (pass, is_ignored) in [false, true, false, true, true].into_iter().enumerate() {
            let class = if pg.rank() == 1 && is_ignored { -100i64 } else { 2 };
            let targets = Tensor::new(&[class, class], &Device::Cpu)?;
            let x = tensor(&[2, 3], 1);
            let loss = match pass {
                3 => ddp.call(|layer| linear_cross_entropy(&x, layer.weight(), layer.bias(), &targets))?,
                _ => cross_entropy(&ddp.forward(&x)?, &targets)?,
            };
            assert_eq!(loss.to_scalar::<f32>()?.is_nan(), class < 0);
            // An evaluation says nothing, nor does the training step after it.
            if pass == 1 {
                continue;
            }
            optimizer.step(&ddp.backward(&loss)?)?;
            if pass == 2 {
                assert!(LOG.0.lock().unwrap().is_empty());
                pg.barrier()?;
            }
        }
        Ok(())
    });
    assert!(
        warnings.len() == 1 && warnings[0].starts_with("the loss on rank 1 is NaN, since no target"),
        "{warnings:?}"
    );
}

#[test]
fn the_first_step_that_is_left_out_is_told_of() {
    let warnings = of_two_ranks(|pg| {
        let on_non_finite = Some(OnNonFinite::Skip { at_most: 9 });
        let options = DdpOptions { on_non_finite, ..Default::default() };
        let ddp = DistributedDataParallel::with_options(&pg, &VarMap::new(), |vb| linear(3, 4, vb), options)?;
        let mut optimizer = Sgd::new(&ddp, ParamsSgd::default())?;
        for factor in [1., f64::INFINITY, 1., f64::NAN] {
            let factor = if pg.rank() == 1 { factor } else { 1. };
            optimizer.step(&ddp.backward(&(ddp.forward(&tensor(&[2, 3], 1))?.mean_all()? * factor)?)?)?;
        }
        Ok(())
    });
    assert!(
        warnings.len() == 1 && warnings[0].starts_with("all ranks leave out this step, since the averaged"),
        "{warnings:?}"
    );
    assert!(warnings[0].contains("contains an infinity"), "{warnings:?}");
}
