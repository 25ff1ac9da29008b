//! Several ddpruns on this machine, each of which is a node.
use crate::verdict::{has, verdict};
use crate::{AFTER, FAILS, PATIENCE, Ran, Running, Sandbox, free_port, is_alive, wait_until};
use candle_ddp_rendezvous::{Store, TcpStore};
use rustix::process::Signal;
use serde_json::json;
use std::process::Stdio;
use std::time::{Duration, Instant};

/// The nodes of a run, with a fixed number of them and, unless the arguments say otherwise, two workers each.
pub(crate) struct Nodes {
    sandbox: Sandbox,
    pub(crate) port: u16,
    count: usize,
}

impl Nodes {
    pub(crate) fn new(count: usize) -> Self {
        Self { sandbox: Sandbox::new(), port: free_port(), count }
    }

    fn start(&self, node_rank: usize, args: &[&str], script: &str) -> Running {
        let own = [
            format!("--nnodes={}", self.count),
            format!("--node-rank={node_rank}"),
            "--master-addr=127.0.0.1".to_string(),
            format!("--master-port={}", self.port),
            "--no-secret".to_string(),
        ];
        let mut own: Vec<&str> = own.iter().map(String::as_str).collect();
        if !args.iter().any(|arg| arg.replace('_', "-").starts_with("--nproc-per-node")) {
            own.push("--nproc-per-node=2");
        }
        self.sandbox.start(&[&own, args].concat(), script)
    }

    fn start_all(&self, args: &[&str], script: &str) -> Vec<Running> {
        (0..self.count).map(|node_rank| self.start(node_rank, args, script)).collect()
    }

    pub(crate) fn run(&self, args: &[&str], script: &str) -> Vec<Ran> {
        finish(self.start_all(args, script))
    }

    /// Runs a script whose workers wait for the file `go`. The ddprun of node 1 learns of what follows only after the end of
    /// `last`, one of its ranks: that its workers are asked to exit never comes before that, however busy the machine is.
    fn run_with_a_late_node(&self, script: &str, last: usize) -> Vec<Ran> {
        let mut running = self.start_all(&["--rdzv-conf", "keep_alive_max_attempt=1000", "--log-dir=logs"], script);
        let pids: Vec<_> = (0..2 * self.count).map(|rank| self.sandbox.pid(&format!("pid{rank}"))).collect();
        running[1].send(Signal::STOP);
        std::fs::write(self.sandbox.path("go"), "").unwrap();
        wait_until("the last rank to end", || !is_alive(pids[last]));
        running[1].send(Signal::CONT);
        finish(running)
    }

    /// The verdict, which the folders of all nodes have.
    #[track_caller]
    fn verdict(&self) -> serde_json::Value {
        let folder = |node| if node == 0 { "logs/none".to_string() } else { format!("logs/none_{}", node + 1) };
        let first = verdict(&self.sandbox, &folder(0));
        (1..self.count).for_each(|node| assert_eq!(verdict(&self.sandbox, &folder(node)), first));
        first
    }

    /// Waits for all workers of [`UP`].
    fn wait_until_up(&self) {
        let workers = 2 * self.count;
        wait_until("all workers", || (0..workers).all(|rank| self.sandbox.path(&format!("up{rank}")).exists()));
    }
}

