//! Parameters without a gradient are an error on all ranks, unless the program allows them.
use crate::common::{of_zero, ranks, try_ranks};
use candle_core::{DType, Module, Tensor};
use candle_ddp::comm_hook::{CommHook, Fp16Compress, Noop};
use candle_ddp::optim::{ParamsAdamW, ZeroRedundancyOptimizer};
use candle_ddp::{DdpOptions, DistributedDataParallel, Error, Failure, ProcessGroup, Result, Unused, nn};
use candle_nn::{Linear, VarBuilder, VarMap, linear};
use std::sync::Arc;

type Ddp = DistributedDataParallel<[Linear; 3]>;

fn layers(vb: VarBuilder) -> candle_core::Result<[Linear; 3]> {
    let layer = |name: &str| linear(4, 4, vb.pp(name));
    Ok([layer("first")?, layer("second")?, layer("third")?])
}

fn wrap(pg: &ProcessGroup, unused: Unused) -> Result<Ddp> {
    let options = DdpOptions { unused, ..Default::default() };
    DistributedDataParallel::with_options(pg, &VarMap::new(), layers, options)
}

fn only(prefix: &'static str) -> Unused {
    Unused::AllowNames(Arc::new(move |name| name.starts_with(prefix)))
}

/// Runs a backward pass through these layers; through none, of a constant.
fn step(ddp: &Ddp, layers: &[usize]) -> Result<()> {
    let x = Tensor::ones((2, 4), DType::F32, ddp.process_group().device())?;
    let y = ddp.call(|net| layers.iter().try_fold(x, |x, layer| net[*layer].forward(&x)))?;
    ddp.backward(&y.sqr()?.mean_all()?).map(drop)
}

/// Asserts that `result` names these parameters, which no rank used.
#[track_caller]
fn assert_unused(result: Result<()>, expected: &[&str]) {
    match result {
        Err(Error::UnusedParameters { rank: None, unused, total: 6 }) => assert_eq!(unused, expected),
        other => panic!("{other:?}"),
    }
}

const THIRD: [&str; 2] = ["third.weight", "third.bias"];

#[test]
fn parameters_that_no_rank_used_are_an_error_on_all_ranks() {
    for world_size in [1, 2, 3] {
        ranks(world_size, |pg| {
            let ddp = wrap(&pg, Unused::Refuse)?;
            // It remains one until all are used. The group remains usable.
            for _ in 0..2 {
                assert_unused(step(&ddp, &[pg.rank() % 2, 0, 1]), &THIRD);
                pg.barrier()?;
            }
            // One rank is enough, and the next passes are free.
            step(&ddp, if pg.rank() == 0 { &[0, 1, 2] } else { &[1] })?;
            step(&ddp, &[0])
        });
    }
}

#[test]
fn gradients_accumulated_before_count() {
    ranks(2, |pg| {
        let ddp = wrap(&pg, Unused::Refuse)?;
        {
            let _guard = ddp.no_sync();
            step(&ddp, &[2])?;
        }
        step(&ddp, &[0, 1])?;
        step(&ddp, &[0])
    });
}

#[test]
fn the_program_may_allow_them() {
    ranks(2, |pg| {
        step(&wrap(&pg, Unused::Allow)?, &[0])?;
        step(&wrap(&pg, only("third."))?, &[0, 1])?;
        assert_unused(step(&wrap(&pg, only("second."))?, &[0, 1]), &THIRD);
        Ok(())
    });
    // Otherwise some ranks would continue, and others not.
    let error = try_ranks(2, |pg| wrap(&pg, if pg.rank() == 0 { Unused::Refuse } else { only("third.") }).map(drop));
    let error = error.unwrap_err();
    assert!(matches!(&error, Error::Mismatch { what: "model", rank: 1, .. }), "{error}");
    assert!(error.to_string().contains("third.weight f32[4, 4], may be unused"), "{error}");
}

