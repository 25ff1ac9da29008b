//! The error that names the first parameter and the rank that had it.
use super::{Bad, Ddp, loss, model, skip, small, stop};
use crate::common::{ranks, tensor};
use candle_core::{DType, Device, Tensor};
use candle_ddp::comm_hook::{AllReduce, Fp16Compress, Noop};
use candle_ddp::nn::{cross_entropy, linear};
use candle_ddp::optim::{ParamsAdamW, ZeroRedundancyOptimizer};
use candle_ddp::{DdpOptions, DistributedDataParallel, Error, Precision, Result, Sharding};
use candle_nn::VarMap;

type Found = (Option<String>, Option<usize>, String, u64);

/// What `NonFinite` says.
fn found(error: Error) -> Found {
    match error {
        Error::NonFinite { parameter, rank, value, steps } => (parameter, rank, value, steps),
        other => panic!("{other:?}"),
    }
}

/// The same error of all ranks, after `steps` that are bad on the rank `world_size - 2`. The group still works.
fn error(world_size: usize, options: &DdpOptions, prepare: fn(&Ddp) -> Result<()>, bad: Bad, steps: u64) -> Found {
    let errors = ranks(world_size, |pg| {
        let ddp = model(&pg, options.clone())?;
        prepare(&ddp)?;
        let bad = if pg.rank() + 2 == world_size.max(2) { bad } else { Bad::Nothing };
        // A step that is left out does not count once one was made.
        let plan = [Bad::Nothing].into_iter().chain([bad, Bad::Nothing].into_iter().filter(|_| steps > 1));
        for (step, bad) in plan.chain(std::iter::repeat_n(bad, steps as usize - 1)).enumerate() {
            drop(ddp.backward(&loss(&ddp, step as u64, bad)?)?);
        }
        let error = ddp.backward(&loss(&ddp, 9, bad)?).map(drop).unwrap_err();
        drop(ddp.backward(&loss(&ddp, 9, Bad::Nothing)?)?);
        assert_eq!(ddp.skipped_steps(), if steps > 1 { steps + 1 } else { 1 });
        Ok(found(error))
    });
    assert!(errors.iter().all(|error| error == &errors[0]), "{errors:?}");
    errors[0].clone()
}

/// Each reduction with its own preparation.
const PREPARATIONS: [fn(&Ddp) -> Result<()>; 2] = [|_| Ok(()), |ddp| ddp.register_comm_hook(AllReduce::default())];

#[test]
fn the_rank_and_the_parameter_are_named_on_all_ranks() {
    let precision = Precision::Half { param_dtype: DType::BF16, buffer_dtype: None };
    let half = DdpOptions { precision, ..stop() };
    for options in [stop(), small(stop()), half] {
        for prepare in PREPARATIONS {
            for (value, text) in [(f64::NAN, "a NaN"), (f64::INFINITY, "an infinity")] {
                for world_size in [1, 2, 3] {
                    let rank = Some(world_size.max(2) - 2);
                    let expected = |parameter: &str| (Some(parameter.to_string()), rank, text.to_string(), 1);
                    assert_eq!(error(world_size, &options, prepare, Bad::Last(value), 1), expected("b.weight"));
                    assert_eq!(error(world_size, &options, prepare, Bad::First(value), 1), expected("a.weight"));
                }
            }
        }
    }
}

#[test]
fn too_many_steps_in_a_row_are_an_error() {
    for prepare in PREPARATIONS {
        let expected = (Some("b.weight".to_string()), Some(1), "an infinity".to_string(), 3);
        assert_eq!(error(3, &skip(2), prepare, Bad::Last(f64::INFINITY), 3), expected);
    }
}

#[test]
fn finite_gradients_with_an_infinite_mean_are_told_apart() {
    let fp16: fn(&Ddp) -> Result<()> = |ddp| ddp.register_comm_hook(Fp16Compress::default());
    let expected = (Some("b.weight".to_string()), None, "an infinity".to_string(), 1);
    assert_eq!(error(2, &small(stop()), fp16, Bad::Last(1e6), 1), expected);
    let text = Error::NonFinite { parameter: expected.0, rank: None, value: expected.2, steps: 1 }.to_string();
    assert!(text.contains("although the gradients of each rank are finite"), "{text}");
}

#[test]
fn shards_name_it_as_well() {
    for options in [stop(), small(stop())] {
        let errors = ranks(3, |pg| {
            let ddp = model(&pg, DdpOptions { sharding: Sharding::Optimizer { ranks: None }, ..options.clone() })?;
            let _optimizer = ZeroRedundancyOptimizer::new(&ddp, ParamsAdamW::default())?;
            let bad = if pg.rank() == 2 { Bad::First(f64::NAN) } else { Bad::Nothing };
            Ok(found(ddp.backward(&loss(&ddp, 0, bad)?).map(drop).unwrap_err()))
        });
        let expected = (Some("a.weight".to_string()), Some(2), "a NaN".to_string(), 1);
        assert_eq!(errors, vec![expected; 3]);
    }
}

/// Its gradients are zeros, so only the loss tells.
#[test]
fn a_mean_over_no_targets_is_an_error_on_all_ranks() {
    let prepare: [fn(&DistributedDataParallel<_>) -> Result<()>; 2] =
        [|_| Ok(()), |ddp| ddp.register_comm_hook(AllReduce::default())];
    for prepare in prepare {
        let errors = ranks(2, |pg| {
            let ddp = DistributedDataParallel::with_options(&pg, &VarMap::new(), |vb| linear(3, 4, vb), stop())?;
            prepare(&ddp)?;
            let class = if pg.rank() == 1 { -100i64 } else { 2 };
            let targets = Tensor::new(&[class, class], &Device::Cpu)?;
            let loss = cross_entropy(&ddp.forward(&tensor(&[2, 3], 1))?, &targets)?;
            Ok(ddp.backward(&loss).map(drop).unwrap_err())
        });
        for error in errors {
            assert!(error.to_string().contains("targets of a cross entropy are ignored"), "{error}");
            assert_eq!(found(error), (None, Some(1), "NaN".to_string(), 1));
        }
    }
}

/// Each rank is alone with its gradients, and with its error.
#[test]
fn a_local_hook_leaves_each_rank_alone() {
    let results = ranks(2, |pg| {
        let ddp = model(&pg, skip(1))?;
        ddp.register_comm_hook(Noop)?;
        let bad = if pg.rank() == 1 { Bad::Last(f64::NAN) } else { Bad::Nothing };
        drop(ddp.backward(&loss(&ddp, 0, bad)?)?);
        let second = ddp.backward(&loss(&ddp, 1, bad)?);
        Ok((ddp.skipped_steps(), second.map(drop).map_err(found).err()))
    });
    let error = Some((Some("b.weight".to_string()), Some(1), "a NaN".to_string(), 2));
    assert_eq!(results, [(0, None), (2, error)]);
}
