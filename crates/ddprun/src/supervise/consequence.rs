//! The consequences of the end of a rank's process, on one machine or several: the ranks that are restarted, and those that
//! continue.
use super::members::{Members, Ranks};
use super::nodes::Exited;
use super::worker::Exit;
use crate::console::message;
use candle_ddp_rendezvous::Result;

/// How often workers may be restarted, and how often they were.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Restarts {
    pub(crate) most: u32,
    pub(crate) used: u32,
    /// The signal that ends the run: from then on, no process is started.
    pub(crate) stopped_by: Option<i32>,
}

impl Restarts {
    pub(crate) fn new(most: u32) -> Self {
        Self { most, used: 0, stopped_by: None }
    }

    pub(crate) fn are_left(self) -> bool {
        self.stopped_by.is_none() && self.used < self.most
    }

    /// Whether a process ended so because it was asked to: by the signal that ends the run, for which it has no handler.
    pub(crate) fn have_asked_for(self, exit: Exit) -> bool {
        self.stopped_by.is_some_and(|signal| Exit::Signal(signal).code() == exit.code())
    }
}

/// The consequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Consequence {
    /// Nothing: the rank has done its work, or is not needed.
    Continue,
    /// The other ranks cannot finish without it; they end by themselves.
    EndRanks,
    /// The run has failed.
    Fail,
    /// All workers are ended, and then restarted.
    RestartAll,
    /// A new process takes its place.
    Replace,
    /// The other ranks continue without it: torchelastic's scale-down.
    ScaleDown,
}

/// Decides what follows, and why; the reason is empty if there is nothing to say. `what` has happened, in words.
fn judge(exited: Exited, what: &str, ranks: Ranks, restarts: Restarts) -> (Consequence, String) {
    use Consequence::{Continue, EndRanks, Fail, Replace, RestartAll, ScaleDown};
    let Exited { rank, exit } = exited;
    let failed = exit.code() != 0;
    let Restarts { most, used, stopped_by } = restarts;
    let turn = format!("(restart {} of {most})", used.saturating_add(1));
    match ranks {
        Ranks::With { .. } if !failed => (EndRanks, format!("its process {exit} before all ranks had finished")),
        _ if !failed => (Continue, String::new()),
        Ranks::Without => (Continue, String::new()),
        Ranks::Over { finished: true } => {
            let after = "after all ranks had finished elastic::run: it is not restarted, and the work that its program does after \
                         elastic::run may be incomplete";
            (Fail, format!("rank {rank} {exit} {after}"))
        }
        Ranks::Fixed if restarts.are_left() => (RestartAll, format!("{what}: restarting all workers {turn}")),
        Ranks::With { .. } if restarts.are_left() => (Replace, format!("{what}: a new process takes its place {turn}")),
        Ranks::Fixed | Ranks::Over { finished: false } => (Fail, String::new()),
        Ranks::With { others, least } if others == 0 || others < least => {
            let used = match (stopped_by, most) {
                (Some(_), _) => "no process takes its place, because a signal ends the run".to_string(),
                (None, 0) => "ddprun restarts none (--max-restarts 0)".to_string(),
                (None, _) => format!("all restarts are used up (--max-restarts {most})"),
            };
            let few = format!("the {others} remaining rank(s) are fewer than min_world_size ({least})");
            (Fail, format!("its process {exit}, {used}, and {few}"))
        }
        Ranks::With { others, .. } => (ScaleDown, format!("{what}: the other {others} rank(s) continue without it")),
    }
}

