//! Helpers that the tests of this folder share.
pub(crate) use crate::rank::{Collective, Rank, Tensor};
pub(crate) use candle_ddp_engine::{CpuOptions, CpuTransport, Error, Failure, ReduceOp, Result};
pub(crate) use candle_ddp_rendezvous::{HashStore, Store};
pub(crate) use std::sync::Arc;
pub(crate) use std::time::{Duration, Instant};

/// The time-out where a test waits for it: longer than a healthy call on a busy machine.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(4);

/// The time-out, or the wait, where it shows only that something hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

pub(crate) fn options() -> CpuOptions {
    CpuOptions { timeout: PATIENCE, transport: Some(super::TRANSPORT), ..CpuOptions::default() }
}

/// Options of a rank on its host.
pub(crate) fn options_of(rank: usize) -> CpuOptions {
    CpuOptions { host: Some(super::host(rank).to_string()), ..options() }
}

pub(crate) fn store() -> Arc<dyn Store> {
    Arc::new(HashStore::new(PATIENCE))
}

/// Runs `body` on every rank of a world, each on its own thread; returns the results by rank.
pub(crate) fn on_ranks<T: Send>(world_size: usize, body: impl Fn(Rank) -> T + Sync) -> Vec<T> {
    within(PATIENCE, world_size, body)
}

/// Like [`on_ranks`], with calls that time out after [`TIMEOUT`].
pub(crate) fn on_hasty_ranks<T: Send>(world_size: usize, body: impl Fn(Rank) -> T + Sync) -> Vec<T> {
    within(TIMEOUT, world_size, body)
}

fn within<T: Send>(timeout: Duration, world_size: usize, body: impl Fn(Rank) -> T + Sync) -> Vec<T> {
    let store = store();
    std::thread::scope(|scope| {
        let rank = |rank| {
            let (store, body) = (store.clone(), &body);
            let options = CpuOptions { timeout, construction_timeout: Some(PATIENCE), ..options_of(rank) };
            scope.spawn(move || body(Rank::new(store, rank, world_size, options).unwrap()))
        };
        let ranks: Vec<_> = (0..world_size).map(rank).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Runs `body` on all `cases` at the same time, since most of their time is waiting.
pub(crate) fn side_by_side<C: Send>(cases: impl IntoIterator<Item = C>, body: impl Fn(C) + Sync) {
    std::thread::scope(|scope| {
        let body = &body;
        let cases: Vec<_> = cases.into_iter().map(|case| scope.spawn(move || body(case))).collect();
        // A panic of a case is the test's.
        cases.into_iter().for_each(|case| case.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
    });
}

pub(crate) fn zeros(count: usize) -> Tensor {
    Tensor::zeros(count)
}

pub(crate) fn all_reduce(count: usize) -> Collective {
    Collective::AllReduce { tensor: zeros(count), op: ReduceOp::Sum }
}

pub(crate) fn broadcast(count: usize, root: usize) -> Collective {
    Collective::Broadcast { tensor: zeros(count), root }
}

/// Makes no calls until the group has failed.
pub(crate) fn idle_until_failure(communicator: &Rank) {
    let start = Instant::now();
    while communicator.failure().is_none() {
        assert!(start.elapsed() < PATIENCE, "rank {} received no error", communicator.rank());
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Makes the given call, then barriers until the group has failed: a rank that completes the call before the failure
/// gets the error at its next call.
pub(crate) fn until_failure(communicator: &Rank, first: Collective) -> Error {
    let start = Instant::now();
    let mut result = communicator.run(first);
    while result.is_ok() {
        assert!(start.elapsed() < PATIENCE, "rank {} received no error", communicator.rank());
        result = communicator.run(Collective::Barrier);
    }
    let error = result.unwrap_err();
    // Every later call returns the same cause.
    for later in [communicator.run(all_reduce(3)), communicator.start(all_reduce(3)).map(drop)] {
        assert_eq!(later.unwrap_err().to_string(), error.to_string());
    }
    error
}
