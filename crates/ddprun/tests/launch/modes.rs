//! Modes that start no workers, and programs of the same names.
use crate::{Ran, Sandbox, free_port};
use std::os::unix::fs::PermissionsExt;

/// A sandbox with a program `status` in `bin`.
fn with_program() -> Sandbox {
    let sandbox = Sandbox::new();
    let program = sandbox.path("bin/status");
    std::fs::create_dir(sandbox.path("bin")).unwrap();
    std::fs::write(&program, "#!/bin/sh\necho started with $# arguments\n").unwrap();
    std::fs::set_permissions(program, std::fs::Permissions::from_mode(0o755)).unwrap();
    sandbox
}

#[test]
fn a_program_with_the_name_of_a_mode_can_be_started() {
    let sandbox = with_program();
    let path = format!("{}:{}", sandbox.path("bin").display(), std::env::var("PATH").unwrap());
    for (args, expected) in [
        (&["--", "status"][..], 0),
        (&["--", "status", "127.0.0.1:1"], 1),
        (&["--", "status", "--", "explain"], 2),
        (&["bin/status", "status"], 1),
        // A mode is only the first argument.
        (&["--role=a", "status", "127.0.0.1:1"], 1),
    ] {
        let ran = Ran::new(sandbox.ddprun(args).env("PATH", &path));
        assert_eq!((ran.code, ran.stdout), (Some(0), format!("started with {expected} arguments\n")), "{args:?}");
    }
    let ran = Ran::new(sandbox.ddprun(&["status", "127.0.0.1:x"]).env("PATH", &path));
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(2), ""), "{ran:?}");
    ran.says("must be HOST:PORT");
}

#[test]
fn options_in_the_environment_do_not_matter() {
    let sandbox = Sandbox::new();
    let ran = Ran::new(sandbox.ddprun(&["explain", "records"]).env("PET_NPROC_PER_NODE", "2").env("PET_ROLE", "a"));
    assert_eq!(ran.code, Some(1), "{ran:?}");
    ran.says("records");
}

#[test]
fn the_former_flags_say_what_to_write() {
    let sandbox = Sandbox::new();
    let store = format!("127.0.0.1:{}", free_port());
    for (args, name, says) in [
        (&["--no-secret", "--status", &store][..], "status", "Connection refused"),
        (&["--explain=records"], "explain", "records"),
        (&["--merge_traces", "traces"], "merge-traces", "traces"),
    ] {
        let ran = Ran::new(&mut sandbox.ddprun(args));
        assert_eq!(ran.code, Some(1), "{ran:?}");
        ran.says(&format!("write `ddprun {name}`"));
        ran.says(says);
    }
}

#[test]
fn the_help_names_them() {
    let sandbox = Sandbox::new();
    let help = Ran::new(&mut sandbox.ddprun(&["--help"])).stdout;
    for text in ["Commands, which start no workers:", "\n  merge-traces", "ddprun -- status"] {
        assert!(help.contains(text), "{text}: {help}");
    }
    assert!(!help.contains("--merge-traces"), "{help}");
    let ran = Ran::new(&mut sandbox.ddprun(&["status", "--help"]));
    assert!(ran.code == Some(0) && ran.stdout.contains("CANDLE_DDP_SECRET_FILE"), "{ran:?}");
}

#[test]
fn a_report_shows_what_a_run_has_left() {
    let sandbox = Sandbox::new();
    let script = "echo '{\"step\":1,\"loss\":0.5}' >>run$RANK.jsonl; [ $TORCHELASTIC_RESTART_COUNT = 1 ]";
    let ran = Ran::new(&mut sandbox.ddprun(&[
        "--nproc-per-node=2",
        "--max-restarts=1",
        "--log-dir=logs",
        "--redirects=3",
        "sh",
        "-c",
        script,
    ]));
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let ran = Ran::new(&mut sandbox.ddprun(&["report", "."]));
    assert_eq!(ran.code, Some(0), "{ran:?}");
    ran.says("./report.html shows the run");
    let page = std::fs::read_to_string(sandbox.path("report.html")).unwrap();
    for expected in
        ["Metrics: run0.jsonl", "Metrics: run1.jsonl", "1 restart.", "<svg role=\"img\" aria-label=\"Loss\""]
    {
        assert!(page.contains(expected), "{expected}");
    }
    let ran = Ran::new(&mut sandbox.ddprun(&["report", "nowhere"]));
    assert_eq!(ran.code, Some(1), "{ran:?}");
    ran.says("nowhere");
    std::fs::create_dir(sandbox.path("empty")).unwrap();
    let ran = Ran::new(&mut sandbox.ddprun(&["report", "empty"]));
    assert_eq!(ran.code, Some(2), "{ran:?}");
    ran.says("empty has nothing to show");
}
