//! Ranks that wait for each other in two groups all get an error within seconds, far from the time-out, also where the program reads a
//! tensor or the GPU is to run calls in another order. Ranks that are only late get none.
use crate::launch::{Ranks, Worker, gpus};
use candle_core::{DType, Tensor};
use candle_ddp::{Error, Failure, P2pOp, ProcessGroup, ReduceOp, Result, Work};
use candle_ddp_testing::Random;
use std::time::{Duration, Instant};

/// The time-out of the groups in seconds, and what is far below it and enough for a busy machine.
const TIMEOUT: u64 = 250;
const SOON: Duration = Duration::from_secs(100);

/// The ways in which two ranks wait for each other, and a part of the error's text.
const WAYS: [(&str, &str); 6] = [
    (
        "two groups, barriers",
        "rank 0 waits in barrier() in the group of ranks [0, 1], rank 1 in barrier() in the group of ranks [1, 0]",
    ),
    (
        "two groups, reading",
        "rank 0 waits in all_reduce(f32[3]) in the group of ranks [0, 1], rank 1 in all_reduce(f32[3]) in the group of",
    ),
    (
        "two groups, launching both",
        "rank 0 waits in all_reduce(f32[3]) in the group of ranks [0, 1], rank 1 in all_reduce(f32[3]) in the",
    ),
    (
        "two groups, a first call",
        "rank 0 waits in all_reduce(f32[3]) in the group of ranks [0, 1], rank 1 in all_reduce(f32[3]) in the",
    ),
    (
        "two groups, one on the CPU",
        "rank 0 waits in barrier() in the CPU group of the group of all ranks, rank 1 in barrier() in the group of ranks",
    ),
    (
        "two groups, a message",
        "rank 0 waits in recv(f32[3]) in the group of all ranks, rank 1 in barrier() in the group of all ranks",
    ),
];

/// Runs the job of a rank, if it is one of these.
pub(crate) fn run(worker: &Worker, group: impl Fn(u64) -> ProcessGroup) -> bool {
    if WAYS.iter().any(|(job, _)| worker.job == *job) {
        let pg = group(TIMEOUT);
        let begin = Instant::now();
        // A tensor may have been read meanwhile, whose contents say nothing.
        let error = wait_in(&worker.job, &pg).and_then(|()| pg.barrier()).unwrap_err();
        assert!(begin.elapsed() < SOON, "{:?}: {error}", begin.elapsed());
        assert!(matches!(error, Error::Group(Failure::Desync { sequence: 0, .. })), "{error:?}");
        assert_eq!(error.to_string(), pg.barrier().unwrap_err().to_string());
        println!("the error came after {:?}", begin.elapsed());
        worker.report(&error.to_string());
        return true;
    }
    match worker.job.as_str() {
        "two groups, late" => late(&group(TIMEOUT)).unwrap(),
        "two groups, programs" => {
            let pg = group(TIMEOUT);
            let programs = std::env::var(PROGRAMS).map_or(1, |programs| programs.parse().unwrap());
            for seed in 1..=programs {
                run_program(&pg, seed).unwrap_or_else(|error| panic!("program {seed}: {error}"));
            }
        }
        _ => return false,
    }
    true
}

fn ones(pg: &ProcessGroup) -> Result<Tensor> {
    Ok(Tensor::ones(3, DType::F32, pg.device())?)
}

fn all_reduce(pg: &ProcessGroup) -> Result<Tensor> {
    let tensor = ones(pg)?;
    pg.all_reduce(&tensor, ReduceOp::Sum)?;
    Ok(tensor)
}

fn wait_in(job: &str, pg: &ProcessGroup) -> Result<()> {
    let [a, b] = [pg.new_group(&[0, 1])?, pg.new_group(&[1, 0])?].map(|group| group.unwrap());
    let (first, second) = if pg.rank() == 0 { (&a, &b) } else { (&b, &a) };
    assert_eq!(all_reduce(&b)?.to_vec1::<f32>()?, [2.0; 3]);
    // While a group's first call connects the ranks, its wait holds up the host.
    if job != "two groups, a first call" {
        assert_eq!(all_reduce(&a)?.to_vec1::<f32>()?, [2.0; 3]);
    }
    match job {
        "two groups, barriers" => {
            first.barrier()?;
            second.barrier()
        }
        "two groups, launching both" => {
            let both = [all_reduce(first)?, all_reduce(second)?];
            both.iter().try_for_each(|tensor| Ok(tensor.to_vec1::<f32>().map(drop)?))
        }
        "two groups, one on the CPU" => {
            let cpu = pg.cpu_group()?;
            cpu.barrier()?;
            if pg.rank() == 0 { cpu.barrier() } else { a.barrier() }
        }
        "two groups, a message" => match pg.rank() {
            0 => pg.recv(&ones(pg)?, 1),
            _ => pg.barrier(),
        },
        _ => {
            all_reduce(first)?.to_vec1::<f32>()?;
            all_reduce(second)?.to_vec1::<f32>()?;
            Ok(())
        }
    }
}

