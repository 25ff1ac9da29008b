//! The nodes' verdicts on their workers, when all of them end, and the verdict on which they agree.
use super::message::Slot;
use crate::verdict::Verdict;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// How long to wait for further nodes' verdicts after the first one, when the run has failed.
pub(super) const REPORTS: Duration = Duration::from_secs(2);

/// The verdicts of nodes that end their workers.
#[derive(Debug)]
pub(super) struct Reports {
    awaited: BTreeSet<Slot>,
    /// Why the workers end, unless nothing has failed.
    why: Option<Verdict>,
    /// The node of the first failure.
    first: Option<Slot>,
    got: Vec<(Slot, Verdict)>,
    deadline: Option<Instant>,
    is_begun: bool,
}

impl Reports {
    /// Waits for the verdicts of these nodes, whose workers end because of `why`. `first` is the node of the first failure.
    pub(super) fn of(awaited: BTreeSet<Slot>, why: Option<Verdict>, first: Option<Slot>) -> Self {
        Self { awaited, why, first, got: Vec::new(), deadline: None, is_begun: false }
    }

    /// No longer waits for the verdict of a node.
    pub(super) fn forget(&mut self, slot: Slot) {
        self.awaited.remove(&slot);
    }

    /// A node whose workers have not failed has no verdict.
    pub(super) fn add(&mut self, slot: Slot, verdict: Option<Verdict>) {
        self.forget(slot);
        self.is_begun = true;
        self.got.extend(verdict.map(|verdict| (slot, verdict)));
    }

    /// Whether all nodes have reported.
    pub(super) fn are_complete(&self) -> bool {
        self.awaited.is_empty()
    }

    /// Whether all have, or time is up.
    pub(super) fn are_due(&mut self, now: Instant) -> bool {
        if self.is_begun {
            self.deadline.get_or_insert(now + REPORTS);
        }
        self.are_complete() || self.deadline.is_some_and(|deadline| deadline <= now)
    }

    /// The verdict: on the failure that caused the others or, if no worker has failed, why they end.
    pub(super) fn verdict(self) -> Option<Verdict> {
        let why = self.why?;
        Some(root(self.first, self.got).unwrap_or(why))
    }
}

/// The failure that caused the others, found as among the workers of one node: one that was killed comes first;
/// otherwise the first one, or the one that its error names.
fn root(first: Option<Slot>, verdicts: Vec<(Slot, Verdict)>) -> Option<Verdict> {
    let killed = verdicts.iter().map(|(_, verdict)| verdict).filter(|verdict| verdict.is_killed());
    if let Some(killed) = killed.min_by_key(|verdict| verdict.at) {
        return Some(killed.clone());
    }
    // Without a first worker, a node ended the run.
    let first = first?;
    let start = verdicts.iter().find(|(slot, _)| *slot == first).or(verdicts.first());
    let mut root = &start?.1;
    let mut seen = vec![root.witness()];
    while let Some(named) = root.elsewhere()
        && let Some((_, next)) = verdicts.iter().find(|(_, verdict)| verdict.witness() == Some(named))
        && !seen.contains(&next.witness())
    {
        seen.push(next.witness());
        root = next;
    }
    Some(root.clone())
}
