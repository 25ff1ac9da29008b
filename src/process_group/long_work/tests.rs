use super::*;
use crate::backend::cpu::{CpuCommunicator, CpuOptions};
use crate::backend::{Collective, Communicator, Completion, ReduceOp, Work};
use crate::error::Failure;
use crate::process_group::job::Job;
use crate::process_group::place::Place;
use crate::process_group::{Backend, Settings, SpawnOptions, spawn_with};
use crate::rendezvous::HashStore;
use candle_core::{DType, Device, Tensor};
use std::collections::HashMap;
use std::path::Path;

fn ranks<T: Send>(timeout: Duration, work: impl Fn(ProcessGroup) -> Result<T> + Sync) -> Vec<T> {
    spawn_with(SpawnOptions { world_size: 2, timeout, ..Default::default() }, work).unwrap()
}

const LONG: Duration = Duration::from_secs(120);

#[test]
fn work_may_take_longer_than_the_time_out() {
    let timeout = Duration::from_secs(4);
    let values = ranks(timeout, |pg| {
        let rank = pg.rank();
        pg.agree_on_long_work(move |progress| {
            let end = Instant::now() + if rank == 0 { 2 * timeout } else { Duration::ZERO };
            while Instant::now() < end {
                progress.step().unwrap();
                std::thread::sleep(Duration::from_millis(10));
            }
            Ok(rank)
        })
    });
    assert_eq!(values, [0, 1]);
}

#[test]
fn work_without_progress_is_given_up() {
    let errors = ranks(LONG, |pg| {
        let (end, ended) = mpsc::channel::<()>();
        let rank = pg.rank();
        // Blocks until the end of the test, like a system call that does not return.
        let work = move |_: &Progress, _: &mut NextPart| {
            if rank == 0 {
                let _ = ended.recv();
            }
            Ok(())
        };
        let error = pg.agree_on_work(work, Duration::from_secs(2), &mut || Ok(None)).unwrap_err();
        drop(end);
        pg.barrier()?;
        Ok(error)
    });
    assert!(matches!(&errors[0], Error::Io { error, .. } if error.kind() == io::ErrorKind::TimedOut), "{errors:?}");
    let reason = "no progress for";
    assert!(matches!(&errors[1], Error::RankFailed { rank: 0, reason: is } if is.contains(reason)), "{errors:?}");
}

#[test]
fn the_failure_of_one_calls_off_the_work_of_the_others() {
    let errors = ranks(LONG, |pg| {
        let (rank, (sender, stopped)) = (pg.rank(), mpsc::channel());
        let error = pg.agree_on_long_work(move |progress| -> Result<()> {
            if rank == 1 {
                return Err(Error::invalid("path", "no"));
            }
            while progress.step().is_ok() {
                std::thread::sleep(Duration::from_millis(1));
            }
            sender.send(()).unwrap();
            Ok(())
        });
        if rank == 0 {
            stopped.recv_timeout(LONG).unwrap();
        }
        let panicked = pg.agree_on_long_work(move |_| if rank == 1 { panic!("a panic") } else { Ok(()) });
        pg.barrier()?;
        Ok((error.unwrap_err(), panicked.unwrap_err()))
    });
    assert!(matches!(&errors[0].0, Error::RankFailed { rank: 1, reason } if reason.contains("no")), "{errors:?}");
    assert!(matches!(&errors[1].0, Error::InvalidArgument { .. }), "{errors:?}");
    assert!(matches!(&errors[0].1, Error::RankFailed { rank: 1, reason } if reason.contains("a panic")), "{errors:?}");
    assert!(matches!(&errors[1].1, Error::Io { .. }), "{errors:?}");
}

/// Rank 1 sends numbers to rank 0's work, which asks for `asks` of them and fails after `fails`.
fn sent(
    pg: &ProcessGroup,
    there: usize,
    asks: usize,
    fails: Option<usize>,
    refuses: Option<usize>,
) -> Result<Vec<f32>> {
    let (rank, mut number) = (pg.rank(), 0);
    let work = move |_: &Progress, next: &mut NextPart| {
        let asks = if rank == 0 { asks } else { 0 };
        let of = |index| match Some(index) == fails {
            true => Err(Error::invalid("path", "it is full")),
            false => Ok(next().map_err(|error| Error::io("waiting", error))?.to_vec1::<f32>()?[0]),
        };
        (0..asks).map(of).collect()
    };
    pg.agree_on_work(work, LONG, &mut || {
        number += 1;
        if number > there {
            return Ok(None);
        }
        if rank == 1 && Some(number) == refuses {
            return Err(Error::invalid("device", "it is gone"));
        }
        let part = Tensor::full(number as f32, 1, &Device::Cpu)?;
        match rank {
            0 => pg.recv(&part.zeros_like()?, 1).map(|()| Some(part)),
            _ => pg.send(&part, 0).map(|()| None),
        }
    })
}

#[test]
fn work_gets_the_parts_that_it_asks_for() {
    // Asking for one more than there are is not an error of the ranks that send.
    for (there, asks) in [(0, 0), (1, 1), (5, 5), (5, 2)] {
        let found = ranks(LONG, |pg| {
            let found = sent(&pg, there, asks, None, None)?;
            pg.barrier()?;
            Ok(found)
        });
        assert_eq!(found[0], (1..=asks).map(|number| number as f32).collect::<Vec<_>>(), "{there}, {asks}");
    }
}

