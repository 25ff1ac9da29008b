//! Where threads of the program are between their calls, for the errors of ranks that wait for them.
use crate::panic::lock;
use crate::wire::beginning;
use std::fmt;
use std::sync::{Arc, Mutex};

type Text = Arc<dyn Fn() -> String + Send + Sync>;

/// The present activity of one thread.
#[derive(Default)]
pub struct Activity(Mutex<Option<Text>>);

thread_local! {
    static THIS: Arc<Activity> = Arc::default();
}

impl Activity {
    /// The activity of the calling thread.
    pub fn current() -> Arc<Self> {
        THIS.try_with(Arc::clone).unwrap_or_default()
    }

    /// The text, if the thread is in [`during`]. It may come from a program, and is cut where it is too long for a message.
    pub fn text(&self) -> Option<String> {
        const LONG: usize = 400;
        let text = lock(&self.0).clone()?;
        // Without the lock, since it may take others.
        let text = text();
        let shown = beginning(&text, LONG);
        Some(if shown.len() < text.len() { format!("{shown}…") } else { text })
    }
}

impl fmt::Debug for Activity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Activity").field(&self.text()).finish()
    }
}

/// Runs `work`. Until it ends, also by a panic, `text` says what the calling thread is doing: "rank 1 …".
pub fn during<T>(text: impl Fn() -> String + Send + Sync + 'static, work: impl FnOnce() -> T) -> T {
    struct Restore(Arc<Activity>, Option<Text>);
    impl Drop for Restore {
        fn drop(&mut self) {
            *lock(&self.0.0) = self.1.take();
        }
    }
    let activity = Activity::current();
    let before = lock(&activity.0).replace(Arc::new(text));
    let _restored = Restore(activity, before);
    work()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    #[test]
    fn texts_are_nested_cut_and_gone_after_a_panic() {
        let activity = Activity::current();
        assert_eq!(activity.text(), None);
        during(
            || "reads".to_string(),
            || {
                let inner = || during(|| "é".repeat(300), || panic!("{}", activity.text().unwrap()));
                let panic = catch_unwind(AssertUnwindSafe(inner)).unwrap_err();
                let text = panic.downcast::<String>().unwrap();
                assert_eq!((text.chars().count(), text.chars().last()), (201, Some('…')));
                assert_eq!(std::thread::spawn(|| Activity::current().text()).join().unwrap(), None);
                assert_eq!(activity.text().unwrap(), "reads");
            },
        );
        assert_eq!(activity.text(), None);
    }
}
