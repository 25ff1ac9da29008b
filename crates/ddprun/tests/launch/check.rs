//! `ddprun check`: real ranks measure. How fast they are decides nothing here, since the machine may be busy.
use crate::nodes::finish;
use crate::{Ran, Running, Sandbox, free_port};
use std::process::{Command, Stdio};

/// However uneven the ranks are.
const ANY: &str = "--tolerance=1e9";

/// Little, since nothing here is optimised.
const LITTLE: &str = "--most-bytes=65536";

#[test]
fn ranks_measure_and_the_table_shows_them() {
    let sandbox = Sandbox::new();
    let ran = Ran::new(&mut sandbox.ddprun(&["check", "--quick", LITTLE, ANY, "--nproc-per-node=3"]));
    assert_eq!(ran.code, Some(0), "{ran:?}");
    for text in [
        "\nrank  node  host",
        "\n2     0     ",
        "\nnode  clock",
        "\nnode  ddprun",
        "over 3 rank(s): 8 B ",
        "\nno outliers\n",
    ] {
        assert!(ran.stdout.contains(text), "{text}: {}", ran.stdout);
    }
    assert_eq!(ran.stderr, "");
}

#[test]
fn a_slow_rank_is_named_and_the_exit_code_is_1() {
    let sandbox = Sandbox::new();
    // One of the two is always slower by something.
    let ran =
        Ran::new(&mut sandbox.ddprun(&["check", "--quick", LITTLE, "--json", "--tolerance=1", "--nproc-per-node=2"]));
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(1), ""), "{ran:?}");
    let report: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
    let copy = |rank: usize| report["ranks"][rank]["copy"].as_f64().unwrap();
    let slower = if copy(0) < copy(1) { 0 } else { 1 };
    let named = format!("rank {slower} (node 0, host ");
    let outliers = report["outliers"].as_array().unwrap().iter().map(|text| text.as_str().unwrap());
    let found: Vec<&str> = outliers.filter(|text| text.contains("memory is copied at")).collect();
    assert!(found.len() == 1 && found[0].starts_with(&named), "{found:?} {named}");
}

/// A command for ddprun that may open `limit` files.
fn limited(limit: &str, ddprun: &Command) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("ulimit -n {limit}; exec \"$0\" \"$@\"")]).arg(ddprun.get_program());
    command.args(ddprun.get_args());
    ddprun.get_current_dir().into_iter().for_each(|folder| {
        command.current_dir(folder);
    });
    for (name, value) in ddprun.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command
}

#[test]
fn all_nodes_name_the_node_that_lacks_something() {
    let sandbox = Sandbox::new();
    let port = format!("--master-port={}", free_port());
    let options = ["--no-secret", "--nnodes=2", "--master-addr=127.0.0.1", &port];
    let start = |node_rank: &str, workers: &str, limit: &str| {
        let args = [&["check", "--quick", LITTLE, ANY, node_rank, workers], &options[..]].concat();
        let mut command = limited(limit, &sandbox.ddprun(&args));
        Running::new(command.stdout(Stdio::piped()).stderr(Stdio::piped()))
    };
    let all = finish(vec![
        start("--node-rank=0", "--nproc-per-node=3", "512"),
        start("--node-rank=1", "--nproc-per-node=1", "75"),
    ]);
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let named = format!("node 1 (host {host}): a process may open 75 files, and 4 ranks may need 76");
    assert_eq!(all.iter().map(|ran| ran.code).collect::<Vec<_>>(), [Some(1), Some(1)], "{all:?}");
    assert!(all[0].stdout.contains(&format!("\n1 outlier(s):\n- {named}")), "{all:?}");
    assert_eq!(all[1].stdout, "");
    all[1].says(&named);
}

#[test]
fn a_run_starts_after_its_check_or_not_at_all() {
    let sandbox = Sandbox::new();
    // The run's options and secret are not those of the check.
    let set = |command: &mut Command| {
        command.env("PET_NNODES", "1:1").env("CANDLE_DDP_SECRET", "x".repeat(32));
    };
    let mut fit = sandbox.ddprun(&["--check=1e9", "sh", "-c", "echo started"]);
    set(&mut fit);
    let ran = Ran::new(&mut fit);
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(0), "started\n"), "{ran:?}");
    ran.says("this machine is fit: ");
    let mut unfit = limited("66", &sandbox.ddprun(&["--check=1e9", "sh", "-c", "echo started"]));
    set(&mut unfit);
    let ran = Ran::new(&mut unfit);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(ran.stdout.contains("1 outlier(s):") && !ran.stdout.contains("started"), "{ran:?}");
    ran.says("this machine does not join the run: node 0 ");
    ran.says("a process may open 66 files, and 1 ranks may need 67");
}

