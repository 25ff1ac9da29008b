use super::super::init_store::LimitedStore;
use super::*;
use crate::{FileStore, HashStore};

const TIMEOUT: Duration = Duration::from_secs(120);
/// A live rank is not considered lost, however busy the machine is.
const PATIENT: Pace = Pace { tick: Duration::from_millis(5), ticks_per_heartbeat: 2, lost_after: 6000 };

fn watcher(path: &std::path::Path, rank: usize) -> InitWatcher {
    let file = Arc::new(FileStore::open(path, TIMEOUT).unwrap());
    let store = Arc::new(InitStore::new(file, Instant::now() + TIMEOUT));
    let mut watcher = InitWatcher::new(store, "run", rank, false);
    watcher.start_at(PATIENT, 2, None).unwrap();
    watcher
}

fn wait_for_failure(watcher: &InitWatcher) -> (usize, String) {
    let start = Instant::now();
    loop {
        assert!(start.elapsed() < TIMEOUT, "the failure was not reported");
        match watcher.check() {
            Ok(()) => std::thread::sleep(Duration::from_millis(5)),
            Err(Error::Group(Failure::PeerFailed { peer, reason })) => return (peer, reason),
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn the_first_failure_is_reported_and_ends_waits() {
    let folder = tempfile::tempdir().unwrap();
    let [a, b] = [0, 1].map(|rank| watcher(&folder.path().join("store"), rank));
    let store = Arc::clone(&a.store);
    let waiting = std::thread::spawn(move || store.get("never set"));
    let error = b.conclude::<(), _>(Err(Error::invalid("device", "no GPU")), Error::failure).unwrap_err();
    assert!(
        matches!(error, Error::Base(candle_ddp_base::Error::InvalidArgument { .. })),
        "a rank's own error must not change: {error}"
    );
    let (peer, reason) = wait_for_failure(&a);
    assert!(peer == 1 && reason.starts_with("device: no GPU (on host "), "{reason}");
    assert!(matches!(waiting.join().unwrap(), Err(Error::Group(Failure::PeerFailed { peer: 1, .. }))));
    assert!(a.conclude::<(), _>(a_failure(), Error::failure).is_err());
}

fn a_failure<T>() -> Result<T> {
    Err(Error::invalid("device", "an echo"))
}

#[derive(Default)]
struct Signals {
    cancellation: Cancellation,
    heard: AtomicBool,
}

impl Signals {
    /// Rank `rank` of two, without a thread: ticks pass when a test says so.
    fn poller(&self, store: &Arc<HashStore>, rank: usize) -> Poller<'_> {
        Poller {
            keys: PrefixStore::new("run", Arc::clone(store) as Arc<dyn Store>),
            superseded: None,
            cancellation: &self.cancellation,
            heard: &self.heard,
            rank,
            pace: PACE,
            heartbeats: 0,
            ring: Ring::new(rank, 2),
        }
    }
}

/// Lets the ticks of one heartbeat pass. Returns whether the initialisation has ended for this rank.
fn beat(poller: &mut Poller<'_>) -> bool {
    (1..=PACE.ticks_per_heartbeat).any(|tick| poller.look(tick).unwrap())
}

#[test]
fn a_rank_whose_heartbeat_stops_is_lost() {
    let (store, signals) = (Arc::new(HashStore::new(TIMEOUT)), Signals::default());
    let mut a = signals.poller(&store, 0);
    for _ in 0..10 * PACE.lost_after {
        assert!(!beat(&mut a), "rank 1 has not arrived yet");
    }
    store.set("run/join/host/1", b"node7 0123").unwrap();
    store.set("run/init/heartbeat/1", &heartbeat(0)).unwrap();
    for _ in 0..PACE.lost_after {
        assert!(!beat(&mut a));
    }
    assert!(beat(&mut a));
    let error = signals.cancellation.check().unwrap_err();
    let Error::Group(Failure::PeerFailed { peer: 1, reason }) = error else { panic!("{error}") };
    assert!(reason.contains("no sign of life for 8 s") && reason.contains("on host node7"), "{reason}");
    assert!(store.check(&["run/init/abort"]).unwrap());
}

#[test]
fn live_or_connected_ranks_are_not_lost() {
    let (store, signals) = (Arc::new(HashStore::new(TIMEOUT)), [Signals::default(), Signals::default()]);
    let [mut a, mut b] = [0, 1].map(|rank| signals[rank].poller(&store, rank));
    for _ in 0..5 {
        assert!(!beat(&mut b));
        // Rank 1 is slow.
        for _ in 0..PACE.lost_after {
            assert!(!beat(&mut a));
        }
    }
    b.finish().unwrap();
    for _ in 0..10 * PACE.lost_after {
        assert!(!beat(&mut a), "rank 1 has ended its initialisation");
    }
}

#[test]
fn a_rank_that_is_connected_tells_its_watcher() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let [a, b] = [0, 1].map(|rank| watcher(&path, rank));
    b.conclude(Ok(()), Error::failure).unwrap();
    let (keys, start) = (FileStore::open(&path, TIMEOUT).unwrap(), Instant::now());
    while keys.get("run/init/heartbeat/1").unwrap() != goodbye(b"") {
        assert!(start.elapsed() < TIMEOUT, "rank 1 has not ended its heartbeats");
        std::thread::sleep(Duration::from_millis(5));
    }
    a.conclude(Ok(()), Error::failure).unwrap();
}

/// The store would end with it. On a busy machine, it may report long after its deadline.
#[test]
fn a_host_waits_until_others_have_heard() {
    let store = Arc::new(HashStore::new(TIMEOUT));
    let long_ago = Instant::now().checked_sub(2 * REPORTING).unwrap();
    let limited = InitStore::new(Arc::clone(&store) as Arc<dyn LimitedStore>, long_ago);
    let host = InitWatcher::new(Arc::new(limited), "run", 0, true);
    store.set("run/join/arrived", b"2").unwrap();
    std::thread::scope(|scope| {
        let host = scope.spawn(|| host.conclude::<(), _>(a_failure(), Error::failure));
        while store.add("run/init/heard", 0).unwrap() == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(HEARING / 20);
        assert!(!host.is_finished());
        store.add("run/init/heard", 1).unwrap();
        assert!(host.join().unwrap().is_err());
    });
}

#[test]
fn a_panic_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let [a, b] = [0, 1].map(|rank| watcher(&folder.path().join("store"), rank));
    let panicked = std::thread::spawn(move || {
        let _b = b;
        panic!("out of luck");
    });
    panicked.join().unwrap_err();
    let (peer, reason) = wait_for_failure(&a);
    assert!(peer == 1 && reason.contains("panicked during initialisation"), "{reason}");
}
