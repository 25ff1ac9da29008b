use crate::Result;
use candle_ddp_base::debug_fields;
use std::any::Any;
use std::sync::Arc;
use std::time::Instant;

/// A collective in flight, as its engine implements it.
pub trait Completion: Send + Sync {
    /// Returns once the calling thread's next candle operations may use the results. On a CPU, the results are then
    /// complete; on a GPU, candle's stream then waits for them, which does not block the host.
    ///
    /// # Errors
    /// Returns [`Error::Group`](crate::Error::Group) if the collective has failed, also if it is called again.
    fn wait(&self) -> Result<()>;

    /// Blocks the host until the results are complete.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    fn synchronize(&self) -> Result<()> {
        self.wait()
    }

    /// Whether the collective is complete (even if it failed), without waiting.
    fn is_completed(&self) -> bool;

    /// When execution started and finished, if known; `None` before the collective is complete.
    fn span(&self) -> Option<(Instant, Instant)> {
        None
    }

    /// The engine's own form of the call, if it starts other calls behind it.
    #[doc(hidden)]
    fn as_any(&self) -> Option<&dyn Any> {
        None
    }
}

/// A collective in flight: PyTorch's `Work`.
///
/// Dropping it does not cancel the collective; the group's next call then returns its error, if any.
#[must_use = "the tensors of a collective may only be used after `wait`"]
#[derive(Clone)]
pub struct Work(Arc<dyn Completion>);

debug_fields!(Work: |this| is_completed = this.is_completed());

impl Work {
    /// Wraps an engine's own handle.
    pub fn new(completion: impl Completion + 'static) -> Self {
        Self(Arc::new(completion))
    }

    /// Work that is already complete, as in a world of one.
    pub fn done() -> Self {
        struct Done;
        impl Completion for Done {
            fn wait(&self) -> Result<()> {
                Ok(())
            }
            fn is_completed(&self) -> bool {
                true
            }
        }
        Self::new(Done)
    }

    /// Several calls as one, which is complete when all are. Its error is the first of theirs.
    pub fn all(works: Vec<Self>) -> Self {
        Self::new(All(works))
    }

    /// Waits until the results may be used by this thread's next candle operations.
    ///
    /// # Errors
    /// Returns [`Error::Group`](crate::Error::Group) if the collective has failed, also if it is called again.
    pub fn wait(&self) -> Result<()> {
        self.0.wait()
    }

    /// Blocks the host until the results are complete, on a GPU too.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub fn synchronize(&self) -> Result<()> {
        self.0.synchronize()
    }

    /// Whether the collective is complete (even if it failed), without waiting.
    pub fn is_completed(&self) -> bool {
        self.0.is_completed()
    }

    /// When execution started and finished, if known; `None` before the collective is complete.
    pub fn span(&self) -> Option<(Instant, Instant)> {
        self.0.span()
    }

    pub(crate) fn as_any(&self) -> Option<&dyn Any> {
        self.0.as_any()
    }
}

struct All(Vec<Work>);

impl All {
    /// Waits for all, even after an error: their tensors may be used once it returns.
    fn each(&self, wait: impl Fn(&Work) -> Result<()>) -> Result<()> {
        self.0.iter().map(wait).fold(Ok(()), Result::and)
    }
}

impl Completion for All {
    fn wait(&self) -> Result<()> {
        self.each(Work::wait)
    }

    fn synchronize(&self) -> Result<()> {
        self.each(Work::synchronize)
    }

    fn is_completed(&self) -> bool {
        self.0.iter().all(Work::is_completed)
    }

    fn span(&self) -> Option<(Instant, Instant)> {
        let spans: Vec<_> = self.0.iter().map(Work::span).collect::<Option<_>>()?;
        let (starts, ends): (Vec<_>, Vec<_>) = spans.into_iter().unzip();
        Some((starts.into_iter().min()?, ends.into_iter().max()?))
    }
}
