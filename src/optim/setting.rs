//! Options of schedules as their states have them: a run that is resumed continues with the options that it was saved with.
use crate::state::{self, Loader};
use crate::warnings::warn_aloud;
use crate::{Error, Result};
use candle_core::Tensor;
use candle_ddp_env::PROCESS;
use std::collections::{HashMap, HashSet};
use std::sync::{LazyLock, Mutex};

/// Names and values.
pub(super) type Settings = Vec<(&'static str, Vec<f64>)>;

/// An option as numbers, which a file can have.
pub(super) trait Setting: Sized {
    fn numbers(&self) -> Vec<f64>;

    /// None if they do not fit such an option.
    fn of(numbers: &[f64]) -> Option<Self>;
}

impl Setting for f64 {
    fn numbers(&self) -> Vec<f64> {
        vec![*self]
    }

    fn of(numbers: &[f64]) -> Option<Self> {
        let [number] = numbers else { return None };
        Some(*number)
    }
}

impl Setting for u64 {
    fn numbers(&self) -> Vec<f64> {
        vec![*self as f64]
    }

    fn of(numbers: &[f64]) -> Option<Self> {
        f64::of(numbers).filter(|number| *number >= 0.).map(|number| number as u64)
    }
}

impl Setting for Vec<u64> {
    fn numbers(&self) -> Vec<f64> {
        self.iter().flat_map(Setting::numbers).collect()
    }

    fn of(numbers: &[f64]) -> Option<Self> {
        numbers.iter().map(|number| u64::of(&[*number])).collect()
    }
}

/// A choice between values without fields, which are numbered in this order.
macro_rules! choice {
    ($type:ty: $($value:expr),+) => {
        impl $crate::optim::setting::Setting for $type {
            fn numbers(&self) -> Vec<f64> {
                [$($value),+].iter().position(|value| value == self).map(|number| number as f64).into_iter().collect()
            }

            fn of(numbers: &[f64]) -> Option<Self> {
                let number = <u64 as $crate::optim::setting::Setting>::of(numbers)?;
                [$($value),+].get(number as usize).copied()
            }
        }
    };
}

pub(super) use choice;

choice!(bool: false, true);

/// The methods that give all options of a struct, and set one. Those before a semicolon are counted in steps; the first is the length of a
/// schedule, or ends with it.
macro_rules! settings {
    ($length:ident $(, $other:ident)*; $($field:ident),*) => {
        $crate::optim::setting::settings!($length $(, $other)* $(, $field)*);

        fn length(&self) -> Option<u64> {
            use $crate::optim::setting::Setting;
            Some($crate::optim::setting::end(&self.$length.numbers()))
        }

        fn lengths(&self) -> &'static [&'static str] {
            &[stringify!($length) $(, stringify!($other))*]
        }
    };
    ($($field:ident),+) => {
        fn settings(&self) -> Vec<(&'static str, Vec<f64>)> {
            use crate::optim::setting::Setting;
            vec![$((stringify!($field), self.$field.numbers())),+]
        }

        fn set(&mut self, name: &str, numbers: &[f64]) -> bool {
            use crate::optim::setting::Setting;
            match name {
                $(stringify!($field) => Setting::of(numbers).map(|value| self.$field = value).is_some(),)+
                _ => false,
            }
        }
    };
}
pub(super) use settings;

/// The last of the steps of an option.
pub(super) fn end(steps: &[f64]) -> u64 {
    steps.iter().copied().fold(0., f64::max) as u64
}

fn key(name: &str) -> String {
    format!("option.{name}")
}

/// Adds the `settings` to a state.
pub(super) fn save(dict: &mut HashMap<String, Tensor>, settings: Settings) -> Result<()> {
    settings.into_iter().try_for_each(|(name, numbers)| {
        dict.insert(key(name), state::list(&numbers)?);
        Ok(())
    })
}

/// The `own` settings that differ in a state. States of earlier versions have none.
pub(super) fn load(dict: &HashMap<String, Tensor>, loader: &mut Loader, own: &Settings) -> Result<Settings> {
    let mut changed = Vec::new();
    for (name, numbers) in own.iter().filter(|(name, _)| dict.contains_key(&key(name))) {
        let saved = loader.values::<f64>(&key(name))?;
        if saved != *numbers {
            changed.push((*name, saved));
        }
    }
    Ok(changed)
}

/// Sets the `changed` settings, by `set`. If the result is not what `check` allows, this is an error, and everything as before.
pub(super) fn apply<T>(
    target: &mut T,
    own: &Settings,
    changed: &Settings,
    set: impl Fn(&mut T, &str, &[f64]) -> bool,
    check: impl Fn(&T) -> Result<()>,
) -> Result<()> {
    let refused = changed.iter().find(|(name, numbers)| !set(target, name, numbers));
    let result = match refused {
        Some((name, numbers)) => {
            Err(Error::parameter(key(name), format!("it must be such an option, not {numbers:?}")))
        }
        None => check(target),
    };
    if result.is_err() {
        own.iter().for_each(|(name, numbers)| {
            set(target, name, numbers);
        });
    }
    result
}

/// Says once that a schedule continues with other options than the program gave.
pub(super) fn warn_of_changed(schedule: &str, own: &Settings, changed: &Settings) {
    let shown = |numbers: &[f64]| match numbers {
        [number] => number.to_string(),
        _ => format!("{numbers:?}"),
    };
    let change = |(name, saved): &(&'static str, Vec<f64>)| {
        let own = own.iter().find(|(own, _)| own == name).map_or(String::new(), |(_, numbers)| shown(numbers));
        format!("{name} {} (the program says {own})", shown(saved))
    };
    if changed.is_empty() {
        return;
    }
    let changes = changed.iter().map(change).collect::<Vec<_>>().join(", ");
    warn_once(format!(
        "the schedule {schedule} continues with the options that it was saved with: {changes}. To go on with the program's options, do not \
         load the schedule: make it anew, and call `advance` as often as it has made steps. For a length, `on_other_length` says which one counts"
    ));
}

/// Says that a schedule whose options the state does not have gives other rates than when it was saved.
pub(super) fn warn_of_rates(schedule: &str, step: u64, saved: &[f64], own: &[f64]) {
    if saved == own {
        return;
    }
    warn_once(format!(
        "the schedule {schedule} had the learning rates {saved:?} in step {step} when it was saved, and now has {own:?}: the program made it \
         with other options. With another number of ranks, an epoch has another number of steps: step the schedule once per epoch, or \
         implement `Schedule::length`"
    ));
}

/// On rank 0, as far as a process knows.
fn warn_once(text: String) {
    static SAID: LazyLock<Mutex<HashSet<String>>> = LazyLock::new(Mutex::default);
    let is_first = PROCESS.number("RANK").ok().flatten().is_none_or(|rank: usize| rank == 0);
    if is_first && crate::panic::lock(&SAID).insert(text.clone()) {
        warn_aloud(format_args!("{text}"));
    }
}
