//! Invalid command lines, and programs that do not exist.
use crate::{Ran, Sandbox};
use candle_ddp_testing::skip;

fn run(sandbox: &Sandbox, args: &[&str]) -> Ran {
    Ran::new(&mut sandbox.ddprun(args))
}

#[test]
fn invalid_command_lines_exit_with_code_2() {
    let sandbox = Sandbox::new();
    let cases: &[(&[&str], &str)] = &[
        (&[], "give a program to run"),
        (&["--nproc-per-node", "0", "x"], "expected a positive number"),
        (&["--no-such-option", "x"], "--no-such-option"),
        (&["--example", "a", "--bin", "b"], "cannot be used with"),
        (&["--nnodes", "2", "--node-rank", "0", "x"], "--master-addr"),
        (&["--nnodes", "2", "--node-rank", "1", "x"], "name of machine 0"),
        (&["--nnodes", "2", "--node-rank", "2", "--master-addr", "a", "x"], "between 0 and 1"),
        (&["--nnodes", "2", "--master-addr", "a", "x"], "--node-rank"),
        (&["--nnodes", "2", "--node-rank", "0", "--standalone", "x"], "omit one"),
        (&["--standalone", "--master-port", "1", "x"], "free port"),
        (&["--master-port", "0", "x"], "not a port"),
        (&["--master-addr", "a:29500", "x"], "give the port by --master-port"),
        (&["-m", "train"], "python -m"),
        (&["--rdzv-backend", "etcd", "x"], "use static or c10d"),
        (&["--nnodes", "0", "x"], "a positive number of machines"),
        (&["--nnodes", "1:2", "x"], "needs --rdzv-backend c10d"),
        (&["--nnodes", "4:1", "--rdzv-backend", "c10d", "x"], "or MIN:MAX"),
        (&["--nnodes", "1:2", "--rdzv-backend", "c10d", "x"], "HOST[:PORT]"),
        (&["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "a:0", "x"], "port 0"),
        (&["--rdzv-endpoint", "::1:29501", "x"], "write an IPv6 address with a port as [::1]:29501"),
        (&["--rdzv-conf", "timeout=never", "x"], "a positive number of seconds"),
        (&["--local-addr", "a", "x"], "omit this option"),
        (&["--local_ranks_filter", "0:1", "x"], "a list as in 0,2"),
        (&["--numa-binding", "cores", "x"], "expected node, socket, exclusive or core-complex"),
        (&["status"], "<HOST:PORT>"),
        (&["explain", "x", "y"], "unexpected argument 'y'"),
        (&["merge-traces", "--nnodes", "2", "x"], "unexpected argument '--nnodes'"),
        (&["--merge-traces", "x"], "unexpected argument '--merge-traces'"),
        (&["--metrics-addr", "::1", "x"], "needs --metrics-port"),
        (&["--metrics-port", "1", "--metrics-addr", "localhost", "x"], "--metrics-addr"),
        (&["--metrics-port", "70000", "x"], "--metrics-port"),
        (&["--redirects", "7", "x"], "expected 0 (none)"),
        (&["--redirects", "0:1,1:3", "x"], "local rank 1"),
        (&["--local-ranks-filter", "0,2", "x"], "local rank 2"),
        (&["--run-id", "a/b", "x"], "folder"),
        (&["--run-id", "a\u{1b}[31m", "x"], "folder"),
        (&["--features", "nccl", "x"], "--example NAME"),
        (&["--shutdown-timeout=-1", "x"], "a non-negative number of seconds"),
        (&["--shutdown-timeout=NaN", "x"], "a non-negative number of seconds"),
        (&["--signals-to-handle=SIGFOO", "x"], "SIGFOO is not a signal that can end a run"),
        (&["--signals-to-handle=SIGKILL", "x"], "SIGKILL is not a signal that can end a run"),
    ];
    for (args, hint) in cases {
        let ran = run(&sandbox, args);
        assert_eq!(ran.code, Some(2), "{args:?}: {ran:?}");
        ran.says(hint);
    }
}

#[test]
fn invalid_variables_are_named() {
    let sandbox = Sandbox::new();
    for (name, value, hint) in [
        ("PET_NNODES", "none", "\"none\" must be a positive number of machines"),
        ("PET_NPROC_PER_NODE", "many", "expected a positive number"),
        ("PET_RDZV_BACKEND", "etcd", "use static or c10d"),
        ("PET_RDZV_ENDPOINT", "a:b", "does not end with a port"),
        ("PET_MAX_RESTARTS", "many", "invalid digit"),
        ("PET_MODULE", "1", "python -m"),
    ] {
        let ran = Ran::new(sandbox.ddprun(&["true"]).env(name, value));
        assert_eq!(ran.code, Some(2), "{name}: {ran:?}");
        ran.says(hint);
        ran.says(&format!("options also come from the environment: {name}={value}\n"));
    }
}

/// Root has no such limit, so as root the test uses that of another user.
#[test]
fn a_lack_of_threads_names_the_limit_to_raise() {
    let sandbox = Sandbox::new();
    let root = rustix::process::geteuid().is_root();
    let user = 59_713;
    if root {
        for folder in ["", "tmp"] {
            std::os::unix::fs::chown(sandbox.path(folder), Some(user), None).unwrap();
        }
        // The binary may be in a folder that only root can read.
        std::fs::copy(env!("CARGO_BIN_EXE_ddprun"), sandbox.path("ddprun")).unwrap();
    }
    let mut reported = 0;
    for limit in if root { 1..8 } else { 1..2 } {
        let limit = format!("--nproc={limit}");
        let user = format!("--reuid={user}");
        let args: &[&str] = if root {
            &["setpriv", &user, "--clear-groups", "prlimit", &limit, "./ddprun"]
        } else {
            &["prlimit", &limit, env!("CARGO_BIN_EXE_ddprun")]
        };
        let mut command = std::process::Command::new("env");
        command.args(args).args(["sh", "-c", "exit 0"]);
        command.current_dir(sandbox.folder.path()).env("TMPDIR", sandbox.path("tmp"));
        let ran = Ran::new(&mut command);
        if ["env:", "setpriv:", "prlimit:"].iter().any(|program| ran.stderr.starts_with(program)) {
            return skip("a_lack_of_threads_names_the_limit_to_raise", ran.stderr.trim());
        }
        if ran.code != Some(0) {
            ran.says("ulimit -u");
            reported += 1;
        }
    }
    assert!(reported > 0);
}

#[test]
fn gpus_are_needed_for_one_worker_per_gpu() {
    let sandbox = Sandbox::new();
    let mut command = sandbox.ddprun(&["--nproc-per-node", "gpu", "true"]);
    let ran = Ran::new(command.env("CUDA_VISIBLE_DEVICES", ""));
    ran.ends(2, &["no GPU is visible"]);
    let mut command = sandbox.ddprun(&["--nproc-per-node", "gpu", "sh", "-c", "echo x"]);
    let ran = Ran::new(command.env("CUDA_VISIBLE_DEVICES", "0,1,2"));
    assert_eq!(ran.stdout, "x\nx\nx\n");
}

#[test]
fn help_and_version_go_to_stdout() {
    let sandbox = Sandbox::new();
    let ran = run(&sandbox, &["--help"]);
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""));
    assert!(ran.stdout.contains("--nproc-per-node"));
    assert!(run(&sandbox, &["--version"]).stdout.starts_with("ddprun "));
}

