//! The place in the program's source from which a call is made. It travels with the call as a number.
use crate::label::Label;
use crate::texts;
use std::cell::Cell;
use std::panic::Location;

/// Where a call comes from, or 0: unknown, or from within this crate, where the label says more. Ranks may make the same call
/// from different places.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallSite(u32);

thread_local! {
    /// The place of the calls that this thread makes.
    static CURRENT: Cell<CallSite> = const { Cell::new(CallSite::NONE) };

    /// The outermost place of this thread, also of calls that have a label.
    static OUTERMOST: Cell<CallSite> = const { Cell::new(CallSite::NONE) };

    /// Another rank's place in the call that this thread runs, if it differs from this rank's.
    static OTHER: Cell<CallSite> = const { Cell::new(CallSite::NONE) };

    /// The numbers of places, by the address of their location: a program has few.
    static NUMBERS: [Cell<(usize, CallSite)>; NUMBERS_KEPT] = const { [const { Cell::new((0, CallSite::NONE)) }; NUMBERS_KEPT] };
}

const NUMBERS_KEPT: usize = 64;

impl CallSite {
    /// No place.
    pub(crate) const NONE: Self = Self(0);

    fn of(location: &'static Location<'static>) -> Self {
        let address = std::ptr::from_ref(location).addr();
        NUMBERS.with(|numbers| {
            let entry = &numbers[address / size_of::<Location>() % NUMBERS_KEPT];
            let (known, place) = entry.get();
            if known == address {
                return place;
            }
            let text = location.to_string();
            let place = Self(texts::code(&text));
            texts::learn(place.0, text);
            entry.set((address, place));
            place
        })
    }

    /// Makes `work`'s calls on this thread come from `location`, unless they come from further outside, or have a label of this
    /// crate's.
    pub fn during<T>(location: &'static Location<'static>, work: impl FnOnce() -> T) -> T {
        /// Restores the previous place, even if `work` panics.
        struct Scope(CallSite);
        impl Drop for Scope {
            fn drop(&mut self) {
                CURRENT.set(self.0);
            }
        }
        let scope = Scope(CURRENT.get());
        if scope.0 == Self::NONE && Label::current() == Label::NONE {
            CURRENT.set(Self::of(location));
        }
        work()
    }

    /// Says that what `work` does on this thread is done at `location` of the program, unless that is done at a place further
    /// outside. Calls do not come from there: this crate's own calls have a label.
    #[doc(hidden)]
    pub fn around<T>(location: &'static Location<'static>, work: impl FnOnce() -> T) -> T {
        /// Restores the previous place, even if `work` panics.
        struct Scope(CallSite);
        impl Drop for Scope {
            fn drop(&mut self) {
                OUTERMOST.set(self.0);
            }
        }
        let scope = Scope(OUTERMOST.get());
        if scope.0 == Self::NONE {
            OUTERMOST.set(Self::of(location));
        }
        work()
    }

    /// Where the program is, as far as this crate knows.
    #[inline]
    pub(crate) fn outermost() -> Self {
        match OUTERMOST.get() {
            Self::NONE => CURRENT.get(),
            place => place,
        }
    }

    /// The place of the calls that this thread makes now.
    #[inline]
    pub fn current() -> Self {
        CURRENT.get()
    }

    /// Notes that another rank is in the running call from `theirs`.
    pub(crate) fn meet(theirs: Self) {
        OTHER.set(theirs);
    }

    /// The place that was noted, which is then forgotten.
    pub(crate) fn take_met() -> Option<Self> {
        Some(OTHER.take()).filter(|place| *place != Self::NONE)
    }

    /// `src/main.rs:41:9`, if there is a place, and this rank knows its text.
    pub(crate) fn text(self) -> Option<String> {
        if self == Self::NONE { None } else { texts::known(self.0) }
    }

    /// The number that is sent.
    pub(crate) fn code(self) -> u32 {
        self.0
    }

    /// The place for a received number.
    pub(crate) fn from_code(code: u32) -> Self {
        Self(code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn here(work: impl FnOnce() -> CallSite) -> CallSite {
        CallSite::during(Location::caller(), work)
    }

    #[test]
    fn the_outermost_place_counts_outside_of_labels() {
        assert_eq!(CallSite::current(), CallSite::NONE);
        let outer = here(|| {
            let outer = CallSite::current();
            assert_eq!(here(CallSite::current), outer);
            outer
        });
        let text = outer.text().unwrap();
        assert!(text.contains("call_site.rs:"), "{text}");
        let other = here(CallSite::current);
        assert!(other != outer && other.text() != outer.text());
        assert_eq!(CallSite::from_code(outer.code()), outer);
        let turns: Vec<CallSite> = (0..3).map(|_| here(CallSite::current)).collect();
        assert!(turns[1..].iter().all(|turn| *turn == turns[0]), "{turns:?}");
        assert_eq!(Label::of("save_distributed").during(|| here(CallSite::current)), CallSite::NONE);
        assert_eq!((CallSite::current(), CallSite::NONE.text()), (CallSite::NONE, None));
        CallSite::meet(outer);
        assert_eq!((CallSite::take_met(), CallSite::take_met()), (Some(outer), None));
    }
}
