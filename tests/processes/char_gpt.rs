//! The examples `char_gpt` and `generate`: trained on many ranks, used by a program that only has candle.
use crate::common::{assert_close, example, floats, json_lines, launch_example, succeed};
use candle_core::{DType, Device, Module, Tensor, safetensors};
use candle_nn::VarBuilder;
use candle_nn::loss::cross_entropy;
use hash::Hash;
use serde_json::Value;
use std::path::Path;
use std::process::Command;

#[path = "../../examples/char_gpt/block.rs"]
mod block;
#[path = "../../examples/common/hash.rs"]
mod hash;
#[path = "../../examples/char_gpt/model.rs"]
mod model;
#[allow(dead_code)] // the test draws no text
#[path = "../../examples/generate/plain.rs"]
mod plain;

/// A model small enough for a test, and a text that does not change.
const SMALL: [&str; 10] = [
    "--layers",
    "2",
    "--width",
    "32",
    "--context",
    "32",
    "--batch-size",
    "4",
    "--data",
    concat!(env!("CARGO_MANIFEST_DIR"), "/LICENSE"),
];

/// Trains, and returns the output.
fn char_gpt(ranks: usize, arguments: &[&str]) -> String {
    let [stdout, _] = succeed(launch_example("char_gpt", ranks).args(SMALL).args(arguments));
    stdout
}

#[test]
fn a_model_of_four_ranks_is_the_same_in_plain_candle() {
    let folder = tempfile::tempdir().unwrap();
    let [exported, metrics] = ["model", "metrics.jsonl"].map(|name| folder.path().join(name));
    let [to, to_metrics] = [exported.to_str().unwrap(), metrics.to_str().unwrap()];
    let trained = char_gpt(4, &["--steps", "4", "--export", to, "--metrics", to_metrics]);
    let [used, _] = succeed(Command::new(example("generate")).arg(&exported));

    // The weights, bit for bit, of all four ranks, of the file, and of the program that has loaded it.
    let weights = safetensors::load(exported.join("model.safetensors"), &Device::Cpu).unwrap();
    let parameters = Hash::of_variables(weights.clone()).unwrap().to_string();
    assert_eq!(json_lines(&metrics).last().unwrap()["parameter_hash"], parameters.as_str());
    // The outputs, bit for bit: all logits of 300 characters, and so the text.
    let (text, hashes) = used.trim_end().rsplit_once('\n').unwrap();
    let logits = hashes.strip_prefix(&format!("parameters {parameters}, ")).unwrap();
    assert!(trained.ends_with(&format!("{text}\n{logits}\n")), "{trained}\n{used}");

    // The layers with which it was trained round differently, and no more than that.
    let config = serde_json::from_slice::<Value>(&std::fs::read(exported.join("config.json")).unwrap()).unwrap();
    let vocabulary = config["vocabulary"].as_str().unwrap().chars().count();
    let config = plain::Config { vocabulary, context: 32, width: 32, heads: 4, layers: 2 };
    let vb = || VarBuilder::from_tensors(weights.clone(), DType::F32, &Device::Cpu);
    let x: Vec<u32> = (0..64).map(|index| index % vocabulary as u32).collect();
    let x = Tensor::from_vec(x, (2, 32), &Device::Cpu).unwrap();
    let ours = model::Gpt::new(config, vb()).unwrap();
    let plain = plain::Gpt::new(config, vb()).unwrap().forward(&x).unwrap();
    assert_close(&floats(&ours.forward(&x).unwrap()), &floats(&plain), 1e-5, "logits");
    let loss = cross_entropy(&plain.flatten_to(1).unwrap(), &x.flatten_all().unwrap()).unwrap();
    assert_close(&floats(&ours.loss(&x, &x).unwrap()), &floats(&loss), 1e-5, "the loss");
}

#[test]
fn the_program_that_uses_the_model_has_candle_alone() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/generate");
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    for file in files.chain([Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/common/hash.rs")]) {
        assert!(!std::fs::read_to_string(&file).unwrap().contains("candle_ddp"), "{}", file.display());
    }
}

#[test]
#[ignore = "slow without optimisation"]
fn the_loss_falls_and_zero_trains_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let metrics = folder.path().join("metrics.jsonl");
    let mut hashes = Vec::new();
    for zero in ["true", "false"] {
        let arguments = ["--steps", "30", "--warmup", "5", "--clip", "1000", "--zero", zero];
        let output = char_gpt(2, &[&arguments[..], &["--metrics", metrics.to_str().unwrap()]].concat());
        assert_eq!(output.matches("MiB on this rank").count(), 1, "{output}");
        let lines = json_lines(&metrics);
        let loss = |step: usize| lines[step - 1]["loss"].as_f64().unwrap();
        assert!(loss(30) < loss(1) - 0.3, "{} {}", loss(1), loss(30));
        hashes.push(lines[30]["parameter_hash"].clone());
    }
    assert_eq!(hashes[0], hashes[1]);
}

#[test]
fn a_resumed_run_ends_as_it_would_have_ended() {
    let folder = tempfile::tempdir().unwrap();
    let [checkpoints, metrics] = ["checkpoints", "metrics.jsonl"].map(|name| folder.path().join(name));
    let [to, to_metrics] = [checkpoints.to_str().unwrap(), metrics.to_str().unwrap()];
    let arguments =
        ["--steps", "6", "--accumulate", "2", "--checkpoint-every", "2", "--checkpoints", to, "--metrics", to_metrics];
    let end = || json_lines(&metrics).last().unwrap()["parameter_hash"].clone();
    char_gpt(2, &arguments);
    let uninterrupted = end();
    // As if the run had ended before its last checkpoint: it continues after step 4.
    std::fs::remove_dir_all(checkpoints.join("step-00000006")).unwrap();
    std::fs::remove_file(&metrics).unwrap();
    char_gpt(2, &[&arguments[..], &["--resume"]].concat());
    assert_eq!(json_lines(&metrics)[0]["step"], 5);
    assert_eq!(end(), uninterrupted);
}
