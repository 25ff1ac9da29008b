//! Adapters on a pretrained model, compared with peft's: `scripts/golden_lora.py` has the model.
use crate::common::{assert_close, assert_error, floats, try_ranks, var};
use candle_core::{DType, Device, Module, Result, Tensor, Var};
use candle_ddp::Error;
use candle_ddp::checkpoint::{self, Pretrained, load_adapter, read_adapter_config, save_adapter};
use candle_ddp::nn::{
    Conv1d, Conv1dConfig, Conv2d, Conv2dConfig, Embedding, Linear, LoraBias, LoraConfig, VarBuilder, conv1d, conv2d,
    embedding, linear, linear_no_bias,
};
use candle_nn::VarMap;
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

struct Net {
    embed: Embedding,
    line: Conv1d,
    image: Conv2d,
    fc: Linear,
    pool: Linear,
    head: Linear,
}

impl Net {
    fn new(vb: VarBuilder) -> Result<Self> {
        let line = Conv1dConfig { padding: 1, ..Default::default() };
        let image = Conv2dConfig { padding: 1, stride: 2, ..Default::default() };
        Ok(Self {
            embed: embedding(11, 8, vb.pp("embed"))?,
            line: conv1d(8, 6, 3, line, vb.pp("line"))?,
            image: conv2d(3, 4, 3, image, vb.pp("image"))?,
            fc: linear(6, 12, vb.pp("fc"))?,
            pool: linear_no_bias(36, 12, vb.pp("pool"))?,
            head: linear(12, 3, vb.pp("head"))?,
        })
    }

    fn forward(&self) -> Result<Tensor> {
        let ids: Vec<u32> = (0..10).map(|index| index * 3 % 11).collect();
        let tokens = self.embed.forward(&Tensor::from_vec(ids, (2, 5), &Device::Cpu)?)?;
        let tokens = self.line.forward(&tokens.transpose(1, 2)?)?.transpose(1, 2)?;
        let pooled = self.image.forward(&wave(&[2, 3, 6, 6], |j| (1.7 * j + 0.3).sin()))?.relu()?.flatten_from(1)?;
        let pooled = self.pool.forward(&pooled)?.unsqueeze(1)?;
        self.head.forward(&self.fc.forward(&tokens)?.relu()?.broadcast_add(&pooled)?)
    }
}

fn wave(shape: &[usize], value: impl Fn(f64) -> f64) -> Tensor {
    let values: Vec<f32> = (0..shape.iter().product()).map(|j: usize| value(j as f64) as f32).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/lora").join(name)
}

/// The model with the adapters that the folder describes, before they are loaded.
fn build(config: &LoraConfig) -> (VarMap, Net) {
    let (varmap, base) = (VarMap::new(), Pretrained::open(folder("model")).unwrap());
    for name in base.names().filter(|name| config.is_trained(name)) {
        let value = Var::from_tensor(&base.read(name).unwrap()).unwrap();
        varmap.data().lock().unwrap().insert(name.to_string(), value);
    }
    let base = base.var_builder(DType::F32, &Device::Cpu);
    let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
    let model = config.build(base, vb, Net::new).unwrap();
    (varmap, model)
}

#[test]
fn pefts_adapters_have_its_results_gradients_and_merged_weights() {
    let config = read_adapter_config(folder("adapter")).unwrap();
    assert_eq!((config.r, config.scaling(), config.bias), (2, 3.0, LoraBias::LoraOnly));
    let (varmap, model) = build(&config);
    load_adapter(&config, &varmap, folder("adapter")).unwrap();
    let expected = checkpoint::read(folder("results.safetensors")).unwrap();
    let y = model.forward().unwrap();
    assert_close(&floats(&y), &floats(&expected["y"]), 1e-5, "y");
    let loss = (y.clone() * wave(y.dims(), |j| (0.9 * j + 0.1).cos())).unwrap().sum_all().unwrap();
    let grads = loss.backward().unwrap();
    let trained: Vec<String> = varmap.data().lock().unwrap().keys().cloned().collect();
    assert_eq!(trained.len(), 13);
    for name in &trained {
        let gradient = floats(grads.get(&var(&varmap, name)).unwrap());
        assert_close(&gradient, &floats(&expected[&format!("d {name}")]), 1e-4, name);
    }
    let base = Pretrained::open(folder("model")).unwrap();
    let mut tensors: HashMap<String, Tensor> =
        base.names().map(|name| (name.to_string(), base.read(name).unwrap())).collect();
    tensors.extend(trained.iter().map(|name| (name.clone(), var(&varmap, name).as_tensor().clone())));
    let merged = config.merge(tensors).unwrap();
    assert_eq!(merged.len(), 10);
    for (name, tensor) in merged {
        assert_close(&floats(&tensor), &floats(&expected[&format!("merged {name}")]), 1e-6, &name);
    }
}

