//! Refused calls, and the state after an error.
use super::{Counting, adamw, loss, loss_of_two, tiny, two, values_of, wrap};
use crate::common::{assert_error, floats, ranks, var, with_virtual_ranks};
use candle_core::{Tensor, Var};
use candle_ddp::amp::{GradScaler, GradScalerOptions};
use candle_ddp::checkpoint::StateDict;
use candle_ddp::optim::*;
use candle_ddp::{DdpOptions, Error, OnNonFinite, ReplicaCheck, Result, Unused};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Nothing is sent, nothing changes, and training continues.
#[test]
fn steps_without_averages_and_with_a_scaled_loss_are_refused() {
    for world_size in [1, 2] {
        ranks(world_size, |pg| {
            let (ddp, _) = wrap(&pg, tiny())?;
            let mut optimizer = adamw(&ddp)?;
            let scaler = GradScaler::new(&pg, &ddp, GradScalerOptions::default())?;
            for step in 0..3 {
                let before = values_of(&ddp);
                {
                    let _guard = ddp.no_sync();
                    let error = ddp.backward_and_step(&loss(&ddp, step)?, &mut optimizer).unwrap_err();
                    let is_told = error.to_string().contains("under no_sync nothing is averaged");
                    assert!(
                        matches!(error, Error::InvalidArgument { argument: "optimizer", .. }) && is_told,
                        "{error}"
                    );
                }
                let scaled = scaler.scale(&loss(&ddp, step)?)?;
                let error = ddp.backward_and_step(&scaled, &mut optimizer).unwrap_err();
                let is_told = error.to_string().contains("scaler.step(&mut optimizer, &mut grads)");
                assert!(matches!(error, Error::InvalidArgument { argument: "optimizer", .. }) && is_told, "{error}");
                assert_eq!(values_of(&ddp), before);
                ddp.backward_and_step(&loss(&ddp, step)?, &mut optimizer)?;
                assert_ne!(values_of(&ddp), before);
            }
            // A scaler that is turned off scales nothing.
            let options = GradScalerOptions { enabled: false, ..Default::default() };
            let scaled = GradScaler::new(&pg, &ddp, options)?.scale(&loss(&ddp, 3)?)?;
            ddp.backward_and_step(&scaled, &mut optimizer)
        });
    }
    with_virtual_ranks(2, 1, |pg| {
        let (ddp, _) = two(&pg, tiny())?;
        let mut optimizer = AdamW::new(&ddp, ParamsAdamW::default())?;
        let refused = ddp.backward_and_step(&loss_of_two(&ddp, || Ok(()))?, &mut optimizer);
        assert_error(refused, &["one backward pass for each micro-batch"]);
        Ok(())
    })
    .unwrap();
}

/// The ranks find errors together before the step.
#[test]
fn what_is_wrong_with_a_pass_changes_nothing() {
    let refused =
        |options: DdpOptions, spoil: fn(&super::Ddp, usize) -> Result<Tensor>, passes: usize, expected: &str| {
            let expected = expected.to_string();
            ranks(2, |pg| {
                let (ddp, _) = wrap(&pg, options.clone())?;
                let mut optimizer = adamw(&ddp)?;
                for step in 0..passes {
                    ddp.backward_and_step(&loss(&ddp, step)?, &mut optimizer)?;
                }
                let before = (values_of(&ddp), optimizer.state_dict()?["state.hidden.bias.step"].to_vec1::<i64>()?);
                let spoilt = spoil(&ddp, passes)?;
                let changed = values_of(&ddp);
                assert_error(ddp.backward_and_step(&spoilt, &mut optimizer), &[&expected]);
                assert_eq!(values_of(&ddp), changed);
                let after = optimizer.state_dict()?;
                assert_eq!(after["state.hidden.bias.step"].to_vec1::<i64>()?, before.1);
                assert!(!after.contains_key("failed_step"));
                Ok(())
            });
        };
    refused(DdpOptions { unused: Unused::Refuse, ..tiny() }, loss, 0, "never.weight");
    let beside = |ddp: &super::Ddp, step| {
        let weight = &ddp.named_parameters()[0].1;
        Ok((loss(ddp, step)? + weight.sqr()?.sum_all()?)?)
    };
    refused(tiny(), beside, 2, "uses its variable directly");
    let infinite = |ddp: &super::Ddp, step| Ok((loss(ddp, step)? * f64::INFINITY)?);
    let stop = DdpOptions { on_non_finite: Some(OnNonFinite::Stop), ..tiny() };
    refused(stop, infinite, 2, "DdpOptions::on_non_finite");
    let part = |ddp: &super::Ddp, step| {
        if ddp.process_group().rank() == 1 {
            let (_, hidden) = ddp.named_parameters().into_iter().find(|(name, _)| name == "hidden.weight").unwrap();
            hidden.set(&(hidden.as_tensor() * 2.)?)?;
        }
        loss(ddp, step)
    };
    let check = ReplicaCheck { every: 4, ..Default::default() };
    refused(DdpOptions { replica_check: Some(check), ..tiny() }, part, 3, "hidden.weight");
}

