//! The example `digits` under the real launcher: it learns, its metrics file shows that, and every run gives the same
//! result.
use crate::common::{json_lines, launch_example, succeed};
use serde_json::Value;

/// Runs the example, which must fail, and returns its errors.
fn failed(arguments: &[&str]) -> String {
    let output = launch_example("digits", 2).args(arguments).output().unwrap();
    assert!(!output.status.success());
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn metrics(ranks: usize, arguments: &[&str]) -> Vec<Value> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("metrics.jsonl");
    let [_, stderr] = succeed(launch_example("digits", ranks).arg("--metrics").arg(&file).args(arguments));
    assert!(!stderr.contains("left\r"), "a progress bar without a terminal: {stderr:?}");
    json_lines(&file)
}

#[test]
#[ignore = "slow without optimisation"]
fn two_ranks_learn_to_read() {
    let epochs = metrics(2, &["--epochs", "5", "--require-accuracy", "0.9"]);
    assert_eq!(epochs.len(), 5);
    for (index, epoch) in epochs.iter().enumerate() {
        assert_eq!(epoch["epoch"], index + 1);
        assert_eq!(epoch["world_size"], 2);
        assert_eq!(epoch["parameter_hash"].as_str().unwrap().len(), 16);
        assert!(epoch["images_per_second"].as_f64().unwrap() > 0.);
    }
    let (first, last) = (&epochs[0], &epochs[4]);
    assert!(last["train_loss"].as_f64().unwrap() < first["train_loss"].as_f64().unwrap() / 5., "{first} {last}");
    assert!(last["test_accuracy"].as_f64().unwrap() >= 0.9, "{last}");
}

#[test]
#[ignore = "slow without optimisation"]
fn sharded_optimizer_state_trains_the_same() {
    for ranks in [2, 3] {
        let hashes = |arguments: &[&str]| -> Vec<Value> {
            let epochs = metrics(ranks, &[&["--epochs", "1"], arguments].concat());
            epochs.into_iter().map(|epoch| epoch["parameter_hash"].clone()).collect()
        };
        // Equal to the last bit, because the engine sums in the same order and the optimizer is the same.
        assert_eq!(hashes(&["--zero"]), hashes(&[]), "{ranks} ranks");
    }
}

#[test]
#[ignore = "slow without optimisation"]
fn every_communication_hook_learns_too() {
    // The maximum share of the gradients that each hook may send.
    for (hook, part) in [("fp16", 0.51), ("bf16", 0.51), ("int8", 0.45), ("power-sgd", 0.8)] {
        let epochs = metrics(2, &["--epochs", "3", "--comm-hook", hook]);
        let last = epochs.last().unwrap();
        assert!(last["test_accuracy"].as_f64().unwrap() >= 0.8, "{hook}: {last}");
        let (sent, all) = (last["bytes_sent"].as_f64().unwrap(), last["gradient_bytes"].as_f64().unwrap());
        assert!(sent > 0.0 && sent < all * part, "{hook}: {last}");
    }
    assert!(metrics(2, &["--epochs", "1"])[0]["bytes_sent"].is_null());
}

#[test]
fn every_test_image_counts_once() {
    // The sampler gives each of 7 ranks 52 of the 360 images, so four images appear twice.
    let epochs = metrics(7, &["--epochs", "1", "--batch-size", "64"]);
    let correct = epochs[0]["test_accuracy"].as_f64().unwrap() * 360.;
    assert!((correct - correct.round()).abs() < 1e-6, "{correct} of 360");
}

#[test]
#[ignore = "slow without optimisation"]
fn a_seed_determines_the_training() {
    let hashes = |seed: &str, epochs: &str| -> Vec<String> {
        let epochs = metrics(3, &["--epochs", epochs, "--seed", seed]);
        epochs.iter().map(|epoch| epoch["parameter_hash"].as_str().unwrap().to_string()).collect()
    };
    let once = hashes("1", "2");
    assert_eq!(once[..1], hashes("1", "1"));
    assert_ne!(once[..1], hashes("2", "1"));
    assert_ne!(once[0], once[1]);
}

#[test]
fn every_rank_reports_metrics_that_cannot_be_written() {
    let stderr = failed(&["--epochs", "1", "--metrics", "/nowhere/metrics.jsonl"]);
    // The other rank reports it as well, unless the launcher ends it first.
    let mut complaints = stderr.lines().filter(|line| line.starts_with("error: ")).peekable();
    assert!(complaints.peek().is_some() && complaints.all(|line| line.contains("/nowhere/metrics.jsonl")), "{stderr}");
}

#[test]
fn an_accuracy_out_of_reach_is_a_failure() {
    let stderr = failed(&["--epochs", "1", "--require-accuracy", "1.1"]);
    assert!(stderr.contains("does not reach 1.1"), "{stderr}");
}

#[test]
#[ignore = "slow without optimisation"]
fn a_resumed_run_ends_as_it_would_have_ended() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = folder.path().to_str().unwrap();
    let hash = |epochs: &[Value]| epochs.last().unwrap()["parameter_hash"].clone();
    let uninterrupted = metrics(2, &["--epochs", "2", "--zero"]);
    metrics(2, &["--epochs", "1", "--zero", "--checkpoints", checkpoints]);
    let resumed = metrics(2, &["--epochs", "2", "--zero", "--checkpoints", checkpoints, "--resume"]);
    assert_eq!(resumed[0]["epoch"], 2);
    assert_eq!(hash(&resumed), hash(&uninterrupted));
    // A run that has ended has nothing to continue, and does not pretend to have trained.
    let stderr = failed(&["--epochs", "2", "--zero", "--checkpoints", checkpoints, "--resume"]);
    assert!(stderr.contains("--epochs: nothing is left to train"), "{stderr}");
}