/// Waits for all of them at once, since each may wait for the output of the others to be read.
pub(crate) fn finish(nodes: Vec<Running>) -> Vec<Ran> {
    let threads: Vec<_> = nodes.into_iter().map(|node| std::thread::spawn(|| Ran::of(node))).collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

/// The script's workers wait for this file, so that all of them are there when something happens.
const ALL_STARTED: &str = ": >started$RANK; while [ $(ls started* | wc -l) -lt $WORLD_SIZE ]; do sleep 0.01; done;";

/// The script's workers wait for this file.
const GO: &str = "until [ -e go ]; do sleep 0.01; done";

/// Workers that say that they are there, and do not end by themselves.
const UP: &str = ": >up$RANK; exec sleep 1000";

#[test]
fn a_failure_on_one_node_ends_all_and_each_names_it() {
    let nodes = Nodes::new(3);
    let script = format!(
        r#"trap 'exit 1' TERM
        {ALL_STARTED}
        if [ $RANK = 4 ]; then echo "Error: no data" >&2; exit 42; fi
        while true; do sleep 0.01; done"#
    );
    let all = nodes.run(&[], &script);
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    for ran in &all {
        assert_eq!(ran.code, Some(42), "{ran:?}");
        ran.says(&format!("rank 4 on host {host} (node 2) failed first: it exited with code 42, "));
        ran.says("its last lines:\n    Error: no data");
    }
    all[0].says("on this node on host");
    all[0].says("ranks [0, 1]: each exited with code 1 after ddprun asked it to exit");
    assert!(all[2].stderr.contains("rank 5 exited with code 1 after ddprun"), "{:?}", all[2]);
}

/// Rank 0 is the first to end, but only because rank 3 was killed.
#[test]
fn the_rank_that_was_killed_on_another_node_is_the_root() {
    let script = format!(
        r#"{FAILS} {AFTER} here; {GO}
        case $RANK in
        0) fails 'rank 3 is gone' 3; exit 1;;
        3) after 0; kill -9 $$;;
        esac
        exec sleep 1000"#
    );
    let nodes = Nodes::new(2);
    for ran in nodes.run_with_a_late_node(&script, 3) {
        ran.ends(128 + 9, &["rank 3 on host ", "(node 1) failed first: it was killed by SIGKILL"]);
        assert!(!ran.stderr.contains("rank 0 on host"), "{ran:?}");
    }
    has(
        &nodes.verdict(),
        &json!({"outcome": "failed", "rank": 3, "node": 1, "how": "signal", "signal": 9, "code": 137}),
    );
}

/// Nothing failed on the node of the rank that is named.
#[test]
fn a_rank_that_only_others_blame_is_named_with_its_node() {
    let script = format!(
        "{FAILS} {ALL_STARTED} [ $RANK = 0 ] || exec sleep 1000
        fails 'its connection closed' 3; exit 1"
    );
    let nodes = Nodes::new(2);
    for ran in nodes.run(&["--log-dir=logs"], &script) {
        assert_eq!(ran.code, Some(1), "{ran:?}");
        ran.says("rank 3 failed first, according to the error of rank 0: see the output of ddprun on node 1\nrank 0 on host ");
    }
    has(
        &nodes.verdict(),
        &json!({"rank": 3, "node": 1, "host": null, "how": "unknown", "told_by": 0, "cause": "PeerFailed"}),
    );
}

/// Errors that name each other lead to the rank that names none.
#[test]
fn errors_that_name_ranks_of_other_nodes_are_followed() {
    let script = format!(
        r#"{FAILS} {AFTER} here; {GO}
        case $RANK in
        1) fails 'it has no disk' 2; exit 1;;
        2) after 1; fails 'no disk'; exit 7;;
        esac
        exec sleep 1000"#
    );
    for ran in Nodes::new(2).run_with_a_late_node(&script, 2) {
        ran.ends(7, &["(node 1) failed first: it exited with code 7"]);
    }
}

#[test]
fn a_signal_to_one_node_ends_all() {
    let nodes = Nodes::new(2);
    let mut running = nodes.start_all(&[], UP);
    nodes.wait_until_up();
    running[1].send(Signal::TERM);
    let all = finish(running);
    assert_eq!([all[0].code, all[1].code], [Some(128 + 15); 2]);
    all[0].says("node 1 (host ");
    all[0].says("leaves: ddprun received SIGTERM");
    all[0].says("SIGTERM forwarded to the workers");
}

/// Each node says what its workers say.
#[test]
fn a_signal_that_all_workers_survive_well_is_no_failure_on_any_node() {
    for signalled in 0..2 {
        let nodes = Nodes::new(2);
        let script = "trap 'echo saved; exit 0' TERM; : >up$RANK; while :; do sleep 0.01; done";
        let mut running = nodes.start_all(&[], script);
        nodes.wait_until_up();
        running[signalled].send(Signal::TERM);
        for ran in finish(running) {
            assert_eq!((ran.code, ran.stdout.as_str()), (Some(0), "saved\nsaved\n"), "{ran:?}");
        }
    }
}

