//! `elastic::run` with real processes that are killed: under the launcher, and by hand.
use crate::common::elastic_ranks::{
    ALL_LOST, EPOCHS, EVENTS, FOLDER, LAST_CALL, Run, SAMPLES, Training, arguments, by_hand, processes, read, result,
    run_as_rank, train, wait_for,
};
use candle_ddp::elastic::State;
use candle_ddp::rendezvous::Store;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// The entry point of ranks.
#[test]
#[ignore = "started by other tests"]
fn rank_of_another_test() {
    run_as_rank(|own, device| State::new(Training::new(own, device)), train);
}

pub(crate) const RANK: &str = "elastic::rank_of_another_test";

/// Under ddprun.
fn launched(world_size: usize, options: &[&str], events: &str, min: Option<usize>) -> Run {
    Run::of(RANK, world_size, options, events, min)
}

/// Starts a ddprun that is a node with `ranks` ranks of a run with `nnodes` nodes, and waits until the store has `key`.
fn node((nnodes, ranks): (&str, usize), folder: &Path, port: u16, events: &str, key: &str) -> Child {
    let mut launcher = Command::new(crate::common::ddprun());
    launcher.args(["--nnodes", nnodes, "--rdzv-backend=c10d", "--rdzv-id=elastic"]);
    launcher.arg(format!("--nproc-per-node={ranks}")).arg(format!("--rdzv-endpoint=localhost:{port}"));
    launcher.arg("--rdzv-conf=keep_alive_interval=0.1,keep_alive_max_attempt=40");
    launcher.arg(std::env::current_exe().unwrap()).args(arguments(RANK));
    launcher.env(EVENTS, events).env(FOLDER, folder).stdout(Stdio::null()).stderr(Stdio::piped());
    let child = launcher.spawn().unwrap();
    // The first node hosts the store.
    let store = candle_ddp::rendezvous::TcpStore::connect("localhost", port, Duration::from_secs(120)).unwrap();
    store.wait(&[key], None).unwrap();
    child
}

#[test]
fn a_whole_node_dies_and_another_comes_while_survivors_go_on() {
    let folder = tempfile::tempdir().unwrap();
    let (folder, port) = (folder.path(), crate::common::free_port());
    let events = "0 wait-forward 3,0 wait-forward 6";
    // The first node to come gets the first ranks.
    let first = node(("1:2", 2), folder, port, events, "candle_ddp/nodes/welcome/0");
    let mut second = node(("1:2", 2), folder, port, events, "candle_ddp/nodes/welcome/1");
    let entered = |rank: usize| {
        std::fs::read_to_string(folder.join(format!("entered-{rank}"))).map_or(0, |text| text.lines().count())
    };
    let waits = |commit: usize| folder.join(format!("0 wait-forward {commit}-0-{commit}")).exists();
    wait_for("the first steps of four ranks", || waits(3));
    assert_eq!(entered(2), 1);
    second.kill().unwrap();
    second.wait().unwrap();
    std::fs::write(folder.join("go-3"), "").unwrap();
    wait_for("steps without the second node", || waits(6));
    assert_eq!((entered(0), entered(2)), (2, 1));
    // It is admitted by its own generation.
    let third = node(("1:2", 2), folder, port, events, "candle_ddp/agent/0/generation/2");
    std::fs::write(folder.join("go-6"), "").unwrap();
    let outputs = [first, third].map(|node| node.wait_with_output().unwrap());
    for output in &outputs {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    result(folder, &[0, 1, 2, 3]);
    let run = Run { output: outputs[0].clone(), folder: tempfile::tempdir().unwrap() };
    for survivor in [processes(folder, 0), processes(folder, 1)] {
        assert!(survivor.len() == 3 && survivor.iter().all(|process| *process == survivor[0]), "{survivor:?}");
    }
    let replaced = processes(folder, 2);
    assert!(replaced.len() == 2 && replaced[0] != replaced[1], "{replaced:?}");
    assert!(run.stderr().contains("The other 2 rank(s) continue without it"), "{}", run.stderr());
    assert!(run.stderr().contains("the others continue with it, 4 ranks in all"), "{}", run.stderr());
}

/// The spare, a third node, has waited since before the run began. It has as many ranks as the node that dies, which are more than
/// those of the first node.
#[test]
fn a_spare_takes_the_place_of_a_node_that_dies() {
    let folder = tempfile::tempdir().unwrap();
    let (folder, port) = (folder.path(), crate::common::free_port());
    let events = "0 wait-forward 3";
    let start = |slot: usize, ranks: usize| {
        node(("2", ranks), folder, port, events, &format!("candle_ddp/nodes/welcome/{slot}"))
    };
    let (first, mut second, spare) = (start(0, 1), start(1, 3), start(2, 3));
    wait_for("the first steps of four ranks", || folder.join("0 wait-forward 3-0-3").exists());
    second.kill().unwrap();
    second.wait().unwrap();
    std::fs::write(folder.join("go-3"), "").unwrap();
    let outputs = [first, spare].map(|node| node.wait_with_output().unwrap());
    for output in &outputs {
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && stderr.contains("A spare takes its place (host "), "{stderr}");
        assert!(stderr.contains("the others continue with it, 4 ranks in all"), "{stderr}");
    }
    result(folder, &[0, 1, 2, 3]);
    // One generation follows another: the survivors never were fewer than four.
    let survivor = processes(folder, 0);
    assert!(survivor.len() == 2 && survivor[0] == survivor[1], "{survivor:?}");
    for replaced in [1, 2, 3].map(|rank| processes(folder, rank)) {
        assert!(replaced.len() == 2 && replaced[0] != replaced[1], "{replaced:?}");
    }
}