#[test]
fn work_that_fails_while_parts_are_sent_fails_on_all_ranks() {
    let errors = ranks(LONG, |pg| {
        let full = sent(&pg, 5, 5, Some(2), None).unwrap_err();
        // The group is as it was.
        pg.barrier()?;
        let gone = sent(&pg, 5, 5, None, Some(3)).unwrap_err();
        Ok((full, gone.to_string()))
    });
    assert!(matches!(&errors[0].0, Error::InvalidArgument { .. }), "{errors:?}");
    assert!(matches!(&errors[1].0, Error::RankFailed { rank: 0, reason } if reason.contains("full")), "{errors:?}");
    assert!(errors.iter().all(|(_, gone)| gone.contains("it is gone")), "{errors:?}");
}

/// The CPU engine with a property of GPU engines: `wait` only orders work, and does not report failures.
struct Queued(CpuCommunicator);

impl Communicator for Queued {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn world_size(&self) -> usize {
        self.0.world_size()
    }

    fn start(&self, collective: Collective) -> Result<Work> {
        struct Unheard(Work);
        impl Completion for Unheard {
            fn wait(&self) -> Result<()> {
                // The contents after a failed call are taken for its result.
                let _ = self.0.wait();
                Ok(())
            }
            fn synchronize(&self) -> Result<()> {
                self.0.synchronize()
            }
            fn is_completed(&self) -> bool {
                self.0.is_completed()
            }
        }
        Ok(Work::new(Unheard(self.0.start(collective)?)))
    }

    fn failure(&self) -> Option<Error> {
        self.0.failure()
    }

    fn abort(&self, reason: &str) {
        self.0.abort(reason);
    }
}

/// Runs two ranks of an engine with queues.
pub(crate) fn queued(work: impl Fn(ProcessGroup) + Sync) {
    let store = Arc::new(HashStore::new(LONG));
    let group = |rank| {
        let (device, timeout) = (Device::Cpu, LONG);
        let options = CpuOptions { timeout, ..Default::default() };
        let communicator = Queued(CpuCommunicator::new(store.clone(), rank, 2, options).unwrap());
        let settings = Settings {
            backend: Backend::Cpu,
            device,
            timeout,
            nccl: Default::default(),
            local_rank: rank,
            local_world_size: 2,
            address: None,
            secret: None,
            virtual_ranks: None,
        };
        let place = Place::of_all(Job::without_launcher(2), rank, 2);
        ProcessGroup::around(Box::new(communicator), store.clone(), place, settings, None).unwrap()
    };
    std::thread::scope(|scope| {
        let (group, work) = (&group, &work);
        let ranks = [0, 1].map(|rank| scope.spawn(move || work(group(rank))));
        ranks.into_iter().for_each(|rank| rank.join().unwrap());
    });
}

fn save(pg: &ProcessGroup, path: &Path, tensor: &Tensor) -> Result<()> {
    let tensors = HashMap::from([("w".to_string(), tensor.clone())]);
    pg.write_together((pg.rank() == 0).then(|| WriteJob::new(path, &tensors)).transpose()).map(drop)
}

/// A peer dies in an all-reduce, and its incomplete result is used and saved: the good file must stay.
#[test]
fn results_of_a_failed_call_do_not_replace_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("weights");
    let started = std::sync::Barrier::new(2);
    queued(|pg| {
        let weights = Tensor::ones(2, DType::F32, pg.device()).unwrap();
        pg.all_reduce(&weights, ReduceOp::Sum).unwrap();
        save(&pg, &path, &weights).unwrap();
        if pg.rank() == 1 {
            started.wait();
            return pg.abort("it is told to");
        }
        let spoilt = Tensor::zeros(2, DType::F32, pg.device()).unwrap();
        let work = pg.all_reduce_async(&spoilt, ReduceOp::Sum).unwrap();
        started.wait();
        work.wait().unwrap();
        match save(&pg, &path, &spoilt) {
            Err(Error::Group(Failure::PeerFailed { peer: 1, reason })) => assert_eq!(reason, "it is told to"),
            other => panic!("{other:?}"),
        }
    });
    let weights = crate::state::file::read_safetensors(&path).unwrap().remove("w").unwrap();
    assert_eq!(weights.to_vec1::<f32>().unwrap(), [2.0, 2.0]);
    assert_eq!(folder.path().read_dir().unwrap().count(), 1, "no temporary file is left");
}

/// Layers use a separate group, which may fail alone.
#[test]
fn a_failure_in_the_group_of_the_layers_does_not_replace_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("weights");
    let errors = ranks(LONG, |pg| {
        let weights = Tensor::ones(2, DType::F32, pg.device())?;
        save(&pg, &path, &weights)?;
        let companion = pg.companion()?;
        companion.barrier()?;
        pg.barrier()?;
        if pg.rank() == 1 {
            companion.abort("a layer failed");
        }
        // Waits until rank 0 knows of the failure.
        while companion.0.communicator.failure().is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(save(&pg, &path, &(weights * 0.)?).unwrap_err().to_string())
    });
    assert!(errors.iter().all(|error| error.contains("a layer failed")), "{errors:?}");
    let weights = crate::state::file::read_safetensors(&path).unwrap().remove("w").unwrap();
    assert_eq!(weights.to_vec1::<f32>().unwrap(), [1.0, 1.0]);
}