/// The agents of other nodes see that the connection is closed, and their workers end as well.
#[test]
fn the_death_of_the_node_that_hosts_the_store_ends_all() {
    let nodes = Nodes::new(2);
    let mut running = nodes.start_all(&[], &format!("{ALL_STARTED} echo $$ >pid$RANK; exec sleep 1000"));
    let workers: Vec<_> = (0..4).map(|rank| nodes.sandbox.pid(&format!("pid{rank}"))).collect();
    running[0].send(Signal::KILL);
    let all = finish(running);
    assert_eq!([all[0].code, all[1].code], [None, Some(1)]);
    all[1].says("the store of the run is gone");
    assert!(workers.iter().all(|worker| !is_alive(*worker)));
}

/// Workers that fail because of it, and say so, are not the first failure.
#[test]
fn the_death_of_the_node_that_hosts_the_store_is_the_cause() {
    let nodes = Nodes::new(2);
    let script = format!(
        "{FAILS} echo $PPID >parent$RANK; {ALL_STARTED} echo $$ >pid$RANK; [ $RANK -lt 2 ] && exec sleep 1000
        while kill -0 $(cat parent0); do sleep 0.01; done; fails 'rank 0 is gone' 0; exit 1"
    );
    let mut running = nodes.start_all(&[], &script);
    (0..4).for_each(|rank| drop(nodes.sandbox.wait_for(&format!("pid{rank}"))));
    running[0].send(Signal::KILL);
    // A zombie can still be sent a signal.
    running[0].child().wait().unwrap();
    let last = finish(vec![running.remove(1)]).remove(0);
    last.ends(1, &["ddprun: the store of the run is gone"]);
}

/// The system closes the connections of a ddprun that is killed, and nobody waits for its signs of life: here, ten minutes
/// would pass before they are missed.
#[test]
fn the_death_of_another_nodes_ddprun_is_noticed_at_once() {
    let nodes = Nodes::new(2);
    let mut running = nodes.start_all(&["--rdzv-conf", "keep_alive_interval=60", "--log-dir=logs"], UP);
    nodes.wait_until_up();
    running[1].send(Signal::KILL);
    let all = finish(running);
    assert_eq!([all[0].code, all[1].code], [Some(1), None]);
    all[0].says("node 1 (host ");
    all[0].says("is gone: its ddprun ended without a word, or its connection to the store was cut");
    let folder = if nodes.sandbox.path("logs/none/verdict.json").exists() { "logs/none" } else { "logs/none_2" };
    has(&verdict(&nodes.sandbox, folder), &json!({"rank": null, "node": 1, "how": "lost", "code": 1}));
}

/// A ddprun that is stopped closes no connection, like a machine that has lost its power: it is missed.
#[test]
fn the_death_of_another_node_is_noticed_by_its_silence() {
    let nodes = Nodes::new(2);
    let args = ["--rdzv-conf", "keep_alive_interval=0.1,keep_alive_max_attempt=40"];
    let mut running = nodes.start_all(&args, UP);
    nodes.wait_until_up();
    running[1].send(Signal::STOP);
    let stopped = running.pop();
    let first = finish(running).remove(0);
    drop(stopped);
    assert_eq!(first.code, Some(1));
    first.says("node 1 (host ");
    first.says("has given no sign of life for 4 s: its machine, its network or its ddprun has failed");
}

#[test]
fn a_program_that_one_node_does_not_have_is_named_by_all() {
    let nodes = Nodes::new(2);
    let other = nodes.start(1, &[], "exec sleep 1000");
    let port = format!("--master-port={}", nodes.port);
    let args = ["--nnodes=2", "--node-rank=0", "--master-addr=127.0.0.1", &port, "--no-secret", "--nproc-per-node=2"];
    let mut command = nodes.sandbox.ddprun(&[&args[..], &["/no/such/program"]].concat());
    let ran = Ran::of(Running::new(command.stdout(Stdio::piped()).stderr(Stdio::piped())));
    ran.ends(127, &["ddprun: the workers cannot be started: cannot start /no/such/program: No such file"]);
    let ran = Ran::of(other);
    ran.ends(1, &["leaves: its workers cannot be started: cannot start /no/such/program: No such file"]);
}

