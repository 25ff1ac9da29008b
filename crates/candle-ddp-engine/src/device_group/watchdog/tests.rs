//! Tests the threads of several ranks over one store, with stand-ins for an engine such as NCCL: what they decide and tell each
//! other.
use super::*;
use crate::device_group::{Fence, HealthStore, HeartbeatMonitor, without_asking};
use crate::flight_recorder::{FlightRecorderOptions, Recording};
use crate::rendezvous::{HashStore, Store};
use crate::{Call, Channel, Label, Operation};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

mod store;

/// Stands in for communicators.
#[derive(Default)]
struct StandIn {
    error: Mutex<Option<String>>,
    aborted: AtomicBool,
}

impl Watched for StandIn {
    fn error(&self) -> Option<String> {
        self.error.lock().unwrap().clone()
    }

    fn abort(&self) {
        self.aborted.store(true, Ordering::SeqCst);
    }
}

/// Stands in for an event.
#[derive(Default)]
struct Switch(AtomicBool);

impl Fence for Switch {
    fn is_over(&self) -> Result<bool, String> {
        Ok(self.0.load(Ordering::SeqCst))
    }
}

struct Rank {
    group: Arc<DeviceGroup>,
    stand_in: Arc<StandIn>,
    watchdog: Option<JoinHandle<()>>,
    heartbeat_monitor: Option<JoinHandle<()>>,
}

const LOST_AFTER: Duration = Duration::from_millis(1500);

/// Starts rank `rank` of a group.
fn start(health_store: HealthStore, rank: usize, world_size: usize, timeout: Duration, lost_after: Duration) -> Rank {
    run_threads(DeviceGroup::new(rank, world_size, timeout, None), health_store, lost_after)
}

/// The threads of `group`.
fn run_threads(group: Arc<DeviceGroup>, health_store: HealthStore, lost_after: Duration) -> Rank {
    let stand_in = Arc::new(StandIn::default());
    let (ours, watched) = (group.clone(), stand_in.clone());
    let watchdog = std::thread::spawn(move || {
        std::thread::scope(|scope| {
            scope.spawn(|| poll(&ours, &*watched));
            watch(&ours, &*watched, &|suspected| without_asking(&ours, suspected));
        });
    });
    let ours = group.clone();
    let heartbeat_monitor = std::thread::spawn(move || {
        HeartbeatMonitor { group: &ours, health_store: &health_store, lost_after }.run();
    });
    Rank { group, stand_in, watchdog: Some(watchdog), heartbeat_monitor: Some(heartbeat_monitor) }
}

/// Starts the first `N` ranks of a group; the other ranks have joined and do nothing.
fn ranks_of<const N: usize>(world_size: usize, timeout: Duration, lost_after: Duration) -> [Rank; N] {
    let store: Arc<dyn Store> = Arc::new(HashStore::new(Duration::from_secs(120)));
    let mut health_stores: Vec<HealthStore> =
        (0..world_size).map(|rank| HealthStore::new(Arc::clone(&store), rank, world_size).unwrap()).collect();
    let mut health_stores = health_stores.drain(..N).enumerate();
    std::array::from_fn(|_| {
        let (rank, health_store) = health_stores.next().unwrap();
        start(health_store, rank, world_size, timeout, lost_after)
    })
}

fn ranks<const N: usize>(timeout: Duration) -> [Rank; N] {
    ranks_of(N, timeout, LOST_AFTER)
}

impl Rank {
    fn begin(&self, call: Call) -> Arc<Switch> {
        self.begin_on(Channel::Collectives, call)
    }

    fn begin_on(&self, channel: Channel, call: Call) -> Arc<Switch> {
        let switch = Arc::new(Switch::default());
        self.group.begin(channel, call, switch.clone()).unwrap();
        switch
    }

    /// Makes a call that has ended as soon as it has begun.
    fn call(&self, call: Call) {
        self.call_on(Channel::Collectives, call);
    }

    fn call_on(&self, channel: Channel, call: Call) {
        self.group.begin(channel, call, Arc::new(Switch(AtomicBool::new(true)))).unwrap();
    }

