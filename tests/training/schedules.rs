//! Schedules that are resumed by a program which makes them with other options, or for a run of another length.
use crate::common::{assert_error, going_on, ranks};
use candle_core::{Device, Tensor};
use candle_ddp::checkpoint::{Checkpointer, CheckpointerOptions, StateDict};
use candle_ddp::optim::{
    Anneal, LrScheduler, OnOtherLength, Optimizer, ParamsCosineAnnealingLr, ParamsMultiStepLr, ParamsOneCycleLr,
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

fn made<S: Schedule>(schedule: S, on_other_length: OnOtherLength) -> LrScheduler<S> {
    LrScheduler::new(&mut sgd(), schedule).unwrap().on_other_length(on_other_length)
}

/// The state of `schedule` after `steps` steps.
fn saved(schedule: impl Schedule, steps: usize) -> HashMap<String, Tensor> {
    let mut schedule = LrScheduler::new(&mut sgd(), schedule).unwrap();
    rates(&mut schedule, steps);
    schedule.state_dict().unwrap()
}

fn goes_on<S: Schedule + Clone>(saved: S, now: S) {
    let name = saved.name();
    let mut whole = LrScheduler::new(&mut sgd(), saved).unwrap();
    let expected = rates(&mut whole.clone(), 3 * SAVED);
    rates(&mut whole, SAVED);
    let state = whole.state_dict().unwrap();
    let mut refused = LrScheduler::new(&mut sgd(), now.clone()).unwrap();
    let error = refused.load_state_dict(&state).unwrap_err();
    assert!(matches!(&error, Error::OtherLength { schedule, .. } if *schedule == name), "{error}");
    assert_eq!(rates(&mut refused, SAVED), rates(&mut LrScheduler::new(&mut sgd(), now.clone()).unwrap(), SAVED));
    let mut resumed = made(now.clone(), OnOtherLength::Keep);
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
fn a_resumed_schedule_has_the_options_it_was_saved_with_and_keeps_its_length_if_it_is_told_to() {
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
    let state = saved.state_dict().unwrap();
    assert!(made(boxed(20), OnOtherLength::Error).load_state_dict(&state).is_err());
    let mut resumed = made(boxed(20), OnOtherLength::Keep);
    resumed.load_state_dict(&state).unwrap();
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

#[test]
fn the_error_names_both_lengths_and_the_choices() {
    let cosine = |warmup_steps, total_steps| ParamsWarmupCosine { warmup_steps, total_steps, ..Default::default() };
    let state = saved(cosine(40, 400), 7);
    let error = made(cosine(80, 800), OnOtherLength::Error).load_state_dict(&state).unwrap_err();
    let Error::OtherLength { option, saved, made: now, .. } = &error else { panic!("{error}") };
    assert_eq!((*option, &saved[..], &now[..]), ("total_steps", &[400][..], &[800][..]));
    for part in ["WarmupCosine", "total_steps 400", "makes it with 800", "Keep", "Stretch", "OnOtherLength::New"] {
        assert!(error.to_string().contains(part), "{part}: {error}");
    }
    // A warm-up alone is a length as well, and so are milestones.
    let error = made(cosine(80, 400), OnOtherLength::Error).load_state_dict(&state);
    assert_error(error, &["warmup_steps 40", "makes it with 80"]);
    let steps = |milestones: &[u64]| ParamsMultiStepLr { milestones: milestones.to_vec(), gamma: 0.1 };
    let error = made(steps(&[6, 9]), OnOtherLength::Error).load_state_dict(&self::saved(steps(&[3, 9]), 1));
    assert_error(error, &["milestones [3, 9]", "makes it with [6, 9]"]);
}

/// The rates from the resumption on, with either of the choices that have the program's length.
fn follows<S: Schedule + Clone>(schedules: [S; 2], steps: usize, [stretched, new]: [usize; 2]) {
    let [before, now] = schedules;
    let name = before.name();
    let state = saved(before, steps);
    let all = rates(&mut LrScheduler::new(&mut sgd(), now.clone()).unwrap(), 300);
    for (choice, step) in [(OnOtherLength::Stretch, stretched), (OnOtherLength::New, new)] {
        let mut resumed = made(now.clone(), choice);
        resumed.load_state_dict(&state).unwrap();
        let again = resumed.state_dict().unwrap();
        assert_eq!(rates(&mut resumed, 300 - step), all[step..], "{name}, {choice:?}");
        // The next resumption finds the program's length.
        let mut again_resumed = made(now.clone(), OnOtherLength::Error);
        again_resumed.load_state_dict(&again).unwrap();
        assert_eq!(again_resumed.learning_rates(), [all[step]], "{name}, {choice:?}");
    }
}

#[test]
fn a_stretched_schedule_goes_on_where_the_same_fraction_is_done_and_a_new_one_at_the_same_step() {
    let step = |step_size| ParamsStepLr { step_size, gamma: 0.5 };
    follows([step(30), step(60)], 45, [90, 45]);
    let steps = |milestones: &[u64]| ParamsMultiStepLr { milestones: milestones.to_vec(), gamma: 0.5 };
    follows([steps(&[60, 20]), steps(&[80, 240])], 30, [120, 30]);
    let cosine = |t_max| ParamsCosineAnnealingLr { t_max, eta_min: 0.01 };
    follows([cosine(200), cosine(100)], 50, [25, 50]);
    // In whole steps: 7 of 20 are 10.5 of 30.
    follows([cosine(20), cosine(30)], 7, [11, 7]);
    let warm = |warmup_steps, total_steps| ParamsWarmupCosine { warmup_steps, total_steps, ..Default::default() };
    follows([warm(10, 100), warm(20, 200)], 5, [10, 5]);
    // With the same length, another warm-up leaves the step as it is.
    follows([warm(10, 100), warm(20, 100)], 5, [5, 5]);
    let cycle = |total_steps| ParamsOneCycleLr { total_steps, ..Default::default() };
    follows([cycle(50), cycle(250)], 50, [250, 50]);
    // Without a length, nothing can be stretched.
    follows([steps(&[]), steps(&[40])], 9, [9, 9]);
}

/// A schedule of the program's own.
#[derive(Clone)]
struct Falling(u64);

impl Schedule for Falling {
    fn name(&self) -> &'static str {
        "Falling"
    }

    fn check(&self) -> Result<()> {
        Ok(())
    }

    fn learning_rate(&self, base: f64, step: u64) -> f64 {
        base * (1. - step as f64 / self.0 as f64)
    }

    fn length(&self) -> Option<u64> {
        Some(self.0)
    }
}

#[test]
fn a_programs_own_schedule_with_a_length_follows_the_same_rule() {
    let state = saved(Falling(20), 5);
    let error = made(Falling(40), OnOtherLength::Error).load_state_dict(&state);
    assert_error(error, &["Falling", "length 20", "makes it with 40"]);
    assert_error(made(Falling(40), OnOtherLength::Keep).load_state_dict(&state), &["on_other_length", "length, 20"]);
    follows([Falling(20), Falling(40)], 5, [10, 5]);
    let mut same = made(Falling(20), OnOtherLength::Error);
    same.load_state_dict(&state).unwrap();
    assert_eq!(rates(&mut same, 1), [0.1 * (1. - 5. / 20.)]);
}

/// An epoch of 24 batches: half of the first of two epochs is done, on two ranks.
#[test]
fn a_run_that_is_resumed_on_more_ranks_gets_the_error_everywhere_or_goes_on_as_it_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let schedule = |world_size: usize, choice| {
        made(ParamsCosineAnnealingLr { t_max: 2 * 24 / world_size as u64, eta_min: 0. }, choice)
    };
    ranks(2, |pg| {
        let mut schedule = schedule(2, OnOtherLength::Error);
        rates(&mut schedule, 6);
        let mut checkpointer = Checkpointer::new(&pg, folder.path(), CheckpointerOptions::default())?;
        checkpointer.save(6, (("first", &mut 6.), ("schedule", &mut schedule)))?.wait()?;
        Ok(())
    });
    let rates = ranks(3, |pg| {
        let mut checkpointer = going_on(&pg, folder.path())?;
        let (mut first, mut refused) = (1., schedule(3, OnOtherLength::Error));
        let error = checkpointer.load_latest((("first", &mut first), ("schedule", &mut refused))).unwrap_err();
        let Error::CheckpointPart { part, error, .. } = error else { panic!("{error}") };
        assert!(part == "schedule" && matches!(*error, Error::OtherLength { .. }), "rank {}: {error}", pg.rank());
        assert_eq!((first, refused.learning_rates()), (1., vec![0.1]));
        let [keep, stretch, new] = [OnOtherLength::Keep, OnOtherLength::Stretch, OnOtherLength::New].map(|choice| {
            let mut schedule = schedule(3, choice);
            checkpointer.load_latest(("schedule", &mut schedule)).unwrap();
            schedule.learning_rates()[0]
        });
        Ok([keep, stretch, new])
    });
    let of_steps = |step: u64, of| ParamsCosineAnnealingLr { t_max: of, eta_min: 0. }.learning_rate(0.1, step);
    assert_eq!(rates, [[of_steps(6, 24), of_steps(4, 16), of_steps(6, 16)]; 3]);
    assert_eq!(of_steps(6, 24), of_steps(4, 16));
}