/// Anyone may write to a store without a secret.
#[test]
fn what_others_say_looks_like_no_message_of_ddprun() {
    let nodes = Nodes::new(2);
    let running = nodes.start_all(&[], UP);
    nodes.wait_until_up();
    let store = TcpStore::connect("127.0.0.1", nodes.port, PATIENCE).unwrap();
    let message = r#"[1,{"Leave":{"reason":"bored\nddprun: all is well","signal":null}}]"#;
    store.queue_push("candle_ddp/nodes/inbox", message.as_bytes()).unwrap();
    for ran in finish(running) {
        assert!(ran.code == Some(1) && !ran.stderr.contains("\nddprun: all is well"), "{ran:?}");
        ran.says("leaves: bored\n  ddprun: all is well");
    }
}

#[test]
fn a_node_that_looks_for_the_store_ends_at_once() {
    let nodes = Nodes::new(2);
    let mut running = nodes.start(1, &[], "true");
    let status = format!("/proc/{}/status", running.child().id());
    wait_until("a handler of SIGTERM", || {
        let status = std::fs::read_to_string(&status).unwrap();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
        u64::from_str_radix(caught.trim(), 16).unwrap() & 1 << 14 != 0
    });
    let started = Instant::now();
    running.send(Signal::TERM);
    let ran = Ran::of(running);
    assert!(ran.code == Some(128 + 15) && started.elapsed() < Duration::from_secs(4), "{ran:?}");
}

#[test]
fn a_node_that_never_comes_is_named() {
    let nodes = Nodes::new(3);
    let args = ["--rdzv-conf", "join_timeout=6"];
    let running = [0, 2].map(|node_rank| nodes.start(node_rank, &args, "echo started"));
    for ran in finish(running.into()) {
        ran.ends(1, &["2 of 3 nodes joined within 6 s: look at the output of ddprun with --node-rank 1"]);
        assert_eq!(ran.stdout, "");
    }
}

#[test]
fn nodes_that_do_not_fit_are_refused() {
    let nodes = Nodes::new(2);
    let first = nodes.start(0, &[], "exit 0");
    let stranger = Ran::of(nodes.start(1, &["--rdzv-id=another"], "exit 0"));
    assert_eq!(stranger.code, Some(1), "{stranger:?}");
    let twin = Ran::of(nodes.start(0, &["--rdzv-conf=is_host=false"], "exit 0"));
    twin.says("--node-rank 0 is taken by the ddprun on host");
    let all = finish(vec![first, nodes.start(1, &[], "exit 0")]);
    assert!(all.iter().all(|ran| ran.code == Some(0)), "{all:?}");
    all[0].says("is refused: --node-rank 0 is taken by the ddprun on host");
}

/// The others would wait for it in vain.
#[test]
fn a_node_with_other_options_ends_all_that_wait_for_it() {
    let (option, difference) = ("--max-restarts=4", "--max-restarts is 4 ");
    for is_static in [true, false] {
        let nodes = Nodes::new(2);
        let endpoint = format!("--rdzv-endpoint=127.0.0.1:{}", nodes.port);
        let common = if is_static { vec![] } else { vec!["--rdzv-backend=c10d", &endpoint] };
        let first = nodes.start(0, &common, "exit 0");
        // With c10d, the first to come hosts the store.
        TcpStore::connect("127.0.0.1", nodes.port, PATIENCE).unwrap();
        let other = nodes.start(1, &[&common[..], &[option]].concat(), "exit 0");
        let all = finish(vec![first, other]);
        assert_eq!([all[0].code, all[1].code], [Some(1); 2], "{all:?}");
        // Also where that node came before the one that hosts the store had introduced itself.
        all[0].says(&format!("{difference}on host "));
        all[1].says(&format!("{difference}here, but "));
        all.iter().for_each(|ran| ran.says("on the node that hosts the store: give all nodes the same"));
    }
}

