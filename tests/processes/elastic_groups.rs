//! `elastic::run` with ranks that communicate in several groups: a death has the same meaning in whichever of them it is seen
//! first. And with parts of commits that belong to a group, when all ranks die.
use crate::common::elastic_ranks::{ALL_LOST, Run, result};
use crate::elastic_groups_ranks::{self, EVERY, SHAPE};

/// The entry point of ranks.
#[test]
#[ignore = "started by other tests"]
fn rank_of_another_test() {
    elastic_groups_ranks::run();
}

const RANK: &str = "elastic_groups::rank_of_another_test";

fn launched(shape: &str, restarts: &str, events: &str, all_lost: &str, transport: &str) -> Run {
    let variables = [(SHAPE, shape), (ALL_LOST, all_lost), ("CANDLE_DDP_CPU_TRANSPORT", transport)];
    let variables = variables.map(|(name, value)| (name, value.to_string()));
    Run::with(RANK, 3, &["--max-restarts", restarts], events, variables)
}

/// Kills ranks, in shared memory and over TCP, and compares the result with the result of a calm run.
fn survives(shape: &str, kills: &[String]) {
    for transport in ["auto", "tcp"] {
        let calm = launched(shape, "0", "", "", transport);
        calm.succeeded();
        let restarts = kills.len().to_string();
        let run = launched(shape, &restarts, &kills.join(","), "", transport);
        run.succeeded();
        assert!(run.stderr().contains(&format!("(restart {restarts} of {restarts})")), "{}", run.stderr());
        assert_eq!(result(run.folder.path(), &[0, 1, 2]), result(calm.folder.path(), &[0, 1, 2]), "{transport}");
    }
}

/// Kills each rank in turn at this place of a step, where the others wait for it.
fn at(place: &str) -> Vec<String> {
    (0..8).map(|kill| format!("{} kill-{place} {}", kill % 3, 1 + 2 * kill)).collect()
}

#[test]
fn a_death_that_is_seen_first_in_the_group_of_the_layers() {
    survives("norm", &at("inside"));
}

/// The other ranks may have made parts of the step by then.
#[test]
fn a_death_in_the_middle_of_a_step_in_parts() {
    // Each group of ranks makes its first step as a whole.
    survives("parts", &(0..6).map(|kill| format!("{} kill-inside {}", kill % 3, 3 + 3 * kill)).collect::<Vec<_>>());
}

#[test]
fn a_death_that_is_seen_first_in_a_subgroup() {
    survives("subgroups", &at("group"));
}

#[test]
fn a_death_that_is_seen_first_in_a_message() {
    survives("messages", &at("message"));
}

#[test]
fn deaths_in_one_generation_after_the_other() {
    let kills = "0 kill-made 0,1 kill-inside 0,2 kill-begin 0,2 kill-group 3,0 kill-made 3,1 kill-begin 3,1 kill-message 3,0 kill-start 0";
    survives("norm,subgroups,messages", &kills.split(',').map(str::to_string).collect::<Vec<_>>());
}

/// All ranks are killed in the same step. The checkpoint has the parts that belong to a group.
#[test]
fn when_all_ranks_die_at_once_the_parts_that_belong_to_a_group_are_those_of_the_checkpoint() {
    let die = |commit: u64| (0..3).map(|rank| format!("{rank} join-forward {commit}")).collect::<Vec<_>>().join(",");
    let calm = launched("norm", "0", "", "load", "auto");
    calm.succeeded();
    // In the first epoch, in the second one, and at its end.
    let commits = [4, 10, 15];
    let run = launched("norm", "9", &commits.map(die).join(","), "load", "auto");
    run.succeeded();
    for commit in commits {
        let expected = format!("continues from the program's checkpoint, commit {}", commit - commit % EVERY);
        assert_eq!(run.stderr().matches(&expected).count(), 1, "{}", run.stderr());
    }
    assert_eq!(result(run.folder.path(), &[0, 1, 2]), result(calm.folder.path(), &[0, 1, 2]));
    assert_eq!(run.read("restored-1").lines().count(), 4);
}
