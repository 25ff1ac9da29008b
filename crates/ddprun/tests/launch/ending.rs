//! How runs end: exit codes, failures and signals, and that no process is left behind.
use crate::{AFTER, Ran, Running, Sandbox, is_alive, wait_until};
use candle_ddp_testing::skip;
use rustix::process::Signal;
use std::io::{BufRead, BufReader, Read};
use std::time::Duration;

#[test]
fn success_is_silent() {
    let sandbox = Sandbox::new();
    let ran = sandbox.run(&[], "echo fine");
    assert_eq!((ran.code, ran.stdout.as_str(), ran.stderr.as_str()), (Some(0), "fine\n", ""));
    assert_eq!(std::fs::read_dir(sandbox.path("tmp")).unwrap().count(), 0, "a temporary folder was left behind");
}

#[test]
fn the_first_failure_decides_the_exit_code_and_ends_the_others() {
    let sandbox = Sandbox::new();
    let script = r#"
        if [ $RANK = 1 ]; then while [ ! -e 0 ]; do sleep 0.01; done; echo last words >&2; exit 42; fi
        : >$RANK; exec sleep 1000"#;
    let ran = sandbox.run(&["--nproc-per-node", "3"], script);
    assert_eq!(ran.code, Some(42));
    ran.says("rank 1 failed first: it exited with code 42");
    ran.says("its last lines:\n    last words\n");
    ran.says("ranks [0, 2]: each was killed by SIGTERM after ddprun asked it to exit");
    assert_eq!(std::fs::read_dir(sandbox.path("tmp")).unwrap().count(), 0, "a temporary folder was left behind");
}

#[test]
fn a_worker_killed_by_a_signal_counts_as_128_and_the_signal() {
    let ran = Sandbox::new().run(&[], "echo out; kill -SEGV $$");
    ran.ends(139, &["was killed by SIGSEGV", "its last lines:\n    out\n"]);
}

#[test]
fn the_summary_shows_twenty_lines_and_prefers_stderr() {
    let ran = Sandbox::new().run(&[], "seq 100 >&2; echo out; exit 1");
    let lines: String = (81..=100).map(|n| format!("\n    {n}")).collect();
    ran.says(&format!("its last lines:{lines}\n"));
    assert!(!ran.stderr.contains("    out"), "{}", ran.stderr);
    assert!(Sandbox::new().run(&[], "exit 1").stderr.contains("it wrote no output"));
}

#[test]
fn the_error_file_is_shown_as_the_cause() {
    let sandbox = Sandbox::new();
    let json = r#"{"message":{"message":"ValueError: bad\nbatch","extraInfo":{"py_callstack":"","timestamp":"1"}}}"#;
    let ran = sandbox.run(&[], &format!("printf '%s' '{json}' >$TORCHELASTIC_ERROR_FILE; exit 1"));
    ran.says("its error:\n    ValueError: bad\n    batch\n");
    let ran = sandbox.run(&[], "echo 'no JSON' >$TORCHELASTIC_ERROR_FILE; exit 1");
    ran.says("its error:\n    no JSON\n");
}

#[test]
fn the_grace_period_is_respected() {
    let sandbox = Sandbox::new();
    let script = r#"
        if [ $RANK = 1 ]; then while [ ! -e armed ]; do sleep 0.01; done; exit 3; fi
        trap 'sleep 1; echo checkpoint >saved; exit 0' TERM
        : >armed; while :; do sleep 0.01; done"#;
    let ran = sandbox.run(&["--nproc-per-node", "2", "--shutdown-timeout", "600"], script);
    assert_eq!(ran.code, Some(3));
    assert_eq!(sandbox.wait_for("saved"), "checkpoint");
    assert!(!ran.stderr.contains("SIGKILL after ddprun"), "{}", ran.stderr);
}

#[test]
fn a_worker_that_ignores_sigterm_is_killed_after_the_grace_period() {
    let sandbox = Sandbox::new();
    let script = r#"
        if [ $RANK = 1 ]; then while [ ! -e armed ]; do sleep 0.01; done; exit 3; fi
        trap '' TERM; : >armed; while :; do sleep 0.01; done"#;
    let ran = sandbox.run(&["--nproc-per-node", "2", "--shutdown-timeout", "0.2"], script);
    ran.ends(3, &["rank 0 was killed by SIGKILL after ddprun asked it to exit"]);
}

/// Returns whether this process ignores a signal; the processes that it starts then ignore it too.
fn is_ignored(signal: Signal) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
    u64::from_str_radix(mask.trim(), 16).unwrap() >> (signal.as_raw() - 1) & 1 == 1
}

