//! Subcommands, and programs of the same names.
use crate::{Ran, Sandbox};
use rustix::fs::{FileType, Mode, mknodat};
use std::os::unix::fs::{PermissionsExt, symlink};

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
    ran.ends(1, &["records"]);
}

#[test]
fn the_help_names_them() {
    let sandbox = Sandbox::new();
    let help = Ran::new(&mut sandbox.ddprun(&["--help"])).stdout;
    for text in ["\nCommands:", "\n  merge-traces", "ddprun -- status"] {
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
    ran.ends(0, &["./report.html shows the run"]);
    let page = std::fs::read_to_string(sandbox.path("report.html")).unwrap();
    for expected in
        ["Metrics: run0.jsonl", "Metrics: run1.jsonl", "1 restart.", "<svg role=\"img\" aria-label=\"Loss\""]
    {
        assert!(page.contains(expected), "{expected}");
    }
    let ran = Ran::new(&mut sandbox.ddprun(&["report", "nowhere"]));
    ran.ends(1, &["nowhere"]);
    std::fs::create_dir(sandbox.path("empty")).unwrap();
    let ran = Ran::new(&mut sandbox.ddprun(&["report", "empty"]));
    ran.ends(2, &["empty has nothing to show"]);
}

/// Runs a mode that reads the folder `run`.
fn read(sandbox: &Sandbox, mode: &str) -> Ran {
    Ran::new(&mut sandbox.ddprun(&[mode, "run"]))
}

/// The folder of a run, which somebody else may have made.
fn left(folders: &str) -> Sandbox {
    let sandbox = Sandbox::new();
    std::fs::create_dir_all(sandbox.path("run").join(folders)).unwrap();
    sandbox
}

/// `report` and `merge-traces` write what they find into the folder, where its owner reads it.
#[test]
fn links_in_the_folder_of_a_run_are_not_followed() {
    let sandbox = left("attempt_0/0");
    let private = |name: &str, text: &str| {
        std::fs::write(sandbox.path(name), text).unwrap();
        sandbox.path(name)
    };
    let key = private("id", "-----BEGIN PRIVATE KEY-----");
    symlink(&key, sandbox.path("run/attempt_0/0/error.json")).unwrap();
    std::fs::create_dir(sandbox.path("far")).unwrap();
    std::fs::copy(&key, sandbox.path("far/error.json")).unwrap();
    symlink(sandbox.path("far"), sandbox.path("run/attempt_0/1")).unwrap();
    let json = private("kaggle.json", "{\"name\":\"v\",\"ph\":\"X\",\"key\":\"kaggle-secret\"}");
    symlink(&json, sandbox.path("run/rank0.trace.json")).unwrap();
    symlink(&json, sandbox.path("run/rank0.flight.json")).unwrap();
    let ran = read(&sandbox, "report");
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let page = std::fs::read_to_string(sandbox.path("run/report.html")).unwrap();
    assert!(!page.contains("PRIVATE KEY") && !page.contains("kaggle-secret"), "{page}");
    for file in ["attempt_0/0/error.json cannot be read", "rank0.trace.json", "rank0.flight.json"] {
        ran.says(&format!("run/{file}: it must be a regular file, and is a symbolic link"));
    }
    for (mode, file) in [("merge-traces", "rank0.trace.json"), ("explain", "rank0.flight.json")] {
        let ran = read(&sandbox, mode);
        ran.ends(1, &[&format!("reading run/{file}: it must be a regular file, and is a symbolic link")]);
    }
    assert!(!sandbox.path("run/trace.json").exists());
}

#[test]
fn fifos_and_devices_in_the_folder_of_a_run_keep_nobody_waiting() {
    let names = ["rank1.trace.json", "rank0.flight.json", "attempt_0/0/error.json", "run.jsonl", "ddprun-ranks.jsonl"];
    for name in names {
        let sandbox = left("attempt_0/0");
        mknodat(rustix::fs::CWD, sandbox.path("run").join(name), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let ran = read(&sandbox, "report");
        ran.ends(0, &[name, "it must be a regular file, and is a FIFO"]);
        for mode in ["merge-traces", "explain"] {
            let ran = read(&sandbox, mode);
            assert!([Some(1), Some(2)].contains(&ran.code), "{ran:?}");
        }
    }
    let sandbox = left("attempt_0");
    symlink("/dev/zero", sandbox.path("run/rank0.trace.json")).unwrap();
    assert_eq!([read(&sandbox, "report").code, read(&sandbox, "merge-traces").code], [Some(0), Some(1)]);
    // Holes cost nothing to send.
    let sandbox = left("attempt_0");
    std::fs::File::create(sandbox.path("run/rank0.trace.json")).unwrap().set_len(1 << 40).unwrap();
    let ran = read(&sandbox, "merge-traces");
    ran.ends(1, &["it has 1099511627776 bytes, but must have at most"]);
}

#[test]
fn what_a_record_says_looks_like_no_line_of_ddprun() {
    let sandbox = left("");
    let record = r#"{"version":1,"rank":0,"world_size":1,"host":"a","pid":1,"reason":"","written_ns":0,"groups":[{"name":"world",
        "ranks":[0],"failure":"no disk\nddprun: all is well","calls":[]}]}"#;
    std::fs::write(sandbox.path("run/rank0.flight.json"), record).unwrap();
    // Nor does the name of a file.
    std::fs::write(sandbox.path("run/x\nddprun: all is well.jsonl"), "{}\n").unwrap();
    for mode in ["explain", "report"] {
        let ran = read(&sandbox, mode);
        assert_eq!(ran.code, Some(0), "{ran:?}");
        assert!(!ran.stderr.contains("\nddprun: all is well"), "{ran:?}");
    }
    read(&sandbox, "explain").says("the error was: no disk\\nddprun: all is well");
}