/// torchrun's variables, in a fixed number of nodes and in one that meets. A rank of the second node fails once.
#[test]
fn nodes_may_have_different_numbers_of_workers() {
    let script = format!(
        "echo $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE, $GROUP_RANK of $GROUP_WORLD_SIZE, \
         $ROLE_RANK of $ROLE_WORLD_SIZE
        {ALL_STARTED} [ $RANK$TORCHELASTIC_RESTART_COUNT != 30 ] || exit 7
        [ $TORCHELASTIC_RESTART_COUNT = 1 ] || exec sleep 1000"
    );
    for is_static in [true, false] {
        let nodes = Nodes::new(2);
        let endpoint = format!("--rdzv-endpoint=127.0.0.1:{}", nodes.port);
        let meeting = if is_static { vec![] } else { vec!["--rdzv-backend=c10d", &endpoint] };
        let common = [&meeting[..], &["--max-restarts=1"]].concat();
        let first = nodes.start(0, &[&common[..], &["--nproc-per-node=3"]].concat(), &script);
        // With c10d, the first to come gets rank 0 and hosts the store.
        let store = TcpStore::connect("127.0.0.1", nodes.port, PATIENCE).unwrap();
        store.wait(&["candle_ddp/nodes/welcome/0"], Some(PATIENCE)).unwrap();
        let all = finish(vec![first, nodes.start(1, &[&common[..], &["--nproc-per-node=1"]].concat(), &script)]);
        let line = |rank: usize| {
            let (local_rank, workers, node) = if rank < 3 { (rank, 3, 0) } else { (0, 1, 1) };
            format!("{rank} of 4, {local_rank} of {workers}, {node} of 2, {rank} of 4")
        };
        for (ran, ranks) in all.iter().zip([0..3, 3..4]) {
            let expected: Vec<_> = ranks.flat_map(|rank| [line(rank), line(rank)]).collect();
            assert_eq!((ran.code, ran.sorted()), (Some(0), expected.iter().map(String::as_str).collect()), "{all:?}");
            ran.says("rank 3 on node 1 (host ");
        }
    }
}

#[test]
fn all_nodes_start_again_together_until_none_fails() {
    // Rank 2 fails twice; rank 0's node had nothing to do with it. A node whose workers have finished starts again as well.
    let script = r#"
        echo "rank $RANK of attempt $TORCHELASTIC_RESTART_COUNT"
        : >here$TORCHELASTIC_RESTART_COUNT-$RANK
        while [ $(ls here$TORCHELASTIC_RESTART_COUNT-* | wc -l) -lt $WORLD_SIZE ]; do sleep 0.01; done
        if [ $RANK = 2 ] && [ $TORCHELASTIC_RESTART_COUNT -lt 2 ]; then sleep 0.3; exit 7; fi
        if [ $RANK -lt 2 ]; then exit 0; fi
        if [ $RANK = 2 ]; then : >done; fi
        while [ ! -e done ]; do sleep 0.02; done"#;
    let all = Nodes::new(2).run(&["--max-restarts", "3"], script);
    for (node_rank, ran) in all.iter().enumerate() {
        assert_eq!(ran.code, Some(0), "{ran:?}");
        let ranks = 2 * node_rank..2 * node_rank + 2;
        let expected: Vec<String> =
            ranks.flat_map(|rank| (0..3).map(move |attempt| format!("rank {rank} of attempt {attempt}"))).collect();
        assert_eq!(ran.sorted(), expected);
        for restart in [1, 2] {
            ran.says(&format!("exited with code 7: restarting all workers (restart {restart} of 3)"));
        }
        ran.says("rank 2 on node 1 (host ");
    }
}

