//! The nodes' reports about a failed run, and the failure that caused the others.
use super::message::{Report, Slot};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// How long to wait for further nodes' reports after the first one.
pub(super) const REPORTS: Duration = Duration::from_secs(2);

/// The reports of a failed run.
#[derive(Debug)]
pub(super) struct Reports {
    awaited: BTreeSet<Slot>,
    /// The node of the first failure.
    first: Option<Slot>,
    /// A node whose workers have not failed has nothing to report.
    got: Vec<(Slot, Option<Report>)>,
    deadline: Option<Instant>,
}

impl Reports {
    /// Waits for the reports of these nodes. `first` is the node of the first failure.
    pub(super) fn of(awaited: BTreeSet<Slot>, first: Option<Slot>) -> Self {
        Self { awaited, first, got: Vec::new(), deadline: None }
    }

    /// No longer waits for the report of a node.
    pub(super) fn forget(&mut self, slot: Slot) {
        self.awaited.remove(&slot);
    }

    pub(super) fn add(&mut self, slot: Slot, report: Option<Report>) {
        self.forget(slot);
        self.got.push((slot, report));
    }

    /// Whether all reports are in, or time is up.
    pub(super) fn are_due(&mut self, now: Instant) -> bool {
        if !self.got.is_empty() {
            self.deadline.get_or_insert(now + REPORTS);
        }
        self.awaited.is_empty() || self.deadline.is_some_and(|deadline| deadline <= now)
    }

    /// The failure that caused the others.
    pub(super) fn root(self) -> Option<Report> {
        root(self.first, self.got.into_iter().filter_map(|(slot, report)| Some((slot, report?))).collect())
    }
}

/// The failure that caused the others, found as among the workers of one node: one that was killed comes first;
/// otherwise the first one, or the one that its error names.
fn root(first: Option<Slot>, reports: Vec<(Slot, Report)>) -> Option<Report> {
    let killed = reports.iter().map(|(_, report)| report).filter(|report| report.killed);
    if let Some(killed) = killed.min_by_key(|report| report.at) {
        return Some(killed.clone());
    }
    // Without a first worker, a node ended the run.
    let first = first?;
    let start = reports.iter().find(|(slot, _)| *slot == first).or(reports.first());
    let mut root = &start?.1;
    let mut seen = vec![root.rank];
    while let Some(named) = root.elsewhere
        && let Some((_, next)) = reports.iter().find(|(_, report)| report.rank == named)
        && !seen.contains(&named)
    {
        seen.push(named);
        root = next;
    }
    Some(root.clone())
}
