//! Ranks whose store does not answer for a while.
use super::*;
use crate::rendezvous;
use std::sync::RwLock;

/// A store that does not answer while it is locked. Only what the heartbeat monitor uses is implemented.
struct Stalling {
    store: Arc<HashStore>,
    answers: RwLock<()>,
}

impl Store for Stalling {
    fn set(&self, key: &str, value: &[u8]) -> rendezvous::Result<()> {
        let _answers = self.answers.read().unwrap();
        self.store.set(key, value)
    }

    fn get(&self, key: &str) -> rendezvous::Result<Vec<u8>> {
        let _answers = self.answers.read().unwrap();
        self.store.get(key)
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> rendezvous::Result<Vec<u8>> {
        let _answers = self.answers.read().unwrap();
        self.store.compare_set(key, expected, desired)
    }

    fn multi_get(&self, keys: &[&str]) -> rendezvous::Result<Vec<Vec<u8>>> {
        let _answers = self.answers.read().unwrap();
        self.store.multi_get(keys)
    }

    fn add(&self, key: &str, amount: i64) -> rendezvous::Result<i64> {
        let _answers = self.answers.read().unwrap();
        self.store.add(key, amount)
    }

    fn wait(&self, _: &[&str], _: Option<Duration>) -> rendezvous::Result<()> {
        unreachable!()
    }

    fn check(&self, keys: &[&str]) -> rendezvous::Result<bool> {
        self.store.check(keys)
    }

    fn is_hosted_here(&self) -> bool {
        true
    }

    fn delete(&self, key: &str) -> rendezvous::Result<bool> {
        let _answers = self.answers.read().unwrap();
        self.store.delete(key)
    }

    fn append(&self, _: &str, _: &[u8]) -> rendezvous::Result<()> {
        unreachable!()
    }

    fn multi_set(&self, _: &[(&str, &[u8])]) -> rendezvous::Result<()> {
        unreachable!()
    }

    fn num_keys(&self) -> rendezvous::Result<usize> {
        unreachable!()
    }

    fn timeout(&self) -> Duration {
        self.store.timeout()
    }
}

#[test]
fn a_store_that_does_not_answer_kills_nobody() {
    let store =
        Arc::new(Stalling { store: Arc::new(HashStore::new(Duration::from_secs(120))), answers: RwLock::default() });
    let [ours, theirs] = [0, 1].map(|rank| HealthStore::new(store.clone(), rank, 2).unwrap());
    let rank = start(ours, 0, 2, Duration::from_secs(60), LOST_AFTER);
    // The rank checks at least once meanwhile.
    let a_while = LOST_AFTER * 3 / 10;
    for beats in 1..3 {
        theirs.beat(beats).unwrap();
        std::thread::sleep(a_while);
    }
    let stall = store.answers.write().unwrap();
    std::thread::sleep(LOST_AFTER * 2);
    drop(stall);
    // The rank checks at once, and the peer's heartbeat comes later.
    std::thread::sleep(a_while);
    theirs.beat(3).unwrap();
    std::thread::sleep(a_while);
    assert_eq!(rank.group.failure(), None);
}

#[test]
fn the_host_of_the_store_stays_until_all_know_the_failure() {
    let store = Arc::new(HashStore::new(Duration::from_secs(120)));
    let stores = [0, 1, 2].map(|_| Arc::new(Stalling { store: store.clone(), answers: RwLock::default() }));
    let [host, other, _killed] = [0, 1, 2].map(|rank| HealthStore::new(stores[rank].clone(), rank, 3).unwrap());
    let begin = |health_store, rank| start(health_store, rank, 3, Duration::from_secs(60), Duration::from_secs(60));
    let [host, other] = [begin(host, 0), begin(other, 1)];
    let stall = stores[1].answers.write().unwrap();
    host.group.fail(Failure::PeerFailed { peer: 2, reason: "killed".to_string() });
    let end = std::thread::spawn(move || drop(host));
    std::thread::sleep(Duration::from_secs(1));
    assert!(!end.is_finished(), "the host has left while rank 1 could not ask");
    drop(stall);
    end.join().unwrap();
    assert_eq!(other.group.failure(), Some(Failure::PeerFailed { peer: 2, reason: "killed".to_string() }));
}