/// The processes of a rank are replaced on the node where they were, while all others continue.
#[test]
fn a_rank_of_another_node_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let port = crate::common::free_port().to_string();
    let start = |node_rank: &str, ranks: &str| {
        let mut launcher = Command::new(crate::common::ddprun());
        launcher.args(["--nnodes=2", "--nproc-per-node", ranks, "--max-restarts=2", "--master-addr=127.0.0.1"]);
        launcher.args(["--node-rank", node_rank, "--master-port", &port]);
        launcher.arg(std::env::current_exe().unwrap()).args(arguments(RANK));
        launcher.env(EVENTS, "3 kill-forward 2,0 kill-backward 5").env(FOLDER, folder.path());
        launcher.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let outputs = [start("0", "3"), start("1", "1")].map(|node| node.wait_with_output().unwrap());
    for output in &outputs {
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{stderr}");
        assert!(stderr.contains("a new process takes its place (restart 2 of 2)"), "{stderr}");
    }
    result(folder.path(), &[0, 1, 2, 3]);
    let survivor = processes(folder.path(), 1);
    assert!(survivor.len() == 3 && survivor.iter().all(|process| *process == survivor[0]), "{survivor:?}");
}

#[test]
fn with_every_rank_killed_and_replaced_the_result_is_that_of_an_undisturbed_run() {
    let calm = launched(3, &[], "", None);
    calm.succeeded();
    // At each place of a step: the others are in the middle of it, or a commit ahead.
    let events = "1 kill-forward 3,0 kill-backward 5,2 kill-step 8,1 kill-commit 9,0 kill-begin 9,2 kill-forward 14,0 kill-end 0";
    let run = launched(3, &["--max-restarts", "7"], events, None);
    run.succeeded();
    let results = [&run, &calm].map(|run| result(run.folder.path(), &[0, 1, 2]));
    assert!(results[0] == results[1], "{results:?}: {}", run.stderr());
    assert!(run.stderr().contains("a new process takes its place (restart 7 of 7)"), "{}", run.stderr());
}