/// A step that all ranks leave out.
#[test]
fn a_step_is_left_out_as_a_whole() {
    ranks(2, |pg| {
        let options = DdpOptions { on_non_finite: Some(OnNonFinite::Skip { at_most: 1 }), ..tiny() };
        let (ddp, _) = wrap(&pg, options)?;
        let mut optimizer = adamw(&ddp)?;
        ddp.backward_and_step(&loss(&ddp, 0)?, &mut optimizer)?;
        let before = values_of(&ddp);
        let bad = if pg.rank() == 1 { f64::NAN } else { 1. };
        ddp.backward_and_step(&(loss(&ddp, 1)? * bad)?, &mut optimizer)?;
        assert_eq!((values_of(&ddp), ddp.skipped_steps()), (before, 1));
        ddp.backward_and_step(&loss(&ddp, 2)?, &mut optimizer)
    });
}

/// Asserts that the optimizer makes no further step, also in another that has loaded its state, until it has a state from before.
fn assert_torn(
    ddp: &super::Two,
    mut optimizer: AdamW,
    before: &std::collections::HashMap<String, Tensor>,
) -> Result<()> {
    const TORN: &str = "failed after some parameters had been updated";
    let grads = Var::zeros((), candle_core::DType::F32, ddp.process_group().device())?.sqr()?.backward()?;
    let refuses = |optimizer: &mut AdamW| {
        let by_candle = candle_nn::Optimizer::step(optimizer, &grads).unwrap_err().to_string();
        let error = Optimizer::step(optimizer, &grads).unwrap_err();
        assert!(
            matches!(&error, Error::InvalidArgument { argument: "optimizer", .. }) && by_candle.contains(TORN),
            "{error}"
        );
        assert!(error.to_string().contains(TORN), "{error}");
    };
    refuses(&mut optimizer);
    let mut other = AdamW::new(ddp, ParamsAdamW::default())?;
    other.load_state_dict(&optimizer.state_dict()?)?;
    refuses(&mut other);
    for optimizer in [&mut optimizer, &mut other] {
        optimizer.load_state_dict(before)?;
        Optimizer::step(optimizer, &grads)?;
    }
    Ok(())
}

