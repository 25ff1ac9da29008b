//! Programs that hold the lock of a tensor that a collective uses. The engine's own tests have more of these, on its own memory.
use candle_core::{DType, Device, Tensor};
use candle_ddp::backend::cpu::{CpuCommunicator, CpuOptions};
use candle_ddp::backend::{Collective, Communicator};
use candle_ddp::rendezvous::{HashStore, Store};
use candle_ddp::{Error, Failure, ReduceOp};
use std::sync::Arc;
use std::time::Duration;

/// Longer than a healthy call on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(4);
/// It shows only that something hangs.
const PATIENCE: Duration = Duration::from_secs(120);

/// Rank 0 holds the lock of its tensor for reading while `collective` works on it. Returns the errors of both ranks.
fn held_by_rank_0(collective: impl Fn(Tensor) -> Collective + Sync) -> [Option<Error>; 2] {
    let store: Arc<dyn Store> = Arc::new(HashStore::new(PATIENCE));
    std::thread::scope(|scope| {
        let rank = |rank| {
            let (store, collective) = (store.clone(), &collective);
            scope.spawn(move || {
                let options =
                    CpuOptions { timeout: TIMEOUT, construction_timeout: Some(PATIENCE), ..CpuOptions::default() };
                let communicator = CpuCommunicator::new(store, rank, 2, options).unwrap();
                let tensor = Tensor::zeros(12, DType::F32, &Device::Cpu).unwrap();
                let guard = (rank == 0).then(|| tensor.storage_and_layout());
                let error = communicator.run(collective(tensor.clone())).err();
                drop(guard);
                error
            })
        };
        [rank(0), rank(1)].map(|rank| rank.join().unwrap())
    })
}

#[test]
fn a_tensor_that_is_to_be_written_is_waited_for_until_the_time_out() {
    let [own, _] = held_by_rank_0(|tensor| Collective::AllReduce { tensor, op: ReduceOp::Sum });
    let error = own.unwrap();
    assert!(matches!(error, Error::Group(Failure::TimedOut { .. })), "{error:?}");
    assert!(error.to_string().contains("drop the guard that storage_and_layout() returns before the call"), "{error}");
}

#[test]
fn a_tensor_that_is_only_read_may_be_locked_for_reading() {
    let errors = held_by_rank_0(|tensor| Collective::Broadcast { tensor, root: 0 });
    assert!(errors.iter().all(Option::is_none), "{errors:?}");
}
