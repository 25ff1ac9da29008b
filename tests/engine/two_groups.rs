//! Ranks that wait for each other in different groups all get an error within seconds, far from the time-out, and ranks that are only late
//! get none.
use crate::common::test_process;
use candle_core::{DType, Tensor};
use candle_ddp::{Error, Failure, P2pOp, ProcessGroup, ReduceOp, Result, SpawnOptions, Work, spawn_with};
use candle_ddp::{InitOptions, init_process_group};
use candle_ddp_testing::Random;
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::time::{Duration, Instant};

/// Far below the time-out, and enough for a machine that is busy with other tests.
const SOON: Duration = Duration::from_secs(120);

/// Runs `work` on `world_size` ranks, where it must fail soon. Returns the error of each rank, which is the same for every later call.
#[track_caller]
fn failures(world_size: usize, work: impl Fn(&ProcessGroup) -> Result<()> + Sync) -> Vec<String> {
    let begin = Instant::now();
    let all = spawn_with(SpawnOptions { world_size, ..Default::default() }, |pg| {
        let error = work(&pg).unwrap_err();
        let (Error::Group(failure), Error::Group(again)) = (&error, pg.barrier().unwrap_err()) else {
            panic!("{error}")
        };
        assert!(matches!(failure, Failure::Desync { sequence: 0, .. }), "{failure:?}");
        assert_eq!(failure, &again);
        Ok(error.to_string())
    });
    assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
    let all = all.unwrap();
    assert!(all.iter().all(|text| *text == all[0]), "{all:?}");
    all
}

#[track_caller]
fn assert_contains(text: &str, parts: &[&str]) {
    parts.iter().for_each(|part| assert!(text.contains(part), "{part:?} is not in {text}"));
}

/// Two ranks that call in two groups in different orders. If the groups are new, no thread is known to call there.
fn cross(is_new: bool) -> String {
    let all = failures(3, |pg| {
        let groups = [pg.new_group(&[0, 1])?, pg.new_group(&[1, 0])?];
        let [Some(a), Some(b)] = groups else { return pg.barrier() };
        if !is_new {
            a.barrier()?;
            b.barrier()?;
        }
        let (first, second) = if pg.rank() == 0 { (&a, &b) } else { (&b, &a) };
        first.barrier()?;
        second.barrier()
    });
    all[2].clone()
}

#[test]
fn ranks_that_use_two_groups_in_different_orders_hear_of_it() {
    let parts = [
        "rank 0 waits in barrier() in the group of ranks [0, 1], rank 1 in barrier() in the group of ranks [1, 0]: they wait for each \
         other",
        "Ranks must make the calls of all their groups in the same order",
        "The call of rank 0 is at tests/engine/two_groups.rs:",
    ];
    assert_contains(&cross(false), &parts);
}

/// The only test of its process: others would start threads.
#[test]
#[ignore = "started by another test"]
fn alone_in_its_process() {
    cross(true);
    // A new thread may make the first call in a group, even if another one has ended.
    let all = spawn_with(SpawnOptions { world_size: 2, ..Default::default() }, |pg| {
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let unrelated = std::thread::spawn(move || _ = ended.recv());
        let other = pg.new_group(&[0, 1])?.unwrap();
        // No thread is new yet.
        pg.barrier()?;
        drop(end);
        unrelated.join().unwrap();
        if pg.rank() == 1 {
            other.barrier()?;
            return pg.barrier();
        }
        std::thread::scope(|scope| {
            let late = scope.spawn(|| {
                std::thread::sleep(Duration::from_secs(7));
                other.barrier()
            });
            pg.barrier().and(late.join().unwrap())
        })
    });
    all.unwrap();
}

