//! The example `bert_classifier`: its files, its frozen layers, and its parts.
use crate::common::{assert_error, floats, launch_example};
use candle_core::{DType, Device, Tensor, safetensors};
use candle_ddp::optim::Schedule;
use schedule::ParamsWarmupLinear;
use serde_json::Value;
use std::collections::HashMap;
use std::path::Path;
use text::{Sentences, WordPieces};

#[path = "../../examples/bert_classifier/freeze.rs"]
#[allow(dead_code)] // the test asks about names only
mod freeze;
#[path = "../../examples/bert_classifier/requests.rs"]
mod requests;
#[path = "../../examples/bert_classifier/schedule.rs"]
mod schedule;
#[path = "../../examples/bert_classifier/text.rs"]
mod text;

/// Trains, and returns whether that succeeded, and the output.
fn train(ranks: usize, arguments: &[&str]) -> (bool, String) {
    let output = launch_example("bert_classifier", ranks).args(arguments).output().unwrap();
    let printed = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    (output.status.success(), printed)
}

fn trained(ranks: usize, arguments: &[&str]) -> String {
    let (success, printed) = train(ranks, arguments);
    assert!(success, "{printed}");
    printed
}

fn weights(folder: &Path) -> HashMap<String, Tensor> {
    safetensors::load(folder.join("model.safetensors"), &Device::Cpu).unwrap()
}

fn last_metrics(path: &Path) -> Value {
    serde_json::from_str(std::fs::read_to_string(path).unwrap().lines().last().unwrap()).unwrap()
}

/// Writes the weights as the old `BertModel` named them: no `bert.`, gamma and beta, no head, and the layers of pre-training.
fn write_old(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for name in ["config.json", "vocab.txt"] {
        std::fs::copy(from.join(name), to.join(name)).unwrap();
    }
    let old =
        |name: &str| name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta");
    let body = weights(from).into_iter().filter_map(|(name, tensor)| Some((old(name.strip_prefix("bert.")?), tensor)));
    let mut tensors: HashMap<_, _> = body.filter(|(name, _)| !name.starts_with("pooler.")).collect();
    let ids = Tensor::arange(0i64, 64, &Device::Cpu).unwrap().unsqueeze(0).unwrap();
    tensors.insert("embeddings.position_ids".to_string(), ids);
    tensors.insert("cls.predictions.bias".to_string(), Tensor::zeros(9, DType::F32, &Device::Cpu).unwrap());
    safetensors::save(&tensors, to.join("model.safetensors")).unwrap();
}

#[test]
#[ignore = "slow without optimisation"]
fn an_exported_model_is_loaded_and_frozen_as_asked() {
    let home = tempfile::tempdir().unwrap();
    let [first, second, old, third, metrics] =
        ["first", "second", "old", "third", "metrics.jsonl"].map(|name| home.path().join(name));
    let path = |path: &Path| path.to_str().unwrap().to_string();

    let printed = trained(2, &["--epochs", "4", "--export", &path(&first), "--metrics", &path(&metrics)]);
    assert!(printed.contains("a small model with random weights"), "{printed}");
    let reached = last_metrics(&metrics)["validation_accuracy"].as_f64().unwrap();
    assert!(reached >= 0.9, "{printed}");

    // All of it, including the head: it classifies as before, and frozen parts keep their bits, in mixed precision too.
    let frozen = "bert.embeddings,encoder.layer.0";
    let arguments =
        ["--lr", "1e-7", "--epochs", "1", "--freeze", frozen, "--amp", "bf16", "--metrics", &path(&metrics)];
    let printed = trained(3, &[&arguments[..], &["--checkpoint", &path(&first), "--export", &path(&second)]].concat());
    assert!(printed.contains("41 variables are from") && !printed.contains("keep their initial values"), "{printed}");
    let again = last_metrics(&metrics)["validation_accuracy"].as_f64().unwrap();
    assert!((again - reached).abs() < 0.03, "{again} after {reached}");
    let [before, after] = [weights(&first), weights(&second)];
    for (name, tensor) in &before {
        let is_frozen = name.contains("embeddings") || name.contains("layer.0");
        assert_eq!(floats(tensor) == floats(&after[name]), is_frozen, "{name}");
    }
    let config: Value = serde_json::from_slice(&std::fs::read(second.join("config.json")).unwrap()).unwrap();
    assert_eq!(config["id2label"]["3"], "weather");
    assert_eq!(config["label2id"]["lights"], 0);

    // The body alone, under old names.
    write_old(&first, &old);
    let arguments = ["--epochs", "1", "--freeze", "bert", "--checkpoint", &path(&old), "--export", &path(&third)];
    let (success, printed) = train(2, &arguments);
    assert!(success, "{printed}");
    assert!(printed.contains("37 variables are from"), "{printed}");
    let new = "classifier.bias, classifier.weight, bert.pooler";
    assert!(
        printed.contains("keep their initial values") && new.split(", ").all(|name| printed.contains(name)),
        "{printed}"
    );
    let after = weights(&third);
    for (name, tensor) in before.iter().filter(|(name, _)| name.starts_with("bert.e")) {
        assert_eq!(floats(tensor), floats(&after[name]), "{name}");
    }
}