/// All ranks are killed in the same step, so that no process is left that has a commit.
#[test]
fn when_all_ranks_die_at_once_the_run_says_from_where_it_continues() {
    let die = |commit: u64| (0..3).map(|rank| format!("{rank} join-forward {commit}")).collect::<Vec<_>>().join(",");
    let twice = format!("{},{}", die(4), die(9));
    let launched = |restarts, events: &str, all_lost: Option<&str>| {
        let all_lost = all_lost.map(|all_lost| (ALL_LOST, all_lost.to_string()));
        Run::with(RANK, 3, &["--max-restarts", restarts], events, all_lost)
    };
    let lost = "all ranks of the run were lost, and every commit with them: generation ";

    // With the program's checkpoint, the result equals an undisturbed run's.
    let (calm, run) = (launched("0", "", None), launched("6", &twice, Some("load")));
    calm.succeeded();
    run.succeeded();
    assert_eq!(result(run.folder.path(), &[0, 1, 2]), result(calm.folder.path(), &[0, 1, 2]));
    let stderr = run.stderr();
    assert_eq!(stderr.matches(lost).count(), 2, "{stderr}");
    for commit in [4, 9] {
        let expected = format!("continues from the program's checkpoint, commit {commit}");
        assert_eq!(stderr.matches(&expected).count(), 1, "{stderr}");
    }
    assert!(!stderr.contains("others continue"), "{stderr}");

    // Without one, it starts over, and says so once.
    let run = launched("3", &die(4), None);
    run.succeeded();
    let stderr = run.stderr();
    assert_eq!(stderr.matches(lost).count(), 1, "{stderr}");
    assert_eq!(stderr.matches("starts from scratch, since the program has no checkpoint").count(), 1, "{stderr}");

    // Or it ends, as the program wishes.
    let run = launched("5", &die(4), Some("end"));
    assert_eq!(run.output.status.code(), Some(1), "{}", run.stderr());
    for rank in 0..3 {
        let error = run.read(&format!("error-{rank}"));
        assert!(error.contains("all ranks of the run were lost") && error.contains("start_over is false"), "{error}");
    }
    assert!(run.stderr().contains("(restart 3 of 5)") && !run.stderr().contains("(restart 4"), "{}", run.stderr());
}

#[test]
fn survivors_keep_their_process_and_nothing_piles_up() {
    let kills: Vec<String> = (1..=8).map(|commit| format!("1 kill-forward {}", 2 * commit)).collect();
    let run = launched(2, &["--max-restarts", "8"], &kills.join(","), None);
    run.succeeded();
    let (survivor, replaced) = (run.processes(0), run.processes(1));
    assert_eq!((survivor.len(), replaced.len()), (9, 9));
    assert!(survivor.iter().all(|process| *process == survivor[0]), "{survivor:?}");
    assert!((1..9).all(|index| replaced[index] != replaced[index - 1]), "{replaced:?}");
    // Threads and open files of the survivor, at the beginning of each generation.
    let entered = run.read("entered-0");
    let resources: Vec<Vec<usize>> =
        entered.lines().map(|line| line.split(' ').skip(1).map(|count| count.parse().unwrap()).collect()).collect();
    // The second one has everything that is made once, such as the threads that compute. A connection may be opened or closed in that
    // moment, but a leftover of each generation would be seven by the last.
    assert!(resources[8].iter().zip(&resources[1]).all(|(last, second)| *last < second + 4), "{resources:?}");
}

#[test]
fn a_replacement_that_dies_at_once_is_replaced_as_well() {
    let events = "1 kill-forward 3,1 kill-start 0,0 kill-forward 6";
    let run = launched(2, &["--max-restarts", "3"], events, None);
    // The first process of rank 1 dies before any rank is known to be elastic, or after.
    run.succeeded();
    assert_eq!(run.processes(0).len() + run.processes(1).len(), 6, "{}", run.stderr());
}