#[test]
fn new_groups_are_watched_too() {
    let output = test_process(module_path!(), "alone_in_its_process").output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn three_ranks_may_wait_in_a_circle_of_three_groups() {
    let all = failures(3, |pg| {
        let groups = [[0, 1], [1, 2], [2, 0]].map(|ranks| pg.new_group(&ranks));
        let groups = groups.map(|group| group.unwrap());
        // A new thread may call a group that the rank has never called.
        for group in groups.iter().flatten() {
            group.barrier()?;
        }
        groups[pg.rank()].as_ref().unwrap().barrier()
    });
    let text = "rank 0 waits in barrier() in the group of ranks [0, 1], rank 1 in barrier() in the group of ranks [1, 2], rank 2 in \
                barrier() in the group of ranks [2, 0]: they wait";
    assert_contains(&all[0], &[text]);
}

#[test]
fn a_message_and_a_collective_wait_for_each_other() {
    let all = failures(2, |pg| match pg.rank() {
        0 => pg.recv(&Tensor::zeros(3, DType::F32, pg.device())?, 1),
        _ => pg.barrier(),
    });
    let text = "rank 0 waits in recv(f32[3]) in the group of all ranks, rank 1 in barrier() in the group of all ranks";
    assert_contains(&all[0], &[text]);
}

#[test]
fn works_that_are_waited_for_count_and_so_do_those_that_a_group_waits_for_at_its_end() {
    let all = failures(2, |pg| {
        let other = pg.new_group(&[0, 1])?.unwrap();
        let tensor = Tensor::zeros(3, DType::F32, pg.device())?;
        if pg.rank() == 0 {
            pg.all_reduce_async(&tensor, ReduceOp::Sum)?.wait()
        } else {
            drop(other.all_reduce_async(&tensor, ReduceOp::Sum)?);
            drop(other);
            pg.all_reduce(&tensor, ReduceOp::Sum)
        }
    });
    let text = "rank 0 waits in all_reduce(f32[3]) in the group of all ranks, rank 1 in all_reduce(f32[3]) in the group of ranks [0, 1]";
    assert_contains(&all[0], &[text]);
}

/// A thread of the rank may still make the call.
#[test]
fn a_rank_with_another_thread_is_only_late() {
    spawn_with(SpawnOptions { world_size: 2, ..Default::default() }, |pg| {
        let other = pg.new_group(&[0, 1])?.unwrap();
        let tensor = Tensor::zeros(3, DType::F32, pg.device())?;
        other.barrier()?;
        if pg.rank() == 0 {
            return std::thread::scope(|scope| {
                let late = scope.spawn(|| {
                    other.barrier()?;
                    std::thread::sleep(Duration::from_secs(6));
                    other.barrier()
                });
                pg.all_reduce(&tensor, ReduceOp::Sum)?;
                late.join().unwrap()
            });
        }
        other.barrier()?;
        other.barrier()?;
        pg.all_reduce(&tensor, ReduceOp::Sum)
    })
    .unwrap();
}

/// The number of random programs; `CANDLE_DDP_TEST_PROGRAMS=1000` for a long run.
const PROGRAMS: &str = "CANDLE_DDP_TEST_PROGRAMS";
const RANKS: usize = 3;

/// Programs in which every rank makes the right calls, but late: between calls, ranks sleep for seconds. Several threads of a rank call in
/// different groups, works are waited for in any order, and messages go in batches.
#[test]
fn ranks_that_are_late_get_no_error() {
    let programs = std::env::var(PROGRAMS).map_or(6, |programs| programs.parse().unwrap());
    let next = std::sync::atomic::AtomicU64::new(1);
    std::thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    if seed > programs {
                        return;
                    }
                    let options = SpawnOptions { world_size: RANKS, ..Default::default() };
                    if let Err(error) = spawn_with(options, |pg| run_program(&pg, seed)) {
                        panic!("program {seed}: {error}");
                    }
                }
            });
        }
    });
}

