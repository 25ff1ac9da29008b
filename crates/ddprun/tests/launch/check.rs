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
    // One of the two is always slower by a millionth.
    let ran = Ran::new(&mut sandbox.ddprun(&[
        "check",
        "--quick",
        LITTLE,
        "--json",
        "--tolerance=1.000001",
        "--nproc-per-node=2",
    ]));
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(1), ""), "{ran:?}");
    let report: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
    let copy = |rank: usize| report["ranks"][rank]["copy"].as_f64().unwrap();
    let slower = if copy(0) < copy(1) { 0 } else { 1 };
    let named = format!("rank {slower} (node 0, host ");
    let outliers = report["outliers"].as_array().unwrap().iter().map(|text| text.as_str().unwrap());
    let found: Vec<&str> = outliers.filter(|text| text.contains("memory is copied at")).collect();
    assert!(found.len() == 1 && found[0].starts_with(&named), "{found:?} {named}");
}

/// The nodes of a check over two nodes, of which the second may open fewer files.
#[test]
fn all_nodes_name_the_node_that_lacks_something() {
    let sandbox = Sandbox::new();
    let port = format!("--master-port={}", free_port());
    let start = |node_rank: &str, limit: &str| {
        let args = [
            "check",
            "--quick",
            LITTLE,
            ANY,
            "--no-secret",
            "--nproc-per-node=2",
            "--nnodes=2",
            "--master-addr=127.0.0.1",
        ];
        let ddprun = sandbox.ddprun(&[&args[..], &[&port, node_rank]].concat());
        let mut command = Command::new("sh");
        command.args(["-c", &format!("ulimit -n {limit}; exec \"$0\" \"$@\"")]).arg(ddprun.get_program());
        command.args(ddprun.get_args()).current_dir(sandbox.path(""));
        for (name, value) in ddprun.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        Running::new(command.stdout(Stdio::piped()).stderr(Stdio::piped()))
    };
    let all = finish(vec![start("--node-rank=0", "512"), start("--node-rank=1", "75")]);
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let named = format!("node 1 (host {host}): a process may open 75 files, and 4 ranks may need 76");
    assert_eq!(all.iter().map(|ran| ran.code).collect::<Vec<_>>(), [Some(1), Some(1)], "{all:?}");
    assert!(all[0].stdout.contains(&format!("\n1 outlier(s):\n- {named}")), "{all:?}");
    assert_eq!(all[1].stdout, "");
    all[1].says(&named);
}

#[test]
fn wrong_options_say_what_is_right() {
    let sandbox = Sandbox::new();
    for (args, says) in [
        (&["check", "--tolerance=1"][..], "a number above 1"),
        (&["check", "--nnodes=2"], "--node-rank"),
        (&["check", "x"], "unexpected argument"),
    ] {
        let ran = Ran::new(&mut sandbox.ddprun(args));
        assert_eq!(ran.code, Some(2), "{ran:?}");
        ran.says(says);
    }
}
