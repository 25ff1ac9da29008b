//! What the ranks of a group tell each other through the store, beside NCCL: signs of heartbeat, the group's failure, and,
//! when a call does not end, where everybody is.
use super::report::{Messages, ProgressReport, ShutdownNotice};
use crate::Result;
use crate::backend::call::Call;
use crate::backend::wire::{Reader, Writer};
use crate::error::Failure;
use crate::rendezvous::Store;
use std::sync::Arc;

/// The first failure of any rank; empty while all is well.
const FAILURE: &str = "failure";
/// Who waits in vain, and in which collective; empty while nobody does.
const QUESTION: &str = "query";

/// The rank that was the first to leave, and after which collective; empty while all are there.
const DEPARTURE: &str = "departure";

fn life_key(rank: usize) -> String {
    format!("heartbeat/{rank}")
}

fn standing_key(rank: usize) -> String {
    format!("report/{rank}")
}

/// One rank's view of its group's keys.
pub(super) struct HealthStore {
    store: Arc<dyn Store>,
    rank: usize,
    world_size: usize,
}

/// A peer's last sign of heartbeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Heartbeat {
    /// A number that changes.
    Beats(u64),
    /// It has left in good order.
    Left,
}

/// Asks every rank for its progress because this collective timed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ProgressQuery {
    pub(super) rank: usize,
    pub(super) sequence: u64,
}

/// A rank that has left in good order, after this collective. Since a rank leaves when all its collectives are over, none
/// of those that leave later does so after an earlier one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ShutdownRecord {
    pub(super) rank: usize,
    pub(super) last: u64,
}

/// What a look at the health_store shows.
#[derive(Debug)]
pub(super) struct Look {
    pub(super) failure: Option<Failure>,
    pub(super) query: Option<ProgressQuery>,
    /// The first one.
    pub(super) departure: Option<ShutdownRecord>,
    pub(super) heartbeat: Heartbeat,
}

impl HealthStore {
    /// Makes this rank's keys. The others may be looked at once all ranks have done so.
    pub(super) fn new(store: Arc<dyn Store>, rank: usize, world_size: usize) -> Result<Self> {
        let health_store = Self { store, rank, world_size };
        health_store.beat(0)?;
        // Set to nothing if they are not there, so that they can be looked at without waiting.
        health_store.store.compare_set(FAILURE, b"", b"")?;
        health_store.store.compare_set(QUESTION, b"", b"")?;
        health_store.store.compare_set(DEPARTURE, b"", b"")?;
        Ok(health_store)
    }

    /// A sign of heartbeat.
    pub(super) fn beat(&self, number: u64) -> Result<()> {
        self.store.set(&life_key(self.rank), &encode_life(Heartbeat::Beats(number)))
    }

    /// The goodbye of a rank that leaves in good order.
    pub(super) fn leave(&self, shutdown_notice: &ShutdownNotice) -> Result<()> {
        self.store.compare_set(DEPARTURE, b"", &encode_place(self.rank, shutdown_notice.last))?;
        let mut writer = Writer(encode_life(Heartbeat::Left));
        for (peer, Messages { sent, received }) in &shutdown_notice.messages {
            writer.u32(*peer as u32).u64(*sent).u64(*received);
        }
        self.store.set(&life_key(self.rank), &writer.0)
    }

    /// The messages between this rank and `peer`, as `peer` counted them, if it has left.
    pub(super) fn messages_of(&self, peer: usize) -> Result<Option<Messages>> {
        let value = self.store.get(&life_key(peer))?;
        Ok((decode_life(&value) == Heartbeat::Left).then(|| decode_messages(&value, self.rank)))
    }

    /// Tells all ranks of `failure`, unless there was another before; the first one.
    pub(super) fn publish(&self, failure: &Failure) -> Result<Failure> {
        let mut writer = Writer::default();
        failure.encode(&mut writer);
        let first = self.store.compare_set(FAILURE, b"", &writer.0)?;
        Ok(Failure::decode(&mut Reader(&first)).unwrap_or_else(|| failure.clone()))
    }

    /// Everything that concerns this rank and how `peer` is, in one request.
    pub(super) fn look(&self, peer: usize) -> Result<Look> {
        let values = self.store.multi_get(&[FAILURE, QUESTION, DEPARTURE, &life_key(peer)])?;
        let [failure, query, departure, heartbeat] = &values[..] else { return Ok(Look::nothing()) };
        Ok(Look {
            failure: Failure::decode(&mut Reader(failure)),
            query: decode_question(query),
            departure: decode_departure(departure),
            heartbeat: decode_life(heartbeat),
        })
    }

    /// How all ranks are.
    pub(super) fn heartbeats(&self) -> Result<Vec<Heartbeat>> {
        let keys: Vec<String> = (0..self.world_size).map(life_key).collect();
        let values = self.store.multi_get(&keys.iter().map(String::as_str).collect::<Vec<_>>())?;
        Ok(values.iter().map(|value| decode_life(value)).collect())
    }

    /// Asks all ranks where they are, unless another did before; the first query.
    pub(super) fn ask(&self, sequence: u64) -> Result<ProgressQuery> {
        let query = ProgressQuery { rank: self.rank, sequence };
        let first = self.store.compare_set(QUESTION, b"", &encode_place(self.rank, sequence))?;
        Ok(decode_question(&first).unwrap_or(query))
    }

    /// Answers the query.
    pub(super) fn answer(&self, report: &ProgressReport) -> Result<()> {
        self.store.set(&standing_key(self.rank), &encode_standing(report))
    }

    /// The answers of all ranks; `None` where there is none yet.
    pub(super) fn reports(&self) -> Result<Vec<Option<ProgressReport>>> {
        (0..self.world_size)
            .map(|rank| {
                let key = standing_key(rank);
                Ok(if self.store.check(&[&key])? { decode_standing(&self.store.get(&key)?) } else { None })
            })
            .collect()
    }
}

