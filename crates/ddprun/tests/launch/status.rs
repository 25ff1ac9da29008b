//! `ddprun status`, of programs that know nothing of it.
use crate::{Ran, Sandbox, free_port, wait_until};
use candle_ddp_rendezvous::TcpStoreServer;
use std::net::Ipv4Addr;

const SECRET: &str = "a secret that the user has given to all";

pub(crate) fn status(sandbox: &Sandbox, port: u16) -> Ran {
    Ran::new(&mut sandbox.ddprun(&["status", &format!("127.0.0.1:{port}")]))
}

/// The status of a run, once its first line is `first`.
#[track_caller]
pub(crate) fn status_when(sandbox: &Sandbox, port: u16, first: &str) -> String {
    let mut ran = None;
    wait_until(&format!("the status {first}"), || {
        let status = status(sandbox, port);
        let is_there = status.stdout.lines().next() == Some(first);
        ran = Some(status);
        is_there
    });
    let ran = ran.unwrap();
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(0), ""));
    ran.stdout
}

#[test]
fn a_restart_is_shown_with_what_has_caused_it() {
    let sandbox = Sandbox::new();
    let port = free_port();
    let script = ": >here-$TORCHELASTIC_RESTART_COUNT-$RANK
        while [ ! -e end-$TORCHELASTIC_RESTART_COUNT ]; do sleep 0.02; done
        [ $TORCHELASTIC_RESTART_COUNT = 1 ] || [ $RANK = 0 ] || exit 7";
    let args = ["--nproc-per-node=2", "--max-restarts=1", "--run-id=a", "--no-secret", "--master-port"];
    let running = sandbox.start(&[&args[..], &[&port.to_string()]].concat(), script);
    wait_until("the workers", || sandbox.path("here-0-0").exists());
    let text = status_when(&sandbox, port, "run a: running, attempt 0, 0 of 1 restarts used");
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    for expected in [vec!["0", &host, "alive"], vec!["1", &host, "-", "-", "-", "-", "-", "-"]] {
        assert!(lines.contains(&expected), "{expected:?} is not in:\n{text}");
    }
    assert!(text.ends_with("\nno failure so far\n"), "{text}");
    std::fs::write(sandbox.path("end-0"), "").unwrap();
    let text = status_when(&sandbox, port, "run a: running, attempt 1, 1 of 1 restarts used");
    assert!(
        text.contains("\nlast failure, 2") && text.ends_with(" UTC: rank 1 failed first: it exited with code 7\n"),
        "{text}"
    );
    std::fs::write(sandbox.path("end-1"), "").unwrap();
    assert_eq!(Ran::of(running).code, Some(0));
}

#[test]
fn what_is_no_run_says_so() {
    let sandbox = Sandbox::new();
    let server = TcpStoreServer::bind((Ipv4Addr::LOCALHOST, 0), Default::default()).unwrap();
    let ran = status(&sandbox, server.port());
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(1), ""), "{ran:?}");
    ran.says("no ddprun has written the status of a run there");
    let ran = status(&sandbox, free_port());
    ran.ends(1, &["Connection refused"]);
    let ran = Ran::new(&mut sandbox.ddprun(&["status", "nobody"]));
    ran.ends(2, &["must be HOST:PORT"]);
}

#[test]
fn the_secret_of_the_run_is_needed() {
    let sandbox = Sandbox::new();
    let port = free_port();
    let args = ["--run-id=a", "--master-port", &port.to_string(), "sleep", "60"];
    let mut command = sandbox.ddprun(&args);
    let mut running = crate::Running::new(command.env("CANDLE_DDP_SECRET", SECRET));
    candle_ddp_rendezvous::TcpStore::connect("127.0.0.1", port, crate::PATIENCE).err().unwrap();
    let ran = status(&sandbox, port);
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(1), ""), "{ran:?}");
    ran.says("CANDLE_DDP_SECRET");
    let mut command = sandbox.ddprun(&["status", &format!("127.0.0.1:{port}")]);
    let ran = Ran::new(command.env("CANDLE_DDP_SECRET", SECRET));
    assert!(ran.code == Some(0) && ran.stdout.starts_with("run a: running"), "{ran:?}");
    running.send(rustix::process::Signal::TERM);
}
