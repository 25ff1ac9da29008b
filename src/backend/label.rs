//! The purpose of a collective, as messages show it: `all_gather(i64[1]) for save_distributed`.
use super::texts;
use std::cell::Cell;

/// The purpose of a call. It is sent with the call as a number, from which every rank derives the text: all ranks know
/// the fixed texts, and register the same other texts.
///
/// Ranks whose calls look alike but have different labels are doing different things.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Label(u32);

thread_local! {
    /// The label of the calls that this thread makes.
    static CURRENT: Cell<Label> = const { Cell::new(Label::NONE) };
}

macro_rules! labels {
    ($($name:ident = $text:literal;)*) => {
        impl Label {
            $(pub(crate) const $name: Self = Self::of($text);)*
        }

        const FIXED: &[&str] = &[$($text),*];
    };
}

labels! {
    BATCH = "batch_isend_irecv";
    BROADCAST_OBJECT = "broadcast_object";
    ALL_GATHER_OBJECT = "all_gather_object";
    ALL_GATHER_VARIED = "all_gather_varied";
    ALL_REDUCE_SCALARS = "all_reduce_scalars";
    DDP_NEW = "DistributedDataParallel::new";
    DDP_HOOK = "register_comm_hook";
    DDP_BUFFERS = "rank 0's variables, which DistributedDataParallel broadcasts";
    DDP_ORDER = "the order of DistributedDataParallel's buckets";
    DDP_USED = "the used flags of DistributedDataParallel's parameters";
    JOIN = "a join, in which the program must call no collectives itself";
    JOIN_NEW = "join";
    JOIN_SYNC = "Joined::sync";
    LOADER_NEW = "DataLoader::new";
    BATCH_NORM = "SyncBatchNorm's statistics";
    BATCH_NORM_BACKWARD = "SyncBatchNorm's gradients";
    UNSCALE = "GradScaler::unscale";
    STOP = "agree_on_stop";
    SPEED = "share_by_speed";
    AVERAGER = "PeriodicModelAverager::average_parameters";
    ZERO_NEW = "ZeroRedundancyOptimizer::new";
    ZERO_STEP = "ZeroRedundancyOptimizer::step";
    ZERO_NORM = "ZeroRedundancyOptimizer::clip_grad_norm";
    ZERO_STATE = "ZeroRedundancyOptimizer's state_dict";
    ZERO_SAVE = "ZeroRedundancyOptimizer::save";
    ZERO_LOAD = "ZeroRedundancyOptimizer::load";
    OPTIMIZER_SAVE = "Optimizer::save_distributed";
    OPTIMIZER_LOAD = "Optimizer::load_distributed";
    ELASTIC = "the state that elastic::run brings to all ranks";
    ELASTIC_MIRROR = "the shards that elastic::State mirrors";
    SAVE = "save_distributed";
    LOAD = "load_distributed";
    CHECKPOINTER_NEW = "Checkpointer::new";
    CHECKPOINTER_SAVE = "Checkpointer::save";
    CHECKPOINTER_WRITE = "the background write of Checkpointer::save";
    CHECKPOINTER_LOAD = "Checkpointer::load_latest";
}

impl Label {
    pub(crate) const NONE: Self = Self(0);

    /// The text's hash; never the number that means no label.
    const fn of(text: &str) -> Self {
        Self(texts::code(text))
    }

    /// A label with a text of this run. Every rank must register the same text before any rank makes a call with it.
    pub(crate) fn register(text: String) -> Self {
        let label = Self::of(&text);
        texts::learn(label.0, || text);
        label
    }

    /// Gives this label to the calls that `work` makes on this thread, unless they have one already: the outermost
    /// label says the most.
    pub(crate) fn during<T>(self, work: impl FnOnce() -> T) -> T {
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

    pub(super) fn current() -> Self {
        CURRENT.get()
    }

    /// The text, if this rank knows it.
    pub(super) fn text(self) -> Option<String> {
        if let Some(text) = FIXED.iter().find(|text| Self::of(text) == self) {
            return Some(text.to_string());
        }
        if self == Self::NONE { None } else { texts::known(self.0) }
    }

    /// The number that is sent.
    pub(super) fn code(self) -> u32 {
        self.0
    }

    /// The label for a received number.
    pub(super) fn from_code(code: u32) -> Self {
        Self(code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_label_has_a_text_of_its_own() {
        for (index, text) in FIXED.iter().enumerate() {
            assert_eq!(Label::of(text).text().as_deref(), Some(*text));
            assert!(FIXED[..index].iter().all(|other| Label::of(other) != Label::of(text)), "{text}");
        }
        assert_eq!((Label::NONE.text(), Label::from_code(12345).text()), (None, None));
        let label = Label::register("the gradients of w".to_string());
        assert_eq!(Label::from_code(label.code()).text().as_deref(), Some("the gradients of w"));
    }

    #[test]
    fn the_outermost_label_counts_and_ends_with_its_work() {
        assert_eq!(Label::current(), Label::NONE);
        Label::SAVE.during(|| {
            assert_eq!(Label::current(), Label::SAVE);
            assert_eq!(Label::ALL_GATHER_OBJECT.during(Label::current), Label::SAVE);
            assert!(std::panic::catch_unwind(|| Label::LOAD.during(|| panic!("on purpose"))).is_err());
            assert_eq!(Label::current(), Label::SAVE);
        });
        assert_eq!(Label::current(), Label::NONE);
    }
}