/// Rank 1 fails when rank 0 has made a part of its step.
#[test]
fn after_a_failure_in_the_middle_an_optimizer_refuses_to_continue() {
    let (sender, receiver) = channel::<()>();
    let (sender, receiver) = (Mutex::new(sender), Arc::new(Mutex::new(receiver)));
    ranks(2, |pg| {
        let (ddp, _) = two(&pg, tiny())?;
        let mut optimizer = AdamW::new(&ddp, ParamsAdamW::default())?;
        for _ in 0..2 {
            ddp.backward_and_step(&loss_of_two(&ddp, || Ok(()))?, &mut optimizer)?;
        }
        let (before, saved) = (values_of(&ddp), optimizer.state_dict()?);
        let saved: std::collections::HashMap<_, _> =
            saved.into_iter().map(|(key, tensor)| Ok((key, tensor.copy()?))).collect::<Result<_>>()?;
        let (rank, receiver) = (pg.rank(), receiver.clone());
        let fails = loss_of_two(&ddp, move || match rank {
            0 => Ok(()),
            _ => {
                receiver.lock().unwrap().recv_timeout(Duration::from_secs(60)).map_err(candle_core::Error::wrap)?;
                candle_core::bail!("out of memory")
            }
        })?;
        if rank == 1 {
            assert_error(ddp.backward_and_step(&fails, &mut optimizer), &["out of memory"]);
            // It has changed nothing itself.
            assert_eq!(values_of(&ddp), before);
            assert!(!optimizer.state_dict()?.contains_key("failed_step"));
            return Ok(());
        }
        let sender = sender.lock().unwrap().clone();
        let mut counting = Counting::new(optimizer);
        counting.then = Some(Box::new(move || sender.send(()).unwrap_or(())));
        assert_error(ddp.backward_and_step(&fails, &mut counting), &["out of memory"]);
        let changed: Vec<bool> = values_of(&ddp).iter().zip(&before).map(|(now, before)| now != before).collect();
        // The weight and the bias of the first layer are as before.
        assert!(changed[..2] == [false; 2] && changed[2..].contains(&true), "{changed:?}");
        let refused = ddp.backward_and_step(&loss_of_two(&ddp, || Ok(()))?, &mut counting);
        assert_error(refused, &["failed after some parameters"]);
        let Counting { optimizer, .. } = counting;
        assert_torn(&ddp, optimizer, &saved)
    });
}

/// A rule that fails for a parameter.
#[derive(Clone, Debug)]
struct Failing {
    fails: Arc<Mutex<bool>>,
}

impl UpdateRule for Failing {
    const NAME: &'static str = "Failing";

    fn states(&self) -> &'static [&'static str] {
        &[]
    }

    fn learning_rate(&self) -> f64 {
        0.1
    }

    fn set_learning_rate(&mut self, _: f64) {}

    fn update(&self, value: &Tensor, gradient: &Tensor, _: &mut [Tensor], _: u64) -> Result<Tensor> {
        if *self.fails.lock().unwrap() && value.dims() == [4, 3] {
            return Err(Error::InvalidArgument { argument: "luck", reason: "it has run out".to_string() });
        }
        Ok((value - (gradient * 0.1)?)?)
    }
}

/// A rule fails in a part. Other ranks must not wait for this one.
#[test]
fn an_error_of_the_optimizer_ends_the_group() {
    for world_size in [1, 2] {
        ranks(world_size, |pg| {
            let (ddp, varmap) = two(&pg, tiny())?;
            let rule = Failing { fails: Arc::default() };
            let mut optimizer = FusedOptimizer::new(&ddp, rule.clone())?;
            for _ in 0..2 {
                ddp.backward_and_step(&loss_of_two(&ddp, || Ok(()))?, &mut optimizer)?;
            }
            let before = floats(&var(&varmap, "a.weight"));
            *rule.fails.lock().unwrap() = true;
            assert_error(ddp.backward_and_step(&loss_of_two(&ddp, || Ok(()))?, &mut optimizer), &["it has run out"]);
            assert_eq!(floats(&var(&varmap, "a.weight")), before);
            *rule.fails.lock().unwrap() = false;
            let refused = ddp.backward_and_step(&loss_of_two(&ddp, || Ok(()))?, &mut optimizer);
            assert_error(refused, &["failed after some parameters"]);
            // The state has a mark, and so does one that was loaded.
            let ended = pg.barrier().is_err();
            assert_eq!(ended, world_size > 1);
            Ok(())
        });
    }
}