#[test]
fn what_does_not_fit_is_an_error() {
    let home = tempfile::tempdir().unwrap();
    let (success, printed) = train(2, &["--freeze", "encoder.layer.9"]);
    assert!(!success && printed.contains("no variable's name begins with \"encoder.layer.9\""), "{printed}");
    let (success, printed) = train(1, &["--checkpoint", home.path().to_str().unwrap()]);
    assert!(!success && printed.contains("has neither model.safetensors nor pytorch_model.bin"), "{printed}");
    let data = home.path().join("data.txt");
    std::fs::write(&data, "good\tyes\nbad no\n").unwrap();
    let (success, printed) = train(1, &["--data", data.to_str().unwrap()]);
    assert!(!success && printed.contains("line 2 has no tab"), "{printed}");
}

#[test]
#[ignore = "slow without optimisation"]
fn a_resumed_run_ends_as_it_would_have_ended() {
    let home = tempfile::tempdir().unwrap();
    let [checkpoints, metrics] = ["checkpoints", "metrics.jsonl"].map(|name| home.path().join(name));
    let [to, to_metrics] = [&checkpoints, &metrics].map(|path| path.to_str().unwrap());
    // A rank's 240 sentences are 15 batches: 7 steps of 2, and one of the last.
    let arguments = ["--epochs", "2", "--accumulate", "2", "--checkpoints", to, "--metrics", to_metrics];
    trained(2, &arguments);
    let uninterrupted = last_metrics(&metrics);
    // As if the run had ended in its second epoch.
    std::fs::remove_dir_all(checkpoints.join("step-00000002")).unwrap();
    trained(2, &[&arguments[..], &["--resume"]].concat());
    assert_eq!(last_metrics(&metrics), uninterrupted);
}

#[test]
fn prefixes_end_at_dots() {
    let is_frozen = |name, prefix: &str| freeze::is_frozen(name, &["other".to_string(), prefix.to_string()]);
    assert!(is_frozen("bert.encoder.layer.1.output.dense.bias", "encoder.layer.1"));
    assert!(is_frozen("bert.encoder.layer.1.output.dense.bias", "bert.encoder"));
    assert!(is_frozen("bert.pooler.dense.bias", "bert"));
    assert!(is_frozen("classifier.bias", "classifier.bias"));
    assert!(!is_frozen("bert.encoder.layer.10.output.dense.bias", "encoder.layer.1"));
    assert!(!is_frozen("bert.encoder.layer.1.output.dense.bias", "layer.1"));
    assert!(!is_frozen("classifier.bias", "bert"));
}

#[test]
fn sentences_are_padded_and_masked() {
    let vocabulary = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nplay\nsong\n##s\n,\n";
    let batch = |vocabulary: &str, sentences: &[&str]| {
        let samples = sentences.iter().zip(7..).map(|(sentence, class)| (sentence.to_string(), class)).collect();
        WordPieces::new(vocabulary, 6).unwrap().batch(samples).unwrap()
    };
    let (ids, mask, classes) = batch(vocabulary, &["Pláy, songs", "SONG", "what"]);
    assert_eq!(ids.to_vec2::<u32>().unwrap(), [[2, 5, 8, 6, 7, 3], [2, 6, 3, 0, 0, 0], [2, 1, 3, 0, 0, 0]]);
    assert_eq!(mask.to_vec2::<u32>().unwrap(), [[1; 6], [1, 1, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0]]);
    assert_eq!(classes.to_vec1::<u32>().unwrap(), [7, 8, 9]);
    // Longer sentences are cut. Words with capitals in the vocabulary keep the capitals of the sentences.
    let cased = vocabulary.to_string() + "Song\n";
    let (ids, ..) = batch(&cased, &["play play Song play play play"]);
    assert_eq!(ids.to_vec2::<u32>().unwrap(), [[2, 5, 5, 9, 5, 3]]);
    assert_error(WordPieces::new("[PAD]\n[UNK]\n[CLS]\n", 6), &["[SEP]"]);
}

#[test]
fn the_requests_are_divided_between_training_and_validation() {
    use candle_ddp::data::Dataset;
    let (classes, train, validation) = Sentences::read(None).unwrap();
    assert_eq!(classes, ["lights", "music", "reminder", "weather"]);
    assert_eq!([train.len(), validation.len()], [480, 120]);
    let mut random = candle_ddp::seed::Generator::new(0);
    let samples: Vec<_> = (0..120).map(|index| validation.get(index, &mut random).unwrap()).collect();
    for class in 0..4 {
        let count = samples.iter().filter(|(_, other)| *other == class).count();
        assert!((20..=40).contains(&count), "{count} of {}", classes[class as usize]);
    }
    // Every word has pieces.
    let (ids, ..) =
        WordPieces::new(&train.vocabulary(), 64).unwrap().batch(vec![("a murky mild day".into(), 0)]).unwrap();
    assert!(!ids.to_vec2::<u32>().unwrap()[0].contains(&1));
}

/// The values of transformers' `get_linear_schedule_with_warmup(num_warmup_steps=2, num_training_steps=8)`, except that its
/// warm-up has 0 and 6 for the first two.
#[test]
fn the_learning_rate_rises_and_falls_along_lines() {
    let schedule = |warmup| ParamsWarmupLinear { warmup, total_steps: 8 };
    let rates: Vec<_> = (0..9).map(|step| schedule(0.25).learning_rate(12., step)).collect();
    assert_eq!(rates, [4., 8., 12., 10., 8., 6., 4., 2., 0.]);
    assert_eq!(schedule(0.).learning_rate(12., 0), 12.);
    for warmup in [-0.1, 1., f64::NAN] {
        assert!(schedule(warmup).check().is_err(), "{warmup}");
    }
}
