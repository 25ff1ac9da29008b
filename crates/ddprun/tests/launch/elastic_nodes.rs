//! `--nnodes MIN:MAX` with `--rdzv-backend c10d`: nodes come and go.
use crate::nodes::finish;
use crate::status::{status, status_when};
use crate::verdict::{has, verdict};
use crate::{Ran, Running, Sandbox, free_port, wait_until};
use candle_ddp_rendezvous::TcpStore;
use rustix::process::Signal;
use serde_json::json;
use std::process::Stdio;

/// Each worker says which round it is in, and waits for the end.
const SCRIPT: &str = ": >here-$TORCHELASTIC_RESTART_COUNT-$RANK-of-$WORLD_SIZE-$GROUP_RANK
    while [ ! -e end ]; do sleep 0.02; done";

/// Nodes with two workers each, which are all on this machine.
struct Nodes {
    sandbox: Sandbox,
    port: u16,
    nnodes: &'static str,
    /// How many seconds a round waits for more nodes, once the smallest number is there.
    last_call: &'static str,
}

impl Nodes {
    /// The first round waits long enough for a second node, however busy the machine is.
    fn new(nnodes: &'static str) -> Self {
        Self { sandbox: Sandbox::new(), port: free_port(), nnodes, last_call: "8" }
    }

    fn start(&self, args: &[&str], script: &str) -> Running {
        let options = ["--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-id=a", "--nnodes", self.nnodes];
        let pace = "keep_alive_interval=0.1,keep_alive_max_attempt=40";
        let conf = format!("--rdzv-conf={pace},last_call_timeout={}", self.last_call);
        let endpoint = format!("localhost:{}", self.port);
        let node = self.sandbox.start(&[&options[..], &["--rdzv-endpoint", &endpoint, &conf], args].concat(), script);
        // The first one hosts the store.
        TcpStore::connect("localhost", self.port, crate::PATIENCE).unwrap();
        node
    }

    /// Waits until a round has begun on `nodes` nodes, and returns its workers' ranks with those of their nodes.
    fn wait_for_round(&self, restart_count: usize, nodes: usize) -> Vec<String> {
        let prefix = format!("here-{restart_count}-");
        let mut found = Vec::new();
        wait_until(&format!("round {restart_count} on {nodes} nodes"), || {
            let names = std::fs::read_dir(self.sandbox.path("")).unwrap();
            found = names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
            found.retain(|name| name.starts_with(&prefix));
            found.len() == 2 * nodes
        });
        found.sort();
        found.into_iter().map(|name| name.split_once(&prefix).unwrap().1.to_string()).collect()
    }

    /// Waits until a spare is there, in a run whose workers were started again so often.
    fn wait_for_spare(&self, attempt: usize) {
        wait_until("the spare", || {
            let told = status(&self.sandbox, self.port).stdout;
            told.starts_with(&format!("run a: running, attempt {attempt},")) && told.contains("  waiting\n")
        });
    }

    fn end(&self, nodes: Vec<Running>) -> Vec<Ran> {
        std::fs::write(self.sandbox.path("end"), "").unwrap();
        finish(nodes)
    }
}