#[test]
fn signals_are_forwarded_and_ddprun_exits_after_the_workers() {
    for (signal, name) in [(Signal::TERM, "TERM"), (Signal::INT, "INT"), (Signal::HUP, "HUP")] {
        if is_ignored(signal) {
            // The tests run under nohup or the like; ddprun and the workers then ignore the signal too.
            const TEST: &str = "signals_are_forwarded_and_ddprun_exits_after_the_workers";
            skip(TEST, format_args!("the tests were started with SIG{name} ignored"));
            continue;
        }
        let sandbox = Sandbox::new();
        let script = format!(
            "trap 'sleep 0.3; echo {name} >got$RANK; exit 0' {name}; echo >armed$RANK; while :; do sleep 0.01; done"
        );
        let mut child = sandbox.start(&["--nproc-per-node", "2"], &script);
        sandbox.wait_for("armed0");
        sandbox.wait_for("armed1");
        child.send(signal);
        let ran = Ran::of(child);
        // The workers have ended as they should.
        assert_eq!(ran.code, Some(0), "{ran:?}");
        for rank in [0, 1] {
            assert_eq!(std::fs::read_to_string(sandbox.path(&format!("got{rank}"))).unwrap(), format!("{name}\n"));
        }
        assert!(!ran.stderr.contains("failed"), "{}", ran.stderr);
    }
}

#[test]
fn a_second_signal_kills_at_once() {
    for (first, second, code) in
        [(Signal::INT, Signal::INT, 130), (Signal::TERM, Signal::TERM, 143), (Signal::TERM, Signal::HUP, 143)]
    {
        if [first, second].into_iter().any(is_ignored) {
            skip("a_second_signal_kills_at_once", "the tests were started with one of its signals ignored");
            continue;
        }
        let sandbox = Sandbox::new();
        let script = "trap '' INT TERM HUP; echo >armed; while :; do sleep 0.01; done";
        let mut child = sandbox.start(&["--shutdown-timeout", "100000"], script);
        sandbox.wait_for("armed");
        let mut stderr = BufReader::new(child.child().stderr.take().unwrap());
        child.send(first);
        let mut line = String::new();
        stderr.read_line(&mut line).unwrap();
        assert!(line.contains("forwarded to the workers") && line.contains("a second signal kills"), "{line}");
        wait_until("the second signal to count as a separate one", || {
            child.send(second);
            std::thread::sleep(Duration::from_millis(100));
            child.child().try_wait().unwrap().is_some()
        });
        assert_eq!(Ran::of(child).code, Some(code));
    }
}

/// Whoever finds no checkpoint looks here.
#[test]
fn workers_that_are_killed_although_they_were_asked_to_save_are_named() {
    let sandbox = Sandbox::new();
    let script = "trap '' TERM; echo >armed$RANK; [ $RANK = 0 ] || exit 0; while :; do sleep 0.01; done";
    let mut child = sandbox.start(&["--nproc-per-node=2", "--shutdown-timeout=1.5"], script);
    sandbox.wait_for("armed0");
    let pid = sandbox.wait_for("armed1");
    child.send(Signal::TERM);
    let ran = Ran::of(child);
    assert_eq!((ran.code, pid.as_str()), (Some(143), ""), "{ran:?}");
    ran.says("ddprun: rank 0 (pid ");
    ran.says(
        "): asked by SIGTERM to save and exit, and still running after 1.5 s (--shutdown-timeout). Killed by SIGKILL",
    );
}

/// The workers say whether all is well.
#[test]
fn a_signal_that_not_all_workers_survive_well_is_the_exit_code() {
    for (end, name) in [("exit 7", "an exit code"), ("trap - TERM; kill -TERM $$", "the signal itself")] {
        let sandbox = Sandbox::new();
        let script = format!(
            "if [ $RANK = 0 ]; then trap 'exit 0' TERM; else trap '{end}' TERM; fi
            echo >armed$RANK; while :; do sleep 0.01; done"
        );
        let mut child = sandbox.start(&["--nproc-per-node", "2"], &script);
        sandbox.wait_for("armed0");
        sandbox.wait_for("armed1");
        child.send(Signal::TERM);
        assert_eq!(Ran::of(child).code, Some(143), "{name}");
    }
}

/// Flight records and Slurm's warning before the end of a job: programs that do not expect the signal live on.
#[test]
fn user_signals_go_to_the_processes_that_handle_them() {
    for (signal, name) in [(Signal::USR1, "USR1"), (Signal::USR2, "USR2")] {
        let sandbox = Sandbox::new();
        let script = format!(
            "[ $RANK = 0 ] && trap 'echo >got' {name}; echo >armed$RANK; while [ ! -e go ]; do sleep 0.01; done; echo end"
        );
        let mut child = sandbox.start(&["--nproc-per-node", "2"], &script);
        sandbox.wait_for("armed0");
        sandbox.wait_for("armed1");
        child.send(signal);
        sandbox.wait_for("got");
        std::fs::write(sandbox.path("go"), "").unwrap();
        let ran = Ran::of(child);
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(0), "end\nend\n"), "{ran:?}");
        ran.says(&format!("SIG{name} forwarded to rank 0 (pid "));
        assert!(!ran.stderr.contains("rank 1"), "{ran:?}");
    }
}

