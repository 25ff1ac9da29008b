//! What the example programs for images have around their loops, with the smallest of them.
#![cfg(feature = "launcher")]
use crate::examples::example;
use serde_json::Value;
use std::path::Path;
use std::process::Command;

/// Trains a narrow ResNet on two ranks, with the small data set in `home`, and returns the lines of its metrics.
fn cifar10_resnet18(home: &Path, arguments: &[&str]) -> Vec<Value> {
    let metrics = home.join("metrics.jsonl");
    let output = Command::new(env!("CARGO_BIN_EXE_ddprun"))
        .args(["--standalone", "--nproc-per-node", "2"])
        .arg(example("cifar10_resnet18"))
        .args(["--epochs", "2", "--width", "2", "--batch-size", "64", "--metrics", metrics.to_str().unwrap()])
        .args(arguments)
        .env("XDG_CACHE_HOME", home)
        .output()
        .unwrap();
    let printed = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(output.status.success(), "{printed}");
    assert!(printed.contains("test accuracy") && printed.contains("% at best"), "{printed}");
    std::fs::read_to_string(metrics).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_resumed_run_ends_as_it_would_have_ended() {
    let home = tempfile::tempdir().unwrap();
    let checkpoints = home.path().join("checkpoints");
    // 749 images are 12 batches, and 4 steps of 3.
    let arguments = ["--accumulate", "3", "--checkpoints", checkpoints.to_str().unwrap()];
    let lines = cifar10_resnet18(home.path(), &arguments);
    let steps: Vec<_> = lines.iter().filter_map(|line| line["step"].as_u64()).collect();
    assert_eq!(steps, (1..=8).collect::<Vec<_>>());
    // As if the run had ended in its second epoch.
    std::fs::remove_dir_all(checkpoints.join("step-00000002")).unwrap();
    let resumed = cifar10_resnet18(home.path(), &[&arguments[..], &["--resume"]].concat());
    // The metrics go on in the same file, which has all that the first run wrote.
    assert_eq!(resumed[..lines.len()], lines);
    let resumed = &resumed[lines.len()..];
    assert_eq!(resumed[0]["step"], 5);
    for key in ["epoch", "test_accuracy", "parameter_hash"] {
        assert!(!lines.last().unwrap()[key].is_null());
        assert_eq!(resumed.last().unwrap()[key], lines.last().unwrap()[key], "{key}");
    }
}