#[test]
fn ranks_that_wait_for_each_other_in_two_groups_hear_of_it() {
    let Some(_) = gpus("ranks_that_wait_for_each_other_in_two_groups_hear_of_it") else { return };
    for (job, text) in WAYS {
        let reports = Ranks::start(2, job).finish();
        assert!(reports.iter().all(|report| report.contains(text)), "{job}: {reports:#?}");
        assert_eq!(reports[0], reports[1], "{job}");
    }
}

/// One rank waits for seconds while the other has put calls on the GPU in another order, or has threads that wait and one that does not.
fn late(pg: &ProcessGroup) -> Result<()> {
    let [a, b] = [pg.new_group(&[0, 1])?, pg.new_group(&[1, 0])?].map(|group| group.unwrap());
    let late = || std::thread::sleep(Duration::from_secs(7));
    for group in [&a, &b] {
        all_reduce(group)?;
    }
    let own = ones(pg)?;
    if pg.rank() == 0 {
        all_reduce(&a)?.to_vec1::<f32>()?;
        all_reduce(&b)?.to_vec1::<f32>()?;
    } else {
        // The GPU has begun it, but waits for it only later.
        let work = b.all_reduce_async(&own, ReduceOp::Sum)?;
        late();
        all_reduce(&a)?;
        work.wait()?;
        assert_eq!(own.to_vec1::<f32>()?, [2.0; 3]);
    }
    if pg.rank() == 0 {
        a.barrier()?;
        b.barrier()?;
    } else {
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| b.barrier());
            late();
            a.barrier()?;
            waiting.join().unwrap()
        })?;
    }
    // Without a wait for it, a call holds up nothing.
    let work = if pg.rank() == 0 { Some(a.all_reduce_async(&own, ReduceOp::Max)?) } else { None };
    late();
    all_reduce(&b)?.to_vec1::<f32>()?;
    work.map_or_else(|| a.all_reduce(&own, ReduceOp::Max), |work| work.synchronize())?;
    pg.barrier()
}

#[test]
fn ranks_that_are_late_in_two_groups_get_no_error() {
    crate::finish("ranks_that_are_late_in_two_groups_get_no_error", 2, "two groups, late");
}

/// The number of random programs; `CANDLE_DDP_TEST_PROGRAMS=100` for a long run.
const PROGRAMS: &str = "CANDLE_DDP_TEST_PROGRAMS";
const RANKS: usize = 3;

/// A program in which every rank makes the right calls, but late: between calls, ranks sleep for seconds.
fn run_program(pg: &ProcessGroup, seed: u64) -> Result<()> {
    let (mut random, mut sleeps) = (Random(seed), Random(seed * 1000 + pg.rank() as u64));
    let mut groups = vec![Some(pg.clone()), Some(pg.cpu_group()?)];
    for _ in 0..3 {
        let first = random.below(RANKS as u64) as usize;
        let ranks: Vec<usize> = (0..2 + random.below(2) as usize).map(|offset| (first + offset) % RANKS).collect();
        groups.push(pg.new_group(&ranks)?);
    }
    let mut long = 0;
    let mut in_flight: Vec<Work> = Vec::new();
    for _ in 0..40 {
        let (group, kind) = (random.below(groups.len() as u64) as usize, random.below(7));
        let sleep = match sleeps.below(40) {
            0 if long < 2 => {
                long += 1;
                2500 + sleeps.below(2500)
            }
            1..8 => sleeps.below(50),
            _ => 0,
        };
        std::thread::sleep(Duration::from_millis(sleep));
        let Some(group) = &groups[group] else { continue };
        let tensor = Tensor::full(1f32, 700, group.device())?;
        let (rank, n) = (group.rank(), group.world_size());
        match kind {
            0 => in_flight.push(group.all_reduce_async(&tensor, ReduceOp::Sum)?),
            1 => group.broadcast(&tensor, 1)?,
            2 => group.barrier()?,
            3 => {
                let received = tensor.zeros_like()?;
                let send = P2pOp::Send { tensor: tensor.clone(), peer: (rank + 1) % n };
                let recv = P2pOp::Recv { tensor: received, peer: (rank + n - 1) % n };
                in_flight.push(group.batch_isend_irecv(&[send, recv])?);
            }
            4 if rank == 0 => drop(group.isend(&tensor, n - 1)?),
            4 if rank == n - 1 => group.recv(&tensor, 0)?,
            4 => {}
            5 => std::mem::take(&mut in_flight).iter().try_for_each(Work::wait)?,
            _ => {
                group.all_reduce(&tensor, ReduceOp::Sum)?;
                assert_eq!(tensor.to_vec1::<f32>()?, [n as f32; 700]);
            }
        }
    }
    in_flight.iter().try_for_each(Work::wait)
}

#[test]
fn random_programs_with_late_ranks_get_no_error() {
    crate::finish("random_programs_with_late_ranks_get_no_error", RANKS, "two groups, programs");
}
