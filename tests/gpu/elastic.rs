//! Generations of `elastic::run` over NCCL: ranks are processes under the launcher, and are killed.
use crate::common::assert_close;
use crate::common::elastic_ranks::{FOLDER, GPUS, Run, Training, by_hand, processes, read, result, run_as_rank, train};
use crate::common::elastic_zero;
use crate::launch::{SHARED, gpus, is_emulated};
use candle_ddp::elastic::State;
use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

const RANK: &str = "elastic::rank_of_another_test";
const RANK_WITH_SHARDS: &str = "elastic::rank_with_shards_of_another_test";

/// The entry point of ranks.
#[test]
#[ignore = "started by other tests"]
fn rank_of_another_test() {
    run_as_rank(|own, device| State::new(Training::new(own, device)), train);
}

/// The entry point of ranks whose optimizer's state is sharded.
#[test]
#[ignore = "started by other tests"]
fn rank_with_shards_of_another_test() {
    elastic_zero::run();
}

/// Under ddprun, on one GPU each if there are enough. NCCL writes the history of its communicators to a file per process.
fn launched(gpus: usize, world_size: usize, options: &[&str], events: &str, min: Option<usize>) -> Run {
    launched_as(RANK, gpus, world_size, options, events, min)
}

fn launched_as(rank: &str, gpus: usize, world_size: usize, options: &[&str], events: &str, min: Option<usize>) -> Run {
    let variables: Vec<String> =
        environment(gpus, world_size).into_iter().map(|(name, value)| format!("{name}={value}")).collect();
    let mut all = [options, &["env"]].concat();
    all.extend(variables.iter().map(String::as_str));
    // The part that differs from rank to rank.
    let host = if gpus < world_size { "NCCL_HOSTID=rank$RANK" } else { "" };
    let shell = format!("NCCL_DEBUG_FILE=${FOLDER}/nccl-%p {host} exec \"$0\" \"$@\"");
    all.extend(["sh", "-c", &shell]);
    Run::of(rank, world_size, &all, events, min)
}

fn environment(gpus: usize, world_size: usize) -> Vec<(&'static str, String)> {
    let mut variables = vec![(GPUS, gpus.to_string()), ("NCCL_DEBUG", "INFO".to_string())];
    if gpus < world_size {
        variables.extend(SHARED.map(|(name, value)| (name, value.to_string())));
    }
    variables
}

/// The history of a process's communicators, in order, with their numbers of ranks: `Init 3`, `Abort 3`.
fn communicators(folder: &Path, process: &str) -> Vec<String> {
    let lines = read(folder, &format!("nccl-{process}"));
    let event = |line: &str| {
        let (line, what) = line.strip_suffix(" COMPLETE")?.rsplit_once(" - ")?;
        let ranks = line.split_once(" nranks ")?.1.split(' ').next()?;
        Some(format!("{what} {ranks}"))
    };
    lines.lines().filter_map(event).collect()
}

fn parameters(run: &Run, ranks: &[usize]) -> Vec<f32> {
    result(run.folder.path(), ranks).split(' ').map(|value| value.parse().unwrap()).collect()
}

#[test]
fn killed_ranks_are_replaced_and_survivors_make_new_communicators() {
    let Some(gpus) = gpus("killed_ranks_are_replaced_and_survivors_make_new_communicators") else { return };
    let calm = launched(gpus, 3, &[], "", None);
    calm.succeeded();
    // The others are in the middle of the all-reduce, or a step ahead.
    let events = "1 kill-forward 3,0 kill-backward 6,2 kill-commit 9";
    let run = launched(gpus, 3, &["--max-restarts", "3"], events, None);
    run.succeeded();
    assert!(run.stderr().contains("a new process takes its place (restart 3 of 3)"), "{}", run.stderr());
    // In which order NCCL adds three values depends on their places in the bucket, and those on the first backward pass.
    let tolerance = if is_emulated() { 0. } else { 1e-4 };
    let (expected, trained) = (parameters(&calm, &[0, 1, 2]), parameters(&run, &[0, 1, 2]));
    assert_close(&trained, &expected, tolerance, "with ranks that were replaced");

    // The number of generations that each process of a rank has seen.
    let expected: [&[usize]; 3] = [&[2, 2], &[1, 3], &[3, 1]];
    for (rank, expected) in expected.into_iter().enumerate() {
        let processes = run.processes(rank);
        let lives: Vec<&[String]> = processes.chunk_by(|one, next| one == next).collect();
        assert_eq!(lives.iter().map(|life| life.len()).collect::<Vec<_>>(), expected, "{processes:?}");
        for (life, is_last) in lives.iter().zip([false, true]) {
            let mut wanted = ["Init 3", "Abort 3"].repeat(life.len());
            wanted.pop();
            wanted.extend(is_last.then_some("Destroy 3"));
            assert_eq!(communicators(run.folder.path(), &life[0]), wanted, "rank {rank}, process {}", life[0]);
        }
    }
}

