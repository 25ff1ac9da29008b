//! The model to begin with, in the files of transformers.
use super::model::Config;
use candle_ddp::checkpoint::{self, LoadOptions};
use candle_ddp::{Context, Error, ProcessGroup, Result};
use candle_nn::VarMap;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};

pub(crate) struct Pretrained {
    pub(crate) config: Config,
    /// The config as the file has it.
    json: Value,
    /// A word piece per line.
    pub(crate) vocabulary: String,
    /// None: the variables keep their random values.
    weights: Option<PathBuf>,
}

impl Pretrained {
    /// Reads `config.json` and `vocab.txt` of a folder, and finds its weights.
    pub(crate) fn read(folder: &Path) -> Result<Self> {
        let read = |name| {
            let path = folder.join(name);
            fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))
        };
        let names = ["model.safetensors", "pytorch_model.bin"];
        let Some(weights) = names.map(|name| folder.join(name)).into_iter().find(|path| path.exists()) else {
            let reason = format!("{} has neither {} nor {}", folder.display(), names[0], names[1]);
            return Err(Error::InvalidArgument { argument: "--checkpoint", reason });
        };
        let failed = |reason| Error::DataFile { path: folder.join("config.json"), reason };
        let json = serde_json::from_str(&read("config.json")?).map_err(|error| failed(error.to_string()))?;
        Self::new(json, read("vocab.txt")?, Some(weights)).map_err(failed)
    }

    /// A model with random weights that is small enough to be trained from them in seconds.
    pub(crate) fn small(vocabulary: String) -> Result<Self> {
        let json = json!({
            "model_type": "bert",
            "vocab_size": vocabulary.lines().count(),
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.1,
            "attention_probs_dropout_prob": 0.1,
            "max_position_embeddings": 64,
            "type_vocab_size": 2,
            "initializer_range": 0.05,
            "layer_norm_eps": 1e-12,
        });
        let invalid = |reason| Error::InvalidArgument { argument: "the small model", reason };
        Self::new(json, vocabulary, None).map_err(invalid)
    }

    fn new(json: Value, vocabulary: String, weights: Option<PathBuf>) -> std::result::Result<Self, String> {
        let config = Config::deserialize(&json).map_err(|error| error.to_string())?;
        let positions = json.get("position_embedding_type").and_then(Value::as_str).unwrap_or("absolute");
        if json["model_type"] != "bert" || positions != "absolute" {
            let model = &json["model_type"];
            return Err(format!("the model is {model} with {positions} positions, not \"bert\" with absolute ones"));
        }
        if vocabulary.lines().count() > config.vocab_size {
            return Err(format!("vocab_size is {}, less than the vocabulary has lines", config.vocab_size));
        }
        Ok(Self { config, json, vocabulary, weights })
    }

    /// Loads the weights into the model. The classifier and the pooler keep their initial values where the file has none of their
    /// shape.
    pub(crate) fn load(&self, pg: &ProcessGroup, varmap: &VarMap) -> Result<()> {
        let Some(path) = &self.weights else {
            if pg.rank() == 0 {
                println!("a small model with random weights; --checkpoint begins with a trained one");
            }
            return Ok(());
        };
        let file = checkpoint::read(path)?;
        let shapes: HashSet<_> = file.iter().map(|(name, tensor)| (rename(name), tensor.dims())).collect();
        let variables = varmap.data().lock().unwrap_or_else(PoisonError::into_inner).clone();
        let is_head = |name: &str| name.starts_with("classifier.") || name.starts_with("bert.pooler.");
        let head = variables.into_iter().filter(|(name, _)| is_head(name));
        let new = head.filter(|(name, variable)| !shapes.contains(&(name.clone(), variable.dims())));
        let new: HashSet<String> = new.map(|(name, _)| name).collect();

        let options = LoadOptions {
            rename: Some(Arc::new(rename)),
            skip: Arc::new(move |name| new.contains(name)),
            // The heads of pre-training, and a constant that old versions saved.
            ignored: Arc::new(|name| name.starts_with("cls.") || name.ends_with(".position_ids")),
            ..Default::default()
        };
        let report = checkpoint::load_distributed(pg, varmap, path, options)?;
        if pg.rank() == 0 {
            println!("{} variables are from {}", report.loaded.len(), path.display());
            if !report.skipped.is_empty() {
                println!("{} keep their initial values: the file has none of their shape", report.skipped.join(", "));
            }
        }
        Ok(())
    }

    /// Writes files for transformers' `from_pretrained`, and for `--checkpoint`. Every rank calls it.
    pub(crate) fn export(&self, pg: &ProcessGroup, folder: &Path, classes: &[String], varmap: &VarMap) -> Result<()> {
        if pg.rank() == 0 {
            let mut json = self.json.clone();
            json["architectures"] = json!(["BertForSequenceClassification"]);
            json["id2label"] = classes.iter().enumerate().map(|(id, class)| (id.to_string(), class.as_str())).collect();
            json["label2id"] = classes.iter().enumerate().map(|(id, class)| (class.clone(), id)).collect();
            let writing = || format!("writing the model to {}", folder.display());
            fs::create_dir_all(folder).with_context(writing)?;
            fs::write(folder.join("config.json"), format!("{json:#}\n")).with_context(writing)?;
            fs::write(folder.join("vocab.txt"), &self.vocabulary).with_context(writing)?;
        }
        checkpoint::save_distributed(pg, varmap, folder.join("model.safetensors"))
    }
}

/// Returns the model's name for a tensor of the file. `BertModel` saves its tensors without `bert.`, and norms converted from
/// TensorFlow have gamma and beta.
fn rename(name: &str) -> String {
    let name = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias");
    if ["bert.", "classifier.", "cls."].iter().any(|part| name.starts_with(part)) {
        name
    } else {
        format!("bert.{name}")
    }
}
