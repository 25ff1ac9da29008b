//! Programs that choose their optimizer at run time.
use crate::common::{assert_close, buckets, filled, floats, ranks, sharding, tensor};
use candle_core::Module;
use candle_ddp::amp::{GradScaler, GradScalerOptions};
use candle_ddp::checkpoint::StateDict;
use candle_ddp::optim::{
    AdamW, Lamb, LrScheduler, Optimizer, ParameterGroup, ParamsAdamW, ParamsLamb, ParamsReduceLrOnPlateau, ParamsSgd,
    ParamsStepLr, ParamsWarmupCosine, ReduceLrOnPlateau, Schedule, Scheduler, Sgd, StepLr, ZeroRedundancyOptimizer,
};
use candle_ddp::{DdpOptions, DistributedDataParallel, Error, ProcessGroup, Result};
use candle_nn::{Linear, VarBuilder, linear};
use std::path::Path;

type Ddp = DistributedDataParallel<[Linear; 2]>;

fn wrap(pg: &ProcessGroup, kind: &str) -> Result<Ddp> {
    let net = |vb: VarBuilder| Ok::<_, Error>([linear(5, 7, vb.pp("a"))?, linear(7, 3, vb.pp("b"))?]);
    let buckets = buckets(0.0001, 0.0001);
    let options = DdpOptions { sharding: sharding(kind == "zero"), buckets, ..Default::default() };
    Ok(filled(pg, net, options, 1)?.0)
}

fn choose(kind: &str, ddp: &Ddp) -> Result<Box<dyn Optimizer>> {
    let (named, adamw) = (ddp.named_parameters(), ParamsAdamW { lr: 0.02, ..Default::default() });
    let (biases, weights) = named.iter().cloned().partition::<Vec<_>, _>(|(name, _)| name.ends_with("bias"));
    let biases = ParameterGroup { parameters: biases, options: ParamsAdamW { lr: 0.01, ..adamw.clone() } };
    let groups = vec![ParameterGroup { parameters: weights, options: adamw }, biases];
    Ok(match kind {
        "zero" => Box::new(ZeroRedundancyOptimizer::from_groups(groups)?),
        "adamw" => Box::new(AdamW::from_groups(groups)?),
        "sgd" => Box::new(Sgd::new(named, ParamsSgd { lr: 0.02, ..Default::default() })?),
        _ => Box::new(Lamb::new(named, ParamsLamb { lr: 0.02, ..Default::default() })?),
    })
}

/// Trains for the steps `steps`, with a schedule, a scaler and clipping.
fn train(pg: &ProcessGroup, ddp: &Ddp, optimizer: &mut Box<dyn Optimizer>, steps: std::ops::Range<u64>) -> Result<()> {
    let mut schedule = StepLr::new(optimizer, ParamsStepLr { step_size: 1, gamma: 0.9 })?;
    let options = GradScalerOptions { init_scale: 8., ..Default::default() };
    let mut scaler = GradScaler::new(pg, ddp, options)?;
    for step in steps {
        let x = tensor(&[4, 5], 10 * step + pg.rank() as u64);
        let loss = ddp.call(|[a, b]| b.forward(&a.forward(&x)?.tanh()?)?.sqr()?.mean_all())?;
        let mut grads = ddp.backward(&scaler.scale(&loss)?)?;
        if step % 2 == 0 {
            optimizer.unscale(&mut scaler, &mut grads)?;
            assert!(optimizer.clip_grad_norm(&mut grads, 1e-3)?.to_scalar::<f64>()? > 1e-3);
        }
        scaler.step(optimizer, &mut grads)?;
        scaler.update()?;
        schedule.step(optimizer)?;
    }
    Ok(())
}

#[test]
fn sharded_and_plain_optimizers_share_a_trait_and_files_and_train_alike() {
    let folder = tempfile::tempdir().unwrap();
    let found = ranks(2, |pg| {
        let mut trained = Vec::new();
        for (first, second) in [("adamw", "adamw"), ("zero", "zero"), ("adamw", "zero"), ("zero", "adamw")] {
            let file = folder.path().join(format!("{first}-{second}"));
            let ddp = wrap(&pg, first)?;
            let mut optimizer = choose(first, &ddp)?;
            train(&pg, &ddp, &mut optimizer, 0..3)?;
            optimizer.save_distributed(&pg, &file)?;
            let trained_first = ddp.parameters();
            let ddp = wrap(&pg, second)?;
            ddp.parameters().iter().zip(&trained_first).try_for_each(|(var, trained)| var.set(trained))?;
            let mut optimizer = choose(second, &ddp)?;
            optimizer.load_distributed(&pg, &file)?;
            let rates: Vec<f32> = optimizer.learning_rates().iter().map(|rate| *rate as f32).collect();
            assert_close(&rates, &[0.02 * 0.729, 0.01 * 0.729], 1e-6, "learning rates");
            train(&pg, &ddp, &mut optimizer, 3..6)?;
            trained.push(ddp.parameters().iter().flat_map(|var| floats(var)).collect::<Vec<_>>());
        }
        Ok(trained)
    });
    for rank in found {
        for other in &rank[1..] {
            assert_close(other, &rank[0], 1e-6, "weights");
        }
    }
}