/// The ranks mirror their shards over the communicator that they have: pairs of them make none, whose kernels would need room.
#[test]
fn the_shards_of_a_killed_rank_come_from_its_mirror() {
    let Some(gpus) = gpus("the_shards_of_a_killed_rank_come_from_its_mirror") else { return };
    let launched = |options: &[&str], events| launched_as(RANK_WITH_SHARDS, gpus, 3, options, events, None);
    let calm = launched(&[], "");
    calm.succeeded();
    let names = std::fs::read_dir(calm.folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
    let processes: Vec<String> =
        names.filter_map(|name| Some(name.to_str()?.strip_prefix("nccl-")?.to_string())).collect();
    assert!(processes.len() >= 3, "{processes:?}");
    for process in processes {
        let all = communicators(calm.folder.path(), &process);
        assert!(all.iter().all(|event| event.ends_with(" 3")), "{all:?}");
    }
    // While the others are in the exchange of a commit, or a step ahead.
    let run = launched(&["--max-restarts", "2"], "1 kill-step 2,2 kill-commit 5");
    run.succeeded();
    let tolerance = if is_emulated() { 0. } else { 1e-4 };
    let (expected, trained) = (parameters(&calm, &[0, 1, 2]), parameters(&run, &[0, 1, 2]));
    assert_close(&trained, &expected, tolerance, "with shards of ranks that were replaced");
}

/// Ranks 1 and 2 have ended without rank 0, in the processes in which they began.
fn assert_went_on(folder: &Path) {
    result(folder, &[1, 2]);
    for rank in [1, 2] {
        let processes = processes(folder, rank);
        assert!(processes.len() == 2 && processes[0] == processes[1], "{processes:?}");
        assert_eq!(communicators(folder, &processes[0]), ["Init 3", "Abort 3", "Init 2", "Destroy 2"]);
    }
}

#[test]
fn without_replacement_the_others_go_on_over_a_smaller_communicator() {
    let Some(gpus) = gpus("without_replacement_the_others_go_on_over_a_smaller_communicator") else { return };
    let run = launched(gpus, 3, &[], "0 kill-backward 2", Some(2));
    run.succeeded();
    assert!(run.stderr().contains("the other 2 rank(s) continue without it"), "{}", run.stderr());
    assert_went_on(run.folder.path());
    let run =
        launched(gpus, 3, &["--max-restarts", "1"], "1 kill-forward 1,2 kill-forward 2,0 kill-forward 3", Some(2));
    assert_eq!(run.output.status.code(), Some(128 + 9), "{}", run.stderr());
    let error = run.read("error-1");
    assert!(error.contains("the 1 remaining rank(s) are fewer than min_world_size (2)"), "{error}");
}

/// Only NCCL reports it to the others.
#[test]
fn without_a_launcher_the_ranks_that_are_left_go_on() {
    let Some(gpus) = gpus("without_a_launcher_the_ranks_that_are_left_go_on") else { return };
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let init_method = format!("file://{}", folder.join("store").display());
    let ranks = by_hand(RANK, folder, &init_method, 3, "0 kill-backward 2", 2);
    let mut children: Vec<Child> = Vec::new();
    for (rank, mut command) in ranks.into_iter().enumerate() {
        command.envs(environment(gpus, 3)).env("NCCL_DEBUG_FILE", folder.join("nccl-%p"));
        command.env("SLURM_LOCALID", rank.to_string());
        if gpus < 3 {
            command.env("NCCL_HOSTID", format!("rank{rank}"));
        }
        children.push(command.spawn().unwrap());
    }
    let until = Instant::now() + Duration::from_secs(120);
    while Instant::now() < until && children.iter_mut().any(|rank| rank.try_wait().unwrap().is_none()) {
        std::thread::sleep(Duration::from_millis(20));
    }
    // One that hangs is not left behind.
    let end = |rank: &mut Child| rank.kill().and_then(|()| rank.wait()).unwrap().success();
    let ended: Vec<bool> = children.iter_mut().map(end).collect();
    assert_eq!(ended, [false, true, true]);
    assert_went_on(folder);
}
