//! Which rank a failed run names, and whose exit code it returns.
use crate::Sandbox;

/// Output that may follow a program's error, such as a backtrace or cleanup messages.
const NOISE: &str = "i=0; while [ $i -lt 30 ]; do echo \"  $i: cleaning up\" >&2; i=$((i + 1)); done";

/// The error that names the cause is followed by more lines than are kept.
#[test]
fn an_error_that_names_another_rank_counts_however_much_follows() {
    let script = format!(
        r#"
        case $RANK in
        0) echo 'Error: rank 1 ended the group: no data' >&2; {NOISE}; exit 1;;
        1) sleep 0.4; echo 'Error: no data' >&2; {NOISE}; exit 3;;
        esac"#
    );
    let ran = Sandbox::new().run(&["--nproc-per-node", "2"], &script);
    assert_eq!(ran.code, Some(3), "{ran:?}");
    ran.says("rank 1 failed first: it exited with code 3");
    ran.says("its last error:\n    Error: no data\n  its last lines:\n      10: cleaning up\n");
    ran.says("rank 0 exited with code 1 by itself\n  its last error:\n    Error: rank 1 ended the group: no data\n");
}

/// The rank that hangs has not failed, but the others fail because of it.
#[test]
fn a_rank_that_never_joined_the_collective_is_named() {
    let timed_out = "rank 2: barrier(), sequence 4, timed out after 3s: rank 1 has not started this collective: its last was \
                     sequence 3, barrier()";
    let script = format!(
        "case $RANK in
        0) echo 'Error: rank 2 ended the group: {timed_out}' >&2; exit 6;;
        1) echo waiting for data >&2; exec sleep 1000;;
        2) sleep 0.2; echo 'Error: {timed_out}' >&2; exit 7;;
        esac"
    );
    let ran = Sandbox::new().run(&["--nproc-per-node", "3"], &script);
    assert_eq!(ran.code, Some(6), "{ran:?}");
    ran.says("ddprun: rank 1 made the other ranks fail: it was killed by SIGTERM after ddprun asked it to exit, ");
    ran.says("its last lines:\n    waiting for data\n");
    ran.says("rank 0 exited with code 6 by itself\n  its last line:\n    Error: rank 2 ended the group");
}

#[test]
fn a_rank_that_left_too_early_is_named() {
    let script = r#"
        [ $RANK = 1 ] && echo done early && exit 0
        sleep 0.2
        echo 'Error: rank 1 left the group after sequence 5, and cannot take part in barrier()' >&2; exit 5"#;
    let ran = Sandbox::new().run(&["--nproc-per-node", "2"], script);
    assert_eq!(ran.code, Some(5), "{ran:?}");
    ran.says("ddprun: rank 1 made the other ranks fail: it exited with code 0, ");
    ran.says("its last lines:\n    done early\n");
    ran.says("rank 0 exited with code 5 by itself\n  its last line:\n    Error: rank 1 left the group");
}
