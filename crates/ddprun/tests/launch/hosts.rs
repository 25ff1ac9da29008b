//! `--hosts`, with a stand-in for ssh that runs the command on this machine. Real sshds are for `scripts/ssh_hosts.sh`.
use crate::{Ran, Running, Sandbox, free_port, is_alive, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};

/// As with ssh, the command survives the death of this process, and its standard input ends when that of this process does.
const SSH: &str = r#"#!/bin/sh
    host=$1; shift
    echo "$*" >>commands
    echo $$ >"connection-$host"
    mkfifo "input-$host"
    exec 3<&0
    cat <&3 >"input-$host" &
    setsid sh -c "$*" <"input-$host"
    code=$?
    kill $!
    exit $code
"#;

/// Workers that wait for a signal.
const WAIT: &str = "trap 'echo asked >asked$RANK; exit 0' TERM; echo $$ >pid$RANK; while :; do sleep 0.02; done";

fn sandbox() -> Sandbox {
    let sandbox = Sandbox::new();
    std::fs::write(sandbox.path("ssh"), SSH).unwrap();
    std::fs::set_permissions(sandbox.path("ssh"), std::fs::Permissions::from_mode(0o755)).unwrap();
    sandbox
}

/// A ddprun with two machines.
fn ddprun(sandbox: &Sandbox, args: &[&str], script: &str) -> Command {
    let port = format!("--master-port={}", free_port());
    let own = ["--hosts=127.0.0.1,user@localhost", "--rsh=./ssh", &port];
    let mut command = sandbox.ddprun(&[&own, args, &["sh", "-c", script]].concat());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Starts two workers on each machine, which wait for a signal.
fn waiting(sandbox: &Sandbox) -> (Running, Vec<Pid>) {
    let running = Running::new(&mut ddprun(sandbox, &["--nproc-per-node=2"], WAIT));
    let pids = (0..4).map(|rank| sandbox.pid(&format!("pid{rank}"))).collect();
    (running, pids)
}

#[test]
fn each_machine_runs_its_ranks_and_gets_the_secret_unseen() {
    let sandbox = sandbox();
    let script = r#"echo "it's $RANK of $WORLD_SIZE on $GROUP_RANK: $A_B$NCCL_DEBUG$PET_NNODES"; echo $CANDLE_DDP_SECRET >secret$RANK"#;
    let mut command = ddprun(&sandbox, &["--nproc-per-node=2"], script);
    let ran = Ran::new(command.env("NCCL_DEBUG", "a 'b'").env_remove("CANDLE_DDP_SECRET"));
    let expected = [0, 1, 2, 3].map(|rank| format!("it's {rank} of 4 on {}: a 'b'", rank / 2));
    assert_eq!((ran.code, ran.sorted()), (Some(0), expected.iter().map(String::as_str).collect()), "{ran:?}");
    let secrets = [0, 1, 2, 3].map(|rank| sandbox.wait_for(&format!("secret{rank}")));
    assert!(secrets[0].len() == 64 && secrets.iter().all(|secret| *secret == secrets[0]), "{secrets:?}");
    let commands = sandbox.wait_for("commands");
    assert!(commands.contains("PET_NODE_RANK") && !commands.contains(&secrets[0]), "{commands}");
}

#[test]
fn the_list_may_have_the_number_of_workers() {
    let sandbox = sandbox();
    let port = format!("--master-port={}", free_port());
    let args = ["--hosts=localhost:3", "--rsh=./ssh", &port, "--no-secret", "sh", "-c", "echo $RANK$CANDLE_DDP_SECRET"];
    let ran = Ran::new(&mut sandbox.ddprun(&args));
    assert_eq!((ran.code, ran.sorted()), (Some(0), vec!["0", "1", "2"]), "{ran:?}");
}

#[test]
fn the_first_failure_ends_all_and_decides_the_code() {
    let sandbox = sandbox();
    let ran = Ran::new(&mut ddprun(&sandbox, &[], "[ $RANK = 0 ] || exit 42; exec sleep 1000"));
    assert_eq!(ran.code, Some(42), "{ran:?}");
    ran.says("rank 1 on host ");
}

#[test]
fn a_signal_reaches_the_workers_of_all_machines() {
    let sandbox = sandbox();
    let (mut running, pids) = waiting(&sandbox);
    running.send(Signal::TERM);
    let ran = Ran::of(running);
    // All workers have exited with 0.
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!((0..4).all(|rank| sandbox.path(&format!("asked{rank}")).exists()), "{ran:?}");
    assert!(!pids.into_iter().any(is_alive));
}

#[test]
fn nothing_is_left_when_ddprun_is_killed() {
    let sandbox = sandbox();
    let (mut running, pids) = waiting(&sandbox);
    running.send(Signal::KILL);
    wait_until("the workers to end", || !pids.iter().any(|pid| is_alive(*pid)));
    // The agents have asked them.
    assert!((0..4).all(|rank| sandbox.path(&format!("asked{rank}")).exists()));
}

#[test]
fn all_end_when_a_connection_is_lost() {
    let sandbox = sandbox();
    let (running, pids) = waiting(&sandbox);
    kill_process(sandbox.pid("connection-user@localhost"), Signal::KILL).unwrap();
    let ran = Ran::of(running);
    assert_eq!(ran.code, Some(128 + 9), "{ran:?}");
    ran.says("the connection to user@localhost has ended (was killed by SIGKILL)");
    ran.says("the connection to the ddprun that started this one has ended");
    wait_until("the workers to end", || !pids.iter().any(|pid| is_alive(*pid)));
}

#[test]
fn a_machine_that_cannot_be_reached_ends_all() {
    let sandbox = sandbox();
    std::fs::write(sandbox.path("ssh"), SSH.replace("echo \"$*\"", "[ $host = 127.0.0.1 ] || exit 255; echo \"$*\""))
        .unwrap();
    let ran = Ran::new(&mut ddprun(&sandbox, &[], "echo started"));
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(255), ""), "{ran:?}");
    ran.says("the connection to user@localhost has ended (exited with code 255)");
}

#[test]
fn contradictions_say_what_to_do() {
    let sandbox = sandbox();
    for (args, says) in [
        (&["--hosts=a,b", "--nnodes=2", "x"][..], "--nnodes: follows from --hosts"),
        (&["--hosts=a:2,b", "x"], "give all the same number"),
        (&["--hosts=a:2,b:2", "--nproc-per-node=3", "x"], "differs from the number of workers in --hosts"),
        (&["--hosts=", "x"], "HOST:WORKERS"),
        (&["--hosts=a", "--rsh= ", "x"], "--rsh: is empty"),
    ] {
        let ran = Ran::new(&mut sandbox.ddprun(args));
        assert_eq!(ran.code, Some(2), "{ran:?}");
        ran.says(says);
    }
    let ran = Ran::new(&mut sandbox.ddprun(&["--hosts=a", "--rsh=./absent", "x"]));
    assert_eq!(ran.code, Some(127), "{ran:?}");
    ran.says("--rsh");
}
