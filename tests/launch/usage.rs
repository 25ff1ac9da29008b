//! Command lines that make no sense, and programs that are not there.
use crate::{Place, Ran};

fn run(place: &Place, args: &[&str]) -> Ran {
    Ran::new(&mut place.ddprun(args))
}

#[test]
fn nonsense_is_refused_with_code_2() {
    let place = Place::new();
    let cases: &[(&[&str], &str)] = &[
        (&[], "say what to run"),
        (&["--nproc-per-node", "0", "x"], "from 1 up"),
        (&["--no-such-option", "x"], "--no-such-option"),
        (&["--example", "a", "--bin", "b"], "cannot be used with"),
        (&["--nnodes", "2", "--node-rank", "0", "x"], "--master-addr"),
        (&["-m", "train"], "python -m"),
        (&["--max-restarts", "3", "x"], "not supported yet"),
        (&["--rdzv-backend", "c10d", "x"], "--master-addr and --master-port"),
        (&["--rdzv_endpoint=a:1", "x"], "--master-addr and --master-port"),
        (&["--rdzv-conf", "timeout=9", "x"], "leave it out"),
        (&["--local-addr", "a", "x"], "leave it out"),
        (&["--local_ranks_filter", "0", "x"], "--redirects"),
        (&["--redirects", "7", "x"], "expected 0 (none)"),
    ];
    for (args, hint) in cases {
        let ran = run(&place, args);
        assert_eq!(ran.code, Some(2), "{args:?}: {ran:?}");
        ran.says(hint);
    }
}

#[test]
fn gpus_are_needed_for_one_worker_per_gpu() {
    let place = Place::new();
    let mut command = place.ddprun(&["--nproc-per-node", "gpu", "true"]);
    let ran = Ran::new(command.env("CUDA_VISIBLE_DEVICES", ""));
    assert_eq!(ran.code, Some(2));
    ran.says("no GPU is visible");
    let mut command = place.ddprun(&["--nproc-per-node", "gpu", "sh", "-c", "echo x"]);
    let ran = Ran::new(command.env("CUDA_VISIBLE_DEVICES", "0,1,2"));
    assert_eq!(ran.stdout, "x\nx\nx\n");
}

#[test]
fn help_and_version_go_to_stdout() {
    let place = Place::new();
    let ran = run(&place, &["--help"]);
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""));
    assert!(ran.stdout.contains("--nproc-per-node"));
    assert!(run(&place, &["--version"]).stdout.starts_with("ddprun "));
}

#[test]
fn a_program_that_is_not_there_says_how_to_get_one() {
    let place = Place::new();
    for (program, hint) in [("./nothing", "Build it first"), ("no-such-program", "--example NAME")] {
        let ran = run(&place, &["--nproc-per-node", "2", program]);
        assert_eq!(ran.code, Some(127), "{ran:?}");
        ran.says(&format!("cannot start {program}: "));
        ran.says(hint);
    }
    std::fs::write(place.path("here"), "#!/bin/sh\n").unwrap();
    run(&place, &["here"]).says("./here");
}

#[test]
fn a_program_that_cannot_be_run_says_why() {
    let place = Place::new();
    std::fs::write(place.path("script"), "#!/bin/sh\n").unwrap();
    std::fs::write(place.path("train.py"), "").unwrap();
    for (program, hint) in [("./script", "chmod +x"), ("./train.py", "python ./train.py"), ("./tmp", "folder")] {
        let ran = run(&place, &[program]);
        assert_eq!(ran.code, Some(126), "{ran:?}");
        ran.says(hint);
    }
}

#[test]
fn a_port_that_is_taken_is_named() {
    let place = Place::new();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let ran = run(&place, &["--master-port", &port, "true"]);
    assert_eq!(ran.code, Some(1));
    ran.says(&port);
}

#[test]
fn what_changes_nothing_is_accepted() {
    let place = Place::new();
    let ran = run(&place, &["--monitor-interval", "0.1", "--start_method=fork", "--no-python", "sh", "-c", "echo x"]);
    assert_eq!((ran.code, ran.stdout.as_str(), ran.stderr.as_str()), (Some(0), "x\n", ""));
}

#[test]
fn too_many_workers_for_the_limits_say_which_to_raise() {
    let place = Place::new();
    // Pipes, the threads' descriptors, or the start of a process: the limit is hit by one or another.
    for limit in 30..36 {
        let script = format!("ulimit -n {limit}; exec \"$0\" \"$@\"");
        let mut command = std::process::Command::new("sh");
        command.args(["-c", &script, env!("CARGO_BIN_EXE_ddprun"), "--nproc-per-node=30", "sleep", "60"]);
        let ran = Ran::new(command.env("TMPDIR", place.path("tmp")));
        assert_eq!(ran.code, Some(1), "{ran:?}");
        ran.says("ulimit -n");
        ran.says("Too many open files");
    }
}
