//! Reads the files of `char_gpt --export`: `config.json` and `model.safetensors`.
use crate::plain::Config;
use crate::vocabulary::Vocabulary;
use candle_core::{Device, Error, Result, Tensor, safetensors};
use serde_json::Value;
use std::collections::HashMap;
use std::path::Path;

/// Returns the sizes, the characters and the weights of the model in `folder`.
pub(crate) fn read(folder: &Path) -> Result<(Config, Vocabulary, HashMap<String, Tensor>)> {
    let path = folder.join("config.json");
    let failed = |reason: &dyn std::fmt::Display| Error::Msg(format!("{}: {reason}", path.display()));
    let text = std::fs::read(&path).map_err(|error| failed(&error))?;
    let value: Value = serde_json::from_slice(&text).map_err(|error| failed(&error))?;
    let missing = |name: &str| failed(&format!("it has no {name:?}"));
    let size = |name: &str| value[name].as_u64().map(|size| size as usize).ok_or_else(|| missing(name));
    let vocabulary = Vocabulary::of(value["vocabulary"].as_str().ok_or_else(|| missing("vocabulary"))?);
    let config = Config {
        vocabulary: vocabulary.len(),
        context: size("context")?,
        width: size("width")?,
        heads: size("heads")?,
        layers: size("layers")?,
    };
    Ok((config, vocabulary, safetensors::load(folder.join("model.safetensors"), &Device::Cpu)?))
}