#[test]
fn a_user_signal_that_nobody_handles_is_reported() {
    let sandbox = Sandbox::new();
    let mut child = sandbox.start(&[], "echo >armed; while [ ! -e go ]; do sleep 0.01; done");
    sandbox.wait_for("armed");
    let mut stderr = BufReader::new(child.child().stderr.take().unwrap());
    child.send(Signal::USR1);
    let mut line = String::new();
    stderr.read_line(&mut line).unwrap();
    assert!(line.contains("SIGUSR1 is not forwarded: no process of the run has a handler for it"), "{line}");
    std::fs::write(sandbox.path("go"), "").unwrap();
    assert_eq!(Ran::of(child).code, Some(0));
}

/// The user has said so.
#[test]
fn a_user_signal_may_end_the_run() {
    let sandbox = Sandbox::new();
    let mut child = sandbox.start(&["--signals-to-handle", "SIGUSR1"], "echo >armed; exec sleep 1000");
    sandbox.wait_for("armed");
    child.send(Signal::USR1);
    let ran = Ran::of(child);
    ran.ends(128 + 10, &["SIGUSR1 forwarded to the workers"]);
}

/// `timeout` signals both the process and its group.
#[test]
fn a_signal_that_comes_twice_is_one_request() {
    let sandbox = Sandbox::new();
    let script = "trap '[ -e saved ] || { sleep 0.3; echo >saved; }; exit 0' TERM USR2; echo >armed
                  while :; do sleep 0.01; done";
    let mut child = sandbox.start(&["--signals-to-handle=SIGTERM,SIGUSR2"], script);
    sandbox.wait_for("armed");
    // One right after the other, however busy the machine is. (Two of the same number would be one while ddprun is stopped.)
    for signal in [Signal::STOP, Signal::TERM, Signal::USR2, Signal::CONT] {
        child.send(signal);
    }
    assert_eq!(Ran::of(child).code, Some(0));
    assert!(sandbox.path("saved").exists());
}

/// A signal from outside, while ddprun ends the run because of a failure, counts as the first one.
#[test]
fn a_signal_after_a_failure_leaves_the_grace_period() {
    let sandbox = Sandbox::new();
    let script = r#"
        if [ $RANK = 1 ]; then while [ ! -e armed ]; do sleep 0.01; done; exit 3; fi
        trap 'echo >told; while [ ! -e go ]; do sleep 0.01; done; echo >saved; exit 0' TERM
        : >armed; while :; do sleep 0.01; done"#;
    let mut child = sandbox.start(&["--nproc-per-node", "2"], script);
    sandbox.wait_for("told");
    let mut stderr = BufReader::new(child.child().stderr.take().unwrap());
    child.send(Signal::TERM);
    let mut lines = (&mut stderr).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.contains("SIGTERM: the workers were already asked to exit")));
    std::fs::write(sandbox.path("go"), "").unwrap();
    let mut rest = String::new();
    stderr.read_to_string(&mut rest).unwrap();
    assert_eq!(Ran::of(child).code, Some(3));
    assert!(sandbox.path("saved").exists(), "{rest}");
}

