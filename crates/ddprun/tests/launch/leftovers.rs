//! Every process that workers started ends with the run, however it detached itself, and no other process does.
use crate::{Ran, Running, Sandbox, is_alive, wait_until};
use candle_ddp_testing::skip;
use rustix::process::{Pid, Signal, kill_process};
use std::process::Stdio;

/// Processes that a test has started, by the files that contain their pids. Dropping this kills those that are left.
struct Started<'a>(&'a Sandbox, &'static [&'static str]);

impl Started<'_> {
    fn pids(&self) -> Vec<Pid> {
        self.1.iter().map(|name| self.0.pid(name)).collect()
    }

    #[track_caller]
    fn have_ended(&self, when: &str) {
        let left: Vec<_> = self.1.iter().zip(self.pids()).filter(|(_, pid)| is_alive(*pid)).collect();
        assert!(left.is_empty(), "left {when}: {left:?}");
    }
}

impl Drop for Started<'_> {
    fn drop(&mut self) {
        for name in self.1 {
            let pid = std::fs::read_to_string(self.0.path(name)).ok().and_then(|text| text.trim().parse().ok());
            let Some(pid) = pid.and_then(Pid::from_raw) else { continue };
            // The pid may have been reused; the test's own processes run in its folder.
            let folder = std::fs::read_link(format!("/proc/{pid}/cwd")).ok();
            if folder.is_some_and(|folder| Some(folder) == self.0.folder.path().canonicalize().ok()) {
                let _ = kill_process(pid, Signal::KILL);
            }
        }
    }
}

/// A separate process group, a separate session, a double fork, and all of them combined.
const DETACHED: &str = r#"
    timeout 1000 sh -c 'echo $$ >group; exec sleep 1000' &
    setsid sh -c 'echo $$ >session; exec sleep 1000' &
    (sh -c 'echo $$ >orphan; exec sleep 1000' &)
    (setsid sh -c '(sh -c "echo \$\$ >daemon; exec sleep 1000" &)' &)
    for name in group session orphan daemon; do while [ ! -s $name ]; do sleep 0.01; done; done"#;
const FILES: &[&str] = &["group", "session", "orphan", "daemon"];

#[test]
fn detached_processes_end_with_a_run_that_is_signalled() {
    let sandbox = Sandbox::new();
    let started = Started(&sandbox, FILES);
    let mut child = sandbox.start(&[], &format!("{DETACHED}; echo >armed; wait"));
    sandbox.wait_for("armed");
    child.send(Signal::TERM);
    assert_eq!(Ran::of(child).code, Some(143));
    started.have_ended("after SIGTERM");
}

#[test]
fn detached_processes_end_with_a_run_that_fails() {
    for end in ["exit 5", "kill -KILL $$"] {
        let sandbox = Sandbox::new();
        let started = Started(&sandbox, FILES);
        let ran = sandbox.run(&[], &format!("{DETACHED}; {end}"));
        assert!([Some(5), Some(137)].contains(&ran.code), "{ran:?}");
        started.have_ended(end);
    }
}

#[test]
fn processes_left_after_a_success_are_named_and_ended() {
    let sandbox = Sandbox::new();
    let started = Started(&sandbox, FILES);
    let ran = sandbox.run(&[], &format!("{DETACHED}; echo end"));
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(0), "end\n"));
    started.have_ended("after success");
    ran.says("ddprun: the workers have exited but left ");
    for pid in started.pids() {
        ran.says(&format!("sleep (pid {pid})"));
    }
}

/// Python's resource tracker does this: it removes shared memory that a program did not free.
#[test]
fn processes_that_exit_soon_after_a_success_are_not_signalled() {
    let sandbox = Sandbox::new();
    // It starts no process once the worker is gone, so that it exits soon on a busy machine too.
    let script = "export worker=$$; setsid sh -c 'trap \"echo >told\" TERM; echo >armed; \
                  while kill -0 $worker 2>/dev/null; do :; done; echo >cleaned' & \
                  while [ ! -s armed ]; do sleep 0.01; done";
    let ran = sandbox.run(&[], script);
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""));
    assert!(sandbox.path("cleaned").exists());
    assert!(!sandbox.path("told").exists());
}

