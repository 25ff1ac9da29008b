//! Ranks that wait for each other in different groups all get an error within seconds, far from the time-out, and ranks that are only late
//! get none.
mod programs;

use crate::common::{ddprun, succeed, test_arguments, test_process};
use candle_core::{DType, Tensor};
use candle_ddp::{Error, Failure, ProcessGroup, ReduceOp, Result, SpawnOptions, spawn_with};
use candle_ddp::{InitOptions, init_process_group};
use candle_ddp_testing::Random;
use programs::Program;
use rustix::process::{Pid, Signal, kill_process};
use std::process::Command;
use std::time::{Duration, Instant};

/// Below the time-out of 600 s, also on a machine that has hardly any time for this test.
const SOON: Duration = Duration::from_secs(500);

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
        "The call of rank 0 is at tests/engine/across_groups.rs:",
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
    succeed(&mut test_process(module_path!(), "alone_in_its_process"));
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
fn messages_that_do_not_fit_wait_for_each_other() {
    // In a process for which the transport can be chosen.
    succeed(test_process(module_path!(), "large_messages_cross").env("CANDLE_DDP_CPU_TRANSPORT", "shm"));
}

#[test]
#[ignore = "started by another test"]
fn large_messages_cross() {
    let all = failures(2, |pg| pg.send(&Tensor::zeros(programs::LARGE, DType::F32, pg.device())?, 1 - pg.rank()));
    let call = "send(f32[4194304]) in the group of all ranks";
    assert_contains(&all[0], &[&format!("rank 0 waits in {call}, rank 1 in {call}: they wait for each other")]);
}

#[test]
fn a_group_that_only_one_rank_makes_and_a_call_wait_for_each_other() {
    let all = failures(2, |pg| {
        let other = pg.new_group(&[1, 0])?.unwrap();
        // Otherwise the threads of other tests might call there.
        pg.barrier()?;
        other.barrier()?;
        match pg.rank() {
            0 => pg.new_group(&[0, 1]).map(drop),
            _ => other.barrier(),
        }
    });
    let text = "rank 0 waits in the construction of the group of ranks [0, 1], rank 1 in barrier() in the group of ranks [1, 0]";
    assert_contains(&all[0], &[text, "The call of rank 0 is at tests/engine/across_groups.rs:"]);
    let all = failures(2, |pg| {
        pg.barrier()?;
        match pg.rank() {
            0 => pg.barrier(),
            _ => pg.with_grad().map(drop),
        }
    });
    let text = "rank 0 waits in barrier() in the group of all ranks, rank 1 in the construction of the companion of the group of all";
    assert_contains(&all[0], &[text, "that of rank 1 is at tests/engine/across_groups.rs:"]);
}

#[test]
fn works_that_are_waited_for_count_and_so_do_those_that_a_group_waits_for_at_its_end() {
    let all = failures(2, |pg| {
        let other = pg.new_group(&[0, 1])?.unwrap();
        // A new thread may call a group that the rank has never called.
        other.barrier()?;
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

const FOLDER: &str = "CANDLE_DDP_TEST_FOLDER";
/// How long a process is stopped.
const STOPPED: &str = "CANDLE_DDP_TEST_STOPPED_SECONDS";
const PROCESSES: usize = 4;

/// A rank that runs random programs.
#[test]
#[ignore = "started by another test"]
fn rank_process() {
    let folder = std::env::var(FOLDER).unwrap();
    let pg = init_process_group(InitOptions::default()).unwrap();
    std::fs::write(format!("{folder}/{}", pg.rank()), format!("{} ", std::process::id())).unwrap();
    for seed in programs::numbers(2) {
        Program::new(seed).of_processes(PROCESSES).on(&pg, &|| ()).unwrap();
    }
}

#[test]
fn processes_that_are_stopped_for_seconds_are_only_late() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(ddprun());
    command.args(["--standalone", "--nproc-per-node", &PROCESSES.to_string()]).arg(std::env::current_exe().unwrap());
    command.args(test_arguments(module_path!(), "rank_process")).env(FOLDER, folder.path());
    let mut launcher = command.spawn().unwrap();
    let pid = |rank: usize| {
        let text = std::fs::read_to_string(folder.path().join(rank.to_string())).ok()?;
        Pid::from_raw(text.strip_suffix(' ')?.parse().ok()?)
    };
    let seconds = std::env::var(STOPPED).map_or(4, |seconds| seconds.parse().unwrap());
    let mut random = Random(seconds);
    for _ in 0..3 {
        let victim = random.below(PROCESSES as u64) as usize;
        let pause = Duration::from_millis(500 + random.below(1500));
        let pid = loop {
            std::thread::sleep(pause);
            match (pid(victim), launcher.try_wait().unwrap()) {
                (Some(pid), None) => break pid,
                (_, Some(status)) => return assert!(status.success()),
                (None, None) => {}
            }
        };
        // It may end just now.
        if kill_process(pid, Signal::STOP).is_ok() {
            std::thread::sleep(Duration::from_secs(seconds));
            kill_process(pid, Signal::CONT).unwrap();
        }
    }
    assert!(launcher.wait().unwrap().success());
}
