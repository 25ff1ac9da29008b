//! The processes of an elastic run, as the launcher decides on them: one generation after the other, in one log.
use candle_ddp_rendezvous::Result;
use candle_ddp_rendezvous::{Decision, Generations, Member, Store};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The newest known generation.
pub(crate) struct Members {
    log: Generations,
    generation: u64,
    members: Vec<Member>,
    /// The last process with each rank.
    last: BTreeMap<usize, u64>,
    /// All ranks have completed their training.
    all_finished: bool,
}

/// The state of a run's ranks when the process of one of them has ended.
#[derive(Clone, Copy)]
pub(crate) enum Ranks {
    /// They do not run elastically.
    Fixed,
    /// They run elastically, and have ended their run; `finished` says whether all of them have done their work.
    Over { finished: bool },
    /// They run elastically, and have already continued without this rank.
    Without,
    /// They run elastically: this rank, and `others` more, which continue with no fewer than `least`.
    With { others: usize, least: usize },
}

impl Members {
    /// The first generation after workers of `world_size` ranks were started for the `attempt`th time.
    pub(crate) fn new(store: Arc<dyn Store>, attempt: u64, world_size: usize) -> Self {
        let members: Vec<Member> = (0..world_size).map(|rank| Member { rank, incarnation: 0 }).collect();
        let last = members.iter().map(|member| (member.rank, 0)).collect();
        Self {
            log: Generations::new(Generations::agent_prefix(attempt), store),
            generation: 0,
            members,
            last,
            all_finished: false,
        }
    }

    /// The smallest world size that the ranks accept, if they run elastically.
    pub(crate) fn announced(&self) -> Result<Option<usize>> {
        self.log.announced()
    }

    /// Reads what the ranks have decided; returns false if the run has ended.
    pub(crate) fn update(&mut self) -> Result<bool> {
        while let Some(decision) = self.log.get(self.generation + 1)? {
            let Decision::Members(members) = decision else {
                self.all_finished = decision == Decision::Done;
                return Ok(false);
            };
            (self.generation, self.members) = (self.generation + 1, members);
        }
        Ok(true)
    }

    /// The state of the run's ranks when the process of `rank` has ended. The run continues with no fewer ranks than
    /// `least`.
    pub(crate) fn ranks(&mut self, rank: usize, least: usize) -> Result<Ranks> {
        if !self.update()? {
            return Ok(Ranks::Over { finished: self.all_finished });
        }
        let others = self.without(|gone| gone == rank).len();
        Ok(if others < self.members.len() { Ranks::With { others, least } } else { Ranks::Without })
    }

    /// Whether there are such ranks among the present members.
    pub(crate) fn any(&self, are: impl Fn(usize) -> bool) -> bool {
        self.members.iter().any(|member| are(member.rank))
    }

    /// The present members without the `gone` ones.
    pub(crate) fn without(&self, gone: impl Fn(usize) -> bool) -> Vec<Member> {
        self.members.iter().copied().filter(|member| !gone(member.rank)).collect()
    }

    /// The present members with new processes for `ranks`.
    pub(crate) fn with_new(&self, ranks: impl IntoIterator<Item = usize>) -> Vec<Member> {
        let new: Vec<Member> = ranks
            .into_iter()
            .map(|rank| Member { rank, incarnation: self.last.get(&rank).map_or(0, |last| last + 1) })
            .collect();
        let mut members = self.without(|rank| new.iter().any(|member| member.rank == rank));
        members.extend(new);
        members.sort_by_key(|member| member.rank);
        members
    }

    /// Begins another generation; returns false if the ranks have decided otherwise in the meantime.
    pub(crate) fn change(&mut self, members: Vec<Member>) -> Result<bool> {
        let decision = Decision::Members(members.clone());
        if self.log.decide(self.generation + 1, &decision)? != decision {
            return Ok(false);
        }
        self.last.extend(members.iter().map(|member| (member.rank, member.incarnation)));
        (self.generation, self.members) = (self.generation + 1, members);
        Ok(true)
    }

    /// Ends the run because of `rank`.
    pub(crate) fn fail(&self, rank: usize, reason: String) -> Result<()> {
        self.log.decide(self.generation + 1, &Decision::Failed { rank, reason }).map(|_| ())
    }

    /// How often the process of `rank` was replaced.
    pub(crate) fn incarnation(&self, rank: usize) -> u64 {
        self.last.get(&rank).copied().unwrap_or(0)
    }
}