    /// Returns the failure once the communicators are aborted too.
    fn end(&self) -> String {
        let failure = self.group.await_failure(Duration::from_secs(15)).expect("the group should fail");
        let deadline = Instant::now() + Duration::from_secs(5);
        while !self.stand_in.aborted.load(Ordering::SeqCst) {
            assert!(Instant::now() < deadline, "the communicators were not aborted");
            std::thread::sleep(Duration::from_millis(5));
        }
        failure.to_string()
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        self.group.leave();
        self.group.end();
        self.watchdog.take().into_iter().chain(self.heartbeat_monitor.take()).for_each(|thread| thread.join().unwrap());
    }
}

fn all_reduce(count: u64) -> Call {
    Call { count, ..Call::bare(Operation::AllReduce) }
}

#[test]
fn the_flight_recorder_writes_how_far_calls_came_when_one_expires() {
    let folder = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(HashStore::new(Duration::from_secs(120)));
    let ranks = [0, 1].map(|rank| {
        let options = FlightRecorderOptions { folder: Some(folder.path().to_path_buf()), ..Default::default() };
        let recording = Recording::of_world(options, rank, 2).unwrap();
        let group = DeviceGroup::new(rank, 2, Duration::from_millis(300), recording);
        run_threads(group, HealthStore::new(Arc::clone(&store), rank, 2).unwrap(), LOST_AFTER)
    });
    for rank in &ranks {
        rank.call(all_reduce(1));
        rank.call_on(Channel::SendTo(1 - rank.group.rank), all_reduce(2));
    }
    ranks[0].begin(all_reduce(3));
    ranks.iter().for_each(|rank| assert!(rank.end().contains("rank 1 has not started this collective")));
    for (rank, expected) in [(0, "1 completed, 2 started, 1 completed"), (1, "1 completed, 1 completed")] {
        // The last thing that a failed group does.
        let deadline = Instant::now() + Duration::from_secs(15);
        let path = folder.path().join(format!("rank{rank}.flight.json"));
        while !path.exists() {
            assert!(Instant::now() < deadline, "rank {rank} has written no file");
            std::thread::sleep(Duration::from_millis(5));
        }
        let file: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let calls = file["groups"][0]["calls"].as_array().unwrap();
        let calls = calls.iter().map(|call| format!("{} {}", call["sequence"], call["state"].as_str().unwrap()));
        assert_eq!(calls.collect::<Vec<_>>().join(", "), expected);
    }
}

#[test]
fn an_abort_ends_the_group_on_every_rank_with_its_reason() {
    let ranks: [Rank; 3] = ranks(Duration::from_secs(60));
    let reason = "backward failed: out of memory".to_string();
    ranks[1].group.fail(Failure::PeerFailed { peer: 1, reason });
    for rank in &ranks {
        assert_eq!(rank.end(), "rank 1 ended the group: backward failed: out of memory");
        assert!(rank.group.begin(Channel::Collectives, all_reduce(1), Arc::new(Switch::default())).is_err());
    }
}

#[test]
fn calls_that_end_in_time_are_forgotten() {
    let [rank] = ranks(Duration::from_millis(300));
    for _ in 0..3 {
        rank.call(all_reduce(5));
    }
    assert_eq!(rank.group.drain(), None);
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(rank.group.failure(), None);
    assert!(!rank.group.is_busy());
}

/// The end of a fence's event may wait for the driver. Nobody else may wait meanwhile.
#[test]
fn a_fence_is_dropped_without_the_lock() {
    /// Says whether another thread gets an answer from the group while this is dropped.
    struct Last(Arc<DeviceGroup>, Sender<bool>);

    impl Fence for Last {
        fn is_over(&self) -> Result<bool, String> {
            Ok(true)
        }
    }

    impl Drop for Last {
        fn drop(&mut self) {
            let (group, (answer, answered)) = (Arc::clone(&self.0), channel());
            std::thread::spawn(move || answer.send(group.is_busy()));
            let _ = self.1.send(answered.recv_timeout(Duration::from_secs(5)).is_ok());
        }
    }

    let group = DeviceGroup::new(0, 1, Duration::from_secs(60), None);
    let (sender, dropped) = channel();
    group.begin(Channel::Collectives, all_reduce(1), Arc::new(Last(Arc::clone(&group), sender))).unwrap();
    assert_eq!(group.sweep(Instant::now()), None);
    assert_eq!(dropped.try_recv(), Ok(true));
}