/// A machine that hosts the store and has no workers: the first node is no more than the others.
fn host_store(nodes: &Nodes, args: &[&str]) -> Running {
    let endpoint = format!("--rdzv-endpoint=localhost:{}", nodes.port);
    let options = ["host-store", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-id=a", "--no-secret", &endpoint];
    let mut command = nodes.sandbox.ddprun(&[&options[..], &["--nnodes", nodes.nnodes], args].concat());
    let host = Running::new(command.stdout(Stdio::piped()).stderr(Stdio::piped()));
    TcpStore::connect("localhost", nodes.port, crate::PATIENCE).unwrap();
    host
}

#[test]
fn a_spare_replaces_any_node_if_the_store_is_on_a_machine_without_workers() {
    let nodes = Nodes::new("2");
    let host = host_store(&nodes, &["--max-restarts=1", "--metrics-port=0", "--log-dir=logs"]);
    let args = ["--max-restarts=1", "--no-secret"];
    let mut first = nodes.start(&args, SCRIPT);
    let second = nodes.start(&args, SCRIPT);
    nodes.wait_for_round(0, 2);
    let spare = nodes.start(&args, SCRIPT);
    nodes.wait_for_spare(0);
    first.send(Signal::KILL);
    nodes.wait_for_round(1, 2);
    let unneeded = nodes.start(&args, SCRIPT);
    nodes.wait_for_spare(1);
    let all = nodes.end(vec![host, second, spare, unneeded]);
    assert!(all.iter().all(|ran| ran.code == Some(0)), "{all:?}");
    all[0].says("the run has ended well\n");
    [&all[2], &all[3]].iter().for_each(|ran| ran.says("all nodes that the run needs are there: this one waits until"));
    all[3].says("the run has ended well: this spare was not needed");
    all[0].says("hosts the store of run a at port ");
    all[0].says("metrics are at http://127.0.0.1:");
    let found = verdict(&nodes.sandbox, "logs/a");
    has(&found, &json!({"outcome": "succeeded", "restarts": 1, "rank": null, "how": "lost"}));
    // The run fails: so does the process of its store.
    let nodes = Nodes::new("2");
    let host = host_store(&nodes, &["--log-dir=logs"]);
    let others = vec![nodes.start(&["--no-secret"], "exit 7"), nodes.start(&["--no-secret"], "sleep 1000")];
    let all = finish([vec![host], others].into_iter().flatten().collect());
    assert_eq!(all.iter().map(|ran| ran.code).collect::<Vec<_>>(), [Some(7); 3], "{all:?}");
    all[0].says("failed first: it exited with code 7");
    has(&verdict(&nodes.sandbox, "logs/a"), &json!({"outcome": "failed", "how": "exit", "exit": 7, "code": 7}));
}

/// All nodes exit with 0 then.
#[test]
fn a_store_whose_workers_save_after_a_signal_ends_well() {
    let nodes = Nodes::new("2");
    let host = host_store(&nodes, &[]);
    let script = format!("trap 'exit 0' TERM; {SCRIPT}");
    let mut first = nodes.start(&["--no-secret"], &script);
    let second = nodes.start(&["--no-secret"], &script);
    nodes.wait_for_round(0, 2);
    first.send(Signal::TERM);
    let all = finish(vec![host, first, second]);
    assert_eq!(all.iter().map(|ran| ran.code).collect::<Vec<_>>(), [Some(0); 3], "{all:?}");
    all[0].says("leaves: ddprun received SIGTERM");
}

/// Whatever the workers make of it: none of them is the spare's.
#[test]
fn a_spare_that_a_signal_ends_was_not_needed() {
    let nodes = Nodes::new("2");
    let mut host = host_store(&nodes, &[]);
    let args = ["--no-secret"];
    let others = [nodes.start(&args, SCRIPT), nodes.start(&args, SCRIPT)];
    nodes.wait_for_round(0, 2);
    let mut signalled = nodes.start(&args, SCRIPT);
    nodes.wait_for_spare(0);
    signalled.send(Signal::TERM);
    let signalled = finish(vec![signalled]).remove(0);
    signalled.ends(0, &["SIGTERM: this spare was not needed"]);
    wait_until("the end of the spare", || !status(&nodes.sandbox, nodes.port).stdout.contains("  waiting\n"));
    let spare = nodes.start(&args, SCRIPT);
    nodes.wait_for_spare(0);
    // A node that leaves would be replaced.
    host.send(Signal::TERM);
    let all = finish([host].into_iter().chain(others).chain([spare]).collect());
    assert_eq!(
        all.iter().map(|ran| ran.code).collect::<Vec<_>>(),
        [Some(143), Some(143), Some(143), Some(0)],
        "{all:?}"
    );
    all[3].says("the host of the store received SIGTERM");
    all[3].says("this spare was not needed");
}

#[test]
fn a_signal_to_the_host_of_the_store_ends_the_run_on_all_nodes() {
    for (trap, code) in [("trap 'exit 0' TERM", 0), ("true", 143)] {
        let nodes = Nodes::new("2");
        let mut host = host_store(&nodes, &[]);
        let script = format!("{trap}; {SCRIPT}");
        let others = [nodes.start(&["--no-secret"], &script), nodes.start(&["--no-secret"], &script)];
        nodes.wait_for_round(0, 2);
        host.send(Signal::TERM);
        let all = finish([host].into_iter().chain(others).collect());
        assert_eq!(all.iter().map(|ran| ran.code).collect::<Vec<_>>(), [Some(code); 3], "{all:?}");
        all.iter().for_each(|ran| ran.says("the host of the store received SIGTERM"));
    }
}

/// The last failure before them is none of theirs.
#[test]
fn a_spare_outlives_restarts_of_the_others() {
    let nodes = Nodes::new("2");
    let args = ["--max-restarts=1", "--no-secret"];
    let script = format!("{SCRIPT}; [ $TORCHELASTIC_RESTART_COUNT = 1 ] || {{ rm end; exit 7; }}");
    let others = [nodes.start(&args, &script), nodes.start(&args, &script)];
    nodes.wait_for_round(0, 2);
    let spare = nodes.start(&args, &script);
    nodes.wait_for_spare(0);
    std::fs::write(nodes.sandbox.path("end"), "").unwrap();
    nodes.wait_for_round(1, 2);
    let all = nodes.end(others.into_iter().chain([spare]).collect());
    assert_eq!(all.iter().map(|ran| ran.code).collect::<Vec<_>>(), [Some(0); 3], "{all:?}");
    all[2].says("restarting all workers (restart 1 of 1)");
    all[2].says("this spare was not needed");
}

#[test]
fn a_store_without_a_run_says_what_is_wrong() {
    let sandbox = Sandbox::new();
    for (args, says) in [
        (&["host-store", "--nnodes=2", "--node-rank=0", "--master-addr=localhost"][..], "needs --rdzv-backend c10d"),
        (
            &["host-store", "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=192.0.2.1"],
            "a free address of this machine",
        ),
    ] {
        let ran = Ran::new(&mut sandbox.ddprun(args));
        ran.ends(2, &[says]);
    }
}

#[test]
fn nodes_get_their_ranks_when_they_meet() {
    let nodes = Nodes::new("2");
    let running = vec![nodes.start(&[], SCRIPT), nodes.start(&[], SCRIPT)];
    assert_eq!(nodes.wait_for_round(0, 2), ["0-of-4-0", "1-of-4-0", "2-of-4-1", "3-of-4-1"]);
    for ran in nodes.end(running) {
        assert_eq!(ran.code, Some(0), "{ran:?}");
    }
}

#[test]
fn the_others_go_on_without_a_dead_node_and_admit_one_that_comes() {
    let nodes = Nodes { last_call: "0.1", ..Nodes::new("1:2") };
    let first = nodes.start(&[], SCRIPT);
    nodes.wait_for_round(0, 1);
    let mut second = nodes.start(&[], SCRIPT);
    assert_eq!(nodes.wait_for_round(1, 2), ["0-of-4-0", "1-of-4-0", "2-of-4-1", "3-of-4-1"]);
    let status = |attempt| {
        let first = format!("run a: running, attempt {attempt}, 0 of 0 restarts used");
        status_when(&nodes.sandbox, nodes.port, &first)
    };
    let both = status(1);
    assert!(both.matches("  alive\n").count() == 2 && both.contains("\n3  ") && both.contains("no failure"), "{both}");
    second.send(Signal::KILL);
    assert_eq!(nodes.wait_for_round(2, 1), ["0-of-2-0", "1-of-2-0"]);
    let one = status(2);
    assert!(one.matches("  alive\n").count() == 1 && !one.contains("\n2  "), "{one}");
    assert!(one.contains("UTC: node 1 (host ") && one.contains("is gone: its ddprun ended without a word"), "{one}");
    let third = nodes.start(&[], SCRIPT);
    nodes.wait_for_round(3, 2);
    let all = nodes.end(vec![first, third]);
    assert!(all.iter().all(|ran| ran.code == Some(0)), "{all:?}");
    all[0].says("a node has joined (host ");
    all[0].says("node 1 (host ");
    all[0].says("is gone: its ddprun ended without a word");
    all[0].says("Restarting all workers, on 1 node(s)");
}

/// The workers that are left fail because those of the other node are gone: that is not their failure. As long as a
/// ddprun is stopped, its node is as silent as a machine without power.
#[test]
fn a_failure_because_of_a_silent_node_uses_up_no_restart() {
    let nodes = Nodes::new("1:2");
    let script =
        SCRIPT.replace("do sleep", "do [ $TORCHELASTIC_RESTART_COUNT = 1 ] || [ ! -e killed ] || exit 5; sleep");
    let running = nodes.start(&[], &script);
    let mut second = nodes.start(&[], &script);
    nodes.wait_for_round(0, 2);
    second.send(Signal::STOP);
    std::fs::write(nodes.sandbox.path("killed"), "").unwrap();
    nodes.wait_for_round(1, 1);
    let ran = nodes.end(vec![running]).remove(0);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(!ran.stderr.contains("restart 1"), "{ran:?}");
    ran.says("has given no sign of life for 4 s");
}

#[test]
fn a_failure_of_a_worker_counts_where_all_nodes_live() {
    let nodes = Nodes::new("1:2");
    let script = format!("{SCRIPT}; [ $RANK != 3 ] || exit 9; sleep 1000");
    let running = vec![nodes.start(&[], &script), nodes.start(&[], &script)];
    nodes.wait_for_round(0, 2);
    for ran in nodes.end(running) {
        ran.ends(9, &["rank 3 on host "]);
    }
}

#[test]
fn too_few_nodes_end_the_run() {
    let nodes = Nodes { last_call: "0.1", ..Nodes::new("2:3") };
    let first = nodes.start(&[], SCRIPT);
    let mut second = nodes.start(&[], SCRIPT);
    nodes.wait_for_round(0, 2);
    second.send(Signal::KILL);
    let ran = finish(vec![first]).remove(0);
    ran.ends(1, &["The 1 remaining node(s) are fewer than --nnodes requires (2)"]);
}

/// It has no workers, and fails with the run.
#[test]
fn a_spare_of_a_run_that_fails_ends_with_its_code_and_its_reason() {
    let nodes = Nodes::new("2");
    let script = format!("{SCRIPT}; [ $RANK != 3 ] || exit 7; exec sleep 1000");
    let members = [nodes.start(&[], &script), nodes.start(&[], &script)];
    nodes.wait_for_round(0, 2);
    let spare = nodes.start(&[], &script);
    nodes.wait_for_spare(0);
    let all = nodes.end(members.into_iter().chain([spare]).collect());
    assert_eq!(all.iter().map(|ran| ran.code).collect::<Vec<_>>(), [Some(7); 3], "{all:?}");
    all[2].says("rank 3 on host ");
    all[2].says("(node 1) failed first: it exited with code 7");
}

/// With restarts, the run waits until there are enough nodes again.
#[test]
fn a_restart_waits_for_a_node_in_place_of_a_dead_one() {
    let nodes = Nodes::new("2");
    let first = nodes.start(&["--max-restarts=1"], SCRIPT);
    let mut second = nodes.start(&["--max-restarts=1"], SCRIPT);
    nodes.wait_for_round(0, 2);
    second.send(Signal::KILL);
    let third = nodes.start(&["--max-restarts=1"], SCRIPT);
    nodes.wait_for_round(1, 2);
    let all = nodes.end(vec![first, third]);
    assert!(all.iter().all(|ran| ran.code == Some(0)), "{all:?}");
}

#[test]
fn a_node_that_leaves_by_a_signal_is_no_failure_and_a_spare_takes_its_place() {
    let nodes = Nodes::new("1:2");
    let first = nodes.start(&[], SCRIPT);
    let mut second = nodes.start(&[], SCRIPT);
    nodes.wait_for_round(0, 2);
    let spare = nodes.start(&[], SCRIPT);
    // The spare is there once it has been told that it is not needed yet.
    second.send(Signal::TERM);
    let ran = finish(vec![second]).remove(0);
    assert_eq!(ran.code, Some(128 + 15), "{ran:?}");
    wait_until("the spare", || {
        nodes.sandbox.path("here-2-3-of-4-1").exists() || nodes.sandbox.path("here-1-3-of-4-1").exists()
    });
    let all = nodes.end(vec![first, spare]);
    assert!(all.iter().all(|ran| ran.code == Some(0)), "{all:?}");
    all[0].says("leaves: ddprun received SIGTERM");
}
