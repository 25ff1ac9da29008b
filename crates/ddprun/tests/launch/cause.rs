//! Which rank a failed run names, and whose exit code it returns.
use crate::{AFTER, FAILS, Ran, Sandbox};

/// Output that may follow a program's error, such as a backtrace or cleanup messages.
const NOISE: &str = "i=0; while [ $i -lt 30 ]; do echo \"  $i: cleaning up\" >&2; i=$((i + 1)); done";

fn run(ranks: usize, script: &str) -> Ran {
    Sandbox::new().run(&["--nproc-per-node", &ranks.to_string()], &format!("{FAILS} {script}"))
}

/// The texts blame rank 2, and each other; the files of the ranks count.
#[test]
fn the_cause_is_what_ranks_have_told_however_they_put_it() {
    for [own, told] in
        [["no data", "rank 1 ended the group: no data"], ["rank 2 failed: x", "whatever rank(s) [2] is gone: x"]]
    {
        let script = format!(
            "{AFTER} here; case $RANK in
            0) fails '{told}' 1; {NOISE}; exit 1;;
            1) after 0; fails '{own}'; {NOISE}; exit 3;;
            2) echo 'warning: rank 2 failed: it is slow' >&2; exec sleep 1000;;
            esac"
        );
        let ran = run(3, &script);
        assert_eq!(ran.code, Some(3), "{ran:?}");
        ran.says("rank 1 failed first: it exited with code 3");
        ran.says(&format!("its error:\n    {own}\n  its last lines:\n      10: cleaning up\n"));
        ran.says("rank 0 exited with code 1 by itself because of rank 1\n");
    }
}

/// Programs that tell nothing: the first to fail counts, whoever their output names.
#[test]
fn warnings_are_no_causes() {
    let script = "
        [ $RANK = 0 ] && exec sleep 1000
        echo 'warning: rank 1: no memory is shared with rank(s) [0] on this host' >&2
        echo 'RuntimeError: rank 0 failed: see there' >&2
        exit 1";
    let ran = run(2, script);
    ran.ends(1, &["rank 1 failed first: it exited with code 1"]);
    assert!(!ran.stderr.contains("rank 0 failed first") && !ran.stderr.contains("rank 0 made"), "{ran:?}");
}

/// The rank that hangs has not failed, but the others fail because of it.
#[test]
fn a_rank_that_never_joined_the_collective_is_named() {
    let script = format!(
        "{AFTER} [ $RANK = 1 ] && echo waiting for data >&2; here
        case $RANK in
        0) fails 'rank 2 ended the group: rank 1 has not started this collective' 2; exit 6;;
        1) exec sleep 1000;;
        2) after 0; fails 'rank 1 has not started this collective' 1 TimedOut; exit 7;;
        esac"
    );
    let ran = run(3, &script);
    assert_eq!(ran.code, Some(6), "{ran:?}");
    ran.says("ddprun: rank 1 made the other ranks fail: it was killed by SIGTERM after ddprun asked it to exit, ");
    ran.says("its last lines:\n    waiting for data\n");
    ran.says("rank 0 exited with code 6 by itself because of rank 2");
}

#[test]
fn a_rank_that_left_too_early_is_named() {
    let script = format!(
        r#"{AFTER} here
        [ $RANK = 1 ] && echo done early && exit 0
        [ $RANK = 2 ] && after 0; after 1; fails 'rank 1 left the group after sequence 5' 1 PeerLeft; exit 5"#
    );
    let ran = run(3, &script);
    assert_eq!(ran.code, Some(5), "{ran:?}");
    ran.says("ddprun: rank 1 ended while the other ranks needed it: it exited with code 0, ");
    ran.says("its last lines:\n    done early\n");
    ran.says("ranks [0, 2]: each exited with code 5 by itself because of rank 1");
}

/// The others have done all that they had to do.
#[test]
fn a_rank_that_makes_a_call_too_many_is_named() {
    let script = format!(
        "{AFTER} here; [ $RANK != 2 ] && exit 0; after 0; after 1; after 3
        fails 'rank 0 left the group after sequence 5' 0 PeerLeft; exit 5"
    );
    let ran = run(4, &script);
    assert_eq!(ran.code, Some(5), "{ran:?}");
    ran.says("ddprun: rank 2 failed first: it exited with code 5, ");
    ran.says("its error:\n    rank 0 left the group after sequence 5\n");
}

/// One error is shown once, not once for every rank that has it.
#[test]
fn an_error_of_many_ranks_is_shown_once() {
    let error = "a long error that all ranks print";
    let script = format!(
        "{AFTER} here; [ $RANK = 5 ] && {{ fails '{error}'; exit 1; }}
        after 5; fails 'rank 5 ended the group: {error}' 5; exit 1"
    );
    let ran = run(6, &script);
    let summary = ran.stderr.split_once("ddprun: rank 5 failed first").unwrap().1;
    assert_eq!(summary.matches(error).count(), 1, "{summary}");
    ran.says("ranks [0, 1, 2, 3, 4]: each exited with code 1 by itself because of rank 5");
}

/// An error that was reported before a worker was started again is not the next one's.
#[test]
fn what_an_earlier_worker_has_told_does_not_count() {
    let script = format!("{FAILS} [ $TORCHELASTIC_RESTART_COUNT = 0 ] && fails 'an old error'; exit 4");
    let ran = Sandbox::new().run(&["--max-restarts", "1"], &script);
    assert_eq!(ran.code, Some(4), "{ran:?}");
    assert!(!ran.stderr.contains("its error:"), "{ran:?}");
}

/// Nor does the file of a rank that has succeeded in spite of it.
#[test]
fn what_a_rank_has_told_before_it_succeeded_does_not_count() {
    let script = format!("{AFTER} here; [ $RANK = 0 ] && fails 'for a moment' 1 && exit 0; after 0; exit 3");
    let ran = run(2, &script);
    ran.ends(3, &["ddprun: rank 1 failed first: it exited with code 3, ", "rank 0 exited with code 0 by itself"]);
    assert!(!ran.stderr.split_once("ddprun: rank 1 failed").unwrap().1.contains("for a moment"), "{ran:?}");
}
