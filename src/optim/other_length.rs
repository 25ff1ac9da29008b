//! How a schedule continues that a run of another length has saved.
use super::setting::{Setting, Settings, end};
use crate::Error;

/// How a resumed run continues if its schedule was saved with another length: another `total_steps`, `t_max`, `step_size`,
/// `warmup_steps`, or other `milestones`, than those with which the program makes it. That happens when an epoch has another number of
/// steps, because of another number of ranks, other data or another batch size, and when a run shall train longer than planned.
///
/// ```
/// # use candle_ddp::checkpoint::StateDict;
/// # use candle_ddp::optim::{Optimizer, ParamsSgd, Sgd};
/// use candle_ddp::optim::{CosineAnnealingLr, OnOtherLength, ParamsCosineAnnealingLr};
///
/// # fn main() -> candle_ddp::Result<()> {
/// # let mut optimizer = Sgd::new(Vec::<candle_core::Var>::new(), ParamsSgd { lr: 0.1, ..Default::default() })?;
/// let on_4_ranks = ParamsCosineAnnealingLr { t_max: 500, eta_min: 0. };
/// let mut schedule = CosineAnnealingLr::new(&mut optimizer, on_4_ranks)?;
/// (0..250).for_each(|_| schedule.advance());
/// let saved = schedule.state_dict()?; // half of the run
///
/// let on_2_ranks = ParamsCosineAnnealingLr { t_max: 1000, eta_min: 0. };
/// let mut resumed = CosineAnnealingLr::new(&mut optimizer, on_2_ranks)?;
/// assert!(resumed.load_state_dict(&saved).is_err());
/// let mut resumed = resumed.on_other_length(OnOtherLength::Stretch);
/// resumed.load_state_dict(&saved)?; // step 500 of 1000
/// assert_eq!(resumed.learning_rates(), schedule.learning_rates());
/// # Ok(())
/// # }
/// ```
///
/// States of versions that did not save the options load with the program's. Within [`elastic::run`](crate::elastic::run), the ranks'
/// commits never are an error: a schedule that is one of the `State`'s own parts keeps its length, and one that `train` makes for its group
/// keeps the committed length, or follows the choice that was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnOtherLength {
    /// To load the state is an error, which names both lengths.
    #[default]
    Error,
    /// Continues with the saved length, as it was planned: what PyTorch does.
    Keep,
    /// Continues with the program's length from the step where the same fraction of it is done, rounded to a whole step.
    Stretch,
    /// Continues with the program's length from the saved step.
    New,
}

/// The name of the length of a program's own schedule in a state.
pub(super) const LENGTH: &str = "length";

/// The step of a schedule that was saved in `step`, for `own` options of which `saved` ones counted in steps differ, the length `length`
/// among them or not.
pub(super) fn stretched(step: u64, length: &str, saved: &Settings, own: &Settings) -> u64 {
    let of = |settings: &Settings| settings.iter().find(|(name, _)| *name == length).map(|(_, steps)| end(steps));
    match (of(saved), of(own)) {
        (Some(saved @ 1..), Some(own)) => {
            let (step, saved, own) = (u128::from(step), u128::from(saved), u128::from(own));
            u64::try_from((step * own + saved / 2) / saved).unwrap_or(u64::MAX)
        }
        _ => step,
    }
}

/// The error of a schedule with the options `own`, of which the state has another one.
pub(super) fn error(schedule: &'static str, (option, saved): &(&'static str, Vec<f64>), own: &Settings) -> Error {
    let made = own.iter().find(|(name, _)| name == option).map_or(&[][..], |(_, made)| made);
    let steps = |numbers: &[f64]| Vec::<u64>::of(numbers);
    match (steps(saved), steps(made)) {
        (Some(saved), Some(made)) => Error::OtherLength { schedule, option, saved, made },
        _ => Error::parameter(format!("option.{option}"), format!("it must be numbers of steps, not {saved:?}")),
    }
}