#[test]
fn hooks_and_shards_know_of_them() {
    fn with_hook(hook: impl CommHook + Copy + Sync, check: fn(Result<()>)) {
        ranks(2, |pg| {
            let ddp = wrap(&pg, Unused::Refuse)?;
            ddp.register_comm_hook(hook)?;
            check(step(&ddp, &[pg.rank()]));
            Ok(())
        });
    }
    with_hook(Fp16Compress::default(), |result| assert_unused(result, &THIRD));
    // Ranks do not know which parameters the others used.
    with_hook(Noop, |result| result.unwrap());
    ranks(2, |pg| {
        let ddp = DistributedDataParallel::with_options(&pg, &VarMap::new(), layers, of_zero())?;
        let optimizer = ZeroRedundancyOptimizer::new(&ddp, ParamsAdamW::default())?;
        assert_unused(step(&ddp, &[pg.rank()]), &THIRD);
        drop(optimizer);
        Ok(())
    });
}

/// As after a `detach`, or with candle_nn's fused layers below the whole model.
#[test]
fn a_loss_that_depends_on_no_parameter_is_an_error_on_all_ranks() {
    let text = "6 of 6 parameters get no gradient on rank 1: first.weight, ";
    for first_is_complete in [true, false] {
        let results = ranks(3, |pg| {
            // The end of the group may overtake the other ranks' earlier work.
            let run = || {
                let ddp = wrap(&pg, Unused::Refuse)?;
                if first_is_complete {
                    step(&ddp, &[0, 1, 2])?;
                }
                step(&ddp, if pg.rank() == 1 { &[] } else { &[0, 1, 2] })
            };
            Ok(run().unwrap_err())
        });
        for (rank, error) in results.iter().enumerate() {
            match error {
                Error::UnusedParameters { rank: Some(1), total: 6, .. } if rank == 1 => {}
                Error::Group(Failure::PeerFailed { peer: 1, reason }) if rank != 1 => {
                    assert!(reason.starts_with(text), "{reason}");
                }
                other => panic!("rank {rank}: {other:?}"),
            }
            assert!(error.to_string().contains(text), "{error}");
        }
    }
    ranks(1, |pg| {
        let ddp = wrap(&pg, Unused::Refuse)?;
        assert!(step(&ddp, &[]).is_err());
        {
            let _guard = ddp.no_sync();
            assert!(step(&ddp, &[]).is_err());
        }
        step(&ddp, &[0, 1, 2])?;
        step(&wrap(&pg, Unused::Allow)?, &[])
    });
}

#[test]
fn layers_that_end_the_graph_are_noticed() {
    for (ours, expected) in [(false, Some(4)), (true, None)] {
        ranks(2, |pg| {
            let build = |vb: VarBuilder| {
                let norm: Box<dyn Module> = match ours {
                    true => Box::new(nn::layer_norm(4, 1e-5, vb.pp("norm"))?),
                    false => Box::new(candle_nn::layer_norm(4, 1e-5, vb.pp("norm"))?),
                };
                Ok::<_, candle_core::Error>((linear(4, 4, vb.pp("fc"))?, norm, linear(4, 1, vb.pp("head"))?))
            };
            let ddp = DistributedDataParallel::new(&pg, &VarMap::new(), build)?;
            let x = Tensor::ones((2, 4), DType::F32, pg.device())?;
            let y = ddp.call(|(fc, norm, head)| head.forward(&norm.forward(&fc.forward(&x)?)?))?;
            match (ddp.backward(&y.sqr()?.mean_all()?), expected) {
                (Err(Error::UnusedParameters { rank: None, unused, .. }), Some(expected)) => {
                    assert_eq!(unused.len(), expected);
                }
                (Ok(_), None) => {}
                (other, _) => panic!("{:?}", other.map(drop)),
            }
            Ok(())
        });
    }
}

/// The list of a large model's names is shortened.
#[test]
fn many_names_are_told_by_their_beginnings() {
    let mut unused = vec!["pooler.weight".to_string(), "pooler.bias".to_string()];
    for layer in 0..12 {
        unused.extend(["q", "k", "v"].map(|name| format!("encoder.layer.{layer}.{name}.weight")));
    }
    let text = Error::UnusedParameters { rank: Some(3), unused: unused.clone(), total: 40 }.to_string();
    let expected =
        "38 of 40 parameters get no gradient on rank 3: pooler.weight, pooler.bias, encoder.layer.* (36). Either";
    assert!(text.starts_with(expected), "{text}");
    unused.truncate(6);
    let text = Error::UnusedParameters { rank: None, unused, total: 40 }.to_string();
    assert!(text.contains("encoder.layer.0.v.weight, encoder.layer.1.q.weight. Either"), "{text}");
}
