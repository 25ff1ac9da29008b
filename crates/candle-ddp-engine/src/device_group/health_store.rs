//! The ranks' messages to each other through the store: heartbeats, the group's failure and, if a call does not complete,
//! each rank's progress.
use crate::Result;
use crate::error::Failure;
use crate::failure::{CallCounts, ProgressReport};
use crate::host::host_name;
use crate::rendezvous::json::{decide, encode};
use crate::rendezvous::liveness::{goodbye, heartbeat, heartbeat_key, leave_will, notice};
use crate::rendezvous::{LastWill, Store};
use candle_ddp_base::debug_fields;
use candle_ddp_base::wire::{Reader, Writer};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The first failure of any rank; empty while there is none.
const FAILURE: &str = "failure";
/// The rank that asks for all ranks' progress, and which of its collectives has expired; empty while no rank asks.
const QUERY: &str = "query";

/// How often a rank has asked where all ranks stand.
const STANDING: &str = "standing";

/// The rank that left first, and after which collective; empty while no rank has left.
const DEPARTURE: &str = "departure";
/// The number of ranks that have left.
const LEFT: &str = "left";

fn report_key(rank: usize) -> String {
    format!("report/{rank}")
}

/// Where this rank stands, behind the number of the question that it answers; empty before the first one.
fn standing_key(rank: usize) -> String {
    format!("standing/{rank}")
}

/// Set once this rank knows the group's failure.
fn told_key(rank: usize) -> String {
    format!("told/{rank}")
}

/// One rank's view of its group's keys.
pub struct HealthStore {
    store: Arc<dyn Store>,
    rank: usize,
    world_size: usize,
    /// Reports the end of this process to the others.
    will: Option<LastWill>,
}

/// Asks every rank for its progress because this collective of rank `rank` has expired.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ProgressQuery {
    pub(super) rank: usize,
    pub(super) sequence: u64,
}

/// A rank that has left in good order after this collective. A rank leaves once all its collectives are complete, so
/// ranks that leave later have completed at least as many.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ShutdownRecord {
    pub(super) rank: usize,
    pub(super) last: u64,
}

/// The last calls of a leaving rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ShutdownNotice {
    /// Its last collective.
    pub(super) last: u64,
    /// The numbers of its last messages to and from each peer with which it exchanged any.
    pub(super) messages: BTreeMap<usize, Messages>,
}

/// The numbers of a rank's last messages to and from one peer; 0 for none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Messages {
    pub(super) sent: u64,
    pub(super) received: u64,
}

/// The result of one request to the store.
#[derive(Debug, Default)]
pub(super) struct Look {
    pub(super) failure: Option<Failure>,
    pub(super) query: Option<ProgressQuery>,
    /// How often a rank has asked where all ranks stand.
    pub(super) asked: u64,
    /// The first rank that left.
    pub(super) departure: Option<ShutdownRecord>,
    pub(super) heartbeat: Vec<u8>,
}

debug_fields!(HealthStore: rank, world_size);

impl HealthStore {
    /// Creates this rank's keys. The keys of other ranks may be read once all ranks have done so.
    pub fn new(store: Arc<dyn Store>, rank: usize, world_size: usize) -> Result<Self> {
        let health_store = Self { store, rank, world_size, will: None };
        health_store.beat(0)?;
        // Sets missing values to empty, so that they can be read without waiting.
        for key in [FAILURE, QUERY, DEPARTURE] {
            health_store.store.compare_set(key, b"", b"")?;
        }
        health_store.store.add(STANDING, 0)?;
        health_store.store.set(&standing_key(rank), b"")?;
        Ok(health_store)
    }

    /// Asks the store to publish the end of this process as a failure, if that comes before the end of this value.
    pub fn leave_will(mut self) -> Self {
        let reason = format!(
            "its process on host {} ended without leaving the group. Look for the first error in its output",
            host_name()
        );
        let failure = encode(&Failure::PeerFailed { peer: self.rank, reason });
        self.will = leave_will(&*self.store, self.rank, FAILURE, &failure);
        self
    }

    /// Writes this rank's heartbeat.
    pub(super) fn beat(&self, number: u64) -> Result<()> {
        self.store.set(&heartbeat_key(self.rank), &heartbeat(number))
    }

    /// Announces that this rank leaves in good order.
    pub(super) fn leave(&self, notice: &ShutdownNotice) -> Result<()> {
        decide(&*self.store, DEPARTURE, &ShutdownRecord { rank: self.rank, last: notice.last })?;
        let mut writer = Writer::default();
        writer.u64(notice.last);
        for (peer, Messages { sent, received }) in &notice.messages {
            writer.u32(*peer as u32).u64(*sent).u64(*received);
        }
        self.store.set(&heartbeat_key(self.rank), &goodbye(&writer.0))?;
        // Nobody need wait for an answer.
        self.answer_standing(u64::MAX, &[])?;
        self.close()
    }

