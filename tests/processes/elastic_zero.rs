//! `elastic::run` with an optimizer whose state is sharded over the ranks, and random numbers of each rank; ranks are
//! killed.
use crate::common::elastic_ranks::{EVENTS, FOLDER, MIN, Run, arguments, result};
use crate::common::elastic_zero;
use std::process::Command;

/// The entry point of ranks.
#[test]
#[ignore = "started by other tests"]
fn rank_of_another_test() {
    elastic_zero::run();
}

const RANK: &str = "elastic_zero::rank_of_another_test";

fn launched(world_size: usize, options: &[&str], events: &str, min: Option<usize>) -> Run {
    Run::of(RANK, world_size, options, events, min)
}

/// Ranks whose model is sharded: three, or under hybrid sharding four.
fn sharded(made: &str, events: &str, options: &[&str], min: Option<usize>) -> Run {
    let min = min.map(|min| (MIN, min.to_string()));
    let variables = min.into_iter().chain([(elastic_zero::SHARDED, made.to_string())]);
    Run::with(RANK, if made == "hybrid" { 4 } else { 3 }, options, events, variables)
}

#[test]
fn the_shards_of_a_killed_rank_come_from_its_mirror() {
    let calm = launched(3, &[], "", None);
    calm.succeeded();
    // At each place of a step, each rank.
    let events = "0 kill-forward 0,1 kill-forward 3,0 kill-backward 5,2 kill-step 7,1 kill-commit 9,0 kill-step 10,2 kill-commit 13";
    let run = launched(3, &["--max-restarts", "7"], events, None);
    run.succeeded();
    assert_eq!(result(run.folder.path(), &[0, 1, 2]), result(calm.folder.path(), &[0, 1, 2]));
    assert!(run.stderr().contains("(restart 7 of 7)"), "{}", run.stderr());
}

#[test]
fn the_pieces_of_a_killed_rank_come_from_its_mirror() {
    let calm = sharded("loop", "", &[], None);
    calm.succeeded();
    let events = "0 kill-forward 0,1 kill-forward 3,0 kill-backward 5,2 kill-step 7,1 kill-commit 9,0 kill-step 10,2 kill-commit 13";
    let killed = sharded("loop", events, &["--max-restarts", "7"], None);
    killed.succeeded();
    assert_eq!(result(killed.folder.path(), &[0, 1, 2]), result(calm.folder.path(), &[0, 1, 2]));
    // Two ranks have three ranks' pieces.
    let fewer = sharded("loop", "0 kill-backward 4", &[], Some(2));
    fewer.succeeded();
    result(fewer.folder.path(), &[1, 2]);
}

#[test]
fn a_rank_that_has_copies_of_pieces_is_replaced_like_any_other() {
    let calm = sharded("hybrid", "", &[], None);
    calm.succeeded();
    let events = "3 kill-forward 0,1 kill-forward 2,2 kill-backward 3,3 kill-step 5,0 kill-commit 6,3 kill-backward 8,2 kill-step 9";
    let killed = sharded("hybrid", events, &["--max-restarts", "7"], None);
    killed.succeeded();
    assert!(killed.stderr().contains("(restart 7 of 7)"), "{}", killed.stderr());
    assert_eq!(result(killed.folder.path(), &[0, 1, 2, 3]), result(calm.folder.path(), &[0, 1, 2, 3]));
    // Two ranks have one model, without copies.
    let fewer = sharded("hybrid", "1 join-backward 4,3 join-backward 4", &[], Some(2));
    fewer.succeeded();
    result(fewer.folder.path(), &[0, 2]);
}

/// Under hybrid sharding, the others first notice that the rank leaves groups that the program does not know.
#[test]
fn an_error_of_the_program_ends_the_run_on_every_rank() {
    for (made, ranks) in [("loop", 3), ("hybrid", 4)] {
        for guilty in [0, ranks - 1] {
            for place in ["forward", "backward", "step"] {
                let run = sharded(made, &format!("{guilty} error-{place} 5"), &["--max-restarts", "3"], None);
                assert!(!run.output.status.success());
                for rank in 0..ranks {
                    let error = run.read(&format!("error-{rank}"));
                    assert!(error.contains("luck: it has run out"), "{made}, {guilty}, {place}: rank {rank}: {error}");
                    assert!(rank == guilty || error.starts_with(&format!("rank {guilty} ended the group")), "{error}");
                }
                let summary = run.stderr().rsplit("ddprun: rank").next().unwrap().to_string();
                assert!(summary.contains("luck: it has run out"), "{}", run.stderr());
            }
        }
    }
}

#[test]
fn sharded_variables_that_outlive_their_group_are_an_error_on_every_rank() {
    let run = sharded("before", "0 kill-backward 4", &[], Some(2));
    assert!(!run.output.status.success());
    for rank in 1..3 {
        let error = run.read(&format!("error-{rank}"));
        assert!(error.contains("make the VarMap in the training loop"), "{error}");
    }
}

#[test]
fn the_ranks_that_are_left_share_the_shards() {
    let run = launched(4, &[], "2 kill-forward 2,0 kill-commit 4", Some(2));
    run.succeeded();
    result(run.folder.path(), &[1, 3]);
}

/// The machines of these ranks have one name, and yet no shard is mirrored on its own machine.
#[test]
fn the_end_of_a_machine_loses_no_shard() {
    let folder = tempfile::tempdir().unwrap();
    let run = |events: &str| {
        let mut launcher = Command::new(crate::common::ddprun());
        launcher.args(["--nproc-per-node", "4", "--max-restarts", "4", "--no-python", "sh", "-c"]);
        launcher
            .arg("CANDLE_DDP_CPU_HOST=node$((RANK / 2)) exec \"$@\"")
            .arg("sh")
            .arg(std::env::current_exe().unwrap());
        launcher.args(arguments(RANK)).env(EVENTS, events).env(FOLDER, folder.path());
        launcher.output().unwrap()
    };
    let output = run("0 join-forward 3,1 join-forward 3,2 join-step 7,3 join-step 7");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    result(folder.path(), &[0, 1, 2, 3]);
    assert!(stderr.contains("(restart 4 of 4)"), "{stderr}");
}

#[test]
fn what_a_rank_and_its_mirror_held_is_lost_when_they_die_together() {
    let run = launched(3, &["--max-restarts", "2"], "1 join-forward 4,2 join-forward 4", None);
    assert!(!run.output.status.success());
    for rank in 0..3 {
        let error = run.read(&format!("error-{rank}"));
        let expected = "the shard of rank 1 in commit 4 (of the states that are sharded over the ranks) is not";
        assert!(error.contains(expected), "{error}");
    }
}