#[test]
fn a_saved_adapter_is_the_one_that_peft_saved() {
    let config = read_adapter_config(folder("adapter")).unwrap();
    let (varmap, _) = build(&config);
    load_adapter(&config, &varmap, folder("adapter")).unwrap();
    let saved = tempfile::tempdir().unwrap();
    let save = |config: &LoraConfig, varmap: &VarMap| {
        try_ranks(1, |pg| save_adapter(&pg, config, varmap, saved.path())).map(drop)
    };
    save(&config, &varmap).unwrap();
    assert_eq!(read_adapter_config(saved.path()).unwrap(), config);
    let read = |folder: &Path| {
        let tensors = checkpoint::read(folder.join("adapter_model.safetensors")).unwrap();
        let mut values: Vec<_> =
            tensors.iter().map(|(name, tensor)| (name.clone(), tensor.dims().to_vec(), floats(tensor))).collect();
        values.sort_by(|(a, ..), (b, ..)| a.cmp(b));
        values
    };
    assert_eq!(read(saved.path()), read(&folder("adapter")));
    // By which peft finds the model and its class.
    let named = LoraConfig {
        base_model_name_or_path: Some("models/tiny".to_string()),
        task_type: Some("CAUSAL_LM".to_string()),
        ..config.clone()
    };
    save(&named, &varmap).unwrap();
    assert_eq!(read_adapter_config(saved.path()).unwrap(), named);
    // Patterns that peft does not know are written out.
    let patterns = LoraConfig { target_modules: vec!["*e".to_string(), "f*".to_string()], ..config.clone() };
    save(&patterns, &varmap).unwrap();
    let full = ["embed", "fc", "image", "line"].map(String::from);
    assert_eq!(read_adapter_config(saved.path()).unwrap().target_modules, full);
    // And a model built with what was read loads it.
    let (other, _) = build(&read_adapter_config(saved.path()).unwrap());
    load_adapter(&config, &other, saved.path()).unwrap();
    assert_eq!(floats(&var(&other, "fc.lora_A.weight")), floats(&var(&varmap, "fc.lora_A.weight")));
    assert_error(save(&config, &VarMap::new()), &["it has no adapter"]);
    let starred = LoraConfig { modules_to_save: vec!["h*".to_string()], ..config };
    assert_error(save(&starred, &varmap), &["a pattern with * must be written out"]);
}

#[test]
fn adapters_of_another_model_are_not_loaded() {
    let config = read_adapter_config(folder("adapter")).unwrap();
    let refused = |config: &LoraConfig, text: &str| {
        let (varmap, _) = build(config);
        let before = floats(&var(&varmap, "fc.lora_A.weight"));
        assert_error(load_adapter(config, &varmap, folder("adapter")), &[text]);
        assert_eq!(floats(&var(&varmap, "fc.lora_A.weight")), before);
    };
    refused(&LoraConfig { r: 4, lora_alpha: 12.0, ..config.clone() }, "its rank is 2 and its scaling 3, but");
    refused(&LoraConfig { lora_alpha: 8.0, ..config.clone() }, "but the model is built with 2 and 4");
    refused(&LoraConfig { use_rslora: true, ..config.clone() }, "its rank is 2 and its scaling 3, but");
    refused(
        &LoraConfig { bias: LoraBias::None, ..config.clone() },
        "it has fc.bias, which the model's LoraConfig does not train",
    );
    refused(
        &LoraConfig { target_modules: vec!["fc".to_string()], bias: LoraBias::All, ..config.clone() },
        "not in the model",
    );
    refused(&LoraConfig { target_modules: vec!["*".to_string()], ..config }, "missing from the file");
}

