//! Problems that only the log reports.
use crate::logger::during;
use candle_core::{DType, Device, Tensor};
use candle_ddp::ReduceOp;
use candle_ddp::backend::cpu::{CpuCommunicator, CpuOptions};
use candle_ddp::backend::{Collective, Communicator};
use candle_ddp::rendezvous::{HashStore, Store, TcpStore};
use std::sync::{Arc, Barrier};
use std::time::Duration;

/// Three ranks create a group, make one call each, rank 0 first, and then leave. Returns which calls succeeded.
fn ranks(call: impl Fn(usize) -> Collective + Sync) -> Vec<bool> {
    const TIMEOUT: Duration = Duration::from_secs(120);
    let store: Arc<dyn Store> = Arc::new(HashStore::new(TIMEOUT));
    let (first, all) = (Barrier::new(3), Barrier::new(3));
    std::thread::scope(|scope| {
        let rank = |rank| {
            let (store, call, first, all) = (store.clone(), &call, &first, &all);
            scope.spawn(move || {
                let options = CpuOptions { timeout: TIMEOUT, ..Default::default() };
                let communicator = CpuCommunicator::new(store, rank, 3, options).unwrap();
                if rank > 0 {
                    first.wait();
                }
                let result = communicator.run(call(rank));
                if rank == 0 {
                    first.wait();
                }
                all.wait();
                result.is_ok()
            })
        };
        let ranks: Vec<_> = (0..3).map(rank).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn failures_that_no_call_returns_are_logged() {
    let ((), told) = during(|| {
        let store = TcpStore::connect("no-such-host.invalid", 1, Duration::from_millis(300));
        assert!(store.is_err());
    });
    assert_eq!(told.len(), 1, "{told:?}");
    assert!(told[0].contains("cannot resolve the name \"no-such-host.invalid\""), "{told:?}");

    // Rank 0's broadcast has already succeeded when rank 1 makes a different call.
    let zeros = || Tensor::zeros(5, DType::F32, &Device::Cpu).unwrap();
    let broadcast = || Collective::Broadcast { tensor: zeros(), root: 0 };
    let ((), told) = during(|| {
        let well = ranks(|rank| match rank {
            1 => Collective::AllReduce { tensor: zeros(), op: ReduceOp::Sum },
            _ => broadcast(),
        });
        assert_eq!(well[..2], [true, false], "{well:?}");
    });
    let of_rank_0: Vec<_> = told.iter().filter(|line| line.starts_with("rank 0: the group had failed")).collect();
    assert!(matches!(of_rank_0[..], [line] if line.contains("rank 1 called all_reduce")), "{told:?}");
    assert!(told.iter().all(|line| !line.starts_with("rank 1")), "rank 1's call has returned the error: {told:?}");

    let ((), told) = during(|| assert_eq!(ranks(|_| broadcast()), [true; 3]));
    assert!(told.is_empty(), "{told:?}");
}

/// The groups of a job often end together, and one call says why.
#[test]
fn a_call_in_one_group_speaks_for_all_groups_of_the_job() {
    for does_call in [true, false] {
        let ((), told) = during(|| {
            let aborted = Barrier::new(2);
            candle_ddp::spawn(2, |pg| {
                // For layers that communicate: it ends with the group.
                let layers = pg.with_grad()?;
                pg.barrier()?;
                if pg.rank() == 1 {
                    pg.abort("out of luck");
                }
                aborted.wait();
                if pg.rank() == 0 && does_call {
                    assert!(pg.barrier().unwrap_err().to_string().contains("out of luck"));
                }
                drop(layers);
                Ok(())
            })
            .unwrap();
        });
        let of_rank_0 =
            told.iter().filter(|line| line.starts_with("rank 0: the group had failed when it left")).count();
        assert_eq!(of_rank_0, if does_call { 0 } else { 2 }, "{does_call}: {told:?}");
    }
}
