//! `verdict.json`, and that all that ddprun shows of a failure agrees with it.
use crate::status::status_when;
use crate::{AFTER, FAILS, Ran, Sandbox, free_port, wait_until};
use rustix::process::Signal;
use serde_json::{Value, json};

/// The verdict in a folder of the run `x`.
pub(crate) fn verdict(sandbox: &Sandbox, folder: &str) -> Value {
    let text = std::fs::read_to_string(sandbox.path(folder).join("verdict.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// Runs a script with log files, and returns the verdict.
fn judged(sandbox: &Sandbox, ranks: usize, args: &[&str], script: &str) -> (Ran, Value) {
    let ranks = ranks.to_string();
    let own = ["--nproc-per-node", &ranks, "--log-dir", "logs", "--run-id", "x"];
    let ran = sandbox.run(&[&own, args].concat(), script);
    (ran, verdict(sandbox, "logs/x"))
}

/// The page about the runs of a sandbox.
fn page(sandbox: &Sandbox) -> String {
    let ran = Ran::new(&mut sandbox.ddprun(&["report", "logs", "--output", "page.html"]));
    assert_eq!(ran.code, Some(0), "{ran:?}");
    std::fs::read_to_string(sandbox.path("page.html")).unwrap()
}

#[track_caller]
pub(crate) fn has(verdict: &Value, fields: &Value) {
    for (name, value) in fields.as_object().unwrap() {
        assert_eq!(&verdict[name], value, "{name} of {verdict:#}");
    }
}

/// Rank 0 is the first to end, but only because of rank 1, which is killed.
const KILLED: &str =
    "trap '' TERM; here; case $RANK in 0) fails 'rank 1 is gone' 1 PeerGone; exit 1;; 1) after 0; kill -9 $$;; esac";

#[test]
fn the_summary_the_page_and_the_file_blame_one_rank_before_the_first_step() {
    let sandbox = Sandbox::new();
    let (ran, verdict) = judged(&sandbox, 2, &["--redirects=2"], &format!("{FAILS} {AFTER} {KILLED}"));
    assert_eq!(ran.code, Some(128 + 9), "{ran:?}");
    let text = "rank 1 failed first: it was killed by SIGKILL";
    ran.says(text);
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    has(
        &verdict,
        &json!({
            "schema": 1, "run_id": "x", "outcome": "failed", "restarts": 0, "rank": 1, "node": 0, "host": host, "how": "signal",
            "exit": null, "signal": 9, "cause": null, "told_by": null, "code": 137, "text": text, "earlier": [],
        }),
    );
    let evidence = &verdict["evidence"];
    let process = evidence["process"].as_str().unwrap();
    ran.says(process);
    assert!(process.starts_with(text) && process.contains(" s after the start, at 2"), "{process}");
    assert_eq!(evidence["files"], json!([sandbox.path("logs/x/attempt_0/1/stderr.log")]));
    let page = page(&sandbox);
    assert!(page.contains("<h2>Why it failed: x</h2>") && page.contains(&format!("<td>{text}</td>")), "{page}");
    assert!(!page.contains("rank 0 failed") && !page.contains("rank 0 exited"), "{page}");
}

#[test]
fn a_restart_the_status_and_the_metrics_blame_the_same_rank() {
    let sandbox = Sandbox::new();
    let (port, metrics) = (free_port(), free_port());
    let script = format!(
        "{FAILS} {AFTER} [ $TORCHELASTIC_RESTART_COUNT = 1 ] && {{ until [ -e end ]; do sleep 0.02; done; exit 0; }}
         {KILLED}"
    );
    let (port_text, metrics_text) = (port.to_string(), metrics.to_string());
    let args = ["--nproc-per-node=2", "--max-restarts=1", "--run-id=x", "--no-secret", "--log-dir=logs"];
    let ports = ["--master-port", &port_text, "--metrics-port", &metrics_text];
    let running = sandbox.start(&[&args[..], &ports].concat(), &script);
    let status = status_when(&sandbox, port, "run x: running, attempt 1, 1 of 1 restarts used");
    assert!(status.ends_with(" UTC: rank 1 failed first: it was killed by SIGKILL\n"), "{status}");
    let metrics = crate::metrics::ask(metrics, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n");
    assert!(metrics.contains("ddprun_last_failure_timestamp_seconds{rank=\"1\",host="), "{metrics}");
    has(&verdict(&sandbox, "logs/x"), &json!({"outcome": "continues", "restarts": 1, "rank": 1, "how": "signal"}));
    std::fs::write(sandbox.path("end"), "").unwrap();
    let ran = Ran::of(running);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    ran.says("ddprun: rank 0 exited with code 1: restarting all workers (restart 1 of 1)\n");
    ran.says("ddprun: rank 1 failed first: it was killed by SIGKILL\n");
    has(&verdict(&sandbox, "logs/x"), &json!({"outcome": "succeeded", "restarts": 1, "rank": 1, "how": "signal"}));
    assert!(page(&sandbox).contains("<h2>The last failure; the run ended well: x</h2>"));
}

#[test]
fn every_way_to_fail_has_its_verdict() {
    let hang = format!(
        "{FAILS} {AFTER} here; [ $RANK = 0 ] || exec sleep 1000
         fails 'rank 1 has not started this collective' 1 TimedOut; exit 6"
    );
    let left = format!(
        "{FAILS} {AFTER} here; [ $RANK = 1 ] && exit 0; after 1; fails 'rank 1 left the group' 1 PeerLeft; exit 5"
    );
    for (script, fields) in [
        ("[ $RANK = 0 ] || exit 3; exec sleep 1000", json!({"rank": 1, "how": "exit", "exit": 3, "code": 3})),
        (
            &format!("{FAILS} [ $RANK = 0 ] && exec sleep 1000; fails 'no disk' null Program; exit 1"),
            json!({"rank": 1, "how": "exit", "exit": 1, "cause": "Program"}),
        ),
        (
            "[ $RANK = 0 ] || kill -11 $$; exec sleep 1000",
            json!({"rank": 1, "how": "signal", "signal": 11, "code": 139}),
        ),
        (
            &hang,
            json!({"rank": 1, "how": "hang", "exit": null, "signal": null, "cause": "TimedOut", "told_by": 0, "code": 6}),
        ),
        (&left, json!({"rank": 1, "how": "left", "exit": 0, "cause": "PeerLeft", "told_by": 0, "code": 5})),
    ] {
        let sandbox = Sandbox::new();
        let (ran, verdict) = judged(&sandbox, 2, &[], script);
        has(&verdict, &fields);
        assert_eq!(ran.code, verdict["code"].as_i64().map(|code| code as i32));
        ran.says(verdict["text"].as_str().unwrap());
        assert!(page(&sandbox).contains(verdict["text"].as_str().unwrap()));
    }
}

/// Those of an earlier run say nothing about this one.
#[test]
fn the_flight_records_of_the_run_are_evidence() {
    for (written, expected) in [("$(date +%s%N)", 1), ("2", 0)] {
        let sandbox = Sandbox::new();
        std::fs::create_dir(sandbox.path("flights")).unwrap();
        let script = format!(
            r#"echo "{{\"version\":1,\"rank\":0,\"world_size\":2,\"started_ns\":1,\"written_ns\":{written},\"host\":\"a\",\"pid\":1,\
\"reason\":\"a test\",\"groups\":[]}}" >flights/rank0.flight.json; exit 1"#
        );
        let args = ["--log-dir", "logs", "--run-id", "x", "sh", "-c", &script];
        let ran = Ran::new(sandbox.ddprun(&args).env("CANDLE_DDP_FLIGHT_RECORDER", "flights"));
        assert_eq!(ran.code, Some(1), "{ran:?}");
        let calls = &verdict(&sandbox, "logs/x")["evidence"]["calls"];
        let is_there = |call: &Value| call.as_str().unwrap().starts_with("there is no file of rank 1");
        assert_eq!(calls.as_array().unwrap().iter().filter(|call| is_there(call)).count(), expected, "{calls}");
    }
}

#[test]
fn a_run_that_did_not_begin_or_was_stopped_has_a_verdict() {
    let sandbox = Sandbox::new();
    let args = ["--log-dir", "logs", "--run-id", "x", "/no/such/program"];
    let ran = Ran::new(&mut sandbox.ddprun(&args));
    assert_eq!(ran.code, Some(127), "{ran:?}");
    let found = verdict(&sandbox, "logs/x");
    has(&found, &json!({"rank": null, "how": "not_started", "code": 127, "outcome": "failed"}));
    ran.says(&format!("ddprun: {}\n", found["text"].as_str().unwrap()));
    // Its id is taken, so the next run has its own folder.
    let mut running = sandbox.start(&["--log-dir", "logs", "--run-id", "x"], ": >here; exec sleep 1000");
    wait_until("the worker", || sandbox.path("here").exists());
    running.send(Signal::TERM);
    assert_eq!(Ran::of(running).code, Some(128 + 15));
    has(
        &verdict(&sandbox, "logs/x_2"),
        &json!({"rank": null, "how": "stopped", "signal": 15, "code": 143, "text": "ddprun received SIGTERM"}),
    );
    // A run in which nothing has failed has none.
    assert_eq!(sandbox.run(&["--log-dir", "logs", "--run-id", "y"], "true").code, Some(0));
    assert!(sandbox.path("logs/y").exists() && !sandbox.path("logs/y/verdict.json").exists());
}

#[test]
fn the_end_of_a_restart_that_cannot_be_made_is_a_verdict() {
    let sandbox = Sandbox::new();
    std::fs::write(sandbox.path("program"), "#!/bin/sh\nrm program; exit 9\n").unwrap();
    rustix::fs::chmod(sandbox.path("program"), rustix::fs::Mode::RWXU).unwrap();
    let args = ["--max-restarts=1", "--log-dir=logs", "--run-id=x", "./program"];
    let ran = Ran::new(&mut sandbox.ddprun(&args));
    assert_eq!(ran.code, Some(127), "{ran:?}");
    let found = verdict(&sandbox, "logs/x");
    has(&found, &json!({"how": "not_started", "outcome": "failed"}));
    has(&found["earlier"][0], &json!({"how": "exit", "exit": 9, "rank": 0}));
    ran.says("ddprun: the workers cannot be restarted: cannot start ./program: No such file");
}