#[test]
fn a_detached_process_that_ignores_sigterm_is_killed_after_the_grace_period() {
    let sandbox = Sandbox::new();
    let started = Started(&sandbox, &["deaf"]);
    let script = "setsid sh -c 'trap \"\" TERM; echo $$ >deaf; while :; do sleep 0.01; done' & \
                  while [ ! -s deaf ]; do sleep 0.01; done; exit 3";
    let ran = sandbox.run(&["--shutdown-timeout", "0.2"], script);
    assert_eq!(ran.code, Some(3));
    started.have_ended("after the grace period");
}

/// A shell that starts a process in the background and then replaces itself with ddprun leaves it a child that does not
/// belong to the run.
#[test]
fn children_from_before_the_run_are_left_alone() {
    let sandbox = Sandbox::new();
    for background in ["sleep 1000", "setsid sleep 1000"] {
        let started = Started(&sandbox, &["before"]);
        let shell = format!(r#"{background} >/dev/null 2>&1 & echo $! >before; exec "$0" "$@""#);
        for (worker, code) in [("exit 0", 0), ("exit 4", 4)] {
            let ddprun = sandbox.ddprun(&["sh", "-c", worker]);
            let mut command = std::process::Command::new("sh");
            command.args(["-c", &shell]).arg(ddprun.get_program()).args(ddprun.get_args());
            command.current_dir(sandbox.folder.path()).env("TMPDIR", sandbox.path("tmp"));
            let ran = Ran::new(&mut command);
            assert_eq!(ran.code, Some(code), "{ran:?}");
            let pid = started.pids()[0];
            assert!(is_alive(pid), "{background} was ended with {worker}: {ran:?}");
            kill_process(pid, Signal::KILL).unwrap();
            wait_until("it to exit", || !is_alive(pid));
            std::fs::remove_file(sandbox.path("before")).unwrap();
        }
    }
}

/// A run removes the temporary folders of killed runs, but not those of runs that are alive.
#[test]
fn the_folder_of_a_killed_run_is_removed_by_the_next() {
    let sandbox = Sandbox::new();
    let folders = || std::fs::read_dir(sandbox.path("tmp")).unwrap().count();
    let mut killed = sandbox.start(&[], "echo >armed0; exec sleep 1000");
    let alive = sandbox
        .start(&[], "echo >armed1; while [ ! -e go ]; do sleep 0.01; done; test -d ${TORCHELASTIC_ERROR_FILE%/*}");
    sandbox.wait_for("armed0");
    sandbox.wait_for("armed1");
    assert_eq!(folders(), 2);
    killed.child().kill().unwrap();
    killed.child().wait().unwrap();
    assert_eq!(folders(), 2);
    assert_eq!(sandbox.run(&[], "exit 0").code, Some(0));
    assert_eq!(folders(), 1);
    std::fs::write(sandbox.path("go"), "").unwrap();
    assert_eq!(Ran::of(alive).code, Some(0));
    assert_eq!(folders(), 0);
}

#[test]
fn no_folder_is_left_when_descriptors_run_out() {
    let sandbox = Sandbox::new();
    for limit in 5..14 {
        let script = format!("ulimit -n {limit}; exec \"$0\" \"$@\"");
        let mut command = std::process::Command::new("sh");
        command.args(["-c", &script, env!("CARGO_BIN_EXE_ddprun"), "sh", "-c", "exit 0"]).stdout(Stdio::null());
        let ran = Ran::of(Running::new(command.env("TMPDIR", sandbox.path("tmp")).stderr(Stdio::piped())));
        if ran.code != Some(0) {
            ran.says("ulimit -n");
        }
        assert_eq!(std::fs::read_dir(sandbox.path("tmp")).unwrap().count(), 0, "ulimit -n {limit}: {ran:?}");
    }
}

/// The first process of a container has no parent and is not in a separate process group.
#[test]
fn ddprun_may_be_the_first_process_of_a_container() {
    let sandbox = Sandbox::new();
    let ddprun = sandbox.ddprun(&["sh", "-c", "setsid sleep 1000 >left & echo $$; exit 4"]);
    let mut command = std::process::Command::new("unshare");
    command.args(["--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"]);
    command.arg(ddprun.get_program()).args(ddprun.get_args());
    let ran = Ran::new(command.current_dir(sandbox.folder.path()).env("TMPDIR", sandbox.path("tmp")));
    if ran.stderr.starts_with("unshare:") {
        return skip("ddprun_may_be_the_first_process_of_a_container", ran.stderr.trim());
    }
    ran.ends(4, &["rank 0 failed: it exited with code 4"]);
}
