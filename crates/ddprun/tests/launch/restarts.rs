//! `--max-restarts` for ordinary programs: torchrun's semantics.
use crate::{Sandbox, is_alive};
use rustix::process::{Signal, kill_process};

#[test]
fn all_workers_are_started_again_until_none_fails() {
    let sandbox = Sandbox::new();
    // Rank 1 fails after rank 0 has written its line; else the restart may end rank 0 before that.
    let script = r#"
        echo "rank $RANK of attempt $TORCHELASTIC_RESTART_COUNT"
        if [ $RANK = 0 ]; then touch written$TORCHELASTIC_RESTART_COUNT; fi
        while [ ! -e written$TORCHELASTIC_RESTART_COUNT ]; do sleep 0.02; done
        if [ $RANK = 1 ] && [ $TORCHELASTIC_RESTART_COUNT -lt 2 ]; then exit 7; fi
        if [ $RANK = 1 ]; then touch done; fi
        while [ ! -e done ]; do sleep 0.05; done"#;
    let ran = sandbox.run(&["--nproc-per-node", "2", "--max-restarts", "3"], script);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let expected: Vec<String> =
        (0..2).flat_map(|rank| (0..3).map(move |attempt| format!("rank {rank} of attempt {attempt}"))).collect();
    assert_eq!(ran.sorted(), expected);
    ran.says("rank 1 exited with code 7: restarting all workers (restart 2 of 3)");
}

#[test]
fn the_last_failure_counts_when_all_restarts_are_used_up() {
    let sandbox = Sandbox::new();
    let script = r#"echo "Error: attempt $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS" >&2; exit 9"#;
    let ran = sandbox.run(&["--max-restarts", "1", "--log-dir", "logs", "--tee", "3", "--run-id", "x"], script);
    ran.ends(9, &["rank 0 failed: it exited with code 9"]);
    let words = ran.stderr.rsplit("its last lines:").next().unwrap();
    assert!(words.contains("attempt 1 of 1") && !words.contains("attempt 0"), "{ran:?}");
    for attempt in [0, 1] {
        let log = std::fs::read_to_string(sandbox.path(&format!("logs/x/attempt_{attempt}/0/stderr.log"))).unwrap();
        assert_eq!(log, format!("Error: attempt {attempt} of 1\n"));
    }
}

#[test]
fn nothing_of_the_failed_attempt_survives_and_a_signal_ends_the_restart() {
    let sandbox = Sandbox::new();
    // The grandchild leaves its worker's process group. It ignores SIGTERM, so that the restart takes a while.
    let script = r#"
        if [ $RANK = 0 ]; then
            setsid sh -c "trap '' TERM; echo \$\$ > orphan; while true; do sleep 0.1; done" &
            while [ ! -s orphan ]; do sleep 0.02; done
            touch started; sleep 60
        fi
        while [ ! -e started ]; do sleep 0.02; done; exit 3"#;
    let args = ["--nproc-per-node", "2", "--max-restarts", "5", "--shutdown-timeout"];
    let mut running = sandbox.start(&[&args[..], &["600"]].concat(), script);
    let orphan = sandbox.pid("orphan");
    crate::wait_until("the restart to begin", || {
        let children = format!("/proc/{}/task/{0}/children", running.child().id());
        // Of the failed attempt, only the grandchild is left.
        std::fs::read_to_string(children).unwrap().split_whitespace().eq([orphan.as_raw_nonzero().to_string()])
    });
    crate::wait_until("the second signal to count as a separate one", || {
        running.send(Signal::TERM);
        std::thread::sleep(std::time::Duration::from_millis(100));
        running.child().try_wait().unwrap().is_some()
    });
    let ran = crate::Ran::of(running);
    assert_eq!(ran.code, Some(128 + 15), "{ran:?}");
    assert!(!is_alive(orphan));
    let _ = kill_process(orphan, Signal::KILL);
    // Killed after the usual time, it does not keep the restart from coming.
    std::fs::remove_file(sandbox.path("started")).unwrap();
    std::fs::remove_file(sandbox.path("orphan")).unwrap();
    let ran = sandbox.run(&["--nproc-per-node", "2", "--max-restarts", "1", "--shutdown-timeout", "0.3"], script);
    assert_eq!(ran.code, Some(3), "{ran:?}");
    assert!(!is_alive(sandbox.pid("orphan")));
}
