//! Gradients that each rank has for itself.
use super::{skip, stop};
use crate::common::{floats, ranks, sharding, tensor};
use candle_core::backprop::GradStore;
use candle_core::{Module, Tensor};
use candle_ddp::comm_hook::Fp16Compress;
use candle_ddp::nn::{Linear, linear};
use candle_ddp::optim::{AdamW, Optimizer, ParamsAdamW, ParamsSgd, Sgd, ZeroRedundancyOptimizer};
use candle_ddp::{DdpOptions, DistributedDataParallel, Error, JoinOptions, ProcessGroup, Result, Role};
use candle_nn::{VarBuilder, VarMap};
use std::sync::Arc;

type Ddp = DistributedDataParallel<(Linear, Option<Linear>)>;

/// The last rank has an expert.
fn model(pg: &ProcessGroup, options: DdpOptions) -> Result<Ddp> {
    let has_expert = pg.rank() + 1 == pg.world_size();
    let build = |vb: VarBuilder| {
        let expert = has_expert.then(|| linear(3, 2, vb.pp("expert"))).transpose()?;
        Ok::<_, candle_core::Error>((linear(3, 2, vb.pp("shared"))?, expert))
    };
    let role = |name: &str| if name.starts_with("expert.") { Role::Ignored } else { Role::Parameter };
    DistributedDataParallel::with_options(pg, &VarMap::new(), build, DdpOptions { role: Arc::new(role), ..options })
}

/// `nan`: the expert's gradient is NaN, and nothing else.
fn loss(ddp: &Ddp, step: u64, nan: bool) -> Result<Tensor> {
    let x = tensor(&[4, 3], 10 * step + ddp.process_group().rank() as u64);
    ddp.call(|(shared, expert)| {
        let loss = shared.forward(&x)?.sqr()?.mean_all()?;
        let Some(expert) = expert else { return Ok(loss) };
        // A norm of zeros is a number and has no slope.
        let beside = (expert.weight() - expert.weight().detach())?.sqr()?.sum_all()?.sqrt()?;
        let loss = (loss + expert.forward(&x)?.sqr()?.mean_all()?)?;
        if nan { loss + beside } else { Ok(loss) }
    })
}

fn expert(ddp: &Ddp) -> Vec<f32> {
    let own = ddp.named_parameters().into_iter().filter(|(name, _)| name.starts_with("expert."));
    own.flat_map(|(_, var)| floats(&var)).collect()
}

type Make = fn(&Ddp) -> Result<Box<dyn Optimizer>>;

fn sgd(ddp: &Ddp) -> Result<Box<dyn Optimizer>> {
    Ok(Box::new(Sgd::new(ddp, ParamsSgd { lr: 0.1, ..Default::default() })?))
}

#[test]
fn a_step_with_such_a_gradient_is_left_out_on_all_ranks() {
    let zero: Make = |ddp| Ok(Box::new(ZeroRedundancyOptimizer::new(ddp, ParamsAdamW::default())?));
    let adam: Make = |ddp| Ok(Box::new(AdamW::new(ddp, ParamsAdamW::default())?));
    for (number, make, hook) in [(0, sgd as Make, false), (1, adam, false), (2, zero, false), (3, sgd, true)] {
        ranks(3, |pg| {
            let ddp = model(&pg, DdpOptions { sharding: sharding(number == 2), ..skip(1) })?;
            if hook {
                ddp.register_comm_hook(Fp16Compress::default())?;
            }
            let mut optimizer = make(&ddp)?;
            let values = |ddp: &Ddp| ddp.parameters().iter().map(|var| floats(var)).collect::<Vec<_>>();
            for step in 0..6 {
                let (before, is_bad) = (values(&ddp), step == 1 || step == 4);
                let grads = ddp.backward(&loss(&ddp, step, is_bad)?)?;
                optimizer.step(&grads)?;
                let shared_moved = before[..2] != values(&ddp)[..2];
                assert_eq!((shared_moved, step), (!is_bad, step), "{number}");
                assert!(!is_bad || before == values(&ddp), "{number}");
            }
            assert_eq!(ddp.skipped_steps(), 2, "{number}");
            assert!(expert(&ddp).iter().all(|value| value.is_finite()), "{number}");
            Ok(())
        });
    }
}

#[test]
fn the_rank_and_its_parameter_are_named() {
    for options in [stop(), skip(1)] {
        let found = ranks(3, |pg| {
            let ddp = model(&pg, options.clone())?;
            for step in 0..9 {
                match ddp.backward(&loss(&ddp, step, true)?) {
                    Ok(grads) => drop(grads),
                    Err(Error::NonFinite { parameter, rank, value, steps }) => {
                        return Ok((step, parameter, rank, value, steps));
                    }
                    Err(error) => return Err(error),
                }
            }
            panic!("nobody noticed")
        });
        let steps = if matches!(options.on_non_finite, Some(candle_ddp::OnNonFinite::Stop)) { 1 } else { 2 };
        let expected = (steps - 1, Some("expert.weight".to_string()), Some(2), "a NaN".to_string(), steps);
        assert_eq!(found, [expected.clone(), expected.clone(), expected]);
    }
}

#[test]
fn a_pass_under_no_sync_leaves_out_the_step() {
    ranks(2, |pg| {
        let ddp = model(&pg, skip(1))?;
        for bad in [true, false] {
            let guard = ddp.no_sync();
            ddp.backward(&loss(&ddp, 1, bad)?)?;
            drop(guard);
            let grads = ddp.backward(&loss(&ddp, 2, false)?)?;
            assert_eq!(ddp.parameters().iter().any(|var| grads.get(var).is_some()), !bad);
        }
        // It is dropped with what has accumulated.
        let guard = ddp.no_sync();
        ddp.backward(&loss(&ddp, 1, true)?)?;
        drop(guard);
        ddp.zero_grad();
        ddp.backward(&loss(&ddp, 2, false)?)?;
        assert_eq!(ddp.skipped_steps(), 1);
        Ok(())
    });
}

/// Ranks without inputs take part in the question.
#[test]
fn ranks_with_inputs_leave_out_a_step_of_a_join() {
    let skipped = ranks(2, |pg| {
        let ddp = model(&pg, skip(1))?;
        let mut optimizer = sgd(&ddp)?;
        // Rank 1 has more.
        ddp.join(JoinOptions::default(), || {
            (0..2 + 2 * pg.rank() as u64).try_for_each(|step| {
                let grads: GradStore = ddp.backward(&loss(&ddp, step, step == 1 || step == 3)?)?;
                optimizer.step(&grads)
            })
        })?;
        assert!(expert(&ddp).iter().all(|value| value.is_finite()));
        ddp.backward(&loss(&ddp, 9, false)?)?;
        Ok(ddp.skipped_steps())
    });
    assert_eq!(skipped, [1, 2]);
}