#[test]
fn a_missing_program_gives_advice() {
    let sandbox = Sandbox::new();
    for (program, hint) in [("./nothing", "Build it first"), ("no-such-program", "--example NAME")] {
        let ran = run(&sandbox, &["--nproc-per-node", "2", program]);
        ran.ends(127, &[&format!("cannot start {program}: "), hint]);
    }
    std::fs::write(sandbox.path("here"), "#!/bin/sh\n").unwrap();
    run(&sandbox, &["here"]).says("./here");
}

#[test]
fn a_program_that_cannot_be_run_gives_the_reason() {
    let sandbox = Sandbox::new();
    std::fs::write(sandbox.path("script"), "#!/bin/sh\n").unwrap();
    std::fs::write(sandbox.path("train.py"), "").unwrap();
    for (program, hint) in [("./script", "chmod +x"), ("./train.py", "python ./train.py"), ("./tmp", "folder")] {
        let ran = run(&sandbox, &[program]);
        ran.ends(126, &[hint]);
    }
}

#[test]
fn a_port_that_is_taken_is_named() {
    let sandbox = Sandbox::new();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let ran = run(&sandbox, &["--master-port", &port, "true"]);
    ran.ends(1, &[&port]);
}

#[test]
fn options_without_effect_are_accepted() {
    let sandbox = Sandbox::new();
    let ran = run(&sandbox, &["--monitor-interval", "0.1", "--start_method=fork", "--no-python", "sh", "-c", "echo x"]);
    assert_eq!((ran.code, ran.stdout.as_str(), ran.stderr.as_str()), (Some(0), "x\n", ""));
}

#[test]
fn too_many_workers_name_the_limit_to_raise() {
    let sandbox = Sandbox::new();
    // Where the store's connections do not hit it, pipes, the threads' descriptors or the start of a process do.
    for limit in 30..36 {
        let script = format!("ulimit -n {limit}; exec \"$0\" \"$@\"");
        let mut command = std::process::Command::new("sh");
        command.args(["-c", &script, env!("CARGO_BIN_EXE_ddprun"), "--nproc-per-node=30", "sleep", "60"]);
        let ran = Ran::new(command.env("TMPDIR", sandbox.path("tmp")));
        assert_ne!(ran.code, Some(0), "{ran:?}");
        ran.says("ulimit -n");
    }
}
