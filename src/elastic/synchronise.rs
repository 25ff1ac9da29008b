//! Bringing all ranks of a generation to the same commit.
use super::placement::ring;
use super::shards::Holding;
use super::state::{Parts, State};
use crate::Result;
use crate::backend::Label;
use crate::host::host_name;
use crate::process_group::ProcessGroup;
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;

/// What a rank has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Standing {
    commits: u64,
    /// It was there in an earlier generation. Of ranks without a commit, one that was counts.
    is_old: bool,
    host: String,
    shards: Vec<Holding>,
}

/// Gives all ranks the commit of the one that is furthest, and has them go back to it. `is_new` says that this process has
/// not been in an earlier generation.
///
/// Where parts are spread over the ranks, it is the commit of the rank that is furthest behind: all others still have their
/// shards of that.
pub(super) fn synchronise<S: Parts>(state: &mut State<S>, pg: &ProcessGroup, is_new: bool) -> Result<()> {
    let (commits, host, shards) = (state.commits(), host_name(), state.shards.holdings());
    let own = Standing { commits, is_old: !is_new, host, shards };
    let all = Label::ELASTIC.during(|| pg.all_gather_object(&own))?;
    let root = root(&all);
    let (commits, is_old) = (all[root].commits, all[root].is_old);
    let ring = ring(&all.iter().map(|standing| standing.host.as_str()).collect::<Vec<_>>());
    let holdings: Vec<Vec<Holding>> = all.iter().map(|standing| standing.shards.clone()).collect();
    let shards = Label::ELASTIC.during(|| state.shards.gather(commits, &holdings, &ring, pg))?;
    if is_old && all.iter().all(|standing| (standing.commits, standing.is_old) == (commits, true)) {
        state.roll_back()?;
    } else {
        let committed = Label::ELASTIC.during(|| pg.broadcast_tensors(state.committed(), root))?;
        log::debug!("rank {}: took over commit {commits} of rank {root}", pg.rank());
        state.adopt(commits, committed)?;
    }
    state.shards.settle(shards, &ring, pg);
    state.enter(pg);
    Ok(())
}

/// The rank whose commit all take over.
fn root(all: &[Standing]) -> usize {
    let ranks = 0..all.len();
    let furthest = |rank: &usize| (all[*rank].commits, all[*rank].is_old, Reverse(*rank));
    let root = match all.iter().all(|standing| standing.shards.is_empty()) {
        true => ranks.max_by_key(furthest),
        false => ranks.filter(|rank| all[*rank].is_old).min_by_key(|rank| (all[*rank].commits, *rank)),
    };
    root.unwrap_or(0)
}
