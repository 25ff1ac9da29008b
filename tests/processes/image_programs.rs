//! The code around the loops of the example programs for images, with the smallest of them.
use crate::common::{json_lines, launch_example, succeed};
use serde_json::Value;
use std::path::Path;

/// Writes `count` noisy images in CIFAR-10's format, which are brighter the higher their label.
fn write_images(path: &Path, count: usize) {
    let mut noise = 1_u32;
    let mut records = Vec::new();
    for index in 0..count {
        let label = (index % 10) as u8;
        records.push(label);
        records.extend((0..3 * 32 * 32).map(|_| {
            noise = noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            20 * label + (noise >> 26) as u8
        }));
    }
    std::fs::write(path, records).unwrap();
}

/// Trains a narrow ResNet on two ranks with 200 images, and returns the lines of its metrics.
fn cifar10_resnet18(home: &Path, arguments: &[&str]) -> Vec<Value> {
    let metrics = home.join("metrics.jsonl");
    (1..=5).for_each(|number| write_images(&home.join(format!("data_batch_{number}.bin")), 40));
    write_images(&home.join("test_batch.bin"), 20);
    let mut command = launch_example("cifar10_resnet18", 2);
    command.args(["--data", home.to_str().unwrap(), "--metrics", metrics.to_str().unwrap()]);
    command.args(["--epochs", "2", "--width", "2", "--batch-size", "8"]);
    let printed = succeed(command.args(arguments)).concat();
    assert!(printed.contains("test accuracy") && printed.contains("% at best"), "{printed}");
    json_lines(&metrics)
}

#[test]
fn a_resumed_run_ends_as_it_would_have_ended() {
    let home = tempfile::tempdir().unwrap();
    let checkpoints = home.path().join("checkpoints");
    // A rank's 100 images are 13 batches: 4 steps of 3, and one of the last.
    let arguments = ["--accumulate", "3", "--checkpoints", checkpoints.to_str().unwrap()];
    let lines = cifar10_resnet18(home.path(), &arguments);
    let steps: Vec<_> =
        lines.iter().filter(|line| line["loss"].is_f64()).map(|line| line["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, (1..=10).collect::<Vec<_>>());
    // As if the run had ended in its second epoch.
    std::fs::remove_dir_all(checkpoints.join("step-00000002")).unwrap();
    let resumed = cifar10_resnet18(home.path(), &[&arguments[..], &["--resume"]].concat());
    // The metrics continue in the same file, without the steps that come again.
    assert_eq!((resumed.len(), &resumed[..6]), (lines.len(), &lines[..6]));
    assert_eq!(resumed[6]["step"], 6);
    assert_ne!(resumed[6]["seconds"], lines[6]["seconds"]);
    for key in ["epoch", "test_accuracy", "parameter_hash"] {
        assert!(!lines.last().unwrap()[key].is_null());
        assert_eq!(resumed.last().unwrap()[key], lines.last().unwrap()[key], "{key}");
    }
}
