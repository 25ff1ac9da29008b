//! The states of schedules.
use super::super::other_length::{self, LENGTH, OnOtherLength};
use super::super::setting::{self, Settings};
use super::super::unsaved;
use super::{LrScheduler, Schedule};
use crate::state::{self, Dict, Loader, StateDict};
use crate::{Error, Result};

/// The key of the current learning rates, of a schedule whose options a state does not have.
const RATES: &str = "rates";

/// Contains `step`, `base`, the learning rates that the schedule started with, and the options (`option.total_steps`). A schedule that loads a
/// state takes its options, as in PyTorch, and so continues where it was; rank 0 warns if the program has made it with others. Options that are
/// counted in steps are the exception: see [`OnOtherLength`]. To continue with other options, make the schedule anew, and call
/// [`advance`](LrScheduler::advance) as often as it has made steps.
///
/// Of a [`Schedule`] of your own, the [`length`](Schedule::length) is saved, and the current `rates`: rank 0 warns if they change.
impl<S: Schedule> StateDict for LrScheduler<S> {
    fn state_dict(&self) -> Result<Dict> {
        unsaved::saved();
        let mut dict = state::begin(self.schedule.name())?;
        dict.insert("step".to_string(), state::count(self.step)?);
        dict.insert("base".to_string(), state::list(&self.base)?);
        if self.is_own() {
            dict.insert(RATES.to_string(), state::list(&self.learning_rates())?);
        }
        setting::save(&mut dict, self.schedule.settings())?;
        Ok(dict)
    }

    /// # Errors
    /// [`Error::OtherLength`] for another length, by default, and the errors of every state.
    fn load_state_dict(&mut self, dict: &Dict) -> Result<()> {
        self.continue_from(dict, self.on_other_length)
    }

    fn take_over(&mut self, dict: &Dict, is_new: bool) -> Result<()> {
        let chosen = Some(self.on_other_length).filter(|chosen| is_new && *chosen != OnOtherLength::Error);
        // The program's own schedules cannot be given the others' length.
        let of_the_run = if self.is_own() { OnOtherLength::New } else { OnOtherLength::Keep };
        self.continue_from(dict, chosen.unwrap_or(of_the_run))
    }
}

impl<S: Schedule> LrScheduler<S> {
    /// Whether the schedule is one of the program's own, whose options are unknown.
    fn is_own(&self) -> bool {
        self.schedule.lengths() == [LENGTH]
    }

    fn continue_from(&mut self, dict: &Dict, on_other_length: OnOtherLength) -> Result<()> {
        let name = self.schedule.name();
        let mut loader = Loader::new(dict, name)?;
        let (mut step, base) = (loader.count("step")?, loader.learning_rates("base", self.base.len())?);
        let own = self.schedule.settings();
        let changed = setting::load(dict, &mut loader, &own)?;
        let rates = dict.contains_key(RATES).then(|| loader.list::<f64>(RATES, base.len())).transpose()?;
        loader.finish()?;

        let lengths = self.schedule.lengths();
        let (of_steps, mut taken): (Settings, Settings) =
            changed.into_iter().partition(|(name, _)| lengths.contains(name));
        let is_chosen = !of_steps.is_empty() && self.on_other_length != OnOtherLength::Error;
        if let Some(first) = of_steps.first() {
            match on_other_length {
                OnOtherLength::Error => return Err(other_length::error(name, first, &own)),
                OnOtherLength::Keep if self.is_own() => {
                    let reason = format!(
                        "OnOtherLength::Keep cannot set the length of the program's own schedule {name}: make it with the saved length, {}",
                        setting::end(&first.1)
                    );
                    return Err(Error::invalid("on_other_length", reason));
                }
                OnOtherLength::Keep => taken.extend(of_steps),
                OnOtherLength::Stretch => step = other_length::stretched(step, lengths[0], &of_steps, &own),
                OnOtherLength::New => (),
            }
        }
        setting::apply(&mut self.schedule, &own, &taken, S::set, S::check)?;
        (self.step, self.base) = (step, base);
        taken.retain(|(name, _)| !(is_chosen && lengths.contains(name)));
        setting::warn_of_changed(name, &own, &taken);
        if let Some(rates) = rates.filter(|_| !is_chosen) {
            setting::warn_of_rates(name, step, &rates, &self.learning_rates());
        }
        Ok(())
    }
}
