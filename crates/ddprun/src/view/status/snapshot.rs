//! Reads the status of a run from its store.
use super::document::{RUN_STATUS, RunStatus};
use candle_ddp_base::MOST_RANKS;
use candle_ddp_rendezvous::json::decode;
use candle_ddp_rendezvous::{Decision, Generations, RankStatus, Store, absent_ranks, rank_status_key};
use std::sync::Arc;

/// A run at some time.
pub(crate) struct Snapshot {
    pub(super) run: RunStatus,
    /// The newest generation, if the ranks run elastically.
    pub(super) generation: Option<u64>,
    /// The ranks that take part, with their reports.
    pub(super) ranks: Vec<(usize, Option<RankStatus>)>,
    /// How many more take part.
    pub(super) unlisted: usize,
}

impl Snapshot {
    /// A run whose ranks have not reported.
    pub(super) fn without_ranks(run: RunStatus) -> Self {
        Self { run, generation: None, ranks: Vec::new(), unlisted: 0 }
    }

    /// The host of a rank, by what it has told, or by its node.
    pub(super) fn host<'a>(&'a self, rank: usize, told: Option<&'a RankStatus>) -> Option<&'a str> {
        let node_rank = self.run.layout.node_of(rank);
        let node = || self.run.nodes.iter().find(|node| node_rank.is_some() && node.node_rank == node_rank);
        told.map(|told| told.host.as_str()).or_else(|| Some(node()?.host.as_str()))
    }
}

/// Reads from `store`, which messages call `name`.
pub(super) fn read(store: Arc<dyn Store>, name: String) -> candle_ddp_rendezvous::Result<Snapshot> {
    if !store.check(&[RUN_STATUS])? {
        let reason = "no ddprun has written the status of a run there: another launcher hosts this store, or the run \
                      has a secret that this process does not have (CANDLE_DDP_SECRET, or a file with \
                      CANDLE_DDP_SECRET_FILE)";
        return Err(refused(&name, reason.to_string()));
    }
    let run: RunStatus = decode(RUN_STATUS, &store.get(RUN_STATUS)?)?;
    check(&run, &name)?;
    let log = Generations::new(Generations::agent_prefix(run.attempt), Arc::clone(&store));
    let (generation, ranks) = match log.announced()? {
        None => (None, ranks_of(&run)),
        Some(_) => {
            let (mut generation, mut ranks) = (0, ranks_of(&run));
            while let Some(Decision::Members(members)) = log.get(generation + 1)? {
                generation += 1;
                ranks = members.into_iter().map(|member| member.rank).collect();
                if generation > GENERATIONS {
                    let reason = format!("it has more than {GENERATIONS} generations: no run has as many");
                    return Err(refused(&name, reason));
                }
            }
            (Some(generation), ranks)
        }
    };
    let (ranks, unlisted) = (&ranks[..ranks.len().min(LISTED)], ranks.len().saturating_sub(LISTED));
    let key = |index: usize| rank_status_key(ranks[index]);
    let absent = absent_ranks(&*store, 0..ranks.len(), &key)?;
    let present: Vec<usize> = (0..ranks.len()).filter(|index| absent.binary_search(index).is_err()).collect();
    let keys: Vec<String> = present.iter().map(|index| key(*index)).collect();
    let values = store.multi_get(&keys.iter().map(String::as_str).collect::<Vec<_>>())?;
    let mut ranks: Vec<(usize, Option<RankStatus>)> = ranks.iter().map(|rank| (*rank, None)).collect();
    for ((index, key), value) in present.into_iter().zip(&keys).zip(values) {
        ranks[index].1 = Some(decode(key, &value)?);
    }
    Ok(Snapshot { run, generation, ranks, unlisted })
}

/// The number of ranks whose reports are read. Anyone may write to a store without a secret: a status must not cost more than
/// these.
pub(crate) const LISTED: usize = 1 << 14;

/// The most generations: somebody may add more, as fast as they are read.
const GENERATIONS: u64 = 1 << 16;

fn refused(store: &str, reason: String) -> candle_ddp_rendezvous::Error {
    let operation = "reading the status of a run".to_string();
    candle_ddp_rendezvous::Error::Store { operation, store: store.to_string(), reason }
}

/// Refuses numbers that no launcher writes.
fn check(run: &RunStatus, store: &str) -> candle_ddp_rendezvous::Result<()> {
    let is_node = |node_rank: usize| node_rank < run.nodes.len();
    if run.layout.is_possible() && run.nodes.iter().filter_map(|node| node.node_rank).all(is_node) {
        return Ok(());
    }
    let reason = format!(
        "a run must have at most {MOST_RANKS} ranks, and its {} nodes must be numbered from 0: no ddprun has written it",
        run.nodes.len()
    );
    Err(refused(store, reason))
}

