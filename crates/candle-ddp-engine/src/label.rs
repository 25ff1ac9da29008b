//! The purpose of a collective, as messages show it: `all_gather(i64[1]) for save_distributed`.
use crate::texts;
use std::cell::Cell;

/// The text of [`Label::BATCH`], which every rank knows.
const BATCH: &str = "batch_isend_irecv";

/// The purpose of a call. It is sent with the call as a number. A rank knows the text of every label that it has
/// [registered](Self::register), and learns those of other ranks from their reports.
///
/// Ranks whose calls look alike but have different labels are doing different things.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Label(u32);

thread_local! {
    /// The label of the calls that this thread makes.
    static CURRENT: Cell<Label> = const { Cell::new(Label::NONE) };
}

impl Label {
    /// No label.
    pub(crate) const NONE: Self = Self(0);
    /// The messages of a batch.
    pub const BATCH: Self = Self::of(BATCH);

    /// The label with this text, which messages have once it is [registered](Self::register).
    pub(crate) const fn of(text: &str) -> Self {
        // Never the number that means no label.
        Self(texts::code(text))
    }

    /// Returns the label with this text. Messages have the text on the ranks that have registered it, and on those that hear of it from them.
    pub fn register(text: impl Into<String>) -> Self {
        let text = text.into();
        let label = Self::of(&text);
        texts::learn(label.0, text);
        label
    }

    /// Gives this label to the calls that `work` makes on this thread, unless they have one already: the outermost
    /// label says the most.
    pub fn during<T>(self, work: impl FnOnce() -> T) -> T {
        /// Restores the previous label, even if `work` panics.
        struct Scope(Label);
        impl Drop for Scope {
            fn drop(&mut self) {
                CURRENT.set(self.0);
            }
        }
        let scope = Scope(CURRENT.get());
        if scope.0 == Self::NONE {
            CURRENT.set(self);
        }
        work()
    }

    /// The label of the calls that this thread makes now.
    #[inline]
    pub fn current() -> Self {
        CURRENT.get()
    }

    /// The text, if this rank knows it.
    pub fn text(self) -> Option<String> {
        match self {
            Self::NONE => None,
            Self::BATCH => Some(BATCH.to_string()),
            Self(code) => texts::known(code),
        }
    }

    /// The number that is sent.
    pub(crate) fn code(self) -> u32 {
        self.0
    }

    /// The label for a received number.
    pub(crate) fn from_code(code: u32) -> Self {
        Self(code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_has_the_text_that_this_rank_knows() {
        let label = Label::of("the gradients of w");
        assert_eq!((Label::NONE.text(), Label::BATCH.text(), label.text()), (None, Some(BATCH.to_string()), None));
        assert_eq!(Label::register("the gradients of w"), label);
        assert_eq!(Label::from_code(label.code()).text().as_deref(), Some("the gradients of w"));
    }

    #[test]
    fn the_outermost_label_counts_and_ends_with_its_work() {
        let [save, load] = ["save", "load"].map(Label::of);
        assert_eq!(Label::current(), Label::NONE);
        save.during(|| {
            assert_eq!(Label::current(), save);
            assert_eq!(load.during(Label::current), save);
            assert!(std::panic::catch_unwind(|| load.during(|| panic!("on purpose"))).is_err());
            assert_eq!(Label::current(), save);
        });
        assert_eq!(Label::current(), Label::NONE);
    }
}