#[test]
fn without_restarts_the_others_go_on_down_to_the_smallest_world_size() {
    let run = launched(4, &[], "2 kill-forward 1,0 kill-backward 4", Some(2));
    run.succeeded();
    result(run.folder.path(), &[1, 3]);
    assert!(run.stderr().contains("the other 2 rank(s) continue without it"), "{}", run.stderr());
    let run = launched(3, &["--max-restarts", "1"], "1 kill-forward 1,2 kill-forward 2,0 kill-forward 3", Some(2));
    assert_eq!(run.output.status.code(), Some(128 + 9), "{}", run.stderr());
    let expected = "rank 0 ended the group: its process was killed by SIGKILL, all restarts are used up \
                    (--max-restarts 1), and the 1 remaining rank(s) are fewer than min_world_size (2)";
    assert!(run.read("error-1").contains(expected), "{}", run.read("error-1"));
}

#[test]
fn an_error_of_the_program_is_not_retried() {
    for (event, expected) in
        [("1 error-forward 2", "luck: it has run out"), ("1 panic-backward 2", "it panicked: out of luck")]
    {
        let run = launched(3, &["--max-restarts", "5"], event, Some(1));
        assert!(!run.output.status.success());
        for rank in [0, 2] {
            let error = run.read(&format!("error-{rank}"));
            assert!(error.contains(&format!("rank 1 ended the group: {expected}")), "{error}");
            assert_eq!(run.processes(rank).len(), 1);
        }
        assert!(!run.stderr().contains("restart"), "{}", run.stderr());
    }
    let run = launched(2, &["--max-restarts", "5"], "1 exit-forward 2", Some(1));
    assert!(!run.output.status.success());
    assert!(run.read("error-0").contains("exited with code 0 before all ranks had finished"), "{}", run.stderr());
}

/// Starts ranks without a launcher that hosts the store.
fn start_by_hand(folder: &Path, init_method: &str, world_size: usize, events: &str, min: usize) -> Vec<Child> {
    let ranks = by_hand(RANK, folder, init_method, world_size, events, min);
    ranks.into_iter().map(|mut rank| rank.spawn().unwrap()).collect()
}

#[test]
fn under_slurm_the_ranks_that_are_left_see_every_sample() {
    let folder = tempfile::tempdir().unwrap();
    let init_method = format!("file://{}", folder.path().join("store").display());
    let mut ranks = start_by_hand(folder.path(), &init_method, 4, "0 kill-forward 2,2 kill-backward 5", 2);
    let codes: Vec<bool> = ranks.iter_mut().map(|rank| rank.wait().unwrap().success()).collect();
    assert_eq!(codes, [false, true, false, true]);
    result(folder.path(), &[1, 3]);
    // A step that was begun with more ranks, and again with fewer, counts once.
    let mut steps = std::collections::BTreeMap::<usize, (usize, Vec<(usize, Vec<usize>)>)>::new();
    for line in (0..4).map(|rank| read(folder.path(), &format!("seen-{rank}"))).collect::<String>().lines() {
        let numbers: Vec<usize> = line.split(' ').map(|number| number.parse().unwrap()).collect();
        let step = steps.entry(numbers[0]).or_insert((numbers[1], Vec::new()));
        if numbers[1] < step.0 {
            *step = (numbers[1], Vec::new());
        }
        if numbers[1] == step.0 {
            step.1.push((numbers[2], numbers[3..].to_vec()));
        }
    }
    let mut seen = vec![vec![0; SAMPLES]; EPOCHS as usize];
    for (epoch, samples) in steps.into_values().flat_map(|(_, ranks)| ranks) {
        samples.into_iter().for_each(|sample| seen[epoch][sample] += 1);
    }
    assert!(seen.iter().flatten().all(|count| *count >= 1), "{seen:?}");
    // Only the padding of an epoch is seen twice.
    let twice: Vec<usize> = seen.iter().map(|epoch| epoch.iter().sum::<usize>() - SAMPLES).collect();
    assert!(twice.iter().all(|count| *count <= 3), "{twice:?}");
}

/// Processes that do not outlive a test that fails.
struct Killed(Vec<Child>);

impl Drop for Killed {
    fn drop(&mut self) {
        for process in &mut self.0 {
            let _ = process.kill();
        }
    }
}