#[test]
fn options_without_a_counterpart_are_errors() {
    let original = fs::read_to_string(folder("adapter").join("adapter_config.json")).unwrap();
    let saved = tempfile::tempdir().unwrap();
    let refused = |from: &str, to: &str, text: &str| {
        assert!(original.contains(from), "{from}");
        fs::write(saved.path().join("adapter_config.json"), original.replace(from, to)).unwrap();
        match read_adapter_config(saved.path()) {
            Err(error @ Error::CheckpointFile { .. }) => assert!(error.to_string().contains(text), "{error}"),
            other => panic!("{other:?}"),
        }
    };
    refused("\"use_dora\": false", "\"use_dora\": true", "its option use_dora has no counterpart here");
    refused("\"rank_pattern\": {}", "\"rank_pattern\": {\"fc\": 4}", "its option rank_pattern has no counterpart");
    refused("\"peft_type\": \"LORA\"", "\"peft_type\": \"LOHA\"", "its peft_type must be LORA");
    refused("\"bias\": \"lora_only\"", "\"bias\": 3", "its option bias must be none, all or lora_only");
    refused("\"r\": 2", "\"r\": -2", "its option r must be a whole number");
    refused("\"lora_alpha\": 6", "\"lora_alpha\": \"six\"", "its option lora_alpha must be a number");
    refused(
        "\"modules_to_save\": [",
        "\"modules_to_save\": \"x\", \"x\": [",
        "its option modules_to_save must be a list of names",
    );
    refused("\"task_type\": null", "\"task_type\": 1", "its option task_type must be a text");
    refused("{", "[", "it is not a JSON object");
    // A model of this rank would need terabytes.
    fs::copy(folder("adapter").join("adapter_model.safetensors"), saved.path().join("adapter_model.safetensors"))
        .unwrap();
    refused("\"r\": 2", "\"r\": 1000000000000", "and the rank in adapter_config.json is 1000000000000");
}

/// peft adds the frozen weight of an embedding that has an adapter.
#[test]
fn an_adapter_may_have_the_frozen_weight_of_an_embedding() {
    let saved = tempfile::tempdir().unwrap();
    fs::copy(folder("adapter").join("adapter_config.json"), saved.path().join("adapter_config.json")).unwrap();
    let mut tensors = checkpoint::read(folder("adapter").join("adapter_model.safetensors")).unwrap();
    let frozen = wave(&[11, 8], |j| j.sin());
    tensors.insert("base_model.model.embed.base_layer.weight".to_string(), frozen.clone());
    let write = |tensors: &HashMap<String, Tensor>| {
        checkpoint::save_tensors(tensors, saved.path().join("adapter_model.safetensors")).unwrap();
    };
    write(&tensors);
    let config = read_adapter_config(saved.path()).unwrap();
    let (varmap, _) = build(&config);
    load_adapter(&config, &varmap, saved.path()).unwrap();
    let (expected, _) = build(&config);
    load_adapter(&config, &expected, folder("adapter")).unwrap();
    let values = |varmap: &VarMap| {
        let vars = varmap.data().lock().unwrap();
        let mut values: Vec<_> = vars.iter().map(|(name, var)| (name.clone(), floats(var))).collect();
        values.sort_by(|(a, _), (b, _)| a.cmp(b));
        values
    };
    assert_eq!(values(&varmap), values(&expected));
    let own = Var::zeros((11, 8), DType::F32, &Device::Cpu).unwrap();
    varmap.data().lock().unwrap().insert("embed.weight".to_string(), own.clone());
    load_adapter(&config, &varmap, saved.path()).unwrap();
    assert_eq!(floats(&own), floats(&frozen));
    // That of a layer without an adapter is still refused.
    tensors.insert("base_model.model.pool.base_layer.weight".to_string(), wave(&[12, 36], |j| j));
    write(&tensors);
    let refused = load_adapter(&config, &varmap, saved.path());
    assert_error(refused, &["it has pool.weight, which the model's LoraConfig does not train"]);
}