    /// Counts this rank among those that have left. The last one removes the keys, which nobody reads any more.
    fn close(&self) -> Result<()> {
        if self.store.add(LEFT, 1)? < self.world_size as i64 {
            return Ok(());
        }
        let of_ranks = (0..self.world_size)
            .flat_map(|rank| [heartbeat_key(rank), report_key(rank), told_key(rank), standing_key(rank)]);
        for key in [FAILURE, QUERY, DEPARTURE, STANDING, LEFT].map(str::to_string).into_iter().chain(of_ranks) {
            self.store.delete(&key)?;
        }
        Ok(())
    }

    /// How many calls that concern this rank `peer` made, if it has left.
    pub(super) fn counts_of(&self, peer: usize) -> Result<Option<CallCounts>> {
        let heartbeat = self.store.get(&heartbeat_key(peer))?;
        Ok(notice(&heartbeat).and_then(|notice| decode_counts(notice, self.rank)))
    }

    /// Tells all ranks of `failure`, unless another one was published before; returns the first one.
    pub(super) fn publish(&self, failure: &Failure) -> Result<Failure> {
        decide(&*self.store, FAILURE, failure)
    }

    /// Records that this rank knows the group's failure.
    pub(super) fn set_told(&self) -> Result<()> {
        self.store.set(&told_key(self.rank), b"")
    }