impl Look {
    fn nothing() -> Self {
        Self { failure: None, query: None, departure: None, heartbeat: Heartbeat::Beats(0) }
    }
}

fn encode_life(heartbeat: Heartbeat) -> Vec<u8> {
    let mut writer = Writer::default();
    match heartbeat {
        Heartbeat::Beats(number) => writer.u8(0).u64(number),
        Heartbeat::Left => writer.u8(1),
    };
    writer.0
}

/// What cannot be read counts as a beat: a stray value must not kill a group.
fn decode_life(bytes: &[u8]) -> Heartbeat {
    let mut reader = Reader(bytes);
    match (reader.u8(), reader.u64()) {
        (Some(1), _) => Heartbeat::Left,
        (_, number) => Heartbeat::Beats(number.unwrap_or(0)),
    }
}

/// The messages with rank `rank`, behind a sign of heartbeat that says goodbye.
fn decode_messages(bytes: &[u8], rank: usize) -> Messages {
    let mut reader = Reader(bytes.get(1..).unwrap_or_default());
    let next = || Some((reader.rank()?, Messages { sent: reader.u64()?, received: reader.u64()? }));
    std::iter::from_fn(next).find(|(peer, _)| *peer == rank).map_or_else(Messages::default, |(_, messages)| messages)
}

/// A rank, and a collective.
fn encode_place(rank: usize, sequence: u64) -> Vec<u8> {
    let mut writer = Writer::default();
    writer.u32(rank as u32).u64(sequence);
    writer.0
}

fn decode_place(bytes: &[u8]) -> Option<(usize, u64)> {
    let mut reader = Reader(bytes);
    Some((reader.rank()?, reader.u64()?))
}

fn decode_question(bytes: &[u8]) -> Option<ProgressQuery> {
    decode_place(bytes).map(|(rank, sequence)| ProgressQuery { rank, sequence })
}

fn decode_departure(bytes: &[u8]) -> Option<ShutdownRecord> {
    decode_place(bytes).map(|(rank, last)| ShutdownRecord { rank, last })
}

fn encode_standing(report: &ProgressReport) -> Vec<u8> {
    let mut writer = Writer::default();
    writer.u64(report.started).u64(report.finished).u32(report.calls.len() as u32);
    report.calls.iter().for_each(|call| call.encode(&mut writer));
    writer.0
}

fn decode_standing(bytes: &[u8]) -> Option<ProgressReport> {
    let mut reader = Reader(bytes);
    let (started, finished, count) = (reader.u64()?, reader.u64()?, reader.u32()?);
    let calls = (0..count).map(|_| Call::decode(&mut reader)).collect::<Option<_>>()?;
    Some(ProgressReport { started, finished, calls })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::call::Operation;
    use crate::rendezvous::HashStore;
    use std::time::Duration;

    fn two_ranks() -> [HealthStore; 2] {
        let store: Arc<dyn Store> = Arc::new(HashStore::new(Duration::from_secs(5)));
        [0, 1].map(|rank| HealthStore::new(store.clone(), rank, 2).unwrap())
    }

    #[test]
    fn the_first_failure_is_everybodys() {
        let [a, b] = two_ranks();
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
    fn signs_of_life_and_goodbyes_are_seen() {
        let [a, b] = two_ranks();
        assert_eq!(a.look(1).unwrap().heartbeat, Heartbeat::Beats(0));
        b.beat(7).unwrap();
        assert_eq!(a.look(1).unwrap().heartbeat, Heartbeat::Beats(7));
        assert_eq!(a.messages_of(1).unwrap(), None);
        let messages = |sent, received| Messages { sent, received };
        let shutdown_notice =
            ShutdownNotice { last: 40, messages: [(3, messages(1, 2)), (0, messages(3, 1 << 40))].into() };
        b.leave(&shutdown_notice).unwrap();
        assert_eq!(a.heartbeats().unwrap(), [Heartbeat::Beats(0), Heartbeat::Left]);
        assert_eq!(a.messages_of(1).unwrap(), Some(messages(3, 1 << 40)));
        a.leave(&ShutdownNotice { last: 41, messages: [(3, messages(1, 2))].into() }).unwrap();
        assert_eq!(b.look(0).unwrap().departure, Some(ShutdownRecord { rank: 1, last: 40 }));
        assert_eq!(b.messages_of(0).unwrap(), Some(Messages::default()));
    }

    #[test]
    fn one_question_is_asked_and_all_answers_survive_their_journey() {
        let [a, b] = two_ranks();
        let query = ProgressQuery { rank: 0, sequence: 9 };
        assert_eq!(a.ask(9).unwrap(), query);
        assert_eq!(b.ask(10).unwrap(), query);
        assert_eq!(b.look(0).unwrap().query, Some(query));
        assert_eq!(a.reports().unwrap(), [None, None]);
        let nothing = ProgressReport::default();
        let calls = vec![Call::bare(Operation::Barrier), Call { count: 8, ..Call::bare(Operation::AllReduce) }];
        let further = ProgressReport { started: 12, finished: 9, calls };
        assert_eq!(
            [10, 11, 12, 13].map(|sequence| further.call_at(sequence).map(|call| call.count)),
            [None, Some(0), Some(8), None]
        );
        a.answer(&nothing).unwrap();
        b.answer(&further).unwrap();
        assert_eq!(a.reports().unwrap(), [Some(nothing), Some(further.clone())]);
        for cut in 0..encode_standing(&further).len() {
            assert_eq!(decode_standing(&encode_standing(&further)[..cut]), None);
        }
    }
}
