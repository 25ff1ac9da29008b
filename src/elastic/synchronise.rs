//! Bringing all ranks of a generation to the same commit.
use super::placement::ring;
use super::shards::{ELASTIC, Holding};
use super::state::State;
use crate::host::host_identity;
use crate::process_group::ProcessGroup;
use crate::state::{Parts, summary};
use crate::warnings::warn_aloud;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// How a rank enters a generation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entrance {
    pub(super) generation: u64,
    /// This process has not been in an earlier generation.
    pub(super) is_new: bool,
    /// Processes of this run have trained before.
    pub(super) has_begun: bool,
    /// Whether the run starts from scratch if no rank was there before, and there is no checkpoint.
    pub(super) start_over: bool,
}

/// A rank's report about its state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Standing {
    commits: u64,
    /// It was there in an earlier generation. Among ranks without a commit, such a rank takes precedence.
    is_old: bool,
    has_begun: bool,
    /// It has loaded a checkpoint after all ranks were lost.
    has_loaded: bool,
    /// The identity of its machine.
    host: String,
    shards: Vec<Holding>,
    /// A hash of each part of its commit.
    parts: BTreeMap<String, u64>,
}

/// Gives all ranks the commit of the rank that is furthest ahead, and makes them return to it.
///
/// If parts are spread over the ranks, it is instead the commit of the rank that is furthest behind: all others still
/// have their shards of it.
pub(super) fn synchronise<S: Parts>(state: &mut State<S>, pg: &ProcessGroup, entrance: Entrance) -> Result<()> {
    let mut all = standings(state, pg, entrance, false)?;
    if all.iter().all(|standing| !standing.is_old) && all.iter().any(|standing| standing.has_begun) {
        let has_loaded = state.load_last(pg)?;
        all = standings(state, pg, entrance, has_loaded)?;
        begin_again(&all[root(&all)], pg, entrance)?;
    }
    let root = root(&all);
    let (commits, is_old) = (all[root].commits, all[root].is_old);
    if pg.rank() == root {
        warn_of_differences(&all, root);
    }
    let ring = ring(&all.iter().map(|standing| standing.host.as_str()).collect::<Vec<_>>());
    let holdings: Vec<Vec<Holding>> = all.iter().map(|standing| standing.shards.clone()).collect();
    let shards = ELASTIC.during(|| state.shards.gather(commits, &holdings, &ring, pg))?;
    if is_old && all.iter().all(|standing| (standing.commits, standing.is_old) == (commits, true)) {
        state.roll_back()?;
    } else {
        let committed = ELASTIC.during(|| pg.broadcast_tensors(state.committed(), root))?;
        log::debug!("rank {}: took over commit {commits} of rank {root}", pg.rank());
        state.adopt(commits, committed)?;
    }
    state.shards.settle(shards, &ring, pg);
    ELASTIC.during(|| state.roll_back_own())?;
    state.enter(pg)
}

/// The reports of all ranks.
fn standings<S: Parts>(
    state: &State<S>,
    pg: &ProcessGroup,
    entrance: Entrance,
    has_loaded: bool,
) -> Result<Vec<Standing>> {
    let Entrance { is_new, has_begun, .. } = entrance;
    let (commits, shards) = (state.commits(), state.shards.holdings());
    let host = format!("{:x}", host_identity(None));
    // All ranks gather, even one that cannot read its own commit.
    let fingerprints = if is_new { Ok(BTreeMap::new()) } else { state.fingerprints() };
    let fingerprints = ELASTIC.during(|| pg.agree(fingerprints))?;
    let parts = fingerprints.iter().map(|(name, fingerprint)| (name.clone(), summary(fingerprint))).collect();
    let own = Standing { commits, is_old: !is_new, has_begun, has_loaded, host, shards, parts };
    ELASTIC.during(|| pg.all_gather_object(&own))
}

/// Announces from where the run continues after all its ranks were lost, or ends it. All ranks take over the state of
/// `root`.
fn begin_again(root: &Standing, pg: &ProcessGroup, entrance: Entrance) -> Result<()> {
    let Entrance { generation, start_over, .. } = entrance;
    let lost = "all ranks of the run were lost, and every commit with them";
    // A process may also have loaded its checkpoint before the run.
    let has_checkpoint = root.has_loaded || root.commits > 0;
    if !has_checkpoint && !start_over {
        return Err(Error::Unavailable {
            what: "the last commit".to_string(),
            hint: format!(
                "{lost}. The program has no checkpoint to continue from (State::on_total_loss), and \
                 ElasticOptions::start_over is false"
            ),
        });
    }
    if pg.rank() == 0 {
        let next = match (has_checkpoint, root.commits) {
            (true, 0) => "continues from the program's checkpoint".to_string(),
            (true, commits) => format!("continues from the program's checkpoint, commit {commits}"),
            (false, _) => "starts from scratch, since the program has no checkpoint (State::on_total_loss)".to_string(),
        };
        warn_aloud(format_args!("{lost}: generation {generation} {next}"));
    }
    Ok(())
}

/// Warns of parts that have come to differ since the first commit of a generation, which compares them.
fn warn_of_differences(all: &[Standing], root: usize) {
    let same_commit = |standing: &&Standing| standing.is_old && standing.commits == all[root].commits;
    for (name, hash) in &all[root].parts {
        let other = all.iter().filter(same_commit).any(|standing| standing.parts.get(name) != Some(hash));
        if other {
            warn_aloud(format_args!(
                "the part {name:?} was not the same on all ranks in commit {}: all ranks continue with rank {root}'s. \
                 Use PerRank(part) to keep each rank's own, or RankZero(part) if one rank's serves all ranks",
                all[root].commits
            ));
        }
    }
}

/// The rank whose commit all take over.
fn root(all: &[Standing]) -> usize {
    let ranks = 0..all.len();
    let furthest = |rank: &usize| {
        let Standing { commits, is_old, has_loaded, .. } = all[*rank];
        (commits, is_old, has_loaded, Reverse(*rank))
    };
    let root = match all.iter().all(|standing| standing.shards.is_empty()) {
        true => ranks.max_by_key(furthest),
        false => ranks.filter(|rank| all[*rank].is_old).min_by_key(|rank| (all[*rank].commits, *rank)),
    };
    root.unwrap_or(0)
}