    /// Whether all ranks know the group's failure, except for `culprit`, which may be dead.
    pub(super) fn all_told_but(&self, culprit: Option<usize>) -> Result<bool> {
        let keys: Vec<String> = (0..self.world_size).filter(|rank| Some(*rank) != culprit).map(told_key).collect();
        self.store.check(&keys.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// Whether the other ranks lose the store when this process ends.
    pub(super) fn is_hosted_here(&self) -> bool {
        self.store.is_hosted_here()
    }

    /// Reads everything that concerns this rank, and the heartbeat of `peer`, in one request.
    pub(super) fn look(&self, peer: usize) -> Result<Look> {
        let values = self.store.multi_get(&[FAILURE, QUERY, STANDING, DEPARTURE, &heartbeat_key(peer)])?;
        let [failure, query, asked, departure, heartbeat] = &values[..] else { return Ok(Look::default()) };
        Ok(Look {
            failure: decode(failure),
            query: decode(query),
            asked: decode(asked).unwrap_or_default(),
            departure: decode(departure),
            heartbeat: heartbeat.clone(),
        })
    }

    /// The heartbeats of all ranks.
    pub(super) fn heartbeats(&self) -> Result<Vec<Vec<u8>>> {
        let keys: Vec<String> = (0..self.world_size).map(heartbeat_key).collect();
        self.store.multi_get(&keys.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// Asks all ranks for their progress, unless another rank has asked before; returns the first query.
    pub(super) fn ask(&self, sequence: u64) -> Result<ProgressQuery> {
        decide(&*self.store, QUERY, &ProgressQuery { rank: self.rank, sequence })
    }

    /// Answers the query.
    pub(super) fn answer(&self, report: &ProgressReport) -> Result<()> {
        let mut writer = Writer::default();
        report.encode(&mut writer);
        self.store.set(&report_key(self.rank), &writer.0)
    }

    /// Asks all ranks where they stand. Returns the number of the question.
    pub(super) fn ask_standing(&self) -> Result<u64> {
        Ok(self.store.add(STANDING, 1)?.cast_unsigned())
    }

    /// Answers question number `number`, and those before it.
    pub(super) fn answer_standing(&self, number: u64, report: &[u8]) -> Result<()> {
        let answer = [&number.to_le_bytes(), report].concat();
        self.store.set(&standing_key(self.rank), &answer)
    }

    /// The answers of the other ranks to question number `number`; `None` for ranks that have not answered it yet.
    pub(super) fn standings(&self, number: u64) -> Result<Vec<Option<Vec<u8>>>> {
        let keys: Vec<String> = (0..self.world_size).filter(|rank| *rank != self.rank).map(standing_key).collect();
        let answers = self.store.multi_get(&keys.iter().map(String::as_str).collect::<Vec<_>>())?;
        let answer = |bytes: Vec<u8>| {
            let (answered, report) = bytes.split_first_chunk()?;
            (u64::from_le_bytes(*answered) >= number).then(|| report.to_vec())
        };
        Ok(answers.into_iter().map(answer).collect())
    }

    /// The answers of all ranks; `None` for ranks that have not answered yet.
    pub(super) fn reports(&self) -> Result<Vec<Option<ProgressReport>>> {
        (0..self.world_size)
            .map(|rank| {
                let key = report_key(rank);
                Ok(if self.store.check(&[&key])? {
                    ProgressReport::decode(&mut Reader(&self.store.get(&key)?))
                } else {
                    None
                })
            })
            .collect()
    }
}

impl Drop for HealthStore {
    fn drop(&mut self) {
        if let Some(will) = self.will.take() {
            will.withdraw();
        }
    }
}

/// The number of calls that concern rank `rank`, from the notice of a rank that has left.
fn decode_counts(notice: &[u8], rank: usize) -> Option<CallCounts> {
    let mut reader = Reader(notice);
    let collectives = reader.u64()?;
    let next = || Some((reader.rank()?, Messages { sent: reader.u64()?, received: reader.u64()? }));
    let Messages { sent, received } =
        std::iter::from_fn(next).find(|(peer, _)| *peer == rank).map(|(_, messages)| messages).unwrap_or_default();
    Some(CallCounts { collectives, sent, received })
}

/// The value of a key that is empty until it is decided. A value that cannot be read counts as none, since a stray value must
/// not end a group.
fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Option<T> {
    serde_json::from_slice(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::HashStore;
    use crate::rendezvous::liveness::has_left;
    use crate::{Call, Operation};
    use std::time::Duration;

    fn ranks<const N: usize>() -> [HealthStore; N] {
        let store: Arc<dyn Store> = Arc::new(HashStore::new(Duration::from_secs(5)));
        std::array::from_fn(|rank| HealthStore::new(store.clone(), rank, N).unwrap())
    }

    #[test]
    fn the_first_failure_is_everybodys() {
        let [a, b] = ranks();
        assert_eq!(a.look(1).unwrap().failure, None);
        let failure = |peer| Failure::PeerFailed { peer, reason: "disk full".into() };
        assert_eq!(b.publish(&failure(1)).unwrap(), failure(1));
        assert_eq!(a.publish(&failure(0)).unwrap(), failure(1));
        assert_eq!(a.look(1).unwrap().failure, Some(failure(1)));
    }

    #[test]
    fn a_rank_that_comes_late_does_not_wipe_out_a_failure() {
        let store: Arc<dyn Store> = Arc::new(HashStore::new(Duration::from_secs(5)));
        let failure = Failure::PeerFailed { peer: 1, reason: "no device".into() };
        HealthStore::new(store.clone(), 1, 2).unwrap().publish(&failure).unwrap();
        assert_eq!(HealthStore::new(store, 0, 2).unwrap().look(1).unwrap().failure, Some(failure));
    }

    #[test]
    fn heartbeats_and_goodbyes_are_seen() {
        let [a, b, _c] = ranks();
        assert_eq!(a.look(1).unwrap().heartbeat, heartbeat(0));
        b.beat(7).unwrap();
        assert_eq!(a.look(1).unwrap().heartbeat, heartbeat(7));
        assert_eq!(a.counts_of(1).unwrap(), None);
        let messages = |sent, received| Messages { sent, received };
        let notice = ShutdownNotice { last: 40, messages: [(3, messages(1, 2)), (0, messages(3, 1 << 40))].into() };
        b.leave(&notice).unwrap();
        assert_eq!(
            a.heartbeats().unwrap().iter().map(|heartbeat| has_left(heartbeat)).collect::<Vec<_>>(),
            [false, true, false]
        );
        let counts = CallCounts { collectives: 40, sent: 3, received: 1 << 40 };
        assert_eq!(a.counts_of(1).unwrap(), Some(counts));
        a.leave(&ShutdownNotice { last: 41, messages: [(3, messages(1, 2))].into() }).unwrap();
        assert_eq!(b.look(0).unwrap().departure, Some(ShutdownRecord { rank: 1, last: 40 }));
        assert_eq!(b.counts_of(0).unwrap(), Some(CallCounts { collectives: 41, ..CallCounts::default() }));
    }

    #[test]
    fn the_last_one_that_leaves_removes_all_keys() {
        let all: [_; 3] = ranks();
        let store = &all[0].store;
        all[1].ask(5).unwrap();
        all[2].answer(&ProgressReport::default()).unwrap();
        for health_store in &all {
            assert!(store.num_keys().unwrap() >= 3 + 1 + 3, "{:?}", store.num_keys());
            health_store.leave(&ShutdownNotice::default()).unwrap();
        }
        assert_eq!(store.num_keys().unwrap(), 0);
    }

    #[test]
    fn one_query_is_open_and_all_answers_arrive() {
        let [a, b] = ranks();
        let query = ProgressQuery { rank: 0, sequence: 9 };
        assert_eq!(a.ask(9).unwrap(), query);
        assert_eq!(b.ask(10).unwrap(), query);
        assert_eq!(b.look(0).unwrap().query, Some(query));
        assert_eq!(a.reports().unwrap(), [None, None]);
        let nothing = ProgressReport::default();
        let calls = vec![Call::bare(Operation::Barrier), Call { count: 8, ..Call::bare(Operation::AllReduce) }];
        let further = ProgressReport { started: 12, begun: 12, calls, ..nothing.clone() };
        a.answer(&nothing).unwrap();
        b.answer(&further).unwrap();
        assert_eq!(a.reports().unwrap(), [Some(nothing), Some(further)]);
    }
}