#[test]
fn a_rank_that_does_not_come_is_named_by_the_one_that_waits() {
    let [waiting, late] = ranks(Duration::from_millis(300));
    let _switch = waiting.begin(all_reduce(5));
    let text = waiting.end();
    assert!(text.contains("rank 0: all_reduce(), sequence 1, timed out after 300ms"), "{text}");
    assert!(text.contains("rank 1 has not started any collective"), "{text}");
    assert_eq!(late.end(), text);
}

impl Rank {
    /// Begins messages to these ranks, in one batch.
    fn begin_batch(&self, peers: &[usize]) -> Arc<Switch> {
        let switch = Arc::new(Switch::default());
        let message = Call { count: 4, label: Label::BATCH, ..Call::bare(Operation::Send) };
        let calls: Vec<_> = peers.iter().map(|peer| (message, Channel::SendTo(*peer))).collect();
        let fence: Arc<dyn Fence> = switch.clone();
        self.group.begin_together(&calls, &fence).unwrap();
        switch
    }
}

#[test]
fn a_batch_that_expires_names_its_ranks() {
    let [waiting, _second, _third] = ranks(Duration::from_millis(300));
    waiting.begin_on(Channel::SendTo(1), all_reduce(2)).0.store(true, Ordering::SeqCst);
    let _switch = waiting.begin_batch(&[2, 1, 2]);
    let text = waiting.end();
    assert!(text.contains("rank 0: send() for batch_isend_irecv, sequence 1, timed out after 300ms"), "{text}");
    assert!(text.contains("of ranks [1, 2], at least one did not make the matching call"), "{text}");
}

#[test]
fn all_messages_of_a_batch_end_together() {
    let [rank] = ranks(Duration::from_millis(300));
    rank.begin_batch(&[2, 1, 2]).0.store(true, Ordering::SeqCst);
    assert_eq!(rank.group.drain(), None);
    assert!(!rank.group.is_busy());
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(rank.group.failure(), None);
}

/// Rank 0's collective waits for its batch with a third rank, and rank 1 waits for that collective.
#[test]
fn a_collective_behind_a_batch_has_not_begun() {
    let [held_up, waiting, _third] = ranks(Duration::from_secs(5));
    let fence = Arc::new(Switch(AtomicBool::new(true)));
    held_up.group.begin(Channel::Collectives, all_reduce(1), fence).unwrap();
    waiting.call(all_reduce(1));
    let _second = waiting.begin(all_reduce(2));
    // The batch begins so much later that the collective expires first, also on a busy machine.
    std::thread::sleep(Duration::from_secs(4));
    let (_batch, _behind) = (held_up.begin_batch(&[2]), held_up.begin(all_reduce(2)));
    let text = waiting.end();
    assert!(
        text.contains("rank 0 has started this collective but is not in it: its last was sequence 1, all_reduce()"),
        "{text}"
    );
}

#[test]
fn ranks_that_call_different_things_are_told_so() {
    let ranks: [Rank; 3] = ranks(Duration::from_secs(3));
    let _switches: Vec<_> = [all_reduce(20), all_reduce(20), Call::bare(Operation::Broadcast)]
        .into_iter()
        .zip(&ranks)
        .map(|(call, rank)| rank.begin(call))
        .collect();
    for rank in &ranks {
        let text = rank.end();
        assert!(
            text.contains("rank 2 called broadcast()") && text.contains("called all_reduce(), sequence 1"),
            "{text}"
        );
    }
}

#[test]
fn an_error_of_nccl_is_blamed_on_the_rank_that_said_why() {
    let [noticing, culprit] = ranks(Duration::from_secs(60));
    culprit.group.fail(Failure::PeerFailed { peer: 1, reason: "disk full".to_string() });
    *noticing.stand_in.error.lock().unwrap() = Some("ncclRemoteError".to_string());
    assert_eq!(noticing.end(), "rank 1 ended the group: disk full");
}

#[test]
fn an_error_of_nccl_that_nobody_explains_is_told_as_it_is() {
    let [noticing, other] = ranks(Duration::from_secs(60));
    *noticing.stand_in.error.lock().unwrap() = Some("ncclSystemError, no route".to_string());
    let text = "rank 0 ended the group: ncclSystemError, no route";
    assert_eq!((noticing.end().as_str(), other.end().as_str()), (text, text));
}

