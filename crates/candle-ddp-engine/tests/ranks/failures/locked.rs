//! Programs that hold a lock on a tensor that a collective is to write.
use super::*;

/// Within its time-out, every rank learns which rank holds the lock and what to do; the program's own call returns too.
#[test]
fn a_tensor_locked_by_the_program_is_reported() {
    side_by_side([false, true], |is_started| {
        let errors = on_hasty_ranks(3, |communicator| {
            communicator.run(all_reduce(10)).unwrap();
            let tensor = zeros(12);
            let call = Collective::AllReduce { tensor: tensor.clone(), op: ReduceOp::Sum };
            if communicator.rank() != 1 {
                // Ranks that have all they need continue with the next call.
                return until_failure(&communicator, call);
            }
            // The other ranks' deadlines come first.
            std::thread::sleep(TIMEOUT / 5);
            let guard = tensor.lock();
            let result = match is_started {
                true => communicator.start(call).and_then(|work| Ok(work.wait()?)),
                false => communicator.run(call),
            };
            drop(guard);
            result.unwrap_err()
        });
        for error in errors {
            let Error::Group(Failure::TimedOut { sequence: 2 | 3, .. }) = error else { panic!("{error:?}") };
            let text = error.to_string();
            let own = "this rank waits for the storage of its tensor, which its own program keeps locked";
            let own = text.contains("rank 1: all_reduce(f32[12]), sequence 2, timed out") && text.contains(own);
            assert!(own || text.contains("rank 1 waits for the storage of its tensor, which its own"), "{text}");
            assert!(text.contains("drop the guard that storage_and_layout() returns before the call"), "{text}");
        }
    });
}

/// A collective that only reads a tensor does not need an exclusive lock.
#[test]
fn a_tensor_that_is_only_read_may_be_locked_for_reading() {
    on_ranks(2, |communicator| {
        let tensor = zeros(5);
        let guard = (communicator.rank() == 0).then(|| tensor.lock());
        communicator.run(Collective::Broadcast { tensor: tensor.clone(), root: 0 }).unwrap();
        drop(guard);
    });
}
