//! `ddprun status` of a run whose ranks train.
use crate::common::elastic_ranks::{EVENTS, FOLDER, arguments, result, wait_for};
use crate::common::free_port;
use crate::elastic::RANK;
use std::path::Path;
use std::process::{Command, Output, Stdio};

const SECRET: &str = "a secret that the user has given to all";

fn ddprun() -> Command {
    let mut command = Command::new(crate::common::ddprun());
    command.env("CANDLE_DDP_SECRET", SECRET);
    command
}

/// The status of the run on this port, once both ranks have reported steps in `generation`.
fn status(port: &str, generation: &str) -> String {
    let mut text = String::new();
    wait_for(&format!("steps in generation {generation}"), || {
        let Output { status, stdout, stderr } =
            ddprun().args(["status", &format!("127.0.0.1:{port}")]).output().unwrap();
        text = String::from_utf8(stdout).unwrap();
        assert!(status.success(), "{text}{}", String::from_utf8_lossy(&stderr));
        [0, 1].into_iter().all(|rank| {
            let columns = columns(&text, rank);
            columns[3] == generation && !matches!(columns[4], "-" | "0")
        })
    });
    text
}

/// The columns of a rank: rank, host, pid, generation, steps, steps per second, time of the last step.
fn columns(text: &str, rank: usize) -> Vec<&str> {
    let lines = text.lines().skip_while(|line| !line.starts_with("rank "));
    let line = lines.skip(1).find(|line| line.starts_with(&format!("{rank} "))).unwrap_or_else(|| panic!("{text}"));
    line.split_whitespace().collect()
}

fn step(columns: &[&str]) -> u64 {
    columns[4].parse().unwrap()
}

/// Rank 1 is killed while rank 0 waits; it is replaced, and the run continues.
#[test]
fn the_status_shows_progress_and_the_last_failure() {
    let folder = tempfile::tempdir().unwrap();
    let port = free_port().to_string();
    let mut launcher = ddprun();
    launcher.args(["--nproc-per-node=2", "--max-restarts=2", "--run-id=watched", "--master-port", &port]);
    launcher.arg(std::env::current_exe().unwrap()).args(arguments(RANK));
    launcher.env(EVENTS, "0 wait-forward 4,1 kill-forward 6,0 wait-forward 8").env(FOLDER, folder.path());
    let run = launcher.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let waits = |commit: usize| folder.path().join(format!("0 wait-forward {commit}-0-{commit}")).exists();
    let go_on = |commit: usize| std::fs::write(folder.path().join(format!("go-{commit}")), "").unwrap();

    wait_for("the first steps", || waits(4));
    let before = status(&port, "0");
    assert!(before.starts_with("run watched: running, generation 0, 0 of 2 restarts used\n"), "{before}");
    assert!(before.contains("\nno failure so far\n"), "{before}");
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let [first, second] = [0, 1].map(|rank| {
        let columns = columns(&before, rank);
        assert_eq!(columns[1], host, "{before}");
        assert!(Path::new("/proc").join(columns[2]).exists(), "{before}");
        columns
    });
    go_on(4);
    wait_for("steps after a death", || waits(8));
    let after = status(&port, "1");
    assert!(after.starts_with("run watched: running, generation 1, 1 of 2 restarts used\n"), "{after}");
    assert!(
        after.contains("\nlast failure, 2") && after.contains(" UTC: rank 1 failed: it was killed by SIGKILL\n"),
        "{after}"
    );
    let [survivor, replaced] = [0, 1].map(|rank| columns(&after, rank));
    assert!(survivor[2] == first[2] && replaced[2] != second[2], "{before}{after}");
    assert!(step(&survivor) > step(&first) && step(&survivor) > step(&replaced), "{before}{after}");
    go_on(8);
    let output = run.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    result(folder.path(), &[0, 1]);
}