/// No rank waits for one that is known to be gone, however long it would wait for others.
#[test]
fn two_ranks_that_die_together_are_not_waited_for() {
    for store in ["tcp", "file"] {
        for (min, survive) in [(2, true), (3, false)] {
            let folder = tempfile::tempdir().unwrap();
            let init_method = match store {
                "tcp" => format!("tcp://127.0.0.1:{}", crate::common::free_port()),
                _ => format!("file://{}", folder.path().join("store").display()),
            };
            let events = "1 join-forward 2,2 join-forward 2";
            let ranks = by_hand(RANK, folder.path(), &init_method, 4, events, min);
            let ranks = ranks.into_iter().map(|mut rank| rank.env(LAST_CALL, "3600").spawn().unwrap());
            let mut ranks = Killed(ranks.collect());
            let ranks = &mut ranks.0;
            wait_for("the end of all ranks", || ranks.iter_mut().all(|rank| rank.try_wait().unwrap().is_some()));
            let codes: Vec<bool> = ranks.iter_mut().map(|rank| rank.wait().unwrap().success()).collect();
            assert_eq!(codes, [survive, false, false, survive], "{store}, at least {min}");
            if survive {
                result(folder.path(), &[0, 3]);
            } else {
                for rank in [0, 3] {
                    let error = read(folder.path(), &format!("error-{rank}"));
                    assert!(error.contains("The 2 remaining rank(s) are fewer than min_world_size (3)"), "{error}");
                }
            }
        }
    }
}

#[test]
fn the_end_of_the_store_and_too_few_ranks_are_errors_that_say_so() {
    for (events, min, expected) in [
        ("1 kill-forward 2", 3, "fewer than min_world_size (3)"),
        ("0 kill-forward 2", 1, "the process that hosts it (rank 0, or the launcher) has ended"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let init_method = format!("tcp://127.0.0.1:{}", crate::common::free_port());
        for mut rank in start_by_hand(folder.path(), &init_method, 3, events, min) {
            assert!(!rank.wait().unwrap().success());
        }
        for rank in (0..3).filter(|rank| !events.starts_with(&rank.to_string())) {
            let error = read(folder.path(), &format!("error-{rank}"));
            assert!(error.contains(expected) && error.contains("is gone: its connection to rank"), "{error}");
        }
    }
}

/// As torchrun does it: its agent hosts the store, and starts all workers again.
#[test]
fn where_all_ranks_are_started_again_the_error_of_the_group_is_returned() {
    let run = launched(2, &["--nnodes", "1", "--max-restarts", "0"], "1 kill-forward 2", None);
    assert!(run.read("error-0").contains("--max-restarts 0"), "{}", run.stderr());
    // Without this variable, ddprun does as torchrun.
    let started_again = |restarts: &str| {
        let folder = tempfile::tempdir().unwrap();
        let mut launcher = Command::new(crate::common::ddprun());
        launcher.args(["--nproc-per-node", "2", "--max-restarts", restarts, "env", "-u", "CANDLE_DDP_AGENT"]);
        launcher.arg(std::env::current_exe().unwrap()).args(arguments(RANK));
        launcher.env(EVENTS, "1 kill-forward 2").env(FOLDER, folder.path()).env(ALL_LOST, "load");
        Run { output: launcher.output().unwrap(), folder }
    };
    let run = started_again("0");
    assert!(!run.output.status.success());
    assert!(run.read("error-0").starts_with("rank 1 is gone: "), "{}", run.stderr());
    // The new processes continue from the checkpoint.
    let run = started_again("1");
    run.succeeded();
    let calm = launched(2, &[], "", None);
    assert_eq!(result(run.folder.path(), &[0, 1]), result(calm.folder.path(), &[0, 1]));
    // Of commit 2, or of commit 1 where rank 0 was ended while it wrote the next one.
    assert_eq!(run.stderr().matches("continues from the program's checkpoint, commit ").count(), 1, "{}", run.stderr());
}
