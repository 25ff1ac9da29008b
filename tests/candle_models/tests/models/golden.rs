//! BERT, ViT and Llama: logits and all gradients equal those of Hugging Face's transformers on PyTorch, from one process and
//! under DistributedDataParallel (`tests/golden/transformers`, `scripts/golden_transformers.py`).
use candle::safetensors::load;
use candle::{DType, Device, Result, Tensor, Var};
use candle_ddp::DistributedDataParallel;
use candle_models::models::{bert, llama, vit};
use candle_nn::loss::cross_entropy;
use candle_nn::{Optimizer, VarBuilder, VarMap, SGD};
use safetensors::SafeTensors;
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};

const CPU: Device = Device::Cpu;

/// A model file with its golden data.
struct Golden<M> {
    build: fn(Value, VarBuilder) -> Result<M>,
    logits: fn(&M, &Tensor) -> Result<Tensor>,
    config: Value,
    tensors: HashMap<String, Tensor>,
}

impl<M> Golden<M> {
    fn new(name: &str, build: fn(Value, VarBuilder) -> Result<M>, logits: fn(&M, &Tensor) -> Result<Tensor>) -> Self {
        let path = format!("{}/../golden/transformers/{name}.safetensors", env!("CARGO_MANIFEST_DIR"));
        let bytes = std::fs::read(&path).unwrap();
        let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
        let config = serde_json::from_str(&metadata.metadata().as_ref().unwrap()["config"]).unwrap();
        Self { build, logits, config, tensors: load(path, &CPU).unwrap() }
    }

    /// The tensors whose names begin with `prefix`, by the rest of their names.
    fn with_prefix(&self, prefix: &str) -> BTreeMap<String, Tensor> {
        let of = |(name, tensor): (&String, &Tensor)| Some((name.strip_prefix(prefix)?.to_string(), tensor.clone()));
        self.tensors.iter().filter_map(of).collect()
    }

    /// The golden weights.
    fn weights(&self) -> VarMap {
        let varmap = VarMap::new();
        let vars =
            self.with_prefix("parameter.").into_iter().map(|(name, tensor)| (name, Var::from_tensor(&tensor).unwrap()));
        varmap.data().lock().unwrap().extend(vars);
        varmap
    }

    /// The loss of the golden batch, or of one of its two halves.
    fn loss(&self, model: &M, half: Option<usize>) -> Result<Tensor> {
        let part = |tensor: &Tensor| match half {
            None => Ok(tensor.clone()),
            Some(half) => tensor.narrow(0, half * tensor.dim(0)? / 2, tensor.dim(0)? / 2),
        };
        let logits = (self.logits)(model, &part(&self.tensors["input"])?)?;
        cross_entropy(&logits, &part(&self.tensors["labels"])?)
    }

    /// Compares one gradient for each parameter with the golden ones.
    fn compare_gradients(&self, gradients: &BTreeMap<String, Tensor>) {
        let expected = self.with_prefix("gradient.");
        assert_eq!(gradients.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
        let overall = expected.values().map(largest).fold(0., f64::max);
        for (name, expected) in &expected {
            // The gradient of a key's bias is 0 but for rounding.
            let scale = largest(expected).max(1e-2 * overall);
            let difference = largest(&(&gradients[name] - expected).unwrap());
            assert!(difference <= 1e-5 * scale, "{name}: {difference} of {scale}");
        }
    }

    fn check_one_process(&self) {
        let varmap = self.weights();
        let count = varmap.all_vars().len();
        let model = (self.build)(self.config.clone(), VarBuilder::from_varmap(&varmap, DType::F32, &CPU)).unwrap();
        assert_eq!(varmap.all_vars().len(), count, "the file reads other names than the checkpoint has");
        let (logits, expected) = ((self.logits)(&model, &self.tensors["input"]).unwrap(), &self.tensors["logits"]);
        let difference = largest(&(logits - expected).unwrap());
        assert!(difference <= 1e-5 * largest(expected), "logits: {difference}");
        let grads = self.loss(&model, None).unwrap().backward().unwrap();
        let vars = varmap.data().lock().unwrap();
        self.compare_gradients(
            &vars.iter().map(|(name, var)| (name.clone(), grads.get(var).unwrap().clone())).collect(),
        );
    }

    /// Two ranks with half of the batch each have the same gradients, and their weights stay the same in a step that
    /// reduces the loss.
    fn check_two_ranks(&self) {
        let weights = candle_ddp::spawn(2, |pg| {
            let varmap = self.weights();
            let build = |vb: VarBuilder<'static>| (self.build)(self.config.clone(), vb);
            let ddp = DistributedDataParallel::new(&pg, &varmap, build)?;
            let loss = ddp.call(|model| self.loss(model, Some(pg.rank())))?;
            let grads = ddp.backward(&loss)?;
            let gradient = |(name, var): (String, Var)| (name, grads.get(&var).unwrap().clone());
            self.compare_gradients(&ddp.named_parameters().into_iter().map(gradient).collect());
            let whole =
                || ddp.call(|model| self.loss(model, None))?.to_scalar::<f32>().map_err(candle_ddp::Error::from);
            let before = whole()?;
            SGD::new(ddp.parameters(), 1e-2)?.step(&grads)?;
            let after = whole()?;
            assert!(after < before, "{before} {after}");
            let values = |(name, var): (String, Var)| Ok((name, var.flatten_all()?.to_vec1::<f32>()?));
            ddp.named_parameters().into_iter().map(values).collect::<candle_ddp::Result<Vec<_>>>()
        });
        let weights = weights.unwrap();
        assert_eq!(weights[0], weights[1]);
    }
}

fn largest(tensor: &Tensor) -> f64 {
    f64::from(tensor.abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap())
}

fn golden_bert() -> Golden<bert::BertForMaskedLM> {
    Golden::new(
        "bert",
        |config, vb| bert::BertForMaskedLM::load(vb, &crate::check::config(config)?),
        |model, ids| model.forward(ids, &ids.zeros_like()?, None)?.flatten(0, 1),
    )
}

fn golden_vit() -> Golden<vit::Model> {
    Golden::new(
        "vit",
        |config, vb| vit::Model::new(&crate::check::config(config)?, 10, vb),
        |model, images| model.forward(images),
    )
}

fn golden_llama() -> Golden<(llama::Llama, llama::Config)> {
    Golden::new(
        "llama",
        |config, vb| {
            let config = crate::check::config::<llama::LlamaConfig>(config)?.into_config(false);
            Ok((llama::Llama::load(vb, &config)?, config))
        },
        |(model, config), ids| model.forward(ids, 0, &mut llama::Cache::new(false, DType::F32, config, &CPU)?),
    )
}

#[test]
fn bert_is_that_of_transformers() {
    golden_bert().check_one_process();
}

#[test]
fn bert_trains_under_ddp() {
    golden_bert().check_two_ranks();
}

#[test]
fn vit_is_that_of_transformers() {
    golden_vit().check_one_process();
}

#[test]
fn vit_trains_under_ddp() {
    golden_vit().check_two_ranks();
}

#[test]
fn llama_is_that_of_transformers() {
    golden_llama().check_one_process();
}

#[test]
fn llama_trains_under_ddp() {
    golden_llama().check_two_ranks();
}
