//! What the CPU engine does when something goes wrong: every rank ends, in time, with an error that names the cause.
#![allow(clippy::unwrap_used)]
mod construction;
mod desync;
mod leaving;
mod timeout;

use candle_core::{DType, Device, Tensor};
use candle_ddp::backend::cpu::{CpuCommunicator, CpuOptions};
use candle_ddp::backend::{Collective, Communicator};
use candle_ddp::rendezvous::{HashStore, Store};
use candle_ddp::{Error, ReduceOp};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What a healthy call never takes, and what a test can wait for.
const TIMEOUT: Duration = Duration::from_millis(1500);

/// Beyond the time-out: time to ask the peers, on a machine that does other things too.
const GRACE: Duration = Duration::from_secs(3);

fn options() -> CpuOptions {
    CpuOptions { timeout: TIMEOUT, ..CpuOptions::default() }
}

fn store() -> Arc<dyn Store> {
    Arc::new(HashStore::new(TIMEOUT))
}

/// Runs `body` on every rank of a world, each on a thread of its own; what they return, by rank.
fn on_ranks<T: Send>(world_size: usize, body: impl Fn(CpuCommunicator) -> T + Sync) -> Vec<T> {
    let store = store();
    std::thread::scope(|scope| {
        let rank = |rank| {
            let (store, body) = (store.clone(), &body);
            scope.spawn(move || body(CpuCommunicator::new(store, rank, world_size, options()).unwrap()))
        };
        let ranks: Vec<_> = (0..world_size).map(rank).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn zeros(count: usize) -> Tensor {
    Tensor::zeros(count, DType::F32, &Device::Cpu).unwrap()
}

fn all_reduce(count: usize) -> Collective {
    Collective::AllReduce { tensor: zeros(count), op: ReduceOp::Sum }
}

fn broadcast(count: usize, root: usize) -> Collective {
    Collective::Broadcast { tensor: zeros(count), root }
}

/// Makes the given call, and barriers after it until the group has failed: ranks that are through with a call when it
/// fails hear of it at their next one.
fn until_failure(communicator: &CpuCommunicator, first: Collective) -> Error {
    let start = Instant::now();
    let mut result = communicator.run(first);
    while result.is_ok() {
        assert!(start.elapsed() < TIMEOUT + GRACE, "rank {} heard of no failure", communicator.rank());
        result = communicator.run(Collective::Barrier);
    }
    assert!(start.elapsed() < TIMEOUT + GRACE, "rank {} heard of it after {:?}", communicator.rank(), start.elapsed());
    let error = result.unwrap_err();
    // Every later call returns the same cause.
    for later in [communicator.run(all_reduce(3)), communicator.start(all_reduce(3)).map(drop)] {
        assert_eq!(later.unwrap_err().to_string(), error.to_string());
    }
    error
}
