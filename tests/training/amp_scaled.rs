//! Gradients that are still scaled reach no optimizer, and a scale that sinks never makes a step.
use crate::common::{added_to, counted, floats, of_micro_batch, of_zero, ranks, with_virtual_ranks};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_ddp::amp::{GradScaler, GradScalerOptions};
use candle_ddp::optim::{
    AdamW, Optimizer, ParamsAdamW, ParamsSgd, Sgd, ZeroRedundancyOptimizer, clip_grad_norm, clip_grad_value,
};
use candle_ddp::{DistributedDataParallel, Error, ProcessGroup, Result, backward_with};
use candle_nn::{Linear, VarMap, linear};

fn scaler(pg: &ProcessGroup, var: &Var, init_scale: f64) -> Result<GradScaler> {
    let options = GradScalerOptions { init_scale, ..Default::default() };
    GradScaler::new(pg, vec![("w".to_string(), var.clone())], options)
}

fn model(pg: &ProcessGroup) -> Result<DistributedDataParallel<Linear>> {
    DistributedDataParallel::new(pg, &VarMap::new(), |vb| linear(3, 1, vb))
}

fn sharded(pg: &ProcessGroup) -> Result<DistributedDataParallel<Linear>> {
    DistributedDataParallel::with_options(pg, &VarMap::new(), |vb| linear(3, 1, vb), of_zero())
}

fn loss(ddp: &DistributedDataParallel<Linear>) -> Result<Tensor> {
    Ok(ddp.forward(&Tensor::ones((2, 3), DType::F32, &Device::Cpu)?)?.sqr()?.mean_all()?)
}

/// A pass in which only rank 0 has a sample, and so a loss to scale.
fn of_rank_0(ddp: &DistributedDataParallel<Linear>, scaler: &GradScaler) -> Result<GradStore> {
    let (loss, count) = match ddp.process_group().rank() {
        0 => (scaler.scale(&loss(ddp)?)?, 1.),
        _ => (Tensor::zeros((), DType::F32, &Device::Cpu)?, 0.),
    };
    backward_with(&loss, &[ddp], counted(count))
}

#[test]
fn a_scale_that_sinks_never_steps_and_recovers() {
    for dtype in [DType::F32, DType::F64, DType::BF16] {
        ranks(2, |pg| {
            let var = Var::ones(4, dtype, &Device::Cpu)?;
            let mut optimizer = Sgd::new(vec![var.clone()], ParamsSgd { lr: 0.5, ..Default::default() })?;
            let mut scaler = scaler(&pg, &var, 65536.0)?;
            for step in 0..300 {
                let infinite = var.sum_all()?.affine(f64::INFINITY, 0.)?;
                let mut grads = scaler.scale(&infinite)?.backward()?;
                assert!(!scaler.step_if_finite(&mut grads, |grads| optimizer.step(grads))?, "step {step} in {dtype:?}");
                scaler.update()?;
                assert!((1.0 / scaler.current_scale() as f32).is_finite());
            }
            assert_eq!(floats(&var), [1.0; 4]);
            let mut grads = scaler.scale(&var.sum_all()?)?.backward()?;
            assert!(scaler.step_if_finite(&mut grads, |grads| optimizer.step(grads))?);
            assert_eq!(floats(&var), [0.5; 4], "{dtype:?}");
            Ok(())
        });
    }
}

/// Gradients that are finite, but not once they are divided by a tiny scale.
#[test]
fn an_overflow_of_the_division_skips_the_step() {
    ranks(1, |pg| {
        for strided in [false, true] {
            let var = Var::zeros((2, 2), DType::F32, &Device::Cpu)?;
            let mut scaler = scaler(&pg, &var, 1e-30)?;
            let mut grads = scaler.scale(&var.sum_all()?)?.backward()?;
            let large = Tensor::new(&[[1f32, 1e20], [0., 0.]], &Device::Cpu)?;
            grads.insert(&var, if strided { large.t()? } else { large });
            assert!(!scaler.step_if_finite(&mut grads, |_| Ok(()))?, "strided: {strided}");
        }
        Ok(())
    });
    let steps = ranks(2, |pg| {
        let ddp = sharded(&pg)?;
        let mut optimizer = ZeroRedundancyOptimizer::new(&ddp, ParamsSgd::default())?;
        let options = GradScalerOptions { init_scale: 1e-30, ..Default::default() };
        let mut scaler = GradScaler::new(&pg, &ddp, options)?;
        let mut stepped = Vec::new();
        for factor in [1.0, 1e50] {
            let scaled = scaler.scale(&loss(&ddp)?)?;
            let mut grads = ddp.backward(&scaled.affine(factor, 0.)?)?;
            let before = scaler.current_scale();
            scaler.step(&mut optimizer, &mut grads)?;
            scaler.update()?;
            stepped.push(scaler.current_scale() >= before);
        }
        Ok(stepped)
    });
    assert_eq!(steps, [[true, false], [true, false]]);
}