/// The ranks of the nodes that have taken part since the last start.
fn ranks_of(run: &RunStatus) -> Vec<usize> {
    let nodes = run.nodes.iter().filter_map(|node| node.node_rank);
    nodes.flat_map(|node_rank| run.layout.ranks(node_rank)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::Layout;
    use crate::verdict::{How, Verdict};
    use crate::view::status::tests::{node, told};
    use candle_ddp_rendezvous::json::encode;
    use candle_ddp_rendezvous::{HashStore, Member};
    use candle_ddp_testing::assert_error;
    use std::time::Duration;

    fn run() -> RunStatus {
        let nodes = vec![node("a", Some(0), true), node("b", Some(1), true), node("c", None, true)];
        let mut layout = Layout::even(1, 1);
        layout.push(3);
        RunStatus { attempt: 2, restarts: 2, layout, nodes, ..RunStatus::for_tests() }
    }

    #[test]
    fn the_ranks_are_those_of_the_newest_generation() {
        let store: Arc<dyn Store> = Arc::new(HashStore::new(Duration::from_secs(120)));
        let snapshot = || read(Arc::clone(&store), "a:1".to_string());
        assert_error(snapshot(), &["a:1", "CANDLE_DDP_SECRET"]);
        store.set(RUN_STATUS, &encode(&run())).unwrap();
        store.set(&rank_status_key(3), &encode(&told())).unwrap();
        let ranks = |snapshot: &Snapshot| snapshot.ranks.iter().map(|(rank, _)| *rank).collect::<Vec<_>>();
        let plain = snapshot().unwrap();
        assert_eq!((plain.generation, ranks(&plain), &plain.ranks[2].1), (None, vec![0, 1, 2, 3], &None));
        assert_eq!(plain.ranks[3].1, Some(told()));
        assert_eq!([0, 1, 3, 4].map(|rank| plain.host(rank, None)), [Some("a"), Some("b"), Some("b"), None]);
        let log = Generations::new(Generations::agent_prefix(2), Arc::clone(&store));
        log.announce(1).unwrap();
        log.decide(0, &Decision::everyone(4)).unwrap();
        assert_eq!(snapshot().unwrap().generation, Some(0));
        let left = [0, 3].map(|rank| Member { rank, incarnation: 0 }).to_vec();
        log.decide(1, &Decision::Members(left)).unwrap();
        log.decide(2, &Decision::Done).unwrap();
        let elastic = snapshot().unwrap();
        assert_eq!((elastic.generation, ranks(&elastic), &elastic.ranks[1].1), (Some(1), vec![0, 3], &Some(told())));
    }

    #[test]
    fn generations_without_an_end_are_an_error() {
        let store: Arc<dyn Store> = Arc::new(HashStore::new(Duration::from_secs(120)));
        store.set(RUN_STATUS, &encode(&run())).unwrap();
        let log = Generations::new(Generations::agent_prefix(2), Arc::clone(&store));
        log.announce(1).unwrap();
        for number in 0..GENERATIONS + 2 {
            log.decide(number, &Decision::Members(Vec::new())).unwrap();
        }
        assert_error(read(store, "a:1".to_string()), &["a:1", "more than 65536 generations"]);
    }

    #[test]
    fn absurd_numbers_are_an_error_or_cost_little() {
        let store: Arc<dyn Store> = Arc::new(HashStore::new(Duration::from_secs(120)));
        let status = |run: &RunStatus| {
            store.set(RUN_STATUS, &encode(run)).unwrap();
            read(Arc::clone(&store), "a:1".to_string())
        };
        for workers in [usize::MAX, usize::MAX / 3, 1_000_000_000_000, MOST_RANKS] {
            let many = RunStatus { layout: Layout::even(3, workers), ..run() };
            assert_error(status(&many), &["a:1", "at most 1048576 ranks"]);
        }
        let far = RunStatus { nodes: vec![node("a", Some(usize::MAX), true)], ..run() };
        assert_error(status(&far), &["numbered from 0"]);
        let nodes = vec![node("a", Some(0), true)];
        let last_failure = Some(Verdict { at: u64::MAX, ..Verdict::now(How::Lost, 1, "it failed") });
        let many = status(&RunStatus { layout: Layout::even(1, 1_000_000), nodes, last_failure, ..run() }).unwrap();
        assert_eq!((many.ranks.len(), many.unlisted), (LISTED, 1_000_000 - LISTED));
        let text = crate::view::status::table::text(&many, std::time::SystemTime::now());
        assert!(text.contains("and 983616 more ranks") && text.contains("it failed"), "{}", text.len());
    }
}
