//! Adapters on a model file that does not know of them.
use crate::check::{config, tokens};
use candle::{DType, Device, Result, Tensor};
use candle_ddp::seed::var_builder;
use candle_models::models::qwen2::ModelForCausalLM;
use candle_nn::{Init, LoraConfig, VarBuilder, VarMap};
use serde_json::json;
use std::collections::HashMap;

fn logits(vb: VarBuilder) -> Result<Tensor> {
    let config = config(json!({
        "vocab_size": 11, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": 16, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "tie_word_embeddings": true, "sliding_window": 16, "max_window_layers": 2,
        "use_sliding_window": false,
    }))?;
    ModelForCausalLM::new(&config, vb)?.forward(&tokens((2, 5), 11)?, 0)
}

/// The embedding is tied to the head, which then has its adapter, too.
#[test]
fn qwen2() -> Result<()> {
    let (base, varmap) = (VarMap::new(), VarMap::new());
    let builder = |varmap: &VarMap, seed| var_builder(varmap, seed, DType::F64, &Device::Cpu);
    let frozen = logits(builder(&base, 1))?;
    let targets = ["*_proj", "embed_tokens"].map(String::from).to_vec();
    let lora = LoraConfig { r: 2, target_modules: targets, ..Default::default() };
    let build = || lora.build(builder(&base, 1), builder(&varmap, 2), logits);
    let as_pretrained = build()?;
    assert!((as_pretrained - &frozen)?.abs()?.max_all()?.to_scalar::<f64>()? < 1e-12);
    // Values for the matrices that begin with zeros.
    let vars = varmap.data().lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone();
    assert_eq!(vars.len(), 2 * (2 * 7 + 1));
    for (name, var) in &vars {
        let values = VarMap::new();
        let init = Init::Randn { mean: 0., stdev: 0.3 };
        var.set(&builder(&values, 3).get_with_hints(var.shape(), name, init)?)?;
    }
    let adapted = build()?;
    let grads = adapted.sqr()?.sum_all()?.backward()?;
    for (name, var) in &vars {
        let gradient = grads.get(var).unwrap_or_else(|| panic!("{name} has no gradient"));
        assert!(gradient.abs()?.max_all()?.to_scalar::<f64>()? > 1e-9, "{name}");
    }
    let of_base = base.data().lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone();
    assert!(of_base.values().all(|var| grads.get(var).is_none()));
    let tensors: HashMap<String, Tensor> =
        of_base.iter().chain(&vars).map(|(name, var)| (name.clone(), var.as_tensor().clone())).collect();
    let merged = logits(VarBuilder::from_tensors(lora.merge(tensors)?, DType::F64, &Device::Cpu))?;
    assert!((&adapted - merged)?.abs()?.max_all()?.to_scalar::<f64>()? < 1e-10);
    assert!((adapted - frozen)?.abs()?.max_all()?.to_scalar::<f64>()? > 1e-3);
    Ok(())
}
