//! Schedules of runs whose length changes with the number of ranks.
use super::entrance;
use crate::Error;
use crate::elastic::State;
use crate::elastic::synchronise::synchronise;
use crate::optim::{CosineAnnealingLr, OnOtherLength, ParamsCosineAnnealingLr, ParamsSgd, Sgd};
use crate::process_group::spawn;
use crate::state::{Parts, StateDict};

struct Training(CosineAnnealingLr);

impl Parts for Training {
    fn parts(&mut self) -> Vec<(&str, &mut dyn StateDict)> {
        vec![("schedule", &mut self.0)]
    }
}

fn schedule(t_max: u64, choice: OnOtherLength) -> CosineAnnealingLr {
    let mut optimizer = Sgd::new(Vec::<candle_core::Var>::new(), ParamsSgd { lr: 0.1, ..Default::default() }).unwrap();
    let schedule = CosineAnnealingLr::new(&mut optimizer, ParamsCosineAnnealingLr { t_max, eta_min: 0. }).unwrap();
    schedule.on_other_length(choice)
}

/// The learning rate of a schedule of that length in that step.
fn rate(step: u64, t_max: u64) -> Vec<f64> {
    let mut schedule = schedule(t_max, OnOtherLength::Error);
    (0..step).for_each(|_| schedule.advance());
    schedule.learning_rates()
}

fn state(t_max: u64, choice: OnOtherLength) -> State<Training> {
    let mut state = State::new(Training(schedule(t_max, choice)));
    state.commit_first().unwrap();
    state
}

const CHOICES: [OnOtherLength; 4] =
    [OnOtherLength::Error, OnOtherLength::Keep, OnOtherLength::Stretch, OnOtherLength::New];

/// The process that takes a dead one's place counts other ranks than the run began with.
#[test]
fn a_schedule_of_the_state_keeps_the_length_with_which_the_run_began() {
    for choice in CHOICES {
        let rates = spawn(3, |pg| {
            let is_new = pg.rank() == 1;
            let mut state = state(if is_new { 90 } else { 60 }, choice);
            if !is_new {
                (0..20).for_each(|_| state.0.advance());
                state.commit()?;
            }
            synchronise(&mut state, &pg, entrance(is_new))?;
            state.0.advance();
            state.commit()?;
            Ok(state.0.learning_rates())
        });
        assert_eq!(rates.unwrap(), [rate(21, 60), rate(21, 60), rate(21, 60)], "{choice:?}");
    }
}

/// `train` makes it again for each group.
#[test]
fn a_schedule_of_a_group_keeps_the_committed_length_unless_it_is_told_otherwise() {
    for (choice, expected) in CHOICES.into_iter().zip([rate(20, 60), rate(20, 60), rate(30, 90), rate(20, 90)]) {
        let rates = spawn(2, |pg| {
            let mut state = State::new(Training(schedule(1, OnOtherLength::Error)));
            let mut of_four = schedule(60, choice);
            (0..20).for_each(|_| of_four.advance());
            state.commit_including(("of group", &mut of_four))?;
            synchronise(&mut state, &pg, entrance(false))?;
            let mut of_two = schedule(90, choice);
            assert!(state.restore("of group", &mut of_two)?);
            Ok(of_two.learning_rates())
        });
        assert_eq!(rates.unwrap(), [expected.clone(), expected], "{choice:?}");
    }
}

/// Another run has saved the file.
#[test]
fn a_file_of_another_length_is_an_error_or_what_was_chosen_in_every_generation() {
    let mut before = state(60, OnOtherLength::Error);
    (0..20).for_each(|_| before.0.advance());
    before.commit().unwrap();
    let file = before.state_dict().unwrap();
    let mut refused = state(90, OnOtherLength::Error);
    let error = refused.load_state_dict(&file).unwrap_err();
    assert!(matches!(error, Error::OtherLength { .. }), "{error}");
    assert_eq!((refused.0.learning_rates(), refused.commits()), (rate(0, 90), 0));
    refused.roll_back().unwrap();
    let chosen = [
        (OnOtherLength::Keep, rate(20, 60)),
        (OnOtherLength::Stretch, rate(30, 90)),
        (OnOtherLength::New, rate(20, 90)),
    ];
    for (choice, expected) in chosen {
        let rates = spawn(2, |pg| {
            let mut state = state(90, choice);
            state.load_state_dict(&file)?;
            synchronise(&mut state, &pg, entrance(true))?;
            assert_eq!(state.commits(), 1);
            Ok(state.0.learning_rates())
        });
        assert_eq!(rates.unwrap(), [expected.clone(), expected], "{choice:?}");
    }
}