/// Decides what follows and why, counts a restart if one is used, and informs the ranks of an elastic run. `elastic`
/// holds these ranks, and the smallest number of them that may continue; `what` has happened, with the rank, and its node if there are
/// several.
pub(crate) fn on_exit(
    elastic: Option<(&mut Members, usize)>,
    exited: Exited,
    what: &str,
    restarts: &mut Restarts,
) -> Result<(Consequence, String)> {
    let Some((members, least)) = elastic else {
        let (consequence, reason) = judge(exited, what, Ranks::Fixed, *restarts);
        restarts.used += u32::from(consequence == Consequence::RestartAll);
        return Ok((consequence, reason));
    };
    let ranks = members.ranks(exited.rank, least)?;
    let (consequence, reason) = judge(exited, what, ranks, *restarts);
    let next = match consequence {
        Consequence::Replace => members.with_new([exited.rank]),
        Consequence::ScaleDown => members.without(|rank| rank == exited.rank),
        Consequence::EndRanks | Consequence::Fail => {
            match ranks {
                Ranks::With { .. } => members.fail(exited.rank, reason.clone())?,
                _ if !reason.is_empty() => message(&reason),
                _ => {}
            }
            return Ok((consequence, reason));
        }
        Consequence::Continue | Consequence::RestartAll => return Ok((consequence, reason)),
    };
    if !members.change(next)? {
        // Meanwhile, the ranks have ended the run.
        return Ok((Consequence::Fail, String::new()));
    }
    restarts.used += u32::from(consequence == Consequence::Replace);
    Ok((consequence, reason))
}

#[cfg(test)]
mod tests {
    use super::Consequence::*;
    use super::*;

    const FAILED: Exited = Exited { rank: 1, exit: Exit::Code(7) };
    const FINISHED: Exited = Exited { rank: 1, exit: Exit::Code(0) };

    #[test]
    fn what_follows_the_end_of_a_process() {
        let (some, none) = (Restarts { used: 1, ..Restarts::new(3) }, Restarts { used: 3, ..Restarts::new(3) });
        let stopped = Restarts { stopped_by: Some(15), ..some };
        let (enough, few) = (Ranks::With { others: 2, least: 2 }, Ranks::With { others: 1, least: 2 });
        let (fixed, without) = (Ranks::Fixed, Ranks::Without);
        let over = |finished| Ranks::Over { finished };
        for (exited, ranks, restarts, consequence, reason) in [
            (FAILED, fixed, some, RestartAll, "rank 1 exited with code 7: restarting all workers (restart 2 of 3)"),
            (FAILED, fixed, none, Fail, ""),
            (FINISHED, fixed, some, Continue, ""),
            (FAILED, few, some, Replace, "rank 1 exited with code 7: a new process takes its place (restart 2 of 3)"),
            (FAILED, enough, none, ScaleDown, "rank 1 exited with code 7: the other 2 rank(s) continue without it"),
            (FAILED, few, none, Fail, "all restarts are used up (--max-restarts 3), and the 1 remaining rank(s)"),
            (FAILED, few, Restarts::new(0), Fail, "ddprun restarts none (--max-restarts 0)"),
            (FAILED, enough, stopped, ScaleDown, "rank 1 exited with code 7: the other 2 rank(s) continue without it"),
            (FAILED, few, stopped, Fail, "no process takes its place, because a signal ends the run, and the 1"),
            (FAILED, fixed, stopped, Fail, ""),
            (FAILED, Ranks::With { others: 0, least: 0 }, none, Fail, "the 0 remaining rank(s)"),
            (FINISHED, enough, some, EndRanks, "its process exited with code 0 before all ranks had finished"),
            (FAILED, without, some, Continue, ""),
            (FINISHED, without, some, Continue, ""),
            (FAILED, over(true), some, Fail, "rank 1 exited with code 7 after all ranks had finished elastic::run"),
            (FAILED, over(false), some, Fail, ""),
            (FINISHED, over(true), some, Continue, ""),
        ] {
            let (judged, why) = judge(exited, &format!("rank 1 {}", exited.exit), ranks, restarts);
            assert_eq!((judged, why.is_empty()), (consequence, reason.is_empty()), "{why}");
            assert!(why.contains(reason), "{why}");
        }
    }
}
