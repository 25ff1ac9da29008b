//! When the parts of a step are made, and how many there are.
use super::{Counting, loss_of_two, tiny, two, values_of};
use crate::common::{filled, ranks, tensor};
use candle_core::Module;
use candle_ddp::optim::*;
use candle_ddp::{DdpOptions, DistributedDataParallel, Error};
use candle_nn::{VarBuilder, VarMap, linear};
use std::sync::Mutex;
use std::sync::mpsc::channel;
use std::time::Duration;

/// Rank 1 completes its gradients only when rank 0 has made a part of its step.
#[test]
fn a_step_begins_before_the_last_bucket_is_there() {
    let (sender, receiver) = channel::<()>();
    let (sender, receiver) = (Mutex::new(sender), std::sync::Arc::new(Mutex::new(receiver)));
    ranks(2, |pg| {
        let (ddp, _) = two(&pg, tiny())?;
        let mut optimizer = Counting::new(Sgd::new(&ddp, ParamsSgd::default())?);
        if pg.rank() == 0 {
            let sender = sender.lock().unwrap().clone();
            optimizer.then = Some(Box::new(move || sender.send(()).unwrap_or(())));
        }
        for pass in 0..3 {
            // All parts of the last pass have been told.
            while pg.rank() == 1 && receiver.lock().unwrap().try_recv().is_ok() {}
            let (receiver, waits) = (receiver.clone(), pass > 0 && pg.rank() == 1);
            let between = move || match waits {
                true => {
                    let told = receiver.lock().unwrap().recv_timeout(Duration::from_secs(60));
                    told.map_err(candle_core::Error::wrap)
                }
                false => Ok(()),
            };
            ddp.backward_and_step(&loss_of_two(&ddp, between)?, &mut optimizer)?;
            pg.barrier()?;
        }
        Ok(())
    });
}

/// Each part has several of many buckets.
#[test]
fn parts_are_not_too_many() {
    for (layers, parts) in [(3, 6), (8, 16), (9, 9), (40, 16)] {
        ranks(2, |pg| {
            let build =
                |vb: VarBuilder| (0..layers).map(|layer| linear(3, 3, vb.pp(layer))).collect::<Result<Vec<_>, _>>();
            let [expected, found] = [false, true].map(|in_one| {
                let (ddp, _) = filled(&pg, build, tiny(), 3)?;
                let mut optimizer = Counting::new(Sgd::new(&ddp, ParamsSgd { lr: 0.1, ..Default::default() })?);
                for pass in 0..3 {
                    let x = tensor(&[2, 3], pass + 10 * pg.rank() as u64);
                    let y = ddp.call(|layers| layers.iter().try_fold(x, |x, layer| layer.forward(&x)))?;
                    let loss = y.sqr()?.mean_all()?;
                    match in_one {
                        true => ddp.backward_and_step(&loss, &mut optimizer).map(drop)?,
                        false => optimizer.step(&ddp.backward(&loss)?)?,
                    }
                }
                if in_one {
                    assert_eq!(optimizer.take(), [1, 2 * parts, 2], "{layers} layers");
                }
                Ok::<_, Error>(values_of(&ddp))
            });
            assert_eq!(expected?, found?);
            Ok(())
        });
    }
}

/// A model that computes with the variables themselves.
#[test]
fn a_model_without_replicas_has_parts_too() {
    ranks(2, |pg| {
        let [expected, found] = [false, true].map(|in_one| {
            let varmap = VarMap::new();
            let vb = VarBuilder::from_varmap(&varmap, candle_core::DType::F32, pg.device());
            let layer = linear(3, 2, vb)?;
            crate::common::fill(&varmap, 3);
            let ddp = DistributedDataParallel::from_vars(
                &pg,
                layer,
                &varmap,
                DdpOptions { role: DdpOptions::default().role, ..tiny() },
            )?;
            let mut optimizer = Counting::new(AdamW::new(&ddp, ParamsAdamW::default())?);
            for pass in 0..3 {
                let loss = ddp.forward(&tensor(&[2, 3], pass + 10 * pg.rank() as u64))?.sqr()?.mean_all()?;
                match in_one {
                    true => ddp.backward_and_step(&loss, &mut optimizer).map(drop)?,
                    false => optimizer.step(&ddp.backward(&loss)?)?,
                }
            }
            if in_one {
                assert_eq!(optimizer.take(), [1, 2 * 2, 2]);
            }
            Ok::<_, Error>(values_of(&ddp))
        });
        assert_eq!(expected?, found?);
        Ok(())
    });
}

/// A request to stop comes with the gradients.
#[test]
fn ranks_stop_together() {
    ranks(2, |pg| {
        let (ddp, _) = two(&pg, tiny())?;
        let mut optimizer = AdamW::new(&ddp, ParamsAdamW::default())?;
        for pass in 0..4 {
            if pass == 2 && pg.rank() == 1 {
                pg.request_stop();
            }
            ddp.backward_and_step(&loss_of_two(&ddp, || Ok(()))?, &mut optimizer)?;
            assert_eq!(pg.stop_requested()?, pass >= 2);
        }
        Ok(())
    });
}

/// The trace shows the waits, and the parts of the step between them.
#[test]
fn a_trace_shows_the_parts() {
    let folder = tempfile::tempdir().unwrap();
    ranks(2, |pg| {
        let (ddp, _) = two(&pg, DdpOptions { trace: Some(folder.path().to_path_buf()), ..tiny() })?;
        let mut optimizer = AdamW::new(&ddp, ParamsAdamW::default())?;
        (0..2).try_for_each(|_| ddp.backward_and_step(&loss_of_two(&ddp, || Ok(()))?, &mut optimizer).map(drop))
    });
    for rank in 0..2 {
        let text = std::fs::read_to_string(folder.path().join(format!("rank{rank}.trace.json"))).unwrap();
        let events: Vec<serde_json::Value> = serde_json::from_str(&text).unwrap();
        let named = |event: &serde_json::Value| event["name"].as_str().unwrap().to_string();
        let phases: Vec<String> =
            events.iter().filter(|event| event["ph"] == "X" && event["tid"] == 0).map(named).collect();
        let (wait, step) = ("wait for buckets", "optimizer");
        let whole = ["refresh", "forward", "backward", wait, step];
        let parts = ["refresh", "forward", "backward", wait, step, wait, step, wait, step, wait, step, step];
        assert_eq!(phases, [&whole[..], &parts[..]].concat());
        assert_eq!(events.iter().filter(|event| named(event).starts_with("all-reduce of bucket")).count(), 8);
    }
}