#[track_caller]
fn refused<T: std::fmt::Debug>(result: Result<T>, name: &str) {
    match result {
        Err(Error::GradScaler { call, reason }) if call == name => {
            assert!(reason.contains("unscale") || reason.contains("scaler.scale"), "{reason}");
        }
        other => panic!("{name}: {other:?}"),
    }
}

#[test]
fn scaled_gradients_are_clipped_and_used_only_after_unscale() {
    ranks(2, |pg| {
        let ddp = model(&pg)?;
        let vars = ddp.parameters();
        let mut optimizer = AdamW::new(&ddp, ParamsAdamW::default())?;
        let mut scaler = GradScaler::new(&pg, &ddp, GradScalerOptions::default())?;
        let before = vars.iter().flat_map(|var| floats(var)).collect::<Vec<_>>();
        let mut grads = ddp.backward(&scaler.scale(&loss(&ddp)?)?)?;
        refused(optimizer.clip_grad_norm(&mut grads, 1.0), "clip_grad_norm");
        refused(clip_grad_norm(&mut grads, vars.clone(), 1.0), "clip_grad_norm");
        refused(clip_grad_value(&mut grads, vars.clone(), 1.0), "clip_grad_value");
        refused(Optimizer::step(&mut optimizer, &grads), "step");
        assert_eq!(vars.iter().flat_map(|var| floats(var)).collect::<Vec<_>>(), before);
        // The same for gradients that are added up, and for gradients of candle's own backward pass.
        let mut sum = GradStore::default();
        sum = backward_with(&scaler.scale(&loss(&ddp)?)?, &[&ddp], added_to(&mut sum))?;
        refused(optimizer.clip_grad_norm(&mut sum, 1.0), "clip_grad_norm");
        let var = Var::ones(2, DType::F32, &Device::Cpu)?;
        let mut own = scaler.scale(&var.sum_all()?)?.backward()?;
        refused(clip_grad_norm(&mut own, vec![var], 1.0), "clip_grad_norm");

        scaler.unscale(&mut grads)?;
        optimizer.clip_grad_norm(&mut grads, 1.0)?;
        assert!(scaler.step_if_finite(&mut grads, |grads| optimizer.step(grads))?);
        scaler.update()?;
        // A disabled scaler scales nothing.
        let disabled = GradScalerOptions { enabled: false, ..Default::default() };
        let off = GradScaler::new(&pg, &ddp, disabled)?;
        let mut grads = ddp.backward(&off.scale(&loss(&ddp)?)?)?;
        optimizer.clip_grad_norm(&mut grads, 1.0)?;
        Ok(())
    });
}

#[test]
fn the_sum_of_micro_batches_is_scaled_too() {
    with_virtual_ranks(4, 2, |pg| {
        let ddp = DistributedDataParallel::new(&pg, &VarMap::new(), |vb| linear(3, 1, vb))?;
        let mut optimizer = AdamW::new(&ddp, ParamsAdamW::default())?;
        let mut scaler = GradScaler::new(&pg, &ddp, GradScalerOptions::default())?;
        let mut grads = GradStore::default();
        for number in ddp.micro_batches().unwrap() {
            grads = backward_with(&scaler.scale(&loss(&ddp)?)?, &[&ddp], of_micro_batch(number))?;
        }
        refused(optimizer.clip_grad_norm(&mut grads, 1.0), "clip_grad_norm");
        assert!(scaler.step_if_finite(&mut grads, |grads| optimizer.step(grads))?);
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_loss_that_nobody_scaled_is_an_error_on_every_rank() {
    ranks(2, |pg| {
        let ddp = model(&pg)?;
        let mut optimizer = AdamW::new(&ddp, ParamsAdamW::default())?;
        let mut scaler = GradScaler::new(&pg, &ddp, GradScalerOptions::default())?;
        let mut grads = ddp.backward(&loss(&ddp)?)?;
        refused(scaler.step(&mut optimizer, &mut grads), "unscale");
        // A rank without samples has nothing to scale.
        let mut grads = of_rank_0(&ddp, &scaler)?;
        assert!(scaler.step_if_finite(&mut grads, |grads| optimizer.step(grads))?);
        Ok(())
    });
}

/// An error on every rank, although one rank's own loss has no scale.
#[test]
fn a_zero_redundancy_optimizer_refuses_scaled_gradients() {
    ranks(2, |pg| {
        let ddp = sharded(&pg)?;
        let mut optimizer = ZeroRedundancyOptimizer::new(&ddp, ParamsAdamW::default())?;
        let scaler = GradScaler::new(&pg, &ddp, GradScalerOptions::default())?;
        let mut grads = of_rank_0(&ddp, &scaler)?;
        let clipped = optimizer.clip_grad_norm(&mut grads, 1.0);
        match pg.rank() {
            0 => refused(clipped, "clip_grad_norm"),
            _ => assert!(clipped.unwrap_err().to_string().contains("unscale")),
        }
        Ok(())
    });
}
