//! The generations of an elastic run: which ranks belong to each, as one log of decisions in the store.
//!
//! Entry `n` says what follows generation `n - 1`: new members, or the end of the run. Whoever writes an entry first
//! decides it, and all others read it, so no two processes ever act on different decisions. Under `ddprun`, the
//! launcher decides who belongs to a generation; elsewhere, the surviving ranks do.
use super::{PrefixStore, Store};
use crate::Result;
use crate::json::{decide, encode, read};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// The variable by which `ddprun` tells its workers that it keeps the log: `RUN_ID/ATTEMPT/INCARNATION/MIN_WORLD_SIZE`.
pub const AGENT_VARIABLE: &str = "CANDLE_DDP_AGENT";

/// Set in the store of a run when its first ranks have begun to train elastically. Unlike their log, it remains when all
/// workers are started again.
pub const BEGUN: &str = "candle_ddp/begun";

/// The value of [`AGENT_VARIABLE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Told {
    /// How often it had started all workers before.
    pub attempt: u64,
    /// How often it has replaced this worker since then.
    pub incarnation: u64,
    /// The smallest world size with which the run continues, unless the program says otherwise.
    pub min_world_size: usize,
}

/// A process of a generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// Its rank in the first generation, which it keeps.
    pub rank: usize,
    /// How often the process with this rank was replaced.
    pub incarnation: u64,
}

/// An entry of the log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Decision {
    /// Another generation begins, with these processes in the order of their new ranks.
    Members(#[serde(with = "runs")] Vec<Member>),
    /// All ranks have finished.
    Done,
    /// The run cannot continue, because of this rank.
    Failed {
        /// Its rank in the first generation.
        rank: usize,
        /// Why.
        reason: String,
    },
}

impl Decision {
    /// The members of the first generation of `world_size` ranks.
    pub fn everyone(world_size: usize) -> Self {
        Self::Members((0..world_size).map(|rank| Member { rank, incarnation: 0 }).collect())
    }
}

/// Members as runs of consecutive ranks with the same incarnation: `[first rank, count, incarnation]`. All ranks read each
/// decision, which must not grow with their number.
mod runs {
    use super::Member;
    use candle_ddp_base::MOST_RANKS as MOST;
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(members: &[Member], serializer: S) -> Result<S::Ok, S::Error> {
        let follows = |before: &Member, next: &Member| {
            before.rank.checked_add(1) == Some(next.rank) && before.incarnation == next.incarnation
        };
        let runs = members.chunk_by(follows).map(|run| (run[0].rank, run.len(), run[0].incarnation));
        runs.collect::<Vec<_>>().serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Member>, D::Error> {
        let runs = Vec::<(usize, usize, u64)>::deserialize(deserializer)?;
        let mut members = Vec::new();
        for (first, count, incarnation) in runs {
            let last = first.checked_add(count).filter(|_| count <= MOST - members.len());
            let last = last.ok_or_else(|| D::Error::custom(format!("there must be at most {MOST} members")))?;
            members.extend((first..last).map(|rank| Member { rank, incarnation }));
        }
        Ok(members)
    }
}

/// The log of a run.
#[derive(Clone, Debug)]
pub struct Generations {
    store: PrefixStore,
}

/// Set by ranks that run elastically, to the smallest world size that they accept.
const ELASTIC: &str = "elastic";

impl Generations {
    /// The log under `prefix`.
    pub fn new(prefix: impl Into<String>, store: Arc<dyn Store>) -> Self {
        Self { store: PrefixStore::new(prefix, store) }
    }

    /// The prefix of the log that `ddprun` keeps for its workers. Each start of all workers has its own.
    pub fn agent_prefix(attempt: u64) -> String {
        format!("candle_ddp/agent/{attempt}")
    }

    /// The key of entry `number`, without the prefix.
    pub fn key(number: u64) -> String {
        format!("generation/{number}")
    }

    /// The prefix, within the log's, of the keys of one generation.
    pub fn prefix_of(number: u64) -> String {
        format!("of/{number}")
    }