#[test]
fn wrong_options_say_what_is_right() {
    let sandbox = Sandbox::new();
    for (args, says) in [
        (&["check", "--tolerance=0.5"][..], "a number from 1 to 1e9"),
        (&["check", "--nnodes=2"], "--node-rank"),
        (&["check", "x"], "unexpected argument"),
    ] {
        let ran = Ran::new(&mut sandbox.ddprun(args));
        ran.ends(2, &[says]);
    }
}

/// Starts agents with `--check`, which count as hosts of their own; the last one may have another version of NCCL.
fn checked_nodes(sandbox: &Sandbox, nodes: usize, workers: usize, last_has_nccl: bool) -> Vec<Ran> {
    let port = format!("--master-port={}", free_port());
    let libraries = sandbox.path("libraries");
    std::fs::create_dir_all(&libraries).unwrap();
    std::fs::write(libraries.join("libnccl.so.2.25.1"), "").unwrap();
    std::os::unix::fs::symlink("libnccl.so.2.25.1", libraries.join("libnccl.so.2")).unwrap();
    let start = |node: usize| {
        let node_rank = format!("--node-rank={node}");
        let counts = [format!("--nnodes={nodes}"), format!("--nproc-per-node={workers}")];
        let placed = [&counts[0], &counts[1], "--master-addr=127.0.0.1", &port, &node_rank, "--no-secret"];
        let script = "echo $RANK of $WORLD_SIZE, $TORCHELASTIC_RESTART_COUNT restarts, $1 >>started";
        let run = ["--check=1e9", "--max-restarts=3", "--redirects=3", "--log-dir=logs", "sh", "-c", script, "sh", "x"];
        let mut command = sandbox.ddprun(&[&placed[..], &run[..]].concat());
        command.env("CANDLE_DDP_CPU_HOST", format!("host {node}"));
        if last_has_nccl && node + 1 == nodes {
            command.env("LD_LIBRARY_PATH", &libraries);
        }
        Running::new(command.stdout(Stdio::piped()).stderr(Stdio::piped()))
    };
    finish((0..nodes).map(start).collect())
}

#[test]
fn nodes_check_their_connections_together_before_the_run() {
    let sandbox = Sandbox::new();
    let all = checked_nodes(&sandbox, 2, 1, false);
    for ran in &all {
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(0), ""), "{all:?}");
        ran.says("the connections between the 2 nodes are fit (--check): the run starts");
    }
    let started = std::fs::read_to_string(sandbox.path("started")).unwrap();
    let mut started: Vec<&str> = started.lines().collect();
    started.sort_unstable();
    let expected: Vec<String> = (0..2).map(|rank| format!("{rank} of 2, 0 restarts, x")).collect();
    assert_eq!(started, expected);
}

#[test]
fn nodes_that_do_not_fit_together_start_no_run() {
    let sandbox = Sandbox::new();
    let all = checked_nodes(&sandbox, 3, 1, true);
    for ran in &all {
        ran.ends(1, &["--check: the run does not start: NCCL is 2.25.1 on node 2 "]);
    }
    assert!(all[0].stdout.contains("\n1 outlier(s):\n- NCCL is 2.25.1 on node 2 "), "{all:?}");
    assert!(!sandbox.path("started").exists(), "{all:?}");
}

/// The others would wait for it: the one that has failed its own check tells them, also if it is to host the store.
#[test]
fn a_machine_that_fails_its_own_check_ends_the_others() {
    for unfit in 0..2 {
        let sandbox = Sandbox::new();
        let port = format!("--master-port={}", free_port());
        let start = |node: usize| {
            let node_rank = format!("--node-rank={node}");
            let placed = ["--nnodes=2", "--master-addr=127.0.0.1", &port, &node_rank, "--no-secret"];
            let command = |check: &[&str]| sandbox.ddprun(&[&placed[..], check, &["sh", "-c", ": >started"]].concat());
            let mut command = command(if node == unfit { &["--check=1e9"] } else { &[] });
            if node == unfit {
                // The check fails at once.
                command.env("CANDLE_DDP_CPU_TRANSPORT", "none");
            }
            Running::new(command.stdout(Stdio::piped()).stderr(Stdio::piped()))
        };
        let all = finish(vec![start(0), start(1)]);
        assert_eq!([all[0].code, all[1].code], [Some(1); 2], "{all:?}");
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        for ran in &all {
            ran.says(&format!("the machine of host {host} is not fit for the run: "));
            ran.says("ddprun check failed (exit status: 1)");
        }
        all[unfit].says("--check: this machine does not join the run: ");
        assert!(!sandbox.path("started").exists(), "{all:?}");
    }
}
