//! For how long a rank waits until the last of the others has come to a collective.
use crate::rank::{Collective, Rank, Tensor};
use candle_ddp_base::flight_record::{CallRecord, CallState, RankRecord};
use candle_ddp_engine::flight_recorder::{FlightRecorderOptions, Recording};
use candle_ddp_engine::{CpuOptions, CpuTransport, ReduceOp};
use candle_ddp_rendezvous::{HashStore, Store};
use std::sync::{Arc, Barrier};
use std::time::Duration;

/// The host of a rank.
type HostOf = fn(usize) -> usize;

const RANKS: usize = 4;
const LATE: usize = 1;
const DELAY: Duration = Duration::from_millis(250);

/// The calls that a rank remembers.
fn calls_of(recording: &Recording) -> Vec<CallRecord> {
    let folder = tempfile::tempdir().unwrap();
    let path = recording.write(folder.path(), "a test").unwrap();
    let mut record: RankRecord = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    record.groups.pop().map_or_else(Vec::new, |group| group.calls)
}

/// Of each rank, for how many nanoseconds it has waited in each call. Rank 1 comes late to all of them.
fn waits(transport: CpuTransport, host: HostOf, calls: &[fn() -> Collective]) -> Vec<Vec<u64>> {
    let store: Arc<dyn Store> = Arc::new(HashStore::new(Duration::from_secs(120)));
    let recording = |rank| Recording::of_world(FlightRecorderOptions::default(), rank, RANKS).unwrap().unwrap();
    let recordings: Vec<Recording> = (0..RANKS).map(recording).collect();
    let all_are_here = Barrier::new(RANKS);
    let run = |rank: usize| {
        let options = CpuOptions {
            transport: Some(transport),
            host: Some(format!("host{}", host(rank))),
            timeout: Duration::from_secs(120),
            ..CpuOptions::default()
        };
        let group = Rank::recorded(&recordings[rank], store.clone(), rank, RANKS, options).unwrap();
        for (number, call) in calls.iter().enumerate() {
            all_are_here.wait();
            if rank == LATE {
                let is_in_call = |peer: &usize| {
                    calls_of(&recordings[*peer]).get(number).is_some_and(|call| call.state != CallState::Scheduled)
                };
                while !(0..RANKS).filter(|peer| *peer != LATE).all(|peer| is_in_call(&peer)) {
                    std::thread::sleep(Duration::from_millis(10));
                }
                std::thread::sleep(DELAY);
            }
            match number % 2 {
                0 => group.run(call()).unwrap(),
                _ => group.start(call()).unwrap().wait().unwrap(),
            }
        }
        // All have recorded the end of the last call.
        all_are_here.wait();
        calls_of(&recordings[rank]).iter().map(|call| call.waited_ns.unwrap()).collect()
    };
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..RANKS).map(|rank| scope.spawn(move || run(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn all_reduce(count: usize) -> Collective {
    Collective::AllReduce { tensor: Tensor::zeros(count), op: ReduceOp::Sum }
}

#[test]
fn the_rank_that_comes_last_waits_least() {
    let calls: [fn() -> Collective; 6] = [
        || all_reduce(2),
        || all_reduce(2),
        || all_reduce(1 << 20),
        || all_reduce(1 << 20),
        || Collective::Barrier,
        || Collective::AllGather { output: Tensor::zeros(4 * 3000), input: Tensor::zeros(3000) },
    ];
    let over: [(CpuTransport, HostOf); 4] = [
        (CpuTransport::SharedMemory, |_| 0),
        (CpuTransport::Tcp, |rank| rank),
        (CpuTransport::Auto, |rank| [0, 1, 1, 0][rank]),
        // Ranks 2 and 3 exchange nothing with rank 1.
        (CpuTransport::Auto, |rank| usize::from(rank == LATE)),
    ];
    let check = |transport: CpuTransport, host: HostOf| {
        let waits = waits(transport, host, &calls);
        for call in 0..calls.len() {
            let waited: Vec<u64> = waits.iter().map(|rank| rank[call]).collect();
            // On a busy machine, one that is in the call may tell it late, but not by that much.
            let others = (0..RANKS).filter(|rank| *rank != LATE).map(|rank| waited[rank]);
            let least = others.min().unwrap();
            assert!(waited[LATE] < least && least > 1_000_000, "{transport:?}, call {call}: {waited:?}");
        }
    };
    // At once, since most of the test is waiting.
    std::thread::scope(|scope| {
        for (transport, host) in over {
            scope.spawn(move || check(transport, host));
        }
    });
}

/// A rank that comes late to a broadcast holds nobody up, unless it is the root.
#[test]
fn nobody_waits_for_a_rank_that_only_receives() {
    let broadcast: [fn() -> Collective; 1] = [|| Collective::Broadcast { tensor: Tensor::zeros(2), root: 0 }];
    for (transport, host) in [(CpuTransport::SharedMemory, (|_| 0) as HostOf), (CpuTransport::Tcp, |rank| rank)] {
        let waits = waits(transport, host, &broadcast);
        // It comes after all others are over.
        assert!(waits[0][0] == 0 && u128::from(waits[LATE][0]) < DELAY.as_nanos(), "{transport:?}: {waits:?}");
    }
}