    /// The store under the log's prefix.
    pub fn store(&self) -> &PrefixStore {
        &self.store
    }

    /// Writes entry `number` unless it is there already; returns the entry that counts.
    pub fn decide(&self, number: u64, decision: &Decision) -> Result<Decision> {
        decide(&self.store, &Self::key(number), decision)
    }

    /// Entry `number`, if it was written.
    pub fn get(&self, number: u64) -> Result<Option<Decision>> {
        read(&self.store, &Self::key(number))
    }

    /// Tells the launcher that a rank runs elastically.
    pub fn announce(&self, min_world_size: usize) -> Result<()> {
        self.store.set(ELASTIC, &encode(&min_world_size))
    }

    /// The smallest world size that the ranks accept, if they run elastically.
    pub fn announced(&self) -> Result<Option<usize>> {
        read(&self.store, ELASTIC)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HashStore;
    use std::time::Duration;

    #[test]
    fn the_first_decision_counts() {
        let log = Generations::new("log", Arc::new(HashStore::new(Duration::from_secs(120))));
        assert_eq!(log.get(1).unwrap(), None);
        let without = Decision::Members(vec![Member { rank: 0, incarnation: 0 }, Member { rank: 2, incarnation: 3 }]);
        assert_eq!(log.decide(1, &without).unwrap(), without);
        assert_eq!(log.decide(1, &Decision::Done).unwrap(), without);
        assert_eq!(log.get(1).unwrap(), Some(without));
        let failed = Decision::Failed { rank: 3, reason: "no disk\nleft".to_string() };
        assert_eq!(log.decide(3, &failed).unwrap(), failed);
        assert_eq!(log.get(3).unwrap(), Some(failed));
        let Decision::Members(all) = Decision::everyone(2) else { panic!() };
        assert_eq!(all, [Member { rank: 0, incarnation: 0 }, Member { rank: 1, incarnation: 0 }]);
        log.store().set("generation/2", b"members 1").unwrap();
        assert!(log.get(2).unwrap_err().to_string().contains("another version"));
    }

    #[test]
    fn a_decision_is_short_however_many_its_members_are() {
        let member = |rank, incarnation| Member { rank, incarnation };
        let round_trip = |members: Vec<Member>| {
            let text = encode(&Decision::Members(members.clone()));
            let decoded: Decision = crate::json::decode("key", &text).unwrap();
            assert_eq!(decoded, Decision::Members(members));
            String::from_utf8(text).unwrap()
        };
        let mut all: Vec<Member> = (0..1000).map(|rank| member(rank, 0)).collect();
        assert_eq!(round_trip(all.clone()), r#"{"Members":[[0,1000,0]]}"#);
        all.remove(7);
        all[500].incarnation = 2;
        assert_eq!(round_trip(all), r#"{"Members":[[0,7,0],[8,493,0],[501,1,2],[502,498,0]]}"#);
        round_trip(vec![]);
        round_trip(vec![member(3, 0), member(2, 0), member(2, 1), member(usize::MAX - 1, u64::MAX)]);
        let decode = |text: &str| crate::json::decode::<Decision>("key", text.as_bytes());
        decode(r#"{"Members":[[0,1048576,0]]}"#).unwrap();
        let refusal = |text: &str| decode(text).map(drop).unwrap_err().to_string();
        for wrong in ["[0,1048577,0]", "[0,1048576,0],[1048576,1,0]", "[18446744073709551615,1048576,0]"] {
            let error = refusal(&format!(r#"{{"Members":[{wrong}]}}"#));
            assert!(error.contains("at most 1048576 members"), "{error}");
        }
    }

    #[test]
    fn ranks_announce_themselves() {
        let log = Generations::new("log", Arc::new(HashStore::new(Duration::from_secs(120))));
        assert_eq!(log.announced().unwrap(), None);
        log.announce(2).unwrap();
        assert_eq!(log.announced().unwrap(), Some(2));
    }
}
