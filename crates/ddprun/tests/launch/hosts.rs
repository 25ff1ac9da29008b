//! `--hosts`, with a stand-in for ssh that runs the command on this machine. Real sshds are for `scripts/ssh_hosts.sh`.
use crate::{Ran, Running, Sandbox, free_port, is_alive, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use std::io::Write;
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
    with_ssh(SSH)
}

fn program(sandbox: &Sandbox, name: &str, text: &str) {
    std::fs::write(sandbox.path(name), text).unwrap();
    std::fs::set_permissions(sandbox.path(name), std::fs::Permissions::from_mode(0o755)).unwrap();
}

fn with_ssh(text: &str) -> Sandbox {
    let sandbox = Sandbox::new();
    program(&sandbox, "ssh", text);
    sandbox
}

/// The second machine differs from the first: the stand-in runs `line` before the command there.
fn with_other(line: &str) -> Sandbox {
    with_ssh(&SSH.replace("exec 3<&0", &format!("[ $host = 127.0.0.1 ] || {{ {line}; }}; exec 3<&0")))
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

/// torchrun's variables, with as many workers as each machine has.
#[test]
fn machines_may_have_different_numbers_of_workers() {
    let sandbox = sandbox();
    let port = format!("--master-port={}", free_port());
    let script = "echo $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE, $GROUP_RANK of $GROUP_WORLD_SIZE, \
        $ROLE_RANK of $ROLE_WORLD_SIZE";
    let own = ["--rsh=./ssh", &port, "--no-secret"];
    for args in
        [&["--hosts=127.0.0.1:3,user@localhost:2"][..], &["--hosts=127.0.0.1:3,user@localhost", "--nproc-per-node=2"]]
    {
        let ran = Ran::new(&mut sandbox.ddprun(&[&own, args, &["sh", "-c", script]].concat()));
        let expected = [
            "0 of 5, 0 of 3, 0 of 2, 0 of 5",
            "1 of 5, 1 of 3, 0 of 2, 1 of 5",
            "2 of 5, 2 of 3, 0 of 2, 2 of 5",
            "3 of 5, 0 of 2, 1 of 2, 3 of 5",
            "4 of 5, 1 of 2, 1 of 2, 4 of 5",
        ];
        assert_eq!((ran.code, ran.sorted()), (Some(0), expected.to_vec()), "{ran:?}");
    }
}

#[test]
fn variables_that_are_named_reach_the_workers_unseen() {
    let ssh = "#!/bin/sh\nshift; echo \"$*\" >>commands; exec env -i HOME=$HOME PATH=$PATH sh -c \"$*\"\n";
    let sandbox = with_ssh(ssh);
    let script = r#"printf '%s|%s|%s|%s\n' "$HF_TOKEN" "$EMPTY" "$OMP_NUM_THREADS" "$RANK" | tr '\n' ';'; echo"#;
    let mut command =
        ddprun(&sandbox, &["--env=HF_TOKEN", "--env", "EMPTY", "--env=OMP_NUM_THREADS", "--env=RANK"], script);
    command.env("HF_TOKEN", "a 'b'\n\"$c").env("EMPTY", "").env("OMP_NUM_THREADS", "3").env("RANK", "7");
    let ran = Ran::new(&mut command);
    let expected = [0, 1].map(|rank| format!("a 'b';\"$c||3|{rank};"));
    assert_eq!((ran.code, ran.sorted()), (Some(0), expected.iter().map(String::as_str).collect()), "{ran:?}");
    let commands = sandbox.wait_for("commands");
    assert!(
        commands.contains("--env=HF_TOKEN") && !commands.contains("a 'b'") && !commands.contains("$c"),
        "{commands}"
    );
}

#[test]
fn the_first_failure_ends_all_and_decides_the_code() {
    let sandbox = sandbox();
    let ran = Ran::new(&mut ddprun(&sandbox, &[], "[ $RANK = 0 ] || exit 42; exec sleep 1000"));
    ran.ends(42, &["rank 1 on host "]);
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

/// One machine's workers end at once, those of the other save for longer than machines otherwise wait for each other to end.
#[test]
fn workers_that_save_after_a_signal_are_left_alone() {
    let sandbox = sandbox();
    let script = "[ $RANK = 0 ] && trap 'sleep 8; echo saved >saved; exit 0' TERM
        echo $$ >pid$RANK; while :; do sleep 0.02; done";
    let mut running = Running::new(&mut ddprun(&sandbox, &[], script));
    for name in ["pid0", "pid1"] {
        sandbox.pid(name);
    }
    running.send(Signal::TERM);
    let ran = Ran::of(running);
    assert_eq!((ran.code, sandbox.wait_for("saved").as_str()), (Some(128 + 15), "saved"), "{ran:?}");
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
    let sandbox = with_other("exit 255");
    let ran = Ran::new(&mut ddprun(&sandbox, &[], "echo started"));
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(255), ""), "{ran:?}");
    ran.says("the connection to user@localhost has ended (exited with code 255)");
}

/// Something else with the program's name may lie in the user's home there.
#[test]
fn a_machine_without_the_folder_runs_nothing_and_is_named() {
    let sandbox = with_other(r##"set -- "$(printf %s "$*" | sed "s#cd $PWD#&/absent#")""##);
    let ran = Ran::new(&mut ddprun(&sandbox, &[], "echo started"));
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(126), ""), "{ran:?}");
    ran.says("ddprun: user@localhost: cannot enter the folder ");
}

