//! Decoders of text.
use crate::check::{check, config, tokens, F32, F64};
use candle::{DType, Device, Result};
use candle_models::models::{
    bigcode, falcon, gemma, gemma2, gemma3, glm4_new, granite, helium, llama, mistral, olmo, olmo2, phi, phi3, qwen2,
    qwen3, smol::smollm3, stable_lm, starcoder2,
};
use serde::de::DeserializeOwned;
use serde_json::{json, Value};

const CPU: Device = Device::Cpu;

/// A configuration with the fields that nearly all decoders have, and `more`.
fn decoder<T: DeserializeOwned>(more: Value) -> Result<T> {
    let mut all = json!({
        "vocab_size": 11, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": 16, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "attention_bias": false, "tie_word_embeddings": false,
    });
    if let (Value::Object(all), Value::Object(more)) = (&mut all, more) {
        all.extend(more);
    }
    config(all)
}

#[test]
fn llama() {
    check(F32, |vb| {
        let config = decoder::<llama::LlamaConfig>(json!({}))?.into_config(false);
        let mut cache = llama::Cache::new(false, DType::F32, &config, &CPU)?;
        llama::Llama::load(vb, &config)?.forward(&tokens((2, 5), 11)?, 0, &mut cache)
    });
}

#[test]
fn qwen2() {
    check(F64, |vb| {
        let config = decoder(json!({"sliding_window": 16, "max_window_layers": 2, "use_sliding_window": false}))?;
        qwen2::ModelForCausalLM::new(&config, vb)?.forward(&tokens((2, 5), 11)?, 0)
    });
}

#[test]
fn qwen3() {
    check(F32, |vb| {
        let config = decoder(json!({"head_dim": 4, "max_window_layers": 2, "use_sliding_window": false}))?;
        qwen3::ModelForCausalLM::new(&config, vb)?.forward(&tokens((2, 5), 11)?, 0)
    });
}

#[test]
fn mistral() {
    check(F64, |vb| {
        mistral::Model::new(&decoder(json!({"sliding_window": 16}))?, vb)?.forward(&tokens((2, 5), 11)?, 0)
    });
}

#[test]
fn phi() {
    check(F32, |vb| {
        let config = decoder(json!({"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "qk_layernorm": false}))?;
        phi::Model::new(&config, vb)?.forward(&tokens((2, 5), 11)?)
    });
}

#[test]
fn phi3() {
    check(F64, |vb| phi3::Model::new(&decoder(json!({}))?, vb)?.forward(&tokens((2, 5), 11)?, 0));
}

#[test]
fn gemma() {
    check(F64, |vb| gemma::Model::new(false, &decoder(json!({"head_dim": 4}))?, vb)?.forward(&tokens((2, 5), 11)?, 0));
}

#[test]
fn gemma2() {
    check(F64, |vb| {
        let config = decoder(json!({
            "head_dim": 4, "hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0, "query_pre_attn_scalar": 4,
        }))?;
        gemma2::Model::new(false, &config, vb)?.forward(&tokens((2, 5), 11)?, 0)
    });
}

#[test]
fn gemma3() {
    check(F64, |vb| {
        let config = decoder(json!({
            "head_dim": 4, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 4, "sliding_window": 3,
            "sliding_window_pattern": 2, "rope_local_base_freq": 10000.0,
        }))?;
        gemma3::Model::new(false, &config, vb)?.forward(&tokens((2, 5), 11)?, 0)
    });
}

#[test]
fn falcon() {
    check(F32, |vb| {
        let config = decoder(json!({
            "layer_norm_epsilon": 1e-5, "initializer_range": 0.02, "use_cache": false, "bos_token_id": 1, "eos_token_id": 2,
            "hidden_dropout": 0.0, "attention_dropout": 0.0, "alibi": false, "new_decoder_architecture": false,
            "multi_query": true, "parallel_attn": true, "bias": false,
        }))?;
        falcon::Falcon::load(vb, config)?.forward(&tokens((1, 5), 11)?)
    });
}

#[test]
fn stable_lm() {
    check(F64, |vb| {
        let config = decoder(json!({
            "partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5, "use_cache": false, "use_qkv_bias": true,
        }))?;
        stable_lm::Model::new(&config, vb)?.forward(&tokens((2, 5), 11)?, 0)
    });
}

#[test]
fn starcoder2() {
    check(F64, |vb| {
        let config = decoder(json!({"norm_epsilon": 1e-5, "use_bias": true}))?;
        starcoder2::Model::new(&config, vb)?.forward(&tokens((2, 5), 11)?, 0)
    });
}

#[test]
fn olmo() {
    check(F64, |vb| olmo::Model::new(&decoder(json!({}))?, vb)?.forward(&tokens((2, 5), 11)?, 0));
}

#[test]
fn olmo2() {
    check(F64, |vb| olmo2::Model::new(&decoder(json!({}))?, vb)?.forward(&tokens((2, 5), 11)?, 0));
}

#[test]
fn bigcode() {
    check(F32, |vb| {
        let config = bigcode::Config {
            vocab_size: 11,
            max_position_embeddings: 16,
            num_hidden_layers: 2,
            hidden_size: 8,
            layer_norm_epsilon: 1e-5,
            n_inner: Some(12),
            num_attention_heads: 2,
            multi_query: true,
            use_cache: false,
        };
        bigcode::GPTBigCode::load(vb, config)?.forward(&tokens((2, 5), 11)?, 0)
    });
}

#[test]
fn glm4_new() {
    check(F64, |vb| {
        let config = decoder(json!({"head_dim": 4, "partial_rotary_factor": 0.5}))?;
        glm4_new::ModelForCausalLM::new(&config, vb)?.forward(&tokens((1, 5), 11)?, 0)
    });
}

#[test]
fn granite() {
    check(F32, |vb| {
        let config = decoder::<granite::GraniteConfig>(json!({}))?.into_config(false);
        let mut cache = granite::Cache::new(false, DType::F32, &config, &CPU)?;
        granite::Granite::load(vb, &config)?.forward(&tokens((2, 5), 11)?, 0, &mut cache)
    });
}

#[test]
fn helium() {
    check(F64, |vb| {
        let config = decoder(json!({
            "bos_token_id": 1, "eos_token_id": 2, "head_dim": 4, "mlp_bias": false, "use_flash_attn": false,
        }))?;
        helium::Model::new(&config, vb)?.forward(&tokens((2, 5), 11)?, 0)
    });
}

#[test]
fn smollm3() {
    check(F64, |vb| smollm3::ModelForCausalLM::new(&decoder(json!({}))?, vb)?.forward(&tokens((2, 5), 11)?, 0));
}