#[test]
fn no_call_succeeds_while_a_root_cause_is_looked_for() {
    let [noticing, _other] = ranks(Duration::from_secs(60));
    *noticing.stand_in.error.lock().unwrap() = Some("ncclRemoteError".to_string());
    while noticing.group.suspected().is_none() {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(noticing.group.failure(), None);
    assert!(noticing.group.check().is_err());
}

#[test]
fn a_rank_without_a_heartbeat_ends_the_group() {
    let ranks: [Rank; 2] = ranks_of(3, Duration::from_secs(60), LOST_AFTER);
    for rank in &ranks {
        let text = rank.end();
        assert!(text.starts_with("rank 2 ended the group: it has not sent a heartbeat for 1.5s"), "{text}");
    }
}

#[test]
fn an_error_of_nccl_is_blamed_on_the_rank_without_a_heartbeat() {
    // Long before its neighbour would consider it lost.
    let ranks: [Rank; 2] = ranks_of(3, Duration::from_secs(60), Duration::from_secs(60));
    *ranks[0].stand_in.error.lock().unwrap() = Some("ncclRemoteError".to_string());
    let text = ranks[0].end();
    assert!(text.starts_with("rank 2 ended the group: it sends no more heartbeats (rank 0: nccl"), "{text}");
}

#[test]
fn leaving_takes_nothing_from_those_who_stay() {
    let [a, b, leaving] = ranks(Duration::from_secs(60));
    drop(leaving);
    std::thread::sleep(LOST_AFTER * 2);
    assert_eq!((a.group.failure(), b.group.failure()), (None, None));
}

#[test]
fn leaving_early_is_told_to_those_who_wait() {
    let [a, b] = ranks(Duration::from_secs(60));
    a.call(all_reduce(1));
    b.call(all_reduce(1));
    let _second = a.begin(all_reduce(7));
    assert_eq!(b.group.drain(), None);
    drop(b);
    let text = a.end();
    assert!(text.contains("rank 1 left the group after sequence 1") && text.contains("sequence 2"), "{text}");
}

/// No rank watches a rank that has left.
#[test]
fn a_rank_that_left_long_ago_is_missed_by_whoever_waits() {
    for others in [1, 2] {
        let mut all: Vec<Rank> = if others == 1 {
            ranks::<2>(Duration::from_secs(60)).into()
        } else {
            ranks::<3>(Duration::from_secs(60)).into()
        };
        all.iter().for_each(|rank| rank.call(all_reduce(1)));
        assert_eq!(all[1].group.drain(), None);
        drop(all.remove(1));
        std::thread::sleep(LOST_AFTER);
        // The last of the other ranks waits first; the leaver's neighbour does not wait yet.
        let _second = all[others - 1].begin(all_reduce(7));
        for rank in &all {
            let text = rank.end();
            assert!(text.contains("rank 1 left the group after sequence 1") && text.contains("sequence 2"), "{text}");
        }
    }
}

/// NCCL does not say who has closed a connection.
#[test]
fn an_error_after_a_departure_is_that_departure() {
    let [a, b] = ranks_of(2, Duration::from_secs(60), Duration::from_secs(60));
    drop(b);
    let _first = a.begin(all_reduce(7));
    *a.stand_in.error.lock().unwrap() = Some("ncclRemoteError".into());
    let text = a.end();
    assert!(text.contains("rank 1 left the group"), "{text}");
}

#[test]
fn a_message_that_a_rank_which_left_did_not_wait_for_is_told() {
    let sends = (Channel::SendTo(1), Channel::RecvFrom(0), Operation::Send);
    let receives = (Channel::RecvFrom(1), Channel::SendTo(0), Operation::Recv);
    for (ours, theirs, operation) in [sends, receives] {
        let [a, b] = ranks(Duration::from_secs(60));
        a.begin_on(ours, Call::bare(operation));
        b.call_on(theirs, Call::bare(operation));
        assert_eq!(b.group.drain(), None);
        drop(b);
        // The first message is in flight.
        std::thread::sleep(LOST_AFTER);
        assert_eq!(a.group.failure(), None);
        let _second = a.begin_on(ours, Call::bare(operation));
        let text = a.end();
        assert!(text.contains("rank 1 left the group after sequence 1") && text.contains("sequence 2"), "{text}");
    }
}