#[test]
fn a_signal_that_was_ignored_at_start_stays_ignored() {
    let sandbox = Sandbox::new();
    let script = "trap 'exit 0' TERM; trap 'echo >hung_up' HUP; echo >armed; while :; do sleep 0.01; done";
    let ddprun = sandbox.ddprun(&["sh", "-c", script]);
    let mut command = std::process::Command::new("sh");
    command.args(["-c", r#"trap '' HUP; exec "$0" "$@""#]).arg(ddprun.get_program()).args(ddprun.get_args());
    let mut child = Running::new(command.current_dir(sandbox.folder.path()).stderr(std::process::Stdio::null()));
    sandbox.wait_for("armed");
    child.send(Signal::HUP);
    child.send(Signal::TERM);
    assert_eq!(Ran::of(child).code, Some(0));
    assert!(!sandbox.path("hung_up").exists());
}

#[test]
fn workers_die_when_ddprun_is_killed() {
    let sandbox = Sandbox::new();
    let script = "echo $$ >pid.new$RANK; mv pid.new$RANK pid$RANK; exec sleep 1000";
    let mut child = sandbox.start(&["--nproc-per-node", "2"], script);
    let pids = [sandbox.pid("pid0"), sandbox.pid("pid1")];
    assert!(pids.iter().all(|&pid| is_alive(pid)));
    child.child().kill().unwrap();
    child.child().wait().unwrap();
    wait_until("the workers to die", || !pids.iter().any(|&pid| is_alive(pid)));
}

#[test]
fn processes_started_by_workers_end_with_the_run() {
    for end in ["exit 0", "exit 5", "kill -KILL $$"] {
        let sandbox = Sandbox::new();
        let ran = sandbox.run(&[], &format!("sleep 1000 & echo $! >pid; {end}"));
        assert_ne!(ran.code, None);
        assert!(!is_alive(sandbox.pid("pid")), "{end}");
    }
}

/// A wrapper script that does not use `exec` dies at once from SIGTERM; the program it started keeps its grace period.
#[test]
fn the_grace_period_also_applies_to_processes_started_by_workers() {
    let sandbox = Sandbox::new();
    let inner = "trap \"sleep 0.5; echo >saved; exit 0\" TERM; echo >armed; while :; do sleep 0.01; done";
    let mut child = sandbox.start(&[], &format!("sh -c '{inner}'; true"));
    sandbox.wait_for("armed");
    child.send(Signal::TERM);
    assert_eq!(Ran::of(child).code, Some(143));
    assert!(sandbox.path("saved").exists());
}

#[test]
fn a_stopped_run_stops_its_workers_and_continues_with_them() {
    let sandbox = Sandbox::new();
    // No `sleep`: a shell whose child is stopped between vfork and exec waits for the child and is not stopped itself.
    let mut child = sandbox.start(&[], "echo $$ >pid; while [ ! -e go ]; do :; done; echo end");
    let worker = sandbox.pid("pid");
    let state = |pid| std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap().contains(") T ");
    let ddprun = rustix::process::Pid::from_child(child.child());
    child.send(Signal::TSTP);
    wait_until("both to stop", || state(worker) && state(ddprun));
    child.send(Signal::CONT);
    wait_until("the worker to continue", || !state(worker));
    std::fs::write(sandbox.path("go"), "").unwrap();
    let mut stdout = String::new();
    child.child().stdout.take().unwrap().read_to_string(&mut stdout).unwrap();
    assert_eq!(stdout, "end\n");
    assert_eq!(child.child().wait().unwrap().code(), Some(0));
}

/// When ddprun looks, both are zombies: one is reported as the first, the other is listed.
#[test]
fn workers_that_fail_at_the_same_time_are_all_named() {
    let sandbox = Sandbox::new();
    let script = "echo $$ >pid.new$RANK; mv pid.new$RANK pid$RANK; while [ ! -e go ]; do sleep 0.01; done; exit 7";
    let mut child = sandbox.start(&["--nproc-per-node", "2"], script);
    let pids = [sandbox.pid("pid0"), sandbox.pid("pid1")];
    child.send(Signal::STOP);
    std::fs::write(sandbox.path("go"), "").unwrap();
    wait_until("both to fail", || !pids.iter().any(|&pid| is_alive(pid)));
    child.send(Signal::CONT);
    let ran = Ran::of(child);
    ran.ends(7, &["failed first: it exited with code 7", "exited with code 7 by itself"]);
}

/// For example because of a memory shortage: the kernel takes a while to reclaim the memory.
#[test]
fn a_worker_that_was_killed_is_the_cause() {
    let script = format!("{AFTER} here; [ $RANK = 1 ] && after 0 && kill -KILL $$; exit 1");
    let ran = Sandbox::new().run(&["--nproc-per-node", "2"], &script);
    assert_eq!(ran.code, Some(137), "{ran:?}");
    ran.says("rank 1 failed first: it was killed by SIGKILL");
    ran.says("SIGKILL often means that memory ran out");
    ran.says("rank 0 exited with code 1 by itself");
}

#[test]
fn a_worker_that_ended_too_early_is_named() {
    // Rank 0 fails when ddprun has seen rank 1's end, and has no zombie of it any more.
    let script = r#"
        if [ $RANK = 1 ]; then echo $$ >pid.new; mv pid.new pid; exit 0; fi
        while [ ! -e pid ] || kill -0 $(cat pid) 2>/dev/null; do sleep 0.01; done; exit 5"#;
    let ran = Sandbox::new().run(&["--nproc-per-node", "2"], script);
    ran.ends(5, &["rank 1 exited with code 0 by itself"]);
}

#[test]
fn orphans_of_workers_do_not_become_zombies() {
    let sandbox = Sandbox::new();
    let script = "(sh -c 'echo $$ >pid; exit 1' &); while [ ! -e go ]; do sleep 0.01; done";
    let child = sandbox.start(&[], script);
    let orphan = sandbox.pid("pid");
    wait_until("the orphan to be gone", || rustix::process::test_kill_process(orphan).is_err());
    std::fs::write(sandbox.path("go"), "").unwrap();
    assert_eq!(Ran::of(child).code, Some(0));
}
