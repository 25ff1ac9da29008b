//! The verdict of `ddprun` on real ranks that fail in every way and at every time, from before the rendezvous on.
//!
//! The processes are this test binary itself; environment variables make it a rank.
use crate::common::launch_test;
use candle_ddp::{InitOptions, init_process_group};
use rustix::process::{Signal, getpid, kill_process};
use serde_json::{Value, json};
use std::time::Duration;

/// The variables that say where rank 1 fails, and how.
const PLACE: &str = "CANDLE_DDP_TEST_VERDICT_PLACE";
const HOW: &str = "CANDLE_DDP_TEST_VERDICT_HOW";

/// The entry point of ranks.
#[test]
#[ignore = "started by other tests"]
fn rank_of_another_test() {
    let is_first = std::env::var("RANK").unwrap() == "0";
    let [place, how] = [PLACE, HOW].map(|name| std::env::var(name).unwrap());
    let at = |here: &str| match how.as_str() {
        _ if is_first || place != here => {}
        "killed" => kill_process(getpid(), Signal::KILL).unwrap(),
        "exits" => std::process::exit(3),
        "hangs" => loop {
            std::thread::park();
        },
        _ => panic!("out of luck"),
    };
    at("start");
    let timeout = Duration::from_secs(if how == "hangs" { 3 } else { 60 });
    let pg = init_process_group(InitOptions { timeout, ..Default::default() }).unwrap();
    let steps = || {
        at("before the first step");
        pg.barrier()?;
        pg.barrier()?;
        at("in the middle");
        pg.barrier()
    };
    pg.abort_on_error(steps).unwrap();
}

#[test]
fn the_rank_that_fails_is_named_with_how_it_did_wherever_that_was() {
    for place in ["start", "before the first step", "in the middle"] {
        let told = place != "start";
        for (how, expected) in [
            ("killed", json!({"how": "signal", "signal": 9, "exit": null, "code": 137, "told_by": null})),
            ("exits", json!({"how": "exit", "signal": null, "exit": 3, "code": 3, "told_by": null})),
            ("panics", json!({"how": "exit", "exit": 101, "code": 101, "cause": told.then_some("Program")})),
            ("hangs", json!({"how": "hang", "signal": null, "exit": null, "code": 101, "told_by": 0})),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let logs = folder.path().to_str().unwrap();
            let mut launcher = launch_test(module_path!(), 2, &["--standalone", "--run-id=x", "--log-dir", logs]);
            let output = launcher.env(PLACE, place).env(HOW, how).output().unwrap();
            let stderr = String::from_utf8_lossy(&output.stderr);
            let text = std::fs::read_to_string(folder.path().join("x/verdict.json")).unwrap();
            let verdict: Value = serde_json::from_str(&text).unwrap();
            assert_eq!(verdict["rank"], 1, "{how} {place}: {text}");
            for (field, value) in expected.as_object().unwrap() {
                assert_eq!(&verdict[field], value, "{field} of one that {how} {place}: {text}");
            }
            assert_eq!(output.status.code(), verdict["code"].as_i64().map(|code| code as i32), "{stderr}");
            assert!(stderr.contains(verdict["text"].as_str().unwrap()), "{how} {place}: {stderr}");
        }
    }
}