#[test]
fn every_optimizer_has_learning_rates_a_state_and_a_step() {
    ranks(2, |pg| {
        for kind in ["zero", "adamw", "sgd", "lamb"] {
            let ddp = wrap(&pg, kind)?;
            let mut optimizer = choose(kind, &ddp)?;
            let before = floats(&ddp.parameters()[0]);
            let mut plateau =
                ReduceLrOnPlateau::new(ParamsReduceLrOnPlateau { patience: 0, factor: 0.5, ..Default::default() })?;
            assert!(!plateau.step(&mut optimizer, 1.)? && plateau.step(&mut *optimizer, 2.)?);
            assert_eq!(optimizer.learning_rate(), 0.01, "{kind}");
            optimizer.set_learning_rate(0.5)?;
            assert!(optimizer.learning_rates().iter().all(|rate| *rate == 0.5));
            assert!(optimizer.set_learning_rate(-1.).is_err() && optimizer.set_learning_rates(&[]).is_err());

            let loss = ddp.call(|[a, b]| b.forward(&a.forward(&tensor(&[4, 5], 3))?)?.sqr()?.mean_all())?;
            optimizer.step(&ddp.backward(&loss)?)?;
            assert_ne!(floats(&ddp.parameters()[0]), before, "{kind}");
            // All ranks have the whole state, under the parameters' names.
            let state = optimizer.state_dict()?;
            assert!(state.contains_key("state.a.weight.step"), "{kind}: {:?}", state.keys());
            optimizer.set_learning_rate(0.25)?;
            optimizer.load_state_dict(&state)?;
            assert_eq!(optimizer.learning_rate(), 0.5);
        }
        Ok(())
    });
}

#[test]
fn a_file_that_does_not_fit_is_refused_on_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let path = |rank: usize| folder.path().join(format!("{rank}"));
    let errors = ranks(2, |pg| {
        let ddp = wrap(&pg, "adamw")?;
        let mut optimizer = choose("adamw", &ddp)?;
        optimizer.save(path(pg.rank()))?;
        if pg.rank() == 1 {
            std::fs::write(path(1), b"not a state").unwrap();
        }
        pg.barrier()?;
        Ok(optimizer.load_distributed(&pg, Path::new(&path(pg.rank()))).unwrap_err().to_string())
    });
    assert!(errors[0].starts_with("rank 1 failed") && errors[0].contains("safetensors"), "{}", errors[0]);
    assert!(errors[1].contains("is not a safetensors file"), "{}", errors[1]);
}

/// Schedules that are chosen at run time: their rates, and their state.
#[test]
fn schedules_and_schedulers_can_be_stored() {
    let sgd = || Sgd::new(Vec::<candle_core::Var>::new(), ParamsSgd { lr: 0.8, ..Default::default() }).unwrap();
    let mut optimizer = sgd();
    let step = ParamsStepLr { step_size: 1, gamma: 0.5 };
    let chosen: Vec<Box<dyn Schedule>> = vec![Box::new(step.clone()), Box::new(ParamsWarmupCosine::default())];
    assert_eq!(chosen.iter().map(|schedule| schedule.name()).collect::<Vec<_>>(), ["StepLr", "WarmupCosine"]);
    let first = chosen.into_iter().next().unwrap();
    let mut schedulers: Vec<Box<dyn Scheduler>> = vec![
        Box::new(LrScheduler::new(&mut optimizer, first).unwrap()),
        Box::new(
            ReduceLrOnPlateau::new(ParamsReduceLrOnPlateau { patience: 0, factor: 0.25, ..Default::default() })
                .unwrap(),
        ),
    ];
    let mut rates = Vec::new();
    for loss in [1.0, 2.0] {
        let mut optimizer = sgd();
        for scheduler in &mut schedulers {
            scheduler.step_by(&mut optimizer, loss).unwrap();
            rates.push(optimizer.learning_rate());
        }
    }
    assert_eq!(rates, [0.4, 0.4, 0.2, 0.05]);
    // A boxed schedule has the state of the schedule itself.
    let mut loaded = LrScheduler::new(&mut sgd(), step).unwrap();
    loaded.load_state_dict(&schedulers[0].state_dict().unwrap()).unwrap();
    assert_eq!(loaded.learning_rates(), [0.2]);
}
