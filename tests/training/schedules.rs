//! Schedules that are resumed by a program which makes them with other options.
use candle_core::{Device, Tensor};
use candle_ddp::checkpoint::StateDict;
use candle_ddp::optim::{
    Anneal, LrScheduler, Optimizer, ParamsCosineAnnealingLr, ParamsMultiStepLr, ParamsOneCycleLr,
    ParamsReduceLrOnPlateau, ParamsSgd, ParamsStepLr, ParamsWarmupCosine, PlateauMode, ReduceLrOnPlateau, Schedule,
    Sgd, Threshold,
};
use candle_ddp::{Error, Result};
use std::collections::HashMap;

const SAVED: usize = 7;

fn sgd() -> Sgd {
    Sgd::new(Vec::<candle_core::Var>::new(), ParamsSgd { lr: 0.1, ..Default::default() }).unwrap()
}

fn rates<S: Schedule>(schedule: &mut LrScheduler<S>, steps: usize) -> Vec<f64> {
    let mut next = || {
        let rates = schedule.learning_rates();
        schedule.advance();
        rates[0]
    };
    (0..steps).map(|_| next()).collect()
}

/// The state of earlier versions had no options.
fn earlier(mut state: HashMap<String, Tensor>) -> HashMap<String, Tensor> {
    state.retain(|key, _| !key.starts_with("option.") && key != "rates");
    state
}

fn goes_on<S: Schedule + Clone>(saved: S, now: S) {
    let name = saved.name();
    let mut whole = LrScheduler::new(&mut sgd(), saved).unwrap();
    let expected = rates(&mut whole.clone(), 3 * SAVED);
    rates(&mut whole, SAVED);
    let state = whole.state_dict().unwrap();
    let mut resumed = LrScheduler::new(&mut sgd(), now.clone()).unwrap();
    resumed.load_state_dict(&state).unwrap();
    assert_eq!(rates(&mut resumed, 2 * SAVED), expected[SAVED..], "{name}");
    // And saves the options with which it continues.
    assert_eq!(state.keys().len(), resumed.state_dict().unwrap().keys().len(), "{name}");

    let mut other = LrScheduler::new(&mut sgd(), now.clone()).unwrap();
    let before = other.learning_rates();
    let mut torn = state.clone();
    let key = torn.keys().filter(|key| key.starts_with("option.")).min().unwrap().clone();
    torn.insert(key, Tensor::new(&[-1f64, -1.], &Device::Cpu).unwrap());
    assert!(other.load_state_dict(&torn).is_err(), "{name}");
    assert_eq!(other.learning_rates(), before, "{name}");
    other.load_state_dict(&earlier(state)).unwrap();
    let mut expected = LrScheduler::new(&mut sgd(), now).unwrap();
    rates(&mut expected, SAVED);
    assert_eq!(rates(&mut other, SAVED), rates(&mut expected, SAVED), "{name}");
}

#[test]
fn a_resumed_schedule_has_the_options_it_was_saved_with() {
    goes_on(ParamsStepLr { step_size: 3, gamma: 0.5 }, ParamsStepLr { step_size: 6, gamma: 0.25 });
    goes_on(
        ParamsMultiStepLr { milestones: vec![3, 9], gamma: 0.5 },
        ParamsMultiStepLr { milestones: vec![6, 18, 30], gamma: 0.5 },
    );
    goes_on(ParamsCosineAnnealingLr { t_max: 10, eta_min: 0.01 }, ParamsCosineAnnealingLr { t_max: 20, eta_min: 0. });
    let cosine = ParamsWarmupCosine { warmup_steps: 2, total_steps: 10, start_factor: 0.1, eta_min: 0.001 };
    goes_on(cosine, ParamsWarmupCosine { warmup_steps: 4, total_steps: 20, ..Default::default() });
    let cycle = ParamsOneCycleLr { total_steps: 20, ..Default::default() };
    let linear =
        ParamsOneCycleLr { total_steps: 40, anneal_strategy: Anneal::Linear, three_phase: true, ..Default::default() };
    goes_on(cycle.clone(), linear.clone());
    goes_on(linear, cycle);
}

#[test]
fn options_that_are_none_change_nothing() {
    for wrong in [0f64, -1., f64::NAN] {
        let (mut state, mut schedule) = (schedule().state_dict().unwrap(), schedule());
        state.insert("option.step_size".to_string(), Tensor::new(&[wrong], &Device::Cpu).unwrap());
        state.insert("option.gamma".to_string(), Tensor::new(&[0.25f64], &Device::Cpu).unwrap());
        assert!(schedule.load_state_dict(&state).is_err(), "{wrong}");
        let mut expected = self::schedule();
        assert_eq!(rates(&mut schedule, 9), rates(&mut expected, 9));
    }
}

fn schedule() -> LrScheduler<ParamsStepLr> {
    LrScheduler::new(&mut sgd(), ParamsStepLr { step_size: 3, gamma: 0.5 }).unwrap()
}

/// A boxed schedule has the options of what is in it.
#[test]
fn a_boxed_schedule_goes_on_as_well() {
    let boxed =
        |total_steps| -> Box<dyn Schedule> { Box::new(ParamsWarmupCosine { total_steps, ..Default::default() }) };
    let mut saved = LrScheduler::new(&mut sgd(), boxed(10)).unwrap();
    rates(&mut saved, SAVED);
    let mut resumed = LrScheduler::new(&mut sgd(), boxed(20)).unwrap();
    resumed.load_state_dict(&saved.state_dict().unwrap()).unwrap();
    assert_eq!(rates(&mut resumed, SAVED), rates(&mut saved, SAVED));
}

#[test]
fn a_plateau_goes_on_with_its_options() -> Result<()> {
    let saved = ParamsReduceLrOnPlateau {
        mode: PlateauMode::Max,
        factor: 0.5,
        patience: 1,
        threshold: Threshold::Absolute(0.1),
        ..Default::default()
    };
    let metric = |step: usize| [1., 2., 2.05, 2.06, 2.07, 2.08, 3., 3.05, 3.06, 3.07, 3.08, 3.09][step];
    let run = |schedule: &mut ReduceLrOnPlateau, optimizer: &mut Sgd, steps: std::ops::Range<usize>| {
        let mut rates = Vec::new();
        for step in steps {
            schedule.step(optimizer, metric(step))?;
            rates.push(optimizer.learning_rate());
        }
        Ok::<_, Error>(rates)
    };
    let (mut whole, mut optimizer) = (ReduceLrOnPlateau::new(saved.clone())?, sgd());
    run(&mut whole, &mut optimizer, 0..3)?;
    let state = whole.state_dict()?;
    let (mut resumed, mut same) = (ReduceLrOnPlateau::new(Default::default())?, sgd());
    same.set_learning_rate(optimizer.learning_rate())?;
    resumed.load_state_dict(&state)?;
    assert_eq!(run(&mut resumed, &mut same, 3..12)?, run(&mut whole, &mut optimizer, 3..12)?);
    assert!(optimizer.learning_rate() < 0.1);
    let mut other = ReduceLrOnPlateau::new(saved)?;
    other.load_state_dict(&earlier(state))
}
