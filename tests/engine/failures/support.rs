//! What the tests share.
pub(crate) use candle_core::{DType, Device, Tensor};
pub(crate) use candle_ddp::backend::cpu::{CpuCommunicator, CpuOptions, CpuTransport};
pub(crate) use candle_ddp::backend::{Collective, Communicator};
pub(crate) use candle_ddp::error::Failure;
pub(crate) use candle_ddp::rendezvous::{HashStore, Store};
pub(crate) use candle_ddp::{Error, ReduceOp};
pub(crate) use std::sync::Arc;
pub(crate) use std::time::{Duration, Instant};

/// What a healthy call never takes, and what a test can wait for.
pub(crate) const TIMEOUT: Duration = Duration::from_millis(1500);

/// Beyond the time-out: time to ask the peers, on a machine that does other things too.
pub(crate) const GRACE: Duration = Duration::from_secs(3);

pub(crate) fn options() -> CpuOptions {
    CpuOptions { timeout: TIMEOUT, transport: super::TRANSPORT, ..CpuOptions::default() }
}

/// Those of a rank that is on the host that it shall be on.
pub(crate) fn options_of(rank: usize) -> CpuOptions {
    CpuOptions { host: Some(super::host(rank).to_string()), ..options() }
}

pub(crate) fn store() -> Arc<dyn Store> {
    Arc::new(HashStore::new(TIMEOUT))
}

/// Runs `body` on every rank of a world, each on a thread of its own; what they return, by rank.
pub(crate) fn on_ranks<T: Send>(world_size: usize, body: impl Fn(CpuCommunicator) -> T + Sync) -> Vec<T> {
    let store = store();
    std::thread::scope(|scope| {
        let rank = |rank| {
            let (store, body) = (store.clone(), &body);
            scope.spawn(move || body(CpuCommunicator::new(store, rank, world_size, options_of(rank)).unwrap()))
        };
        let ranks: Vec<_> = (0..world_size).map(rank).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

pub(crate) fn zeros(count: usize) -> Tensor {
    Tensor::zeros(count, DType::F32, &Device::Cpu).unwrap()
}

pub(crate) fn all_reduce(count: usize) -> Collective {
    Collective::AllReduce { tensor: zeros(count), op: ReduceOp::Sum }
}

pub(crate) fn broadcast(count: usize, root: usize) -> Collective {
    Collective::Broadcast { tensor: zeros(count), root }
}

/// Calls nothing until the group has failed.
pub(crate) fn idle_until_failure(communicator: &CpuCommunicator) {
    let start = Instant::now();
    while communicator.failure().is_none() {
        assert!(start.elapsed() < TIMEOUT + GRACE, "rank {} heard of no failure", communicator.rank());
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Makes the given call, and barriers after it until the group has failed: ranks that are through with a call when it
/// fails hear of it at their next one.
pub(crate) fn until_failure(communicator: &CpuCommunicator, first: Collective) -> Error {
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