/// All ranks run the same program, but sleep as they like.
fn run_program(pg: &ProcessGroup, seed: u64) -> Result<()> {
    let mut random = Random(seed);
    // Each of two threads has groups to itself.
    let mut groups = [vec![Some(pg.clone())], vec![]];
    for index in 0..5 {
        let first = random.below(RANKS as u64) as usize;
        let ranks: Vec<usize> = (0..2 + random.below(2) as usize).map(|offset| (first + offset) % RANKS).collect();
        groups[index % 2].push(pg.new_group(&ranks)?);
    }
    let [mine, theirs] = groups;
    let sleeps = seed * 1000 + pg.rank() as u64;
    std::thread::scope(|scope| {
        let other = scope.spawn(|| run_part(&theirs, random.clone(), Random(sleeps * 2)));
        let mut own = random.clone();
        own.below(7);
        let ran = run_part(&mine, own, Random(sleeps * 2 + 1));
        other.join().unwrap().and(ran)
    })
}

fn run_part(groups: &[Option<ProcessGroup>], mut random: Random, mut sleeps: Random) -> Result<()> {
    let mut long = 1;
    let mut in_flight: Vec<Work> = Vec::new();
    for _ in 0..30 {
        let (group, kind, first) = (random.below(groups.len() as u64) as usize, random.below(6), random.below(2) == 0);
        // Of the slow ranks in the world, some are late for seconds, once or twice.
        let sleep = match sleeps.below(40) {
            0 if long < 3 => {
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
            1 => group.broadcast(&tensor, usize::from(first))?,
            2 => group.barrier()?,
            3 => {
                let received = tensor.zeros_like()?;
                let send = P2pOp::Send { tensor: tensor.clone(), peer: (rank + 1) % n };
                let recv = P2pOp::Recv { tensor: received, peer: (rank + n - 1) % n };
                in_flight.push(group.batch_isend_irecv(&if first { vec![send, recv] } else { vec![recv, send] })?);
            }
            4 => {
                let order = sleeps.below(2) == 0;
                let mut waited: Vec<Work> = std::mem::take(&mut in_flight);
                if order {
                    waited.reverse();
                }
                waited.iter().try_for_each(Work::wait)?;
            }
            _ => group.all_reduce(&tensor, ReduceOp::Sum)?,
        }
    }
    in_flight.iter().try_for_each(Work::wait)
}

const RANK: &str = "CANDLE_DDP_TEST_RANK";
const FOLDER: &str = "CANDLE_DDP_TEST_FOLDER";

/// A rank that makes calls in two groups.
#[test]
#[ignore = "started by another test"]
fn rank_process() {
    let [rank, folder] = [RANK, FOLDER].map(|variable| std::env::var(variable).unwrap());
    let init_method = format!("file://{folder}/store");
    let (rank, world_size) = (Some(rank.parse().unwrap()), Some(2));
    let pg = init_process_group(InitOptions { init_method, rank, world_size, ..Default::default() }).unwrap();
    let other = pg.new_group(&[0, 1]).unwrap().unwrap();
    let begin = Instant::now();
    let mut turns = 0;
    // All ranks make equally many turns.
    while pg.all_reduce_scalars([begin.elapsed().as_secs_f64()], ReduceOp::Max).unwrap()[0] < 12. {
        other.barrier().unwrap();
        if turns == 0 {
            println!("\nready");
        }
        turns += 1;
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_rank_that_is_stopped_for_seconds_is_only_late() {
    let folder = tempfile::tempdir().unwrap();
    let mut ranks: Vec<_> = (0..2)
        .map(|rank| {
            let mut command = test_process(module_path!(), "rank_process");
            command.env(RANK, rank.to_string()).env(FOLDER, folder.path());
            command.stdout(Stdio::piped()).spawn().unwrap()
        })
        .collect();
    let mut lines =
        ranks.iter_mut().map(|rank| BufReader::new(rank.stdout.take().unwrap()).lines()).collect::<Vec<_>>();
    for lines in &mut lines {
        assert!(lines.any(|line| line.unwrap() == "ready"));
    }
    for victim in [1, 0] {
        let pid = Pid::from_child(&ranks[victim]);
        kill_process(pid, Signal::STOP).unwrap();
        std::thread::sleep(Duration::from_millis(4500));
        kill_process(pid, Signal::CONT).unwrap();
    }
    lines.into_iter().for_each(|lines| lines.for_each(drop));
    for mut rank in ranks {
        assert!(rank.wait().unwrap().success());
    }
}