#[test]
fn a_machine_without_ddprun_is_named_and_no_variable_names_another() {
    let own = env!("CARGO_BIN_EXE_ddprun");
    let sandbox = with_other(&format!("set -- \"$(printf %s \"$*\" | sed 's#{own}#/absent#')\"; export d=./other"));
    program(&sandbox, "other", "#!/bin/sh\necho the wrong program\n");
    let ran = Ran::new(&mut ddprun(&sandbox, &[], "echo started"));
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(127), ""), "{ran:?}");
    ran.says("ddprun: user@localhost: there is no ddprun: neither ");
}

/// It has said why, but not to the others.
#[test]
fn a_machine_that_fails_before_it_joins_is_named_and_the_others_do_not_wait() {
    let sandbox = with_other("exit 1");
    let ran = Ran::new(&mut ddprun(&sandbox, &[], "echo started"));
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(1), ""), "{ran:?}");
    ran.says(
        "the ddprun on user@localhost has exited with code 1, and its output is above. Those on 127.0.0.1 have not",
    );
    assert!(!ran.stderr.contains("look for workers"), "{ran:?}");
}

#[test]
fn a_secret_of_several_lines_is_refused_and_not_shown() {
    let sandbox = sandbox();
    let (first, second) = ("a".repeat(64), "b".repeat(64));
    let mut command = ddprun(&sandbox, &[], "true");
    let ran = Ran::new(command.env("CANDLE_DDP_SECRET", format!("{first}\n{second}")));
    ran.ends(1, &["CANDLE_DDP_SECRET=\"(hidden)\": the secret must be a single line"]);
    assert!(!ran.stderr.contains(&second[..32]), "{ran:?}");
    // Nor is what an agent gets from a ddprun that sends it all the same.
    let mut agent =
        sandbox.ddprun(&["--hosts=localhost", "sh", "-c", ": >here; until [ -e end ]; do sleep 0.02; done"]);
    agent.env("CANDLE_DDP_HOSTS_AGENT", "1").stdin(Stdio::piped());
    let mut running = Running::new(agent.stdout(Stdio::piped()).stderr(Stdio::piped()));
    let mut input = running.child().stdin.take().unwrap();
    input.write_all(format!("{first}\n[]\n{second}\n").as_bytes()).unwrap();
    wait_until("the worker", || sandbox.path("here").exists());
    std::fs::write(sandbox.path("end"), "").unwrap();
    let ran = Ran::of(running);
    assert!(ran.code == Some(0) && !ran.stderr.contains(&second[..32]), "{ran:?}");
    ran.says("has sent a line that is no signal");
}

#[test]
fn variables_reach_all_machines_by_the_beginning_of_their_names() {
    let sandbox = with_ssh("#!/bin/sh\nshift; exec env -i HOME=$HOME PATH=$PATH sh -c \"$*\"\n");
    let script = "echo $NCCL_IB_HCA $NCCL_NET_PLUGIN $RUST_BACKTRACE $CANDLE_DDP_TEST_OWN $PET_OWN, $HF_TOKEN";
    let mut command = ddprun(&sandbox, &[], script);
    command.env("NCCL_IB_HCA", "mlx5").env("NCCL_NET_PLUGIN", "a'w\\s").env("RUST_BACKTRACE", "1");
    command.env("CANDLE_DDP_TEST_OWN", "x").env("PET_OWN", "y").env("HF_TOKEN", "mine");
    let ran = Ran::new(&mut command);
    assert_eq!((ran.code, ran.sorted()), (Some(0), vec![r"mlx5 a'w\s 1 x y,"; 2]), "{ran:?}");
}

#[test]
fn ssh_forwards_nothing_and_does_not_wait_long_for_a_machine() {
    let sandbox = with_ssh("#!/bin/sh\nuntil [ $1 = localhost ]; do echo $1; shift; done; shift; exec sh -c \"$*\"\n");
    let port = format!("--master-port={}", free_port());
    let mut command = sandbox.ddprun(&["--hosts=localhost", &port, "true"]);
    let path = format!("{}:{}", sandbox.path("").display(), std::env::var("PATH").unwrap());
    let ran = Ran::new(command.env("PATH", path).env_remove("CANDLE_DDP_RSH"));
    assert_eq!(ran.code, Some(0), "{ran:?}");
    for option in ["-a", "-x", "ClearAllForwardings=yes", "ConnectTimeout=15", "BatchMode=yes"] {
        assert!(ran.stdout.lines().any(|line| line == option), "{option}: {ran:?}");
    }
}

#[test]
fn contradictions_say_what_to_do() {
    let sandbox = sandbox();
    for (args, says) in [
        (&["--hosts=a,b", "--nnodes=2", "x"][..], "--nnodes: follows from --hosts"),
        (
            &["--hosts=a:2,b:3", "--nproc-per-node=4", "x"],
            "--nproc-per-node: has no effect, since --hosts has a number",
        ),
        (&["--hosts=a", "--env=NOBODY_SETS_IT", "x"], "--env: \"NOBODY_SETS_IT\" must be the name of a variable that"),
        (&["--hosts=a", "--env=PATH=x", "x"], "--env: \"PATH=x\" must be the name"),
        (&["--env=PATH", "x"], "--hosts <LIST>"),
        (&["--hosts=", "x"], "HOST:WORKERS"),
        (&["--hosts=a", "--rsh= ", "x"], "--rsh: is empty"),
    ] {
        let ran = Ran::new(&mut sandbox.ddprun(args));
        ran.ends(2, &[says]);
    }
    let ran = Ran::new(&mut sandbox.ddprun(&["--hosts=a", "--rsh=./absent", "x"]));
    ran.ends(127, &["--rsh"]);
}