#[test]
fn the_last_failure_counts_when_all_restarts_of_the_nodes_are_used_up() {
    let script = format!(
        r#"{} if [ $RANK = 3 ]; then echo "Error: attempt $TORCHELASTIC_RESTART_COUNT" >&2; exit 9; fi; exec sleep 1000"#,
        ALL_STARTED.replace("started", "started$TORCHELASTIC_RESTART_COUNT-")
    );
    let nodes = Nodes::new(2);
    for ran in nodes.run(&["--max-restarts", "1", "--log-dir=logs"], &script) {
        ran.ends(9, &["rank 3 on host ", "    Error: attempt 1"]);
        assert!(!ran.stderr.contains("    Error: attempt 0"), "{ran:?}");
    }
    let verdict = nodes.verdict();
    has(&verdict, &json!({"outcome": "failed", "restarts": 1, "rank": 3, "node": 1, "exit": 9}));
    has(&verdict["earlier"][0], &json!({"rank": 3, "node": 1, "exit": 9}));
}

/// Keys that workers leave behind are gone in the next attempt, as with PyTorch, which uses the same ones again.
#[test]
fn the_store_is_empty_after_a_restart() {
    let nodes = Nodes::new(2);
    let script = r#"
        echo $TORCHELASTIC_RESTART_COUNT >attempt$RANK
        while [ ! -e go$TORCHELASTIC_RESTART_COUNT ]; do sleep 0.02; done
        exit $((1 - $TORCHELASTIC_RESTART_COUNT))"#;
    let running = nodes.start_all(&["--max-restarts", "1", "--nproc-per-node", "1"], script);
    let store = || TcpStore::connect("127.0.0.1", nodes.port, PATIENCE).unwrap();
    nodes.sandbox.wait_for("attempt1");
    store().set("left behind", b"1").unwrap();
    std::fs::write(nodes.sandbox.path("go0"), "").unwrap();
    wait_until("the restart", || (0..2).all(|rank| nodes.sandbox.wait_for(&format!("attempt{rank}")) == "1"));
    assert!(!store().check(&["left behind"]).unwrap());
    assert!(store().check(&["candle_ddp/run_id"]).unwrap());
    std::fs::write(nodes.sandbox.path("go1"), "").unwrap();
    assert!(finish(running).iter().all(|ran| ran.code == Some(0)));
}

/// The store outlives the workers of its node, until those of all nodes have finished.
#[test]
fn nodes_that_have_finished_wait_for_the_others() {
    let nodes = Nodes::new(2);
    let script = r#"
        echo $RANK >finished$RANK
        if [ $GROUP_RANK = 1 ]; then while [ ! -e go ]; do sleep 0.02; done; fi"#;
    let mut running = nodes.start_all(&[], script);
    for rank in 0..4 {
        nodes.sandbox.wait_for(&format!("finished{rank}"));
    }
    wait_until("the workers of node 0 to end", || {
        let children = format!("/proc/{}/task/{0}/children", running[0].child().id());
        std::fs::read_to_string(children).unwrap().trim().is_empty()
    });
    let store = TcpStore::connect("127.0.0.1", nodes.port, PATIENCE).unwrap();
    store.set("last", b"checkpoint").unwrap();
    assert!(running[0].child().try_wait().unwrap().is_none());
    std::fs::write(nodes.sandbox.path("go"), "").unwrap();
    for ran in finish(running) {
        assert_eq!((ran.code, ran.stderr.lines().count()), (Some(0), 1), "{ran:?}");
        ran.says("for each worker: ");
    }
}

#[test]
fn the_wait_for_other_nodes_is_bounded() {
    let nodes = Nodes::new(2);
    let script = "if [ $GROUP_RANK = 1 ]; then while [ ! -e go ]; do sleep 0.02; done; fi";
    let args = ["--rdzv-conf", "exit_barrier_timeout=0.3"];
    let mut running = nodes.start_all(&args, script);
    let last = running.remove(1);
    let first = finish(running).remove(0);
    first.ends(0, &["it has waited long enough for the others to finish (--rdzv-conf exit_barrier_timeout)"]);
    // The other node continues without the store.
    std::fs::write(nodes.sandbox.path("go"), "").unwrap();
    let last = finish(vec![last]).remove(0);
    last.ends(0, &["It hosted the store: failures on other nodes go unnoticed from here on"]);
}
