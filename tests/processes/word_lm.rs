//! The example `word_lm`: columns of a text on several ranks, and a state that is carried from step to step.
use crate::common::{json_lines, launch_example, succeed};
use serde_json::Value;
use std::path::Path;

/// A model small enough for a test, and a text that does not change.
const SMALL: [&str; 10] = [
    "--emsize",
    "24",
    "--nhid",
    "24",
    "--batch-size",
    "6",
    "--bptt",
    "5",
    "--data",
    concat!(env!("CARGO_MANIFEST_DIR"), "/LICENSE"),
];

/// Trains, and returns the lines of the metrics.
fn word_lm(ranks: usize, metrics: &Path, arguments: &[&str]) -> Vec<Value> {
    succeed(launch_example("word_lm", ranks).args(SMALL).args(arguments).arg("--metrics").arg(metrics));
    json_lines(metrics)
}

fn number(line: &Value, name: &str) -> f64 {
    line[name].as_f64().unwrap()
}

/// Columns on other ranks are as columns on this one. Without dropout, of which each rank has its own masks.
#[test]
fn several_ranks_train_as_one_and_the_loss_falls() {
    let folder = tempfile::tempdir().unwrap();
    for arguments in [&["--tied"][..], &["--model", "gru", "--nlayers", "1"]] {
        let arguments = [&["--dropout", "0", "--epochs", "3", "--lr", "2"], arguments].concat();
        let [one, two, three] = [1, 2, 3].map(|ranks| word_lm(ranks, &folder.path().join("metrics"), &arguments));
        for name in ["train_loss", "validation_loss"] {
            for (epoch, one) in one.iter().enumerate() {
                for several in [&two, &three] {
                    let (one, several) = (number(one, name), number(&several[epoch], name));
                    assert!((one - several).abs() < 1e-4 * one, "{arguments:?}, {name}: {several}, not {one}");
                }
            }
        }
        assert!(number(&one[2], "train_loss") < number(&one[0], "train_loss") - 0.2, "{one:?}");
    }
}

/// With dropout, whose generator is part of the checkpoint, as is the learning rate that has been reduced.
#[test]
fn a_resumed_run_ends_as_it_would_have_ended() {
    let folder = tempfile::tempdir().unwrap();
    let [checkpoints, metrics] = ["checkpoints", "metrics"].map(|name| folder.path().join(name));
    let to = checkpoints.to_str().unwrap();
    // At this rate the validation loss does not fall in every epoch.
    let arguments = ["--epochs", "5", "--lr", "40", "--checkpoints", to];
    let whole = word_lm(2, &metrics, &arguments);
    assert!(number(&whole[4], "learning_rate") < 40.0, "{whole:?}");
    // As if the run had ended before its last checkpoint.
    std::fs::remove_dir_all(checkpoints.join("step-00000005")).unwrap();
    std::fs::remove_file(&metrics).unwrap();
    let rest = word_lm(2, &metrics, &[&arguments[..], &["--resume"]].concat());
    assert_eq!(rest, [whole[4].clone()]);
}

#[test]
fn options_that_do_not_fit_are_refused() {
    for (arguments, text) in [
        (["--batch-size", "5"], "a multiple of the number of ranks, 2, not 5"),
        (["--bptt", "0"], "it must be at least 1"),
        (["--batch-size", "4000"], "each of 4000 columns needs two"),
    ] {
        let output = launch_example("word_lm", 2).args(&SMALL[8..]).args(arguments).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && stderr.contains(text), "{arguments:?}: {stderr}");
    }
}
